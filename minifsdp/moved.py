"""Modules by the paths that they had before, and names in the modules that they were in, for one release."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

MOVED = {
    "minifsdp.checkpoint.dtensors": "minifsdp.checkpoint",
    "minifsdp.checkpoint.whole": "minifsdp.checkpoint",
    "minifsdp.course.bench.turns": "minifsdp.course.bench.interleave",
    "minifsdp.course.doctor.versions": "minifsdp.instruments.system.versions",
    "minifsdp.course.explore": "minifsdp.instruments.explore",
    "minifsdp.course.ladder.activations": "minifsdp.cost.activations",
    "minifsdp.course.ladder.closed_form": "minifsdp.cost.data_parallel",
    "minifsdp.course.ladder.model": "minifsdp.gpt",
    "minifsdp.course.ladder.per_parameter": "minifsdp.cost.fsdp2",
    "minifsdp.course.ladder.pipeline": "minifsdp.cost.pipeline",
    "minifsdp.course.ladder.pipeline_rungs": "minifsdp.course.ladder.rungs",
    "minifsdp.course.ladder.step": "minifsdp.instruments.watch.step",
    "minifsdp.course.ladder.tensor": "minifsdp.cost.tensor_parallel",
    "minifsdp.course.ladder.tensor_rungs": "minifsdp.course.ladder.rungs",
    "minifsdp.course.launch": "minifsdp.instruments.launch",
    "minifsdp.course.launch.rank_server": "minifsdp.instruments.warm.client",
    "minifsdp.course.link": "minifsdp.instruments.link",
    "minifsdp.course.machine": "minifsdp.instruments.machine",
    "minifsdp.course.plots": "minifsdp.instruments.plots",
    "minifsdp.course.reference": "minifsdp.answers",
    "minifsdp.course.system": "minifsdp.instruments.system",
    "minifsdp.course.watch": "minifsdp.instruments.watch",
    "minifsdp.ddp.arguments": "minifsdp.ddp.torch_api.arguments",
    "minifsdp.ddp.comm_hook": "minifsdp.ddp.torch_api.comm_hook",
    "minifsdp.ddp.distributed": "minifsdp.ddp.torch_api.api",
    "minifsdp.ddp.join": "minifsdp.ddp.torch_api.join",
    "minifsdp.ddp.logging_data": "minifsdp.ddp.torch_api.logging_data",
    "minifsdp.ddp.sparse": "minifsdp.ddp.torch_api.sparse",
    "minifsdp.ddp.static_graph": "minifsdp.ddp.torch_api.static_graph",
    "minifsdp.from_rank_0": "minifsdp.checkpoint.from_rank_0",
    "minifsdp.fsdp.ending": "minifsdp.autograd_hooks",
    "minifsdp.fsdp.steps": "minifsdp.optimizer_steps",
    "minifsdp.fsdp.torch_api.optimizer_checks": "minifsdp.optimizer_checks",
    "minifsdp.fsdp.torch_api.state.names": "minifsdp.wrapper_names",
    "minifsdp.fsdp.torch_api.state.optim": "minifsdp.checkpoint.optim_units",
    "minifsdp.fsdp.torch_api.state.optim_dict": "minifsdp.checkpoint.optim_dict",
    "minifsdp.fsdp.torch_api.state.optim_names": "minifsdp.checkpoint.optim_names",
    "minifsdp.fsdp.torch_api.state.optim_schema": "minifsdp.checkpoint.optim_schema",
    "minifsdp.fsdp.turns": "minifsdp.fsdp.backward_order",
    "minifsdp.fsdp.watch": "minifsdp.autograd_hooks",
    "minifsdp.fsdp2.custom": "minifsdp.fsdp2.torch_api.custom",
    "minifsdp.fsdp2.extensions": "minifsdp.fsdp2.torch_api.extensions",
    "minifsdp.fsdp2.forward_methods": "minifsdp.fsdp2.torch_api.forward_methods",
    "minifsdp.fsdp2.module": "minifsdp.fsdp2.torch_api.module",
    "minifsdp.fsdp2.policies": "minifsdp.fsdp2.torch_api.policies",
    "minifsdp.fsdp2.reduction": "minifsdp.fsdp2.torch_api.reduction",
    "minifsdp.optim_state": "minifsdp.checkpoint.optim_state",
    "minifsdp.pipeline.api": "minifsdp.pipeline.torch_api.api",
    "minifsdp.pipeline.orders": "minifsdp.pipeline.schedules.orders",
    "minifsdp.pipeline.schedules.dualpipe_v": "minifsdp.pipeline.torch_api.dualpipe_v",
    "minifsdp.pipeline.schedules.looped_bfs": "minifsdp.pipeline.torch_api.looped_bfs",
    "minifsdp.pipeline.schedules.zbv": "minifsdp.pipeline.torch_api.zbv",
    "minifsdp.sharded_values": "minifsdp.checkpoint.sharded_values",
}
"""New paths by old ones; what is below a package has moved with it."""

_FORMS = (
    *("FullOptimStateDictConfig", "FullStateDictConfig", "LocalOptimStateDictConfig", "LocalStateDictConfig"),
    *("OptimStateDictConfig", "OptimStateKeyType", "ShardedOptimStateDictConfig", "ShardedStateDictConfig"),
    *("StateDictConfig", "StateDictSettings", "StateDictType"),
)

MOVED_NAMES = {
    **{f"minifsdp.fsdp.torch_api.options.{each}": f"minifsdp.checkpoint.forms.{each}" for each in _FORMS},
    "minifsdp.fsdp2.api.CPUOffloadPolicy": "minifsdp.fsdp2.torch_api.policies.CPUOffloadPolicy",
    "minifsdp.fsdp2.api.MixedPrecisionPolicy": "minifsdp.fsdp2.torch_api.policies.MixedPrecisionPolicy",
    "minifsdp.fsdp2.api.OffloadPolicy": "minifsdp.fsdp2.torch_api.policies.OffloadPolicy",
    "minifsdp.fsdp2.api.fully_shard": "minifsdp.fsdp2.torch_api.api.fully_shard",
    "minifsdp.pipeline.actions.parse": "minifsdp.pipeline.torch_api.csv_files.parse",
    "minifsdp.pipeline.actions.read_csv": "minifsdp.pipeline.torch_api.csv_files.read_csv",
    "minifsdp.pipeline.actions.write_csv": "minifsdp.pipeline.torch_api.csv_files.write_csv",
    "minifsdp.pipeline.gpt.cross_entropy": "minifsdp.losses.cross_entropy",
    "minifsdp.pipeline.torch_api.api.from_csv": "minifsdp.pipeline.torch_api.csv_files.from_csv",
    **{f"minifsdp.recipe.{each}": f"minifsdp.divisions.{each}" for each in ("ORDERS", "PRECISIONS", "SCHEDULES")},
    "minifsdp.tensor_parallel.prepare.PrepareModuleInputOutput": (
        "minifsdp.tensor_parallel.torch_api.prepare.PrepareModuleInputOutput"
    ),
    "minifsdp.tensor_parallel.prepare.PrepareModuleOutput": (
        "minifsdp.tensor_parallel.torch_api.prepare.PrepareModuleOutput"
    ),
}
"""Names of modules that are still there; a module's old path leads to them, too."""

_OLD_HOMES = {each.rpartition(".")[0] for each in MOVED_NAMES}

_IMPORTING = (
    *(__name__, "minifsdp.on_first_use", "minifsdp.course"),
    *("importlib", "importlib._bootstrap", "importlib._bootstrap_external"),
)


class _Moved(MetaPathFinder, Loader):
    """Finds an old path: it is the module of the new one, the same object. The one who imports it is warned."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _OLD_HOMES and (spec := PathFinder.find_spec(fullname, path)) is not None:
            spec.loader = _OldHome(fullname, str(spec.origin))
            return spec
        new = new_path(fullname)
        return spec_from_loader(fullname, self, origin=new) if new and find_spec(new) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(str(spec.origin))
        spec.loader_state = module.__spec__  # importing gives the module the old path's
        warn_moved(spec.name, str(spec.origin))
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class _OldHome(SourceFileLoader):
    """Loads a module, some of whose names are elsewhere now. The one who takes such a name from it is warned."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)

        def find(name: str) -> Any:  # PEP 562
            old = f"{module.__name__}.{name}"
            if old not in MOVED_NAMES:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            home, _, name = MOVED_NAMES[old].rpartition(".")
            warn_moved(old, MOVED_NAMES[old])
            return getattr(import_module(home), name)

        module.__dict__["__getattr__"] = find


def new_path(old: str) -> str | None:
    """The path of a module now; None if it has not moved."""
    known = old
    while known.startswith("minifsdp."):
        if known in MOVED:
            return MOVED[known] + old.removeprefix(known)
        known = known.rpartition(".")[0]
    return None


def warn_moved(old: str, new: str) -> None:
    """Warn, at the line that imports the old path."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _IMPORTING:
        frame = frame.f_back
    warnings.warn_explicit(
        f"{old} is {new} now; the old path goes with the next release",
        DeprecationWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=str(frame.f_globals.get("__name__")),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def find_moved() -> None:
    """Let old paths be imported. Before anything else looks: an old package's folder is the new one's."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
