"""Reference answers of lab 12, per-parameter sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minifsdp import device, private
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp2.cut import Cut, Rows


@reference(
    "12.1",
    hints=(
        "All pieces but the last are equally long: ceil(d / N) rows. Where does the piece of `rank` begin? Where does it "
        "end if the parameter ends first?",
        "`rows = -(-d // ranks)`; the piece begins at `min(rank * rows, d)` and ends at `min((rank + 1) * rows, d)`. "
        "`whole.narrow(0, start, length)` is a view, with `length` 0 too.",
    ),
    forbids=(Cut.of, Cut.local),
)
def cut(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's piece of a parameter."""
    rows = -(-whole.shape[0] // ranks)
    start = min(rank * rows, whole.shape[0])
    length = min(rows, whole.shape[0] - start)
    return whole.narrow(0, start, length)


@reference(
    "12.2",
    hints=(
        "A row has a column for each parameter, wide enough for the longest piece: ceil(d / N) rows of it. How many "
        "bytes are missing to the next multiple of 16?",
        "`size = ceil(shape[0] / ranks) * prod(shape[1:])` for each; the gap is `-sum(sizes) % (16 // itemsize)` "
        "elements, since 16 is a multiple of every itemsize here.",
    ),
    forbids=(Rows.__init__,),
)
def plan_row(shapes: Sequence[torch.Size], ranks: int, itemsize: int) -> list[int]:
    """Elements of each column of a row, and of its gap."""
    sizes = [-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes]
    return [*sizes, -sum(sizes) % (16 // itemsize)]


@reference(
    "12.3",
    hints=(
        "Cut the row into its columns. A piece may be shorter than its column: which part of the column is written?",
        "`for column, piece in zip(row.split(sizes), pieces): column[: piece.numel()].copy_(piece.flatten())`; `zip` "
        "leaves the gap alone, and `copy_` casts.",
    ),
    forbids=(private.foreach_copy,),
)
def copy_in(row: Tensor, pieces: Sequence[Tensor], sizes: list[int]) -> None:
    """Pack this rank's pieces into its row."""
    for column, piece in zip(row.split(sizes), pieces, strict=False):
        column[: piece.numel()].copy_(piece.view(-1))


@reference(
    "12.4",
    hints=(
        "As a table [N, S] the buffer has a row for each rank and a column block for each parameter. Which part of the "
        "table belongs to one parameter, and in which order does its memory want it?",
        "`columns = gathered.view(ranks, -1).split(sizes, dim=1)`; column block i has shape [N, size], and "
        "`memories[i].view(ranks, -1)` too: `copy_` one to the other.",
    ),
    forbids=(private.split_copy,),
)
def copy_out(gathered: Tensor, memories: Sequence[Tensor], sizes: list[int], ranks: int) -> None:
    """From rank order to parameter order."""
    columns = gathered.view(ranks, sum(sizes)).split(sizes, dim=1)
    for memory, column in zip(memories, columns, strict=False):
        memory.view(ranks, -1).copy_(column)


@reference(
    "12.5",
    hints=(
        "The way back of copy-out: gradient i fills columns of the table [N, S'], rank r's rows of it in row r. What "
        "stands where a rank has fewer rows than the longest piece, or a gradient is None?",
        "Zero `packed` first. Then for every rank and parameter: take the rank's rows of the gradient with `cut`, flat, "
        "and write them to the beginning of `packed.view(ranks, -1)[rank]`'s column.",
    ),
    forbids=(private.chunk_cat,),
)
def pack(
    gradients: Sequence[Tensor | None],
    packed: Tensor,
    sizes: list[int],
    ranks: int,
    cut: Callable[[Tensor, int, int], Tensor],
) -> None:
    """Concatenate the ranks' rows of all gradients."""
    packed.zero_()
    for rank, row in enumerate(packed.view(ranks, sum(sizes))):
        for column, gradient in zip(row.split(sizes), gradients, strict=False):
            if gradient is not None:
                piece = cut(gradient, rank, ranks).reshape(-1)
                column[: piece.numel()].copy_(piece)


@reference(
    "12.6",
    hints=(
        "Two streams: one owns the buffer and allocates the next one, the other reads it last. `keep` runs on the "
        "reader's, `give_back` on the owner's. What must the owner's queue hold before the memory is used again?",
        "`keep` appends the buffer and `device.current_stream(where).record_event()` to a list. `give_back` calls "
        "`device.current_stream(where).wait_event(event)` for each, then `resize_(0)` on its storage, and clears the "
        "list.",
    ),
)
def hold(where: torch.device) -> tuple[Callable[[Tensor], None], Callable[[], None]]:
    """Two functions: keep a buffer until its owner's stream waits for its last reader; give back what is kept."""
    kept: list[tuple[Tensor, Any]] = []

    def keep(buffer: Tensor) -> None:
        kept.append((buffer, device.current_stream(where).record_event()))

    def give_back() -> None:
        for buffer, read in kept:
            device.current_stream(where).wait_event(read)
            buffer.untyped_storage().resize_(0)
        kept.clear()

    return keep, give_back
