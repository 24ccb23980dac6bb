"""What several exercises of lab 04 share."""

import torch

GARBAGE = "uninitialized memory, here nan, in the padding: a reduction and a norm read it, so it must be zero"
WHOLE_N = "a whole N of padding where N divides: `-numel % N` is 0 there, `N - numel % N` is N"


def numbers(numel, dtype):
    """1, 2, 3, ..., such that every dtype holds them exactly."""
    return (torch.arange(numel) % 97 + 1).to(dtype)


def total(ledger):
    return sum(ledger.live().values())
