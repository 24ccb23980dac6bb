"""Two ways to give a buffer back, and what they keep busy on a simulated GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

from draw.canvas import MIB, canvas
from draw.fsdp.drawing import say
from matplotlib.figure import Figure
from torch import nn
from torch.optim import AdamW

from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import LEARNING_RATE, RUNGS, Trainer
from minifsdp.fsdp import PrefetchSchedule
from minifsdp.fsdp2 import Held, Recorded, fully_shard, use_schedule
from minifsdp.instruments.launch import launch
from minifsdp.instruments.machine import A100, record_steps, replay
from minifsdp.instruments.plots.palette import BLOCK_COLOURS, INK, LANE_COLOURS

SETTINGS = Settings(ranks=2, layers=8, width=128)
STEPS = 4  # as in lab 12: by then the allocator's cache is as large as it gets
SLOW = replace(  # so that the host of a small model runs far ahead
    A100,
    flops={dtype: flops / 400 for dtype, flops in A100.flops.items()},
    memory_bandwidth=A100.memory_bandwidth / 40,
    issue=20e-6,
)


def _build(model: Any, keeper: Any) -> Trainer:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    use_schedule(model, PrefetchSchedule, keeper)
    assert isinstance(model, nn.Module)
    return Trainer(model, AdamW(model.parameters(), LEARNING_RATE))


def _limited(model: Any) -> Trainer:
    return RUNGS["fsdp2"].build(model, 2)


def _record() -> dict[str, Any]:
    batch = next(SETTINGS.batches())
    ways = {
        "record_stream": partial(_build, keeper=Recorded),
        "record_stream, limit of 2": _limited,
        "held": partial(_build, keeper=Held),
    }
    return {name: record_steps(partial(build, SETTINGS.model()), batch, STEPS) for name, build in ways.items()}


@cache
def peaks() -> dict[str, dict[str, float]]:
    """By way the peak MiB reserved, the most MiB freed and still in use at one moment, and the step's seconds."""
    with patch.dict("os.environ", MINIFSDP_DEVICE="cpu"):
        programs = launch(_record, 2, backend="gloo", timeout=300)[0]
    found = {}
    for name, program in programs.items():
        run = replay(program, SLOW)
        assert not run.hazards
        waiting = max(sample.active - sample.allocated for sample in run.memory)
        found[name] = {"waiting": waiting / MIB, "reserved": run.peak("reserved") / MIB, "seconds": run.seconds}
    return found


def draw_held() -> Figure:
    """Memory that waits for a reader, what the allocator has reserved, and a step's time, for three ways."""
    figure = canvas(3.9)
    panels = figure.subplots(1, 3, sharey=True)
    found = peaks()
    for axes, title, says, values, colour in (
        (panels[0], "freed, still in use\n(at one moment)", "{:.1f} MiB", "waiting", BLOCK_COLOURS["waiting"]),
        (panels[1], "reserved\n(peak)", "{:.0f} MiB", "reserved", BLOCK_COLOURS["in use"]),
        (panels[2], "a step\ntakes", "{:.1f} ms", "seconds", LANE_COLOURS["compute"]),
    ):
        sizes = [row[values] * (1e3 if values == "seconds" else 1) for row in found.values()]
        axes.barh(range(len(sizes)), sizes, 0.56, color=colour)
        for place, size in enumerate(sizes):
            say(axes, size + max(sizes) * 0.03, place, says.format(size), ha="left")
        axes.set_title(title)
        axes.set(xlim=(0, max(sizes) * 1.6), xticks=[])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
    panels[0].set_yticks(range(len(found)), [name.replace(", ", "\n") for name in found])
    panels[0].invert_yaxis()
    return figure
