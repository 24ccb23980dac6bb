"""Temporary folders that the program does not leave behind, even if it is killed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from minifsdp.course.system.plain_files import remove_all
from minifsdp.course.warm.client import server


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder, removed at the end with anything in it; if this program is killed, by its server, if it has one."""
    made = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    server.remove_at_end(made.name)
    try:
        yield Path(made.name)
    finally:
        with suppress(RecursionError):
            made.cleanup()
        remove_all([made.name])
