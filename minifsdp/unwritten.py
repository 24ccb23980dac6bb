"""Memory that has not been initialized: its old content could pass for values without any error."""

from __future__ import annotations

import torch
from torch import Tensor


def mark_unwritten(tensor: Tensor) -> Tensor:
    """Fill a tensor with a value that no initialization uses."""
    return tensor.fill_(_stand_in(tensor.dtype) or 0)


def is_unwritten(tensor: Tensor) -> bool:
    """True if any element has not been written since `mark_unwritten`; the host waits for the answer.

    It takes no memory, because the minimum of numbers that include a NaN is NaN.
    """
    value = _stand_in(tensor.dtype)
    if value is None or not tensor.numel():
        return False
    least = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).amin().item()
    return least == value or least != least


def check_written(tensors: dict[str, Tensor | None]) -> None:
    """Check that all of the tensors have values.

    Raises:
        RuntimeError: some have not; the error names them.
    """
    if names := [name for name, tensor in tensors.items() if tensor is not None and is_unwritten(tensor)]:
        raise RuntimeError(
            f"nothing has initialized {', '.join(names)}, which came from the meta device: have each module's "
            "reset_parameters() write all parameters and buffers of its own, or pass param_init_fn."
        )


def _stand_in(dtype: torch.dtype) -> float | int | None:
    """None: a dtype in which every value may be meant."""
    if dtype.itemsize == 1:
        return None
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min if dtype in (torch.int32, torch.int64) else None
