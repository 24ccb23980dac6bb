"""Exercise 12.3: Copy out."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from minifsdp.course.workshop.checking import AnswerError, check, same
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp2.cut import Cut, Rows
from minifsdp.fsdp2.gather import Gather

from .shared import (
    NARROWED,
    POISON,
    SPECIAL,
    expect,
    is_narrowed,
    layout,
    named,
    packed_by_rank,
    settings,
    special_values,
    wholes_of,
)


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
    """Fill the unsharded parameters, in place, from a buffer in rank order. Autograd is off.

    Args:
        gathered: the buffer [N * S] after the all-gather, as `copy_in` has packed it on each rank. It must not change.
        params: the unsharded parameters, contiguous, of the buffer's dtype, uninitialized. Modules hold these very
            tensors, so write into them.
        dims: the dimension along which each parameter was split.
        sizes: the widths of the columns, that of the gap last.
        ranks: N.
    """
    columns = gathered.view(ranks, -1).split(list(sizes), 1)
    for whole, dim, column in zip(params, dims, columns, strict=False):
        for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
            part.copy_(row[: part.numel()].view(part.shape))


@check("12.3")
def check_copy_out(answer, variant):
    """Every parameter has its values, at its own address, without padding, however it was cut."""
    for ranks, group, gap, dtype in settings(variant):
        wholes = wholes_of(group, variant, [dtype])
        sizes, starts = layout(group, ranks, gap)
        gathered = packed_by_rank(wholes, group, ranks, gap, dtype, POISON).flatten()
        memory = [torch.full((ranks * size,), POISON + 1, dtype=dtype) for size in sizes[:-1]]
        params = [each[: prod(shape)].view(shape) for each, (shape, _) in zip(memory, group, strict=True)]
        given, places, before = list(params), [p.data_ptr() for p in params], gathered.clone()
        dims, columns = [dim for _, dim in group], list(sizes)
        where = f"({named(group, ranks)})"
        try:
            with torch.no_grad():
                answer(gathered, params, dims, columns, ranks)
        except RuntimeError as error:
            slip = "the last shards are short or empty: copy the first elements of a row, as many as fit"
            if max(dims) > 1:
                slip = "a parameter is split along its own `dim`, which may be 2 or more"
            raise AnswerError(f"{where}: it raises {error}\nlikely slip: {slip}") from error
        slip = "the lists belong to the caller, who needs them again: take nothing away"
        expect(f"`dims` and `sizes` afterwards {where}", (dims, columns), ([d for _, d in group], sizes), slip=slip)
        if not gathered.untyped_storage().nbytes():
            raise AnswerError(
                f"the buffer afterwards {where}: expected its memory, got it freed\n"
                "likely slip: the buffer is read here; its memory is given back later (12.5)"
            )
        for i, (whole, start, dim) in enumerate(zip(wholes, starts, dims, strict=False)):
            values_of(given[i], whole, gathered, (ranks, start, sizes[i], dim, gap), where)
        moved = [i for i, p in enumerate(given) if p.data_ptr() != places[i]]
        moved += [i for i, (p, q) in enumerate(zip(params, given, strict=False)) if p is not q and i not in moved]
        if moved:
            raise AnswerError(
                f"parameter {moved[0]} {where}: expected it at its own address, got other memory\n"
                "likely slip: autograd and modules hold these very tensors: copy into them"
            )
        behind = [m[p.numel() :] for m, p in zip(memory, given, strict=True)]
        expect(
            f"the memory after the parameters {where}",
            [bool((each == POISON + 1).all()) for each in behind],
            [True] * len(behind),
            slip="copied more than the parameter has",
        )
        expect(f"the buffer afterwards {where}", gathered, before, slip="the buffer is read here, not written to")

    param = torch.zeros(len(SPECIAL))
    with torch.no_grad():
        answer(torch.cat([SPECIAL, torch.zeros(2)]), [param], [0], [len(SPECIAL), 2], 1)
    special_values(param, SPECIAL)


def values_of(got, whole, gathered, place, where):
    """One parameter's values, and the usual mistakes."""
    ranks, start, size, dim, gap = place
    without_gap = gathered[: len(gathered) - ranks * gap].view(ranks, -1)[:, start : start + size]
    column = gathered.view(ranks, -1)[:, start : start + size]
    as_rows = column.flatten()[: whole.numel()].view(whole.shape)
    parameter_order = gathered[ranks * start :][: whole.numel()]
    untouched = torch.full_like(whole, POISON + 1)
    slips = {
        "nothing has arrived: `=` only names another tensor, `reshape` of a non-contiguous view is a copy": untouched,
        "the buffer is in rank order: row r has rank r's shard of *every* parameter": (
            parameter_order.view(whole.shape) if parameter_order.numel() == whole.numel() else None
        ),
    }
    if gap:
        slips["a row ends with the gap: row r begins at r times the sum of all `sizes`, the gap's, too"] = filled(
            whole, without_gap, whole.chunk(ranks, dim)
        )
    if not got.untyped_storage().nbytes():
        raise AnswerError(f"a parameter {list(whole.shape)} {where}: expected its memory, got it freed")
    slips |= {
        "`tensor_split` evens lengths out; the buffer has shards as `chunk` returns them": (
            filled(whole, column, whole.tensor_split(ranks, dim))
        )
    }
    if dim > 1:
        slips["a parameter is split along its own `dim`, which may be 2 or more"] = filled(
            whole, column, whole.chunk(ranks, 1)
        )
    if dim:
        slips["along other dimensions, shards interleave: the parameter's chunk r along `dim` is row r"] = as_rows
    slip = "chunk r of the parameter is the beginning of row r of its column"
    if is_narrowed(got, whole):
        slip = NARROWED
    elif bool((got == POISON).any()):
        slip = "padding was copied, too: the last elements of a row, and the gap, belong to no parameter"
    elif bool((got == POISON + 1).any()):
        slip = "some of the parameter was never written; shards have ceil(length / N) rows, the last ones fewer"
    if whole.dtype == got.dtype and same(got, slips.get(next(reversed(slips)))):
        slip = None
    slips = {text: wrong for text, wrong in slips.items() if wrong is not None and not same(wrong, whole)}
    expect(f"a parameter {list(whole.shape)} {where}", got, whole, slips=slips, slip=slip)


def filled(whole, column, parts):
    """The parameter if its parts, of these shapes, are taken from the rows; None if they do not fit."""
    if any(part.numel() > row.numel() for part, row in zip(parts, column, strict=False)):
        return None
    found, at = torch.full_like(whole, POISON + 1), [part.storage_offset() for part in parts]
    for part, row, offset in zip(parts, column, at, strict=False):
        found.as_strided(part.shape, part.stride(), offset).copy_(row[: part.numel()].view(part.shape))
    return found
