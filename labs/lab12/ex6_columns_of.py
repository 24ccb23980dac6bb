"""Exercise 12.6: Pad to 16 bytes."""

from collections.abc import Sequence
from math import prod

from minifsdp.course.workshop.checking import AnswerError, check, describe
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp2.cut import Rows

from .shared import GROUPS, expect, width_of


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
    """Return the number of elements of each parameter in a rank's row, and of the gap after them.

    Args:
        shapes: the shapes of the unsharded parameters, which have at least one element each.
        dims: the dimension along which each parameter is split, as in 12.1.
        ranks: N.
        itemsize: bytes of an element: 1, 2, 4, 8 or 16.

    Returns:
        For each parameter, the number of elements in the first rank's shard, which is the largest. Then the smallest
        number of elements that makes the row a multiple of 16 bytes.
    """
    sizes = []
    for shape, dim in zip(shapes, dims, strict=True):
        rows = -(-shape[dim] // ranks)
        sizes.append(rows * prod(shape[:dim]) * prod(shape[dim + 1 :]))
    return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]


def wanted_columns(shapes, dims, ranks, itemsize):
    sizes = [width_of(shape, ranks, dim) for shape, dim in zip(shapes, dims, strict=True)]
    nbytes = sum(sizes) * itemsize
    return [*sizes, (-nbytes % 16) // itemsize]


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
