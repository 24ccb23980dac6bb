"""What to use instead of FSDP, what FSDP2 changes in its schedule, and which tool does what."""

from __future__ import annotations

from typing import Any

from draw.canvas import GB, canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.course.plots.palette import (
    GATHER,
    INK,
    LANE_COLOURS,
    LINE,
    PALE,
    REDUCE,
    SOFT,
    STRATEGY_COLOURS,
    TAG_COLOURS,
    ink_on,
)

COMPUTE, COPY, HOST = (LANE_COLOURS[lane] for lane in ("compute", "copy", "host"))
SMALL_MODEL = 100e6  # parameters
REASONS = (  # a question; the answer if it is yes; why; the answer's colour
    ("Do model and state fit?", "DDP, or ZeRO-1", "it sends 2Ψ, not 3Ψ", STRATEGY_COLOURS["DDP"]),
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


def draw_schedule() -> Figure:
    """A unit's step under FSDP1 and FSDP2: the same gathers, computations and reductions, and copies around them."""
    figure = canvas(4.6)
    axes = figure.subplots()
    both = (
        (1.0, 4.1, 0, GATHER, "all-gather"),
        (5.1, 8.1, 1, COMPUTE, "forward"),
        (10.7, 13.8, 0, GATHER, "all-gather"),
        (14.8, 18.2, 1, COMPUTE, "backward"),
        (19.2, 23.8, 0, REDUCE, "reduce-scatter"),
    )
    copies = (
        (0.1, 1.0, 0, "in"),
        (4.1, 5.1, 1, "out"),
        (9.8, 10.7, 0, "in"),
        (13.8, 14.8, 1, "out"),
        (18.2, 19.2, 1, "in"),
    )
    rows: Any = {
        "FSDP1: one flat parameter per unit, split anywhere": (3.6, ()),
        "FSDP2: rows of each parameter, copied in and out of a buffer": (0.0, copies),
    }
    for title, (bottom, more) in rows.items():
        say(axes, 0.1, bottom + 2.45, title, ha="left", fontweight="bold")
        for lane, name in enumerate(("link", "compute")):
            say(axes, -0.3, bottom + lane + 0.42, name, ha="right")
        for begin, end, lane, colour, text in both:
            box(axes, (begin, bottom + lane), end - begin, 0.84, colour)
            say(axes, (begin + end) / 2, bottom + lane + 0.42, text, color=ink_on(colour))
        for begin, end, lane, text in more:
            box(axes, (begin, bottom + lane), end - begin, 0.84, COPY)
            say(axes, (begin + end) / 2, bottom + lane + 0.42, text, color=ink_on(COPY))
        say(axes, 8.9, bottom + 1.42, "free", color=SOFT)
    bare(axes, (-2.6, 23.9), (-0.1, 6.5))
    return figure


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
