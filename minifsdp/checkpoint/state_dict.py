"""The functions, in torch's order of arguments (torch/distributed/checkpoint/state_dict.py)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from minifsdp import comm
from minifsdp.checkpoint.begin import initialized
from minifsdp.checkpoint.dtensors import left_to_torch_if_dtensors
from minifsdp.checkpoint.names import Names, StateDict, flattened, rename_groups, unflattened
from minifsdp.checkpoint.options import AnyOptions, StateDictOptions, checked
from minifsdp.device import compute_device
from minifsdp.from_rank_0 import outline_from_rank_0, receive
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp.torch_api.state.optim_dict import from_names, to_names
from minifsdp.sharded_values import copied, is_sharded, storage_of

Optimizers = Optimizer | Iterable[Optimizer]


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: AnyOptions = None,
) -> tuple[StateDict, StateDict]:
    """The state of a model and of its optimizers: `get_model_state_dict` and `get_optimizer_state_dict`."""
    optimizers = as_tuple(optimizers)
    model_state = get_model_state_dict(model, submodules=submodules, options=options)
    return model_state, get_optimizer_state_dict(model, optimizers, options=options) if optimizers else {}


@left_to_torch_if_dtensors
def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: AnyOptions = None
) -> StateDict:
    """The model's state; parameters of FSDP are copies, others are not.

    Args:
        model: the outermost module.
        submodules: only what is in these; deprecated in torch: choose by name from what is returned.
        options: see `StateDictOptions`.
    """
    options = checked(model, options)
    names = Names(model)
    with state_dict_form(model, options):
        state = {names.outside(key): value for key, value in model.state_dict().items()}
    if submodules:
        warnings.warn(
            "Getting submodules only model/optim state_dict is deprecated and will be removed in 2.5. This feature can "
            "be achieved by manually filtering out the state_dict returned from get_state_dict.",
            FutureWarning,
            stacklevel=2,
        )
        state = names.of_submodules(submodules, state, options.keep_submodule_prefixes)
    if options.ignore_frozen_params:
        for p, of_p in names.of_parameters.items():
            for name in of_p if not p.requires_grad else ():
                state.pop(name, None)
    if options.on_rank_0_only and comm.world().rank() > 0:
        return {}
    return on_host(state, model) if options.cpu_offload else state


@left_to_torch_if_dtensors
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: AnyOptions = None,
) -> StateDict:
    """The optimizers' state as one, copied: {"state": {name: {key: value}}, "param_groups": [...]}.

    An optimizer without state, which has not stepped yet, is described as it would be after a step that changes
    nothing, so that there is something to load into; it stays as it is. What is saved then is what training starts
    with, for optimizers whose state starts at zero (not NAdam, ASGD and Rprop).

    Args:
        model: the outermost module.
        optimizers: those of its parameters, or one of them.
        submodules: has no effect, as in torch.
        options: see `StateDictOptions`.
    """
    options, optimizers = checked(model, options), as_tuple(optimizers)
    if not optimizers:
        raise RuntimeError("Optimizers are not passed in but optim_only is set to True.")
    names = Names(model)
    result: StateDict = {"state": {}, "param_groups": []}
    rank0_only, config = options.on_rank_0_only, options.form.optim_state_dict_config
    for optim in names.in_order(optimizers):
        with initialized(optim) as state_dict:
            part = to_names(model, optim, state_dict, config, comm.world() if rank0_only else None)
        if part:
            result["state"] |= {names.outside(name): state for name, state in part["state"].items()}
            result["param_groups"] += rename_groups(part["param_groups"], names.outside)
    if rank0_only and comm.world().rank() > 0:
        return {}
    return flattened(result) if options.flatten_optimizer_state_dict else result


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: StateDict,
    optim_state_dict: StateDict,
    options: AnyOptions = None,
) -> Any:
    """Load what `get_state_dict` returns; not between a backward and its step.

    Returns:
        `missing_keys` and `unexpected_keys` of the model's state.
    """
    optimizers = as_tuple(optimizers)
    if optimizers:
        set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)


@left_to_torch_if_dtensors
def set_model_state_dict(model: nn.Module, model_state_dict: StateDict, *, options: AnyOptions = None) -> Any:
    """Load a model's state: whole values, or sharded ones for this number of ranks.

    With `broadcast_from_rank0` every rank gets all values; to have less than the whole model on a device, save sharded.

    Returns:
        `missing_keys` and `unexpected_keys`, as `torch.nn.Module.load_state_dict`.

    Raises:
        RuntimeError: there is nothing to load; or, if `strict`, keys are missing or unexpected.
    """
    options = checked(model, options)
    names = Names(model)
    if options.broadcast_from_rank0:
        world = comm.world()
        device = compute_device(None, model.parameters(), world)
        outline = outline_from_rank_0(model_state_dict, world)
        model_state_dict = {name: receive(value, world, device) for name, value in outline.items()}
    elif not model_state_dict and options.strict:
        raise RuntimeError(
            "The option indicates that model state_dict is required to save or load, but model state_dict is empty. "
            "If only rank 0 has it, pass broadcast_from_rank0=True."
        )
    with state_dict_form(model, options):
        state = {names.inside(name): value for name, value in model_state_dict.items()}
        return model.load_state_dict(state, strict=options.strict)


@left_to_torch_if_dtensors
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: StateDict,
    *,
    options: AnyOptions = None,
) -> None:
    """Load the optimizers' state, each its part of it; not between a backward and its step.

    Raises:
        RuntimeError: there is nothing to load; or, if `strict`, a trained parameter has no state where others have.
    """
    options, optimizers = checked(model, options), as_tuple(optimizers)
    names = Names(model)
    source = comm.world() if options.broadcast_from_rank0 else None
    if source is not None:
        optim_state_dict = dict(outline_from_rank_0(optim_state_dict, source))
    if not optim_state_dict:
        raise RuntimeError(
            "The option indicates that model state_dict is required to save, or load but optim state_dict is empty. "
            "If only rank 0 has it, pass broadcast_from_rank0=True."
        )
    if "state" not in optim_state_dict:
        optim_state_dict = unflattened(optim_state_dict, optimizers, names)
    for optim in names.in_order(optimizers):
        part = names.of_optimizer(optim, optim_state_dict, options.strict)
        optim.load_state_dict(from_names(model, optim, part, source=source))


def as_tuple(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


def on_host(state: StateDict, model: nn.Module) -> StateDict:
    """The state in host memory, and nothing of it the model's own."""
    live = {storage_of(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    return {
        name: copied(value, to_cpu=True)
        if isinstance(value, Tensor)
        and not is_sharded(value)
        and (value.device.type != "cpu" or storage_of(value) in live)
        else value
        for name, value in state.items()
    }


@contextmanager
def state_dict_form(model: nn.Module, options: StateDictOptions) -> Iterator[None]:
    """Set the state dict type of the FSDP instances in `model` inside the `with`."""
    kind, config = options.form.state_dict_type, options.form.state_dict_config
    with warnings.catch_warnings(), FullyShardedDataParallel.state_dict_type(model, kind, config):
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")  # whole values are a form of sharded ones
        yield
