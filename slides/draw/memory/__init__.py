"""Figures and numbers of deck 1: where memory goes, and what ZeRO saves."""

from __future__ import annotations

from typing import Any

from draw.canvas import GB, MIB, Draw, in_units
from draw.measured import ladders_gpt
from draw.memory.left import draw_left
from draw.memory.needs import draw_needs
from draw.memory.parallel import draw_parallel
from draw.memory.state import PSI, draw_account, draw_fits, draw_optimizers
from draw.memory.training import activations, draw_activations, draw_kept, draw_step, model
from draw.memory.zero import STAGES, draw_floor, draw_partitions, draw_sent, draw_stages
from minifsdp.answers.lab00 import training_bytes


def numbers() -> dict[str, Any]:
    """The numbers in the deck's text."""
    mixed = training_bytes([PSI], 2, "adam", master_copy=True)
    saved = activations()
    state = sum(training_bytes([p.numel() for p in model().parameters()], 4, "adam").values())
    return {
        "gb": in_units("GB", GB, 0),
        "mib": in_units("MiB", MIB, 1),
        "mixed": mixed,
        "total": sum(mixed.values()),
        "state": state,
        "gpt": ladders_gpt(),
        "outgrown": next(batch for batch, size in saved.items() if size > state),
    }


FIGURES: dict[str, Draw] = {
    "fits": draw_fits,
    "account": draw_account,
    "step": draw_step,
    "kept": draw_kept,
    "optimizers": draw_optimizers,
    "activations": draw_activations,
    **{f"partition-{count}": lambda stage=stage: draw_partitions(stage) for stage, count in STAGES.items()},
    "stages": draw_stages,
    "floor": draw_floor,
    "sent": draw_sent,
    "parallel": draw_parallel,
    "needs": draw_needs,
    "left": draw_left,
}
