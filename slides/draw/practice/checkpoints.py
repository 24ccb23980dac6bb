"""Checkpoints: of a run on disk, and of activations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from draw.canvas import MIB, canvas
from draw.measured import told
from draw.practice.drawing import bare, box
from matplotlib.figure import Figure
from minifsdp.answers.lab10b import commit, my_rows

from minifsdp.instruments.plots.palette import COLLECTIVE_COLOURS, INK, LINE, RANK_COLOURS, SOFT, TAG_COLOURS, as_text

ROWS = 257  # of the GPT's embedding


class Log:
    """Counts what a disk is asked for."""

    calls = 0

    def __getattr__(self, verb: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.calls += 1

        return call


def commit_calls() -> int:
    """How often a disk is asked when a rank's file is committed."""
    disk = Log()
    commit(disk, Path("run"), "step-200", {"rank-0.pt": b""}, 0, lambda: None)  # type: ignore[arg-type]
    return disk.calls


def recomputed() -> dict[str, tuple[int, ...]]:
    """By where the checkpoints lie: gathers, bytes that forward keeps, and bytes of model state at its peak."""
    rows = [(line[:19].strip(), line[19:].replace(",", "").split()) for line in told("10b", "C42")]
    return {name: tuple(int(each) for each in cells[:3]) for name, cells in rows if cells and cells[0].isdigit()}


def draw_rows() -> Figure:
    """The rows of one tensor as two ranks save them, and as three ranks, or a plain process, load them."""
    figure, axes = bare(4.6, ROWS + 1, 3.75, left=-64)
    whole = torch.zeros(ROWS, 1)
    starts = {}
    for name, ranks, bottom in (("torch loads", 1, 2.9), ("2 ranks save", 2, 1.45), ("3 ranks load", 3, 0.0)):
        axes.text(-3, bottom + 0.35, name, ha="right", va="center")
        pieces = [my_rows(whole, rank, ranks) for rank in range(ranks)]
        starts[ranks] = [first for first, _ in pieces]
        for rank, (first, rows) in enumerate(pieces):
            colour = RANK_COLOURS[rank] if ranks > 1 else LINE
            word = f"rank {rank}: {len(rows)} rows" if ranks > 1 else f"{ROWS} rows"
            box(axes, first, bottom, (len(rows), 0.7), colour, word)
    for rank in range(2):
        middle, colour = ROWS * (2 * rank + 1) / 4, RANK_COLOURS[rank]
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 2.5}
        axes.annotate("", (middle, 2.85), (middle, 2.2), arrowprops=arrow)
    edges = sorted({*starts[2], *starts[3], ROWS})
    for low, high in pairwise(edges):
        middle, colour = (low + high) / 2, RANK_COLOURS[sum(first <= low for first in starts[2]) - 1]
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 2.5}
        axes.annotate("", (middle, 0.75), (middle, 1.4), arrowprops=arrow)
        axes.text(middle + 3, 1.07, f"{low} to {high - 1}", va="center", color=as_text(colour))
    return figure


def draw_recomputed() -> Figure:
    """By where the activation checkpoints lie: what forward keeps, the peak of model state, the all-gathers."""
    figure = canvas(4.5)
    places = {
        "none": "no checkpoint",
        "inside": "inside the units",
        "around": "around, non-reentrant",
        "around, reentrant": "around, reentrant",
    }
    found = recomputed()
    kinds = (
        ("activations kept\nafter forward", 1, MIB, TAG_COLOURS["activations"]),
        ("model state\nat its peak", 2, MIB, SOFT),
        ("all-gathers\nper step", 0, 1, COLLECTIVE_COLOURS["all-gather"]),
    )
    panels = figure.subplots(1, 3, sharey=True)
    for panel, (title, column, unit, colour) in zip(panels, kinds, strict=True):
        sizes = [found[name][column] / unit for name in places]
        panel.barh(range(len(places)), sizes, 0.66, color=colour)
        for place, size in enumerate(sizes):
            says = f"{size:.2f} MiB" if unit > 1 else f"{size:.0f}"
            more = column == 0 and size > sizes[0]
            panel.text(size + 0.03 * max(sizes), place, says, va="center", fontweight="bold" if more else "normal")
        panel.set_title(title)
        panel.set_yticks(range(len(places)), list(places.values()))
        panel.tick_params(axis="y", length=0, labelcolor=INK)
        panel.set(xticks=[], xlim=(0, 1.75 * max(sizes)))
        panel.spines["bottom"].set_visible(False)
    panels[0].invert_yaxis()
    figure.supxlabel("measured in lab 10b: a step of a GPT of 4 blocks, 5 units, on 2 ranks", fontsize=18, color=SOFT)
    return figure
