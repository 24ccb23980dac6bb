"""What to use instead of FSDP, what FSDP2 changes in its schedule, and which tool does what."""

from __future__ import annotations

from typing import Any

from draw.canvas import GB, canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.palette import (
    GATHER,
    INK,
    LANE_COLOURS,
    LINE,
    PALE,
    RANK_COLOURS,
    REDUCE,
    SOFT,
    STRATEGY_COLOURS,
    TAG_COLOURS,
    WHITE,
    ink_on,
)

COMPUTE, COPY, HOST = (LANE_COLOURS[lane] for lane in ("compute", "copy", "host"))
SMALL_MODEL = 100e6  # parameters
REASONS = (  # a question; the answer if it is yes; why; the answer's colour
    (
        "Do model and state fit?",
        "DDP, or ZeRO-1",
        "it sends 2Ψ, not 3Ψ; on a\nslow network: last question",
        STRATEGY_COLOURS["DDP"],
    ),
    (
        "Mostly activations?",
        "recompute first",
        f"100 M parameters: sharding\nsaves at most {16 * SMALL_MODEL / GB:.1f} GB",
        TAG_COLOURS["activations"],
    ),
    ("One layer too large?", "tensor\nparallelism", "a unit is unsharded\nwhile it computes", LINE),
    (
        "Slow network?",
        "hybrid sharding,\nor a pipeline",
        "compute waits for\nall-gathers",
        STRATEGY_COLOURS["HYBRID_SHARD"],
    ),
)


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    look: Any = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, begin, arrowprops=look)


def draw_reasons() -> Figure:
    """Four questions, one below the other: each yes leads to something else than FSDP, four noes to FSDP."""
    figure = canvas(5.0)
    axes = figure.subplots()
    for place, (question, use, why, colour) in enumerate(REASONS):
        low = 4.0 - place
        box(axes, (0, low), 7.2, 0.72, PALE)
        say(axes, 3.6, low + 0.36, question)
        _arrow(axes, (7.3, low + 0.36), (9.2, low + 0.36))
        say(axes, 8.1, low + 0.52, "yes", color=SOFT)
        box(axes, (9.3, low), 5.8, 0.72, colour)
        say(axes, 12.2, low + 0.36, use, color=ink_on(colour), linespacing=1.05)
        say(axes, 15.5, low + 0.36, why, ha="left", color=SOFT, linespacing=1.05)
        _arrow(axes, (3.6, low - 0.02), (3.6, low - 0.26))
        say(axes, 3.9, low - 0.14, "no", ha="left", color=SOFT)
    navy = STRATEGY_COLOURS["FSDP"]
    box(axes, (0, 0), 7.2, 0.72, navy)
    say(axes, 3.6, 0.36, "FSDP", color=ink_on(navy), fontweight="bold")
    say(axes, 7.6, 0.36, "use the memory for a larger batch, which hides the gathers", ha="left")
    bare(axes, (-0.1, 23.4), (-0.05, 4.8))
    return figure


STEP = (  # of a unit: lane, length, colour, name; FSDP1 has no copies
    ("link", 1.1, COPY, "in"),
    ("link", 2.9, GATHER, "gather"),
    ("compute", 1.5, COPY, "out"),
    ("compute", 3.1, COMPUTE, "forward"),
    ("compute", 1.7, WHITE, "free"),
    ("link", 1.1, COPY, "in"),
    ("link", 2.9, GATHER, "gather"),
    ("compute", 1.5, COPY, "out"),
    ("compute", 4.0, COMPUTE, "backward"),
    ("compute", 2.2, COPY, "pack"),
    ("link", 5.7, REDUCE, "reduce-scatter"),
)
SHARDS = RANK_COLOURS[0], RANK_COLOURS[2]  # of ranks 0 and 1
Layout = tuple[tuple[float, float, int, str], ...]
FLAT: Layout = ((0.0, 5.3, 0, "w"), (5.3, 1.7, 1, "w"), (7.0, 3.6, 1, "b"))  # left, width, rank, parameter
ROWS: Layout = ((0.0, 4.2, 0, "w"), (4.2, 2.8, 1, "w"), (7.5, 1.8, 0, "b"), (9.3, 1.8, 1, "b"))


def draw_schedule() -> Figure:
    """A unit's parameters and its step under FSDP1 and FSDP2: the same order, other shards, and copies."""
    figure = canvas(4.85)
    axes = figure.subplots()
    _draw_unit(axes, 4.4, "FSDP1: one flat parameter", FLAT, copies=False)
    _draw_unit(axes, 0.0, "FSDP2: rows of each parameter", ROWS, copies=True)
    left = 4.2
    for colour, text in (*zip(SHARDS, ("rank 0's shards", "rank 1's shards"), strict=True), (COPY, "copies")):
        box(axes, (left, -1.1), 0.7, 0.6, colour)
        say(axes, left + 1.0, -0.8, text, ha="left", color=SOFT)
        left += 7.4
    bare(axes, (-2.8, 27.9), (-1.2, 7.9))
    return figure


def _draw_unit(axes: Axes, bottom: float, title: str, layout: Layout, copies: bool) -> None:
    """Its title and whose elements are whose; below them, its step on compute and link."""
    say(axes, 0.0, bottom + 2.9, title, ha="left", fontweight="bold")
    for left, width, rank, text in layout:
        box(axes, (13.4 + left, bottom + 2.5), width, 0.84, SHARDS[rank])
        say(axes, 13.4 + left + width / 2, bottom + 2.92, text, color=ink_on(SHARDS[rank]))
    heights, at = {"link": bottom, "compute": bottom + 1.0}, 0.0
    for lane, height in heights.items():
        say(axes, -0.3, height + 0.42, lane, ha="right")
    for lane, length, colour, text in STEP:
        if copies or colour != COPY:
            box(axes, (at, heights[lane]), length, 0.84, colour)
            say(axes, at + length / 2, heights[lane] + 0.42, text, color=SOFT if colour == WHITE else ink_on(colour))
            at += length


def draw_tools() -> Figure:
    """Tools by what they do: start processes, configure, train."""
    figure = canvas(4.6)
    axes = figure.subplots()
    heads = {"starts processes": (4.6, 6.4), "configures": (11.4, 4.0), "trains": (15.9, 8.3)}
    for head, (left, width) in heads.items():
        say(axes, left + width / 2, 5.35, head, color=SOFT)
    tools: dict[str, dict[str, str]] = {
        "torchrun, srun": {"starts processes": "RANK, WORLD_SIZE,\nan address"},
        "Accelerate": {"starts processes": "its own launcher", "configures": "options\nfrom a file"},
        "torch": {"trains": "DDP, FSDP"},
        "DeepSpeed": {"starts processes": "its own launcher", "trains": "ZeRO 1 to 3, offload,\npipelines"},
        "Megatron-LM": {"trains": "tensor, pipeline and\ndata parallelism"},
    }
    colours = {"starts processes": HOST, "configures": PALE, "trains": COMPUTE}
    for place, (tool, does) in enumerate(tools.items()):
        low = 4.1 - place
        say(axes, 4.3, low + 0.42, tool, ha="right", fontweight="bold")
        for head, what in does.items():
            left, width = heads[head]
            box(axes, (left, low), width, 0.86, colours[head])
            say(axes, left + width / 2, low + 0.43, what, color=ink_on(colours[head]), linespacing=1.05)
    left, width = heads["configures"]
    for place in (2, 3, 4):
        begin, end = (left + width / 2 + 0.6 * (3 - place), 3.08), (heads["trains"][0] - 0.05, 4.53 - place)
        _arrow(axes, begin, end)
    bare(axes, (-0.2, 24.3), (0.0, 5.7))
    return figure
