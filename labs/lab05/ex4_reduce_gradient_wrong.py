"""Wrong answers to exercise 5.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("5.4", "the ledger cannot see it")
def reduce_gradient(flat, gradient, group):
    """The right mean, in memory that nobody accounts for."""
    flat.padding_of(gradient).zero_()
    mean = torch.empty_like(flat.shard.data)
    comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
    device.free(gradient)
    flat.shard.grad = mean if flat.shard.grad is None else flat.shard.grad.add_(mean)


wrong("5.4", "add in place").diff("""
Adds out of place, into a tensor of torch's.
- flat.shard.grad.add_(mean)
+ flat.shard.grad = flat.shard.grad + mean
""")
wrong("5.4", "the sum over the ranks").diff("""
Sums, does not average.
- mean = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
- comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
+ total = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
+ comm.reduce_scatter(total, gradient, group).wait()
- flat.shard.grad = mean
+ flat.shard.grad = total
- flat.shard.grad.add_(mean)
- device.free(mean)
+ flat.shard.grad.add_(total)
+ device.free(total)
""")
wrong("5.4", "the padding has no gradient").diff("""
Reduces whatever lies in the padding.
- flat.padding_of(gradient).zero_()
""")


@wrong("5.4", "the second gradient has overwritten the first")
def reduce_gradient(flat, gradient, group):
    """Overwrites what an earlier backward has left."""
    flat.padding_of(gradient).zero_()
    flat.shard.grad = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
    comm.reduce_scatter(flat.shard.grad, gradient, group, comm.MEAN).wait()
    device.free(gradient)


wrong("5.4", "the output is unwritten until").diff("""
Does not wait.
- comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
- device.free(gradient)
+ comm.reduce_scatter(mean, gradient, group, comm.MEAN)
- device.free(mean)
""")
wrong("5.4", "twice those of a reduce-scatter").diff("""
All-reduces and keeps a part.
- mean = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
- comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
+ comm.all_reduce(gradient, group, comm.MEAN).wait()
+ mine = gradient.chunk(group.size())[group.rank()].clone()
- flat.shard.grad = mean
+ flat.shard.grad = mine
- flat.shard.grad.add_(mean)
- device.free(mean)
+ flat.shard.grad.add_(mine)
""")


@wrong("5.4", "this reduces the parameter")
def reduce_gradient(flat, gradient, group):
    """Averages the parameter and keeps this rank's own gradient."""
    flat.padding_of(gradient).zero_()
    comm.all_reduce(flat.shard.data, group, comm.MEAN).wait()
    flat.shard.grad = gradient.chunk(group.size())[group.rank()].clone()
    device.free(gradient)


wrong("5.4", "the unsharded gradient is still there").diff("""
Only drops the name of the unsharded gradient.
- device.free(gradient)
+ del gradient
- device.free(mean)
""")


@wrong("5.4", "what was reduced before is reduced again")
def reduce_gradient(flat, gradient, group):
    """Accumulates before the reduction, so that the first mean is averaged twice."""
    flat.padding_of(gradient).zero_()
    if flat.shard.grad is not None:
        gradient.chunk(group.size())[group.rank()].add_(flat.shard.grad)
        device.free(flat.shard.grad)
    mean = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
    comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
    device.free(gradient)
    flat.shard.grad = mean


wrong("5.4", "divided by 2, whatever").diff("""
Takes N for 2.
- comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
+ comm.reduce_scatter(mean, gradient, group).wait()
+ mean.div_(2)
""")
wrong("5.4", "which need not be float32").diff("""
Has its mean in float32, whatever the gradient is.
- mean = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
+ mean = device.empty(flat.shard.numel(), torch.float32, "gradients", gradient.device)
""")
wrong("5.4", "rank 1, the last 1 of `flat.shard.grad`").diff("""
Zeroes all of the padding's gradient after the reduction.
- flat.padding_of(gradient).zero_()

  comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
+ if group.rank() == group.size() - 1 and flat.padding:
+     mean[-flat.padding :] = 0
""")
wrong("5.4", "is right for any padding").diff("""
Zeroes everything where there is no padding.
- flat.padding_of(gradient).zero_()
+ k = flat.padding_of(gradient).numel()
+ gradient[-k:] = 0
""")
wrong("5.4", "every rank zeroes its own").diff("""
Clears the padding on the rank alone in whose shard it lies.
- flat.padding_of(gradient).zero_()
+ if group.rank() == group.size() - 1:
+     flat.padding_of(gradient).zero_()
""")
wrong("5.4", "`comm.world()` is about the world").diff("""
Over all ranks there are.
- comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
+ comm.reduce_scatter(mean, gradient, comm.world(), comm.MEAN).wait()
""")
wrong("5.4", "the second mean has been added: free its buffer").diff("""
Only drops the name of the second mean.
- device.free(mean)
""")
