"""The bytes of FSDP2, whose parameters are sharded one by one: arithmetic, no tensors.

As in data_parallel.py. Of a parameter [d, ...] on N ranks each has ceil(d / N) rows in every buffer, and keeps those
that there are: the last ranks have fewer. A rank's share of a buffer is a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from minifsdp.cost.data_parallel import Bytes, Setting

Shape = tuple[int, ...]
ALIGNMENT = 16


@dataclass(frozen=True)
class Buffers:
    """Bytes of a unit's buffers on one rank.

    Attributes:
        whole: its parameters, in rank order or in parameter order.
        leaves: its gradients as autograd makes them, without padding.
        packed: its gradients in rank order.
        reducing: what a reduction needs beside the packed gradients.
        mean: what it leaves in `.grad`.
    """

    whole: int
    leaves: int
    packed: int
    reducing: int
    mean: int

    @staticmethod
    def of(shapes: Sequence[Shape], setting: Setting) -> Buffers:
        used = setting.itemsize * sum(-(-shape[0] // setting.ranks) * prod(shape[1:]) for shape in shapes)
        share = -(-used // ALIGNMENT) * ALIGNMENT
        whole = setting.ranks * share
        leaves = setting.itemsize * sum(map(prod, shapes))
        return Buffers(whole, leaves, whole, setting.reducing(whole), share)


def fsdp2(
    units: Sequence[Sequence[Shape]],
    head: int,
    setting: Setting,
    ahead: int,
    limited: bool,
    holds: bool,
    reshard: bool = True,
    inside: int = 0,
) -> Bytes:
    """Parameters, gradients and optimizer state sharded, a parameter at a time.

    Args:
        units: shapes of each parameter, unit by unit, the root's first.
        head: how many of the root's parameters, its last ones, are used after all other units.
        setting: that of all rungs; `rank` matters here.
        ahead: how many units are gathered ahead of the one that computes, in forward and in backward.
        limited: a free lets another be gathered, so that `ahead + 1` are whole or on their way at all times.
        holds: buffers that another stream reads last are kept until their own stream allocates the next.
        reshard: units are freed after forward; otherwise no backward gathers, and the limit, which counts the units
            that will be freed, lets forward gather all of them at once.
        inside: what a unit's own last collective in backward receives, less the gradients that come after it.
    """
    local = [kept_by_rank(shape, setting) for unit in units for shape in unit]
    root, *blocks = [Buffers.of(unit, setting) for unit in units]
    early = setting.itemsize * sum(map(prod, units[0][len(units[0]) - head :]))
    peak = max(level.bytes for level in gradient_moments(root, blocks, early, ahead, limited, holds, reshard, inside))
    whole = [block.whole for block in blocks]
    return Bytes(
        setting.itemsize * sum(local),
        sum(unit.mean for unit in (root, *blocks)),
        setting.optimizer.bytes(local),
        root.whole + (max(whole, default=0) if reshard else sum(whole)),
        peak,
    )


def kept_by_rank(shape: Shape, setting: Setting) -> int:
    """Elements that the rank keeps of a parameter."""
    rows = -(-shape[0] // setting.ranks)
    return min(max(shape[0] - setting.rank * rows, 0), rows) * prod(shape[1:])


class Level(NamedTuple):
    """Bytes of gradients, and of gathers under way, at a moment of a step.

    Attributes:
        when: "forward", and in backward "begin", "inside" and "end", of a unit.
        unit: its number: 0 is the root, whose moments in backward come after all others, but for its head's.
        bytes: including the unit's own gradients, if backward is inside, all of them.
    """

    when: str
    unit: int
    bytes: int


def gradient_moments(
    root: Buffers,
    blocks: Sequence[Buffers],
    early: int,
    ahead: int,
    limited: bool,
    holds: bool,
    reshard: bool = True,
    inside: int = 0,
) -> Iterator[Level]:
    """The moments of a step at which there may be most."""
    window = ahead + limited if reshard or not limited else len(blocks)
    yield Level("forward", 0, root.whole + _whole(blocks[: max(1, window)]))
    for place in range(len(blocks)):
        yield Level("forward", place + 1, _whole(blocks[place : place + max(ahead + 1, window)]))
    means = under_way = 0
    backwards = blocks[::-1]
    again = backwards if reshard else []  # what backward gathers
    for place, unit in enumerate(backwards):
        number = len(blocks) - place
        # not copied out yet
        yield Level("begin", number, early + means + under_way + _whole(again[place : place + 1 + ahead]))
        ahead_of_it = _whole(again[place + 1 : place + 1 + ahead])
        yield Level("inside", number, early + means + under_way + unit.leaves + inside + ahead_of_it)
        held = unit.packed if holds else 0
        gathers = _whole(again[place + 1 : place + 1 + window])
        # freed, its gradient complete
        yield Level("end", number, early + means + under_way + unit.leaves + held + gathers)
        if place:  # the reduction before it is waited for
            means += backwards[place - 1].mean
        # packed
        yield Level("end", number, early + means + unit.leaves + unit.packed + held + gathers)
        under_way = unit.packed + unit.reducing
        yield Level("end", number, early + means + under_way + gathers)
    yield Level("inside", 0, root.leaves + means + under_way)
    means = sum(block.mean for block in blocks)
    yield Level("end", 0, root.leaves + root.packed + means)
    yield Level("end", 0, root.packed + root.reducing + means)


def _whole(units: Sequence[Buffers]) -> int:
    return sum(unit.whole for unit in units)
