"""One command with a time limit, gone afterwards with all that it has started."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from minifsdp.course.workshop.tree import end_members
from minifsdp.instruments.system.housekeeping import TREE, label

PATIENCE = 12.0  # seconds in which a command that is over its limit may still write what it has


class Ended(NamedTuple):
    """How a command ended.

    Attributes:
        code: as `subprocess` has it, negative for a signal; None if it was over its limit.
        seconds: by the clock.
        last: the last line that it printed.
    """

    code: int | None
    seconds: float
    last: str


def run_limited(
    arguments: Sequence[str], name: str, limit: float, log: Path, folder: Path, variables: Mapping[str, str]
) -> Ended:
    """Run `python arguments...`; at the limit interrupt it, soon after kill it, with all its descendants.

    Args:
        arguments: of the Python that runs this.
        name: what the process is called in `minifsdp ps`.
        limit: seconds.
        log: the file to which all that it prints is added.
        folder: in which it runs.
        variables: of its environment, besides this process's own.
    """
    mark = secrets.token_hex(4)
    environ = os.environ | label(name) | {TREE: mark, "PYTHONUNBUFFERED": "1", **variables}
    start = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environ,
            start_new_session=True,
        )
        try:
            code = _wait(process, limit)
        finally:
            end_members(process.pid if process.poll() is None else None, mark)
            process.kill()
            process.wait()
    return Ended(code, time.monotonic() - start, _last_line(log))


def _wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return process.wait(limit)
    process.send_signal(signal.SIGINT)  # pytest then reports the tests that are done
    with suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    return None


def _last_line(log: Path) -> str:
    with log.open("rb") as output:
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4000))
        lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("minifsdp: ")[:300] if lines else "it printed nothing"
