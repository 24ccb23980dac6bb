"""Where a state dict goes, and what padding adds to the ladder's bytes."""

from __future__ import annotations

from typing import Any

from draw.canvas import KIB, canvas
from draw.fsdp.drawing import bare, box, say
from matplotlib.figure import Figure

from minifsdp.cost import data_parallel
from minifsdp.cost.data_parallel import Bytes
from minifsdp.cost.fsdp2 import fsdp2
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import sizes_of
from minifsdp.instruments.plots.palette import INK, SOFT, STRATEGY_COLOURS, TAG_COLOURS, ink_on

FSDP, FLAT, PLAIN = (STRATEGY_COLOURS[name] for name in ("FSDP", "HYBRID_SHARD", "plain"))


def draw_checkpoints() -> Figure:
    """Four holders of a model's state, and what moves it from one to another."""
    figure = canvas(4.4)
    axes = figure.subplots()
    for left, bottom, colour, text in (
        (0.0, 3.6, FSDP, "fully_shard\non 2 ranks"),
        (17.2, 3.6, FSDP, "fully_shard\non 3 ranks"),
        (0.0, 0.0, PLAIN, "plain model"),
        (17.2, 0.0, FLAT, "FSDP1, sharded"),
    ):
        box(axes, (left, bottom), 6.2, 1.4, colour)
        say(axes, left + 3.1, bottom + 0.7, text, color=ink_on(colour))
    code: Any = {"fontfamily": "DejaVu Sans Mono"}
    for begin, end, text, at, side, style in (
        ((6.4, 4.3), (17.0, 4.3), "DCP moves rows", (11.7, 4.7), "center", {}),
        ((1.6, 3.5), (1.6, 1.5), "↓ get_model_state_dict(\n    full_state_dict=True)", (6.6, 2.5), "left", code),
        ((4.6, 1.5), (4.6, 3.5), "", (0, 0), "left", {}),
        ((20.3, 1.5), (20.3, 3.5), "DCP", (20.0, 2.5), "right", {}),
    ):
        look: Any = {"arrowstyle": "<|-|>" if text == "DCP moves rows" else "-|>", "color": INK, "linewidth": 2.6}
        axes.annotate("", end, begin, arrowprops=look | {"shrinkA": 0, "shrinkB": 0})
        say(axes, *at, text, ha=side, **style)
    say(axes, 6.6, 0.7, "↑ set_model_state_dict(\n    broadcast_from_rank0=True)", ha="left", **code)
    say(axes, 11.7, 3.9, "ours or torch's: the same DTensors", color=SOFT)
    bare(axes, (-0.1, 23.5), (-0.1, 5.1))
    return figure


def both() -> tuple[Bytes, Bytes]:
    """Predicted bytes of the ladder's model on rank 0 of 2: flat, and per parameter."""
    sizes, setting = sizes_of(Settings().model()), data_parallel.Setting(2)
    each = fsdp2(sizes.shapes, sizes.head, setting, ahead=1, limited=True, holds=False)
    return data_parallel.fsdp(sizes.units, setting), each


def draw_added() -> Figure:
    """Bytes of a rank, flat and per parameter; what the second adds is too thin to see."""
    figure = canvas(4.4)
    axes = figure.subplots()
    rows = {
        "parameters": ("parameters", TAG_COLOURS["parameters"]),
        "gradients": ("gradients", TAG_COLOURS["gradients"]),
        "optimizer": ("optimizer", TAG_COLOURS["optimizer"]),
        "gathered at\nthe peak": ("unsharded_peak", TAG_COLOURS["unsharded"]),
    }
    flat, each = both()
    for place, (what, colour) in enumerate(rows.values()):
        for low, bytes_, name in ((-0.22, flat, "fsdp"), (0.22, each, "fsdp2")):
            size = getattr(bytes_, what) / KIB
            axes.barh(place + low, size, 0.4, color=colour)
            says = f"{name}: {size:,.0f} KiB"
            if bytes_ is each:
                says += f", {getattr(each, what) / getattr(flat, what) - 1:+.1%}".replace("%", " %")
            axes.text(size + 80, place + low, says, va="center_baseline")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.invert_yaxis()
    axes.set(xlim=(0, 12_900), xticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure
