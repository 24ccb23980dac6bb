"""The ranks of the stages."""

from __future__ import annotations


def looped(stage: int, ranks: int) -> int:
    """Stage s is on rank s mod p: a rank's stages are p apart."""
    return stage % ranks


def in_a_v(stage: int, ranks: int) -> int:
    """Down the ranks and up again: rank r has stages r and 2p - 1 - r."""
    return stage if stage < ranks else 2 * ranks - 1 - stage
