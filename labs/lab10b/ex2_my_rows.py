"""Exercise 10b.2: Rows."""

import torch
from torch import Tensor

from minifsdp.checkpoint.sharded_values import shard_value
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference

from .shared import LARGE


@reference(
    "10b.2",
    hints=(
        "ceil(rows / ranks) rows each, counted from the start; a slice that begins beyond the end is empty, and that "
        "is right. A slice is a view: it keeps the memory of the whole.",
        "`size = -(-len(whole) // ranks)`, `first = min(rank * size, len(whole))`, "
        "`whole[first : first + size].clone()`. A tensor of no dimension has no rows, and no `len`.",
    ),
    forbids=(shard_value,),
)
def my_rows(whole: Tensor, rank: int, ranks: int) -> tuple[int, Tensor]:
    """Return the number of a rank's first row, and a copy of its rows.

    Args:
        whole: [rows, ...]; or a scalar, [], which cannot be split: every rank gets all of it, and its first row is 0.
        rank, ranks: the rank, and the number of ranks.

    Returns:
        `(first, rows)`. A rank without rows has `first == len(whole)` and a tensor [0, ...]. The
        result shares no memory with `whole`, and its storage holds only these rows.
    """
    if whole.dim() == 0:
        return 0, whole.clone()
    size = -(-len(whole) // ranks)
    first = min(rank * size, len(whole))
    return first, whole[first : first + size].clone()


VIEW = "likely slip: a slice is a view and keeps the whole tensor's memory: copy it"


@check("10b.2")
def check_my_rows(answer, variant):
    """Rows of dimension 0, ceil(rows / N) each, in memory of their own; the last ranks have fewer or none."""
    generator = torch.Generator().manual_seed(variant.seed)
    size = variant.size
    shapes = [(size, 3), (2 * size + 1,), (1, 4), (3, 2), (6, 5), (0, 2), (1,), ()]
    for ranks in (1, variant.ranks, 4, 5):
        for shape in shapes:
            check_rows(answer, torch.randn(shape, generator=generator), ranks)
    check_rows(answer, torch.randn(size, 3, generator=generator, dtype=torch.bfloat16), variant.ranks)
    for shape in ((size, 2, 3), (5, 1, 2, 2)):
        check_rows(answer, torch.randn(shape, generator=generator), variant.ranks)
    for number in (torch.tensor(LARGE), torch.tensor(1.5, dtype=torch.bfloat16)):
        check_rows(answer, number, variant.ranks)
    large = LARGE + torch.arange(size)
    for rank in range(variant.ranks):
        got, rows = pair(call_rows(answer, large, rank, variant.ranks))[1], -(-size // variant.ranks)
        same = torch.equal(got, large[rank * rows :][:rows])
        slip = "on the way through a floating-point dtype large whole numbers lose their last digits"
        expect("whole numbers above 2**60, torch.int64: all rows are as they were", same, True, rank=rank, slip=slip)
    for ranks in (1, variant.ranks, 4):
        check_rows(answer, torch.randn(3, size, generator=generator).T, ranks, " (a transpose, not contiguous)")


def check_rows(answer, whole, ranks, which=""):
    shape = list(whole.shape)
    if not shape:
        for rank in range(ranks):
            try:
                got = pair(answer(whole, rank, ranks))
            except (TypeError, IndexError) as error:
                raise AnswerError(
                    f"a number, shape []: {error}\n"
                    "likely slip: a tensor of no dimension cannot be cut: every rank has it"
                ) from error
            expect(f"a number on rank {rank} of {ranks}", got[0], 0, slip="every rank has it whole, from row 0 on")
            what = f"a number in {str(whole.dtype).removeprefix('torch.')} on rank {rank} of {ranks}"
            expect(what, got[1], whole, slip="a number keeps its dtype and all of its digits: `clone()`")
            if got[1].untyped_storage()._cdata == whole.untyped_storage()._cdata:
                raise AnswerError("a number: expected a copy, got the tensor itself\nlikely slip: a copy, here too")
        return
    rows = -(-len(whole) // ranks)
    floor = len(whole) // ranks
    even = [len(part) for part in torch.tensor_split(whole, ranks)]
    sizes = [max(0, min(rows, len(whole) - rank * rows)) for rank in range(ranks)]
    got = [pair(call_rows(answer, whole, rank, ranks)) for rank in range(ranks)]
    lengths = [len(part) if part.dim() else -1 for _, part in got]
    what = f"shape {shape}{which} on {ranks} ranks"
    expect(
        f"{what}, rows by rank",
        lengths,
        sizes,
        slips={
            "one element is not a number: [1] is a row, which one rank has": [1] * ranks if shape == [1] else None,
            "the remaining rows belong to no rank: round up": [floor] * ranks,
            "all remaining rows went to the last rank: round up, and the last ranks have fewer": [
                *[floor] * (ranks - 1),
                len(whole) - floor * (ranks - 1),
            ],
            "this is as even as possible, and another layout: ceil(rows / N) each, as long as there are any": even,
        },
    )
    for rank, (first, part) in enumerate(got):
        expect(
            f"{what}, rank {rank}'s first row",
            first,
            min(rank * rows, len(whole)),
            slips={"a rank without rows begins at the end, not beyond it": rank * rows, "rank, not row": rank},
        )
        expected = whole[rank * rows : rank * rows + rows]
        if part.dtype != whole.dtype:
            raise AnswerError(
                f"{what}, rank {rank}'s rows: expected {whole.dtype}, got {part.dtype}\n"
                "likely slip: a checkpoint keeps each tensor's dtype: copy without converting"
            )
        slip = "its rows are not next to each other in memory: index it" if which else None
        slip = slip or "whole rows, in the tensor's other dimensions"
        expect(f"{what}, rank {rank}'s rows", part, expected, slip=slip)
        held = part.untyped_storage().nbytes()
        expect(
            f"{what}, bytes that rank {rank} holds",
            held,
            part.numel() * part.element_size(),
            slips={VIEW.removeprefix("likely slip: "): whole.numel() * part.element_size()},
        )
        if held and part.untyped_storage()._cdata == whole.untyped_storage()._cdata:
            raise AnswerError(f"{what}, rank {rank}: expected a copy, got the tensor's own memory\n{VIEW}")


def call_rows(answer, whole, rank, ranks):
    try:
        return answer(whole, rank, ranks)
    except IndexError as error:
        raise AnswerError(
            f"shape {list(whole.shape)}, rank {rank} of {ranks}: {error}\n"
            "likely slip: `chunk` makes fewer than N pieces where the rows do not suffice; such a rank has none"
        ) from error


def pair(got):
    if not (isinstance(got, tuple) and len(got) == 2 and isinstance(got[1], torch.Tensor)):
        raise AnswerError(f"expected a pair (first row, rows), got an object of type {type(got).__name__}")
    return got
