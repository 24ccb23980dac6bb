"""One plan under our styles and under torch's: results, gradients, layouts, and how many collectives they take."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
import torch.distributed.tensor.parallel as theirs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import minifsdp.tensor_parallel as ours
from minifsdp import comm

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Plan = Callable[[Any], dict[str, Any]]  # takes the library
_NAMES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


def both(build: Callable[[], nn.Module], plan: Plan, mesh: Any) -> tuple[nn.Module, nn.Module]:
    """The model under our styles, and under torch's."""
    torch.manual_seed(0)
    model = build().to(torch.float64)
    models = [copy.deepcopy(model) for _ in range(2)]
    return tuple(lib.parallelize_module(m, mesh, plan(lib)) for lib, m in zip((ours, theirs), models, strict=True))


def whole(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, DTensor) else t


def collectives(run: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """The result, and the collectives that it took, ours and those of torch's DTensors."""
    with CommDebugMode() as mode, comm.record() as log:
        result = run()
    counts = Counter(call.op for call in log)
    for op, count in mode.get_comm_counts().items():
        if not str(op).startswith("c10d."):  # those are what ours are carried by
            counts[_NAMES.get(op.__name__, op.__name__)] += count
    return result, counts


def assert_alike(mine: Any, other: Any, what: str, or_as: Any = None) -> None:
    """Of one layout, or in that of the parameter, and of equal values."""
    assert isinstance(mine, DTensor) == isinstance(other, DTensor), (what, type(mine), type(other))
    if isinstance(mine, DTensor):
        assert mine.placements in (other.placements, or_as), (what, mine.placements, other.placements)
        assert mine.shape == other.shape, what
    torch.testing.assert_close(whole(mine), whole(other), rtol=0, atol=1e-12, msg=lambda text: f"{what}: {text}")


def compare(
    build: Callable[[], nn.Module], plan: Plan, mesh: Any, x: Tensor, frozen: tuple[str, ...] = ()
) -> tuple[Counter[str], Counter[str]]:
    """Forward and backward of both; returns our collectives forward and backward, which are torch's."""
    outputs, inputs, counts = [], [], []
    models = both(build, plan, mesh)
    for model in models:
        for name, p in model.named_parameters():
            p.requires_grad_(name not in frozen)
        mine = x.clone().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        output, forward = collectives(lambda model=model, mine=mine: model(mine))
        weights = torch.linspace(1, 2, whole_numel(output), dtype=torch.float64)
        local = output.to_local() if isinstance(output, DTensor) else output
        loss = (local * weights[: local.numel()].view(local.shape)).sum()
        _, backward = collectives(loss.backward)
        outputs.append(output.detach())
        inputs.append(mine)
        counts.append((forward, backward))
    assert_alike(*outputs, "output")
    if x.requires_grad:
        assert_alike(inputs[0].grad, inputs[1].grad, "gradient of the input")
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert p.placements == q.placements, name
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert_alike(p.grad, q.grad, f"gradient of {name}", p.placements)
    assert counts[0] == counts[1], counts
    return counts[0]


def whole_numel(t: Any) -> int:
    return t.to_local().numel() if isinstance(t, DTensor) else t.numel()
