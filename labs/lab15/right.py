"""Right answers that are not the reference's: each must pass."""

from minifsdp.course.workshop.wrong import right


@right("15.1")
def position(rank, sizes):
    """Looks ranks up in torch's grid."""
    grid = torch.arange(torch.Size(sizes.values()).numel()).view(*sizes.values())
    at = tuple((grid == rank).nonzero()[0].tolist())
    lines = [grid[(*at[:dim], slice(None), *at[dim + 1 :])].tolist() for dim in range(len(at))]
    return dict(zip(sizes, at, strict=True)), dict(zip(sizes, lines, strict=True))


@right("15.2")
def pairs(mesh):
    """Tests all pairs."""

    def is_pair(a, b, axis):
        same = all(mesh.place(a, other) == mesh.place(b, other) for other in mesh.divided if other != axis)
        return same and (axis != "pp" or mesh.place(b, axis) - mesh.place(a, axis) == 1)

    ranks = range(mesh.ranks)
    return {axis: [(a, b) for a in ranks for b in ranks if a < b and is_pair(a, b, axis)] for axis in mesh.divided}


@right("15.3")
def reduce_gradients(gradients, summands, tp, dp):
    """Sends one message for each group."""
    mine = [gradient for name, gradient in gradients.items() if name in summands]

    def reduced(tensors, group, op):
        flat = torch.cat([each.flatten() for each in tensors])
        comm.all_reduce(flat, group, op).wait()
        for each, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
            each.copy_(part.view_as(each))

    if mine:
        reduced(mine, tp, comm.SUM)
    reduced(list(gradients.values()), dp, comm.MEAN)


@right("15.3")
def reduce_gradients(gradients, summands, tp, dp):
    """Averages first, and divides by hand."""
    for gradient in gradients.values():
        comm.all_reduce(gradient, dp).wait()
        gradient.div_(dp.size())
    for name in sorted(summands):
        comm.all_reduce(gradients[name], tp).wait()


@right("15.4")
def step(stage, inputs, loss_of, buffer, pp, reduce):
    """Uses leaves for all that arrives, and waits for its sends at the end."""
    first, last = pp.rank() == 0, pp.rank() == pp.size() - 1
    ins, outs, sends = [], [], []
    for i in range(len(inputs)):
        x = inputs[i]
        if not first:
            x = buffer()
            comm.recv(x, pp.rank() - 1, pp).wait()
            x = x.detach().requires_grad_()
        y = stage(x)
        if last:
            y = loss_of(y, i)
        else:
            sends.append(comm.send(y.detach().clone(), pp.rank() + 1, pp))
        ins.append(x)
        outs.append(y)
    for x, y in zip(ins, outs, strict=True):
        if last:
            torch.autograd.backward(y, torch.ones_like(y) / len(inputs))
        else:
            gradient = buffer()
            comm.recv(gradient, pp.rank() + 1, pp).wait()
            torch.autograd.backward(y, gradient)
        if not first:
            sends.append(comm.send(x.grad, pp.rank() - 1, pp))
    for each in sends:
        each.wait()
    reduce()
    return [y.detach() for y in outs] if last else []


@right("15.5")
def bytes_sent(mesh, rank, tokens, width, blocks, parameters, micros, itemsize):
    """Counts message by message."""
    stage = mesh.place(rank, "pp")
    is_first, is_last = stage == 0, stage == mesh.pp - 1

    def ring(elements, ranks):
        return 2 * (ranks - 1) / ranks * elements * itemsize

    tp = pp = 0.0
    for _ in range(micros):
        for _ in range(4 * blocks + is_first + is_last):
            tp += ring(tokens * width, mesh.tp)
        if is_last:
            tp += 3 * ring(tokens, mesh.tp)
        pp += (2 - is_first - is_last) * tokens * width * itemsize
    return {"pp": pp, "dp": ring(parameters, mesh.dp), "tp": tp}


@right("15.6")
def seconds(mesh, host, sent, inside, across):
    """Looks at the ends of each group, which is sorted."""
    slowest = 0.0
    for rank in range(mesh.ranks):
        took = []
        for axis in mesh.divided:
            group = mesh.peers(rank, axis)
            latency, bandwidth = inside if min(group) // host == max(group) // host else across
            messages, size = sent[axis]
            took.append(messages * latency + size / bandwidth)
        slowest = max(slowest, sum(took))
    return slowest


@right("15.7")
def token_losses(logits, targets, group):
    """Sums the losses of tokens by a mask."""
    count = torch.tensor(float(sum(int((each != IGNORED).sum()) for each in targets)), device=logits[0].device)
    comm.all_reduce(count, group).wait()
    found = []
    for rows, wanted in zip(logits, targets, strict=True):
        counts = wanted != IGNORED
        each = -rows.log_softmax(-1).gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
        found.append(torch.where(counts, each, 0).sum() / max(1.0, count.item()) * group.size())
    return found


@right("15.8")
def ring_attention(q, k, v, chunks, block, group):
    """Keeps the logarithm of each sum, and sends keys and values separately."""
    rank, ranks = group.rank(), group.size()
    per_rank = len(chunks[rank])
    outs, lses = [None] * per_rank, [None] * per_rank
    for hop in range(ranks):
        owner, handles = (rank - hop) % ranks, []
        after = torch.empty_like(k), torch.empty_like(v)
        if hop + 1 < ranks:
            handles = [comm.send(each, (rank + 1) % ranks, group) for each in (k, v)]
            handles += [comm.recv(each, (rank - 1) % ranks, group) for each in after]
        for i, mine in enumerate(chunks[rank]):
            for j, theirs in enumerate(chunks[owner]):
                if theirs > mine:
                    continue
                parts = [each.chunk(per_rank, 1)[n] for each, n in ((q, i), (k, j), (v, j))]
                out, top, total = block(*parts, theirs == mine)
                out, lse = out / total, top + total.log()
                if outs[i] is not None:
                    both = torch.logaddexp(lses[i], lse)
                    out = outs[i] * (lses[i] - both).exp() + out * (lse - both).exp()
                    lse = both
                outs[i], lses[i] = out, lse
        for handle in handles:
            handle.wait()
        k, v = after
    return torch.cat(outs, 1)


@right("15.8")
def ring_attention(q, k, v, chunks, block, group):
    """Goes round the other way, and weighs all blocks at the end."""
    rank, ranks = group.rank(), group.size()
    number = len(chunks[rank])
    found, kv = [[] for _ in range(number)], torch.stack([k, v])
    for hop in range(ranks):
        handles, arriving = [], torch.empty_like(kv)
        if hop + 1 < ranks:
            handles = [comm.recv(arriving, (rank + 1) % ranks, group), comm.send(kv, (rank - 1) % ranks, group)]
        parts = [*zip(kv[0].chunk(number, 1), kv[1].chunk(number, 1), chunks[(rank + hop) % ranks], strict=True)]
        for query, of_query, blocks in zip(q.chunk(number, 1), chunks[rank], found, strict=True):
            blocks += [block(query, key, value, n == of_query) for key, value, n in parts if n <= of_query]
        for handle in handles:
            handle.wait()
        kv = arriving
    outs = []
    for blocks in found:
        out, top, total = (torch.stack(each) for each in zip(*blocks, strict=True))
        weight = (top - top.amax(0)).exp()
        outs.append((weight * out).sum(0) / (weight * total).sum(0))
    return torch.cat(outs, 1)


@right("15.9")
def reads(saved, wanted):
    """Goes through the files, and keeps what is left to read."""
    found, done = [], set()
    for number, parts in enumerate(saved):
        for name, part in parts.items():
            if name not in wanted or (name, part) in done:
                continue
            done.add((name, part))
            source, target = [], []
            for (a, b), (c, d) in zip(wanted[name], part, strict=True):
                low, size = max(a, c), min(b, d) - max(a, c)
                source.append(slice(low - c, low - c + max(0, size)))
                target.append(slice(low - a, low - a + max(0, size)))
            if all(each.stop > each.start for each in source):
                found.append(Read(number, name, tuple(source), tuple(target)))
    return found


@right("15.9")
def reads(saved, wanted):
    """Takes the last of equal parts."""
    found = []
    for name, box in wanted.items():
        last = {parts[name]: number for number, parts in enumerate(saved) if name in parts}
        for part, number in last.items():
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, part, strict=True)]
            if all(a < b for a, b in both):
                source = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, part, strict=True))
                target = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, box, strict=True))
                found.append(Read(number, name, source, target))
    return found
