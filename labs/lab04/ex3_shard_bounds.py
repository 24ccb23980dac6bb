"""Exercise 4.3: Bounds of a parameter in a shard."""

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter
from minifsdp.layout import Layout


@reference(
    "4.3",
    hints=(
        "In the flat parameter the shard is `[rank * length, (rank + 1) * length)` with `length` the padded shard's; "
        "where does parameter `index` begin and end there?",
        "Subtract the shard's start from both ends of the parameter, then clamp both into `[0, length]`: "
        "what does not overlap becomes empty by itself.",
    ),
    forbids=(FlatParameter.__init__, Layout.__init__),
)
def shard_bounds(sizes: list[int], index: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the elements `[low, high)` of a rank's shard that belong to a parameter.

    Args:
        sizes: the number of elements of each parameter in the flat parameter, in order, without padding.
        index: the parameter's index in `sizes`.
        rank: the rank that holds the shard.
        ranks: N; each shard has ceil(sum(sizes) / N) elements, and the last shards end with padding.

    Returns:
        Positions in the shard, with `0 <= low <= high <=` its length, and `low == high` if the shard
        holds none of the parameter.
    """
    length = -(-sum(sizes) // ranks)
    begin = sum(sizes[:index]) - rank * length
    end = begin + sizes[index]
    return min(max(begin, 0), length), min(max(end, 0), length)


@check("4.3")
def check_shard_bounds(answer, variant):
    """Each parameter's part of each shard, empty where they do not meet, the padding nobody's."""
    for sizes in ([variant.size, 3, 1, 2 * variant.size, 5], [12, 3], [16, 16], [3, 0, 4, 0]):
        for ranks in (variant.ranks, 4, 16, 1):
            bounds_of(answer, sizes, ranks)


def bounds_of(answer, sizes, ranks):
    length = -(-sum(sizes) // ranks)
    owner = [index for index, size in enumerate(sizes) for _ in range(size)] + [None] * (-sum(sizes) % ranks)
    cells = [(index, rank) for rank in range(ranks) for index in range(len(sizes))]
    got = {}
    for index, rank in cells:
        given = list(sizes)
        found = answer(given, index, rank, ranks)
        expect("`sizes` afterwards", given, sizes, slip="it is the caller's list, and is only read")
        if not isinstance(found, (list, tuple)) or len(found) != 2 or not all(type(edge) is int for edge in found):
            what = f"rank {rank}, bounds of parameter {index} of sizes {sizes} over {ranks} ranks"
            raise AnswerError(f"{what}: expected two integers (low, high), got {describe(found)}")
        got[index, rank] = tuple(found)
    usual = usual_bounds(sizes, ranks)
    # a slip that explains the whole table rather than one cell of it
    slip = next((text for text, wrong in usual.items() if all(got[cell] == wrong[cell] for cell in cells)), None)
    for index, rank in cells:
        low, high = got[index, rank]
        owned = [at for at, each in enumerate(owner[rank * length : (rank + 1) * length]) if each == index]
        right = (low, high) == (owned[0], owned[-1] + 1) if owned else 0 <= low == high <= length
        if not right:
            wanted = f"[{owned[0]}, {owned[-1] + 1}]" if owned else f"an empty range within [0, {length}]"
            what = f"rank {rank}, bounds of parameter {index} of sizes {sizes} over {ranks} ranks"
            if slip is None:
                cell = (text for text, wrong in usual.items() if wrong[index, rank] == (low, high))
                slip = next(
                    cell, "where it begins and ends, less where the shard begins, both clamped into [0, length]"
                )
            raise AnswerError(f"{what}: expected {wanted}, got [{low}, {high}]\nlikely slip: {slip}")


def usual_bounds(sizes, ranks):
    """What usual slips give, by words, for each parameter and rank."""
    length, last = -(-sum(sizes) // ranks), len(sizes) - 1
    slips = {
        "positions in the whole flat parameter: subtract where the shard begins": {},
        "`high` is the last element instead of the one behind it": {},
        "beyond the shard: clamp both ends into [0, length]": {},
        "`low` is clamped, `high` is not: the parameter goes on in the next shard": {},
        "low above high: clamp both ends into [0, length], and what does not meet is empty": {},
        "the shard's length rounded down: shards are padded, so round up": {},
        "the padding belongs to no parameter, the last one ends before it": {},
        "offset and length, where the end is asked for": {},
        "a whole N of padding where N divides, or too long a shard: its length is ceil(sum / N)": {},
        "positions in the parameter: asked are positions in the shard": {},
        "parameters are not sharded one by one: the flat parameter is, and each shard has a part of some": {},
        "ranks count from 0: the shard of rank r begins at r * length": {},
        "a parameter begins where those before it end: `sum(sizes[:index])`, without its own size": {},
        "the last one's end is not the shard's: `low` is not clamped, or `high` not from below": {},
        "the empty range of what begins in a later shard lies behind this one's end: `low` is at most the length": {},
        "sizes repeat: `sizes.index(size)` finds the first parameter of that size, `index` says which is asked for": {},
    }
    for rank in range(ranks):
        for index, size in enumerate(sizes):
            offset, start, floor = sum(sizes[:index]), rank * length, rank * (sum(sizes) // ranks)
            begin, end = offset - start, offset + size - start
            low, high = clamped(begin, length), clamped(end, length)
            whole = max(offset, start), min(offset + size, start + length)
            long = sum(sizes) // ranks + 1
            longer = tuple(clamped(edge - rank * long, long) for edge in (offset, offset + size))
            own, twin = -(-size // ranks), sum(sizes[: sizes.index(size)]) - start
            after = clamped(begin - length, length), clamped(end - length, length)
            rounded = [clamped(edge, sum(sizes) // ranks) for edge in (offset - floor, offset + size - floor)]
            wrong = [
                (whole[0], max(whole)),
                (low, high - 1 if high > low else low),
                (begin, end),
                (max(begin, 0), max(end, 0)),
                (max(begin, 0), min(end, length)),
                tuple(rounded),
                (low, clamped(end + (-sum(sizes) % ranks if index == last else 0), length)),
                (low, high - low),
                longer,
                (whole[0] - offset, whole[1] - offset) if low < high else (0, 0),
                (0, clamped(size - rank * own, own)),
                after,
                (clamped(begin + size, length), clamped(end + size, length)),
                (low, min(end, length)),
                (max(begin, 0), max(begin, 0, min(end, length))),
                (clamped(twin, length), clamped(twin + size, length)),
            ]
            for table, cell in zip(slips.values(), wrong, strict=True):
                table[index, rank] = cell
    return slips


def clamped(edge, length):
    return min(max(edge, 0), length)
