"""`minifsdp ...` as a process of its own that need not import torch: a fork of the tests' warm server.

For commands whose entry point is not what is tested. `tests/commands/test_cli.py` and others start real programs.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from minifsdp.course.cli import main
from minifsdp.course.cli.commands import COMMANDS
from minifsdp.course.warm.client import Process, server
from minifsdp.course.warm.needs import RANKS_NEED

NEEDS = (*RANKS_NEED, *(f"minifsdp.course.cli.{command.module}" for command in COMMANDS.values()), "matplotlib.pyplot")


def run_command() -> None:
    """Run the command line in `sys.argv`; its ranks, too, are forks."""
    server.fork_here()
    main()


def start(
    *words: str,
    out: int | None = None,
    errors: int | None = None,
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Process:
    """Start `minifsdp WORDS...`; its standard output and errors go to these file descriptors, or nowhere."""
    with open(os.devnull, "r+") as null:
        nowhere = null.fileno()
        return server.start(
            "command",
            run_command,
            stdio=(nowhere, nowhere if out is None else out, nowhere if errors is None else errors),
            argv=["minifsdp", *words],
            folder=str(folder) if folder else None,
            environ=environ,
            needs=NEEDS,
        )


def minifsdp(
    *words: str, folder: Path | None = None, environ: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `minifsdp WORDS...` to its end.

    Raises:
        subprocess.TimeoutExpired: it has not ended within `timeout` seconds; it is killed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = start(*words, out=out.fileno(), errors=errors.fileno(), folder=folder, environ=environ)
        try:
            code = process.wait(timeout)
            if code is None:
                process.kill()
                raise subprocess.TimeoutExpired(["minifsdp", *words], timeout)
        finally:
            process.close()
        for each in (out, errors):
            each.seek(0)
        return subprocess.CompletedProcess(["minifsdp", *words], code, out.read(), errors.read())
