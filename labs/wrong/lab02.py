"""Wrong answers to lab 02, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 2.1

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

# 2.2


@wrong("2.2", "in order of registration")
def assign_buckets(params, cap_bytes):
    """Forward order, as in published answers to a well-known course: the first bucket is full last."""
    buckets, size = [], cap_bytes
    for param in params:
        if size >= cap_bytes or param.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
    return buckets


@wrong("2.2", "a bucket per parameter")
def assign_buckets(params, cap_bytes):
    """A bucket per parameter."""
    return [[param] for param in reversed(params)]


@wrong("2.2", "the last bucket is lost")
def assign_buckets(params, cap_bytes):
    """Appends a bucket only when it is full: the last, partial one never is."""
    buckets, current = [], []
    for param in reversed(params):
        if current and param.dtype != current[0].dtype:
            buckets.append(current)
            current = []
        current.append(param)
        if sum(p.numel() * p.element_size() for p in current) >= cap_bytes:
            buckets.append(current)
            current = []
    return buckets


@wrong("2.2", "the cap is in bytes")
def assign_buckets(params, cap_bytes):
    """Counts elements."""
    buckets, size = [], cap_bytes
    for param in reversed(params):
        if size >= cap_bytes or param.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.numel()
    return buckets


@wrong("2.2", "one buffer has one dtype")
def assign_buckets(params, cap_bytes):
    """Mixes dtypes in a bucket."""
    buckets, size = [], cap_bytes
    for param in reversed(params):
        if size >= cap_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
    return buckets


@wrong("2.2", "closed before the cap is reached")
def assign_buckets(params, cap_bytes):
    """Takes the cap for a limit that no bucket may exceed."""
    buckets, size = [], 0
    for param in reversed(params):
        new = param.numel() * param.element_size()
        if not buckets or size + new > cap_bytes or param.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += new
    return buckets


@wrong("2.2", "the cap itself is enough")
def assign_buckets(params, cap_bytes):
    """Closes a bucket beyond the cap only."""
    buckets, size = [[]], 0
    for param in reversed(params):
        if buckets[-1] and (size > cap_bytes or param.dtype != buckets[-1][0].dtype):
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
    return buckets


@wrong("2.2", "also where the dtype changes")
def assign_buckets(params, cap_bytes):
    """Goes on counting after a change of dtype."""
    buckets, size = [[]], 0
    for param in reversed(params):
        if buckets[-1] and size >= cap_bytes:
            buckets.append([])
            size = 0
        if buckets[-1] and param.dtype != buckets[-1][0].dtype:
            buckets.append([])
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
    return buckets


@wrong("2.2", "cut from the first parameter on")
def assign_buckets(params, cap_bytes):
    """Cuts in the order of registration and turns the result around."""
    buckets, size = [[]], 0
    for param in params:
        if buckets[-1] and (size >= cap_bytes or param.dtype != buckets[-1][0].dtype):
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
    return [bucket[::-1] for bucket in reversed(buckets)]


wrong("2.2", "ask its element_size()").diff("""
Takes every element for four bytes.
- buckets = []
- filling = {}
+ buckets, filling = [], {}
- bucket = filling[param.dtype]
- bucket.append(param)
- if sum(p.numel() * p.element_size() for p in bucket) >= cap_bytes:
+ filling[param.dtype].append(param)
+ if sum(p.numel() * 4 for p in filling[param.dtype]) >= cap_bytes:
""")


@wrong("2.2", "in `params` afterwards: expected [0, 1, 2, 3, 4, 5, 6], got []")
def assign_buckets(params, cap_bytes):
    """Empties its caller's list."""
    open_, closed = {}, []
    while params:
        p = params.pop()
        if p.dtype not in open_:
            open_[p.dtype] = []
            closed.append(open_[p.dtype])
        open_[p.dtype].append(p)
        if sum(q.numel() * q.element_size() for q in open_[p.dtype]) >= cap_bytes:
            del open_[p.dtype]
    return closed


@wrong("2.2", "got [6, 5, 4, 3, 2, 1, 0]")
def assign_buckets(params, cap_bytes):
    """Reverses its caller's list."""
    params.reverse()
    buckets = []
    size = 0
    for param in params:
        if not buckets or size >= cap_bytes or param.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
    return buckets


@wrong("2.2", "whatever came in between")
def assign_buckets(params, cap_bytes):
    """Closes a bucket before another dtype, where torch leaves it open."""
    out, held = [[]], 0
    for p in reversed(params):
        if out[-1] and (held >= cap_bytes or out[-1][0].dtype != p.dtype):
            out.append([])
            held = 0
        out[-1].append(p)
        held += p.numel() * p.element_size()
    return out


@wrong("2.2", "not that in which they are full")
def assign_buckets(params, cap_bytes):
    """Has buckets in the order in which they close."""
    open_, out = {}, []
    for p in reversed(params):
        b = open_.setdefault(p.dtype, [])
        b.append(p)
        if sum(q.numel() * q.element_size() for q in b) >= cap_bytes:
            out.append(open_.pop(p.dtype))
    return out + list(open_.values())


@wrong("2.2", "each dtype counts its own bytes")
def assign_buckets(params, cap_bytes):
    """Counts all dtypes together."""
    open_, out, held = {}, [], 0
    for p in reversed(params):
        if p.dtype not in open_:
            open_[p.dtype] = []
            out.append(open_[p.dtype])
        open_[p.dtype].append(p)
        held += p.numel() * p.element_size()
        if held >= cap_bytes:
            open_.clear()
            held = 0
    return out


# 2.3


@wrong("2.3", "leaves nothing to overlap")
def start_bucket(bucket, group):
    """Waits at once: right values, no overlap."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(torch.zeros_like(part) if p.grad is None else p.grad.flatten())
    handle = comm.all_reduce(flat, group, comm.MEAN)
    handle.wait()
    return flat, handle


@wrong("2.3", "the sum, not the mean")
def start_bucket(bucket, group):
    """Sums, and nobody divides."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(torch.zeros_like(part) if p.grad is None else p.grad.flatten())
    return flat, comm.all_reduce(flat, group)


@wrong("2.3", "an all-reduce per parameter")
def start_bucket(bucket, group):
    """Reduces the parts one by one: as many messages as without buckets."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(torch.zeros_like(part) if p.grad is None else p.grad.flatten())
        handle = comm.all_reduce(part, group, comm.MEAN)
    return flat, handle


@wrong("2.3", "the buffer comes uninitialized")
def start_bucket(bucket, group):
    """Passes over gradients that are None, whose places in the buffer hold garbage."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is not None:
            part.copy_(p.grad.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "nobody can count its bytes")
def start_bucket(bucket, group):
    """Concatenates into a tensor that no ledger knows, as _flatten_dense_tensors does."""
    flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in bucket])
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "the parameters were copied in")
def start_bucket(bucket, group):
    """Copies the parameters in: parameter averaging."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(p.data.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "a gradient that is None stays so here")
def start_bucket(bucket, group):
    """Makes a gradient of zeros where there is none."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        part.copy_(p.grad.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "expected `group`, got the world")
def start_bucket(bucket, group):
    """Does not look at the group."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(torch.zeros_like(part) if p.grad is None else p.grad.flatten())
    return flat, comm.all_reduce(flat, comm.world(), comm.MEAN)


@wrong("2.3", "the dtype of the bucket's parameters")
def start_bucket(bucket, group):
    """Allocates float32 whatever the parameters are."""
    flat = device.empty(sum(p.numel() for p in bucket), torch.float32, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(torch.zeros_like(part) if p.grad is None else p.grad.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "only gives a name to something else")
def start_bucket(bucket, group):
    """Rebinds the name of a part, and so writes nothing."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            part.zero_()
        else:
            part = p.grad.flatten()
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "the copy comes after the all-reduce was issued")
def start_bucket(bucket, group):
    """Launches first and fills the buffer then."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    handle = comm.all_reduce(flat, group, comm.MEAN)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(torch.zeros_like(part) if p.grad is None else p.grad.flatten())
    return flat, handle


@wrong("2.3", "got []")
def start_bucket(bucket, group):
    """Sends nothing for a bucket without gradients."""
    sizes = [p.numel() for p in bucket]
    flat = device.empty(sum(sizes), bucket[0].dtype, "communication", bucket[0].device)
    if all(p.grad is None for p in bucket):
        return flat.zero_(), comm.Done()
    for part, p in zip(flat.split(sizes), bucket, strict=True):
        part.zero_() if p.grad is None else part.copy_(p.grad.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "got [all_reduce of 36 bytes]")
def start_bucket(bucket, group):
    """Takes the dtype from the first gradient, and float32 where there is none."""
    sizes = [p.numel() for p in bucket]
    dtype = bucket[0].grad.dtype if bucket[0].grad is not None else torch.float32
    flat = device.empty(sum(sizes), dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split(sizes), bucket, strict=True):
        part.zero_() if p.grad is None else part.copy_(p.grad.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "so it has no flat view")
def start_bucket(bucket, group):
    """Flattens with `view`, which a channels-last gradient refuses."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    flat.zero_()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is not None:
            part.copy_(p.grad.view(-1))
    return flat, comm.all_reduce(flat, group, comm.MEAN)


# 2.4


@wrong("2.4", "before wait() the buffer holds")
def finish_bucket(bucket, flat, handle):
    """Does not wait."""
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        p.grad = part.view(p.shape).clone()
    device.free(flat)


@wrong("2.4", "the means were never copied back")
def finish_bucket(bucket, flat, handle):
    """Waits and frees, and leaves the gradients as they were."""
    handle.wait()
    device.free(flat)


@wrong("2.4", "divided by N again")
def finish_bucket(bucket, flat, handle):
    """Averages twice: the all-reduce has taken the mean already."""
    handle.wait()
    flat /= handle.call.ranks
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        p.grad = part.view(p.shape).clone()
    device.free(flat)


@wrong("2.4", "buffers pile up")
def finish_bucket(bucket, flat, handle):
    """Never frees the buffer."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(part.view(p.shape))


@wrong("2.4", "write into the gradient that exists")
def finish_bucket(bucket, flat, handle):
    """Gives every gradient new memory while the old one still lives."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        p.grad = part.view_as(p).clone()
    device.free(flat)


@wrong("2.4", "a gradient that was None stays None")
def finish_bucket(bucket, flat, handle):
    """Passes over gradients that are None: this rank's parameter then stays behind the others'."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is not None:
            p.grad.copy_(part.view(p.shape))
    device.free(flat)


@wrong("2.4", "loses its memory when the buffer is freed")
def finish_bucket(bucket, flat, handle):
    """Lets the gradients be views of the buffer that it then frees."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        p.grad = part.view(p.shape)
    device.free(flat)


@wrong("2.4", "it must replace it")
def finish_bucket(bucket, flat, handle):
    """Accumulates the mean on top of the rank's own gradient."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        p.grad = part.view(p.shape).clone() if p.grad is None else p.grad + part.view(p.shape)
    device.free(flat)


@wrong("2.4", "attempting to assign a gradient")
def finish_bucket(bucket, flat, handle):
    """Makes float32 where there was None, whatever the dtype."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = torch.zeros(p.shape)
        p.grad.copy_(part.view(p.shape))
    device.free(flat)


@wrong("2.4", "the list is the caller's")
def finish_bucket(bucket, flat, handle):
    """Empties the bucket's list."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = part.clone().view(p.shape)
        else:
            p.grad.copy_(part.view(p.shape))
    bucket.clear()
    device.free(flat)


@wrong("2.4", "the optimizer moves parameters")
def finish_bucket(bucket, flat, handle):
    """Moves the parameters on the way."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = part.clone().view(p.shape)
        else:
            p.grad.copy_(part.view(p.shape))
        p.data -= 0.1 * p.grad
    device.free(flat)


@wrong("2.4", "gradient of a parameter that lies in memory channels last")
def finish_bucket(bucket, flat, handle):
    """Writes into what may be a copy of the gradient."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = part.clone().view(p.shape)
        else:
            p.grad.reshape(-1).copy_(part)
    device.free(flat)


@wrong("2.4", "have other memory now")
def finish_bucket(bucket, flat, handle):
    """Gives the gradient new memory."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = part.clone().view(p.shape)
        else:
            p.grad.data = part.view_as(p).clone()
    device.free(flat)


# 2.5


@wrong("2.5", "out of turn")
def on_gradient(param, reducer):
    """Launches a bucket as soon as it is full, in whatever order this rank's buckets fill."""
    if not reducer.sync:
        return
    number = reducer.bucket_of[param]
    reducer.missing[number] -= 1
    if reducer.missing[number] == 0:
        reducer.in_flight.append(reducer.start(reducer.buckets[number]))
    if len(reducer.in_flight) == len(reducer.buckets):
        at_end_of_backward(reducer.finish)


wrong("2.5", "wait in finish only").diff("""
Waits for each bucket at once: right values, no overlap.
- buckets, in_flight = reducer.buckets, reducer.in_flight

- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
-     in_flight.append(reducer.start(buckets[len(in_flight)]))
- if len(in_flight) == len(buckets):
+ while len(reducer.in_flight) < len(reducer.buckets) and reducer.missing[len(reducer.in_flight)] == 0:
+     flat, handle = reducer.start(reducer.buckets[len(reducer.in_flight)])
+     handle.wait()
+     reducer.in_flight.append((flat, handle))
+ if len(reducer.in_flight) == len(reducer.buckets):
""")
wrong("2.5", "leave with the last gradient").diff("""
Waits for all gradients before the first launch: rung 2 inside a hook.
- buckets, in_flight = reducer.buckets, reducer.in_flight

- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
-     in_flight.append(reducer.start(buckets[len(in_flight)]))
- if len(in_flight) == len(buckets):
+ if sum(reducer.missing) == 0:
+     for bucket in reducer.buckets:
+         reducer.in_flight.append(reducer.start(bucket))
""")
wrong("2.5", "the last bucket is never launched").diff("""
Launches a bucket when a gradient of a later one arrives, so never flushes the last.
- buckets, in_flight = reducer.buckets, reducer.in_flight

- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
-     in_flight.append(reducer.start(buckets[len(in_flight)]))
- if len(in_flight) == len(buckets):
+ behind = [n for n in range(len(reducer.buckets) - 1) if reducer.missing[n] == 0]
+ if not any(reducer.missing[:-1]) or behind[-1:] == [len(reducer.in_flight)]:
+     for number in range(len(reducer.in_flight), len(behind)):
+         reducer.in_flight.append(reducer.start(reducer.buckets[number]))
+ if len(reducer.in_flight) == len(reducer.buckets) - 1 and sum(reducer.missing) == 0:
""")


@wrong("2.5", "has to leave at once if reducer.sync is False")
def on_gradient(param, reducer):
    """Does not look at `sync`: every micro-batch is reduced."""
    reducer.missing[reducer.bucket_of[param]] -= 1
    while len(reducer.in_flight) < len(reducer.buckets) and reducer.missing[len(reducer.in_flight)] == 0:
        reducer.in_flight.append(reducer.start(reducer.buckets[len(reducer.in_flight)]))
    if len(reducer.in_flight) == len(reducer.buckets):
        at_end_of_backward(reducer.finish)


@wrong("2.5", "a gradient that is only accumulated is not counted")
def on_gradient(param, reducer):
    """Counts under no_sync as well, so that the next backward finds its counters spent."""
    reducer.missing[reducer.bucket_of[param]] -= 1
    if not reducer.sync:
        return
    while len(reducer.in_flight) < len(reducer.buckets) and reducer.missing[len(reducer.in_flight)] == 0:
        reducer.in_flight.append(reducer.start(reducer.buckets[len(reducer.in_flight)]))
    if len(reducer.in_flight) == len(reducer.buckets):
        at_end_of_backward(reducer.finish)


@wrong("2.5", "the means stay in the buffers")
def on_gradient(param, reducer):
    """Launches all and finishes none."""
    if not reducer.sync:
        return
    reducer.missing[reducer.bucket_of[param]] -= 1
    while len(reducer.in_flight) < len(reducer.buckets) and reducer.missing[len(reducer.in_flight)] == 0:
        reducer.in_flight.append(reducer.start(reducer.buckets[len(reducer.in_flight)]))


@wrong("2.5", "holds up the rest of backward")
def on_gradient(param, reducer):
    """Finishes inside the last hook: right values, but backward still has work that could run meanwhile."""
    if not reducer.sync:
        return
    reducer.missing[reducer.bucket_of[param]] -= 1
    while len(reducer.in_flight) < len(reducer.buckets) and reducer.missing[len(reducer.in_flight)] == 0:
        reducer.in_flight.append(reducer.start(reducer.buckets[len(reducer.in_flight)]))
    if len(reducer.in_flight) == len(reducer.buckets):
        reducer.finish()


wrong("2.5", "never left: after each launch look at the next").diff("""
Launches at most one bucket a gradient, so one that was full before its turn stays behind.
- buckets, in_flight = reducer.buckets, reducer.in_flight

- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
-     in_flight.append(reducer.start(buckets[len(in_flight)]))
- if len(in_flight) == len(buckets):
+ if len(reducer.in_flight) < len(reducer.buckets) and reducer.missing[len(reducer.in_flight)] == 0:
+     reducer.in_flight.append(reducer.start(reducer.buckets[len(reducer.in_flight)]))
+ if len(reducer.in_flight) == len(reducer.buckets):
""")
wrong("2.5", "after 6 gradients, rest of backward, return]").diff("""
Queues `finish` once in a lifetime.
- buckets, in_flight = reducer.buckets, reducer.in_flight
+ b, f = reducer.buckets, reducer.in_flight
- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
-     in_flight.append(reducer.start(buckets[len(in_flight)]))
- if len(in_flight) == len(buckets):
+ while len(f) < len(b) and reducer.missing[len(f)] == 0:
+     f.append(reducer.start(b[len(f)]))
+ if len(f) == len(b) and not hasattr(reducer, "queued"):
+     reducer.queued = True
""")
wrong("2.5", "the hook serves any number of backwards").diff("""
Remembers the parameters that it has seen, for ever.
- buckets, in_flight = reducer.buckets, reducer.in_flight
+ if not hasattr(reducer, "done"):
+     reducer.done = set()
+ reducer.done.add(param)
+ b, f = reducer.buckets, reducer.in_flight
- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
-     in_flight.append(reducer.start(buckets[len(in_flight)]))
- if len(in_flight) == len(buckets):
+ while len(f) < len(b) and all(p in reducer.done for p in b[len(f)]):
+     f.append(reducer.start(b[len(f)]))
+ if len(f) == len(b):
""")


@wrong("2.5", "finish waits for buckets that have left")
def on_gradient(param, reducer):
    """Queues finish when the first bucket leaves."""
    if not reducer.sync:
        return
    b, f = reducer.buckets, reducer.in_flight
    reducer.missing[reducer.bucket_of[param]] -= 1
    while len(f) < len(b) and reducer.missing[len(f)] == 0:
        f.append(reducer.start(b[len(f)]))
        if len(f) == 1:
            at_end_of_backward(reducer.finish)


# 2.6

wrong("2.6", "what is reduced is reduced again").diff("""
Never turns communication off: a reduction per micro-batch.
- for number, batch in enumerate(micro_batches, start=1):
-     reducer.sync = number == len(micro_batches)
+ for batch in micro_batches:
""")
wrong("2.6", "divide each loss by k").diff("""
Adds up k gradients without dividing.
- (loss_of(batch) / len(micro_batches)).backward()
+ loss_of(batch).backward()
""")
wrong("2.6", "the gradients of those before it were dropped").diff("""
Drops the gradients between micro-batches, like a zero_grad() in the wrong loop.
  for number, batch in enumerate(micro_batches, start=1):
+     for param in reducer.bucket_of:
+         param.grad = None
""")


@wrong("2.6", "keeps the graphs of all micro-batches alive")
def accumulate(micro_batches, loss_of, reducer):
    """One backward over the mean of all losses: right gradient, k times the activations."""
    sum(loss_of(batch) / len(micro_batches) for batch in micro_batches).backward()


@wrong("2.6", "needs all their activations at once")
def accumulate(micro_batches, loss_of, reducer):
    """One large batch: right gradient, and nothing is accumulated."""
    loss_of(torch.cat(micro_batches)).backward()


@wrong("2.6", "the ranks' gradients never meet")
def accumulate(micro_batches, loss_of, reducer):
    """Turns communication off for all of them, the last included."""
    reducer.sync = False
    for batch in micro_batches:
        (loss_of(batch) / len(micro_batches)).backward()
    reducer.sync = True


@wrong("2.6", "what comes after it stays on its rank")
def accumulate(micro_batches, loss_of, reducer):
    """Communicates in the first micro-batch, not in the last."""
    for number, batch in enumerate(micro_batches):
        reducer.sync = number == 0
        (loss_of(batch) / len(micro_batches)).backward()
    reducer.sync = True


wrong("2.6", "and not always 4").diff("""
Divides by the number of micro-batches that the text speaks of.
- (loss_of(batch) / len(micro_batches)).backward()
+ (loss_of(batch) / 4).backward()
""")


@wrong("2.6", "whether the list holds its micro-batches")
def accumulate(micro_batches, loss_of, reducer):
    """Empties its caller's list."""
    k = len(micro_batches)
    while micro_batches:
        batch = micro_batches.pop(0)
        reducer.sync = not micro_batches
        (loss_of(batch) / k).backward()


@wrong("2.6", "expected [2], got [0]")
def accumulate(micro_batches, loss_of, reducer):
    """Communicates nothing if there is one micro-batch."""
    k = len(micro_batches)
    for i, batch in enumerate(micro_batches):
        reducer.sync = i == k - 1 and i > 0
        (loss_of(batch) / k).backward()
    reducer.sync = True


@wrong("2.6", "whether the micro-batches are as they were")
def accumulate(micro_batches, loss_of, reducer):
    """Zeroes the batches on the way."""
    k = len(micro_batches)
    for i, batch in enumerate(micro_batches):
        reducer.sync = i == k - 1
        (loss_of(batch) / k).backward()
        batch.zero_()


@wrong("2.6", "the last is known by its place")
def accumulate(micro_batches, loss_of, reducer):
    """Knows the last one by what it is."""
    for batch in micro_batches:
        reducer.sync = batch is micro_batches[-1]
        (loss_of(batch) / len(micro_batches)).backward()
    reducer.sync = True


@wrong("2.6", "is divided by 1, not by 2")
def accumulate(micro_batches, loss_of, reducer):
    """Divides by `max(k, 2)`."""
    k = len(micro_batches)
    for i, m in enumerate(micro_batches):
        reducer.sync = i == k - 1
        (loss_of(m) / max(k, 2)).backward()


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


wrong("2.2", "its storage may hold others").diff("""
Counts the storage, of which a parameter may be a part.
- if sum(p.numel() * p.element_size() for p in bucket) >= cap_bytes:
+ if sum(p.untyped_storage().nbytes() for p in bucket) >= cap_bytes:
""")


wrong("2.2", "got [[6], [5, 4], [3, 2], [1], [0]]").diff("""
Counts rows times columns.
- if sum(p.numel() * p.element_size() for p in bucket) >= cap_bytes:
+ if sum(p.shape[0] * p.shape[-1] * p.element_size() for p in bucket) >= cap_bytes:
""")


wrong("2.3", "each call takes a buffer of its own").diff("""
Keeps the buffer of a size for ever.
- flat = device.empty(sum(sizes), bucket[0].dtype, "communication", bucket[0].device)
+ kept = globals().setdefault("kept", {})
+ key = sum(sizes), bucket[0].dtype
+ if key not in kept:
+     kept[key] = device.empty(sum(sizes), bucket[0].dtype, "communication", bucket[0].device)
+ flat = kept[key]
""")


wrong("2.4", "expected 56, got 156").diff("""
Copies the whole buffer, and lets new gradients be parts of that.
- handle.wait()
- for part, param in zip(flat.split([param.numel() for param in bucket]), bucket, strict=True):
+ handle.wait()
+ whole = flat.clone()
+ for part, param in zip(whole.split([param.numel() for param in bucket]), bucket, strict=True):

- param.grad = mean.clone()
+ param.grad = mean
""")


wrong("2.4", "expected 56, got 140").diff("""
Copies each part before it copies it into the gradient.
- mean = part.view(param.shape)
+ mean = part.clone().view(param.shape)

- param.grad = mean.clone()
+ param.grad = mean
""")


wrong("2.4", "len() of a 0-d tensor").diff("""
Takes the first dimension by `len`, which a scalar does not have.
- mean = part.view(param.shape)
+ mean = part.view(len(param), -1).view_as(param)
""")


wrong("2.5", "got [rest of backward, return]").diff("""
Keeps the counts of the first backward, where `finish` makes new ones.
- reducer.missing[reducer.bucket_of[param]] -= 1
- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
+ reducer.counts = missing = getattr(reducer, "counts", reducer.missing)
+ missing[reducer.bucket_of[param]] -= 1
+ while len(in_flight) < len(buckets) and missing[len(in_flight)] == 0:
""")


wrong("2.6", "one is in memory at a time").diff("""
Keeps the losses, and their graphs by `retain_graph`.
- for number, batch in enumerate(micro_batches, start=1):
+ losses = []
+ for number, batch in enumerate(micro_batches, start=1):

- (loss_of(batch) / len(micro_batches)).backward()
+ losses.append(loss_of(batch) / len(micro_batches))
+ losses[-1].backward(retain_graph=True)
""")
