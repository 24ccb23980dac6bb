"""What several exercises of lab 09 share."""

from contextlib import contextmanager

import torch

from minifsdp import comm

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@contextmanager
def phases():
    """The issues and waits of collectives, in order."""
    seen: list[str] = []

    @contextmanager
    def watcher(call, phase):
        seen.append(f"{phase} {call.op}")
        yield

    comm.observers.append(watcher)
    try:
        yield seen
    finally:
        comm.observers.remove(watcher)


def numbers(seed, size):
    """fp32 values that no shorter dtype can represent."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) / 3


def nbytes(tensor):
    return tensor.untyped_storage().nbytes()


def shards_of(unit, ranks):
    """The shards of a unit's flattened and padded gradient, by rank."""
    flat = torch.cat([p.grad.flatten() for p in unit.parameters()])
    padded = flat.new_zeros(-(-len(flat) // ranks) * ranks)
    padded[: len(flat)] = flat
    return padded.chunk(ranks)
