"""Optimizer steps inside backward: a hook that takes one uses gradients that have not been averaged yet.

A parameter's hooks see and may change this rank's gradient before it is averaged, as in torch. So the step is refused:
that of any `torch.optim.Optimizer` before it changes anything, and a write of the hook's own once backward has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from minifsdp.optimizer_steps import before_every_step, parameters_of
from minifsdp.private import hooked_in, in_backward, version_of


class Replica(Protocol):
    """A module or an optimizer that averages gradients over ranks."""

    def not_yet_averaged(self) -> Collection[Tensor]:
        """The parameters whose gradients are only this rank's, as long as a backward is under way."""
        ...


_replicas: WeakSet[Any] = WeakSet()


def refuse_early_steps(replica: Replica) -> None:
    """Raise RuntimeError when an optimizer is about to step inside backward, before the replica has averaged."""
    _replicas.add(replica)
    before_every_step(_check_step)


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    if torch.compiler.is_compiling() or not in_backward():
        return
    stepped = {id(p) for p in parameters_of(optimizer)}
    for replica in _replicas:  # a replica that is an optimizer knows itself what it averages when it steps
        if replica is not optimizer and any(id(p) in stepped for p in replica.not_yet_averaged()):
            raise early_step(optimizer, replica)


def early_step(optimizer: torch.optim.Optimizer, replica: object) -> RuntimeError:
    return RuntimeError(
        f"{type(optimizer).__name__} steps inside backward, in a hook, with gradients that "
        f"{type(replica).__name__} has not averaged over the ranks yet: step after backward, or use "
        "FullyShardedDataParallel or fully_shard, whose parameters' hooks run after the reduction"
    )


def versions_of_hooked(params: Iterable[nn.Parameter]) -> dict[nn.Parameter, int]:
    """The versions of the parameters that have hooks, at the beginning of a backward."""
    return {p: version_of(p) for p in hooked_in(params)}


def check_unwritten(versions: Mapping[nn.Parameter, int], names: Mapping[nn.Parameter, str]) -> None:
    """Raise RuntimeError if a parameter that has hooks was changed in place since it had this version."""
    for p, version in versions.items():
        if version_of(p) != version:
            raise RuntimeError(
                f"parameter {names.get(p)} has a hook and was changed inside backward, before its gradient was "
                "averaged over the ranks: change it after backward"
            )
