"""Random numbers of sharded tensors: each rank draws the whole tensor's, and keeps those of its part.

torch does this on CUDA, where a generator can skip the numbers of other ranks. On the CPU it cannot, and each rank
would draw its part from the beginning: with one seed, all ranks' parts are equal. So for a moment each rank needs the
memory of the whole tensor. Ranks with one seed get what one process gets, and their generators stay equal. Ranks with
different seeds have parts of different draws, and replicas the values of the first one among them.

torch asks a table of functions before it runs an operator on a DTensor. Its own `loss_parallel` uses the same table.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from minifsdp import comm, private
from minifsdp.private import dtensor
from minifsdp.process_groups import mesh_group

DRAWING = (
    *("normal_", "uniform_", "log_normal_", "exponential_", "geometric_", "cauchy_", "random_", "bernoulli_"),
    *("bernoulli", "native_dropout", "rand_like", "randn_like", "randint_like", "multinomial", "eye"),
)
"""Operators that take as many random numbers for an element, whatever its value; and `eye`, which takes none."""
SKIPPING = ("rrelu_with_noise", "rrelu_with_noise_")
"""Operators that take a random number for some of the elements."""
WRITING = ("zero_", "fill_")
"""Operators by which a function of torch.nn shows that it writes to single elements."""
REJECTING = "_no_grad_trunc_normal_"
"""The function that draws again until no element, of any rank, is out of bounds, which it asks with `any`."""
BY_FANS = {"kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"}
LOST = {"sparse_", "dirac_"}
PADDING = "_fill_padding_idx_with_zero"
_WITH_CARE = {*BY_FANS, *LOST, "orthogonal_", PADDING, REJECTING}
_DEEPEST = 10  # calls between such a function and the operator, ours included


stacked: WeakSet[nn.Module] = WeakSet()
"""Layers with a weight of `[parts, rows, columns]`, in which `torch.nn.init` would see a convolution's."""
_meshes: set[DeviceMesh] = set()


def draw_whole(mesh: DeviceMesh) -> None:
    """From now on let DTensors on this mesh have their parts of a whole tensor's random numbers."""
    _meshes.add(mesh)
    _install()


@cache
def _install() -> None:
    handlers = dtensor.dtensor_handlers()
    for name in (*DRAWING, *SKIPPING, *WRITING, "any"):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            handlers.setdefault(getattr(packet, overload), _handle)


def _handle(operator: Any, args: Any, kwargs: Any) -> Any:
    """An operator on DTensors; torch calls this instead, with the operator and its arguments."""
    x = next(each for each in (*args, *kwargs.values()) if isinstance(each, DTensor))
    if x.device_mesh not in _meshes:
        return _as_torch(operator, args, kwargs)
    name = private.schema_of(operator).name.removeprefix("aten::")
    caller = _caller()
    if name == "any":
        found = _as_torch(operator, args, kwargs)
        return found.full_tensor() if caller is not None and caller.f_code.co_name == REJECTING else found
    if caller is not None:
        _refuse_lost(caller.f_code.co_name, x)
        if name == "fill_" and caller.f_code.co_name == PADDING:
            _fill_row(caller.f_locals["self"], args[1])
            return x
    if name.endswith("_"):
        _refuse_copy(name, x)
    off = dtensor.local_of(x).device.type != "cpu" or x.device_mesh.get_coordinate() is None
    if name in WRITING or off or any(each.is_partial() for each in x.placements):
        return _as_torch(operator, args, kwargs)
    if name == "multinomial" and any(each.is_shard(x.ndim - 1) for each in x.placements):
        return _as_torch(operator, args, kwargs)  # which gathers the probabilities
    if name in SKIPPING:
        raise NotImplementedError(
            "rrelu draws for negative elements only, so that a rank cannot tell the numbers of its part: use "
            "leaky_relu or call it on plain tensors"
        )
    return _whole(operator, args, kwargs)


def _refuse_copy(name: str, x: DTensor) -> None:
    """
    Raises:
        NotImplementedError: the operator would write to a copy that torch has made of a part of a sharded tensor.
    """
    base = private.base_of(x)
    if isinstance(base, DTensor) and _storage(x) != _storage(base):
        raise NotImplementedError(
            f"{name} on a part of a sharded tensor of {list(base.shape)} would write to a copy, which is lost: call it "
            "on the whole tensor, or before fully_shard or parallelize_module"
        )


def _storage(x: Any) -> int:
    return private.identity(dtensor.local_of(x).untyped_storage())


def _fill_row(embedding: Any, value: float) -> None:
    """Fill the row of an embedding's padding; a DTensor would fill a copy of it."""
    weight = embedding.weight
    row = embedding.padding_idx - _place(weight)[0].start
    local = dtensor.local_of(weight)
    if 0 <= row < len(local):
        local.detach()[row].fill_(value)


def _as_torch(operator: Any, args: Any, kwargs: Any) -> Any:
    return dtensor.without_handler(_handle, operator, args, kwargs)


def _whole(operator: Any, args: Any, kwargs: Any) -> Any:
    """Run the operator on whole tensors that have this rank's values, and keep this rank's part of the results."""
    wholes: list[tuple[DTensor, Tensor]] = []

    def whole(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=dtensor.local_of(x).device).fill_(1)
        made[_place(x)] = dtensor.local_of(x)
        wholes.append((x, made))
        return made

    results = operator(*map(whole, args), **{key: whole(x) for key, x in kwargs.items()})
    for x, made in wholes:
        dtensor.local_of(x).copy_(_part(x, made))
    kept = tuple(_kept(each, wholes) for each in (results if isinstance(results, tuple) else (results,)))
    return kept if isinstance(results, tuple) else kept[0]


def _kept(result: Tensor, wholes: list[tuple[DTensor, Tensor]]) -> DTensor:
    for x, made in wholes:
        if result is made:
            return x
    x = wholes[0][0]
    return DTensor.from_local(
        _part(x, result), x.device_mesh, x.placements, run_check=False, shape=result.shape, stride=result.stride()
    )


def _part(x: DTensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that is cut as `x`; replicas have the same one, whatever their seeds."""
    mesh = x.device_mesh
    part = whole[_place(x)].to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    for dim, placement in enumerate(x.placements):
        if placement.is_replicate() and mesh.size(dim) > 1 and part.numel():
            group = mesh_group(mesh, dim)
            comm.broadcast(part, 0, group).wait()
    return part.to(whole.device)


def _place(x: DTensor) -> tuple[slice, ...]:
    """The indices of this rank's part in the whole tensor.

    Raises:
        NotImplementedError: torch's rule gives a part of another shape than the rank has.
    """
    shape, offset = dtensor.place_of(x)
    local = dtensor.local_of(x)
    if tuple(shape) != tuple(local.shape):
        raise NotImplementedError(
            f"random numbers for a part of {list(local.shape)} of a tensor of {list(x.shape)}, where {x.placements} "
            f"gives {list(shape)}: draw them before it is sharded"
        )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _refuse_lost(name: str, x: DTensor) -> None:
    """
    Raises:
        NotImplementedError: a function of `torch.nn.init` would give other values than on a plain tensor.
    """
    if name in LOST or (name == "orthogonal_" and x.shape[0] < max(x.shape[1], x.device_mesh.size())):
        raise NotImplementedError(
            f"torch.nn.init.{name} does not work on this sharded tensor of {list(x.shape)}: call it before fully_shard "
            "or parallelize_module, or on a plain tensor, and load its values with distribute_tensor"
        )
    if name in BY_FANS and x.ndim == 3 and any(_same(x, m.weight) for m in stacked):
        raise NotImplementedError(
            f"torch.nn.init.{name} takes this stack of {x.shape[0]} matrices for a convolution's weight, and draws too "
            f"narrow values: call it on each matrix, for part in weight.detach().unbind(): {name}(part)"
        )


def _same(x: DTensor, weight: Any) -> bool:
    return x.shape == weight.shape and _storage(x) == _storage(weight)


def _caller() -> FrameType | None:
    """The call of a function of torch.nn, among those that need care, that the operator comes from."""
    frame = inspect.currentframe()
    for _ in range(_DEEPEST):
        if frame is None:
            return None
        if frame.f_code.co_name in _WITH_CARE and frame.f_globals.get("__name__", "").startswith("torch.nn."):
            return frame
        frame = frame.f_back
    return None
