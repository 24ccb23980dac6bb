"""Wrong answers to exercise 12.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("12.4", "after a short chunk, for ranks without a chunk, in the gap").diff("""
Leaves padding as it was.
- packed.zero_()
""")


@wrong("12.4", "the ends of short columns are not")
def chunk_cat(packed, gradients, dims, sizes):
    """Clears the gap alone."""
    packed[:, packed.shape[1] - sizes[-1] :] = 0
    for gradient, dim, column in zip(gradients, dims, packed.split(list(sizes), 1), strict=False):
        for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
            row[: part.numel()] = part.flatten()


@wrong("12.4", "each short chunk is padded by itself")
def chunk_cat(packed, gradients, dims, sizes):
    """Concatenates first, and pads behind all."""
    packed.zero_()
    for r, row in enumerate(packed):
        parts = [g.chunk(packed.shape[0], dim) for g, dim in zip(gradients, dims, strict=False)]
        mine = [part[r].flatten() for part in parts if r < len(part)]
        if mine:
            both = torch.cat(mine)
            row[: both.numel()] = both


@wrong("12.4", "the buffer is filled in place")
def chunk_cat(packed, gradients, dims, sizes):
    """Makes another buffer."""
    packed = torch.zeros_like(packed)
    for gradient, dim, column in zip(gradients, dims, packed.split(list(sizes), 1), strict=False):
        for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
            row[: part.numel()] = part.flatten()


@wrong("12.4", "the shards of parameters and gradients must agree")
def chunk_cat(packed, gradients, dims, sizes):
    """Distributes rows evenly."""
    packed.zero_()
    for gradient, dim, column in zip(gradients, dims, packed.split(list(sizes), 1), strict=False):
        for part, row in zip(gradient.tensor_split(packed.shape[0], dim), column, strict=False):
            row[: part.numel()] = part.flatten()


@wrong("12.4", "the gradients of other elements")
def chunk_cat(packed, gradients, dims, sizes):
    """Cuts the flattened gradient."""
    packed.zero_()
    for gradient, dim, column in zip(gradients, dims, packed.split(list(sizes), 1), strict=False):
        parts = gradient.chunk(packed.shape[0], dim) if dim else gradient.flatten().chunk(packed.shape[0])
        for part, row in zip(parts, column, strict=False):
            row[: part.numel()] = part.flatten()


@wrong("12.4", "they are not contiguous")
def chunk_cat(packed, gradients, dims, sizes):
    """Lays a gradient into its column as it is, whatever the dimension."""
    packed.zero_()
    for gradient, column in zip(gradients, packed.split(list(sizes), 1), strict=False):
        for part, row in zip(gradient.flatten().split(column.shape[1]), column, strict=False):
            row[: part.numel()] = part


wrong("12.4", "here nothing is divided").diff("""
Takes the mean before the sum.
-         row[: part.numel()].view(part.shape).copy_(part)
+         row[: part.numel()].view(part.shape).copy_(part / packed.shape[0])
""")
wrong("12.4", "passed through a narrower dtype").diff("""
Casts to bfloat16 on the way.
-         row[: part.numel()].view(part.shape).copy_(part)
+         row[: part.numel()].view(part.shape).copy_(part.bfloat16())
""")
wrong("12.4", "infinities and NaNs are packed as they are").diff("""
Replaces NaNs and infinities.
-         row[: part.numel()].view(part.shape).copy_(part)
+         row[: part.numel()].view(part.shape).copy_(part.nan_to_num())
""")
wrong("12.4", "they fill the beginning of their row").diff("""
Copies short chunks to whole rows.
-         row[: part.numel()].view(part.shape).copy_(part)
+         row.view(part.shape).copy_(part)
""")
wrong("12.4", "all passed through the first one's").diff("""
Casts all gradients to the first one's dtype.
-     for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
+     for part, row in zip(gradient.to(gradients[0].dtype).chunk(packed.shape[0], dim), column, strict=False):
""")
wrong("12.4", "which may be 2 or more").diff("""
Treats all dimensions but the first as the second.
-     for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
+     for part, row in zip(gradient.chunk(packed.shape[0], min(dim, 1)), column, strict=False):
""")
wrong("12.4", "may be stored in another order than its shape's").diff("""
Takes elements in the order of memory.
-     for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
+     gradient = gradient.as_strided(gradient.shape, torch.empty(gradient.shape).stride())
+     for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
""")
wrong("12.4", "belong to the caller, who frees them").diff("""
Frees each gradient when it is packed.
-     for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
-         row[: part.numel()].view(part.shape).copy_(part)
+     for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
+         row[: part.numel()].view(part.shape).copy_(part)
+     gradient.untyped_storage().resize_(0)
""")
wrong("12.4", "[2, 9] float64, got a tensor [2, 9] float64").diff("""
Casts to float32 on the way.
-         row[: part.numel()].view(part.shape).copy_(part)
+         row[: part.numel()].view(part.shape).copy_(part.float())
""")
