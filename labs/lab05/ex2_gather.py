"""Exercise 5.2: Gather."""

from typing import Any, NamedTuple

import torch

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger

from .shared import ITEM, flat_parameter, phases, values


@reference(
    "5.2",
    hints=(
        "`device.allocate` gives `flat.full` its memory, the same that `flat.views` look at. `comm.all_gather` returns "
        "a handle; there is nothing to read before its `wait()`. Autograd has no part in it: `.data` on both buffers.",
        "Three steps: allocate `flat.full`; `comm.all_gather(output, shard, group)` with `flat.full.data` for the "
        "output, since it has a version counter of its own, and `flat.shard.data`, since the shard is a Parameter and "
        "autograd would record what is done with it; wait.",
    ),
    forbids=(FlatUnit._gather,),
)
def gather(flat: FlatParameter, group: Group) -> None:
    """Unshard the unit: fill `flat.full` [P] with the `flat.shard` [P / N] of every rank, in order.

    Allocate `flat.full`, issue one all-gather straight into it, and wait for it before returning.
    Allocate no other memory. `flat.views` and autograd's saved tensors refer to `flat.full`, so it must
    stay the same tensor, and its version counter must not change. `flat.shard` is a Parameter: pass `flat.shard.data`
    (and `flat.full.data`), otherwise autograd records the collective.

    Use `device.allocate(buffer)` and `comm.all_gather(output, shard, group)`, which returns a handle.
    """
    device.allocate(flat.full)
    comm.all_gather(flat.full.data, flat.shard.data, group).wait()


class Gathered(NamedTuple):
    calls: list[tuple[str, int]]
    phases: list[str]
    views: list[Any]
    full: Any
    shard: torch.Tensor
    unsharded: int
    peak: int
    version: int


def observe_gather(answer, seed, size):
    group, where = comm.world(), rank_device()
    rank, ranks = group.rank(), group.size()
    with Ledger() as ledger:
        flat = flat_parameter(seed, size, rank, ranks, where)
        buffer = flat.full
        flat.shard.data.add_(rank + 1)  # as after a step of the optimizer
        ledger.reset_peaks()
        before = sum(ledger.live().values())
        with comm.record() as calls, phases() as seen:
            answer(flat, group)
        unsharded, peak = ledger.live()["unsharded"], ledger.peak.total - before
    views, full, shard = [values(view) for view in flat.views], values(buffer), values(flat.shard)
    device.free(buffer)
    version = flat.views[0]._version
    answer(flat, group)  # once more without the ledger, under which no collective counts as a change
    version = flat.views[0]._version - version
    comm.all_reduce(torch.zeros(1, device=where), group).wait()  # nobody leaves while a gather is under way
    return Gathered([(c.op, c.payload) for c in calls], seen, views, full, shard, unsharded, peak, version)


WATCHED = "autograd is watching: hand both buffers over as `.data`, aliases that it does not follow"
GATHER_ERRORS = {
    "being modified inplace": WATCHED,
    "multiple views": WATCHED,
    "setStorage": "`flat.full` has no memory yet: `device.allocate` first",
}


@check("5.2")
def check_gather(answer, variant):
    """One all-gather into the memory that the views look at, waited for; nothing else is allocated."""
    try:
        seen = on_ranks(variant.ranks, observe_gather, answer, variant.seed, variant.size, timeout=8)
    except AnswerError as error:
        slip = next((slip for text, slip in GATHER_ERRORS.items() if text in str(error)), None)
        raise AnswerError(f"{error}\nlikely slip: {slip}" if slip else str(error)) from error
    start = [flat_parameter(variant.seed, variant.size, rank, variant.ranks) for rank in range(variant.ranks)]
    shards = [flat.shard.detach() + rank + 1 for rank, flat in enumerate(start)]
    full = torch.cat(shards)
    payload = full.numel() * ITEM
    for rank, found in enumerate(seen):
        expect(
            "collectives (operation, bytes)",
            found.calls,
            [("all_gather", payload)],
            rank=rank,
            slips={
                "this rank's own shard is only 1/N of the unit: the others' have to be fetched": [],
                "an all-reduce of zero-filled buffers gives the same values and sends twice the bytes": [
                    ("all_reduce", payload)
                ],
            },
        )
        expect(
            "what was issued and waited for",
            found.phases,
            ["issue all_gather", "wait all_gather"],
            rank=rank,
            slips={
                "`comm.all_gather` only starts it: until the handle's `wait()` the buffer holds anything": [
                    "issue all_gather"
                ]
            },
        )
        if any(view is None for view in found.views):
            raise AnswerError(
                f"rank {rank}, memory behind `flat.views`: expected that of `flat.full`, got none\n"
                "likely slip: gathered into a fresh tensor. The views, and autograd, look at the old buffer: give "
                "that one its memory back with `device.allocate`"
            )
        expect("`flat.full` after the gather", found.full, full, rank=rank, slips={"rank order": full.flip(0)})
        expect(
            "bytes allocated meanwhile, at most",
            found.peak,
            payload,
            rank=rank,
            slips={"the unit is there twice: gather into `flat.full`, not into a buffer to copy from": 2 * payload},
            slip="gather into `flat.full`; another buffer costs its bytes just when memory is tightest",
        )
        expect(
            "changes that autograd has counted on the views",
            found.version,
            0,
            rank=rank,
            slip="gathering puts back the values that autograd has saved, and must not count as a change: gather into "
            "`flat.full.data`, an alias with a version counter of its own, or backward will refuse",
        )
        expect("`flat.shard`", found.shard, shards[rank], rank=rank, slip="gather reads the shard and leaves it alone")
