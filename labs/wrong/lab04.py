"""Wrong answers to lab 04, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("4.1", "shard over 2 ranks: expected")
def pad_and_chunk(flat, ranks):
    """Leaves the last shard short."""
    return list(flat.chunk(ranks))
