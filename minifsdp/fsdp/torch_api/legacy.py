"""Method names that torch keeps with a warning, and an argument that it no longer accepts."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer


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
