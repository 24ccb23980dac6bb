"""One matrix product on two ranks: ZeRO splits the storage of the weight, tensor parallelism the product."""

from __future__ import annotations

from draw.canvas import canvas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minifsdp.instruments.plots.palette import PALE, SOFT, TAG_COLOURS, ink_on

ACTIVATIONS, OWNED, UNSHARDED = (TAG_COLOURS[tag] for tag in ("activations", "parameters", "unsharded"))
TALL = 1.1  # inches, of all rows, and of a weight
INPUT, WEIGHT, RESULT = (0.9, 1.45), (2.8, 1.2), (4.45, 1.1)  # left and width


def _box(axes: Axes, left: float, bottom: float, size: tuple[float, float], colour: str, text: str = "") -> None:
    width, height = size
    axes.add_patch(Rectangle((left, bottom), width, height, facecolor=colour, edgecolor=SOFT, linewidth=1))
    axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", color=ink_on(colour))


def _product(axes: Axes, left: float, bottom: float, rank: int, tensor_parallel: bool) -> None:
    """Rows times weight, as rank `rank` of 2 computes it."""
    rows, tall = ("all rows", TALL) if tensor_parallel else ("own rows", TALL / 2)
    low = bottom + (TALL - tall) / 2
    _box(axes, left + INPUT[0], low, (INPUT[1], tall), ACTIVATIONS, rows)
    half = WEIGHT[1] / 2
    for part in range(2):
        colour = OWNED if part == rank else PALE if tensor_parallel else UNSHARDED
        _box(axes, left + WEIGHT[0] + half * part, bottom, (half, TALL), colour)
    width = RESULT[1] / 2 if tensor_parallel else RESULT[1]
    shift = width * rank if tensor_parallel else 0.0
    _box(axes, left + RESULT[0] + shift, low, (width, tall), ACTIVATIONS)
    for at, sign in ((2.575, "×"), (4.225, "=")):
        axes.text(left + at, bottom + TALL / 2, sign, ha="center", va="center", fontsize=24)


def draw_parallel() -> Figure:
    """What each of two ranks holds and computes of one layer."""
    figure = canvas(4.9)
    axes = figure.subplots()
    ways = {
        "ZeRO and FSDP shard storage": "parameters and gradients are sent",
        "tensor parallelism shards computation": "activations are sent",
    }
    for number, (way, wire) in enumerate(ways.items()):
        left = 5.9 * number
        axes.text(left, 3.3, way, fontweight="bold", va="center")
        for (start, width), name in zip((INPUT, WEIGHT, RESULT), ("input", "weight", "result"), strict=True):
            axes.text(left + start + width / 2, 2.72, name, ha="center", va="bottom", color=SOFT)
        for rank in range(2):
            bottom = 1.5 - 1.4 * rank
            axes.text(left, bottom + TALL / 2, f"rank {rank}", va="center")
            _product(axes, left, bottom, rank, bool(number))
        axes.text(left, -0.4, wire, va="center")
    keys = {"owned": OWNED, "temporarily unsharded": UNSHARDED, "activations": ACTIVATIONS, "not held": PALE}
    for x, (name, colour) in zip((0.0, 1.75, 5.9, 8.6), keys.items(), strict=True):
        _box(axes, x, -1.15, (0.3, 0.3), colour)
        axes.text(x + 0.42, -1.0, name, va="center", color=SOFT)
    axes.set(xlim=(0, 11.7), ylim=(-1.25, 3.55))
    axes.axis("off")
    return figure
