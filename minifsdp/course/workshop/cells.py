"""The cells of an answer, run as a notebook would run them, outside of it."""

from __future__ import annotations
import __future__

import linecache
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LAZY_ANNOTATIONS = __future__.annotations.compiler_flag  # a signature may name what only the notebook defines

_collected: dict[str, Callable[..., Any]] | None = None


def define(setup: str, cell: str, exercise: str) -> Callable[..., Any]:
    """Run the two cells as a notebook would, and return the exercise's function.

    Raises:
        ValueError: the cell does not define it under `@exercise`.
    """
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    with _collecting() as answers:
        for name, source in (("set-up cell", setup), (f"cell of exercise {exercise}", cell)):
            filename = f"<{name}>"
            linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
            exec(compile(source, filename, "exec", LAZY_ANNOTATIONS, dont_inherit=True), namespace)
    if exercise not in answers:
        raise ValueError(f'the cell has no function under @exercise("{exercise}")')
    return answers[exercise]


@contextmanager
def _collecting() -> Iterator[dict[str, Callable[..., Any]]]:
    global _collected
    before, _collected = _collected, {}
    try:
        yield _collected
    finally:
        _collected = before


def collect(exercise: str, function: Callable[..., Any]) -> bool:
    """Take the function of an exercise's cell, if it is `define` that runs the cell. Returns whether it is."""
    if _collected is not None:
        _collected[exercise] = function
    return _collected is not None


def last_lines(error: BaseException) -> str:
    """The exception, and the line of the learner's cell that raised it."""
    said = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    if isinstance(error, SyntaxError):
        line = (error.text or "").strip()
        advice = "; a check runs plain Python: leave out lines that begin with % or !" if line[:1] in "%!" else ""
        return f"{said} (line {error.lineno} of the {(error.filename or '')[1:-1]}: {line}){advice}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<")]
    where = f" (line {frames[-1].lineno} of the {frames[-1].filename[1:-1]}: {frames[-1].line})" if frames else ""
    return said + where
