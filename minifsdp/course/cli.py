"""The command line: `minifsdp ladder`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minifsdp.course.launch import RankError
from minifsdp.course.measure import Settings

DEFAULT = Settings()

app = typer.Typer(
    name="minifsdp",
    help="Build DDP, ZeRO and FSDP one small step at a time, with every byte measured.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Makes `ladder` a command rather than the whole program."""


@app.command()
def ladder(
    ranks: Annotated[int, typer.Option(help="Number of ranks, N.")] = DEFAULT.ranks,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto takes GPUs if there is one per rank.")] = "auto",
    rungs: Annotated[str, typer.Option(help="Comma-separated names; default: all.")] = ",".join(DEFAULT.rungs),
    steps: Annotated[int, typer.Option(help="Optimizer steps per rung.")] = DEFAULT.steps,
    batch: Annotated[int, typer.Option(help="Sequences per step over all ranks; a multiple of N.")] = DEFAULT.batch,
    layers: Annotated[int, typer.Option(help="Transformer blocks, each a unit.")] = DEFAULT.layers,
    width: Annotated[int, typer.Option(help="Size of the residual stream.")] = DEFAULT.width,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = DEFAULT.context,
    data: Annotated[Path | None, typer.Option(help="Text to train on; default: Python's standard library.")] = None,
    link: Annotated[str | None, typer.Option(help='Emulated link, as "latency=200us,bandwidth=1GB/s".')] = None,
    limit: Annotated[int, typer.Option(help="k of fsdp-limit: units gathered and not yet freed.")] = DEFAULT.limit,
    out: Annotated[Path, typer.Option(help="Folder for ladder.json, pictures and traces.")] = Path("results/ladder"),
    seed: Annotated[int, typer.Option(help="Seed of the model and of the batches.")] = DEFAULT.seed,
) -> None:
    """Train one model on every rung, from one all-reduce to the rate limiter, and show what each rung buys.

    Example: minifsdp ladder --ranks 4 --rungs ddp,fsdp,fsdp-limit --link latency=200us,bandwidth=1GB/s
    """
    from minifsdp.course import ladder as course
    from minifsdp.course.tables import ladder_table

    names = tuple(name.strip() for name in rungs.split(",") if name.strip())
    settings = Settings(ranks, names, steps, batch, layers, width, context, data, link, limit, seed)
    try:
        plan = course.plan(settings, device, out)  # type: ignore[arg-type]
    except (ValueError, OSError) as error:
        _fail(str(error), code=2)
    with _progress() as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        try:
            record = course.run(plan, show)
        except KeyboardInterrupt:
            _fail("interrupted, nothing was written", code=130)
        except RankError as error:
            _fail(str(error), code=1)
    if record is not None:
        console = Console()
        console.print(ladder_table(record))
        console.print(
            f"{out}: ladder.json, memory.png, timeline.png and {len(names)} traces (ui.perfetto.dev opens them)"
        )


def _progress() -> Progress:
    columns: list[Any] = [TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    return Progress(*columns, console=Console(stderr=True), transient=True)


def main() -> None:
    """Run the command line; what is wrong with a request ends in one line on standard error and exit code 2."""
    if sys.platform == "win32":
        sys.exit("minifsdp runs on Linux, macOS and WSL2, not on native Windows")
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))  # ranks and temporary files go on the way out
    usage_error: Any = typer.BadParameter.__mro__[1]
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except usage_error as error:
        _fail(error.format_message(), code=2)


def _fail(message: str, code: int) -> NoReturn:
    print(f"minifsdp: {message}", file=sys.stderr)
    sys.exit(code)
