"""What runs notebooks, such as nbval, and their kernels, as forks of servers that have imported what these need.

Only how they start differs from `pytest --nbval`, `jupyter execute` and `minifsdp lab run`, which tests run, too, as
users do.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from commands_in_forks import call_and_end, run_command, run_python
from jupyter_client.provisioning import local_provisioner

from minifsdp.course.needs import RANKS_USE
from minifsdp.instruments.warm.client import Process, server
from minifsdp.instruments.warm.needs import RANKS_NEED

# Not ipykernel: the ranks are forks as well, and tqdm writes for a notebook wherever it is imported.
KERNELS_NEED = (*RANKS_NEED, *RANKS_USE, "matplotlib_inline.backend_inline", "matplotlib.pyplot", __name__)
NEEDS = (*KERNELS_NEED, "nbval.plugin")


def start(options: Sequence[str], folder: Path, environ: Mapping[str, str], output: IO[str]) -> Process:
    """Start `pytest OPTIONS...` in a folder, with nbval as its only plugin: Hypothesis's imports it all at the end."""
    with open(os.devnull, "r+") as null:
        return server.start(
            "nbval",
            call_and_end,
            run_pytest,
            ["-p", "nbval.plugin", *options],
            stdio=(null.fileno(), output.fileno(), output.fileno()),
            folder=str(folder),
            environ={**environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            needs=NEEDS,
        )


def run_pytest(options: list[str]) -> None:
    """Run pytest to its end; a kernel that it starts is a fork of a server that is a fork of this process."""
    server.fork_here()
    local_provisioner.launch_kernel = launch_kernel
    sys.exit(pytest.main(options))


def run_command_with_kernel() -> None:
    """Run the minifsdp command line in `sys.argv`; a kernel that it starts is a fork, too."""
    local_provisioner.launch_kernel = launch_kernel
    run_command()


def run_python_with_kernel(*words: str) -> None:
    """Do what `python WORDS` does; a kernel that it starts is a fork, too."""
    server.fork_here()
    local_provisioner.launch_kernel = launch_kernel
    run_python(*words)


def launch_kernel(
    cmd: list[str],
    *,
    stderr: IO[str] | None = None,
    env: Mapping[str, str],
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
    **others: Any,
) -> Process:
    """What jupyter_client's function of this name does, with what it uses of a `subprocess.Popen`."""
    with open(os.devnull, "r+") as null:
        stdio = (null.fileno(), null.fileno(), null.fileno() if stderr is None else stderr.fileno())
        argv = cmd[cmd.index("ipykernel_launcher") :]
        settings: dict[str, Any] = {"stdio": stdio, "folder": cwd, "environ": env, "argv": argv, "needs": KERNELS_NEED}
        kernel: Any = server.start("kernel", run_kernel, fds=pass_fds, **settings)
    kernel.stdin = kernel.stdout = kernel.stderr = None
    kernel.send_signal = lambda number: os.kill(kernel.pid, number) if kernel.poll() is None else None
    while os.getpgid(kernel.pid) != kernel.pid:  # signals are sent to its group, before this the server's
        time.sleep(0.001)
    return kernel


def run_kernel(*held: int) -> None:
    """Run the kernel that the command line in `sys.argv` describes; its ranks and checks are forks of this process.

    Args:
        *held: file descriptors that it keeps open.
    """
    server.fork_here()
    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance()
