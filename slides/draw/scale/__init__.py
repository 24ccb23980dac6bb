"""Figures and numbers of deck 6, beyond the flat parameter."""

from __future__ import annotations

import re
from typing import Any

from draw.canvas import Draw
from draw.measured import told
from draw.scale.cuts import draw_chunks, draw_padding, starts
from draw.scale.held import draw_held, draw_queues, peaks
from draw.scale.kinds import draw_dtypes, draw_subclass
from draw.scale.life import draw_life, draw_reshard
from draw.scale.mesh import draw_mesh
from draw.scale.prefetching import draw_ahead
from draw.scale.rows import draw_pack, draw_rows
from draw.scale.states import both, draw_added, draw_checkpoints

from minifsdp.course.ladder.measure import Settings
from minifsdp.fsdp2.cut import Cut

SETTINGS = Settings()  # the ladder's model


def numbers() -> dict[str, Any]:
    """The numbers in the deck's text."""
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
    }


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
    "scale-mesh": draw_mesh,
    "scale-ahead": draw_ahead,
    "scale-dtypes": draw_dtypes,
    "scale-subclass": draw_subclass,
    "scale-checkpoints": draw_checkpoints,
    "scale-added": draw_added,
}
