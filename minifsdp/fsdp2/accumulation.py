"""Gradients that stay in units over several backwards, for pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minifsdp.fsdp.unit import reducing
from minifsdp.fsdp2.hooks import state_of
from minifsdp.fsdp2.module import FSDPModule


@contextmanager
def accumulating(module: FSDPModule) -> Iterator[None]:
    """Inside, no gradient is reduced, and parameters stay whole after backward; then everything is set as before."""
    names = "reduces", "all_reduces", "reshard_after_backward"
    before = [(unit, {name: getattr(unit, name) for name in names}) for unit in module._units(True)]
    for unit, _ in before:
        vars(unit).update(dict.fromkeys(names, False))
    try:
        yield
    finally:
        for unit, values in before:
            vars(unit).update(values)


def drop_accumulated(module: FSDPModule) -> None:
    """Forget what earlier backwards have left unsharded, even one that has raised; without communication."""
    engine = state_of(module).engine
    if engine is None:
        return
    if engine.backward_runs:
        with reducing(engine.passes, False):
            engine._end_backward()
    for unit in module._units(True):
        unit.take_accumulated()
        unit.gradients.held.clear()
        engine.schedule.free(unit)
