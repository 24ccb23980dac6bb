"""A learner's progress, read from the saved notebooks and the records in `.minifsdp/`; nothing is run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from minifsdp.course.workshop.catalogue import EXERCISE, Stub, all_labs, cells_with, read_cells, source_of, stubs_of
from minifsdp.course.workshop.copies import copies, find_copy
from minifsdp.course.workshop.references import is_blank
from minifsdp.course.workshop.store import Store

BLANK = "not attempted"
WRITTEN = "not passed"
PASSED = "passed"
CHANGED = "changed since"
MISSING = "no such cell"


class Standing(NamedTuple):
    """One exercise in one folder.

    Attributes:
        state: one of the constants above.
        hints: number of hints shown.
        read: True if the reference was revealed.
        prediction: the number predicted, or None.
    """

    exercise: str
    name: str
    state: str
    hints: int
    read: bool
    prediction: float | None


def standings(folder: Path) -> dict[str, list[Standing] | str]:
    """The state of each exercise, by lab; or the reason that it is unknown.

    Raises:
        ValueError: there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name the folder with your notebooks")
    found: dict[str, list[Standing] | str] = {}
    for lab in all_labs():
        try:
            found[lab] = _lab(lab, folder) if copies(lab, folder) else "not started"
        except (ValueError, OSError) as error:
            found[lab] = str(error)
    return found


def _lab(lab: str, folder: Path) -> list[Standing]:
    cells, store = read_cells(find_copy(lab, folder)), Store(folder)
    found = []
    for exercise, stub in stubs_of(lab).items():
        mine = [source_of(cell) for cell in cells_with(cells, EXERCISE + exercise)]
        standing = Standing(
            exercise,
            stub.name,
            state=_state(mine, stub, store.read("answers", exercise)),
            hints=store.read("hints", exercise) or 0,
            read=store.read("reveals", exercise) is not None,
            prediction=store.read("predictions", exercise),
        )
        found.append(standing)
    return found


def _state(cells: list[str], stub: Stub, kept: dict[str, str] | None) -> str:
    """The state of an exercise; `kept` is the answer that passed last."""
    if len(cells) != 1:
        return MISSING
    if is_blank(cells[0], stub):
        return BLANK
    if kept is None:
        return WRITTEN
    return PASSED if kept["cell"].strip() == cells[0].strip() else CHANGED
