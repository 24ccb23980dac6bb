"""Wrong answers to exercise 3.4, each with words that its rejection must contain."""

from minifsdp import comm, device
from minifsdp.course.workshop.wrong import wrong


@wrong("3.4", "never gathered")
def update_and_gather(optimizer, flats, group):
    """Forgets the all-gather."""
    optimizer.step()
    for shard in optimizer.param_groups[0]["params"]:
        device.free(shard.grad)
        shard.grad = None


wrong("3.4", "gathered before they are updated").diff("""
Gathers first.
  shards = optimizer.param_groups[0]["params"]
+ for flat, shard in zip(flats, shards, strict=True):
+     comm.all_gather(flat, shard.data, group).wait()
- for flat, shard in zip(flats, shards, strict=True):
-     comm.all_gather(flat, shard.data, group).wait()
""")


@wrong("3.4", "averaging the parameters")
def update_and_gather(optimizer, flats, group):
    """Averages the parameters over the ranks instead of gathering the shards."""
    optimizer.step()
    for shard in optimizer.param_groups[0]["params"]:
        device.free(shard.grad)
        shard.grad = None
    for flat in flats:
        comm.all_reduce(flat, group, comm.MEAN).wait()


@wrong("3.4", "they were never freed")
def update_and_gather(optimizer, flats, group):
    """Leaves the shards' gradients, to which the next step's are added."""
    optimizer.step()
    for flat, shard in zip(flats, optimizer.param_groups[0]["params"], strict=True):
        comm.all_gather(flat, shard.data, group).wait()


wrong("3.4", "the optimizer found no gradient").diff("""
Clears the gradients before the update.
  shards = optimizer.param_groups[0]["params"]
+ optimizer.zero_grad()
- for shard in shards:
-     device.free(shard.grad)
-     shard.grad = None
""")
wrong("3.4", "memory freed by `device.free` was used again").diff("""
Frees the gradient's memory, and leaves the gradient there.
- shard.grad = None
""")
wrong("3.4", "the gradient of the step before").diff("""
Steps on stale gradients: keeps this step's for the next one.
  shards = optimizer.param_groups[0]["params"]
+ for shard in shards:
+     fresh = shard.grad
+     shard.grad = getattr(shard, "kept", torch.zeros_like(shard))
+     shard.kept = fresh
- device.free(shard.grad)
""")


@wrong("3.4", "a broadcast per shard")
def update_and_gather(optimizer, flats, group):
    """Broadcasts every rank's shard, as ZeroRedundancyOptimizer does its parameters."""
    optimizer.step()
    for shard in optimizer.param_groups[0]["params"]:
        device.free(shard.grad)
        shard.grad = None
    for flat in flats:
        for rank, part in enumerate(flat.chunk(group.size())):
            comm.broadcast(part, rank, group).wait()


wrong("3.4", "buckets are left out").diff("""
Gathers the first bucket alone.
- for flat, shard in zip(flats, shards, strict=True):
-     comm.all_gather(flat, shard.data, group).wait()
+ comm.all_gather(flats[0], shards[0].data, group).wait()
""")
wrong("3.4", "wait for every gather").diff("""
Waits for the last gather only.
- for flat, shard in zip(flats, shards, strict=True):
-     comm.all_gather(flat, shard.data, group).wait()
+ handles = [comm.all_gather(flat, shard.data, group) for flat, shard in zip(flats, shards, strict=True)]
+ handles[-1].wait()
""")
wrong("3.4", "gather in place").diff("""
Gathers from a copy of the shard.
- comm.all_gather(flat, shard.data, group).wait()
+ comm.all_gather(flat, shard.data.clone(), group).wait()
""")
wrong("3.4", "is only set to None").diff("""
Lets the gradients go without freeing them.
- device.free(shard.grad)
""")
wrong("3.4", "between the update and the gathers").diff("""
Frees the gradients after the gathers.
  optimizer.step()
+ for flat, shard in zip(flats, shards, strict=True):
+     comm.all_gather(flat, shard.data, group).wait()
- for flat, shard in zip(flats, shards, strict=True):
-     comm.all_gather(flat, shard.data, group).wait()
""")


@wrong("3.4", "expected `group`, got the world")
def update_and_gather(optimizer, flats, group):
    """Gathers in the world."""
    shards = optimizer.param_groups[0]["params"]
    optimizer.step()
    for s in shards:
        device.free(s.grad)
        s.grad = None
    for flat, s in zip(flats, shards, strict=True):
        comm.all_gather(flat, s.data, comm.world()).wait()


@wrong("3.4", "`torch.distributed.get_rank()` is about the world")
def update_and_gather(optimizer, flats, group):
    """Finds its shard by its number in the world."""
    import torch.distributed as dist

    shards = optimizer.param_groups[0]["params"]
    optimizer.step()
    for s in shards:
        device.free(s.grad)
        s.grad = None
    for flat in flats:
        comm.all_gather(flat, flat.chunk(group.size())[dist.get_rank() % group.size()], group).wait()


wrong("3.4", "argument 2 is shorter than argument 1").diff("""
Knows the shards by their state, which SGD does not have.
- shards = optimizer.param_groups[0]["params"]
- optimizer.step()
+ optimizer.step()
+ shards = list(optimizer.state)
""")
