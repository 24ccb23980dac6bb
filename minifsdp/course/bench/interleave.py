"""Contestants take turns, step by step, so that other load on the machine affects them all alike."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def interleave(contestants: Mapping[K, T], rounds: int) -> Iterator[tuple[int, K, T]]:
    """The number of the round, and a contestant: each once per round.

    The order is shuffled for each round, identically on all ranks: a step inherits the caches and the allocator's
    blocks from the step before it.
    """
    order, shuffled = list(contestants.items()), random.Random(0)
    for number in range(rounds):
        shuffled.shuffle(order)
        for key, contestant in order:
            yield number, key, contestant


@contextmanager
def without_garbage() -> Iterator[None]:
    """Python's garbage collector runs only when it is called, and then on what is new."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
