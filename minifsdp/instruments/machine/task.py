"""An open task: the schedule with the fastest step on a simulated GPU, in a given memory.

    result = try_schedule(MySchedule)
    result.problem or f"{1e3 * result.seconds:.1f} ms, {result.reserved / 2**30:.2f} GiB"

The model is T5-11B-like (shapes.py) on 16 GPUs, where gathering and computing take about equally long, so that no
schedule hides everything. Nothing here is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

from minifsdp.fsdp import RateLimitedSchedule, SyncSchedule
from minifsdp.instruments.machine.program import STEP, Issue, Mark, Program
from minifsdp.instruments.machine.replay import Run, replay
from minifsdp.instruments.machine.shapes import SHAPES, MakeSchedule, seconds, with_limiter

SHAPE = SHAPES["T5-11B-like"]
LIMIT = 8 * 2**30  # bytes that the allocator may reserve
_ROOMY = 2**50  # bytes of a device on which nothing runs out

OURS: dict[str, MakeSchedule] = {
    "one thing at a time": SyncSchedule,
    "torch's defaults: k = 2, one ahead": with_limiter(),
    "k = 3, two ahead": partial(RateLimitedSchedule, depth=2, limit=3),
}


@dataclass(frozen=True)
class Result:
    """The result of a schedule.

    Attributes:
        seconds: of a step; the mean of all but the first.
        reserved: bytes at the peak.
        problem: the reason why it does not count; None if it does.
        run: the simulated run.
        bound: seconds that no schedule goes below: the busier of device and link, without a gap.
    """

    seconds: float
    reserved: int
    problem: str | None
    run: Run
    bound: float


def try_schedule(schedule: MakeSchedule) -> Result:
    """Record the task's model under a schedule, and replay it.

    Args:
        schedule: makes the schedule from the list of units, as FSDP's argument of that name.

    Raises:
        RuntimeError: a unit computes that is not whole.
    """
    program = SHAPE.record(schedule)
    run = replay(program, replace(SHAPE.device, capacity=_ROOMY))
    return Result(seconds(run), run.peak("reserved"), _left_out(program) or _problem(run), run, _bound(program, run))


def ours() -> dict[str, Result]:
    """The results of minifsdp's schedules and of torch's defaults."""
    return {name: _tried(name) for name in OURS}


@cache
def _tried(name: str) -> Result:
    return try_schedule(OURS[name])


def _left_out(program: Program) -> str | None:
    """The units that the last step has not gathered or not reduced: no such program trains."""
    begin = max(at for at, each in enumerate(program.instructions) if each == Mark(STEP))
    units = {each.unit for each in program.instructions if isinstance(each, Issue)}
    issued = {(each.call.op, each.unit) for each in program.instructions[begin:] if isinstance(each, Issue)}
    undone = {
        "all_gather": "a step has not gathered {}: never freed, it still has the values of an earlier step",
        "reduce_scatter": "a step has not reduced {}",
    }
    for op, says in undone.items():
        if missing := sorted(unit for unit in units if (op, unit) not in issued):
            return says.format(", ".join(missing))
    return None


def _problem(run: Run) -> str | None:
    if run.hazards:
        return f"{len(run.hazards)} hazards, first: {run.hazards[0].text}"
    if run.peak("reserved") > LIMIT:
        return f"reserves {run.peak('reserved') / 2**30:.2f} GiB of {LIMIT / 2**30:.0f}"
    return None


def _bound(program: Program, run: Run) -> float:
    steps = program.instructions.count(Mark(STEP))
    lanes = {"compute": 0.0, "communication": 0.0}
    for span in run.spans:
        for lane in lanes:
            lanes[lane] += span.duration * span.lane.startswith(lane)
    return max(lanes.values()) / steps
