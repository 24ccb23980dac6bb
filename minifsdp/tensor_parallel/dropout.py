"""Random numbers of tensor-parallel ranks: equal where all compute the same, different where each has its own part.

The ranks of a group start from one seed and draw alike, so a dropout of whole activations has one mask. On parts the
masks have to differ: there a rank draws from a generator of its own, whose seed is drawn from the common one. So the
common generators stay equal, and whatever restores their state, such as recomputation, repeats all masks
(Megatron-LM keeps a second generator instead, megatron/core/tensor_parallel/random.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from minifsdp import private
from minifsdp.comm import Group

_RANKS = 1 << 20  # seeds of one draw lie this far apart


@contextmanager
def own_random_numbers(group: Group, device: torch.device) -> Iterator[None]:
    """Inside, this rank draws numbers that the others do not; afterwards all go on alike."""
    drawn = int(torch.randint(1 << 40, ()))  # from the host's generator: it needs no wait
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
        torch.default_generator.manual_seed(drawn * _RANKS + group.rank())
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(drawn * _RANKS + group.rank())
        yield


def drops(module: nn.Module) -> bool:
    """True if the module draws masks in its forward."""
    return module.training and any(isinstance(m, private.AnyDropout) and m.p > 0 for m in module.modules())
