"""What ran when `make test-labs` last ran: of a lab that is so still CI runs a part.

The others of its tests are marked `rest`: `make test-course` and `make test-notebooks` leave them out.

A lab is so still if its set-up, its references, its checks and its wrong answers are, and, for the exercises, the files
of the package that references and checks import from. What those files import does not count, or it would be all of the
package: a change there is met by the part that runs, which has one wrong answer of every exercise, and with each commit
another. For the notebooks no file of the package counts: as they are shipped all of them run.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from zlib import crc32

import pytest

import minifsdp
from minifsdp.course.workshop import wrong
from minifsdp.course.workshop.catalogue import checks_of, labs_folder, setup_of
from minifsdp.course.workshop.references import lab_of, lab_references
from minifsdp.course.workshop.wrong import Wrong

WHEN_ALL_RAN = Path(__file__).with_name("wrong_answers.json")
PACKAGE = Path(minifsdp.__file__).parent


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
    """Of what decides what is said of the lab's wrong answers: its own texts, and the called files of the package."""
    beside = sorted(path for path in checks_of(lab).parent.glob("*.py") if not path.name.startswith("checks_"))
    checks = [path.read_text() for path in (checks_of(lab), *beside)]
    reference = (PACKAGE / "course" / "reference" / f"lab{lab}.py").read_text()
    called = sorted({file for text in (*checks, reference) for file in imported(text)})
    texts = [*checks, setup_of(lab), *(ref.source for ref in lab_references(lab))]
    texts += [text for each in wrong_answers(lab) for text in (each.words, each.source)]
    return {"lab": hash_of(texts), "called": hash_of([file.read_text() for file in called])}


def hash_of(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def imported(text: str) -> Iterator[Path]:
    """The files of the package in which that is defined which a text imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name:
            module = importlib.import_module(str(node.module))
            yield from (Path(str(defining(module, name.name).__file__)) for name in node.names)


def defining(module: ModuleType, name: str) -> ModuleType:
    """The module of the package that defines what another has under this name; the other itself for a constant."""
    if not hasattr(module, name):
        return importlib.import_module(f"{module.__name__}.{name}")
    value = getattr(module, name)
    of = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None) or ""
    return sys.modules[of] if of.startswith(f"{PACKAGE.name}.") else module


@cache
def is_as_when_all_ran(lab: str, *parts: str) -> bool:
    then, now = json.loads(WHEN_ALL_RAN.read_text()).get(lab, {}), digest(lab)
    return all(then.get(part) == now[part] for part in parts)


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
