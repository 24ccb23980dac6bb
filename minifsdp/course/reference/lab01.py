"""Reference answers of lab 01, collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from minifsdp import comm, device, ring
from minifsdp.comm import Group
from minifsdp.course.workshop.references import reference

WHOLE = (comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.all_to_all, comm.broadcast, comm.reduce)
RINGS = (ring.all_reduce, ring.reduce_scatter, ring.all_gather, ring._pass_on)


@reference(
    "1.1",
    hints=(
        "`group.rank()` is r, `group.size()` is N. With N = 2 and 7 rows the blocks are 0 to 2 and 3 to 6: where does "
        "the block of rank r begin, if that of rank 0 begins at 0 and that of a rank N would begin at 7?",
        "The block of rank r begins at `r * rows // N` and ends where that of rank r + 1 begins; slice `batch` there.",
    ),
)
def my_rows(batch: Tensor, group: Group) -> Tensor:
    """This rank's block of the rows of `batch` [rows, ...], as a view."""
    rank, ranks, rows = group.rank(), group.size(), len(batch)
    return batch[rank * rows // ranks : (rank + 1) * rows // ranks]


@reference(
    "1.2",
    hints=(
        "`comm.send` and `comm.recv` return at once with a handle; what blocks is `wait()`. How many messages must be "
        "under way before anybody waits?",
        "On even ranks `posted = [comm.send(outgoing, right, group), comm.recv(incoming, left, group)]`, on odd ranks "
        "the other way round; then wait for both handles.",
    ),
    forbids=(*WHOLE, *RINGS),
)
def exchange(outgoing: Tensor, incoming: Tensor, group: Group) -> None:
    """Send `outgoing` to the right neighbour, and receive `incoming` from the left one."""
    rank, ranks = group.rank(), group.size()
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    if rank % 2 == 0:
        posted = [comm.send(outgoing, right, group), comm.recv(incoming, left, group)]
    else:
        posted = [comm.recv(incoming, left, group), comm.send(outgoing, right, group)]
    for handle in posted:
        handle.wait()


@reference(
    "1.3",
    hints=(
        "Three things happen in order: the reduce-scatter is issued, `work` runs, the handle is waited for. Only then "
        "is there anything in the output to return.",
        'Take the output from `device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)`, '
        "keep the handle that `comm.reduce_scatter(part, full, group)` returns, and call `handle.wait()` last.",
    ),
    forbids=(comm.all_reduce, comm.reduce, *RINGS),
)
def reduce_while(full: Tensor, work: Callable[[], Tensor], group: Group) -> tuple[Tensor, Tensor]:
    """Reduce-scatter `full` [N * numel] while `work` runs; returns this rank's part of the sum, and work's result."""
    part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
    handle = comm.reduce_scatter(part, full, group)
    result = work()
    handle.wait()
    return part, result


@reference(
    "1.4",
    hints=(
        "Number the ranks from the source: `place = (group.rank() - source) % N`, so that the source has place 0. In "
        "the round with distance d = 1, 2, 4, ... the places below d hold the tensor, and place p sends it to p + d.",
        "In each round: if `place < d` and `place + d < N`, send to rank `(source + place + d) % N`; if "
        "`d <= place < 2 * d`, receive from rank `(source + place - d) % N`; wait at once, then double d.",
    ),
    forbids=(*WHOLE, *RINGS),
)
def broadcast(tensor: Tensor, source: int, group: Group) -> None:
    """`tensor` on every rank <- `tensor` of rank `source`, in ceil(log2 N) rounds."""
    ranks = group.size()
    place = (group.rank() - source) % ranks
    distance = 1
    while distance < ranks:
        if place < distance and place + distance < ranks:
            comm.send(tensor, (source + place + distance) % ranks, group).wait()
        elif distance <= place < 2 * distance:
            comm.recv(tensor, (source + place - distance) % ranks, group).wait()
        distance *= 2


@reference(
    "1.5",
    hints=(
        "It is the broadcast's tree with its arrows turned round. In the round with distance d = 1, 2, 4, ... the "
        "places that are odd multiples of d send, once and for all; the even multiples of d receive and add.",
        "If `place % (2 * d) == d`: send to rank `(target + place - d) % N`, and this rank is done. Else, if "
        "`place + d < N`: receive from `(target + place + d) % N` into a buffer viewed as `tensor`, wait, add it.",
    ),
    forbids=(*WHOLE, *RINGS),
)
def reduce(tensor: Tensor, target: int, group: Group) -> None:
    """`tensor` on rank `target` <- the sum over the ranks, in ceil(log2 N) rounds; elsewhere it holds partial sums."""
    ranks = group.size()
    place = (group.rank() - target) % ranks
    distance = 1
    while distance < ranks and place % distance == 0:
        if place % (2 * distance) == distance:
            comm.send(tensor, (target + place - distance) % ranks, group).wait()
        elif place + distance < ranks:
            arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
            comm.recv(arriving, (target + place + distance) % ranks, group).wait()
            tensor += arriving
        distance *= 2


@reference(
    "1.6",
    hints=(
        "What you receive in step s, with your own chunk of that number added, is what you send in step s + 1. Begin "
        "with chunk r - 1, and in step s add chunk r - 2 - s, all modulo N; after N - 1 steps that is chunk r.",
        "`chunks = full.view(N, -1)`; `partial = chunks[(r - 1) % N]`; in each of N - 1 steps a new `arriving`, "
        "`exchange(partial, arriving, group)`, `partial = arriving.add_(chunks[(r - 2 - step) % N])`. At the end copy "
        "`partial` into `output`.",
    ),
    forbids=(*WHOLE, *RINGS),
)
def reduce_scatter(
    output: Tensor, full: Tensor, group: Group, exchange: Callable[[Tensor, Tensor, Group], None]
) -> None:
    """`output` [numel] <- chunk r of the sum over the ranks of `full` [N * numel], which is only read."""
    rank, ranks = group.rank(), group.size()
    chunks = full.view(ranks, output.numel())
    partial = chunks[(rank - 1) % ranks]
    for step in range(ranks - 1):
        arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
        exchange(partial, arriving, group)
        partial = arriving.add_(chunks[(rank - 2 - step) % ranks])
    output.copy_(partial)


@reference(
    "1.7",
    hints=(
        "Put your own shard in its place first. Then what you receive in step s is what you send in step s + 1: in "
        "step 0 you send chunk r. Which chunk does your left neighbour send in step 0?",
        "`chunks = output.view(N, -1)`; `chunks[r].copy_(shard)`; in each of N - 1 steps "
        "`exchange(chunks[(r - step) % N], chunks[(r - 1 - step) % N], group)`.",
    ),
    forbids=(*WHOLE, *RINGS),
)
def all_gather(output: Tensor, shard: Tensor, group: Group, exchange: Callable[[Tensor, Tensor, Group], None]) -> None:
    """`output` [N * numel] <- every rank's `shard` [numel], in rank order."""
    rank, ranks = group.rank(), group.size()
    chunks = output.view(ranks, shard.numel())
    chunks[rank].copy_(shard)
    for step in range(ranks - 1):
        exchange(chunks[(rank - step) % ranks], chunks[(rank - 1 - step) % ranks], group)


@reference(
    "1.8",
    hints=(
        "The two pieces want N chunks of one length: that is `-(-numel // N)`, rounded up, in a buffer N times as long "
        "whose last elements are zero. Chunk r of the buffer can be the reduce-scatter's output.",
        "Copy `tensor.flatten()` to the front of a zeroed `full` [N * length]; `mine = full.view(N, length)[r]`; "
        "`reduce_scatter(mine, full, group)`; divide `mine` by N for a mean; `all_gather(full, mine, group)`; copy the "
        "first numel elements back.",
    ),
    forbids=(comm.all_reduce, comm.reduce, comm.broadcast, comm.all_to_all, *RINGS),
)
def all_reduce(
    tensor: Tensor,
    op: Literal["sum", "mean"],
    group: Group,
    reduce_scatter: Callable[[Tensor, Tensor, Group], None],
    all_gather: Callable[[Tensor, Tensor, Group], None],
) -> None:
    """`tensor` [any shape] <- its sum or mean over the ranks, in place."""
    ranks, numel = group.size(), tensor.numel()
    length = -(-numel // ranks)
    full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
    full[:numel] = tensor.flatten()
    mine = full.view(ranks, length)[group.rank()]
    reduce_scatter(mine, full, group)
    if op == "mean":
        mine /= ranks
    all_gather(full, mine, group)
    tensor.copy_(full[:numel].view_as(tensor))
