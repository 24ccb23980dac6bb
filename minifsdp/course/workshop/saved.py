"""Check an answer in a saved notebook exactly as the notebook itself does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from minifsdp.course.workshop.copies import answer_in
from minifsdp.course.workshop.hints import stub_of
from minifsdp.course.workshop.notebook import BLANK, record_verdict, show_phase
from minifsdp.course.workshop.process import run_check
from minifsdp.course.workshop.references import is_blank
from minifsdp.course.workshop.store import Store
from minifsdp.course.workshop.submission import Submission

POLL_SECONDS = 0.2


def check_saved(exercise: str, notebook: Path) -> tuple[str, bool]:
    """The text that the notebook would print, and True if the answer failed. An answer that passes is stored.

    Raises:
        ValueError: no such exercise, no notebook, not exactly one cell of that exercise in it, or an invalid MINIFSDP_
            environment variable.
        OSError: the file cannot be read.
    """
    stub, submission, store = stub_of(exercise), answer_in(notebook, exercise), Store(notebook.parent)
    if any(name.startswith("MINIFSDP_") for name in os.environ):  # otherwise torch need not be imported here
        from minifsdp.instruments.launch.world import forced_device

        forced_device()
    if is_blank(submission.cell, stub):
        return f"{exercise} {stub.name}: {BLANK}", False
    verdict = run_check(submission, alive=partial(show_phase, exercise) if sys.stdout.isatty() else lambda *_: None)
    return record_verdict(submission, verdict, store), verdict.state != "passed"


def saves(notebook: Path, exercises: Sequence[str]) -> Iterator[str]:
    """The exercises to check: at first all, and from then on, without an end, each whose answer a save has changed.

    Raises:
        ValueError, OSError: as for `check_saved`, at first; later a notebook that cannot be read is being saved.
    """
    before: dict[str, Submission] = {}
    read = None
    while True:
        with suppress(*([ValueError, OSError] if before else [])):
            if (stamp := _stamp(notebook)) is None or stamp != read:
                now = {exercise: answer_in(notebook, exercise) for exercise in exercises}
                changed = [exercise for exercise in exercises if now[exercise] != before.get(exercise)]
                before, read = now, stamp
                yield from changed
        time.sleep(POLL_SECONDS)


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Something that a save changes, and that costs less than reading; None if there is no file."""
    with suppress(OSError):
        found = file.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None
