"""The command line: `python -m tools.gpu_check`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from minifsdp.course.cli.common import fail, new_app, new_console
from minifsdp.course.cli.signals import cleaning_up
from tools.gpu_check.check import FILES, gpu_check, prepare
from tools.gpu_check.machine import NoGpuError
from tools.gpu_check.summary import exit_code, summary_table
from tools.records import Part

app = new_app()


@app.command()
def check(
    part: Annotated[list[str] | None, typer.Option(help="doctor, tests, ladder, step or labs; default: all.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the record; default: benchmarks/records of the checkout.")
    ] = None,
    share_gpu: Annotated[
        bool | None,
        typer.Option("--share-gpu/--no-share-gpu", help="Two ranks on each GPU; default: if there is only one."),
    ] = None,
) -> None:
    """Run what the course claims of GPUs on this machine's, and put every result on record.

    A part that is named by --part takes its place in the record that is there; the others stay as they are.

    Example: python -m tools.gpu_check --part doctor --part tests
    """
    try:
        request = prepare(part or [], out, share_gpu)
    except NoGpuError as error:
        fail(f"gpu-check needs an NVIDIA GPU; {error}", code=2)
    except ValueError as error:
        fail(str(error), code=2)
    machine = request.machine
    title = f"{machine.gpu} x {machine.count}, torch {machine.versions['torch']}, NCCL {machine.versions['nccl']}"
    ranks = f"{request.ranks.count} rank{'s' * (request.ranks.count > 1)}{' on shared GPUs' * request.ranks.shared}"
    _say(f"{title}; {ranks}; up to nine minutes a part, what it prints is in {request.root / FILES}")
    with cleaning_up():
        done = gpu_check(request, _tell)
    console = new_console()
    console.print(summary_table(done, title))
    if skipped := [name for name, each in done.items() if each.state == "skipped"]:
        _say(f"NOT RUN: {', '.join(skipped)} (for the reasons above)")
    print(request.path)
    sys.exit(exit_code(done))


def _tell(name: str, done: Part | None) -> None:
    """A line when a part starts, another when it is on record."""
    if done is None:
        _say(f"{time.strftime('%H:%M:%S')} {name} ...")
    else:
        _say(f"{time.strftime('%H:%M:%S')} {name}: {done.state}{f', {done.reason}' if done.reason else ''}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
