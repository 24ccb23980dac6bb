"""The bytes that every rung must hold, from plain numbers: arithmetic, no tensors.

It shares no code with what it predicts. Sizes are elements of parameters (Ψ their sum), N is the number of ranks, and
all model state is of one item size. The root unit has the parameters of no other unit; the other units are listed in
the order of forward.

    parameters, gradients, optimizer   held between `step()` and `zero_grad()`
    unsharded_peak                     most bytes of gathered parameters at any moment of a step, padding included
    gradients_peak                     most bytes of gradients: in `.grad`, in buckets, unsharded, received, reduced
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

Backward = Literal["none", "pre", "host", "post"]


@dataclass(frozen=True)
class OptimizerState:
    """Bytes of state per element of a parameter, and per parameter (Adam counts its steps in a float32)."""

    per_element: int
    per_tensor: int

    def bytes(self, numels: Sequence[int]) -> int:
        return sum(self.per_element * numel + self.per_tensor for numel in numels)

    def of_sizes(self, sizes: Iterable[int]) -> int:
        """As `bytes`, for parameters of so many bytes each; their states have their dtype."""
        return sum(self.per_element * size // 4 + self.per_tensor for size in sizes)


SGD, MOMENTUM, ADAM, AMSGRAD = OptimizerState(0, 0), OptimizerState(4, 0), OptimizerState(8, 4), OptimizerState(12, 4)


@dataclass(frozen=True)
class Bytes:
    """Bytes on one rank; equal on all ranks where shards are padded to one size."""

    parameters: int
    gradients: int
    optimizer: int
    unsharded_peak: int
    gradients_peak: int


@dataclass(frozen=True)
class Setting:
    """The setting that all rungs share.

    Attributes:
        ranks: N.
        itemsize: bytes per element.
        optimizer: its state.
        by_all_to_all: whether a reduce-scatter receives the others' parts and sums them, as on gloo (gloo.py).
        rank: whose bytes they are; only where parameters are sharded one by one do they differ.
        runs_behind: the host only queues work: buffers that are held are given back later (fsdp2/held.py).
        batch: sequences of a step over all ranks; only activations, and messages of them, depend on it.
        context: their tokens; 0: as many as the model takes.
    """

    ranks: int
    itemsize: int = 4
    optimizer: OptimizerState = ADAM
    by_all_to_all: bool = False
    rank: int = 0
    runs_behind: bool = False
    batch: int = 0
    context: int = 0

    def reducing(self, size: int) -> int:
        """Bytes beside a padded buffer of `size` bytes in its reduction: the mean's shard and the parts received."""
        mean = size // self.ranks
        return size if self.by_all_to_all else mean  # all-to-all: N - 1 received parts as large as the mean's

    def padded(self, numel: int) -> int:
        """Bytes of a buffer of `numel` elements, padded to a multiple of N."""
        return self.itemsize * self.ranks * -(-numel // self.ranks)

    def shard_state(self, buffers: Sequence[int]) -> int:
        """Bytes of optimizer state for a shard of each padded buffer (bytes); an empty root has none."""
        return self.optimizer.bytes([size // self.ranks // self.itemsize for size in buffers if size])


def buckets(numels: Sequence[int], cap_bytes: int, itemsize: int = 4) -> list[int]:
    """Elements per bucket: parameters in reverse, a bucket closed once it has reached the cap."""
    sizes: list[int] = []
    for numel in reversed(numels):
        if not sizes or sizes[-1] * itemsize >= cap_bytes:
            sizes.append(0)
        sizes[-1] += numel
    return sizes


def bucket_numbers(numels: Sequence[int], cap_bytes: int, itemsize: int = 4) -> list[int]:
    """The number of each parameter's bucket."""
    ends = [*accumulate(buckets(numels, cap_bytes, itemsize))]
    return [bisect_left(ends, end) for end in accumulate(reversed(numels))][::-1]


def ddp(numels: Sequence[int], setting: Setting, staging: int = 0) -> Bytes:
    """Everything on every rank; `staging`: the largest bucket (elements) that gradients are copied through, if any."""
    psi = setting.itemsize * sum(numels)
    return Bytes(psi, psi, setting.optimizer.bytes(numels), 0, psi + setting.itemsize * staging)


def padded_buckets(numels: Sequence[int], cap_bytes: int, setting: Setting, apart: Sequence[int] = ()) -> list[int]:
    """Bytes of each of ZeRO's buckets, in the order in which they are reduced.

    Args:
        numels: elements of each parameter, in the model's order.
        cap_bytes: size at which a bucket is closed.
        setting: the ranks that share the state.
        apart: elements of parameters that have buckets of their own, after the others.
    """
    each = [*buckets(numels, cap_bytes, setting.itemsize), *buckets(apart, cap_bytes, setting.itemsize)]
    return [setting.padded(numel) for numel in each]


def zero1(numels: Sequence[int], cap_bytes: int, setting: Setting, apart: Sequence[int] = ()) -> Bytes:
    """Optimizer state sharded: in `step()` gradients pass through one bucket at a time and leave a shard of each.

    Args:
        numels, cap_bytes, setting, apart: as for `padded_buckets`.
    """
    sizes = padded_buckets(numels, cap_bytes, setting, apart)
    kept = accumulate((size // setting.ranks for size in sizes), initial=0)
    psi = setting.itemsize * sum([*numels, *apart])
    peak = psi + max(size + setting.reducing(size) + held for size, held in zip(sizes, kept, strict=False))
    return Bytes(sum(sizes), psi, setting.shard_state(sizes), 0, peak)


def zero2(numels: Sequence[int], cap_bytes: int, setting: Setting, apart: Sequence[int] = ()) -> Bytes:
    """Gradients sharded too: beside the shards, one bucket is being filled and the one before it reduced.

    The peak is that of one backward whose gradients come in the order of buckets; of any other: zero2.py.

    Args:
        numels, cap_bytes, setting, apart: as for `padded_buckets`.
    """
    sizes = padded_buckets(numels, cap_bytes, setting, apart)
    kept = list(accumulate((size // setting.ranks for size in sizes), initial=0))
    under_way = [size + setting.reducing(size) + held for size, held in zip(sizes, kept, strict=False)]
    peak = max(held + following for held, following in zip(under_way, [*sizes[1:], 0], strict=True))
    return Bytes(sum(sizes), kept[-1], setting.shard_state(sizes), 0, peak)


def fsdp(
    units: Sequence[Sequence[int]],
    setting: Setting,
    *,
    reshard_after_forward: bool = True,
    reductions: int | None = 0,
    forward_depth: int | None = 0,
    backward: Backward = "none",
    backward_depth: int | None = 1,
    limit: int | None = None,
    accumulates: bool = False,
    root_is_first: bool = True,
) -> Bytes:
    """All three sharded, parameters whole while a unit computes.

    Args:
        units: elements of each parameter, unit by unit, the root's first.
        reshard_after_forward: True: FULL_SHARD; False: SHARD_GRAD_OP.
        reductions: how many units' reductions may be under way while the next one computes; None: all.
        forward_depth: how many units ahead forward gathers; None: all.
        backward, backward_depth: when and how many units ahead backward gathers; "host": as "pre", but nothing is
            gathered beside the first unit, and nothing computes while it is reduced.
        limit: the most units, besides the root, that may be whole at once.
        accumulates: several backwards before a step: the later ones find all reduced gradients there.
        root_is_first: as for `gradient_levels`.
    """
    root, *blocks = sizes = [setting.padded(sum(unit)) for unit in units]
    held = sum(sizes) // setting.ranks
    whole = sum(blocks)
    if reshard_after_forward:
        whole = most_whole(blocks, forward_depth, backward, backward_depth, limit)
    gradients = [Gradient.of(size, setting) for size in sizes]
    if accumulates:
        gradients = [replace(gradient, kept=0) for gradient in gradients]
    peak = gradients_peak(gradients, reductions, backward == "host", root_is_first) + (held if accumulates else 0)
    unsharded = root + whole if setting.ranks > 1 else 0  # one rank's shard is the unsharded parameters
    return Bytes(held, held, setting.shard_state(sizes), unsharded, peak)


def accumulated(units: Sequence[Sequence[int]], setting: Setting, itemsize: int) -> int:
    """Bytes of unsharded gradients between backwards inside `no_sync`: all of them.

    Args:
        units: as for `fsdp`.
        itemsize: bytes per element in the dtype of the reduction or of gathered parameters, whichever is larger.
    """
    return sum(setting.padded(sum(unit)) for unit in units) // setting.itemsize * itemsize


def most_whole(
    blocks: Sequence[int],
    forward_depth: int | None = 0,
    backward: Backward = "none",
    backward_depth: int | None = 1,
    limit: int | None = None,
) -> int:
    """The most bytes of units, besides the root, that are whole at once; arguments as for `fsdp`."""
    return _most_whole(blocks, forward_depth, backward, backward_depth, len(blocks) if limit is None else limit)


def _most_whole(
    blocks: Sequence[int], forward_depth: int | None, backward: Backward, backward_depth: int | None, cap: int
) -> int:
    """Units gathered ahead stand beside the one that computes, except with POST, which gathers after the free."""
    every = len(blocks)
    ahead = every if forward_depth is None else forward_depth
    behind = 0 if backward == "none" else every if backward_depth is None else backward_depth
    forward = _window(blocks, min(1 + ahead, cap))
    if backward in ("host", "post"):  # nothing is gathered beside the first unit of backward
        beside = 1 + behind if backward == "host" else max(1, behind)
        return max(forward, *blocks[-1:], _window(blocks[:-1], min(beside, cap)))
    return max(forward, _window(blocks, min(1 + behind, cap)))


def _window(sizes: Sequence[int], k: int) -> int:
    """The largest sum of `k` neighbours."""
    k = min(k, len(sizes))
    return max((sum(sizes[i : i + k]) for i in range(len(sizes) - k + 1)), default=0)


@dataclass(frozen=True)
class Gradient:
    """Bytes of one unit's gradient on its way: unsharded, then what its reduction needs beside it, then in `.grad`."""

    unsharded: int
    reducing: int
    kept: int

    @staticmethod
    def of(size: int, setting: Setting) -> Gradient:
        """Of a flat parameter of `size` bytes, padded; one rank's gradient is its mean, and stays where it is."""
        return Gradient(size, setting.reducing(size) if setting.ranks > 1 else 0, size // setting.ranks)


def gradients_peak(
    units: Sequence[Gradient], reductions: int | None, first_alone: bool = False, root_is_first: bool = True
) -> int:
    """The peak over backward; arguments as for `gradient_levels`."""
    levels = gradient_levels(units, reductions, first_alone, root_is_first)
    return max(units[0].unsharded, *(max(each) for each in levels))


def gradient_levels(
    units: Sequence[Gradient], reductions: int | None, first_alone: bool = False, root_is_first: bool = True
) -> Iterator[tuple[int, int]]:
    """Of each unit in the order of backward, bytes when its gradient is complete, and when its reduction has begun.

    Args:
        units: the root's first, then the others in the order of forward.
        reductions: as for `fsdp`.
        first_alone: whether backward always waits for its first reduction at once.
        root_is_first: the root's unsharded gradient is always there, because the head's is the first of all; if not, as
            in a pipeline's stages before the last, it is made after the others.
    """
    root, *blocks = units
    kept, first = 0, root.unsharded if root_is_first else 0
    under_way: list[Gradient] = []
    for unit in reversed(blocks):
        complete = first + sum(u.unsharded + u.reducing for u in under_way) + kept + unit.unsharded
        most = len(under_way) if reductions is None else max(1, reductions) - 1
        kept += _finish(under_way, most)  # the oldest are waited for
        begun = first + sum(u.unsharded + u.reducing for u in under_way) + kept
        yield complete, begun + unit.unsharded + unit.reducing
        under_way.append(unit)
        if reductions == 0 or (first_alone and unit is blocks[-1]):
            kept += _finish(under_way, 0)
    complete = root.unsharded + sum(u.unsharded + u.reducing for u in under_way) + kept
    if reductions is not None:
        kept += _finish(under_way, max(1, reductions) - 1)
    yield complete, root.unsharded + root.reducing + sum(u.unsharded + u.reducing for u in under_way) + kept


def _finish(under_way: list[Gradient], most: int) -> int:
    """Wait for the oldest until `most` are left; return the bytes that this leaves in `.grad`."""
    done = under_way[: max(0, len(under_way) - most)]
    del under_way[: len(done)]
    return sum(unit.kept for unit in done)
