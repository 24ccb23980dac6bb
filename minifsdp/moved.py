"""Modules by the paths that they had before, for one release."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

MOVED = {
    "minifsdp.course.ladder.activations": "minifsdp.cost.activations",
    "minifsdp.course.ladder.closed_form": "minifsdp.cost.data_parallel",
    "minifsdp.course.ladder.model": "minifsdp.gpt",
    "minifsdp.course.ladder.per_parameter": "minifsdp.cost.fsdp2",
    "minifsdp.course.ladder.pipeline": "minifsdp.cost.pipeline",
    "minifsdp.course.ladder.pipeline_rungs": "minifsdp.course.ladder.rungs",
    "minifsdp.course.ladder.tensor": "minifsdp.cost.tensor_parallel",
    "minifsdp.course.ladder.tensor_rungs": "minifsdp.course.ladder.rungs",
}
"""New paths by old ones."""


class _Moved(MetaPathFinder, Loader):
    """Finds an old path: it is the module of the new one, the same object."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self, origin=MOVED[fullname]) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__  # importing gives the module the old path's
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def find_moved() -> None:
    """Let old paths be imported."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
