"""Loading a model's state, the same on all ranks: every value that is given is loaded, or reported by all."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.checkpoint.agree import same_errors
from minifsdp.checkpoint.from_rank_0 import receive
from minifsdp.checkpoint.names import Names, StateDict
from minifsdp.checkpoint.parts import Parts
from minifsdp.comm import Group
from minifsdp.device import compute_device

Path = tuple[str, ...]


def received(outline: StateDict, source: Group, device: torch.device, keep: Callable[[Path, Any], Any]) -> StateDict:
    """The values of `outline_from_rank_0`, one at a time in rank 0's order, and of each what `keep` makes of it.

    What `keep` raises is raised on all ranks, after the last value, which the other ranks wait for.
    """
    errors: list[Exception] = []

    def arrived(value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            return {key: arrived(inner, (*path, key)) for key, inner in value.items()}
        whole = receive(value, source, device)
        try:
            return keep(path, whole)
        except Exception as error:
            errors.append(error)

    state = {key: arrived(value, (key,)) for key, value in outline.items()}
    with same_errors([source]):
        if errors:
            raise errors[0]
    return state


def check_has_values(state: StateDict) -> None:
    """
    Raises:
        RuntimeError: there is nothing to load; the error names the tensors without values.
    """
    on_meta = [name for name, value in state.items() if isinstance(value, Tensor) and value.is_meta]
    if on_meta:
        raise RuntimeError(
            f"{', '.join(on_meta)}: on the meta device, without values. Move the model to a device with to_empty() "
            "before get_state_dict, load the checkpoint, and pass what it has loaded"
        )


def materialize(model: nn.Module, parts: Parts, state: StateDict, device: torch.device | None) -> None:
    """Give the parameters and buffers on the meta device for which `state` has values memory on `device`.

    Otherwise `load_state_dict` would copy the values to nowhere. Tied ones stay tied.
    """
    new: dict[Tensor, Tensor] = {}
    for name, tensor in parts.tensors.items():
        value = state.get(name)
        if not (tensor.is_meta and isinstance(value, Tensor)) or tensor in new:
            continue
        if value.shape in (tensor.shape, parts.plain_shape(name)):
            empty = torch.empty_like(tensor, device=device or value.device)
            is_parameter = isinstance(tensor, nn.Parameter)
            new[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    for module in model.modules() if new else ():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: new[t] for name, t in tensors.items() if t in new})  # type: ignore[misc]
    parts.tensors.update({name: new[tensor] for name, tensor in parts.tensors.items() if tensor in new})
    warn_of_meta(model, parts)


def warn_of_meta(model: nn.Module, parts: Parts) -> None:
    """Warn of buffers on the meta device that no checkpoint has, so that nothing else names them."""
    left_out = {
        module._buffers[name]
        for module in model.modules()
        for name in module._non_persistent_buffers_set & module._buffers.keys()
    }
    if names := [name for name, tensor in parts.tensors.items() if tensor.is_meta and tensor in left_out]:
        warnings.warn(
            f"{', '.join(names)}: on the meta device, and in no checkpoint, since persistent=False: compute on a "
            "device what they hold, and assign it to the module",
            stacklevel=4,
        )


def device_for(model: nn.Module, to_cpu: bool) -> torch.device | None:
    """The device for what is on meta; None: that of its values."""
    if to_cpu:
        return torch.device("cpu")
    return compute_device(None, model.parameters(), comm.world()) if comm.has_world() else None


def load(model: nn.Module, names: Names, state: StateDict, strict: bool) -> Any:
    """`model.load_state_dict`, with the names of a checkpoint in its result and its errors.

    Raises:
        RuntimeError: values have other shapes; or, if `strict`, keys are missing or unexpected.
    """
    try:
        result = model.load_state_dict({names.inside(name): value for name, value in state.items()}, strict=strict)
    except RuntimeError as error:
        quoted = r'(?<=")[^"\s]+(?=")|(?<=mismatch for )\S+(?=:)'
        raise RuntimeError(re.sub(quoted, lambda found: names.outside(found[0]), str(error))) from None
    missing, unexpected = ([names.outside(name) for name in keys] for keys in result)
    return result._replace(missing_keys=missing, unexpected_keys=unexpected)
