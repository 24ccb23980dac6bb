"""What ran when `make test-labs` last ran: of a lab that is so still CI runs a part.

The others of its tests are marked `rest`: `make test-course` and `make test-notebooks` leave them out.

A lab is so still if its set-up, its exercises and their wrong answers are, and, for the exercises, the definitions of
the package that they import (called.py). What those import from other files does not count, or it would be all of the
package: a change there is met by the part that runs, which has one wrong answer of every exercise, and with each commit
another. For the notebooks nothing of the package counts: as they are shipped all of them run.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
from functools import cache
from pathlib import Path
from zlib import crc32

import pytest
from called import called, code_of

from minifsdp.course.workshop import wrong
from minifsdp.course.workshop.catalogue import exercise_files, folder_of, lab_of, setup_of
from minifsdp.course.workshop.wrong import Wrong

WHEN_ALL_RAN = Path(__file__).with_name("wrong_answers.json")


def load(path: Path) -> None:
    """Import a file of a lab's folder."""
    importlib.import_module(f"minifsdp.answers.{path.parent.name}.{path.stem}")


@cache
def wrong_answers(lab: str) -> list[Wrong]:
    for file in exercise_files(lab).values():
        load(file.with_stem(f"{file.stem}_wrong"))
    return [each for each in wrong.collected if lab_of(each.exercise) == lab]


def digest(lab: str) -> dict[str, str]:
    """Of what decides what is said of the lab's wrong answers: its own texts, and what they call of the package."""
    files = [*exercise_files(lab).values(), *folder_of(lab).glob("shared.py")]
    own = [file.read_text() for file in files]
    calls = sorted(frozenset().union(*map(called, own)))
    texts = [*map(code_of, own), setup_of(lab)]
    texts += [text for each in wrong_answers(lab) for text in (each.words, each.source)]
    return {"lab": hash_of(texts), "called": hash_of(calls)}


def hash_of(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@cache
def changed(lab: str) -> set[str]:
    """The parts of a lab that are not as they were when all ran."""
    then, now = json.loads(WHEN_ALL_RAN.read_text()).get(lab, {}), digest(lab)
    return {part for part in now if now[part] != then.get(part)}


def is_as_when_all_ran(lab: str, *parts: str) -> bool:
    return changed(lab).isdisjoint(parts)


def rest_of(lab: str, *parts: str, sampled: bool = False) -> list[pytest.MarkDecorator]:
    """The mark of a test that need not run while these parts of the lab's digest are as they were."""
    return [pytest.mark.rest] if is_as_when_all_ran(lab, *parts) and not sampled else []


@cache
def commit_seconds() -> int:
    """When the commit that is checked out was made; 0 outside a repository."""
    command = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return int(done.stdout.strip() or 0)


def draw(exercise: str, number: int) -> int:
    """Which of an exercise's so many wrong answers has its turn: each commit draws anew, and alike on all machines."""
    return (commit_seconds() + crc32(exercise.encode())) % number
