"""Figures and numbers of deck 6: beyond the flat parameter, and tensor parallelism."""

from __future__ import annotations

import re
from typing import Any

from draw.canvas import Draw
from draw.measured import told
from draw.scale.cut_layers import draw_block, draw_f_g, draw_sequence, draw_vocabulary
from draw.scale.cuts import draw_chunks, draw_padding, starts
from draw.scale.held import draw_held, draw_queues, peaks
from draw.scale.kinds import draw_dtypes, draw_subclass
from draw.scale.life import draw_life, draw_reshard
from draw.scale.mesh import draw_mesh
from draw.scale.prefetching import draw_ahead
from draw.scale.product import draw_product
from draw.scale.rows import draw_pack, draw_rows
from draw.scale.states import both, draw_added, draw_checkpoints
from draw.scale.tensor import SPEEDS, draw_activations, draw_node

from minifsdp.course.ladder.measure import Settings
from minifsdp.fsdp2.cut import Cut

SETTINGS = Settings()  # the ladder's model


def numbers() -> dict[str, Any]:
    """What the deck's text says in numbers."""
    flat, each = both()
    head = SETTINGS.model().head.weight.shape
    return {
        "head": {"whole": list(head), "mine": list(Cut(head, 0, 2).local(0))},
        "count": lambda value: f"{value:,}",
        "starts": starts(),
        "lab": _flat_and_yours(),
        "flat": flat,
        "each": each,
        "peaks": peaks(),
        "even": _even_tokens,
        "lost": 1 - SPEEDS["tensor parallel"][16] / SPEEDS["tensor parallel"][8],
    }


def _even_tokens(width: int) -> int:
    """Tokens in a step at which a block's activations and its parameters are as much to send."""
    return round(3 * (12 * width**2 + 13 * width) / (8 * width))


def _flat_and_yours() -> dict[str, dict[str, str]]:
    """Rows of the table that lab 12 prints of a step: of the flat unit, and of the learner's."""
    rows = {}
    for line in told("12", "C26"):
        name, *values = re.split(r"\s{2,}", line.strip())
        if len(values) == 3:
            rows[name] = dict(zip(("flat", "yours"), values, strict=False))
    return rows


FIGURES: dict[str, Draw] = {
    "scale-chunks": draw_chunks,
    "scale-life": draw_life,
    "scale-rows": draw_rows,
    "scale-pack": draw_pack,
    "scale-padding": draw_padding,
    "scale-queues": draw_queues,
    "scale-held": draw_held,
    "scale-reshard": draw_reshard,
    "scale-product": draw_product,
    "scale-f-g": draw_f_g,
    "scale-block": draw_block,
    "scale-vocabulary": draw_vocabulary,
    "scale-sequence": draw_sequence,
    "scale-activations": draw_activations,
    "scale-node": draw_node,
    "scale-mesh": draw_mesh,
    "scale-ahead": draw_ahead,
    "scale-dtypes": draw_dtypes,
    "scale-subclass": draw_subclass,
    "scale-checkpoints": draw_checkpoints,
    "scale-added": draw_added,
}
