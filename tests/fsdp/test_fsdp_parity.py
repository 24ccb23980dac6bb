"""FSDP computes what one process computes, and what torch's FSDP1, FSDP2 and DDP compute, whatever a model does.

A case is a model and the function that makes one step's gradients with it. Every case trains two steps of SGD with
momentum, or three; losses, gradients, norms and parameters of every step are compared, and after every step no unit may
be gathered and no unsharded memory alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from minifsdp import device
from minifsdp.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    OverlapSchedule,
    PrefetchSchedule,
    RateLimitedSchedule,
    ShardingStrategy,
    SyncSchedule,
)
from minifsdp.fsdp.unit import SHARDED
from minifsdp.instruments.launch import launch
from minifsdp.wrapper_names import clean_name

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH, ROWS, MICRO_BATCHES = 5, 12, 4  # 12 rows: an equal share for 1, 2 and 3 ranks
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = ShardingStrategy

SCHEDULES: dict[str, Any] = {
    "sync": SyncSchedule,
    "overlap": OverlapSchedule,
    "pre": PrefetchSchedule,
    "post": partial(PrefetchSchedule, backward=BackwardPrefetch.BACKWARD_POST),
    "deep": partial(PrefetchSchedule, depth=None),
    "limit": RateLimitedSchedule,
    "limit deep": partial(RateLimitedSchedule, depth=None),
    "limit 1": partial(RateLimitedSchedule, depth=None, limit=1),
}


# The parts that models are made of. `is_unit` says what the wrap policies make a unit of.


class Part(nn.Module):
    is_unit: ClassVar[bool] = True


class Block(Part):
    """35 elements, a number that neither 2 nor 3 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + self.bias) * self.gain


class Tiny(Part):
    """One element: with two ranks the second holds nothing but padding."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Hollow(Part):
    """An empty parameter between others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x @ self.weight + self.bias, self.nothing])


@dataclasses.dataclass
class Pair:
    one: Tensor
    two: list[Tensor]


class NamedPair(NamedTuple):
    one: Tensor
    two: Tensor


class Opaque:
    """Nobody can know that there are tensors in it."""

    def __init__(self, one: Tensor, two: Tensor) -> None:
        self.one, self.two = one, two


class DictOfMine(dict[str, Any]):
    """As the outputs of many libraries: not a dict to those who ask for the exact type."""


PACKINGS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out),
    "dict": (lambda a, b: {"a": a, "deep": [{"b": b}]}, lambda out: (out["a"], out["deep"][0]["b"])),
    "dataclass": (lambda a, b: Pair(a, [b]), lambda out: (out.one, out.two[0])),
    "dataclass in a list": (
        lambda a, b: [{"pair": Pair(a, [b])}],
        lambda out: (out[0]["pair"].one, out[0]["pair"].two[0]),
    ),
    "named tuple": (NamedPair, lambda out: (out.one, out.two)),
    "subclass of dict": (lambda a, b: DictOfMine(a=a, b=b), lambda out: (out["a"], out["b"])),
    "an object": (Opaque, lambda out: (out.one, out.two)),
    "packed sequence": (
        lambda a, b: (PackedSequence(a, torch.tensor([len(a)])), b),
        lambda out: (out[0].data, out[1]),
    ),
    "set": (
        lambda a, b: {a, (b,)},
        lambda out: (next(t for t in out if isinstance(t, Tensor)), next(t for t in out if isinstance(t, tuple))[0]),
    ),
}


class Two(Part):
    """Two outputs in some container."""

    def __init__(self, packing: str = "tuple") -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.packing = packing

    def forward(self, x: Tensor) -> Any:
        return PACKINGS[self.packing][0](self.left(x), torch.tanh(self.right(x)))

    def unpack(self, output: Any) -> tuple[Tensor, Tensor]:
        return PACKINGS[self.packing][1](output)


class Choice(Part):
    """Uses some of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, left: bool = True, right: bool = False) -> Tensor:
        if left:
            x = torch.tanh(self.left(x))
        if right:
            x = torch.tanh(self.right(x))
        return x


class Tied(Part):
    """One weight under two names, and one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.other.weight = self.one.weight
        self.again = nn.ModuleList([self.one])

    def forward(self, x: Tensor) -> Tensor:
        return self.again[0](torch.tanh(self.other(torch.tanh(self.one(x)))))


class Nest(Part):
    """Units inside a unit, whose own parameters are used before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Block(), Block()])
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.inner[1](self.own(self.inner[0](self.own(x)))))


class Shell(Part):
    """A unit whose parameters all belong to units inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Recurrent(Part):
    """An LSTM keeps a list of its weights beside its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(1))[0].squeeze(1)


class Listed(Part):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.4 for _ in range(2))
        self.named = nn.ParameterDict({"bias": torch.randn(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) + self.named["bias"]
        return x


class Attention(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).unsqueeze(-2)
        h = torch.cat([h, h * 2], -2)
        return x + self.attention(h, h, h, need_weights=False)[0].sum(-2)


class Recomputed(Part):
    """An activation checkpoint inside the unit, with parameters of the unit inside and outside of it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(
            checkpoint(lambda h: torch.tanh(self.inside(h)), self.outside(x), use_reentrant=self.reentrant)
        )


class Fragile(Part):
    """Raises when it is told to, after it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, turn: Any) -> Tensor:
        x = torch.tanh(self.linear(x))
        if turn == "raise":
            raise OopsError
        return x


class OopsError(Exception):
    """What a model raises on purpose."""


class Net(nn.Module):
    """`first`, then whatever `path` does with the units, then `head`."""

    def __init__(self, units: list[nn.Module], path: Path) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(units)
        self.path = path

    def forward(self, x: Tensor, turn: Any = 0) -> Tensor:
        return self.head(self.path(self.units, self.first(x), turn))


Path = Callable[[Any, Tensor, Any], Tensor]
Step = Callable[["Trainer", Tensor, int], Tensor]


class Trap(torch.autograd.Function):
    """Does nothing, but its backward raises if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Any) -> Tensor:
        ctx.turn = turn
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.turn == "raise":
            raise OopsError
        return gradient, None


def in_a_row(units: Any, h: Tensor, turn: Any) -> Tensor:
    for unit in units:
        h = unit(h)
    return h


# What a step does. `x` is [micro-batches, rows, width]; the loss of the last forward is returned.


def loss_of(trainer: Trainer, x: Tensor, turn: Any = 0) -> Tensor:
    return trainer.model(x, turn=turn).square().sum() / x.shape[0]


def one_backward(trainer: Trainer, x: Tensor, turn: Any) -> Tensor:
    loss = loss_of(trainer, x[0], turn)
    loss.backward()
    return loss


def accumulate(synced: str) -> Step:
    """A micro-batch per letter: `s` with communication, `n` inside `no_sync`."""

    def step(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
        for i, letter in enumerate(synced):
            with trainer.no_sync() if letter == "n" else contextlib.nullcontext():
                loss = loss_of(trainer, x[i], i)
                loss.backward()
        return loss

    return step


def forward_inside_no_sync_only(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
    with trainer.no_sync():
        loss = loss_of(trainer, x[0], turn)
    loss.backward()
    return loss


def two_forwards_one_backward(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
    loss = loss_of(trainer, x[0], turn) + loss_of(trainer, x[1], turn)
    loss.backward()
    return loss


def two_forwards_two_backwards(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
    one, other = loss_of(trainer, x[0], turn), loss_of(trainer, x[1], turn)
    one.backward()
    other.backward()
    return other


def last_forward_first(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
    one, other = loss_of(trainer, x[0], turn), loss_of(trainer, x[1], turn)
    other.backward()
    one.backward()
    return other


def backward_twice_through_one_graph(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
    loss = loss_of(trainer, x[0], turn)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def grad_of_the_input_first(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
    x = x[0].clone().requires_grad_()
    loss = loss_of(trainer, x, turn)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return loss


def forward_without_grad_in_between(mode: Any) -> Step:
    """Between a forward and its backward, and before the next forward."""

    def step(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
        loss = loss_of(trainer, x[0], turn)
        with mode():
            loss_of(trainer, x[3], turn)
        loss.backward()
        trainer.model.eval()
        with mode():
            loss_of(trainer, x[2], turn)
        trainer.model.train()
        return loss

    return step


def another_way_without_grad(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
    loss = one_backward(trainer, x, 0)
    with torch.no_grad():
        loss_of(trainer, x[1], 1)
    return loss


def forward_that_nobody_uses(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
    loss_of(trainer, x[3], turn)
    return one_backward(trainer, x, turn)


def forward_after_the_backward(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
    """As one that logs: with grad, and the optimizer's step comes after it."""
    loss = one_backward(trainer, x, turn)
    loss_of(trainer, x[1], turn)
    return loss


def backward_that_raises(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
    """The gradients of some parameters are there then, of others not: nothing of it may stay."""
    with contextlib.suppress(OopsError):
        loss_of(trainer, x[1], "raise").backward()
    trainer.model.zero_grad()
    return one_backward(trainer, x, turn)


def forward_that_raises(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
    with contextlib.suppress(OopsError):
        loss_of(trainer, x[1], "raise")
    return one_backward(trainer, x, turn)


def whole_model_checkpointed(reentrant: bool) -> Step:
    def step(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
        z = x[0].clone().requires_grad_()
        loss = checkpoint(partial(loss_of, trainer), z, turn, use_reentrant=reentrant)
        loss.backward()
        return loss

    return step


def backward_from_a_unit(trainer: Trainer, x: Tensor, turn: int) -> Tensor:
    """Two losses, one of which leaves out the second half of the model."""
    early: list[Tensor] = []
    model = trainer.plain
    handle = model.units[0].register_forward_hook(lambda _, __, output: early.append(output))
    loss = loss_of(trainer, x[0], turn)
    handle.remove()
    (early[0].square().sum() / x.shape[1]).backward(retain_graph=True)
    loss.backward()
    return loss


# The cases


class Case(NamedTuple):
    """A model and what a step does with it.

    Attributes:
        units: makes the units between `first` and `head`.
        path: how the model's forward goes through them; `turn` is the step's number.
        step: makes the gradients of one step.
        prepare: changes the model before it is wrapped: ties, freezes, or wraps parts by hand with its second argument.
        clip: maximum norm and p.
        set_to_none: the optimizer's `zero_grad`.
        steps: the second is from the optimizer's state, and an order of units, that the first has left.
    """

    units: Callable[[], list[nn.Module]]
    path: Path = in_a_row
    step: Step = one_backward
    prepare: Callable[[Net, Callable[..., nn.Module]], None] = lambda net, wrap: None
    clip: tuple[float, float] | None = None
    set_to_none: bool = True
    steps: int = 2


def blocks(count: int) -> Callable[[], list[nn.Module]]:
    return lambda: [Block() for _ in range(count)]


def freeze(*names: str) -> Callable[[Net, Any], None]:
    def prepare(net: Net, wrap: Any) -> None:
        for name in names:
            net.get_submodule(name).requires_grad_(False)

    return prepare


def tie_root(net: Net, wrap: Any) -> None:
    net.head.weight = net.first.weight


def wrap_by_hand(net: Net, wrap: Callable[..., nn.Module]) -> None:
    net.units[0] = wrap(net.units[0])
    net.units[2] = wrap(nn.Sequential(net.units[2], wrap(nn.Linear(WIDTH, WIDTH))))


def no_units(net: Net, wrap: Any) -> None:
    for unit in net.units:
        unit.is_unit = False


def add_in_place(units: Any, h: Tensor, turn: Any) -> Tensor:
    h = units[0](h)
    h += 1.0
    h = units[1](h)
    h.mul_(2)
    return h


def checkpointed(reentrant: bool, *spans: slice) -> Path:
    """Each span of units inside one activation checkpoint, the others outside."""

    def path(units: Any, h: Tensor, turn: Any) -> Tensor:
        done = 0
        for span in spans:
            h = in_a_row(units[done : span.start], h, turn)
            h = checkpoint(in_a_row, units[span], h, turn, use_reentrant=reentrant)
            done = span.stop
        return in_a_row(units[done:], h, turn)

    return path


def partly_used_twice(units: Any, h: Tensor, turn: Any) -> Tensor:
    """Two nested backwards through one unit, the first of which reaches only half of it."""
    h = checkpoint(partial(units[0], left=True, right=True), h, use_reentrant=True)
    return checkpoint(partial(units[0], left=False, right=True), h, use_reentrant=True)


def outputs_of_two(units: Any, h: Tensor, turn: Any) -> Tensor:
    left, right = units[1].unpack(units[1](units[0](h)))
    return units[2](left) * right


def one_output_used(units: Any, h: Tensor, turn: Any) -> Tensor:
    return units[0](units[1].unpack(units[1](h))[1])


def output_dropped(units: Any, h: Tensor, turn: Any) -> Tensor:
    units[1](h)
    return units[2](units[0](h))


def caught_inside(units: Any, h: Tensor, turn: Any) -> Tensor:
    try:
        h = units[1](h, "raise")
    except OopsError:
        h = units[0](h)
    return units[2](h)


def without_grad_inside(units: Any, h: Tensor, turn: Any) -> Tensor:
    with torch.no_grad():
        mask = units[0](h)
    return units[1](h) * mask + units[0](h).detach()


CASES: dict[str, Case] = {
    "a row": Case(blocks(3), steps=3),
    "no units": Case(blocks(2), prepare=no_units),
    "smaller than N": Case(lambda: [Tiny(1), Block(), Tiny(1)]),
    "scalars": Case(lambda: [Tiny(), Block(), Tiny()]),
    "empty parameters": Case(lambda: [Hollow(), Block()]),
    "parameter lists": Case(lambda: [Listed(), Block()]),
    "attention": Case(lambda: [Attention(), Block()]),
    "lstm": Case(lambda: [Recurrent(), Block()]),
    # Once, twice, never, in another order
    "called twice": Case(blocks(2), lambda u, h, turn: u[1](u[0](u[1](u[0](h))))),
    "called twice at once": Case(blocks(2), lambda u, h, turn: u[0](u[0](h)) * u[1](h)),
    "unused unit": Case(blocks(3), lambda u, h, turn: u[2](u[0](h))),
    "unused parameters": Case(lambda: [Block(), Choice(), Block()]),
    "unused now and then": Case(
        lambda: [Choice(), Block(), Block()],
        lambda u, h, turn: u[1 + turn % 2](u[0](h, left=turn != 1, right=turn != 0)),
        steps=3,
    ),
    "order changes": Case(
        blocks(4), lambda u, h, turn: in_a_row([u[(turn + i) % 4] for i in range(4)], h, turn), steps=3
    ),
    "order turns round": Case(blocks(4), lambda u, h, turn: in_a_row(u if turn % 2 else u[::-1], h, turn), steps=3),
    "shorter and longer": Case(blocks(4), lambda u, h, turn: in_a_row(u[: (4, 1, 3)[turn]], h, turn), steps=3),
    "branches": Case(blocks(3), lambda u, h, turn: u[0](h) + u[1](h) * u[2](h)),
    "residuals": Case(blocks(3), lambda u, h, turn: h + u[2](h + u[1](h + u[0](h)))),
    "in place on outputs": Case(blocks(2), add_in_place),
    # Outputs
    **{
        f"output: {packing}": Case(lambda packing=packing: [Block(), Two(packing), Block()], outputs_of_two)
        for packing in PACKINGS
    },
    "one output used": Case(lambda: [Block(), Two()], one_output_used),
    "output dropped": Case(blocks(3), output_dropped),
    # Wrapping
    "nested": Case(lambda: [Block(), Nest(), Block()], steps=3),
    "nested, called twice": Case(lambda: [Nest(), Block()], lambda u, h, turn: u[0](u[1](u[0](h)))),
    "shell": Case(lambda: [Shell(), Block()]),
    "wrapped by hand": Case(blocks(3), prepare=wrap_by_hand),
    "tied in a unit": Case(lambda: [Tied(), Block()]),
    "tied in the root": Case(blocks(2), prepare=tie_root),
    # Frozen
    "frozen in the middle": Case(blocks(3), prepare=freeze("units.1")),
    "frozen at first": Case(blocks(3), prepare=freeze("units.0", "units.1")),
    "frozen at last": Case(blocks(3), prepare=freeze("units.2")),
    "frozen root": Case(blocks(2), prepare=freeze("first", "head")),
    "frozen, called twice": Case(blocks(2), lambda u, h, turn: u[1](u[0](u[1](u[0](h)))), prepare=freeze("units.1")),
    "all but the root frozen": Case(blocks(2), prepare=freeze("units")),
    "frozen, tied and nested": Case(lambda: [Tied(), Nest()], prepare=freeze("units.0", "units.1.inner.0")),
    # Several forwards or backwards
    "accumulate inside no_sync": Case(blocks(2), step=accumulate("nns")),
    "accumulate outside no_sync": Case(blocks(2), step=accumulate("sss")),
    "accumulate both ways": Case(blocks(2), step=accumulate("snns"), steps=3),
    "accumulate, then used no more": Case(
        lambda: [Choice(), Block(), Block()],
        lambda u, h, turn: u[1](u[0](h, left=turn == 0, right=turn > 0)) if turn else u[2](u[0](h)),
        step=accumulate("nsns"),
    ),
    "accumulate, twice and frozen": Case(
        blocks(3), lambda u, h, turn: u[2](u[1](u[0](u[1](h)))), step=accumulate("nns"), prepare=freeze("units.2")
    ),
    "forward inside no_sync": Case(blocks(2), step=forward_inside_no_sync_only),
    "two forwards, one backward": Case(blocks(2), step=two_forwards_one_backward),
    "two forwards, one backward, frozen": Case(blocks(3), step=two_forwards_one_backward, prepare=freeze("units.1")),
    "two forwards, two backwards": Case(blocks(2), step=two_forwards_two_backwards),
    "two forwards, the last one's backward first": Case(blocks(2), step=last_forward_first),
    "one graph, two backwards": Case(blocks(2), step=backward_twice_through_one_graph),
    "a loss in the middle": Case(blocks(3), step=backward_from_a_unit),
    "autograd.grad first": Case(blocks(2), step=grad_of_the_input_first),
    "no_grad in between": Case(blocks(2), step=forward_without_grad_in_between(torch.no_grad)),
    "inference_mode in between": Case(blocks(2), step=forward_without_grad_in_between(torch.inference_mode)),
    "no_grad and another way": Case(
        blocks(4), lambda u, h, turn: in_a_row((u[:1] if turn else u), h, turn), another_way_without_grad
    ),
    "no_grad inside": Case(blocks(2), without_grad_inside),
    "forward before": Case(blocks(2), step=forward_that_nobody_uses),
    "forward after": Case(blocks(2), step=forward_after_the_backward),
    "forward raises": Case(
        lambda: [Block(), Fragile(), Block()], lambda u, h, turn: u[2](u[1](u[0](h), turn)), forward_that_raises
    ),
    "backward raises": Case(blocks(3), lambda u, h, turn: u[2](u[1](Trap.apply(u[0](h), turn))), backward_that_raises),
    "unit raises": Case(lambda: [Block(), Fragile(), Block()], caught_inside),
    # Activation checkpoints
    **{
        f"checkpoint {where}, {'' if reentrant else 'not '}reentrant": case
        for reentrant in (False, True)
        for where, case in {
            "around a unit": Case(blocks(3), checkpointed(reentrant, slice(1, 2))),
            "around units": Case(blocks(4), checkpointed(reentrant, slice(0, 2), slice(2, 4))),
            "around the last": Case(blocks(3), checkpointed(reentrant, slice(1, 3))),
            "around frozen": Case(blocks(4), checkpointed(reentrant, slice(1, 4)), prepare=freeze("units.2")),
            "around nested": Case(lambda: [Block(), Nest()], checkpointed(reentrant, slice(1, 2))),
            "around the model": Case(blocks(2), step=whole_model_checkpointed(reentrant)),
            "inside a unit": Case(lambda reentrant=reentrant: [Block(), Recomputed(reentrant), Block()]),
            "and no_sync": Case(blocks(3), checkpointed(reentrant, slice(1, 3)), accumulate("nss")),
        }.items()
    },
    "checkpoint twice around one unit": Case(lambda: [Choice(), Block()], partly_used_twice),
    # The optimizer's side
    "clip to the 2-norm": Case(blocks(3), clip=(0.5, 2.0)),
    "clip to the 1-norm": Case(lambda: [Nest(), Block()], clip=(2.0, 1.0)),
    "clip to the maximum": Case(blocks(2), clip=(0.1, float("inf"))),
    "clip nothing": Case(blocks(2), clip=(1e6, 2.0)),
    "clip with unused and frozen": Case(
        blocks(4), lambda u, h, turn: u[2](u[0](h)), prepare=freeze("units.2"), clip=(0.5, 2.0)
    ),
    "zeros, not None": Case(blocks(2), set_to_none=False),
}


# Who trains: each says how to wrap, which pieces of gradients and parameters this rank has, and how those of all ranks
# are put together under the original names.

Pick = Callable[[Tensor], Tensor | None]  # the gradient of a parameter, or its value
Pieces = list[Tensor]  # of one rank, in the same sizes on all


class Trainer:
    """One process with the plain model."""

    def __init__(self, case: Case, strategy: ShardingStrategy = NO_SHARD) -> None:
        self.strategy = strategy
        torch.manual_seed(3)
        self.plain = Net(case.units(), case.path)
        case.prepare(self.plain, self.wrap)
        self.model = self.finish(self.plain)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Make a unit of a module that the case wraps by hand."""
        return module

    def finish(self, net: Net) -> nn.Module:
        return net

    def no_sync(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def pieces(self, pick: Pick) -> Pieces:
        """What `pick` makes of each parameter; None counts as zeros."""
        return [or_zeros(pick, p) for p in self.model.parameters()]

    def whole(self, of_ranks: list[Pieces]) -> dict[str, Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        return dict(zip(names, of_ranks[0], strict=True))

    def check_nothing_left(self) -> None:
        """After a step."""


def or_zeros(pick: Pick, p: Tensor) -> Tensor:
    picked = pick(p)
    return torch.zeros_like(p) if picked is None else picked.detach().clone()


def of_all_ranks(mine: list[Pieces], ranks: int) -> Iterator[list[Pieces]]:
    """Each of them, of every rank: exchanged at once."""
    flat = torch.cat([piece.flatten() for pieces in mine for piece in pieces])
    every = [torch.empty_like(flat) for _ in range(ranks)] if ranks > 1 else [flat]
    if ranks > 1:
        dist.all_gather(every, flat)
    sizes = [piece.numel() for pieces in mine for piece in pieces]
    found = [iter(part.split(sizes)) for part in every]
    for pieces in mine:
        yield [[next(part).view_as(piece) for piece in pieces] for part in found]


class Ours(Trainer):
    def __init__(self, case: Case, strategy: ShardingStrategy, schedule: str, buffers: list[Any]) -> None:
        self.schedule = SCHEDULES[schedule]
        self.buffers = buffers  # the storages of all buffers: (storage, elements, role)
        super().__init__(case, strategy)

    def wrap(self, module: nn.Module, **policy: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, None, self.strategy, schedule=self.schedule, **policy)

    def finish(self, net: Net) -> FullyShardedDataParallel:
        by_hand = any(isinstance(module, FullyShardedDataParallel) for module in net.modules())
        model = self.wrap(net) if by_hand else self.wrap(net, auto_wrap_policy=is_a_unit)
        instances = [(name, m) for name, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]
        self.units = {name: m._unit for name, m in instances if m._unit is not None}
        return model

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.model.no_sync()

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return self.model.clip_grad_norm_(max_norm, norm_type)

    def pieces(self, pick: Pick) -> Pieces:
        return [or_zeros(pick, unit.flat.shard) for unit in self.units.values()]

    def whole(self, of_ranks: list[Pieces]) -> dict[str, Tensor]:
        found = {}
        for (prefix, unit), pieces in zip(self.units.items(), zip(*of_ranks, strict=True), strict=True):
            buffer = pieces[0].clone() if unit.plan.inside is None else torch.cat(pieces)
            assert not unit.flat.padding_of(buffer).any(), f"{unit.name}: the padding is not zero"
            for name, piece in zip(unit.flat.names, unit.flat.unflatten(buffer), strict=True):
                found[clean_name(f"{prefix}.{name}" if prefix else name)] = piece
        return found

    def check_nothing_left(self) -> None:
        """No unit gathered, no gathered memory alive, no gradient but the shards'."""
        for unit in self.units.values():
            sharded = unit.plan.inside is not None
            assert unit.state is SHARDED or not sharded, f"{unit.name} is {unit.state} after the step"
            assert not unit.flat.full.untyped_storage().nbytes(), f"{unit.name}: the gathered memory is alive"
            assert not unit.has_gradient, f"{unit.name} keeps an unsharded gradient"
        shard_sizes = {unit.flat.shard.numel() for unit in self.units.values()}
        for storage, numel, role in self.buffers:
            if numel not in shard_sizes:  # a reduced shard is the optimizer's
                assert not storage.nbytes(), f"a buffer of {numel} elements ({role}) was not freed"


def is_a_unit(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or getattr(module, "is_unit", False)


# Torch's own, imported where they are used: that takes seconds


class TorchsFsdp1(Trainer):
    def wrap(self, module: nn.Module, **policy: Any) -> nn.Module:
        from torch.distributed import fsdp

        strategy = fsdp.ShardingStrategy[self.strategy.name]
        cpu = torch.device("cpu")
        return fsdp.FullyShardedDataParallel(module, sharding_strategy=strategy, device_id=cpu, **policy)

    def finish(self, net: Net) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1

        self.fsdp = Fsdp1
        by_hand = any(isinstance(module, Fsdp1) for module in net.modules())
        return self.wrap(net) if by_hand else self.wrap(net, auto_wrap_policy=is_a_unit)

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.model.no_sync()

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return self.model.clip_grad_norm_(max_norm, norm_type)

    def flat(self) -> list[tuple[str, Any]]:
        instances = [(name, m) for name, m in self.model.named_modules() if isinstance(m, self.fsdp)]
        return [(name, m._handle.flat_param) for name, m in instances if m._handle is not None]

    def pieces(self, pick: Pick) -> Pieces:
        return [or_zeros(pick, flat) for _, flat in self.flat()]

    def whole(self, of_ranks: list[Pieces]) -> dict[str, Tensor]:
        found = {}
        for (prefix, flat), parts in zip(self.flat(), zip(*of_ranks, strict=True), strict=True):
            buffer = torch.cat(parts)
            pieces = buffer.split([*flat._numels, buffer.numel() - sum(flat._numels)])
            for name, piece, shape in zip(flat._fqns, pieces, flat._shapes, strict=False):
                found[clean_name(f"{prefix}.{name}" if prefix else name)] = piece.view(shape)
        return found


class TorchsFsdp2(Trainer):
    def wrap(self, module: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        return fully_shard(module, reshard_after_forward=self.strategy is FULL_SHARD)

    def finish(self, net: Net) -> nn.Module:
        from torch.distributed.fsdp import FSDPModule

        if not any(isinstance(module, FSDPModule) for module in net.modules()):
            for module in reversed(list(net.modules())):
                if getattr(module, "is_unit", False):
                    self.wrap(module)
        return self.wrap(net)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return super().clip(max_norm, norm_type).full_tensor()

    def pieces(self, pick: Pick) -> Pieces:
        """With the rows that the last ranks lack."""
        found = []
        for p in self.model.parameters():
            rows: Tensor = or_zeros(pick, p).to_local()
            lacks = -(-len(p) // dist.get_world_size()) - len(rows)
            found.append(torch.cat([rows, rows.new_zeros(lacks, *p.shape[1:])]))
        return found

    def whole(self, of_ranks: list[Pieces]) -> dict[str, Tensor]:
        params, parts = self.model.named_parameters(), zip(*of_ranks, strict=True)
        return {name: torch.cat(part)[: len(p)] for (name, p), part in zip(params, parts, strict=True)}


class TorchsDdp(Trainer):
    def finish(self, net: Net) -> nn.Module:
        return nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.model.no_sync()

    def whole(self, of_ranks: list[Pieces]) -> dict[str, Tensor]:
        return {name.removeprefix("module."): value for name, value in super().whole(of_ranks).items()}


# Training, and comparing two who trained

Record = dict[str, Tensor]  # "step 1, gradient of first.weight", "step 1, loss" ...


def train(trainer: Trainer, case: Case, rank: int = 0, ranks: int = 1) -> Record:
    record: Record = {}
    mine: dict[str, Pieces] = {}
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.02, momentum=0.9)
    numbers = torch.Generator().manual_seed(5)
    for turn in range(case.steps):
        x = torch.randn(MICRO_BATCHES, ROWS, WIDTH, generator=numbers).chunk(ranks, 1)[rank]
        mine[f"step {turn}, loss"] = [case.step(trainer, x, turn).detach().clone()]
        if case.clip is not None:
            record[f"step {turn}, norm"] = trainer.clip(*case.clip)
        for p in trained:  # None counts as zero, for momentum too
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        mine[f"step {turn}, gradient of "] = trainer.pieces(lambda p: p.grad)
        optimizer.step()
        mine[f"step {turn}, "] = trainer.pieces(lambda p: p)
        if case.step is not forward_after_the_backward:
            trainer.check_nothing_left()
        optimizer.zero_grad(case.set_to_none)
    for (title, _), of_ranks in zip(mine.items(), of_all_ranks([*mine.values()], ranks), strict=True):
        if title.endswith("loss"):
            record[title] = torch.stack([loss for (loss,) in of_ranks]).mean()
        else:
            record |= {title + name: value for name, value in trainer.whole(of_ranks).items()}
    return record


def differences(record: Record, reference: Record, tolerance: float) -> list[str]:
    """What differs by more than `tolerance` times the tensor's greatest element."""
    found = [f"{name} is in one record only" for name in record.keys() ^ reference.keys()]
    for name in record.keys() & reference.keys():
        value, expected = record[name], reference[name]
        if value.shape != expected.shape:
            found.append(f"{name} has shape {tuple(value.shape)}, not {tuple(expected.shape)}")
        elif value.numel():
            difference, scale = (value - expected).abs().max().item(), expected.abs().max().item()
            if not difference <= tolerance * scale:
                found.append(f"{name} differs by {difference:.1e} of {scale:.1e}")
    return sorted(found)


# The tests. One launch trains all cases; each case is then a test of its own.


class Run(NamedTuple):
    """How a case is trained.

    Attributes:
        watched: under a dispatch mode, which changes which operations count as modifications for autograd.
    """

    strategy: ShardingStrategy
    schedule: str
    watched: bool = False

    def __str__(self) -> str:
        return f"{self.strategy.name}, {self.schedule}{', watched' if self.watched else ''}"


class Nothing(TorchDispatchMode):
    """Looks on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def watching(buffers: list[Any]) -> Iterator[None]:
    """Hold on to the storage of each buffer, as a backend may: it has to be freed, not only forgotten."""

    def tell(buffer: Tensor, role: str) -> None:
        buffers.append((buffer.untyped_storage(), buffer.numel(), role))

    device.buffer_observers.append(tell)
    try:
        yield
    finally:
        device.buffer_observers.remove(tell)


def train_ours(case: Case, run: Run) -> Record:
    buffers: list[Any] = []
    with watching(buffers), Nothing() if run.watched else contextlib.nullcontext():
        trainer = Ours(case, run.strategy, run.schedule, buffers)
        return train(trainer, case, dist.get_rank(), dist.get_world_size())


EVERYTHING = [
    *(Run(*run) for run in product((FULL_SHARD, SHARD_GRAD_OP), SCHEDULES)),
    *(Run(*run, watched=True) for run in product((FULL_SHARD, SHARD_GRAD_OP), ("sync", "post", "limit deep"))),
    *(Run(NO_SHARD, schedule) for schedule in ("sync", "limit")),
]


def some_of_everything(number: int) -> list[Run]:
    """For each case other schedules, so that neighbours together meet all of them under each strategy."""
    names = [*SCHEDULES, *SCHEDULES][number % len(SCHEDULES) :]
    runs = [
        Run(FULL_SHARD, names[0]),
        Run(FULL_SHARD, names[6], watched=True),
        Run(SHARD_GRAD_OP, names[5]),
        Run(NO_SHARD, names[2]),
    ]
    return [*runs, *runs][number // len(SCHEDULES) % len(runs) :][: len(runs)]


Wrong = dict[str, list[str]]  # by case: what went wrong


def compare(make: Callable[[], Record], reference: Record, tolerance: float, what: object) -> list[str]:
    """What is different in the record that `make` makes, or the end of its traceback."""
    try:
        return [f"{what}: {line}" for line in differences(make(), reference, tolerance)[:3]]
    except Exception:
        return [f"{what}: raised\n{traceback.format_exc(limit=-4)}"]


def against_one_process(runs: list[list[Run]]) -> Wrong:
    """Train every case in the runs given for it. In float64, where nothing but a mistake makes a difference of 1e-9."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    wrong: Wrong = {name: [] for name in CASES}
    for (name, case), runs_of_case in zip(CASES.items(), runs, strict=True):
        reference = train(Trainer(case), case)
        for run in runs_of_case:
            wrong[name] += compare(partial(train_ours, case, run), reference, 1e-9, run)
    return wrong


def together(wrongs: list[Wrong]) -> Wrong:
    """All ranks' findings."""
    return {name: [f"rank {r}, {line}" for r, wrong in enumerate(wrongs) for line in wrong[name]] for name in wrongs[0]}


SELECTIONS = [
    pytest.param((2, slice(0, 2)), id="2"),
    pytest.param((2, slice(2, None)), id="2, others", marks=pytest.mark.wide),
    pytest.param((3, slice(0, 1)), id="3", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=SELECTIONS)
def selection(request: pytest.FixtureRequest) -> Wrong:
    ranks, part = request.param
    runs = [some_of_everything(number)[part] for number in range(len(CASES))]
    return together(launch(against_one_process, ranks, runs, timeout=160))


@pytest.mark.behaviour(4, 18, 20, 21, 26, 27, 29, 43)
@pytest.mark.behaviour(4, 17, 18, 20, 21, 25, 26, 27)
@pytest.mark.parametrize("name", CASES)
def test_a_case_trains_as_one_process_does(selection: Wrong, name: str) -> None:
    assert not selection[name], "\n".join(selection[name])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_case_on_everything(ranks: int) -> None:
    wrong = together(launch(against_one_process, ranks, [EVERYTHING] * len(CASES), timeout=1100))
    assert not any(wrong.values()), "\n".join(line for lines in wrong.values() for line in lines)


# What the FSDP paper and torch's own tests of FSDP care for most
COMPARED_WITH_TORCH = [
    "a row",
    "smaller than N",
    "called twice",
    "unused unit",
    "unused parameters",
    "unused now and then",
    "nested",
    "wrapped by hand",
    "tied in a unit",
    "tied in the root",
    "frozen in the middle",
    "frozen at first",
    "accumulate inside no_sync",
    "accumulate outside no_sync",
    "accumulate both ways",
    "two forwards, one backward",
    "checkpoint around a unit, not reentrant",
    "clip to the 2-norm",
    "clip to the 1-norm",
    "clip to the maximum",
    "clip with unused and frozen",
]


# Where torch's do not compute what one process computes, in 2.13. Ours does in every case.
UNLIKE_OURS: dict[str, dict[str, list[str]]] = {
    "fsdp1": {
        "refuses parameters without dimensions": ["scalars"],
        "finds no tensors in an object": ["output: an object"],
        "asserts that a unit with gradients was in this backward": ["accumulate, then used no more"],
        "gathers no unit for a second backward": [
            "two forwards, two backwards",
            "two forwards, the last one's backward first",
            "one graph, two backwards",
            "autograd.grad first",
            "a loss in the middle",
        ],
        "keeps the root gathered over the optimizer's step, and computes with it": [
            "no_grad in between",
            "inference_mode in between",
            "no_grad and another way",
            "forward after",
        ],
        "keeps its state": ["backward raises"],
        "takes the nested backward's end for the unit's": ["checkpoint inside a unit, reentrant"],
    },
    "fsdp2": {
        "refuses parameters without dimensions": ["scalars"],
        "fails on the chunks of an empty one": ["empty parameters"],
        "finds no tensors in them": ["output: an object", "output: set"],
        "leaves unsharded parameters to the optimizer (SHARD_GRAD_OP)": [
            "no_grad in between",
            "inference_mode in between",
            "no_grad and another way",
            "forward after",
        ],
        "keeps its state": ["backward raises"],
        "takes the first nested backward's end for the unit's": ["checkpoint twice around one unit"],
    },
    "ddp": {
        "decides in forward": ["forward inside no_sync"],
        "reduces once per forward": [
            "two forwards, two backwards",
            "two forwards, the last one's backward first",
            "one graph, two backwards",
            "a loss in the middle",
            "checkpoint inside a unit, reentrant",
            "checkpoint twice around one unit",
            *(name for name in CASES if re.fullmatch("checkpoint (around (?!the model)|and).*, reentrant", name)),
        ],
        "keeps its state": ["backward raises"],
    },
}


def unlike_ours(kind: str) -> list[str]:
    return [name for names in UNLIKE_OURS[kind].values() for name in names]


def train_torchs(kind: type[Trainer], case: Case, strategy: ShardingStrategy) -> Record:
    return train(kind(case, strategy), case, dist.get_rank(), dist.get_world_size())


TORCHS: list[tuple[str, type[Trainer], ShardingStrategy]] = [
    ("fsdp1", TorchsFsdp1, FULL_SHARD),
    ("fsdp1", TorchsFsdp1, SHARD_GRAD_OP),
    ("fsdp2", TorchsFsdp2, FULL_SHARD),
    ("fsdp2", TorchsFsdp2, SHARD_GRAD_OP),
    ("ddp", TorchsDdp, NO_SHARD),
]


def against_torch(names: list[str], dtype: torch.dtype) -> Wrong:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(dtype)
    wrong: Wrong = {name: [] for name in names}
    for name in names:
        case = CASES[name]
        reference = train(Trainer(case), case)
        ours = {
            strategy: train_ours(case, Run(strategy, "limit")) for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD)
        }
        for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD):
            wrong[name] += compare(partial(ours.get, strategy), reference, 1e-5, f"{strategy.name} against one process")
        for kind, trainer, strategy in TORCHS:
            fails = kind == "fsdp1" and case.clip and dtype is torch.float64  # torch takes that norm in float32
            if name not in unlike_ours(kind) and not fails:
                theirs = partial(train_torchs, trainer, case, strategy)
                wrong[name] += compare(theirs, ours[strategy], 1e-6, f"{kind} against {strategy.name}")
    return wrong


@pytest.fixture(scope="module")
def beside_torch() -> Wrong:
    return together(launch(against_torch, 2, COMPARED_WITH_TORCH, torch.float32, timeout=160))


@pytest.mark.wide
@pytest.mark.parametrize("name", COMPARED_WITH_TORCH)
def test_a_case_trains_as_torch_does(beside_torch: Wrong, name: str) -> None:
    assert not beside_torch[name], "\n".join(beside_torch[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (3, torch.float64)])
def test_every_case_trains_as_torch_does(ranks: int, dtype: torch.dtype) -> None:
    wrong = together(launch(against_torch, ranks, list(CASES), dtype, timeout=500))
    assert not any(wrong.values()), "\n".join(line for lines in wrong.values() for line in lines)
