"""torch's private functions, classes and tensor attributes; no other module uses them.

Some private names are used elsewhere: those that every author of a module, an optimizer or a scaler meets in the base
class (`_parameters`, `_buffers`, `_non_persistent_buffers_set`, `_modules` and `_apply` of a module, its hooks of state
dicts, `_unscale_grads_`); names that torch's users have to write (`_HYBRID_SHARD_ZERO2`, `_module_classes_to_ignore`, a
policy's `_run_policy`, `_ddp_params_and_buffers_to_ignore`); the names of operators in
instruments/machine/operators.py; and the names of wrappers that state dicts leave out, in fsdp/torch_api/state.

Torch may change these names without notice. Each of them has a test that states what would break
(tests/core/test_private.py), so that a missing name in a new version of torch is reported by that name.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from traceback import walk_stack
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch._C import DisableTorchFunctionSubclass
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._utils import _get_device_index as device_index
from torch.autograd.graph import _engine_run_backward
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.remote_device import _remote_device as remote_device
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.dropout import _DropoutNd as AnyDropout
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "ASKED_BY_STATE_DICT_FUNCTIONS",
    "AnyBatchNorm",
    "AnyDropout",
    "ClosedToTorch",
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "TensorProperties",
    "TorchDispatchMode",
    "accumulates_in",
    "active_ddp",
    "at_end_of_backward",
    "backend_of",
    "base_of",
    "base_store_of",
    "chunk_cat",
    "close_to_torchs_wrappers",
    "current_backward",
    "device_index",
    "device_types_of",
    "fake_store",
    "foreach_copy",
    "gloo_group",
    "group_named",
    "has_storage",
    "hooked_in",
    "hooks_of",
    "identity",
    "in_backward",
    "is_in_torchs_fsdp",
    "is_traceable_wrapper_subclass",
    "is_traceable_wrapper_subclass_type",
    "leave_uncompiled",
    "made_since",
    "memory_snapshot",
    "name_of",
    "new_group_named",
    "nodes_so_far",
    "pass_on_hooks",
    "post_hooks_of",
    "record_memory_history",
    "remote_device",
    "run_backward",
    "schema_of",
    "set_timeout",
    "spin",
    "split_copy",
    "steps_in_backward",
    "tensor_of_shards",
    "timeout_of",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unset_fake_temporarily",
    "unwatched",
    "version_of",
]

ASKED_BY_STATE_DICT_FUNCTIONS = "_fqn_modifiers"
"""What the functions of torch.distributed.checkpoint.state_dict ask each module for before they do anything."""

# Autograd


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the current backward has computed all its gradients, before it returns to its caller."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """`torch.autograd.backward` without its checks of shapes and dtypes in Python, which the engine repeats.

    They are a tenth of what a pipeline adds to a step on the host. Megatron-LM calls the engine directly, too
    (`custom_backward` in megatron/core/pipeline_parallel/schedules.py).
    """
    _engine_run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""A number for the backward that this thread is inside; -1: none."""


def in_backward() -> bool:
    """True if this thread is inside a backward."""
    return current_backward() != -1


def accumulates_in(leaf: Any) -> bool:
    """True if the backward under way will add to the gradient of a leaf, given its node; `autograd.grad` will not."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # autograd.grad is to return this gradient
        return False


def base_of(view: Tensor) -> Tensor | None:
    """The tensor that autograd takes this one for a view of, if it does."""
    return view._base if view._is_view() else None


def nodes_so_far() -> int:
    """The number of autograd nodes that this thread has made."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def made_since(tensor: Tensor, nodes: int) -> bool:
    """True if it comes from an operation that autograd recorded after this thread had made `nodes` nodes."""
    return tensor.grad_fn is not None and int(tensor.grad_fn._sequence_nr()) >= nodes


def version_of(tensor: Tensor) -> int:
    """The number of in-place changes; 0 for an inference tensor, because torch does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def hooks_of(param: Tensor) -> Mapping[int, Callable[[Tensor], Tensor | None]]:
    """The hooks of `register_hook`."""
    return param._backward_hooks or {}


def post_hooks_of(param: Tensor) -> Mapping[int, Callable[[Tensor], None]]:
    """The hooks of `register_post_accumulate_grad_hook`."""
    return param._post_accumulate_grad_hooks or {}


def hooked_in(params: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """The ones with hooks of either kind."""
    return [p for p in params if p._post_accumulate_grad_hooks or p._backward_hooks]


def pass_on_hooks(source: Tensor, target: Tensor) -> None:
    """Give `target` the hooks of `source` where it has none of its own; their handles remove them from both."""
    if target._backward_hooks is None:
        target._backward_hooks = source._backward_hooks
    if target._post_accumulate_grad_hooks is None:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def steps_in_backward(param: Tensor) -> bool:
    """True if an optimizer steps as soon as it has its gradient (`_apply_optimizer_in_backward`)."""
    return hasattr(param, "_in_backward_optimizers")


# Wrappers of torch's

FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
"""The module of torch's FullyShardedDataParallel."""


class ClosedToTorch(dict[str, Any]):
    """Of the torch.distributed functions applied to a module; raises an error when a wrapper looks for itself.

    State dicts look as well, and may go on.
    """

    why = ""

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard" or (name == "replicate" and any(map(_wraps, walk_stack(None)))):
            raise RuntimeError(self.why)
        return super().__contains__(name)


def _wraps(call: tuple[FrameType, int]) -> bool:
    """True if a call is the construction of a wrapper of torch's."""
    code, module = call[0].f_code.co_name, call[0].f_globals.get("__name__", "")
    return (code, module) == ("__init__", FSDP1) or code in ("fully_shard", "replicate")


def close_to_torchs_wrappers(module: torch.nn.Module, why: str) -> None:
    """Let torch's FSDP, `fully_shard` and `replicate` raise RuntimeError when they are to take this module."""
    closed = module.__dict__[REGISTRY_KEY] = ClosedToTorch(module.__dict__.get(REGISTRY_KEY, ()))
    closed.why = why


def is_in_torchs_fsdp(module: torch.nn.Module) -> bool:
    """True if torch's FSDP or `fully_shard` has the module's parameters."""
    return "_is_fsdp_managed_module" in module.__dict__


def active_ddp() -> Any:
    """torch's DistributedDataParallel whose forward is running; None if there is none."""
    return DistributedDataParallel._active_ddp_module


# Tensors and operators


def foreach_copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of `sources` to its target: on CUDA in one kernel."""
    torch._foreach_copy_(targets, sources)


def chunk_cat(tensors: list[Tensor], ranks: int, out: Tensor) -> None:
    """Row r of `out` [N, S] <- part r of each tensor, cut along dimension 0 as by `torch.chunk`, padded with zeros."""
    torch._chunk_cat(tensors, 0, ranks, out=out)


def split_copy(rows: Tensor, sizes: list[int], out: list[Tensor]) -> None:
    """Copy the columns of `rows` [N, S], so many elements wide, to `out`: on CUDA in one kernel."""
    torch.split_with_sizes_copy(rows, sizes, dim=1, out=out)


has_storage: Callable[[Tensor], bool] = torch._C._has_storage
"""True of a tensor that has a storage: a sparse one has none."""

identity: Callable[[UntypedStorage], int] = attrgetter("_cdata")
"""A number for the memory behind a storage; torch may make several Python objects for one."""


def schema_of(operator: Any) -> Any:
    """An operator's schema: its arguments, and the ones it changes."""
    return operator._schema


def leave_uncompiled(modules: Iterable[str]) -> None:
    """Let `torch.compile` run code in these modules as it is."""
    from unittest.mock import patch

    from torch._dynamo import trace_rules  # takes seconds, as it would for any of torch's optimizers

    with patch.object(trace_rules, "_recompile_re"):  # of all names at once, below: it takes a millisecond
        for name in modules:
            trace_rules.add(name)
    trace_rules._recompile_re()


# Process groups


def backend_of(group: Any, device: torch.device) -> str:
    """The backend for tensors on such a device; a RuntimeError if there is none.

    A group that is a class in Python has no backends by device, and decides by itself which tensors it takes.
    """
    return str(group._get_backend(device).name() if group._device_types else dist.get_backend(group))


def device_types_of(group: Any) -> set[str]:
    """The kinds of devices whose tensors it carries: those of its backends, or those it was registered with."""
    listed = {device.type for device in group._device_types}
    return listed or set(dist.Backend.backend_capability.get(dist.get_backend(group), ("cpu", "cuda")))


def unwatched() -> AbstractContextManager[Any]:
    """Inside, no mode sees operators: neither one that measures, nor one that pretends."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def name_of(group: Any) -> str:
    """torch's name for it; `group_name` raises for a group that is a class in Python."""
    names = dist.distributed_c10d._world.pg_names
    return str(names[group]) if group in names else str(group.group_name)


def group_named(name: str) -> Any:
    """The process group with this name."""
    find: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return find(name)


def base_store_of(group: Any) -> Any:
    """The key-value store that its ranks share."""
    return dist.distributed_c10d._world.pg_map[group][1]


def set_timeout(options: Any, timeout: datetime.timedelta) -> None:
    """Of a process group's options; where it differs from the group's, torch warns."""
    options._timeout = timeout


def gloo_group(store: Any, rank: int, ranks: int, timeout: datetime.timedelta) -> Any:
    """A process group of gloo's that torch.distributed has no list of, connected when it returns."""
    return dist.ProcessGroupGloo(store, rank, ranks, timeout)


def new_group_named(name: str, ranks: list[int], options: Any) -> Any:
    """A process group with this name. torch's own names depend on the number of groups that a rank is in."""
    with patch.object(dist.distributed_c10d, "_process_group_name", lambda *_, **__: name):
        return dist.new_group(ranks, pg_options=options, use_local_synchronization=True)


def timeout_of(group: Any) -> datetime.timedelta:
    """The time that its collectives of tensors in host memory wait for the other ranks."""
    found: datetime.timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


def tensor_of_shards(mine: list[Shard], metadata: ShardedTensorMetadata, group: Any) -> ShardedTensor:
    """Of this rank's shards; the metadata say who has the others."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata, process_group=group)


def fake_store() -> Any:
    """For the backend "fake", whose collectives return at once and carry nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


# CUDA


def spin(cycles: int) -> None:
    """A kernel that does nothing for so many cycles, on one of the many multiprocessors."""
    sleep: Any = torch.cuda._sleep
    sleep(cycles)


def record_memory_history(enabled: bool) -> None:
    """Let CUDA's allocator remember what it does, with Python's stacks, or forget it and stop."""
    if enabled:
        torch.cuda.memory._record_memory_history(stacks="python")
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def memory_snapshot() -> dict[str, Any]:
    """The recorded memory history (the docstring of torch's `_snapshot` has the format)."""
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    return snapshot
