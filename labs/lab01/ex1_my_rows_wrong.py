"""Wrong answers to exercise 1.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("1.1", "drops the remainder")
def my_rows(batch, group):
    """Rounds down and leaves the last rows to nobody."""
    share = len(batch) // group.size()
    return batch[group.rank() * share :][:share]


@wrong("1.1", "asked is a block")
def my_rows(batch, group):
    """Takes every N-th row."""
    return batch[group.rank() :: group.size()]


@wrong("1.1", "every rank has all rows")
def my_rows(batch, group):
    """Forgets that the program is the same on every rank."""
    return batch


wrong("1.1", "an index list copies").diff("""
Picks the right rows by a list of indices, which copies them.
- return batch[rank * rows // ranks : (rank + 1) * rows // ranks]
+ return batch[list(range(rank * rows // ranks, (rank + 1) * rows // ranks))]
""")


@wrong("1.1", "spread the remainder")
def my_rows(batch, group):
    """The last rank takes all that is left over."""
    rank, ranks = group.rank(), group.size()
    share = len(batch) // ranks
    return batch[rank * share :] if rank == ranks - 1 else batch[rank * share :][:share]


@wrong("1.1", "the first block is on no rank")
def my_rows(batch, group):
    """Counts ranks from 1."""
    share = -(-len(batch) // group.size())
    return batch[(group.rank() + 1) * share :][:share]


@wrong("1.1", "`comm.world()` is about the world")
def my_rows(batch, group):
    """Asks the world for rank and size."""
    group = comm.world()
    r, n, rows = group.rank(), group.size(), len(batch)
    return batch[r * rows // n : (r + 1) * rows // n]


@wrong("1.1", "`torch.distributed.get_rank()` is about the world")
def my_rows(batch, group):
    """Takes its number in the world."""
    import torch.distributed as dist

    r, n, rows = dist.get_rank(), group.size(), len(batch)
    return batch[r * rows // n : (r + 1) * rows // n]


@wrong("1.1", "tuple index out of range")
def my_rows(batch, group):
    """Counts rows as if a batch had two dimensions."""
    r, n, rows = group.rank(), group.size(), batch.numel() // batch.shape[1]
    return batch[r * rows // n : (r + 1) * rows // n]


@wrong("1.1", "not one that another has, too")
def my_rows(batch, group):
    """Gives every rank at least one row."""
    n, k, r = batch.size(0), group.size(), group.rank()
    low, high = r * n // k, (r + 1) * n // k
    return batch[low : max(high, low + 1)]


@wrong("1.1", "expected rows of the batch, a tensor ['any', 2], got None")
def my_rows(batch, group):
    """Returns nothing for an empty batch."""
    rank, ranks, rows = group.rank(), group.size(), len(batch)
    size, more = divmod(rows, ranks)
    return batch.split([size + (r < more) for r in range(ranks)])[rank] if rows else None
