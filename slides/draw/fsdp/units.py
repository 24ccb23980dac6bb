"""Units: what they may be made of, and what each choice costs."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from draw.canvas import GIB, KIB, MIB, canvas
from draw.fsdp.drawing import bare, box, named, padding_box, say
from matplotlib.figure import Figure
from minifsdp.answers.lab04 import assign_units
from torch import nn

from minifsdp.cost import data_parallel
from minifsdp.cost.data_parallel import Setting
from minifsdp.course.ladder.rungs import sizes_of
from minifsdp.fsdp.torch_api.wrap import check_not_shared
from minifsdp.gpt import GPT
from minifsdp.instruments.plots.palette import GATHER, INK, SOFT, TAG_COLOURS, UNIT_COLOURS, as_text, ink_on, lighter

LARGE: dict[str, Any] = {"vocabulary": 50257, "width": 4096, "layers": 32, "heads": 32, "context": 2048}
LARGE_SETTING = Setting(ranks=64, itemsize=2)
WIDTHS = [6, 10, 9, 12, 11, 8, 5]  # lab 04's six layers
COLOURS = dict(zip(("root", "middle", "last"), UNIT_COLOURS, strict=False))


@cache
def groupings() -> dict[str, list[list[int]]]:
    """Ways to group the parameters of a large GPT into units: elements of each parameter, the root's first."""
    with torch.device("meta"):
        model = GPT(**LARGE)
    root, *blocks = sizes_of(model).units
    layers = [[p.numel() for p in m.parameters()] for m in model.modules() if not list(m.children())]
    return {
        "the full model": [[*root, *(size for block in blocks for size in block)]],
        "8 blocks": [root, *([n for each in blocks[i : i + 8] for n in each] for i in range(0, len(blocks), 8))],
        "a block": [root, *blocks],
        "a layer": [[], *(sizes for sizes in layers if sizes)],
        "a parameter": [[], *([p.numel()] for p in model.parameters())],
    }


def six_layers() -> nn.Sequential:
    """Lab 04's model: layers 1 and 2 are in a module of their own, and so are 4 and 5."""
    layers = [nn.Linear(before, after) for before, after in pairwise(WIDTHS)]
    middle = nn.Sequential(OrderedDict(layer1=layers[1], layer2=layers[2]))
    last = nn.Sequential(OrderedDict(layer4=layers[4], layer5=layers[5]))
    return nn.Sequential(OrderedDict(layer0=layers[0], middle=middle, layer3=layers[3], last=last))


@cache
def layouts(ranks: int) -> dict[str, dict[str, int]]:
    """Elements by parameter, and last the padding, of the three units of the six layers."""
    model = six_layers()
    inner: list[nn.Module] = [model.get_submodule("middle"), model.get_submodule("last")]
    return dict(zip(COLOURS, assign_units(model, inner, ranks), strict=True))


def refusal() -> str:
    """What is said of a parameter that would be in two units."""
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    try:
        check_not_shared(model, model["head"])
    except ValueError as error:
        return str(error)
    raise AssertionError("a tie between two units was not refused")


def readable(size: float) -> str:
    """Bytes in the largest unit of which there is about one."""
    sizes = (GIB, "GiB", 1), (MIB, "MiB", 0), (KIB, "KiB", 0)
    unit, name, digits = next(each for each in sizes if size > 0.3 * each[0])
    return f"{size / unit:.{digits}f} {name}"


def draw_trade() -> Figure:
    """What is gathered at once, and how many messages a step takes, by what a unit is made of."""
    figure = canvas(4.5)
    held, sent = figure.subplots(1, 2, sharey=True)
    for place, units in enumerate(groupings().values()):
        size = data_parallel.fsdp(units, LARGE_SETTING).unsharded_peak
        held.barh(place, size, 0.62, color=TAG_COLOURS["unsharded"])
        held.text(size + 0.2 * GIB, place, readable(size), va="center")
        messages = 3 * sum(map(bool, units)) - bool(units[0])  # an empty root has none
        middle = median(LARGE_SETTING.padded(sum(unit)) for unit in units if unit)
        sent.barh(place, messages, 0.62, color=GATHER)
        sent.text(messages + 18, place, f"{messages:,} of {readable(middle)}", va="center")
    named(held, list(groupings()))
    held.set_title("most unsharded\nat once")
    sent.set_title("collectives per step,\nand median size")
    held.set_xlim(0, 19 * GIB)
    sent.set_xlim(0, 2150)
    for axes in (held, sent):
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
    sent.tick_params(axis="y", length=0)
    held.set_title("unit", loc="right", x=-0.03)
    return figure


def draw_root() -> Figure:
    """Unsharded parameters over forward and backward: one block after the other, on top of the root."""
    figure = canvas(3.0)
    axes = figure.subplots()
    root, *blocks = (LARGE_SETTING.padded(sum(unit)) / GIB for unit in groupings()["a block"])
    colour, steps = TAG_COLOURS["unsharded"], 2 * len(blocks)
    light = lighter(colour, 0.45)
    axes.barh(root / 2, steps, root, color=light)
    axes.bar([place + 0.5 for place in range(steps)], [*blocks, *reversed(blocks)], 0.7, root, color=colour)
    say(axes, steps / 4, root / 2, f"the root: {root:.1f} GiB", color=ink_on(light))
    axes.axvline(len(blocks), color=INK, linewidth=1.6, linestyle=(0, (3, 3)))
    says = f"{len(blocks)} blocks, one at a time: {blocks[0]:.1f} GiB each"
    say(axes, 0.5, root + 1.3 * blocks[0], says, ha="left", color=as_text(colour), va="bottom")
    axes.set_xticks([len(blocks) / 2, 1.5 * len(blocks)], ["forward", "backward"])
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(0, steps), ylim=(0, 1.35 * (root + blocks[0])))
    axes.set_ylabel("GiB unsharded")
    return figure


def draw_units() -> Figure:
    """Six layers as they run, and the three flat parameters that hold them."""
    figure = canvas(5.2)
    axes = figure.subplots()
    for number in range(6):
        unit = next(name for name, layout in layouts(4).items() if any(f"layer{number}." in each for each in layout))
        colour = COLOURS[unit]
        box(axes, (number * 38, 4.75), 31, 0.6, colour)
        say(axes, number * 38 + 15.5, 5.04, f"layer {number}", color=ink_on(colour))
        if number:
            arrow = {"arrowstyle": "->", "color": SOFT}
            axes.annotate("", (number * 38 - 0.5, 5.05), (number * 38 - 6.5, 5.05), arrowprops=arrow)
    say(axes, 232, 5.05, "every rank\nruns them all", ha="left", color=SOFT)
    for row, (unit, layout) in enumerate(layouts(4).items()):
        bottom, left, whole = 3.35 - 1.6 * row, 0, sum(layout.values())
        for name, size in layout.items():
            if name == "padding":
                padding_box(axes, (left, bottom), size, 0.6)
            else:
                is_weight = name.endswith("weight")
                box(axes, (left, bottom), size, 0.6, COLOURS[unit], alpha=1.0 if is_weight else 0.4)
                if is_weight:
                    say(axes, left + size / 2, bottom + 0.8, "layer " + name.partition("layer")[2][0])
            left += size
        axes.vlines([whole * rank / 4 for rank in range(5)], bottom - 0.3, bottom + 0.6, color=INK, linewidth=2)
        for rank in range(4):
            say(axes, whole * (rank + 0.5) / 4, bottom - 0.2, f"rank {rank}", color=SOFT)
        text = f"{whole - layout['padding']} + {layout['padding']} = 4 × {whole // 4}"
        say(axes, 232, bottom + 0.55, unit, ha="left", color=as_text(COLOURS[unit]), fontweight="bold")
        say(axes, 232, bottom + 0.1, text, ha="left")
    say(axes, 160, 0.3, "pale: bias; hatched:\npadding; numbers:\nelements", ha="left", color=SOFT)
    bare(axes, (-1, 309), (-0.2, 5.4))
    return figure
