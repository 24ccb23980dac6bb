"""Memory for a stage alone: a model is made without any, loses the layers of other stages, and then gets its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minifsdp.following import marking
from minifsdp.unwritten import check_written, mark_unwritten

M = TypeVar("M", bound=nn.Module)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have no memory for parameters. Buffers, which no checkpoint may have, get their values."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, p: nn.Parameter | None) -> None:
        on_meta = p if p is None or p.is_meta else nn.Parameter(p.to("meta"), p.requires_grad)
        register(module, name, on_meta)

    with patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


@torch.no_grad()
def materialize(module: M, where: torch.device | str, values: Mapping[str, Tensor] | Callable[[nn.Module], Any]) -> M:
    """Give a stage's parameters memory and values, and move its buffers.

    Args:
        module: with parameters on "meta"; the others are moved.
        where: the rank's device.
        values: a state dict of the whole model, perhaps mapped from a file; or a function that initializes what is a
            module's own, called on each module that has a parameter, or a buffer that was on "meta".

    Raises:
        ValueError: the state dict lacks parameters; names them.
        RuntimeError: parameters or buffers have no values afterwards; names them.
    """
    moved: dict[Tensor, Any] = {}
    todo = [m for m in module.modules() if [*m.parameters(False)] or any(b.is_meta for b in m.buffers(False))]
    for each in module.modules():
        for table in (each._parameters, each._buffers):
            for name, t in table.items():
                if t is not None and t not in moved:
                    here = mark_unwritten(torch.empty_like(t, device=where)) if t.is_meta else t.to(where)
                    moved[t] = nn.Parameter(here, t.requires_grad) if isinstance(t, nn.Parameter) else here
                if t is not None:
                    table[name] = moved[t]
    if callable(values):
        with marking():
            for each in todo:
                values(each)
    else:
        left = [name for name in module.state_dict() if name not in values]
        if left:
            raise ValueError(f"the state dict lacks {', '.join(left)}: is it the whole model's?")
        module.load_state_dict({name: values[name] for name in module.state_dict()})
    check_written(
        {**dict(module.named_parameters()), **dict(module.named_buffers())},
        "a state dict has no non-persistent buffers. Build the model inside parameters_on_meta(), where buffers get "
        "their values, or pass a function that writes them",
    )
    return module
