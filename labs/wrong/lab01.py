"""Wrong answers to lab 01, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("1.1", "drops the remainder")
def my_rows(batch, group):
    """Rounds down and leaves the last rows to nobody."""
    share = len(batch) // group.size()
    return batch[group.rank() * share :][:share]


@wrong("1.1", "asked is a block")
def my_rows(batch, group):
    """Takes every N-th row."""
    return batch[group.rank() :: group.size()]


@wrong("1.1", "every rank has all rows")
def my_rows(batch, group):
    """Forgets that the program is the same on every rank."""
    return batch


wrong("1.1", "an index list copies").diff("""
Picks the right rows by a list of indices, which copies them.
- return batch[rank * rows // ranks : (rank + 1) * rows // ranks]
+ return batch[list(range(rank * rows // ranks, (rank + 1) * rows // ranks))]
""")


@wrong("1.1", "spread the remainder")
def my_rows(batch, group):
    """The last rank takes all that is left over."""
    rank, ranks = group.rank(), group.size()
    share = len(batch) // ranks
    return batch[rank * share :] if rank == ranks - 1 else batch[rank * share :][:share]


@wrong("1.1", "the first block is on no rank")
def my_rows(batch, group):
    """Counts ranks from 1."""
    share = -(-len(batch) // group.size())
    return batch[(group.rank() + 1) * share :][:share]


@wrong("1.1", "`comm.world()` is about the world")
def my_rows(batch, group):
    """Asks the world for rank and size."""
    group = comm.world()
    r, n, rows = group.rank(), group.size(), len(batch)
    return batch[r * rows // n : (r + 1) * rows // n]


@wrong("1.1", "`torch.distributed.get_rank()` is about the world")
def my_rows(batch, group):
    """Takes its number in the world."""
    import torch.distributed as dist

    r, n, rows = dist.get_rank(), group.size(), len(batch)
    return batch[r * rows // n : (r + 1) * rows // n]


@wrong("1.1", "tuple index out of range")
def my_rows(batch, group):
    """Counts rows as if a batch had two dimensions."""
    r, n, rows = group.rank(), group.size(), batch.numel() // batch.shape[1]
    return batch[r * rows // n : (r + 1) * rows // n]


@wrong("1.1", "not one that another has, too")
def my_rows(batch, group):
    """Gives every rank at least one row."""
    n, k, r = batch.size(0), group.size(), group.rank()
    low, high = r * n // k, (r + 1) * n // k
    return batch[low : max(high, low + 1)]


@wrong("1.2", "has not posted yet")
def exchange(outgoing, incoming, group):
    """Every rank waits for its send before it receives."""
    comm.send(outgoing, (group.rank() + 1) % group.size(), group).wait()
    comm.recv(incoming, (group.rank() - 1) % group.size(), group).wait()


@wrong("1.2", "no link works both ways at once")
def exchange(outgoing, incoming, group):
    """Even ranks send and then receive, odd ranks the other way round: no deadlock, but one message at a time."""
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    if group.rank() % 2 == 0:
        comm.send(outgoing, right, group).wait()
        comm.recv(incoming, left, group).wait()
    else:
        comm.recv(incoming, left, group).wait()
        comm.send(outgoing, right, group).wait()


@wrong("1.2", "odd ranks must post the receive first")
def exchange(outgoing, incoming, group):
    """Posts the send first on every rank, which NCCL may run one after the other."""
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    handles = [comm.send(outgoing, right, group), comm.recv(incoming, left, group)]
    for handle in handles:
        handle.wait()


@wrong("1.2", "until a send is, its buffer may not change")
def exchange(outgoing, incoming, group, pending=[]):  # noqa: B006
    """Waits for the receive only, and keeps the send's handle for later."""
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    if group.rank() % 2 == 0:
        pending.append(comm.send(outgoing, right, group))
        comm.recv(incoming, left, group).wait()
    else:
        handle = comm.recv(incoming, left, group)
        pending.append(comm.send(outgoing, right, group))
        handle.wait()


@wrong("1.2", "left and right are exchanged")
def exchange(outgoing, incoming, group):
    """Sends to the left."""
    left, right = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    posts = [lambda: comm.send(outgoing, right, group), lambda: comm.recv(incoming, left, group)]
    for handle in [post() for post in (posts if group.rank() % 2 == 0 else posts[::-1])]:
        handle.wait()


@wrong("1.2", "it is only read")
def exchange(outgoing, incoming, group):
    """Swaps the two buffers' contents, to have the result in the buffer that it sent."""
    left, right = (group.rank() - 1) % group.size(), (group.rank() + 1) % group.size()
    posts = [lambda: comm.send(outgoing, right, group), lambda: comm.recv(incoming, left, group)]
    for handle in [post() for post in (posts if group.rank() % 2 == 0 else posts[::-1])]:
        handle.wait()
    outgoing.copy_(incoming)


@wrong("1.2", "even ranks must post the send first")
def exchange(outgoing, incoming, group):
    """Posts the receive first on every rank."""
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    handles = [comm.recv(incoming, left, group), comm.send(outgoing, right, group)]
    for handle in handles:
        handle.wait()


@wrong("1.2", "after the last comes rank 0, modulo N")
def exchange(outgoing, incoming, group):
    """Neighbours without a modulo: the ring is not closed."""
    right, left = group.rank() + 1, group.rank() - 1
    posts = [lambda: comm.send(outgoing, right, group), lambda: comm.recv(incoming, left, group)]
    for handle in [post() for post in (posts if group.rank() % 2 == 0 else posts[::-1])]:
        handle.wait()


@wrong("1.2", "expected `group`, got the world")
def exchange(outgoing, incoming, group):
    """Sends and receives in the world."""
    group = comm.world()
    r, n = group.rank(), group.size()
    posts = [lambda: comm.send(outgoing, (r + 1) % n, group), lambda: comm.recv(incoming, (r - 1) % n, group)]
    for h in [p() for p in (posts if r % 2 == 0 else posts[::-1])]:
        h.wait()


@wrong("1.2", "`torch.distributed.get_rank()` is about the world")
def exchange(outgoing, incoming, group):
    """Is even or odd by its number in the world."""
    import torch.distributed as dist

    r, n = group.rank(), group.size()
    posts = [lambda: comm.send(outgoing, (r + 1) % n, group), lambda: comm.recv(incoming, (r - 1) % n, group)]
    for h in [p() for p in (posts if dist.get_rank() % 2 == 0 else posts[::-1])]:
        h.wait()


@wrong("1.2", "even and odd are exchanged")
def exchange(outgoing, incoming, group):
    """Exchanges even and odd."""
    r, n = group.rank(), group.size()
    posts = [lambda: comm.send(outgoing, (r + 1) % n, group), lambda: comm.recv(incoming, (r - 1) % n, group)]
    for h in [p() for p in (posts if r % 2 else posts[::-1])]:
        h.wait()


@wrong("1.2", "element 0 is nan")
def exchange(outgoing, incoming, group):
    """Gives `incoming` other memory."""
    r, n = group.rank(), group.size()
    buffer = torch.empty_like(incoming)
    posts = [lambda: comm.send(outgoing, (r + 1) % n, group), lambda: comm.recv(buffer, (r - 1) % n, group)]
    for h in [p() for p in (posts if r % 2 == 0 else posts[::-1])]:
        h.wait()
    incoming.data = buffer


@wrong("1.2", "whatever their dtype")
def exchange(outgoing, incoming, group):
    """Sends through float32, which the other side does not."""
    r, n = group.rank(), group.size()
    buffer = torch.empty(incoming.numel())
    posts = [lambda: comm.send(outgoing.float(), (r + 1) % n, group), lambda: comm.recv(buffer, (r - 1) % n, group)]
    for h in [p() for p in (posts if r % 2 == 0 else posts[::-1])]:
        h.wait()
    incoming.copy_(buffer)


@wrong("1.2", "a message may be lost with its handle")
def exchange(outgoing, incoming, group):
    """Drops the handle of the send."""
    n, r = group.size(), group.rank()
    if r % 2 == 0:
        comm.send(outgoing, (r + 1) % n, group)
        comm.recv(incoming, (r - 1) % n, group).wait()
    else:
        h = comm.recv(incoming, (r - 1) % n, group)
        comm.send(outgoing, (r + 1) % n, group)
        h.wait()


@wrong("1.2", "messages go through `comm`")
def exchange(outgoing, incoming, group):
    """Calls torch's own `isend` and `irecv`."""
    n, r = group.size(), group.rank()

    def s():
        return dist.isend(outgoing, (r + 1) % n, group=group)

    def v():
        return dist.irecv(incoming, (r - 1) % n, group=group)

    works = [s(), v()] if r % 2 == 0 else [v(), s()]
    for w in works:
        w.wait()


@wrong("1.3", "waits at once")
def reduce_while(full, work, group):
    """Waits before the work."""
    part = torch.empty(full.numel() // group.size())
    comm.reduce_scatter(part, full, group).wait()
    return part, work()


@wrong("1.3", "nobody waits: on gloo")
def reduce_while(full, work, group):
    """Never waits."""
    part = torch.empty(full.numel() // group.size())
    comm.reduce_scatter(part, full, group)
    return part, work()


@wrong("1.3", "before anything is under way")
def reduce_while(full, work, group):
    """Works first."""
    result = work()
    part = torch.empty(full.numel() // group.size())
    comm.reduce_scatter(part, full, group).wait()
    return part, result


wrong("1.3", "copied out before the wait").diff("""
Copies the part out before it has waited.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = torch.full((full.numel() // group.size(),), -1.0)
- result = work()
+ result, copy = work(), part.clone()
- return part, result
+ return copy, result
""")
wrong("1.3", "neither freed nor changed").diff("""
Clears the input for the next step while it is under way.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = torch.empty(full.numel() // group.size())
  result = work()
+ full.zero_()
""")
wrong("1.3", "so that its bytes are counted").diff("""
Takes its buffer from torch, where nobody counts it.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = torch.empty(full.numel() // group.size(), dtype=full.dtype, device=full.device)
""")
wrong("1.3", "the dtype is that of `full`").diff("""
Writes a dtype down instead of taking the input's.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = device.empty(full.numel() // group.size(), torch.float32, "communication", full.device)
""")
wrong("1.3", "the two results are exchanged").diff("""
Returns the work's result first.
- return part, result
+ return result, part
""")
wrong("1.3", "`comm.world()` is about the world").diff("""
Reduces in the world.
  def reduce_while(full, work, group):
+     group = comm.world()
- handle = comm.reduce_scatter(part, full, group)
+ h = comm.reduce_scatter(part, full, group)
- handle.wait()
+ h.wait()
""")
wrong("1.3", "this is the mean: asked is the sum").diff("""
Takes the mean.
- handle = comm.reduce_scatter(part, full, group)
+ h = comm.reduce_scatter(part, full, group, comm.MEAN)
- handle.wait()
+ h.wait()
""")
wrong("1.3", "are not 3 parts of 10").diff("""
Knows that there are two ranks.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
- handle = comm.reduce_scatter(part, full, group)
+ part = device.empty(full.numel() // 2, full.dtype, "communication", full.device)
+ h = comm.reduce_scatter(part, full, group)
- handle.wait()
+ h.wait()
""")
wrong("1.3", "not a part of `full`").diff("""
Takes this rank's chunk of the input for the output.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = full.chunk(group.size())[group.rank()]
""")


@wrong("1.4", "the source sends to each rank itself")
def broadcast(tensor, source, group):
    """The source sends N - 1 times: right values, too many rounds."""
    if group.rank() == source:
        for target in range(group.size()):
            if target != source:
                comm.send(tensor, target, group).wait()
    else:
        comm.recv(tensor, source, group).wait()


@wrong("1.4", "from rank to rank in a chain")
def broadcast(tensor, source, group):
    """Passes the tensor along a chain: right values, too many rounds."""
    ranks = group.size()
    place = (group.rank() - source) % ranks
    if place > 0:
        comm.recv(tensor, (group.rank() - 1) % ranks, group).wait()
    if place < ranks - 1:
        comm.send(tensor, (group.rank() + 1) % ranks, group).wait()


@wrong("1.4", "it came from rank 0")
def broadcast(tensor, source, group):
    """Always broadcasts from rank 0."""
    rank, ranks, distance = group.rank(), group.size(), 1
    while distance < ranks:
        if rank < distance and rank + distance < ranks:
            comm.send(tensor, rank + distance, group).wait()
        elif distance <= rank < 2 * distance:
            comm.recv(tensor, rank - distance, group).wait()
        distance *= 2


wrong("1.4", "it has received nothing").diff("""
Takes int(log2 N) rounds, one too few unless N is a power of two.
- distance = 1
- while distance < ranks:
+ for round in range(ranks.bit_length() - 1):
+     distance = 2**round
- distance *= 2
""")
wrong("1.4", "what is passed on has not arrived yet").diff("""
Posts everything, and waits at the end: ranks pass on what they do not have.
- ranks = group.size()
+ ranks, distance, handles = group.size(), 1, []
- distance = 1

- comm.send(tensor, (source + place + distance) % ranks, group).wait()
+ handles.append(comm.send(tensor, (source + place + distance) % ranks, group))
- comm.recv(tensor, (source + place - distance) % ranks, group).wait()
+ handles.append(comm.recv(tensor, (source + place - distance) % ranks, group))
      distance *= 2
+ for handle in handles:
+     handle.wait()
""")
wrong("1.4", "is the peer counted as a rank").diff("""
Receivers count from the source, senders from rank 0.
- ranks = group.size()
- place = (group.rank() - source) % ranks
- distance = 1
+ rank, ranks, distance = group.rank(), group.size(), 1
+ place = (rank - source) % ranks
- comm.send(tensor, (source + place + distance) % ranks, group).wait()
+ comm.send(tensor, place + distance, group).wait()
""")
wrong("1.4", "is place p + d below N").diff("""
Sends to places beyond N - 1 too, where nobody receives.
- ranks = group.size()
+ ranks, distance = group.size(), 1
- distance = 1

- if place < distance and place + distance < ranks:
+ if place < distance:
""")
wrong("1.4", "by another tree").diff("""
Begins with the largest distance: as many rounds and messages, and other ranks that talk.
- distance = 1
- while distance < ranks:
-     if place < distance and place + distance < ranks:
+ distance = 2 ** (ceil(log2(ranks)) - 1) if ranks > 1 else 0
+ while distance >= 1:
+     if place % (2 * distance) == 0 and place + distance < ranks:
- elif distance <= place < 2 * distance:
+ elif place % (2 * distance) == distance:
- distance *= 2
+ distance //= 2
""")


@wrong("1.4", "expected `group`, got the world")
def broadcast(tensor, source, group):
    """Sends in the world."""
    group = comm.world()
    n = group.size()
    place = (group.rank() - source) % n
    d = 1
    while d < n:
        if place < d and place + d < n:
            comm.send(tensor, (source + place + d) % n, group).wait()
        elif d <= place < 2 * d:
            comm.recv(tensor, (source + place - d) % n, group).wait()
        d *= 2


@wrong("1.4", "`torch.distributed.get_rank()` is about the world")
def broadcast(tensor, source, group):
    """Finds its place by its number in the world."""
    import torch.distributed as dist

    n = group.size()
    place = (dist.get_rank() - source) % n
    d = 1
    while d < n:
        if place < d and place + d < n:
            comm.send(tensor, (source + place + d) % n, group).wait()
        elif d <= place < 2 * d:
            comm.recv(tensor, (source + place - d) % n, group).wait()
        d *= 2


@wrong("1.4", "rank 4, tensor over 5 ranks")
def broadcast(tensor, source, group):
    """Has two rounds, enough for four ranks."""
    n = group.size()
    place = (group.rank() - source) % n
    for d in (1, 2):
        if place < d and place + d < n:
            comm.send(tensor, (source + place + d) % n, group).wait()
        elif d <= place < 2 * d and place < n:
            comm.recv(tensor, (source + place - d) % n, group).wait()


@wrong("1.4", "rank 1, tensor over 2 ranks, source 0")
def broadcast(tensor, source, group):
    """Gives the tensor other memory."""
    n = group.size()
    place = (group.rank() - source) % n
    d = 1
    while d < n:
        if place < d and place + d < n:
            comm.send(tensor, (source + place + d) % n, group).wait()
        elif d <= place < 2 * d:
            new = torch.empty_like(tensor)
            comm.recv(new, (source + place - d) % n, group).wait()
            tensor.data = new
        d *= 2


wrong("1.5", "replaces the tensor instead of being added").diff("""
Overwrites where it should add.
- ranks = group.size()
+ ranks, distance = group.size(), 1
- distance = 1

- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
- comm.recv(arriving, (target + place + distance) % ranks, group).wait()
- tensor += arriving
+ comm.recv(tensor, (target + place + distance) % ranks, group).wait()
""")


@wrong("1.5", "nothing has been added to it")
def reduce(tensor, target, group):
    """Reduces on rank 0, whatever the target."""
    rank, ranks, distance = group.rank(), group.size(), 1
    while distance < ranks and rank % distance == 0:
        if rank % (2 * distance) == distance:
            comm.send(tensor, rank - distance, group).wait()
        elif rank + distance < ranks:
            arriving = torch.empty_like(tensor)
            comm.recv(arriving, rank + distance, group).wait()
            tensor += arriving
        distance *= 2


@wrong("1.5", "every rank sends to the target itself")
def reduce(tensor, target, group):
    """A star: right values, N - 1 rounds."""
    if group.rank() != target:
        comm.send(tensor, target, group).wait()
        return
    for source in range(group.size()):
        if source != target:
            arriving = torch.empty_like(tensor)
            comm.recv(arriving, source, group).wait()
            tensor += arriving


wrong("1.5", "some ranks are left out").diff("""
Takes int(log2 N) rounds, one too few unless N is a power of two.
- distance = 1
- while distance < ranks and place % distance == 0:
+ for round in range(ranks.bit_length() - 1):
+     distance = 2**round
- elif place + distance < ranks:
-     arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+     return
+ if place % (2 * distance) == 0 and place + distance < 2 ** (ranks.bit_length() - 1):
+     arriving = torch.empty_like(tensor)
- distance *= 2
""")
wrong("1.5", "this is the mean").diff("""
Divides by N, unasked.
- ranks = group.size()
+ ranks, distance = group.size(), 1
- distance = 1

- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+ arriving = torch.empty_like(tensor)
      distance *= 2
+ tensor /= ranks
""")
wrong("1.5", "by another tree").diff("""
Runs the broadcast's rounds backwards, the largest distance first.
- distance = 1
- while distance < ranks and place % distance == 0:
-     if place % (2 * distance) == distance:
+ distance = 2 ** (ceil(log2(ranks)) - 1) if ranks > 1 else 0
+ while distance >= 1:
+     if distance <= place < 2 * distance:
- elif place + distance < ranks:
+     return
+ if place + distance < ranks:
- distance *= 2
+ distance //= 2
""")
wrong("1.5", "so that its bytes are counted").diff("""
Takes its buffers from torch, where nobody counts them.
- ranks = group.size()
+ ranks, distance = group.size(), 1
- distance = 1

- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+ arriving = torch.empty_like(tensor)
""")
wrong("1.5", "this code always takes float32").diff("""
Writes a dtype down: tensors of another one arrive as garbage.
- ranks = group.size()
+ ranks, distance = group.size(), 1
- distance = 1

- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+ arriving = device.empty(tensor.numel(), torch.float32, "communication", tensor.device).view_as(tensor)
""")
wrong("1.5", "every rank but the target sends once").diff("""
Goes on after it has sent, and sends again.
- ranks = group.size()
+ ranks, distance = group.size(), 1
- distance = 1
- while distance < ranks and place % distance == 0:
-     if place % (2 * distance) == distance:
+ while distance < ranks:
+     if place % (2 * distance) >= distance:
""")
wrong("1.5", "view it as `tensor`").diff("""
Adds the flat buffer to a tensor of another shape.
- ranks = group.size()
+ ranks, distance = group.size(), 1
- distance = 1

- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+ arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device)
""")


@wrong("1.5", "expected `group`, got the world")
def reduce(tensor, target, group):
    """Sends in the world."""
    group = comm.world()
    n = group.size()
    place = (group.rank() - target) % n
    d = 1
    while d < n and place % d == 0:
        if place % (2 * d) == d:
            comm.send(tensor, (target + place - d) % n, group).wait()
        elif place + d < n:
            a = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
            comm.recv(a, (target + place + d) % n, group).wait()
            tensor += a
        d *= 2


@wrong("1.5", "rank 0, tensor over 5 ranks, target 0")
def reduce(tensor, target, group):
    """Has two rounds, enough for four ranks."""
    n = group.size()
    place = (group.rank() - target) % n
    for d in (1, 2):
        if place % d:
            break
        if place % (2 * d) == d:
            comm.send(tensor, (target + place - d) % n, group).wait()
        elif place + d < n:
            a = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
            comm.recv(a, (target + place + d) % n, group).wait()
            tensor += a


@wrong("1.5", "rank 0, tensor over 2 ranks, target 0")
def reduce(tensor, target, group):
    """Gives the tensor other memory for the sum."""
    n = group.size()
    place = (group.rank() - target) % n
    d = 1
    while d < n and place % d == 0:
        if place % (2 * d) == d:
            comm.send(tensor, (target + place - d) % n, group).wait()
        elif place + d < n:
            a = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
            comm.recv(a, (target + place + d) % n, group).wait()
            tensor.data = tensor + a
        d *= 2


wrong("1.6", "this is chunk r + 1 of the sum").diff("""
Starts with chunk r instead of r - 1, and so ends on chunk r + 1: the textbook's ring, one off.
- chunks = full.view(ranks, output.numel())
- partial = chunks[(rank - 1) % ranks]
+ chunks = full.view(ranks, -1)
+ partial = chunks[rank]
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
+ arriving = torch.empty_like(output)
- partial = arriving.add_(chunks[(rank - 2 - step) % ranks])
+ partial = arriving.add_(chunks[(rank - 1 - step) % ranks])
""")


@wrong("1.6", "N steps instead of N - 1")
def reduce_scatter(output, full, group, exchange):
    """Takes one step too many: right values, and one chunk more on the wire."""
    rank, ranks = group.rank(), group.size()
    chunks = full.view(ranks, -1)
    partial = torch.zeros_like(output)
    for step in range(ranks):
        arriving = torch.empty_like(output)
        exchange(partial, arriving, group)
        partial = arriving.add_(chunks[(rank - 1 - step) % ranks])
    output.copy_(partial)


@wrong("1.6", "nothing is added to it")
def reduce_scatter(output, full, group, exchange):
    """Passes chunks on and forgets to add."""
    rank, ranks = group.rank(), group.size()
    partial = full.view(ranks, -1)[(rank - 1) % ranks]
    for _ in range(ranks - 1):
        arriving = torch.empty_like(output)
        exchange(partial, arriving, group)
        partial = arriving
    output.copy_(partial)


wrong("1.6", "two ranks' parts only").diff("""
Sends its own chunk in every step instead of the partial sum.
- chunks = full.view(ranks, output.numel())
- partial = chunks[(rank - 1) % ranks]
+ chunks = full.view(ranks, -1)
+ partial = chunks[rank].clone()
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
- exchange(partial, arriving, group)
+ arriving = torch.empty_like(output)
+ exchange(chunks[(rank - 1 - step) % ranks], arriving, group)
""")


@wrong("1.6", "it is only read")
def reduce_scatter(output, full, group, exchange):
    """Adds up in the input itself."""
    rank, ranks = group.rank(), group.size()
    chunks = full.view(ranks, -1)
    for step in range(ranks - 1):
        arriving = torch.empty_like(output)
        exchange(chunks[(rank - 1 - step) % ranks], arriving, group)
        chunks[(rank - 2 - step) % ranks] += arriving
    output.copy_(chunks[rank])


@wrong("1.6", "the whole tensor goes round")
def reduce_scatter(output, full, group, exchange):
    """Sends the whole tensor in every step: right values, N times the bytes."""
    rank, ranks = group.rank(), group.size()
    total, passing = full.clone(), full
    for _ in range(ranks - 1):
        arriving = torch.empty_like(full)
        exchange(passing, arriving, group)
        total += arriving
        passing = arriving
    output.copy_(total.view(ranks, -1)[rank])


@wrong("1.6", "before chunk r of `full` has been read")
def reduce_scatter(output, full, group, exchange):
    """Receives into the output from the first step on."""
    rank, ranks = group.rank(), group.size()
    chunks = full.view(ranks, -1)
    passing = chunks[(rank - 1) % ranks].clone()
    for step in range(ranks - 1):
        exchange(passing, output, group)
        passing = output + chunks[(rank - 2 - step) % ranks]
    output.copy_(passing)


wrong("1.6", "from the buffer that it receives into").diff("""
One buffer for all steps: it is sent while the next chunk arrives in it.
- chunks = full.view(ranks, output.numel())
+ chunks = full.view(ranks, -1)
  partial = chunks[(rank - 1) % ranks]
+ arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
""")
wrong("1.6", "`output` was never written").diff("""
Binds the name `output` to the result.
- chunks = full.view(ranks, output.numel())
+ chunks = full.view(ranks, -1)
- output.copy_(partial)
+ output = partial
""")
wrong("1.6", "so that its bytes are counted").diff("""
Takes its buffers from torch, where nobody counts them.
- chunks = full.view(ranks, output.numel())
+ chunks = full.view(ranks, -1)
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
+ arriving = torch.empty_like(output)
""")
wrong("1.6", "this code always takes float32").diff("""
Writes a dtype down: tensors of another one arrive as garbage.
- chunks = full.view(ranks, output.numel())
+ chunks = full.view(ranks, -1)
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
+ arriving = device.empty(output.numel(), torch.float32, "communication", full.device)
""")


@wrong("1.6", "`comm.world()` is about the world")
def reduce_scatter(output, full, group, exchange):
    """Exchanges in the world."""
    group = comm.world()
    r, n = group.rank(), group.size()
    chunks = full.view(n, output.numel())
    partial = chunks[(r - 1) % n]
    for s in range(n - 1):
        a = device.empty(output.numel(), full.dtype, "communication", full.device)
        exchange(partial, a, group)
        partial = a.add_(chunks[(r - 2 - s) % n])
    output.copy_(partial)


@wrong("1.6", "cannot access local variable")
def reduce_scatter(output, full, group, exchange):
    """Has no result where there is no step."""
    r, n = group.rank(), group.size()
    chunks = full.view(n, output.numel())
    partial = chunks[(r - 1) % n]
    for s in range(n - 1):
        a = device.empty(output.numel(), full.dtype, "communication", full.device)
        exchange(partial, a, group)
        a += chunks[(r - 2 - s) % n]
        partial = a
    output.copy_(a)


wrong("1.7", "N steps instead of N - 1").diff("""
Takes one step too many, in which its own shard comes home.
- chunks = output.view(ranks, shard.numel())
+ chunks = output.view(ranks, -1)
- for step in range(ranks - 1):
+ for step in range(ranks):
""")


@wrong("1.7", "its own shard is missing")
def all_gather(output, shard, group, exchange):
    """Does not put its own shard into the output."""
    rank, ranks = group.rank(), group.size()
    chunks, passing = output.view(ranks, -1), shard
    for step in range(ranks - 1):
        arriving = chunks[(rank - 1 - step) % ranks]
        exchange(passing, arriving, group)
        passing = arriving


wrong("1.7", "pass on what has arrived").diff("""
Sends its own shard in every step.
- chunks = output.view(ranks, shard.numel())
+ chunks = output.view(ranks, -1)
- exchange(chunks[(rank - step) % ranks], chunks[(rank - 1 - step) % ranks], group)
+ exchange(shard, chunks[(rank - 1 - step) % ranks], group)
""")


@wrong("1.7", "in the order of arrival")
def all_gather(output, shard, group, exchange):
    """Stacks the shards as they come in."""
    ranks = group.size()
    chunks = output.view(ranks, -1)
    received = [shard.clone()]
    for _ in range(ranks - 1):
        received.append(torch.empty_like(shard))
        exchange(received[-2], received[-1], group)
    chunks.copy_(torch.stack(received))


wrong("1.7", "the whole tensor goes round").diff("""
Sends the whole output in every step: right values, N times the bytes.
- chunks = output.view(ranks, shard.numel())
+ chunks = output.view(ranks, -1)
- exchange(chunks[(rank - step) % ranks], chunks[(rank - 1 - step) % ranks], group)
+ arriving = torch.empty_like(output)
+ exchange(output, arriving, group)
+ chunks[(rank - 1 - step) % ranks] = arriving.view(ranks, -1)[(rank - 1 - step) % ranks]
""")
wrong("1.7", "one place too far").diff("""
Puts what arrives where its own shard belongs, and so on round the ring: one off.
- chunks = output.view(ranks, shard.numel())
- chunks[rank].copy_(shard)
+ chunks = output.view(ranks, -1)
+ chunks[(rank + 1) % ranks].copy_(shard)
- exchange(chunks[(rank - step) % ranks], chunks[(rank - 1 - step) % ranks], group)
+ exchange(chunks[(rank + 1 - step) % ranks], chunks[(rank - step) % ranks], group)
""")
wrong("1.7", "another buffer is memory for nothing").diff("""
Receives into a fresh buffer and copies from it: right values, a chunk more memory.
- chunks = output.view(ranks, shard.numel())
+ chunks = output.view(ranks, -1)
- exchange(chunks[(rank - step) % ranks], chunks[(rank - 1 - step) % ranks], group)
+ arriving = device.empty(shard.numel(), shard.dtype, "communication", shard.device)
+ exchange(chunks[(rank - step) % ranks], arriving, group)
+ chunks[(rank - 1 - step) % ranks].copy_(arriving)
""")


@wrong("1.7", "`comm.world()` is about the world")
def all_gather(output, shard, group, exchange):
    """Exchanges in the world."""
    group = comm.world()
    r, n = group.rank(), group.size()
    chunks = output.view(n, shard.numel())
    chunks[r].copy_(shard)
    for s in range(n - 1):
        exchange(chunks[(r - s) % n], chunks[(r - 1 - s) % n], group)


@wrong("1.7", "over 1 ranks: expected [0], got [none]")
def all_gather(output, shard, group, exchange):
    """Copies its shard in the first step, and with one rank there is none."""
    r, n = group.rank(), group.size()
    chunks = output.view(n, shard.numel())
    for s in range(n - 1):
        if s == 0:
            chunks[r].copy_(shard)
        exchange(chunks[(r - s) % n], chunks[(r - 1 - s) % n], group)


@wrong("1.7", "it would send to 0, which is itself")
def all_gather(output, shard, group, exchange):
    """Takes at least one step."""
    r, n = group.rank(), group.size()
    chunks = output.view(n, shard.numel())
    chunks[r].copy_(shard)
    for s in range(max(1, n - 1)):
        exchange(chunks[(r - s) % n], chunks[(r - 1 - s) % n], group)


wrong("1.8", "this is the sum: a mean divides by N").diff("""
Sums where the mean is asked for.
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = torch.zeros(numel + -numel % ranks, dtype=tensor.dtype)
- mine = full.view(ranks, length)[group.rank()]
+ mine = full.chunk(ranks)[group.rank()]
- if op == "mean":
-     mine /= ranks
""")
wrong("1.8", "rounded down").diff("""
Cuts numel // N elements a chunk and drops the remainder.
- ranks, numel = group.size(), tensor.numel()
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
- full[:numel] = tensor.flatten()
+ ranks, length = group.size(), tensor.numel() // group.size()
+ full = tensor.flatten()[: ranks * length].clone()
- tensor.copy_(full[:numel].view_as(tensor))
+ tensor.view(-1)[: ranks * length] = full
""")


@wrong("1.8", "are gathered and then added up")
def all_reduce(tensor, op, group, reduce_scatter, all_gather):
    """Gathers everybody's tensor and adds them up: right values, N times the memory."""
    ranks = group.size()
    everything = torch.empty(ranks * tensor.numel(), dtype=tensor.dtype)
    all_gather(everything, tensor.flatten(), group)
    total = everything.view(ranks, *tensor.shape).sum(0)
    tensor.copy_(total / ranks if op == "mean" else total)


wrong("1.8", "belongs in the tensor itself").diff("""
Returns the result, and leaves the tensor as it was.
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = torch.zeros(numel + -numel % ranks, dtype=tensor.dtype)
- mine = full.view(ranks, length)[group.rank()]
+ mine = full.chunk(ranks)[group.rank()]
- tensor.copy_(full[:numel].view_as(tensor))
+ return full[:numel].view_as(tensor)
""")
wrong("1.8", "divided by N twice").diff("""
Divides the chunk, and the whole again.
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = torch.zeros(numel + -numel % ranks, dtype=tensor.dtype)
- mine = full.view(ranks, length)[group.rank()]
+ mine = full.chunk(ranks)[group.rank()]
  all_gather(full, mine, group)
+ if op == "mean":
+     full /= ranks
""")
wrong("1.8", "use the two pieces, and nothing else").diff("""
Lets all ranks meet before it begins, by a collective of one element.
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ comm.all_gather(torch.empty(ranks), torch.ones(1), group).wait()
+ full = torch.zeros(numel + -numel % ranks, dtype=tensor.dtype)
- mine = full.view(ranks, length)[group.rank()]
+ mine = full.chunk(ranks)[group.rank()]
""")
wrong("1.8", "memory from `device.empty` holds anything").diff("""
Does not zero the padding.
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device)
""")
wrong("1.8", "view size is not compatible").diff("""
Takes every tensor for contiguous.
- full[:numel] = tensor.flatten()
+ full[:numel] = tensor.view(-1)
""")
wrong("1.8", "after the gather, N times the work").diff("""
Divides the whole instead of its own chunk.
- if op == "mean":
-     mine /= ranks

  all_gather(full, mine, group)
+ if op == "mean":
+     full /= ranks
""")
wrong("1.8", "so that its bytes are counted").diff("""
Takes its buffer from torch, where nobody counts it.
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = torch.zeros(ranks * length, dtype=tensor.dtype, device=tensor.device)
""")
wrong("1.8", "this code always takes float32").diff("""
Writes a dtype down: bfloat16 travels as float32, twice the bytes.
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = device.empty(ranks * length, torch.float32, "communication", tensor.device).zero_()
""")
wrong("1.8", "are too short, round up").diff("""
Rounds the length of a chunk down and copies everything.
- length = -(-numel // ranks)
+ length = numel // ranks
""")
wrong("1.8", "expected `group`, got the world").diff("""
Reduces in the world.
- ranks, numel = group.size(), tensor.numel()
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ group = comm.world()
+ n, numel = group.size(), tensor.numel()
+ length = -(-numel // n)
+ full = device.empty(n * length, tensor.dtype, "communication", tensor.device).zero_()
- mine = full.view(ranks, length)[group.rank()]
+ mine = full.view(n, length)[group.rank()]
- mine /= ranks
+ mine /= n
""")
wrong("1.8", "`torch.distributed.get_world_size()` is about the world").diff("""
Divides by the size of the world.
- ranks, numel = group.size(), tensor.numel()
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ import torch.distributed as dist
+ n, numel = group.size(), tensor.numel()
+ length = -(-numel // n)
+ full = device.empty(n * length, tensor.dtype, "communication", tensor.device).zero_()
- mine = full.view(ranks, length)[group.rank()]
+ mine = full.view(n, length)[group.rank()]
- mine /= ranks
+ mine /= dist.get_world_size()
""")


@wrong("1.8", "element 0 is 6 instead of 4")
def all_reduce(tensor, op, group, reduce_scatter, all_gather):
    """Gives the tensor other memory."""
    n, numel = group.size(), tensor.numel()
    length = -(-numel // n)
    full = device.empty(n * length, tensor.dtype, "communication", tensor.device).zero_()
    full[:numel] = tensor.flatten()
    mine = full.view(n, length)[group.rank()]
    reduce_scatter(mine, full, group)
    if op == "mean":
        mine /= n
    all_gather(full, mine, group)
    tensor.data = full[:numel].view_as(tensor)


wrong("1.8", "chunk r of the buffer is the output").diff("""
Reduces into a buffer of its own: a chunk more memory.
- ranks, numel = group.size(), tensor.numel()
- length = -(-numel // ranks)
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ n, numel = group.size(), tensor.numel()
+ length = -(-numel // n)
+ full = device.empty(n * length, tensor.dtype, "communication", tensor.device).zero_()
- mine = full.view(ranks, length)[group.rank()]
+ mine = device.empty(length, tensor.dtype, "communication", tensor.device)
- mine /= ranks
+ mine /= n
""")


@wrong("1.1", "expected rows of the batch, a tensor ['any', 2], got None")
def my_rows(batch, group):
    """Returns nothing for an empty batch."""
    rank, ranks, rows = group.rank(), group.size(), len(batch)
    size, more = divmod(rows, ranks)
    return batch.split([size + (r < more) for r in range(ranks)])[rank] if rows else None


@wrong("1.2", "it waits for a send of an earlier call")
def exchange(outgoing, incoming, group, posted=[]):  # noqa: B006
    """Keeps the handles of all calls in a default argument."""
    rank, ranks = group.rank(), group.size()
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    posts = [lambda: comm.send(outgoing, right, group), lambda: comm.recv(incoming, left, group)]
    posted += [post() for post in (posts if rank % 2 == 0 else posts[::-1])]
    for handle in posted[::-1] if rank % 2 else posted:
        handle.wait()


wrong("1.3", "the next call has overwritten it").diff("""
Keeps the output for the next call.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ kept = globals().setdefault("kept", {})
+ if full.dtype not in kept:
+     kept[full.dtype] = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = kept[full.dtype]
""")


wrong("1.3", 'its role is "communication"').diff("""
Hands its buffer out as parameters.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ part = device.empty(full.numel() // group.size(), full.dtype, "parameters", full.device)
""")


wrong("1.3", "the output is torch.float32, the input torch.float64").diff("""
Knows two dtypes.
- part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
+ dtype = torch.bfloat16 if full.dtype == torch.bfloat16 else torch.float32
+ part = device.empty(full.numel() // group.size(), dtype, "communication", full.device)
""")


wrong("1.4", "is invalid for input of size 1").diff("""
Sends matrices only.
- comm.send(tensor, (source + place + distance) % ranks, group).wait()
+ comm.send(tensor.view(-1, 2), (source + place + distance) % ranks, group).wait()
""")


wrong("1.5", "got bfloat16 from device.empty as gradients").diff("""
Hands its buffers out as gradients.
- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+ arriving = device.empty(tensor.numel(), tensor.dtype, "gradients", tensor.device).view_as(tensor)
""")


wrong("1.5", "tuple index out of range").diff("""
Gives every buffer two dimensions.
- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+ arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view(tensor.shape[0], -1)
""")


wrong("1.6", "a buffer as long as what is sent").diff("""
Takes buffers as long as the whole input.
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
+ arriving = device.empty(full.numel(), full.dtype, "communication", full.device)[: output.numel()]
""")


wrong("1.6", "got bfloat16 from device.empty as unsharded").diff("""
Hands its buffers out as unsharded parameters.
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
+ arriving = device.empty(output.numel(), full.dtype, "unsharded", full.device)
""")


wrong("1.8", "got bfloat16 from device.empty as gradients").diff("""
Hands its buffer out as gradients.
- full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
+ full = device.empty(ranks * length, tensor.dtype, "gradients", tensor.device).zero_()
""")


wrong("1.8", "of a tensor [2, 2, 3]").diff("""
Copies back a matrix.
- tensor.copy_(full[:numel].view_as(tensor))
+ tensor.copy_(full[:numel].view(tensor.shape[0], -1) if tensor.dim() > 1 else full[:numel].view_as(tensor))
""")
