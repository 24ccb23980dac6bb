"""Wrong answers to exercise 12.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("12.3", "`reshape` of a non-contiguous view is a copy").diff("""
Flattens the chunks of a parameter, which copies those along other dimensions.
-         part.copy_(row[: part.numel()].view(part.shape))
+         part.reshape(-1).copy_(row[: part.numel()])
""")
wrong("12.3", "passed through a narrower dtype").diff("""
Casts to bfloat16 on the way.
-         part.copy_(row[: part.numel()].view(part.shape))
+         part.copy_(row[: part.numel()].view(part.shape).bfloat16())
""")


@wrong("12.3", "`=` only names another tensor")
def copy_out(gathered, params, dims, sizes, ranks):
    """Builds the parameters and drops them."""
    for whole, dim, column in zip(params, dims, gathered.view(ranks, -1).split(list(sizes), 1), strict=False):
        parts = [
            row[: part.numel()].view(part.shape) for part, row in zip(whole.chunk(ranks, dim), column, strict=False)
        ]
        whole = torch.cat(parts, dim)


@wrong("12.3", "copy into them")
def copy_out(gathered, params, dims, sizes, ranks):
    """Gives the parameters other memory."""
    for whole, dim, column in zip(params, dims, gathered.view(ranks, -1).split(list(sizes), 1), strict=False):
        parts = [
            row[: part.numel()].view(part.shape) for part, row in zip(whole.chunk(ranks, dim), column, strict=False)
        ]
        whole.data = torch.cat(parts, dim)


@wrong("12.3", "the buffer is in rank order")
def copy_out(gathered, params, dims, sizes, ranks):
    """Reads the buffer in parameter order."""
    start = 0
    for whole, size in zip(params, sizes, strict=False):
        whole.copy_(gathered[start : start + whole.numel()].view(whole.shape))
        start += ranks * size


@wrong("12.3", "shards interleave")
def copy_out(gathered, params, dims, sizes, ranks):
    """Lays pieces one behind the other, whatever the dimension."""
    for whole, column in zip(params, gathered.view(ranks, -1).split(list(sizes), 1), strict=False):
        whole.copy_(column.flatten()[: whole.numel()].view(whole.shape))


@wrong("12.3", "as many as fit")
def copy_out(gathered, params, dims, sizes, ranks):
    """Copies whole rows to short pieces."""
    for whole, dim, column in zip(params, dims, gathered.view(ranks, -1).split(list(sizes), 1), strict=False):
        for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
            part.copy_(row.view(part.shape))


wrong("12.3", "some of the parameter was never written").diff("""
Leaves the last rank's piece out.
-     for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
+     for part, row in zip(whole.chunk(ranks, dim), column[:-1], strict=False):
""")
wrong("12.3", "is read here, not written to").diff("""
Clears the buffer behind it.
-         part.copy_(row[: part.numel()].view(part.shape))
+         part.copy_(row[: part.numel()].view(part.shape))
+         row.zero_()
""")


@wrong("12.3", "padding was copied, too")
def copy_out(gathered, params, dims, sizes, ranks):
    """Distributes rows evenly, so that padding lands inside."""
    for whole, dim, column in zip(params, dims, gathered.view(ranks, -1).split(list(sizes), 1), strict=False):
        for part, row in zip(whole.tensor_split(ranks, dim), column.flip(0).flip(0), strict=False):
            part.copy_(row[row.numel() - part.numel() :].view(part.shape))


wrong("12.3", "which may be 2 or more").diff("""
Treats all dimensions but the first as the second.
-     for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
+     for part, row in zip(whole.chunk(ranks, min(dim, 1)), column, strict=False):
""")
wrong("12.3", "`tensor_split` evens lengths out").diff("""
Has parts of even lengths.
-     for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
+     for part, row in zip(whole.tensor_split(ranks, dim), column, strict=False):
""")
wrong("12.3", "expected a tensor [5, 3] float64, got").diff("""
Casts to float32 on the way.
-         part.copy_(row[: part.numel()].view(part.shape))
+         part.copy_(row[: part.numel()].view(part.shape).float())
""")
wrong("12.3", "a row ends with the gap").diff("""
Forgets the gap.
- columns = gathered.view(ranks, -1).split(list(sizes), 1)
+ share = sum(sizes[:-1])
+ columns = gathered[: ranks * share].view(ranks, share).split(list(sizes[:-1]), 1)
""")
wrong("12.3", "its memory is given back later").diff("""
Frees the buffer.
- for whole, dim, column in zip(params, dims, columns, strict=False):
-     for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
-         part.copy_(row[: part.numel()].view(part.shape))
+ for whole, dim, column in zip(params, dims, columns, strict=False):
+     for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
+         part.copy_(row[: part.numel()].view(part.shape))
+ gathered.untyped_storage().resize_(0)
""")
