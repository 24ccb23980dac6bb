"""What a rank holds, by tag, between steps and at the peak of a step: measured under DDP and FSDP."""

from __future__ import annotations

from functools import cache

from minifsdp import comm
from minifsdp.course.ladder.measure import Settings
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.step import take_step

LADDER = Settings()  # the ladder's model: 6 blocks and a root, 2 ranks
RUNGS = "ddp", "fsdp"

Tagged = dict[str, int]
"""Bytes by tag."""


def _measure(rung: str) -> tuple[Tagged, Tagged]:
    """Bytes on this rank after a first step, and at the peak of a second one."""
    batches = LADDER.batches()
    rows = LADDER.batch // LADDER.ranks
    with Ledger() as ledger:
        trainer = LADDER.build(rung, rank_device())
        ledger.watch(trainer.model, trainer.optimizer)
        for _ in range(2):
            ledger.reset_peaks()
            tokens, targets = (part[rows * comm.world().rank() :][:rows] for part in next(batches))
            take_step(trainer, (tokens, targets), rank_device())
        curve, peak = ledger.curve(), ledger.peak
    return {tag: levels[0] for tag, levels in curve["tags"].items()}, dict(peak.tags)


@cache
def held() -> dict[str, tuple[Tagged, Tagged]]:
    """By rung what rank 0 holds, between steps and at the peak."""
    return launch(lambda: {rung: _measure(rung) for rung in RUNGS}, LADDER.ranks, backend="gloo")[0]
