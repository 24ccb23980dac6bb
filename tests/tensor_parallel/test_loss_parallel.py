"""Cross-entropy of logits that no rank has whole: as torch's of all of them, and three numbers per token are sent."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from minifsdp import comm
from minifsdp.tensor_parallel import ColwiseParallel, cross_entropy, loss_parallel, parallelize_module
from minifsdp.tensor_parallel.layouts import part_of

check = Checks(__name__)
TOKENS = 10


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def logits(*shape: int, scale: float = 30.0) -> Tensor:
    """Large ones: without the maximum their exponentials overflow float32."""
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)


def targets(*shape: int, classes: int) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


OPTIONS = {
    f"{reduction}{', weights' * weighted}{', smoothing' * smoothing}{', ignored' * ignored}": (
        reduction,
        weighted,
        smoothing,
        ignored,
    )
    for reduction, weighted, smoothing, ignored in product(("mean", "sum", "none"), *[(False, True)] * 3)
}


@check(ranks=(2, 3), options=OPTIONS, classes=(12, 13))
def it_is_that_of_all_logits(options: tuple[str, bool, bool, bool], classes: int) -> None:
    reduction, weighted, smoothing, ignored = options
    x, y = logits(TOKENS, classes), targets(TOKENS, classes=classes)
    if ignored:
        y[::3] = 7
    given = {
        "reduction": reduction,
        "weight": torch.linspace(0.5, 2, classes, dtype=torch.float64) if weighted else None,
        "label_smoothing": 0.2 if smoothing else 0.0,
        "ignore_index": 7 if ignored else -100,
    }
    alone = x.clone().requires_grad_()
    expected = F.cross_entropy(alone, y, **given)
    expected.sum().backward()

    cut = distribute_tensor(x, mesh(), [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(cut, y, **given)
    assert isinstance(loss, DTensor)
    assert loss.placements == (Replicate(),)
    torch.testing.assert_close(loss.to_local(), expected, rtol=1e-13, atol=1e-12)
    loss.sum().backward()
    assert cut.grad.placements == (Shard(1),)
    torch.testing.assert_close(cut.grad.full_tensor(), alone.grad, rtol=0, atol=1e-13)


@check(ranks=(2, 4))
def three_numbers_per_token_are_sent() -> None:
    """The maximum; then the sum of exponentials and the target's logit together. Backward sends nothing."""
    x = part_of(logits(TOKENS, 1000), 1, comm.world()).contiguous().requires_grad_()
    with comm.record() as log:
        loss = cross_entropy(x, targets(TOKENS, classes=1000), 1000, comm.world())
        loss.backward()
    assert [(call.op, call.payload) for call in log] == [("all_reduce", 8 * TOKENS), ("all_reduce", 2 * 8 * TOKENS)]


@check(ranks=2, shape=((13,), (4, 13), (4, 13, 5), (4, 13, 5, 2)))
def shapes_that_torch_takes(shape: tuple[int, ...]) -> None:
    x, classes = logits(*shape), 13
    y = targets(*(size for dim, size in enumerate(shape) if dim != min(1, len(shape) - 1)), classes=classes)
    cut = distribute_tensor(x, mesh(), [Shard(min(1, len(shape) - 1))]).requires_grad_()
    with loss_parallel():
        for module in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="none")):
            torch.testing.assert_close(module(cut, y).to_local(), module(x, y))


@check(ranks=2)
def logits_in_half_precision() -> None:
    x, y = logits(TOKENS, 12, scale=1.0).to(torch.bfloat16), targets(TOKENS, classes=12)
    loss = cross_entropy(part_of(x, 1, comm.world()), y, 12, comm.world())
    assert loss.dtype == torch.bfloat16
    assert abs(loss.float() - F.cross_entropy(x.float(), y)) < 0.02


@check(ranks=4)
def a_rank_may_have_no_class() -> None:
    x, y = logits(TOKENS, 5), targets(TOKENS, classes=5)
    cut = distribute_tensor(x, mesh(), [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(cut, y)
    assert abs(loss.to_local() - F.cross_entropy(x, y)) < 1e-12
    loss.backward()
    assert cut.grad.full_tensor().sum().abs() < 1e-12


@check(ranks=2)
def other_losses_are_left_alone() -> None:
    x, y = logits(TOKENS, 12), targets(TOKENS, classes=12)
    with loss_parallel():
        assert torch.equal(F.cross_entropy(x, y), F.cross_entropy(x, y))
        assert F.mse_loss(x, x) == 0


@check(ranks=2)
def a_head_by_columns_before_it() -> None:
    """The logits are never whole: no message is as large."""
    torch.manual_seed(0)
    head = nn.Linear(8, 300).double()
    x = torch.randn(TOKENS, 8, dtype=torch.float64)
    expected = F.cross_entropy(head(x), targets(TOKENS, classes=300)).item()
    parallelize_module(head, mesh(), ColwiseParallel(use_local_output=False))
    x.requires_grad_()
    with loss_parallel(), comm.record() as log:
        loss = F.cross_entropy(head(x), targets(TOKENS, classes=300))
        loss.backward()
    assert abs(loss.item() - expected) < 1e-12
    assert max(call.payload for call in log) == TOKENS * 8 * 8  # the gradient of x


@check(ranks=2)
def what_it_does_not_take_is_refused_in_a_line() -> None:
    cut = distribute_tensor(logits(TOKENS, 12), mesh(), [Shard(1)])
    with loss_parallel():
        with pytest.raises(IndexError, match="is not one of 12 classes"):
            F.cross_entropy(cut, torch.full((TOKENS,), 12))
        with pytest.raises(ValueError, match="class indices"):
            F.cross_entropy(cut, torch.rand(TOKENS, 12))


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
