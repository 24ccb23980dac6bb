"""What several exercises of lab 10b share."""

from collections import Counter
from functools import wraps
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import comm
from minifsdp.course.workshop.checking import AnswerError, on_ranks
from minifsdp.flat_param import FlatParameter, find_parameters

TIED = ["tied.weight", "again.weight"]  # further names of 1.weight


class NamedUnit(NamedTuple):
    """As in the notebook's set-up cell."""

    flat: FlatParameter
    names: list[list[str]]


def make_units(variant, where="cpu", dtype=torch.float32):
    """Three units with padding on 2, 3 and 4 ranks; in the second a weight has three names. Alike on all ranks."""
    torch.manual_seed(variant.seed)
    group = comm.world()
    units = []
    for number in range(3):
        numels = {"weight": (2 + number, variant.size), "bias": (3,)}
        filler = -sum(torch.Size(shape).numel() for shape in numels.values()) % 12 + 1
        shapes = {**numels, "scale": (filler,)}
        module = nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()}).to(where, dtype)
        flat = FlatParameter(find_parameters(module), group.rank(), group.size())
        names = [[f"{number}.{name}"] for name in shapes]
        if number == 1:
            names[0] += TIED
        units.append(NamedUnit(flat, names))
    return units


def has_memory(tensor):
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


class Keep:
    """Copies, and notes what it was shown."""

    def __init__(self):
        self.shown, self.without, self.attached = Counter(), 0, 0

    def __call__(self, whole):
        if not isinstance(whole, torch.Tensor):
            raise AnswerError(f"keep() was given {type(whole).__name__}: expected the parameter's whole value")
        self.shown[tuple(whole.shape)] += 1
        self.attached += whole.requires_grad
        if not has_memory(whole):
            self.without += 1
            return torch.full(whole.shape, torch.nan)
        return whole.detach().clone()


class Refused(str):
    """What an answer was refused for while it ran: an exception would lose all but its first line on the way back."""


def refusing(observe):
    """Let `observe` return what it refuses an answer for."""

    @wraps(observe)
    def observed(*args):
        try:
            return observe(*args)
        except AnswerError as error:
            return Refused(error)

    return observed


def seen_on(ranks, observe, *args, slip):
    """What the ranks have seen, in their order; raises what the first of them has refused the answer for."""
    try:
        seen = on_ranks(ranks, observe, *args, timeout=6, slip=slip)
    except AnswerError as error:
        if "'NoneType' object is not callable" in str(error):
            raise AnswerError(f"{error}\nlikely slip: {KEEPERS}") from error
        raise
    for rank, each in enumerate(seen):
        if isinstance(each, Refused):
            raise AnswerError(f"rank {rank}, {each}")
    return seen


def another_group():
    """All ranks again, in a group that is not the world: its name tells which one an answer has used."""
    return dist.new_group(list(range(comm.world().size())))


class AtOnce(comm.Handle):
    """A collective that is over when it has begun: if nobody waits, it does not write into memory that is freed."""

    __slots__ = ()

    def __init__(self, call, work):
        work.wait()
        super().__init__(call, work)


class Waited:
    """The issues and waits of collectives, in order; refuses those in another group, and those that do not fit."""

    def __init__(self, seen, group):
        self.seen, self.group = seen, group
        self.patches = [patch.object(comm, "Handle", AtOnce), patch.object(comm, "all_gather", self.all_gather)]
        self.gather = comm.all_gather

    def __enter__(self):
        comm.observers.append(self.watch)
        for each in self.patches:
            each.start()

    def __exit__(self, *exc):
        comm.observers.remove(self.watch)
        for each in self.patches:
            each.stop()

    def watch(self, call, phase):
        if call.group != self.group.group_name:
            raise AnswerError(
                f"the group of the {call.op}: expected the one that was given, got another\n"
                "likely slip: `group` need not be the world: with hybrid sharding it is a part of it"
            )
        self.seen.append(f"{phase} {call.op}")
        return NOTHING

    def all_gather(self, output, shard, group):
        ranks = self.group.size()
        if output.dtype != shard.dtype:
            raise AnswerError(
                f"a gather's buffer: expected {shard.dtype} as its shards, got {output.dtype}\n"
                "likely slip: a buffer has the dtype of what is gathered into it, which need not be float32"
            )
        if output.numel() != ranks * shard.numel():
            raise AnswerError(
                f"a gather's buffer: expected {ranks * shard.numel():,} elements for shards {list(shard.shape)}, "
                f"got {output.numel():,}\n"
                "likely slip: "
                + (
                    "a state may have a dimension, and not the shard's shape: compare the shapes"
                    if shard.dim()
                    else "gather what has the shard's shape, whatever its key: `step` is not the only number"
                )
            )
        return self.gather(output, shard, group)


class Nothing:
    def __enter__(self): ...

    def __exit__(self, *exc): ...


NOTHING = Nothing()


def fake_units(variant, rank, dtype=torch.float32):
    """`make_units` as another rank would have it."""

    class FakeGroup:
        def rank(self):
            return rank

        def size(self):
            return variant.ranks

    world, comm.world = comm.world, FakeGroup
    try:
        return make_units(variant, dtype=dtype)
    finally:
        comm.world = world


KEEPERS = "every rank that has a `keep` uses it, whatever its number: test `keep is not None`"


def expect_names(rank, result, wanted, slip):
    """On a rank that keeps; says which names are missing and which are too many, since the rest is of no interest."""
    missing, more = sorted(wanted.keys() - result.keys()), sorted(result.keys() - wanted.keys())
    if missing or more:
        faults = [f"{len(missing)} missing ({', '.join(missing[:6])})"] if missing else []
        faults += [f"{len(more)} too many ({', '.join(map(str, more[:6]))})"] if more else []
        text = f"rank {rank}, names: expected {len(wanted)}, got {', '.join(faults)}"
        raise AnswerError(f"{text}\nlikely slip: {slip}" if slip else text)


LARGE = 2**60 + 1  # no floating-point dtype of torch has it
