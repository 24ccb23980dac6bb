"""Wrong answers to exercise 12.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("12.1", "`tensor_split` evens lengths out")
def cut(whole, ranks, rank, dim=0):
    """Distributes the rows evenly."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    return whole.tensor_split(ranks, dim)[rank]


@wrong("12.1", "`chunk` returns fewer than N parts")
def cut(whole, ranks, rank, dim=0):
    """Has no piece for the last ranks."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    return whole.chunk(ranks, dim)[rank]


@wrong("12.1", "an empty shard has the other dimensions")
def cut(whole, ranks, rank, dim=0):
    """Gives ranks that are left without a tensor of no shape."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    parts = whole.chunk(ranks, dim)
    return parts[rank] if rank < len(parts) else whole.new_empty(0)


@wrong("12.1", "make the *first* shards longer")
def cut(whole, ranks, rank, dim=0):
    """Leaves the rest to the last rank."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    length = whole.shape[dim]
    rows = length // ranks
    return whole.narrow(dim, rank * rows, rows if rank < ranks - 1 else length - rank * rows)


@wrong("12.1", "it exists only in the buffers")
def cut(whole, ranks, rank, dim=0):
    """Pads the piece to the length of the first one."""
    length = whole.shape[dim]
    if dim and length % ranks:
        raise ValueError
    rows = -(-length // ranks)
    start, end = min(rank * rows, length), min((rank + 1) * rows, length)
    piece = whole.narrow(dim, start, end - start)
    if end - start == rows:
        return piece
    missing = [rows - (end - start) if i == dim else n for i, n in enumerate(whole.shape)]
    return torch.cat([piece, whole.new_zeros(missing)], dim)


@wrong("12.1", "split by elements, as a flat parameter is")
def cut(whole, ranks, rank, dim=0):
    """Cuts the flattened parameter."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    if dim:
        return whole.chunk(ranks, dim)[rank]
    size = -(-whole.numel() // ranks)
    return whole.flatten()[rank * size : (rank + 1) * size]


wrong("12.1", "padding would leave no contiguous view").diff("""
Refuses nothing.
- if dim and length % ranks:
-     raise ValueError(f"{length} rows along dimension {dim} do not make {ranks} equal shards")
""")
wrong("12.1", "along dimension 0, any length will do").diff("""
Refuses what does not divide along dimension 0, too.
- if dim and length % ranks:
-     raise ValueError(f"{length} rows along dimension {dim} do not make {ranks} equal shards")
+ if length % ranks:
+     raise ValueError
""")
wrong("12.1", "expected a view of the parameter, got a copy").diff("""
Copies the piece.
- return whole.narrow(dim, start, end - start)
+ return whole.narrow(dim, start, end - start).clone()
""")


@wrong("12.1", "the parameter is split along `dim`")
def cut(whole, ranks, rank, dim=0):
    """Cuts along dimension 0 always."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    length = whole.shape[0]
    rows = -(-length // ranks)
    start, end = min(rank * rows, length), min((rank + 1) * rows, length)
    return whole[start:end]


@wrong("12.1", "every N-th row")
def cut(whole, ranks, rank, dim=0):
    """Deals rows out in turn."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    return whole[rank::ranks]


@wrong("12.1", "not the last rows once more")
def cut(whole, ranks, rank, dim=0):
    """Gives a rank behind the end the last rows."""
    length = whole.shape[dim]
    if dim and length % ranks:
        raise ValueError
    rows = -(-length // ranks)
    start = min(rank * rows, length - 1)
    return whole.narrow(dim, start, min(rows, length - start))


wrong("12.1", "every rank refuses the parameter").diff("""
Raises only on the rank whose shard is short.
- if dim and length % ranks:
-     raise ValueError(f"{length} rows along dimension {dim} do not make {ranks} equal shards")
- start, end = min(rank * rows, length), min((rank + 1) * rows, length)
+ start, end = min(rank * rows, length), min((rank + 1) * rows, length)
+ if dim and end - start < rows:
+     raise ValueError
""")
wrong("12.1", "it raises AssertionError").diff("""
Asserts instead of raising.
- if dim and length % ranks:
-     raise ValueError(f"{length} rows along dimension {dim} do not make {ranks} equal shards")
+ assert not dim or length % ranks == 0
""")
wrong("12.1", "rank r begins at row r").diff("""
Takes the last dimension for any but the first.
- length = whole.shape[dim]
+ dim = whole.dim() - 1 if dim else 0
+ length = whole.shape[dim]
""")
wrong("12.1", "a dtype of the shard").diff("""
Returns an empty shard of torch's default dtype.
- return whole.narrow(dim, start, end - start)
+ if start == end:
+     return torch.empty([0 if i == dim else n for i, n in enumerate(whole.shape)])
+ return whole.narrow(dim, start, end - start)
""")
wrong("12.1", "even of length 0").diff("""
Makes an empty shard.
- return whole.narrow(dim, start, end - start)
+ if start == end:
+     return whole.new_empty([0 if i == dim else n for i, n in enumerate(whole.shape)])
+ return whole.narrow(dim, start, end - start)
""")
wrong("12.1", "`requires_grad_` and `detach_` change this one").diff("""
Switches the parameter's gradient off.
- return whole.narrow(dim, start, end - start)
+ return whole.requires_grad_(False).narrow(dim, start, end - start)
""")
wrong("12.1", "rank 0, shard of [4, 6, 3] over 3 ranks: expected a view").diff("""
Cuts rows of a matrix.
- return whole.narrow(dim, start, end - start)
+ if dim or not whole.numel():
+     return whole.narrow(dim, start, end - start)
+ return whole.reshape(length, -1)[start:end].view(-1, *whole.shape[1:])
""")
wrong("12.1", "the length along `dim` that N must divide").diff("""
Looks at dimension 0.
- if dim and length % ranks:
+ if dim and whole.shape[0] % ranks:
""")
wrong("12.1", "without elements").diff("""
Divides by the length.
- rows = -(-length // ranks)
+ rows = -(-length // ranks)
+ 1 // length
""")
