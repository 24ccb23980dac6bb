"""Answers that test the checks: wrong ones, which must be rejected with the right words, and right ones."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from minifsdp.course.workshop.references import find_reference, written


class Wrong(NamedTuple):
    """A wrong answer to an exercise.

    Attributes:
        exercise: its id.
        words: text that the rejection must contain.
        name: the function's name, the same as the reference's.
        source: the function as text.
        slip: the mistake, which is also the docstring.
    """

    exercise: str
    words: str
    name: str
    source: str
    slip: str


class Right(NamedTuple):
    """A right answer to an exercise, different from the reference.

    Attributes:
        exercise: its id.
        source: the function as text.
        way: the difference, which is also the docstring.
    """

    exercise: str
    source: str
    way: str


FIND, TAKE, PUT, NEXT = "  ", "- ", "+ ", ""  # prefixes of a diff's lines

collected: list[Wrong] = []
accepted: list[Right] = []


class Entry(NamedTuple):
    """A wrong answer without its text yet: decorate a function, or call `diff`.

    Attributes:
        exercise: its id.
        words: text that the rejection must contain.
    """

    exercise: str
    words: str

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the decorated function, whose algorithm differs from the reference's. Its docstring is the slip."""
        slip = inspect.getdoc(function) or ""
        collected.append(Wrong(self.exercise, self.words, function.__name__, written(function), slip))
        return function

    def diff(self, text: str) -> None:
        """Register the reference with some of its lines swapped.

        Args:
            text: the slip in one or more lines, then the swaps. Each is a run of whole lines of `bare(reference)`, at
                any indentation: "  " before a line to find, "- " before a line to remove, then "+ " before a line to
                insert. The next swap begins after the last "+ ", or after an empty line.

        Raises:
            ValueError: a swap's lines are missing from the reference, occur twice or stay the same; or two swaps
                have a line in common. The message names the exercise and the slip.
        """
        given = text.strip("\n").splitlines()
        begin = next((i for i, line in enumerate(given) if line[:2] in (FIND, TAKE, PUT, NEXT)), len(given))
        slip = "\n".join(given[:begin])
        ref = find_reference(self.exercise)
        lines = bare(ref.source).splitlines()
        try:
            if not (swaps := _swaps(given[begin:])):
                raise ValueError("it swaps nothing")
            taken = sorted((_place(lines, swap), swap) for swap in swaps)
            for (place, swap), (following, _) in pairwise(taken):
                if place + len(swap.found) > following:
                    raise ValueError(f"two swaps have this line in common:\n{lines[following]}")
        except ValueError as error:
            raise ValueError(f"the wrong answer to {self.exercise} with the slip {slip!r}: {error}") from None
        for place, swap in reversed(taken):
            shift = _indent(lines[place]) - _indent(swap.found[0])
            lines[place : place + len(swap.found)] = [
                " " * (_indent(line) + shift) + line.lstrip() for line in swap.put
            ]
        lines.insert(1, f'    """{slip}"""')
        collected.append(Wrong(self.exercise, self.words, ref.name, "\n".join(lines) + "\n", slip))


def wrong(exercise: str, words: str) -> Entry:
    """Declare a wrong answer: `@wrong(...)` above a function, or `wrong(...).diff(...)` for an edited reference."""
    return Entry(exercise, words)


@cache
def bare(source: str) -> str:
    """A function without docstring, annotations, asserts and empty lines, and with its signature on one line.

    Wrong answers are written in this form. The asserts, like the annotations, serve only mypy.

    Raises:
        SyntaxError: the source is not Python.
    """
    lines: list[str | None] = [line if line.strip() else None for line in source.splitlines()]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            first = node.body[ast.get_docstring(node) is not None]
            decorators = first.decorator_list if isinstance(first, ast.FunctionDef) else []
            begin, end = node.lineno - 1, min([first.lineno, *(each.lineno for each in decorators)]) - 1
            for arg in ast.walk(node.args):
                if isinstance(arg, ast.arg):
                    arg.annotation = None
            lines[begin:end] = [None] * (end - begin)
            lines[begin] = f"{' ' * node.col_offset}def {node.name}({ast.unparse(node.args)}):"
        elif isinstance(node, ast.AnnAssign):
            line = source.splitlines()[node.lineno - 1].encode()
            rest = line[: node.target.end_col_offset] + line[node.annotation.end_col_offset :]
            lines[node.lineno - 1] = rest.decode() if node.value else None
        elif isinstance(node, ast.Assert):
            lines[node.lineno - 1] = None
    return "".join(f"{line}\n" for line in lines if line is not None)


class _Swap(NamedTuple):
    """Lines to find, and the lines that replace them."""

    found: list[str]
    put: list[str]


def _swaps(lines: list[str]) -> list[_Swap]:
    """Parse a diff's lines into swaps."""
    swaps: list[_Swap] = []
    before = NEXT
    for line in lines:
        mark, code = line[:2], line[2:]
        if mark not in (FIND, TAKE, PUT, NEXT):
            raise ValueError(f"{line!r} is in the swaps without a mark")
        if mark and (before == NEXT or (before == PUT and mark != PUT)):
            swaps.append(_Swap([], []))
        if mark in (FIND, TAKE):
            swaps[-1].found.append(code)
        if mark in (FIND, PUT):
            swaps[-1].put.append(code)
        before = mark
    return swaps


def _place(lines: list[str], swap: _Swap) -> int:
    """The index in `lines` at which a swap's lines are found."""
    found = "\n".join(swap.found)
    if not swap.found:
        raise ValueError(f"after which line of the reference does this stand?\n{swap.put[0]}")
    if swap.found == swap.put:
        raise ValueError(f"this swap changes nothing:\n{found}")
    size, wanted = len(swap.found), textwrap.dedent(found)
    places = [i for i in range(len(lines)) if textwrap.dedent("\n".join(lines[i : i + size])) == wanted]
    if len(places) != 1:
        raise ValueError(f"{len(places)} places in the reference have these lines, not one:\n{found}")
    return places[0]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def right(exercise: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as another right answer."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        accepted.append(Right(exercise, written(function), inspect.getdoc(function) or ""))
        return function

    return register
