"""Models whose parameters are DTensors, which torch's own functions gather and load.

This module adds the missing parts: whole tensors have the shapes of the plain model, and any of them can be sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from torch import nn

from minifsdp.checkpoint import whole
from minifsdp.checkpoint.names import Names
from minifsdp.checkpoint.options import AnyOptions, checked
from minifsdp.ddp import DistributedDataParallel

F = TypeVar("F", bound=Callable[..., Any])


def left_to_torch_if_dtensors(function: F) -> F:
    """Let torch's function of the same name serve a model that FSDP2 or tensor parallelism has sharded."""

    @wraps(function)
    def called(model: nn.Module, *args: Any, options: AnyOptions = None, **kwargs: Any) -> Any:
        if not _are_dtensors(model):
            return function(model, *args, options=options, **kwargs)
        from torch.distributed.checkpoint import state_dict as torchs  # takes a second to import

        ours = checked(model, options)
        call = signature(function).bind(model, *args, **kwargs).arguments
        if isinstance(model, DistributedDataParallel):
            call["model"] = model = model.module
        named = {name: p for p, names in Names(model).of_parameters.items() for name in names}
        for state in call.keys() & {"model_state_dict", "optim_state_dict"}:
            call[state] = whole.from_plain(named, model, call[state])
            if ours.full_state_dict and not ours.broadcast_from_rank0:
                call[state] = whole.cut(named, call[state])
                ours = replace(ours, full_state_dict=False)
        theirs = torchs.StateDictOptions(**{field.name: getattr(ours, field.name) for field in fields(ours)})
        result = getattr(torchs, function.__name__)(**call, options=theirs)
        return (
            result if call.keys() & {"model_state_dict", "optim_state_dict"} else whole.to_plain(named, model, result)
        )

    return called  # type: ignore[return-value]


def _are_dtensors(model: nn.Module) -> bool:
    return any(hasattr(p, "placements") for p in model.parameters())
