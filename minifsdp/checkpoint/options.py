"""Options of minifsdp.checkpoint, under torch's names (torch/distributed/checkpoint/state_dict.py)."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

from torch import nn

from minifsdp import comm
from minifsdp.checkpoint.forms import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)

AnyOptions: TypeAlias = Any
"""Ours or torch's; to import torch's takes a second."""


@dataclass
class StateDictOptions:
    """The form of a state dict that is returned or loaded; torch's own class is accepted, too.

    Attributes:
        full_state_dict: whole tensors; otherwise FSDP's are sharded.
        cpu_offload: in host memory; with `full_state_dict`, on rank 0 only.
        ignore_frozen_params: leave frozen parameters out of the model's state.
        keep_submodule_prefixes: with `submodules`, keep the names that their parameters have in the model.
        strict: refuse missing and unexpected keys.
        broadcast_from_rank0: only rank 0 passes the state, whole, and broadcasts it; `full_state_dict` must be set.
        flatten_optimizer_state_dict: the optimizer's state is one level deep: "state.<name>.exp_avg",
            "param_groups.<name>.lr".
        dsd_fqn_modifiers: not supported; for torch's signature.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"

    @property
    def on_rank_0_only(self) -> bool:
        """Whole values in host memory would be one copy per rank of it."""
        return self.full_state_dict and self.cpu_offload and comm.has_world()

    @property
    def form(self) -> StateDictSettings:
        """The same in FSDP's words."""
        if self.full_state_dict:
            how = {"offload_to_cpu": self.cpu_offload, "rank0_only": self.on_rank_0_only}
            return StateDictSettings(
                StateDictType.FULL_STATE_DICT, FullStateDictConfig(**how), FullOptimStateDictConfig(**how)
            )
        how = {"offload_to_cpu": self.cpu_offload}
        return StateDictSettings(
            StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(**how), ShardedOptimStateDictConfig(**how)
        )


def checked(model: nn.Module, given: AnyOptions) -> StateDictOptions:
    """The options, ours or torch's, if they can be followed.

    Raises:
        ValueError: they contradict each other or are not supported; or `model` is wrapped by torch's FSDP.
    """
    options = as_ours(given)
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError("full_state_dict must be True when broadcast_from_rank0 is True.")
    if options.dsd_fqn_modifiers != "_fqn_modifiers":
        raise ValueError("dsd_fqn_modifiers is not supported: rename what get_state_dict returns")
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.distributed.fsdp"):
            raise ValueError(
                f"{name or 'the model'} is torch's {type(module).__name__}: its state is saved by "
                "torch.distributed.checkpoint.state_dict"
            )
    return options


def as_ours(options: Any) -> StateDictOptions:
    """Options of torch's class as ours have them; a field that ours lack, as of another torch, must not be set."""
    if options is None:
        return StateDictOptions()
    if isinstance(options, StateDictOptions):
        return options
    names = {kind.__name__ for kind in type(options).__mro__}  # not to import torch's
    if not is_dataclass(options) or StateDictOptions.__name__ not in names:
        raise ValueError(f"options={options!r}: give a StateDictOptions")
    known = {field.name for field in fields(StateDictOptions)}
    for field in (field for field in fields(options) if field.name not in known):
        if getattr(options, field.name) != field.default:
            raise ValueError(f"StateDictOptions.{field.name} is not supported: leave it out")
    return StateDictOptions(**{name: getattr(options, name) for name in known if hasattr(options, name)})
