"""Exercise 10b.1: Full parameters, one unit at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger

from .shared import (
    KEEPERS,
    TIED,
    Keep,
    NamedUnit,
    Waited,
    another_group,
    expect_names,
    fake_units,
    make_units,
    refusing,
    seen_on,
)


@reference(
    "10b.1",
    hints=(
        "One unit after the other: gather it, look at it, free it, and only then the next one. Gathering and freeing "
        "is what all ranks do together; looking is for those that have a `keep`.",
        "Per unit: `device.allocate(flat.full)`; `comm.all_gather(flat.full.data, flat.shard.data, group).wait()`; if "
        "`keep` is not None, for each of `zip(unit.names, flat.views)` one `keep(view.detach())`, entered under all of "
        "the parameter's names; `device.free(flat.full)`.",
    ),
)
def whole_values(units: Sequence[NamedUnit], group: Group, keep: Callable[[Tensor], Any] | None) -> dict[str, Any]:
    """Apply `keep` to each full parameter; return the results by name. Every rank of the group calls this.

    Args:
        units: pairs `(flat, names)`. `device.allocate(flat.full)` allocates the memory of `flat.full` [P], and
            `comm.all_gather(flat.full.data, flat.shard.data, group)` fills it. The latter returns a handle: call its
            `wait()` before you read.
        group: the ranks.
        keep: called once per parameter with the full value, a tensor in the parameter's shape. The tensor's memory is
            freed soon after the call. The result is stored under *all* names of the parameter. If None, this rank keeps
            nothing and returns an empty dict.

    Only one unit is unsharded at a time: call `device.free(flat.full)` before the next one is gathered, on every rank.
    """
    kept: dict[str, Any] = {}
    for flat, names in units:
        device.allocate(flat.full)
        comm.all_gather(flat.full.data, flat.shard.data, group).wait()
        if keep is not None:
            for names_of_one, view in zip(names, flat.views, strict=True):
                kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
        device.free(flat.full)
    return kept


KEPT = ((torch.float32, 0), (torch.bfloat16, -1))  # of what dtype the units are, and which rank keeps


@refusing
def observe_whole_values(answer, variant):
    group = another_group()
    ranks = range(group.size())
    return [observe_kept(answer, variant, group, dtype, {ranks[keeper]}) for dtype, keeper in KEPT]


def observe_kept(answer, variant, group, dtype, kept_by):
    with Ledger() as ledger:
        units = make_units(variant, rank_device(), dtype)
        for unit in units:
            unit.flat.shard.data.add_(group.rank() + 1)  # as after a step of the optimizer
        keep = Keep() if group.rank() in kept_by else None
        ledger.reset_peaks()
        order, seen = [], ledger.live()["unsharded"]
        with comm.record() as calls, Waited(order, group):
            result = answer(units, group, keep)
        if not torch.is_grad_enabled():
            raise AnswerError(
                "gradients after the call: expected switched on as before, got switched off\n"
                "likely slip: `set_grad_enabled` stays: `with torch.no_grad():` ends, or `keep` gets `view.detach()`"
            )
        peak, left = ledger.peak_of("unsharded") - seen, ledger.live()["unsharded"] - seen
    comm.all_reduce(torch.zeros(1, device=rank_device()), group).wait()  # nobody leaves while a gather is under way
    first = (result or {}).get("1.weight")
    others = {id((result or {}).get(name, first)) for name in TIED} - {id(first)}
    found = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in dict(result or {}).items()}
    return (
        found,
        [c.op for c in calls],
        order,
        peak,
        left,
        None if keep is None else (keep.shown, keep.without, 1 + len(others)),
    )


def expected_values(variant, dtype):
    """The units of all ranks put together, as a plain dict."""
    whole = {}
    flats = [fake_units(variant, rank, dtype) for rank in range(variant.ranks)]
    for at, unit in enumerate(flats[0]):
        full = torch.cat([ranks_units[at].flat.shard.detach() + (rank + 1) for rank, ranks_units in enumerate(flats)])
        for names, view in zip(unit.names, unit.flat.unflatten(full), strict=True):
            whole |= dict.fromkeys(names, view)
    return whole


EVERYBODY = "every rank takes part in every all-gather, also one that keeps nothing"


@check("10b.1")
def check_whole_values(answer, variant):
    """One unit whole at a time, on every rank; kept by rank 0 alone."""
    found = seen_on(variant.ranks, observe_whole_values, answer, variant, slip=EVERYBODY)
    for number, (dtype, keeper) in enumerate(KEPT):
        check_kept([each[number] for each in found], variant, dtype, range(variant.ranks)[keeper])


def check_kept(found, variant, dtype, keeper):
    """What the ranks have done with units of a dtype, of which rank `keeper` alone has a `keep`."""
    units = fake_units(variant, 0, dtype)
    largest = max(unit.flat.full.numel() for unit in units) * dtype.itemsize
    everything = sum(unit.flat.full.numel() for unit in units) * dtype.itemsize
    everywhere = all(each[4] == everything for each in found)
    wanted = expected_values(variant, dtype)
    gathers = ["all_gather"] * len(units)
    for rank, (result, ops, order, peak, left, kept) in enumerate(found):
        expect("collectives", ops, gathers, rank=rank, slip="one all-gather per unit, whatever the rank keeps")
        expect(
            "issues and waits",
            order,
            ["issue all_gather", "wait all_gather"] * len(units),
            rank=rank,
            slip="until the handle's `wait()` the buffer holds anything; and one unit after the other",
        )
        expect(
            "unsharded bytes afterwards",
            left,
            0,
            rank=rank,
            slips={"nothing is freed: the entire model stays unsharded next to its state dict": everything}
            if everywhere
            else {},
            slip="each unit is freed as soon as it has been kept, on ranks that keep nothing too",
        )
        expect(
            "unsharded bytes at the peak",
            peak,
            largest,
            rank=rank,
            slips={"the whole model at once: free a unit before the next one is gathered": everything},
        )
        if rank != keeper:
            expect("the result", result, {}, rank=rank, slip="a rank whose `keep` is None gets an empty dict")
            continue
        if kept[0].total() == 0 and not result:
            raise AnswerError(f"rank {rank}, calls of keep(): expected some, got none\nlikely slip: {KEEPERS}")
        shown, without, objects = kept
        if without:
            raise AnswerError(
                f"rank {rank}, values given to keep(): expected whole ones, got {without} without memory\n"
                "likely slip: freed before it was kept"
            )
        expect(
            "calls of keep()",
            sum(shown.values()),
            sum(len(unit.names) for unit in units),
            rank=rank,
            slips={"a tied parameter is kept once, and all of its names lead to it": len(wanted)},
            slip="once per parameter, with its whole value",
        )
        slip = "put what `keep` returns under all names of a parameter, not a copy of it: it may be any object"
        expect(f"objects under 1.weight, {' and '.join(TIED)}", objects, 1, rank=rank, slip=slip)
        tied = "a plain module's state dict has all names of a tied weight"
        missing = wanted.keys() - result.keys()
        expect_names(rank, result, wanted, tied if missing and missing <= set(TIED) else None)
        for name, value in wanted.items():
            expect(
                name,
                result[name],
                value,
                rank=rank,
                slip="`flat.views` are the parameters in their shapes and their dtype",
            )
