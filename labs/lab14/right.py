"""Right answers that are not the reference's: each must pass."""

from minifsdp.course.workshop.wrong import right


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
