"""Our styles give what torch's give: results, gradients, layouts, and collectives where one is due, none elsewhere."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from on_ranks import Checks, mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from tp_beside_torch import compare

from minifsdp.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

check = Checks(__name__)
ANY = (2, 3)
LAYOUTS = {"default": None, "whole": Replicate(), "rows": Shard(0), "middle": Shard(1), "features": Shard(-1)}


def mesh() -> Any:
    return mesh_of((torch.distributed.get_world_size(),))


def data(requires_grad: bool = True) -> Tensor:
    """[6, 6, 12], the same on every rank: a part of something, where a layout says so."""
    return torch.randn(6, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_(
        requires_grad
    )


def linear(bias: bool = True, features: int = 12) -> Any:
    return lambda: nn.Sequential(nn.Linear(12, features, bias=bias))


INPUTS = {"default": None, "whole": Replicate(), "rows": Shard(0), "middle": Shard(1)}


@check(ranks=ANY, given=tuple(INPUTS), wanted=tuple(LAYOUTS), local=(True, False))
def a_linear_by_columns(given: str, wanted: str, local: bool) -> None:
    layouts = {"input_layouts": INPUTS[given], "output_layouts": LAYOUTS[wanted], "use_local_output": local}
    compare(linear(), lambda lib: {"0": lib.ColwiseParallel(**layouts)}, mesh(), data())


ROW_INPUTS = {"whole": Replicate(), "rows": Shard(0), "middle": Shard(1)}
ROW_OUTPUTS = {**LAYOUTS, "summands": Partial()}


@check(ranks=ANY, given=tuple(ROW_INPUTS), wanted=tuple(ROW_OUTPUTS), local=(True, False))
def a_linear_by_rows(given: str, wanted: str, local: bool) -> None:
    if wanted == "summands" and local:
        return  # how a sum falls into summands is anyone's choice
    layouts = {"input_layouts": ROW_INPUTS[given], "output_layouts": ROW_OUTPUTS[wanted], "use_local_output": local}
    compare(linear(), lambda lib: {"0": lib.RowwiseParallel(**layouts)}, mesh(), data())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))


@check(ranks=ANY)
def columns_before_rows_take_one_reduction_each_way() -> None:
    forward, backward = compare(
        mlp, lambda lib: {"0": lib.ColwiseParallel(), "2": lib.RowwiseParallel()}, mesh(), data()
    )
    assert forward == backward == {"all_reduce": 1}


@check(ranks=ANY)
def sequence_parallel_takes_a_gather_and_a_reduction_each_way() -> None:
    def plan(lib: Any) -> Any:
        rows = lib.RowwiseParallel(output_layouts=Shard(1))
        return {"0": lib.ColwiseParallel(input_layouts=Shard(1)), "2": rows}

    forward, backward = compare(mlp, plan, mesh(), data())
    assert forward == backward == {"all_gather": 1, "reduce_scatter": 1}


@check(
    ranks=ANY,
    frozen={
        "first": ("0.weight", "0.bias"),
        "second": ("2.weight",),
    },
)
def frozen_parameters_save_what_only_they_need(frozen: tuple[str, ...]) -> None:
    plan = lambda lib: {"0": lib.ColwiseParallel(), "2": lib.RowwiseParallel()}  # noqa: E731
    _, backward = compare(mlp, plan, mesh(), data(requires_grad=False), frozen)
    assert not backward


@check(ranks=ANY, features=(7, 5))
def features_that_the_ranks_do_not_divide(features: int) -> None:
    """Torch's layer by rows does not take them as plain tensors; beside one process."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(12, features), nn.GELU(), nn.Linear(features, 12)).to(torch.float64)
    cut = parallelize_module(copy.deepcopy(alone), mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x, y = data(), data()
    alone(x).square().sum().backward()
    cut(y).square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=0, atol=1e-12)
    for p, q in zip(cut.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0, atol=1e-12)
    for layout, local in product((Replicate(), Shard(0)), (True, False)):
        plan = partial(column_plan, layout, local)
        compare(linear(features=features), plan, mesh(), data())


def column_plan(layout: Any, local: bool, lib: Any) -> Any:
    return {"0": lib.ColwiseParallel(output_layouts=layout, use_local_output=local)}


TOKENS = torch.arange(36).view(6, 6) % 12


@check(ranks=ANY, wanted=LAYOUTS)
def an_embedding_by_columns(wanted: Any) -> None:
    plan = lambda lib: {"0": lib.ColwiseParallel(output_layouts=wanted)}  # noqa: E731
    compare(lambda: nn.Sequential(nn.Embedding(12, 6)), plan, mesh(), TOKENS)


@check(ranks=ANY, options={f"{a}, {size}": (a, size) for a, size in product(("default", "rows", "middle"), (12, 13))})
def an_embedding_by_rows(options: tuple[str, int]) -> None:
    wanted, size = options
    layouts = {"input_layouts": Replicate(), "output_layouts": LAYOUTS[wanted]}
    compare(
        lambda: nn.Sequential(nn.Embedding(size, 6)), lambda lib: {"0": lib.RowwiseParallel(**layouts)}, mesh(), TOKENS
    )


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight


NORMS = {"LayerNorm": nn.LayerNorm, "RMSNorm": RMSNorm}


@check(ranks=ANY, norm=NORMS, local=(True, False))
def norms_on_a_part_of_the_sequence(norm: Any, local: bool) -> None:
    """Their gradients are summands, and no collective is made of them."""
    plan = lambda lib: {"0": lib.SequenceParallel(use_local_output=local)}  # noqa: E731
    forward, backward = compare(lambda: nn.Sequential(norm(12)), plan, mesh(), data())
    assert not forward
    assert not backward


class Block(nn.Module):
    """Three layers by columns that share an input, and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(12), Inner()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.norm(x), scale=x)
        return y


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        y: Tensor = self.out(self.a(x) * self.b(x) + self.c(scale))
        return y


@check(ranks=ANY, local=(True, False))
def inputs_and_outputs_are_moved(local: bool) -> None:
    def plan(lib: Any) -> Any:
        prepare = lib.PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            input_kwarg_layouts={"scale": Shard(1)},
            desired_input_kwarg_layouts={"scale": Replicate()},
            use_local_input=local,
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
            use_local_output=local,
        )
        columns = {f"inner.{name}": lib.ColwiseParallel() for name in "abc"}
        return {"norm": lib.SequenceParallel(), "inner": prepare, **columns, "inner.out": lib.RowwiseParallel()}

    compare(Block, plan, mesh(), data())


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
