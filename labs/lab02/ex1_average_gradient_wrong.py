"""Wrong answers to exercise 2.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("2.1", "the parameter is reduced instead of its gradient").diff("""
Averages the parameter, as a published tutorial does whose hook takes what it is given for the gradient.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ comm.all_reduce(param.data, group, comm.MEAN).wait()
""")
wrong("2.1", "the sum, not the mean").diff("""
Never divides by N.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ comm.all_reduce(param.grad, group).wait()
""")
wrong("2.1", "divided by N twice").diff("""
Takes the mean of the mean.
  comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ param.grad /= group.size()
""")
wrong("2.1", "not before").diff("""
Does not wait for its all-reduce.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ comm.all_reduce(param.grad, group, comm.MEAN)
""")
wrong("2.1", "the mean went into another tensor").diff("""
Reduces a copy and leaves the gradient as it is.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ grad = param.grad.clone()
+ comm.all_reduce(grad, group, comm.MEAN).wait()
""")
wrong("2.1", "N times the memory").diff("""
Gathers all gradients and averages them: right values, N gradients on every rank.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ every = param.grad.new_empty(group.size() * param.grad.numel())
+ comm.all_gather(every, param.grad.flatten(), group).wait()
+ param.grad.copy_(every.view(group.size(), *param.grad.shape).mean(0))
""")
wrong("2.1", "a new tensor took its place").diff("""
Puts a new gradient in the place of the accumulated one: right values, twice the bytes.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ grad = param.grad.clone()
+ comm.all_reduce(grad, group, comm.MEAN).wait()
+ param.grad = grad
""")
wrong("2.1", "a copy was reduced").diff("""
Reduces a copy and copies it back: right values, a gradient's memory more.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ grad = param.grad.clone()
+ comm.all_reduce(grad, group, comm.MEAN).wait()
+ param.grad.copy_(grad)
""")
wrong("2.1", "expected `group`, got the world").diff("""
Does not look at the group.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ comm.all_reduce(param.grad, comm.world(), comm.MEAN).wait()
""")
wrong("2.1", "not a number known beforehand").diff("""
Divides by the number of ranks that this notebook happens to have.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ param.grad /= RANKS
+ comm.all_reduce(param.grad, group).wait()
""")
wrong("2.1", "dividing before wait() divides what is there so far").diff("""
Divides while the all-reduce is under way.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ handle = comm.all_reduce(param.grad, group)
+ param.grad /= group.size()
+ handle.wait()
""")


@wrong("2.1", "`torch.distributed.get_world_size()` is about the world")
def average_gradient(param, group):
    """Divides by the size of the world."""
    import torch.distributed as dist

    comm.all_reduce(param.grad, group).wait()
    param.grad /= dist.get_world_size()


wrong("2.1", "a copy of 2 bytes per element was reduced").diff("""
Reduces a copy in bfloat16.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ half = param.grad.bfloat16()
+ comm.all_reduce(half, group, comm.MEAN).wait()
+ param.grad.copy_(half)
""")
wrong("2.1", "`.float()` and the like make a copy here").diff("""
Reduces `.float()`, which is the gradient itself only if that is float32.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ grad = param.grad.float()
+ comm.all_reduce(grad, group, comm.MEAN).wait()
""")
wrong("2.1", "do not lie one behind the other").diff("""
Reduces what may be a copy.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ comm.all_reduce(param.grad.contiguous(), group, comm.MEAN).wait()
""")
wrong("2.1", "was reduced as float32").diff("""
Reduces gradients of bfloat16 in a copy of float32.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ g = param.grad.float()
+ comm.all_reduce(g, group, comm.MEAN).wait()
+ param.grad.copy_(g)
""")
wrong("2.1", "another memory under the same tensor").diff("""
Reduces a copy and lets `.grad.data` be that.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ g = param.grad.clone()
+ comm.all_reduce(g, group, comm.MEAN).wait()
+ param.grad.data = g
""")
wrong("2.1", "cannot be applied to a 0-dim tensor").diff("""
Takes a slice, which a scalar does not have.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ comm.all_reduce(param.grad[:], group, comm.MEAN).wait()
""")
wrong("2.1", "every backward brings one to average").diff("""
Averages each parameter's gradient once in a lifetime.
- comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ if not hasattr(param, "averaged"):
+     comm.all_reduce(param.grad, group, comm.MEAN).wait()
+ param.averaged = True
""")
