"""Ctrl-C, SIGTERM and SIGHUP at the moments at which an exception would be lost, and where they are ignored."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from minifsdp.course import cli, doctor
from minifsdp.course.cli.signals import ENDING, cleaning_up
from minifsdp.course.workshop import batch, catalogue, copies, marking, saved
from minifsdp.course.workshop.references import find_reference
from minifsdp.instruments.launch.world import choose_world

# A signal at the import of a module; the C code of torch imports numpy, and clears what that raises.
AT_IMPORT = """
import signal, sys
module, number = sys.argv[1], int(sys.argv[2])
class At:
    def find_spec(self, name, *_):
        if name == module:
            signal.raise_signal(number)
sys.meta_path.insert(0, At())
from minifsdp.course import cli
sys.argv[:] = ["minifsdp", "train", "--strategy", "none"]
cli.main()
"""


@pytest.mark.parametrize(
    ("module", "number"),
    [("typer", signal.SIGINT), *((f"numpy.{name}", number) for name in ("linalg", "dtypes") for number in ENDING)],
)
def test_a_signal_while_something_is_imported_ends_the_process(module: str, number: signal.Signals) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_IMPORT, module, str(int(number))], capture_output=True, text=True, check=False
    )
    says = (130, "minifsdp: interrupted\n") if number == signal.SIGINT else (-number, "")
    assert (done.returncode, done.stderr) == says


def interrupt(*_: Any, **__: Any) -> Any:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("words", "where", "name"),
    [
        (("doctor", "--device", "cpu"), doctor, "run"),
        (("lab", "check", "4.1"), saved, "run_check"),
        (("lab", "mark", ".", "--out", "marks.csv"), marking, "mark"),
        (("lab", "run", "04"), batch, "run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_ctrl_c_always_says_interrupted(
    words: tuple[str, ...],
    where: Any,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    copies.start("04", Path())
    (copy,) = tmp_path.glob("*.ipynb")
    notebook = catalogue.read_notebook(copy)
    answer = f'@exercise("4.1")\n{find_reference("4.1").source}'
    catalogue.cells_with(notebook["cells"], catalogue.EXERCISE + "4.1")[0]["source"] = answer
    copy.write_text(json.dumps(notebook))
    monkeypatch.setattr(where, name, interrupt)
    monkeypatch.setattr(sys, "argv", ["minifsdp", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
    assert "minifsdp: interrupted" in capsys.readouterr().err


@pytest.fixture
def ignored() -> Iterator[None]:
    """All three signals, as nohup and a shell's `&` leave them."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("ignored")
def test_what_is_ignored_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def still() -> bool:
        for number in ENDING:
            signal.raise_signal(number)
        return all(signal.getsignal(number) is signal.SIG_IGN for number in ENDING)

    with cleaning_up():
        assert still()
    seen = []

    async def no_cells(*_: Any) -> None:
        seen.append(still())

    monkeypatch.setattr(batch, "_run_cells", no_cells)
    (tmp_path / "lab00_x.ipynb").write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    request = batch.Request("00", tmp_path / "lab00_x.ipynb", tmp_path, 60.0, choose_world(2, "cpu"))
    assert batch.run(request, lambda *_: None)["state"] == "complete"
    assert seen == [True]


def test_what_is_heard_unwinds_and_is_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    for number, raises in zip(ENDING, (KeyboardInterrupt, SystemExit, SystemExit), strict=True):
        with pytest.raises(raises), cleaning_up():
            signal.raise_signal(number)
    assert [signal.getsignal(number) for number in ENDING] == before


# The tests themselves

CONFTEST = Path(__file__).parents[1] / "conftest.py"

STARTS_AND_FAILS = """
import subprocess, sys
def test_it(capfd):
    child = subprocess.Popen(["sleep", "1000"])
    with open("pid", "w") as file:
        file.write(str(child.pid))
    assert not child
"""


def test_a_test_that_fails_ends_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(STARTS_AND_FAILS)
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    assert subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, check=False).returncode == 1
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


HEARS = """
import signal, subprocess, sys
def test_it():
    signal.raise_signal(signal.SIGHUP)  # as when the terminal closes
    code = "import signal; print(*(signal.getsignal(n) is signal.SIG_IGN for n in (1, 2, 15)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).stdout.split() == [b"False"] * 3
"""


@pytest.mark.usefixtures("ignored")
@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "workers"])
@pytest.mark.slow
def test_tests_in_the_background_start_what_hears_signals(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "test_it.py").write_text(HEARS)
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
