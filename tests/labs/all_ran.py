"""What ran when `make test-labs` last ran: of a lab that is so still CI runs a part.

The others of its tests are marked `rest`: `make test-course` and `make test-notebooks` leave them out.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

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


def digest(lab: str) -> str:
    """Of what decides what is said of the lab's wrong answers, but for the package: the sample is there for that."""
    beside = sorted(path for path in checks_of(lab).parent.glob("*.py") if not path.name.startswith("checks_"))
    texts = [path.read_text() for path in (checks_of(lab), *beside)]
    texts += [setup_of(lab), *(ref.source for ref in lab_references(lab))]
    texts += [text for each in wrong_answers(lab) for text in (each.words, each.source)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@cache
def is_as_when_all_ran(lab: str) -> bool:
    return json.loads(WHEN_ALL_RAN.read_text()).get(lab) == digest(lab)


def rest_of(lab: str, *, sampled: bool = False) -> list[pytest.MarkDecorator]:
    return [pytest.mark.rest] if is_as_when_all_ran(lab) and not sampled else []
