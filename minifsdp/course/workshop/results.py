"""Results of a notebook run, saved after every cell: the notebook with its outputs, figures, traces and a record."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from minifsdp.course.workshop.catalogue import EXERCISE, facts_of, tags_of
from minifsdp.course.workshop.notebook import FAILED, PASSED
from minifsdp.course.workshop.references import is_blank, lab_references
from minifsdp.instruments.system.plain_files import read_plain
from minifsdp.instruments.system.whole_files import write_whole

RECORD = "record.json"
LARGEST = 2**24  # bytes of a record
NOT_RUN, RUNNING, RAN = "not run", "running", "ran"
BLANK = "blank"


class Results:
    """The results of one run, in a folder; complete files at any time, even after the run is killed.

    Args:
        lab: such as "05".
        source: the learner's saved notebook.
        out: the folder.
        facts: further entries of the record.

    Attributes:
        notebook: the notebook that is run, initially without outputs.
        names: the name of each cell, also used for its figures and traces.
        new_traces: the folder for the traces of the running cell.
        record: the content of `record.json`.
    """

    def __init__(self, lab: str, source: Path, out: Path, facts: dict[str, Any]) -> None:
        self.notebook = nbformat.read(source, as_version=4)  # type: ignore[no-untyped-call]
        self.names = [_name(cell, index) for index, cell in enumerate(self.notebook.cells)]
        self.figures, self.traces, self.new_traces = out / "figures", out / "traces", out / ".traces"
        self._out, self._file, self._lab = out, source.name, lab
        self._lock = os.open(out, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the run ends, even if it is killed
        self._begun = time.monotonic()
        self._cells: dict[int, dict[str, Any]] = {}
        for index, cell in enumerate(self.notebook.cells):
            if cell.cell_type == "code":
                cell.update(outputs=[], execution_count=None)
            if is_run(cell):
                self._cells[index] = {"id": self.names[index], "state": NOT_RUN, "seconds": None}
        self.record: dict[str, Any] = {
            "lab": lab,
            "edition": facts_of(self.notebook).get("edition"),
            **facts,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "state": RUNNING,
            "error": None,
            "cells": list(self._cells.values()),
        }
        for folder in (self.figures, self.traces, self.new_traces):
            folder.mkdir(exist_ok=True)
            for left in folder.iterdir():  # by a run that was killed
                if left.suffix in (".png", ".json"):
                    left.unlink()
        self._save()

    @contextmanager
    def running(self, index: int) -> Iterator[None]:
        """Run cell `index` inside the block. If the block raises, it stays "running" until `end` sets its state."""
        cell, begun = self._cells[index], time.monotonic()
        cell["state"] = RUNNING
        self._save_record()  # names the running cell if everything is killed
        try:
            yield
            cell["state"] = RAN
        finally:
            cell["seconds"] = round(time.monotonic() - begun, 3)
            self._save_figures(index)
            for trace in self.new_traces.glob("*.json"):
                trace.rename(self.traces / f"{self.names[index]}-{trace.name}")
            self._save()

    def end(self, state: str, reason: str | None = None) -> None:
        """Close the record.

        Args:
            state: "complete", "failed" or "stopped"; also the state of the last cell if it did not finish.
            reason: the reason for an incomplete run, in one line.
        """
        last = next((cell for cell in self._cells.values() if cell["state"] == RUNNING), None)
        if last is not None:
            last["state"] = state
        if reason is not None:
            self.record["error"] = {"cell": last and last["id"], "reason": reason}
        self.record["state"] = state
        shutil.rmtree(self.new_traces, ignore_errors=True)
        self._save()
        os.close(self._lock)

    def _save(self) -> None:
        exercises = self._exercises()
        self.record |= {
            "seconds": round(time.monotonic() - self._begun, 3),
            "yours": f"{sum(state != BLANK for state in exercises.values())}/{len(exercises)}",
            "exercises": exercises,
            "figures": sorted(path.name for path in self.figures.iterdir()),
            "traces": sorted(path.name for path in self.traces.glob("*.json")),
        }
        write_whole(self._out / self._file, nbformat.writes(self.notebook).encode())  # type: ignore[no-untyped-call]
        self._save_record()

    def _save_record(self) -> None:
        write_whole(self._out / RECORD, (json.dumps(self.record, indent=1, ensure_ascii=False) + "\n").encode())

    def _exercises(self) -> dict[str, str]:
        """The state of each exercise: "blank", or the outcome of its check in this run."""
        said = {}
        for ref in lab_references(self._lab):
            cells = [cell for cell in self.notebook.cells if EXERCISE + ref.id in tags_of(cell)]
            blank = all(is_blank(cell.source, ref) for cell in cells)
            said[ref.id] = BLANK if blank else _verdict("".join(map(_text, cells)))
        return said

    def _save_figures(self, index: int) -> None:
        images = [output.data["image/png"] for output in self.notebook.cells[index].outputs if _is_figure(output)]
        for number, image in enumerate(images, start=1):
            name = self.names[index] + (f"-{number}" if number > 1 else "")
            (self.figures / f"{name}.png").write_bytes(base64.b64decode(image))


def was_killed(out: Path) -> bool:
    """True if a folder holds the results of a run that has neither ended nor goes on: another may replace them.

    Raises:
        BlockingIOError: the run goes on.
    """
    try:
        state = json.loads(read_plain(out / RECORD, LARGEST))["state"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    if state != RUNNING:
        return False
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks, where it may go on
        return False
    finally:
        os.close(folder)
    return True


def is_run(cell: NotebookNode) -> bool:
    """True if a cell has code to run."""
    return bool(cell.cell_type == "code" and cell.source.strip())


def _name(cell: NotebookNode, index: int) -> str:
    """The cell's id, or its number if the id cannot be a file name."""
    name = str(cell.get("id", ""))
    return name if re.fullmatch(r"[\w-]{1,64}", name) else f"cell-{index:03d}"


def _is_figure(output: NotebookNode) -> bool:
    return isinstance(output.get("data", {}).get("image/png"), str)


def _text(cell: NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def _verdict(said: str) -> str:
    return "passed" if PASSED in said else "failed" if FAILED in said else "not checked"
