"""Exercise 9.1: Gather in a different dtype."""

from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minifsdp import comm, device
from minifsdp.comm import Group, Handle
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger

from .shared import BF16, FP16, numbers, phases


@reference(
    "9.1",
    hints=(
        "What is sent, from where, and who waits? `copy_` casts on the way, so the cast shard needs no buffer: a part "
        "of `full` belongs to this rank of `group` anyway. Which one?",
        "Elements rank * S up to (rank + 1) * S of `full`, with S = `shard.numel()`. `copy_(shard, non_blocking=True)` "
        "into that slice, then `return comm.all_gather(full, slice, group)`: it may send a part of its own output.",
    ),
    forbids=(FlatUnit.gather_into, FlatParameter.mine),
)
def gather_low(full: Tensor, shard: Tensor, group: Group) -> Handle:
    """Start filling `full` [P] with every rank's `shard` [P / N], in the dtype of `full`, and return the handle.

    Args:
        full: already allocated, in a dtype such as bf16; rank r's shard belongs at elements r * P / N onwards.
        shard: this rank's shard, in fp32, possibly in host memory. It is not modified.
        group: the ranks; `group.rank()` is this rank.

    Issue one all-gather of elements that are already cast, and use no memory other than `full`. Do not wait for the
    copy or for the gather: the caller does that.

    Use `Tensor.copy_`, which casts (and moves; with `non_blocking=True` the host does not wait for a move), and
    `comm.all_gather(output, part, group)`, whose `part` may be this rank's own slice of `output`.
    """
    size = shard.numel()
    mine = full[group.rank() * size :][:size]
    mine.copy_(shard, non_blocking=True)
    return comm.all_gather(full, mine, group)


class Gathered(NamedTuple):
    returned: str
    calls: list[tuple[str, int]]
    phases: list[str]
    groups: list[bool]  # whether each was over the given group
    begins: list[int]  # the element of `full` that what is sent begins at; -1: it lies elsewhere
    full: torch.Tensor
    shard: torch.Tensor
    peak: int
    copies: list[bool]  # of each copy into `full`, whether the host goes on at once
    later: list[torch.Tensor]  # what a second call leaves in `full`, and a third in one of fp16, with other shards


class Copies(TorchDispatchMode):
    """Notes of each copy, and of each cast, whether the host waits for it where it is one between devices."""

    def __init__(self):
        super().__init__()
        self.non_blocking = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            self.non_blocking.append(bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))
        return func(*args, **kwargs)


def observe_gather(answer, seed, size):
    """On all ranks but the first, which are the group: its ranks are not those of the world."""
    group, where = dist.new_group(list(range(1, comm.world().size()))), rank_device()
    if comm.world().rank() == 0:
        return None
    gather, groups, begins, issued, copies = comm.all_gather, [], [], [], Copies()

    def spy(output, shard, given):
        groups.append(given.group_name == group.group_name)
        inside = shard.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        begins.append(shard.storage_offset() if inside else -1)
        issued.append(len(copies.non_blocking))
        return gather(output, shard, group)  # another group would not come back

    with Ledger() as ledger:
        shard = numbers(seed + group.rank(), size).to(where)
        full = device.empty(size * group.size(), BF16, "unsharded", where).fill_(torch.nan)
        ledger.reset_peaks()
        before = sum(ledger.live().values())
        with comm.record() as calls, phases() as seen, patch.object(comm, "all_gather", spy), copies:
            handle = answer(full, shard, group)
        peak = ledger.peak.total - before
    returned, order = type(handle).__name__, list(seen)
    if handle is not None:
        handle.wait()
    of_first, first, later = (groups[:], begins[:], issued[:]), full.clone(), []
    with patch.object(comm, "all_gather", spy):
        for buffer in (full, device.empty(size * group.size(), FP16, "unsharded", where).fill_(torch.nan)):
            handle = answer(buffer, 1000.5 * shard, group)
            if handle is not None:
                handle.wait()
            later.append(buffer.cpu())
    (groups, begins, issued), full = of_first, first
    comm.all_reduce(torch.zeros(1, device=where), group).wait()
    calls = [(c.op, c.payload) for c in calls]
    casts = copies.non_blocking[: issued[0]] if issued else []
    return Gathered(returned, calls, order, groups, begins, full.cpu(), shard.cpu(), peak, casts, later)


@check("9.1")
def check_gather_low(answer, variant):
    """The shard is cast straight into its place, and one all-gather in the low dtype fills the rest."""
    ranks, size = max(3, variant.ranks), variant.size
    try:
        seen = on_ranks(ranks + 1, observe_gather, answer, variant.seed, size, timeout=8)[1:]
    except AnswerError as error:
        if "size of tensor" in str(error):
            raise AnswerError(
                f"{error}\nlikely slip: `full` has a part for each of `group.size()` ranks, here {ranks}"
            ) from error
        if "dtype" in str(error):
            raise AnswerError(
                f"{error}\nlikely slip: a collective does not cast: what is sent has to have the dtype of `full`"
            ) from error
        raise
    shards = [numbers(variant.seed + rank, size) for rank in range(ranks)]
    full = torch.cat(shards).to(BF16)
    payload = 2 * ranks * size
    for rank, found in enumerate(seen):
        expect(
            "`shard`",
            found.shard,
            shards[rank],
            rank=rank,
            slip="the fp32 shard is the master copy, which the optimizer updates: cast a copy of it, not itself",
        )
        expect(
            "collectives (operation, bytes)",
            found.calls,
            [("all_gather", payload)],
            rank=rank,
            slips={
                "fp32 went over the wire, twice the bytes: cast before you send": [("all_gather", 2 * payload)],
                "an all-reduce of zero-filled buffers sends twice the bytes of a gather": [("all_reduce", payload)],
                "only this rank's own part is there: the others' have to be fetched": [],
            },
            slip="one all-gather, of what is cast already",
        )
        if not all(found.groups):
            raise AnswerError(
                f"rank {rank}, the group of the all-gather: expected `group`, got another\n"
                "likely slip: a unit's group need not be the world: in another one others wait"
            )
        expect(
            "what is issued and waited for before it returns",
            found.phases,
            ["issue all_gather"],
            rank=rank,
            slip="the caller waits, later: who waits here lets nothing compute during the gather",
        )
        if found.returned == "NoneType":
            raise AnswerError(
                f"rank {rank}, what is returned: expected the handle of the gather, got None\n"
                "likely slip: the handle is lost, so nobody can tell when `full` is filled"
            )
        slip = "this rank sends its part of `full`, and that begins at rank * S"
        expect("`full` after the gather", found.full, full, rank=rank, slip=slip, tolerance=0.0)
        if found.begins != [-1]:
            expect(
                "element of `full` at which what is sent begins",
                found.begins,
                [rank * size],
                rank=rank,
                slip="gloo copies what it sends, NCCL does not: it gathers in place from element rank * S only, and "
                "what lies elsewhere in `full` is overwritten while it is sent",
            )
        expect(
            "bytes allocated meanwhile, at most",
            found.peak,
            0,
            rank=rank,
            slips={"that is a buffer for the cast shard: cast it straight into its part of `full`": 2 * size},
            slip="`full` has room for all of it",
        )
    for rank, found in enumerate(seen):
        expect(
            "copies for which the host waits, where `shard` is in host memory",
            found.copies.count(False),
            0,
            rank=rank,
            slip="`non_blocking=True`: the host queues the copy and goes on, the gather is queued behind it",
        )
        again = torch.cat([1000.5 * shard for shard in shards])
        slip = "the optimizer has changed the shard since the last call: cast it for every gather"
        expect("`full` after a second gather", found.later[0], again.to(BF16), rank=rank, slip=slip, tolerance=0.0)
        slip = "bf16 is one dtype of several, and has fewer digits than fp16: cast once, to the dtype of `full`"
        expect("`full` in fp16", found.later[1], again.to(FP16), rank=rank, slip=slip, tolerance=0.0)
