"""Wrong answers to lab 03, each with words that its rejection must contain."""

import torch

from minifsdp import comm, device
from minifsdp.course.workshop.wrong import wrong


@wrong("3.1", "the remainder is dropped")
def partition(params, ranks):
    """Shards of numel // ranks elements: the last parameter loses its end."""
    sizes = [p.numel() for p in params]
    length = sum(sizes) // ranks
    flat = torch.cat([p.detach().flatten() for p in params])[: ranks * length].clone()
    start = 0
    for p in params:
        if start + p.numel() <= flat.numel():
            p.data = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
    return flat, list(flat.chunk(ranks))


@wrong("3.1", "every parameter is padded by itself")
def partition(params, ranks):
    """Pads each parameter to a multiple of N."""
    sizes = [p.numel() + -p.numel() % ranks for p in params]
    flat = torch.zeros(sum(sizes))
    for p, piece in zip(params, flat.split(sizes), strict=True):
        piece[: p.numel()] = p.detach().flatten()
        p.data = piece[: p.numel()].view(p.shape)
    return flat, list(flat.chunk(ranks))


wrong("3.1", "the padding is missing").diff("""
Lets chunk make the last shard shorter.
- numel = sum(sizes)
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
- for p, piece in zip(params, flat[:numel].split(sizes), strict=True):
-     piece.copy_(p.detach().flatten())
+ flat = torch.cat([p.detach().flatten() for p in params])
+ for p, piece in zip(params, flat.split(sizes), strict=True):
""")
wrong("3.1", "the padding stands in front").diff("""
Pads at the front.
- numel = sum(sizes)
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
- for p, piece in zip(params, flat[:numel].split(sizes), strict=True):
+ padding = -sum(sizes) % ranks
+ flat = torch.zeros(padding + sum(sizes))
+ for p, piece in zip(params, flat[padding:].split(sizes), strict=True):
""")


@wrong("3.1", "the flat buffer is a copy")
def partition(params, ranks):
    """Concatenates, and leaves the parameters where they are."""
    flat = torch.cat([p.detach().flatten() for p in params])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % ranks)])
    return flat, list(flat.chunk(ranks))


wrong("3.1", "the shards are copies").diff("""
Clones the shards.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.zeros(numel + -numel % ranks)
- return flat, list(flat.chunk(ranks))
+ return flat, [shard.clone() for shard in flat.chunk(ranks)]
""")
wrong("3.1", "the shards must be equal in length").diff("""
Whole parameters to ranks, as torch's ZeroRedundancyOptimizer cuts.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.zeros(numel + -numel % ranks)
- return flat, list(flat.chunk(ranks))
+ loads = [0] * ranks
+ for size in sizes:
+     loads[loads.index(min(loads))] += size
+ loads[-1] += flat.numel() - numel
+ return flat, list(flat.split(loads))
""")
wrong("3.1", "the parameters' old memory, or a second copy").diff("""
Keeps the parameters' old memory alive.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.zeros(numel + -numel % ranks)
  piece.copy_(p.detach().flatten())
+ p.old = p.data
""")
wrong("3.1", "must have the parameters' dtype").diff("""
Makes the buffer of the default type.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.zeros(numel + -numel % ranks)
""")
wrong("3.1", "behind the last element the buffer must be zero").diff("""
Leaves the padding uninitialized.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.empty(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
""")


@wrong("3.1", "the copying was recorded")
def partition(params, ranks):
    """Copies the parameters themselves, so the buffer has a grad_fn."""
    numel = sum(p.numel() for p in params)
    flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
    start = 0
    for p in params:
        piece = flat[start : start + p.numel()].view(p.shape)
        piece.copy_(p)
        p.data = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
    return flat, list(flat.chunk(ranks))


@wrong("3.1", "round up to a multiple of N, not down")
def partition(params, ranks):
    """Rounds down."""
    flat = torch.zeros(sum(p.numel() for p in params) // ranks * ranks, dtype=params[0].dtype)
    start = 0
    for p in params:
        piece = flat[start : start + p.numel()].view(p.shape)
        piece.copy_(p.detach())
        p.data = piece
        start += p.numel()
    return flat, list(flat.chunk(ranks))


wrong("3.1", "expected [True, True, True, True], got [False, False, False, False]").diff("""
Puts new Parameters into the list, which the model does not see.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
- for p, piece in zip(params, flat[:numel].split(sizes), strict=True):
-     piece.copy_(p.detach().flatten())
-     p.data = piece.view(p.shape)
+ flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype)
+ for i, piece in enumerate(flat[:numel].split(sizes)):
+     piece.copy_(params[i].detach().flatten())
+     params[i] = nn.Parameter(piece.view(params[i].shape))
""")
wrong("3.1", "a whole N of padding where N divides").diff("""
Pads by a whole N where N divides.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.zeros(numel + ranks - numel % ranks, dtype=params[0].dtype)
""")


@wrong("3.1", "expected [True, True, True, True], got []")
def partition(params, ranks):
    """Empties its caller's list."""
    sizes = [p.numel() for p in params]
    numel = sum(sizes)
    flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype)
    start = 0
    while params:
        p = params.pop(0)
        flat[start : start + p.numel()] = p.detach().flatten()
        p.data = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
    return flat, list(flat.chunk(ranks))


wrong("3.1", "they are moved, and are otherwise as they were").diff("""
Freezes the parameters on the way.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype)
- piece.copy_(p.detach().flatten())
+ p.requires_grad_(False)
+ piece.copy_(p.flatten())
""")


@wrong("3.1", "hand out whatever memory held")
def partition(params, ranks):
    """Takes the buffer from `new_empty` and leaves the padding as it comes."""
    n = sum(p.numel() for p in params)
    flat = params[0].data.new_empty(-(-n // ranks) * ranks)
    o = 0
    for p in params:
        flat[o : o + p.numel()] = p.data.reshape(-1)
        p.data = flat[o : o + p.numel()].view(p.shape)
        o += p.numel()
    return flat, list(flat.chunk(ranks))


@wrong("3.1", "has no flat view of its own memory")
def partition(params, ranks):
    """Leaves a single parameter in its memory if nothing is to be padded."""
    n = sum(p.numel() for p in params)
    if len(params) == 1 and n % ranks == 0:
        flat = params[0].data.view(-1)
        return flat, list(flat.chunk(ranks))
    flat = torch.cat([p.data.reshape(-1) for p in params] + [params[0].data.new_zeros(-n % ranks)])
    o = 0
    for p in params:
        p.data = flat[o : o + p.numel()].view(p.shape)
        o += p.numel()
    return flat, list(flat.chunk(ranks))


@wrong("3.1", "its elements in the order of memory")
def partition(params, ranks):
    """Leaves a single parameter in its memory, with the elements in the memory's order."""
    n = sum(p.numel() for p in params)
    if len(params) == 1 and n % ranks == 0:
        flat = params[0].data.as_strided((n,), (1,))
        return flat, list(flat.chunk(ranks))
    flat = torch.cat([p.data.reshape(-1) for p in params] + [params[0].data.new_zeros(-n % ranks)])
    o = 0
    for p in params:
        p.data = flat[o : o + p.numel()].view(p.shape)
        o += p.numel()
    return flat, list(flat.chunk(ranks))


wrong("3.2", "every rank updates everything").diff("""
Gives every rank all shards.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shard) for shards in buckets for shard in shards], **defaults)
""")
wrong("3.2", "this is the shard of rank").diff("""
Takes the next rank's shards.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shards[(rank + 1) % len(shards)]) for shards in buckets], **defaults)
""")
wrong("3.2", "was given copies of the shards").diff("""
Gives the optimizer copies.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shards[rank].clone()) for shards in buckets], **defaults)
""")
wrong("3.2", "not of the first alone").diff("""
Shards only the first bucket.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(buckets[0][rank])], **defaults)
""")
wrong("3.2", "did not reach the optimizer").diff("""
Drops the learning rate.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets])
""")
wrong("3.2", "not one bucket's shards").diff("""
Takes the bucket with the rank's number instead of the shards with it.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shard) for shard in buckets[rank % len(buckets)]], **defaults)
""")
wrong("3.2", "is a plain tensor").diff("""
Gives the optimizer plain tensors.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([shards[rank] for shards in buckets], **defaults)
""")
wrong("3.2", "`optimizer_class` is an argument").diff("""
Makes an Adam, whatever is asked for.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return torch.optim.Adam([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
""")
wrong("3.2", "all of `**defaults` go to").diff("""
Hands on the learning rate alone.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], lr=defaults["lr"])
""")
wrong("3.2", "one parameter group with all shards").diff("""
Makes a parameter group per bucket.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([{"params": [nn.Parameter(shards[rank])]} for shards in buckets], **defaults)
""")
wrong("3.2", "the lists are the caller's").diff("""
Writes its Parameters into the caller's lists.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ for shards in buckets:
+     shards[rank] = nn.Parameter(shards[rank])
+ return optimizer_class([shards[rank] for shards in buckets], **defaults)
""")
wrong("3.2", "of however many buckets").diff("""
Knows that there are two buckets.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets[:2]], **defaults)
""")
wrong("3.2", "a shard whose elements are all zero").diff("""
Leaves shards out that hold only zeros, taking them for padding.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(b[rank]) for b in buckets if b[rank].any()], **defaults)
""")
wrong("3.3", "the sum of the gradients").diff("""
Reduces with SUM.
- reduction = comm.reduce_scatter(mean, bucket, group, comm.MEAN)
+ reduction = comm.reduce_scatter(mean, bucket, group, comm.SUM)
""")
wrong("3.3", "hands every rank the whole mean").diff("""
All-reduces and takes a shard of the result.
- mean = device.empty(shard.numel(), shard.dtype, "gradients", shard.device)
- reduction = comm.reduce_scatter(mean, bucket, group, comm.MEAN)
+ reduction = comm.all_reduce(bucket, group, comm.MEAN)
  reduction.wait()
+ mean = device.empty(shard.numel(), shard.dtype, "gradients", shard.device)
+ mean.copy_(bucket.chunk(group.size())[group.rank()])
""")
wrong("3.3", "these are the parameters, not the gradients").diff("""
Averages the parameters, which picotron's naive data parallelism once did.
- if p.grad is not None:
-     bucket[start : start + p.numel()] = p.grad.flatten()
+ bucket[start : start + p.numel()] = p.data.flatten()
""")
wrong("3.3", "device.empty is not zero").diff("""
Leaves the padding, and the place of a missing gradient, uninitialized.
- bucket = device.empty(shard.numel() * group.size(), shard.dtype, "communication", shard.device).zero_()
+ bucket = device.empty(shard.numel() * group.size(), shard.dtype, "communication", shard.device)
""")
wrong("3.3", "what follows must not move up").diff("""
Skips a parameter that has no gradient, so those behind it land in the wrong places.
- start = 0
- for p in params:
-     if p.grad is not None:
-         bucket[start : start + p.numel()] = p.grad.flatten()
-     start += p.numel()
+ grads = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
+ bucket[: grads.numel()] = grads
""")
wrong("3.3", "nobody waits").diff("""
Frees and uses without waiting.
- reduction = comm.reduce_scatter(mean, bucket, group, comm.MEAN)
+ comm.reduce_scatter(mean, bucket, group, comm.MEAN)
- reduction.wait()
- device.free(bucket)
""")
wrong("3.3", "reduce_bucket waits itself").diff("""
Waits before it returns.
- reduction = comm.reduce_scatter(mean, bucket, group, comm.MEAN)
+ comm.reduce_scatter(mean, bucket, group, comm.MEAN).wait()
+ device.free(bucket)
- reduction.wait()
- device.free(bucket)
""")
wrong("3.3", "the bucket is still alive").diff("""
Keeps the bucket for the next time.
- bucket = device.empty(shard.numel() * group.size(), shard.dtype, "communication", shard.device).zero_()
+ if not hasattr(shard, "bucket"):
+     shard.bucket = device.empty(shard.numel() * group.size(), shard.dtype, "communication", shard.device)
+ shard.bucket.zero_()
- bucket[start : start + p.numel()] = p.grad.flatten()
+ shard.bucket[start : start + p.numel()] = p.grad.flatten()
- reduction = comm.reduce_scatter(mean, bucket, group, comm.MEAN)
+ reduction = comm.reduce_scatter(mean, shard.bucket, group, comm.MEAN)
- device.free(bucket)
""")
wrong("3.3", "the second reduction replaced the first").diff("""
Overwrites what earlier micro-batches have left.
- if shard.grad is None:
-     shard.grad = mean
- else:
-     shard.grad += mean
-     device.free(mean)
+ shard.grad = mean
""")
wrong("3.3", "laid out in reverse").diff("""
Lays the gradients out in another order than the parameters.
- for p in params:
+ for p in reversed(params):
""")
wrong("3.3", "the finishing function frees it").diff("""
Drops the bucket, which lives on only as long as the backend holds it.
- device.free(bucket)
""")
wrong("3.3", "the caller frees it").diff("""
Clears the gradients itself.
      start += p.numel()
+ for p in params:
+     p.grad = None
""")
wrong("3.3", "needed no longer").diff("""
Drops the second mean without freeing it.
- device.free(mean)
""")
wrong("3.3", "expected `group`, got the world").diff("""
Reduces in the world.
  def reduce_bucket(params, shard, group):
+     group = comm.world()
""")
wrong("3.3", "`torch.distributed.get_world_size()` is about the world").diff("""
Divides by the size of the world.
  def reduce_bucket(params, shard, group):
+     import torch.distributed as dist
- reduction = comm.reduce_scatter(mean, bucket, group, comm.MEAN)
+ reduction = comm.reduce_scatter(mean, bucket, group)
  device.free(bucket)
+ mean.div_(dist.get_world_size())
""")
wrong("3.3", "The expanded size of the tensor").diff("""
Knows that there are two ranks.
- bucket = device.empty(shard.numel() * group.size(), shard.dtype, "communication", shard.device).zero_()
+ bucket = device.empty(shard.numel() * 2, shard.dtype, "communication", shard.device).zero_()
""")
wrong("3.3", "look at shard.grad in the function that is returned").diff("""
Looks at shard.grad when it starts.
  reduction = comm.reduce_scatter(mean, bucket, group, comm.MEAN)
+ earlier = shard.grad
- if shard.grad is None:
+ if earlier is None:
- shard.grad += mean
+ earlier.add_(mean)
""")
wrong("3.3", "add the second one in place").diff("""
Makes a third tensor of the sum.
- shard.grad += mean
+ shard.grad = shard.grad + mean
""")


@wrong("3.3", "the mean took its place")
def reduce_bucket(params, shard, group):
    """Adds the old gradient to the new mean, frees the old one and takes its place."""
    n = group.size()
    flat = device.empty(n * shard.numel(), shard.dtype, "communication", shard.device).zero_()
    o = 0
    for p in params:
        if p.grad is not None:
            flat[o : o + p.numel()] = p.grad.reshape(-1)
        o += p.numel()
    mean = device.empty(shard.numel(), shard.dtype, "gradients", shard.device)
    h = comm.reduce_scatter(mean, flat, group, comm.MEAN)

    def finish():
        h.wait()
        device.free(flat)
        if shard.grad is not None:
            mean.add_(shard.grad)
            device.free(shard.grad)
        shard.grad = mean

    return finish


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


wrong("3.5", "the memory is not saved").diff("""
Keeps the full gradients alive until after the step.
- for q in params:
-     q.grad = None
""")


@wrong("3.5", "a reduction is started for every gradient")
def reduce_in_backward(params, shard, start, in_flight, group):
    """Reduces whenever a gradient comes."""

    def on_gradient(p):
        while in_flight:
            in_flight.pop()()
        in_flight.append(start(params, shard, group))
        p.grad = None

    return [p.register_post_accumulate_grad_hook(on_gradient) for p in params]


wrong("3.5", "backward stands still while it travels").diff("""
Waits for each reduction in the hook that started it.
- while in_flight:
-     in_flight.pop()()
- in_flight.append(start(params, shard, group))
+ start(params, shard, group)()
""")
wrong("3.5", "all buckets are in flight").diff("""
Never finishes a reduction during backward.
- while in_flight:
-     in_flight.pop()()
""")
wrong("3.5", "must start anew").diff("""
Counts the gradients of the first backward only.
- missing = set(params)
+ arrived = []
- missing.remove(p)
- if missing:
+ arrived.append(p)
+ if len(arrived) != len(params):
- missing.update(params)
""")
wrong("3.5", "not yet, or not any more").diff("""
Clears the gradients before the reduction copies them.
- in_flight.append(start(params, shard, group))

      q.grad = None
+ in_flight.append(start(params, shard, group))
""")
wrong("3.5", "whichever that is").diff("""
Takes the gradient of the last parameter in the list for the last to come.
- missing = set(params)

- missing.remove(p)
- if missing:
-     return
- missing.update(params)

- return [p.register_post_accumulate_grad_hook(on_gradient) for p in params]
+ handles = [p.register_post_accumulate_grad_hook(lambda p: None) for p in params[:-1]]
+ return [*handles, params[-1].register_post_accumulate_grad_hook(on_gradient)]
""")
wrong("3.5", "runs before the gradient is in p.grad").diff("""
Uses the tensor hook, which runs before the gradient is accumulated.
- return [p.register_post_accumulate_grad_hook(on_gradient) for p in params]
+ return [p.register_hook(lambda grad, p=p: on_gradient(p)) for p in params]
""")
wrong("3.5", "the count was not taken back").diff("""
Counts on where the first backward ended.
- missing = set(params)
+ count = 0
- missing.remove(p)
- if missing:
+ nonlocal count
+ count += 1
+ if count < len(params):
- missing.update(params)
""")
wrong("3.5", "take it out of in_flight").diff("""
Finishes what is in flight, and leaves it there.
- while in_flight:
-     in_flight.pop()()
+ for finish in in_flight:
+     finish()
""")
wrong("3.5", "by setting it to None").diff("""
Frees the gradients as if they were buffers.
  for q in params:
+     device.free(q.grad)
""")
wrong("3.5", "otherwise two buckets are held").diff("""
Starts a reduction before it finishes the one before.
  missing.update(params)
+ finish = start(params, shard, group)
- in_flight.append(start(params, shard, group))
+ in_flight.append(finish)
""")
wrong("3.5", "expected `group`, got the world").diff("""
Starts reductions in the world.
- def on_gradient(p):
+ def hook(p):
- in_flight.append(start(params, shard, group))
+ in_flight.append(start(params, shard, comm.world()))
- return [p.register_post_accumulate_grad_hook(on_gradient) for p in params]
+ return [p.register_post_accumulate_grad_hook(hook) for p in params]
""")

wrong("3.1", "len() of a 0-d tensor").diff("""
Takes the first dimension by `len`, which a scalar does not have.
- p.data = piece.view(p.shape)
+ p.data = piece.view(len(p), *p.shape[1:])
""")


wrong("3.1", "its value is moved, its .grad stays").diff("""
Drops the gradients on the way.
- p.data = piece.view(p.shape)
+ p.data = piece.view(p.shape)
+ p.grad = None
""")


wrong("3.2", "what changes the dtype makes a copy").diff("""
Asks for float32, which float32 shards are already.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shards[rank].float()) for shards in buckets], **defaults)
""")


wrong("3.3", "view size is not compatible").diff("""
Takes every gradient for contiguous.
- bucket[start : start + p.numel()] = p.grad.flatten()
+ bucket[start : start + p.numel()] = p.grad.view(-1)
""")


wrong("3.3", "element 43 is").diff("""
Lays a transposed gradient out in the order of memory.
- bucket[start : start + p.numel()] = p.grad.flatten()
+ bucket[start : start + p.numel()] = p.grad.as_strided((p.numel(),), (1,))
""")


wrong("3.3", "attempting to assign a gradient with dtype 'double'").diff("""
Makes its buffers in float64, as the parameters of one model are.
- bucket = device.empty(shard.numel() * group.size(), shard.dtype, "communication", shard.device).zero_()
+ bucket = device.empty(shard.numel() * group.size(), torch.float64, "communication", shard.device).zero_()

- mean = device.empty(shard.numel(), shard.dtype, "gradients", shard.device)
+ mean = device.empty(shard.numel(), torch.float64, "gradients", shard.device)
""")


wrong("3.4", "argument 2 is shorter than argument 1").diff("""
Knows the shards by their state, which SGD does not have.
- shards = optimizer.param_groups[0]["params"]
- optimizer.step()
+ optimizer.step()
+ shards = list(optimizer.state)
""")
