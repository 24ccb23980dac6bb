"""Atomic checkpoints: complete or absent, even if a process is killed or the power fails.

    DIR/step-00000050/                .metadata, *.distcp    model and optimizer, sharded (torch.distributed.checkpoint)
                                      rank-0.pt, rank-1.pt   random numbers of each rank
                                      run.pt                 everything else, the settings, the files' sizes

All ranks write into the `.part` folder, with fsync; once all have, rank 0 renames it, which is atomic. Only then are
older checkpoints deleted. With several hosts DIR has to be on a shared file system.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from minifsdp.checkpoint import get_trainer_state, set_trainer_state
from minifsdp.course.train.folder import CheckpointError, damage, latest, prune, step_of
from minifsdp.course.train.settings import TrainSettings, task_of
from minifsdp.course.train.state import State, seed_rank
from minifsdp.instruments.system.plain_files import read_plain

RUN = "run.pt"
LARGEST = 2**34  # bytes of a file; run.pt has one number per step


def save(state: State, settings: TrainSettings, data: str) -> None:
    """Save everything; a collective call. The checkpoint is complete on return."""
    folder, rank = settings.checkpoint, dist.get_rank()
    assert folder is not None
    saved = folder / f"step-{state.step:08}"
    part = folder / f".{saved.name}.part"
    if rank == 0:
        with _unwritten(part, saved):
            part.mkdir()
    dist.barrier()
    of_trainer = get_trainer_state(state.trainer.model, state.trainer.optimizer)
    with _unwritten(part, saved):
        state_dict_saver.save(of_trainer, storage_writer=FileSystemWriter(part, sync_files=True))
        _write(part / f"rank-{rank}.pt", _random_states())
    dist.barrier()  # all ranks have written
    if rank == 0:
        run = {
            "step": state.step,
            "losses": state.losses[: state.step].tolist(),
            "draws": state.draws.get_state(),
            "scaler": state.scaler.state_dict(),
            "ranks": settings.ranks,
            "task": settings.task,
            "data": data,
            "files": {file.name: file.stat().st_size for file in part.iterdir()},
        }
        with _unwritten(part, saved):
            _write(part / RUN, run)
            _sync(part)
            part.rename(saved)
            _sync(folder)
        prune(folder, settings.keep)
    dist.barrier()


def restore(state: State, saved: Path) -> None:
    """Restore a fresh state from a checkpoint; a collective call.

    Any number of ranks, strategy and recipe can read model and optimizer. Random number generators are restored if the
    number of ranks is the same; otherwise each rank reseeds its own.
    """
    of_trainer = get_trainer_state(state.trainer.model, state.trainer.optimizer)
    try:
        state_dict_loader.load(of_trainer, storage_reader=FileSystemReader(saved))
    except CheckpointException as error:
        raise CheckpointError(damage(saved, _first_cause(error))) from error
    set_trainer_state(state.trainer.model, state.trainer.optimizer, of_trainer)
    run = _load(saved / RUN)
    state.step = run["step"]
    state.losses[: state.step] = torch.tensor(run["losses"])
    state.draws.set_state(run["draws"])
    state.scaler.load_state_dict(run["scaler"])
    if run["ranks"] == dist.get_world_size():
        _set_random_states(_load(saved / f"rank-{dist.get_rank()}.pt"))
    else:
        seed_rank(run["task"]["seed"], state.step)


def _load(file: Path) -> dict[str, Any]:
    """Load a file written by `_write`.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return dict(torch.load(io.BytesIO(read_plain(file, LARGEST, links=True))))
    except Exception as error:
        raise ValueError(damage(file.parent, f"{file.name}: {type(error).__name__}")) from error


def check_same_task(saved: Path, settings: TrainSettings, data: str) -> int:
    """Raise ValueError unless `settings` can continue from this checkpoint; returns its number of steps."""
    if missing := next((path for path in saved.iterdir() if not path.is_file()), None):
        raise ValueError(damage(saved, f"{missing.name} is not a file"))
    run = _load(saved / RUN)
    if run["ranks"] == settings.ranks:
        for rank in range(settings.ranks):
            _load(saved / f"rank-{rank}.pt")
    _check_files(saved, run.get("files", {".metadata": None}))  # older checkpoints have no list
    if run["step"] != step_of(saved):
        raise ValueError(damage(saved, f"it was renamed: it holds step {run['step']}"))
    now = settings.task
    for name, then in task_of(run["task"]).items():
        if now[name] != then:
            raise ValueError(f"{_differs(name, now[name], then, saved)}, or name another --checkpoint DIR")
    if run["data"] != data:
        raise ValueError(f"--data: {saved} was trained on {run['data']}, not on {data}; give that text")
    if run["step"] > settings.steps:
        raise ValueError(f"--steps {settings.steps}: {saved} is beyond that; give more, or another --checkpoint DIR")
    return int(run["step"])


def _differs(name: str, now: Any, then: Any, saved: Path) -> str:
    if not isinstance(now, bool):
        return f"--{name} {now}: {saved} was trained with {then}; give that"
    return f"--{name}: {saved} was trained {'without it; leave it out' if now else 'with it; add it'}"


def _check_files(saved: Path, sizes: dict[str, int | None]) -> None:
    """Check the sizes of the files to be read, except random states, which another number of ranks does not need."""
    for name, size in sizes.items():
        if name.startswith("rank-"):
            continue
        if not (saved / name).exists():
            raise ValueError(damage(saved, f"{name} is missing"))
        if size is not None and (now := (saved / name).stat().st_size) != size:
            raise ValueError(damage(saved, f"{name} has {now:,} bytes, not {size:,}"))
    try:
        FileSystemReader(saved).read_metadata()
    except Exception as error:
        raise ValueError(damage(saved, f".metadata: {type(error).__name__}")) from error


@contextmanager
def _unwritten(part: Path, saved: Path) -> Iterator[None]:
    """Reduce an error in saving, which torch reports with every rank's traceback, to one line with the cause."""
    try:
        yield
    except (CheckpointException, OSError) as error:
        cause = _first_cause(error) if isinstance(error, CheckpointException) else error.strerror or str(error)
        probe = part / f"is there space, asks {dist.get_rank()}"
        try:  # on a full disk torch's zip writer only says "unexpected pos", so probe the disk
            probe.write_bytes(bytes(2**16))
        except OSError as said:
            cause = said.strerror or cause
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
        cause = cause[:1].lower() + cause[1:]
        kept = latest(saved.parent)
        cure = f"{kept.name} is kept, and --resume continues from it" if kept else "nothing is saved yet"
        raise CheckpointError(f"{saved} cannot be saved ({cause}); {cure}") from error


def _first_cause(error: CheckpointException) -> str:
    cause, _ = next(iter(error.failures.values()))
    return f"{type(cause).__name__}: {cause}".partition("\n")[0]


def _random_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if states["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def _write(path: Path, content: Any) -> None:
    buffer = io.BytesIO()  # torch's zip writer would hide the disk's error
    torch.save(content, buffer)
    with path.open("wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Fsync a folder, so that its file names are on disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
