"""Units: what they may be made of, what each choice costs, and whose layers they are."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from draw.canvas import GB, KB, MB, canvas
from draw.fsdp.drawing import bare, box, inset, named, padding_box, say
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

from minifsdp.course.ladder import closed_form
from minifsdp.course.ladder.closed_form import Setting
from minifsdp.course.ladder.model import GPT
from minifsdp.course.ladder.rungs import sizes_of
from minifsdp.course.plots.palette import GATHER, INK, PALE, SOFT, TAG_COLOURS, UNIT_COLOURS, as_text, ink_on
from minifsdp.course.reference.lab04 import assign_units
from minifsdp.fsdp.torch_api.wrap import check_not_shared

LARGE: dict[str, Any] = {"vocabulary": 50257, "width": 4096, "layers": 32, "heads": 32, "context": 2048}
LARGE_SETTING = Setting(ranks=64, itemsize=2)
WIDTHS = [6, 10, 9, 12, 11, 8, 5]  # lab 04's six layers
UNITS = dict(zip(("root", "middle", "last"), UNIT_COLOURS, strict=False))


@cache
def groupings() -> dict[str, list[list[int]]]:
    """Ways to group the parameters of a large GPT into units: elements of each parameter, the root's first."""
    with torch.device("meta"):
        model = GPT(**LARGE)
    root, *blocks = sizes_of(model).units
    layers = [[p.numel() for p in m.parameters()] for m in model.modules() if not list(m.children())]
    return {
        "the whole model": [[*root, *(size for block in blocks for size in block)]],
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
    return dict(zip(UNITS, assign_units(model, inner, ranks), strict=True))


def refusal() -> str:
    """What is said of a parameter that would be in two units."""
    model = six_layers()
    first, last = model.get_submodule("layer0"), model.get_submodule("last.layer5")
    last.weight = first.weight
    try:
        check_not_shared(model, model.get_submodule("last"))
    except ValueError as error:
        return str(error)
    raise AssertionError("a tie between two units was not refused")


def readable(size: float) -> str:
    """Bytes in the largest unit of which there is about one."""
    unit, name, digits = next(each for each in ((GB, "GB", 1), (MB, "MB", 0), (KB, "kB", 0)) if size > 0.3 * each[0])
    return f"{size / unit:.{digits}f} {name}"


def draw_trade() -> Figure:
    """What is gathered at once, and how many messages a step takes, by what a unit is made of."""
    figure = canvas(4.8)
    inset(figure)
    held, sent = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
    for place, units in enumerate(groupings().values()):
        size = closed_form.fsdp(units, LARGE_SETTING).unsharded_peak / GB
        held.barh(place, size, 0.62, color=TAG_COLOURS["unsharded"])
        held.text(size + 0.2, place, f"{size:.1f} GB", va="center")
        messages = 3 * len(units) - bool(units[0])
        middle = median(LARGE_SETTING.padded(sum(unit)) for unit in units if unit)
        sent.barh(place, messages, 0.62, color=GATHER)
        sent.text(messages + 18, place, f"{messages:,} of {readable(middle)}", va="center")
    named(held, list(groupings()))
    held.set_title("whole at once")
    sent.set_title("messages in a step")
    held.set_xlim(0, 20)
    sent.set_xlim(0, 2500)
    for axes in (held, sent):
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
    sent.tick_params(axis="y", length=0)
    return figure


def draw_units() -> Figure:
    """Six layers as they run, and the three flat parameters that hold them."""
    figure = canvas(5.0)
    axes = figure.subplots()
    for number in range(6):
        unit = next(name for name, layout in layouts(4).items() if any(f"layer{number}." in each for each in layout))
        box(axes, (number * 40, 4.6), 32, 0.62, UNITS[unit])
        say(axes, number * 40 + 16, 4.91, f"layer {number}", color=ink_on(UNITS[unit]))
        if number:
            arrow = {"arrowstyle": "->", "color": SOFT}
            axes.annotate("", (number * 40 - 0.5, 4.91), (number * 40 - 7.5, 4.91), arrowprops=arrow)
    say(axes, 240, 4.91, "every rank\nruns them all", ha="left", color=SOFT)
    for row, (unit, layout) in enumerate(layouts(4).items()):
        bottom, left, whole = 3.0 - 1.4 * row, 0, sum(layout.values())
        for name, size in layout.items():
            if name == "padding":
                padding_box(axes, (left, bottom), size, 0.62)
            else:
                box(axes, (left, bottom), size, 0.62, UNITS[unit], alpha=0.45 if "bias" in name else 1.0)
                say(
                    axes,
                    left + size / 2,
                    bottom + 0.76,
                    f"{'b' if 'bias' in name else 'W'}{name.partition('layer')[2][0]}",
                )
            left += size
        axes.vlines([whole * rank / 4 for rank in range(5)], bottom - 0.22, bottom + 0.62, color=INK, linewidth=1.4)
        for rank in range(4):
            say(axes, whole * (rank + 0.5) / 4, bottom - 0.17, f"rank {rank}", color=SOFT)
        layers = " and ".join(name.partition("layer")[2][0] for name in layout if name.endswith("weight"))
        text = f"{unit}: layers {layers}\n{whole - layout['padding']} + {layout['padding']} = 4 × {whole // 4}"
        say(axes, 240, bottom + 0.31, text, ha="left", color=as_text(UNITS[unit]))
    bare(axes, (-1, 320), (-0.15, 5.3))
    return figure


def draw_whose() -> Figure:
    """What a rank owns and what it gathers while layers 1 and 2 run: FSDP, a pipeline, tensor parallelism."""
    figure = canvas(4.8)
    panels = {
        "FSDP": "owns a third of each unit,\ngathers the one that runs",
        "pipeline": "owns two layers,\nand runs no other",
        "tensor parallelism": "owns a third of each layer,\nand never gathers",
    }
    columns = figure.subplots(1, 3, width_ratios=(7.8, 6.5, 6.5))
    owned, gathered, third = TAG_COLOURS["parameters"], TAG_COLOURS["unsharded"], 0.3
    for axes, (title, says) in zip(columns, panels.items(), strict=True):
        say(axes, 3, 4.3, title, fontweight="bold")
        say(axes, 3, -0.2, says, va="top")
        for layer in range(6):
            say(axes, layer + 0.5, 3.45, str(layer), color=SOFT)
        bare(axes, (-1.75 if axes is columns[0] else -0.3, 6.1), (-1.2, 4.6))
    columns[0].add_patch(Rectangle((0.96, -0.06), 2.08, 3.3, fill=False, edgecolor=INK, linewidth=2, zorder=5))
    say(columns[0], 2, 3.83, "now computing")
    for rank, bottom in enumerate((2.3, 1.15, 0.0)):
        say(columns[0], -0.15, bottom + 0.45, f"rank {rank}", ha="right")
        for layer in range(6):
            slice_of_rank = (layer, bottom + third * (2 - rank))
            box(columns[0], (layer, bottom), 1, 0.9, gathered if layer in (1, 2) else PALE)
            box(columns[0], slice_of_rank, 1, third, owned)
            box(columns[1], (layer, bottom), 1, 0.9, owned if layer // 2 == rank else PALE)
            box(columns[2], (layer, bottom), 1, 0.9, PALE)
            box(columns[2], slice_of_rank, 1, third, owned)
    return figure
