"""Layers divided among stages, by number, parameters or seconds. A pipeline is as fast as its slowest stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from torch import nn

from minifsdp import device


def divide(layers: Sequence[str], stages: int, costs: Sequence[float] | None = None) -> list[list[str]]:
    """Consecutive layers for each stage: the most expensive stage costs as little as possible, the others are alike.

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
    slowest, _ = _best_cuts(costs, stages, max)
    even = partial(_add_square, most=slowest)
    _, cuts = _best_cuts(costs, stages, even)
    return [list(layers[begin:end]) for begin, end in pairwise((0, *cuts))]


def _best_cuts(
    costs: Sequence[float], stages: int, join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The division for which the stages' costs, joined one after the other, are least: that value, and each end.

    Of equal ones the one that gives earlier stages more layers: the last one often has a head.
    """
    sums = [0.0, *accumulate(costs)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by the number of layers that are placed
    for stage in range(1, stages + 1):
        best = {
            end: min(
                (
                    (join(value, sums[end] - sums[begin]), (*ends, end))
                    for begin, (value, ends) in best.items()
                    if begin < end
                ),
                key=lambda found: (found[0], [-each for each in found[1]]),
            )
            for end in range(stage, len(costs) - (stages - stage) + 1)
        }
    return best[len(costs)]


def _add_square(total: float, cost: float, most: float) -> float:
    return total + cost**2 if cost <= most * (1 + 1e-9) else inf


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
