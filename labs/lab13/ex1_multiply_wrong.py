"""Wrong answers to exercise 13.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("13.1", "the gather joins along the first dimension").diff("""
Reads the gathered parts as if they lay side by side.
- return gathered.movedim(0, 1).flatten(1)[:, : w.shape[1]]
+ return gathered.view(x.shape[0], -1)[:, : w.shape[1]]
""")
wrong("13.1", "the columns beyond `out` are padding").diff("""
Keeps the padding.
- return gathered.movedim(0, 1).flatten(1)[:, : w.shape[1]]
+ return gathered.movedim(0, 1).flatten(1)
""")
wrong("13.1", "this is only this rank's partial sum").diff("""
Adds nothing up.
-     comm.all_reduce(product, group).wait()
""")
wrong("13.1", "a mean also divides by t").diff("""
Takes the mean, as of gradients.
-     comm.all_reduce(product, group).wait()
+     comm.all_reduce(product, group, comm.MEAN).wait()
""")


@wrong("13.1", "the weight was gathered, as FSDP does")
def multiply(x, w, by, group):
    """Gathers the weight's columns, and multiplies the whole."""
    t, rank = group.size(), group.rank()
    if by == "rows":
        size = -(-w.shape[0] // t)
        product = x[:, rank * size : (rank + 1) * size] @ w[rank * size : (rank + 1) * size]
        comm.all_reduce(product, group).wait()
        return product
    size = -(-w.shape[1] // t)
    part = w[:, rank * size : (rank + 1) * size].t().contiguous()
    if part.shape[0] < size:
        part = torch.cat([part, part.new_zeros(size - part.shape[0], w.shape[0])])
    gathered = part.new_empty(t * size, w.shape[0])
    comm.all_gather(gathered.view(-1), part.view(-1), group).wait()
    return x @ gathered[: w.shape[1]].t()


@wrong("13.1", "nothing was sent")
def multiply(x, w, by, group):
    """Multiplies whole matrices."""
    return x @ w


@wrong("13.1", "an all-reduce of columns padded with zeros")
def multiply(x, w, by, group):
    """Sums products that are zero outside of this rank's part."""
    dim = 1 if by == "columns" else 0
    size = -(-w.shape[dim] // group.size())
    mine = slice(group.rank() * size, (group.rank() + 1) * size)
    if by == "rows":
        product = x[:, mine] @ w[mine]
    else:
        product = x.new_zeros(x.shape[0], w.shape[1])
        product[:, mine] = x @ w[:, mine]
    comm.all_reduce(product, group).wait()
    return product


@wrong("13.1", "partial sums need no gather")
def multiply(x, w, by, group):
    """Gathers the partial sums and adds them up by itself."""
    t, rank = group.size(), group.rank()
    dim = 1 if by == "columns" else 0
    size = -(-w.shape[dim] // t)
    mine = slice(rank * size, (rank + 1) * size)
    part = F.pad(w[:, mine], (0, size - w[:, mine].shape[1])) if by == "columns" else w[mine]
    product = (x if by == "columns" else x[:, mine]) @ part
    gathered = product.new_empty(t, *product.shape)
    comm.all_gather(gathered.view(-1), product.view(-1), group).wait()
    return gathered.sum(0) if by == "rows" else gathered.movedim(0, 1).flatten(1)[:, : w.shape[1]]


@wrong("13.1", "each rank has to multiply only by its shard of w")
def multiply(x, w, by, group):
    """Multiplies whole matrices, and sends its part of the product."""
    t, rank = group.size(), group.rank()
    if by == "rows":
        size = -(-w.shape[0] // t)
        masked = torch.zeros_like(w)
        masked[rank * size : (rank + 1) * size] = w[rank * size : (rank + 1) * size]
        product = x @ masked
        comm.all_reduce(product, group).wait()
        return product
    size = -(-w.shape[1] // t)
    part = (x @ w)[:, rank * size : (rank + 1) * size]
    part = F.pad(part, (0, size - part.shape[1])).contiguous()
    gathered = part.new_empty(t, *part.shape)
    comm.all_gather(gathered.view(-1), part.view(-1), group).wait()
    return gathered.movedim(0, 1).flatten(1)[:, : w.shape[1]]


@wrong("13.1", "`chunk` returns fewer than t parts")
def multiply(x, w, by, group):
    """Has no part for ranks that are left without."""
    t, rank = group.size(), group.rank()
    if by == "rows":
        product = x.chunk(t, 1)[rank] @ w.chunk(t, 0)[rank]
        comm.all_reduce(product, group).wait()
        return product
    size = -(-w.shape[1] // t)
    part = w.chunk(t, 1)[rank]
    product = x @ F.pad(part, (0, size - part.shape[1]))
    gathered = product.new_empty(t, *product.shape)
    comm.all_gather(gathered.view(-1), product.view(-1), group).wait()
    return gathered.movedim(0, 1).flatten(1)[:, : w.shape[1]]


@wrong("13.1", "remove the columns beyond `out` after the gather")
def multiply(x, w, by, group):
    """Gathers products of unequal size."""
    t, rank = group.size(), group.rank()
    size = -(-w.shape[0 if by == "rows" else 1] // t)
    mine = slice(rank * size, (rank + 1) * size)
    if by == "rows":
        product = x[:, mine] @ w[mine]
        comm.all_reduce(product, group).wait()
        return product
    product = (x @ w[:, mine]).t().contiguous()
    gathered = x.new_empty(w.shape[1], x.shape[0])
    comm.all_gather(gathered, product, group).wait()
    return gathered.t()


@wrong("13.1", "an all-gather needs shards of equal size")
def multiply(x, w, by, group):
    """Gathers unequal products into a buffer for t parts of its own size."""
    t, rank = group.size(), group.rank()
    size = -(-w.shape[0 if by == "rows" else 1] // t)
    mine = slice(rank * size, (rank + 1) * size)
    if by == "rows":
        product = x[:, mine] @ w[mine]
        comm.all_reduce(product, group).wait()
        return product
    product = (x @ w[:, mine]).t().contiguous()
    gathered = x.new_empty(t * product.shape[0], x.shape[0])
    comm.all_gather(gathered, product, group).wait()
    return gathered[: w.shape[1]].t()


wrong("13.1", "`comm.all_gather` only starts").diff("""
Reads the gathered columns without a wait.
- comm.all_gather(gathered.view(-1), product.view(-1), group).wait()
+ comm.all_gather(gathered.view(-1), product.view(-1), group)
""")
wrong("13.1", "`comm.all_reduce` only starts").diff("""
Returns the partial sum without a wait.
-     comm.all_reduce(product, group).wait()
+     comm.all_reduce(product, group)
""")


@wrong("13.1", "`tensor_split` evens lengths out")
def multiply(x, w, by, group):
    """Has shards of even lengths."""
    t, rank = group.size(), group.rank()
    if by == "rows":
        product = x.tensor_split(t, 1)[rank] @ w.tensor_split(t, 0)[rank]
        comm.all_reduce(product, group).wait()
        return product
    parts = w.tensor_split(t, 1)
    product = x @ F.pad(parts[rank], (0, parts[0].shape[1] - parts[rank].shape[1]))
    gathered = product.new_empty(t, *product.shape)
    comm.all_gather(gathered.view(-1), product.view(-1), group).wait()
    return torch.cat([each[:, : part.shape[1]] for each, part in zip(gathered, parts, strict=True)], 1)


wrong("13.1", "a rank without rows adds zeros").diff("""
Adds the last rows again on ranks without rows.
-     mine = slice(rank * size, (rank + 1) * size)
+     start = min(rank, -(-w.shape[0] // size) - 1) * size
+     mine = slice(start, start + size)
""")
wrong("13.1", "sent in another dtype than that of x and w: 0.5 times the bytes").diff("""
Sends float32.
-     comm.all_reduce(product, group).wait()
-     return product
+     sent = product.float()
+     comm.all_reduce(sent, group).wait()
+     return sent.to(product.dtype)
""")
wrong("13.1", "a later call overwrites what this one returned").diff("""
Keeps a buffer for each shape.
- def multiply(x, w, by, group):
+ def multiply(x, w, by, group, kept={}):
-     product = x[:, mine] @ w[mine]
+     key = x.shape[0], w.shape[1]
+     product = torch.matmul(x[:, mine], w[mine], out=kept.setdefault(key, x.new_empty(key)))
""")
