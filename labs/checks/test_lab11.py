"""The checks of lab 11."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import comm
from minifsdp.course.launch import rank_device
from minifsdp.course.workshop.checking import AnswerError, expect, on_ranks

# 11.1


def planned(ranks, factor):
    """By the place of each rank in a table: rows shard together, columns hold the same."""
    table = torch.arange(ranks).view(-1, factor)
    return table.tolist(), table.T.tolist()


@pytest.mark.exercise(id="11.1")
def test_plan_groups(answer, variant):
    """Neighbours shard together, the same places hold the same shard, and what leaves a remainder is refused."""
    n = variant.ranks
    for ranks, factor in ((6 * n, n), (6 * n, 3), (4, 2), (n, 1), (n, n)):
        setting = f"{ranks} ranks, F = {factor}"
        sharding, replicas = planned(ranks, factor)
        got = answer(ranks, factor)
        if not isinstance(got, tuple) or len(got) != 2:
            raise AnswerError(f"{setting}: expected a pair of lists, got {type(got).__name__}")
        if list(got) == [replicas, sharding] and sharding != replicas:
            raise AnswerError(
                f"{setting}: the sharding groups and the replica groups are in each other's place\n"
                "likely slip: the groups of neighbours are those that shard, and come first"
            )
        strided = [list(range(place, ranks, ranks // factor)) for place in range(ranks // factor)]
        by_number = [list(range(low, low + ranks // factor)) for low in range(0, ranks, ranks // factor)]
        expect(
            f"{setting}: sharding groups",
            got[0],
            sharding,
            slips={
                "a stride takes ranks of different hosts: consecutive ranks live on one host": strided,
                "F is the size of a sharding group, not the number of them": by_number,
            },
        )
        expect(
            f"{setting}: replica groups",
            got[1],
            replicas,
            slips={
                "every place has replicas, not the first of each group alone": replicas[:1],
                "replicas hold the same shard: ranks of one place in *different* sharding groups": [
                    list(range(low, low + ranks // factor)) for low in range(0, ranks, ranks // factor)
                ],
            },
        )
    for ranks, factor in ((6, 4), (4, 8), (4, 0)):
        try:
            got = answer(ranks, factor)
        except ValueError:
            continue
        except Exception as error:
            raise AnswerError(f"{ranks} ranks, F = {factor}: expected a ValueError, got {error!r}") from error
        raise AnswerError(
            f"{ranks} ranks, F = {factor}: expected a ValueError, got {got}\n"
            "likely slip: ranks would be left over, in no group or in one that is too small"
        )


# 11.2


class FakeGroup(SimpleNamespace):
    """What `new_group` returns to a member, here."""


@contextmanager
def world_of(rank, ranks, made):
    """This process as one rank of a world; `made` hears which groups it asks for."""

    def new_group(members=None, *args, **kwargs):
        members = list(range(ranks)) if members is None else list(members)
        made.append(members)
        return FakeGroup(ranks=members) if rank in members else dist.GroupMember.NON_GROUP_MEMBER

    def by_enumeration(lists, *args, **kwargs):
        groups = [new_group(members) for members in lists]
        mine = [group for group in groups if isinstance(group, FakeGroup)]
        return (mine[-1] if mine else None), groups

    with (
        patch.object(dist, "new_group", new_group),
        patch.object(dist, "new_subgroups_by_enumeration", by_enumeration),
        patch.object(dist, "get_rank", lambda group=None: rank),
        patch.object(dist, "get_world_size", lambda group=None: ranks),
    ):
        yield


def why_made(rank, made, sharding, replicas):
    mine = [group for group in (*sharding, *replicas) if rank in group]
    wanted = [*sharding, *replicas]
    if made == mine:
        return (
            "a rank has to make every group, also those that it is not in: the others count its calls, and wait for it"
        )
    if made[: len(sharding)] == sharding and len(made) < len(wanted):
        return "the sharding groups are all made, and then not all replica groups"
    if len(made) > len(wanted) and all(made.count(group) > 1 for group in wanted):
        return "each is made more than once: keep what the first call returned, for a group costs connections"
    if made and sorted(map(tuple, made)) == sorted(map(tuple, wanted)):
        return "all of them, but in an order of this rank's own: then ranks meet in different groups under one name"
    return None


@pytest.mark.exercise(id="11.2")
def test_make_groups(answer, variant):
    """Every rank makes every group in the same order, and returns its own two."""
    for ranks, factor in ((2 * variant.ranks, variant.ranks), (3 * variant.ranks, variant.ranks)):
        sharding, replicas = planned(ranks, factor)
        for rank in range(ranks):
            made = []
            with world_of(rank, ranks, made):
                got = answer([list(group) for group in sharding], [list(group) for group in replicas])
            expect(
                "groups made, in order",
                made,
                [*sharding, *replicas],
                rank=rank,
                slip=why_made(rank, made, sharding, replicas),
            )
            if not isinstance(got, (tuple, list)) or len(got) != 2:
                raise AnswerError(f"rank {rank}: expected a pair of groups, got {type(got).__name__}")
            if not all(isinstance(group, FakeGroup) for group in got):
                raise AnswerError(
                    f"rank {rank}: expected two groups that it is a member of, got {[type(g).__name__ for g in got]}\n"
                    "likely slip: `new_group` returns a marker on ranks that are outside: keep only the groups of "
                    "which this rank is a member"
                )
            wanted = [next(g for g in groups if rank in g) for groups in (sharding, replicas)]
            expect(
                "ranks of the groups returned",
                [group.ranks for group in got],
                wanted,
                rank=rank,
                slips={"the replica group comes second": wanted[::-1]},
                slip="these are not the two groups that this rank is in",
            )


# 11.3


class Started(NamedTuple):
    events: list[str]
    calls: list[tuple[str, str, int]]
    has_handle: bool
    same_buffer: bool
    mean: torch.Tensor
    grad: torch.Tensor


def mean_of(rank, seed, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * seed + rank))


def observe_start(answer, seed, size):
    """A unit with a sharding group of its rank alone, whose replicas are all ranks."""
    where, rank = rank_device(), dist.get_rank()
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    names = {alone.group_name: "the sharding group", comm.world().group_name: "the replicas"}
    events, buffer = [], mean_of(rank, seed, size).to(where)
    shard = nn.Parameter(torch.zeros(size, device=where))
    shard.grad = torch.ones(size, device=where)

    def deliver(mean):
        events.append("deliver")
        shard.grad += mean

    @contextmanager
    def watcher(call, phase):
        events.append(f"{phase} {call.op}")
        yield

    unit = SimpleNamespace(
        mean=buffer, replicas=comm.world(), group=alone, across=None, deliver=deliver, flat=SimpleNamespace(shard=shard)
    )
    comm.watchers.append(watcher)
    try:
        with comm.record() as calls:
            answer(unit)
    finally:
        comm.watchers.remove(watcher)
    has_handle = isinstance(unit.across, comm.Handle)
    if has_handle:
        unit.across.wait()
    comm.all_reduce(torch.zeros(1, device=where), comm.world()).wait()  # nobody leaves while one is under way
    same = unit.mean is buffer
    issued = [(call.op, names[call.group], call.payload) for call in calls]
    return Started(events, issued, has_handle, same, buffer.cpu(), shard.grad.cpu())


def why_started(events):
    match events:
        case []:
            return "nothing goes to the other hosts, and each trains a model of its own"
        case [issue, *_] if issue == "deliver":
            return (
                "added to `.grad` before the second stage: `.grad` may hold earlier micro-batches, which have been "
                "reduced"
            )
        case [_, wait] if wait.startswith("wait"):
            return "to wait here overlaps nothing: backward would stand still until the other hosts have answered"
        case [*_, "deliver"]:
            return "to deliver is the task of `finish_across`, at the end of backward: here the mean is on its way"
    return None


@pytest.mark.exercise(id="11.3")
def test_start_across(answer, variant):
    """One all-reduce of the mean over the replicas, in place, under way when it returns."""
    size = 2 * variant.size + 1
    seen = on_ranks(variant.ranks, observe_start, answer, variant.seed, size, timeout=8)
    means = [mean_of(rank, variant.seed, size) for rank in range(variant.ranks)]
    whole = torch.stack(means)
    for rank, found in enumerate(seen):
        expect("what happened", found.events, ["issue all_reduce"], rank=rank, slip=why_started(found.events))
        expect(
            "collectives (operation, group, bytes)",
            found.calls,
            [("all_reduce", "the replicas", 4 * size)],
            rank=rank,
            slips={
                "the sharding group has had its turn: the reduce-scatter. The same shard is on the replicas": [
                    ("all_reduce", "the sharding group", 4 * size)
                ]
            },
        )
        expect("`unit.across` is the handle", found.has_handle, True, rank=rank, slip="nobody can wait for it")
        expect("`unit.mean` is the same buffer", found.same_buffer, True, rank=rank, slip="another buffer costs bytes")
        expect(
            "`unit.mean` after the wait",
            found.mean,
            whole.mean(0),
            rank=rank,
            slips={
                "a sum: every further host makes the step larger. Ask for `comm.MEAN`": whole.sum(0),
                "a copy was reduced: `unit.mean` is as before": means[rank],
            },
        )
        expect("`.grad`", found.grad, torch.ones(size), rank=rank, slip="nothing is delivered yet")


# 11.4


class FakeHandle:
    """A reduction whose result is there once somebody waits."""

    def __init__(self, log, buffer, result):
        self.log, self.buffer, self.result = log, buffer, result

    def wait(self):
        self.log.append("wait")
        self.buffer.copy_(self.result)


class FakeUnit:
    def __init__(self, size):
        self.log = []
        self.across = self.mean = None
        self.replicas = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        self.group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        self.averaged_over = 4
        self.flat = SimpleNamespace(shard=nn.Parameter(torch.zeros(size)))
        self.flat.shard.grad = torch.ones(size)  # of an earlier micro-batch

    def begin(self, result):
        self.mean = torch.full_like(result, float("nan"))
        self.across = FakeHandle(self.log, self.mean, result)

    def deliver(self, mean):
        self.log.append("deliver" if isinstance(mean, torch.Tensor) else "deliver of what is no tensor")
        if isinstance(mean, torch.Tensor):
            self.flat.shard.grad += mean
            mean.fill_(float("nan"))  # its memory is somebody else's


def finished(answer, unit, when):
    """What one call did; a call that cannot bear an idle unit is told so."""
    unit.log.clear()
    try:
        answer(unit)
    except AttributeError as error:
        if "NoneType" not in str(error):
            raise
        raise AnswerError(
            f"{when}: it raises {error}\n"
            "likely slip: `unit.across` is None where nothing is under way, and then there is nothing to do"
        ) from error
    return list(unit.log)


def why_finished(log, grad_kept):
    match log:
        case ["wait"]:
            if grad_kept:
                return "waited for, and never handed over: the optimizer finds an old gradient or none"
            return "`.grad` is overwritten, and earlier micro-batches are gone: `unit.deliver` adds"
        case ["deliver"]:
            return "the mean is not there before `wait()`: what is delivered may be anything"
        case ["deliver", "wait"]:
            return "delivered first and waited for afterwards: the other way round"
    return None


@pytest.mark.exercise(id="11.4")
def test_finish_across(answer, variant):
    """Waited for, delivered once, and forgotten; nothing where nothing is under way."""
    size = variant.size
    unit, grad = FakeUnit(size), torch.ones(size)
    for number in (1, 2):
        result = torch.randn(size, generator=torch.Generator().manual_seed(variant.seed + number))
        unit.begin(result)
        log = finished(answer, unit, f"reduction {number}")
        kept = torch.equal(unit.flat.shard.grad, grad)
        what = f"reduction {number}: what was called"
        expect(what, log, ["wait", "deliver"], slip=why_finished(log, kept))
        expect(
            f"reduction {number}: `.grad`",
            unit.flat.shard.grad,
            grad + result,
            slips={"divided again: `start_across` has made a mean of it": grad + result / 2},
            slip="the mean as it is after the wait is to be added, once",
        )
        grad = grad + result
        again = finished(answer, unit, "the next call, with nothing under way")
        expect(
            "the next call, with nothing under way: what was called",
            again,
            [],
            slip="what has been delivered is delivered twice: `unit.across` has to become None",
        )
        expect("`.grad` after it", unit.flat.shard.grad, grad)
        expect("`unit.across` is None", unit.across is None, True)
        expect(
            "`unit.mean` is None",
            unit.mean is None,
            True,
            slip="a name that stays keeps a buffer that has been given away",
        )
    finished(answer, FakeUnit(size), "a unit that never had a reduction")


# 11.5


def walk(units, ranks, per_host, factor):
    """What each rank sends along each ring of a step, and what of it goes to another host. Of rank 0 and its host."""
    sharding, replicas = planned(ranks, factor)
    sent = {"sharding": [0.0] * ranks, "replicas": [0.0] * ranks, "leaves": [0.0] * ranks}

    def ring(kind, members, nbytes, rounds):
        for place, rank in enumerate(members):
            following = members[(place + 1) % len(members)]
            moved = rounds * (len(members) - 1) * nbytes / len(members)
            sent[kind][rank] += moved
            if following // per_host != rank // per_host:
                sent["leaves"][rank] += moved

    for number, nbytes in enumerate(units):
        for members in sharding:
            ring("sharding", members, nbytes, 2 if number == 0 else 3)  # gathers and a reduce-scatter
        for members in replicas:
            ring("replicas", members, nbytes / factor, 2)
    return sent["sharding"][0], sent["replicas"][0], sum(sent["leaves"][:per_host])


@pytest.mark.exercise(id="11.5")
def test_traffic(answer, variant):
    """What a rank sends to either group, and what leaves its host, is what its rings carry, for every F."""
    units = [96 * variant.size, 480 * (variant.size + 2), 480, 1440 + 96 * variant.seed]
    whole = sum(units)
    for ranks, per_host, factor in (
        (24, 4, 2),
        (24, 4, 8),
        (24, 4, 4),
        (24, 4, 1),
        (24, 4, 24),
        (4, 4, 2),
        (4, 4, 4),
        (2 * variant.ranks, variant.ranks, variant.ranks),
    ):
        got = answer(list(units), ranks, per_host, factor)
        sharding, replicas, leaves = walk(units, ranks, per_host, factor)
        setting = f"{ranks} ranks, {per_host} per host, F = {factor}"
        if not isinstance(got, tuple) or len(got) != 3:
            raise AnswerError(f"{setting}: expected a Traffic of three numbers, got {type(got).__name__}")
        share, copies = (factor - 1) / factor, ranks // factor
        expect(
            f"{setting}: bytes to the sharding group",
            float(got[0]),
            sharding,
            slips={
                "the root is gathered once: it stays whole from forward to backward": share * 3 * whole,
                "every other unit is gathered twice, in forward and in backward": share * 2 * whole,
                "its rings have F ranks, not N": (ranks - 1) / ranks * (3 * whole - units[0]),
                "a rank need not send to itself: (F - 1) / F": float(3 * whole - units[0]),
            },
        )
        expect(
            f"{setting}: bytes to the replicas",
            float(got[1]),
            replicas,
            slips={
                "what is all-reduced is a shard, 1/F of the unit": 2 * (copies - 1) / copies * whole,
                "an all-reduce is a reduce-scatter and a gather: twice": (copies - 1) / copies * whole / factor,
                "its rings have R = N / F ranks, whatever the number of hosts": (
                    2 * (ranks // per_host - 1) / (ranks // per_host) * whole / factor
                ),
            },
        )
        expect(
            f"{setting}: bytes that leave a host",
            float(got[2]),
            leaves,
            slips={} if ranks == per_host else why_leaves(sharding, replicas, per_host, factor),
            slip="with one host nothing leaves it" if ranks == per_host else None,
        )


def why_leaves(sharding, replicas, per_host, factor):
    """What is left out or counted twice, by its words."""
    outside = sharding if factor > per_host else 0.0
    return {
        "several replica rings leave a host at once, one for each place": outside + replicas,
        "a ring leaves a host once, with what one rank sends, however many of its ranks are there": per_host
        * (outside + replicas),
        "sharding groups inside a host send nothing out of it": sharding + min(factor, per_host) * replicas,
        "sharding groups larger than a host send out of it, too": min(factor, per_host) * replicas,
        "no more replica rings touch a host than it has ranks": outside + factor * replicas,
    }


# 11.6


class Case(NamedTuple):
    """What a choice is made from: bytes and seconds by factor."""

    says: str
    memory: dict[int, float]
    seconds: dict[int, float]
    wanted: tuple[str, Any]
    slip: str
    rest: float = 10.0


CASES = (
    Case(
        "the fastest needs too much memory",
        {4: 60.0, 1: 200.0, 8: 40.0, 2: 110.0},
        {4: 3.0, 1: 1.0, 8: 4.0, 2: 2.0},
        ("hybrid sharding", 4),
        "what does not fit cannot be chosen, however fast",
    ),
    Case(
        "a larger factor is faster than the smallest that fits",
        {8: 30.0, 1: 190.0, 2: 100.5, 4: 55.0, 16: 20.0},
        {8: 2.0, 1: 1.0, 2: 1.0, 4: 3.0, 16: 5.0},
        ("hybrid sharding", 8),
        "the smallest that fits is usually the fastest, and not always: ask `seconds`",
    ),
    Case(
        "factor 1 needs exactly the capacity",
        {2: 60.0, 1: 100.0, 4: 40.0},
        {2: 2.0, 1: 1.0, 4: 3.0},
        ("data parallelism", 1),
        "what is not more than the capacity fits",
    ),
    Case(
        "two are equally fast",
        {8: 30.0, 4: 50.0, 2: 80.0, 1: 150.0},
        {8: 2.0, 4: 1.0, 2: 1.0, 1: 1.0},
        ("hybrid sharding", 2),
        "of equally fast ones the smallest, in whatever order the factors come",
    ),
    Case(
        "only the largest fits",
        {1: 800.0, 8: 110.0, 64: 22.0},
        {1: 1.0, 8: 2.0, 64: 3.0},
        ("full sharding", 64),
        "the largest factor there is goes by the name of full sharding",
    ),
    Case(
        "nothing fits, and `rest` is small",
        {1: 800.0, 2: 405.0, 4: 210.0},
        {1: 1.0, 2: 2.0, 4: 3.0},
        ("more ranks", None),
        "no factor fits, so there is none to return: shards that are too large want more ranks",
    ),
    Case(
        "nothing fits, and `rest` alone is more than the capacity",
        {1: 800.0, 2: 460.0, 4: 290.0},
        {1: 1.0, 2: 2.0, 4: 3.0},
        ("split layers", None),
        "`rest` stays on however many ranks: here only splitting what is whole helps",
        rest=120.0,
    ),
    Case(
        "nothing fits, and `rest` is the capacity",
        {1: 800.0, 2: 450.0, 4: 275.0},
        {1: 1.0, 2: 2.0, 4: 3.0},
        ("split layers", None),
        "`rest` has to be *less* than the capacity: something of the shards is left on any number of ranks",
        rest=100.0,
    ),
)


@pytest.mark.exercise(id="11.6")
def test_choose(answer, variant):
    """The fastest of those that fit; and where none fits, whether more ranks would help."""
    for case in CASES:
        got = answer(list(case.memory), 100.0, case.memory.__getitem__, case.seconds.__getitem__, case.rest)
        if not isinstance(got, tuple) or len(got) != 2:
            raise AnswerError(f"{case.says}: expected a Choice, got {type(got).__name__}\nlikely slip: {case.slip}")
        slips = {}
        if case.wanted[0] == "hybrid sharding":
            slips["with any factor between 1 and the largest it is hybrid"] = ("full sharding", case.wanted[1])
        expect(f"{case.says} (capacity 100, rest {case.rest:g})", tuple(got), case.wanted, slips=slips, slip=case.slip)
