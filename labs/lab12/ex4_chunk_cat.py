"""Exercise 12.4: Chunk and concatenate."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minifsdp.course.workshop.checking import AnswerError, check, same
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp2.cut import Cut, Rows
from minifsdp.fsdp2.gradients import Gradients

from .shared import (
    FIRST_DTYPE,
    NARROWED,
    POISON,
    expect,
    is_narrowed,
    layout,
    mixed,
    named,
    of_tensors,
    packed_by_rank,
    packed_tight,
    wholes_of,
)


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
    """Pack unsharded gradients into the input of a reduce-scatter. Autograd is off.

    Args:
        packed: [N, S], uninitialized, in the dtype of the reduction. Afterwards, row r has chunk r of each gradient at
            the beginning of its column, and zeros everywhere else.
        gradients: one for each column except the gap, in the shape of its parameter. They may have a different dtype,
            and are not changed.
        dims: the dimension along which each gradient is split.
        sizes: the widths of the columns, that of the gap last.
    """
    packed.zero_()
    for gradient, dim, column in zip(gradients, dims, packed.split(list(sizes), 1), strict=False):
        for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
            row[: part.numel()].view(part.shape).copy_(part)


@check("12.4")
def check_chunk_cat(answer, variant):
    """Row r has chunk r of every gradient, in the buffer's dtype, and zeros elsewhere."""
    for (ranks, group, gap, dtype), is_mixed in mixed(variant):
        gradients = wholes_of(group, variant, of_tensors(is_mixed, dtype))
        for fill, turned in ((float("nan"), False), (POISON, is_mixed)):
            packed_once(answer, gradients, group, (ranks, gap, fill), dtype, turned)
    special = torch.tensor([float("inf"), 2.0, float("nan")])
    packed = torch.full((2, 2), POISON)
    answer(packed, [special], [0], [2, 0])
    if not torch.equal(packed.nan_to_num(7.0), torch.tensor([[float("inf"), 2.0], [7.0, 0.0]]).nan_to_num(7.0)):
        raise AnswerError(
            f"a gradient {special.tolist()} over 2 ranks: got {packed.tolist()}\n"
            "likely slip: infinities and NaNs are packed as they are, so that a check of the result finds them"
        )


TURNED = "a gradient may be stored in another order than its shape's: `reshape` and `copy_` go by the shape"


def packed_once(answer, gradients, group, place, dtype, turned):
    """Gradients as the answer packs them; `turned`: stored in another order."""
    ranks, gap, fill = place
    sizes, starts = layout(group, ranks, gap)
    wanted = packed_by_rank(gradients, group, ranks, gap, dtype, 0.0)
    where = f"({named(group, ranks)}{', gradients that are not contiguous' if turned else ''})"
    packed = torch.full_like(wanted, fill)
    given = [
        g.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1) if turned else g.clone()
        for g in gradients
    ]
    mine, stored = list(given), [packed, *given]
    views = [each.detach() for each in stored]
    arguments = given, [dim for _, dim in group], list(sizes)
    try:
        with torch.no_grad():
            answer(packed, *arguments)
    except RuntimeError as error:
        slip = "the last chunks are short or missing: they fill the beginning of their row"
        if max(dim for _, dim in group) > 1:
            slip = "a gradient is split along its own `dim`, which may be 2 or more"
        if turned and "view" in str(error):
            slip = TURNED
        raise AnswerError(f"{where}: it raises {error}\nlikely slip: {slip}") from error
    for each, view in zip(stored, views, strict=True):
        if not view.untyped_storage().nbytes() or each.data_ptr() != view.data_ptr():
            what = "the buffer" if each is packed else f"a gradient {list(view.shape)}"
            raise AnswerError(
                f"{what} {where} afterwards: expected the memory that it had, got it freed or replaced\n"
                "likely slip: the buffer and the gradients belong to the caller, who frees them"
            )
    chunked(packed, wanted, gradients, group, place, (sizes, starts), where, turned)
    expect(f"gradients afterwards {where}", mine, gradients, slip="gradients are read, not written to")
    slip = "the lists belong to the caller, who needs them again: take nothing away"
    kept = [len(each) for each in arguments]
    expect(
        f"lengths of `gradients`, `dims` and `sizes` afterwards {where}",
        kept,
        [len(group)] * 2 + [len(sizes)],
        slip=slip,
    )


def chunked(packed, wanted, gradients, group, place, columns, where, turned):
    ranks, gap, fill = place
    what, before = f"the packed gradients {where}", packed.isnan() if fill != fill else packed == fill
    tight = packed_tight(gradients, group, ranks, gap, wanted.dtype, 0.0)
    if bool(before.all()):
        expect(what, packed, wanted, slip="nothing was written: the buffer is filled in place")
    if bool(before.any()):
        slip = "padding must be zero, since it is reduced: after a short chunk, for ranks without a chunk, in the gap"
        if gap and bool((packed[:, -gap:] == 0).all()):
            slip = "the gap is zero, but the ends of short columns are not: they are padding as well"
        expect(what, packed, wanted, slip=slip)
    if same(packed, tight) and not same(tight, wanted):
        expect(what, packed, wanted, slip="columns are equally wide on all ranks: each short chunk is padded by itself")
    if fill == fill and same(packed, wanted + fill):
        expect(what, packed, wanted, slip="added to what the memory held before: it is uninitialized")
    for (shape, dim), gradient, start, size in zip(group, gradients, columns[1], columns[0], strict=False):
        column, right = packed[:, start : start + size], wanted[:, start : start + size]
        slip = "row r has the gradient's chunk r, at the beginning of its column"
        if turned:
            slip = TURNED
        if is_narrowed(column, right):
            slip = FIRST_DTYPE if len({each.dtype for each in gradients}) > 1 else NARROWED
        elif dim > 1 and same(column, spread(list(gradient.chunk(ranks, 1)), right)):
            slip = "a gradient is split along its own `dim`, which may be 2 or more"
        elif dim and same(column.flatten(), gradient.flatten().to(column.dtype)):
            slip = "a gradient that is split along `dim` has its chunks along it: they are not contiguous"
        elif not dim and same(column, spread(gradient.tensor_split(ranks), right)):
            slip = "`tensor_split` evens lengths out, and the shards of parameters and gradients must agree"
        elif not dim and same(column, spread(list(gradient.flatten().chunk(ranks)), right)):
            slip = "split by elements: a chunk has whole rows; otherwise, shards get the gradients of other elements"
        elif same(column, right / ranks):
            slip = "the mean is taken by the reduction, over the ranks; here nothing is divided"
        expect(f"gradient {list(shape)} in the buffer {where}", column, right, slip=slip)
    expect(f"the packed gradients {where}", packed, wanted, slip="the gap's elements are zero")


def spread(parts, like):
    """Parts at the front of the rows, zeros behind."""
    found = torch.zeros_like(like)
    for row, part in zip(found, parts, strict=False):
        n = min(part.numel(), row.numel())
        row[:n] = part.flatten()[:n].to(row.dtype)
    return found
