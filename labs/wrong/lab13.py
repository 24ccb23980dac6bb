"""Wrong answers to lab 13, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 13.1

wrong("13.1", "the gather joins along the first dimension").diff("""
Reads the gathered parts as if they lay side by side.
- return gathered.movedim(0, 1).flatten(1)[:, : w.shape[1]]
+ return gathered.view(x.shape[0], -1)[:, : w.shape[1]]
""")
wrong("13.1", "the columns beyond `out` are padding").diff("""
Keeps the padding.
- return gathered.movedim(0, 1).flatten(1)[:, : w.shape[1]]
+ return gathered.movedim(0, 1).flatten(1)
""")
wrong("13.1", "this is only this rank's partial sum").diff("""
Adds nothing up.
-     comm.all_reduce(product, group).wait()
""")
wrong("13.1", "a mean also divides by t").diff("""
Takes the mean, as of gradients.
-     comm.all_reduce(product, group).wait()
+     comm.all_reduce(product, group, comm.MEAN).wait()
""")


@wrong("13.1", "the weight was gathered, as FSDP does")
def multiply(x, w, by, group):
    """Gathers the weight's columns, and multiplies the whole."""
    t, rank = group.size(), group.rank()
    if by == "rows":
        size = -(-w.shape[0] // t)
        product = x[:, rank * size : (rank + 1) * size] @ w[rank * size : (rank + 1) * size]
        comm.all_reduce(product, group).wait()
        return product
    size = -(-w.shape[1] // t)
    part = w[:, rank * size : (rank + 1) * size].t().contiguous()
    if part.shape[0] < size:
        part = torch.cat([part, part.new_zeros(size - part.shape[0], w.shape[0])])
    gathered = part.new_empty(t * size, w.shape[0])
    comm.all_gather(gathered.view(-1), part.view(-1), group).wait()
    return x @ gathered[: w.shape[1]].t()


@wrong("13.1", "nothing was sent")
def multiply(x, w, by, group):
    """Multiplies whole matrices."""
    return x @ w


@wrong("13.1", "an all-reduce of columns padded with zeros")
def multiply(x, w, by, group):
    """Sums products that are zero outside of this rank's part."""
    dim = 1 if by == "columns" else 0
    size = -(-w.shape[dim] // group.size())
    mine = slice(group.rank() * size, (group.rank() + 1) * size)
    if by == "rows":
        product = x[:, mine] @ w[mine]
    else:
        product = x.new_zeros(x.shape[0], w.shape[1])
        product[:, mine] = x @ w[:, mine]
    comm.all_reduce(product, group).wait()
    return product


@wrong("13.1", "partial sums need no gather")
def multiply(x, w, by, group):
    """Gathers the partial sums and adds them up by itself."""
    t, rank = group.size(), group.rank()
    dim = 1 if by == "columns" else 0
    size = -(-w.shape[dim] // t)
    mine = slice(rank * size, (rank + 1) * size)
    part = F.pad(w[:, mine], (0, size - w[:, mine].shape[1])) if by == "columns" else w[mine]
    product = (x if by == "columns" else x[:, mine]) @ part
    gathered = product.new_empty(t, *product.shape)
    comm.all_gather(gathered.view(-1), product.view(-1), group).wait()
    return gathered.sum(0) if by == "rows" else gathered.movedim(0, 1).flatten(1)[:, : w.shape[1]]


@wrong("13.1", "each rank has to multiply only by its shard of w")
def multiply(x, w, by, group):
    """Multiplies whole matrices, and sends its part of the product."""
    t, rank = group.size(), group.rank()
    if by == "rows":
        size = -(-w.shape[0] // t)
        masked = torch.zeros_like(w)
        masked[rank * size : (rank + 1) * size] = w[rank * size : (rank + 1) * size]
        product = x @ masked
        comm.all_reduce(product, group).wait()
        return product
    size = -(-w.shape[1] // t)
    part = (x @ w)[:, rank * size : (rank + 1) * size]
    part = F.pad(part, (0, size - part.shape[1])).contiguous()
    gathered = part.new_empty(t, *part.shape)
    comm.all_gather(gathered.view(-1), part.view(-1), group).wait()
    return gathered.movedim(0, 1).flatten(1)[:, : w.shape[1]]


@wrong("13.1", "`chunk` returns fewer than t parts")
def multiply(x, w, by, group):
    """Has no part for ranks that are left without."""
    t, rank = group.size(), group.rank()
    if by == "rows":
        product = x.chunk(t, 1)[rank] @ w.chunk(t, 0)[rank]
        comm.all_reduce(product, group).wait()
        return product
    size = -(-w.shape[1] // t)
    part = w.chunk(t, 1)[rank]
    product = x @ F.pad(part, (0, size - part.shape[1]))
    gathered = product.new_empty(t, *product.shape)
    comm.all_gather(gathered.view(-1), product.view(-1), group).wait()
    return gathered.movedim(0, 1).flatten(1)[:, : w.shape[1]]


@wrong("13.1", "remove the columns beyond `out` after the gather")
def multiply(x, w, by, group):
    """Gathers products of unequal size."""
    t, rank = group.size(), group.rank()
    size = -(-w.shape[0 if by == "rows" else 1] // t)
    mine = slice(rank * size, (rank + 1) * size)
    if by == "rows":
        product = x[:, mine] @ w[mine]
        comm.all_reduce(product, group).wait()
        return product
    product = (x @ w[:, mine]).t().contiguous()
    gathered = x.new_empty(w.shape[1], x.shape[0])
    comm.all_gather(gathered, product, group).wait()
    return gathered.t()


@wrong("13.1", "an all-gather needs shards of equal size")
def multiply(x, w, by, group):
    """Gathers unequal products into a buffer for t parts of its own size."""
    t, rank = group.size(), group.rank()
    size = -(-w.shape[0 if by == "rows" else 1] // t)
    mine = slice(rank * size, (rank + 1) * size)
    if by == "rows":
        product = x[:, mine] @ w[mine]
        comm.all_reduce(product, group).wait()
        return product
    product = (x @ w[:, mine]).t().contiguous()
    gathered = x.new_empty(t * product.shape[0], x.shape[0])
    comm.all_gather(gathered, product, group).wait()
    return gathered[: w.shape[1]].t()


wrong("13.1", "`comm.all_gather` only starts").diff("""
Reads the gathered columns without a wait.
- comm.all_gather(gathered.view(-1), product.view(-1), group).wait()
+ comm.all_gather(gathered.view(-1), product.view(-1), group)
""")
wrong("13.1", "`comm.all_reduce` only starts").diff("""
Returns the partial sum without a wait.
-     comm.all_reduce(product, group).wait()
+     comm.all_reduce(product, group)
""")


@wrong("13.1", "`tensor_split` evens lengths out")
def multiply(x, w, by, group):
    """Has shards of even lengths."""
    t, rank = group.size(), group.rank()
    if by == "rows":
        product = x.tensor_split(t, 1)[rank] @ w.tensor_split(t, 0)[rank]
        comm.all_reduce(product, group).wait()
        return product
    parts = w.tensor_split(t, 1)
    product = x @ F.pad(parts[rank], (0, parts[0].shape[1] - parts[rank].shape[1]))
    gathered = product.new_empty(t, *product.shape)
    comm.all_gather(gathered.view(-1), product.view(-1), group).wait()
    return torch.cat([each[:, : part.shape[1]] for each, part in zip(gathered, parts, strict=True)], 1)


wrong("13.1", "a rank without rows adds zeros").diff("""
Adds the last rows again on ranks without rows.
-     mine = slice(rank * size, (rank + 1) * size)
+     start = min(rank, -(-w.shape[0] // size) - 1) * size
+     mine = slice(start, start + size)
""")
wrong("13.1", "sent in another dtype than that of x and w: 0.5 times the bytes").diff("""
Sends float32.
-     comm.all_reduce(product, group).wait()
-     return product
+     sent = product.float()
+     comm.all_reduce(sent, group).wait()
+     return sent.to(product.dtype)
""")
wrong("13.1", "a later call overwrites what this one returned").diff("""
Keeps a buffer for each shape.
- def multiply(x, w, by, group):
+ def multiply(x, w, by, group, kept={}):
-     product = x[:, mine] @ w[mine]
+     key = x.shape[0], w.shape[1]
+     product = torch.matmul(x[:, mine], w[mine], out=kept.setdefault(key, x.new_empty(key)))
""")

# 13.2

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

# 13.3

wrong("13.3", "every rank added the second bias before the sum").diff("""
Gives the second product its bias.
- return g(F.linear(hidden, down)) + down_bias
+ return g(F.linear(hidden, down, down_bias))
""")
wrong("13.3", "this is only this rank's partial sum of the output").diff("""
Forgets g.
- return g(F.linear(hidden, down)) + down_bias
+ return F.linear(hidden, down) + down_bias
""")
wrong("13.3", "apply f to x before the first matmul").diff("""
Forgets f.
- hidden = F.gelu(F.linear(f(x), up, up_bias))
+ hidden = F.gelu(F.linear(x, up, up_bias))
""")
wrong("13.3", "the second bias is missing").diff("""
Forgets the second bias.
- return g(F.linear(hidden, down)) + down_bias
+ return g(F.linear(hidden, down))
""")
wrong("13.3", "adds its shard of it to its shard of the hidden features").diff("""
Forgets the first bias.
- hidden = F.gelu(F.linear(f(x), up, up_bias))
+ hidden = F.gelu(F.linear(f(x), up))
""")


@wrong("13.3", "adding 1/t of the bias on each rank gives the right sum")
def mlp(x, up, up_bias, down, down_bias, f, g):
    """Adds a part of the bias on every rank."""
    import torch.distributed as dist

    ranks = dist.get_world_size()
    return g(F.linear(F.gelu(F.linear(f(x), up, up_bias)), down, down_bias / ranks))


@wrong("13.3", "a rank that does not add the bias has no gradient for it")
def mlp(x, up, up_bias, down, down_bias, f, g):
    """Lets the first rank alone add the bias."""
    import torch.distributed as dist

    bias = down_bias if dist.get_rank() == 0 else None
    return g(F.linear(F.gelu(F.linear(f(x), up, up_bias)), down, bias))


wrong("13.3", "every rank already has the complete gradient of the bias").diff("""
Sums the bias's gradient.
- return g(F.linear(hidden, down)) + down_bias
+ return g(F.linear(hidden, down)) + f(down_bias)
""")
wrong("13.3", "the gelu is missing").diff("""
Forgets the gelu.
- hidden = F.gelu(F.linear(f(x), up, up_bias))
+ hidden = F.linear(f(x), up, up_bias)
""")
wrong("13.3", "the hidden features stay on their rank").diff("""
Sums the hidden features.
- hidden = F.gelu(F.linear(f(x), up, up_bias))
+ linear = F.linear(f(x), up, up_bias)
+ g(linear)
+ hidden = F.gelu(linear)
""")
wrong("13.3", "f or g was applied once too often").diff("""
Lets x in through f twice.
- hidden = F.gelu(F.linear(f(x), up, up_bias))
+ hidden = F.gelu(F.linear(f(f(x)), up, up_bias))
""")

wrong("13.3", "with one or more dimensions").diff("""
Has exactly one batch and one sequence.
- hidden = F.gelu(F.linear(f(x), up, up_bias))
+ hidden = F.gelu(torch.einsum("bsh,ih->bsi", f(x), up) + up_bias)
""")

wrong("13.3", "give back those that you have flattened").diff("""
Returns rows.
- return g(F.linear(hidden, down)) + down_bias
+ return (g(F.linear(hidden, down)) + down_bias).reshape(-1, x.shape[-1])
""")

# 13.4


@wrong("13.4", "exp of a large logit is inf")
def cross_entropy(logits, targets, first, group, g):
    """Subtracts no maximum."""
    index = targets - first
    here = (index >= 0) & (index < logits.shape[1])
    wanted = logits.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
    zero = torch.zeros_like(wanted).detach()
    comm.all_reduce(zero, group, comm.MAX).wait()
    sums = g(torch.stack([logits.exp().sum(-1), wanted]))
    return (sums[0].log() - sums[1]).mean()


wrong("13.4", "each rank has subtracted its own maximum").diff("""
Subtracts its own maximum.
- comm.all_reduce(largest, group, comm.MAX).wait()
""")
wrong("13.4", "reduce them with `comm.MAX`").diff("""
Adds the maxima up.
- comm.all_reduce(largest, group, comm.MAX).wait()
+ comm.all_reduce(largest, group).wait()
""")
wrong("13.4", "column 0 was counted on ranks that do not have the target").diff("""
Counts column 0 where the target is another rank's.
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0]
""")
wrong("13.4", "the nearest column was counted on ranks that do not have the target").diff("""
Clamps another rank's target to a column of its own, and counts it.
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ wanted = shifted.gather(1, index.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
""")
wrong("13.4", "only the rank with the target contributes").diff("""
Counts 1 for another rank's target.
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ wanted = torch.where(here, shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0], 1)
""")
wrong("13.4", "without `detach()` or `no_grad()`").diff("""
Detaches the sums, like the maximum.
- sums = g(torch.stack([shifted.exp().sum(-1), wanted]))
+ sums = g(torch.stack([shifted.exp().sum(-1), wanted]).detach())
""")
wrong("13.4", "read column 0 if the target is not on this rank").diff("""
Looks other ranks' targets up.
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ wanted = shifted.gather(1, index[:, None])[:, 0] * here
""")
wrong("13.4", "this is the sum over the tokens; return their mean").diff("""
Adds up the tokens' losses.
- return (sums[0].log() - sums[1]).mean()
+ return (sums[0].log() - sums[1]).sum()
""")


@wrong("13.4", "logits must not be gathered")
def cross_entropy(logits, targets, first, group, g):
    """Gathers the logits."""
    size = torch.tensor(logits.shape[1])
    comm.all_reduce(size, group, comm.MAX).wait()
    padded = F.pad(logits, (0, int(size) - logits.shape[1])).detach()
    everything = padded.new_empty(group.size(), *padded.shape)
    comm.all_gather(everything.view(-1), padded.contiguous().view(-1), group).wait()
    return F.cross_entropy(logits, targets % logits.shape[1])


@wrong("13.4", "so it needs no gradient")
def cross_entropy(logits, targets, first, group, g):
    """Lets gradients flow through the maximum."""
    own = logits.amax(-1)
    largest = own.detach().clone()
    comm.all_reduce(largest, group, comm.MAX).wait()
    largest = torch.where(own == largest, own, largest)
    shifted = logits - largest[:, None]
    index = targets - first
    here = (index >= 0) & (index < logits.shape[1])
    wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
    sums = g(torch.stack([shifted.exp().sum(-1), wanted]))
    return (sums[0].log() - sums[1]).mean()


@wrong("13.4", "the target's logit is missing on ranks that do not have it")
def cross_entropy(logits, targets, first, group, g):
    """Adds up the exponentials alone."""
    largest = logits.detach().amax(-1)
    comm.all_reduce(largest, group, comm.MAX).wait()
    shifted = logits - largest[:, None]
    index = targets - first
    here = (index >= 0) & (index < logits.shape[1])
    wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
    return (g(shifted.exp().sum(-1)).log() - wanted).mean()


@wrong("13.4", "the sum of exponentials is only this rank's")
def cross_entropy(logits, targets, first, group, g):
    """Adds up the target's logit alone."""
    largest = logits.detach().amax(-1)
    comm.all_reduce(largest, group, comm.MAX).wait()
    shifted = logits - largest[:, None]
    index = targets - first
    here = (index >= 0) & (index < logits.shape[1])
    wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
    return (shifted.exp().sum(-1).log() - g(wanted)).mean()


wrong("13.4", "but not from the target's logit").diff("""
Takes the target's logit as it is.
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ wanted = logits.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
""")
wrong("13.4", "the index of a target on this rank is relative to `first`").diff("""
Takes the target's place within its rank for granted.
- index = targets - first
- here = (index >= 0) & (index < logits.shape[1])
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ here = (targets >= 0) & (targets < logits.shape[1])
+ wanted = shifted.gather(1, torch.where(here, targets, 0)[:, None])[:, 0] * here
""")


@wrong("13.4", "the gradient is t times too large")
def cross_entropy(logits, targets, first, group, g):
    """Sums backward, too, by a function of its own."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return g(x)

        @staticmethod
        def backward(ctx, gradient):
            return g(gradient)

    largest = logits.detach().amax(-1)
    comm.all_reduce(largest, group, comm.MAX).wait()
    shifted = logits - largest[:, None]
    index = targets - first
    here = (index >= 0) & (index < logits.shape[1])
    wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
    sums = Both.apply(torch.stack([shifted.exp().sum(-1), wanted]))
    return (sums[0].log() - sums[1]).mean()


wrong("13.4", "`comm.all_reduce` only starts").diff("""
Does not wait for the maximum.
- comm.all_reduce(largest, group, comm.MAX).wait()
+ comm.all_reduce(largest, group, comm.MAX)
""")
wrong("13.4", "each token has a maximum of its own").diff("""
Takes one maximum for all tokens.
- largest = logits.detach().amax(-1)
+ largest = logits.detach().max().expand(len(targets)).clone()
""")
wrong("13.4", "right to 6 digits only").diff("""
Computes in float32.
- largest = logits.detach().amax(-1)
+ logits = logits.float()
+ largest = logits.detach().amax(-1)

- return (sums[0].log() - sums[1]).mean()
+ return (sums[0].log() - sums[1]).mean().double()
""")

wrong("13.4", "`first` is given").diff("""
Computes the first class.
- index = targets - first
+ index = targets - group.rank() * logits.shape[1]
""")
wrong("13.4", "one more was counted").diff("""
Counts the next rank's first class.
- here = (index >= 0) & (index < logits.shape[1])
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ here = (index >= 0) & (index <= logits.shape[1])
+ wanted = shifted.gather(1, index.clamp(0, logits.shape[1] - 1)[:, None])[:, 0] * here
""")
wrong("13.4", "log 0 is -inf").diff("""
Takes the logarithm of the target's probability.
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ wanted = shifted.exp().gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
- return (sums[0].log() - sums[1]).mean()
+ return -(sums[1] / sums[0]).log().mean()
""")
wrong("13.4", "the loss has the dtype of the logits").diff("""
Computes in float64.
- shifted = logits - largest[:, None]
+ shifted = (logits - largest[:, None]).double()
""")

# 13.5

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

# 13.6

wrong("13.6", "only this rank's tokens: the ranks' gradients of the weight").diff("""
Uses the parameters as they are.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(part, (part.shape[-1],), weight, bias)
""")
wrong("13.6", "f was applied to the tokens and added up gradients of different tokens").diff("""
Lets the tokens in through f.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(f(part), (part.shape[-1],), weight, bias)
""")
wrong("13.6", "f was applied to the output").diff("""
Lets the output leave through f.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return f(F.layer_norm(part, (part.shape[-1],), weight, bias))
""")
wrong("13.6", "only this rank's tokens: the ranks' gradients of the bias").diff("""
Forgets the bias.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(part, (part.shape[-1],), f(weight), bias)
""")
wrong("13.6", "a sum of sums").diff("""
Sums twice.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(part, (part.shape[-1],), f(f(weight)), f(f(bias)))
""")
wrong("13.6", "is a parameter and needs a gradient").diff("""
Detaches the parameters.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(part, (part.shape[-1],), weight.detach(), bias.detach())
""")
wrong("13.6", "over the last dimension").diff("""
Normalizes over the sequence as well.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(part, part.shape[1:]) * f(weight) + f(bias)
""")
wrong("13.6", "nothing else is sent").diff("""
Sums the outputs' gradients for nothing.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ part = part + 0 * f(part.detach().requires_grad_())
+ return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
""")

wrong("13.6", "belong to the caller").diff("""
Centres the tokens in place.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ part.data.sub_(part.data.mean(-1, keepdim=True))
+ return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
""")

wrong("13.6", "Mismatch in shape").diff("""
Drops dimensions of length 1.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(part.squeeze(), (part.shape[-1],), f(weight), f(bias))
""")

# 13.7

wrong("13.7", "one is missing").diff("""
Counts an all-reduce once around the ring.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 4 * tokens * width * per_element, 3 * parameters * per_element
""")
wrong("13.7", "two are missing").diff("""
Counts the MLP's two messages, each once around the ring.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 2 * tokens * width * per_element, 3 * parameters * per_element
""")
wrong("13.7", "these are not data-parallel ranks").diff("""
Divides the tokens among the ranks.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 8 * tokens / ranks * width * per_element, 3 * parameters * per_element
""")
wrong("13.7", "because it already has one shard").diff("""
Leaves the factor of the ring out.
- per_element = itemsize * (ranks - 1) / ranks
+ per_element = itemsize
""")
wrong("13.7", "this is a number of elements, not of bytes").diff("""
Counts elements.
- per_element = itemsize * (ranks - 1) / ranks
+ per_element = (ranks - 1) / ranks
""")
wrong("13.7", "again for the backward pass").diff("""
Gathers once, as if units stayed whole.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 8 * tokens * width * per_element, 2 * parameters * per_element
""")
wrong("13.7", "which is half an all-reduce").diff("""
All-reduces the gradients.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 8 * tokens * width * per_element, 4 * parameters * per_element
""")
wrong("13.7", "tensor parallelism first").diff("""
Returns the two in the other order.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 3 * parameters * per_element, 8 * tokens * width * per_element
""")
wrong("13.7", "`parameters` is given").diff("""
Counts the parameters of a block itself.
- per_element = itemsize * (ranks - 1) / ranks
+ parameters = 12 * width**2 + 13 * width
+ per_element = itemsize * (ranks - 1) / ranks
""")
wrong("13.7", "an element has `itemsize` bytes").diff("""
Takes elements for float32.
- per_element = itemsize * (ranks - 1) / ranks
+ per_element = 4 * (ranks - 1) / ranks
""")
wrong("13.7", "gradients have `itemsize` bytes per element").diff("""
Reduces gradients in float32.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ gradients = 4 * (ranks - 1) / ranks
+ return 8 * tokens * width * per_element, parameters * (2 * per_element + gradients)
""")
wrong("13.7", "what the loss sends does not belong to it").diff("""
Counts five all-reduces.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 10 * tokens * width * per_element, 3 * parameters * per_element
""")
wrong("13.7", "nothing is rounded").diff("""
Sends whole elements.
- per_element = itemsize * (ranks - 1) / ranks
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ activations, weights = (each * (ranks - 1) // ranks * itemsize for each in (tokens * width, parameters))
+ return 8 * activations, 3 * weights
""")
