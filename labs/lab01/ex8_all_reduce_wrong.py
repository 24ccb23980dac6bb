"""Wrong answers to exercise 1.8, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("1.8", "this is the sum: a mean divides by N").diff("""
Sums where the mean is asked for.
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = torch.zeros(numel + -numel % ranks, dtype=tensor.dtype)
- mine = full.view(ranks, length)[group.rank()]
+ mine = full.chunk(ranks)[group.rank()]
- if op == "mean":
-     mine /= ranks
""")
wrong("1.8", "rounded down").diff("""
Cuts numel // N elements a chunk and drops the remainder.
- ranks, numel = group.size(), tensor.numel()
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
- full[:numel] = tensor.flatten()
+ ranks, length = group.size(), tensor.numel() // group.size()
+ full = tensor.flatten()[: ranks * length].clone()
- tensor.copy_(full[:numel].view_as(tensor))
+ tensor.view(-1)[: ranks * length] = full
""")


@wrong("1.8", "are gathered and then added up")
def all_reduce(tensor, op, group, reduce_scatter, all_gather):
    """Gathers everybody's tensor and adds them up: right values, N times the memory."""
    ranks = group.size()
    everything = torch.empty(ranks * tensor.numel(), dtype=tensor.dtype)
    all_gather(everything, tensor.flatten(), group)
    total = everything.view(ranks, *tensor.shape).sum(0)
    tensor.copy_(total / ranks if op == "mean" else total)


wrong("1.8", "belongs in the tensor itself").diff("""
Returns the result, and leaves the tensor as it was.
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = torch.zeros(numel + -numel % ranks, dtype=tensor.dtype)
- mine = full.view(ranks, length)[group.rank()]
+ mine = full.chunk(ranks)[group.rank()]
- tensor.copy_(full[:numel].view_as(tensor))
+ return full[:numel].view_as(tensor)
""")
wrong("1.8", "divided by N twice").diff("""
Divides the chunk, and the whole again.
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = torch.zeros(numel + -numel % ranks, dtype=tensor.dtype)
- mine = full.view(ranks, length)[group.rank()]
+ mine = full.chunk(ranks)[group.rank()]
  all_gather(full, mine, group)
+ if op == "mean":
+     full /= ranks
""")
wrong("1.8", "use the two pieces, and nothing else").diff("""
Lets all ranks meet before it begins, by a collective of one element.
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ comm.all_gather(torch.empty(ranks), torch.ones(1), group).wait()
+ full = torch.zeros(numel + -numel % ranks, dtype=tensor.dtype)
- mine = full.view(ranks, length)[group.rank()]
+ mine = full.chunk(ranks)[group.rank()]
""")
wrong("1.8", "memory from `device.empty` holds anything").diff("""
Does not zero the padding.
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device)
""")
wrong("1.8", "view size is not compatible").diff("""
Takes every tensor for contiguous.
- full[:numel] = tensor.flatten()
+ full[:numel] = tensor.view(-1)
""")
wrong("1.8", "after the gather, N times the work").diff("""
Divides the whole instead of its own chunk.
- if op == "mean":
-     mine /= ranks

  all_gather(full, mine, group)
+ if op == "mean":
+     full /= ranks
""")
wrong("1.8", "so that its bytes are counted").diff("""
Takes its buffer from torch, where nobody counts it.
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = torch.zeros(ranks * length, dtype=tensor.dtype, device=tensor.device)
""")
wrong("1.8", "this code always takes float32").diff("""
Writes a dtype down: bfloat16 travels as float32, twice the bytes.
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = device.empty(ranks * length, torch.float32, "communication", tensor.device).zero_()
""")
wrong("1.8", "are too short, round up").diff("""
Rounds the length of a chunk down and copies everything.
- length = -(-numel // ranks)
+ length = numel // ranks
""")
wrong("1.8", "expected `group`, got the world").diff("""
Reduces in the world.
- ranks, numel = group.size(), tensor.numel()
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ group = comm.world()
+ n, numel = group.size(), tensor.numel()
+ length = -(-numel // n)
+ full = device.empty(n * length, tensor.dtype, "communication", tensor.device).zero_()
- mine = full.view(ranks, length)[group.rank()]
+ mine = full.view(n, length)[group.rank()]
- mine /= ranks
+ mine /= n
""")
wrong("1.8", "`torch.distributed.get_world_size()` is about the world").diff("""
Divides by the size of the world.
- ranks, numel = group.size(), tensor.numel()
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ import torch.distributed as dist
+ n, numel = group.size(), tensor.numel()
+ length = -(-numel // n)
+ full = device.empty(n * length, tensor.dtype, "communication", tensor.device).zero_()
- mine = full.view(ranks, length)[group.rank()]
+ mine = full.view(n, length)[group.rank()]
- mine /= ranks
+ mine /= dist.get_world_size()
""")


@wrong("1.8", "element 0 is 6 instead of 4")
def all_reduce(tensor, op, group, reduce_scatter, all_gather):
    """Gives the tensor other memory."""
    n, numel = group.size(), tensor.numel()
    length = -(-numel // n)
    full = device.empty(n * length, tensor.dtype, "communication", tensor.device).zero_()
    full[:numel] = tensor.flatten()
    mine = full.view(n, length)[group.rank()]
    reduce_scatter(mine, full, group)
    if op == "mean":
        mine /= n
    all_gather(full, mine, group)
    tensor.data = full[:numel].view_as(tensor)


wrong("1.8", "chunk r of the buffer is the output").diff("""
Reduces into a buffer of its own: a chunk more memory.
- ranks, numel = group.size(), tensor.numel()
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ n, numel = group.size(), tensor.numel()
+ length = -(-numel // n)
+ full = device.empty(n * length, tensor.dtype, "communication", tensor.device).zero_()
- mine = full.view(ranks, length)[group.rank()]
+ mine = device.empty(length, tensor.dtype, "communication", tensor.device)
- mine /= ranks
+ mine /= n
""")
wrong("1.8", "got bfloat16 from device.empty as gradients").diff("""
Hands its buffer out as gradients.
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = device.empty(ranks * length, tensor.dtype, "gradients", tensor.device).zero_()
""")
wrong("1.8", "of a tensor [2, 2, 3]").diff("""
Copies back a matrix.
- tensor.copy_(full[:numel].view_as(tensor))
+ tensor.copy_(full[:numel].view(tensor.shape[0], -1) if tensor.dim() > 1 else full[:numel].view_as(tensor))
""")
