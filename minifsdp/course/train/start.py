"""Validate arguments, launch the run, write the results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifsdp.course.train import checkpoint, report
from minifsdp.course.train import folder as folders
from minifsdp.course.train.folder import CheckpointError
from minifsdp.course.train.loop import train
from minifsdp.course.train.settings import TrainSettings
from minifsdp.instruments.launch import RankError, launch
from minifsdp.instruments.launch.job import check_job
from minifsdp.instruments.launch.world import Device, World, choose_world, is_first
from minifsdp.instruments.system.resources import ADAMW_BYTES, check_host_memory, check_writable

_CHECKPOINT_ERROR = re.compile(r"^rank [0-9]+ failed: CheckpointError: (.*?)(?: \([^()]*:[0-9]+\))?$")

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Request:
    """A run that has passed every check and can start.

    Attributes:
        saved: the checkpoint to resume from, or None.
        step: the checkpoint's number of steps.
        data: the text's name and size.
    """

    settings: TrainSettings
    data: str
    world: World
    out: Path
    saved: Path | None = None
    step: int = 0


def check(settings: TrainSettings, device: Device, out: Path, share_gpu: bool | None = None) -> Request:
    """Check everything that can be checked before a rank starts, and create the folders.

    Raises:
        ValueError: a setting is impossible; the message is one line with its name and the cure.
        OSError: the training text is missing.
    """
    check_job()
    corpus = settings.check()
    data = f"{corpus.name} ({corpus.bytes:,} bytes, checksum {corpus.checksum})"
    world = choose_world(settings.ranks, device, share_gpu)
    check_host_memory(settings.elements(), ADAMW_BYTES if world.device == "cpu" else 4)
    saved, step = None, 0
    with _having(settings.checkpoint, settings.resume, out):
        if settings.checkpoint:
            saved = _find_checkpoint(settings.checkpoint, settings)
        if saved is not None:
            step = checkpoint.check_same_task(saved, settings, data)
        check_writable(out)
    return Request(settings, data, world, out, saved, step)


def run(request: Request, progress: Progress) -> dict[str, Any] | None:
    """Train; write `train.json` and `loss.png`.

    Args:
        request: the checked run.
        progress: called now and then with the steps done, the total steps, and the loss.

    Returns:
        the content of `train.json`; None on every rank except the first of an SPMD run.

    Raises:
        RankError: a rank has failed.
        CheckpointError: a checkpoint cannot be written or read.
        UndeliveredError: the output folder is no longer writable; the message names the folder that has the files.
    """
    try:
        ranks = launch(
            train,
            request.settings.ranks,
            request.settings,
            request.data,
            request.saved,
            timeout=request.settings.time_limit,
            backend=request.world.backend,
            share_gpu=request.world.shares_gpu,
            on_report=lambda _, what: progress(*what),
        )
    except RankError as error:
        if said := _CHECKPOINT_ERROR.search(str(error)):
            raise CheckpointError(said[1]) from error
        raise
    finally:
        _tidy(request.settings.checkpoint)
    if not is_first():
        return None
    record = report.record(request.settings, request.data, request.world, request.step, ranks)
    report.write(record, request.out)
    return record


def _tidy(folder: Path | None) -> None:
    """Delete the half-written checkpoints of ranks that have ended; if that fails, the next run deletes them."""
    if folder is not None and is_first() and folders.rests(folder):
        with suppress(ValueError, OSError), folders.held(folder):
            folders.clean(folder)


@contextmanager
def _having(folder: Path | None, resume: bool, out: Path) -> Iterator[None]:
    """Lock the checkpoint folder while it is checked, and remove the remains of a killed run from it."""
    if folder is None:
        yield
        return
    if resume and not folder.is_dir():
        raise ValueError(f"--resume: there is no folder {folder}; leave out --resume to start a new run")
    folders.check_apart(folder, out)
    check_writable(folder, "--checkpoint")
    if not is_first():
        yield
        return
    with folders.held(folder):
        folders.clean(folder)
        yield


def _find_checkpoint(folder: Path, settings: TrainSettings) -> Path | None:
    if other := folders.in_the_way(folder):
        raise ValueError(f"{other} has a checkpoint's name but is not one: rename it")
    saved = folders.latest(folder)
    if settings.resume and saved is None:
        raise ValueError(f"--resume: {folder} contains no checkpoint; leave out --resume to start a new run")
    if saved is not None and not (settings.resume or settings.auto_resume):
        raise ValueError(f"--checkpoint {folder} holds {saved.name}: add --resume to continue, or name another folder")
    return saved
