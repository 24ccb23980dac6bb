"""What was measured and is in git: the ladder's run for the decks, and what the labs print."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

SLIDES = Path(__file__).parents[1]
LABS = SLIDES.parent / "labs"


@cache
def ladder_run() -> Any:
    """The ladder's run, and the machine that it was on."""
    return json.loads((SLIDES / "measured.json").read_text())


def rungs() -> dict[str, dict[str, Any]]:
    """The ladder's, by name: bytes and messages are the same in every run, seconds are not."""
    return {rung["name"]: rung for rung in ladder_run()["rungs"]}


def told(lab: str, claim: str) -> list[str]:
    """The lines that a lab prints for a claim, from the notebook as it is given out."""
    (notebook,) = LABS.glob(f"lab{lab}_*.ipynb")
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if claim in cell["metadata"].get("tags", [])]
    return "".join(text for cell in cells for out in cell["outputs"] for text in out.get("text", [])).splitlines()
