"""Precision: what is held and sent in which dtype, and what a dtype can hold."""

from __future__ import annotations

import torch
from draw.canvas import GB, canvas
from draw.practice.drawing import BF16, FP32, bare, box
from draw.practice.model import RANKS, elements
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from minifsdp.instruments.plots.palette import DTYPE_COLOURS, INK, SOFT, as_text

PRECISIONS = {"fp32": (4, 4), "bf16, reduced\nin fp32": (2, 4), "bf16": (2, 2)}  # bytes computed in, reduced in
GATHERS, SCATTERS = "all-\ngathers", "reduce-\nscatters"


def small_steps() -> float:
    """What becomes of a 1 in bf16 from which 0.001 is taken 500 times."""
    low = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(500):
        low -= 0.001
    return low.item()


def draw_dtypes() -> Figure:
    """By precision, what is held and what is sent on the way from a shard to its update; arrows are messages."""
    figure, axes = bare(4.8, 7, 3.85, left=-1.65, bottom=-0.5)
    psi, root, block = elements()
    share = (RANKS - 1) / RANKS
    names = ("shards", GATHERS, "unsharded\nblock", "its\ngradient", SCATTERS, "grad.\nshards", "Adam's\nstate")
    for row, (precision, (p, r)) in enumerate(PRECISIONS.items()):
        sent = share * p * (2 * psi - root), share * r * psi
        held = 4 * psi / RANKS, p * block, r * block, 4 * psi / RANKS, 8 * psi / RANKS
        cells = [(held[0], 4), (sent[0], p), (held[1], p), (held[2], r), (sent[1], r), (held[3], 4), (held[4], 4)]
        bottom = 2.05 - 0.98 * row
        axes.text(-0.12, bottom + 0.4, precision, ha="right", va="center")
        for place, (size, item) in enumerate(cells):
            colour, ink = (FP32, "white") if item == 4 else (BF16, "white")
            if names[place] in (GATHERS, SCATTERS):
                edge = [(0.06, 0), (0.78, 0), (0.98, 0.4), (0.78, 0.8), (0.06, 0.8)]
                axes.add_patch(Polygon([(place + x, bottom + y) for x, y in edge], facecolor=colour))
            else:
                box(axes, place + 0.03, bottom, (0.94, 0.8), colour)
            word = f"{size / GB:.{1 if size > GB else 2}f}"
            axes.text(place + 0.49, bottom + 0.4, word, ha="center", va="center", color=ink)
    for place, name in enumerate(names):
        axes.text(place + 0.49, 3.06, name, ha="center", va="baseline")
    words = f"GB per rank on {RANKS} ranks, {psi / 1e9:.1f} billion parameters; arrows: sent"
    axes.text(-1.6, -0.25, words, va="center", color=SOFT)
    axes.text(6.3, -0.25, "fp32", va="center", ha="right", color=FP32, fontweight="bold")
    axes.text(6.97, -0.25, "bf16", va="center", ha="right", color=BF16, fontweight="bold")
    return figure


def draw_ranges() -> Figure:
    """From the smallest to the largest number of each dtype, and what a gradient is that is too small for fp16."""
    figure = canvas(4.8)
    axes = figure.subplots()
    gradient, scale = 2e-8, 2.0**16
    colours = DTYPE_COLOURS
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for height, (name, dtype) in enumerate(reversed(dtypes.items())):
        info = torch.finfo(dtype)
        least = info.smallest_normal * info.eps
        axes.barh(height, info.max - info.smallest_normal, 0.5, info.smallest_normal, color=colours[name])
        axes.barh(height, info.smallest_normal - least, 0.5, least, color=colours[name], alpha=0.35)
        bits = round(-torch.tensor(info.eps).log2().item())
        largest = f"{info.max:,.0f}" if info.max < 1e6 else f"{info.max:.1e}"
        text = f"{bits} mantissa bits, {least:.0e} to {largest}"
        axes.text(least, height + 0.29, text, va="bottom", ha="left", color=as_text(colours[name]))
    axes.plot([gradient] * 2, [-0.42, 0.25], color=INK, linewidth=2)
    axes.text(gradient / 50, -0.36, f"gradient {gradient:.0e}: 0 in fp16", ha="right", va="center")
    axes.annotate(
        "", (gradient * scale, -0.36), (gradient, -0.36), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 2}
    )
    axes.text(gradient * scale * 20, -0.36, f"times {scale:,.0f}: in range", ha="left", va="center")
    axes.set_xscale("log")
    axes.set_xlim(1e-46, 1e40)
    axes.set_ylim(-0.6, 2.75)
    axes.set_yticks(range(3), reversed(dtypes))
    axes.tick_params(axis="y", length=0, labelcolor=INK, labelsize=18)
    axes.set_xticks([1e-40, 1e-20, 1, 1e20])
    axes.set_xlabel("magnitude of a number; pale: subnormal, with fewer mantissa bits")
    axes.minorticks_off()
    axes.spines["left"].set_visible(False)
    return figure
