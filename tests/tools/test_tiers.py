"""What `.ci/run` runs of tests/: every test once, longest files first."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
PARTS = ("test-wide", "test-course", "test-notebooks")
CI = tuple(re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
MARKS = ("rest", "slow", "wide")


@cache
def commands(targets: tuple[str, ...]) -> list[Namespace]:
    """The pytest commands by which these are made."""
    # without the options of a make that runs this test
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    make = subprocess.run(["make", "-n", *targets], cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    parser = ArgumentParser()
    parser.add_argument("-m", dest="marks", required=True)
    parser.add_argument("-n", dest="workers", type=int, default=0)
    parser.add_argument("--ignore", action="append", type=Path, default=[])
    parser.add_argument("-q", action="store_true")
    parser.add_argument("--durations")
    parser.add_argument("paths", nargs="+", type=Path)
    lines = [shlex.split(line) for line in make.stdout.splitlines()]
    return [parser.parse_args(words[1:]) for words in lines if words and words[0].endswith("/pytest")]


def running(file: Path, *marks: str, targets: tuple[str, ...] = CI) -> list[Namespace]:
    """The commands that run a file's tests that have these marks and no others."""

    def has(paths: list[Path]) -> bool:
        return any(file.is_relative_to(path) for path in paths)

    given = {mark: mark in marks for mark in MARKS}
    return [
        each for each in commands(targets) if has(each.paths) and not has(each.ignore) and eval(each.marks, {}, given)
    ]


@pytest.mark.parametrize("targets", [CI, PARTS], ids=["CI", "its parts"])
@pytest.mark.parametrize("marks", [(), ("wide",)], ids=["plain", "wide"])
def test_every_test_is_run_once(marks: tuple[str, ...], targets: tuple[str, ...]) -> None:
    assert len(FILES) > 100
    assert not [str(file) for file in FILES if len(running(file, *marks, targets=targets)) != 1]


def test_the_short_loop_is_the_library_without_what_is_wide() -> None:
    wide = [file for file in FILES if running(file, "wide", targets=("test-wide",))]
    assert len(wide) > 60
    assert [file for file in FILES if running(file, targets=("test",))] == wide
    assert not [file for file in FILES if running(file, "wide", targets=("test",))]


@pytest.mark.parametrize("mark", ["slow", "rest"])
def test_what_ci_leaves_out_is_said_by_a_mark(mark: str) -> None:
    """`make test-full` runs these, and of the notebooks none is slow."""
    assert not [str(file) for file in FILES if running(file, mark) and file.name != "test_notebooks.py"]


# The order

KEPT = {"test_long": 9, "test_short": 1, "labs/test_labs 05": 5}


def test_the_longest_come_first_and_what_is_new_is_like_the_median(tmp_path: Path) -> None:
    done = in_a_folder(tmp_path, "-v", test_short=PASSES, test_new=PASSES, test_long=PASSES)
    assert re.findall(r"test_\w+(?=\.py::)", done) == ["test_long", "test_new", "test_short"]


def test_what_each_took_is_added_and_labs_and_notebooks_go_one_by_one(tmp_path: Path) -> None:
    cases = "import pytest\n@pytest.mark.parametrize('case', ['5.1-default', '14-C8', '10a'])\ndef test(case): pass"
    slowly = "import time\ndef test(): time.sleep(0.6)"
    files = {"test_long": slowly, "test_new": PASSES, "labs/test_labs": cases, "labs/test_notebooks": cases}
    in_a_folder(tmp_path, "--add-seconds", "-p", "xdist", "-n", "2", **files)
    labs = {"labs/test_labs 05": 5, "labs/test_labs 10a": 0, "labs/test_labs 14": 0}
    notebooks = {f"labs/test_notebooks {case}": 0 for case in ("5.1-default", "14-C8", "10a")}
    expected = {"test_long": 10, "test_short": 1, "test_new": 0, **labs, **notebooks}
    assert json.loads((tmp_path / "tests" / "seconds.json").read_text()) == expected


PASSES = "def test(): pass"


def in_a_folder(folder: Path, *options: str, **files: str) -> str:
    """What pytest prints of these files next to our conftest.py and the seconds in `KEPT`."""
    tests = folder / "tests"
    (tests / "labs").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    (tests / "seconds.json").write_text(json.dumps(KEPT))
    for name, text in files.items():
        (tests / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, tests]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout
