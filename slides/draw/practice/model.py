"""The large model of deck 5, without memory, and the ranks that it is on."""

from __future__ import annotations

from functools import cache

import torch

from minifsdp.course.ladder.rungs import sizes_of
from minifsdp.gpt import GPT

RANKS = 8  # of the large model; the small ones that run are on 2


@cache
def large() -> GPT:
    """A GPT of 6.9 billion parameters, without memory."""
    with torch.device("meta"):
        return GPT(vocabulary=50_000, width=4096, layers=32, context=2048)


def elements() -> tuple[int, int, int]:
    """Of the large model, of its root and of a block."""
    units = [sum(unit) for unit in sizes_of(large()).units]
    return sum(units), units[0], units[1]
