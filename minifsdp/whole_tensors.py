"""Optimizers that need more than shards: one list, and one rule for every kind of shard.

Adam updates each element by itself: the update of a shard is the shard of the update. Others combine elements.

    Adafactor, LARS, LAMB, Muon, Shampoo    those of a parameter: means of rows and columns, norms, matmuls
    LBFGS                                   those of the whole model: dot products of gradients

A flat shard, as FSDP1 and ZeRO have, is a different vector on each rank, without rows or columns. Each rank would
combine its own elements, and compute a wrong update without an error. A DTensor, as FSDP2 and tensor
parallelism have, knows its whole shape, so torch combines across ranks, where it has the operators.

An optimizer that minifsdp does not know is tried out, on a tensor of twelve elements: once on the matrix, once on two
flat shards. One that exchanges what it needs with collectives is taken at its word. One that cannot be tried gets a
warning.
"""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from minifsdp.comm import Group
from minifsdp.kinds import refused
from minifsdp.local_parts import check_replicated, cuts_of
from minifsdp.optimizer_steps import before_every_step, parameters_of
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
    before_every_step(check_step)
    for p in params:
        _flat[p] = ranks


def is_flat(p: Tensor) -> bool:
    return p in _flat


def check_whole(p: Tensor, name: str, group: Group) -> None:
    """
    Raises:
        ValueError: a parameter is sharded over ranks of the group, as a DTensor or by FSDP.
    """
    check_replicated(p, name, group)
    if is_flat(p):
        raise ValueError(f"{name} is a shard of FSDP, so its optimizer state is sharded already: leave out ZeRO")


def check_step(optimizer: Optimizer) -> None:
    """See that an optimizer can do with the shards that it has.

    Raises:
        ValueError: it cannot; every rank raises, before any parameter has changed.
    """
    kind = type(optimizer)
    if (kind in ELEMENTWISE and kind is not optim.Rprop) or optimizer in _passed:
        return
    params = parameters_of(optimizer)
    ranks = max((_flat[p] for p in params if p in _flat), default=0)
    if ranks and not (ranks == 1 and issubclass(kind, optim.LBFGS)):
        different: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "lr")}
            if settings not in different:
                different.append(settings)
                check_flat(kind, settings, "FSDP", optimizer)
        _passed.add(optimizer)
    check_dtensors(kind, [p for p in params if isinstance(p, DTensor)])


def check_flat(kind: type[Optimizer], settings: Mapping[str, Any], whose: str, live: Optimizer | None = None) -> None:
    """See that an optimizer can do with flat shards; if it cannot be tried out, a warning says so.

    Raises:
        ValueError: it needs more.
        TypeError: it is no class of optimizers.
    """
    if kind in ELEMENTWISE:
        return
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise refused("optimizer_class", kind, "a class of optimizers, such as torch.optim.AdamW")
    why = next((why for each, why in NEEDS.items() if issubclass(kind, each)), None)
    found = Finding(False) if kind in NEEDS else try_out(kind, settings, live)
    if found.alone or (found.alone is None and why is None):
        if found.doubt:
            warnings.warn(
                f"{kind.__name__} has flat shards of parameters from {whose}, and could not be verified to update "
                f"element by element ({found.doubt}): if it uses shapes, norms or means, its result is wrong",
                stacklevel=3,
            )
        return
    raise ValueError(
        f"{kind.__name__} {why or 'updates elements by the values of others'}, but {whose} gives it flat shards of "
        "parameters: take an optimizer that updates element by element, such as AdamW or SGD, or keep the parameters' "
        "shapes with fully_shard or DDP"
    )


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


class Finding(NamedTuple):
    """The result of a trial.

    Attributes:
        alone: its update of flat shards is that of the whole matrix; None if that is unknown.
        doubt: why it is unknown; empty if it communicates, and so sees to its elements itself.
    """

    alone: bool | None
    doubt: str = ""


def try_out(kind: type[Optimizer], settings: Mapping[str, Any], live: Optimizer | None = None) -> Finding:
    """Compare an optimizer's update of flat shards with that of the whole matrix.

    Args:
        kind: its class, which is called with parameters, and those of the settings that it takes.
        settings: a parameter group's.
        live: an instance, which is copied if its class takes other arguments.
    """
    settings = {**settings, "lr": 0.01}
    makers = [partial(_made, kind, settings), *([partial(_copied, live, settings)] if live else [])]
    doubt = ""
    for make, dtype in product(makers, (torch.float64, torch.float32)):  # some keep state in the default dtype
        try:
            return _compared(make, dtype)
        except _ExchangesError:
            return Finding(None)
        except Exception as error:
            doubt = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Finding(None, f"a trial of it raised {doubt}")


def _compared(make: Callable[[nn.Parameter], Optimizer], dtype: torch.dtype) -> Finding:
    start = _START.to(dtype)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _Alone():  # type: ignore[no-untyped-call]
        warnings.simplefilter("ignore")
        whole, again = (_updated(make, dtype, slice(0, 12), (3, 4)) for _ in range(2))
        shards = [_updated(make, dtype, part, (-1,)) for part in (slice(0, 5), slice(5, 12))]
    if not torch.equal(whole, again):
        return Finding(None, "its steps are random")
    if torch.equal(whole, start):
        return Finding(None, "its first three steps change nothing")
    tiny = 16 * torch.finfo(dtype).eps
    return Finding(torch.allclose(whole - start, torch.cat(shards) - start, rtol=1e-3, atol=tiny))


def _made(kind: type[Optimizer], settings: Mapping[str, Any], p: nn.Parameter) -> Optimizer:
    takes = inspect.signature(kind).parameters
    return kind([p], **{key: value for key, value in settings.items() if key in takes})


def _copied(live: Optimizer, settings: Mapping[str, Any], p: nn.Parameter) -> Optimizer:
    """An optimizer of `p` with what `live` has, except for its parameters and their state."""
    copied = object.__new__(type(live))
    memo: dict[int, Any] = {id(each): p for group in live.param_groups for each in group["params"]}
    had = {key: value for key, value in vars(live).items() if key not in ("state", "param_groups")}
    vars(copied).update(deepcopy(had, {**memo, id(live): copied}))
    copied.state, copied.param_groups = defaultdict(dict), [{**deepcopy(dict(settings)), "params": [p]}]
    return copied


@torch.no_grad()
def _updated(
    make: Callable[[nn.Parameter], Optimizer], dtype: torch.dtype, part: slice, shape: tuple[int, ...]
) -> Tensor:
    """A part of the values after three steps, 1-D."""
    p = nn.Parameter(_START[part].to(dtype, copy=True).reshape(shape))
    optimizer = make(p)
    step = inspect.unwrap(type(optimizer).step)  # without hooks, which are for steps that count
    closures = [p for p in inspect.signature(step).parameters.values() if p.name == "closure"]

    def closure() -> Tensor:
        p.grad = p.detach() * slope
        return (p.detach().square() * slope).sum() / 2

    for number in range(3):
        slope = _SLOPE.roll(5 * number)[part].to(dtype).reshape(shape)  # other elements are the large ones in each step
        closure()
        step(optimizer, *[closure for each in closures if each.default is each.empty])
    return p.detach().reshape(-1)
