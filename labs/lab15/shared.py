"""Values and comparisons that several exercises of lab 15 share."""

from functools import partial

import torch

from minifsdp.course.workshop.checking import expect
from minifsdp.instruments.launch import rank_device

EXACT = partial(expect, tolerance=1e-12)


def randn(*shape, seed=0, rank=0):
    """The same on every rank that gives the same `rank`."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + rank))


def here(*tensors):
    """The tensors on this rank's device."""
    return [tensor.to(rank_device()) for tensor in tensors]


def made_everywhere(found, slips):
    """The slips of each case, without those that explain one case and not another."""
    pairs = list(zip(found, slips, strict=True))
    made = [text for text in slips[0] if all(got == each[text] for got, each in pairs)]
    return [{text: each[text] for text in made} for each in slips]
