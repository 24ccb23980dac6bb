"""The parts of a GPU check: what each needs, the commands that it is, what is read from the files that they leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from tools import ROOT
from tools.gpu_check.junit import count, parse_junit

Results = dict[str, Any]
Commands = list[list[str]]

ALONE = "alone"  # the step benchmark of one rank, where the others share a GPU: key of its results, and its folder
JUNIT = "junit.xml"

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)

_NOTEBOOKS = 3  # at once, each with ranks of its own, where these have GPUs of their own

# Larger than on a laptop, for kernels to take longer than the host takes to issue them, but small enough for a GPU with
# 16 GB: in the benchmark two ranks that share it keep more than 20 models each, of 14 million parameters and 16 bytes
# for each; on the ladder it is one after the other. And small enough for bytes that go through the host.
_STEP = ["--width", "384", "--context", "128", "--batch", "8"]
_LADDER = ["--width", "768", "--context", "256"]
_BATCH = 16  # sequences per step of the ladder, rounded up to a multiple of the ranks


@dataclass(frozen=True)
class Ranks:
    """How many ranks the parts start.

    Attributes:
        count: N.
        shared: whether several have one GPU.
        link: what was measured between them, as `minifsdp bench --measured-link` takes it.
    """

    count: int
    shared: bool
    link: str | None = None

    @property
    def options(self) -> list[str]:
        """For the commands that start ranks."""
        return ["--ranks", str(self.count), "--device", "cuda", "--share-gpu" if self.shared else "--no-share-gpu"]


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        packages: modules that it imports.
        commands: the arguments of Python, of one command after the other, given the ranks and the folder for files.
        read: what the record keeps, from that folder. Raises one of `UNREADABLE` if it is not there, or is otherwise.
        figures: of these results the ones for the table at the end, in a few words.
    """

    packages: tuple[str, ...]
    commands: Callable[[Ranks, Path], Commands]
    read: Callable[[Path], Results]
    figures: Callable[[Results], str]

    @property
    def missing(self) -> list[str]:
        """Modules that are not installed here."""
        return [name for name in self.packages if find_spec(name) is None]


def ranks_for(gpus: int, share: bool | None) -> Ranks:
    """A rank for each GPU; on a single one two ranks that share it.

    Args:
        gpus: how many there are.
        share: True for two ranks on each GPU, False for one, None for what is said above.
    """
    shared = gpus == 1 if share is None else share
    return Ranks(2 * gpus if shared else gpus, shared)


def _minifsdp(command: str, ranks: Ranks, out: Path, *more: str) -> list[str]:
    return ["-m", "minifsdp", command, *ranks.options, *more, "--out", str(out)]


def _doctor(ranks: Ranks, out: Path) -> Commands:
    return [_minifsdp("doctor", ranks, out, "--seconds", "180")]  # on a cold machine imports alone take a minute


def _ladder(ranks: Ranks, out: Path) -> Commands:
    batch = ceil(_BATCH / ranks.count) * ranks.count
    steps = ["--steps", "5"] if ranks.shared else []  # by loopback
    return [_minifsdp("ladder", ranks, out, *_LADDER, *steps, "--batch", str(batch))]


def _step(ranks: Ranks, out: Path) -> Commands:
    """On all ranks; where these share a GPU, which the device model does not know, also on one that has it alone."""
    link = ["--measured-link", ranks.link] if ranks.link else []
    alone = [_minifsdp("bench", Ranks(1, shared=False), out / ALONE, *_STEP)] if ranks.shared else []
    return [_minifsdp("bench", ranks, out, *_STEP, *link), *alone]


def _pytest(out: Path, *arguments: str) -> Commands:
    report = ["-o", "junit_family=xunit1", f"--junitxml={out / JUNIT}"]
    return [["-m", "pytest", "-q", "-p", "no:cacheprovider", *report, *arguments]]


def _tests(ranks: Ranks, out: Path) -> Commands:
    return _pytest(out, "-rs", "-m", "gpu or multigpu", "tests/gpu")


def _labs(ranks: Ranks, out: Path) -> Commands:
    """On a shared GPU a notebook at a time.

    Processes take turns there, and a collective takes a turn of each. Under MPS they take none, but a launch that ends
    its ranks may break those of another (docs/gpu.md).
    """
    parallel = find_spec("xdist") and not ranks.shared
    at_once = ["-n", str(_NOTEBOOKS), "--dist", "loadscope"] if parallel else []
    notebooks = sorted(f"labs/{path.name}" for path in (ROOT / "labs").glob("*.ipynb"))
    nbval = ["-p", "nbval", "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=120"]
    return _pytest(out, *at_once, *nbval, *notebooks)


def _json(path: Path) -> Results:
    content = json.loads(path.read_text(), parse_constant=_no_figure)
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is no table of results")
    return content


def _no_figure(word: str) -> NoReturn:
    raise ValueError(f"one of its figures is {word}")


def _read_doctor(folder: Path) -> Results:
    """With the link for the device model; without the machine's name, which is nobody's business."""
    results = _json(folder / "doctor.json")
    machine = {key: value for key, value in results["machine"].items() if key != "host"}
    return results | {"machine": machine, "link": measured_link(results)}


def _read_ladder(folder: Path) -> Results:
    """Without the curves of the allocator, which allocator.png shows, and what explore.html is made of."""
    results = _json(folder / "ladder.json")
    for rung in results["rungs"]:
        rung.pop("moments", None)
        rung["cuda"] = {key: rung["cuda"][key] for key in ("alloc_retries", "peaks")} if rung["cuda"] else None
    return results


def _read_step(folder: Path) -> Results:
    alone = folder / ALONE / "bench.json"
    return _json(folder / "bench.json") | ({ALONE: _json(alone)} if alone.exists() else {})


def _read_tests(folder: Path) -> Results:
    return parse_junit((folder / JUNIT).read_text())


def measured_link(doctor: Results) -> str | None:
    """What `minifsdp bench --measured-link` takes, from what the doctor has measured; None if that is nothing.

    The bandwidth is the best of all collectives and sizes; the latency what the quickest of them takes beyond the
    time for its bytes at that rate.
    """
    rows = [row for rows in doctor["bandwidth"].values() for row in rows]
    if not rows:
        return None
    best = max(row["bus"] for row in rows)
    quickest = min(rows, key=lambda row: row["seconds"])
    latency = quickest["seconds"] * (1 - quickest["bus"] / best)  # bus: bytes sent / seconds
    return f"latency={1e6 * latency:.1f}us,bandwidth={best / 1e9:.4f}GB/s"


def _bandwidths(results: Results) -> str:
    best = {name: max(row["bus"] for row in rows) / 1e9 for name, rows in results["bandwidth"].items() if rows}
    return ", ".join(f"{name} {rate:.3g} GB/s" for name, rate in best.items())


def _counted(results: Results) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in count(results["tests"]).items() if number)


def _last_rung(results: Results) -> str:
    rung = results["rungs"][-1]
    overlap = "" if rung["overlap"] is None else f", {rung['overlap']:.0%} of communication under compute"
    return f"{rung['name']}: {1e3 * median(rung['step_seconds']):.2f} ms a step{overlap}"


def _medians(results: Results) -> str:
    rows = {row["name"]: row["median"] for row in results["contestants"]}
    names = [name for name in ("torch-fsdp1", "torch-fsdp2", "fsdp-limit") if name in rows]
    return ", ".join(f"{name} {1e3 * rows[name]:.2f} ms" for name in names)


PARTS = {
    "doctor": Part(("torch", "matplotlib"), _doctor, _read_doctor, _bandwidths),
    "tests": Part(("torch", "pytest", "pytest_timeout"), _tests, _read_tests, _counted),
    "ladder": Part(("torch", "matplotlib"), _ladder, _read_ladder, _last_rung),
    "step": Part(("torch", "matplotlib"), _step, _read_step, _medians),
    "labs": Part(("pytest", "nbval", "jupyter_client", "ipykernel", "torch"), _labs, _read_tests, _counted),
}
"""By name, in their order."""
