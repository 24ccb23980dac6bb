"""Modules exempt from mixed precision: statistics such as those of a BatchNorm are lost in few bits.

An `auto_wrap_policy` makes each of them a unit of its own, in its own dtype; its inputs are cast to that, and its
outputs to the dtype that the inputs had (torch/distributed/fsdp/_common_utils.py, `_override_module_mixed_precision`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from minifsdp.tree import map_tensors, tensors_in


def exempt_modules(root: nn.Module, classes: Iterable[type[nn.Module]], ignored: Iterable[nn.Module]) -> set[nn.Module]:
    """The modules of these classes inside `root`, now with casts around their forward.

    Warns:
        which classes there are, in torch's words.
    """
    left_alone = {root, *ignored}
    exempt = {m for m in root.modules() if isinstance(m, tuple(classes)) and m not in left_alone}
    for module in exempt:
        keep_dtype(module)
    if exempt:
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped module has "
            f"submodules of type:\n{ {type(module) for module in exempt} }\n"
            "These modules will be wrapped as separate FSDP instances with mixed precision disabled.",
            stacklevel=4,
        )
    return exempt


def keep_dtype(module: nn.Module) -> None:
    """Let `module` compute in the dtype of its own parameters and buffers, and nobody around it notice."""
    own = (t.dtype for t in chain(module.parameters(), module.buffers()) if t.is_floating_point())
    dtype = next(own, torch.float32)
    came_in: list[torch.dtype] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        came_in[:] = [t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()][:1]
        return cast((args, kwargs), dtype)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return cast(output, came_in[0]) if came_in else output

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def cast(values: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors in `values`, in any nesting, in `dtype`."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, values)
