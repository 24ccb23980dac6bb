"""The future state of an optimizer, into which a checkpoint can be loaded before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from minifsdp.checkpoint.optim_names import check_by_element
from minifsdp.optimizer_steps import parameters_of, updating

STILL = {"lr": 0.0, "weight_decay": 0.0}  # a step with these and without gradients changes nothing


def has_state(optim: Optimizer) -> bool:
    return bool(live_state(optim))


def live_state(optim: Optimizer) -> Any:
    """The optimizer's states on this rank, by parameter or shard."""
    return updating(optim).state


@contextmanager
def initialized(optim: Optimizer) -> Iterator[dict[str, Any]]:
    """The optimizer's state dict; if it has no state yet, one as after a step that changes nothing, counted as none.

    Outside the `with` the optimizer is what it was (torch/distributed/checkpoint/state_dict.py, `_init_optim_state`,
    leaves it with a step counted).
    """
    check_by_element(optim)
    live = live_state(optim)
    if live:
        yield optim.state_dict()
        return
    inner = updating(optim)  # ZeRO's: its parameters are shards, whose gradients no backward has to have reduced
    params = parameters_of(inner)
    gradients = [p.grad for p in params]
    settings = [dict(group) for group in inner.param_groups]
    try:
        for p in params:
            p.grad = torch.zeros_like(p) if p.requires_grad and p.numel() else None
        for group, given in zip(inner.param_groups, optim.param_groups, strict=True):
            group |= {key: given[key] for key in group if key in given and key not in ("params", "param_names")}
            group |= {key: as_before(group[key], value) for key, value in STILL.items() if key in group}
        step_without_hooks(inner)
    finally:
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        for group, before in zip(inner.param_groups, settings, strict=True):
            group |= before
    for state in live.values():
        if "step" in state:
            state["step"] = state["step"] * 0
    try:
        yield optim.state_dict()
    finally:
        live.clear()


def as_before(setting: Any, value: float) -> Any:
    """`value` as a tensor, where the setting is one."""
    return torch.full_like(setting, value) if isinstance(setting, Tensor) else value


def step_without_hooks(optim: Optimizer) -> None:
    """Take a step without calling the optimizer's hooks, the checks before every step, or a scheduler."""
    step: Any = type(optim).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optim)  # `hooked`: torch's Optimizer has wrapped it
