"""Figures and numbers of deck 5: precision, construction, checkpoints, hybrid sharding, and what to choose."""

from __future__ import annotations

from typing import Any

from draw.canvas import GB, MIB, Draw, in_units
from draw.practice.accumulation import draw_accumulation
from draw.practice.checkpoints import commit_calls, draw_recomputed, draw_rows
from draw.practice.choices import draw_reasons, draw_schedule, draw_tools
from draw.practice.construction import draw_construction
from draw.practice.hybrid import draw_decisions, draw_hybrid, draw_leaves, more_with_ddp
from draw.practice.model import RANKS, elements
from draw.practice.offload import draw_offload
from draw.practice.precision import draw_dtypes, draw_ranges, small_steps
from draw.practice.scaler import draw_scaler
from draw.practice.wrapping import draw_frozen, draw_policies, tuned


def numbers() -> dict[str, Any]:
    """The numbers in the deck's text."""
    psi, _, _ = elements()
    units = [50_000 * 8448, *[12 * 8448**2] * 80]  # lab 11's model of 70 billion parameters
    return {
        "gb": in_units("GB", GB, 1),
        "mib": in_units("MiB", MIB, 2),
        "psi": psi,
        "ranks": RANKS,
        "lost": small_steps(),
        "commit": commit_calls(),
        "full": 4 * sum(units),
        "unit": 4 * max(units),
        "trained": tuned(),
        "more_with_ddp": more_with_ddp(),
    }


FIGURES: dict[str, Draw] = {
    "practice-dtypes": draw_dtypes,
    "practice-ranges": draw_ranges,
    "practice-scaler": draw_scaler,
    "practice-accumulation": draw_accumulation,
    "practice-offload": draw_offload,
    "practice-construction": draw_construction,
    "practice-policies": draw_policies,
    "practice-rows": draw_rows,
    "practice-frozen": draw_frozen,
    "practice-recomputed": draw_recomputed,
    "practice-hybrid": draw_hybrid,
    "practice-leaves": draw_leaves,
    "practice-decisions": draw_decisions,
    "practice-reasons": draw_reasons,
    "practice-schedule": draw_schedule,
    "practice-tools": draw_tools,
}
