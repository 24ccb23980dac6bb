"""What ran when `make test-labs` last ran: of a lab that is so still CI runs a part.

The others of its tests are marked `rest`: `make test-course` and `make test-notebooks` leave them out.

A lab is so still if its set-up, its references, its checks and its wrong answers are, and, for the exercises, the
definitions of the package that references and checks import (called.py). What those import from other files does not
count, or it would be all of the package: a change there is met by the part that runs, which has one wrong answer of
every exercise, and with each commit another. For the notebooks nothing of the package counts: as they are shipped all
of them run.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from zlib import crc32

import pytest
from called import PACKAGE, called, code_of

from minifsdp.course.workshop import wrong
from minifsdp.course.workshop.catalogue import checks_of, labs_folder, setup_of
from minifsdp.course.workshop.references import lab_of, lab_references
from minifsdp.course.workshop.wrong import Wrong

WHEN_ALL_RAN = Path(__file__).with_name("wrong_answers.json")


def module(path: Path) -> ModuleType:
    """A file of labs/ as a module that the ranks can import too."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


@cache
def wrong_answers(lab: str) -> list[Wrong]:
    file = labs_folder() / "wrong" / f"lab{lab}.py"
    if file.exists():
        module(file)
    return [each for each in wrong.collected if lab_of(each.exercise) == lab]


def digest(lab: str) -> dict[str, str]:
    """Of what decides what is said of the lab's wrong answers: its own texts, and what they call of the package."""
    beside = sorted(path for path in checks_of(lab).parent.glob("*.py") if not path.name.startswith("checks_"))
    checks = [path.read_text() for path in (checks_of(lab), *beside)]
    reference = (PACKAGE / "course" / "reference" / f"lab{lab}.py").read_text()
    calls = sorted(frozenset().union(*map(called, (*checks, reference))))
    texts = [*map(code_of, checks), setup_of(lab), *(ref.source for ref in lab_references(lab))]
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
