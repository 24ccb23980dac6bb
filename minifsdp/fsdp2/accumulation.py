"""Gradients that stay in units over several backwards, for pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minifsdp.fsdp2.hooks import state_of
from minifsdp.fsdp2.module import FSDPModule


@contextmanager
def accumulating(module: FSDPModule) -> Iterator[None]:
    """Inside, no gradient is reduced, and parameters stay whole after backward; then everything is set as before."""
    names = "reduces", "all_reduces", "reshard_after_backward"
    units = [state.unit for state in state_of(module).tree() if state.unit is not None]
    before = [(unit, {name: getattr(unit, name) for name in names}) for unit in units]
    for unit in units:
        vars(unit).update(dict.fromkeys(names, False))
    try:
        yield
    finally:
        for unit, values in before:
            vars(unit).update(values)


def drop_accumulated(module: FSDPModule) -> None:
    """Forget what earlier backwards have left unsharded, even one that has raised; without communication."""
    state_of(module).drop_accumulated()
