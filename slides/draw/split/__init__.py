"""Figures and numbers of deck 7, tensor parallelism and pipelines."""

from __future__ import annotations

import re
from typing import Any

from draw.canvas import Draw
from draw.measured import told
from draw.split.bubbles import MICROS_AT_95, draw_bubbles, draw_sizes, fastest
from draw.split.cut_layers import draw_block, draw_f_g, draw_sequence, draw_vocabulary
from draw.split.kept import draw_kept, kept_share
from draw.split.lanes import MICROS, RANKS, draw_interleaved, draw_micro_batches, draw_order, draw_zero_bubble, runs
from draw.split.placement import draw_placement
from draw.split.product import draw_product
from draw.split.reductions import draw_reductions
from draw.split.tensor import SPEEDS, draw_activations, draw_node

from minifsdp.course.ladder.pipeline import bubble, data_parallel, messages, zero_bubble
from minifsdp.pipeline.actions import homes_of


def numbers() -> dict[str, Any]:
    """The numbers in the deck's text."""
    return {
        "count": lambda value: f"{value:,}",
        "even": _even_tokens,
        "lost": 1 - SPEEDS["tensor parallel"][16] / SPEEDS["tensor parallel"][8],
        "percent": lambda value, digits=0: f"{100 * value:.{digits}f} %",
        "bubble": bubble,
        "fewest": MICROS_AT_95,
        "schedules": _schedules(),
        "kept": kept_share(),
        "best": fastest(),
        "factor": lambda how: sum(data_parallel(how, MICROS)) / sum(data_parallel("zero1", MICROS)),
    }


def _even_tokens(width: int) -> int:
    """Tokens in a step at which a block's activations and its parameters are as much to send."""
    return round(3 * (12 * width**2 + 13 * width) / (8 * width))


def _schedules() -> dict[str, dict[str, str]]:
    """By schedule: its bubble by the formula and by the clock of lab 14, micro-batches held, messages of all ranks."""
    formulas = {
        "naive": bubble(RANKS, 1),
        "GPipe": bubble(RANKS, MICROS),
        "1F1B": bubble(RANKS, MICROS),
        "interleaved": bubble(RANKS, MICROS, 2),
        "ZB-H1": zero_bubble(RANKS, MICROS),
    }
    clock = dict(re.findall(r"^(\S+) +([\d.]+)% by the clock", "\n".join(told("14", "C28")), re.MULTILINE))
    rows = {}
    for name, run in runs().items():
        assert abs(run.bubble - formulas[name]) < 1e-9, name
        homes = [home for _, home in sorted(homes_of(run.plan).items())]
        sent = sum(messages(actions, homes, rank) for rank, actions in enumerate(run.plan))
        size = MICROS if name == "naive" else RANKS / len(homes)  # of an action, in a rank's micro-batches
        rows[name] = {
            "bubble": f"{100 * formulas[name]:.1f} %",
            "clock": f"{clock[name]} %" if name in clock else "",
            "held": f"{run.held[0] * size:g}",
            "messages": f"{sent}",
        }
    return rows


FIGURES: dict[str, Draw] = {
    "split-product": draw_product,
    "split-f-g": draw_f_g,
    "split-block": draw_block,
    "split-vocabulary": draw_vocabulary,
    "split-sequence": draw_sequence,
    "split-activations": draw_activations,
    "split-node": draw_node,
    "split-placement": draw_placement,
    "split-micro-batches": draw_micro_batches,
    "split-bubbles": draw_bubbles,
    "split-order": draw_order,
    "split-kept": draw_kept,
    "split-interleaved": draw_interleaved,
    "split-zero-bubble": draw_zero_bubble,
    "split-sizes": draw_sizes,
    "split-reductions": draw_reductions,
}
