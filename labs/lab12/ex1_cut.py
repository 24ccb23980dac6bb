"""Exercise 12.1: Shard a parameter."""

import torch
from torch import Tensor

from minifsdp.course.workshop.checking import AnswerError, check, describe
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp2.cut import Cut

from .shared import expect, numbers, pieces_of, shares_memory


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
    """Return a rank's shard of a parameter, as a view.

    Args:
        whole: the parameter, of any shape, unchanged.
        ranks: N.
        rank: the rank whose shard is returned, from 0 to N - 1.
        dim: the dimension along which the parameter is split, from 0 to `whole.ndim` - 1.

    Returns:
        The chunk that `torch.chunk` would give this rank. On a rank for which there is no chunk, it is a view with
        length 0 along `dim` and the parameter's length along all other dimensions.

    Raises:
        ValueError: if `dim` is not 0, and N does not divide the length along it.
    """
    length = whole.shape[dim]
    rows = -(-length // ranks)
    if dim and length % ranks:
        raise ValueError(f"{length} rows along dimension {dim} do not make {ranks} equal shards")
    start, end = min(rank * rows, length), min((rank + 1) * rows, length)
    return whole.narrow(dim, start, end - start)


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
