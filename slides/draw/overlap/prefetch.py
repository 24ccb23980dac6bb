"""In which order a host issues, how many gathers that makes whole at once, and what is gained."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

from draw.canvas import MIB, canvas
from draw.overlap.drawing import COLOURS, bare, box
from draw.overlap.runs import TIMED, big, layer_seconds, program
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minifsdp.cost.data_parallel import Setting, fsdp
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import sizes_of
from minifsdp.instruments.machine.program import STEP, Allocate, Free, Issue, Kernel, Mark
from minifsdp.instruments.machine.shapes import Shape
from minifsdp.instruments.plots.palette import INK, SERIES_COLOURS, SOFT, as_text


def prefetch_gain(shape: Shape) -> float:
    """What backward prefetch adds to the steps per second of all blocks."""
    runs = [big(shape, name) for name in ("no prefetch", "BACKWARD_PRE")]
    without, ahead = (run.seconds + (shape.layers - shape.recorded) * sum(layer_seconds(run)) for run in runs)
    return without / ahead - 1


def issued(name: str) -> list[tuple[str, str]]:
    """What the host issues for each block in backward, in order."""
    recorded = program(name, TIMED).instructions
    found: list[tuple[str, str]] = []
    for each in recorded[max(at for at, mark in enumerate(recorded) if mark == Mark("backward")) :]:
        match each:
            case Issue(call, unit):
                found.append((call.op.replace("_", "-"), unit))
            case Kernel(_, unit) if ("compute", unit) not in found:
                found.append(("compute", unit))
    return [(what, unit.rpartition(".")[2]) for what, unit in found if unit.startswith("blocks")]


@cache
def whole(name: str) -> tuple[list[int], dict[str, int]]:
    """Bytes of gathered parameters after each kernel of the last step, in the host's order; and where phases begin."""
    recorded, held, after, begins = program(name, Settings()), 0, list[int](), dict[str, int]()
    for each in recorded.instructions:
        match each:
            case Mark(mark):
                after = [] if mark == STEP else after
                begins[mark] = len(after)
            case Allocate(buffer) | Free(buffer) if recorded.buffers[buffer].tag == "unsharded":
                held += recorded.buffers[buffer].nbytes * (1 if isinstance(each, Allocate) else -1)
            case Kernel():
                after.append(held)
    return after, begins


def draw_issue() -> Figure:
    """In which order the host issues gathers, gradients and reductions; and what that costs in memory."""
    figure = canvas(3.9)
    axes = figure.subplots()
    sizes = sizes_of(Settings().model()).units
    costs: dict[str, Any] = {"no prefetch": "none", "BACKWARD_POST": "post", "BACKWARD_PRE": "pre"}
    marked = list[tuple[float, float]]()
    for line, (name, backward) in enumerate(costs.items()):
        for place, (what, unit) in enumerate(issued(name)):
            box(axes, place, -line, 1, what, unit)
            if (what, unit) == ("all-gather", "1"):
                marked.append((place + 0.5, -line))
                axes.add_patch(
                    Rectangle((place, -line - 0.32), 1, 0.64, fill=False, edgecolor=INK, linewidth=4, zorder=3)
                )
        held = fsdp(sizes, Setting(2), reductions=1, backward=backward).unsharded_peak / MIB
        axes.text(10.1, -line, f"{held:.1f} MiB", va="center", ha="center")
    for (right, above), (left, below) in pairwise(marked):
        arrow: Any = {"arrowstyle": "-|>", "color": INK, "linewidth": 2.4, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (left, below + 0.34), (right, above - 0.34), arrowprops=arrow, zorder=4)
    words = {"all-gather": (0, "all-gather"), "compute": (2.4, "backward"), "reduce-scatter": (4.7, "reduce-scatter")}
    for what, (left, word) in words.items():
        axes.text(left, 0.7, word, color=as_text(COLOURS[what]), fontweight="bold", va="center")
    axes.text(10.1, 0.78, "peak\ngathered", color=SOFT, va="center", ha="center")
    axes.text(0, -2.72, "backward pass, in host order; peak on 2 ranks", color=SOFT, va="center")
    named = {name.replace("no", "torch, no"): -line for line, name in enumerate(costs)}
    bare(axes, named, 11.1, -2.95, 1.2)
    return figure


def draw_unbounded() -> Figure:
    """Gathered parameters over the kernels of a step: all of them at once, or as many as the limit lets."""
    figure = canvas(4.6)
    axes = figure.subplots()
    names = {  # with the place of the label, as a part of the step, and its colour
        "all ahead": ("without a bound", 0.36, SERIES_COLOURS[1]),
        "all, limited": ("two blocks at most", 0.735, SERIES_COLOURS[0]),
        "sync": ("no prefetch", 0.86, SOFT),
    }
    for name, (label, place, colour) in names.items():
        sizes, begins = whole(name)
        axes.plot([size / MIB for size in sizes], drawstyle="steps-post", color=colour, linewidth=3)
        most = max(sizes) / MIB
        says = f"{label}: {most:.1f} MiB"
        on_paper: Any = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        axes.text(len(sizes) * place, most, says, color=as_text(colour), va="center", fontweight="bold", bbox=on_paper)
    for phase in ("forward", "backward", "optimizer"):
        axes.text(begins[phase], -0.03, phase, va="top", transform=axes.get_xaxis_transform())
    axes.set_xlim(0, 1.14 * len(sizes))
    axes.set_ylim(0, 9.6)
    axes.set_xticks([begins["backward"], begins["optimizer"]], ["", ""])
    axes.grid(axis="x")
    axes.set_ylabel("MiB gathered")
    return figure
