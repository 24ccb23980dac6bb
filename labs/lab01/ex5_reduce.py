"""Exercise 1.5: Reduce: the same tree, backwards."""

from math import ceil, log2

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import check, expect
from minifsdp.course.workshop.references import reference

from .shared import (
    NARROW,
    RINGS,
    WHOLE,
    check_lengths,
    check_origins,
    check_tree,
    check_waited,
    largest,
    numbers,
    observe_tree,
    run,
    tree_cases,
    worlds,
)


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
    """Overwrite `tensor` on rank `target` with the sum of all ranks' `tensor`, using `comm.send` and `comm.recv`.

    On the other ranks, `tensor` may end up with partial sums. It has the same shape and dtype on
    all ranks and is contiguous. There are N - 1 messages in total, in ceil(log2 N) rounds: in the
    round with distance d = 1, then 2, 4, ..., the ranks at places that are odd multiples of d send
    to the rank d places below, and are then done. Place p is rank (target + p) % N. An incoming
    tensor needs its own buffer, `device.empty(numel, dtype, "communication", device)`, [numel].
    """
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


def backwards(place, ranks):
    """The same of the reduction's tree: its shortest arrows come first too."""
    found, distance = [], 1
    while distance < ranks:
        if place % (2 * distance) == distance:
            return [*found, ("send", place - distance)]
        if place + distance < ranks:
            found.append(("recv", place + distance))
        distance *= 2
    return found


@check("1.5")
def check_reduce(answer, variant):
    """The sum on the target by N - 1 messages in ceil(log2 N) rounds, for whichever target."""
    for ranks in worlds(variant, odd=5):
        cases = tree_cases(variant, ranks)
        stuck = (
            "somebody waits in vain: a rank that has sent is done, no place beyond N - 1 sends, "
            "and both sides count places from the target"
        )
        seen = run(ranks, observe_tree, answer, variant.seed, cases, slip=stuck)
        for number, (root, dtype, *shape) in enumerate(cases):
            inputs = [numbers(variant.seed, rank, *shape, dtype=dtype) for rank in range(ranks)]
            total = torch.stack(inputs).sum(0)
            logs = [results[number][0] for results in seen]
            got = seen[root][number][1]
            for rank, log in enumerate(logs):
                check_waited(rank, log, before_sends=True)
                if dtype is NARROW:
                    check_origins(f"bfloat16 over {ranks} ranks", rank, seen[rank][number][2])
                    check_lengths(f"over {ranks} ranks", rank, seen[rank][number][3], total.numel())
            reached = 2 ** int(log2(ranks))  # by int(log2 N) rounds
            last = inputs[(root + 2 ** ceil(log2(ranks)) // 2) % ranks]
            expect(
                f"tensor over {ranks} ranks, target {root}",
                got,
                total,
                rank=root,
                slips={
                    "what arrives replaces the tensor instead of being added to it": last,
                    "some ranks are left out: where N is no power of two there are ceil(log2 N) rounds": sum(
                        inputs[(root + place) % ranks] for place in range(reached)
                    ),
                    "this is the mean: asked is the sum": total / ranks,
                    "nothing has been added to it": inputs[root],
                },
                slip="the sum has not come together here: is the target place 0 of the tree?",
            )
            hub = "every rank sends to the target itself; ranks can add up in pairs first"
            chain = "the sum goes from rank to rank in a chain; half of the ranks that are left can send in each round"
            once = "every rank but the target sends once, and is done"
            arrows = backwards if ranks == largest(variant, odd=5) else None
            check_tree(logs, f"over {ranks} ranks, target {root}", root, total.numel(), arrows, once, hub, chain)
