"""ZeRO-2's gradients during a backward: what its buckets, taken in their order, do with each; arithmetic, no tensors.

As in data_parallel.py, whose closed form this is as long as gradients come in the order of buckets. A gradient that
comes earlier stays in `.grad` until its bucket is filled or next to be filled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minifsdp.cost.data_parallel import Setting
from minifsdp.cost.model import Model

_LAYERS = ("head", "norm", "down", "up", "norm2", "out", "qkv", "norm1", "position", "embed")
"""In the order in which backward comes to their parameters, inside a unit."""


@dataclass(frozen=True)
class Arrival:
    """A gradient that is complete.

    Attributes:
        name: of its parameter, without the block's name.
        size: its bytes.
        bucket: number of its bucket.
    """

    name: str
    size: int
    bucket: int


@dataclass(frozen=True)
class Level:
    """Bytes of gradients around an arrival.

    Attributes:
        name: as of the arrival; empty: the end of backward.
        made: bytes of the gradients that have come, with this one.
        most: bytes while it is put into its bucket, and buckets are reduced.
        left: bytes after that.
    """

    name: str
    made: int
    most: int
    left: int


def arrivals(stage: Model, itemsize: int, buckets: Sequence[int]) -> list[Arrival]:
    """All gradients of a stage, in the order of backward.

    Args:
        stage: a rank's part of it.
        itemsize: bytes per element.
        buckets: of each of its parameters, in their order in the model, the number of its bucket.
    """
    names, sizes = [name for name, _ in stage.named], [itemsize * numel for numel in stage.parameters]
    every = [*map(Arrival, names, sizes, buckets)]
    before = len(stage.root) - stage.head
    ends = [before, *(before + sum(map(len, stage.blocks[: i + 1])) for i in range(len(stage.blocks))), len(every)]
    units = [every[first:last] for first, last in zip([0, *ends], ends, strict=False)]
    return [each for unit in reversed(units) for each in sorted(unit, key=_place)]


def _place(arrival: Arrival) -> int:
    return _LAYERS.index(arrival.name.partition(".")[0])


def levels(
    arriving: Sequence[Arrival], sizes: Sequence[int], members: Counter[int], setting: Setting, adds: bool
) -> Iterator[Level]:
    """Around each arrival, and at the end of backward, which reduces what is left.

    Args:
        arriving: the gradients that this backward makes.
        sizes: bytes of each bucket, padded.
        members: how many parameters each has, some perhaps of another stage.
        setting: the ranks that share them.
        adds: to the shards of an earlier backward.
    """
    queue = _Queue(sizes, members.copy(), setting, adds)
    made = 0
    for each in arriving:
        made += each.size
        queue.take(each)
        yield Level(each.name, made, queue.most, queue.level)
        queue.most = queue.level
    queue.end()
    yield Level("", made, queue.most, queue.level)


class _Queue:
    """The buckets in one backward, as Zero2Optimizer has them.

    Attributes:
        missing: of each bucket, how many gradients have not come.
        early: of buckets whose turn has not come, bytes that are in `.grad`.
        filling: bytes of the buffers of the first two that are not reduced yet.
        reducing: bytes of the one that is being reduced, and of what its reduction needs.
        kept: bytes of means.
        most: of all these at once.
    """

    def __init__(self, sizes: Sequence[int], missing: Counter[int], setting: Setting, adds: bool) -> None:
        self.sizes, self.missing, self.setting, self.adds = sizes, missing, setting, adds
        self.kept = sum(sizes) // setting.ranks if adds else 0
        self.early: dict[int, int] = {}
        self.filling: dict[int, int] = {}
        self.head = self.reducing = self.mean = 0
        self.most = self.level

    @property
    def level(self) -> int:
        return self.kept + self.reducing + sum(self.filling.values()) + sum(self.early.values())

    def take(self, arrival: Arrival) -> None:
        """Put a gradient into its bucket, and reduce the buckets that are complete."""
        bucket = arrival.bucket
        self.missing[bucket] -= 1
        if bucket > self.head + 1:
            self.early[bucket] = self.early.get(bucket, 0) + arrival.size
            return
        (self.fill if bucket == self.head else self.fill_next)(bucket)
        while self.head < len(self.sizes) and not self.missing[self.head]:
            self.reduce()
            if self.head + 1 in self.early:
                self.fill_next(self.head + 1)

    def end(self) -> None:
        """Reduce the buckets that have not got all gradients."""
        while self.head < len(self.sizes):
            self.reduce()
        self.finish()

    def fill(self, bucket: int) -> None:
        """Make its buffer, if there is none, and put into it what has come early."""
        self.filling[bucket] = self.sizes[bucket]
        self.most = max(self.most, self.level)
        self.early.pop(bucket, None)

    def fill_next(self, bucket: int) -> None:
        """As `fill`, of the one after the first: with two buffers being filled, none is reduced."""
        self.fill(self.head)
        self.finish()
        self.fill(bucket)

    def reduce(self) -> None:
        """Begin to reduce the first bucket, once the one before it is reduced."""
        self.fill(self.head)
        self.finish()
        size = self.filling.pop(self.head)
        self.reducing, self.mean = size + self.setting.reducing(size), size // self.setting.ranks
        self.most = max(self.most, self.level)
        self.head += 1

    def finish(self) -> None:
        """The bucket is reduced; its mean is kept, or added to that of an earlier backward."""
        self.kept += 0 if self.adds else self.mean
        self.reducing = self.mean = 0
