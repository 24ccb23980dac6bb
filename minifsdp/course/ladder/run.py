"""The ladder as a whole: check the request, train one model on every rung, write the results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from minifsdp.cost.model import Model
from minifsdp.course.ladder import data, pictures
from minifsdp.course.ladder.axes import AXES
from minifsdp.course.ladder.data import Corpus
from minifsdp.course.ladder.measure import MEASURING, Settings, run_rungs, snapshot_of, trace_of, train_alone
from minifsdp.course.ladder.outline import count_elements, outline
from minifsdp.course.ladder.rungs import closed_form_setting, sizes_of
from minifsdp.instruments.launch import launch
from minifsdp.instruments.launch.world import Device, World, choose_world, is_first
from minifsdp.instruments.link.emulated import parse_links
from minifsdp.instruments.system.resources import (
    ADAMW_BYTES,
    check_counts,
    check_host_memory,
    check_names,
    check_seed,
    check_writable,
)
from minifsdp.instruments.system.scratch import scratch_folder
from minifsdp.instruments.system.whole_files import delivering
from minifsdp.instruments.watch.timeline import Span, overlap, read_trace

TIME_LIMIT = 3600.0  # seconds that the ranks may take together before they count as stuck

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """A run that has passed every check.

    Attributes:
        left_out: rungs of the axis that so many ranks cannot climb, and why.
    """

    settings: Settings
    corpus: Corpus
    world: World
    sizes: Model
    out: Path
    left_out: dict[str, str]


def check(settings: Settings, device: Device, out: Path, share_gpu: bool | None = None) -> Request:
    """Check everything that can be checked before a rank starts, and make the output folder.

    Raises:
        ValueError: the request is impossible; one line that names the fault and the cure.
        OSError: the text to train on is missing.
    """
    ladder = [name for name in settings.rungs if name not in settings.recipes]
    check_names("--rungs", ladder, AXES[settings.axis].rungs)
    check_seed(settings.seed)
    check_counts(settings, ("ranks", "steps", "batch", "layers", "width", "heads", "context", "limit"))
    if settings.batch % (rows := settings.rows):
        by = f"{settings.ranks} ranks" if rows == settings.ranks else f"{rows} micro-batches"
        raise ValueError(f"--batch {settings.batch} cannot be shared equally by {by}: choose a multiple of {rows}")
    world = choose_world(settings.ranks, device, share_gpu)
    if settings.link is not None:
        parse_links(settings.link)
    corpus = data.load_text(settings.text)
    settings.batches()
    elements = count_elements(settings.layers, width=settings.width, context=settings.context)
    check_host_memory(elements, ADAMW_BYTES if world.device == "cpu" else 4)
    sizes = sizes_of(outline(**settings.shape))
    left_out = _left_out(settings, settings.faults(sizes))
    settings = replace(settings, rungs=tuple(name for name in settings.rungs if name not in left_out))
    check_writable(out)
    return Request(settings, corpus, world, sizes, out, left_out)


def _left_out(settings: Settings, faults: dict[str, str]) -> dict[str, str]:
    """The rungs with a fault, if all of the axis are asked for and others remain to compare.

    Raises:
        ValueError: a recipe, or one of a few rungs asked for, has a fault.
    """
    every = AXES[settings.axis].rungs
    wrong = list(faults)
    if own := [name for name in wrong if name in settings.recipes]:
        raise ValueError(f"--recipe {own[0]}: {faults[own[0]]}")
    if wrong and (len(settings.rungs) < len(every) or len(every) - len(wrong) < 2):
        raise ValueError(f"--rungs {wrong[0]}: {faults[wrong[0]]}")
    return {name: faults[name] for name in wrong}


def run(request: Request, progress: Progress) -> dict[str, Any] | None:
    """Train, measure and trace; write `ladder.json`, the pictures, `explore.html` and the traces.

    On a GPU also `allocator.png` and, for torch's memory viewer (pytorch.org/memory_viz), a snapshot of each rung.

    Nothing is written to the output folder until every file is ready; each then appears whole.

    Returns:
        the content of `ladder.json`; None on all but the first rank of an SPMD run.

    Raises:
        RankError: a rank has failed.
        UndeliveredError: the output folder can no longer be written; names the folder that has the files.
    """
    settings = request.settings

    lanes: dict[str, list[Span]] = {}

    def heard(_: int, what: tuple[str, int, int]) -> None:
        progress(*what)
        if what[0].endswith(MEASURING) and not lanes:  # no step is timed any longer, and here is time
            lanes.update((name, read_trace(staging / trace_of(name))) for name in settings.rungs)

    progress("one process", 0, 1)
    where: Any = {"timeout": TIME_LIMIT, "backend": request.world.backend, "share_gpu": request.world.shares_gpu}
    # Meanwhile no step is timed, and one process leaves cores idle.
    reference = launch(train_alone, 1, settings, on_report=lambda *_: pictures.prepare(), **where)[0]
    with scratch_folder() as staging:
        ranks = launch(
            run_rungs,
            settings.ranks,
            settings,
            staging,
            on_report=heard,
            **where,
        )
        if not is_first():
            return None
        for name, rung in ranks[0].items():
            rung["traced"] = replace(rung["traced"], spans=lanes[name])
        record = _record(request, reference, ranks)
        with delivering(staging, request.out, record):
            (staging / "ladder.json").write_text(_one_line_per_list(json.dumps(record, indent=1)) + "\n")
            pictures.draw(settings, record, ranks, staging, request.world)
        _forget_earlier(request.out, staging)
    return record


def _record(request: Request, reference: list[float], ranks: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    settings = request.settings
    setting = replace(closed_form_setting(settings.ranks, request.world), batch=settings.batch)
    replays = pictures.replays(settings, ranks)
    rungs = []
    for name in settings.rungs:
        ours = [rank[name] for rank in ranks]
        rung, places = settings.rung(name), [replace(setting, rank=rank) for rank in range(len(ranks))]
        predicted = [rung.predict(request.sizes, place, settings.limit) for place in places]
        on_cpu = request.world.device == "cpu"  # for which alone there is a bound
        peaks = [rung.peak(request.sizes, place, settings.limit) for place in places] if on_cpu else None
        rungs.append(
            {
                "name": name,
                "losses": [fmean(losses) for losses in zip(*(rank["losses"] for rank in ours), strict=True)],
                "step_seconds": [max(times) for times in zip(*(rank["step_seconds"] for rank in ours), strict=True)],
                "bytes": [{key: rank["bytes"][key] for key in (*asdict(predicted[0]), "peak")} for rank in ours],
                "predicted": [asdict(each) for each in predicted],
                "peak_at_most": peaks,
                "collectives": ours[0]["collectives"],
                "sent": [rank["sent"] for rank in ours],
                "predicted_sent": [rung.sent(request.sizes, place, settings.limit) for place in places],
                "overlap": overlap(ours[0]["traced"].spans) if settings.ranks > 1 else None,
                "traced_seconds": ours[0]["traced"].seconds,
                "cuda": ours[0]["cuda"],
                **({"bubble": [replays[name].bubble, settings.bubble(name)]} if name in replays else {}),
                "moments": [[[each.name, each.bytes] for each in rank["log"].moments] for rank in ours],
            }
        )
    return {
        "parameters": sum(request.sizes.parameters),
        "ranks": settings.ranks,
        "device": torch.cuda.get_device_name() if request.world.gpus else "cpu",
        "backend": request.world.backend,
        "world": str(request.world),
        "torch": torch.__version__,
        "data": {"name": request.corpus.name, "bytes": request.corpus.bytes},
        **_options(settings),
        "units": [sum(unit) for unit in request.sizes.units],
        "reference_losses": reference,
        "rungs": rungs,
    }


def _options(settings: Settings) -> dict[str, Any]:
    """Of a run, as it records them."""
    default = asdict(Settings())
    first = {
        name for name in ("axis", "heads", "recipes") if getattr(settings, name) == default[name]
    }  # as on the first ladder
    left_out = {"ranks", "rungs", "text", *first}
    return {name: value for name, value in asdict(settings).items() if name not in left_out}


def _one_line_per_list(text: str) -> str:
    """Indented JSON with its innermost lists and mappings on one line each."""
    return re.sub(r"([\[{])\s+([^\[\]{}]*?)\s+([\]}])", lambda m: m[1] + re.sub(r"\s+", " ", m[2]) + m[3], text)


def _forget_earlier(out: Path, staging: Path) -> None:
    """Delete an earlier run's files that this run did not write."""
    rungs = [name for axis in AXES.values() for name in axis.rungs]
    every = {
        "allocator.png",
        "pipeline.png",
        "timeline.png",
        *(name for rung in rungs for name in (trace_of(rung), snapshot_of(rung))),
    }
    for name in every - {path.name for path in staging.iterdir()}:
        (out / name).unlink(missing_ok=True)
