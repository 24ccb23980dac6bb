"""Wrong answers to exercise 9.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

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
