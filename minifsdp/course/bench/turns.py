"""Contestants take turns, step by step, so that other load on the machine affects them all alike."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def turns(contestants: Mapping[K, T], rounds: int) -> Iterator[tuple[int, K, T]]:
    """The number of the round, and a contestant: each once per round.

    The order is shuffled for each round, identically on all ranks: a step inherits the caches and the allocator's
    blocks from the step before it.
    """
    order, shuffled = list(contestants.items()), random.Random(0)
    for number in range(rounds):
        shuffled.shuffle(order)
        for key, contestant in order:
            yield number, key, contestant


def turns_without_garbage(contestants: Mapping[K, T], rounds: int) -> Iterator[tuple[int, K, T]]:
    """As `turns`, for steps so short that Python's collector would show: from now on it runs only between them."""
    gc.freeze()  # keeps the collections between steps short
    gc.disable()
    for each in turns(contestants, rounds):
        gc.collect()
        yield each
