"""The command line: `minifsdp bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minifsdp.course.bench.settings import BenchSettings
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
from minifsdp.instruments.launch import RankError
from minifsdp.instruments.launch.world import is_first, tell
from minifsdp.instruments.system.whole_files import UndeliveredError

DEFAULT = BenchSettings()

app = new_app()
APPS = {"bench": app}


@app.command()
def bench(
    ranks: RanksOption = None,
    device: DeviceOption = "auto",
    share_gpu: ShareOption = None,
    only: Annotated[str, typer.Option(help="Comma-separated contestants; default: all.")] = ",".join(DEFAULT.only),
    batch: Annotated[int, typer.Option(help="Sequences per step on each rank.")] = DEFAULT.batch,
    layers: Annotated[int, typer.Option(help="Transformer blocks, each a unit.")] = DEFAULT.layers,
    width: Annotated[int, typer.Option(help="Size of the residual stream.")] = DEFAULT.width,
    heads: Annotated[int | None, typer.Option(help="Attention heads; default: as many as fit, up to 8.")] = None,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = DEFAULT.context,
    steps: Annotated[int, typer.Option(help="Timed steps of each contestant.")] = DEFAULT.steps,
    warm_up: Annotated[int, typer.Option(help="Steps before the timed ones.")] = DEFAULT.warm_up,
    measured_link: Annotated[
        str | None,
        typer.Option(help='Measured link, for the device model: "latency=30us,bandwidth=300GB/s".'),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for bench.json and bench.png.")] = Path("results/bench"),
    seed: Annotated[int, typer.Option(help="Seed of the model and of the batches.")] = DEFAULT.seed,
    memory: Annotated[bool, typer.Option(help="Also measure peak memory.")] = DEFAULT.memory,
) -> None:
    """Measure a step of torch's DDP, FSDP1 and FSDP2, of our versions and of every rung, all in one interleaved run.

    The exit code is 1 if any losses differ from those of one process that trains on the global batch.

    Example: minifsdp bench --only plain,torch-fsdp1,our-fsdp --width 512 --context 128
    """
    from minifsdp.course.bench import report, start

    names = tuple(name.strip() for name in only.split(",") if name.strip())
    settings = BenchSettings(
        ranks_asked_for(ranks, DEFAULT.ranks), names, batch, layers, width, heads, context, steps, warm_up, seed, memory
    )
    try:
        request = start.check(settings, device, out, share_gpu, link=measured_link)  # type: ignore[arg-type]
    except (ValueError, OSError) as error:
        fail(str(error), code=2)
    tell(request.world)
    try:
        with cleaning_up(), progress_bar(shown=is_first()) as bar:
            task = bar.add_task("starting", total=None)

            def show(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total)

            record = start.run(request, show)
    except KeyboardInterrupt:
        fail("interrupted, nothing was written", code=130)
    except RankError as error:
        fail_of_ranks(error)
    except UndeliveredError as error:
        fail_of_results(error, report.bench_table)
    if record is not None:
        new_console().print(report.bench_table(record))
        print(f"{out}: bench.json and bench.png")
        if wrong := report.disagreement(record):
            fail(wrong, code=1)
