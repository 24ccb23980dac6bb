"""Hybrid sharding: groups, what leaves a host, and what to choose on which cluster."""

from __future__ import annotations

import re

from draw.canvas import canvas
from draw.measured import told
from draw.practice.drawing import bare, box
from draw.practice.model import RANKS, large
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from minifsdp.answers.lab11 import plan_groups, traffic

from minifsdp.course.ladder.rungs import sizes_of
from minifsdp.instruments.plots.palette import (
    COLLECTIVE_COLOURS,
    INK,
    LINE,
    PALE,
    SOFT,
    STRATEGY_COLOURS,
    UNIT_COLOURS,
    as_text,
    ink_on,
)

OPS = "all-gather", "reduce-scatter", "all-reduce"
ALL_REDUCE = COLLECTIVE_COLOURS["all-reduce"]


def draw_hybrid() -> Figure:
    """Eight ranks on two hosts: rows are sharding groups, columns are replica groups."""
    figure, axes = bare(4.35, 7.2, 4.75, left=-0.75, bottom=0.25)
    factor = 4
    sharding, replicas = plan_groups(RANKS, factor)
    round_corners = "round,pad=0,rounding_size=0.12"
    for host, group in enumerate(sharding):
        bottom = 2.35 - 2.0 * host
        row = FancyBboxPatch((-0.02, bottom - 0.02), 4.24, 1.54, round_corners, facecolor=PALE, edgecolor=LINE)
        axes.add_patch(row)
        axes.text(-0.1, bottom + 0.75, f"host {host}", ha="right", va="center")
        for place, rank in enumerate(group):
            left = 0.12 + 1.04 * place
            axes.add_patch(Rectangle((left, bottom + 0.16), 0.9, 1.18, facecolor="white", edgecolor=LINE))
            axes.text(left + 0.45, bottom + 1.06, f"rank {rank}", ha="center", va="center")
            for part in range(factor):
                colour = UNIT_COLOURS[part] if part == place else PALE
                box(axes, left + 0.08 + 0.185 * part, bottom + 0.3, (0.185, 0.5), colour)
    for place, group in enumerate(replicas):
        middle = 0.57 + 1.04 * place
        axes.annotate(
            "",
            (middle, 2.3),
            (middle, 1.87),
            arrowprops={
                "arrowstyle": "<|-|>",
                "color": ALL_REDUCE,
                "lw": 2.5,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
        axes.text(
            middle,
            4.0,
            f"replicas\n{group}",
            ha="center",
            va="bottom",
            color=ALL_REDUCE,
        )
    told_inside = "1  along a row: all-gather,\nreduce-scatter of P:\nthe mean of 4 ranks, P / 4"
    told_across = "2  down a column:\nall-reduce of P / 4:\nthe mean of 8 ranks"
    axes.text(4.4, 3.1, told_inside, va="center", color=INK)
    axes.text(4.4, 1.75, told_across, va="center", color=ALL_REDUCE)
    return figure


def draw_leaves() -> Figure:
    """What all ranks of a host send to other hosts in a step, by sharding factor."""
    figure = canvas(4.8)
    panels = figure.subplots(1, 2, sharey=True, width_ratios=(3, 6))
    units = [2 * sum(unit) for unit in sizes_of(large()).units]
    clusters = (("2 hosts of 2", 4, 2, (1, 2, 4)), ("8 hosts of 8", 64, 8, (1, 2, 4, 8, 16, 64)))
    for panel, (name, ranks, per_host, factors) in zip(panels, clusters, strict=True):
        for place, factor in enumerate(factors):
            sent = traffic(units, ranks, per_host, factor)
            sharding = sent.sharding * (factor > per_host)  # two gathers but one of the root, and a reduce-scatter
            scatters = sharding * sum(units) / (3 * sum(units) - units[0])
            bottom, parts = 0.0, (sharding - scatters, scatters, sent.leaves - sharding)
            for part, op in zip(parts, OPS, strict=True):
                panel.bar(place, part / sum(units), 0.62, bottom, color=COLLECTIVE_COLOURS[op])
                bottom += part / sum(units)
            panel.text(place, bottom + 0.05, f"{bottom:.2f}", ha="center", va="bottom")
        panel.set_xticks(range(len(factors)), [f"F = {factor}" for factor in factors])
        panel.tick_params(axis="x", length=0)
        panel.set_title(f"{name} ranks")
        panel.set_ylim(0, 4.4)
    panels[0].set_ylabel("bytes leaving a host per step\n(multiples of the model)")
    for place, op in enumerate(OPS):
        look = {"color": as_text(COLLECTIVE_COLOURS[op]), "fontweight": "bold"}
        panels[1].text(-0.3, 3.9 - 0.45 * place, op, **look)
    return figure


def more_with_ddp() -> float:
    """On 8 hosts of 8: how many more bytes leave a host with F = 1 than with F = 8, as a share of the latter."""
    alone, inside = (traffic([1], 64, 8, factor).leaves for factor in (1, 8))
    return alone / inside - 1


CLUSTERS = {  # the lab's columns: hosts and GPUs, the memory of each, and the network of a host
    "8 hosts of 8 A100": "8 × 8 A100\n80 GB each\n100 GB/s",
    "the same, Ethernet": "8 × 8 A100\n80 GB, Ethernet\n12.5 GB/s",
    "64 hosts of 8 A100": "64 × 8 A100\n80 GB each\n100 GB/s",
    "2 hosts of 4, PCIe": "2 × 4 on PCIe\n24 GB each\n12.5 GB/s",
}


def draw_decisions() -> Figure:
    """What lab 11's cost model chooses, by model and cluster."""
    head, *lines = [re.split(r"\s{2,}", line.strip()) for line in told("11", "C44") if line.strip()]
    colours = {
        "data": STRATEGY_COLOURS["DDP"],
        "hybrid": STRATEGY_COLOURS["HYBRID_SHARD"],
        "full": STRATEGY_COLOURS["FSDP"],
        "more ranks": PALE,
        "split layers": LINE,
    }
    figure, axes = bare(4.75, 4.0, len(lines) + 2.1, left=-1.05)
    axes.text(-0.04, len(lines) + 0.15, "hosts × GPUs\nmemory\nnetwork", ha="right", va="bottom", color=SOFT)
    for place, cluster in enumerate(head):
        axes.text(place + 0.5, len(lines) + 0.15, CLUSTERS[cluster], ha="center", va="bottom", color=SOFT)
    for row, (job, *decisions) in enumerate(lines):
        bottom = len(lines) - 1 - row
        axes.text(-0.04, bottom + 0.5, _short(job), ha="right", va="center")
        for place, decision in enumerate(decisions):
            choice, _, factor = decision.partition(", ")
            word = choice.replace("data", "DDP") + (f", {factor}" if factor not in ("", "F = 1") else "")
            box(axes, place, bottom + 0.04, (0.985, 0.9), colours[choice], word, color=ink_on(colours[choice]))
    return figure


def _short(text: str) -> str:
    """A row's name in the lab's table, for a narrow column."""
    words = {" billion": " B", "context 131,072": "long context"}
    for word, short in words.items():
        text = text.replace(word, short)
    return text
