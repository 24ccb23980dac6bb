"""Right answers that are not the reference's: each must pass."""

from minifsdp.course.workshop.wrong import right


@right("0.3")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Moves the second moment by `lerp_` too."""
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)
    grad = grad.to(param.dtype)
    state["step"] += 1
    t = state["step"].item()
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
    root = state["exp_avg_sq"].sqrt() / (1 - beta2**t) ** 0.5
    param.addcdiv_(state["exp_avg"], root + eps, value=-lr / (1 - beta1**t))


@right("10b.5")
def commit(disk, folder, name, files, rank, barrier):
    """Lets every rank sync the part after its own files, and the folder after the rename."""
    part, whole = folder / f".{name}.part", folder / name
    if rank == 0:
        disk.make_folder(part)
    barrier()
    for file, content in files.items():
        disk.write(part / file, content)
        disk.sync(part / file)
    disk.sync(part)
    barrier()
    if rank == 0:
        disk.rename(part, whole)
    barrier()
    disk.sync(folder)


@right("8.6")
def rate_limit(gather, free, limit):
    """Records the event just before the free, which queues nothing."""
    frees = deque()

    def limited_gather(unit):
        if unit.state is SHARDED and unit.freed_after_forward:
            while len(frees) >= limit:
                frees.popleft().synchronize()
        gather(unit)

    def limited_free(unit):
        if unit.state is not SHARDED and unit.freed_after_forward:
            frees.append(device.current_stream(unit.device).record_event())
        free(unit)

    return limited_gather, limited_free


@right("12.1")
def cut(whole, ranks, rank, dim=0):
    """Asks `chunk` itself."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    parts = whole.chunk(ranks, dim)
    return parts[rank] if rank < len(parts) else whole.narrow(dim, whole.shape[dim], 0)


@right("12.3")
def copy_out(gathered, params, dims, sizes, ranks):
    """Concatenates, leaves the padding behind, and copies once."""
    for whole, dim, column in zip(params, dims, gathered.view(ranks, -1).split(sizes, 1), strict=False):
        shape = list(whole.shape)
        shape[dim] = -(-shape[dim] // ranks)
        whole.copy_(torch.cat([row.view(shape) for row in column], dim).narrow(dim, 0, whole.shape[dim]))


@right("12.4")
def chunk_cat(packed, gradients, dims, sizes):
    """Goes by torch's own kernel where dimension 0 is cut."""
    ranks = packed.shape[0]
    parts = [torch.stack(g.chunk(ranks, dim)).flatten(1) if dim else g for g, dim in zip(gradients, dims, strict=True)]
    parts += [packed.new_zeros(ranks, sizes[-1])] if sizes[-1] else []
    torch._chunk_cat([part.to(packed.dtype) for part in parts], 0, ranks, out=packed)


@right("12.5")
def hold():
    """Lets the stream wait for all before it frees any."""
    kept = []

    def keep(buffer):
        kept.append((buffer, device.current_stream(buffer.device).record_event()))

    def give_back(on):
        for _, read in kept:
            read.wait(device.current_stream(on))
        while kept:
            kept.pop()[0].untyped_storage().resize_(0)

    return keep, give_back


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


@right("13.6")
def norm(part, weight, bias, f):
    """Written out, with one message for both parameters."""
    both = f(torch.stack([weight, bias]))
    centred = part - part.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * both[0] + both[1]


@right("14.1")
def place(costs, ranks):
    """Tries all placements, from the last one on."""
    from itertools import combinations, pairwise

    def slowest(cuts):
        return max(sum(costs[begin:end]) for begin, end in pairwise((0, *cuts, len(costs))))

    found = min(reversed(list(combinations(range(1, len(costs)), ranks - 1))), key=slowest)
    return [end - begin for begin, end in pairwise((0, *found, len(costs)))]


@right("14.5")
def ends(plan, seconds):
    """Asks for what an action waits for, and notices when it asks twice."""
    last = max(action.stage for actions in plan for action in actions)
    before = {actions[at]: actions[at - 1] for actions in plan for at in range(1, len(actions))}
    asked = set()

    @cache
    def end(action):
        if action in asked:
            raise RuntimeError(f"{action} waits for itself")
        asked.add(action)
        stage, kind, micro = action
        needed = [Action(stage - 1, "F", micro)] if kind == "F" and stage else []
        needed += [Action(stage, "F", micro)] if kind == "B" else []
        needed += [Action(stage + 1, "B", micro)] if kind == "B" and stage < last else []
        needed += [before[action]] if action in before else []
        return max(map(end, needed), default=0) + seconds[kind]

    return {action: end(action) for actions in plan for action in actions}


@right("14.6")
def linear_later(later):
    """Keeps x and the parameters on `ctx`, multiplies by einsum, and adds in place."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.x, ctx.weight, ctx.bias = x.detach(), weight, bias
            return x @ weight.t() + bias

        @staticmethod
        def backward(ctx, gradient):
            x, weight, bias = ctx.x, ctx.weight, ctx.bias

            @torch.no_grad()
            def finish():
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                weight.grad += torch.einsum("...o,...i->oi", gradient, x)
                bias.grad = torch.zeros_like(bias) if bias.grad is None else bias.grad
                bias.grad += gradient.sum(tuple(range(gradient.dim() - 1)))

            later.append(finish)
            return torch.einsum("...o,oi->...i", gradient, weight) if ctx.needs_input_grad[0] else None, None, None

    return Linear.apply


@right("14.7")
def when_to_reduce(actions, zero):
    """Looks, after each backward, for another of its stage."""
    done = [at for at, action in enumerate(actions) if action.kind in "BW"]
    if zero == 2:
        return tuple(done)
    stages = [actions[at].stage for at in done]
    return [at for n, at in enumerate(done) if stages[n] not in stages[n + 1 :]]
