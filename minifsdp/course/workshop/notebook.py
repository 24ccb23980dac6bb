"""Exercises inside a notebook: run the learner's answer or the reference, check the answer, and give hints."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from minifsdp.course.needs import CHECKS_NEED, RANKS_USE
from minifsdp.course.workshop.catalogue import lab_of
from minifsdp.course.workshop.cells import collect, define
from minifsdp.course.workshop.hints import count_hint, next_hint, stub_of
from minifsdp.course.workshop.process import run_check
from minifsdp.course.workshop.references import find_reference, is_blank, lab_references
from minifsdp.course.workshop.store import Store
from minifsdp.course.workshop.submission import Submission
from minifsdp.course.workshop.verdict import Verdict
from minifsdp.instruments.plots import subtitle
from minifsdp.instruments.warm.client import server
from minifsdp.instruments.warm.needs import RANKS_NEED

BLANK = "not attempted, reference in use"
PASSED = "yours: passed"
FAILED = "yours: failed; the cells below use it all the same"
UNCHECKED = "yours: not checked; the cells below use it all the same"
LONGEST_PHASE = len("starting torch, once per notebook ... 119 s")

_submissions: dict[str, Submission] = {}  # by exercise, this notebook's answers that are not blank
_states: dict[str, str] = {}

if "ipykernel" in sys.modules:  # a notebook's set-up cell: while the learner reads, import what checks need
    with suppress(OSError):  # a check says why there is no server
        server.prepare((*CHECKS_NEED, *RANKS_NEED, *RANKS_USE))


def exercise(exercise_id: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function as the answer to an exercise.

    A stub is replaced by the reference, and a line says so. Any other function is checked in a fresh process and used
    from here on, whether or not it passes.

    Raises:
        ValueError: there is no such exercise, or the function has another name.
    """
    ref = find_reference(exercise_id)

    def choose(function: Callable[..., Any]) -> Callable[..., Any]:
        if collect(exercise_id, function):
            return function
        if function.__name__ != ref.name:
            raise ValueError(f"exercise {exercise_id} is called {ref.name}, not {function.__name__}")
        cell = _cell_source() or textwrap.dedent(inspect.getsource(function))
        _submissions.pop(exercise_id, None)
        if is_blank(cell, ref):
            _states[exercise_id] = BLANK
            print(f"{exercise_id} {ref.name}: {BLANK}")
            return ref.function
        _submissions[exercise_id] = Submission(exercise_id, _setup_source(lab_of(exercise_id)), cell)
        check(exercise_id)
        return function

    return choose


def check(exercise_id: str) -> None:
    """Check the answer in this notebook's cell, and print one of the three states."""
    ref = find_reference(exercise_id)
    submission = _submissions.get(exercise_id)
    if submission is None:
        print(f"{exercise_id} {ref.name}: {BLANK}")
        return
    verdict = run_check(submission, alive=partial(show_phase, exercise_id))
    _states[exercise_id] = state_of(verdict)
    print(record_verdict(submission, verdict, Store()))


def show_phase(exercise_id: str, doing: str) -> None:
    """Print what a check is doing; the next second's line or the verdict, which is longer, overwrites it."""
    print(f"{exercise_id} {stub_of(exercise_id).name}: {doing:{LONGEST_PHASE}}", end="\r", flush=True)


def state_of(verdict: Verdict) -> str:
    """The state of an answer as this module shows it."""
    return {"passed": PASSED, "unchecked": UNCHECKED}.get(verdict.state, FAILED)


def record_verdict(submission: Submission, verdict: Verdict, store: Store) -> str:
    """Store the answer if it passed; return the verdict as text for the learner."""
    if verdict.state == "passed":
        store.write("answers", submission.exercise, submission._asdict())
    return told(submission.exercise, verdict, store)


def told(exercise_id: str, verdict: Verdict, store: Store) -> str:
    """A verdict as text for the learner: state, errors and the next hint, which is not counted as requested."""
    head = f"{exercise_id} {stub_of(exercise_id).name}: {state_of(verdict)}"
    if verdict.state == "passed":
        return f"{head}. {verdict.text}"
    lines = [head, *verdict.text.splitlines()]
    if verdict.state == "unchecked":
        return "\n    ".join(lines)
    if "NameError" in verdict.text:
        lines.append("a check runs the set-up cell and this exercise's cell, nothing else: define what you need here")
    if "SyntaxError" not in verdict.text:
        lines.append(next_hint(exercise_id, store))
    return "\n    ".join(lines)


def hint(exercise_id: str) -> None:
    """Print the next of an exercise's two hints."""
    print(next_hint(exercise_id, Store()), flush=True)
    count_hint(exercise_id, Store())


def earlier(exercise_id: str) -> Callable[..., Any]:
    """An earlier lab's exercise: the learner's answer if it has passed its check in this folder, else the reference."""
    ref = find_reference(exercise_id)
    kept = Store().read("answers", exercise_id)
    if kept is None:
        print(f"{exercise_id} {ref.name}: {BLANK}")
        return ref.function
    print(f"{exercise_id} {ref.name}: {PASSED}, kept from lab {lab_of(exercise_id)}")
    return define(kept["setup"], kept["cell"], exercise_id)


def has_failed(exercise_id: str) -> bool:
    """True if this notebook runs the learner's answer and its check has rejected it."""
    return _states.get(exercise_id) == FAILED


def yours(lab: str) -> str:
    """The answers that a plot was made with, for its subtitle: `with your answers to 2 of 3 exercises; failed: 5.3`.

    Only exercises whose cells have run count: a plot in the middle of a lab uses no later ones.
    """
    ids = [ref.id for ref in lab_references(lab) if ref.id in _states]
    written = [each for each in ids if _states[each] != BLANK]
    failed = [each for each in written if has_failed(each)]
    if not written:
        return "with the reference answers"
    answers, exercises = ("answer" + "s" * (len(written) > 1)), ("exercise" + "s" * (len(ids) > 1))
    counted = f"with your {answers} to {len(written)} of {len(ids)} {exercises}"
    return counted + (f"; failed: {', '.join(failed)}" if failed else "")


subtitle.of_lab = yours


def _cell_source() -> str | None:
    """The text of the running cell, or None outside IPython."""
    history = _history()
    return history[-1] if history else None


def _setup_source(lab: str) -> str:
    """The set-up cell that this notebook ran last, or the shipped one if it ran none."""
    from minifsdp.course.workshop.catalogue import setup_of

    marked = [cell for cell in _history() if cell.lstrip().startswith(SETUP_MARK)]
    return marked[-1] if marked else setup_of(lab)


SETUP_MARK = "# set-up"
"""The first words of a lab's set-up cell; a kernel does not see tags."""


def _history() -> list[str]:
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return []
    shell: Any = get_ipython()
    return list(shell.history_manager.input_hist_raw) if shell is not None else []
