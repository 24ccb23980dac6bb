"""Wrong answers to exercise 5.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("5.2", "only starts it").diff("""
Does not wait.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
+ comm.all_gather(flat.full.data, flat.shard.data, group)
""")


@wrong("5.2", "gathered into a fresh tensor")
def gather(flat, group):
    """Gathers into a new tensor; the views look at the old buffer."""
    flat.full = torch.empty(flat.shard.numel() * group.size())
    comm.all_gather(flat.full, flat.shard.data, group).wait()


wrong("5.2", "a version counter of its own").diff("""
Gathers into the buffer under autograd's eyes.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
+ flat.full.add_(0)
+ comm.all_gather(flat.full, flat.shard.data, group).wait()
""")


@wrong("5.2", "the unit is there twice")
def gather(flat, group):
    """Gathers beside the buffer and copies."""
    device.allocate(flat.full)
    gathered = torch.empty_like(flat.full)
    comm.all_gather(gathered, flat.shard.data, group).wait()
    flat.full.data.copy_(gathered)


wrong("5.2", "only 1/N of the unit").diff("""
Puts this rank's shard in its place and fetches nothing.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
+ flat.full.data.zero_()
+ flat.full.data.chunk(group.size())[group.rank()].copy_(flat.shard.data)
""")


@wrong("5.2", "sends twice the bytes")
def gather(flat, group):
    """An all-reduce of what is zero but for this rank's shard."""
    device.allocate(flat.full)
    flat.full.data.zero_()
    flat.full.data.chunk(group.size())[group.rank()].copy_(flat.shard.data)
    comm.all_reduce(flat.full.data, group).wait()


wrong("5.2", "hand both buffers over as `.data`").diff("""
Gathers from the Parameter, under autograd's eyes.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
+ comm.all_gather(flat.full.data, flat.shard, group).wait()
""")
wrong("5.2", "`device.allocate` first").diff("""
Gathers into a buffer that has no memory.
- device.allocate(flat.full)
""")
wrong("5.2", "`group` need not be the world").diff("""
From all ranks there are.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
+ comm.all_gather(flat.full.data, flat.shard.data, comm.world()).wait()
""")
