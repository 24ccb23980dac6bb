"""Exercise 12.2: Copy in."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minifsdp.course.workshop.checking import AnswerError, check, describe, same
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp2.cut import Rows
from minifsdp.fsdp2.gather import Gather

from .shared import (
    FIRST_DTYPE,
    NARROWED,
    POISON,
    SPECIAL,
    expect,
    is_narrowed,
    layout,
    mixed,
    named,
    of_tensors,
    packed_by_rank,
    packed_tight,
    pieces_of,
    shares_memory,
    special_values,
    wholes_of,
)


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
    """Pack this rank's shards into its row of the gather buffer. Autograd is off.

    Args:
        gathered: the buffer [N * S], uninitialized, in the dtype of the computation.
        pieces: this rank's shard of each parameter, contiguous and without padding. A shard may be empty, or have a
            different dtype. The shards belong to the optimizer and must not change.
        sizes: the widths of the columns, in elements: one for each parameter, then that of the gap. Their sum is S.
        ranks, rank: N, and this rank.

    Returns:
        Row `rank` of the buffer, as a view [S]. Each shard is at the beginning of its column, in row-major order. Other
        rows are untouched; the unused places of this row may hold any values.
    """
    row = gathered.view(ranks, -1)[rank]
    for column, piece in zip(row.split(sizes), pieces, strict=False):
        column[: piece.numel()].view(piece.shape).copy_(piece)
    return row


@check("12.2")
def check_copy_in(answer, variant):
    """Each shard at the beginning of its column, in this rank's row and nowhere else; the row goes into the gather."""
    for (ranks, group, gap, dtype), is_mixed in mixed(variant):
        wholes = wholes_of(group, variant, of_tensors(is_mixed, dtype))
        sizes, starts = layout(group, ranks, gap)
        wanted = packed_by_rank(wholes, group, ranks, gap, dtype, POISON)
        tight = packed_tight(wholes, group, ranks, gap, dtype, POISON)
        for rank in range(ranks):
            packed_row(answer, (ranks, rank), group, wholes, sizes, starts, wanted, tight)

    gathered = torch.zeros(2 * (len(SPECIAL) + 2))
    with torch.no_grad():
        answer(gathered, [SPECIAL.bfloat16()], [len(SPECIAL), 2], 2, 1)
    special_values(gathered.view(2, -1)[1, : len(SPECIAL)], SPECIAL.bfloat16().float())


def packed_row(answer, place, group, wholes, sizes, starts, wanted, tight):
    ranks, rank = place
    where = f"({named(group, ranks)}, {str(wanted.dtype).removeprefix('torch.')})"
    gathered = torch.full((wanted.numel(),), POISON, dtype=wanted.dtype)
    pieces = [pieces_of(whole, ranks, dim)[rank].contiguous() for whole, (_, dim) in zip(wholes, group, strict=True)]
    given, columns, mine = [piece.clone() for piece in pieces], list(sizes), list(pieces)
    with torch.no_grad():
        row = answer(gathered, pieces, columns, ranks, rank)
    buffer = gathered.view(ranks, -1)
    others = [other for other in range(ranks) if other != rank]
    if touched := [other for other in others if bool((buffer[other] != POISON).any())]:
        raise AnswerError(
            f"rank {rank}, the row of rank {touched[0]} {where}: expected it untouched\n"
            "likely slip: rank r packs into row r; the other rows are filled by the collective"
        )
    for (shape, _), start, size, piece in zip(group, starts, sizes, pieces, strict=False):
        column, n = buffer[rank, start : start + size], piece.numel()
        slips = {
            "columns are as wide as the first rank's shard on all ranks: a short shard leaves the end of its column": (
                tight[rank, start : start + n]
            ),
            "nothing has been written here: an assignment to a name copies nothing": torch.full_like(
                column[:n], POISON
            ),
        }
        if 0 < n < size and same(column[size - n :], wanted[rank, start : start + n]):
            slips["padding comes after the shard, not before it"] = column[:n].clone()
        slip = "the elements of a shard go in row-major order to the beginning of its column, in the buffer's dtype"
        if is_narrowed(column[:n], wanted[rank, start : start + n]):
            slip = FIRST_DTYPE if len({each.dtype for each in mine}) > 1 else NARROWED
        expect(
            f"shard of {list(shape)} in the buffer {where}",
            column[:n],
            wanted[rank, start : start + n],
            rank=rank,
            slips=slips,
            slip=slip,
        )
    if not isinstance(row, Tensor) or row.ndim != 1:
        raise AnswerError(f"rank {rank} {where}: expected the row [S], got {describe(row)}")
    expect(
        f"elements of the row {where}",
        row.numel(),
        sum(sizes),
        rank=rank,
        slips={"the gap is sent, too: it makes the row a multiple of 16 bytes": sum(sizes[:-1])},
        slip="all ranks send equally much: the entire row, including padding",
    )
    if not shares_memory(row, gathered) or row.storage_offset() != rank * sum(sizes):
        raise AnswerError(
            f"rank {rank} {where}: expected a view of the buffer's row {rank}, got other memory\n"
            "likely slip: the gather works in place: its input is a part of its output"
        )
    expect(f"shards afterwards {where}", mine, given, rank=rank, slip="the optimizer owns the shards: only read them")
    unchanged = (len(pieces), columns)
    slip = "the lists belong to the caller, who needs them again: take nothing away"
    expect(f"number of shards, and `sizes`, afterwards {where}", unchanged, (len(mine), list(sizes)), slip=slip)
