"""Run a saved notebook unattended, from its first cell to its last: `minifsdp lab run`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import torch
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from minifsdp.course.workshop.catalogue import Notebook, read_notebook
from minifsdp.course.workshop.copies import find_copy, lab_of_copy
from minifsdp.course.workshop.results import RECORD, Results, is_run, was_killed
from minifsdp.instruments.launch.world import World, choose_world
from minifsdp.instruments.system.housekeeping import end_processes, find_processes
from minifsdp.instruments.system.lifeline import end_by_signal
from minifsdp.instruments.system.resources import check_writable
from minifsdp.instruments.system.scratch import scratch_folder
from minifsdp.instruments.system.versions import versions
from minifsdp.instruments.watch.trace import TRACES

RANKS = 2  # in most launches of the labs; the record names the world chosen for this number

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """A run that has passed every check.

    Attributes:
        lab: such as "05".
        notebook: the learner's file, which is only read.
        out: the output folder.
        seconds: the time limit of the run.
        world: the backend and device for two ranks.
    """

    lab: str
    notebook: Path
    out: Path
    seconds: float
    world: World


def check(lab: str, notebook: Path | None, out: Path, seconds: float) -> Request:
    """Validate everything that can be checked before a kernel starts, and make the output folder.

    Args:
        lab: such as "05".
        notebook: by default the notebook of that lab in the current folder.
        out: a folder that holds no other run's results, unless that run was killed.
        seconds: the time limit of the whole run.

    Raises:
        ValueError: the notebook is missing, belongs to another lab or cannot be run; the output folder is in use; or
            the requested world is impossible.
        OSError: the notebook cannot be read.
    """
    path = notebook or find_copy(lab, Path())
    saved = read_notebook(path)
    _check_text(path, saved)
    try:
        cells = nbformat.read(path, as_version=4).cells  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ValueError(f"{path} is not a runnable notebook ({type(error).__name__}): save it again") from None
    if not any(cell.cell_type == "code" for cell in cells):
        raise ValueError(f"{path} has no cell to run as nbformat {saved.get('nbformat')}: save it again in Jupyter")
    if (belongs := lab_of_copy(path)) not in (lab, None):
        raise ValueError(f"{path} is a notebook of lab {belongs}, not of lab {lab}")
    if out.is_dir() and any(out.samefile(each.parent) for each in (path, path.resolve())):
        raise ValueError(f"--out {out} is the notebook's own folder: name another")
    _check_out(out, path.name)
    world = choose_world(RANKS)
    check_writable(out)
    return Request(lab, path, out, seconds, world)


def _check_out(out: Path, notebook: str) -> None:
    """Reject a folder with other results than those of a run that was killed."""
    try:
        if was_killed(out):
            return
    except BlockingIOError:
        raise ValueError(f"--out {out} is in use by a run that goes on: name another folder") from None
    for name in (RECORD, notebook):
        if os.path.lexists(out / name):
            whose = f"the {name} of another run" if name == RECORD else f"another {name}"
            raise ValueError(f"--out {out} holds {whose}: name another folder")


def _check_text(path: Path, notebook: Notebook) -> None:
    """Reject lone surrogates: JSON can hold "\\ud800", but neither a kernel message nor a file can."""
    for number, cell in enumerate(notebook["cells"], start=1):
        if _is_broken({key: value for key, value in cell.items() if key != "outputs"}):  # outputs are dropped anyway
            raise ValueError(f"{path}: cell {number} contains half a character, a lone surrogate: write it again")
    if _is_broken({key: value for key, value in notebook.items() if key != "cells"}):
        raise ValueError(f"{path} has half a character, a lone surrogate, in its metadata: save it again in Jupyter")


def _is_broken(content: Any) -> bool:
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def run(request: Request, progress: Progress) -> dict[str, Any]:
    """Run the notebook in a fresh kernel, in its own folder, and write the results to `request.out`.

    The run stops at a cell that raises, at the time limit, and on SIGINT, SIGTERM or SIGHUP. The kernel and the ranks
    are ended in every case. Results are on disk after every cell.

    Returns:
        the record: "state" is "complete", or "failed" or "stopped" with the reason in "error".
    """
    return asyncio.run(_run(request, progress))


async def _run(request: Request, progress: Progress) -> dict[str, Any]:
    reasons: list[str] = []

    def stop(why: str) -> None:
        if not reasons:  # ignore a second signal while stopping
            reasons.append(why)
            running.cancel()

    loop = asyncio.get_running_loop()
    loop.call_later(request.seconds, stop, f"not done within {request.seconds:g} s")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup, and for a script's background jobs
            loop.add_signal_handler(number, stop, f"ended by {number.name}")
    machine = {"world": str(request.world), "versions": versions(), "gpus": _gpus()}
    results = Results(request.lab, request.notebook, request.out, machine)
    running = asyncio.create_task(_run_cells(request, results, progress))
    try:
        await running
    except (asyncio.CancelledError, Exception) as error:  # nbclient wraps a cancellation in its own error
        results.end(*(("stopped", reasons[0]) if reasons else ("failed", _reason(error))))
    else:
        results.end("complete")
    return results.record


async def _run_cells(request: Request, results: Results, progress: Progress) -> None:
    cells = [index for index, cell in enumerate(results.notebook.cells) if is_run(cell)]
    with scratch_folder() as scratch, _lifeline() as lifeline:
        manager = AsyncKernelManager(
            kernel_name="python3",  # this Python, whichever kernel the notebook names
            connection_file=str(scratch / "kernel.json"),
        )
        client = NotebookClient(
            results.notebook,
            km=manager,
            startup_timeout=int(request.seconds) + 1,  # the run's own limit expires first
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
            log=_silent(),
        )
        environ = os.environ | {
            TRACES: str(results.new_traces.resolve()),
            "JPY_SESSION_NAME": request.notebook.name,  # the name in `minifsdp ps`
            "TMPDIR": str(scratch),  # a killed kernel leaves its files behind
        }
        folder = str(request.notebook.resolve().parent)
        try:
            await client.async_start_new_kernel(cwd=folder, env=environ, pass_fds=(lifeline,))
            if (kernel := _pid(manager)) is not None:
                end_by_signal(lifeline, group=kernel)
            await client.async_start_new_kernel_client()
            for done, index in enumerate(cells):
                progress(results.names[index], done, len(cells))
                with results.running(index):
                    await client.async_execute_cell(results.notebook.cells[index], index, execution_count=done + 1)
        finally:
            await _end(client, manager)


async def _end(client: NotebookClient, manager: AsyncKernelManager) -> None:
    """Kill the kernel, whose ranks and checks normally end with it, then end any that are left."""
    pid = _pid(manager)
    if manager.has_kernel:
        await manager.shutdown_kernel(now=True)
    if client.kc is not None:
        client.kc.stop_channels()
    end_processes([each for each in find_processes() if each.starter_pid == pid])


def _pid(manager: AsyncKernelManager) -> int | None:
    """The kernel's process id, once it has started; it leads a process group."""
    return getattr(manager.provisioner, "pid", None)


@contextmanager
def _lifeline() -> Iterator[int]:
    """A file descriptor whose other end closes when this process ends. A kernel polls for that, not in all cases."""
    for_kernel, ours = os.pipe()
    try:
        yield for_kernel
    finally:
        os.close(for_kernel)
        os.close(ours)


def _reason(error: BaseException) -> str:
    """The error in one line."""
    if isinstance(error, DeadKernelError):
        return "its kernel died"
    said = (
        f"{error.ename}: {error.evalue}"
        if isinstance(error, CellExecutionError)
        else f"{type(error).__name__}: {error}"
    )
    return said.strip().partition("\n")[0]


def _silent() -> logging.Logger:
    """A silent logger for nbclient, which would otherwise repeat the record."""
    logger = logging.getLogger(__name__)
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
