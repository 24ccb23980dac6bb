"""The command line: `minifsdp doctor`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from minifsdp.course.cli.common import (
    DeviceOption,
    ShareOption,
    fail,
    fail_of_results,
    new_app,
    new_console,
    progress_bar,
)
from minifsdp.course.cli.signals import cleaning_up

app = new_app()
APPS = {"doctor": app}

MARGIN = 3.0  # seconds left for writing and showing the findings


@app.command()
def doctor(
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks; default: torchrun's, otherwise one per GPU, at least 2.")
    ] = None,
    device: DeviceOption = "auto",
    share_gpu: ShareOption = None,
    peak: Annotated[str | None, typer.Option(help='Nominal bandwidth of the link, such as "400GB/s".')] = None,
    seconds: Annotated[float, typer.Option(help="Time limit for the whole command.", min=10, max=3600)] = 60.0,
    out: Annotated[Path, typer.Option(help="Folder for doctor.json and bandwidth.png.")] = Path("results/doctor"),
) -> None:
    """List the hardware, check the ranks, measure their bandwidth, and list the labs that can run here.

    If something is broken, the command prints the reason and exits with code 1.

    Example: minifsdp doctor --ranks 4 --device cpu
    """
    start, doing = time.monotonic(), ["importing torch"]
    with _ended_after(seconds, doing):
        from minifsdp.course import doctor as course
        from minifsdp.course.doctor.report import reasons, summary
        from minifsdp.instruments.launch.world import is_first, tell
        from minifsdp.instruments.system.whole_files import UndeliveredError

        doing[0] = "looking at the machine"
        with cleaning_up(), progress_bar(shown=is_first()) as bar:
            task = bar.add_task(doing[0], total=None)

            def show(what: str, done: int, total: int) -> None:
                doing[0] = what
                bar.update(task, description=what, completed=done, total=total)

            left = max(1.0, seconds - (time.monotonic() - start) - MARGIN)  # with less left, the timer ends it
            try:
                request = course.check(ranks, device, out, share_gpu, peak, left)  # type: ignore[arg-type]
                if request.world is not None:
                    tell(request.world)
                record = course.run(request, show)
            except ValueError as error:
                fail(str(error), code=2)
            except KeyboardInterrupt:
                fail("interrupted, nothing was written", code=130)
            except UndeliveredError as error:
                bar.stop()
                fail_of_results(error, summary)
    if is_first():
        picture = " and bandwidth.png" if any(record["bandwidth"].values()) else ""
        new_console().print(summary(record), f"{out}: doctor.json{picture}")
    if not record["ok"]:
        fail("; ".join(reasons(record)), code=1)


@contextmanager
def _ended_after(seconds: float, doing: list[str]) -> Iterator[None]:
    """End this process and its ranks after `seconds`, even in a call that never returns and ignores time-outs."""

    def end() -> None:
        print(f"minifsdp: no answer within {seconds:.0f} s while {doing[0]}; the process was ended", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
