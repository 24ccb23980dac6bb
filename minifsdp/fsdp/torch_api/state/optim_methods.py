"""Those of FullyShardedDataParallel's methods that save and load an optimizer's state."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer

from minifsdp.comm import Group
from minifsdp.from_rank_0 import outline_from_rank_0
from minifsdp.fsdp.torch_api.options import FullOptimStateDictConfig, OptimStateKeyType, ShardedOptimStateDictConfig
from minifsdp.fsdp.torch_api.state.methods import StateMethods
from minifsdp.fsdp.torch_api.state.optim_dict import StateDict, from_names, group_of, to_names
from minifsdp.fsdp.torch_api.state.optim_names import rekey


class OptimStateMethods:
    """A base of FullyShardedDataParallel (torch/distributed/fsdp/fully_sharded_data_parallel.py).

    The state dicts have the original parameters' names for keys and fit any number of ranks, torch's FSDP, and, by
    `rekey_optim_state_dict`, the plain model's optimizer. All but `rekey_optim_state_dict` are collective.

    `model` is the module whose parameters the optimizer has: an instance, or a module with instances in it.
    """

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
            model, optim, state_dict, StateMethods.get_state_dict_type(model).optim_state_dict_config, group
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
        """What `optim.load_state_dict` takes on this rank, from a state dict of `optim_state_dict` or torch's.

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
        config = StateMethods.get_state_dict_type(model).optim_state_dict_config
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


def stand_in(optim_input: Any) -> Optimizer | None:
    """An optimizer that numbers the parameters as the one that was made from `optim_input`.

    It has groups of its own: torch.optim keeps a dict that it is given, and writes its defaults into it.
    """
    if optim_input is None:
        return None
    return Optimizer([dict(group) if isinstance(group, dict) else group for group in optim_input], defaults={})


def warn_legacy(old: str, new: str, optim_input: Any = None) -> None:
    warnings.warn(
        f"``FullyShardedDataParallel.{old}``is being deprecated and is replaced by ``FullyShardedDataParallel.{new}``. "
        f"``FullyShardedDataParallel.{old}`` may be removed after PyTorch 2.2.",
        FutureWarning,
        stacklevel=3,
    )
    warn_optim_input(optim_input, stacklevel=4)


def warn_optim_input(optim_input: Any, stacklevel: int = 3) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated and will be removed after PyTorch 1.13. You may remove it from "
            "your code without changing its functionality.",
            FutureWarning,
            stacklevel=stacklevel,
        )
