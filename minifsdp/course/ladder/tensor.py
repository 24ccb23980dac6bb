"""The bytes of tensor parallelism: arithmetic, no tensors.

As in closed_form.py. Of a parameter that is cut a rank has ceil(d / t) rows or columns, the last ranks fewer; norms,
positions and the biases of layers by rows are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from minifsdp.course.ladder import closed_form
from minifsdp.course.ladder.closed_form import Bytes, Setting
from minifsdp.course.ladder.per_parameter import Buffers, Shape
from minifsdp.course.ladder.per_parameter import fsdp2 as fsdp2_bytes

Cut = Callable[[Shape, int, int], Shape]
"""From a parameter's shape, the number of ranks and a rank to the shape of its part."""


@dataclass(frozen=True)
class StepBytes(Bytes):
    """As `Bytes`, and what forward leaves for backward."""

    activations: int
    """Bytes from the end of forward, with the loss, without the batch."""


def whole(shape: Shape, ranks: int, rank: int) -> Shape:
    """On every rank."""
    return shape


def rows(shape: Shape, ranks: int, rank: int) -> Shape:
    """[d, ...] -> [d / t, ...], as `torch.chunk` cuts."""
    share = -(-shape[0] // ranks)
    return (min(max(shape[0] - rank * share, 0), share), *shape[1:])


def columns(shape: Shape, ranks: int, rank: int) -> Shape:
    """[out, in] -> [out, in / t]."""
    return (shape[0], *rows(shape[1:], ranks, rank))


def fused(shape: Shape, ranks: int, rank: int) -> Shape:
    """[3 h, ...] -> [3, h / t, ...]: of q, k and v the same rows."""
    return (3, *rows((shape[0] // 3, *shape[1:]), ranks, rank))


ROOT: list[Cut] = [rows, whole, whole, whole, rows, rows]
"""embed, position, weight and bias of norm, of head."""

BLOCK: list[Cut] = [whole, whole, whole, whole, fused, fused, columns, whole, rows, rows, columns, whole]
"""Weight and bias of norm1, norm2, qkv, out, up, down."""


def parts(units: Sequence[Sequence[Shape]], ranks: int, rank: int) -> list[list[Shape]]:
    """Shapes of a rank's parts, unit by unit, the root's first."""
    cuts = [ROOT, *[BLOCK] * (len(units) - 1)]
    return [[cut(p, ranks, rank) for cut, p in zip(*each, strict=True)] for each in zip(cuts, units, strict=True)]


def tp(units: Sequence[Sequence[Shape]], setting: Setting) -> Bytes:
    """Parameters, gradients and optimizer state of a rank's parts."""
    numels = [prod(shape) for unit in parts(units, setting.ranks, setting.rank) for shape in unit]
    return closed_form.ddp(numels, setting)


def tp_sequence(units: Sequence[Sequence[Shape]], setting: Setting, stream: int) -> Bytes:
    """With sequence parallelism, where gradients of norms and positions are summed after backward, in a buffer.

    Args:
        units, setting: as for `fsdp2`.
        stream: bytes of the activations between two layers, whole: a reduce-scatter may receive parts of them.
    """
    held = tp(units, setting)
    root, *blocks = parts(units, setting.ranks, setting.rank)
    norms = [p for block in blocks for p in block[:4]]
    summands = setting.itemsize * sum(map(prod, [*root[1:4], *norms]))  # root: positions and the last norm
    after = setting.itemsize * sum(map(prod, [*root[:2], *blocks[0][:2]]))  # the last reduction is of qkv's input
    peak = max(held.gradients + summands, held.gradients - after + received(stream, setting.ranks, setting))
    return replace(held, gradients_peak=peak)


def received(size: int, ranks: int, setting: Setting) -> int:
    """Bytes that a reduce-scatter of `size` bytes receives in a buffer of its own."""
    return size - size // ranks if setting.by_all_to_all else 0


def tp_fsdp2(
    units: Sequence[Sequence[Shape]], head: int, setting: Setting, tp_ranks: int, stream: int, limit: int
) -> Bytes:
    """FSDP2 outside, with sequence parallelism inside, on a mesh [N / t, t].

    Args:
        units, head, setting: as for `fsdp2`.
        tp_ranks: t.
        stream: as for `tp_sequence`, of the batch that a tensor-parallel group has.
        limit: k of the limiter.
    """
    outer = replace(setting, ranks=setting.ranks // tp_ranks, rank=setting.rank // tp_ranks)
    root, *blocks = mine = parts(units, tp_ranks, setting.rank % tp_ranks)
    arriving = received(stream, tp_ranks, setting)
    inside = arriving - setting.itemsize * sum(map(prod, blocks[0][:2]))  # the last is qkv's, before norm1's gradients
    held = fsdp2_bytes(mine, head, outer, ahead=limit - 1, limited=True, holds=False, inside=inside)
    begins = setting.itemsize * sum(map(prod, root[-2:])) + arriving + Buffers.of(blocks[-1], outer).whole
    return replace(held, gradients_peak=max(held.gradients_peak, begins))  # the head's, which counts with one block
