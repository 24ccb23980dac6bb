"""Those of FullyShardedDataParallel's methods that look at the whole model."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from minifsdp.comm import Group
from minifsdp.flat_param import Place
from minifsdp.fsdp.engine import Engine
from minifsdp.fsdp.mixed_precision import BufferDtypes
from minifsdp.fsdp.orig_params import OrigParamsUnit
from minifsdp.fsdp.torch_api.options import ShardingStrategy, StateDictSettings, StateDictType, make_settings
from minifsdp.fsdp.torch_api.state import saving
from minifsdp.fsdp.torch_api.state.names import CHECKPOINTED, clean_name
from minifsdp.fsdp.torch_api.state.summon import Summon, check, exposed, runs
from minifsdp.fsdp.whole import WholeUnit


class StateMethods(nn.Module):
    """A base of FullyShardedDataParallel. All of them are collective: every rank has to call them."""

    rank: int
    process_group: Group
    sharding_strategy: ShardingStrategy
    compute_device: torch.device
    _device_mesh: Any
    _fsdp_wrapped_module: nn.Module
    _unit: WholeUnit | None
    _engine: Engine | None
    _loading: ExitStack

    def __init__(self) -> None:
        super().__init__()
        self._settings = StateDictSettings()
        self._summoned: Summon | None = None
        self._saves = False
        self._buffer_dtypes: BufferDtypes = {}

    @property
    def module(self) -> nn.Module:
        """The wrapped module; if that is an activation checkpoint around it, what is inside."""
        wrapped = self._fsdp_wrapped_module
        inside = wrapped._modules.get(CHECKPOINTED)
        return wrapped if inside is None else inside

    @property
    def _places(self) -> list[Place]:
        """Where the unit's parameters are used; a tied one in several places."""
        return [] if self._unit is None else [place for users in self._unit.places for place in users]

    def check_is_root(self) -> bool:
        raise NotImplementedError

    def _lazy_init(self) -> Engine:
        raise NotImplementedError

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
        instances = StateMethods.fsdp_modules(module)
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
        before = StateMethods.get_state_dict_type(module)
        for instance in StateMethods.fsdp_modules(module):
            instance._settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """What `state_dict` and `optim_state_dict` return at present; the defaults if nothing is wrapped.

        Raises:
            AssertionError: with torch's text, the instances in `module` differ.
        """
        found = [instance._settings for instance in StateMethods.fsdp_modules(module)]
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
        before = StateMethods.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for instance in StateMethods.fsdp_modules(module):
                instance._settings = before

    def kind_of_state(self) -> StateDictType:
        """The type chosen for this instance. Where nothing is sharded, there is nothing but the full state."""
        chosen = self._settings.state_dict_type
        if self.sharding_strategy is ShardingStrategy.NO_SHARD and chosen is not StateDictType.FULL_STATE_DICT:
            warnings.warn(
                "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.", stacklevel=3
            )
            return StateDictType.FULL_STATE_DICT
        return chosen

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
        is_whole = unit is None or unit.is_exposed or (isinstance(unit, OrigParamsUnit) and unit.flat.ranks == 1)
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
