"""Bytes of a step by axis, and memory of a rank from DDP to three axes: by `cost`, for a model of seven billion."""

from __future__ import annotations

from functools import cache

from draw.canvas import GB, canvas
from draw.fsdp.drawing import say
from draw.scale.groups import AXIS_COLOURS
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minifsdp.cost.data_parallel import Setting
from minifsdp.cost.links import wire
from minifsdp.cost.model import gpt
from minifsdp.cost.total import StepBytes, cost
from minifsdp.cost.traffic import sent
from minifsdp.instruments.plots.palette import INK, SOFT, TAG_COLOURS, as_text
from minifsdp.recipe import Recipe

MODEL = gpt(vocabulary=50_257, width=4096, layers=32, heads=32, context=4096)
FEW, MANY = 8, 64  # sequences of a step: one for each of 8 ranks, and as in lab 15
LAYOUTS = (
    "dp=8,zero=1",
    "dp=4,tp=2,zero=1,sequence",
    "pp=2,dp=2,tp=2,zero=1,sequence,micro=32",
    "pp=4,dp=2,zero=1,micro=32",
)
WAYS = {  # rows of the memory's figure
    "dp 8, DDP": "dp=8,data=ddp",
    "dp 8, ZeRO-1": "dp=8,zero=1",
    "dp 8, FSDP2": "dp=8,data=fsdp2",
    "pp 8": "pp=8,micro=8",
    "tp 8": "tp=8,sequence,regather",
    "2 × 2 × 2, ZeRO-1": "pp=2,dp=2,tp=2,zero=1,sequence,regather,micro=4",
    "2 × 2 × 2, ZeRO-2": "pp=2,dp=2,tp=2,zero=2,sequence,regather,micro=4",
    "2 × 2 × 2, FSDP2": "pp=2,dp=2,tp=2,data=fsdp2,sequence,regather,micro=4",
}
TAGS = {  # of StepBytes
    "parameters": "parameters",
    "unsharded_peak": "unsharded",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
}


def billions() -> str:
    return f"{sum(MODEL.parameters) / 1e9:.1f} B"


@cache
def sent_by_axis(text: str, sequences: int) -> dict[str, float]:
    """Bytes that a rank sends in a step in float32, by axis, of the rank that sends most."""
    recipe, found = Recipe.parse(text), list[dict[str, float]]()
    for rank in range(recipe.mesh.ranks):
        total = dict.fromkeys(recipe.mesh.divided, 0.0)
        for call, count in sent(MODEL, recipe, rank, Setting(recipe.mesh.ranks, batch=sequences)).items():
            total[call.axis] += count * wire(call, recipe.mesh.size(call.axis))
        found.append(total)
    return max(found, key=lambda total: sum(total.values()))


@cache
def held(text: str) -> StepBytes:
    """Of the rank that holds most."""
    recipe = Recipe.parse(text)
    setting = Setting(recipe.mesh.ranks, batch=FEW)
    return max((cost(MODEL, recipe, rank, setting) for rank in range(recipe.mesh.ranks)), key=total)


def total(each: StepBytes) -> int:
    return sum(getattr(each, name) for name in TAGS)


def figures() -> dict[str, str]:
    """Numbers of both slides, as text."""
    on_dp = {way: sent_by_axis(text, FEW)["dp"] for way, text in WAYS.items() if "dp=" in text}
    alone, _, three, _ = (sent_by_axis(text, MANY) for text in LAYOUTS)
    return {
        "parameters": billions(),
        "DDP": f"{total(held(WAYS['dp 8, DDP'])) / GB:.0f}",
        "three axes": f"{total(held(WAYS['2 × 2 × 2, ZeRO-1'])) / GB:.0f} GB",
        "ZeRO-2": f"{on_dp['2 × 2 × 2, ZeRO-2'] / on_dp['2 × 2 × 2, ZeRO-1']:.1f}",
        "dp alone": f"{alone['dp'] / GB:.0f} GB",
        "dp of three": f"{three['dp'] / GB:.1f} GB",
        "tp of three": f"{three['tp'] / GB:.0f} GB",
    }


def draw_bytes() -> Figure:
    """For each layout a bar for each axis."""
    figure = canvas(4.2)
    axes = figure.subplots()
    place, ticks, names = 0.0, [], []
    for text in LAYOUTS:
        recipe, begin = Recipe.parse(text), place
        by_axis = sent_by_axis(text, MANY)
        for axis in ("tp", "dp", "pp"):
            if axis not in by_axis:
                continue
            size = by_axis[axis] / GB
            axes.barh(place, size, 0.8, color=AXIS_COLOURS[axis])
            says = f"{axis}  {size:.1f} GB"
            say(axes, size + 1.5, place, says, ha="left", color=as_text(AXIS_COLOURS[axis]), fontweight="bold")
            place += 1
        ticks.append((begin + place - 1) / 2)
        names.append(" × ".join(f"{axis} {recipe.mesh.size(axis)}" for axis in recipe.mesh.divided))
        place += 0.6
    axes.set_yticks(ticks, names)
    axes.tick_params(axis="y", length=0, pad=8, labelcolor=INK)
    axes.invert_yaxis()
    axes.set(xlim=(0, 172), xticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


def draw_everything() -> Figure:
    """For each way a bar of what a rank holds, its sum, and what data parallelism sends."""
    figure = canvas(3.9)
    axes = figure.subplots()
    most = total(held(WAYS["dp 8, DDP"])) / GB
    for place, text in enumerate(WAYS.values()):
        each, left = held(text), 0.0
        for name, tag in TAGS.items():
            size = getattr(each, name) / GB
            axes.barh(place, size, 0.74, left, color=TAG_COLOURS[tag])
            left += size
        say(axes, left + 1.5, place, f"{left:.0f}", ha="left", fontweight="bold")
        by_axis = sent_by_axis(text, FEW)
        says = f"{by_axis['dp'] / GB:.1f}" if "dp" in by_axis else "–"
        say(axes, 1.25 * most, place, says, ha="right")
    say(axes, 1.25 * most, -1.3, "GB sent\non dp", ha="right", color=SOFT)
    say(axes, most + 1.5, -0.9, "GB", ha="left", color=SOFT)
    axes.set_yticks(range(len(WAYS)), list(WAYS))
    axes.tick_params(axis="y", length=0, pad=8, labelcolor=INK)
    axes.set(xlim=(0, 1.27 * most), ylim=(len(WAYS) - 0.5, -1.9), xticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    patches = [Patch(color=TAG_COLOURS[tag], label=tag) for tag in TAGS.values()]
    figure.legend(handles=patches, loc="outside lower left", ncols=5, handlelength=1.0, columnspacing=0.9)
    return figure
