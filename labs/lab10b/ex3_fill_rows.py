"""Exercise 10b.3: A different number of ranks."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference

from .shared import LARGE


class Piece(Protocol):
    """Rows of a saved tensor; the notebook defines the class."""

    first: int
    count: int

    def read(self) -> Tensor: ...


@reference(
    "10b.3",
    hints=(
        "Count in rows of the whole tensor. Which rows do `out` and a piece have in common? From the larger of the two "
        "beginnings to the smaller of the two ends.",
        "`low, high = max(first, piece.first), min(first + len(out), piece.first + piece.count)`; only if `low < high` "
        "is there anything to read. Then row `low` is number `low - first` of `out` and `low - piece.first` of the "
        "piece. Add up `high - low`: it has to be `len(out)` in the end.",
    ),
)
def fill_rows(out: Tensor, first: int, pieces: Sequence[Piece]) -> None:
    """Fill `out` in place with the rows `first` to `first + len(out)` of the tensor saved in
    `pieces`.

    Args:
        out: [rows, ...], with at least one dimension; may have no rows. The caller has disabled gradients.
        first: the number of the first row of `out` in the tensor.
        pieces: each has `first`, `count` and `read()`; they come in any order and do not overlap.

    A piece is read once if it holds rows of `out`, and otherwise not at all.

    Raises:
        ValueError: if a row of `out` is in no piece.
    """
    found = 0
    for piece in pieces:
        low, high = max(first, piece.first), min(first + len(out), piece.first + piece.count)
        if low < high:
            out[low - first : high - first].copy_(piece.read()[low - piece.first : high - piece.first])
            found += high - low
    if found != len(out):
        raise ValueError(f"{found} of the {len(out)} rows from {first} on are in the pieces")


class CountedPiece:
    """A piece that notes when it is read."""

    def __init__(self, first, rows):
        self.first, self.count, self.rows, self.reads = first, len(rows), rows, 0

    def read(self):
        self.reads += 1
        return self.rows.clone()


@check("10b.3")
def check_fill_rows(answer, variant):
    """Every row from the piece that has it, for any numbers of ranks then and now; nothing else is read."""
    generator = torch.Generator().manual_seed(variant.seed)
    for rows in (variant.size, 2 * variant.size + 1, 2):
        whole = torch.randn(rows, 3, generator=generator)
        for then, now in ((2, 3), (3, 2), (1, variant.ranks), (variant.ranks, 1), (4, 5), (5, 4)):
            check_fill(answer, whole, then, now, shuffle=False)
            check_fill(answer, whole, then, now, shuffle=True)
    check_empty(answer, generator)
    whole = torch.randn(6, 3, generator=generator)
    check_any_values(answer, torch.where(whole > 1, torch.nan, whole).index_fill(0, torch.tensor(4), torch.nan))
    check_any_values(answer, torch.arange(18).view(6, 3))
    out, whole_numbers = torch.zeros(3, 3, dtype=torch.int64), LARGE + torch.arange(18).view(6, 3)
    answer(out, 2, cut_into(whole_numbers, 2))
    slip = "on the way through a floating-point dtype large whole numbers lose their last digits"
    same = torch.equal(out, whole_numbers[2:5])
    expect("whole numbers above 2**60, torch.int64: all rows are as they were saved", same, True, slip=slip)
    check_shapes(answer, generator)
    check_many(answer)
    for lost, first in ((2, 1), (1, 1), (3, 1), (0, 0), (5, 3)):
        check_lost(answer, whole, lost, first)


def check_empty(answer, generator):
    """A piece without rows, of a rank that had none, in the middle of `out`."""
    whole = torch.randn(6, 3, generator=generator)
    pieces = [CountedPiece(0, whole[:3]), CountedPiece(3, whole[3:3]), CountedPiece(3, whole[3:])]
    out = torch.full((4, 3), torch.nan)
    answer(out, 1, pieces)
    expect("`out`, where a piece without rows lies between two", out, whole[1:5])
    slip = "a piece with `count` 0 has no rows in common with anything: where it begins does not matter"
    expect("how often a piece without rows is read", pieces[1].reads, 0, slip=slip)
    try:
        answer(torch.empty(0, 3), 6, [])
    except Exception as error:
        text = f"an `out` without rows, and no pieces: expected no error, got {type(error).__name__}: {error}"
        raise AnswerError(
            f"{text}\nlikely slip: an `out` without rows lacks none, however few pieces there are"
        ) from error


def check_many(answer):
    """As many pieces as ranks have saved."""
    whole = torch.arange(1_500.0).view(-1, 1)
    out = torch.full_like(whole, torch.nan)
    try:
        answer(out, 0, cut_into(whole, len(whole)))
    except RecursionError as error:
        raise AnswerError(
            "1,500 pieces of one row: expected all of them, got RecursionError\n"
            "likely slip: a call for each piece is one too many for Python's stack: use a loop"
        ) from error
    expect("1,500 pieces of one row, `out`", out, whole)


def check_shapes(answer, generator):
    """One dimension, three, and rows of `out` that do not lie one behind the other."""
    for shape, what in (((6,), "one dimension"), ((6, 2, 3), "three dimensions")):
        whole = torch.randn(shape, generator=generator)
        out = torch.full_like(whole[2:5], torch.nan)
        try:
            answer(out, 2, cut_into(whole, 2))
        except Exception as error:
            text = f"a tensor of {what}: {type(error).__name__}: {str(error).splitlines()[0]}"
            raise AnswerError(f"{text}\nlikely slip: rows are dimension 0, however many others there are") from error
        expect(f"a tensor of {what}, `out`", out, whole[2:5], slip="rows are dimension 0")
    whole = torch.randn(6, 3, generator=generator)
    out = torch.full((3, 3), torch.nan).T
    try:
        answer(out, 2, cut_into(whole, 2))
    except RuntimeError as error:
        raise AnswerError(f"an `out` that is a transpose: RuntimeError: {error}\nlikely slip: {STRIDES}") from error
    expect("an `out` that is a transpose", out, whole[2:5], slip=STRIDES)


STRIDES = "`out` need not be contiguous: write into `out[low:high]`, not through a `view` or `reshape`, which may copy"


def check_lost(answer, whole, lost, first):
    """Row `lost` is in no piece; rows `first` to `first + 3` are wanted."""
    pieces = [CountedPiece(0, whole[:lost]), CountedPiece(lost + 1, whole[lost + 1 :])]
    out = torch.full((3, 3), torch.nan)
    place = {0: "the first", 2: "the last"}.get(lost - first, "a middle")
    what = f"{place} row of `out` that is in no piece"
    try:
        answer(out, first, pieces)
    except ValueError:
        return
    except Exception as error:
        raise AnswerError(f"{what}: expected a ValueError, got {type(error).__name__}") from error
    raise AnswerError(
        f"{what}: expected a ValueError, got nothing\n"
        "likely slip: rows that are never filled keep what the memory held: count the rows that were found"
    )


def check_any_values(answer, whole):
    """Two pieces whose values are not numbers, or whole ones: what has been found must not be told from values."""
    what = "values that are NaN" if whole.is_floating_point() else "a tensor of whole numbers, torch.int64"
    out = torch.zeros_like(whole[2:])
    slip = "likely slip: whether a row was found is not in its values: count the rows"
    try:
        answer(out, 2, cut_into(whole, 2))
    except Exception as error:
        text = f"{what}: expected the rows as they are saved, got {type(error).__name__}: {str(error).splitlines()[0]}"
        raise AnswerError(f"{text}\n{slip}") from error
    if not torch.equal(out.nan_to_num(7.5), whole[2:].nan_to_num(7.5)):
        raise AnswerError(f"{what}: expected the rows as they are saved, got others\n{slip}")


def cut_into(whole, ranks):
    rows = -(-len(whole) // ranks)
    return [CountedPiece(min(r * rows, len(whole)), whole[r * rows :][:rows]) for r in range(ranks)]


def check_fill(answer, whole, then, now, shuffle):
    rows = -(-len(whole) // now)
    for rank in range(now):
        first = min(rank * rows, len(whole))
        wanted = whole[first : first + rows]
        pieces = cut_into(whole, then)
        given = pieces[::-1] if shuffle else pieces[:]
        order = given[:]
        out = torch.full_like(wanted, torch.nan)
        what = f"{len(whole)} rows, saved by {then} ranks{', pieces in another order' * shuffle}, rank {rank} of {now}"
        try:
            answer(out, first, given)
        except AnswerError:
            raise
        except Exception as error:
            slip = "pieces and `out` begin at different rows: take what both have, from each one's own first row on"
            if isinstance(error, ValueError) and not len(wanted):
                slip = "a rank without rows lacks nothing"
            elif isinstance(error, ValueError):
                slip = "no row is missing: look at every piece there is, in whatever order they come"
            elif isinstance(error, IndexError):
                slip = "there need not be a piece for each rank: any number of ranks may have saved"
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise AnswerError(f"{what}: {text}\nlikely slip: {slip}") from error
        if len(out) and bool(torch.isnan(out).all()):
            raise AnswerError(
                f"{what}: expected the rows in `out`, got nothing there\n"
                "likely slip: `out` is to be written in place; an assignment only gives another tensor its name"
            )
        if len(out) and bool(torch.isnan(out).any()):
            raise AnswerError(
                f"{what}: expected every row of `out`, got {int(torch.isnan(out).any(1).sum())} without values\n"
                "likely slip: rows may come from several pieces: take of each what it has"
            )
        shifted = "the right row for each: row `low` is number `low - first` of `out`, `low - piece.first` of the piece"
        numbered = pieces[rank].rows[: len(out)] if rank < then else None
        pieces_of = "there need not be a piece for each rank: any number of ranks may have saved"
        expect(f"{what}, `out`", out, wanted, slips={pieces_of: numbered}, slip=shifted)
        slip = "the list belongs to the caller, who may need it again: `sorted` makes a new one, `sort` changes it"
        kept = [each is piece for each, piece in zip(given, order, strict=False)]
        expect(f"{what}, pieces in their places afterwards", kept, [True] * len(order), slip=slip)
        reads = [piece.reads for piece in pieces]
        needed = [int(max(first, p.first) < min(first + len(wanted), p.first + p.count)) for p in pieces]
        expect(
            f"{what}, how often each piece is read",
            reads,
            needed,
            slips={"all pieces are read, on every rank: N times the checkpoint from the disk": [1] * then},
            slip="a piece that has rows of `out` is read once, another not at all",
        )
