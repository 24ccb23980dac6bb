"""How long one waits for a verdict, the ladder and the tests, compared with another checkout.

`python benchmarks/waiting.py BASE` runs each command in both checkouts by turns; the ratio is that of the medians. A
session is a program that checks one answer several times, as a notebook does. What the Makefile has starts in a fresh
clone; the two longest run only if `--only` names them. Exit code 1 if a ratio is above its limit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for `tools`, and so that a plain `python` does

from minifsdp.course.cli.common import run_script  # noqa: E402
from tools import benchmark  # noqa: E402

ANSWERS = {"with ranks": "5.2", "without ranks": "12.3"}
VERDICTS = 4  # in a session
READING = 5.0  # seconds between a notebook's set-up and its first answer, at least

SESSION = """
import sys, time
from minifsdp.course.workshop.catalogue import setup_of
from minifsdp.course.workshop.process import run_check
from minifsdp.course.workshop.references import find_reference, lab_of
from minifsdp.course.workshop.submission import Submission

if reading := float(sys.argv[3]):
    import ipykernel
    import minifsdp.course.workshop.notebook
    time.sleep(reading)
exercise = sys.argv[1]
answer = f'@exercise("{exercise}")\\n{find_reference(exercise).source}'
for _ in range(int(sys.argv[2])):
    begin = time.perf_counter()
    verdict = run_check(Submission(exercise, setup_of(lab_of(exercise)), answer))
    assert verdict.state == "passed", verdict
    print(time.perf_counter() - begin)
"""

Seconds = dict[str, list[float]]


class Case(NamedTuple):
    """A timed program: `run` returns the seconds of each wait by its name; the limits are ratios."""

    run: Callable[[Path, Path], Seconds]
    limits: Mapping[str, float]


def session(exercise: str, reading: float) -> Callable[[Path, Path], Seconds]:
    """Verdicts in one program, which is a notebook's kernel if somebody reads first."""

    def run(checkout: Path, folder: Path) -> Seconds:
        said = started(checkout, folder, "-c", SESSION, exercise, str(VERDICTS), str(reading))
        first, *others = map(float, said.split())
        return {"the first verdict": [first], "each further verdict": others}

    return run


def ladder(checkout: Path, folder: Path) -> Seconds:
    """The command's whole time."""
    begin = time.perf_counter()
    started(checkout, folder, "-m", "minifsdp", "ladder", "--out", str(folder / f"ladder-{begin}"))
    return {"minifsdp ladder": [time.perf_counter() - begin]}


def started(checkout: Path, folder: Path, *words: str) -> str:
    """The output of a program of a checkout."""
    environ = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environ, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def in_clone(command: str, first: str = "true") -> Callable[[Path, Path], Seconds]:
    """The whole time of a command in a fresh clone of a checkout's commit, after another command that is not timed."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(checkout: Path, folder: Path) -> Seconds:
        clone = folder / f"clone-{time.perf_counter()}"
        subprocess.run(["git", "clone", "--quiet", checkout, clone], check=True)
        for words in (first, command):
            begin = time.perf_counter()
            subprocess.run(words.split(), cwd=clone, env=environ, check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - begin
        shutil.rmtree(clone)
        return {command: [seconds]}

    return run


CASES = {
    **{
        name + where: Case(session(exercise, reading), {"the first verdict": 0.7, "each further verdict": 0.2})
        for name, exercise in ANSWERS.items()
        for where, reading in {"": 0.0, ", in a notebook": READING}.items()
    },
    "ladder": Case(ladder, {"minifsdp ladder": 0.5}),
    "make ladder": Case(in_clone("make ladder"), {"make ladder": 0.6}),
    "make test": Case(in_clone("make test", first="make install"), {"make test": 0.25}),
    ".ci/run": Case(in_clone("bash .ci/run"), {"bash .ci/run": 0.5}),
}
LONG = ("make test", ".ci/run")  # 20 minutes or more before there was one server for all


def measure(case: Case, base: Path, runs: int) -> list[dict[str, Any]]:
    """For each wait the medians of both checkouts, in seconds, and their ratio."""
    found: dict[Path, Seconds] = {base: {}, ROOT: {}}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(runs):
            for checkout, seconds in found.items():
                for what, each in case.run(checkout, Path(folder)).items():
                    seconds.setdefault(what, []).extend(each)
    rows = []
    for what, limit in case.limits.items():
        before, after = (median(found[checkout][what]) for checkout in (base, ROOT))
        times = {"before": round(before, 3), "after": round(after, 3)}
        rows.append({"what": what, **times, "ratio": round(after / before, 3), "limit": limit})
    return rows


def compare(names: Sequence[str], base: Path, runs: int) -> benchmark.Result:
    load = os.getloadavg()[0]
    found = {name: measure(CASES[name], base, runs) for name in names}
    rows = [(name, row) for name in names for row in found[name]]
    cells = [[name, *(each if isinstance(each, str) else f"{each:.2f}" for each in row.values())] for name, row in rows]
    missed = [f"{name}, {row['what']}: {row['ratio']:.3f}" for name, row in rows if row["ratio"] > row["limit"]]
    shown = benchmark.table("", ("", "", "before, s", "after, s", "ratio", "limit"), cells)
    return {"load": round(load, 2), "cases": found}, [shown], missed


def check(base: Path) -> None:
    if not (base / "minifsdp").is_dir():
        raise ValueError(f"{base} is no checkout of minifsdp: git worktree add ../base COMMIT")


def main() -> int:
    """The exit code: 1 for a limit that is exceeded, 2 for a run that cannot be."""
    usual = [name for name in CASES if name not in LONG]
    parser = benchmark.options(__doc__, "waiting.json")
    parser.add_argument("base", type=Path, help="another checkout, to compare with")
    parser.add_argument("--only", nargs="+", choices=CASES, default=usual, help="default: all but the two longest")
    given = parser.parse_args()
    base = given.base.resolve()
    return benchmark.run("waiting", given.out, lambda: compare(given.only, base, given.runs), lambda: check(given.base))


if __name__ == "__main__":
    run_script(main)
