"""Boundaries between two stages: shapes and dtypes of the tensors that pass, and whether they need a gradient.

The receiver has to know them to allocate. The first micro-batch decides: its description goes ahead of its tensors, as
a message of its own, and later micro-batches have to agree with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from minifsdp.private import is_traceable_wrapper_subclass

HEADER = 256  # int64 numbers
_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.uint16, torch.uint32, torch.uint64),
]


class Passed(NamedTuple):
    """One tensor of a micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Boundary: TypeAlias = tuple[Passed, ...]


def boundary_of(tensors: Sequence[Tensor]) -> Boundary:
    """
    Raises:
        TypeError: a tensor cannot be sent as it is.
    """
    for t in tensors:
        if is_traceable_wrapper_subclass(t) or t.layout is not torch.strided or t.is_nested or t.dtype not in _DTYPES:
            kind = f"{t.dtype}, {t.layout}" if type(t) is Tensor else type(t).__name__
            raise TypeError(
                f"a stage passes a tensor that cannot be sent ({kind}): pass dense ones, of a DTensor its part"
            )
    return tuple(Passed(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def agrees(boundary: Boundary, tensors: Sequence[Tensor]) -> bool:
    """True if these tensors have the shapes, dtypes and gradients of a boundary."""
    for (shape, dtype, needs_grad), t in zip(boundary, tensors, strict=False):
        if t.shape != shape or t.dtype is not dtype or t.requires_grad != needs_grad:
            return False
    return len(boundary) == len(tensors)


def in_words(boundary: Boundary) -> str:
    return ", ".join(map(str, boundary)) or "no tensor"


def to_header(boundary: Boundary) -> Tensor:
    """As numbers: how many tensors, and of each its dtype, whether it needs a gradient, and its shape.

    Raises:
        ValueError: they do not fit.
    """
    numbers = [len(boundary)]
    for shape, dtype, needs_grad in boundary:
        numbers += [_DTYPES.index(dtype), int(needs_grad), len(shape), *shape]
    if len(numbers) > HEADER:
        raise ValueError(f"{len(boundary)} tensors pass between two stages: pass fewer, {HEADER} numbers describe them")
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)))


def from_header(header: Tensor) -> Boundary:
    numbers = iter(header.tolist())
    found = []
    for _ in range(next(numbers)):
        dtype, needs_grad, ndim = next(numbers), next(numbers), next(numbers)
        found.append(Passed(tuple(next(numbers) for _ in range(ndim)), _DTYPES[dtype], bool(needs_grad)))
    return tuple(found)
