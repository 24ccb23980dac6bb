"""The folder of a run's checkpoints: list them, delete old ones, lock the folder.

    DIR/step-00000050/                a checkpoint
    DIR/.step-00000100.part/          being written, unusable
    DIR/.step-00000050.old/           being deleted
    DIR/.lock                         held by the run that writes to DIR

Anything else in DIR belongs to the user, such as a copy under another name or a file of notes.
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
    """A checkpoint cannot be written or read; the message is one line with its name and the cure."""


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, oldest first; a folder with a checkpoint's name is complete."""
    found = [path for path in folder.iterdir() if _WHOLE.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def latest(folder: Path) -> Path | None:
    """The latest checkpoint, or None."""
    return max(checkpoints(folder), key=step_of, default=None)


def in_the_way(folder: Path) -> Path | None:
    """A path with a checkpoint's name that is none: a file, or a folder without any checkpoint file."""
    named = (path for path in folder.iterdir() if _WHOLE.fullmatch(path.name))
    return next((path for path in named if not (path.is_dir() and any(map(_is_ours, path.iterdir())))), None)


def _is_ours(file: Path) -> bool:
    return _FILES.fullmatch(file.name) is not None


def check_apart(folder: Path, out: Path) -> None:
    """Raise ValueError if the output folder is inside a checkpoint, with which it would be deleted."""
    below = os.path.relpath(out.resolve(), folder.resolve()).split(os.sep)[0]
    if _WHOLE.fullmatch(below) or _REST.fullmatch(below):
        raise ValueError(f"--out {out}: {folder / below} is a checkpoint's, deleted with it: name another folder")


def step_of(whole: Path) -> int:
    """The number of steps in a checkpoint's name."""
    return int(whole.name.removeprefix("step-"))


def damage(whole: Path, what: str) -> str:
    """A one-line message about a damaged checkpoint, with the cure."""
    before = [each for each in checkpoints(whole.parent) if step_of(each) < step_of(whole)]
    cure = f"--resume then takes {before[-1].name}" if before else "there is no earlier one: begin without --resume"
    return f"{whole} is damaged ({what}): delete it; {cure}"


def prune(folder: Path, keep: int) -> None:
    """Delete all but the last `keep`, renaming each first so that a half-deleted one never looks complete."""
    for whole in checkpoints(folder)[:-keep]:
        _delete(whole.rename(folder / f".{whole.name}.old"))


def clean(folder: Path) -> None:
    """Delete the half-written and half-deleted checkpoints of a killed run."""
    for rest in rests(folder):
        _delete(rest)


def rests(folder: Path) -> list[Path]:
    """All half-written and half-deleted checkpoints."""
    return [path for path in folder.iterdir() if _REST.fullmatch(path.name)] if folder.is_dir() else []


def _delete(rest: Path) -> None:
    """Delete a folder, or only the link if it is a link to a folder on another disk."""
    if rest.is_dir() and not rest.is_symlink():
        shutil.rmtree(rest)
    else:
        rest.unlink()


@contextmanager
def held(folder: Path, patience: float = 5.0) -> Iterator[None]:
    """Lock the folder for this process; the lock ends with the process.

    If the block raises, the lock file is removed unless it existed before.

    Args:
        patience: seconds to wait, since the ranks of a killed run end slightly later.

    Raises:
        ValueError: another run holds the lock.
    """
    file, deadline = folder / ".lock", time.monotonic() + patience
    was_there = file.exists()
    while (lock := _lock(file)) is None:
        if time.monotonic() > deadline:
            raise ValueError(f"--checkpoint {folder} belongs to another run: name another folder")
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
    """A descriptor of the locked file; None if another process holds the lock or has just deleted the file."""
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
