"""Exercise 11.3: Reduce in two stages."""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import comm
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.reduction import Reduction
from minifsdp.instruments.launch import rank_device

from .shared import Replica


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
    """Start the reduction of `unit.mean` [P / F] over the replicas, in place, and store its handle in `unit.across`.

    After a wait on that handle, `unit.mean` is the mean of the replicas' means. Do not wait here,
    and deliver nothing.

    Use `comm.all_reduce(tensor, group, op)`, which returns a handle; `op` is `comm.SUM` by default, or `comm.MEAN`.
    """
    assert unit.mean is not None
    unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)


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
