"""Files left by others, read without waiting on a pipe and without filling the memory."""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LIMIT = 16 * 2**20  # bytes


def read_plain(path: str | os.PathLike[str], limit: int = LIMIT, *, links: bool = False) -> bytes:
    """The content of a plain file of at most `limit` bytes. A pipe, a device or a folder is refused, without waiting.

    Args:
        path: of the file.
        limit: bytes.
        links: whether `path` may be a link to the file, as a user's own may.

    Raises:
        ValueError: it is not a plain file, or larger; one line that names it.
        OSError: it does not exist, or cannot be read.
    """
    try:  # O_NONBLOCK: to open a pipe would otherwise wait for its writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{os.fspath(path)} is a link: a plain file is needed") from None
        if error.errno == errno.ENXIO:  # a socket
            raise ValueError(f"{os.fspath(path)} is not a plain file") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{os.fspath(path)} is not a plain file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(limit + 1) if status.st_size <= limit else b""
    finally:
        os.close(descriptor)
    if max(status.st_size, len(content)) > limit:
        raise ValueError(f"{os.fspath(path)} is too large: more than {limit:,} bytes")
    return content


def files_below(folder: Path) -> Iterator[Path]:
    """All files under a folder, at any depth. Links are not followed and count as files."""
    folders = deque([folder])
    while folders:
        with suppress(OSError), os.scandir(folders.popleft()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                else:
                    yield Path(entry.path)
