"""`parallelize_module`: styles for modules, chosen by patterns of names (torch/distributed/tensor/parallel/api.py)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from minifsdp.draws import draw_whole
from minifsdp.first_forward import check_before_forward
from minifsdp.kinds import check_count, check_kind
from minifsdp.local_parts import replaced, sharers
from minifsdp.nesting import TENSOR_PARALLEL, refuse_nested
from minifsdp.optimizer_steps import before_every_step
from minifsdp.order import check_labelled_calls
from minifsdp.partial_reads import refuse_partial_reads
from minifsdp.private import dtensor
from minifsdp.process_groups import mesh_group
from minifsdp.tensor_parallel.layer import LayerStyle
from minifsdp.tensor_parallel.parameters import names
from minifsdp.tensor_parallel.replicas import check_replicas, note_parallel
from minifsdp.uncompiled import stay_out_of_graphs
from minifsdp.whole_tensors import check_step

Target: TypeAlias = tuple[str, nn.Module, ParallelStyle]
"""A module that a plan names: its name, itself, and what to do to it."""


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Apply styles to a module in place, and return it.

    Args:
        module: a module with whole parameters.
        device_mesh: the tensor-parallel ranks, a mesh of one dimension; None: the mesh of the surrounding `with mesh:`.
        parallelize_plan: a style for the module, or styles by dotted names of its submodules; each part of a name may
            be a pattern with `*`, `?` and `[]`, and "" is the module itself.
        src_data_rank: the rank of the mesh whose values all ranks receive; None: each rank keeps its own values.

    Raises:
        ValueError: the mesh has several dimensions or lacks this rank; a style does not fit; a layer is in a wrapper.
            In the first forward: a model takes apart the output of a `ColwiseParallel` without `parts`. In backward: a
            parameter is tied to one that is parallel, and no other call has parallelized it.
        TypeError: the plan is neither a style nor a dict of styles.
    """
    check_labelled_calls()
    check_kind("module", module, nn.Module, "a module")
    mesh = dtensor.current_mesh() if device_mesh is None else device_mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"device_mesh is a {type(mesh).__name__}: give a DeviceMesh, such as init_device_mesh returns")
    if mesh.ndim != 1:
        raise ValueError(f"a mesh of {mesh.ndim} dimensions: give parallelize_module one of them, such as mesh['tp']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not on {mesh}: call parallelize_module on its ranks only")
    if src_data_rank is not None:
        check_count("src_data_rank", src_data_rank, 0)
        if src_data_rank >= mesh.size():
            raise ValueError(f"src_data_rank={src_data_rank}: the mesh has {mesh.size()} ranks, counted from 0")
    if parallelize_plan is None:
        warnings.warn("parallelize_module without a plan changes nothing", stacklevel=2)
        return module
    stay_out_of_graphs()
    before_every_step(check_step)
    before_every_step(check_replicas)
    refuse_partial_reads()
    note_parallel(module, mesh_group(mesh, 0))
    draw_whole(mesh)
    made = _parallelized(module, mesh, parallelize_plan, src_data_rank)
    check_before_forward(module, mesh_group(mesh, 0))
    return made


def _parallelized(module: nn.Module, mesh: DeviceMesh, plan: Any, src_data_rank: int | None) -> nn.Module:
    if isinstance(plan, LayerStyle):
        refuse_nested(TENSOR_PARALLEL, module)
    if isinstance(plan, ParallelStyle):
        plan.src_data_rank = src_data_rank
        return plan._apply(module, mesh)
    if isinstance(plan, type):
        raise TypeError(f"the class {plan.__name__} as a style: give an instance, with parentheses")
    if not isinstance(plan, Mapping):
        raise TypeError(f"a plan is a style or a dict of styles by name, not a {type(plan).__name__}")
    targets = list(_once(_targets(module, plan)))
    tied = list(_tied(module, targets))
    names.update({target: name for name, target, _ in targets if name})
    order = {target: index for index, target in enumerate(module.modules())}  # rank 0's values come in this order
    for _, target, style in sorted(targets, key=lambda each: order[each[1]]):
        _parallelized(target, mesh, style, src_data_rank)
    for other, attribute, pair, p in (each for each in tied if each[-1] in replaced):
        if next(other.children(), None) is None:  # a layer, which another call may parallelize or tie again
            sharers[p] = pair
        else:  # which can have no style, such as a head with the name of its layer's bias
            other.register_parameter(attribute, replaced[p])
    return module


def divide(module: nn.Module, mesh: DeviceMesh, *names: str) -> None:
    """Divide counts that the module stores, such as its number of heads, by the number of ranks.

    Raises:
        ValueError: a count is not divisible by the number of ranks.
    """
    ranks = mesh.size()
    for name in names:
        count = getattr(module, name)
        if count % ranks:
            kind = type(module).__name__
            raise ValueError(
                f"{name} = {count} of {kind} cannot be shared by {ranks} ranks: choose a divisor of {count}"
            )
    for name in names:
        setattr(module, name, getattr(module, name) // ranks)


def _targets(module: nn.Module, plan: Mapping[str, Any]) -> Iterator[Target]:
    """The modules that a plan names."""
    for pattern, style in plan.items():
        check_kind("a key of the plan", pattern, str, "the name of a submodule")
        found = list(_matches(module, pattern.split(".") if pattern else []))
        if not found:
            warnings.warn(f"no submodule is called {pattern!r}: this entry of the plan changes nothing", stacklevel=5)
        for name, target in found:
            yield name, target, style


def _once(targets: Iterable[Target]) -> Iterator[Target]:
    """One layer style for each module, even if the plan has it under several names."""
    styles: dict[int, tuple[str, ParallelStyle]] = {}
    for name, target, style in targets:
        if isinstance(style, LayerStyle):
            first, earlier = styles.setdefault(id(target), (name, style))
            if earlier != style:
                raise ValueError(f"{first} and {name} are one module, with two styles: give it one")
            if name != first:
                continue
        yield name, target, style


def _matches(module: nn.Module, patterns: list[str], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    if not patterns:
        yield prefix, module
        return
    for name, child in module.named_children():
        if fnmatch(name, patterns[0]):
            yield from _matches(child, patterns[1:], f"{prefix}.{name}" if prefix else name)


def _tied(module: nn.Module, targets: list[Target]) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """Parameters of layers in the plan that modules outside it share: module, attribute, its name, and the layer's."""
    layers = {id(target) for _, target, style in targets if isinstance(style, LayerStyle)}
    cut = {p: name for name, target, _ in targets if id(target) in layers for p in target.parameters(recurse=False)}
    for name, other in module.named_modules():
        for attribute, p in other._parameters.items() if id(other) not in layers else ():
            if p is not None and p in cut:
                yield other, attribute, f"{name or type(other).__name__} and {cut[p]}", p
