"""Gradients that stay in units over several backwards, for pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from minifsdp.fsdp.unit import reducing
from minifsdp.fsdp2.hooks import state_of


@contextmanager
def accumulating(module: nn.Module) -> Iterator[None]:
    """Inside, no gradient is reduced, and parameters stay unsharded after backward; then all is set as before."""
    units = [group.unit for group in state_of(module).tree() if group.unit is not None]
    before = [(unit.delivery.all_reduces, unit.reshard_after_backward) for unit in units]
    with reducing(units, False):
        for unit in units:
            unit.delivery.all_reduces = unit.reshard_after_backward = False
        try:
            yield
        finally:
            for unit, each in zip(units, before, strict=True):
                unit.delivery.all_reduces, unit.reshard_after_backward = each


def drop_accumulated(module: nn.Module) -> None:
    """Forget what earlier backwards have left unsharded in the tree; without communication."""
    engine = state_of(module).engine
    if engine is not None:
        engine.drop()
