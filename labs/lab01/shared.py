"""What several exercises of lab 01 share.

A message is seen three times: when `comm` issues it, when `torch.distributed` gets it with the rank it goes to or
comes from, and when its handle is waited for. From that follow the bytes, the order and the rounds.
"""

import re
from collections import deque
from contextlib import contextmanager
from math import ceil, log2
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from minifsdp import comm, device, ring
from minifsdp.course.workshop.checking import AnswerError, expect, on_ranks
from minifsdp.course.workshop.late import link_of
from minifsdp.instruments.launch import rank_device

WHOLE = (comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.all_to_all, comm.broadcast, comm.reduce)
RINGS = (ring.all_reduce, ring.reduce_scatter, ring.all_gather, ring._pass_on)

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


# of the messages of this rank: gloo loses a message whose work is gone, and its receiver waits for ever
WORKS: list[Any] = []


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


def pass_on(outgoing, incoming, group):
    """The ring's step, as 1.2 asks for it."""
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    posts = [lambda: comm.send(outgoing, right, group), lambda: comm.recv(incoming, left, group)]
    for handle in [post() for post in (posts if group.rank() % 2 == 0 else posts[::-1])]:
        handle.wait()


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
