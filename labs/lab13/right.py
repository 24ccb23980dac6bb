"""Right answers that are not the reference's: each must pass."""

from minifsdp.course.workshop.wrong import right


@right("13.1")
def multiply(x, w, by, group):
    """Takes its parts by chunk, and multiplies the transposes by columns, so that the gather joins them in order."""
    t, rank = group.size(), group.rank()
    dim = 1 if by == "columns" else 0
    parts = w.chunk(t, dim)
    part = parts[rank] if rank < len(parts) else w.narrow(dim, w.shape[dim], 0)
    if by == "rows":
        start = rank * -(-w.shape[0] // t)
        product = x.narrow(1, min(start, x.shape[1]), part.shape[0]) @ part
        comm.all_reduce(product, group).wait()
        return product
    size = -(-w.shape[1] // t)
    transposed = x.new_zeros(size, x.shape[0])
    transposed[: part.shape[1]] = part.t() @ x.t()
    gathered = x.new_empty(t * size, x.shape[0])
    comm.all_gather(gathered.view(-1), transposed.view(-1), group).wait()
    return gathered[: w.shape[1]].t()


@right("13.2")
def f_and_g(group):
    """f by a hook on a view, g by a sum in place of a copy, which autograd sees as the copy alone."""

    def summed(gradient):
        total = gradient.contiguous().clone()
        comm.all_reduce(total, group).wait()
        return total

    def f(x):
        y = x.view_as(x)
        if y.requires_grad:
            y.register_hook(summed)
        return y

    def g(x):
        y = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(y.detach(), group).wait()
        return y

    return f, g


@right("13.2")
def f_and_g(group):
    """Sums into a new tensor; a function per direction."""

    def summed(x):
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total.copy_(x)
        handle = comm.all_reduce(total, group)
        handle.wait()
        return total

    class F(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, gradient: summed(gradient))

    class G(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: summed(x))
        backward = staticmethod(lambda ctx, gradient: gradient.clone())

    return (lambda x: F.apply(x)), (lambda x: G.apply(x))


@right("13.3")
def mlp(x, up, up_bias, down, down_bias, f, g):
    """Flattens the batch and restores it."""
    hidden = torch.nn.functional.gelu(torch.addmm(up_bias, f(x).reshape(-1, x.shape[-1]), up.t()))
    return g((hidden @ down.t()).reshape(x.shape)) + down_bias


@right("13.3")
def mlp(x, up, up_bias, down, down_bias, f, g):
    """Uses einsum with an ellipsis."""
    hidden = torch.nn.functional.gelu(torch.einsum("...h,ih->...i", f(x), up) + up_bias)
    return g(torch.einsum("...i,hi->...h", hidden, down)).add(down_bias)


@right("13.3")
def mlp(x, up, up_bias, down, down_bias, f, g):
    """By matrix products of transposes."""
    hidden = torch.nn.functional.gelu(f(x) @ up.t() + up_bias)
    return g(hidden @ down.t()) + down_bias


@right("13.4")
def cross_entropy(logits, targets, first, group, g):
    """Two sums, one for each number, and a mask by comparison with all classes."""
    with torch.no_grad():
        largest = logits.max(dim=1).values.clone()
        comm.all_reduce(largest, group, comm.MAX).wait()
    classes = torch.arange(logits.shape[1], device=logits.device) + first
    at_target = torch.where(classes == targets[:, None], logits, 0).sum(1)
    total = g((logits - largest[:, None]).exp().sum(1))
    return (largest + total.log() - g(at_target)).mean()


@right("13.4")
def cross_entropy(logits, targets, first, group, g):
    """No g but a sum in place, which autograd does not see, so that it returns the gradient unchanged, as g does."""
    largest = logits.detach().amax(-1)
    comm.all_reduce(largest, group, comm.MAX).wait()
    shifted = logits - largest[:, None]
    index = targets - first
    here = (index >= 0) & (index < logits.shape[1])
    wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
    sums = torch.stack([shifted.exp().sum(-1), wanted])
    comm.all_reduce(sums, group).wait()
    return (sums[0].log() - sums[1]).mean()


@right("13.5")
def sequence_f_and_g(group):
    """Joins and splits lists of parts."""
    t = group.size()

    def gathered(x):
        whole = x.new_empty(t, *x.shape)
        comm.all_gather(whole.view(-1), x.contiguous().view(-1), group).wait()
        return torch.cat(whole.unbind(), 1)

    def scattered(x):
        whole = torch.stack(x.chunk(t, 1))
        part = torch.empty_like(whole[0])
        comm.reduce_scatter(part.view(-1), whole.view(-1), group).wait()
        return part

    class Enter(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: gathered(x))
        backward = staticmethod(lambda ctx, gradient: scattered(gradient))

    class Leave(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: scattered(x))
        backward = staticmethod(lambda ctx, gradient: gathered(gradient))

    return Enter.apply, Leave.apply


@right("13.5")
def sequence_f_and_g(group):
    """Gathers into a flat buffer and views it."""
    t = group.size()

    def gathered(x):
        b, s, h = x.shape
        whole = torch.empty(t * x.numel(), dtype=x.dtype, device=x.device)
        comm.all_gather(whole, x.reshape(-1), group).wait()
        return whole.view(t, b, s, h).permute(1, 0, 2, 3).reshape(b, t * s, h)

    def scattered(x):
        b, s, h = x.shape
        full = x.unflatten(1, (t, s // t)).transpose(0, 1).reshape(-1)
        mine = full.new_zeros(full.numel() // t)
        comm.reduce_scatter(mine, full, group).wait()
        return mine.view(b, s // t, h)

    class Enter(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: gathered(x))
        backward = staticmethod(lambda ctx, gradient: scattered(gradient))

    class Leave(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: scattered(x))
        backward = staticmethod(lambda ctx, gradient: gathered(gradient))

    return Enter.apply, Leave.apply


@right("13.6")
def norm(part, weight, bias, f):
    """Normalizes without parameters, then applies them."""
    import torch.nn.functional as F

    return torch.addcmul(f(bias), F.layer_norm(part, part.shape[-1:]), f(weight))


@right("13.6")
def norm(part, weight, bias, f):
    """Written out, with one message for both parameters."""
    both = f(torch.stack([weight, bias]))
    centred = part - part.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * both[0] + both[1]
