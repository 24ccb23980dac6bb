"""The labs as they are shipped: their notebooks, set-up cells and checks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import minifsdp

SETUP = "setup"  # the tag of a lab's set-up cell
EXERCISE = "exercise-"  # what the tag of an exercise's cell begins with; its id follows


def labs_folder() -> Path:
    """The folder `labs` of this checkout or installation."""
    return Path(minifsdp.__file__).parents[1] / "labs"


def checks_of(lab: str) -> Path:
    """The pytest file with a lab's checks."""
    return labs_folder() / "checks" / f"test_lab{lab}.py"


@cache
def shipped_notebook(lab: str) -> Path:
    """The notebook of a lab ("05").

    Raises:
        ValueError: there is no such lab; names those that there are.
    """
    found = sorted(labs_folder().glob(f"lab{lab}_*.ipynb"))
    if not found:
        labs = ", ".join(path.name[3:5] for path in sorted(labs_folder().glob("lab*.ipynb"))) or "none"
        raise ValueError(f"there is no lab {lab!r}: choose from {labs}")
    return found[0]


def setup_of(lab: str) -> str:
    """The set-up cell of a lab, as text."""
    return source_of(cells_with(read_cells(shipped_notebook(lab)), SETUP)[0])


def read_cells(notebook: Path) -> list[dict[str, Any]]:
    """The cells of a saved notebook.

    Raises:
        ValueError: the file is not a notebook.
        OSError: it cannot be read.
    """
    try:
        cells = json.loads(notebook.read_text())["cells"]
        return [dict(cell) for cell in cells]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise ValueError(f"{notebook} is not a notebook: give a saved .ipynb file") from None


def cells_with(cells: list[dict[str, Any]], tag: str) -> list[dict[str, Any]]:
    """The cells that carry a tag."""
    return [cell for cell in cells if tag in cell.get("metadata", {}).get("tags", [])]


def source_of(cell: dict[str, Any]) -> str:
    """A cell's text; in the file it may be a list of lines."""
    return "".join(cell["source"])
