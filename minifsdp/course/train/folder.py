"""The folder of a run's checkpoints: which are there, which go, and whose it is.

    DIR/step-00000050/                a checkpoint
    DIR/.step-00000100.part/          being written: worth nothing
    DIR/.step-00000050.old/           being deleted
    DIR/.lock                         held by the run that writes here

What else lies in DIR is its owner's: a copy under another name, a file of notes.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WHOLE = re.compile(r"step-[0-9]+")
_REST = re.compile(r"\.step-[0-9]+\.(part|old)")
_FILES = re.compile(r"run\.pt|rank-[0-9]+\.pt|\.metadata|.+\.distcp")


class CheckpointError(OSError):
    """A checkpoint that cannot be written or read; one line that names it and the cure."""


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, the oldest first: what has the name of one is whole."""
    found = [path for path in folder.iterdir() if _WHOLE.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def latest(folder: Path) -> Path | None:
    """The last checkpoint."""
    return max(checkpoints(folder), key=step_of, default=None)


def in_the_way(folder: Path) -> Path | None:
    """Something else that has the name of a checkpoint: a file, or a folder without any file of one."""
    named = (path for path in folder.iterdir() if _WHOLE.fullmatch(path.name))
    return next((path for path in named if not (path.is_dir() and any(map(_is_ours, path.iterdir())))), None)


def _is_ours(file: Path) -> bool:
    return _FILES.fullmatch(file.name) is not None


def check_apart(folder: Path, out: Path) -> None:
    """Raise ValueError if results would go into a checkpoint, which is deleted with all that is in it."""
    below = os.path.relpath(out.resolve(), folder.resolve()).split(os.sep)[0]
    if _WHOLE.fullmatch(below) or _REST.fullmatch(below):
        raise ValueError(f"--out {out}: {folder / below} is for a checkpoint, and goes with it: name another folder")


def step_of(whole: Path) -> int:
    """The steps that a checkpoint has, by its name."""
    return int(whole.name.removeprefix("step-"))


def damage(whole: Path, what: str) -> str:
    """The fault of a checkpoint and its cure, in one line."""
    before = [each for each in checkpoints(whole.parent) if step_of(each) < step_of(whole)]
    cure = f"--resume then takes {before[-1].name}" if before else "there is none before it: begin without --resume"
    return f"{whole} is damaged ({what}): delete it; {cure}"


def prune(folder: Path, keep: int) -> None:
    """Delete all but the last `keep`. What is deleted loses its name first, lest half of it be taken for whole."""
    for whole in checkpoints(folder)[:-keep]:
        _delete(whole.rename(folder / f".{whole.name}.old"))


def clean(folder: Path) -> None:
    """Delete what a killed run has left half written or half deleted."""
    for rest in rests(folder):
        _delete(rest)


def rests(folder: Path) -> list[Path]:
    """Folders that are half written or half deleted."""
    return [path for path in folder.iterdir() if _REST.fullmatch(path.name)] if folder.is_dir() else []


def _delete(rest: Path) -> None:
    """A folder, or a link to one, which is on another disk for a reason."""
    if rest.is_dir() and not rest.is_symlink():
        shutil.rmtree(rest)
    else:
        rest.unlink()


@contextmanager
def held(folder: Path, patience: float = 5.0) -> Iterator[None]:
    """Have the folder to oneself; the lock goes with the process that holds it.

    If the block raises, a file for the lock goes that was not there before.

    Args:
        patience: seconds to wait: ranks of a run that was killed end a moment after it.

    Raises:
        ValueError: another run has it.
    """
    file, deadline = folder / ".lock", time.monotonic() + patience
    was_there = file.exists()
    while (lock := _lock(file)) is None:
        if time.monotonic() > deadline:
            raise ValueError(f"--checkpoint {folder} is another run's: name another folder")
        time.sleep(0.05)
    try:
        yield
    except BaseException:
        if not was_there:
            file.unlink(missing_ok=True)
        raise
    finally:
        os.close(lock)


def _lock(file: Path) -> int | None:
    """A descriptor of the file, locked; None if another process has it, or has just deleted it."""
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ValueError(f"{file} cannot be opened ({why}): remove it, or name another folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(file)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None
