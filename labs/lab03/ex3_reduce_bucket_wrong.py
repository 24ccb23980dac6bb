"""Wrong answers to exercise 3.3, each with words that its rejection must contain."""

from minifsdp import comm, device
from minifsdp.course.workshop.wrong import wrong

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
