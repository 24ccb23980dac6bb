"""Exercise 11.2: Create the groups."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from minifsdp import process_groups
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference

from .shared import planned


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
    """Return this rank's sharding group and its replica group. Every rank calls this with the same lists.

    Args:
        sharding, replicas: as from `plan_groups`.

    Call `dist.new_group(ranks)` once for every list of both kinds, the sharding groups first, in the order given. The
    call returns the group on its members, and an unusable marker on other ranks. `dist.get_rank()` returns this rank.
    """
    mine: list[Any] = []
    for lists in (sharding, replicas):
        for ranks in lists:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine.append(group)
    inside, across = mine
    return inside, across


class FakeGroup(SimpleNamespace):
    """What `new_group` returns to a member, here."""


@contextmanager
def world_of(rank, ranks, made):
    """This process as one rank of a world; `made` hears which groups it asks for."""

    def new_group(members=None, *args, use_local_synchronization=False, **kwargs):
        if use_local_synchronization:
            raise AnswerError(
                "expected `dist.new_group(ranks)`, got `use_local_synchronization`: members alone meet then, which "
                "can deadlock where groups overlap, as these do (torch's docstring of `new_group`)"
            )
        members = list(range(ranks)) if members is None else list(members)
        made.append(members)
        return FakeGroup(ranks=members) if rank in members else dist.GroupMember.NON_GROUP_MEMBER

    def by_enumeration(lists, *args, **kwargs):
        groups = [new_group(members) for members in lists]
        mine = [group for group in groups if isinstance(group, FakeGroup)]
        return (mine[-1] if mine else None), groups

    before, dist.group.WORLD = dist.group.WORLD, FakeGroup(ranks=list(range(ranks)))
    try:
        with (
            patch.object(dist, "new_group", new_group),
            patch.object(dist, "new_subgroups_by_enumeration", by_enumeration),
            patch.object(dist, "get_rank", lambda group=None: rank),
            patch.object(dist, "get_world_size", lambda group=None: ranks),
        ):
            yield
    finally:
        dist.group.WORLD = before


def why_made(rank, made, wanted, sharding, replicas):
    """What rank `rank` did wrong; `made`: what each rank has made."""
    mine = made[rank]
    if mine == [group for group in wanted if rank in group] != wanted:
        return (
            "a rank has to make every group, also those that it is not in: the others count its calls, and wait for it"
        )
    if mine == [group for group in wanted if len(group) < len(made)] != wanted:
        return "a group of all ranks is made like any other: the default group is not one of its own"
    if mine == [group for at, group in enumerate(wanted) if group not in wanted[:at]] != wanted:
        return "a list that stands in both sorts is two groups: one to shard in, one of replicas"
    if mine[: len(sharding)] == sharding and len(mine) < len(wanted):
        return "the sharding groups are all made, and then not all replica groups"
    if len(mine) > len(wanted) and all(mine.count(group) > wanted.count(group) for group in wanted):
        return "each is made more than once: keep what the first call returned, for a group costs connections"
    if sorted(mine) == sorted(wanted):
        if all(each == mine for each in made):
            return "the same order on every rank would do, but this is not the one asked for: first all sharding groups"
        return "all of them, but in an order of this rank's own: then ranks meet in different groups under one name"
    return None


@check("11.2")
def check_make_groups(answer, variant):
    """Every rank makes every group in the same order, and returns its own two."""
    n = variant.ranks
    for ranks, factor in ((2 * n, n), (3 * n, n), (6, 3), (n, 1), (n, n), (1, 1)):
        setting = f"{ranks} ranks, F = {factor}: "
        sharding, replicas = planned(ranks, factor)
        wanted, made, returned = [*sharding, *replicas], [], []
        for rank in range(ranks):
            made.append([])
            with world_of(rank, ranks, made[rank]):
                given = [list(group) for group in sharding], [list(group) for group in replicas]
                returned.append(answer(*given))
            slip = "the lists belong to the caller, who may need them again: iterate over them, and remove nothing"
            expect(f"{setting}`sharding` and `replicas` afterwards", given, (sharding, replicas), rank=rank, slip=slip)
        for rank, got in enumerate(returned):
            expect(
                f"{setting}groups made, in order",
                made[rank],
                wanted,
                rank=rank,
                slip=why_made(rank, made, wanted, sharding, replicas),
            )
            if not isinstance(got, tuple | list) or len(got) != 2:
                raise AnswerError(f"{setting}rank {rank}: expected a pair of groups, got {type(got).__name__}")
            if not all(isinstance(group, FakeGroup) for group in got):
                raise AnswerError(
                    f"{setting}rank {rank}: expected two groups that it is a member of, "
                    f"got {[type(g).__name__ for g in got]}\n"
                    "likely slip: `new_group` returns a marker on ranks that are outside: keep only the groups of "
                    "which this rank is a member"
                )
            mine = [next(g for g in groups if rank in g) for groups in (sharding, replicas)]
            expect(
                f"{setting}ranks of the groups returned",
                [group.ranks for group in got],
                mine,
                rank=rank,
                slips={"the replica group comes second": mine[::-1]},
                slip="these are not the two groups that this rank is in",
            )
