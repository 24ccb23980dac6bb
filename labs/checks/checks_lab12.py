"""The checks of lab 12."""

from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from math import prod
from unittest import mock

import torch
from torch import Tensor

from minifsdp import device
from minifsdp.course.workshop.checking import AnswerError, check, describe, same
from minifsdp.course.workshop.checking import expect as expect_nearly

expect = partial(expect_nearly, tolerance=0.0)  # nothing is computed here, only copied
POISON = -77.0  # of memory that nobody has written to yet: every dtype holds it


def numbers(shape, dtype=torch.float32, first=1):
    """Numbers that float32 holds exactly, and bfloat16 and float16 do not, cast to a dtype; float64 has more digits."""
    exact = (torch.arange(prod(shape)) + first) % 113 * 2 + 257.125
    return exact.to(dtype).add(2**-32 if dtype == torch.float64 else 0).view(shape)


def pieces_of(whole, ranks, dim):
    """Each rank's piece, as `torch.chunk` cuts it, and empty ones for ranks that it has none for."""
    found = list(whole.chunk(ranks, dim))
    empty = whole.narrow(dim, whole.shape[dim], 0)
    return [*found, *[empty] * (ranks - len(found))]


def width_of(shape, ranks, dim):
    """Elements of a piece, padding included."""
    return prod(shape) // max(1, shape[dim]) * -(-shape[dim] // ranks)


def is_narrowed(got, values, dtype=None):
    """True if `got` are the values after a cast to a narrower dtype and back: to this one, or to any."""
    narrow = [dtype] if dtype else [torch.bfloat16, torch.float16, torch.float32]
    return any(same(got, values.to(each).to(values.dtype)) and not same(got, values) for each in narrow)


NARROWED = "the values have passed through a narrower dtype: cast once, to the dtype of the buffer"
FIRST_DTYPE = "each tensor has a dtype of its own, and the buffer has another: here, all passed through the first one's"


def shares_memory(part, whole):
    return part.untyped_storage()._cdata == whole.untyped_storage()._cdata


# 12.1


def cut_cases(variant):
    """(shape, ranks, dim): with short pieces, with ranks that get nothing, and along other dimensions."""
    n, size = variant.ranks, variant.size
    return (
        ((5, 3), 2, 0),
        ((6, 2), 3, 0),
        ((7, 2), 4, 0),
        ((size * n + 1, 3), n, 0),
        ((9, 2), 8, 0),
        ((4,), 3, 0),
        ((1, 4), n, 0),
        ((4, 6), 2, 1),
        ((3, 2, 3 * n), n, 2),
        ((2, 6, 3), 3, 1),
        ((3, 5), 1, 1),
        ((3, 5), 1, 0),
    )


@check("12.1")
def check_cut(answer, variant):
    """Shards as `torch.chunk` returns them, views of the parameter, and empty ones on the ranks past the end."""
    for shape, ranks, dim in cut_cases(variant):
        whole = numbers(shape, torch.float64)
        for rank in range(ranks):
            piece_of(answer, whole, ranks, rank, dim)
        what = f"{list(shape)} over {ranks} ranks, the parameter afterwards"
        expect(what, whole, numbers(shape, torch.float64), slip="the parameter is the caller's: do not write to it")
    turned = numbers((6, 4), torch.float64).t(), numbers((3, 6, 4)).permute(2, 1, 0)
    for whole in (numbers((4, 6), torch.bfloat16), *turned):
        for ranks, rank, dim in ((3, 0, 0), (3, 2, 0), (2, 0, 1), (2, 1, 1)):
            piece_of(answer, whole, ranks, rank, dim)
    trained(answer)
    for rank in range(2):
        piece_of(answer, numbers((0, 3)), 2, rank, 0)
    for shape, ranks, dim in (((4, 5), 2, 1), ((2, 3, 4), 3, 2)):
        refusals = [refusal(answer, numbers(shape), ranks, rank, dim) for rank in range(ranks)]
        if refusals == [None] * ranks:
            continue
        rank, got = next((rank, each) for rank, each in enumerate(refusals) if each)
        slip = (
            "along dimensions other than 0, shards of different lengths are refused, as in torch: shards interleave in "
            "memory there, and padding would leave no contiguous view"
        )
        if None in refusals:
            slip = "every rank refuses the parameter: if only some of them raise, the others wait for them forever"
        raise AnswerError(
            f"rank {rank}, {list(shape)} over {ranks} ranks along dimension {dim}: expected a ValueError, {got}\n"
            f"likely slip: {slip}"
        )


def trained(answer):
    """A parameter that needs a gradient, without the argument `dim`."""
    whole = torch.nn.Parameter(numbers((5, 3)))
    place = whole.data_ptr()
    for rank, part in enumerate(pieces_of(whole, 4, 0)):
        expect("shard of [5, 3] over 4 ranks, without `dim`", answer(whole, 4, rank), part, rank=rank)
    slip = (
        "the parameter is the caller's: `detach()` gives another tensor, `requires_grad_` and `detach_` change this one"
    )
    now = whole.requires_grad, whole.data_ptr() == place, list(whole.shape)
    expect(
        "the parameter afterwards: needs a gradient, has its memory, its shape", now, (True, True, [5, 3]), slip=slip
    )


def refusal(answer, *given):
    """None if the answer raises a ValueError, otherwise what it does instead."""
    try:
        got = answer(*given)
    except ValueError:
        return None
    except Exception as error:
        return f"it raises {error!r}"
    return f"got {describe(got)}"


def piece_of(answer, whole, ranks, rank, dim):
    shape, length = list(whole.shape), whole.shape[dim]
    where = f"{shape} over {ranks} ranks" + (f" along dimension {dim}" if dim else "")
    wanted = pieces_of(whole, ranks, dim)[rank]
    try:
        got = answer(whole, ranks, rank, dim)
    except Exception as error:
        slip = "a rank past the end has an empty shard; `chunk` returns fewer than N parts then"
        if not length:
            slip = "a parameter without elements has empty shards"
        if dim == 0 and length % ranks and isinstance(error, ValueError):
            slip = "along dimension 0, any length will do: only other dimensions must be divisible by N"
        elif isinstance(error, ValueError) and length % ranks == 0:
            slip = "it is the length along `dim` that N must divide, and here it does"
        elif wanted.numel():
            slip = "this shard has elements, and `narrow` or a slice returns them"
        raise AnswerError(f"rank {rank}, {where}: it raises {error!r}\nlikely slip: {slip}") from error
    rows, flat = -(-length // ranks), whole.flatten()
    each = length // ranks
    rest = whole.narrow(dim, min(rank * each, length), each if rank < ranks - 1 else length - rank * each)
    padded = torch.cat([wanted, wanted.new_zeros(*shape[:dim], rows - wanted.shape[dim], *shape[dim + 1 :])], dim)
    elements = flat[rank * -(-flat.numel() // ranks) :][: -(-flat.numel() // ranks)]
    if isinstance(got, Tensor) and got.dtype != whole.dtype:
        raise AnswerError(
            f"rank {rank}, shard of {where}: expected {describe(wanted)}, got {describe(got)}\n"
            "likely slip: a dtype of the shard's own: it is a view of the parameter, even if it is empty"
        )
    slips = {
        "`tensor_split` evens lengths out; `chunk` gives every rank ceil(length / N) rows until none are left": (
            whole.tensor_split(ranks, dim)[rank]
        ),
        "the remaining rows make the *first* shards longer, not the last one": rest,
        "the padding is not a part of the shard: it exists only in the buffers": padded,
        "every N-th row: a shard is contiguous along the dimension that is split": whole[rank::ranks],
        "split by elements, as a flat parameter is: here, rows are never split": elements,
        "an empty shard has the other dimensions of the parameter, too": whole.new_empty(0),
        "the parameter is split along `dim`": pieces_of(whole, ranks, 0)[rank],
    }
    slip = "a rank past the end has an empty shard, and not the last rows once more"
    if wanted.numel():
        slip = "rank r begins at row r · ceil(length / N)"
    if not isinstance(got, Tensor):
        raise AnswerError(f"rank {rank}, {where}: expected a tensor, got {describe(got)}\nlikely slip: {slip}")
    expect(f"shard of {where}", got, wanted, rank=rank, slips=slips, slip=slip)
    if not shares_memory(got, whole):
        raise AnswerError(
            f"rank {rank}, shard of {where}: expected a view of the parameter, got a copy\n"
            "likely slip: what is written to the shard has to reach the parameter: `narrow`, `chunk` and slices are "
            "views, of any layout, and even of length 0; `reshape` may copy"
        )


# 12.2, 12.3, 12.4: buffers in rank order

GROUPS = (  # shapes and dims of a group's parameters
    (((5, 3), 0), ((5,), 0)),
    (((7, 2), 0), ((4, 6), 1), ((1,), 0), ((6,), 0)),
    (((2, 12, 2), 1), ((3, 2), 0), ((6, 6), 1), ((2, 3, 12), 2)),
)
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.float16)  # of tensors next to each other


def layout(group, ranks, gap):
    """Sizes of the columns of a row, the gap's last, and where each begins."""
    sizes = [*(width_of(shape, ranks, dim) for shape, dim in group), gap]
    return sizes, [0, *accumulate(sizes)][:-1]


def packed_by_rank(wholes, group, ranks, gap, dtype, fill):
    """What a buffer [N, S] should hold, `fill` between the pieces."""
    sizes, starts = layout(group, ranks, gap)
    buffer = torch.full((ranks, sum(sizes)), fill, dtype=dtype)
    for whole, (_, dim), start in zip(wholes, group, starts, strict=False):
        for rank, piece in enumerate(pieces_of(whole, ranks, dim)):
            buffer[rank, start : start + piece.numel()] = piece.flatten().to(dtype)
    return buffer


def packed_tight(wholes, group, ranks, gap, dtype, fill):
    """The same without padding between the pieces."""
    sizes, _ = layout(group, ranks, gap)
    buffer = torch.full((ranks, sum(sizes)), fill, dtype=dtype)
    for rank in range(ranks):
        row = torch.cat([pieces_of(w, ranks, dim)[rank].flatten() for w, (_, dim) in zip(wholes, group, strict=True)])
        buffer[rank, : row.numel()] = row.to(dtype)
    return buffer


def settings(variant):
    for ranks in (variant.ranks, 4, 1, 6):
        for number, group in enumerate(GROUPS):
            if all(dim == 0 or shape[dim] % ranks == 0 for shape, dim in group):
                dtypes = (torch.float32,)
                if ranks == variant.ranks:
                    dtypes += (torch.bfloat16, torch.float64)
                for dtype in dtypes:
                    yield ranks, group, (3, 0, 1)[number], dtype


def mixed(variant):
    """Settings whose tensors have several dtypes, and whether they have."""
    found = list(settings(variant))
    return [(each, False) for each in found] + [(each, True) for each in found]


def of_tensors(is_mixed, dtype):
    """The dtypes of tensors that go into a buffer of this dtype."""
    if is_mixed:
        return DTYPES
    return (torch.float64,) if dtype == torch.float64 else (torch.float32,)


def wholes_of(group, variant, dtypes=(torch.float32,)):
    return [numbers(shape, dtypes[i % len(dtypes)], 17 * i + variant.seed) for i, (shape, _) in enumerate(group)]


def named(group, ranks):
    texts = [f"{list(shape)}" + (f" cut along {dim}" if dim else "") for shape, dim in group]
    return f"{', '.join(texts)}, {ranks} ranks"


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


SPECIAL = torch.tensor([float("inf"), 3e38, 1e-30, float("nan")])


def special_values(got, wanted):
    """Compare; NaN equals NaN."""
    if not torch.equal(got.nan_to_num(7.0, 8.0), wanted.nan_to_num(7.0, 8.0)):
        raise AnswerError(
            f"{wanted.tolist()} in the buffer: got {got.tolist()}\n"
            "likely slip: large and small numbers, infinities and NaNs are copied as they are, through no other dtype"
        )


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


# 12.5

HOST = torch.device("cpu", 0)  # not the `cpu` that an answer may think of by itself


class Told:
    """What a device with queues would have been told, in words, and which buffers were freed by then.

    The n-th buffer is the one kept when the n-th event was recorded.
    """

    def __init__(self, streams, buffers):
        self.streams, self.buffers = streams, [buffer.detach() for buffer in buffers]
        self.log, self.events, self.recorded_on, self.kept = [], {}, [], []
        self.asked = False

    def query(self):
        self.asked = True
        return False

    def __call__(self, command):
        stream = next((name for name, each in self.streams.items() if each is command.stream), "another stream")
        self.kept.append(command.subject)  # so that no other object gets its id
        if command.verb == "record":
            self.recorded_on.append(stream)
            self.events[id(command.subject)] = len(self.recorded_on)
            self.log.append(f"{stream} records event {len(self.recorded_on)}")
        elif command.verb == "wait":
            number = self.events.get(id(command.subject))
            event = f"event {number}" if number else "another event"
            freed = number and number <= len(self.buffers) and not self.buffers[number - 1].untyped_storage().nbytes()
            self.log.append(f"{stream} waits for {event}" + (", with its buffer freed" if freed else ""))
        else:
            self.log.append("the host waits" if command.verb == "synchronize" else f"{command.verb} on {stream}")

    def since(self):
        """The log since the last call."""
        said, self.log = self.log, []
        if self.asked and not said:
            said = ["the host asks whether an event has passed"]
        self.asked = False
        return said


@contextmanager
def told(streams, buffers):
    watch = Told(streams, buffers)
    device.command_observers.append(watch)
    try:
        with mock.patch.object(device.CpuEvent, "query", watch.query):
            yield watch
    finally:
        device.command_observers.remove(watch)


def pair_of(answer):
    pair = answer()
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(callable, pair))):
        raise AnswerError(f"expected two functions, `keep` and `give_back`, got {describe(pair)}")
    return pair


@check("12.5")
def check_hold(answer, variant):
    """Memory stays until the stream of its owner waits for the last reader, and the host never waits."""
    reader, owner = device.new_stream(HOST), device.new_stream(HOST)
    first, second, third = [torch.zeros(variant.size, device="cpu") for _ in range(3)]
    views = [buffer[:2] for buffer in (first, second, third)]  # a reference that is dropped frees nothing
    streams = {"the reader": reader, "the owner": owner}
    keep, give_back = pair_of(answer)
    other_keep, other_back = pair_of(answer)
    with told(streams, [first, second, third]) as watch:
        with device.on_stream(owner):
            give_back(HOST)
        expect(
            "commands of a `give_back` before any `keep`",
            watch.since(),
            [],
            slip="nothing is kept, nothing to wait for",
        )
        with device.on_stream(reader):
            keep(first)
            kept(watch.since(), first)
            keep(second)
            expect(
                "commands of a second `keep`", watch.since(), ["the reader records event 2"], slip="an event for each"
            )
            other_keep(third)
            watch.since()
        with device.on_stream(owner):
            give_back(HOST)
        given_back(watch.since(), "two buffers", {"first": views[0], "second": views[1]}, [2], [1, 2])
        if not device.is_allocated(third):
            raise AnswerError(
                "a second pair's buffer after the first pair's `give_back`: expected it allocated, got it freed\n"
                "likely slip: a list outside of the function is shared by all pairs: make it inside"
            )
        device.allocate(first)
        with device.on_stream(owner):
            give_back(HOST)
        slip = "what was given back has to be forgotten, or its memory is freed once more, while others use it"
        again = watch.since(), device.is_allocated(first)
        expect(
            "a third `give_back`: commands, and whether memory allocated since is there", again, ([], True), slip=slip
        )
        with device.on_stream(owner):
            other_back(HOST)
        given_back(watch.since(), "a single buffer", {"only": views[2]}, [3], [3])
    several_readers(keep, give_back, variant)
    dropped(keep, give_back, variant)


def several_readers(keep, give_back, variant):
    """Buffers of two readers, then one that both read: the latest event of each has to be waited for."""
    readers, owner = [device.new_stream(HOST) for _ in range(2)], device.new_stream(HOST)
    streams = {"the reader": readers[0], "the other reader": readers[1], "the owner": owner}
    four, shared = [torch.zeros(variant.size, device="cpu") for _ in range(4)], torch.zeros(variant.size, device="cpu")
    for which, buffers in (
        ("four buffers, read by two streams in turn", four),
        ("a buffer that two streams read", [shared] * 2),
    ):
        views, events = {f"number {n}": each[:2] for n, each in enumerate(buffers, start=1)}, range(1, len(buffers) + 1)
        with told(streams, buffers) as watch:
            for number, buffer in enumerate(buffers):
                with device.on_stream(readers[number % 2]):
                    keep(buffer)
            watch.since()
            with device.on_stream(owner):
                give_back(HOST)
            log = watch.since()
        if buffers is not four:  # freed before the second wait, or after it
            log = [each.removesuffix(", with its buffer freed") for each in log]
        given_back(log, which, views, list(events)[-2:], list(events))
        device.allocate(buffers[0])
        if views["number 1"].data_ptr() != buffers[0].data_ptr():
            raise AnswerError(FREED_UNDER_VIEWS)


FREED_UNDER_VIEWS = (
    "buffers after `give_back`: expected no memory, got a tensor with other memory\n"
    "likely slip: views keep a storage alive; `buffer.untyped_storage().resize_(0)` frees it under them"
)


def dropped(keep, give_back, variant):
    """A buffer to which nobody else has a reference."""
    buffer = torch.zeros(variant.size, device="cpu")
    storage = buffer.untyped_storage()  # not a view, which would refer to the buffer
    with device.on_stream(device.new_stream(HOST)):
        keep(buffer)
    del buffer
    give_back(HOST)
    slip = "only a weak reference was kept: the caller may drop the buffer, whose memory nobody could give back then"
    expect("bytes of a buffer that the caller has dropped", storage.nbytes(), 0, slip=slip)


def kept(log, buffer):
    if not device.is_allocated(buffer):
        raise AnswerError(
            "the buffer after `keep`: expected it allocated, got it freed\n"
            "likely slip: its reader is only queued, and the owner's stream could be handed this memory at once"
        )
    recorded = "the reader records event 1"
    slips = {
        "`record_stream` is what this replaces: the allocator would hold the memory back until it polls": [
            "record_stream on the reader"
        ],
        "an event marks the end of this reader; the stream's end, later, is behind other work as well": [],
        "it is the owner that waits, and later: the reader goes on": [recorded, "the reader waits for event 1"],
        "the host must not wait: it runs ahead": [recorded, "the host waits"],
    }
    slip = "one event, behind the last reader, on the stream that is current now"
    expect("commands of a `keep`", log, [recorded], slips=slips, slip=slip)


def given_back(log, which, views, latest, events):
    """Of buffers whose memory has to be there until the owner waits: for all `events`, or the `latest` of each reader.

    Args:
        log: commands of a `give_back`.
        which: the buffers in words.
        views: a view of each.
        latest: the last event of each reader.
        events: one for each buffer.
    """
    what = f"commands of a `give_back` of {which}"
    needed = "a wait" if len(latest) == 1 else f"{len(latest)} waits"
    for words, slip in (
        ("the host asks", "the queue waits, whether an event has passed or not: every kept buffer is given back"),
        ("the host waits", "`synchronize` stops the host; `wait_event` puts the wait into the stream's queue"),
        ("record_stream", "`device.free` calls `record_stream`; after the wait, `resize_(0)` of the storage is enough"),
        ("records", "an event of now is on the wrong stream: the reader's event was recorded in `keep`"),
        ("freed", "first the wait, then the free: freed memory may be reused at once"),
        ("reader waits", "the stream that is current in `give_back` is the owner's: let that one wait"),
        ("another stream", "`device.current_stream(on)` is the owner's stream"),
    ):
        if any(words in each for each in log):
            raise AnswerError(f"{what}: expected {needed} of the owner, got {describe(log)}\nlikely slip: {slip}")
    wait = "the owner waits for event {}".format
    if any(each.startswith("the owner waits") and each not in map(wait, events) for each in log):
        slip = "this event is another pair's: a list outside of the function is shared by all pairs: make it inside"
        raise AnswerError(f"{what}: expected {needed} of the owner, got {describe(log)}\nlikely slip: {slip}")
    if not log and all(view.untyped_storage().nbytes() for view in views.values()):
        slip = "all that is kept is given back, however little it is"
        raise AnswerError(f"{what}: expected a wait and a free, got neither\nlikely slip: {slip}")
    strange = [each for each in log if each not in map(wait, events)]
    if strange or len(set(log)) < len(log) or any(wait(number) not in log for number in latest):
        slips = {
            "freed without a wait: the reader may not even have begun": [],
            "the last event alone: another stream may have recorded the first": [wait(events[-1])],
            "the oldest alone: all that is kept is given back": [wait(events[0])],
        }
        slip = "each buffer's own event, once"
        if len(latest) > 1:
            del slips["the oldest alone: all that is kept is given back"]
            slip = "of each stream that has read a buffer, its latest event at least"
        expect(what, log, [wait(number) for number in events], slips=slips, slip=slip)
    left = [name for name, view in views.items() if view.untyped_storage().nbytes()]
    slip = "views keep a storage alive; `buffer.untyped_storage().resize_(0)` frees it under them"
    if left and len(left) < len(views):
        slip = "all that is kept is given back"
    expect(f"of {which}, those that have memory after `give_back`", left, [], slip=slip)


# 12.6


def wanted_columns(shapes, dims, ranks, itemsize):
    sizes = [width_of(shape, ranks, dim) for shape, dim in zip(shapes, dims, strict=True)]
    nbytes = sum(sizes) * itemsize
    return [*sizes, (-nbytes % 16) // itemsize]


def flat_share(shapes, ranks):
    return -(-sum(map(prod, shapes)) // ranks)


@check("12.6")
def check_columns_of(answer, variant):
    """Equal columns on all ranks, and rows of whole multiples of 16 bytes."""
    size, rows = variant.size, []
    groups = (
        *GROUPS,
        (((size, 3), 0), ((size,), 0)),
        (((16, 4), 0), ((8,), 0)),
        (((1,), 0),),
        (((105, 105), 0), ((105,), 0), ((105,), 0)),
    )
    for group in groups:
        shapes, dims = [tuple(shape) for shape, _ in group], [dim for _, dim in group]
        for ranks in (variant.ranks, 3, 4, 64):
            if any(dim and shape[dim] % ranks for shape, dim in group):
                continue
            for itemsize in (4, 2, 8, 1, 16):
                rows.append(one_row(answer, shapes, dims, ranks, itemsize))
    for what, got, wanted, slips in rows:  # a mistake explains all rows
        always = [text for text in slips if all(each[1] == each[3][text] for each in rows)]
        expect(
            what,
            got,
            wanted,
            slip=next(
                iter(always),
                "a column has ceil(length / N) times the other lengths, all in elements, as is the gap",
            ),
        )


def one_row(answer, shapes, dims, ranks, itemsize):
    """The setting in words, what was wanted and got, and the usual mistakes."""
    where = f"{', '.join(map(str, map(list, shapes)))} over {ranks} ranks, {itemsize} bytes per element"
    wanted = wanted_columns(shapes, dims, ranks, itemsize)
    given = list(shapes), list(dims)
    got = answer(*given, ranks, itemsize)
    slip = "the lists are the caller's: do not change them"
    expect(f"`shapes` and `dims` afterwards, {where}", given, (shapes, dims), slip=slip)
    if not isinstance(got, list | tuple):
        raise AnswerError(f"{where}: expected a list of sizes, got {describe(got)}")
    if any(isinstance(size, float) for size in got):
        raise AnswerError(f"{where}: expected whole numbers, got {got}\nlikely slip: `//` divides, `/` makes a float")
    sizes = wanted[:-1]
    used, step = sum(sizes), max(1, 16 // itemsize)

    def closed(widths):
        return [*widths, -sum(widths) % step]

    slips = {
        "the gap is the last entry, 0 if there is none": sizes,
        "a row that is a multiple of 16 bytes already needs no gap": [*sizes, step - used % step],
        "sizes are in elements, 16 bytes are four of float32": [*sizes, -(used * itemsize) % 16],
        "a multiple of 16 *bytes*, not of 16 elements": [*sizes, -used % 16],
        "4 elements are 16 bytes for float32 alone": [*sizes, -used % 4],
        "one gap at the end is enough: a column begins where the last one ends": [
            *(n + -n % step for n in sizes),
            0,
        ],
        "each row must be a multiple of 16 bytes; the entire buffer may be one by chance": [
            *sizes,
            -(used * ranks) % step,
        ],
        "a column is as wide as the *largest* shard, the first rank's": closed(
            [prod(s) // s[d] * (s[d] // ranks) for s, d in zip(shapes, dims, strict=True)]
        ),
        "rows are never split: ceil(length / N) of them, not ceil(elements / N)": closed(
            [-(-prod(s) // ranks) for s in shapes]
        ),
        "the parameter is split along `dim`": closed([width_of(s, ranks, 0) for s in shapes]),
    }
    return f"a row of {where}", list(got), wanted, slips
