"""What several exercises of lab 12 share."""

from functools import partial
from itertools import accumulate
from math import prod

import torch

from minifsdp.course.workshop.checking import AnswerError, same
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


SPECIAL = torch.tensor([float("inf"), 3e38, 1e-30, float("nan")])


def special_values(got, wanted):
    """Compare; NaN equals NaN."""
    if not torch.equal(got.nan_to_num(7.0, 8.0), wanted.nan_to_num(7.0, 8.0)):
        raise AnswerError(
            f"{wanted.tolist()} in the buffer: got {got.tolist()}\n"
            "likely slip: large and small numbers, infinities and NaNs are copied as they are, through no other dtype"
        )
