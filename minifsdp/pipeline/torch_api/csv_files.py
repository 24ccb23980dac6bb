"""Plans in torch's files: one row for each rank, one action in a cell, empty cells for idle slots."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from minifsdp.pipeline.actions import Action, Kind, Slots
from minifsdp.pipeline.schedule import Schedule
from minifsdp.pipeline.stage import PipelineStage

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_ELSE = re.compile(r"\d+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|(SEND|RECV|WAIT_SEND)_[FB]\d+)")


def from_csv(
    path: Path, stages: PipelineStage | Sequence[PipelineStage], n_microbatches: int, **options: Any
) -> Schedule:
    """A schedule from a file in torch's format."""
    return Schedule(read_csv(path), stages, n_microbatches, **options)


def parse(text: str) -> list[Action]:
    """The actions in one cell; none if the cell is empty, or says something else than what to compute.

    Raises:
        ValueError: it is no action.
    """
    text = text.strip()
    if overlapped := _OVERLAPPED.fullmatch(text):  # torch computes both at the same time, we one after the other
        return [action for part in overlapped[1].split(";") for action in parse(part)]
    if found := _ACTION.fullmatch(text):
        return [Action(int(found[1]), cast(Kind, found[2]), int(found[3]))]
    if text and not _ELSE.fullmatch(text):
        raise ValueError(f"{text!r} is no action: write the stage, one of F, B, I, W, and the micro-batch, as in 2F0")
    return []


def read_csv(path: Path) -> list[list[Action]]:
    """Read a plan.

    Raises:
        ValueError: a cell holds no action; names its row and column.
    """
    with path.open(newline="") as file:
        return [list(_row(cells, f"{path.name}, rank {rank}")) for rank, cells in enumerate(csv.reader(file))]


def _row(cells: Iterable[str], where: str) -> Iterable[Action]:
    for column, cell in enumerate(cells):
        try:
            yield from parse(cell)
        except ValueError as error:
            raise ValueError(f"{where}, slot {column}: {error}") from None


def write_csv(slots: Slots, path: Path) -> None:
    """Write a plan, with or without idle slots, so that `read_csv` and torch's schedules read it."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([str(action or "") for action in row] for row in slots)
