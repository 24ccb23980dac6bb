"""What a command needs of this machine, checked before anything starts."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path


def check_writable(folder: Path, option: str = "--out") -> None:
    """Make the folder that `option` names.

    Raises:
        ValueError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} {folder} cannot be written ({error.strerror}): name a folder that you may write to"
        ) from error


def check_writable_file(path: Path, option: str = "--out") -> None:
    """Make the folder of the file that `option` names, which may be there already.

    Raises:
        ValueError: it is a folder, or cannot be written.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: name a file")
    check_writable(path.parent, option)


def check_names(option: str, names: Sequence[str], known: Collection[str]) -> None:
    """What `option` names, separated by commas.

    Raises:
        ValueError: it names nothing, something twice, or something that is not `known`.
    """
    there = ", ".join(known)
    if not names:
        raise ValueError(f"{option} is empty; there are {there}")
    for place, name in enumerate(names):
        if name not in known:
            raise ValueError(f"{option}: there is no {name!r}; there are {there}")
        if name in names[:place]:
            raise ValueError(f"{option} names {name} twice: once is enough")
