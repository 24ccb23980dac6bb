"""Random numbers of tensor-parallel ranks: equal on replicated activations, different on sharded ones.

The ranks of a group start from the same seed and draw the same numbers, which gives replicated activations the same
mask. On sharded activations the masks have to differ, so each rank draws from a separate generator, whose seed is drawn
from the common one. The common generators stay equal, and restoring their state, as recomputation and checkpoints do,
repeats all masks (Megatron-LM keeps a second generator instead, megatron/core/tensor_parallel/random.py).

With data parallelism outside, seed by its rank: `torch.manual_seed(seed + mesh.get_local_rank("dp"))`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from minifsdp import private
from minifsdp.comm import Group

_RANKS = 1 << 20  # more than there are ranks: the seeds of two draws do not overlap


@contextmanager
def own_random_numbers(group: Group, device: torch.device) -> Iterator[None]:
    """Let each rank draw different numbers inside the `with`, and all ranks equal ones again afterwards."""
    drawn = int(torch.randint(1 << 40, ()))  # from the host's generator: it needs no wait
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
        torch.default_generator.manual_seed(drawn * _RANKS + group.rank())
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(drawn * _RANKS + group.rank())
        yield


def drops(module: nn.Module) -> bool:
    """True if the module's forward draws masks."""
    return module.training and any(isinstance(m, private.AnyDropout) and m.p > 0 for m in module.modules())
