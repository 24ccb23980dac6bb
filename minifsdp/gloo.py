"""Two collectives for the gloo backend, composed of other collectives that gloo does better.

To reduce-scatter, torch's ProcessGroupGloo reduces a whole clone over all ranks and copies a part out of it. To
all-gather, it fills an internal buffer and copies from there (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp). For P
elements and N ranks:

                      each rank sends     extra memory
    reduce-scatter    2 (N - 1) / N P     P                gloo's own: an all-reduce
                        (N - 1) / N P     (N - 1) / N P    here: all to all, and every rank sums the parts it receives
    all-gather          (N - 1) / N P     P                gloo's own
                        (N - 1) / N P     0                here: a broadcast from every rank, straight to its
                        destination

`comm` decides where these replace the backend's own. With `MINIFSDP_COLLECTIVES=native` they are never used: every
collective is a single call of torch's own, for code that counts or patches the calls. The default is `auto`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp import device, private

Group = dist.ProcessGroup

NAME, CHOICES = "MINIFSDP_COLLECTIVES", ("auto", "native")
OLD_NAME, OLD_CHOICES = "MINIFSDP_REDUCE_SCATTER", ("auto", "native", "alltoall")  # for one release; the last: on NCCL
TAGS = 1 << 20  # where the tags of our sends and receives begin: a user's have 0 unless they say so


def choice_in(environment: Mapping[str, str]) -> str:
    """The value of the environment variable or, if it is not set, of the variable's former name.

    Raises:
        ValueError: one of them has a value that is not among the choices.
    """
    said = {}
    for name, choices in ((NAME, CHOICES), (OLD_NAME, OLD_CHOICES)):
        said[name] = environment.get(name, "")
        if said[name] not in ("", *choices):
            raise ValueError(f"{name}={said[name]}: set {NAME} to {' or '.join(CHOICES)}, or unset it")
    return said[NAME] or said[OLD_NAME] or "auto"


@cache
def wanted() -> str:
    """The choice at process start, cached because a lookup costs as much as starting a message.

    Raises:
        ValueError: see `choice_in`.
    """
    choice = choice_in(os.environ)
    if os.environ.get(OLD_NAME) and not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(f"{OLD_NAME} is {NAME} now, and goes with the next release", FutureWarning, stacklevel=4)
    return choice


def gathers_by_broadcasts(backend: str) -> bool:
    """True if an all-gather is a broadcast from every rank."""
    return backend == "gloo" and wanted() != "native"


def reduces_by_all_to_all(backend: str, ranks: int) -> bool:
    """True if a reduce-scatter over so many ranks is an all-to-all into our own memory, and a sum."""
    return ranks > 1 and (gathers_by_broadcasts(backend) or wanted() == "alltoall")


class Works:
    """Several messages in progress, as one `Work` of `torch.distributed`. Waiting a second time does nothing."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        works, self.works = self.works, ()  # gloo would wait for another message on a receive that is over
        for work in works:
            work.wait()
        _exchanges.discard(self)


_exchanges: set[Works] = set()
"""Not waited for. Where nobody ever does, as after an error, gloo must not lose them: no later one would end."""


def parts_of(full: Tensor, part: Tensor, ranks: int) -> Tensor:
    """`full` [N * numel] as one row for each rank, in the shape of `part` [numel].

    Raises:
        ValueError: it is not N of those; on all ranks alike, before a message is on its way.
    """
    if full.numel() != ranks * part.numel() or full.dtype != part.dtype:
        raise ValueError(
            f"{full.numel()} elements of dtype {full.dtype} are not {ranks} parts of {part.numel()} of {part.dtype}"
        )
    return full.view(ranks, *part.shape)


@dataclass(frozen=True)
class Connections:
    """Two connections between any two ranks of a group: the group's own, and those of a twin group.

    A gloo connection is locked during a send. It is not read meanwhile, and the thread that would read it polls on a
    core that is needed for computing (`Pair::handleEvents` in gloo's transport/tcp/pair.cc). So two ranks that send to
    each other at the same time need two connections.

    Attributes:
        group: the group that the user knows.
        twin: a second group of the same ranks. Broadcasts from even ranks use the group, from odd ranks the twin.
    """

    group: Group
    twin: Group

    @classmethod
    def of(cls, group: Group) -> Connections:
        """Connect the ranks a second time; called on each of them, no earlier than their first collective.

        `new_group` cannot be used: for a part of the world, it names the group after the number of groups that a rank
        is in, and ranks that are in different numbers of groups would wait for each other for ever.
        """
        store = dist.PrefixStore("minifsdp/twin", private.base_store_of(group))  # type: ignore[attr-defined]
        return cls(group, private.gloo_group(store, group.rank(), group.size(), private.timeout_of(group)))

    def of_source(self, rank: int) -> Group:
        """The group for broadcasts from this rank: another than for those from the next."""
        return self.twin if rank % 2 else self.group

    def between(self, source: int, target: int) -> Group:
        """The group for a message: another than for one that goes the other way."""
        return self.twin if source > target else self.group


def gather_by_broadcasts(output: Tensor, shard: Tensor, connect: Callable[[], Connections]) -> Works:
    """`output` [N * numel] <- every rank's `shard` [numel], see `comm.all_gather`."""
    ways = connect()
    group = ways.group
    parts = parts_of(output, shard, group.size()).unbind()
    mine = parts[group.rank()]
    if mine.data_ptr() != shard.data_ptr():
        mine.copy_(shard)
    send = partial(dist.broadcast, async_op=True)
    return Works([send(part, group=ways.of_source(r), group_src=r) for r, part in enumerate(parts)])


def exchange(received: Tensor, parts: Tensor, connect: Callable[[], Connections], order: int) -> Works:
    """`received` [N - 1, numel] <- this rank's part of every other rank's `parts` [N, numel], in rank order.

    `order` is the same on all ranks, and another next time, so that a message that nobody waits for goes to no other.
    """
    ways = connect()
    me, tag = ways.group.rank(), TAGS + order % TAGS
    others = [r for r in range(ways.group.size()) if r != me]
    receive, send = partial(dist.irecv, tag=tag), partial(dist.isend, tag=tag)
    arriving = [receive(row, group=ways.between(r, me), group_src=r) for row, r in zip(received, others, strict=True)]
    works = Works([*arriving, *(send(parts[r], group=ways.between(me, r), group_dst=r) for r in others)])
    _exchanges.add(works)
    return works


def sum_parts(output: Tensor, received: Tensor, mine: Tensor, rank: int, is_mean: bool) -> None:
    """`output` [numel] <- the sum or mean of `received` [N - 1, numel], which is freed, and `mine` [numel].

    In rank order, whoever sums. `output` may be `mine`, so only the last addition writes to it.
    """
    parts = [*received[:rank].unbind(), mine, *received[rank:].unbind()]
    total = parts[0]
    for part in parts[1:-1]:
        total = torch.add(total, part, out=received[0])
    torch.add(total, parts[-1], out=output)
    if is_mean:
        output.div_(len(parts))
    device.free(received)
