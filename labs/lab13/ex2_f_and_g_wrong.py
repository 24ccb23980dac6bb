"""Wrong answers to exercise 13.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("13.2", "an all-reduce in both directions: all ranks continue").diff("""
Lets g sum backward, too.
-         return gradient
+         return summed(gradient)
""")
wrong("13.2", "nothing to add up in the forward pass").diff("""
Lets f sum forward, too.
-         return x.view_as(x)
+         return summed(x)
""")
wrong("13.2", "each rank's gradient is a partial sum").diff("""
Sends nothing in f.
-         return summed(gradient)
+         return gradient
""")
wrong("13.2", "return f first, then g").diff("""
Returns g and f.
- return Enter.apply, Leave.apply
+ return Leave.apply, Enter.apply
""")
wrong("13.2", "a mean is for ranks that have different data").diff("""
Averages, as DDP does.
-     comm.all_reduce(total, group).wait()
+     comm.all_reduce(total, group, comm.MEAN).wait()
""")
wrong("13.2", "the gradient that came in was summed in place").diff("""
Sums the gradient in place.
-         return summed(gradient)
+         comm.all_reduce(gradient, group).wait()
+         return gradient
""")
wrong("13.2", "x was summed in place").diff("""
Sums x in place.
-         return summed(x)
+         comm.all_reduce(x, group).wait()
+         return x.view_as(x)
""")
wrong("13.2", "a collective sends elements in the order of memory").diff("""
Copies with the strides of the original.
-     total = x.clone(memory_format=torch.contiguous_format)
+     total = x.clone()
""")
wrong("13.2", "do not divide it").diff("""
Divides g's gradient by t, as one of t parts of the sum.
-         return gradient
+         return gradient / group.size()
""")


@wrong("13.2", "write one in a `torch.autograd.Function` and call its `apply`")
def f_and_g(group):
    """Lets g leave autograd."""

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            total = gradient.clone(memory_format=torch.contiguous_format)
            comm.all_reduce(total, group).wait()
            return total

    def leave(x):
        total = x.detach().clone()
        comm.all_reduce(total, group).wait()
        return total

    return Enter.apply, leave


wrong("13.2", "`comm.all_reduce` only starts").diff("""
Waits for no sum.
-     comm.all_reduce(total, group).wait()
+     comm.all_reduce(total, group)
""")
wrong("13.2", "that shape in both directions").diff("""
Returns sums with two dimensions.
-     total = x.clone(memory_format=torch.contiguous_format)
+     total = x.reshape(-1, x.shape[-1]).clone(memory_format=torch.contiguous_format)
""")
wrong("13.2", "the next call overwrites").diff("""
Keeps one buffer for all calls.
-     total = x.clone(memory_format=torch.contiguous_format)
+     total = kept.setdefault(tuple(x.shape), torch.empty_like(x, memory_format=torch.contiguous_format))
+     total = total.detach().copy_(x)

- def summed(x):
+ kept = {}
+ def summed(x):
""")
wrong("13.2", "each pair keeps its own group").diff("""
Sums over the group of the newest pair.
- def summed(x):
+ f_and_g.newest = group
+ def summed(x):
-     comm.all_reduce(total, group).wait()
+     comm.all_reduce(total, f_and_g.newest).wait()
""")
wrong("13.2", "no message has another one").diff("""
Sums in float64.
-     total = x.clone(memory_format=torch.contiguous_format)
+     total = x.double().clone(memory_format=torch.contiguous_format)
-     return total
+     return total.to(x.dtype)
""")


@wrong("13.2", "in place or by a hook on x")
def f_and_g(group):
    """Sums the gradient of x itself, by a hook."""

    def summed(x):
        total = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total, group).wait()
        return total

    def f(x):
        if x.requires_grad:
            x.register_hook(summed)
        return x.view_as(x)

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return summed(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return f, Leave.apply


wrong("13.2", "autograd finds what the first one returned changed").diff("""
Returns views of one buffer.
- def summed(x):
+ kept = {}
+ def summed(x):
-     total = x.clone(memory_format=torch.contiguous_format)
+     key = x.shape, x.dtype
+     total = kept.setdefault(key, torch.empty(x.shape, dtype=x.dtype, device=x.device)).copy_(x)
-     return total
+     return total.view(x.shape)
""")
