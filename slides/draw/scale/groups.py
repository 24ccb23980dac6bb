"""Eight ranks on three axes: the groups along each, and when each axis talks in a step."""

from __future__ import annotations

from typing import Any

from draw.canvas import canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.cost.data_parallel import Setting
from minifsdp.cost.traffic import sent_by_part
from minifsdp.course.ladder.axes import AXES
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import sizes_of
from minifsdp.instruments.plots.palette import (
    INK,
    PALE,
    SERIES_COLOURS,
    SOFT,
    as_text,
    group_colour,
    ink_on,
)
from minifsdp.instruments.plots.schedules import colour_of
from minifsdp.mesh import Mesh, leaves_host
from minifsdp.pipeline.schedules.one_f_one_b import one_f_one_b
from minifsdp.pipeline.simulate import Timed, simulate
from minifsdp.recipe import Recipe

EIGHT, HOST = Mesh(pp=2, dp=2, tp=2), 4
AXIS_COLOURS = dict(zip(EIGHT.divided, SERIES_COLOURS, strict=False))  # as lab 15 has them
RECIPE = Recipe.parse("pp=2,dp=2,tp=2,data=ddp,micro=4")
UNITS = {"F": 1.0, "B": 2.0}
MODEL = Settings(batch=16, **AXES["3d"].sizes)


def draw_groups() -> Figure:
    """A panel for each axis: two hosts of four ranks, each group in one colour."""
    figure = canvas(3.9)
    for axes, axis in zip(figure.subplots(1, len(EIGHT.divided)), EIGHT.divided, strict=True):
        groups = EIGHT.groups(axis)
        for host in range(EIGHT.ranks // HOST):
            box(axes, (-0.1, 2.3 * (1 - host) - 0.1), HOST + 0.2, 2.1, PALE)
        for rank in range(EIGHT.ranks):
            host, along = divmod(rank, HOST)
            (number,) = (number for number, group in enumerate(groups) if rank in group)
            colour, low = group_colour(number), 2.3 * (1 - host)
            box(axes, (along + 0.04, low), 0.92, 1.9, colour)
            say(axes, along + 0.5, low + 1.35, f"{rank}", color=ink_on(colour), fontweight="bold", fontsize=24)
            place = "".join(f"{EIGHT.place(rank, each)}" for each in EIGHT.divided)
            say(axes, along + 0.5, low + 0.5, place, color=ink_on(colour))
        where = "across hosts" if leaves_host(groups, HOST) else "inside a host"
        say(axes, -0.1, 4.75, f"{axis}: {where}", ha="left", fontweight="bold")
        say(axes, -0.1, -0.55, "  ".join("-".join(map(str, group)) for group in groups), ha="left", color=SOFT)
        bare(axes, (-0.2, HOST + 0.25), (-0.9, 5.1))
    return figure


def _tensor_messages(stage: int, kind: str) -> int:
    """All-reduces of an action: two of each block, one of the embedding or the head, and two of the loss."""
    forward, last = kind == "F", stage == RECIPE.mesh.pp - 1
    return 2 * MODEL.layers // RECIPE.mesh.pp + (forward != last) + 2 * (forward and last)


def messages(rank: int) -> dict[str, int]:
    """Of a rank in a step, by part of the recipe, without the broadcast of the losses."""
    setting = Setting(RECIPE.mesh.ranks, batch=MODEL.batch)
    calls = sent_by_part(sizes_of(MODEL.model()), RECIPE, rank, setting)
    found = {part: sum(count for call, count in each.items() if call.op != "broadcast") for part, each in calls.items()}
    stage = RECIPE.mesh.place(rank, "pp")
    assert found["tensor"] == RECIPE.micro_batches * sum(_tensor_messages(stage, kind) for kind in UNITS)
    return found


def _lane(axes: Axes, low: float, stage: int, row: list[Timed]) -> None:
    """The actions of a stage, its tensor-parallel messages beside them, and the reductions of its gradients."""
    side = (low + 1.06, low + 1.4) if stage == 0 else (low - 0.4, low - 0.06)
    for action, start, end in row:
        colour = colour_of(action)
        box(axes, (start, low), end - start, 1.0, colour)
        say(axes, (start + end) / 2, low + 0.5, f"{action.kind}{action.micro}", color=ink_on(colour))
        count = _tensor_messages(stage, action.kind)
        for number in range(count):
            at = start + (number + 0.5) * (end - start) / count
            axes.plot([at, at], side, color=AXIS_COLOURS["tp"], lw=3, solid_capstyle="butt")
    left = max(end for _, _, end in row)
    box(axes, (left, low), 1.4, 1.0, AXIS_COLOURS["dp"])
    say(axes, left + 0.7, low + 0.5, "dp", color=ink_on(AXIS_COLOURS["dp"]), fontweight="bold")
    say(axes, -0.2, low + 0.5, f"stage {stage}", ha="right")


def draw_one_step() -> Figure:
    """1F1B on two stages: messages inside stages at every action, between them at some, and once at the end."""
    figure = canvas(4.6)
    axes = figure.subplots()
    run = simulate([list(one_f_one_b(rank, 2, RECIPE.micro_batches)) for rank in range(2)], UNITS)
    lows = 3.9, 1.7
    at: dict[tuple[int, str, int], tuple[float, float]] = {}
    for stage, row in enumerate(run.rows):
        _lane(axes, lows[stage], stage, row)
        at |= {(stage, action.kind, action.micro): (start, end) for action, start, end in row}
    look: Any = {"arrowstyle": "-|>", "color": AXIS_COLOURS["pp"], "lw": 2.6, "shrinkA": 0, "shrinkB": 0}
    for micro in range(RECIPE.micro_batches):
        down = (at[0, "F", micro][1] - 0.3, lows[0]), (at[1, "F", micro][0] + 0.3, lows[1] + 1.02)
        up = (at[1, "B", micro][1] - 0.3, lows[1] + 1.02), (at[0, "B", micro][0] + 0.3, lows[0])
        for begin, end in (down, up):
            axes.annotate("", end, begin, arrowprops=look)
    first = messages(0)
    says = {
        "tp": f"inside a stage: {first['tensor']} all-reduces of activations and their gradients",
        "pp": f"between stages: {first['pipeline']} activations sent, {first['pipeline']} gradients received",
        "dp": f"between replicas: {first['data']} all-reduce of gradients, after the last backward",
    }
    for line, (axis, text) in enumerate(says.items()):
        y = 0.75 - 0.66 * line
        say(axes, -1.4, y, axis, ha="left", color=as_text(AXIS_COLOURS[axis]), fontweight="bold")
        say(axes, -0.6, y, text, ha="left", color=INK)
    bare(axes, (-1.5, run.length + 1.5), (-0.95, 5.4))
    return figure
