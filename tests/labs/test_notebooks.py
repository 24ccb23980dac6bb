"""The notebooks print what is stored in them: as shipped, and with the reference answers written into the exercises.

Each runs under nbval in a process of its own, most of them in a fork (notebooks_in_forks.py), and in an empty folder.
With answers, `make test-notebooks` runs the labs that have changed since `make test-labs` ran, which runs all, and one
of the others, which each commit draws anew.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import notebooks_in_forks
import psutil
import pytest
from all_ran import draw, rest_of

from minifsdp.course.workshop.catalogue import EXERCISE, all_labs, labs_folder, setup_of, shipped_notebook, tags_of
from minifsdp.course.workshop.references import find_reference, lab_references
from minifsdp.course.workshop.store import Store
from minifsdp.course.workshop.submission import Submission
from minifsdp.instruments.system.housekeeping import TREE
from minifsdp.instruments.warm.client import Process

SECONDS = 600  # for one notebook, on a machine that is busy with much else
MARK = "MINIFSDP_TEST_NOTEBOOK"
AS_USERS_DO = "05-blank"  # the others' processes are forks
BLANK = [f"{lab}-blank" for lab in all_labs()]
DRAWN = all_labs()[draw("a notebook with answers", len(all_labs()))]
WRITTEN_IN = [pytest.param(f"{lab}-written", marks=rest_of(lab, "lab", sampled=lab == DRAWN)) for lab in all_labs()]

# What may differ once the answers are written: that they are.
WRITTEN = r"""
[state of an exercise]
regex: (\d+[a-z]?\.\d+ \w+): (not attempted, reference in use|yours: passed.*)
replace: \1: PIECE

[pieces of a plot]
regex: with (your answers? to \d+ of \d+ exercises?|the reference answers)
replace: WITH ANSWERS
"""


class Run(NamedTuple):
    code: int
    output: str
    left: list[str]


def filled(notebook: dict[str, Any]) -> dict[str, Any]:
    """A notebook with the reference answers in the place of the stubs."""
    notebook = json.loads(json.dumps(notebook))
    for cell in notebook["cells"]:
        for tag in tags_of(cell):
            if tag.startswith(EXERCISE):
                cell["source"] = written(tag.removeprefix(EXERCISE))
    return notebook


def written(exercise: str) -> str:
    return f'@exercise("{exercise}")\n{find_reference(exercise).source}'


def keep_earlier_answers(lab: str, folder: Path) -> None:
    """As if all labs before this one had been done in the folder."""
    for before in all_labs():
        for ref in lab_references(before) if before < lab else []:
            answer = Submission(ref.id, setup_of(before), written(ref.id))
            Store(folder).write("answers", ref.id, answer._asdict())


def run(case: str, folder: Path, start: Callable[..., subprocess.Popen[bytes] | Process]) -> Run:
    """One notebook under nbval, and what it has left behind."""
    lab, kind = case.split("-")
    shipped, copy = shipped_notebook(lab), folder / f"lab{lab}.ipynb"
    allowed = (labs_folder() / "nbval.cfg").read_text()
    if kind == "blank":
        shutil.copy(shipped, copy)
    else:
        keep_earlier_answers(lab, folder)
        copy.write_text(json.dumps(filled(json.loads(shipped.read_text()))))
        allowed += WRITTEN
    (folder / "nbval.cfg").write_text(allowed)
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder), "--color=no", "--nbval"]
    options += ["--nbval-current-env", "--nbval-cell-timeout=120", f"--nbval-sanitize-with={folder / 'nbval.cfg'}"]
    mark = uuid.uuid4().hex
    environ = {**os.environ, MARK: mark, TREE: mark, "IPYTHONDIR": str(folder / ".ipython")}
    log = folder / "log"
    with log.open("w") as output:
        nbval = start([*options, str(copy)], folder, environ, output)
    with suppress(subprocess.TimeoutExpired):
        nbval.wait(SECONDS)
    nbval.kill()
    left = left_by(mark)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return Run(nbval.wait(), log.read_text(), [str(process) for process in left])


def start_program(
    options: list[str], folder: Path, environ: dict[str, str], output: IO[str]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT)


def left_by(mark: str, patience: float = 5.0) -> list[psutil.Process]:
    """What still runs of all that a marked process has started, after a moment to end."""
    deadline = time.monotonic() + patience
    while True:
        left = [process for process in psutil.process_iter() if is_of(process, mark)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def is_of(process: psutil.Process, mark: str) -> bool:
    try:
        return mark in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False


@pytest.fixture(scope="module", autouse=True)
def fonts() -> None:
    """On a new machine finding them takes a while, and would say so in a cell."""
    importlib.import_module("matplotlib.font_manager")


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("case", [*BLANK, *WRITTEN_IN])
def test_a_notebook_prints_what_is_stored_in_it(case: str, tmp_path: Path) -> None:
    done = run(case, tmp_path, start_program if case == AS_USERS_DO else notebooks_in_forks.start)
    assert done.code == 0, done.output
    assert done.left == [], f"still running: {done.left}"
    lab, kind = case.split("-")
    kept = [ref.id for ref in lab_references(lab) if Store(tmp_path).read("answers", ref.id) is not None]
    assert kept == ([] if kind == "blank" else [ref.id for ref in lab_references(lab)])
