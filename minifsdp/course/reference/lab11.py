"""Reference answers of lab 11, hybrid sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from minifsdp import comm, process_groups
from minifsdp.comm import Group, Handle
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.reduction import Reduction


class Replica(Protocol):
    """The unit interface that 11.3 and 11.4 may use; the notebook's set-up cell explains it."""

    mean: Tensor | None
    replicas: Group
    across: Handle | None

    def deliver(self, mean: Tensor) -> None: ...


class Traffic(NamedTuple):
    sharding: float
    replicas: float
    leaves: float


class Choice(NamedTuple):
    name: str
    factor: int | None


@reference(
    "11.1",
    hints=(
        "Rank r is number r % F of sharding group r // F. Which ranks have the same number?",
        "`range(low, low + factor)` for each `low` in steps of `factor`; `range(place, ranks, factor)` for each "
        "`place` of a group. Refuse first: a factor below 1, or one that leaves a remainder.",
    ),
)
def plan_groups(ranks: int, factor: int) -> tuple[list[list[int]], list[list[int]]]:
    """The sharding groups and the replica groups of a world, as lists of ranks."""
    if factor < 1 or ranks % factor:
        raise ValueError(f"{ranks} ranks do not make groups of {factor}")
    sharding = [list(range(low, low + factor)) for low in range(0, ranks, factor)]
    replicas = [list(range(place, ranks, factor)) for place in range(factor)]
    return sharding, replicas


@reference(
    "11.2",
    hints=(
        "`dist.new_group` is a collective of the whole world: every rank takes part in the making of every group, of "
        "those too that it is no member of, and in the same order as all others. A rank outside gets a marker back.",
        "Go through the lists as they are, not through your own groups. Call `dist.new_group(ranks)` for each, and "
        "keep what it returns where `dist.get_rank() in ranks`. First all sharding groups, then all replica groups.",
    ),
    forbids=(process_groups.host_groups,),
)
def make_groups(sharding: list[list[int]], replicas: list[list[int]]) -> tuple[Group, Group]:
    """This rank's sharding group and its replica group."""
    mine: list[Any] = []
    for lists in (sharding, replicas):
        for ranks in lists:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine.append(group)
    inside, across = mine
    return inside, across


@reference(
    "11.3",
    hints=(
        "The replicas have the means of different rows, of the same shard. `comm.all_reduce` reduces in place and sums "
        "unless you say otherwise; what it returns is what somebody has to wait for later.",
        "One line is enough. Two of the unit's attributes go into the call, and what it returns is the third. No wait, "
        "and nothing is delivered: the mean is not there yet.",
    ),
    forbids=(FlatUnit._accumulate, Reduction.start_across),
)
def start_across(unit: Replica) -> None:
    """Start the reduction of `unit.mean` [P / F] over the replicas, in place."""
    assert unit.mean is not None
    unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)


@reference(
    "11.4",
    hints=(
        "It is called for every unit, also for those that have nothing under way, and more than once. How do you see "
        "that there is something? And how will the next call?",
        "If `unit.across` is None, there is nothing to do. Otherwise wait for it, hand `unit.mean` to `unit.deliver`, "
        "and set both attributes to None.",
    ),
    forbids=(FlatUnit.finish_reduce,),
)
def finish_across(unit: Replica) -> None:
    """Wait for what `start_across` has started, and deliver the mean, once."""
    if unit.across is None:
        return
    unit.across.wait()
    assert unit.mean is not None
    unit.deliver(unit.mean)
    unit.across = unit.mean = None


@reference(
    "11.5",
    hints=(
        "With M = sum(units), R = ranks / F: in the sharding group two gathers and a reduce-scatter, (F - 1) / F each, "
        "less the root's second gather. To the replicas an all-reduce of M / F bytes over R ranks.",
        "sharding = (F - 1) / F * (3 M - root), replicas = 2 (R - 1) / R * M / F. Sharding rings leave a host only if "
        "F > per_host, and then there is one of them there. Replica rings: min(F, per_host) of them touch a host, and "
        "each leaves it if it has ranks elsewhere.",
    ),
)
def traffic(units: Sequence[int], ranks: int, per_host: int, factor: int) -> Traffic:
    """Bytes of a step of FULL_SHARD in groups of `factor` ranks, replicated over the rest."""
    whole, copies = sum(units), ranks // factor
    sharding = (factor - 1) / factor * (3 * whole - units[0])
    replicas = 2 * (copies - 1) / copies * whole / factor
    leaves = 0.0
    if factor > per_host:
        leaves += sharding
    if ranks > per_host:
        leaves += min(factor, per_host) * replicas
    return Traffic(sharding, replicas, leaves)


@reference(
    "11.6",
    hints=(
        "Two steps. Which factors fit? Of these, which is the fastest? `min` takes a `key`, and the first of equals.",
        "`fitting = [f for f in sorted(factors) if memory(f) <= capacity]`. If there are any, "
        "`min(fitting, key=seconds)`. If not, compare `rest` with the capacity: sharding over more ranks leaves "
        "`rest` as it is.",
    ),
)
def choose(
    factors: Sequence[int],
    capacity: float,
    memory: Callable[[int], float],
    seconds: Callable[[int], float],
    rest: float,
) -> Choice:
    """The fastest sharding factor that fits, or what to do if none does."""
    fitting = [factor for factor in sorted(factors) if memory(factor) <= capacity]
    if not fitting:
        return Choice("more ranks" if rest < capacity else "split layers", None)
    factor = min(fitting, key=seconds)
    if factor == 1:
        return Choice("data parallelism", 1)
    return Choice("full sharding" if factor == max(factors) else "hybrid sharding", factor)
