"""Run a check's ranks as a subgroup of the world, so that an answer's `group` never happens to be the world.

One extra rank is started, rank 0, which takes no part. A check and the package see the others as the world:
`comm.world()` and torch's default group are those ranks. The learner's cell sees the real world, one rank larger, in
which every rank's number differs from its number in `group`.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch.distributed as dist

from minifsdp import comm, gloo
from minifsdp.course.workshop.comparing import AnswerError
from minifsdp.course.workshop.late import Seen, observed
from minifsdp.instruments.launch import RankError
from minifsdp.instruments.launch.world import Backend, choose_world

CELLS = ("<cell of exercise", "<set-up cell")  # file names that child.define gives to a learner's code
ANSWERS_OF_THE_WORLD = ("get_rank", "get_world_size", "get_global_rank", "get_group_rank", "get_process_group_ranks")


def has_room(ranks: int, backend: Backend | None) -> bool:
    """True if one more rank runs with the same backend; with exactly N GPUs it would not."""
    try:
        return choose_world(ranks, backend=backend).backend == choose_world(ranks + 1, backend=backend).backend
    except ValueError:
        return False


def in_a_part(observe: Callable[..., Any], args: tuple[Any, ...]) -> Seen:
    """Call `observe(*args)` on every rank except the first, as if those were the world. A collective call."""
    everyone = comm.world()
    group = dist.new_group(list(range(1, everyone.size())))
    if everyone.rank() == 0:
        return Seen(None)
    asked: list[str] = []
    with _default(group), _cells_see(everyone, asked), _refusing(everyone):
        try:
            seen = observed(observe, args)
        except Exception as error:
            if asked and "likely slip" not in str(error):
                error.add_note(f"likely slip: {slip_of(asked[0])}")
            raise
    return seen._replace(asked=slip_of(asked[0]) if asked else None)


def slip_of(asked: str) -> str:
    """The explanation for a rejected answer whose cell has called `asked`."""
    return f"`{asked}` is about the world; the ranks that take part are those of `group`, a part of it here"


def as_in_the_group(error: RankError) -> RankError:
    """The same error with ranks numbered within their group."""

    def less_one(match: re.Match[str]) -> str:
        return ", ".join(str(int(rank) - 1) for rank in match[0].split(", ") if rank != "0") or "none"

    numbers = r"((?<=^rank )|(?<=rank\(s\) )|(?<=finished: ))\d+(, \d+)*"
    failures = {rank - 1: text for rank, text in error.failures.items() if rank > 0}
    return RankError(re.sub(numbers, less_one, str(error)), failures)


@contextmanager
def _default(group: comm.Group) -> Iterator[None]:
    """Make `group` torch's default group."""
    before = comm.world()
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = before


@contextmanager
def _cells_see(everyone: comm.Group, asked: list[str]) -> Iterator[None]:
    """Answer a cell's queries of the world for `everyone`, and note them in `asked`."""

    def seeing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_code.co_filename.startswith(CELLS):
                return function(*args, **kwargs)
            if not (args or kwargs):
                asked.append(name)
            with _default(everyone):
                return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(comm, "world", seeing(comm.world, "comm.world()")))
        for name in ANSWERS_OF_THE_WORLD:
            function = seeing(getattr(dist, name), f"torch.distributed.{name}()")
            stack.enter_context(mock.patch.object(dist, name, function))
        yield


@contextmanager
def _refusing(everyone: comm.Group) -> Iterator[None]:
    """Make a collective on `everyone` raise when it is issued or connects ranks: rank 0 would never join it."""

    def refuse(call: comm.Call, phase: str) -> AbstractContextManager[None]:
        if call.group == everyone.group_name:
            raise refused(call.op)
        return nullcontext()

    def refused(op: str) -> AnswerError:
        return AnswerError(
            f"the group of the {op}: expected `group`, got the world\n"
            "likely slip: `group` need not be the world: the ranks outside of it take no part, and a collective of "
            "the world waits for them"
        )

    def of(group: comm.Group) -> gloo.Connections:
        if group is everyone:
            raise refused("collective")
        return connections(group)

    connections = gloo.Connections.of
    comm.observers.append(refuse)
    try:
        with mock.patch.object(gloo.Connections, "of", of):
            yield
    finally:
        comm.observers.remove(refuse)
