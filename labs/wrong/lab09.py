"""Wrong answers to lab 09, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 9.1


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

# 9.2

wrong("9.2", "a gradient has its parameter's dtype").diff("""
Hangs the low-precision mean on an fp32 parameter.
- shard.grad = device.empty(mean.numel(), shard.dtype, "gradients", mean.device)
- shard.grad.copy_(mean)
+ shard.grad = mean
- device.free(mean)
+     device.free(mean)
""")
wrong("9.2", "has overwritten the first").diff("""
Overwrites what an earlier micro-batch has left.
-     shard.grad.copy_(mean)
- else:
-     shard.grad.add_(mean)
+ shard.grad.copy_(mean)
""")
wrong("9.2", "made in the low precision").diff("""
Adds in the mean's dtype.
- shard.grad.add_(mean)
+ shard.grad.copy_(shard.grad.to(mean.dtype) + mean)
""")
wrong("9.2", "even if others refer to it").diff("""
Drops the name of the mean, not its memory.
- device.free(mean)
+ del mean
""")
wrong("9.2", "the ledger cannot see this memory").diff("""
Casts into memory that nobody accounts for.
- shard.grad = device.empty(mean.numel(), shard.dtype, "gradients", mean.device)
- shard.grad.copy_(mean)
+ shard.grad = mean.to(shard.dtype, copy=True)
""")


@wrong("9.2", "leave the shard alone")
def deliver(shard, mean):
    """Casts the parameter to the gradient's dtype."""
    shard.data = shard.data.to(mean.dtype)
    shard.grad = mean


@wrong("9.2", "added out of place")
def deliver(shard, mean):
    """Adds out of place."""
    wide = device.empty(mean.numel(), shard.dtype, "gradients", mean.device)
    wide.copy_(mean)
    shard.grad = wide if shard.grad is None else shard.grad + wide
    device.free(mean)


wrong("9.2", "a buffer left besides").diff("""
Leaves the cast copy of the second mean where it is.
  def deliver(shard, mean):
+     wide = device.empty(mean.numel(), shard.dtype, "gradients", mean.device)
+     wide.copy_(mean)
- shard.grad = device.empty(mean.numel(), shard.dtype, "gradients", mean.device)
- shard.grad.copy_(mean)
+ shard.grad = wide
- shard.grad.add_(mean)
+ shard.grad.add_(wide)
+ shard.left = wide
""")


@wrong("9.2", "this is the parameter")
def deliver(shard, mean):
    """Adds the gradient to the parameter."""
    shard.data.add_(mean)
    device.free(mean)


wrong("9.2", "is not zeroed").diff("""
Adds to memory that nobody has zeroed.
-     shard.grad.copy_(mean)
- else:
-     shard.grad.add_(mean)
+ shard.grad.add_(mean)
""")
wrong("9.2", "cast on the way").diff("""
Casts every mean into a buffer of its own, and frees that.
  def deliver(shard, mean):
+     wide = device.empty(mean.numel(), shard.dtype, "gradients", mean.device).copy_(mean)
- shard.grad = device.empty(mean.numel(), shard.dtype, "gradients", mean.device)
- shard.grad.copy_(mean)
+ shard.grad = wide
- shard.grad.add_(mean)
+ shard.grad.add_(wide)
+ device.free(wide)
""")
wrong("9.2", "the role of this buffer").diff("""
Has the gradient counted as unsharded parameters.
- shard.grad = device.empty(mean.numel(), shard.dtype, "gradients", mean.device)
- shard.grad.copy_(mean)
+ shard.grad = device.empty(mean.numel(), shard.dtype, "unsharded", mean.device).copy_(mean)
""")


@wrong("9.2", "became the gradient")
def deliver(shard, mean):
    """Adopts a mean of the right dtype."""
    if shard.grad is None and mean.dtype == shard.dtype:
        shard.grad = mean
        return
    if shard.grad is None:
        shard.grad = device.empty(mean.numel(), shard.dtype, "gradients", mean.device).zero_()
    shard.grad.add_(mean)
    device.free(mean)


wrong("9.2", "with grad_dtype 'Double'").diff("""
Makes a buffer of float32 for a shard of float64.
- shard.grad = device.empty(mean.numel(), shard.dtype, "gradients", mean.device)
+ shard.grad = device.empty(mean.numel(), torch.float32, "gradients", mean.device)
""")
wrong("9.2", "a mean is added in every call").diff("""
Adds to each gradient once.
- shard.grad.add_(mean)
+ if not hasattr(shard, "added"):
+     shard.grad.add_(mean)
+ shard.added = True
""")

# 9.3


@wrong("9.3", "nothing is divided before the sum")
def divisors(dtype, ranks):
    """Divides the sum, whatever the dtype."""
    return 1, ranks


@wrong("9.3", "what is below 3e-8 * N is 0 then")
def divisors(dtype, ranks):
    """Divides everything first."""
    return (ranks, 1) if dtype is torch.float16 else (1, ranks)


@wrong("9.3", "not a power of two")
def divisors(dtype, ranks):
    """Divides by the root itself."""
    return (ranks**0.5, ranks**0.5) if dtype is torch.float16 else (1, ranks)


wrong("9.3", "and the mean needs").diff("""
Divides by the power of two twice.
- while dtype is torch.float16 and before * before < ranks:
+ while before * before < ranks:
- return before, ranks / before
+ return (before, before) if dtype is torch.float16 else (1, ranks)
""")
wrong("9.3", "has fp32's range").diff("""
Takes every dtype of two bytes for fp16.
- while dtype is torch.float16 and before * before < ranks:
+ while dtype.itemsize == 2 and before * before < ranks:
""")
wrong("9.3", "fp32 has range enough").diff("""
Splits in fp32 as well, but not in bf16.
- while dtype is torch.float16 and before * before < ranks:
+ while dtype is not torch.bfloat16 and before * before < ranks:
""")
wrong("9.3", "rounded down").diff("""
The power of two below the root: nothing at all on 3 ranks would be that.
- before = 1
- while dtype is torch.float16 and before * before < ranks:
+ if dtype is not torch.float16:
+     return 1, ranks
+ before = 1 if ranks == 1 else 2
+ while 4 * before * before <= ranks:
""")
wrong("9.3", "does not ask whether N can be divided").diff("""
torch's loop.
  def divisors(dtype, ranks):
+     if dtype is not torch.float16:
+         return 1, ranks
- while dtype is torch.float16 and before * before < ranks:
+ while ranks % before == 0 and ranks / before > before:
""")
wrong("9.3", "comes first, the rest after the sum").diff("""
The power of two above the root, also where the root is one.
- while dtype is torch.float16 and before * before < ranks:
+ while dtype is torch.float16 and before * before <= ranks:
""")
wrong("9.3", "of all dtypes fp16 alone").diff("""
Splits in every dtype that it does not know.
- while dtype is torch.float16 and before * before < ranks:
+ while dtype not in (torch.bfloat16, torch.float32) and before * before < ranks:
""")
wrong("9.3", "on 100000 ranks").diff("""
Divides by 32 at most, enough for 1,024 ranks.
- while dtype is torch.float16 and before * before < ranks:
+ while dtype is torch.float16 and before * before < ranks and before < 32:
""")

# 9.4


@wrong("9.4", "each rank decides alone")
def step_together(optimizer, scale, group):
    """Looks at its own shards only."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if not all(grad.isfinite().all() for grad in grads):
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "a rank waits in a collective")
def step_together(optimizer, scale, group):
    """Only the rank that has found something says so."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.zeros(1)
    if not all(grad.isfinite().all() for grad in grads):
        found.fill_(1)
        comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "a NaN is no infinity")
def step_together(optimizer, scale, group):
    """Looks for infinities and lets NaNs pass."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(any(grad.isinf().any() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "the step made all the same")
def step_together(optimizer, scale, group):
    """Halves the scale and steps."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale / 2 if found.item() else scale


@wrong("9.4", "the next step will overflow again")
def step_together(optimizer, scale, group):
    """Skips, and leaves the scale."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if not found.item():
        for grad in grads:
            grad.div_(scale)
        optimizer.step()
    return scale


wrong("9.4", "are still scaled").diff("""
Forgets to unscale.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
- found = torch.zeros(1, device=params[0].device)
- for p in params:
-     if p.grad is not None:
-         p.grad.div_(scale)
-         found += (~p.grad.isfinite()).any()
+ grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
+ found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
""")


@wrong("9.4", "one rank's finding is everybody's")
def step_together(optimizer, scale, group):
    """Skips only if all ranks have found something."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.SUM).wait()
    if found.item() == group.size():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "only the verdict is shared")
def step_together(optimizer, scale, group):
    """All-reduces the gradients, which are of different elements."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    bad = False
    for grad in grads:
        whole = torch.zeros(64)
        whole[: grad.numel()] = grad
        comm.all_reduce(whole, group, comm.MAX).wait()
        bad |= not whole.isfinite().all()
        grad.div_(scale)
    if bad:
        return scale / 2
    optimizer.step()
    return scale


@wrong("9.4", "is no zero")
def step_together(optimizer, scale, group):
    """Takes zero for what has overflowed."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item() and group.rank() < group.size() - 1:
        return scale / 2
    for grad in grads:
        grad.div_(scale).nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()
    return scale / 2 if found.item() else scale


@wrong("9.4", "without gradients there is nothing to find")
def step_together(optimizer, scale, group):
    """Leaves at once if there are no gradients."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if not grads:
        return scale
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "minus infinity is an overflow")
def step_together(optimizer, scale, group):
    """Compares with infinity."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(any((grad == torch.inf).any() or grad.isnan().any() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "can be several")
def step_together(optimizer, scale, group):
    """Looks for infinities in the first parameter group."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    first = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in first))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "those of the second parameter group")
def step_together(optimizer, scale, group):
    """Knows one parameter group only."""
    grads = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "one verdict for all gradients")
def step_together(optimizer, scale, group):
    """Communicates for every gradient."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.zeros(1)
    for grad in grads:
        bad = torch.tensor([float(not grad.isfinite().all())])
        comm.all_reduce(bad, group, comm.MAX).wait()
        found += bad
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "have a sum that is not")
def step_together(optimizer, scale, group):
    """Asks whether the sum is finite."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not sum((grad.sum() for grad in grads), torch.zeros(())).isfinite())])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "the world may have more")
def step_together(optimizer, scale, group):
    """Asks the world."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, comm.world(), comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "the number is this rank's own")
def step_together(optimizer, scale, group):
    """Does not wait for the verdict."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX)
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "MAX may lose a NaN")
def step_together(optimizer, scale, group):
    """Sends the largest gradient in place of a verdict."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.stack([torch.zeros(()), *(grad.abs().max() for grad in grads)]).max()[None]
    comm.all_reduce(found, group, comm.MAX).wait()
    if not found.isfinite():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "none forgotten")
def step_together(optimizer, scale, group):
    """Keeps what it finds in the last gradient only."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.zeros(1)
    for grad in grads:
        found.fill_(float(not grad.isfinite().all()))
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for grad in grads:
        grad.div_(scale)
    optimizer.step()
    return scale


@wrong("9.4", "momentum and weight decay")
def step_together(optimizer, scale, group):
    """Zeroes the gradients in place of skipping the step."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = torch.tensor([float(not all(grad.isfinite().all() for grad in grads))])
    comm.all_reduce(found, group, comm.MAX).wait()
    for grad in grads:
        grad.zero_() if found.item() else grad.div_(scale)
    optimizer.step()
    return scale / 2 if found.item() else scale


wrong("9.4", "whole numbers end in a scale of 0").diff("""
Halves in whole numbers, down to 0.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- p.grad.div_(scale)

-     return scale / 2
+     return scale // 2
+ for p in params:
+     if p.grad is not None:
+         p.grad.div_(scale)
""")


@wrong("9.4", "made without the parameters' device")
def step_together(optimizer, scale, group):
    """Makes its number where torch makes it if nothing is said."""
    params = [p for each in optimizer.param_groups for p in each["params"] if p.grad is not None]
    bad = any(not p.grad.isfinite().all() for p in params)
    found = torch.tensor([float(bad)])
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for p in params:
        p.grad.div_(scale)
    optimizer.step()
    return scale


wrong("9.4", "a scale of 1: scale: expected 0.5, got 1").diff("""
Does not let the scale fall below 1.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- return scale / 2
+ return max(1.0, scale / 2)
""")
wrong("9.4", "divided by 1,024").diff("""
Knows the scale: 1024.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- p.grad.div_(scale)
+ p.grad.div_(1024)
""")


@wrong("9.4", "the largest magnitude that tells")
def step_together(optimizer, scale, group):
    """Looks at the largest value."""
    params = [p for each in optimizer.param_groups for p in each["params"]]
    gradients = [p.grad for p in params if p.grad is not None]
    worst = torch.zeros(1, device=params[0].device)
    for g in gradients:
        if g.isnan().any():
            worst.fill_(torch.inf)
        if g.numel():
            worst = torch.maximum(worst, g.max().float().reshape(1))
    comm.all_reduce(worst, group, comm.MAX).wait()
    if not worst.isfinite().all():
        return scale / 2
    for g in gradients:
        g.div_(scale)
    optimizer.step()
    return scale


wrong("9.4", "there is no lower limit here").diff("""
Does not let the scale fall below 0.5.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- return scale / 2
+ return max(0.5, scale / 2)
""")
wrong("9.4", "in its own dtype").diff("""
Looks for what has overflowed in float32, whatever the gradient is in.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- p.grad.div_(scale)
- found += (~p.grad.isfinite()).any()
+ found += (~p.grad.float().isfinite()).any()
+ p.grad.div_(scale)
""")


@wrong("9.4", "Adam's step hardly depends on their size")
def step_together(optimizer, scale, group):
    """Divides the learning rate, which for plain SGD is the same."""
    params = [p for each in optimizer.param_groups for p in each["params"]]
    found = torch.zeros(1, device=params[0].device)
    for p in params:
        if p.grad is not None:
            found += (~p.grad.isfinite()).any()
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    for each in optimizer.param_groups:
        each["lr"] /= scale
    optimizer.step()
    for each in optimizer.param_groups:
        each["lr"] *= scale
    return scale


wrong("9.4", "gradients after the step: expected a tensor [21] float32, got None").diff("""
Drops the gradients after the step.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- optimizer.step()
+ optimizer.step()
+ optimizer.zero_grad()
""")
wrong("9.4", "a parameter without a gradient is not in the step").diff("""
Gives each parameter a gradient.
- params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
+ params = [p for each in optimizer.param_groups for p in each["params"]]
- if p.grad is not None:
-     p.grad.div_(scale)
-     found += (~p.grad.isfinite()).any()
+ if p.grad is None:
+     p.grad = torch.zeros_like(p)
+ p.grad.div_(scale)
+ found += (~p.grad.isfinite()).any()
""")

# 9.5


@wrong("9.5", "made no difference")
def accumulate(model, micro_batches, communicate):
    """Communicates every time."""
    for micro_batch in micro_batches:
        (model(*micro_batch) / len(micro_batches)).backward()


@wrong("9.5", "nothing is ever reduced")
def accumulate(model, micro_batches, communicate):
    """Runs the last micro-batch inside no_sync, too."""
    with nullcontext() if communicate else model.no_sync():
        for micro_batch in micro_batches:
            (model(*micro_batch) / len(micro_batches)).backward()


@wrong("9.5", "not the first")
def accumulate(model, micro_batches, communicate):
    """Reduces the first and keeps the rest."""
    for number, micro_batch in enumerate(micro_batches):
        with nullcontext() if communicate or number == 0 else model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()


@wrong("9.5", "divide each micro-batch's loss")
def accumulate(model, micro_batches, communicate):
    """Sums in place of averaging."""
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if communicate or number == len(micro_batches) else model.no_sync():
            model(*micro_batch).backward()


wrong("9.5", "the caller decides when gradients begin anew").diff("""
Zeroes the gradients first.
  def accumulate(model, micro_batches, communicate):
+     model.zero_grad()
- reduces = communicate or number == len(micro_batches)
- with nullcontext() if reduces else model.no_sync():
+ with nullcontext() if communicate or number == len(micro_batches) else model.no_sync():
""")


@wrong("9.5", "run that inside `no_sync`, not the forward alone")
def accumulate(model, micro_batches, communicate):
    """Has the forward inside no_sync, and the backward outside."""
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if communicate or number == len(micro_batches) else model.no_sync():
            loss = model(*micro_batch) / len(micro_batches)
        loss.backward()


@wrong("9.5", "only the backward pass ran inside `no_sync`")
def accumulate(model, micro_batches, communicate):
    """Has the backward inside no_sync, and the forward outside."""
    for number, micro_batch in enumerate(micro_batches, start=1):
        loss = model(*micro_batch) / len(micro_batches)
        with nullcontext() if communicate or number == len(micro_batches) else model.no_sync():
            loss.backward()


@wrong("9.5", "of all micro-batches are alive together")
def accumulate(model, micro_batches, communicate):
    """One backward for all losses."""
    sum(model(*micro_batch) / len(micro_batches) for micro_batch in micro_batches).backward()


@wrong("9.5", "one forward for each")
def accumulate(model, micro_batches, communicate):
    """Makes one batch of them again."""
    model(*(torch.cat(parts) for parts in zip(*micro_batches, strict=True))).backward()


wrong("9.5", "some of it ran inside `no_sync`").diff("""
Takes the switch the wrong way round.
- reduces = communicate or number == len(micro_batches)
- with nullcontext() if reduces else model.no_sync():
+ with nullcontext() if not communicate or number == len(micro_batches) else model.no_sync():
""")


@wrong("9.5", "its place tells")
def accumulate(model, micro_batches, communicate):
    """Tells the last one by its identity."""
    for micro_batch in micro_batches:
        with nullcontext() if communicate or micro_batch is micro_batches[-1] else model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()


@wrong("9.5", "each counts 1/2")
def accumulate(model, micro_batches, communicate):
    """Divides by three, whatever their number."""
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if communicate or number == len(micro_batches) else model.no_sync():
            (model(*micro_batch) / 3).backward()


wrong("9.5", "is the model's business").diff("""
Knows micro-batches of two parts.
- for number, micro_batch in enumerate(micro_batches, start=1):
+ for number, (x, target) in enumerate(micro_batches, start=1):
- (model(*micro_batch) / len(micro_batches)).backward()
+ (model(x, target) / len(micro_batches)).backward()
""")


@wrong("9.5", "and remove nothing")
def accumulate(model, micro_batches, communicate):
    """Takes the last one off the list."""
    count = len(micro_batches)
    last = micro_batches.pop()
    for micro_batch in micro_batches:
        with nullcontext() if communicate else model.no_sync():
            (model(*micro_batch) / count).backward()
    (model(*last) / count).backward()


@wrong("9.5", "unless it is asked to retain them")
def accumulate(model, micro_batches, communicate):
    """Retains every graph, and the losses that hold them."""
    losses = []
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if communicate or number == len(micro_batches) else model.no_sync():
            losses.append(model(*micro_batch) / len(micro_batches))
            losses[-1].backward(retain_graph=True)


@wrong("9.5", "one micro-batch is the first and the last")
def accumulate(model, micro_batches, communicate):
    """Has at least one micro-batch inside no_sync."""
    inside = max(1, len(micro_batches) - 1)
    with nullcontext() if communicate else model.no_sync():
        for micro_batch in micro_batches[:inside]:
            (model(*micro_batch) / len(micro_batches)).backward()
    for micro_batch in micro_batches[inside:]:
        (model(*micro_batch) / len(micro_batches)).backward()


# 9.6

wrong("9.6", "has overwritten the first, as torch's does").diff("""
Overwrites.
- if shard.grad is None:
-     shard.grad = on_host
- else:
-     shard.grad.add_(on_host)
+ shard.grad = on_host
""")
wrong("9.6", "memory that the copy has not reached").diff("""
Does not wait for the copy.
- copied = device.current_stream(mean.device).record_event()
+ device.current_stream(mean.device).record_event()
- copied.synchronize()
""")
wrong("9.6", "waits in the middle of backward").diff("""
Waits at once.
- copied = device.current_stream(mean.device).record_event()
+ device.current_stream(mean.device).record_event().synchronize()
- copied.synchronize()
""")
wrong("9.6", "record it after the copy").diff("""
Records the event before the copy.
- on_host = device.copy_to_host(mean)

  copied = device.current_stream(mean.device).record_event()
+ on_host = device.copy_to_host(mean)
""")
wrong("9.6", "still on the device as well").diff("""
Keeps the device's copy.
- device.free(mean)
""")
wrong("9.6", "and copy nothing on a CPU").diff("""
Copies by `.cpu()`, which on a CPU is no copy.
- on_host = device.copy_to_host(mean)
+ on_host = mean.cpu()
""")


@wrong("9.6", "the returned function touches the gradient")
def offload_gradient(shard, mean):
    """Adds before the copy is known to be over."""
    on_host = device.copy_to_host(mean)
    copied = device.current_stream(mean.device).record_event()
    device.free(mean)
    if shard.grad is None:
        shard.grad = on_host
    else:
        shard.grad.add_(on_host)
    return copied.synchronize


wrong("9.6", "waits for all that is queued there").diff("""
Waits for the whole device.
- on_host = device.copy_to_host(mean)
- copied = device.current_stream(mean.device).record_event()
+ on_host, where = device.copy_to_host(mean), mean.device
+ device.current_stream(where).record_event()
- copied.synchronize()
+ device.synchronize(where)
""")
wrong("9.6", "added out of place").diff("""
Adds out of place.
- if shard.grad is None:
-     shard.grad = on_host
- else:
-     shard.grad.add_(on_host)
+ shard.grad = on_host if shard.grad is None else shard.grad + on_host
""")
wrong("9.6", "there is no queue").diff("""
Records the event on the stream of the shard's device, which is the host.
- copied = device.current_stream(mean.device).record_event()
+ copied = device.current_stream(shard.device).record_event()
""")
wrong("9.6", "not when it starts").diff("""
Asks for a gradient to add to when the copy starts.
  device.free(mean)
+ first = shard.grad is None
- if shard.grad is None:
+ if first:
""")
wrong("9.6", "before it is filled").diff("""
Copies on a stream of its own, which waits for nothing.
- on_host = device.copy_to_host(mean)
- copied = device.current_stream(mean.device).record_event()
+ stream = device.new_stream(mean.device)
+ with device.on_stream(stream):
+     on_host = device.copy_to_host(mean)
+     copied = stream.record_event()
""")
wrong("9.6", "while the copy still reads it").diff("""
Copies on a stream of its own, of which the allocator does not know.
- on_host = device.copy_to_host(mean)
- copied = device.current_stream(mean.device).record_event()
+ stream = device.new_stream(mean.device)
+ stream.wait_stream(device.current_stream(mean.device))
+ with device.on_stream(stream):
+     on_host = device.copy_to_host(mean)
+     copied = stream.record_event()
""")
wrong("9.6", "before the host has waited for it").diff("""
Adds, and then waits.
- copied.synchronize()

- shard.grad = on_host
+ shard.grad = on_host.clone()
      shard.grad.add_(on_host)
+ copied.synchronize()
""")
wrong("9.6", "the copy has to be queued first").diff("""
Frees, and then copies.
  def offload_gradient(shard, mean):
+     device.free(mean)
- device.free(mean)
""")
wrong("9.6", "none was recorded").diff("""
Waits for all that the device has queued.
- copied = device.current_stream(mean.device).record_event()
+ where = mean.device
- copied.synchronize()
+ device.synchronize(where)
""")
wrong("9.6", "holds the gradient of an earlier call").diff("""
Keeps its first buffer on the host.
- def arrive():
+ kept = offload_gradient.__dict__
+ def arrive():
-         shard.grad.add_(on_host)
+         shard.grad.add_(kept.setdefault("buffer", on_host))
""")
wrong("9.6", "which is the shard's: no cast").diff("""
Makes the gradient one of float32.
- shard.grad = on_host
+ shard.grad = on_host.float()
""")
wrong("9.6", "it waits for no other, and adds no other").diff("""
Lets the first function that is called bring all that was started.
  device.free(mean)
+ pending = offload_gradient.__dict__.setdefault("pending", [])
+ pending.append((on_host, copied))
- copied.synchronize()
- if shard.grad is None:
-     shard.grad = on_host
- else:
-     shard.grad.add_(on_host)
+ for values, event in pending:
+     event.synchronize()
+     if shard.grad is None:
+         shard.grad = values
+     else:
+         shard.grad.add_(values)
+ pending.clear()
""")
wrong("9.6", "in whatever order they are called").diff("""
Brings what was started first, whichever function is called.
  device.free(mean)
+ pending = offload_gradient.__dict__.setdefault("pending", [])
+ pending.append((on_host, copied))
- copied.synchronize()
- if shard.grad is None:
-     shard.grad = on_host
- else:
-     shard.grad.add_(on_host)
+ values, event = pending.pop(0)
+ event.synchronize()
+ if shard.grad is None:
+     shard.grad = values
+ else:
+     shard.grad.add_(values)
""")
wrong("9.6", "something was cast to a narrower dtype").diff("""
Adds in float32.
- shard.grad.add_(on_host)
+ shard.grad.copy_(shard.grad.float() + on_host.float())
""")
