"""Reference answers of lab 12, parameters sharded one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from minifsdp import device
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp2.cut import Cut, Rows
from minifsdp.fsdp2.gather import Gather
from minifsdp.fsdp2.gradients import Gradients
from minifsdp.fsdp2.held import Held, Recorded


@reference(
    "12.1",
    hints=(
        "How long is a shard, if all but the last ones have the same length? Where does the shard of rank r begin, and "
        "what if this is past the end of the parameter?",
        "`rows = -(-length // ranks)`. Both ends of the shard, rank · rows and (rank + 1) · rows, may be past the end "
        "of the parameter: bound each by `length`. `whole.narrow(dim, start, length)` is a view; a length of 0 is "
        "allowed.",
    ),
    forbids=(Cut.of, Cut.local),
)
def cut(whole: Tensor, ranks: int, rank: int, dim: int = 0) -> Tensor:
    """A rank's shard of a parameter, as a view."""
    length = whole.shape[dim]
    rows = -(-length // ranks)
    if dim and length % ranks:
        raise ValueError(f"{length} rows along dimension {dim} do not make {ranks} equal shards")
    start, end = min(rank * rows, length), min((rank + 1) * rows, length)
    return whole.narrow(dim, start, end - start)


@reference(
    "12.2",
    hints=(
        "`gathered.view(ranks, -1)` has a row for each rank. `split(sizes)` divides a row into columns.",
        "A shard may have fewer elements than its column: copy it to the beginning, `column[: piece.numel()]`, viewed "
        "in the shard's shape. `copy_` casts. There is one more column than there are shards.",
    ),
    forbids=(Gather.start, Rows.local),
)
def copy_in(gathered: Tensor, pieces: Sequence[Tensor], sizes: Sequence[int], ranks: int, rank: int) -> Tensor:
    """Pack this rank's shards into its row of the gather's buffer; returns the row [S]."""
    row = gathered.view(ranks, -1)[rank]
    for column, piece in zip(row.split(sizes), pieces, strict=False):
        column[: piece.numel()].view(piece.shape).copy_(piece)
    return row


@reference(
    "12.3",
    hints=(
        "`gathered.view(ranks, -1).split(sizes, 1)` gives a column [N, size] for each parameter: its row r is the "
        "shard of rank r. Which part of the parameter is this? See 12.1.",
        "`whole.chunk(ranks, dim)` gives views of the parameter, in rank order; there may be fewer than N of them. Zip "
        "them with the rows of the column, and copy `row[: part.numel()].view(part.shape)` to each.",
    ),
    forbids=(Gather.copy_out, Cut.whole, Cut.by_rank, Rows.columns),
)
def copy_out(gathered: Tensor, params: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[int], ranks: int) -> None:
    """Give whole parameters their values from a buffer in rank order."""
    columns = gathered.view(ranks, -1).split(list(sizes), 1)
    for whole, dim, column in zip(params, dims, columns, strict=False):
        for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
            part.copy_(row[: part.numel()].view(part.shape))


@reference(
    "12.4",
    hints=(
        "This reverses the copy out: row r of a column gets chunk r of the gradient. The rest of the column is "
        "padding, and a reduction reads it.",
        "Fill `packed` with zeros first. Then, for each gradient and its column [N, size], zip `gradient.chunk(ranks, "
        "dim)` with the rows, and copy each chunk to the beginning of its row.",
    ),
    forbids=(Gradients.pack, Gradients._by_rank, Cut.by_rank, Rows.columns),
)
def chunk_cat(packed: Tensor, gradients: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[int]) -> None:
    """Pack whole gradients into a buffer [N, S] in rank order, zeros between them."""
    packed.zero_()
    for gradient, dim, column in zip(gradients, dims, packed.split(list(sizes), 1), strict=False):
        for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
            row[: part.numel()].view(part.shape).copy_(part)


@reference(
    "12.5",
    hints=(
        "There are two streams: the reader's is current in `keep`, the owner's in `give_back`. What must be in the "
        "owner's queue before the memory may be written to again?",
        "`keep` records an event on the current stream, and stores it with the buffer. For each of them, `give_back` "
        "calls `wait_event` of the current stream, then `buffer.untyped_storage().resize_(0)`; then it forgets all of "
        "them. Nothing makes the host wait.",
    ),
    forbids=(Held.keep, Held.give_back, Held.clear, Recorded.keep),
)
def hold() -> tuple[Callable[[Tensor], None], Callable[[torch.device], None]]:
    """Return `keep` and `give_back`, which share what is kept."""
    kept: list[tuple[Tensor, Any]] = []

    def keep(buffer: Tensor) -> None:
        kept.append((buffer, device.current_stream(buffer.device).record_event()))

    def give_back(on: torch.device) -> None:
        for buffer, read in kept:
            device.current_stream(on).wait_event(read)
            buffer.untyped_storage().resize_(0)
        kept.clear()

    return keep, give_back


@reference(
    "12.6",
    hints=(
        "A column is as wide as the largest shard, the first rank's. The condition for the gap is in bytes, but you "
        "return numbers of elements.",
        "`ceil(shape[dim] / ranks)` times the product of the other lengths, for each. Then with `step = max(1, 16 // "
        "itemsize)` the gap is `-sum(sizes) % step`.",
    ),
    forbids=(Rows.__init__,),
)
def columns_of(shapes: Sequence[Sequence[int]], dims: Sequence[int], ranks: int, itemsize: int) -> list[int]:
    """Elements of each parameter in a rank's row, and of the gap that makes the row a multiple of 16 bytes."""
    sizes = []
    for shape, dim in zip(shapes, dims, strict=True):
        rows = -(-shape[dim] // ranks)
        sizes.append(rows * prod(shape[:dim]) * prod(shape[dim + 1 :]))
    return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
