"""Figures and numbers of deck 6, beyond the flat parameter."""

from __future__ import annotations

from typing import Any

from draw.canvas import Draw
from draw.measured import ladders_gpt
from draw.scale.boxes import draw_boxes
from draw.scale.by_axis import FEW, MANY, draw_bytes, draw_everything, figures
from draw.scale.copies import both, draw_copies
from draw.scale.cuts import draw_chunks, draw_padding, draw_rows_of_ranks, starts
from draw.scale.experts import draw_experts
from draw.scale.groups import draw_groups, draw_one_step
from draw.scale.held import draw_held
from draw.scale.kinds import draw_dtypes, draw_subclass
from draw.scale.life import draw_life, draw_reshard
from draw.scale.mesh import draw_mesh
from draw.scale.orders import draw_inside, draw_orders, record, summary
from draw.scale.rows import draw_pack, draw_rows
from draw.scale.sequence import draw_softmax, draw_ways
from draw.scale.shares import draw_sent, draw_zigzag
from draw.scale.tokens import draw_tokens

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
        "orders": summary(),
        "ran": record(),
        "seven": figures(),
        "few": FEW,
        "many": MANY,
    }


FIGURES: dict[str, Draw] = {
    "scale-chunks": draw_chunks,
    "scale-rows-of-ranks": draw_rows_of_ranks,
    "scale-life": draw_life,
    "scale-rows": draw_rows,
    "scale-pack": draw_pack,
    "scale-padding": draw_padding,
    "scale-copies": draw_copies,
    "scale-held": draw_held,
    "scale-reshard": draw_reshard,
    "scale-dtypes": draw_dtypes,
    "scale-subclass": draw_subclass,
    "scale-mesh": draw_mesh,
    "scale-groups": draw_groups,
    "scale-one-step": draw_one_step,
    "scale-bytes": draw_bytes,
    "scale-orders": draw_orders,
    "scale-inside": draw_inside,
    "scale-everything": draw_everything,
    "scale-tokens": draw_tokens,
    "scale-ways": draw_ways,
    "scale-softmax": draw_softmax,
    "scale-zigzag": draw_zigzag,
    "scale-sent": draw_sent,
    "scale-boxes": draw_boxes,
    "scale-experts": draw_experts,
}
