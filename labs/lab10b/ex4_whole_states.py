"""Exercise 10b.4: The optimizer state."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minifsdp import comm, device
from minifsdp.checkpoint.optim_state import gather_states
from minifsdp.comm import Group
from minifsdp.contents import Contents
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger

from .shared import (
    KEEPERS,
    LARGE,
    TIED,
    Keep,
    NamedUnit,
    Refused,
    Waited,
    another_group,
    expect_names,
    fake_units,
    has_memory,
    make_units,
    refusing,
    seen_on,
)


@reference(
    "10b.4",
    hints=(
        "What the optimizer has for a flat parameter has its layout: what makes parameters of a gathered buffer makes "
        "states of a gathered state. What has no elements to share out, as Adam's `step`, is the same on all ranks.",
        "For each unit, for each key of `optimizer.state.get(flat.shard, {})`: a value of the shard's shape goes the "
        "way of 10b.1, into a buffer of `device.empty(flat.full.numel(), value.dtype, 'communication', value.device)`, "
        "of which `flat.unflatten(buffer)` makes the states; anything else is cloned for each parameter.",
    ),
    forbids=(Contents.gather, gather_states),
)
def whole_states(
    units: Sequence[NamedUnit], optimizer: Optimizer, group: Group, keep: Callable[[Tensor], Any] | None
) -> dict[str, dict[str, Any]]:
    """Return the optimizer state by parameter (under its first name) and key. Every rank of the group calls this.

    Args:
        units: pairs `(flat, names)`. `optimizer.state.get(flat.shard, {})` has the unit's states by key, with the same
            keys on all ranks. It is empty if the unit is frozen; the unit's names are then not in the result.
        optimizer: its parameters are the units' `flat.shard`.
        group: the ranks.
        keep: called with each full state in its parameter's shape, as in 10b.1. If None, return an empty dict.

    Gather a state of the shard's shape [P / N] into a buffer [P] from
    `device.empty(flat.full.numel(), dtype, "communication", device)`. `flat.unflatten(buffer)`
    splits it into one tensor per parameter, without the padding. Release the buffer with
    `device.free` before the next state is gathered. Any other state, such as `step`, is a tensor that all ranks already
    have: each parameter gets a `clone()` of it, without communication.
    """
    kept: dict[str, dict[str, Any]] = {}
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            buffer = None
            wholes = [value] * len(names)
            if value.shape == flat.shard.shape:
                buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
                comm.all_gather(buffer, value, group).wait()
                wholes = flat.unflatten(buffer)
            if keep is not None:
                for names_of_one, whole in zip(names, wholes, strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole) if buffer is not None else whole.clone()
            if buffer is not None:
                device.free(buffer)
    return kept


STATES_DTYPE = torch.bfloat16
OTHER_KEYS = ("step", "mu_product", "exp_avg", "exp_avg_sq", "history", "row", "count")


@refusing
def observe_both(answer, variant):
    """Of Adam, kept by rank 0; and of one with other states, a unit with one element a rank, kept by the last rank."""
    group = another_group()
    first_rank, last_rank = {0}, {group.size() - 1}
    gain = nn.ParameterDict({"gain": torch.arange(group.size()) + 1.0}).to(rank_device())
    small = NamedUnit(FlatParameter(find_parameters(gain), group.rank(), group.size()), [["gain"]])
    units = make_units(variant, rank_device(), STATES_DTYPE)
    adam = observe_whole_states(answer, group, units, torch.optim.Adam, first_rank)
    first, _, frozen = make_units(variant, rank_device())
    units = [first, small, frozen]
    try:
        return adam, observe_whole_states(answer, group, units, WithHistory, last_rank)
    except AnswerError as error:
        return adam, Refused(error)  # what Adam's states say comes first


class WithHistory(torch.optim.NAdam):
    """Keeps two tensors more that are the same on all ranks: of another shape, and of as many elements as the shard.

    And its second moments in more digits than the parameters have.
    """

    def step(self):
        super().step()
        for shard, state in self.state.items():
            state["exp_avg_sq"] = state["exp_avg_sq"].double() + 1e-12
            state["history"] = torch.arange(3.0, device=shard.device)
            state["row"] = torch.arange(float(shard.numel()), device=shard.device).view(1, -1)
            state["count"] = torch.tensor(LARGE, device=shard.device)


def observe_whole_states(answer, group, units, make_optimizer, kept_by):
    with Ledger() as ledger:
        optimizer = make_optimizer([unit.flat.shard for unit in reversed(units)], lr=0.1)
        for unit in units[:2]:  # the third is frozen, and has no state
            gradient = torch.arange(unit.flat.shard.numel(), device=rank_device()) + 1.0 + group.rank()
            unit.flat.shard.grad = gradient.to(unit.flat.shard.dtype)
        optimizer.step()
        optimizer.zero_grad()
        having = len(optimizer.state)
        keep = Keep() if group.rank() in kept_by else None
        ledger.reset_peaks()
        buffers = ledger.live()["communication"]
        order = []
        with comm.record() as calls, Waited(order, group):
            result = answer(units, optimizer, group, keep)
        peak, left = ledger.peak_of("communication") - buffers, ledger.live()["communication"] - buffers
    comm.all_reduce(torch.zeros(1, device=rank_device()), group).wait()
    if len(optimizer.state) != having:
        raise AnswerError(
            f"shards that have a state in the optimizer: expected {having} as before, got {len(optimizer.state)}\n"
            "likely slip: `optimizer.state` is a defaultdict: `[flat.shard]` makes an entry where there is none"
        )
    result = dict(result or {})
    tensors = [v for state in result.values() for v in state.values() if isinstance(v, torch.Tensor)]
    own = len({v.untyped_storage()._cdata for v in tensors}) == len(tensors)
    theirs = {v.untyped_storage()._cdata for state in optimizer.state.values() for v in state.values()}
    own = own and not theirs & {v.untyped_storage()._cdata for v in tensors}
    found = {name: {k: plain(v) for k, v in state.items()} for name, state in result.items()}
    shards = [{k: plain(v) for k, v in optimizer.state[unit.flat.shard].items()} for unit in units[:2]]
    return (
        found,
        [c.op for c in calls],
        order,
        peak,
        left,
        own,
        shards,
        None if keep is None else (keep.without, keep.shown[()]),
    )


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone() if has_memory(value) else None
    return value


@check("10b.4")
def check_whole_states(answer, variant):
    """States in the parameters' shapes and under their names, the step in a copy for each, one buffer at a time."""
    slip = "every rank takes part in the same gathers, also one that keeps nothing"
    seen = seen_on(variant.ranks, observe_both, answer, variant, slip=slip)
    check_states([adam for adam, _ in seen], fake_units(variant, 0)[:2], STATES_DTYPE.itemsize)
    try:
        for rank, (_, others) in enumerate(seen):
            if isinstance(others, Refused):
                raise AnswerError(f"rank {rank}, {others}")
        check_others([others for _, others in seen], fake_units(variant, 0)[0])
    except AnswerError as error:
        raise AnswerError(f"an optimizer whose states are {', '.join(OTHER_KEYS)}: {error}") from error


def check_states(seen, units, itemsize):
    """Adam's, of two units; what was seen on each rank."""
    largest = max(unit.flat.full.numel() for unit in units) * itemsize
    together = sum(unit.flat.full.numel() for unit in units) * itemsize
    wanted: dict[str, Any] = {}
    for at, unit in enumerate(units):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            parts = [each[6][at][key] for each in seen]
            wholes = [parts[0]] * 3 if key == "step" else unit.flat.unflatten(torch.cat(parts))
            for names, whole in zip(unit.names, wholes, strict=True):
                wanted.setdefault(names[0], {})[key] = whole
    for rank, (result, ops, order, peak, left, own, _, kept) in enumerate(seen):
        expect(
            "collectives",
            ops,
            ["all_gather"] * 4,
            rank=rank,
            slips={
                "Adam's `step` is on every rank already": ["all_gather"] * 6,
                "states stay after `zero_grad`: ask for the unit's states, not for its gradient": [],
                "states are found by the shard: the optimizer may have its parameters in another order": (
                    ["all_gather"] * 2
                ),
            },
            slip="one per unit and key of the shard's shape; none for a unit without state",
        )
        wanted_order = ["issue all_gather", "wait all_gather"] * 4
        expect("issues and waits", order, wanted_order, rank=rank, slip="wait before you read, then the next state")
        if left:
            raise AnswerError(
                f"rank {rank}, bytes of gathered states afterwards: expected 0, got {left:,}\n"
                "likely slip: each buffer is given back as soon as its states are kept"
            )
        if peak > largest:
            too = ", on ranks that keep nothing too" if rank else ""
            both = "all states of all units" if peak >= 2 * together else "more than one state"
            raise AnswerError(
                f"rank {rank}, bytes of gathered states at the peak: expected {largest:,}, got {peak:,}\n"
                f"likely slip: {both} whole at once: one unit's, one key's, then give it back{too}"
            )
        expect(
            "bytes of gathered states at the peak, by the role `communication`",
            peak,
            largest,
            rank=rank,
            slip="allocate the buffer with `device.empty(..., 'communication', ...)`, so that its bytes are counted",
        )
        if rank:
            expect("the result", result, {}, rank=rank, slip="a rank whose `keep` is None gets an empty dict")
            continue
        without, numbers = kept
        if numbers:
            raise AnswerError(
                f"rank 0, calls of keep() with a number: expected none, got {numbers}\n"
                "likely slip: `keep` is for whole states; of a number each parameter gets a `clone()`"
            )
        if without or any(value is None for state in result.values() for value in state.values()):
            raise AnswerError(
                "rank 0, whole states: expected values, got some without memory\n"
                "likely slip: the buffer was given back before its states were kept"
            )
        slip = "a unit without state, as a frozen one, has no entries"
        more = result.keys() - wanted.keys()
        if more and more <= set(TIED):
            slip = "a tied parameter has one state, under its first name"
        expect_names(rank, result, wanted, slip)
        for name, state in wanted.items():
            expect(f"keys of {name}", sorted(result[name]), sorted(state), rank=rank, slip="every key, the step too")
            for key, value in state.items():
                expect(
                    f"{key} of {name}",
                    result[name][key],
                    value,
                    rank=rank,
                    slip="a `clone()` of the tensor that the optimizer has"
                    if key == "step"
                    else "`flat.unflatten(buffer)`: the parameters' shapes, without the padding",
                )
        if not own:
            raise AnswerError(
                "rank 0, values with memory of their own: expected all, got some that share theirs\n"
                "likely slip: Adam adds 1 to each parameter's `step`: with a shared tensor, each adds for all"
            )


def check_others(seen, unit):
    """What differs from Adam: more states, a unit whose shard has one element, and that the last rank keeps."""
    keeper = len(seen) - 1
    for rank, (_, ops, *_) in enumerate(seen):
        expect(
            "collectives",
            ops,
            ["all_gather"] * 4,
            rank=rank,
            slip="a shard may have one element: what is gathered has the shard's *shape*: [1] and not [], "
            "[n] and not [1, n]",
        )
    for rank, (result, *_) in enumerate(seen[:keeper]):
        expect("the result", result, {}, rank=rank, slip="a rank whose `keep` is None gets an empty dict")
    result, shards = seen[keeper][0], [each[6] for each in seen]
    if not result:
        raise AnswerError(f"rank {keeper}, the result: expected states, got none\nlikely slip: {KEEPERS}")
    wholes = {"gain": lambda parts: torch.cat(parts)}
    wholes |= {
        names[0]: lambda parts, at=at: unit.flat.unflatten(torch.cat(parts))[at] for at, names in enumerate(unit.names)
    }
    expect_names(keeper, result, wholes, None)
    for name, whole in wholes.items():
        slip = "the optimizer says which keys there are: other optimizers have others"
        expect(f"keys of {name}", sorted(result[name]), sorted(OTHER_KEYS), rank=keeper, slip=slip)
        for key in OTHER_KEYS:
            parts = [each[name == "gain"][key] for each in shards]
            gathered = key.startswith("exp_avg")
            slip = None if gathered else "what has another shape than the shard is a `clone()` on each rank"
            wanted = whole(parts) if gathered else parts[0]
            if gathered:
                dtype = "a state need not have the parameters' dtype: the buffer is of `value.dtype`"
                expect(
                    f"dtype of {key} of {name}",
                    str(result[name][key].dtype),
                    str(wanted.dtype),
                    rank=keeper,
                    slip=dtype,
                )
            expect(f"{key} of {name}", result[name][key], wanted, rank=keeper, slip=slip)
