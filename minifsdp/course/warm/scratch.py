"""Temporary folders that the program does not leave behind, even if it is killed."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
        if os.path.lexists(made.name):  # nested deeper than Python's recursion limit
            subprocess.run(["rm", "-rf", "--", made.name], stderr=subprocess.DEVNULL, check=False)
