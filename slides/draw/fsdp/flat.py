"""A flat parameter: its padding, its shards, its storage, and its gradient."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, padding_box, say
from draw.fsdp.runs import LAB
from matplotlib.figure import Figure
from torch import nn

from minifsdp import device
from minifsdp.course.plots.palette import INK, LINE, PALE, REDUCE, SOFT, TAG_COLOURS, UNIT_COLOURS, as_text
from minifsdp.course.reference.lab04 import pad_and_chunk, shard_bounds
from minifsdp.flat_param import FlatParameter, find_parameters


def torch_padding(sizes: list[int], ranks: int, use_orig_params: bool) -> int:
    """Elements of padding in torch's flat parameter of float32 (lab 04 compares it with torch's own)."""
    between = sum(-size % 4 for size in sizes[:-1]) if use_orig_params else 0
    return between + -(sum(sizes) + between) % ranks


def draw_steps() -> Figure:
    """A linear layer's weight and bias on their way into 16 shards."""
    figure = canvas(4.8)
    axes = figure.subplots()
    colour = TAG_COLOURS["parameters"]
    shards = pad_and_chunk(torch.arange(15) + 1.0, 16)  # 0 is padding

    def cell(x: float, y: float, mark: float, width: float = 1.15) -> None:
        if mark:
            box(axes, (x, y), width, 0.62, colour, alpha=1.0 if mark <= 12 else 0.5)
            say(axes, x + width / 2, y + 0.31, f"{mark - 1:.0f}", color="white" if mark <= 12 else INK)
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
    for name, y in {"": 5.3, "flatten, concatenate": 3.51, "pad": 2.36, "chunk": 1.21, "rank": 0.6}.items():
        say(axes, -0.4, y, name, ha="right", color=SOFT if name == "rank" else INK)
    bare(axes, (-5.9, 18.6), (0.3, 6.8))
    return figure


def draw_offsets() -> Figure:
    """The unit of layers 0 and 3 over 16 ranks: where each parameter begins and ends, and which rank has what."""
    figure = canvas(4.4)
    axes = figure.subplots()
    sizes = {"layer0.weight": 60, "layer0.bias": 10, "layer3.weight": 132, "layer3.bias": 11}
    numels, length, ranks = list(sizes.values()), -(-sum(sizes.values()) // 16), 16
    colours = [UNIT_COLOURS[0], UNIT_COLOURS[0], UNIT_COLOURS[1], UNIT_COLOURS[1]]
    ends = list(accumulate(numels))
    names = [(30, 2.75), (65, 3.15), (136, 2.75), (196, 3.15)]

    def place(rank: int, low: int, high: int, **style: Any) -> None:
        """A part of a shard, drawn a little narrower."""
        scale = (length - 1.6) / length
        at = (rank * length + 0.8 + low * scale, 0.6)
        box(axes, at, (high - low) * scale, 0.62, "white", **{"linewidth": 0.8} | style)

    for index, (name, size, end) in enumerate(zip(sizes, numels, ends, strict=True)):
        alpha = 0.45 if "bias" in name else 1.0
        box(axes, (end - size, 1.9), size, 0.62, colours[index], alpha=alpha)
        say(axes, *names[index], f"{name} [{end - size}, {end})", color=as_text(colours[index]))
        if "bias" in name:
            axes.plot([end - size / 2] * 2, [2.52, 2.95], color=SOFT, linewidth=1)
        for rank in range(ranks):
            low, high = shard_bounds(numels, index, rank, ranks)
            if low < high:
                place(rank, low, high, facecolor=colours[index], alpha=alpha)
    padding_box(axes, (ends[-1], 1.9), ranks * length - ends[-1], 0.62)
    place(ranks - 1, ends[-1] % length, length, facecolor="white", edgecolor=SOFT, hatch="////", linewidth=0.8)
    say(axes, ranks * length, 1.62, f"padding [{ends[-1]}, {ranks * length})", ha="right", color=SOFT)
    for rank in range(ranks):
        say(axes, (rank + 0.5) * length, 0.35, str(rank), color=SOFT)
    say(axes, -2, 2.21, "flat", ha="right")
    say(axes, -2, 0.91, f"shards\nof {length}", ha="right")
    say(axes, -2, 0.35, "rank", ha="right", color=SOFT)
    bare(axes, (-21, 228), (0.05, 3.4))
    return figure


def draw_storage() -> Figure:
    """Who refers to a unit's memory while it is whole, and while it is sharded."""
    figure = canvas(5.0)
    axes = figure.subplots()
    block = LAB.model().blocks[0]
    flat = FlatParameter(find_parameters(block), rank=0, ranks=2)
    device.allocate(flat.full)
    whole = flat.full.untyped_storage().nbytes()
    device.free(flat.full)
    freed = flat.full.untyped_storage().nbytes()
    for left, title, size in ((0, "while the unit computes", whole), (12.5, "after free", freed)):
        gathered = size > 0
        module = "module.qkv.weight:\na leaf" if gathered else "module.qkv.weight:\na placeholder"
        holders = {
            module: 3.9,
            "views of full,\nkept by the unit": 2.75,
            "saved tensors,\nkept by autograd": 1.6,
        }
        say(axes, left, 5.1, title, ha="left", fontweight="bold")
        for text, y in holders.items():
            box(axes, (left, y - 0.45), 5.4, 0.9, PALE)
            say(axes, left + 2.7, y, text)
            if gathered or y < 3.9:
                arrow = {"arrowstyle": "->", "color": SOFT, "linewidth": 1.4}
                axes.annotate("", (left + 6.9, 2.75), (left + 5.5, y), arrowprops=arrow)
        style = {} if gathered else {"edgecolor": LINE, "linestyle": (0, (4, 3)), "linewidth": 1.6}
        box(axes, (left + 7.0, 1.2), 4.6, 3.1, TAG_COLOURS["unsharded"] if gathered else "white", **style)
        say(axes, left + 9.3, 2.75, f"one storage\n{size:,} bytes")
        box(axes, (left, -0.2), 5.4, 0.9, PALE)
        say(axes, left + 2.7, 0.25, "model.parameters(),\nfor the optimizer")
        axes.annotate("", (left + 6.9, 0.25), (left + 5.5, 0.25), arrowprops={"arrowstyle": "->", "color": SOFT})
        box(axes, (left + 7.0, -0.2), 4.6, 0.9, TAG_COLOURS["parameters"])
        say(axes, left + 9.3, 0.25, f"shard\n{flat.shard.nbytes:,} bytes", color="white")
    bare(axes, (-0.1, 24.2), (-0.3, 5.4))
    return figure


def draw_gradients() -> Figure:
    """Four ranks' own gradients of one linear layer, and the shards of their mean."""
    figure = canvas(4.6)
    axes = figure.subplots()
    torch.manual_seed(0)
    layer, own = nn.Linear(4, 3), []
    for rows_of_rank in torch.randn(4, 2, 4):
        layer.zero_grad()
        layer(rows_of_rank).square().mean().backward()
        own.append(torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None]))
    mean = torch.stack(own).mean(0)
    largest = max(float(each.abs().max()) for each in own)

    def strip(values: torch.Tensor, bottom: float, gap: float) -> None:
        shades = torch.cat([values, torch.zeros(1)]) / largest
        for number, shade in enumerate(shades.tolist()):
            at = (number + gap * (number // 4), bottom)
            if number == 15:
                padding_box(axes, at, 1, 0.62)
            else:
                colour = TAG_COLOURS["gradients"] if shade > 0 else INK
                box(axes, at, 1, 0.62, PALE)
                box(axes, at, 1, 0.62, colour, alpha=min(1.0, 0.12 + 0.88 * abs(shade)))

    for rank, gradient in enumerate(own):
        strip(gradient, 4.4 - 0.78 * rank, 0.5)
        say(axes, -0.4, 4.71 - 0.78 * rank, f"rank {rank}'s", ha="right")
    strip(mean, 0.6, 0.5)
    say(axes, -0.4, 0.91, "mean", ha="right")
    for rank in range(4):
        arrow = {"arrowstyle": "->", "color": REDUCE, "linewidth": 2}
        axes.annotate("", (4.5 * rank + 2, 1.3), (4.5 * rank + 2, 1.98), arrowprops=arrow)
        box(axes, (4.5 * rank, 0.6), 4, 0.62, "none", edgecolor=REDUCE, linewidth=2)
        say(axes, 4.5 * rank + 2, 0.28, f"rank {rank} keeps", color=REDUCE)
    bare(axes, (-4.2, 17.7), (0, 5.1))
    return figure
