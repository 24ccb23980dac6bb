"""Files that are whole at any time: each is written beside its target, then renamed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # of a file system without hard links


class UndeliveredError(OSError):
    """Results that could not be written to the requested folder; one line that names where they are.

    Attributes:
        record: the results.
    """

    def __init__(self, message: str, record: dict[str, Any]) -> None:
        super().__init__(message)
        self.record = record


def write_whole(path: Path, content: bytes) -> None:
    """Write a whole file, or leave the old one.

    Raises:
        OSError: it cannot be written; names the file.
    """
    with _beside(path, content) as part:
        part.replace(path)


def write_new(path: Path, content: bytes) -> None:
    """Write a file where there is none.

    Raises:
        FileExistsError: there is one.
        OSError: it cannot be written; names the file.
    """
    with _beside(path, content) as part:
        try:
            os.link(part, path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
            part.rename(path)


@contextmanager
def _beside(path: Path, content: bytes) -> Iterator[Path]:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with suppress(FileNotFoundError):
            part.unlink()  # left by an earlier process with this id, or a pipe that would block
        part.write_bytes(content)
        yield part
    except OSError as error:  # for a full disk it names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def delivering(staging: Path, out: Path, record: dict[str, Any]) -> Iterator[None]:
    """Move the files that the block writes to `staging` to `out` when it ends: all of them, or none.

    Args:
        staging: a temporary folder.
        out: the output folder, made again if it has gone since its check.
        record: the results, for the error.

    Raises:
        UndeliveredError: `out` cannot be written, and the files are kept elsewhere; or not even `staging` can.
    """
    try:
        yield
    except OSError as error:
        raise UndeliveredError(f"{staging.parent}: {_why(error)}: no file could be written", record) from error
    files = sorted(path for path in staging.iterdir() if path.is_file())
    try:
        _publish(files, out)
    except OSError as error:
        kept = Path(tempfile.mkdtemp(prefix="minifsdp-kept-", dir=staging.parent))
        for path in files:
            path.rename(kept / path.name)
        raise UndeliveredError(
            f"--out {out} cannot be written ({_why(error)}): {_listed(files)} went to {kept} instead", record
        ) from error


def _publish(files: list[Path], out: Path) -> None:
    parts = {path: out / f".{path.name}.part" for path in files}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, part in parts.items():
            part.unlink(missing_ok=True)
            shutil.copyfile(path, part)
        for path, part in parts.items():
            part.replace(out / path.name)
    finally:
        for part in parts.values():
            with suppress(OSError):
                part.unlink(missing_ok=True)


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _listed(files: list[Path]) -> str:
    """The first names of some files."""
    names = [path.name for path in files]
    return ", ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"
