"""Calls of torch.distributed's own functions, counted by wrapping them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import cloudpickle
import torch
import torch.distributed as dist

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NAMES = [  # of everything that sends; two have another name as well, from torch 2.12 on
    name
    for name in dir(dist)
    if name.startswith(
        ("all_", "reduce", "broadcast", "gather", "scatter", "isend", "irecv", "send", "recv", "barrier")
    )
    and callable(getattr(dist, name))
]
SAME = {  # their newer names
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
GATHER, REDUCTION = "all_gather_into_tensor", "reduce_scatter_tensor"


@contextmanager
def torchs_calls() -> Iterator[list[tuple[str, int]]]:
    """Names, and bytes of the largest tensor; a call that torch makes inside another does not count."""
    found: list[tuple[str, int]] = []
    inside = [False]

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return function(*args, **kwargs)
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            found.append((SAME.get(name, name), max((t.nbytes for t in tensors), default=0)))
            inside[0] = True
            try:
                return function(*args, **kwargs)
            finally:
                inside[0] = False

        return call

    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(patch.object(dist, name, counting(name, getattr(dist, name))))
        yield found
