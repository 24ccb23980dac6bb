"""The functions, in torch's order of arguments (torch/distributed/checkpoint/state_dict.py)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from minifsdp import comm
from minifsdp.checkpoint.agree import check_given, check_settings, groups_sharing, same_errors
from minifsdp.checkpoint.begin import initialized
from minifsdp.checkpoint.forms import OptimStateKeyType
from minifsdp.checkpoint.from_rank_0 import outline_from_rank_0
from minifsdp.checkpoint.loading import check_has_values, device_for, load, materialize, received
from minifsdp.checkpoint.names import Names, StateDict, flattened, rename_groups, unflattened
from minifsdp.checkpoint.optim_dict import from_names, to_names
from minifsdp.checkpoint.optim_names import rekey
from minifsdp.checkpoint.options import AnyOptions, StateDictOptions, checked
from minifsdp.checkpoint.parts import Parts
from minifsdp.checkpoint.saving import agreed_states, check_frozen, check_owners
from minifsdp.checkpoint.sharded_values import copied, is_dtensor, storage_of
from minifsdp.checkpoint.units import wrappers_in
from minifsdp.device import compute_device
from minifsdp.local_parts import local_of
from minifsdp.private import ShardedTensor

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


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: AnyOptions = None
) -> StateDict:
    """The model's state; whole values and those of FSDP are copies, others share the model's memory.

    Args:
        model: the outermost module.
        submodules: only what is in these; deprecated in torch: choose by name from what is returned.
        options: see `StateDictOptions`.
    """
    options = checked(model, options)
    names = Names(model)
    if options.ignore_frozen_params:
        check_frozen(names, groups_sharing(model))
    with state_dict_form(model, options):
        state: StateDict = {names.outside(key): value for key, value in model.state_dict().items()}
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
    return exported(state, model, names, options)


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

    Raises:
        RuntimeError: ranks have different states of parameters that they share (saving.py). All of them raise it.
    """
    options, optimizers = checked(model, options), as_tuple(optimizers)
    if not optimizers:
        raise RuntimeError("Optimizers are not passed in but optim_only is set to True.")
    names = Names(model)
    result: StateDict = {"state": {}, "param_groups": []}
    rank0_only, config = options.on_rank_0_only, options.form.optim_state_dict_config
    with agreed_states(model, names, names.in_order(optimizers)) as of_each:
        group = comm.world() if rank0_only else None
        named = [to_names(model, optim, state_dict, config, group) for optim, state_dict in of_each.items()]
    for part in named:
        if part:
            result["state"] |= {names.outside(name): state for name, state in part["state"].items()}
            result["param_groups"] += rename_groups(part["param_groups"], names.outside)
    if rank0_only and comm.world().rank() > 0:
        return {}
    if options.full_state_dict:
        parts = Parts(model, names)
        result["state"] = {name: parts.whole(name, state) for name, state in result["state"].items()}
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


def set_model_state_dict(model: nn.Module, model_state_dict: StateDict, *, options: AnyOptions = None) -> Any:
    """Load a model's state: whole values, or sharded ones for this number of ranks.

    With `broadcast_from_rank0` each rank keeps its part of a value and no more than one whole value at a time.
    Parameters and buffers on the meta device get memory, with `cpu_offload` in host memory.

    Returns:
        `missing_keys` and `unexpected_keys`, as `torch.nn.Module.load_state_dict`.

    Raises:
        RuntimeError: there is nothing to load; values have other shapes; ranks that share the model have been given
            different names or forms; or, if `strict`, keys are missing or unexpected. All its ranks raise the same.
    """
    options = checked(model, options)
    names = Names(model)
    parts, state = Parts(model, names), names.of_modules(model_state_dict)
    source = comm.world() if options.broadcast_from_rank0 else None
    groups = groups_sharing(model) if source is None else [source]
    if source is not None:
        state = outline_from_rank_0(state, source)
    with same_errors(groups):
        if not (state or options.broadcast_from_rank0) and options.strict:
            raise RuntimeError(NOTHING.format("model"))
        check_has_values(model_state_dict)
    if source is None:
        check_given(parts, state, parts.names, groups)
    materialize(model, parts, state, device_for(model, options.cpu_offload))
    if source is not None:
        device = compute_device(None, model.parameters(), source)
        state = received(state, source, device, lambda path, value: parts.on_arrival(".".join(path), value))
    with same_errors(groups), state_dict_form(model, options):
        return load(model, names, {name: parts.part(name, value) for name, value in state.items()}, options.strict)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: StateDict,
    *,
    options: AnyOptions = None,
) -> None:
    """Load the optimizers' state, each its part of it; not between a backward and its step.

    Raises:
        RuntimeError: there is nothing to load; ranks that share the model have been given different states; or, if
            `strict`, a trained parameter has no state where others have. All ranks of the model raise the same.
        ValueError: a state for one of torch's optimizers has another shape than its parameter. All ranks raise it.
    """
    options, optimizers = checked(model, options), as_tuple(optimizers)
    names = Names(model)
    parts = Parts(model, names)
    source = comm.world() if options.broadcast_from_rank0 else None
    groups = groups_sharing(model) if source is None else [source]
    with same_errors(groups):
        state = numbers_to_names(model, optimizers, optim_state_dict)
    check_owners(names, names.in_order(optimizers), groups)

    def keep(path: tuple[str, ...], value: Any) -> Any:
        found = names.parsed(".".join(path))
        return parts.state_on_arrival(found[1], found[2][-1], value) if found and found[0] == "state" else value

    if source is not None:
        outline = outline_from_rank_0(state, source)
        state = received(outline, source, compute_device(None, model.parameters(), source), keep)
    with same_errors(groups):
        if not state:
            raise RuntimeError(NOTHING.format("optimizer"))
        if "state" not in state:
            state = unflattened(state, optimizers, names)
        if lacking := {"state", "param_groups"} - state.keys():
            raise KeyError(f"the optimizer's state dict has no {' and no '.join(sorted(lacking))}")
    if source is None:
        check_given(parts, state["state"], names.known, groups)
        check_settings(state["param_groups"], names.known, groups)
    with same_errors(groups):
        warn_of_no_state(state, optimizers)
        of_each = {optim: names.of_optimizer(optim, state, options.strict) for optim in names.in_order(optimizers)}
        for optim, part in of_each.items():
            parts.check_shapes(optim, {names.outside(name): state for name, state in part["state"].items()})
    with same_errors(groups):
        for optim, part in of_each.items():
            mine = {name: parts.state_part(names.outside(name), part["state"][name]) for name in sorted(part["state"])}
            optim.load_state_dict(from_names(model, optim, part | {"state": mine}))


NOTHING = (
    "The option indicates that model state_dict is required to save or load, but {} state_dict is empty. "
    "If only rank 0 has it, pass broadcast_from_rank0=True."
)


def as_tuple(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


def warn_of_no_state(state: StateDict, optimizers: tuple[Optimizer, ...]) -> None:
    """Warn if the optimizers have states and the checkpoint has none."""
    for optim in optimizers if not state["state"] else ():
        with initialized(optim) as fresh:
            if fresh["state"]:
                warnings.warn(
                    f"the checkpoint has no state for {type(optim).__name__}, which starts anew: let dcp.load fill "
                    "the dict of get_optimizer_state_dict(), not that of optimizer.state_dict()",
                    stacklevel=3,
                )


def numbers_to_names(model: nn.Module, optimizers: tuple[Optimizer, ...], state_dict: StateDict) -> StateDict:
    """The state dict; of one by number, as `Optimizer.state_dict` returns, the same by name."""
    states = state_dict.get("state")
    if not states or not all(isinstance(key, int) for key in states) or len(optimizers) != 1:
        return state_dict
    return rekey(state_dict, OptimStateKeyType.PARAM_NAME, model, optimizers[0])


def exported(state: StateDict, model: nn.Module, names: Names, options: StateDictOptions) -> StateDict:
    """The model's state in the form that the options ask for, on this rank perhaps none."""
    parts = Parts(model, names)
    live = {storage_of(local_of(tensor)) for tensor in [*model.parameters(), *model.buffers()]}
    kept = not (options.on_rank_0_only and comm.world().rank() > 0)
    result: StateDict = {}
    for name, value in state.items():
        is_gathered = options.full_state_dict and is_dtensor(value)
        found = parts.whole(name, value) if is_gathered else value  # also on ranks that do not keep it
        if kept and isinstance(found, Tensor) and not isinstance(found, ShardedTensor):
            is_live = storage_of(local_of(found)) in live
            if (is_gathered and is_live) or (options.cpu_offload and (is_live or found.device.type != "cpu")):
                found = copied(found, options.cpu_offload)
        if kept:
            result[name] = found
    return result


@contextmanager
def state_dict_form(model: nn.Module, options: StateDictOptions) -> Iterator[None]:
    """Set the state dict type of the wrappers in `model` inside the `with`."""
    kind, config = options.form.state_dict_type, options.form.state_dict_config
    with warnings.catch_warnings(), ExitStack() as stack:
        for wrapper in wrappers_in(model)[:1]:
            stack.enter_context(wrapper.state_dict_type(model, kind, config))
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")  # whole values are a form of sharded ones
        yield
