"""What a learner has done, kept in `.minifsdp/` beside the notebooks: answers that passed, predictions, hints, reveals.

One small file per exercise and kind, replaced whole, so that several kernels in one folder do not disturb each other.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

Kind = Literal["answers", "predictions", "hints", "reveals"]


class Store:
    """The records of one folder of notebooks.

    Args:
        folder: where the notebooks are; by default the current folder, where a notebook's kernel runs.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.root = (folder or Path.cwd()) / ".minifsdp"

    def read(self, kind: Kind, exercise: str) -> Any:
        """The record, or None."""
        try:
            return json.loads(self._file(kind, exercise).read_text())
        except (OSError, json.JSONDecodeError):
            return None

    def write(self, kind: Kind, exercise: str, record: Any) -> None:
        """Keep a record. Where the folder cannot be written to, nothing is kept, and the lab goes on."""
        file = self._file(kind, exercise)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
                json.dump(record, part, indent=1)
            os.replace(part.name, file)
        except OSError:
            return

    def _file(self, kind: Kind, exercise: str) -> Path:
        return self.root / kind / f"{exercise}.json"
