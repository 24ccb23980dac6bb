"""The checks of lab 01.

A message is seen three times: when `comm` issues it, when `torch.distributed` gets it with the rank it goes to or
comes from, and when its handle is waited for. From that follow the bytes, the order and the rounds.
"""

import re
import sys
from collections import deque
from contextlib import contextmanager
from itertools import pairwise
from math import ceil, log2
from typing import NamedTuple
from unittest import mock

import cloudpickle
import torch
import torch.distributed as dist

from minifsdp import comm, device
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.late import link_of
from minifsdp.instruments.launch import rank_device

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STUCK_SECONDS = 8.0  # more than two busy cores need; a correct answer takes a tenth of a second
UNTOUCHED = -77.5  # what an output holds before; no answer comes to it
NARROW = torch.bfloat16  # every check has a case of it, which a buffer of torch's default dtype does not suit


class Message(NamedTuple):
    """One call of this rank; `number` counts them, and is what a wait refers to."""

    what: str
    number: int
    peer: int | None = None
    numel: int = 0
    tensor: torch.Tensor | None = None  # on its rank only

    def __str__(self):
        way = {"send": "to", "recv": "from"}.get(self.what)
        return f"{self.what} {way} {self.peer}" if way else self.what


WORKS = []  # of the messages of this rank: gloo loses a message whose work is gone, and its receiver waits for ever


class Held:
    """The work of a message, which lives on in WORKS; notes that its handle was dropped before anybody waited."""

    def __init__(self, message, work, dropped):
        self.message, self.work, self.dropped = message, work, dropped
        WORKS.append(work)

    def wait(self):
        self.dropped = []
        self.work.wait()

    def __del__(self):
        self.dropped.append(self.message)


@contextmanager
def watching(dropped=None):
    """What is issued and waited for inside the `with`, in order; `dropped` takes what nobody can wait for any more."""
    seen, inside = [], []  # the calls of `comm` that are under way

    @contextmanager
    def watch(call, phase):
        if phase != "issue" and call.order not in [message.number for message in seen]:
            raise AnswerError(
                f"it waits for a {call.op} of an earlier call\n"
                "likely slip: each call has messages of its own: a default argument or a global keeps the old ones"
            )
        seen.append(Message(call.op if phase == "issue" else f"wait for {call.op}", call.order))
        inside.append(call)
        try:
            yield
        finally:
            inside.pop()

    def peer_of(name, which):
        real, through = getattr(dist, name), {"isend": "comm.send", "irecv": "comm.recv"}[name]

        def call(tensor, *args, **where):
            if not inside:
                raise AnswerError(
                    f"torch.distributed.{name} was called directly\n"
                    f"likely slip: messages go through `comm`, here `{through}`, whose log this check reads"
                )
            seen[-1] = seen[-1]._replace(peer=where[which], numel=tensor.numel(), tensor=tensor)
            if where[which] == dist.get_rank():
                raise ValueError(f"it would {seen[-1]}, which is itself: is the peer counted as a rank, modulo N?")
            if where[which] not in range(dist.get_world_size()):
                raise ValueError(f"it would {seen[-1]}, and that is no rank: after the last comes rank 0, modulo N")
            work = real(tensor, *args, **where)
            return work if dropped is None else Held(str(seen[-1]), work, dropped)

        return mock.patch.object(dist, name, call)

    comm.observers.append(watch)
    try:
        with link_of(None), peer_of("isend", "group_dst"), peer_of("irecv", "group_src"):
            yield seen
    finally:
        comm.observers.remove(watch)


@contextmanager
def handing_out():
    """The buffers that come from `device.empty` inside the `with`, filled with NaN as fresh memory may be."""
    handed = []

    def keep(buffer, role):
        handed.append(buffer.fill_(float("nan")))
        buffer.role = role

    device.buffer_observers.append(keep)
    try:
        yield handed
    finally:
        device.buffer_observers.remove(keep)


def origin(tensor, handed):
    """Dtype of a buffer, and the role in which `device.empty` has handed it out."""
    roles = [f"device.empty as {buffer.role}" for buffer in handed if address(buffer) == address(tensor)]
    return f"{str(tensor.dtype).removeprefix('torch.')} from {(*roles, 'elsewhere')[0]}"


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def arrived_in(seen, handed):
    """The origin of every buffer that has been received into."""
    return [origin(message.tensor, handed) for message in issued(seen, "recv")]


def plain(seen):
    """Messages without their tensors, to leave the rank."""
    return [message._replace(tensor=None) for message in seen]


def check_origins(where, rank, origins):
    """Buffers of the case in NARROW."""
    narrow = str(NARROW).removeprefix("torch.")
    for each in origins:
        dtype = each.split()[0]
        slip = "allocate it with `device.empty`, so that its bytes are counted"
        if dtype != narrow:
            slip = f"its dtype is that of the tensor; this code always takes {dtype}"
        elif "device.empty" in each:
            slip = 'its role is "communication": the ledger counts it under what `device.empty` is told'
        wanted = f"{narrow} from device.empty as communication"
        expect(f"{where}: buffer for communication", each, wanted, rank=rank, slip=slip)


def check_lengths(where, rank, handed, numel):
    slip = "what arrives needs a buffer as long as what is sent"
    expect(f"{where}: lengths of buffers from `device.empty`", handed, [numel] * len(handed), rank=rank, slip=slip)


def issued(seen, what=None):
    return [m for m in seen if not m.what.startswith("wait") and what in (None, m.what)]


def waits(seen):
    return {m.number: place for place, m in enumerate(seen) if m.what.startswith("wait")}


def run(ranks, observe, *args, slip=None):
    """`on_ranks`, with the number of ranks in what it says."""
    try:
        return on_ranks(ranks, observe, *args, timeout=STUCK_SECONDS, slip=slip)
    except AnswerError as error:
        raise AnswerError(f"over {ranks} ranks: {error}") from None


def worlds(variant, least=1, odd=3):
    """Two ranks hide many a mistake: a left neighbour that is also the right one, a number that is a power of two.

    And one rank, the last, has others: no step at all, nothing that a loop has left behind.
    """
    several = sorted({max(least, variant.ranks), odd, 4})
    return several if least in several else [*several, least]


def largest(variant, odd=3):
    """The last of `worlds`, where the finer points are checked: a mistake in the sum has been found by then."""
    return max(worlds(variant, odd=odd))


def numbers(seed, rank, *shape, dtype=torch.float32):
    """Rank's data: small whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def check_waited(rank, seen, before_sends=False):
    """Every message is waited for; what is received, before anything else is sent."""
    waited = waits(seen)
    for place, message in enumerate(seen):
        if message.what.startswith("wait"):
            continue
        expect(
            f"whether it waits for `{message}`",
            message.number in waited,
            True,
            rank=rank,
            slip="until a receive is waited for, its buffer holds nothing; until a send is, its buffer may not change",
        )
        later = [place for place, m in enumerate(seen) if m.what == "send" and m.number > message.number]
        if before_sends and message.what == "recv" and later and waited[message.number] > later[0]:
            raise AnswerError(
                f"rank {rank} issues `{seen[later[0]]}` before it has waited for `{message}`\n"
                "likely slip: what is passed on has not arrived yet"
            )


# 1.1


def observe_all_rows(answer, batches):
    return [observe_rows(answer, batch) for batch in batches]


def observe_rows(answer, batch):
    batch = batch.to(rank_device())
    with comm.record() as log:
        mine = answer(batch, comm.world())
    shares = isinstance(mine, torch.Tensor) and mine.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()
    return mine.cpu() if isinstance(mine, torch.Tensor) else mine, shares, [call.op for call in log], batch.cpu()


@check("1.1")
def check_my_rows(answer, variant):
    """Every row on exactly one rank, in rank order, no rank with more than one row above another, and no message."""
    for ranks in worlds(variant):
        batches = [numbers(variant.seed, 0, rows, 3) for rows in (4 * ranks, variant.size, 2 * ranks + 1)]
        few = numbers(variant.seed, 1, max(1, ranks - 1), 2, 3)  # of a batch of three dimensions
        columns = numbers(variant.seed, 2, 3, 2 * ranks).t()  # in memory, so that there is no flat view
        batches += [few, columns, numbers(variant.seed, 3, variant.size + 1), torch.ones(0, 2)]
        found = run(ranks, observe_all_rows, answer, batches)
        for number, batch in enumerate(batches):
            seen, rows, shape = [each[number] for each in found], len(batch), list(batch.shape[1:])
            for rank, (mine, shares, log, after) in enumerate(seen):
                expect("messages", log, [], rank=rank, slip="every rank has the batch and knows who it is")
                if not isinstance(mine, torch.Tensor) or list(mine.shape[1:]) != shape or mine.dim() != batch.dim():
                    raise AnswerError(
                        f"rank {rank}: expected rows of the batch, a tensor {['any', *shape]}, got {mine!r}"
                    )
                expect("`batch` afterwards", after, batch, rank=rank, slip="it is only read")
                expect("whether its rows are a view of the batch", shares, True, rank=rank, slip="an index list copies")
            parts = [mine for mine, *_ in seen]
            where = f"{rows} rows over {ranks} ranks"
            together = torch.cat(parts)
            kept = rows // ranks * ranks
            every = torch.cat([batch[rank::ranks] for rank in range(ranks)])
            begins = [rank * rows // ranks for rank in range(ranks)]
            least = torch.cat([batch[begin:][: max(1, end - begin)] for begin, end in pairwise([*begins, rows])])
            few_rows = {"with fewer rows than ranks some ranks have none, not one that another has, too": least}
            lost = f"rows // N drops the remainder: of {rows} rows {rows % ranks} on no rank"
            expect(
                f"{where}: all ranks' rows, put together",
                together,
                batch,
                slips=(few_rows if rows < ranks else {})
                | {
                    lost: batch[:kept],
                    "every N-th row is fair too, as torch's DistributedSampler takes it; asked is a block": every,
                    "every rank has all rows: the same data on all ranks teaches the model nothing more": torch.cat(
                        [batch] * ranks
                    ),
                    "the first block is on no rank, ranks count from 0 to N - 1": batch[-(-rows // ranks) :],
                },
                slip="the blocks of the ranks must meet: one ends where the next begins",
            )
            sizes = [len(part) for part in parts]
            expect(
                f"{where}: most rows of a rank less fewest",
                max(sizes) - min(sizes) <= 1,
                True,
                slip=f"the ranks have {sizes} rows: the slowest rank sets the pace, so spread the remainder",
            )


# 1.2


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


# 1.3


def observe_while(answer, seed, size, dtype):
    group = comm.world()
    full = numbers(seed, group.rank(), group.size() * size, dtype=dtype).to(rank_device())
    written = []
    with watching() as seen, handing_out() as handed, writing(written):

        def work():
            seen.append(Message("work", -1))
            return torch.full((2,), float(group.rank()))

        returned = answer(full, work, group)
        order = [m.what for m in seen]
        answer(full + 1, work, group)  # leaves alone what the first has returned
        if dtype is NARROW:
            answer(full.double(), work, group)
    got = [each.cpu() if isinstance(each, torch.Tensor) else each for each in returned] if returned else returned
    return order, got, full.cpu(), [origin(output, handed) for output in written[:1]]


@contextmanager
def writing(written):
    """Collects the outputs of the reduce-scatters inside the `with`; two dtypes are an error that says which."""
    real = comm.reduce_scatter

    def call(output, full, *rest, **named):
        written.append(output)
        if output.dtype != full.dtype:
            raise ValueError(f"the output is {output.dtype}, the input {full.dtype}: the dtype is that of `full`")
        return real(output, full, *rest, **named)

    with mock.patch.object(comm, "reduce_scatter", call):
        yield


@check("1.3")
def check_reduce_while(answer, variant):
    """The reduction is issued, the work runs, the wait comes last, and only then is the part read."""
    size = variant.size
    issue, wait = "reduce_scatter", "wait for reduce_scatter"
    for ranks, dtype in ((variant.ranks, torch.float32), (variant.ranks + 1, NARROW)):
        inputs = [numbers(variant.seed, rank, ranks * size, dtype=dtype) for rank in range(ranks)]
        total = torch.stack(inputs).sum(0)
        seen = run(ranks, observe_while, answer, variant.seed, size, dtype)
        for rank, (order, returned, full, origins) in enumerate(seen):
            expect(
                "order",
                order,
                [issue, "work", wait],
                rank=rank,
                slips={
                    "it waits at once: right, and nothing runs while the message is under way": [issue, wait, "work"],
                    "the work is done before anything is under way": ["work", issue, wait],
                    "nobody waits: on gloo the part is unwritten until `wait`": [issue, "work"],
                    "nobody waits, and the work is done first": ["work", issue],
                },
                slip="issue, work, wait",
            )
            if not isinstance(returned, list) or len(returned) != 2:
                raise AnswerError(f"rank {rank}: expected (part of the sum, what work returned), got {returned!r}")
            part, result = returned
            slip = "a buffer under way is neither freed nor changed, and the output is not a part of `full`"
            expect("`full` afterwards", full, inputs[rank], rank=rank, slip=slip)
            if dtype is NARROW:
                check_origins("bfloat16", rank, origins)
            expect(
                "its part of the sum",
                part,
                total[rank * size :][:size],
                rank=rank,
                slips={
                    "the whole sum: asked is this rank's part": total,
                    "this is the mean: asked is the sum, comm.SUM": total[rank * size :][:size] / ranks,
                    "its own data": inputs[rank][rank * size :][:size],
                    "the two results are exchanged: the part comes first": torch.full((2,), float(rank)),
                    "the next call has overwritten it: every call needs a buffer of its own, for its caller keeps it": (
                        total[rank * size :][:size] + ranks
                    ),
                },
                slip="what is copied out before the wait is not the sum",
            )
            expect("what work returned", result, torch.full((2,), float(rank)), rank=rank)


# 1.4 and 1.5


def observe_tree(answer, seed, cases):
    """The tree is built once for every root and dtype."""
    group, results = comm.world(), []
    for root, dtype, *shape in cases:
        tensor = numbers(seed, group.rank(), *shape, dtype=dtype).to(rank_device())
        memory = tensor.detach()
        with watching() as seen, handing_out() as handed:
            try:
                answer(tensor, root, group)
            except RuntimeError as error:
                if handed and re.search("size of tensor|broadcast", str(error)):
                    flat, shape = list(handed[-1].shape), list(tensor.shape)
                    raise ValueError(f"a buffer {flat} does not add to a tensor {shape}: view it as `tensor`") from None
                raise
        results.append((plain(seen), memory.cpu(), arrived_in(seen, handed), [each.numel() for each in handed]))
    return results


def tree_cases(variant, ranks):
    """Roots, dtypes and shapes."""
    shapes = [(variant.size, 2), (), (2, 1, variant.size)]
    roots = zip(sorted({0, 1 % ranks, ranks - 1}), shapes, strict=False)
    narrow = [(ranks - 1, NARROW, variant.size, 2)] * (ranks == largest(variant, odd=5))
    return [(root, torch.float32, *shape) for root, shape in roots] + narrow


def rounds(logs):
    """How long the messages take if each takes one round and a rank has one at a time; None if they do not pair up."""
    left = [deque((m.what, m.peer) for m in issued(log)) for log in logs]
    free = [0] * len(logs)
    while any(left):
        heads = [(rank, *queue[0]) for rank, queue in enumerate(left) if queue]
        pair = next(((a, b) for a, what, b in heads if what == "send" and (b, "recv", a) in heads), None)
        if pair is None:
            return None
        for rank in pair:
            left[rank].popleft()
        free[pair[0]] = free[pair[1]] = max(free[rank] for rank in pair) + 1
    return max(free)


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


def check_tree(logs, where, root, numel, arrows, once, hub, chain):
    """N - 1 messages of the whole tensor in ceil(log2 N) rounds.

    `once`, `hub`, `chain`: what more messages and more rounds come from. `arrows`: the tree, if it is to be this one.
    """
    ranks = len(logs)
    sizes = [message.numel for log in logs for message in issued(log, "send")]
    expect(f"{where}: elements sent by all ranks", sizes, [numel] * (ranks - 1), slip=f"a tree has N - 1 edges: {once}")
    most = max(len(issued(log)) for log in logs)
    slip = hub if most == ranks - 1 > 2 else chain
    expect(f"{where}: rounds", rounds(logs), ceil(log2(ranks)), slip=slip)
    for rank, log in enumerate(logs if arrows else []):
        wanted = [Message(what, 0, (root + place) % ranks) for what, place in arrows((rank - root) % ranks, ranks)]
        slip = "as many rounds, by another tree: the distance is 1 in the first round and doubles, as in the picture"
        expect(f"{where}: messages", list(map(str, issued(log))), list(map(str, wanted)), rank=rank, slip=slip)


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


# 1.6 to 1.8


def apart(outgoing, incoming):
    """Whether no element is in both."""
    low, high = sorted((outgoing, incoming), key=torch.Tensor.data_ptr)
    return low.data_ptr() + low.numel() * low.element_size() <= high.data_ptr()


def pass_on(outgoing, incoming, group):
    """The ring's step, as 1.2 asks for it."""
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    posts = [lambda: comm.send(outgoing, right, group), lambda: comm.recv(incoming, left, group)]
    for handle in [post() for post in (posts if group.rank() % 2 == 0 else posts[::-1])]:
        handle.wait()


def observe_scatter(answer, seed, size, dtype):
    group, disjoint = comm.world(), []

    def step(outgoing, incoming, group):
        disjoint.append(apart(outgoing, incoming))
        pass_on(outgoing, incoming, group)

    full = numbers(seed, group.rank(), group.size() * size, dtype=dtype).to(rank_device())
    output = torch.full_like(full[:size], UNTOUCHED)
    memory = output.detach()
    with watching() as seen, handing_out() as handed:
        answer(output, full, group, step)
    inside = full.clone()
    own = inside.view(group.size(), size)[group.rank()]
    answer(own, inside, group, pass_on)
    buffers = arrived_in(seen, handed), [each.numel() for each in handed]
    return plain(issued(seen)), all(disjoint), *buffers, memory.cpu(), full.cpu(), own.cpu()


def check_steps(rank, ranks, log, length):
    """N - 1 sends to the right of one chunk each."""
    sends = [m.numel for m in log if m.what == "send"]
    expect(
        f"elements sent in each step, over {ranks} ranks",
        sends,
        [length] * (ranks - 1),
        rank=rank,
        slips={
            "N steps instead of N - 1: the last one only brings back what was here": [length] * ranks,
            "the whole tensor goes round in every step; one chunk is enough": [ranks * length] * (ranks - 1),
        },
        slip="a ring sends one chunk in each of N - 1 steps",
    )
    peers = sorted({m.peer for m in log})
    expect("ranks it talks to", peers, sorted({(rank + 1) % ranks, (rank - 1) % ranks} - {rank}), rank=rank)


@check("1.6")
def check_reduce_scatter(answer, variant):
    """N - 1 sends of one chunk; rank r ends with chunk r of the sum, and the input is as it was."""
    for ranks in worlds(variant):
        check_reduce_scatter_case(answer, variant, ranks, torch.float32)
    check_reduce_scatter_case(answer, variant, largest(variant), NARROW)


def check_reduce_scatter_case(answer, variant, ranks, dtype):
    size = variant.size
    inputs = [numbers(variant.seed, rank, ranks * size, dtype=dtype) for rank in range(ranks)]
    total = torch.stack(inputs).sum(0).view(ranks, size)
    stuck = "all ranks must take the same number of steps"
    seen = run(ranks, observe_scatter, answer, variant.seed, size, dtype, slip=stuck)
    for rank, (log, disjoint, origins, lengths, output, full, own) in enumerate(seen):
        check_steps(rank, ranks, log, size)
        slip = "it sends from the buffer that it receives into: take a new one in each step"
        expect(f"sent and received apart, over {ranks} ranks", disjoint, True, rank=rank, slip=slip)
        if dtype is NARROW:
            check_origins(f"bfloat16 over {ranks} ranks", rank, origins)
            check_lengths(f"over {ranks} ranks", rank, lengths, size)
        expect(f"`full` afterwards, over {ranks} ranks", full, inputs[rank], rank=rank, slip="it is only read")
        mine = [each.view(ranks, size)[rank] for each in inputs]
        expect(
            f"chunk {rank} of the sum, over {ranks} ranks",
            output,
            total[rank],
            rank=rank,
            slips={
                "`output` was never written: `output = ...` only renames, `output.copy_(...)` fills": torch.full_like(
                    output, UNTOUCHED
                ),
                "this is chunk r + 1 of the sum: in step 0 rank r sends chunk r - 1": total[(rank + 1) % ranks],
                "this is chunk r - 1 of the sum": total[(rank - 1) % ranks],
                "a chunk goes round and nothing is added to it": mine[(rank + 1) % ranks],
                "two ranks' parts only: what is passed on is the chunk that arrived, with one's own added": (
                    mine[rank] + mine[(rank - 1) % ranks]
                ),
                "this is the mean: asked is the sum": total[rank] / ranks,
            },
            slip="in step s rank r receives chunk r - 2 - s and adds its own chunk of that number",
        )
        expect(
            f"the output where it is chunk {rank} of `full` itself, over {ranks} ranks",
            own,
            total[rank],
            rank=rank,
            slip="the output is written before chunk r of `full` has been read, in the last step",
        )


def a_shard(seed, rank, size, dtype):
    """No two ranks' are equal."""
    return numbers(seed, rank, size, dtype=dtype) + 32 * rank


def whose(row, shards):
    if bool((row == UNTOUCHED).any()):
        return "none"
    return next((str(rank) for rank, shard in enumerate(shards) if torch.equal(shard, row)), "?")


def observe_gather(answer, seed, size, dtype):
    group = comm.world()
    shard = a_shard(seed, group.rank(), size, dtype).to(rank_device())
    output = torch.full((group.size() * size,), UNTOUCHED, dtype=dtype, device=shard.device)
    memory = output.detach()
    with watching() as seen:
        answer(output, shard, group, pass_on)
    inside = torch.full_like(output, UNTOUCHED)
    own = inside.view(group.size(), size)[group.rank()]
    own.copy_(shard)
    answer(inside, own, group, pass_on)
    in_place = [address(message.tensor) == address(output) for message in issued(seen, "recv")]
    return plain(issued(seen)), all(in_place), memory.cpu(), shard.cpu(), inside.cpu()


@check("1.7")
def check_all_gather(answer, variant):
    """N - 1 sends of one chunk; every rank ends with all shards in rank order."""
    for ranks in worlds(variant):
        check_all_gather_case(answer, variant, ranks, torch.float32)
    check_all_gather_case(answer, variant, largest(variant), NARROW)


def check_all_gather_case(answer, variant, ranks, dtype):
    size = variant.size
    shards = [a_shard(variant.seed, rank, size, dtype) for rank in range(ranks)]
    stuck = "all ranks must take the same number of steps"
    seen = run(ranks, observe_gather, answer, variant.seed, size, dtype, slip=stuck)
    for rank, (log, in_place, output, shard, inside) in enumerate(seen):
        check_steps(rank, ranks, log, size)
        names = [whose(row, shards) for row in output.view(ranks, size)]
        expect(
            f"whose shards are in the output, over {ranks} ranks",
            names,
            [str(r) for r in range(ranks)],
            rank=rank,
            slips={
                "`output` was never written: `output = ...` only renames": ["none"] * ranks,
                "its own shard is missing: a ring brings only the others'": [
                    "none" if r == rank else str(r) for r in range(ranks)
                ],
                "the left neighbour's shard N - 1 times: pass on what has arrived, not your own shard": [
                    str(rank if r == rank else (rank - 1) % ranks) for r in range(ranks)
                ],
                "shards stand in the order of arrival, its own first: asked is rank order": [
                    str((rank - r) % ranks) for r in range(ranks)
                ],
                "each shard stands one place too far: in step 0 chunk r - 1 arrives": [
                    str((r - 1) % ranks) for r in range(ranks)
                ],
            },
            slip="in step s rank r sends chunk r - s and receives chunk r - 1 - s, modulo N",
        )
        slip = "a chunk of `output` is what it receives into; another buffer is memory for nothing"
        if ranks == largest(variant):
            expect(f"received in place, over {ranks} ranks", in_place, True, rank=rank, slip=slip)
        expect("`shard` afterwards", shard, shards[rank], rank=rank, slip="it is only read")
        slip = "the output is changed before the shard, which is a part of it, has been read"
        expect("the output where `shard` is chunk r of it", inside, torch.cat(shards), rank=rank, slip=slip)


class Collected(NamedTuple):
    """What one all-reduce has given to its two pieces, and what the tensor then holds."""

    calls: list[str]
    given: torch.Tensor | None
    gathered: torch.Tensor | None
    origins: list[str]
    in_place: bool
    logged: int
    tensor: torch.Tensor


def observe_all_reduce(answer, seed, cases):
    return [all_reduce_once(answer, seed, *case) for case in cases]


def all_reduce_once(answer, seed, shape, op, dtype):
    group, calls, given, gathered, buffers, places = comm.world(), [], [], [], [], []

    def scatter(output, full, where):
        calls.append(f"reduce_scatter {full.numel()}")
        given.append(full.flatten().clone())
        buffers.append(full)
        places.append(output.data_ptr() == full.data_ptr() + where.rank() * output.nbytes)
        comm.reduce_scatter(output, full.view(-1), where).wait()

    def gather(output, shard, where):
        calls.append(f"all_gather {output.numel()}")
        gathered.append(shard.flatten().clone())
        buffers.append(output)
        comm.all_gather(output.view(-1), shard, where).wait()

    tensor = a_tensor(seed, group.rank(), shape, dtype).to(rank_device())
    memory = tensor.detach()
    with comm.record() as log, handing_out() as handed:
        try:
            answer(tensor, op, group, scatter, gather)
        except RuntimeError as error:
            if not calls and any(buffer.numel() < tensor.numel() for buffer in handed):
                short = f"{tensor.numel()} elements do not fit into a buffer of {handed[0].numel()}"
                raise ValueError(f"{short}: N chunks of numel // N are too short, round up") from None
            raise ValueError(f"of a tensor {list(shape)}: {error}") from None
    origins = [origin(buffer, handed) for buffer in buffers]
    first = [each[0].cpu() if each else None for each in (given, gathered)]
    return Collected(calls, *first, origins, all(places), len(log), memory.cpu())


def a_tensor(seed, rank, shape, dtype):
    """Several dimensions lie in memory in columns, so that there is no flat view."""
    made = numbers(seed, rank, *shape, dtype=dtype)
    return made.transpose(0, -1).contiguous().transpose(0, -1) if len(shape) > 1 else made


@check("1.8")
def check_all_reduce(answer, variant):
    """One reduce-scatter, one all-gather of the padded tensor, in place, for any shape; sum and mean."""
    for ranks in worlds(variant):
        cases = [(shape, op, torch.float32) for shape in ((variant.size,), (), (12,)) for op in ("sum", "mean")]
        if ranks == largest(variant):
            cases += [
                ((variant.size, 3), "sum", NARROW),
                ((2, 2, 3), "sum", torch.float32),
                ((variant.size, 3), "mean", torch.float32),
            ]
        seen = run(ranks, observe_all_reduce, answer, variant.seed, cases)
        for number, case in enumerate(cases):
            for rank, results in enumerate(seen):
                check_all_reduce_case(variant.seed, ranks, rank, *case, results[number])


def check_all_reduce_case(seed, ranks, rank, shape, op, dtype, got):
    inputs = [a_tensor(seed, each, shape, dtype) for each in range(ranks)]
    total = torch.stack(inputs).sum(0)
    numel = total.numel()
    padded = -(-numel // ranks) * ranks
    wanted = total if op == "sum" else total / ranks
    kept = numel // ranks * ranks
    where = f"{op} of {list(shape)} over {ranks} ranks"
    expect(
        f"{where}: collectives and their elements",
        got.calls,
        [f"reduce_scatter {padded}", f"all_gather {padded}"],
        rank=rank,
        slips={
            f"rounded down: {numel % ranks} elements are never reduced": [
                f"reduce_scatter {kept}",
                f"all_gather {kept}",
            ],
            "all ranks' whole tensors are gathered and then added up: N times the memory": [
                f"all_gather {ranks * numel}"
            ],
        },
        slip="the tensor, padded to a multiple of N, is reduce-scattered and then all-gathered, once each",
    )
    expect(f"{where}: messages in all", got.logged, 2, rank=rank, slip="use the two pieces, and nothing else")
    expect(
        f"{where}: the tensor",
        got.tensor,
        wanted,
        rank=rank,
        slips={
            "unchanged: the result belongs in the tensor itself": inputs[rank],
            "this is the sum: a mean divides by N": total if op == "mean" else None,
            "this is the mean: asked is the sum": total / ranks if op == "sum" else None,
            "divided by N twice: each rank divides its chunk, and a gather only copies": wanted / ranks,
        },
        slip="each rank's chunk comes back at its own place",
    )
    if dtype is NARROW:
        check_origins(where, rank, got.origins)
    slip = "memory from `device.empty` holds anything: zero it before the tensor is copied in"
    expect(f"{where}: elements reduced that nobody has set", int(got.given.isnan().sum()), 0, rank=rank, slip=slip)
    chunks = [torch.nn.functional.pad(each.flatten(), (0, padded - numel)) for each in (inputs[rank], total, wanted)]
    slip = "the tensor's own elements in order, then zeros"
    expect(f"{where}: what is reduced", got.given, chunks[0], rank=rank, slip=slip)
    before, after = (each.view(ranks, -1)[rank] for each in chunks[1:])
    slips = {"each rank divides the whole after the gather, N times the work: divide your chunk before": before}
    expect(f"{where}: the chunk that is gathered", got.gathered, after, rank=rank, slips=slips)
    slip = "chunk r of the buffer is the output of the reduce-scatter; another one is memory for nothing"
    expect(f"{where}: reduced in place", got.in_place, True, rank=rank, slip=slip)
