"""A tensor moves from layout to layout, and its gradient back, as if one process had the whole."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from minifsdp import comm
from minifsdp.tensor_parallel.layouts import all_gathered, f, g, move, of_gradient, part_of, reduce_scattered

check = Checks(__name__)
ANY = (2, 3)
LAYOUTS = {"whole": Replicate(), "rows": Shard(0), "columns": Shard(-1), "summands": Partial()}


def world() -> Any:
    return comm.world()


def lying(whole: Tensor, layout: Any) -> Tensor:
    """This rank's part of `whole`; its summand is a share that depends on the rank."""
    if layout.is_partial():
        shares = torch.arange(1.0, world().size() + 1, dtype=whole.dtype)
        return whole * shares[world().rank()] / shares.sum()
    return part_of(whole, layout.dim % whole.ndim, world()) if layout.is_shard() else whole


def calls(log: list[comm.Call]) -> list[str]:
    return [call.op for call in log]


@check(ranks=2)
def the_smallest_product_by_columns_and_by_rows() -> None:
    x = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    w = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    product = torch.tensor([[22.0, 28], [49, 64]])
    with comm.record() as log:
        by_columns = f(x, world()) @ part_of(w, 1, world())
    assert torch.equal(by_columns, product[:, world().rank(), None])
    assert calls(log) == []
    with comm.record() as log:
        by_rows = g(part_of(x, 1, world()) @ part_of(w, 0, world()), world())
    assert torch.equal(by_rows, product)
    assert calls(log) == ["all_reduce"]


@check(ranks=ANY, layouts={f"{a} to {b}": (a, b) for a, b in product(LAYOUTS, LAYOUTS)})
def a_move_and_its_gradient(layouts: tuple[str, str]) -> None:
    source, target = (LAYOUTS[name] for name in layouts)
    n = world().size()
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2 * n, 3, n, dtype=torch.float64, generator=generator)
    gradient = torch.randn(2 * n, 3, n, dtype=torch.float64, generator=generator)
    x = lying(whole, source).clone().requires_grad_()
    moved = move(x, source, target, world())
    if target.is_partial():
        total = moved.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, whole, rtol=0, atol=1e-14)
    else:
        torch.testing.assert_close(moved, lying(whole, target), rtol=0, atol=1e-14)
    moved.backward(lying(gradient, of_gradient(target)).contiguous())
    torch.testing.assert_close(x.grad, lying(gradient, of_gradient(source)), rtol=0, atol=1e-14)


@check(ranks=ANY, target={"whole": "whole", "rows": "rows", "columns": "columns"})
def a_gradient_of_summands_is_summed(target: str) -> None:
    """f: what goes into a layer by columns; and its sequence-parallel version."""
    n = world().size()
    whole = torch.randn(2 * n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = lying(whole, LAYOUTS[target]).clone().requires_grad_()
    moved = move(x, LAYOUTS[target], Replicate(), world(), gradient=Partial())
    assert torch.equal(moved, whole)
    with comm.record() as log:
        moved.backward(whole * (world().rank() + 1))
    torch.testing.assert_close(x.grad, lying(whole, LAYOUTS[target]) * n * (n + 1) / 2, rtol=0, atol=1e-13)
    assert calls(log) == ["all_reduce" if target == "whole" else "reduce_scatter"]


@check(ranks=ANY)
def collectives_of_each_move() -> None:
    """One where the layouts differ in what ranks lack, none otherwise; backward only where a gradient is wanted."""
    n = world().size()
    x = torch.ones(n, n)
    expected = {
        ("whole", "whole"): ([], []),
        ("whole", "rows"): ([], ["all_gather"]),
        ("rows", "whole"): (["all_gather"], []),
        ("summands", "whole"): (["all_reduce"], []),
        ("summands", "columns"): (["reduce_scatter"], ["all_gather"]),
        ("rows", "columns"): (["all_gather"], ["all_gather"]),
        ("whole", "summands"): ([], []),
        ("summands", "summands"): ([], []),
    }
    for (source, target), (forward, backward) in expected.items():
        part = lying(x, LAYOUTS[source]).clone().requires_grad_()
        with comm.record() as log:
            moved = move(part, LAYOUTS[source], LAYOUTS[target], world())
        assert calls(log) == forward, (source, target)
        with comm.record() as log:
            moved.sum().backward()
        assert calls(log) == backward, (source, target)
        with comm.record() as log:
            move(part.detach(), LAYOUTS[source], LAYOUTS[target], world())
        assert calls(log) == forward, (source, target)


@check(ranks=(2, 3, 4), length=(1, 5, 7))
def lengths_that_the_ranks_do_not_divide(length: int) -> None:
    """Parts are those of `torch.chunk`; the last ranks' may be shorter, or empty."""
    n, rank = world().size(), world().rank()
    whole = torch.arange(3.0 * length).view(3, length)
    chunks = whole.chunk(n, 1)
    mine = part_of(whole, 1, world())
    assert torch.equal(mine, chunks[rank]) if rank < len(chunks) else mine.shape == (3, 0)
    assert torch.equal(all_gathered(mine, 1, world(), length), whole)
    assert torch.equal(reduce_scattered(whole, 1, world()), n * mine)
    for target in (Replicate(), Shard(0)):
        x = mine.clone().requires_grad_()
        moved = move(x, Shard(1), target, world(), size=length)
        assert torch.equal(moved, lying(whole, target))
        moved.backward(lying(whole, target).contiguous())
        assert torch.equal(x.grad, mine)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
