"""What a training run leaves: a record, a loss curve, a line on the terminal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from minifsdp.course import plots
from minifsdp.course.train.settings import Settings

MIB = 2**20


def record(settings: Settings, data: str, device: str, begun: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of `train.json`; `ranks` is what `train` returned on each."""
    losses, seconds = ranks[0]["losses"], max(rank["seconds"] for rank in ranks)
    tokens = (settings.steps - begun) * settings.batch * settings.context
    return {
        "settings": settings.plain(),
        "data": data,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "begun_at_step": begun,
        "losses": [loss if math.isfinite(loss) else None for loss in losses],
        "final_loss": losses[-1] if math.isfinite(losses[-1]) else None,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "peak_bytes": [rank["peak"] for rank in ranks],
    }


def write(record: dict[str, Any], out: Path) -> None:
    """`train.json` and `loss.png`, each whole or as it was."""
    files = {"train.json": (json.dumps(record, indent=1) + "\n").encode(), "loss.png": loss_curve(record)._repr_png_()}
    for name, content in files.items():
        part = out / f".{name}.part"
        part.write_bytes(content)
        part.replace(out / name)


def loss_curve(record: dict[str, Any]) -> plots.Picture:
    """The loss over the steps; what earlier runs did has a colour of its own."""
    begun, losses = record["begun_at_step"], [math.nan if loss is None else loss for loss in record["losses"]]
    points = list(enumerate(losses, start=1))
    parts = {"before the restart": points[:begun], "this run" if begun else "loss": points[max(begun - 1, 0) :]}
    finite = [loss for loss in losses if math.isfinite(loss)]
    title = f"The loss goes from {losses[0]:.2f} to {losses[-1]:.2f} nats per token in {len(losses)} steps"
    if len(finite) < len(losses):
        title = f"The loss is no number at {len(losses) - len(finite)} of {len(losses)} steps: try a smaller --lr"
    return plots.lines(
        {name: tuple(zip(*part, strict=True)) for name, part in parts.items() if part},
        xlabel="optimizer step",
        ylabel="loss, nats per token",
        title=title,
        says=f"Each point is the mean over the {record['settings']['batch']} sequences of a step, before the step. "
        "A model that knows nothing of 257 tokens has 5.55.",
    )


def summary(record: dict[str, Any]) -> Table:
    """One row: what was trained, how fast, with how much memory, how well."""
    settings = record["settings"]
    peaks = [peak for peak in record["peak_bytes"] if peak is not None]
    loss = record["final_loss"]
    table = Table("strategy", "ranks", "precision", "steps", "tokens/s", "peak of a rank", "final loss", box=box.SIMPLE_HEAD)
    begun = f"{record['begun_at_step']} + " if record["begun_at_step"] else ""
    table.add_row(
        settings["strategy"],
        str(settings["ranks"]),
        settings["precision"],
        f"{begun}{settings['steps'] - record['begun_at_step']}",
        f"{record['tokens_per_second']:,.0f}",
        f"{max(peaks) / MIB:.1f} MiB" if peaks else "not counted",
        "no number" if loss is None else f"{loss:.6f}",
    )
    return table
