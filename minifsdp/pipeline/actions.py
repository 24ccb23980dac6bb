"""Actions: the steps of one rank of a pipeline, written as in torch.distributed.pipelining.

    2F0   forward of micro-batch 0 through stage 2
    2B0   its backward
    2I0   the part of its backward that the stage before waits for: the gradient of the input
    2W0   the rest: the gradients of the weights

A plan has one list of actions for each rank. It says nothing about messages: an action's inputs arrive before it, and
its output leaves after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias, cast

Kind: TypeAlias = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One computation on one micro-batch."""

    stage: int
    kind: Kind
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"

    def __repr__(self) -> str:
        return str(self)


Plan: TypeAlias = Sequence[Sequence[Action]]
"""The actions of each rank, in order."""

Slots: TypeAlias = Sequence[Sequence[Action | None]]
"""A plan with idle time: of each rank the action in each slot, or None."""


def stages_of(actions: Iterable[Action]) -> list[int]:
    """The stages on a rank."""
    return sorted({action.stage for action in actions})


def homes_of(plan: Plan) -> dict[int, int]:
    """The rank of each stage."""
    return {action.stage: rank for rank, actions in enumerate(plan) for action in actions}


def check_complete(plan: Plan, stages: int, micros: int) -> None:
    """
    Raises:
        ValueError: a stage is on no rank or on two, or does not do each micro-batch exactly once; names the action.
    """
    home: dict[int, int] = {}
    for rank, actions in enumerate(plan):
        for stage in stages_of(actions):
            if home.setdefault(stage, rank) != rank:
                raise ValueError(f"stage {stage} is on rank {home[stage]} and on rank {rank}: a stage has one rank")
    if home.keys() != set(range(stages)):
        wrong = sorted(home.keys() ^ set(range(stages)))
        raise ValueError(f"the plan has stages {sorted(home)}, the model has {stages}: look at {wrong}")
    for rank, actions in enumerate(plan):
        _check_rank(rank, actions, micros)


def _check_rank(rank: int, actions: Sequence[Action], micros: int) -> None:
    counts = {action: actions.count(action) for action in actions}
    twice = [action for action, count in counts.items() if count > 1]
    beyond = [action for action in actions if action.micro >= micros]
    if twice or beyond:
        why = "twice" if twice else f"of a micro-batch that is not one of {micros}"
        raise ValueError(f"rank {rank} does {(twice or beyond)[0]} {why}")
    for stage in stages_of(actions):
        for micro in range(micros):
            did = "".join(kind for kind in "FBIW" if Action(stage, cast(Kind, kind), micro) in counts)
            if did not in ("FB", "FIW"):
                raise ValueError(
                    f"rank {rank} does {did or 'nothing'} for micro-batch {micro} of stage {stage}: it has to do F and "
                    "B, or F, I and W"
                )
