"""The checks of lab 11."""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import comm
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.instruments.launch import rank_device

# 11.1


def planned(ranks, factor):
    """By the place of each rank in a table: rows shard together, columns hold the same."""
    table = torch.arange(ranks).view(-1, factor)
    return table.tolist(), table.T.tolist()


@check("11.1")
def check_plan_groups(answer, variant):
    """Neighbours shard together, the same places hold the same shard, and what leaves a remainder is refused."""
    n = variant.ranks
    for ranks, factor in ((6 * n, n), (6 * n, 3), (4, 2), (n, 1), (n, n), (1, 1)):
        setting = f"{ranks} ranks, F = {factor}"
        sharding, replicas = planned(ranks, factor)
        try:
            got = answer(ranks, factor)
        except Exception as error:
            raise AnswerError(f"{setting}: it raises {error!r}, though F divides N") from error
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise AnswerError(f"{setting}: expected a pair of lists, got {type(got).__name__}")
        if strange := [each for part in got for each in part if not isinstance(each, tuple | list)]:
            raise AnswerError(
                f"{setting}: expected groups as lists of ranks, got {strange[0]!r}\n"
                "likely slip: `list(...)` around each group, and each group in a list"
            )
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
    for ranks, factor in ((6, 4), (4, 8), (4, 0), (4, -2), (6, -1), (n, -n)):
        try:
            got = answer(ranks, factor)
        except ValueError:
            continue
        except Exception as error:
            raise AnswerError(f"{ranks} ranks, F = {factor}: expected a ValueError, got {error!r}") from error
        slip = "ranks would be left over, in no group or in one that is too small"
        if factor < 0:
            slip = "a negative factor divides, too, and makes no groups: refuse what is below 1"
        raise AnswerError(f"{ranks} ranks, F = {factor}: expected a ValueError, got {got}\nlikely slip: {slip}")


# 11.2


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


# 11.3


DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float64: 1e-14}  # of the mean, and how far off it may be
DIRECT = ("all_reduce", "reduce", "broadcast", "barrier", "all_gather", "all_to_all_single", "isend", "irecv")
POISON = 1000.0


class Started(NamedTuple):
    events: list[str]
    calls: list[tuple[str, str, int]]
    has_handle: bool
    same_buffer: bool
    left_alone: bool
    kept: list[str]
    mean: torch.Tensor
    grad: torch.Tensor


class UnderWay:
    """A link on which nothing arrives while the answer runs: until then a buffer holds no result."""

    def __init__(self):
        self.sent = []

    def submit(self, call, collective):
        tensor = collective.args[0]
        self.sent.append((call.function, collective, tensor, tensor.clone()))
        tensor.fill_(POISON)
        return comm.Done()

    def arrive(self):
        for function, collective, tensor, before in self.sent:
            tensor.copy_(before)
            getattr(dist, function)(*collective.args, **collective.keywords).wait()


def mean_of(rank, seed, size, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype) / 3


@contextmanager
def listening(events):
    """`events` hears of what is issued and waited for, and of what goes past `comm`, which is not carried out."""

    @contextmanager
    def watcher(call, phase):
        events.append(f"{phase} {call.op}")
        yield

    def past(name):
        return lambda *args, **kwargs: events.append(f"dist.{name}") or comm.Done()

    comm.observers.append(watcher)
    try:
        with ExitStack() as patches:
            for name in DIRECT:
                patches.enter_context(patch.object(dist, name, past(name)))
            yield
    finally:
        comm.observers.remove(watcher)


def observe_start(answer, seed, size):
    """Units whose shard all ranks but the last have; the last rank's is on no other."""
    where, rank, last = rank_device(), dist.get_rank(), dist.get_world_size() - 1
    alone = [dist.new_group([each]) for each in range(last + 1)][rank]
    several, single = dist.new_group(list(range(last))), dist.new_group([last])
    replicas = single if rank == last else several
    names = {
        alone.group_name: "the sharding group",
        replicas.group_name: "the replicas",
        comm.world().group_name: "the world",
    }
    return [start(answer, mean_of(rank, seed, size, dtype).to(where), replicas, alone, names) for dtype in DTYPES]


def start(answer, mean, replicas, alone, names):
    """What `answer` does with one unit."""
    events, shard = [], nn.Parameter(torch.zeros_like(mean))
    shard.grad = torch.ones_like(mean)

    def deliver(delivered):
        events.append("deliver")
        shard.grad += delivered

    flat = SimpleNamespace(shard=shard)
    unit = SimpleNamespace(mean=mean, replicas=replicas, group=alone, across=None, deliver=deliver, flat=flat)
    before, under_way = set(vars(unit)), UnderWay()
    with comm.record() as calls, listening(events), patch.object(comm, "link", under_way):
        answer(unit)
    left_alone = all(bool((tensor == POISON).all()) for _, _, tensor, _ in under_way.sent)
    issued = [(call.op, names.get(call.group, "another group"), call.payload) for call in calls]
    if all(comm.gather_objects([call[:2] for call in issued] == [("all_reduce", "the replicas")], comm.world())):
        under_way.arrive()  # else somebody would wait for ever
    return Started(
        events,
        issued,
        isinstance(unit.across, comm.Handle),
        unit.mean is mean,
        left_alone,
        [name for name in vars(unit) if name not in before],
        unit.mean.cpu(),
        shard.grad.cpu(),
    )


def why_started(events):
    match events:
        case []:
            return "nothing goes to the other hosts, and each trains a model of its own"
        case [issue, *_] if issue == "deliver":
            return (
                "added to `.grad` before the second stage: `.grad` may hold earlier micro-batches, which have been "
                "reduced"
            )
        case ["dist.barrier", *_] | [_, "dist.barrier", *_]:
            return "a barrier makes backward stand still until the other hosts have come as far"
        case [issue, *_] if issue.startswith("dist."):
            return "no collective of `comm` is issued: it is `comm.all_reduce` that returns a `Handle`"
        case [_, wait] if wait.startswith("wait"):
            return "to wait here overlaps nothing: backward would stand still until the other hosts have answered"
        case [*_, "deliver"]:
            return "to deliver is the task of `finish_across`, at the end of backward: here the mean is on its way"
        case [_, again, *_] if again.startswith("issue"):
            return "one reduction is enough: what is reduced twice crosses the slow link twice"
    return None


@check("11.3")
def check_start_across(answer, variant):
    """One all-reduce of the mean over the replicas, in place, in its dtype, under way when it returns."""
    size, count = 2 * variant.size + 1, variant.ranks + 1  # replicas of the first shard; the second has one
    seen = on_ranks(count + 1, observe_start, answer, variant.seed, size, timeout=8)
    for number, (dtype, tolerance) in enumerate(DTYPES.items()):
        means = [mean_of(rank, variant.seed, size, dtype) for rank in range(count + 1)]
        nbytes = size * dtype.itemsize
        loss = "half of its digits are lost" if dtype.itemsize > 4 else "twice as many bytes cross the slow link"
        started = [found[number].events.count("issue all_reduce") for found in seen]
        if started == [1] * count + [0]:
            raise AnswerError(
                f"all-reduces started on rank {count}, the only replica of its shard: expected 1, got none\n"
                "likely slip: a replica that is alone reduces too: `finish_across` waits for a handle in any case"
            )
        if len(set(started)) > 1:
            raise AnswerError(
                f"all-reduces started on ranks 0 to {count}: expected one on each, got {started}\n"
                "likely slip: every replica has to take part, or those that do wait for ever"
            )
        for rank, found in enumerate(each[number] for each in seen):
            whole = torch.stack(means[:count] if rank < count else means[count:])
            whole = whole.double() if dtype == torch.float64 else whole.float()
            expect("what happened", found.events, ["issue all_reduce"], rank=rank, slip=why_started(found.events))
            expect(
                f"collectives (operation, group, bytes) of a mean in {str(dtype).removeprefix('torch.')}",
                found.calls,
                [("all_reduce", "the replicas", nbytes)],
                rank=rank,
                slips={
                    "the sharding group has had its turn: the reduce-scatter. The same shard is on the replicas": [
                        ("all_reduce", "the sharding group", nbytes)
                    ],
                    "the world has other shards, too: the same one is on `unit.replicas` only": [
                        ("all_reduce", "the world", nbytes)
                    ],
                    f"the mean goes as it is: in float32 {loss}": [("all_reduce", "the replicas", 4 * size)],
                },
            )
            expect("`unit.across` is the handle", found.has_handle, True, rank=rank, slip="nobody can wait for it")
            expect("`unit.mean` is the same buffer", found.same_buffer, True, rank=rank, slip="another costs bytes")
            expect("new attributes", found.kept, [], rank=rank, slip="what a unit keeps stays until the next step")
            expect(
                "the buffer is left alone while it is under way",
                found.left_alone,
                True,
                rank=rank,
                slip="what is divided before the wait may be divided before, during or after the sum",
            )
            expect(
                "`unit.mean` after the wait",
                found.mean,
                whole.mean(0).to(dtype),
                rank=rank,
                slips={
                    "a sum: every further host makes the step larger. Ask for `comm.MEAN`": whole.sum(0).to(dtype),
                    "divided by 2, whatever the number of replicas": (whole.sum(0) / 2).to(dtype),
                    "divided twice: `comm.MEAN` divides": (whole.mean(0) / len(whole)).to(dtype),
                    "a copy was reduced: `unit.mean` is as before": means[rank],
                },
                tolerance=tolerance,
            )
            expect("`.grad`", found.grad, torch.ones(size, dtype=dtype), rank=rank, slip="nothing is delivered yet")


# 11.4


class FakeHandle:
    """A reduction whose result is there once somebody waits."""

    def __init__(self, log, buffer, result):
        self.log, self.buffer, self.result = log, buffer, result

    def wait(self):
        self.log.append("wait")
        self.buffer.copy_(self.result)


class FakeUnit:
    def __init__(self, size, dtype=torch.float32):
        self.log = []
        self.across = self.mean = self.delivered = None
        self.replicas = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        self.group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        self.averaged_over = 4
        self.flat = SimpleNamespace(shard=nn.Parameter(torch.zeros(size, dtype=dtype)))
        self.flat.shard.grad = torch.ones(size, dtype=dtype)  # of an earlier micro-batch

    def begin(self, result):
        self.mean = torch.full_like(result, float("nan"))
        self.across = FakeHandle(self.log, self.mean, result)

    def deliver(self, mean):
        self.log.append("deliver" if isinstance(mean, torch.Tensor) else "deliver of what is no tensor")
        self.delivered = None
        if isinstance(mean, torch.Tensor):
            self.delivered = mean.dtype, mean.data_ptr()
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
        case ["wait", "deliver of what is no tensor"]:
            return "`wait` returns nothing: what it waited for is in `unit.mean`"
        case ["wait", "wait", *_]:
            return "what has been waited for once is there"
        case ["deliver"]:
            return "the mean is not there before `wait()`: what is delivered may be anything"
        case ["deliver", "wait"]:
            return "delivered first and waited for afterwards: the other way round"
    return None


@check("11.4")
def check_finish_across(answer, variant):
    """Waited for, delivered once, and forgotten; nothing where nothing is under way."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        check_finished(answer, variant.size, variant.seed, dtype)
    size = variant.size
    unit = FakeUnit(size)
    finished(answer, unit, "a unit that never had a reduction")
    unit.mean = torch.zeros(size)
    when = "a mean whose reduction has not started"
    log = finished(answer, unit, when)
    expect(f"{when}: what was called", log, [], slip="`unit.across` says what is under way")
    expect(f"{when}: it stays", unit.mean is not None, True, slip="what nobody has waited for is not to be forgotten")
    units = [FakeUnit(size) for _ in range(3)]
    for each in units:
        each.begin(torch.ones(size))
    for at in (1, 2, 0):
        log = finished(answer, units[at], f"unit {at} of three that are under way")
        slip = "a unit is finished by itself, in whatever order: keep nothing of one for another"
        expect(f"unit {at} of three that are under way: what was called", log, ["wait", "deliver"], slip=slip)


def check_finished(answer, size, seed, dtype):
    """Two reductions of a unit in a dtype, and a call with nothing under way after each."""
    unit, grad = FakeUnit(size, dtype), torch.ones(size, dtype=dtype)
    for number in (1, 2):
        result = torch.randn(size, generator=torch.Generator().manual_seed(seed + number)).to(dtype)
        unit.begin(result)
        buffer = unit.mean
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
        dtype, place = unit.delivered
        slip = "`.grad` takes no other dtype than its parameter's"
        expect(f"reduction {number}: dtype delivered", str(dtype), str(buffer.dtype), slip=slip)
        slip = "a copy is a second buffer, and `deliver` gives the memory of the copy away, not the mean's"
        expect(f"reduction {number}: `unit.mean` itself is delivered", place == buffer.data_ptr(), True, slip=slip)
        grad = grad + result
        forgotten = unit.across is None
        again = finished(answer, unit, "the next call, with nothing under way")
        expect(
            "the next call, with nothing under way: what was called",
            again,
            [],
            slip="nothing was waited for, so there is nothing to deliver: both belong under one condition"
            if forgotten
            else "what has been delivered is delivered twice: `unit.across` has to become None",
        )
        expect("`.grad` after it", unit.flat.shard.grad, grad)
        expect("`unit.across` is None", unit.across is None, True)
        expect(
            "`unit.mean` is None",
            unit.mean is None,
            True,
            slip="a name that stays keeps a buffer that has been given away",
        )


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


ALONE = (8, 4, 2)  # ranks, per host, factor: of a model that is one unit


@check("11.5")
def check_traffic(answer, variant):
    """What a rank sends to either group, and what leaves its host, is what its rings carry, for every F."""
    shards = [3 * variant.size + 1, 3 * variant.size + 6, 3, 9 + 3 * variant.seed]  # elements; 3 does not divide all
    for ranks, per_host, factor in (
        (24, 4, 2),
        (24, 4, 8),
        (24, 4, 4),
        (24, 4, 1),
        (24, 4, 24),
        (4, 4, 2),
        (4, 4, 4),
        (2 * variant.ranks, variant.ranks, variant.ranks),
        (18, 6, 3),
        (36, 6, 12),
        (6, 1, 2),
        (6, 1, 1),
        (12, 3, 1),
        (1, 1, 1),
        ALONE,
    ):
        units = [4 * factor * shard for shard in shards]  # padded for F, not for R
        if (ranks, per_host, factor) == ALONE:
            units = units[:1]
        whole = sum(units)
        given = list(units)
        got = answer(given, ranks, per_host, factor)
        sharding, replicas, leaves = walk(units, ranks, per_host, factor)
        setting = f"{ranks} ranks, {per_host} per host, F = {factor}" + ", the root alone" * (len(units) == 1)
        if getattr(got, "_fields", None) != ("sharding", "replicas", "leaves"):
            raise AnswerError(f"{setting}: expected a Traffic, `Traffic(...)`, got {type(got).__name__}")
        slip = "the list belongs to the caller, who may need it again: use `units[0]`, not `pop`"
        expect(f"{setting}: `units` afterwards", given, units, slip=slip)
        share, copies = (factor - 1) / factor, ranks // factor
        expect(
            f"{setting}: bytes to the sharding group",
            float(got[0]),
            sharding,
            slips={
                "the root is gathered once: it stays whole from forward to backward": share * 3 * whole,
                "every other unit is gathered twice, in forward and in backward": share * 2 * whole,
                "the root is the first of the units, not the largest": share * (3 * whole - max(units)),
                "the root is the first of the units, not the last": share * (3 * whole - units[-1]),
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
                "`//` drops what `/` keeps: R need not divide a shard": replicas // 1,
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
    silent = "replicas of a group inside a host are on other hosts" if factor < per_host else ""
    return {
        silent or "larger groups leave the host by their replica rings as well": 0.0 if silent else sharding,
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
    named_full: str = "with any factor between 1 and the largest it is hybrid"  # where it is called full sharding
    rest: float = 10.0


CASES = (
    Case(
        "the fastest needs too much memory",
        {1: 200.0, 8: 40.0, 4: 60.0, 2: 110.0},
        {1: 1.0, 8: 4.0, 4: 3.0, 2: 2.0},
        ("hybrid sharding", 4),
        "what does not fit cannot be chosen, however fast",
    ),
    Case(
        "a larger factor is faster than the smallest that fits",
        {16: 20.0, 1: 190.0, 2: 100.5, 4: 55.0, 8: 30.0},
        {16: 5.0, 1: 1.0, 2: 1.0, 4: 3.0, 8: 2.0},
        ("hybrid sharding", 8),
        "the smallest that fits is usually the fastest, and not always: ask `seconds`",
        "the largest factor is the largest number, not the last in the list",
    ),
    Case(
        "the largest factor does not fit, a smaller one does",
        {1: 150.0, 2: 60.0, 4: 120.0},
        {1: 3.0, 2: 2.0, 4: 1.0},
        ("hybrid sharding", 2),
        "ask `memory` of every factor: a larger one need not hold less",
        "full sharding is the largest factor there is, not the largest that fits",
    ),
    Case(
        "seconds that rise and fall again",
        {1: 180.0, 2: 90.0, 4: 60.0, 8: 40.0, 16: 25.0},
        {1: 1.0, 2: 3.0, 4: 4.0, 8: 2.0, 16: 5.0},
        ("hybrid sharding", 8),
        "ask `seconds` of every factor that fits: behind one that is not faster there may be one that is",
    ),
    Case(
        "factor 1 needs exactly the capacity",
        {2: 60.0, 1: 100.0, 4: 40.0},
        {2: 2.0, 1: 1.0, 4: 3.0},
        ("data parallelism", 1),
        "what is not more than the capacity fits",
    ),
    Case(
        "one rank",
        {1: 50.0},
        {1: 1.0},
        ("data parallelism", 1),
        "factor 1 goes by the name of data parallelism, though it be the largest, too",
    ),
    Case(
        "the smallest of the factors is 2, and the fastest",
        {8: 30.0, 2: 80.0, 4: 50.0},
        {8: 3.0, 2: 1.0, 4: 2.0},
        ("hybrid sharding", 2),
        "data parallelism is factor 1, not the smallest that is on the list",
    ),
    Case(
        "8 is the only factor",
        {8: 30.0},
        {8: 3.0},
        ("full sharding", 8),
        "the largest factor there is goes by the name of full sharding, though it be the smallest, too",
    ),
    Case(
        "two are equally fast",
        {8: 30.0, 4: 50.0, 2: 80.0, 1: 150.0},
        {8: 2.0, 4: 1.0, 2: 1.0, 1: 1.0},
        ("hybrid sharding", 2),
        "of equally fast ones the smallest, in whatever order the factors come",
    ),
    Case(
        "seconds that differ by thousandths",
        {1: 150.0, 2: 80.0, 4: 50.0, 8: 30.0},
        {1: 1.0, 2: 1.009, 4: 1.006, 8: 1.008},
        ("hybrid sharding", 4),
        "seconds have fractions: compare them as they are, neither rounded nor cut off",
    ),
    Case(
        "only the largest fits",
        {64: 22.0, 1: 800.0, 8: 110.0},
        {64: 3.0, 1: 1.0, 8: 2.0},
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
    Case(
        "nothing fits, and `rest` is half a byte less than the capacity",
        {1: 800.0, 2: 450.0, 4: 275.0},
        {1: 1.0, 2: 2.0, 4: 3.0},
        ("more ranks", None),
        "bytes per rank have fractions: compare them as they are, neither rounded nor cut off",
        rest=99.5,
    ),
)


@check("11.6")
def check_choose(answer, variant):
    """The fastest of those that fit; and where none fits, whether more ranks would help."""
    for case, unit in [(case, unit) for unit in (1.0, 8.0) for case in CASES]:
        factors = list(case.memory)
        memory = {factor: unit * nbytes for factor, nbytes in case.memory.items()}
        got = answer(factors, unit * 100.0, memory.__getitem__, case.seconds.__getitem__, unit * case.rest)
        if getattr(got, "_fields", None) != ("name", "factor"):
            what = f"expected a `Choice(...)`, got {type(got).__name__}"
            raise AnswerError(f"{case.says}: {what}\nlikely slip: {case.slip}")
        slips = {case.named_full: ("full sharding", case.wanted[1])} if case.wanted[0] == "hybrid sharding" else {}
        what = f"{case.says} (capacity {unit * 100:g}, rest {unit * case.rest:g})"
        slip = case.slip if unit == 1.0 else "how many bytes a device has is an argument: `capacity`"
        expect(what, tuple(got), case.wanted, slips=slips, slip=slip)
        slip = "`sort` changes the caller's list, `sorted` makes one"
        expect(f"{case.says}: `factors` afterwards", factors, list(case.memory), slip=slip)
