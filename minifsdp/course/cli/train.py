"""The command line: `minifsdp train`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from minifsdp.course.cli.common import (
    DeviceOption,
    RanksOption,
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
from minifsdp.course.train.folder import CheckpointError, latest
from minifsdp.course.train.layouts import recipe_of
from minifsdp.course.train.settings import PRECISIONS, PREFETCHES, SIZES_OF_RECIPES, STRATEGIES, TrainSettings
from minifsdp.divisions import ATTENTIONS, ORDERS
from minifsdp.instruments.launch import RankError
from minifsdp.instruments.launch.world import is_first, tell
from minifsdp.instruments.system.whole_files import UndeliveredError

if TYPE_CHECKING:
    from minifsdp.course.train import Request

DEFAULT = TrainSettings()
SETTINGS = [each.name for each in fields(TrainSettings) if each.name not in ("recipe", "ranks")]
WORDS = (*("pp", "dp", "cp", "tp", "replicate", "axes", "zero"), *("sequence", "order", "stages", "micro", "attention"))
"""The options that are words of a recipe."""

app = new_app()
APPS = {"train": app}


def _cure(folder: Path | None, how: str) -> str:
    """The advice on how to resume, if there are checkpoints."""
    if folder is None:
        return ""
    with suppress(OSError):
        if whole := latest(folder):
            return f"; {how} from {whole.name}"
    return f"; {folder} contains no checkpoint"


@contextmanager
def _failures(settings: TrainSettings, bar: Progress) -> Iterator[None]:
    """Ends a run that has failed with one line, and an exit code."""
    folder = settings.checkpoint
    try:
        yield
    except KeyboardInterrupt:
        fail(f"interrupted{_cure(folder, '--resume continues')}", code=130)
    except RankError as error:
        which = ", which is --time-limit" if f"within {settings.time_limit:g} s" in str(error) else ""
        fail_of_ranks(error, f"{which}{_cure(folder, '--resume continues')}")
    except CheckpointError as error:  # it has a cure of its own
        fail(str(error), code=1)
    except UndeliveredError as error:
        from minifsdp.course.train.report import summary

        bar.stop()
        fail_of_results(error, summary, _cure(folder, "--resume with another --out writes them again"))


def _choices(known: Iterable[str]) -> str:
    return ", ".join(known) + "."


def _usual(name: str) -> str:
    return f"default: {getattr(DEFAULT, name)}, with a recipe {SIZES_OF_RECIPES[name]}"


@app.command()
def train(
    strategy: Annotated[
        str | None, typer.Option(help=f"Without a recipe: {_choices(STRATEGIES)} Default: {DEFAULT.strategy}.")
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="What is divided on each axis of a mesh, such as pp=2,dp=2,tp=2,zero=1.")
    ] = "",
    pp: Annotated[int | None, typer.Option("--pp", help="Ranks of the pipeline axis.")] = None,
    dp: Annotated[
        int | None, typer.Option("--dp", help="Ranks of the data axis; default: those that the other axes leave.")
    ] = None,
    cp: Annotated[int | None, typer.Option("--cp", help="Ranks of the context axis, which divide sequences.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Ranks of the tensor axis, which divide layers.")] = None,
    zero: Annotated[str | None, typer.Option(help="ZeRO stage of the data axis: 0 to 3; 3 is FSDP2.")] = None,
    replicate: Annotated[int | None, typer.Option(help="Copies of the shards (HSDP), a divisor of --dp.")] = None,
    sequence: Annotated[bool, typer.Option("--sequence", help="Sequence parallelism, with --tp.")] = False,
    order: Annotated[str | None, typer.Option(help=f"Of a pipeline: {_choices(ORDERS)}")] = None,
    stages: Annotated[int | None, typer.Option(help="Stages of each rank, with --order interleaved.")] = None,
    micro: Annotated[int | None, typer.Option(help="Micro-batches of a pipeline.")] = None,
    attention: Annotated[str | None, typer.Option(help=f"With --cp: {_choices(ATTENTIONS)}")] = None,
    axes: Annotated[
        str | None, typer.Option(help="Order of the axes, outermost first, such as dp/pp/tp: the last stays in a host.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help=f"{_choices(PRECISIONS)} Recipes have no fp16. Default: {DEFAULT.precision}.")
    ] = None,
    forward_prefetch: Annotated[
        bool, typer.Option("--forward-prefetch", help="Gather the next unit before computing the current one.")
    ] = DEFAULT.forward_prefetch,
    backward_prefetch: Annotated[
        str, typer.Option(help=f"Prefetching in backward: {_choices(PREFETCHES)}")
    ] = DEFAULT.backward_prefetch,
    limit: Annotated[bool, typer.Option(help="Gather at most two units before one is freed.")] = DEFAULT.limit,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = DEFAULT.accumulate,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="Reduce gradients only after the last micro-batch.")
    ] = DEFAULT.no_sync,
    offload: Annotated[bool, typer.Option("--offload", help="Keep shards in host memory.")] = DEFAULT.offload,
    replicas: Annotated[
        int | None, typer.Option(help=f"Copies of the model in a hybrid strategy; default: {DEFAULT.replicas}.")
    ] = None,
    ranks: RanksOption = None,
    device: DeviceOption = "auto",
    share_gpu: ShareOption = None,
    layers: Annotated[int | None, typer.Option(help=f"Transformer blocks, each a unit; {_usual('layers')}.")] = None,
    width: Annotated[int | None, typer.Option(help=f"Size of the residual stream; {_usual('width')}.")] = None,
    heads: Annotated[
        int | None, typer.Option(help="Attention heads; default: the most up to 8 that the width allows.")
    ] = None,
    context: Annotated[int | None, typer.Option(help=f"Tokens per sequence; {_usual('context')}.")] = None,
    batch: Annotated[
        int | None, typer.Option(help=f"Sequences per optimizer step, over all ranks; {_usual('batch')}.")
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Sequences end with their line: ranks have different numbers of tokens.")
    ] = DEFAULT.lines,
    steps: Annotated[int, typer.Option(help="Total optimizer steps, including those of earlier runs.")] = DEFAULT.steps,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = DEFAULT.lr,
    seed: Annotated[int, typer.Option(help="Seed of the model and of the batches.")] = DEFAULT.seed,
    data: Annotated[Path | None, typer.Option(help="Text to train on; default: Python's standard library.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for checkpoints.")] = None,
    every: Annotated[int, typer.Option(help="Steps between checkpoints; the last step is saved too.")] = DEFAULT.every,
    keep: Annotated[int, typer.Option(help="Checkpoints to keep.")] = DEFAULT.keep,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint.")] = DEFAULT.resume,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Resume if there is a checkpoint, else begin: for jobs that restart.")
    ] = DEFAULT.auto_resume,
    ledger: Annotated[bool, typer.Option(help="Count peak bytes on CPU, in two extra steps first.")] = DEFAULT.ledger,
    time_limit: Annotated[float, typer.Option(help="Seconds after which a run counts as stuck.")] = DEFAULT.time_limit,
    out: Annotated[Path, typer.Option(help="Folder for train.json and loss.png.")] = Path("results/train"),
) -> None:
    """Train one model with one strategy or recipe, over any number of restarts.

    A killed run resumes from its last checkpoint. On the same number of ranks, it ends with the same bits on CPU; a GPU
    may sum in a different order. It can also resume on a different number of ranks, with a different strategy or on
    another layout; its results are then the same up to rounding.

    Example: minifsdp train --pp 2 --dp 2 --tp 2 --zero 1 --checkpoint runs/one --every 20; later, add --resume
    """
    options = locals()
    from minifsdp.course import train as course

    try:
        ranks = ranks_asked_for(ranks, None)
        asked_for = recipe_of(recipe, {word: options[word] for word in WORDS}, precision, ranks)
        settings = TrainSettings.asked_for(asked_for, ranks, {name: options[name] for name in SETTINGS})
        request = course.check(settings, device, out, share_gpu)  # type: ignore[arg-type]
    except (ValueError, OSError) as error:
        fail(str(error), code=2)
    tell(request.world)
    if is_first() and len(settings.mesh.divided) > 1:
        from minifsdp.instruments.plots.mesh_text import coloured

        for line in coloured(settings.mesh):
            new_console().print(line)
    _run(request)


def _run(request: Request) -> None:
    """Train as planned, with a progress bar, and print the results."""
    from minifsdp.course import train as course
    from minifsdp.course.train.report import summary

    settings = request.settings
    with cleaning_up(), progress_bar(shown=is_first()) as bar, _failures(settings, bar):
        task = bar.add_task("starting", total=settings.steps, completed=request.step)

        def show(step: int, steps: int, loss: float) -> None:
            speed = bar.tasks[0].speed
            rate = "" if speed is None else f", {speed * settings.batch * settings.context:,.0f} tokens/s"
            bar.update(task, description=f"loss {loss:.4f}{rate}", completed=step)

        record = course.run(request, show)
    if record is not None:
        new_console().print(summary(record))
        print(f"{request.out}: train.json and loss.png")
