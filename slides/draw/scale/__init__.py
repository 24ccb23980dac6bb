"""Figures and numbers of deck 6, beyond the flat parameter."""

from __future__ import annotations

from typing import Any

from draw.canvas import Draw
from draw.measured import ladders_gpt
from draw.scale.copies import draw_copies
from draw.scale.cuts import draw_chunks, draw_padding, draw_rows_of_ranks, starts
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
        "gpt": ladders_gpt(),
        "flat": flat,
        "each": each,
        "peaks": peaks(),
    }


FIGURES: dict[str, Draw] = {
    "scale-chunks": draw_chunks,
    "scale-rows-of-ranks": draw_rows_of_ranks,
    "scale-life": draw_life,
    "scale-rows": draw_rows,
    "scale-pack": draw_pack,
    "scale-padding": draw_padding,
    "scale-copies": draw_copies,
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
