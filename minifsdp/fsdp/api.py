"""The front door, with torch's arguments (torch/distributed/fsdp/fully_sharded_data_parallel.py)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.fsdp import full_state
from minifsdp.fsdp.clip_grad import clip_grad_norm
from minifsdp.fsdp.engine import Engine
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.prefetch import BackwardPrefetch, PrefetchSchedule
from minifsdp.fsdp.rate_limit import RateLimitedSchedule
from minifsdp.fsdp.replicated import ReplicatedUnit
from minifsdp.fsdp.sync import SyncSchedule
from minifsdp.fsdp.unit import Unit
from minifsdp.fsdp.wrap import ModuleWrapPolicy, WrapPolicy, check_not_shared, check_not_taken, wrap_children


class ShardingStrategy(Enum):
    """What is sharded between uses: everything; everything, but parameters not from forward to backward; nothing."""

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()


MakeSchedule = Callable[[Sequence[Unit]], SyncSchedule]


class FullyShardedDataParallel(nn.Module):
    """Shards `module` over the ranks. The optimizer must be built after wrapping: its parameters are the shards.

    Args:
        module: what to wrap. Its parameters that no inner instance holds are this instance's unit.
        process_group: shard over these ranks; default: all.
        sharding_strategy: default FULL_SHARD; on one rank NO_SHARD, whatever is asked for.
        auto_wrap_policy: which submodules are units of their own: a `WrapPolicy`, or a set of module classes.
        backward_prefetch: when backward gathers the next unit; None: when it is needed.
        forward_prefetch: gather the next unit in forward before this one computes, in the order of the last forward.
        limit_all_gathers: have at most two units gathered and not yet freed.
        device_id: move the module there before sharding it.
        schedule: makes the schedule from all units, in place of the one that the three arguments before choose.

    Raises:
        ValueError: parameters of one unit differ in dtype, device or `requires_grad`, or one is used in two units.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Group | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        *,
        auto_wrap_policy: WrapPolicy | Iterable[type[nn.Module]] | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        device_id: int | torch.device | None = None,
        schedule: MakeSchedule | None = None,
    ) -> None:
        super().__init__()
        self.process_group = comm.world(process_group)
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.sharding_strategy = self._resolve(sharding_strategy or ShardingStrategy.FULL_SHARD)
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        make_schedule = PrefetchSchedule if not limit_all_gathers else RateLimitedSchedule
        self._make_schedule = schedule or partial(make_schedule, forward=forward_prefetch, backward=backward_prefetch)
        self._engine: Engine | None = None
        self._is_root: bool | None = None
        if device_id is not None:
            module.to(torch.device("cuda", device_id) if isinstance(device_id, int) else device_id)
        if auto_wrap_policy is not None:
            self._wrap_children(module, auto_wrap_policy)
        self._fsdp_wrapped_module = module
        self._unit = self._make_unit(module)
        if self._unit is not None:
            module.register_parameter(full_state.FLAT_PARAM, self._unit.flat.shard)
        full_state.register_load_hooks(self, module, self._unit)

    # Construction

    def _resolve(self, strategy: ShardingStrategy) -> ShardingStrategy:
        if not isinstance(strategy, ShardingStrategy):
            raise ValueError(f"sharding_strategy={strategy!r}: give a ShardingStrategy, such as FULL_SHARD")
        if self.world_size > 1 or strategy is ShardingStrategy.NO_SHARD:
            return strategy
        warnings.warn(
            f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.", stacklevel=3
        )
        return ShardingStrategy.NO_SHARD

    def _wrap_children(self, module: nn.Module, policy: Any) -> None:
        def wrap(child: nn.Module) -> nn.Module:
            check_not_shared(module, child)
            return FullyShardedDataParallel(
                child,
                self.process_group,
                self.sharding_strategy,
                backward_prefetch=self.backward_prefetch,
                forward_prefetch=self.forward_prefetch,
                limit_all_gathers=self.limit_all_gathers,
                schedule=self._make_schedule,
            )

        for name, inner in module.named_modules():
            if isinstance(inner, FullyShardedDataParallel):
                raise ValueError(
                    f"FSDP auto wrapping requires modules to not already have FSDP applied but found {name} in "
                    f"{type(module).__name__}: leave all of it to the policy, or wrap all of it by hand"
                )
        if isinstance(policy, type) or not callable(policy):
            policy = ModuleWrapPolicy(policy)
        wrap_children(module, policy, wrap)

    def _make_unit(self, module: nn.Module) -> FlatUnit | None:
        params = find_parameters(module, skip=self.fsdp_modules(module))
        if not params:
            return None
        check_not_taken(params)
        name = type(module).__name__
        if self.sharding_strategy is ShardingStrategy.NO_SHARD:
            return ReplicatedUnit(FlatParameter(params, rank=0, ranks=1), self.process_group, name)
        reshard = self.sharding_strategy is ShardingStrategy.FULL_SHARD
        return FlatUnit(FlatParameter(params, self.rank, self.world_size), self.process_group, name, reshard)

    def _lazy_init(self) -> Engine:
        """The outermost instance that runs first hooks all units to one schedule."""
        if self._engine is None:
            instances = self.fsdp_modules(self)
            for inner in instances[1:]:
                if inner._is_root:
                    raise RuntimeError(
                        "Non-root FSDP instance's `_is_root` should not have been set yet or should have been set to "
                        f"`False`: the unit {type(inner.module).__name__} ran by itself before the model that holds it."
                    )
            units = [instance._unit for instance in instances if instance._unit is not None]
            self._engine = Engine(units, self._make_schedule(units) if units else SyncSchedule(units))
            for instance in instances:
                instance._engine, instance._is_root = self._engine, instance is self
            if self._unit is not None:
                self._unit.is_root = True
        return self._engine

    def _root_engine(self, what: str) -> Engine:
        engine = self._lazy_init()
        if not self._is_root:
            raise RuntimeError(
                f"`{what}` on inner FSDP instances is not supported. Please call `{what}` on root FSDP module."
            )
        return engine

    # Running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._lazy_init()
        if self._is_root:
            engine.begin()
        if self._unit is not None:
            engine.before(self._unit, (args, kwargs))
        output = self.module(*args, **kwargs)
        if self._unit is not None:
            engine.after(self._unit, output)
        if self._is_root:
            engine.end()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients, without communication; the first backward outside reduces them."""
        with self._root_engine("no_sync()").no_sync():
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of all gradients of all ranks; returns the norm. To be called on every rank."""
        self._root_engine("clip_grad_norm_()")
        units = [m._unit for m in self.fsdp_modules(self) if m._unit is not None]
        sharded = [unit.flat.shard for unit in units if not isinstance(unit, ReplicatedUnit)]
        replicated = [unit.flat.shard for unit in units if isinstance(unit, ReplicatedUnit)]
        device = units[0].device if units else torch.device("cpu")
        return clip_grad_norm(sharded, replicated, float(max_norm), float(norm_type), self.process_group, device)

    # The whole model

    @staticmethod
    @contextmanager
    def summon_full_params(module: nn.Module, recurse: bool = True, writeback: bool = True) -> Iterator[None]:
        """Have whole parameters under their original names; with `writeback`, changes to them stay."""
        instances = FullyShardedDataParallel.fsdp_modules(module)
        with ExitStack() as stack:
            for instance in instances if recurse else instances[:1]:
                if instance._unit is not None:
                    stack.enter_context(full_state.exposed(instance.module, instance._unit, writeback))
            yield

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The full state under the original names, a copy on every rank; to be called on every rank."""
        return full_state.state_dict(self.module, self._unit, destination, prefix, keep_vars)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; inside `summon_full_params` the names are the original ones."""
        for name, p in super().named_parameters(*args, **kwargs):
            yield (name if name.endswith(full_state.FLAT_PARAM) else full_state.clean_name(name)), p

    # Looking through to the wrapped module

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        wrapped = self._modules["_fsdp_wrapped_module"]
        assert wrapped is not None
        return wrapped

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_fsdp_wrapped_module" not in self._modules:
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    @property
    def params(self) -> list[nn.Parameter]:
        """The flat parameter of this instance, as a list; empty if it manages none."""
        return [] if self._unit is None else self._unit.shards

    def check_is_root(self) -> bool:
        self._lazy_init()
        return bool(self._is_root)

    @staticmethod
    def fsdp_modules(module: nn.Module) -> list[FullyShardedDataParallel]:
        """All instances in `module`, itself included."""
        return [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
