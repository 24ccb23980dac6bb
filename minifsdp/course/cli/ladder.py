"""The command line: `minifsdp ladder`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minifsdp.course.cli.common import (
    DeviceOption,
    ShareOption,
    fail,
    fail_of_ranks,
    fail_of_results,
    new_app,
    new_console,
    progress_bar,
    ranks_asked_for,
)
from minifsdp.course.cli.signals import cleaning_up
from minifsdp.course.ladder.axes import AXES
from minifsdp.course.ladder.measure import Settings
from minifsdp.instruments.launch import RankError
from minifsdp.instruments.launch.world import is_first, tell
from minifsdp.instruments.system.whole_files import UndeliveredError
from minifsdp.recipe import Recipe

if TYPE_CHECKING:
    from minifsdp.course.ladder.run import Request

DEFAULT = Settings(steps=10)  # enough for a median, since the rungs take each step in turn
OTHERS = {axis: Settings.on(axis) for axis in AXES if axis != DEFAULT.axis}


def _rungs(incomplete: str) -> list[str]:
    """The names that may follow those that have been typed."""
    before, _, last = incomplete.rpartition(",")
    names = dict.fromkeys(name for axis in AXES.values() for name in axis.rungs)
    return [f"{before},{name}".lstrip(",") for name in names if name.startswith(last) and name not in before]


def _other(name: str) -> str:
    """The default of an option on all axes."""
    usual = getattr(DEFAULT, name)
    others = {axis: getattr(settings, name) for axis, settings in OTHERS.items()}
    return ", ".join(
        [f"default: {usual or 'as the width allows'}"]
        + [f"with --axis {axis} {value}" for axis, value in others.items() if value != usual]
    )


app = new_app()
APPS = {"ladder": app}


@app.command()
def ladder(
    ranks: Annotated[
        int | None, typer.Option(help=f"Number of ranks, N, unless torchrun gives it; {_other('ranks')}.")
    ] = None,
    device: DeviceOption = "auto",
    share_gpu: ShareOption = None,
    axis: Annotated[
        str,
        typer.Option(help="What the rungs divide: data, tensor, pipeline, or 3d, all three; all: rungs of each."),
    ] = "data",
    rungs: Annotated[
        str | None, typer.Option(help="Comma-separated names; default: all.", autocompletion=_rungs)
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="Beside the rungs, a recipe such as pp=2,dp=2,tp=2,zero=1; may be given several times."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps per rung.")] = DEFAULT.steps,
    batch: Annotated[
        int | None, typer.Option(help="Sequences per step over all ranks; default: 12, or the next that fits.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help=f"Transformer blocks, each a unit; {_other('layers')}.")] = None,
    width: Annotated[int | None, typer.Option(help=f"Size of the residual stream; {_other('width')}.")] = None,
    heads: Annotated[int | None, typer.Option(help=f"Attention heads; {_other('heads')}.")] = None,
    context: Annotated[int | None, typer.Option(help=f"Tokens per sequence; {_other('context')}.")] = None,
    data: Annotated[Path | None, typer.Option(help="Text to train on; default: Python's standard library.")] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Emulated link, such as latency=200us,bandwidth=1GB/s, or two, inside hosts of 4 ranks and across: "
            "inside=5us@10GB/s,across=200us@1GB/s,host=4."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="k of fsdp-limit: most units gathered at once.")] = DEFAULT.limit,
    out: Annotated[
        Path | None, typer.Option(help="Folder for ladder.json, pictures and traces; default: results/ladder[-AXIS].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model and of the batches.")] = DEFAULT.seed,
) -> None:
    """Train one model on every rung, from one all-reduce to the rate limiter, and show the gain from each rung.

    With --axis tensor, the rungs lead from whole layers on every rank to layers and sequences that are sharded over
    the ranks, and to a combination with FSDP2. With --axis pipeline, they lead from one busy rank at a time to
    micro-batches, 1F1B, zero bubble, and a combination with data parallelism. With --axis 3d, 8 ranks divide all three.
    With --axis all, 8 ranks train the same model on rungs of all these ladders, from ddp-naive to 3d.

    Example: minifsdp ladder --ranks 4 --rungs ddp,fsdp,fsdp-limit --link latency=200us,bandwidth=1GB/s
    """
    from minifsdp.course.ladder import run as course

    names = None if rungs is None else tuple(name.strip() for name in rungs.split(",") if name.strip())
    model: dict[str, int | None] = {"layers": layers, "width": width, "heads": heads, "context": context}
    run: dict[str, Any] = {"steps": steps, "batch": batch, "limit": limit, "seed": seed}
    try:
        own = [Recipe.parse(text) for text in recipe or ()]
        ranks = ranks_asked_for(ranks, own[0].mesh.ranks if own else Settings.on(axis).ranks)
        settings = Settings.on(axis, **model, **run, ranks=ranks, rungs=names, text=data, link=link)
        if own:
            settings = settings.beside(names, own)
        if batch is None:
            settings = replace(settings, batch=settings.rows * ceil(DEFAULT.batch / settings.rows))
        out = Path(AXES[axis].folder) if out is None else out
        request = course.check(settings, device, out, share_gpu)  # type: ignore[arg-type]
    except (ValueError, OSError) as error:
        fail(str(error), code=2)
    tell(request.world)
    _run(request)


def _run(request: Request) -> None:
    """Climb as planned, with a progress bar, and print the results."""
    from minifsdp.course.ladder import run as course
    from minifsdp.course.ladder.tables import ladder_table

    with cleaning_up(), progress_bar(shown=is_first()) as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        try:
            record = course.run(request, show)
        except KeyboardInterrupt:
            fail("interrupted, nothing was written", code=130)
        except RankError as error:
            fail_of_ranks(error)
        except UndeliveredError as error:
            bar.stop()
            fail_of_results(error, ladder_table)
    if record is not None:
        console = new_console()
        console.print(ladder_table(record))
        console.print(_files(request, record["rungs"]))
        for name, fault in request.left_out.items():
            console.print(f"left out: {name} ({fault})")


def _files(request: Request, rungs: Sequence[Any]) -> str:
    """A line that names the files of a ladder."""
    on_gpu = ", allocator.png, snapshots (pytorch.org/memory_viz opens them)" if request.world.gpus else ""
    lanes = "pipeline.png" if any("bubble" in rung for rung in rungs) else "timeline.png"
    pictures = f"memory.png, memory.gif, {lanes}, explore.html (open it in a browser){on_gpu}"
    return f"{request.out}: ladder.json, {pictures} and {len(rungs)} traces (ui.perfetto.dev opens them)"
