"""What `.ci/run` runs of tests/: every test once, and with no other beside it if it is marked so."""

from __future__ import annotations

import re
import shlex
import subprocess
from argparse import ArgumentParser, Namespace
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
MARKS = ("alone", "rest", "slow", "wide")


@cache
def commands() -> list[Namespace]:
    """The pytest commands of the targets that `.ci/run` makes."""
    targets = re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    printed = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    parser = ArgumentParser()
    parser.add_argument("-m", dest="marks", required=True)
    parser.add_argument("-n", dest="workers", type=int, default=0)
    parser.add_argument("--ignore", action="append", type=Path, default=[])
    parser.add_argument("-q", action="store_true")
    parser.add_argument("--durations")
    parser.add_argument("paths", nargs="+", type=Path)
    lines = [shlex.split(line) for line in printed.splitlines()]
    return [parser.parse_args(words[1:]) for words in lines if words and words[0].endswith("/pytest")]


def running(file: Path, *marks: str) -> list[Namespace]:
    """The commands that run a file's tests that have these marks and no others."""

    def has(paths: list[Path]) -> bool:
        return any(file.is_relative_to(path) for path in paths)

    given = {mark: mark in marks for mark in MARKS}
    return [each for each in commands() if has(each.paths) and not has(each.ignore) and eval(each.marks, {}, given)]


@pytest.mark.parametrize("marks", [(), ("wide",)], ids=["plain", "wide"])
def test_every_test_is_run_once(marks: tuple[str, ...]) -> None:
    assert len(FILES) > 100
    assert not [str(file) for file in FILES if len(running(file, *marks)) != 1]


def test_one_that_wants_to_be_alone_is_run_without_workers() -> None:
    files = [file for file in FILES if re.search(r"\bmark\.alone\b", (ROOT / file).read_text())]
    assert files
    assert [[each.workers for each in running(file, "alone")] for file in files] == [[0]] * len(files)


def test_the_short_loop_leaves_more_ranks_than_four_out() -> None:
    target = "tests/tensor_parallel/test_styles.py"
    (plain,), (wide,) = running(Path(target)), running(Path(target), "wide")
    assert plain is not wide


@pytest.mark.parametrize("mark", ["slow", "rest"])
def test_what_ci_leaves_out_is_said_by_a_mark(mark: str) -> None:
    """`make test-full` runs these, and of the notebooks none is slow."""
    assert not [str(file) for file in FILES if running(file, mark) and file.name != "test_notebooks.py"]
