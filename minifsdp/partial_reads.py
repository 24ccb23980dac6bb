"""Numbers that an optimizer reads of DTensors: of a sum that is pending, it would get this rank's part.

The norm of shards is pending on all ranks until something needs it, and DTensor's operators then reduce it. `item()`,
`float()` and `bool()` do not: each rank gets the norm of its own part, and updates with it, without an error. An
optimizer's step that reads such a number is refused. Other code may want the number of its rank.

torch asks a table of functions before it runs an operator on a DTensor (draws.py).
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from minifsdp.private.dtensor import dtensor_handlers, read_number, without_handler


@cache
def refuse_partial_reads() -> None:
    """From now on no optimizer can read a number of a DTensor of which each rank has its own part."""
    dtensor_handlers()[read_number] = _read


def _read(operator: Any, args: Any, kwargs: Any) -> Any:
    """
    Raises:
        ValueError: an optimizer reads a rank's part; all ranks raise.
    """
    x: DTensor = args[0]
    is_part = any(not each.is_replicate() and x.device_mesh.size(i) > 1 for i, each in enumerate(x.placements))
    optimizer = _reader() if is_part else None
    if optimizer is not None:
        raise ValueError(
            f"a method or hook of {type(optimizer).__name__} reads a number of a DTensor, by item(), float(), bool() "
            "or as an alpha, and would get only this rank's part: write p.grad.norm().full_tensor().item(), for "
            "instance, or to_local() if you need the part"
        )
    return without_handler(_read, operator, args, kwargs)


def _reader() -> Optimizer | None:
    """The optimizer with a method that is running."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, Optimizer):
            return first
        frame = frame.f_back
    return None
