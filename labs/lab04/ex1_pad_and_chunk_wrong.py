"""Wrong answers to exercise 4.1, each with words that its rejection must contain."""

import torch

from minifsdp.course.workshop.wrong import wrong


@wrong("4.1", "`chunk` does not pad")
def pad_and_chunk(flat, ranks):
    """Leaves the last shard short."""
    return list(flat.chunk(ranks))


@wrong("4.1", "a whole N of padding where N divides")
def pad_and_chunk(flat, ranks):
    """Pads by a whole N where N divides."""
    return list(torch.cat([flat, flat.new_zeros(ranks - flat.numel() % ranks)]).chunk(ranks))


wrong("4.1", "uninitialized memory").diff("""
Leaves in the padding what was in memory.
- padded = flat.new_zeros(flat.numel() + -flat.numel() % ranks)
+ padded = torch.empty(flat.numel() + -flat.numel() % ranks, dtype=flat.dtype)
""")


@wrong("4.1", "every shard is padded by itself")
def pad_and_chunk(flat, ranks):
    """Shares the elements out first and pads every shard."""
    length = -(-flat.numel() // ranks)
    return [torch.cat([part, part.new_zeros(length - part.numel())]) for part in flat.tensor_split(ranks)]


@wrong("4.1", "the padding stands in front")
def pad_and_chunk(flat, ranks):
    """Pads in front."""
    return list(torch.cat([flat.new_zeros(-flat.numel() % ranks), flat]).chunk(ranks))


@wrong("4.1", "every N-th element")
def pad_and_chunk(flat, ranks):
    """Deals the elements out in turn."""
    padded = torch.cat([flat, flat.new_zeros(-flat.numel() % ranks)])
    return list(padded.view(-1, ranks).unbind(1))


@wrong("4.1", "another dtype")
def pad_and_chunk(flat, ranks):
    """Pads with float32, whatever the dtype."""
    return list(torch.cat([flat, torch.zeros(-flat.numel() % ranks)]).chunk(ranks))


@wrong("4.1", "every shard is a copy")
def pad_and_chunk(flat, ranks):
    """Copies every shard."""
    padded = torch.cat([flat, flat.new_zeros(-flat.numel() % ranks)])
    return [shard.clone() for shard in padded.chunk(ranks)]


@wrong("4.1", "the shards are views of `flat`")
def pad_and_chunk(flat, ranks):
    """Makes a buffer only where padding is needed, else hands out views of the input."""
    padding = -flat.numel() % ranks
    if padding:
        flat = torch.cat([flat, flat.new_zeros(padding)])
    return list(flat.chunk(ranks))


wrong("4.1", "expected [1, 2, 3, 4] ([4] int64), got [1.0, 2.0, 3.0, 4.0]").diff("""
Makes a float32 buffer for integers.
- padded = flat.new_zeros(flat.numel() + -flat.numel() % ranks)
+ padded = torch.zeros(
+     flat.numel() + -flat.numel() % ranks, dtype=flat.dtype if flat.is_floating_point() else torch.float32
+ )
""")


@wrong("4.1", "a single rank's shard is a part of a new buffer")
def pad_and_chunk(flat, ranks):
    """Gives `flat` itself back on one rank."""
    if ranks == 1:
        return [flat]
    size = -(-flat.numel() // ranks)
    b = flat.new_zeros(ranks * size)
    b[: flat.numel()] = flat
    return [b[i * size : (i + 1) * size] for i in range(ranks)]
