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


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, the oldest first: what has the name of one is whole."""
    found = [path for path in folder.iterdir() if _WHOLE.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step)


def latest(folder: Path) -> Path | None:
    """The last checkpoint."""
    return max(checkpoints(folder), key=_step, default=None)


def in_the_way(folder: Path) -> Path | None:
    """Something else that has the name of a checkpoint."""
    return next((path for path in folder.iterdir() if _WHOLE.fullmatch(path.name) and not path.is_dir()), None)


def _step(whole: Path) -> int:
    return int(whole.name.removeprefix("step-"))


def damage(whole: Path, what: str) -> str:
    """What is wrong with a checkpoint, and how to go on, in one line."""
    before = [each for each in checkpoints(whole.parent) if _step(each) < _step(whole)]
    cure = f"--resume then takes {before[-1].name}" if before else "there is none before it: begin without --resume"
    return f"{whole} is damaged ({what}): delete it; {cure}"


def prune(folder: Path, keep: int) -> None:
    """Delete all but the last `keep`. What is deleted loses its name first, lest half of it be taken for whole."""
    for whole in checkpoints(folder)[:-keep]:
        _delete(whole.rename(folder / f".{whole.name}.old"))


def clean(folder: Path) -> None:
    """Delete what a killed run has left half written or half deleted."""
    for rest in folder.iterdir():
        if _REST.fullmatch(rest.name):
            _delete(rest)


def _delete(rest: Path) -> None:
    """A folder, or a link to one, which is on another disk for a reason."""
    if rest.is_dir() and not rest.is_symlink():
        shutil.rmtree(rest)
    else:
        rest.unlink()


@contextmanager
def held(folder: Path, patience: float = 5.0) -> Iterator[None]:
    """Have the folder to oneself; the lock goes with the process that holds it.

    Args:
        patience: seconds to wait: ranks of a run that was killed end a moment after it.

    Raises:
        ValueError: another run has it.
    """
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
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
    finally:
        os.close(lock)
