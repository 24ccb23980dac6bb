"""What a command needs of this machine, checked before anything starts."""

from __future__ import annotations

import tempfile
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
