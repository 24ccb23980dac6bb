"""Measurements that are in git: the ladder's runs for the decks, what the labs print, and a record of a GPU."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from minifsdp.course.ladder.measure import Settings

SLIDES = Path(__file__).parents[1]
LABS = SLIDES.parent / "labs"
RECORD = SLIDES.parent / "benchmarks" / "records" / "nvidia-h100-80gb-hbm3-x1.json"


@cache
def ladders_gpt() -> str:
    """The model of these runs, in words."""
    settings = Settings()
    size = sum(p.numel() for p in settings.model().parameters())
    return f"the ladder's GPT ({settings.layers} blocks of width {settings.width}, {size / 1e6:.1f} M parameters)"


@cache
def rungs(ranks: int = 2) -> dict[str, dict[str, Any]]:
    """The ladder's bytes and messages, by rung, as measure.py wrote them."""
    runs: Any = json.loads((SLIDES / "measured.json").read_text())["runs"]
    (run,) = (each for each in runs if each["ranks"] == ranks)
    return {rung["name"]: rung for rung in run["rungs"]}


@cache
def recorded() -> dict[str, Any]:
    """The parts of the record of one H100 that two ranks share, as `make gpu-check` wrote them."""
    parts: dict[str, Any] = json.loads(RECORD.read_text())["parts"]
    return parts


def told(lab: str, claim: str) -> list[str]:
    """The lines that a lab prints for a claim, from the notebook as it is given out."""
    (notebook,) = LABS.glob(f"lab{lab}_*.ipynb")
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if claim in cell["metadata"].get("tags", [])]
    return "".join(text for cell in cells for out in cell["outputs"] for text in out.get("text", [])).splitlines()
