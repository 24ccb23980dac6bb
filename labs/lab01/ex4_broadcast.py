"""Exercise 1.4: Broadcast as a tree."""

from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import check, expect
from minifsdp.course.workshop.references import reference

from .shared import RINGS, WHOLE, check_tree, check_waited, largest, numbers, observe_tree, run, tree_cases, worlds


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
    """Overwrite `tensor` on every rank with the tensor of rank `source`, using `comm.send` and `comm.recv`.

    `tensor` has the same shape and dtype on all ranks and is contiguous. There are N - 1 messages
    in total, in ceil(log2 N) rounds: in the round with distance d = 1, then 2, 4, ..., the rank at
    place p < d sends to the rank at place p + d, if p + d is below N. Place p is rank
    (source + p) % N. Return when all of this rank's messages have completed.
    """
    ranks = group.size()
    place = (group.rank() - source) % ranks
    distance = 1
    while distance < ranks:
        if place < distance and place + distance < ranks:
            comm.send(tensor, (source + place + distance) % ranks, group).wait()
        elif distance <= place < 2 * distance:
            comm.recv(tensor, (source + place - distance) % ranks, group).wait()
        distance *= 2


def edges(place, ranks):
    """The places that a place of the broadcast's tree talks to, in order, and whether it sends."""
    found, distance = [], 1
    while distance < ranks:
        if distance <= place < 2 * distance:
            found.append(("recv", place - distance))
        elif place < distance and place + distance < ranks:
            found.append(("send", place + distance))
        distance *= 2
    return found


@check("1.4")
def check_broadcast(answer, variant):
    """The source's tensor on every rank by N - 1 messages in ceil(log2 N) rounds, from whichever source."""
    for ranks in worlds(variant, odd=5):
        cases = tree_cases(variant, ranks)
        stuck = (
            "somebody waits in vain: do both sides count places from the source, is place p + d below N, "
            "is every send waited for?"
        )
        seen = run(ranks, observe_tree, answer, variant.seed, cases, slip=stuck)
        for number, (root, dtype, *shape) in enumerate(cases):
            logs = [results[number][0] for results in seen]
            wanted = numbers(variant.seed, root, *shape, dtype=dtype)
            for rank, log in enumerate(logs):
                check_waited(rank, log, before_sends=True)
            for rank, results in enumerate(seen):
                expect(
                    f"tensor over {ranks} ranks, source {root}",
                    results[number][1],
                    wanted,
                    rank=rank,
                    slips={
                        "it came from rank 0, not from the source": numbers(variant.seed, 0, *shape, dtype=dtype),
                        "it has received nothing: the last round is missing where N is no power of two, ceil(log2 N)": (
                            numbers(variant.seed, rank, *shape, dtype=dtype)
                        ),
                    },
                )
            hub = "the source sends to each rank itself; the ranks that have the tensor can send too"
            chain = "it goes from rank to rank in a chain; in each round all that have the tensor can send"
            once = "every rank but the source receives once"
            arrows = edges if ranks == largest(variant, odd=5) else None
            check_tree(logs, f"over {ranks} ranks, source {root}", root, wanted.numel(), arrows, once, hub, chain)
