"""Models whose parameters are DTensors: torch's own functions know how to gather, cut and load those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from torch import nn

from minifsdp.checkpoint.options import AnyOptions, checked

F = TypeVar("F", bound=Callable[..., Any])


def left_to_torch_if_dtensors(function: F) -> F:
    """Let torch's function of the same name serve a model that FSDP2 or tensor parallelism has sharded."""

    @wraps(function)
    def called(model: nn.Module, *args: Any, options: AnyOptions = None, **kwargs: Any) -> Any:
        if not _are_dtensors(model):
            return function(model, *args, options=options, **kwargs)
        from torch.distributed.checkpoint import state_dict as torchs  # takes a second to import

        ours = checked(model, options)
        theirs = torchs.StateDictOptions(**{field.name: getattr(ours, field.name) for field in fields(ours)})
        return getattr(torchs, function.__name__)(model, *args, options=theirs, **kwargs)

    return called  # type: ignore[return-value]


def _are_dtensors(model: nn.Module) -> bool:
    return any(hasattr(p, "placements") for p in model.parameters())
