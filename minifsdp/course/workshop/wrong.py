"""Answers kept to test the checks: wrong ones, each to be rejected with the right words, and right ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from minifsdp.course.workshop.references import written


class Wrong(NamedTuple):
    """A wrong answer to an exercise.

    Attributes:
        exercise: its id.
        words: what the rejection must contain.
        name: of the function, the same as the reference's.
        source: the function as text.
        slip: what is wrong, its docstring.
    """

    exercise: str
    words: str
    name: str
    source: str
    slip: str


class Right(NamedTuple):
    """A right answer to an exercise that is not the reference's.

    Attributes:
        exercise: its id.
        source: the function as text.
        way: what is different, its docstring.
    """

    exercise: str
    source: str
    way: str


collected: list[Wrong] = []
accepted: list[Right] = []


def wrong(exercise: str, words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a wrong answer."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        slip = inspect.getdoc(function) or ""
        collected.append(Wrong(exercise, words, function.__name__, written(function), slip))
        return function

    return register


def right(exercise: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as another right answer."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        accepted.append(Right(exercise, written(function), inspect.getdoc(function) or ""))
        return function

    return register
