"""Random plans of random modules, next to one process and to torch's styles: DTensors in between, in any layout."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as theirs
from on_ranks import TORCH, Checks, mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from tp_small_model import whole

import minifsdp.tensor_parallel as ours

check = Checks(__name__)
LIBRARIES = (ours, theirs) if TORCH >= (2, 12) else (ours,)  # torch 2.11 has no linear layer for 3-D x that is Shard(1)
LAYOUTS = (None, Replicate(), Shard(0), Shard(1), Shard(-1))


def made(numbers: random.Random) -> tuple[nn.Module, list[tuple[str, dict[str, Any]]]]:
    """Four linear layers, of widths that the ranks may not divide, and norms; the style of each by name."""
    widths = [numbers.choice([4, 6, 5, 12]) for _ in range(5)]
    modules: list[nn.Module] = []
    styles: list[tuple[str, dict[str, Any]]] = []
    for index in range(4):
        modules += [nn.Linear(*widths[index : index + 2], bias=numbers.random() < 0.7), nn.Tanh()]
        given = numbers.choice([Replicate(), Shard(0)] if index == 0 else LAYOUTS)
        options = {"input_layouts": given, "output_layouts": numbers.choice(LAYOUTS), "use_local_output": False}
        styles += [(numbers.choice(["ColwiseParallel", "RowwiseParallel"]), options), ("", {})]
        if numbers.random() < 0.4:
            modules.append(nn.LayerNorm(widths[index + 1]))
            styles.append(("SequenceParallel", {"sequence_dim": numbers.choice([0, 1])}))
    return nn.Sequential(*modules).double(), styles


def run(model: nn.Module, x: Tensor) -> list[Any]:
    """The result, and the gradients of the parameters and of the input."""
    x = x.clone().requires_grad_()
    y = whole(model(x))
    y.square().sum().backward()
    return [y.detach(), *(whole(p.grad) for p in model.parameters()), x.grad]


@check(ranks=(2, 3), slow=(3,), seed=range(6))
@check(ranks=(2, 3), slow=(2,), seed=range(6, 12))
def a_plan(seed: int) -> None:
    torch.manual_seed(seed)
    alone, styles = made(random.Random(seed))
    x = torch.randn(6, 12, alone[0].in_features, dtype=torch.float64)
    cut = styles[0][1]["input_layouts"].is_shard()
    mine = x.chunk(dist.get_world_size())[dist.get_rank()] if cut else x
    mesh = mesh_of((dist.get_world_size(),))
    *expected, gradient = run(alone, x)
    for lib in LIBRARIES:
        plan = {str(number): getattr(lib, kind)(**options) for number, (kind, options) in enumerate(styles) if kind}
        alone.zero_grad()
        *found, own = run(lib.parallelize_module(copy.deepcopy(alone), mesh, plan), mine)
        wanted = gradient.chunk(dist.get_world_size())[dist.get_rank()] if cut else gradient
        for each, other in zip([*found, own], [*expected, wanted], strict=True):
            torch.testing.assert_close(each, other, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
