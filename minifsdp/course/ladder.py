"""The ladder: one model trained on every rung, from the check of what was asked for to the files that it leaves."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from minifsdp.course import data, plots
from minifsdp.course.data import Corpus
from minifsdp.course.launch import launch
from minifsdp.course.link import parse_link
from minifsdp.course.measure import Settings, climb, train_alone
from minifsdp.course.resources import check_names, check_writable
from minifsdp.course.rungs import RUNGS, Sizes, closed_form_setting, sizes_of
from minifsdp.course.timeline import read_trace
from minifsdp.course.world import Device, World, choose_world, is_first

TIME_LIMIT = 3600.0  # seconds that the ranks may take together before they count as stuck

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """A run that has passed every check: what starts from here on can start."""

    settings: Settings
    corpus: Corpus
    world: World
    sizes: Sizes
    out: Path


def plan(settings: Settings, device: Device, out: Path, share_gpu: bool | None = None) -> Plan:
    """Check everything that can be checked before a rank starts, and make the output folder.

    Raises:
        ValueError: something asked for is impossible; one line that names it and the cure.
        OSError: the text to train on is not there.
    """
    check_names("--rungs", settings.rungs, RUNGS)
    if not -(2**63) <= settings.seed < 2**63:
        raise ValueError(f"--seed {settings.seed}: must fit into 64 bits")
    for name in ("ranks", "steps", "batch", "layers", "width", "context", "limit"):
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name} {getattr(settings, name)}: must be at least 1")
    if settings.batch % settings.ranks:
        raise ValueError(
            f"--batch {settings.batch} cannot be shared equally by {settings.ranks} ranks: "
            f"choose a multiple of {settings.ranks}"
        )
    world = choose_world(settings.ranks, device, share_gpu)
    if settings.link is not None:
        parse_link(settings.link)
    corpus = data.load_text(settings.text)
    settings.batches()
    with torch.device("meta"):
        sizes = sizes_of(settings.model())
    check_writable(out)
    return Plan(settings, corpus, world, sizes, out)


def run(plan: Plan, progress: Progress) -> dict[str, Any] | None:
    """Train, weigh and trace; write `ladder.json`, `memory.png` and `.gif`, `timeline.png` and the traces.

    On a GPU also `allocator.png` and, for torch's memory viewer (pytorch.org/memory_viz), a snapshot of each rung.

    Nothing is written to the output folder before everything is there; each file then appears whole.

    Returns:
        the content of `ladder.json`; None on all but the first rank of an SPMD run.
    """
    settings = plan.settings
    progress("one process", 0, 1)
    reference = launch(train_alone, 1, settings, timeout=TIME_LIMIT, backend=plan.world.backend)[0]
    with tempfile.TemporaryDirectory(prefix="minifsdp-ladder-") as name:
        staging = Path(name)
        ranks = launch(
            climb,
            settings.ranks,
            settings,
            staging,
            timeout=TIME_LIMIT,
            backend=plan.world.backend,
            share_gpu=plan.world.shares_gpu,
            on_report=lambda _, what: progress(*what),
        )
        if not is_first():
            return None
        record = _record(plan, reference, ranks)
        (staging / "ladder.json").write_text(json.dumps(record, indent=1) + "\n")
        drawn = [(rung["name"], rung) for rung in record["rungs"]]
        rungs = [rung | {"adds": RUNGS[name].adds, "curve": ranks[0][name]["curve"]} for name, rung in drawn]
        plots.memory_figure(rungs, staging / "memory.png")
        plots.memory_steps(rungs, staging / "memory.gif")
        sharded = [name for name in settings.rungs if name.startswith("fsdp")]
        lanes = [
            (name, read_trace(_trace(staging, name)), ranks[0][name]["overlap"]) for name in sharded or settings.rungs
        ]
        plots.timeline_figure(lanes, staging / "timeline.png")
        if all(rung["cuda"] for rung in rungs):
            plots.allocator_figure(rungs, staging / "allocator.png")
        _publish(staging, plan.out)
    return record


def _record(plan: Plan, reference: list[float], ranks: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    settings = plan.settings
    setting = closed_form_setting(settings.ranks, plan.world.backend)
    rungs = []
    for name in settings.rungs:
        ours = [rank[name] for rank in ranks]
        predicted = asdict(RUNGS[name].predict(plan.sizes, setting, settings.limit))
        rungs.append(
            {
                "name": name,
                "losses": [fmean(losses) for losses in zip(*(rank["losses"] for rank in ours), strict=True)],
                "step_seconds": [max(times) for times in zip(*(rank["step_seconds"] for rank in ours), strict=True)],
                "bytes": [rank["bytes"] for rank in ours],
                "predicted": [predicted] * settings.ranks,
                "collectives": ours[0]["collectives"],
                "overlap": ours[0]["overlap"],
                "cuda": ours[0]["cuda"],
            }
        )
    return {
        "parameters": sum(plan.sizes.parameters),
        "ranks": settings.ranks,
        "device": torch.cuda.get_device_name() if plan.world.gpus else "cpu",
        "backend": plan.world.backend,
        "world": str(plan.world),
        "torch": torch.__version__,
        "data": {"name": plan.corpus.name, "bytes": plan.corpus.bytes},
        **{name: value for name, value in asdict(settings).items() if name not in ("ranks", "rungs", "text")},
        "units": [sum(unit) for unit in plan.sizes.units],
        "reference_losses": reference,
        "rungs": rungs,
    }


def _trace(folder: Path, rung: str) -> Path:
    return folder / f"trace-{rung}.json"


def _publish(staging: Path, out: Path) -> None:
    """Move what is finished to where it belongs; what only an earlier run has left goes."""
    files = sorted(path for path in staging.iterdir() if path.is_file())
    names = {path.name for path in files}
    parts = {path: out / f".{path.name}.part" for path in files}
    try:
        for path, part in parts.items():
            shutil.copyfile(path, part)
        for path, part in parts.items():
            part.replace(out / path.name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    every = {"allocator.png", *(name for rung in RUNGS for name in (f"trace-{rung}.json", f"snapshot-{rung}.pickle"))}
    for name in every - names:
        (out / name).unlink(missing_ok=True)
