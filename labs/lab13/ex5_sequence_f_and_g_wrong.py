"""Wrong answers to exercise 13.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("13.5", "the shards are joined along the batch").diff("""
Gathers as collectives do, along the first dimension.
-     part = x.movedim(1, 0).contiguous()
-     whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
-     comm.all_gather(whole.view(-1), part.view(-1), group).wait()
-     return whole.movedim(0, 1).contiguous()
+     part = x.contiguous()
+     whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
+     comm.all_gather(whole.view(-1), part.view(-1), group).wait()
+     return whole
""")
wrong("13.5", "mixes sequences").diff("""
Reads the gathered parts as a whole batch.
-     part = x.movedim(1, 0).contiguous()
-     whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
-     comm.all_gather(whole.view(-1), part.view(-1), group).wait()
-     return whole.movedim(0, 1).contiguous()
+     part = x.contiguous()
+     whole = part.new_empty(group.size() * part.numel())
+     comm.all_gather(whole, part.view(-1), group).wait()
+     return whole.view(part.shape[0], -1, part.shape[2])
""")
wrong("13.5", "this splits the batch").diff("""
Reduces as collectives do, along the first dimension.
-     whole = x.movedim(1, 0).contiguous()
-     part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
-     comm.reduce_scatter(part.view(-1), whole.view(-1), group).wait()
-     return part.movedim(0, 1).contiguous()
+     whole = x.contiguous()
+     part = whole.new_empty(whole.shape[0], whole.shape[1] // group.size(), whole.shape[2])
+     comm.reduce_scatter(part.view(-1), whole.view(-1), group).wait()
+     return part
""")


@wrong("13.5", "this is a shard of only this rank's gradient")
def sequence_f_and_g(group):
    """Takes its tokens of the gradient, and adds nothing up."""

    def gathered(x):
        part = x.movedim(1, 0).contiguous()
        whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
        comm.all_gather(whole.view(-1), part.view(-1), group).wait()
        return whole.movedim(0, 1).contiguous()

    def scattered(x):
        whole = x.movedim(1, 0).contiguous()
        part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
        comm.reduce_scatter(part.view(-1), whole.view(-1), group).wait()
        return part.movedim(0, 1).contiguous()

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return gathered(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.chunk(group.size(), 1)[group.rank()].contiguous()

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return scattered(x)

        @staticmethod
        def backward(ctx, gradient):
            return gathered(gradient)

    return Enter.apply, Leave.apply


wrong("13.5", "its gradient covers the other ranks' tokens, too").diff("""
Pads g's gradient with zeros.
-         return gathered(gradient)
+         parts = [torch.zeros_like(gradient) for _ in range(group.size())]
+         parts[group.rank()] = gradient
+         return torch.cat(parts, 1)
""")
wrong("13.5", "a mean also divides by t").diff("""
Takes the mean in the reduce-scatter.
-     comm.reduce_scatter(part.view(-1), whole.view(-1), group).wait()
+     comm.reduce_scatter(part.view(-1), whole.view(-1), group, comm.MEAN).wait()
""")
wrong("13.5", "sends twice the bytes").diff("""
Reduces all and keeps a part.
-     part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
-     comm.reduce_scatter(part.view(-1), whole.view(-1), group).wait()
+     whole = whole.clone()
+     comm.all_reduce(whole, group).wait()
+     part = whole.chunk(group.size())[group.rank()]
""")
wrong("13.5", "this is a shard of only this rank's x").diff("""
Takes its tokens of x, and adds nothing up.
-         return scattered(x)
+         return x.chunk(group.size(), 1)[group.rank()].contiguous()
""")
wrong("13.5", "a rank keeps only its own").diff("""
Returns all tokens of the sum.
-         return scattered(gradient)
+         total = gradient.contiguous().clone()
+         comm.all_reduce(total, group).wait()
+         return total
""")
wrong("13.5", "`comm.all_gather` only starts").diff("""
Does not wait for the gather.
-     comm.all_gather(whole.view(-1), part.view(-1), group).wait()
+     comm.all_gather(whole.view(-1), part.view(-1), group)
""")
wrong("13.5", "`comm.reduce_scatter` only starts").diff("""
Does not wait for the reduce-scatter.
-     comm.reduce_scatter(part.view(-1), whole.view(-1), group).wait()
+     comm.reduce_scatter(part.view(-1), whole.view(-1), group)
""")
wrong("13.5", "the order of memory").diff("""
Takes elements in the order of memory.
  def gathered(x):
-     part = x.movedim(1, 0).contiguous()
+     x = x.as_strided(x.shape, torch.empty(x.shape).stride())
+     part = x.movedim(1, 0).contiguous()
""")
wrong("13.5", "do not move dimensions").diff("""
Calls the batch the sequence.
  def gathered(x):
-     part = x.movedim(1, 0).contiguous()
+     part = x.reshape(x.shape[1], x.shape[0], x.shape[2])
""")
wrong("13.5", "each pair keeps its own group").diff("""
Works on the group of the newest pair.
- def gathered(x):
+ sequence_f_and_g.newest = group
+ def gathered(x):
+     group = sequence_f_and_g.newest
- def scattered(x):
+ def scattered(x):
+     group = sequence_f_and_g.newest
""")
wrong("13.5", "was transposed in place").diff("""
Transposes the caller's tensor.
-     whole = x.movedim(1, 0).contiguous()
+     whole = x.transpose_(0, 1).contiguous()
""")
wrong("13.5", "everything stays in the dtype of x").diff("""
Gathers in float64.
-     part = x.movedim(1, 0).contiguous()
+     part = x.movedim(1, 0).contiguous().double()
""")
