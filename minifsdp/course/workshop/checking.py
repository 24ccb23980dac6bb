"""The parts of a check: ranks to run the answer on, and comparisons whose failure explains itself.

A check is a function of an answer and a setting:

    @check("5.2")
    def check_gather(answer, variant):
        \"\"\"One all-gather; every rank holds all shards in rank order.\"\"\"        # what is said when it passes
        seen = on_ranks(variant.ranks, observe_gather, answer, variant.seed)
        for rank, found in enumerate(seen):
            expect("the gathered buffer", found.buffer, wanted, rank=rank, slips={"rank order": reversed_order})

The function given to `on_ranks` runs the answer and returns what it saw: values, bytes, the collective log. Comparing
is done here, in one place and in rank order, so that a wrong answer on one rank leaves no other rank waiting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from minifsdp.course.workshop import comparing, subgroup
from minifsdp.course.workshop.comparing import AnswerError, describe, expect, same
from minifsdp.course.workshop.late import Seen, observed
from minifsdp.course.workshop.references import Reference, definition_in, find_reference, forbidden
from minifsdp.instruments.launch import RankError, launch
from minifsdp.instruments.launch.world import Backend

__all__ = [
    "AnswerError",
    "Variant",
    "check",
    "checking",
    "describe",
    "examine",
    "expect",
    "find_check",
    "on_ranks",
    "same",
]

RANKS_SECONDS = 20.0  # seconds after which the ranks of a check count as stuck
ON_GPUS = 4  # times as long: fresh processes load kernels and libraries, and NCCL connects each new group


@dataclass(frozen=True)
class Variant:
    """The setting of a check; an instructor's own variants differ in it.

    Attributes:
        ranks: number of ranks, N.
        seed: of the data.
        size: what the check makes large or small, such as a number of elements.
    """

    ranks: int = 2
    seed: int = 0
    size: int = 7


Check = Callable[[Callable[..., Any], Variant], None]
"""Raises AnswerError if the answer is wrong; its docstring is the message for a right answer."""

_checks: dict[str, Check] = {}


def check(exercise: str) -> Callable[[Check], Check]:
    """Register the decorated function as the check of an exercise."""

    def register(function: Check) -> Check:
        if exercise in _checks:
            raise ValueError(f"there are two checks of {exercise}: {_checks[exercise].__name__}, {function.__name__}")
        _checks[exercise] = function
        return function

    return register


def find_check(exercise: str) -> Check:
    """The check of an exercise, which stands in its file below the reference.

    Raises:
        ValueError: there is no such exercise.
    """
    find_reference(exercise)
    return _checks[exercise]


def examine(exercise: str, answer: Callable[..., Any], variant: Variant) -> None:
    """Check an answer in this process.

    Raises:
        AnswerError: it is wrong.
        BaseException: whatever it raises.
    """
    check = find_check(exercise)
    with checking(exercise):
        check(answer, variant)
        if comparing.race:
            raise AnswerError(f"the values are right, but by chance\nlikely slip: {comparing.race}")


_under_check: Reference | None = None


@contextmanager
def checking(exercise: str) -> Iterator[None]:
    """While an exercise is checked its reference raises, here and on the ranks of `on_ranks`."""
    global _under_check
    before, _under_check = _under_check, find_reference(exercise)
    comparing.overriding = comparing.race = None
    try:
        with forbidden(_under_check):
            yield
    finally:
        _under_check, comparing.overriding, comparing.race = before, None, None


def on_ranks(
    ranks: int,
    observe: Callable[..., Any],
    *args: Any,
    timeout: float = RANKS_SECONDS,
    slip: str | None = None,
    backend: Backend | None = None,
) -> list[Any]:
    """`observe(*args)` on each of N ranks; what they returned, in rank order.

    Where the exercise's function has a parameter `group`, the N ranks are a part of the world (subgroup.py). A check
    needs no word of it: its `comm.world()` and torch's default group are those of the N ranks.

    Args:
        ranks: N.
        observe: runs the answer inside a rank; a function of the check's module.
        *args: its arguments.
        timeout: seconds after which the ranks count as stuck; `ON_GPUS` times as many on a machine with GPUs.
        slip: the likely reason why the ranks are stuck, or why gloo aborts one, if either happens.
        backend: as in `launch`; a check with a `Recorder` needs "gloo", which is where it can record.

    Raises:
        AnswerError: a rank raised, died, or did not come back.
    """
    exercise = _under_check.id if _under_check is not None else None
    part = _under_check is not None and _has_group(_under_check) and subgroup.has_room(ranks, backend)
    limit = timeout * (ON_GPUS if torch.cuda.device_count() else 1)
    try:
        found = launch(_observed, ranks + part, exercise, observe, args, part, timeout=limit, backend=backend)
    except RankError as error:
        raise AnswerError(_explained(subgroup.as_in_the_group(error) if part else error, slip)) from error
    found = found[part:]
    comparing.overriding = next((seen.asked for seen in found if seen.asked), comparing.overriding)
    comparing.race = next((seen.race for seen in found if seen.race), comparing.race)
    return [seen.returned for seen in found]


def _has_group(ref: Reference) -> bool:
    """By the text: while it is forbidden the function has another signature."""
    return any(argument.arg == "group" for argument in definition_in(ref.source, ref.name).args.args)


def _explained(error: RankError, slip: str | None) -> str:
    """The ranks' failure, with the line of the learner's cell."""
    lines = [re.sub(r" \([^()]*:\d+\)$", "", str(error)).replace("AnswerError: ", "")]  # the place may be one of ours
    first = next(iter(error.failures.values()), "")
    lines += first.partition("AnswerError: ")[2].splitlines()[1:]  # what `expect` says in a rank below: the slip
    said = re.search(r"^likely slip: .*$", first, re.MULTILINE)
    lines += [said[0]] if said and said[0] not in lines else []
    stuck = any("stuck here" in text for text in error.failures.values())
    for rank, text in sorted(error.failures.items()) if stuck else list(error.failures.items())[:1]:
        frames = re.findall(r'File "<cell.*?", line (\d+),.*\n +(.*)', text)
        for line, source in frames[:1] if stuck else frames[-1:]:
            lines.append(f"rank {rank} {'waits' if stuck else 'is'} in line {line} of your cell: {source}")
    if slip and (stuck or "SIGABRT" in lines[0]):  # gloo aborts a rank that receives more bytes than it expects
        lines.append(f"likely slip: {slip}")
    if "SIGSEGV" in lines[0]:  # a freed buffer has no memory behind its address
        lines.append("likely slip: memory freed by `device.free` was used again: keep no reference to it")
    return "\n".join(lines)


def _observed(exercise: str | None, observe: Callable[..., Any], args: tuple[Any, ...], part: bool) -> Seen:
    if exercise is None:
        return Seen(observe(*args))
    with forbidden(find_reference(exercise)):
        return subgroup.in_a_part(observe, args) if part else observed(observe, args)
