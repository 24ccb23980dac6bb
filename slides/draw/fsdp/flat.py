"""A flat parameter: its padding, its shards, its storage, and its gradient."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, padding_box, say
from draw.fsdp.runs import LAB
from matplotlib.figure import Figure
from minifsdp.answers.lab04 import pad_and_chunk, shard_bounds
from torch import nn

from minifsdp import device
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.instruments.plots.palette import INK, PALE, REDUCE, SOFT, TAG_COLOURS, UNIT_COLOURS, ink_on


def torch_padding(sizes: list[int], ranks: int, use_orig_params: bool) -> int:
    """Elements of padding in torch's flat parameter of float32 (lab 04 compares it with torch's own)."""
    between = sum(-size % 4 for size in sizes[:-1]) if use_orig_params else 0
    return between + -(sum(sizes) + between) % ranks


def draw_steps() -> Figure:
    """A linear layer's weight and bias on their way into 16 shards."""
    figure = canvas(4.8)
    axes = figure.subplots()
    colour = UNIT_COLOURS[0]
    shards = pad_and_chunk(torch.arange(15) + 1.0, 16)  # 0 is padding

    def cell(x: float, y: float, mark: float, width: float = 1.15) -> None:
        if mark:
            box(axes, (x, y), width, 0.62, colour, alpha=1.0 if mark <= 12 else 0.5)
            say(axes, x + width / 2, y + 0.31, f"{mark - 1:.0f}", color=ink_on(colour) if mark <= 12 else INK)
        else:
            padding_box(axes, (x, y), width, 0.62)

    for number, mark in enumerate(torch.cat(shards).tolist()):
        if mark:
            row, column = divmod(number, 4) if number < 12 else (number - 12, 7)
            cell(2.3 + 1.15 * column, 5.6 - 0.62 * row, mark)
            cell(1.15 * number, 3.2, mark)
        cell(1.15 * number, 2.05, mark)
        cell(1.15 * number + 0.08, 0.9, mark, 0.99)
        say(axes, 1.15 * (number + 0.5), 0.6, str(number), color=SOFT)
    say(axes, 4.6, 6.5, "weight [3, 4]")
    say(axes, 10.93, 6.5, "bias [3]")
    for name, y in {"flatten": 3.51, "pad": 2.36, "chunk": 1.21, "rank": 0.6}.items():
        say(axes, -0.4, y, name, ha="right", color=SOFT if name == "rank" else INK)
    bare(axes, (-2.6, 18.5), (0.3, 6.8))
    return figure


def draw_offsets() -> Figure:
    """The unit of layers 0 and 3 over 16 ranks: where each parameter begins and ends, and which rank has what."""
    figure = canvas(3.9)
    axes = figure.subplots()
    sizes = {"0.weight": 60, "0.bias": 10, "3.weight": 132, "3.bias": 11}
    numels, length, ranks = list(sizes.values()), -(-sum(sizes.values()) // 16), 16
    colour, ends, names = UNIT_COLOURS[0], list(accumulate(numels)), [(28, 2.8), (62, 3.35), (136, 2.8), (190, 3.35)]
    scale = (length - 1.6) / length  # a shard is drawn a little narrower

    def place(rank: int, low: int, high: int) -> tuple[tuple[float, float], float, float]:
        """Where a part of a shard is drawn, its width and its height."""
        return (rank * length + 0.8 + low * scale, 0.75), (high - low) * scale, 0.62

    for index, (name, size, end) in enumerate(zip(sizes, numels, ends, strict=True)):
        alpha = 0.4 if "bias" in name else 1.0
        box(axes, (end - size, 1.9), size, 0.62, colour, alpha=alpha)
        say(axes, *names[index], f"{name} [{end - size}, {end})")
        if "bias" in name:
            axes.plot([end - size / 2] * 2, [2.54, 3.15], color=SOFT, linewidth=1.4)
        for rank in range(ranks):
            low, high = shard_bounds(numels, index, rank, ranks)
            if low < high:
                box(axes, *place(rank, low, high), colour, alpha=alpha, linewidth=0.8)
    padding_box(axes, (ends[-1], 1.9), ranks * length - ends[-1], 0.62)
    padding_box(axes, *place(ranks - 1, ends[-1] % length, length))
    say(axes, ranks * length, 1.62, f"padding [{ends[-1]}, {ranks * length})", ha="right", color=SOFT)
    for rank in range(ranks):
        say(axes, (rank + 0.5) * length, 0.42, str(rank), color=SOFT)
    say(axes, -3, 2.21, "flat", ha="right")
    say(axes, -3, 1.06, f"{ranks} × {length}", ha="right")
    say(axes, -3, 0.42, "rank", ha="right", color=SOFT)
    bare(axes, (-30, 226), (0.2, 3.6))
    return figure


def draw_storage() -> Figure:
    """Who refers to a unit's memory while it is whole, and while it is sharded."""
    figure = canvas(4.4)
    axes = figure.subplots()
    flat = FlatParameter(find_parameters(LAB.model().blocks[0]), rank=0, ranks=2)
    device.allocate(flat.full)
    whole = flat.full.untyped_storage().nbytes()
    device.free(flat.full)
    freed = flat.full.untyped_storage().nbytes()
    look: dict[str, Any] = {"arrowstyle": "->", "color": SOFT, "linewidth": 2}
    for left, title, size in ((0, "while the unit is in use", whole), (5.85, "after the free", freed)):
        say(axes, left, 4.1, title, ha="left", fontsize=20, fontweight="bold")
        module = "qkv.weight" if size else "qkv.weight:\na placeholder"
        holders = {module: 3.25, "leaves and views": 2.35, "saved for backward": 1.45, "model.parameters()": 0.35}
        for text, y in holders.items():
            box(axes, (left, y - 0.36), 2.75, 0.72, PALE)
            say(axes, left + 1.37, y, text)
            if size or y < 3:
                axes.annotate("", (left + 3.32, y), (left + 2.8, y), arrowprops=look)
        style = {} if size else {"edgecolor": SOFT, "linestyle": (0, (4, 3)), "linewidth": 2}
        box(axes, (left + 3.35, 1.1), 2.1, 2.5, TAG_COLOURS["unsharded"] if size else "white", **style)
        say(axes, left + 4.4, 2.35, f"one storage\n{size:,} bytes")
        box(axes, (left + 3.35, -0.01), 2.1, 0.72, TAG_COLOURS["parameters"])
        say(axes, left + 4.4, 0.35, f"shard\n{flat.shard.nbytes:,} bytes", color=ink_on(TAG_COLOURS["parameters"]))
    bare(axes, (-0.02, 11.35), (-0.1, 4.35))
    return figure


def own_gradients() -> list[torch.Tensor]:
    """Of one linear layer on each of four ranks, flat; the rows of a rank are its own."""
    torch.manual_seed(0)
    layer, own = nn.Linear(4, 3), []
    for rows_of_rank in torch.randn(4, 2, 4):
        layer.zero_grad()
        layer(rows_of_rank).square().mean().backward()
        own.append(torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None]))
    return own


def draw_gradients() -> Figure:
    """Four ranks' own gradients of one linear layer, and the shards of their mean."""
    figure = canvas(4.5)
    axes = figure.subplots()
    own = own_gradients()
    mean, largest = torch.stack(own).mean(0), max(float(each.abs().max()) for each in own)

    def strip(values: torch.Tensor, middle: float) -> None:
        """A bar for each element, in groups of four, rounded: last bits differ by processor. The last is padding."""
        for number, value in enumerate((0.42 * values / largest).tolist()):
            box(
                axes,
                (number + 0.5 * (number // 4), middle),
                0.9,
                round(value, 4),
                TAG_COLOURS["gradients"],
                linewidth=0,
            )
        for group in range(4):
            axes.hlines(middle, 4.5 * group, 4.5 * group + 3.9, color=SOFT, linewidth=1)
        padding_box(axes, (16.5, middle - 0.2), 0.9, 0.4)

    for rank, gradient in enumerate(own):
        strip(gradient, 4.62 - 0.82 * rank)
        say(axes, -0.4, 4.62 - 0.82 * rank, f"rank {rank}", ha="right")
    strip(mean, 0.72)
    say(axes, -0.4, 0.72, "the mean", ha="right", fontweight="bold")
    for rank in range(4):
        arrow = {"arrowstyle": "-|>", "color": REDUCE, "linewidth": 3, "mutation_scale": 20}
        axes.annotate("", (4.5 * rank + 1.95, 1.18), (4.5 * rank + 1.95, 1.72), arrowprops=arrow)
        box(axes, (4.5 * rank - 0.1, 0.3), 4.1, 0.84, "none", edgecolor=REDUCE, linewidth=2.4)
        say(axes, 4.5 * rank + 1.95, 0.05, f"to rank {rank}", color=REDUCE)
    say(axes, 17.9, 0.72, "hatched:\npadding", ha="left", color=SOFT)
    bare(axes, (-3.4, 20.4), (-0.15, 5.0))
    return figure
