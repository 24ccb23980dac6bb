"""The state of a trainer, for `torch.distributed.checkpoint`, the same whatever its recipe divides."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from minifsdp.checkpoint.names import Names, StateDict
from minifsdp.checkpoint.parts import Parts
from minifsdp.checkpoint.pieces import Pieces
from minifsdp.checkpoint.state_dict import get_state_dict, set_state_dict


def get_trainer_state(model: nn.Module, optimizer: Optimizer) -> StateDict:
    """The state of a model and its optimizer to give dcp, to save or to load into; a collective call.

        dcp.save(get_trainer_state(trainer.model, trainer.optimizer), checkpoint_id=path)

    Names and shapes are the plain model's, in a pipeline, too, where ranks have values of different names. A trainer of
    any recipe and on any number of ranks reads what another has saved. The optimizer's settings are left out: they are
    not of a parameter, and who builds a trainer gives them.

    Args:
        model: of a trainer: in a pipeline the list of this rank's stages.
        optimizer: its.

    Returns:
        {"model": {name: value}, "optimizer": {"state": {name: {key: value}}}}; sharded values are `Pieces`, which share
        memory with the model where it has DTensors.
    """
    of_model, of_optimizer = get_state_dict(model, optimizer)
    parts = Parts(model, Names(model))

    def given(name: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        is_like = name in parts.tensors and value.shape == parts.tensors[name].shape
        return Pieces(value, parts.plain_shape(name) if is_like else value.shape)

    return {
        "model": {_whole_name(model, name): given(name, value) for name, value in of_model.items()},
        "optimizer": {
            "state": {
                _whole_name(model, name): {key: given(name, value) for key, value in state.items()}
                for name, state in of_optimizer["state"].items()
            }
        },
    }


def set_trainer_state(model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
    """Load what `get_trainer_state` has returned for this trainer and dcp has filled; a collective call."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    states = state["optimizer"]["state"]
    of_optimizer["state"] = {
        name: {key: _filled(value) for key, value in states[_whole_name(model, name)].items()}
        for name in of_optimizer["state"]
    }
    set_state_dict(
        model,
        optimizer,
        model_state_dict={name: _filled(state["model"][_whole_name(model, name)]) for name in of_model},
        optim_state_dict=of_optimizer,
    )


def _whole_name(model: nn.Module, name: str) -> str:
    """Without the number of a stage on this rank: stages name their parameters as the model does."""
    return name.partition(".")[2] if isinstance(model, nn.ModuleList) else name


def _filled(value: Any) -> Any:
    return value.value if isinstance(value, Pieces) else value
