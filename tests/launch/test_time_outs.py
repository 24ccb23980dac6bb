"""Notebooks whose time runs out while ranks wait: whatever runs the notebook, no rank outlives it."""

import subprocess
import sys
from pathlib import Path
from typing import IO

import nbformat
import notebooks_in_forks
import pytest
from commands_in_forks import start_fork
from marked import marked, within
from nbformat.v4 import new_code_cell, new_notebook

from minifsdp.instruments.system.housekeeping import TREE
from minifsdp.instruments.warm.client import Process

LIMIT = 8  # seconds for a cell
PATIENCE = 120  # seconds until torch is imported on a busy machine: as many cells that do not run out of time
STEP = 2  # seconds that one of them waits at most

PREPARING = """
import os, threading, time
from pathlib import Path

def prepare():
    global launch
    from minifsdp.instruments.launch import launch
    launch(int, 1)

preparing = threading.Thread(target=prepare)
preparing.start()
"""

WAITING = """
def wait():
    Path(os.environ["STARTED"] + os.environ["RANK"]).touch()
    time.sleep(1000)

launch(wait, 2, timeout=1000)
"""

RUNNERS = {
    "nbclient": ["jupyter", "execute", f"--timeout={LIMIT}", "waiting.ipynb"],
    "papermill": ["papermill", "--kernel=python3", f"--execution-timeout={LIMIT}", "waiting.ipynb", "out.ipynb"],
    "nbval": ["pytest", "--nbval", "--nbval-current-env", f"--nbval-cell-timeout={LIMIT}", "waiting.ipynb"],
}
AS_USERS_DO = ("nbclient", "papermill")  # nbval and its kernel are forks; test_notebooks.py runs it as users do, too


def test_no_rank_outlives_a_notebook_whose_time_runs_out(
    marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner ends the kernel's process group. Ranks have sessions of their own, and end because the kernel has."""
    cells = [PREPARING, *[f"preparing.join({STEP})"] * (PATIENCE // STEP), WAITING]
    monkeypatch.setenv(TREE, marker)
    runs: dict[str, subprocess.Popen[bytes] | Process] = {}
    for name, words in RUNNERS.items():
        (folder := tmp_path / name).mkdir()
        nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells]), folder / "waiting.ipynb")
        monkeypatch.setenv("STARTED", f"{folder}/rank-")
        with (folder / "log").open("w") as log:
            runs[name] = start(name, words, folder, log)
    for name, run in runs.items():
        log = tmp_path / name / "log"
        assert run.wait(PATIENCE + 30), name
        assert "time" in log.read_text().lower(), name
        assert {path.name for path in log.parent.glob("rank-*")} == {"rank-0", "rank-1"}, name
    within(3, lambda: not marked(marker))


def start(name: str, words: list[str], folder: Path, log: IO[str]) -> subprocess.Popen[bytes] | Process:
    if name in AS_USERS_DO:
        return subprocess.Popen([sys.executable, "-m", *words], cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    out = log.fileno()
    run = notebooks_in_forks.run_python_with_kernel
    return start_fork(run, args=("-m", *words), out=out, errors=out, folder=folder)
