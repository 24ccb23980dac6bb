"""torch's private names about DTensors, whose import takes a third as long as torch's, and about meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "StridedShard",
    "current_mesh",
    "dtensor_handlers",
    "join_meshes",
    "local_of",
    "place_of",
    "put_local",
    "read_number",
    "spec",
    "spec_of",
    "with_spec",
    "without_handler",
    "without_memory",
]


def local_of(tensor: DTensor) -> Tensor:
    """This rank's part, not a view of it: `to_local()` makes one, an operation of autograd's."""
    return tensor._local_tensor


def put_local(tensor: Any, local: Tensor) -> None:
    """Let another tensor of the same shape and values be this rank's part."""
    tensor._local_tensor = local


def spec_of(tensor: Any) -> Any:
    """A DTensor's mesh, placements, whole shape and dtype."""
    return tensor._spec


def place_of(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a DTensor's local part, and the indices at which it begins in the whole tensor."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def dtensor_handlers() -> dict[Any, Callable[..., Any]]:
    """By operator, what torch calls instead on DTensors, with the operator and its arguments."""
    return DTensor._op_dispatcher._custom_op_handlers


read_number: Any = torch.ops.aten._local_scalar_dense.default
"""The operator of `item()`, which `float()`, `bool()` and arguments that must be numbers call, too."""


def without_handler(handler: Callable[..., Any], operator: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that has this handler as torch does."""
    handlers = dtensor_handlers()
    handlers.pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        handlers[operator] = handler


def with_spec(local: Tensor, spec: Any) -> DTensor:
    """A DTensor made of this rank's part; `from_local` would check and compute what is known.

    `DTensor.__init__` does nothing but leave and enter the compiler, which takes longer than all the rest.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


@lru_cache(maxsize=4096)
def spec(mesh: DeviceMesh, placement: Any, shape: torch.Size, dtype: torch.dtype) -> Any:
    """The specification of a contiguous DTensor of this shape on a mesh of one dimension."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, (placement,), TensorMeta(shape, stride, dtype))


def without_memory(kind: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a class of one's own that has its memory elsewhere."""
    return Tensor._make_wrapper_subclass(kind, torch.Size(shape), dtype=dtype, device=device)


def current_mesh() -> DeviceMesh:
    """That of the surrounding `with mesh:`; a RuntimeError, if there is none."""
    return device_mesh._mesh_resources.get_current_mesh()


def join_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh of the dimensions of several, which are parts of one."""
    return DeviceMesh._concatenate(meshes)
