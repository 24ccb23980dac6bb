"""A plan in virtual time: how long a step takes, how much of it is bubble, what is held, and whether it ends at all.

Every rank works through its list. An action begins when the one before it on the rank has ended and its inputs are
there; `seconds` says how long each kind takes. Nothing is sent, and no tensor is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeAlias

from minifsdp.pipeline.actions import Action, Plan, homes_of

Duration = Callable[[Action], float]


class Timed(NamedTuple):
    """An action with its beginning and end, in one unit of time."""

    action: Action
    start: float
    end: float


Rows: TypeAlias = Sequence[Sequence[tuple[Action, float, float]]]
"""The actions of each rank with their beginnings and ends, simulated or by the clock."""


def length_of(rows: Rows) -> float:
    """From the beginning of the first action to the end of the last one."""
    return max(end for row in rows for _, _, end in row) - min(start for row in rows for _, start, _ in row)


def bubble_of(rows: Rows) -> float:
    """The idle share of all ranks' time, of the whole step (not of the work, as (p - 1) / m counts it)."""
    busy = sum(end - start for row in rows for _, start, end in row)
    return 1 - busy / (len(rows) * length_of(rows))


@dataclass(frozen=True)
class Simulation:
    """A step in virtual time.

    Attributes:
        plan: the actions of each rank.
        start, end: of each action.
        held: by rank, the most micro-batches with activations on it at one moment; one that is held for two stages
            counts twice.
    """

    plan: Plan
    start: Mapping[Action, float]
    end: Mapping[Action, float]
    held: Sequence[int]

    @property
    def length(self) -> float:
        """The end of the last action."""
        return max(self.end.values())

    @property
    def rows(self) -> list[list[Timed]]:
        return [[Timed(each, self.start[each], self.end[each]) for each in actions] for actions in self.plan]

    @property
    def bubbles(self) -> list[float]:
        """The idle share of the step, by rank."""
        work = [sum(self.end[action] - self.start[action] for action in actions) for actions in self.plan]
        return [1 - each / self.length for each in work]

    @property
    def bubble(self) -> float:
        """See `bubble_of`."""
        return bubble_of(self.rows)

    def slots(self) -> list[list[Action | None]]:
        """The plan with idle slots, if every action has taken a whole number of time units: one cell for each unit."""
        rows: list[list[Action | None]] = [[None] * round(self.length) for _ in self.plan]
        for row, actions in zip(rows, self.plan, strict=True):
            for action in actions:
                row[round(self.start[action])] = action
        return rows


def simulate(plan: Plan, seconds: Mapping[str, float] | Duration, latency: float = 0.0) -> Simulation:
    """Work through a plan.

    Args:
        plan: complete (`actions.check_complete`).
        seconds: by kind, or of each action; {"F": 1, "B": 2, "I": 1, "W": 1} is usual.
        latency: of a message between two ranks.

    Raises:
        RuntimeError: a deadlock; names the action that each rank cannot begin, and what it waits for.
    """
    takes: Duration = seconds if callable(seconds) else lambda action: seconds[action.kind]
    homes = homes_of(plan)
    inputs = _Inputs(plan)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    clocks, positions = [0.0] * len(plan), [0] * len(plan)
    ready = set(range(len(plan)))
    while ready:
        rank = ready.pop()
        actions = plan[rank]
        while positions[rank] < len(actions):
            action = actions[positions[rank]]
            needed = inputs.of(action)
            if any(each not in end for each in needed):
                break
            arrivals = (end[each] + latency * (homes[each.stage] != rank) for each in needed)
            start[action] = max(clocks[rank], *arrivals, 0.0)
            clocks[rank] = end[action] = start[action] + takes(action)
            positions[rank] += 1
            ready |= {homes[stage] for stage in (action.stage - 1, action.stage + 1) if stage in homes}
    stuck = {rank: plan[rank][at] for rank, at in enumerate(positions) if at < len(plan[rank])}
    if stuck:
        waits = "; ".join(
            f"rank {rank} cannot begin {action}, which needs {_listed(a for a in inputs.of(action) if a not in end)}"
            for rank, action in stuck.items()
        )
        raise RuntimeError(f"the plan is a deadlock: {waits}")
    return Simulation(plan, start, end, [most_held(actions) for actions in plan])


def replay(rows: Rows) -> Simulation:
    """A step by the clock once more, with every action of a stage and kind at its median time, and no latency."""
    times: dict[tuple[int, str], list[float]] = {}
    for action, start, end in (each for row in rows for each in row):
        times.setdefault((action.stage, action.kind), []).append(end - start)
    return simulate([[action for action, _, _ in row] for row in rows], lambda a: median(times[a.stage, a.kind]))


def _listed(actions: Iterable[Action]) -> str:
    return " and ".join(str(action) for action in actions)


class _Inputs:
    """The actions on any rank that have to come before an action."""

    def __init__(self, plan: Plan) -> None:
        self.actions = {action for actions in plan for action in actions}
        self.last = max(action.stage for action in self.actions)

    def of(self, action: Action) -> list[Action]:
        stage, kind, micro = action
        if kind == "F":
            return [Action(stage - 1, "F", micro)] if stage else []
        if kind == "W":
            return [Action(stage, "I", micro)]
        here = Action(stage, "F", micro)
        return [here] if stage == self.last else [here, self.gradient_of(stage + 1, micro)]

    def gradient_of(self, stage: int, micro: int) -> Action:
        """The action that makes the gradient of a stage's input."""
        whole = Action(stage, "B", micro)
        return whole if whole in self.actions else Action(stage, "I", micro)


def most_held(actions: Iterable[Action]) -> int:
    """The most micro-batches whose activations a rank holds: from F to B, or to W where backward is in two parts."""
    held = most = 0
    for action in actions:
        held += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, held)
    return most
