"""Wrong answers to exercise 1.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


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


@wrong("1.2", "it waits for a send of an earlier call")
def exchange(outgoing, incoming, group, posted=[]):  # noqa: B006
    """Keeps the handles of all calls in a default argument."""
    rank, ranks = group.rank(), group.size()
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    posts = [lambda: comm.send(outgoing, right, group), lambda: comm.recv(incoming, left, group)]
    posted += [post() for post in (posts if rank % 2 == 0 else posts[::-1])]
    for handle in posted[::-1] if rank % 2 else posted:
        handle.wait()
