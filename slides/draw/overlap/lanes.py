"""Lanes of a timeline for a lecture: host, compute and communication, with type that the back row can read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draw.canvas import canvas
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minifsdp.instruments.plots.drawing import step_of
from minifsdp.instruments.plots.palette import GATHER, INK, LANE_COLOURS, PALE, REDUCE, SOFT, as_text, ink_on
from minifsdp.instruments.watch.timeline import Span

LANES = "compute", "communication"
MESSAGES = {"all-gather": GATHER, "reduce-scatter": REDUCE}
_LETTER, _EDGES = 0.0165, 0.007  # of a panel's width: room for one, and beside the text of a bar


def timeline(
    rows: Mapping[str, Sequence[Span]],
    height: float,
    model: str,
    lanes: Sequence[str] = LANES,
    messages: Iterable[str] = MESSAGES,
) -> Figure:
    """A panel for each run, on one axis of milliseconds; wide bars have the numbers of their blocks."""
    figure = canvas(height)
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(map(step_of, rows.values()))
    for panel, (name, spans) in zip(panels, rows.items(), strict=True):
        panel.set_title(name)
        draw_lanes(panel, spans, longest, lanes)
    for panel in panels[:-1]:
        panel.tick_params(axis="x", length=0)
        panel.spines["bottom"].set_visible(False)
    name_messages(panels[0], messages)
    panels[-1].set_xlabel(f"ms, modelled: {model}")
    return figure


def draw_lanes(
    panel: Axes, spans: Sequence[Span], longest: float, lanes: Sequence[str] = LANES, numbered: bool = True
) -> None:
    """The lanes, from the top. In the host's, what holds it up is drawn too."""
    heights = {lane: len(lanes) - 1 - place for place, lane in enumerate(lanes)}
    for span in joined(spans, 0.002e-3 * longest):
        lane = "host" if span.lane == "wait" else span.lane
        if lane in heights:
            text = label(span) if numbered else ""
            room = 1e3 * span.duration / longest
            apart = room > _EDGES and (numbered or lane == "host")
            bar(panel, span, heights[lane], text if room > _LETTER * len(text) + _EDGES else "", 1.2 if apart else 0)
    if numbered and "host" in lanes:
        over = 1e3 * max(span.end for span in spans if span.lane in ("host", "wait"))
        if over < 0.9 * step_of(spans):
            panel.text(over + 0.008 * longest, heights["host"], "all queued", va="center_baseline", color=SOFT)
    panel.set_yticks(list(heights.values()), list(heights))
    panel.tick_params(axis="y", length=0, labelcolor=INK)
    panel.spines["left"].set_visible(False)
    panel.set_xlim(0, longest)
    panel.set_ylim(-0.5, len(lanes) - 0.5)


def label(span: Span) -> str:
    """`all_gather blocks.3` as `3`, and what the host does; nothing for the root."""
    if span.lane in ("wait", "host"):
        return "waits" if span.lane == "wait" else "issues"
    return span.name.rpartition(".")[2] if "." in span.name else ""


def bar(panel: Axes, span: Span, height: float, text: str, edge: float) -> None:
    """One span in its colour."""
    colour = colour_of(span)
    look: Any = {"facecolor": colour, "edgecolor": "white", "linewidth": edge}
    panel.broken_barh([(1e3 * span.start, 1e3 * span.duration)], (height - 0.42, 0.84), **look)
    middle = 1e3 * (span.start + span.duration / 2)
    panel.text(middle, height, text, ha="center", va="center_baseline", color=ink_on(colour))


def colour_of(span: Span) -> str:
    return REDUCE if "reduce" in span.name else LANE_COLOURS[span.lane]


def name_phases(panel: Axes, turn: float, end: float) -> None:
    """A strip below the lanes: forward until `turn`, backward until `end`, in milliseconds."""
    low = panel.get_ylim()[0] - 0.86
    for name, begin, over in (("forward", 0.0, turn), ("backward", turn, end)):
        look: Any = {"facecolor": PALE, "edgecolor": "white", "linewidth": 2}
        panel.broken_barh([(begin, over - begin)], (low, 0.86), **look)
        panel.text((begin + over) / 2, low + 0.42, name, ha="center", va="center_baseline", color=SOFT)
    top = panel.get_ylim()[1] - 0.08  # of the uppermost bars
    panel.vlines(turn, low, top, color=INK, linewidth=1.6, linestyle=(0, (3, 3)))
    panel.set_ylim(low - 0.08)
    rows = [each.get_ylim() for each in panel.figure.axes]
    grid: Any = panel.get_gridspec()
    grid.set_height_ratios([high - low for low, high in rows])  # lanes of one height


def name_messages(panel: Axes, messages: Iterable[str] = MESSAGES) -> None:
    """The kinds of messages in their colours, above the right end of a panel."""
    at, left = (1.0, 1.0), 0.0
    for message in reversed(list(messages)):
        look: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "fontweight": "bold"}
        panel.annotate(message, at, (left, 8), ha="right", color=as_text(MESSAGES[message]), **look)
        left -= 11 * len(message) + 14


def joined(spans: Iterable[Span], gap: float) -> list[Span]:
    """In order; neighbours of one name in a lane, at most `gap` seconds apart, are one, but messages and waits."""
    last: dict[str, Span] = {}
    found: list[Span] = []
    for span in sorted(spans, key=lambda each: each.start):
        before = last.get(span.lane)
        if before is not None and before.name == span.name and span.start <= before.end + gap:
            found.remove(before)
            span = before._replace(duration=max(span.end, before.end) - before.start)
        found.append(span)
        last = last if span.lane in ("communication", "wait") else {**last, span.lane: span}
    return found
