"""Programs that need not import torch: forks of the tests' warm server.

For programs whose start is not what is tested. `tests/commands/test_cli.py` and others start real ones.
"""

from __future__ import annotations

import atexit
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from minifsdp.course.cli import main
from minifsdp.course.cli.commands import COMMANDS
from minifsdp.instruments.warm.client import Process, server
from minifsdp.instruments.warm.needs import RANKS_NEED

COMMANDS_NEED = (*(f"minifsdp.course.cli.{command.module}" for command in COMMANDS.values()), "matplotlib.pyplot")
NEEDS = (*RANKS_NEED, *COMMANDS_NEED, "torch.distributed.run")


def call_and_end(function: Callable[..., None], *args: Any) -> None:
    """Call a function in a fork, and end as a Python program does, but do not take apart what is imported.

    The fork would first copy all of that, which takes a quarter of a second of CPU time.
    """
    code: Any = None
    try:
        function(*args)
    except SystemExit as stop:
        code = stop.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # it waits for the threads, as Python does
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored in: {sys.stdout!r}\nOSError: {error}", file=sys.stderr)
        code = 120
    with suppress(OSError):
        sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def run_command(file_bytes: int | None = None) -> None:
    """Run the command line in `sys.argv`; its ranks, too, are forks. A file may have so many bytes."""
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    server.fork_here()
    main()


def run_python(*words: str) -> None:
    """Do what `python WORDS` does with a file, or with `-m` and a module."""
    first, *rest = (word for word in words if word != "-u")
    sys.argv[:] = rest if first == "-m" else [first, *rest]
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")


def run_torchrun() -> None:
    """Run the torchrun in `sys.argv`; its ranks are forks instead of programs."""
    from torch.distributed import run

    launch: Any = run.elastic_launch
    run.elastic_launch = lambda config, entrypoint: launch(replace(config, start_method="fork"), run_python)  # type: ignore[assignment,misc]
    run.main()


def start(*words: str, **streams: Any) -> Process:
    """Start `minifsdp WORDS...`; arguments as for `start_fork`."""
    return start_fork(run_command, "minifsdp", *words, **streams)


def start_fork(
    function: Callable[..., None],
    *words: str,
    args: tuple[Any, ...] = (),
    out: int | None = None,
    errors: int | None = None,
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Process:
    """Start a process that calls `function(*args)`, with WORDS as `sys.argv`.

    Its standard output and errors go to these file descriptors, or nowhere.
    """
    with open(os.devnull, "r+") as null:
        nowhere = null.fileno()
        return server.start(
            "command",
            call_and_end,
            function,
            *args,
            stdio=(nowhere, nowhere if out is None else out, nowhere if errors is None else errors),
            argv=words,
            folder=str(folder) if folder else None,
            environ=environ,
            needs=NEEDS,
        )


def minifsdp(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run `minifsdp WORDS...` to its end; arguments and errors as for `run_fork`."""
    return run_fork(run_command, "minifsdp", *words, **settings)


def torchrun(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run `torchrun WORDS...` to its end; arguments and errors as for `run_fork`."""
    return run_fork(run_torchrun, "torchrun", *words, **settings)


def run_fork(
    function: Callable[..., None], *words: str, timeout: float = 120, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end; arguments as for `start_fork`.

    Raises:
        subprocess.TimeoutExpired: it has not ended within `timeout` seconds; it is killed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = start_fork(function, *words, out=out.fileno(), errors=errors.fileno(), **settings)
        try:
            code = process.wait(timeout)
            if code is None:
                process.kill()
                raise subprocess.TimeoutExpired(words, timeout)
        finally:
            process.close()
        for each in (out, errors):
            each.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), errors.read())
