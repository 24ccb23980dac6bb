"""The colours: one meaning each, in labs, lectures, the ladder's figures and on the site.

Hues are those of Okabe and Ito for the ledger's tags, which colour-blind readers can tell apart, and nothing else has
them: identities (ranks, units, strategies, dtypes, collectives) are families of other hues, one colour in several
lightnesses. A test holds all drawing code to this module (tests/watch/test_palette.py).

Text needs a contrast of 4.5 : 1 (WCAG 2.1, level AA): `ink_on` a filled box, `as_text` in a box's colour on white.
"""

from __future__ import annotations

from functools import cache

BLACK, INK, SOFT, LINE, PALE, WHITE = "#000000", "#1B1F24", "#5F6B76", "#D0D4D8", "#EEF0F2", "#FFFFFF"
"""Marks, text, secondary text, rules, backgrounds, paper."""

TAG_COLOURS = {
    "parameters": "#0072B2",
    "unsharded": "#56B4E9",
    "gradients": "#D55E00",
    "optimizer": "#009E73",
    "activations": "#F0E442",
    "communication": "#CC79A7",
}
"""Memory by the ledger's tags, in stacking order from the bottom."""

COLLECTIVE_COLOURS = {
    "all-gather": "#B0449E",
    "reduce-scatter": "#D0194F",
    "all-reduce": "#761B85",
    "broadcast": "#D2A5CC",
}
"""Messages: magentas, from rose to purple."""

GATHER, REDUCE = COLLECTIVE_COLOURS["all-gather"], COLLECTIVE_COLOURS["reduce-scatter"]

LANE_COLOURS = {
    "compute": "#4A5560",
    "communication": GATHER,
    "copy": "#A58A63",
    "host": "#CBD3DA",
    "wait": "#E69F00",
}
"""A timeline's lanes, from the top."""

BLOCK_COLOURS = {"in use": "#33566B", "waiting": "#C08A7B", "free": PALE}
"""An allocator's memory, by block state."""

RANK_COLOURS = ("#263947", "#4F6778", "#8095A5", "#B4C3CE")
"""Ranks: slates. With more than four, their numbers tell them apart."""

UNIT_COLOURS = ("#453A7D", "#746AAD", "#A49CD2", "#CFCBE8")
"""Units, blocks and buckets: violets."""

MICRO_BATCH_COLOURS = ("#1FA0D8", "#00A8B3", "#4AA77C", "#8E9D54", "#C08B53", "#D97B7A", "#CB7DAF", "#908FD6")
"""Micro-batches of a pipeline: the colour wheel at one lightness; a ninth has the first one's, and its number."""

GROUP_COLOURS = ("#F3B8C4", "#F6D2A2", "#E3E09A", "#B9E2AF", "#A3DED2", "#A6D0F1", "#C3BFF3", "#E4BCEC")
"""Groups of ranks along an axis of a mesh: pastels; see `group_colour` for more."""

STRATEGY_COLOURS = {
    "plain": "#D9D9D2",
    "DDP": "#8B8B83",
    "ZeRO-1": "#C9AE78",
    "ZeRO-2": "#8A6B33",
    "FSDP": "#14274E",
    "SHARD_GRAD_OP": "#53699A",
    "HYBRID_SHARD": "#94A5CB",
}
"""What shards nothing is grey, what shards some state is sand, FSDP is navy."""

CONTESTANT_COLOURS = {
    "plain": STRATEGY_COLOURS["plain"],
    "torch": "#9A8F97",
    "minifsdp": STRATEGY_COLOURS["FSDP"],
    "rung": STRATEGY_COLOURS["HYBRID_SHARD"],
}
"""Implementations of one step, in a benchmark."""

DTYPE_COLOURS = {"fp32": "#4B5320", "bf16": "#6C7932", "fp16": "#AFBC74"}
"""Dtypes: olives."""

OUTCOME_COLOURS = {"right": "#2F6B3A", "wrong": "#A3252B"}
"""What is as it should be, and what is not."""

PAGE_COLOURS = {"accent": "#1F5A70", "title page": "#12303F", "on it": "#CFE3EE", "code": "#F2F4F6"}
"""Lectures and site: emphasis, a lecture's first page, and backgrounds."""

EARLIER_COLOURS = ("#E3E5E8", "#D0D4D8", "#BCC1C7", "#A7ADB5", "#9299A2", "#7D858F")
"""Greys of earlier rungs, in order: the nearer, the darker."""

SERIES_COLOURS = ("#332288", "#CC6677", "#999933", "#6B4423", "#88A0A8", "#AA4499", "#000000")
"""Series that differ only by name."""

_NAMES = {
    **STRATEGY_COLOURS,
    **DTYPE_COLOURS,
    **COLLECTIVE_COLOURS,
    **TAG_COLOURS,
    "replicated": STRATEGY_COLOURS["DDP"],
    "NO_SHARD": STRATEGY_COLOURS["DDP"],
    "ZeRO-3": STRATEGY_COLOURS["FSDP"],
    "stage 1": STRATEGY_COLOURS["ZeRO-1"],
    "stage 2": STRATEGY_COLOURS["ZeRO-2"],
    "stage 3": STRATEGY_COLOURS["FSDP"],
    "fully sharded": STRATEGY_COLOURS["FSDP"],
    "hybrid": STRATEGY_COLOURS["HYBRID_SHARD"],
    "FULL_SHARD": STRATEGY_COLOURS["FSDP"],
    "float32": DTYPE_COLOURS["fp32"],
    "bfloat16": DTYPE_COLOURS["bf16"],
    "float16": DTYPE_COLOURS["fp16"],
}


def colour_of(name: str) -> str | None:
    """The declared colour of a strategy, dtype, collective or tag, by the name that a legend gives it.

    "your FSDP" has the colour of FSDP.
    """
    return _NAMES.get(name.removeprefix("your "))


@cache
def lighter(colour: str, share: float) -> str:
    """`colour` with a share of white in it; a negative share is of black."""
    base = 255 if share > 0 else 0
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + abs(share) * (base - part)):02X}" for part in parts)


def group_colour(number: int) -> str:
    """The colour of a group; from the ninth on those of the first ones, darker, and again from the 33rd."""
    turn, place = divmod(number, len(GROUP_COLOURS))
    return lighter(GROUP_COLOURS[place], -0.14 * (turn % 4)) if turn % 4 else GROUP_COLOURS[place]


@cache
def luminance(colour: str) -> float:
    """The relative luminance of `#RRGGBB`, between 0 and 1 (WCAG 2.1)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, from 1 to 21 (WCAG 2.1)."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def ink_on(colour: str) -> str:
    """A colour for text on a box of `colour`: white, ink, or black where neither is enough."""
    return next((ink for ink in (WHITE, INK) if contrast(ink, colour) >= 4.5), BLACK)


@cache
def as_text(colour: str, least: float = 4.5) -> str:
    """`colour`, darkened until text in it has a contrast of `least` on white."""
    darker = [f"#{''.join(f'{int(int(colour[at : at + 2], 16) * k / 50):02X}' for at in (1, 3, 5))}" for k in range(51)]
    return next(each for each in reversed(darker) if contrast(each, WHITE) >= least)
