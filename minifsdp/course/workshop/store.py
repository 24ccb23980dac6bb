"""A learner's records in `.minifsdp/` next to the notebooks: passed answers, predictions, hints, reveals, scores.

One small file per exercise and kind, replaced atomically, so that several kernels in one folder do not interfere.
"""

from __future__ import annotations

import json
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from minifsdp.instruments.system.plain_files import read_plain
from minifsdp.instruments.system.whole_files import write_whole

LARGEST = 2**20  # bytes of a record
Kind = Literal["answers", "predictions", "hints", "reveals", "scores"]


class Store:
    """The records of one folder of notebooks.

    Args:
        folder: the notebooks' folder; by default the current folder, in which a notebook's kernel runs.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.root = (folder or Path.cwd()) / ".minifsdp"

    def read(self, kind: Kind, exercise: str) -> Any:
        """The record, or None if it is missing or unreadable."""
        try:
            record = json.loads(read_plain(self._file(kind, exercise), LARGEST))
        except (OSError, ValueError, RecursionError):
            return None
        return record if _is_sound(kind, record) else None

    def write(self, kind: Kind, exercise: str, record: Any) -> None:
        """Store a record. If the folder is not writable, print a warning once and continue without it."""
        file = self._file(kind, exercise)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(record, indent=1).encode())
        except OSError:
            _say_once(f"nothing can be written to {self.root}: answers, predictions and hints are not kept")

    def _file(self, kind: Kind, exercise: str) -> Path:
        return self.root / kind / f"{exercise}.json"


def _is_sound(kind: Kind, record: Any) -> bool:
    """True if a record has the type that `write` stores for this kind."""
    match kind:
        case "answers":
            return isinstance(record, dict) and all(isinstance(record.get(key), str) for key in ("setup", "cell"))
        case "predictions":
            return type(record) in (int, float)
        case "hints":
            return type(record) is int and record >= 0
        case "scores":
            return isinstance(record, list) and all(map(_is_score, record))
    return record is True


def _is_score(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or "seconds" not in entry:
        return False
    numbers = [value for key, value in entry.items() if key not in ("name", "problem", "when")]
    finite = all(type(number) in (int, float) and isfinite(number) for number in numbers)
    return finite and isinstance(entry.get("problem", 0), str | None)


@cache
def _say_once(text: str) -> None:
    print(text)
