"""Checkpoints that are whole or not there, whenever a process is killed and whenever the power goes.

    DIR/step-00000050/                .metadata, *.distcp    model and optimizer, sharded (torch.distributed.checkpoint)
                                      rank-0.pt, rank-1.pt   random numbers of each rank
                                      run.pt                 everything else, and what was asked for
    DIR/.step-00000100.part/          being written: worth nothing
    DIR/.step-00000050.old/           being deleted
    DIR/.lock                         held by the run that writes here

All ranks write into the `.part`, with fsync; when all have, rank 0 gives it its name: a rename either has happened or
has not. Only then do older ones go. With several hosts DIR has to be on a file system that they share.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from minifsdp.checkpoint import get_state_dict, set_state_dict
from minifsdp.course.train.settings import TASK, Settings
from minifsdp.course.train.state import State, seed_rank

ONE_BEFORE = "delete it and --resume takes the one before"


def save(state: State, settings: Settings, data: str) -> None:
    """Save everything, on all ranks together; when it returns the checkpoint is there."""
    folder, rank = settings.checkpoint, dist.get_rank()
    assert folder is not None
    whole = folder / f"step-{state.step:08}"
    part = folder / f".{whole.name}.part"
    if rank == 0:
        part.mkdir()
    dist.barrier()
    model, optimizer = get_state_dict(state.model, state.optimizer)
    parts = {"model": model, "optimizer": optimizer}
    with _failing(f"{part} cannot be written"):
        state_dict_saver.save(parts, storage_writer=FileSystemWriter(part, sync_files=True))
    _write(part / f"rank-{rank}.pt", _random_states())
    dist.barrier()  # all have written
    if rank == 0:
        run = {
            "step": state.step,
            "losses": state.losses[: state.step].tolist(),
            "draws": state.draws.get_state(),
            "scaler": state.scaler.state_dict(),
            "ranks": settings.ranks,
            "task": {name: getattr(settings, name) for name in TASK},
            "data": data,
        }
        _write(part / "run.pt", run)
        _sync(part)
        part.rename(whole)
        _sync(folder)
        prune(folder, settings.keep)
    dist.barrier()


def restore(state: State, whole: Path) -> None:
    """Bring a state that has just begun to where the checkpoint was; on all ranks together.

    Any number of ranks and any strategy can read model and optimizer. Random numbers go on where they were if there
    are as many ranks as then; otherwise each rank begins new ones.
    """
    model, optimizer = get_state_dict(state.model, state.optimizer)
    with _failing(f"{whole} is damaged, {ONE_BEFORE}"):
        state_dict_loader.load({"model": model, "optimizer": optimizer}, storage_reader=FileSystemReader(whole))
    set_state_dict(state.model, state.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    run = read(whole)
    state.step = run["step"]
    state.losses[: state.step] = torch.tensor(run["losses"])
    state.draws.set_state(run["draws"])
    state.scaler.load_state_dict(run["scaler"])
    if run["ranks"] == dist.get_world_size():
        _set_random_states(torch.load(whole / f"rank-{dist.get_rank()}.pt"))
    else:
        seed_rank(run["task"]["seed"], state.step)


def latest(folder: Path) -> Path | None:
    """The last checkpoint; all that have a name are whole."""
    return max(folder.glob("step-*"), default=None)


def read(whole: Path) -> dict[str, Any]:
    """What `save` wrote besides model and optimizer.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    try:
        return dict(torch.load(whole / "run.pt"))
    except Exception as error:
        raise ValueError(f"{whole} is damaged, {ONE_BEFORE}: {type(error).__name__}") from error


def check_same_task(whole: Path, settings: Settings, data: str) -> int:
    """Raise ValueError unless `settings` can go on from this checkpoint; returns the steps that it has."""
    run = read(whole)
    for name, then in run["task"].items():
        if (now := getattr(settings, name)) != then:
            raise ValueError(f"--{name} {now}: {whole} was trained with {then}; give that, or another --checkpoint DIR")
    if run["data"] != data:
        raise ValueError(f"--data: {whole} was trained on {run['data']}, not on {data}; give that text")
    if run["step"] > settings.steps:
        raise ValueError(f"--steps {settings.steps}: {whole} is beyond that; give more, or another --checkpoint DIR")
    return int(run["step"])


def prune(folder: Path, keep: int) -> None:
    """Delete all but the last `keep`. What is deleted loses its name first, lest half of it be taken for whole."""
    for whole in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(whole.rename(folder / f".{whole.name}.old"))


def clean(folder: Path) -> None:
    """Delete what a killed run has left half written or half deleted."""
    for rest in folder.glob(".step-*"):
        shutil.rmtree(rest)


@contextmanager
def held(folder: Path, patience: float = 5.0) -> Iterator[None]:
    """Have the folder to oneself; the lock goes with the process that holds it.

    Args:
        patience: seconds to wait: ranks of a run that was killed end a moment after it.

    Raises:
        ValueError: another run has it.
    """
    with (folder / ".lock").open("w") as lock:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(f"--checkpoint {folder} is another run's: name another folder") from None
                time.sleep(0.05)
        yield


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Say in a line what torch says in the tracebacks of all ranks."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise OSError(f"{what}: {type(cause).__name__}: {cause}") from error


def _random_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if states["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def _write(path: Path, content: Any) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk, not only the files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
