"""Temporary folders that do not stay, whatever ends the program that made them.

The program holds a lock on its folder. The kernel releases the lock when the program ends, even if it is killed.
Whoever makes the next folder removes those without a lock. A process id would not do: it may become another process's,
and in another container it is unknown. systemd, when it tidies up, leaves a locked folder alone as well.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Machines that share a folder, as by Lustre or NFS, may not see each other's locks: each has names of its own.
_PREFIX = f"minifsdp-{zlib.crc32(socket.gethostname().encode()):08x}-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, removed at the end with anything in it; first, those of programs that have ended are removed.

    Raises:
        OSError: no folder can be made.
    """
    remove_abandoned()
    folder, lock = _new()
    try:
        yield Path(folder)
    finally:
        try:
            _remove(folder)
        finally:
            if lock is not None:
                os.close(lock)


def remove_abandoned() -> None:
    """Remove this user's folders whose programs have ended."""
    found: list[str] = []
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        found += [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for folder in found:
        with suppress(OSError):  # its program runs, or another one is removing it
            if os.lstat(folder).st_uid == os.getuid():
                lock = _lock(folder)
                try:
                    _remove(folder)
                finally:
                    os.close(lock)


def _new() -> tuple[str, int | None]:
    """A new folder and its lock; without one where there are no locks, so that nobody else removes the folder."""
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            return folder, _lock(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # it was not locked for a moment, and has been removed
        except OSError:
            return folder, None


def _lock(folder: str) -> int:
    """A file descriptor that holds the folder's lock.

    Raises:
        BlockingIOError: another process holds it.
        FileNotFoundError: the folder has been removed.
        OSError: it is no folder, or its file system has no locks for folders.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), os.stat(folder, follow_symlinks=False)):
            raise FileNotFoundError(folder)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _remove(folder: str) -> None:
    """Remove a folder, also one nested deeper than Python's recursion limit, or with parts closed to their owner."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        for command in (("chmod", "-R", "u+rwx"), ("rm", "-rf")):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)
