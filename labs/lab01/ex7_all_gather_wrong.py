"""Wrong answers to exercise 1.7, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("1.7", "N steps instead of N - 1").diff("""
Takes one step too many, in which its own shard comes home.
- chunks = output.view(ranks, shard.numel())
+ chunks = output.view(ranks, -1)
- for step in range(ranks - 1):
+ for step in range(ranks):
""")


@wrong("1.7", "its own shard is missing")
def all_gather(output, shard, group, exchange):
    """Does not put its own shard into the output."""
    rank, ranks = group.rank(), group.size()
    chunks, passing = output.view(ranks, -1), shard
    for step in range(ranks - 1):
        arriving = chunks[(rank - 1 - step) % ranks]
        exchange(passing, arriving, group)
        passing = arriving


wrong("1.7", "pass on what has arrived").diff("""
Sends its own shard in every step.
- chunks = output.view(ranks, shard.numel())
+ chunks = output.view(ranks, -1)
- exchange(chunks[(rank - step) % ranks], chunks[(rank - 1 - step) % ranks], group)
+ exchange(shard, chunks[(rank - 1 - step) % ranks], group)
""")


@wrong("1.7", "in the order of arrival")
def all_gather(output, shard, group, exchange):
    """Stacks the shards as they come in."""
    ranks = group.size()
    chunks = output.view(ranks, -1)
    received = [shard.clone()]
    for _ in range(ranks - 1):
        received.append(torch.empty_like(shard))
        exchange(received[-2], received[-1], group)
    chunks.copy_(torch.stack(received))


wrong("1.7", "the whole tensor goes round").diff("""
Sends the whole output in every step: right values, N times the bytes.
- chunks = output.view(ranks, shard.numel())
+ chunks = output.view(ranks, -1)
- exchange(chunks[(rank - step) % ranks], chunks[(rank - 1 - step) % ranks], group)
+ arriving = torch.empty_like(output)
+ exchange(output, arriving, group)
+ chunks[(rank - 1 - step) % ranks] = arriving.view(ranks, -1)[(rank - 1 - step) % ranks]
""")
wrong("1.7", "one place too far").diff("""
Puts what arrives where its own shard belongs, and so on round the ring: one off.
- chunks = output.view(ranks, shard.numel())
- chunks[rank].copy_(shard)
+ chunks = output.view(ranks, -1)
+ chunks[(rank + 1) % ranks].copy_(shard)
- exchange(chunks[(rank - step) % ranks], chunks[(rank - 1 - step) % ranks], group)
+ exchange(chunks[(rank + 1 - step) % ranks], chunks[(rank - step) % ranks], group)
""")
wrong("1.7", "another buffer is memory for nothing").diff("""
Receives into a fresh buffer and copies from it: right values, a chunk more memory.
- chunks = output.view(ranks, shard.numel())
+ chunks = output.view(ranks, -1)
- exchange(chunks[(rank - step) % ranks], chunks[(rank - 1 - step) % ranks], group)
+ arriving = device.empty(shard.numel(), shard.dtype, "communication", shard.device)
+ exchange(chunks[(rank - step) % ranks], arriving, group)
+ chunks[(rank - 1 - step) % ranks].copy_(arriving)
""")


@wrong("1.7", "`comm.world()` is about the world")
def all_gather(output, shard, group, exchange):
    """Exchanges in the world."""
    group = comm.world()
    r, n = group.rank(), group.size()
    chunks = output.view(n, shard.numel())
    chunks[r].copy_(shard)
    for s in range(n - 1):
        exchange(chunks[(r - s) % n], chunks[(r - 1 - s) % n], group)


@wrong("1.7", "over 1 ranks: expected [0], got [none]")
def all_gather(output, shard, group, exchange):
    """Copies its shard in the first step, and with one rank there is none."""
    r, n = group.rank(), group.size()
    chunks = output.view(n, shard.numel())
    for s in range(n - 1):
        if s == 0:
            chunks[r].copy_(shard)
        exchange(chunks[(r - s) % n], chunks[(r - 1 - s) % n], group)


@wrong("1.7", "it would send to 0, which is itself")
def all_gather(output, shard, group, exchange):
    """Takes at least one step."""
    r, n = group.rank(), group.size()
    chunks = output.view(n, shard.numel())
    chunks[r].copy_(shard)
    for s in range(max(1, n - 1)):
        exchange(chunks[(r - s) % n], chunks[(r - 1 - s) % n], group)
