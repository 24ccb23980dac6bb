"""Activations of each rank with GPipe and 1F1B, as lab 14 has measured them."""

from __future__ import annotations

import re

from draw.canvas import MIB, canvas
from draw.fsdp.drawing import say
from draw.measured import told
from draw.split.lanes import MICROS, RANKS
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minifsdp.instruments.plots.palette import EARLIER_COLOURS, TAG_COLOURS

LINE = re.compile(r"(gpipe|one_f_one_b) +rank (\d): +([\d,]+) bytes of activations, (\d) x")


def _kept() -> dict[str, list[tuple[int, int]]]:
    """By schedule and rank: bytes at most, and micro-batches held."""
    found: dict[str, list[tuple[int, int]]] = {}
    for line in told("14", "C28"):
        if match := LINE.match(line):
            found.setdefault(match[1], []).append((int(match[3].replace(",", "")), int(match[4])))
    assert [len(rows) for rows in found.values()] == [RANKS, RANKS]
    return found


def kept_share() -> list[str]:
    """Of each rank, 1F1B's activations in percent of GPipe's."""
    found = _kept()
    pairs = zip(found["one_f_one_b"], found["gpipe"], strict=True)
    return [f"{100 * mine / theirs:.0f} %" for (mine, _), (theirs, _) in pairs]


def draw_kept() -> Figure:
    """Bars for each rank: GPipe grey, 1F1B in the activations' colour, with the micro-batches held."""
    figure = canvas(4.3)
    axes = figure.subplots()
    found = _kept()
    colours = {"gpipe": EARLIER_COLOURS[-1], "one_f_one_b": TAG_COLOURS["activations"]}
    for side, (name, rows) in zip((-0.21, 0.21), found.items(), strict=True):
        for rank, (nbytes, held) in enumerate(rows):
            size = nbytes / MIB
            axes.bar(rank + side, size, 0.4, color=colours[name])
            say(axes, rank + side, size + 0.2, f"{held}")
    axes.set_xticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
    axes.tick_params(axis="x", length=0, labelcolor="black")
    axes.set_ylim(0, 6.2)
    axes.set_xlim(-0.55, RANKS - 0.45)
    axes.set_ylabel("MiB of activations")
    keys = [Patch(color=colour, label=name) for name, colour in zip(("GPipe", "1F1B"), colours.values(), strict=True)]
    axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(0.14, 1.04), ncols=2)
    say(axes, 1.75, 5.9, f"numbers: micro-batches held, of {MICROS}", ha="left")
    return figure
