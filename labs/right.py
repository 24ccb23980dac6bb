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


@right("6.2")
def order_streams(giver, taker):
    """Goes to the taker, and lets the event be waited for there."""
    mark = giver.record_event()
    with device.on_stream(taker):
        mark.wait()


@right("6.3")
def gather(flat, group, stream):
    """Resizes the storage itself, and goes to the stream twice."""
    output = flat.full.detach()
    with device.on_stream(stream):
        output.untyped_storage().resize_(output.numel() * output.element_size())
    with device.on_stream(stream):
        return comm.all_gather(output.data, flat.shard.detach(), group)


@right("6.4")
def missing_waits(log):
    """Counts each unit's gathers, and of how many a stream is sure."""
    made, sure, events, found = {}, {}, {}, []
    for number, (verb, what, stream) in enumerate(log):
        have = sure.setdefault(stream, {})
        if verb == "gather":
            made[what] = made.get(what, 0) + 1
        if verb == "wait":
            have[what] = made[what]
        if verb == "record":
            events[what] = dict(have)
        if verb == "wait event":
            for unit, count in events[what].items():
                have[unit] = max(count, have.get(unit, 0))
        if verb == "read" and (what not in made or have.get(what) != made[what]):
            found.append(number)
    return found


@right("6.4")
def missing_waits(log):
    """Keeps names of units; a gather takes its own out of all sets."""
    sure, events, found = {}, {}, []
    for number, line in enumerate(log):
        mine = sure.setdefault(line.stream, set())
        if line.verb == "gather":
            for each in [*sure.values(), *events.values()]:
                each.discard(line.what)
        elif line.verb == "wait":
            mine.add(line.what)
        elif line.verb == "record":
            events[line.what] = mine.copy()
        elif line.verb == "wait event":
            mine.update(events[line.what])
        elif line.what not in mine:
            found.append(number)
    return found


@right("6.5")
def free(buffer, readers):
    """Goes down into one reader's stream after the other."""

    def tell(others):
        if others:
            with device.on_stream(others[0]):
                device.record_stream(buffer.detach())
            tell(others[1:])

    tell(list(dict.fromkeys(readers)))
    buffer.untyped_storage().resize_(0)


@right("6.6")
def start_reduction(unit, stream, under_way):
    """Asks for the compute stream first, and puts the unit on the list before anything is waited for."""
    before, under_way[:] = list(under_way), [unit]
    compute = device.current_stream(unit.device)
    with device.on_stream(stream):
        for each in before:
            each.wait_reduce()
        compute.record_event().wait()
        unit.start_reduce()


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


@right("12.1")
def cut(whole, ranks, rank, dim=0):
    """Splits by a list of lengths."""
    length = whole.shape[dim]
    if dim and length % ranks:
        raise ValueError(f"{length} is not divisible by {ranks}")
    rows = -(-length // ranks)
    return whole.split([max(0, min(rows, length - r * rows)) for r in range(ranks)], dim)[rank]


@right("12.1")
def cut(whole, ranks, rank, dim=0):
    """Slices with the dimension in front."""
    if dim != 0 and whole.shape[dim] % ranks != 0:
        raise ValueError("uneven")
    rows = (whole.shape[dim] + ranks - 1) // ranks
    return whole.transpose(0, dim)[rank * rows : (rank + 1) * rows].transpose(0, dim)


@right("12.2")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Assigns slices of the flat buffer."""
    total = sum(sizes)
    at = rank * total
    for piece, size in zip(pieces, sizes, strict=False):
        gathered[at : at + piece.numel()] = piece.reshape(-1)
        at += size
    return gathered[rank * total : (rank + 1) * total]


@right("12.2")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Uses one kernel for all, and fills unused places."""
    row = gathered.chunk(ranks)[rank].fill_(0)
    into = [column[: piece.numel()] for column, piece in zip(row.split(list(sizes)), pieces, strict=False)]
    torch._foreach_copy_(into, [piece.view(-1) for piece in pieces])
    return row


@right("12.2")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Concatenates a padded row, cast once."""
    import torch.nn.functional as F

    padded = [F.pad(p.flatten().to(gathered.dtype), (0, n - p.numel())) for p, n in zip(pieces, sizes, strict=False)]
    row = gathered.view(ranks, sum(sizes)).select(0, rank)
    return row.copy_(torch.cat([*padded, gathered.new_zeros(sizes[-1])]))


@right("12.3")
def copy_out(gathered, params, dims, sizes, ranks):
    """Writes through strided views of the parameters, row by row."""
    total, start = sum(sizes), 0
    for whole, dim, size in zip(params, dims, sizes, strict=False):
        rows = -(-whole.shape[dim] // ranks)
        for rank in range(ranks):
            begin = min(rank * rows, whole.shape[dim])
            length = min(rows, whole.shape[dim] - begin)
            part = whole.narrow(dim, begin, length)
            at = rank * total + start
            part[...] = gathered[at : at + part.numel()].reshape(part.shape)
        start += size


@right("12.3")
def copy_out(gathered, params, dims, sizes, ranks):
    """Sets the data of a list of parts with one kernel for each parameter."""
    for number, (whole, dim) in enumerate(zip(params, dims, strict=True)):
        column = gathered.unflatten(0, (ranks, -1)).narrow(1, sum(sizes[:number]), sizes[number])
        parts = whole.chunk(ranks, dim)
        torch._foreach_copy_(parts, [row[: p.numel()].view_as(p) for p, row in zip(parts, column, strict=False)])


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


@right("12.4")
def chunk_cat(packed, gradients, dims, sizes):
    """Concatenates the padded chunks of each rank."""
    ranks = packed.shape[0]
    chunks = [g.chunk(ranks, dim) for g, dim in zip(gradients, dims, strict=True)]
    for rank in range(ranks):
        row = []
        for parts, size in zip(chunks, sizes, strict=False):
            part = parts[rank].to(packed.dtype).reshape(-1) if rank < len(parts) else packed.new_empty(0)
            row += [part, packed.new_zeros(size - part.numel())]
        packed[rank] = torch.cat([*row, packed.new_zeros(sizes[-1])])


@right("12.4")
def chunk_cat(packed, gradients, dims, sizes):
    """Clears only what is unused."""
    start, ranks = 0, len(packed)
    for gradient, dim, size in zip(gradients, dims, sizes, strict=False):
        rows = -(-gradient.shape[dim] // ranks)
        for rank in range(ranks):
            begin = min(rank * rows, gradient.shape[dim])
            part = gradient.narrow(dim, begin, min(rows, gradient.shape[dim] - begin))
            packed[rank, start : start + part.numel()] = part.flatten()
            packed[rank, start + part.numel() : start + size] = 0
        start += size
    packed[:, start:].fill_(0)


@right("12.5")
def hold():
    """Waits only for each stream's latest event."""
    kept, latest = [], {}

    def keep(buffer):
        stream = device.current_stream(buffer.device)
        latest[id(stream)] = stream.record_event()
        kept.append(buffer)

    def give_back(on):
        for event in latest.values():
            device.current_stream(on).wait_event(event)
        for buffer in kept:
            buffer.untyped_storage().resize_(0)
        latest.clear()
        kept.clear()

    return keep, give_back


@right("12.5")
def hold():
    """Keeps storages, and the newest first."""
    from collections import deque

    kept = deque()

    def keep(buffer):
        event = device.new_event(buffer.device)
        event.record(device.current_stream(buffer.device))
        kept.appendleft((buffer.untyped_storage(), event))

    def give_back(on):
        stream = device.current_stream(on)
        while kept:
            storage, read = kept.popleft()
            stream.wait_event(read)
            storage.resize_(0)

    return keep, give_back


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


@right("12.5")
def hold():
    """Asks whether a buffer has been read, and waits only if not."""
    kept = []

    def keep(buffer):
        kept.append((buffer, device.current_stream(buffer.device).record_event()))

    def give_back(on):
        while kept:
            buffer, read = kept.pop()
            if not read.query():
                device.current_stream(on).wait_event(read)
            buffer.untyped_storage().resize_(0)

    return keep, give_back


@right("12.6")
def columns_of(shapes, dims, ranks, itemsize):
    """Counts in bytes."""
    found = []
    for shape, dim in zip(shapes, dims, strict=True):
        largest = list(shape)
        largest[dim] = (shape[dim] + ranks - 1) // ranks
        found.append(prod(largest))
    over = sum(found) * itemsize % 16
    found.append((16 - over) // itemsize if over else 0)
    return found


@right("12.6")
def columns_of(shapes, dims, ranks, itemsize):
    """Asks torch for the first chunk, and tries gaps; returns a tuple."""
    sizes = [torch.empty(s, device="meta").chunk(ranks, d)[0].numel() for s, d in zip(shapes, dims, strict=True)]
    gap = next(gap for gap in range(16) if (sum(sizes) + gap) * itemsize % 16 == 0)
    return (*sizes, gap)


@right("12.6")
def columns_of(shapes, dims, ranks, itemsize):
    """Divides by the length, multiplies by rows."""
    import math

    sizes = [prod(s) // s[d] * math.ceil(s[d] / ranks) for s, d in zip(shapes, dims, strict=True)]
    step = 16 // itemsize
    return [*sizes, (step - sum(sizes) % step) % step]


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


@right("14.1")
def place(costs, ranks):
    """Tries all placements, from the last one on."""
    from itertools import combinations, pairwise

    def slowest(cuts):
        return max(sum(costs[begin:end]) for begin, end in pairwise((0, *cuts, len(costs))))

    found = min(reversed(list(combinations(range(1, len(costs)), ranks - 1))), key=slowest)
    return [end - begin for begin, end in pairwise((0, *found, len(costs)))]


@right("14.1")
def place(costs, ranks):
    """Fills a table, from the last stage on, and follows it back."""
    layers = len(costs)
    table = [[(sum(costs[at:]), layers)] + [None] * (ranks - 1) for at in range(layers)]
    for stages in range(1, ranks):
        for at in range(layers - stages):
            ends = range(at + 1, layers - stages + 1)
            table[at][stages] = min((max(sum(costs[at:end]), table[end][stages - 1][0]), end) for end in ends)
    counts, at = [], 0
    for stages in reversed(range(ranks)):
        end = table[at][stages][1]
        counts.append(end - at)
        at = end
    return counts


@right("14.1")
def place(costs, ranks):
    """Tries each sum of consecutive layers as a limit, smallest first, and fills stages up to it."""
    layers = range(len(costs))
    for limit in sorted({sum(costs[begin : end + 1]) for begin in layers for end in layers[begin:]}):
        counts, filled = [0], 0
        for at, cost in enumerate(costs):
            full = filled + cost > limit + 1e-12 or len(costs) - at == ranks - len(counts)
            if counts[-1] and full:
                counts.append(0)
                filled = 0
            counts[-1] += 1
            filled += cost
        if len(counts) == ranks and max(costs) <= limit + 1e-12:
            return tuple(counts)
    return None


@right("14.2")
def accumulate(forward, loss_fn, x, target, micros):
    """Counts positions, gives the outputs names, and scales the gradient instead of the loss."""
    total, begin = torch.zeros((), dtype=torch.float64), 0
    for micro in range(micros):
        size = len(x) // micros + (micro < len(x) % micros)
        output = forward(x[begin : begin + size])
        loss = loss_fn(output, target[begin : begin + size])
        loss.backward(torch.full_like(loss, size / len(x)))
        total = total + loss.detach() * size / len(x)
        begin += size
    return total


@right("14.2")
def accumulate(forward, loss_fn, x, target, micros):
    """Keeps the losses with their graphs, whose activations are freed."""
    losses = []
    for rows, wanted in zip(torch.tensor_split(x, micros), torch.tensor_split(target, micros), strict=True):
        losses.append(loss_fn(forward(rows), wanted) * rows.shape[0] / x.shape[0])
        losses[-1].backward()
    return sum(losses).detach()


@right("14.2")
def accumulate(forward, loss_fn, x, target, micros):
    """Recurses over the micro-batches."""

    def run(x, target, micros, samples):
        size = -(-len(x) // micros)
        loss = loss_fn(forward(x[:size]), target[:size]) * (size / samples)
        loss.backward()
        found = loss.data
        del loss
        return found + run(x[size:], target[size:], micros - 1, samples) if micros > 1 else found

    return run(x, target, micros, len(x))


@right("14.3")
def gpipe(rank, ranks, micros):
    """Two loops."""
    found = []
    for micro in range(micros):
        found.append(Action(rank, "F", micro))
    for micro in range(micros):
        found.append(Action(rank, "B", micro))
    return found


@right("14.3")
def gpipe(rank, ranks, micros):
    """A tuple."""
    return (*(Action(rank, "F", m) for m in range(micros)), *(Action(rank, "B", m) for m in range(micros)))


@right("14.3")
def gpipe(rank, ranks, micros):
    """By divmod, with names."""
    return [Action(stage=rank, kind="FB"[at // micros], micro=at % micros) for at in range(2 * micros)]


@right("14.4")
def one_f_one_b(rank, ranks, micros):
    """Runs a forward pass unless as many micro-batches are held as there are stages from this one on."""
    found, forward, backward = [], 0, 0
    while backward < micros:
        if forward < micros and forward - backward < ranks - rank:
            found.append(Action(rank, "F", forward))
            forward += 1
        else:
            found.append(Action(rank, "B", backward))
            backward += 1
    return found


@right("14.4")
def one_f_one_b(rank, ranks, micros):
    """Sorts by time."""
    ahead = ranks - 1 - rank
    forwards = [(2 * micro, Action(rank, "F", micro)) for micro in range(micros)]
    backwards = [(2 * (micro + ahead) + 1, Action(rank, "B", micro)) for micro in range(micros)]
    return [action for _, action in sorted(forwards + backwards, key=lambda each: each[0])]


@right("14.4")
def one_f_one_b(rank, ranks, micros):
    """Two iterators."""
    forwards = iter([Action(rank, "F", micro) for micro in range(micros)])
    found = [action for action, _ in zip(forwards, range(ranks - rank - 1), strict=False)]
    rest, forwards = [], iter([Action(rank, "F", micro) for micro in range(len(found), micros)])
    for micro in range(micros):
        rest += [action for action in [next(forwards, None)] if action] + [Action(rank, "B", micro)]
    return found + rest


@right("14.5")
def ends(plan, seconds):
    """Counts the inputs that each action still waits for."""
    from collections import defaultdict, deque

    last = max(action.stage for actions in plan for action in actions)
    waits, followers = {}, defaultdict(list)
    for actions in plan:
        before = None
        for action in actions:
            stage, kind, micro = action
            needed = {before} - {None}
            if kind == "F" and stage:
                needed.add(Action(stage - 1, "F", micro))
            if kind == "B":
                needed.add(Action(stage, "F", micro))
            if kind == "B" and stage < last:
                needed.add(Action(stage + 1, "B", micro))
            waits[action], before = needed, action
            for each in needed:
                followers[each].append(action)
    left = {action: len(needed) for action, needed in waits.items()}
    ready, found = deque(action for action in waits if not left[action]), {}
    while ready:
        action = ready.popleft()
        found[action] = max([found[each] for each in waits[action]] or [0]) + seconds[action.kind]
        for each in followers[action]:
            left[each] -= 1
            if not left[each]:
                ready.append(each)
    if len(found) < len(waits):
        raise RuntimeError
    return found


@right("14.5")
def ends(plan, seconds):
    """Runs one action of one rank at a time, from reversed copies of the lists."""
    last = max(action.stage for actions in plan for action in actions)
    stacks = [list(reversed(actions)) for actions in plan]
    clocks, found = [0] * len(plan), {}
    while any(stacks):
        for rank, stack in enumerate(stacks):
            if not stack:
                continue
            stage, kind, micro = stack[-1]
            needed = [(stage, "F", micro)] if kind == "B" else []
            if kind == "F" and stage > 0:
                needed.append((stage - 1, "F", micro))
            if kind == "B" and stage < last:
                needed.append((stage + 1, "B", micro))
            if all(each in found for each in needed):
                clocks[rank] = max(clocks[rank], *(found[each] for each in needed), 0) + seconds[kind]
                found[stack.pop()] = clocks[rank]
                break
        else:
            raise RuntimeError("deadlock")
    return found


@right("14.5")
def ends(plan, seconds):
    """Sweeps over all actions until no end changes."""
    last = max(action.stage for actions in plan for action in actions)
    found, changed = {}, True
    while changed:
        changed = False
        for actions in plan:
            clock = 0.0
            for action in actions:
                stage, kind, micro = action
                needed = [Action(stage - 1, "F", micro)] if kind == "F" and stage else []
                needed += [Action(stage, "F", micro)] if kind == "B" else []
                needed += [Action(stage + 1, "B", micro)] if kind == "B" and stage < last else []
                if not all(each in found for each in needed):
                    break
                clock = max([clock] + [found[each] for each in needed]) + seconds[kind]
                changed |= found.get(action) != clock
                found[action] = clock
    if len(found) != sum(len(actions) for actions in plan):
        raise RuntimeError("deadlock")
    return found


@right("14.6")
def linear_later(later):
    """Keeps nothing but what `ctx` saves, and leaves the flattening to the function."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x)
            ctx.parameters = weight, bias
            return F.linear(x, weight, bias)

        @staticmethod
        def backward(ctx, gradient):
            (x,), (weight, bias), needs = ctx.saved_tensors, ctx.parameters, ctx.needs_input_grad[0]

            def work():
                with torch.no_grad():
                    rows = gradient.reshape(-1, gradient.shape[-1])
                    for parameter, found in ((weight, rows.t() @ x.reshape(-1, x.shape[-1])), (bias, rows.sum(dim=0))):
                        if parameter.grad is None:
                            parameter.grad = found
                        else:
                            parameter.grad.add_(found)

            later.append(work)
            return (gradient.matmul(weight) if needs else None), None, None

    return lambda x, weight, bias: Linear.apply(x, weight, bias)


@right("14.6")
def linear_later(later):
    """A partial of a function outside, with the transposed matmul."""
    from functools import partial

    @torch.no_grad()
    def add_up(x, gradient, weight, bias):
        x, gradient = x.flatten(end_dim=-2), gradient.flatten(end_dim=-2)
        found = (x.T @ gradient).T.contiguous()
        weight.grad = found if weight.grad is None else weight.grad + found
        bias.grad = gradient.sum(0) + (0 if bias.grad is None else bias.grad)

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight, bias)
            return torch.matmul(x, weight.T) + bias

        @staticmethod
        def backward(ctx, gradient):
            later.append(partial(add_up, ctx.saved_tensors[0], gradient, *ctx.saved_tensors[1:]))
            return (F.linear(gradient, ctx.saved_tensors[1].T) if ctx.needs_input_grad[0] else None), None, None

    return Linear.apply


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


@right("14.7")
def when_to_reduce(actions, zero):
    """Goes through the list from its end."""
    found, seen = [], set()
    for at in range(len(actions) - 1, -1, -1):
        if actions[at].kind in {"B", "W"} and (zero == 2 or actions[at].stage not in seen):
            found.insert(0, at)
            seen.add(actions[at].stage)
    return found


@right("14.7")
def when_to_reduce(actions, zero):
    """Counts for each stage what is left."""
    from collections import Counter

    left = Counter(action.stage for action in actions if action.kind in ("B", "W"))
    found = []
    for at, (stage, kind, _) in enumerate(actions):
        if kind in ("B", "W"):
            left[stage] -= 1
            if zero == 2 or left[stage] == 0:
                found += [at]
    return found
