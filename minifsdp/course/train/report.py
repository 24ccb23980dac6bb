"""Results of a training run: a record, a loss curve, a line on the terminal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Column, Table

from minifsdp.course.train.settings import TrainSettings
from minifsdp.instruments import plots
from minifsdp.instruments.launch.world import World
from minifsdp.instruments.system.scratch import scratch_folder
from minifsdp.instruments.system.whole_files import delivering

MIB = 2**20
VOCABULARY = 257


def record(settings: TrainSettings, data: str, world: World, begun: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of `train.json`; `ranks` has the return value of `train` on each rank."""
    losses, seconds = ranks[0]["losses"], max(rank["seconds"] for rank in ranks)
    tokens = (settings.steps - begun) * settings.batch * settings.context
    return {
        "settings": settings.plain(),
        "data": data,
        "device": torch.cuda.get_device_name() if world.gpus else "cpu",
        "world": str(world),
        "torch": torch.__version__,
        "begun_at_step": begun,
        "losses": [loss if math.isfinite(loss) else None for loss in losses],
        "final_loss": losses[-1] if math.isfinite(losses[-1]) else None,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "peak_bytes": [rank["peak"] for rank in ranks],
    }


def write(record: dict[str, Any], out: Path) -> None:
    """Write `train.json` and `loss.png`, each atomically; raises as `delivering`."""
    with scratch_folder() as staging, delivering(staging, out, record):
        (staging / "train.json").write_text(json.dumps(record, indent=1) + "\n")
        (staging / "loss.png").write_bytes(loss_curve(record)._repr_png_())


def loss_curve(record: dict[str, Any]) -> plots.Picture:
    """Plot the loss over the steps, with the steps of earlier runs in another colour."""
    begun, losses = record["begun_at_step"], [math.nan if loss is None else loss for loss in record["losses"]]
    steps = range(1, len(losses) + 1)
    series = {"this run" if begun else "loss": (steps[max(begun - 1, 0) :], losses[max(begun - 1, 0) :])}
    if begun:
        series = {"before the restart": (steps[:begun], losses[:begun]), **series}
    lost = sum(math.isnan(loss) for loss in losses)
    title = f"The loss goes from {losses[0]:.2f} nats per token at step 1 to {losses[-1]:.2f} at step {len(losses)}"
    if lost:
        title = f"The loss is not a number at {lost} of {len(losses)} steps: try a smaller --lr"
    return plots.lines(
        series,
        xlabel="optimizer step",
        ylabel="loss, nats per token",
        title=title,
        says=f"Each point: the mean over the {record['settings']['batch']} sequences of a step, before its update.",
        expected={"all tokens equally likely": ((1, len(losses)), (math.log(VOCABULARY),) * 2)},
    )


def summary(record: dict[str, Any]) -> Table:
    """A one-row table: the model, its speed, its memory and its loss."""
    settings = record["settings"]
    peaks = [peak for peak in record["peak_bytes"] if peak is not None]
    loss = record["final_loss"]
    what = (settings["recipe"] or settings["strategy"]).replace(",", ", ")  # whose lines may be broken at spaces
    headings = (
        Column("recipe" if settings["recipe"] else "strategy", min_width=max(map(len, what.split()))),
        "ranks",
        "precision",
        "steps",
        "tokens/s",
        "peak",
        "final loss",
    )
    table = Table(
        *headings, box=box.SIMPLE_HEAD, caption="peak: bytes of the rank that holds most", caption_justify="left"
    )
    begun = f"{record['begun_at_step']} + " if record["begun_at_step"] else ""
    table.add_row(
        what,
        str(settings["ranks"]),
        settings["precision"],
        f"{begun}{settings['steps'] - record['begun_at_step']}",
        f"{record['tokens_per_second']:,.0f}",
        f"{max(peaks) / MIB:.1f} MiB" if peaks else "not counted",
        "not a number" if loss is None else f"{loss:.6f}",
    )
    return table
