"""Exercise 7.5: Compare the order."""

import re
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.late import link_of
from minifsdp.course.workshop.placing import Homes
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device


@reference(
    "7.5",
    hints=(
        "Every rank has to see every rank's number, or some would raise and some not. Numbers travel as any tensor "
        "does, on the device of the group.",
        "`comm.all_gather` of a tensor [1] with the number into one [N] of the same dtype, waited for; `.tolist()`; "
        "the first number that differs from rank 0's is the one to name.",
    ),
)
def check_order(number: int, names: list[str], group: Group, device: torch.device) -> None:
    """Raise an error on every rank unless all ranks are about to gather the same unit.

    Args:
        number: this rank's unit, as an index into `names`.
        names: the names of all units, the same on every rank.
        group: the participating ranks, either all ranks or a subset; `group.size()` is their number.
        device: the device on which tensors must be for a collective of this group.

    Use a single blocking all-gather of one int64 per rank: `comm.all_gather(output, shard, group)`, with output [N] and
    shard [1], both of the same dtype. Afterwards every rank knows all numbers.

    Raises:
        RuntimeError: on all ranks, with the same message. The message contains `rank r`, where r is the first rank
            whose number differs from rank 0's, and the names of the units that ranks r and 0 are about to gather. It
            mentions no rank but these two. Ranks are numbered within the group.
    """
    mine = torch.tensor([number], device=device)
    numbers = torch.empty(group.size(), dtype=mine.dtype, device=device)
    comm.all_gather(numbers, mine, group).wait()
    expected, *others = numbers.tolist()
    for rank, found in enumerate(others, start=1):
        if found != expected:
            raise RuntimeError(
                f"the order of units differs: rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}"
            )


NAMES = ["root", "encoder", "bridge", "decoder", "head"]
NUMBERS = {  # what each of three ranks, and those beyond as the third, is about to gather
    "all the same": [2, 2, 2],
    "the last rank differs": [1, 1, 3],
    "rank 1 differs": [3, 1, 3],
    "two ranks differ, and rank 0 has their mean": [2, 1, 3],
    "rank 0 stands alone": [4, 2, 2],
    "all the same again": [4, 4, 4],
}
IN_A_PART = "the same in a group of some of the ranks"  # rank 0 is in a group of its own
RANKS = 3  # at least: with two, each rank's own number tells it the other's from the sum


class Said(NamedTuple):
    """What an answer did on a rank.

    Attributes:
        error: what it raised.
        phases: its collectives, as they were issued and waited for.
        groups: whether each of them was of the group that was given.
        dtypes: of the tensors that they were given.
        payloads: their bytes.
        homeless: how many of those tensors were made without a word on where.
    """

    error: str | None
    phases: list[str]
    groups: list[bool]
    dtypes: list[str]
    payloads: list[int]
    homeless: int


class Wire:
    """Looks at the tensors of each collective, and lets it run."""

    def __init__(self, homes):
        self.homes, self.calls, self.tensors = homes, [], []

    def submit(self, call, collective):
        self.calls.append(call)
        self.tensors += [each for each in collective.args if isinstance(each, Tensor)]
        return collective()


def observe_order(answer):
    """In every scenario, what the answer did on this rank."""
    everyone = comm.world()
    parts = [dist.new_group([0]), dist.new_group(list(range(1, everyone.size())))]
    groups = dict.fromkeys(NUMBERS, everyone) | {IN_A_PART: parts[min(everyone.rank(), 1)]}
    return [observe_answer(answer, group, scenario) for scenario, group in groups.items()]


def numbers_of(scenario, ranks):
    several = NUMBERS.get(scenario, [4, 1])
    return [several[min(rank, len(several) - 1)] for rank in range(ranks)]


def observe_answer(answer, group, scenario):
    error, phases, homes = None, [], Homes(rank_device())
    wire = Wire(homes)

    @contextmanager
    def watcher(call, phase):
        phases.append(f"{phase} {call.op}")
        yield

    comm.observers.append(watcher)
    try:
        with homes, link_of(wire):
            answer(numbers_of(scenario, group.size())[group.rank()], list(NAMES), group, homes.device)
    except RuntimeError as raised:
        error = str(raised)
    except ValueError as raised:
        if " parts of " not in str(raised):  # then the all-gather refused its sizes, of which more is said below
            raise
        error = str(raised)
    finally:
        comm.observers.remove(watcher)
    comm.all_reduce(torch.zeros(1, device=homes.device), comm.world()).wait()
    return Said(
        error,
        phases,
        [call.group == group.group_name for call in wire.calls],
        [str(tensor.dtype) for tensor in wire.tensors],
        [call.payload for call in wire.calls],
        sum(map(homes.lacks, wire.tensors)),
    )


def collective_slip(phases):
    """What is wrong with the collectives of an answer."""
    issued = [phase for phase in phases if phase.startswith("issue")]
    if not issued:
        return "without a word from the others no rank can know that their order differs"
    if issued[0] in ("issue all_reduce", "issue reduce"):
        return (
            "of a reduction's result a rank that differs cannot be told, and not every rank sees that one does: gather"
        )
    if len(issued) > 1:
        return "one all-gather brings all numbers to all ranks"
    return "`comm.all_gather` only starts it: before the handle's `wait()` the numbers are not there"


def check_collective(what, said, ranks, rank):
    """One all-gather in the group given, of an int64 of each rank, on the device given, waited for."""
    phases = ["issue all_gather", "wait all_gather"]
    issued = [phase for phase in said.phases if phase.startswith("issue")]
    slip = collective_slip(said.phases)
    expect(what + "what was issued", issued, phases[:1], rank=rank, slip=slip)
    expect(
        what + "in the group given",
        said.groups,
        [True],
        rank=rank,
        slip="`group` need not be all ranks there are: those outside of it do not come to this all-gather",
    )
    expect(
        what + "dtypes of output and shard",
        said.dtypes,
        ["torch.int64"] * 2,
        rank=rank,
        slip="an index is an int64: smaller ones end, and floating point rounds what it cannot hold",
    )
    expect(
        what + "bytes gathered",
        said.payloads,
        [8 * ranks],
        rank=rank,
        slip="one int64 of each rank of `group` is enough, 8 bytes times `group.size()`",
    )
    expect(
        what + "tensors in the collective that were made without `device`",
        said.homeless,
        0,
        rank=rank,
        slip="on a GPU they would be in the host's memory, where NCCL cannot reach them",
    )
    expect(what + "what was issued and waited for", said.phases, phases, rank=rank, slip=slip)


@check("7.5")
def check_check_order(answer, variant):
    """One small all-gather; where the numbers differ all ranks raise, and say who differs and in what."""
    ranks = max(RANKS, variant.ranks)
    seen = on_ranks(
        ranks, observe_order, answer, timeout=8, slip="every rank has to take part, whatever it is about to gather"
    )
    for scenario, told in zip([*NUMBERS, IN_A_PART], zip(*seen, strict=True), strict=True):
        parts = [told] if scenario in NUMBERS else [told[:1], told[1:]]
        for part in parts:
            first = ranks - len(part) if len(parts) > 1 and part is parts[1] else 0
            for rank, said in enumerate(part, start=first):
                check_collective(f"{scenario}: ", said, len(part), rank)
            check_errors(scenario, numbers_of(scenario, len(part)), [said.error for said in part])


def check_errors(scenario, numbers, errors):
    """Every rank raises, or none, and the sentence names the first rank that differs, and both units."""
    differs = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
    for rank, error in enumerate(errors):
        what = f"{scenario} (units {', '.join(NAMES[number] for number in numbers)}): "
        if differs is None:
            expect(what + "error", error, None, rank=rank, slip="there is nothing wrong: all gather the same unit")
            continue
        expect(
            what + "raises RuntimeError",
            error is not None,
            True,
            rank=rank,
            slip="a rank that does not raise goes on alone, and waits in its next collective for those that did"
            if any(each is not None for each in errors)
            else "nobody has noticed: compare all the numbers with rank 0's",
        )
        for part, meaning in (
            (f"rank {differs}", "the first rank that differs from rank 0"),
            (NAMES[numbers[differs]], "what that rank is about to gather"),
            (NAMES[numbers[0]], "what rank 0 is about to gather"),
        ):
            if part not in error:
                raise AnswerError(
                    f"rank {rank}, {what}expected a sentence with `{part}` ({meaning}), got: {error}\n"
                    "likely slip: the message has to name the rank and both units"
                )
        others = set(re.findall(r"rank (\d+)", error)) - {"0", str(differs)}
        others |= {name for name in NAMES if name in error} - {NAMES[numbers[0]], NAMES[numbers[differs]]}
        if others:
            raise AnswerError(
                f"rank {rank}, {what}expected a sentence about rank 0 and rank {differs} alone, got: {error}\n"
                "likely slip: everyone's number is too much to read on many ranks: name the first that differs"
            )
    if differs is not None:
        expect(
            f"{scenario}: the sentence is the same on all ranks",
            errors,
            errors[:1] * len(errors),
            slip="all ranks know the same, so all can say the same",
        )
