"""Wrong answers to exercise 4.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("4.3", "subtract where the shard begins")
def shard_bounds(sizes, index, rank, ranks):
    """Positions in the whole flat parameter."""
    length = -(-sum(sizes) // ranks)
    offset = sum(sizes[:index])
    low, high = max(offset, rank * length), min(offset + sizes[index], (rank + 1) * length)
    return low, max(low, high)


wrong("4.3", "`high` is the last element instead of the one behind it").diff("""
Includes the end, as the indices inside torch's FlatParamHandle do.
- end = begin + sizes[index]
- return min(max(begin, 0), length), min(max(end, 0), length)
+ low, high = (min(max(edge, 0), length) for edge in (begin, begin + sizes[index]))
+ return low, (high - 1 if high > low else low)
""")
wrong("4.3", "low above high").diff("""
A length below zero where parameter and shard do not meet.
- end = begin + sizes[index]
- return min(max(begin, 0), length), min(max(end, 0), length)
+ return max(begin, 0), min(begin + sizes[index], length)
""")


@wrong("4.3", "the shard's length rounded down")
def shard_bounds(sizes, index, rank, ranks):
    """Divides without padding."""
    length = sum(sizes) // ranks
    begin = sum(sizes[:index]) - rank * length
    low, high = (min(max(edge, 0), length) for edge in (begin, begin + sizes[index]))
    return low, high


wrong("4.3", "the padding belongs to no parameter").diff("""
Lets the last parameter have the padding.
- end = begin + sizes[index]
- return min(max(begin, 0), length), min(max(end, 0), length)
+ end = begin + sizes[index] if index < len(sizes) - 1 else ranks * length
+ low, high = (min(max(edge, 0), length) for edge in (begin, end))
+ return low, high
""")
wrong("4.3", "`low` is clamped, `high` is not").diff("""
Lets a parameter end behind the shard.
- end = begin + sizes[index]
- return min(max(begin, 0), length), min(max(end, 0), length)
+ return max(begin, 0), max(begin + sizes[index], 0)
""")
wrong("4.3", "`sizes` afterwards").diff("""
Appends the padding to its caller's list.
- length = -(-sum(sizes) // ranks)
+ sizes.append(-sum(sizes) % ranks)
+ length = sum(sizes) // ranks
""")
wrong("4.3", "or too long a shard").diff("""
Pads by a whole N where N divides.
- length = -(-sum(sizes) // ranks)
+ length = sum(sizes) // ranks + 1
""")
wrong("4.3", "without its own size").diff("""
Begins a parameter where it ends.
- begin = sum(sizes[:index]) - rank * length
+ begin = sum(sizes[: index + 1]) - rank * length
""")


@wrong("4.3", "parameters are not sharded one by one")
def shard_bounds(sizes, index, rank, ranks):
    """Shards each parameter by itself."""
    length = -(-sizes[index] // ranks)
    return 0, max(0, min(length, sizes[index] - rank * length))


wrong("4.3", "the shard of rank r begins at r * length").diff("""
Counts ranks from 1.
- begin = sum(sizes[:index]) - rank * length
+ begin = sum(sizes[:index]) - (rank + 1) * length
""")


@wrong("4.3", "positions in the parameter: asked")
def shard_bounds(sizes, index, rank, ranks):
    """Counts from the parameter's beginning."""
    length = -(-sum(sizes) // ranks)
    off = sum(sizes[:index])
    low, high = max(rank * length, off), min((rank + 1) * length, off + sizes[index])
    return (low - off, high - off) if low < high else (0, 0)


@wrong("4.3", "lies behind this one's end")
def shard_bounds(sizes, index, rank, ranks):
    """Lets an empty range lie behind the end of the shard."""
    size = -(-sum(sizes) // ranks)
    a = sum(sizes[:index]) - rank * size
    low = max(0, a)
    high = max(low, min(size, a + sizes[index]))
    return low, high


@wrong("4.3", "finds the first parameter of that size")
def shard_bounds(sizes, index, rank, ranks):
    """Looks the parameter up by its size, which another one may have, too."""
    size = -(-sum(sizes) // ranks)
    a = sum(sizes[: sizes.index(sizes[index])]) - rank * size
    return min(max(0, a), size), min(max(0, a + sizes[index]), size)


wrong("4.3", "of sizes [3, 0, 4, 0]").diff("""
Finds a parameter by its last element, which an empty one does not have.
- end = begin + sizes[index]
- return min(max(begin, 0), length), min(max(end, 0), length)
+ last = begin + max(sizes[index], 1) - 1
+ return min(max(begin, 0), length), min(max(last + 1, 0), length)
""")
