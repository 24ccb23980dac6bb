"""Layout of parameters in a flat parameter and its shards, and in the units of a model.

Each layer has a colour: its weight is drawn solid, its bias pale and dotted, and padding hatched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minifsdp.instruments.plots.palette import SOFT, UNIT_COLOURS, ink_on
from minifsdp.instruments.plots.picture import Picture, page
from minifsdp.instruments.plots.style import notebook_style

PADDING = "padding"
_CHARACTER = 0.0105  # width of a character, as a fraction of the drawing
_SMALL = 0.0082  # the same in a unit's row
_FEW = 64  # up to this number, elements are drawn one by one

Bounds = Sequence[tuple[int, int]]


def flat_layout(
    sizes: Mapping[str, int],
    bounds: Mapping[str, Bounds],
    length: int,
    *,
    title: str,
    says: str,
    lab: str | None = None,
) -> Picture:
    """Plot a flat parameter in one row, and below it its shards, rank by rank.

    Args:
        sizes: elements of each parameter, in order.
        bounds: by parameter, the elements `[low, high)` of each rank's shard that belong to it. The rest is padding.
        length: elements of a shard.
        title: the finding.
        says: one sentence on how to read it.
        lab: the lab, for the subtitle's count of the learner's answers.

    Returns:
        A picture whose `data` has, as drawn: `offsets`, the start and end of each parameter in the flat parameter;
        `padding`, likewise; `ranks`, by parameter the ranks that hold a part of it.
    """
    ranks = len(next(iter(bounds.values())))
    colours = _by_layer(sizes)
    ends = list(accumulate(sizes.values()))
    spans = {name: (end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
    spans[PADDING] = ends[-1], ranks * length
    with notebook_style():
        figure = page(3.0, title, says, lab)
        axes = figure.subplots()
        gap = ranks * length / 400
        for name, (start, end) in spans.items():
            _box(axes, start, end, 1.0, colours[name], name)
        names = _name_spans(axes, spans, ranks * length)
        for rank in range(ranks):
            start = rank * length
            _box(axes, start + gap, start + length - gap, 0.0, colours[PADDING], PADDING)
            for name, parts in bounds.items():
                low, high = parts[rank]
                left = start + low + (gap if low == 0 else 0)
                if low < high:
                    _box(axes, left, start + high - (gap if high == length else 0), 0.0, colours[name], name)
            axes.add_patch(Rectangle((start + gap, 0), length - 2 * gap, 0.42, fill=False, edgecolor="black", lw=0.8))
            axes.text(start + length / 2, -0.07, str(rank), ha="center", va="top")
        if ranks * length <= _FEW:
            axes.vlines(range(ranks * length + 1), 1.0, 1.42, color="white", linewidth=0.8)
        axes.text(
            ranks * length / 2,
            -0.3,
            f"rank, and its shard of {length:,} {'elements' if length > 1 else 'element'}",
            ha="center",
            va="top",
        )
        _bare(axes, ranks * length, -0.5, 1.55 + 0.2 * names)
    held = {name: [rank for rank, (low, high) in enumerate(parts) if low < high] for name, parts in bounds.items()}
    offsets = {name: list(span) for name, span in spans.items() if name != PADDING}
    return Picture(figure, title, says, {"offsets": offsets, PADDING: list(spans[PADDING]), "ranks": held})


def units(
    layers: Sequence[str],
    layouts: Mapping[str, Mapping[str, int]],
    ranks: int,
    *,
    title: str,
    says: str,
    lab: str | None = None,
) -> Picture:
    """Plot the layers of a model in execution order, and below them the flat parameter of each unit.

    Args:
        layers: module names, the prefixes of the parameters' names.
        layouts: by unit, elements of each of its parameters, and of its `padding` at the end.
        ranks: number of shards per unit.
        title: the finding.
        says: one sentence on how to read it.
        lab: the lab, for the subtitle's count of the learner's answers.
    """
    mine = {unit: [layer for layer in layers if _has(layout, layer)] for unit, layout in layouts.items()}
    longest = max(sum(layout.values()) for layout in layouts.values())
    with notebook_style():
        figure = page(2.1 + 0.95 * len(layouts), title, says, lab)
        above, below = figure.subplots(2, height_ratios=(0.6, len(layouts)))
        _draw_layers(
            above, layers, [next(i for i, names in enumerate(mine.values()) if each in names) for each in layers]
        )
        for number, (unit, layout) in enumerate(layouts.items()):
            _draw_unit(below, unit, layout, number, len(layouts) - 1 - number, ranks, longest)
        below.set_xlim(-0.005 * longest, 1.005 * longest)
        below.set_ylim(-0.32, len(layouts) - 0.22)
        below.set_xlabel("elements of a unit's flat parameter")
        below.xaxis.set_major_formatter("{x:,.0f}")
        below.set_yticks([])
        below.spines["left"].set_visible(False)
    data = {
        unit: {
            "layers": "+".join(layer.rpartition(".")[2] for layer in mine[unit]),
            "elements": sum(layout.values()) - layout[PADDING],
            PADDING: layout[PADDING],
            "shard": sum(layout.values()) // ranks,
        }
        for unit, layout in layouts.items()
    }
    return Picture(figure, title, says, data)


def _draw_layers(axes: Axes, layers: Sequence[str], owners: Sequence[int]) -> None:
    """Draw the layers in a row, each in its unit's colour."""
    arrow: Any = {"arrowstyle": "->", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
    for number, (layer, owner) in enumerate(zip(layers, owners, strict=True)):
        _box(axes, number, number + 0.86, 0.0, _colour(owner), "weight")
        ink = ink_on(_colour(owner))
        axes.text(number + 0.43, 0.21, layer.rpartition(".")[2], ha="center", va="center", color=ink)
        if number:
            axes.annotate("", (number, 0.21), (number - 0.14, 0.21), arrowprops=arrow)
    _bare(axes, len(layers) - 0.14, -0.05, 0.47)


def _draw_unit(
    axes: Axes, unit: str, layout: Mapping[str, int], number: int, height: float, ranks: int, longest: int
) -> None:
    """Draw one unit's flat parameter, and below it the ranks that own its shards."""
    start, whole = 0, sum(layout.values())
    length, small = whole // ranks, _SMALL * longest
    for name, size in layout.items():
        _box(axes, start, start + size, height, _colour(number), name)
        if name != PADDING and not name.endswith("bias"):
            label = ".".join(name.split(".")[-2:])
            left, right = _widest_piece(start, start + size, length)
            if (len(label) + 1) * small < right - left:
                centre: Any = {"ha": "center", "va": "center", "color": ink_on(_colour(number)), "fontsize": 8}
                axes.text((left + right) / 2, height + 0.21, label, **centre)
        start += size
    cuts = [rank * length for rank in range(ranks + 1)]
    axes.vlines(cuts, height - 0.17, height + 0.42, color="black", lw=0.9)
    word = "rank " if len(f" rank {ranks}") * small < length else ""
    for rank, cut in enumerate(cuts[:-1]):
        axes.text(cut + length / 2, height - 0.03, f"{word}{rank}", ha="center", va="top", fontsize=8)
    numel, padding = whole - layout[PADDING], layout[PADDING]
    says = f"{unit}: {numel:,} elements + {padding} of padding = {ranks} shards of {length:,}"
    axes.text(0, height + 0.46, says, va="bottom")


def _widest_piece(start: int, end: int, length: int) -> tuple[int, int]:
    """The widest of the pieces into which shards of `length` cut `[start, end)`."""
    edges = [start, *range(start - start % length + length, end, length), end]
    return max(pairwise(edges), key=lambda piece: piece[1] - piece[0])


def _box(axes: Axes, left: float, right: float, bottom: float, colour: str, name: str) -> None:
    """Draw a part of a row."""
    style: Any = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.4}
    if name == PADDING:
        style |= {"facecolor": "white", "edgecolor": SOFT, "hatch": "//////"}
    elif name.endswith("bias"):
        style |= {"facecolor": _pale(colour), "edgecolor": colour, "hatch": "...."}
    if left < right:
        axes.add_patch(Rectangle((left, bottom), right - left, 0.42, **style))


def _name_spans(axes: Axes, spans: Mapping[str, tuple[int, int]], whole: int) -> int:
    """Write each span's name and offsets above it, on enough lines to keep them apart; returns their number."""
    free: list[float] = []  # end of the last name on each line
    for name, (start, end) in spans.items():
        if start == end:
            continue
        text = f"{name} [{start:,}, {end:,})"
        half = len(text) * _CHARACTER * whole / 2
        centre = min(max((start + end) / 2, half), whole - half)
        row = next((row for row, taken in enumerate(free) if taken <= centre - half), len(free))
        free[row : row + 1] = [centre + half]
        at = 1.5 + 0.2 * row
        axes.plot([(start + end) / 2] * 2, [1.42, at], color=SOFT, linewidth=0.7)
        axes.text(centre, at, text, ha="center", va="bottom", fontsize=8.5)
    return len(free)


def _colour(number: int) -> str:
    return UNIT_COLOURS[number % len(UNIT_COLOURS)]


def _by_layer(sizes: Mapping[str, int]) -> dict[str, str]:
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in sizes))
    colours = {name: _colour(layers.index(name.rpartition(".")[0])) for name in sizes}
    return {**colours, PADDING: "white"}


def _pale(colour: str) -> str:
    """A paler shade, two thirds of the way to white."""
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 2 * 255) // 3:02x}" for i in (1, 3, 5))


def _has(layout: Mapping[str, int], layer: str) -> bool:
    return any(name.startswith(f"{layer}.") for name in layout)


def _bare(axes: Axes, right: float, bottom: float, top: float) -> None:
    axes.set_xlim(-0.005 * right, 1.005 * right)
    axes.set_ylim(bottom, top)
    axes.axis("off")
