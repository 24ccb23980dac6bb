"""Figures and numbers of deck 7, tensor parallelism and pipelines."""

from __future__ import annotations

import re
from typing import Any

from draw.canvas import Draw
from draw.ladders import draw_others
from draw.measured import told
from draw.memory.parallel import draw_parallel
from draw.split.bubbles import MICROS_AT_95, draw_bubbles, draw_sizes, fastest
from draw.split.cut_layers import draw_block, draw_f_g, draw_sequence, draw_vocabulary
from draw.split.kept import draw_kept, kept_share
from draw.split.lanes import MICROS, RANKS, draw_micro_batches, draw_order, runs, sent
from draw.split.placement import draw_placement
from draw.split.product import draw_product
from draw.split.reductions import draw_reductions
from draw.split.stages import draw_interleaved, draw_zero_bubble
from draw.split.tensor import SPEEDS, beyond_weights, draw_activations, draw_node, draw_traffic

from minifsdp.cost.pipeline import bubble, data_parallel, zero_bubble
from minifsdp.pipeline.actions import homes_of


def numbers() -> dict[str, Any]:
    """The numbers in the deck's text."""
    return {
        "biases": beyond_weights(),
        "lost": 1 - SPEEDS["alone"][16] / SPEEDS["alone"][8],
        "percent": lambda value, digits=0: f"{100 * value:.{digits}f} %",
        "bubble": bubble,
        "fewest": MICROS_AT_95,
        "schedules": _schedules(),
        "kept": kept_share(),
        "best": fastest(),
        "factor": lambda how: sum(data_parallel(how, MICROS)) / sum(data_parallel("zero1", MICROS)),
    }


def _schedules() -> dict[str, dict[str, str]]:
    """By schedule: its bubble by the formula and as lab 14 measures it, micro-batches held, messages of all ranks."""
    formulas = {
        "naive": bubble(RANKS, 1),
        "GPipe": bubble(RANKS, MICROS),
        "1F1B": bubble(RANKS, MICROS),
        "interleaved": bubble(RANKS, MICROS, 2),
        "ZB-H1": zero_bubble(RANKS, MICROS),
    }
    clock = dict(re.findall(r"^(\S+) +measured ([\d.]+)%", "\n".join(told("14", "C28")), re.MULTILINE))
    rows = {}
    for name, run in runs().items():
        assert abs(run.bubble - formulas[name]) < 1e-9, name
        size = MICROS if name == "naive" else RANKS / len(homes_of(run.plan))  # of an action, in micro-batches
        rows[name] = {
            "bubble": f"{100 * formulas[name]:.1f} %",
            "clock": f"{clock[name]} %",
            "held": f"{run.held[0] * size:g}",
            "last": f"{run.held[-1] * size:g}",
            "messages": f"{sent(run)}",
        }
    return rows


FIGURES: dict[str, Draw] = {
    "split-ladders": draw_others,
    "split-storage": draw_parallel,
    "split-product": draw_product,
    "split-f-g": draw_f_g,
    "split-block": draw_block,
    "split-vocabulary": draw_vocabulary,
    "split-sequence": draw_sequence,
    "split-activations": draw_activations,
    "split-traffic": draw_traffic,
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
