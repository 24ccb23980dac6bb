"""Gradients of four ranks and their mean: what it is divided by, how often each counts, and its memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from draw.canvas import canvas
from draw.ddp.drawing import FOUR
from draw.ddp.traffic import group_of
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.optim import SGD, Adam

from minifsdp.answers import lab01
from minifsdp.instruments.plots.palette import (
    CONTESTANT_COLOURS,
    INK,
    LINE,
    PALE,
    SERIES_COLOURS,
    SOFT,
    TAG_COLOURS,
    as_text,
    ink_on,
)

MICRO = 4
BATCHES = (5, 5, 4, 2)  # of each rank, where they are uneven
RECORD = Path(__file__).parents[3] / "benchmarks" / "records" / "cpu" / "step-2-ranks.json"


def step_ratio(kind: type[Any], ranks: int) -> float:
    """How much longer the first step is with summed gradients than with their mean."""
    lengths = []
    for factor in (ranks, 1):
        weight = nn.Parameter(torch.zeros(16, dtype=torch.float64))
        weight.grad = factor * torch.linspace(-1, 1, 16, dtype=torch.float64)
        kind([weight], lr=1e-3).step()
        lengths.append(float(weight.detach().norm()))
    return lengths[0] / lengths[1]


def counted(ranks: int) -> list[float]:
    """How often each micro-batch counts if every backward is summed over the ranks, and divided by N at the end."""
    grad = torch.zeros(MICRO)
    for index in range(MICRO):
        grad[index] += 1
        grad *= ranks
    return (grad / ranks).tolist()


def extra_memory() -> dict[str, float]:
    """By contestant of the committed benchmark, its peak above one process's, in sizes of the gradients."""
    size = json.loads(RECORD.read_text())["sizes"][0]
    peaks = {row["name"]: row["bytes"][0] for row in size["rows"]}
    return {name: (peak - peaks["plain"]) / (4 * size["model"]["parameters"]) for name, peak in peaks.items()}


def _rounded(values: Tensor) -> list[float]:
    """To what can be seen: kinds of processors differ in the last bits, and a figure must not."""
    return [round(each, 4) for each in values.tolist()]


def draw_gradients() -> Figure:
    """Four ranks with equal parameters and two rows each: their gradients, the mean, and the step that all take."""
    figure = canvas(5.2)
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1455))  # no bar too low to be seen
    before = torch.full((4,), 0.1)

    def gradient(rows: Tensor) -> Tensor:
        weight = nn.Parameter(before.clone())
        (rows @ weight - rows.sum(1)).square().mean().backward()
        assert weight.grad is not None
        return weight.grad

    own = [gradient(lab01.my_rows(batch, group_of(rank, 4))) for rank in FOUR]
    mean = torch.stack(own).mean(0)
    assert torch.allclose(mean, gradient(batch), atol=1e-6)
    lines = {
        "four equal\nparameters": ("parameters", [before] * 4),
        "gradient of\nown samples": ("gradients", own),
        "all-reduce:\nthe mean": ("gradients", [mean] * 4),
        "parameters\nafter the step": ("parameters", [before - 0.2 * mean] * 4),
    }
    heights = {
        of: [0.0, *(each for tag, values in lines.values() if tag == of for v in values for each in _rounded(v))]
        for of in ("parameters", "gradients")
    }  # rows of one kind have one scale
    for row, (name, (tag, values)) in zip(figure.subplots(4, 4), lines.items(), strict=True):
        for rank, (axes, value) in enumerate(zip(row, values, strict=True)):
            axes.bar(FOUR, _rounded(value), 0.7, color=TAG_COLOURS[tag])
            axes.axhline(0, color=LINE, linewidth=1)
            axes.axis("off")
            axes.set_ylim(1.05 * min(heights[tag]), 1.05 * max(heights[tag]))
            if row[0].get_subplotspec().is_first_row():
                axes.set_title(f"rank {rank}\nsamples {2 * rank}, {2 * rank + 1}", loc="center")
        ink = as_text(TAG_COLOURS[tag])
        row[0].text(-0.12, 0.5, name, ha="right", va="center", transform=row[0].transAxes, color=ink)
    return figure


def draw_join() -> Figure:
    """Steps of four ranks with unequal numbers of batches, and the weight of a batch by what the sum is divided by."""
    figure = canvas(4.8)
    axes = figure.subplots()
    steps, colour = range(max(BATCHES)), TAG_COLOURS["gradients"]
    running = [sum(step < batches for batches in BATCHES) for step in steps]
    centre: Any = {"ha": "center", "va": "center"}
    for step in steps:
        axes.text(step + 0.5, 0.15, f"step {step}", ha="center", color=SOFT)
        for rank, batches in enumerate(BATCHES):
            has = step < batches
            face, ink = (colour, ink_on(colour)) if has else (PALE, SOFT)
            axes.add_patch(Rectangle((step + 0.03, -rank - 0.92), 0.94, 0.84, facecolor=face))
            axes.text(step + 0.5, -rank - 0.5, "batch" if has else "zeros", color=ink, **centre)
        for row, divisor in enumerate((len(BATCHES), running[step])):
            look = {"fontsize": 22, "fontweight": "bold"} if divisor < len(BATCHES) else {}
            axes.text(step + 0.5, -4.85 - 0.62 * row, f"1/{divisor}", **centre, **look)
    for rank in range(len(BATCHES)):
        axes.text(-0.08, -rank - 0.5, f"rank {rank}", ha="right", va="center")
    axes.plot([-1.85, len(steps)], [-4.3, -4.3], color=LINE, linewidth=1)
    axes.text(-0.08, -4.85, "weight, mean over all", ha="right", va="center")
    axes.text(-0.08, -5.47, "over running ranks", ha="right", va="center")
    axes.set(xlim=(-1.9, len(steps)), ylim=(-5.8, 0.6))
    axes.axis("off")
    return figure


def draw_extra() -> Figure:
    """What DDP adds to the peak of one process, in sizes of the gradients."""
    figure = canvas(3.3)
    axes = figure.subplots()
    names = {
        "torch-ddp": ("torch's DDP", "torch"),
        "torch-ddp-view": ("with gradient_\nas_bucket_view", "torch"),
        "our-ddp": ("minifsdp: buckets\nfreed after backward", "minifsdp"),
    }
    for place, (name, (_, who)) in enumerate(names.items()):
        size = extra_memory()[name]
        axes.barh(place, size, 0.66, color=CONTESTANT_COLOURS[who])
        axes.text(size + 0.01, place, f"{size:.2f}", va="center", fontweight="bold")
    axes.set_yticks(range(len(names)), [label for label, _ in names.values()])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.12), xticks=(0, 0.5, 1), xlabel="peak above that of one process, in multiples of the gradients")
    axes.spines["left"].set_visible(False)
    return figure


def draw_longer() -> Figure:
    """The first step with summed gradients, in lengths of that with their mean, over the ranks."""
    figure = canvas(3.6)
    axes = figure.subplots()
    counts = 2, 8, 64
    for kind, number, colour in ((SGD, 0, SERIES_COLOURS[1]), (Adam, 1, SERIES_COLOURS[0])):
        for place, ranks in enumerate(counts):
            ratio = step_ratio(kind, ranks)
            at = place + 0.46 * number
            axes.bar(at, ratio, 0.36, color=colour)
            axes.text(at, ratio + 1.5, f"{kind.__name__}: {ratio:.3g} ×", ha="center", color=as_text(colour))
    axes.set(ylim=(0, 72), ylabel="first step with the sum,\nrelative to the mean")
    axes.axhline(1, color=SOFT, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_yticks([1, 20, 40, 60], ["1 ×", "20 ×", "40 ×", "60 ×"])
    axes.set_xticks([place + 0.23 for place in range(len(counts))], [f"{ranks} ranks" for ranks in counts])
    axes.tick_params(axis="x", length=0)
    return figure
