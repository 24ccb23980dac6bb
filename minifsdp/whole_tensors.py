"""Optimizers that need more than shards: one list, and one rule for every kind of shard.

Adam updates each element by itself: the update of a shard is the shard of the update. Others combine elements.

    Adafactor, LARS, LAMB, Muon, Shampoo    those of a parameter: means of rows and columns, norms, matmuls
    LBFGS                                   those of the whole model: dot products of gradients

A flat shard, as FSDP1 and ZeRO have, is a different vector on each rank, without rows or columns. Each rank would
combine its own elements, and get a number that nobody asked for, without an error. A DTensor, as FSDP2 and tensor
parallelism have, knows its whole shape, so torch combines across ranks, where it has the operators.

An optimizer that minifsdp does not know is tried out, on a tensor of twelve elements: once on the matrix, once on two
flat shards. One that exchanges what it needs with collectives is taken at its word.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from minifsdp.local_parts import cuts_of
from minifsdp.private import TorchDispatchMode

ELEMENTWISE = {optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam}
ELEMENTWISE |= {optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD}

NEEDS: dict[type[Optimizer], str] = {
    optim.LBFGS: "multiplies whole gradients with each other",
    optim.Adafactor: "averages over the rows and columns of whole parameters",
    optim.Muon: "orthogonalizes whole matrices",
    optim.SparseAdam: "updates the rows that a sparse gradient has",
}

_flat: Any = WeakIdKeyDictionary()  # parameters that are flat, and the number of ranks over which each is sharded
_passed: WeakSet[Optimizer] = WeakSet()


def note_flat(params: Iterable[nn.Parameter], ranks: int) -> None:
    """From now on, an optimizer's first step with these parameters is refused if it needs more than flat shards."""
    watch_optimizers()
    for p in params:
        _flat[p] = ranks


def is_flat(p: Tensor) -> bool:
    return p in _flat


@cache
def watch_optimizers() -> None:
    """From now on every optimizer's `step` begins with `check_step`."""
    register_optimizer_step_pre_hook(check_step)


def check_step(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """See that an optimizer can do with the shards that it has.

    Raises:
        ValueError: it cannot; every rank raises, before any parameter has changed.
    """
    kind = type(optimizer)
    if (kind in ELEMENTWISE and kind is not optim.Rprop) or optimizer in _passed:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    ranks = max((_flat[p] for p in params if p in _flat), default=0)
    if ranks and not (ranks == 1 and issubclass(kind, optim.LBFGS)):
        different: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "lr")}
            if settings not in different:
                different.append(settings)
                check_flat(kind, settings, "FSDP")
        _passed.add(optimizer)
    check_dtensors(kind, [p for p in params if isinstance(p, DTensor)])


def check_flat(kind: type[Optimizer], settings: Mapping[str, Any], whose: str) -> None:
    """
    Raises:
        ValueError: the optimizer needs more than flat shards.
    """
    why = need_of(kind, settings)
    if why is not None:
        raise ValueError(
            f"{kind.__name__} {why}, but {whose} gives it flat shards of parameters: take an optimizer that updates "
            "element by element, such as AdamW or SGD, or keep the parameters' shapes with fully_shard or DDP"
        )


def need_of(kind: type[Optimizer], settings: Mapping[str, Any]) -> str | None:
    """The way in which an optimizer combines elements, in words; None if it does not, or if that is unknown."""
    if kind in ELEMENTWISE:
        return None
    listed = next((why for each, why in NEEDS.items() if issubclass(kind, each)), None)
    alone = None if kind in NEEDS else updates_alone(kind, settings)
    return None if alone else listed or (None if alone is None else "updates elements by the values of others")


def check_dtensors(kind: type[Optimizer], params: Iterable[DTensor]) -> None:
    """
    Raises:
        ValueError: torch lacks the operators for this optimizer with DTensors, or with one sharded like this.
    """
    for p in params:
        cuts = [(p.shape[each.dim], p.device_mesh.size(i)) for i, each in cuts_of(p).items()]
        uneven = next((f"{size} over {ranks} ranks" for size, ranks in cuts if size % ranks), "")
        tiny = next((f"{size} over {ranks} ranks" for size, ranks in cuts if size < ranks), "")
        if cuts and issubclass(kind, optim.Adafactor | optim.Rprop):
            why, cure = "torch has no DTensor operators for its step", "take another, such as AdamW"
        elif uneven and issubclass(kind, optim.LBFGS):
            why, cure = f"it flattens parameters, which are sharded unevenly ({uneven})", "choose a divisor"
        elif tiny and issubclass(kind, optim.Muon):
            why, cure = f"some ranks have nothing of its matrix {[*p.shape]} ({tiny})", "give it to AdamW"
        else:
            continue
        raise ValueError(
            f"{kind.__name__} cannot step with these sharded parameters, because {why}: {cure}, or use DDP"
        )


# An optimizer is tried out

_START = torch.linspace(0.5, 2.0, 12, dtype=torch.float64)
_SLOPE = torch.logspace(-2, 2, 12, dtype=torch.float64)  # of different magnitudes: a norm is that of the last ones


class _ExchangesError(Exception):
    """The optimizer communicates."""


class _Alone(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise _ExchangesError
        return func(*args, **(kwargs or {}))


def updates_alone(kind: type[Optimizer], settings: Mapping[str, Any]) -> bool | None:
    """True if an optimizer's update of flat shards is that of the whole matrix; None if it could not be tried.

    Args:
        kind: its class, which is called with parameters, and those of the settings that it takes.
        settings: a parameter group's.
    """
    settings = {**settings, "lr": 0.01}
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _Alone():  # type: ignore[no-untyped-call]
            warnings.simplefilter("ignore")
            whole, again = (_updated(kind, settings, slice(0, 12), (3, 4)) for _ in range(2))
            shards = [_updated(kind, settings, part, (-1,)) for part in (slice(0, 5), slice(5, 12))]
    except Exception:
        return None  # it takes other arguments, or other tensors; or it communicates
    if not torch.equal(whole, again) or torch.equal(whole, _START):
        return None  # it adds noise, or has done nothing yet
    return torch.allclose(whole - _START, torch.cat(shards) - _START, rtol=1e-3, atol=1e-12)


@torch.no_grad()
def _updated(kind: type[Optimizer], settings: Mapping[str, Any], part: slice, shape: tuple[int, ...]) -> Tensor:
    """A part of the values after three steps, 1-D."""
    p = nn.Parameter(_START[part].reshape(shape).clone())
    takes = inspect.signature(kind).parameters
    optimizer = kind([p], **{key: value for key, value in settings.items() if key in takes})
    step = inspect.unwrap(type(optimizer).step)  # without hooks, which are for steps that count
    closures = [p for p in inspect.signature(step).parameters.values() if p.name == "closure"]

    def closure() -> Tensor:
        p.grad = p.detach() * slope
        return (p.detach().square() * slope).sum() / 2

    for number in range(3):
        slope = _SLOPE.roll(5 * number)[part].reshape(shape)  # other elements are the large ones in each step
        closure()
        step(optimizer, *[closure for each in closures if each.default is each.empty])
    return p.detach().reshape(-1)
