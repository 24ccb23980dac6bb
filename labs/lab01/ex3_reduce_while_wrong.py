"""Wrong answers to exercise 1.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("1.3", "waits at once")
def reduce_while(full, work, group):
    """Waits before the work."""
    part = torch.empty(full.numel() // group.size())
    comm.reduce_scatter(part, full, group).wait()
    return part, work()


@wrong("1.3", "nobody waits: on gloo")
def reduce_while(full, work, group):
    """Never waits."""
    part = torch.empty(full.numel() // group.size())
    comm.reduce_scatter(part, full, group)
    return part, work()


@wrong("1.3", "before anything is under way")
def reduce_while(full, work, group):
    """Works first."""
    result = work()
    part = torch.empty(full.numel() // group.size())
    comm.reduce_scatter(part, full, group).wait()
    return part, result


wrong("1.3", "copied out before the wait").diff("""
Copies the part out before it has waited.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = torch.full((full.numel() // group.size(),), -1.0)
- result = work()
+ result, copy = work(), part.clone()
- return part, result
+ return copy, result
""")
wrong("1.3", "neither freed nor changed").diff("""
Clears the input for the next step while it is under way.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = torch.empty(full.numel() // group.size())
  result = work()
+ full.zero_()
""")
wrong("1.3", "so that its bytes are counted").diff("""
Takes its buffer from torch, where nobody counts it.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = torch.empty(full.numel() // group.size(), dtype=full.dtype, device=full.device)
""")
wrong("1.3", "the dtype is that of `full`").diff("""
Writes a dtype down instead of taking the input's.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = device.empty(full.numel() // group.size(), torch.float32, "communication", full.device)
""")
wrong("1.3", "the two results are exchanged").diff("""
Returns the work's result first.
- return part, result
+ return result, part
""")
wrong("1.3", "`comm.world()` is about the world").diff("""
Reduces in the world.
  def reduce_while(full, work, group):
+     group = comm.world()
- handle = comm.reduce_scatter(part, full, group)
+ h = comm.reduce_scatter(part, full, group)
- handle.wait()
+ h.wait()
""")
wrong("1.3", "this is the mean: asked is the sum").diff("""
Takes the mean.
- handle = comm.reduce_scatter(part, full, group)
+ h = comm.reduce_scatter(part, full, group, comm.MEAN)
- handle.wait()
+ h.wait()
""")
wrong("1.3", "are not 3 parts of 10").diff("""
Knows that there are two ranks.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
- handle = comm.reduce_scatter(part, full, group)
+ part = device.empty(full.numel() // 2, full.dtype, "communication", full.device)
+ h = comm.reduce_scatter(part, full, group)
- handle.wait()
+ h.wait()
""")
wrong("1.3", "not a part of `full`").diff("""
Takes this rank's chunk of the input for the output.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = full.chunk(group.size())[group.rank()]
""")
wrong("1.3", "the next call has overwritten it").diff("""
Keeps the output for the next call.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ kept = globals().setdefault("kept", {})
+ if full.dtype not in kept:
+     kept[full.dtype] = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = kept[full.dtype]
""")
wrong("1.3", 'its role is "communication"').diff("""
Hands its buffer out as parameters.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = device.empty(full.numel() // group.size(), full.dtype, "parameters", full.device)
""")
wrong("1.3", "the output is torch.float32, the input torch.float64").diff("""
Knows two dtypes.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ dtype = torch.bfloat16 if full.dtype == torch.bfloat16 else torch.float32
+ part = device.empty(full.numel() // group.size(), dtype, "communication", full.device)
""")
