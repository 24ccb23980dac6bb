"""The step benchmark as a whole: check the request, run the ranks, write the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifsdp.course.bench.compete import compete, train_alone
from minifsdp.course.bench.contestants import CONTESTANTS, Contestant
from minifsdp.course.bench.prediction import Prediction, predict
from minifsdp.course.bench.report import make_record
from minifsdp.course.bench.settings import BenchSettings
from minifsdp.instruments import plots
from minifsdp.instruments.launch import launch
from minifsdp.instruments.launch.world import Device, World, choose_world, is_first
from minifsdp.instruments.link.emulated import parse_link
from minifsdp.instruments.system.resources import (
    ADAMW_BYTES,
    check_counts,
    check_host_memory,
    check_names,
    check_seed,
    check_writable_file,
)
from minifsdp.instruments.system.scratch import scratch_folder
from minifsdp.instruments.system.whole_files import delivering

COUNTS = ("ranks", "batch", "layers", "width", "heads", "context", "steps", "warm_up")
TIME_LIMIT = 3600.0  # seconds that the ranks may take together before they count as stuck

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """A run that has passed every check.

    Attributes:
        contestants: all that exist; `settings.only` names the participants.
        link: latency in seconds and bandwidth in bytes per second, for the device model.
    """

    settings: BenchSettings
    contestants: Mapping[str, Contestant]
    world: World
    link: tuple[float, float] | None
    out: Path


def check(
    settings: BenchSettings,
    device: Device,
    out: Path,
    share_gpu: bool | None = None,
    *,
    link: str | None = None,
    contestants: Mapping[str, Contestant] = CONTESTANTS,
) -> Request:
    """Check everything that can be checked before a rank starts, and make the output folder.

    Args:
        settings: of the run.
        device: as for `choose_world`.
        out: folder for `bench.json` and `bench.png`.
        share_gpu: whether several ranks may share one GPU, as for `choose_world`.
        link: measured latency and bandwidth between the GPUs, as for `parse_link`; only the device model uses it.
        contestants: by the names that `settings.only` may hold.

    Raises:
        ValueError: the request is impossible; one line that names the fault and the cure.
    """
    check_names("--only", settings.only, contestants)
    check_counts(settings, COUNTS)
    if settings.heads and settings.width % settings.heads:
        raise ValueError(f"--heads {settings.heads} does not divide --width {settings.width}: choose a divisor")
    check_seed(settings.seed)
    settings.batches()
    world = choose_world(settings.ranks, device, share_gpu)
    if world.device == "cpu":
        models = len(settings.only)
        check_host_memory(settings.shape()["parameters"], models * ADAMW_BYTES, ", or fewer contestants with --only")
    measured = None if link is None else parse_link(link)
    for name in ("bench.json", "bench.png"):
        check_writable_file(out / name)
    return Request(settings, contestants, world, (measured.latency, measured.bandwidth) if measured else None, out)


def run(request: Request, progress: Progress) -> dict[str, Any] | None:
    """Measure time, memory and losses of all contestants; write `bench.json` and `bench.png`.

    Returns:
        the content of `bench.json`; None on all but the first rank of an SPMD run.

    Raises:
        RankError: a rank has failed.
        UndeliveredError: the output folder can no longer be written; names the folder that has the files.
    """
    settings, world = request.settings, request.world
    where: Any = {"backend": world.backend, "share_gpu": world.shares_gpu, "timeout": TIME_LIMIT}
    progress("one process", 0, 1)
    reference = launch(train_alone, 1, settings, **where)[0]
    ranks = launch(
        compete,
        settings.ranks,
        settings,
        request.contestants,
        on_report=lambda _, what: progress(*what),
        **where,
    )
    if not is_first():
        return None
    progress("the device model", 0, 1)
    record = make_record(settings, request.contestants, world, reference, ranks, _predict(request, ranks[0]["device"]))
    with scratch_folder() as staging, delivering(staging, request.out, record):
        (staging / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
        plots.bench_figure(record, staging / "bench.png")
    return record


def _predict(request: Request, gpu: str) -> Prediction:
    """The device model's prediction of this run."""
    if request.world.device == "cpu":
        return Prediction(None, "the device model is of GPUs: none on CPU")
    if request.world.shares_gpu:
        return Prediction(None, "the device model does not cover ranks that share a GPU")
    if request.link is None and request.settings.ranks > 1:
        return Prediction(None, "the device model needs the link's numbers: --measured-link, from `minifsdp doctor`")
    latency, bandwidth = request.link or (0.0, 1.0)  # one rank sends nothing
    return predict(request.settings, gpu, bandwidth, latency)
