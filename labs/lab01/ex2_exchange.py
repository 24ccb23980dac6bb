"""Exercise 1.2: Exchange: a deadlock and how to avoid it."""

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device

from .shared import NARROW, RINGS, WHOLE, check_waited, issued, largest, numbers, plain, run, watching, worlds


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
    """Send `outgoing` to the right neighbour, r + 1, and receive `incoming` from the left one, r - 1, modulo N.

    Both tensors are [numel], contiguous and of the same dtype; `outgoing` is only read. Post both
    messages before you wait for either: ranks with an even number in `group` post the send first,
    the others the receive. Return when both messages have completed.
    """
    rank, ranks = group.rank(), group.size()
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    if rank % 2 == 0:
        posted = [comm.send(outgoing, right, group), comm.recv(incoming, left, group)]
    else:
        posted = [comm.recv(incoming, left, group), comm.send(outgoing, right, group)]
    for handle in posted:
        handle.wait()


def observe_exchange(answer, seed, size, dtype):
    group = comm.world()
    outgoing = numbers(seed, group.rank(), size, dtype=dtype).to(rank_device())
    incoming = torch.full_like(outgoing, float("nan"))
    memory = incoming.detach()
    dropped = []
    with watching(dropped) as seen:
        answer(outgoing, incoming, group)
        lost = list(dropped)
    if lost:
        raise AnswerError(
            f"nobody keeps the handle of `{lost[0]}`, so that nobody waits for it\n"
            "likely slip: a message may be lost with its handle: keep what `comm.send` and `comm.recv` return, and wait"
        )
    moved = [str(message.tensor.dtype) for message in issued(seen)]
    first = outgoing.cpu().clone(), memory.cpu().clone()
    outgoing += 1
    with watching() as again:
        answer(outgoing, incoming, group)
    logs = [[str(message) for message in log] for log in (seen, again)]
    return plain(seen), *first, moved, *logs, (memory - 1).cpu()


@check("1.2")
def check_exchange(answer, variant):
    """One send to the right and one receive from the left, both posted before either is waited for."""
    slip = "every rank waits for a message that its neighbour has not posted yet; post both, then wait"
    for ranks in worlds(variant, least=2):
        dtype = NARROW if ranks == largest(variant) else torch.float32
        seen = run(ranks, observe_exchange, answer, variant.seed, variant.size, dtype, slip=slip)
        orders = [["wait" if m.what.startswith("wait") else m.what for m in log] for log, *_ in seen]
        exchanged = [["recv", "send", "wait", "wait"], ["send", "recv", "wait", "wait"]]  # on even ranks, on odd ranks
        for rank, (log, outgoing, incoming, moved, once, twice, incoming_again) in enumerate(seen):
            right, left = (rank + 1) % ranks, (rank - 1) % ranks
            messages = sorted(map(str, issued(log)))
            expect(
                f"messages over {ranks} ranks",
                messages,
                [f"recv from {left}", f"send to {right}"],
                rank=rank,
                slips={
                    "left and right are exchanged: rank + 1 is on the right": [
                        f"recv from {right}",
                        f"send to {left}",
                    ]
                },
            )
            check_waited(rank, log)
            slip = "`incoming` and `outgoing` are what is sent and received, whatever their dtype"
            expect(f"dtypes of what is sent and received, over {ranks} ranks", moved, [str(dtype)] * 2, slip=slip)
            slips = {}
            if orders == [exchanged[each % 2] for each in range(ranks)]:
                slips["even and odd are exchanged: even ranks post the send first, odd ranks the receive"] = orders[
                    rank
                ]
            elif orders != [orders[0]] * ranks and all(order[2:] == ["wait", "wait"] for order in orders):
                slips["the ranks' order has to follow from their number in `group`: even or odd"] = orders[rank]
            expect(
                f"order of the calls over {ranks} ranks",
                orders[rank],
                ["recv" if rank % 2 else "send", "send" if rank % 2 else "recv", "wait", "wait"],
                rank=rank,
                slips=slips
                | {
                    "one message at a time: no deadlock, and twice as long, since no link works both ways at once": [
                        "recv" if rank % 2 else "send",
                        "wait",
                        "send" if rank % 2 else "recv",
                        "wait",
                    ],
                    "all ranks post the send first: enough on gloo; on NCCL, where the two may share a stream, odd "
                    "ranks must post the receive first": ["send", "recv", "wait", "wait"],
                    "all ranks post the receive first: enough on gloo; on NCCL, where the two may share a stream, even "
                    "ranks must post the send first": ["recv", "send", "wait", "wait"],
                },
                slip="post both messages, then wait for both",
            )
            wanted = numbers(variant.seed, left, variant.size, dtype=dtype)
            own = numbers(variant.seed, rank, variant.size, dtype=dtype)
            expect(f"`incoming` over {ranks} ranks", incoming, wanted, rank=rank, slips={"it holds its own data": own})
            expect(f"`outgoing` afterwards, over {ranks} ranks", outgoing, own, rank=rank, slip="it is only read")
            slip = "each call has messages of its own: a default argument or a global keeps those of the call before"
            expect(f"messages of a second call, over {ranks} ranks", twice, once, rank=rank, slip=slip)
            expect(f"`incoming` of a second call, less 1, over {ranks} ranks", incoming_again, wanted, rank=rank)
