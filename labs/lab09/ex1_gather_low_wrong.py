"""Wrong answers to exercise 9.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("9.1", "a buffer for the cast shard")
def gather_low(full, shard, group):
    """Casts into a buffer of its own first, as torch does."""
    return comm.all_gather(full, shard.to(full.dtype), group)


@wrong("9.1", "fp32 went over the wire")
def gather_low(full, shard, group):
    """Gathers in fp32 and casts afterwards."""
    wide = torch.empty(full.numel(), dtype=shard.dtype)
    handle = comm.all_gather(wide, shard, group)
    handle.wait()
    full.copy_(wide)
    return handle


@wrong("9.1", "begins at rank * S")
def gather_low(full, shard, group):
    """Every rank casts its shard to the beginning of the buffer."""
    full[: shard.numel()].copy_(shard)
    return comm.all_gather(full, full[group.rank() * shard.numel() :][: shard.numel()], group)


@wrong("9.1", "lets nothing compute during the gather")
def gather_low(full, shard, group):
    """Waits for the gather."""
    mine = full[group.rank() * shard.numel() :][: shard.numel()]
    mine.copy_(shard)
    handle = comm.all_gather(full, mine, group)
    handle.wait()
    return handle


@wrong("9.1", "the handle is lost")
def gather_low(full, shard, group):
    """Returns nothing."""
    mine = full[group.rank() * shard.numel() :][: shard.numel()]
    mine.copy_(shard)
    comm.all_gather(full, mine, group)


@wrong("9.1", "which the optimizer updates")
def gather_low(full, shard, group):
    """Casts the shard itself."""
    shard.data = shard.to(full.dtype)
    return comm.all_gather(full, shard, group)


@wrong("9.1", "a collective does not cast")
def gather_low(full, shard, group):
    """Sends fp32 into a buffer of another dtype."""
    return comm.all_gather(full, shard, group)


@wrong("9.1", "the others' have to be fetched")
def gather_low(full, shard, group):
    """Casts this rank's own part and fetches nothing."""
    full[group.rank() * shard.numel() :][: shard.numel()].copy_(shard)
    return comm.Done()


@wrong("9.1", "NCCL does not")
def gather_low(full, shard, group):
    """Sends from the beginning of `full` on every rank, which gloo forgives."""
    mine = full[: shard.numel()]
    mine.copy_(shard)
    return comm.all_gather(full, mine, group)


@wrong("9.1", "need not be the world")
def gather_low(full, shard, group):
    """Gathers over the world."""
    mine = full[group.rank() * shard.numel() :][: shard.numel()]
    mine.copy_(shard)
    return comm.all_gather(full, mine, comm.world())


@wrong("9.1", "a part for each of `group.size()` ranks")
def gather_low(full, shard, group):
    """Takes the group for two ranks."""
    mine = full.chunk(2)[min(group.rank(), 1)]
    mine.copy_(shard)
    return comm.all_gather(full, mine, group)


wrong("9.1", "queues the copy and goes on").diff("""
Lets the host wait for the copy.
- mine.copy_(shard, non_blocking=True)
+ mine.copy_(shard)
""")


@wrong("9.1", "copies for which the host waits")
def gather_low(full, shard, group):
    """Assigns to a slice, which copies with the host waiting."""
    at = group.rank() * shard.numel()
    full[at : at + shard.numel()] = shard
    return comm.all_gather(full, full[at : at + shard.numel()], group)


wrong("9.1", "cast it for every gather").diff("""
Casts once into each buffer.
- mine.copy_(shard, non_blocking=True)
+ if not hasattr(full, "cast"):
+     mine.copy_(shard, non_blocking=True)
+ full.cast = True
""")
wrong("9.1", "has fewer digits than fp16").diff("""
Casts to bf16, and from there to the dtype of the buffer.
- mine.copy_(shard, non_blocking=True)
+ mine.copy_(shard if full.dtype is torch.bfloat16 else shard.bfloat16(), non_blocking=True)
""")
