"""Wrong answers, kept to test the checks: each must be rejected, with the right words."""

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


collected: list[Wrong] = []


def wrong(exercise: str, words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a wrong answer."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        slip = inspect.getdoc(function) or ""
        collected.append(Wrong(exercise, words, function.__name__, written(function), slip))
        return function

    return register
