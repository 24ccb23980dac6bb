"""The front door, with torch's arguments (torch/distributed/fsdp/fully_sharded_data_parallel.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.clip_grad import clip_grad_norm
from minifsdp.comm import Group
from minifsdp.fsdp.engine import Engine
from minifsdp.fsdp.mixed_precision import cast_buffers, cast_inputs, computes_exactly, follow_buffers
from minifsdp.fsdp.replicated import ReplicatedUnit
from minifsdp.fsdp.schedules.host import HostSchedule
from minifsdp.fsdp.schedules.prefetch import BackwardPrefetch, PrefetchSchedule
from minifsdp.fsdp.schedules.rate_limit import RateLimitedSchedule
from minifsdp.fsdp.schedules.sync import SyncSchedule
from minifsdp.fsdp.torch_api import construct
from minifsdp.fsdp.torch_api.auto_wrap import wrap_submodules
from minifsdp.fsdp.torch_api.eager import stay_out_of_graphs
from minifsdp.fsdp.torch_api.groups import find_groups
from minifsdp.fsdp.torch_api.ignored import find_ignored
from minifsdp.fsdp.torch_api.kinds import make_unit
from minifsdp.fsdp.torch_api.options import CPUOffload, MixedPrecision, ShardingStrategy, ours
from minifsdp.fsdp.torch_api.policies import NamingPolicy, WrapPolicy
from minifsdp.fsdp.torch_api.state.loading import register_load_hooks
from minifsdp.fsdp.torch_api.state.methods import StateMethods
from minifsdp.fsdp.torch_api.state.names import FLAT_PARAM, clean_name, refuse_torchs_functions
from minifsdp.fsdp.torch_api.state.optim_methods import OptimStateMethods
from minifsdp.fsdp.torch_api.state.saving import refuse_past_wrapper
from minifsdp.fsdp.torch_api.state.summon import check_forward, check_none_summoned
from minifsdp.fsdp.unit import Unit

MakeSchedule = Callable[[Sequence[Unit]], SyncSchedule]


class FullyShardedDataParallel(StateMethods, OptimStateMethods):
    """Shards `module` over the ranks. The optimizer must be built after wrapping: its parameters are the shards.

    With `use_orig_params` one from before goes on, unless parameters were on meta; without, its `step` raises.

    Args:
        module: what to wrap. Its parameters that no inner instance holds are this instance's unit.
        process_group: shard over these ranks; default: all. Of a hybrid strategy: (to shard over, to replicate over).
        sharding_strategy: default FULL_SHARD; on one rank NO_SHARD, whatever is asked for.
        cpu_offload: keep shards and gradients in host memory.
        auto_wrap_policy: which submodules are units of their own: a policy (policies.py), or a set of module classes.
        backward_prefetch: when backward gathers the next unit; None: when it is needed.
        mixed_precision: dtypes of computation, reduction and buffers.
        ignored_modules: left alone, with all that is in them.
        param_init_fn: gives a module that has meta tensors memory and values; called for each, children first.
        device_id: compute there, whatever device the module is on.
        sync_module_states: start from rank 0's values.
        forward_prefetch: gather the next unit in forward before this one computes, in the order of the last forward.
        limit_all_gathers: have at most two units gathered and not yet freed. On CPU this prefetches in forward too,
            and overlaps in backward what memory allows (host.py).
        use_orig_params: let the optimizer see the original parameters, and a module's own forward whole ones.
        ignored_states: parameters or modules to leave alone.
        device_mesh: shard over its dimension; of a hybrid strategy, replicate over the first and shard over the second.
        schedule: makes the schedule from all units, in place of the one that the prefetch and limit arguments choose.

    Raises:
        ValueError: parameters of one unit differ in dtype, device or `requires_grad`, or one is used in two units.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Group | tuple[Group, Group] | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: WrapPolicy | NamingPolicy | Iterable[type[nn.Module]] | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
        *,
        schedule: MakeSchedule | None = None,
    ) -> None:
        super().__init__()
        stay_out_of_graphs()
        construct.warn_if_never_called(module)
        self._ignored = ignored = find_ignored(module, ignored_modules, ignored_states)
        strategy = ours(ShardingStrategy, sharding_strategy or ShardingStrategy.FULL_SHARD, "sharding_strategy")
        self._groups = groups = find_groups(strategy, process_group, device_mesh, auto_wrap_policy is not None)
        self.process_group, self._device_mesh = groups.shard, groups.mesh
        self.rank, self.world_size = groups.shard.rank(), groups.shard.size()
        self.compute_device = construct.find_device(device_id, module, ignored, groups.shard)
        self.sharding_strategy = construct.clamp(strategy, self.world_size)
        self.cpu_offload = ours(CPUOffload, cpu_offload or CPUOffload(), "cpu_offload")
        self.mixed_precision = ours(MixedPrecision, mixed_precision or MixedPrecision(), "mixed_precision")
        self.backward_prefetch = backward_prefetch and ours(BackwardPrefetch, backward_prefetch, "backward_prefetch")
        self.forward_prefetch, self.limit_all_gathers = forward_prefetch, limit_all_gathers
        chosen: Any = partial(RateLimitedSchedule if limit_all_gathers else PrefetchSchedule, forward=forward_prefetch)
        if limit_all_gathers and self.compute_device.type == "cpu":
            chosen = HostSchedule
        self._make_schedule = schedule or partial(chosen, backward=self.backward_prefetch)
        self._use_orig_params = use_orig_params
        self._engine: Engine | None = None
        self._is_root: bool | None = None
        if auto_wrap_policy is not None:
            inherited = {
                "process_group": groups,
                "sharding_strategy": self.sharding_strategy,
                "cpu_offload": self.cpu_offload,
                "backward_prefetch": self.backward_prefetch,
                "mixed_precision": mixed_precision and self.mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": self.compute_device,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                "ignored_states": ignored,
                "schedule": self._make_schedule,
            }
            wrap_submodules(module, auto_wrap_policy, ignored, FullyShardedDataParallel, inherited)
        self._fsdp_wrapped_module = module
        self._managed = construct.managed_modules(module, ignored)
        self._unit = make_unit(self, param_init_fn, groups if sync_module_states else None)
        if self._unit is not None and not use_orig_params:
            self.module.register_parameter(FLAT_PARAM, self._unit.flat.shard)
        self._loading = register_load_hooks(self)
        refuse_past_wrapper(self)

    def _lazy_init(self) -> Engine:
        """The outermost instance that runs first hooks all units to one schedule."""
        if self._engine is None:
            instances = self.fsdp_modules(self)
            construct.check_alike(instances)
            units = [instance._unit for instance in instances if instance._unit is not None]
            self._engine = Engine(units, self._make_schedule(units) if units else SyncSchedule(units))
            names = {m: clean_name(name) for name, m in self.named_modules()}
            for instance in instances:
                instance._engine, instance._is_root = self._engine, instance is self
                if instance._unit is not None:
                    instance._unit.title = f"{names[instance] or 'root'} ({instance._unit.name})"
                instance._buffer_dtypes = cast_buffers(instance._managed, instance.mixed_precision.buffer_dtype)
            if self._unit is not None:
                self._unit.is_root = True
            self._instances = instances
        return self._engine

    # Running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self._modules["_fsdp_wrapped_module"], *args, **kwargs)  # type: ignore[arg-type]

    def run(self, compute: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`compute(*args, **kwargs)` as this instance's forward: with its parameters whole, and with its hooks."""
        if self._summoned is not None:  # whole already, and to stay so
            check_forward(self)
            return compute(*args, **kwargs)
        engine = self._engine or self._lazy_init()
        if self._is_root:
            check_none_summoned(self._instances)
            engine.begin()
        try:
            args, kwargs = self._cast((args, kwargs))
            if self._unit is not None:
                engine.before(self._unit, (args, kwargs))
                self._unit.lend()
            output = compute(*args, **kwargs)
            if self._unit is not None:
                engine.after(self._unit, output, self._managed)
        finally:
            if self._is_root:
                engine.end()
            elif self._unit is not None:
                engine.leave(self._unit)
        return output

    def _cast(self, inputs: Any) -> Any:
        """Inputs as the wrapped module expects them, and its buffers as well."""
        precision = self.mixed_precision
        if not (self._is_root or precision.param_dtype or self._buffer_dtypes):
            return inputs
        exact = computes_exactly(self.module)
        follow_buffers(self._buffer_dtypes, precision.buffer_dtype, exact)
        wanted = precision.cast_forward_inputs or (self._is_root and precision.cast_root_forward_inputs)
        dtype = precision.param_dtype if wanted and not exact else None
        return cast_inputs(inputs, dtype, self.compute_device) if dtype or self._is_root else inputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients, without communication; the first backward outside reduces them."""
        engine = self._lazy_init()
        if not self._is_root:
            raise RuntimeError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module."
            )
        with engine.no_sync():
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of all gradients of all ranks; returns the norm. To be called on every rank."""
        if not self.check_is_root():
            raise RuntimeError("`clip_grad_norm_()` should only be called on the root FSDP instance")
        sharded: dict[Group, list[nn.Parameter]] = {}
        for unit in (m._unit for m in self.fsdp_modules(self)):
            if unit is not None and not isinstance(unit, ReplicatedUnit):
                sharded.setdefault(unit.group, []).extend(unit.shards)
        shards = set().union(*sharded.values())
        others = [p for p in self.parameters() if p not in shards]
        return clip_grad_norm(sharded, others, float(max_norm), float(norm_type), self.compute_device)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; original parameters have their original names."""
        for name, p in super().named_parameters(*args, **kwargs):
            yield (name if name.endswith(FLAT_PARAM) else clean_name(name)), p

    # Looking through to the wrapped module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_fsdp_wrapped_module" not in self._modules:
                raise
            refuse_torchs_functions(name)
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            f"FullyShardedDataParallel({type(self.module).__name__}) cannot be copied, its shards belong to process "
            "groups: copy the module before it is wrapped, or wrap another one and load this one's state_dict() there"
        )

    @property
    def params(self) -> list[nn.Parameter]:
        """The flat parameter of this instance, as a list; empty if it manages none."""
        return [] if self._unit is None else self._unit.shards

    def check_is_root(self) -> bool:
        self._lazy_init()
        return bool(self._is_root)
