"""Wrong answers to exercise 1.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


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


wrong("1.4", "is invalid for input of size 1").diff("""
Sends matrices only.
- comm.send(tensor, (source + place + distance) % ranks, group).wait()
+ comm.send(tensor.view(-1, 2), (source + place + distance) % ranks, group).wait()
""")
