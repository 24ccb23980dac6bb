"""Layers divided among stages, by number, parameters or seconds. A pipeline is as fast as its slowest stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from minifsdp import device


def divide(layers: Sequence[str], stages: int, costs: Sequence[float] | None = None) -> list[list[str]]:
    """Consecutive layers for each stage, so that the most expensive stage costs as little as possible.

    Args:
        layers: names, in the order of their use.
        stages: the number of them.
        costs: of the layers, such as `parameters_of` or `seconds_of`; None: all alike.

    Raises:
        ValueError: there are fewer layers than stages; or not a cost for each layer.
    """
    costs = [1.0] * len(layers) if costs is None else costs
    if len(costs) != len(layers):
        raise ValueError(f"{len(layers)} layers and {len(costs)} costs: give one for each")
    if not 0 < stages <= len(layers):
        raise ValueError(f"{len(layers)} layers make no {stages} stages: each stage needs one, take fewer stages")
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by how many layers: the highest cost, and the cuts
    for stage in range(1, stages + 1):
        best = {
            end: min(
                (max(best[begin][0], sum(costs[begin:end])), [*best[begin][1], end]) for begin in best if begin < end
            )
            for end in range(stage, len(layers) - (stages - stage) + 1)
        }
    ends = best[len(layers)][1]
    return [list(layers[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def parameters_of(model: nn.Module, layers: Sequence[str]) -> list[float]:
    """The number of parameters of each layer."""
    return [float(sum(p.numel() for p in model.get_submodule(name).parameters())) for name in layers]


def seconds_of(model: nn.Module, layers: Sequence[str], run: Callable[[], Any], repeats: int = 5) -> list[float]:
    """The seconds that each layer takes in a forward: the shortest of some.

    Args:
        model: whole, with memory.
        layers: names.
        run: calls the model on a micro-batch.
        repeats: after one that is not measured.
    """
    found = {name: [0.0] for name in layers}
    began: dict[str, float] = {}

    def clock(name: str, begins: bool, module: nn.Module, *_: Any) -> None:
        for p in list(module.parameters())[:1]:
            device.synchronize(p.device)
        if begins:
            began[name] = time.perf_counter()
        else:
            found[name][-1] += time.perf_counter() - began[name]

    modules = [(name, model.get_submodule(name)) for name in layers]
    handles = [module.register_forward_pre_hook(partial(clock, name, True)) for name, module in modules]
    handles += [module.register_forward_hook(partial(clock, name, False)) for name, module in modules]
    for _ in range(1 + repeats):
        for times in found.values():
            times.append(0.0)
        run()
    for handle in handles:
        handle.remove()
    return [min(times[2:]) for times in found.values()]
