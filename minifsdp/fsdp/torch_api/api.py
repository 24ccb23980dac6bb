"""FSDP with torch's arguments and methods (torch/distributed/fsdp/fully_sharded_data_parallel.py).

This class is an adapter: its methods are implemented in the files next to this one, and in fsdp/.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minifsdp import nesting
from minifsdp.checkpoint.forms import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    StateDictSettings,
    StateDictType,
    make_settings,
)
from minifsdp.checkpoint.from_rank_0 import outline_from_rank_0
from minifsdp.checkpoint.optim_dict import StateDict, from_names, group_of, to_names
from minifsdp.checkpoint.optim_names import rekey
from minifsdp.clip_grad import clip_grad_norm
from minifsdp.comm import Group
from minifsdp.first_forward import FirstForward, tensors_of
from minifsdp.fsdp.engine import Engine
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.schedules.host import HostSchedule
from minifsdp.fsdp.schedules.prefetch import BackwardPrefetch, PrefetchSchedule
from minifsdp.fsdp.schedules.rate_limit import RateLimitedSchedule
from minifsdp.fsdp.schedules.sync import SyncSchedule
from minifsdp.fsdp.torch_api import construct
from minifsdp.fsdp.torch_api.auto_wrap import wrap_submodules
from minifsdp.fsdp.torch_api.comm_hooks import CommHook, HookReduction
from minifsdp.fsdp.torch_api.groups import find_groups
from minifsdp.fsdp.torch_api.ignored import find_ignored
from minifsdp.fsdp.torch_api.legacy import stand_in, warn_legacy, warn_optim_input
from minifsdp.fsdp.torch_api.mixed_precision import cast_buffers, computes_exactly, follow_buffers
from minifsdp.fsdp.torch_api.options import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.fsdp.torch_api.policies import NamingPolicy, WrapPolicy
from minifsdp.fsdp.torch_api.state import saving
from minifsdp.fsdp.torch_api.state.loading import register_load_hooks
from minifsdp.fsdp.torch_api.state.saving import refuse_torchs_functions
from minifsdp.fsdp.torch_api.state.summon import Summon, check, check_forward, check_none_summoned, exposed, runs
from minifsdp.fsdp.torch_api.units import MakeUnit, make_unit
from minifsdp.fsdp.torch_api.wrapped import Wrapped
from minifsdp.fsdp.unit import Unit
from minifsdp.kinds import check_dtypes, check_flags, check_kind, ours
from minifsdp.optimizer_checks import check_none_accumulated
from minifsdp.tree import cast_inputs
from minifsdp.uncompiled import stay_out_of_graphs
from minifsdp.wrapper_names import FLAT_PARAM, clean_name

MakeSchedule = Callable[[Sequence[Unit]], SyncSchedule]


class FullyShardedDataParallel(Wrapped):
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
        schedule: makes the schedule from all units, instead of the one that the prefetch and limit arguments choose.
        unit: makes a unit of its flat parameter and its plan (units.py): `FlatUnit`, or one of your own.

    Raises:
        ValueError: parameters of one unit differ in dtype, device or `requires_grad`; or one is used in two units, or
            is in another wrapper.
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
        unit: MakeUnit = FlatUnit,
    ) -> None:
        super().__init__()
        self._summoned: Summon | None = None
        self._saves = False
        self._buffer_dtypes = {}
        stay_out_of_graphs()
        check_kind("module", module, nn.Module, "a module")
        check_flags(
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
        )
        check_dtypes("mixed_precision", mixed_precision, "param_dtype", "reduce_dtype", "buffer_dtype")
        construct.warn_if_never_called(module)
        self._settings, self._first = StateDictSettings(), FirstForward(self, module)
        self._ignored = ignored = find_ignored(module, ignored_modules, ignored_states)
        nesting.refuse_nested(nesting.FSDP1, module, ignored.params, ignored.modules)
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
                "unit": unit,
            }
            wrap_submodules(module, auto_wrap_policy, ignored, FullyShardedDataParallel, inherited)
        self._fsdp_wrapped_module = module
        self._managed = construct.managed_modules(module, ignored)
        self._unit = make_unit(self, param_init_fn, groups if sync_module_states else None, unit)
        if self._unit is not None and not use_orig_params:
            self.module.register_parameter(FLAT_PARAM, self._unit.contents.shard)
        self._loading = register_load_hooks(self)
        saving.refuse_past_wrapper(self)
        nesting.keep([self, *(place.module for place in self._places)], nesting.FSDP1)

    def _lazy_init(self) -> Engine:
        """The outermost instance that runs first hooks all units to one schedule."""
        if self._engine is None:
            instances = self.fsdp_modules(self)
            construct.check_alike(instances)
            units = [instance._unit for instance in instances if instance._unit is not None]
            nesting.refuse_torchs_ddp(nesting.FSDP1, [p for unit in units for p in unit.shards])
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
            low = [instance for instance in instances if instance.mixed_precision.computes_otherwise]
            self._may_be_exact = [(each._unit, each.module) for each in low if each._unit is not None]
        return self._engine

    # Running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self._modules["_fsdp_wrapped_module"], *args, **kwargs)  # type: ignore[arg-type]

    def run(self, compute: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`compute(*args, **kwargs)` as this instance's forward: with its parameters whole, and with its hooks."""
        if self._summoned is not None:  # whole already, and to stay so
            check_forward(self)
            return compute(*args, **kwargs)
        if self._first.comes and self._is_root in (None, True):
            self._check_values()
        engine = self._engine or self._lazy_init()
        if self._is_root:
            check_none_summoned(self._instances)
            for unit, module in self._may_be_exact:
                unit.exact = computes_exactly(module)
            engine.begin()
        try:
            args, kwargs = self._cast((args, kwargs))
            if self._unit is not None:
                engine.before(self._unit, (args, kwargs))
                self._unit.view.before_forward()
            output = compute(*args, **kwargs)
            if self._unit is not None:
                engine.after(self._unit, output, self._managed)
        finally:
            if self._is_root:
                engine.end()
            elif self._unit is not None:
                engine.leave(self._unit)
        return output

    def _check_values(self) -> None:
        instances = self.fsdp_modules(self)
        names = {m: clean_name(f"{name}." if name else "") for name, m in self.named_modules()}
        units = [(names[instance], instance._unit) for instance in instances if instance._unit is not None]
        shards = {p for _, unit in units for p in unit.shards}
        tensors = {name: t for name, t in tensors_of([self]).items() if t not in shards}
        for place, unit in units:
            tensors |= {place + name: part for name, part in unit.contents.parts().items()}
        self._first.check([self], [group for each in instances for group in each._groups.outermost_first], tensors)

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
        sharded: dict[tuple[Group, ...], list[nn.Parameter]] = {}
        for unit in (m._unit for m in self.fsdp_modules(self)):
            if unit is not None and unit.plan.inside is not None:
                sharded.setdefault((unit.plan.inside,), []).extend(unit.shards)
        shards = set().union(*sharded.values())
        check_none_accumulated(shards)
        others = [p for p in self.parameters() if p not in shards]
        return clip_grad_norm(sharded, others, float(max_norm), float(norm_type), self.compute_device)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook` reduce the gradients of all units, instead of their strategy's reduction (comm_hooks.py).

        Raises:
            AssertionError: with torch's texts: not the outermost instance; a hybrid strategy; there is a hook already.
            ValueError: it is not callable.
        """
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        instances = self.fsdp_modules(self)
        for instance in instances:
            if instance.sharding_strategy.is_hybrid:
                raise AssertionError(
                    f"Communication hook is not supported for hybrid strategies: {instance.sharding_strategy}"
                )
            if instance._unit is not None and isinstance(instance._unit.delivery.reduction, HookReduction):
                raise AssertionError("A communication hook is already registered")
        if not callable(hook):
            raise ValueError(f"The communication hook must be callable but got {hook}")
        for unit in (instance._unit for instance in instances):
            if unit is not None:
                unit.delivery.reduction = HookReduction(state, hook)

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

    @classmethod
    def fsdp_modules(cls, module: nn.Module, root_only: bool = False) -> list[Self]:
        """All instances in `module`, itself included; with `root_only`, the outermost that have run as roots."""
        found = [m for m in module.modules() if isinstance(m, cls)]
        return [m for m in found if m.check_is_root()] if root_only else found

    # Whole parameters

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Have whole parameters under their original names.

        Args:
            module: a wrapped module, or one with wrapped modules inside.
            recurse: also those of the instances inside `module`. Without, these can run a forward of their own.
            writeback: changes to them stay. With NO_SHARD they do in any case.
            rank0_only: on rank 0 of the process group alone; the others only take part, and hold no memory.
            offload_to_cpu: in host memory.
            with_grads: with their gradients, and changes to these.

        Raises:
            AssertionError: inside forward or backward; or inside another `summon_full_params` that gives less.
            NotImplementedError: with torch's texts, `writeback` with `rank0_only`; `offload_to_cpu` with NO_SHARD;
                `with_grads` without `use_orig_params=True`, or with `offload_to_cpu`.
        """
        how = Summon(writeback, rank0_only, offload_to_cpu, with_grads)
        instances = FullyShardedDataParallel.fsdp_modules(module)
        if not recurse:
            instances = [m for m in instances if m is module]
        check(how, instances)
        for instance in () if recurse else instances:
            instance._lazy_init()  # else those inside would run as roots
        with ExitStack() as stack:
            for instance in instances:
                stack.enter_context(exposed(instance, how))
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """`torch.nn.Module.apply`, while the parameters of each instance are whole; what `fn` writes to them stays.

        Raises:
            ValueError: inside forward, backward or `summon_full_params`.
        """
        if runs(self) or self._summoned is not None:
            state = "FORWARD_BACKWARD" if self._summoned is None else "SUMMON_FULL_PARAMS"
            raise ValueError(
                f"expected to be in states [<TrainingState.IDLE: 1>] but current state is TrainingState.{state}: "
                "apply() summons full parameters itself, outside forward and backward"
            )
        with exposed(self, Summon(writeback=True)):
            return super().apply(fn)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As of any module, under their original names."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_name(name), buffer

    # Which state dict

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> StateDictSettings:
        """Choose what `state_dict` and `optim_state_dict` return, and `load_state_dict` takes.

        Args:
            module: a wrapped module, or one with wrapped modules inside; all of them follow.
            state_dict_type: whole parameters, a shard of each, or the flat shard.
            state_dict_config: the type's own configuration; default: its defaults.
            optim_state_dict_config: likewise.

        Returns:
            the settings so far.

        Raises:
            RuntimeError: with torch's text, a configuration is another type's.
            AssertionError: with torch's text, the instances differ so far.
        """
        settings = make_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = FullyShardedDataParallel.get_state_dict_type(module)
        for instance in FullyShardedDataParallel.fsdp_modules(module):
            instance._settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The current settings of `state_dict` and `optim_state_dict`; the defaults if nothing is wrapped.

        Raises:
            AssertionError: with torch's text, the instances in `module` differ.
        """
        found = [instance._settings for instance in FullyShardedDataParallel.fsdp_modules(module)]
        for other in found:
            if other != found[0]:
                raise AssertionError(
                    f"All FSDP modules must have the same state dict settings. Got {other} and {found[0]}. "
                    "Call set_state_dict_type for the outermost module."
                )
        return replace(found[0]) if found else StateDictSettings()

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Iterator[None]:
        """`set_state_dict_type` inside the `with`."""
        before = FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for instance in FullyShardedDataParallel.fsdp_modules(module):
                instance._settings = before

    # Saving and loading

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state under the original names, as `state_dict_type` says; to be called on every rank.

        Parameters are copies in the dtype of the shards, buffers have the dtype that they had when wrapped.
        """
        if args:
            warnings.warn("Positional args are being deprecated, use kwargs instead.", FutureWarning, stacklevel=2)
            by_name = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
            return self.state_dict(**{"destination": destination, "prefix": prefix, "keep_vars": keep_vars} | by_name)
        for before in self._state_dict_pre_hooks.values():
            before(self, prefix, keep_vars)
        state = saving.save(self, destination, prefix, keep_vars)
        saving.restore_buffers(self, state, prefix, self._settings.state_dict_config.offload_to_cpu)
        metadata = getattr(state, "_metadata", OrderedDict()).get(prefix[:-1], {})
        for after in self._state_dict_hooks.values():
            replaced = after(self, state, prefix, metadata)
            state = state if replaced is None else replaced
        return state

    def _refuse_shards(self, module: nn.Module, *_: Any) -> None:
        """A hook of the modules inside: their own state dict, past the wrapper, would be of shards."""
        unit = self._unit
        is_whole = unit is None or unit.view.shows_originals or (self._use_orig_params and unit.contents.ranks == 1)
        if not (self._saves or is_whole):
            raise RuntimeError(
                f"{type(module).__name__} inside FSDP holds shards, or a flat parameter: call state_dict() on the FSDP "
                "model, and pass it as state_dict=... to what would call it inside, such as save_pretrained()"
            )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module, from a state dict of the type that `state_dict_type` says; on every rank."""
        try:
            return super().load_state_dict(*args, **kwargs)
        finally:
            for instance in self.fsdp_modules(self):
                instance._loading.close()

    # Optimizers' state (torch/distributed/fsdp/fully_sharded_data_parallel.py)
    #
    # The state dicts have the original parameters' names for keys and fit any number of ranks, torch's FSDP, and, by
    # `rekey_optim_state_dict`, the plain model's optimizer. All but `rekey_optim_state_dict` are collective. `model` is
    # the module whose parameters the optimizer has: an instance, or a module with instances in it.

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_state_dict: StateDict | None = None, group: Group | None = None
    ) -> StateDict:
        """The optimizer's state by original names, in the form that `state_dict_type` has set.

        FULL: whole tensors on every rank, or with `rank0_only` on one. SHARDED, and as in torch LOCAL as well: values
        that are sharded along dimension 0. With `offload_to_cpu` (default) in host memory. States of parameters that
        no unit manages are whole; numbers such as `step` are kept once per parameter.

        Args:
            model: see above.
            optim: its optimizer; one whose states have a value per element or per parameter.
            optim_state_dict: default: `optim.state_dict()`.
            group: of which rank 0 is meant by `rank0_only`; default: the ranks the model is sharded over.

        Raises:
            RuntimeError: a rank has no state for a parameter of which others have it.
            ValueError: a state is neither per element nor per parameter, or a parameter is not the model's.
        """
        state_dict = optim.state_dict() if optim_state_dict is None else optim_state_dict
        return to_names(
            model, optim, state_dict, FullyShardedDataParallel.get_state_dict_type(model).optim_state_dict_config, group
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Group | None = None,
    ) -> StateDict:
        """This rank's input for `optim.load_state_dict`, from a state dict of `optim_state_dict` or torch's.

        Parameter groups are matched by the names in them, not by position. With FULL and `rank0_only`, rank 0 of
        `group` has the state dict, and the others' argument does not matter.

        Args:
            model: see above.
            optim: which is to load it.
            optim_state_dict: whole or sharded states by name; sharded ones for this number of ranks.
            is_named_optimizer: `optim`'s own state dict has names for keys.
            load_directly: load it, too.
            group: see `optim_state_dict`.

        Raises:
            KeyError: a parameter group has parameters that the model has not.
            ValueError: it has no "state", or has numbers for keys; or a shard's parameters were trained apart, for
                another number of steps or in groups that differ.
        """
        config = FullyShardedDataParallel.get_state_dict_type(model).optim_state_dict_config
        rank0_only = getattr(config, "rank0_only", False)
        source = group_of(model, group) if rank0_only else None
        saved = outline_from_rank_0(optim_state_dict, source) if source else optim_state_dict
        result = from_names(model, optim, saved, is_named_optimizer, source)
        if load_directly:
            optim.load_state_dict(result)
        return result

    # The older names, which torch keeps with a warning

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_input: Any = None, rank0_only: bool = True, group: Group | None = None
    ) -> StateDict:
        """`optim_state_dict` in FULL form, whatever is set."""
        warn_legacy("full_optim_state_dict", "optim_state_dict", optim_input)
        return to_names(model, optim, optim.state_dict(), FullOptimStateDictConfig(rank0_only=rank0_only), group)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Group | None = None) -> StateDict:
        """`optim_state_dict` in SHARDED form, whatever is set."""
        warn_legacy("sharded_optim_state_dict", "optim_state_dict")
        return to_names(model, optim, optim.state_dict(), ShardedOptimStateDictConfig(), group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict, model: nn.Module, optim_input: Any = None, optim: Optimizer | None = None
    ) -> StateDict:
        """`optim_state_dict_to_load` where every rank has the full state dict; no communication."""
        warn_legacy("shard_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        return from_names(model, optim or stand_in(optim_input), full_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Group | None = None,
    ) -> StateDict:
        """`optim_state_dict_to_load` where rank 0 has the full state dict, and sends one state after the other."""
        warn_legacy("scatter_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        source = group_of(model, group)
        saved = outline_from_rank_0(full_optim_state_dict or {}, source)
        return from_names(model, optim or stand_in(optim_input), saved, source=source)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
    ) -> StateDict:
        """`optim_state_dict_to_load` of what `sharded_optim_state_dict` has returned."""
        warn_legacy("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return from_names(model, optim, sharded_optim_state_dict)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """A state dict by names for an optimizer of the plain model, or the other way round; no communication.

        Args:
            optim_state_dict: of `optim_state_dict` or of a plain optimizer; its values are not copied.
            optim_state_key_type: by name, or by number as `torch.optim` has them.
            model: the plain model.
            optim_input: what the optimizer was made from; deprecated.
            optim: the plain model's optimizer; default: one of `model.parameters()`, with the groups of the state dict.

        Raises:
            RuntimeError: `model` has flat parameters.
            ValueError: the keys are of both kinds, or the optimizer's groups have other parameters.
        """
        warn_optim_input(optim_input)
        return rekey(optim_state_dict, optim_state_key_type, model, optim or stand_in(optim_input))
