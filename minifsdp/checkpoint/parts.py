"""Whole values of a checkpoint, and the parts of them that a rank keeps.

Tensor parallelism keeps a fused weight [3 width, width] as [3, width, width], to shard each of the three matrices
(minifsdp/tensor_parallel/columns.py). The elements have the same order, one is a view of the other, and a whole value
has the plain model's shape.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Adafactor, Optimizer

from minifsdp.checkpoint.names import Names, StateDict, paths
from minifsdp.checkpoint.optim_names import find_units
from minifsdp.checkpoint.optim_schema import UnitNames
from minifsdp.checkpoint.optim_state import ONE_PER_PARAMETER, check_shape, has_elements
from minifsdp.checkpoint.sharded_values import shard_value, whole_of
from minifsdp.checkpoint.units import Wrapper
from minifsdp.optimizer_steps import updating
from minifsdp.private import ShardedTensor, dtensor
from minifsdp.wrapper_names import clean_name


class Parts:
    """The division of a model's values among the ranks, by their names in a checkpoint.

    Attributes:
        units: the FSDP units with the parameters that are sharded in them.
        tensors: the parameters outside these, and the buffers; the sharded ones are DTensors.
        fused: those of them that tensor parallelism has reshaped.
    """

    def __init__(self, model: nn.Module, names: Names) -> None:
        sharded = {one.unit: one for one in find_units(model) if one.unit.contents.ranks > 1}
        self.units: dict[str, UnitNames] = {}
        for prefix, module in paths(model):
            if isinstance(module, Wrapper) and module._unit in sharded:
                of_unit = [names.outside(prefix + clean_name(place.name)) for place in module._places]
                self.units |= dict.fromkeys(of_unit, sharded[module._unit])
        every = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        found = {names.outside(clean_name(name)): tensor for name, tensor in every}
        self.tensors = {name: tensor for name, tensor in found.items() if name not in self.units}
        layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module.weight.ndim == 3]
        of_layers = {p for layer in layers for p in layer.parameters(recurse=False)}
        self.fused = {name for name, tensor in self.tensors.items() if tensor in of_layers}

    @property
    def names(self) -> list[str]:
        """The names of all parameters and buffers."""
        return [*self.units, *self.tensors]

    def is_shared(self, name: str) -> bool:
        """True if each rank has a part of the value."""
        return name in self.units or isinstance(self.tensors.get(name), DTensor)

    # Saving

    def whole(self, name: str, value: Any) -> Any:
        """A value of the model or of its optimizer, in the plain model's shape; one all-gather if it is a DTensor."""
        value = whole_of(value)
        return _reshaped(value, self.tensors[name].shape, self.plain_shape(name)) if name in self.fused else value

    def plain_shape(self, name: str) -> torch.Size:
        """The shape of a parameter or buffer in the plain model."""
        shape = self.tensors[name].shape
        return torch.Size([shape[0] * shape[1], *shape[2:]]) if name in self.fused else shape

    # Loading

    def on_arrival(self, name: str, value: Any) -> Any:
        """This rank's share of a whole value of the model while others are on their way; no communication."""
        if name in self.units:
            return self._rows(name, value)
        is_known = name in self.tensors or not isinstance(value, Tensor)
        return self.part(name, value) if is_known else value.cpu()  # of another stage, or to be renamed

    def state_on_arrival(self, name: str, key: str, value: Any) -> Any:
        """The same of a value in an optimizer's state; None if it is of no parameter here."""
        if name in self.units:
            return self._rows(name, value)
        return self.state_part(name, {key: value})[key] if name in self.tensors else None

    def _rows(self, name: str, value: Any) -> Any:
        one = self.units[name]
        is_sharded = isinstance(value, Tensor) and value.dim() > 0
        return shard_value(value, one.unit.group, one.device_mesh) if is_sharded else value

    def part(self, name: str, value: Any) -> Any:
        """This rank's part of a value of the model, in the model's layout; collective if it has another layout.

        Raises:
            ValueError: it is sharded like a parameter in an FSDP unit, but is in none here.
        """
        p = self.tensors.get(name)
        if p is None or not isinstance(value, Tensor) or _are_alike(value, p):
            return value
        if isinstance(value, ShardedTensor):
            raise ValueError(
                f"{name} is a ShardedTensor, as in FSDP, but no FSDP unit has it here: load the checkpoint through "
                "torch.distributed.checkpoint, which reshards, or save with full_state_dict=True"
            )
        whole = whole_of(value)
        if name in self.fused:
            whole = _reshaped(whole, self.plain_shape(name), p.shape)
        return cut(p, whole) if isinstance(p, DTensor) and whole.shape == p.shape else whole

    def check_shapes(self, optim: Optimizer, states: StateDict) -> None:
        """Check states, by name, for one of torch's optimizers; others may keep values of any shape.

        States in FSDP units are checked when they are scattered.

        Raises:
            ValueError: a state has another shape than its parameter, in torch's words.
        """
        kind = type(updating(optim))
        if not kind.__module__.startswith("torch.optim.") or kind is Adafactor:
            return
        for name in (name for name in states if name in self.tensors):
            for key, value in states[name].items():
                is_per_element = isinstance(value, Tensor) and key not in ONE_PER_PARAMETER
                if is_per_element and value.shape != self.tensors[name].shape:
                    check_shape(value, self.plain_shape(name), f"{key} of {name}")

    def state_part(self, name: str, state: StateDict) -> StateDict:
        """This rank's part of an optimizer's state of a parameter, from whole or sharded values."""
        return {key: self._state_value(name, key, value) for key, value in state.items()}

    def _state_value(self, name: str, key: str, value: Any) -> Any:
        p = self.tensors.get(name)
        if isinstance(value, dict):
            return self.state_part(name, value)
        if p is None or not has_elements(key, value, p.shape):
            return value
        if value.shape in (p.shape, self.plain_shape(name)):
            return self.part(name, value)
        if not isinstance(p, DTensor):
            return whole_of(value)
        # Not a value for each of the parameter's, such as means of its rows: right in any layout.
        return value if isinstance(value, DTensor) or value.numel() == 1 else replicated(p, value)


def cut(p: DTensor, whole: Tensor) -> DTensor:
    """This rank's part of a whole value, as a DTensor in the layout of `p`, in memory of its own.

    torch's `distribute_tensor` cannot cut a dimension that data and tensor parallelism share unevenly.
    """
    shape, offset = dtensor.place_of(p)
    place = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    device = whole.device if p.is_meta else p.device
    local = whole.detach()[place].to(device, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def replicated(p: DTensor, whole: Tensor) -> DTensor:
    """A whole value as a DTensor on the mesh of `p`."""
    local = whole.detach().to(p.device, copy=True)
    return DTensor.from_local(local, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)


def _are_alike(value: Tensor, p: Tensor) -> bool:
    """True if both are plain tensors, or DTensors in one layout."""
    if not isinstance(value, DTensor) or not isinstance(p, DTensor):
        return not isinstance(value, DTensor | ShardedTensor) and not isinstance(p, DTensor)
    return value.device_mesh == p.device_mesh and value.placements == p.placements


def _reshaped(value: Any, given: torch.Size, wanted: torch.Size) -> Any:
    if isinstance(value, dict):
        return {key: _reshaped(inner, given, wanted) for key, inner in value.items()}
    return value.reshape(wanted) if isinstance(value, Tensor) and value.shape == given else value
