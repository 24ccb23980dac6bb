"""Weights that are a stack of matrices: the evidence is what a model does with the layer's output.

Cut as a single matrix, a stack of queries, keys and values gives one rank the queries and another the values. A model
that takes a rank's part of the output apart, as it would the whole, then computes something else in silence. Names and
shapes show nothing of it. So in a layer's first forward the output is a `Columns`, which follows the sharded dimension
through views, and cannot be taken apart along it.
"""

from __future__ import annotations

from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from minifsdp.calls import Label
from minifsdp.private import DisableTorchFunctionSubclass

# By the name of an operator, the position of its argument `dim`, and the default.
_TAKING_APART = {"chunk": (2, 0), "split": (2, 0), "tensor_split": (2, 0), "unbind": (1, 0), "select": (1, 0)}
_TAKING_APART |= {"narrow": (1, 0), "glu": (1, -1)}
_PERMUTING = {"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"}
_RESHAPING = {"view", "reshape", "unflatten", "contiguous", "clone"}

_seen: WeakSet[nn.Module] = WeakSet()


def watched(y: Tensor, module: nn.Module, label: Label | None) -> Tensor:
    """A column-parallel layer's output, in its first forward as a `Columns`."""
    if module in _seen:
        return y
    _seen.add(module)
    return _columns(y, y.ndim - 1, label.what if label else type(module).__name__)


class Columns(Tensor):
    """A rank's part of an output; only views of all of it are `Columns`, too.

    Attributes:
        at: the dimension that is sharded.
        layer: whose output it is.
    """

    at: int | None
    layer: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with DisableTorchFunctionSubclass():
            x: Any = args[0] if args else None
            at = getattr(x, "at", None) if isinstance(x, Columns) else None
            if at is None:
                return func(*args, **kwargs)
            if x.shape[at] > 1 and _takes_apart(name, x, at, args, kwargs):
                raise ValueError(
                    f"{x.layer} looks like a stack of matrices, each of which must be sharded, because its output is "
                    "taken apart: give their number, as in ColwiseParallel(parts=3); parts=1 if it is one matrix"
                )
            result = func(*args, **kwargs)
            at = _followed(name, func, x, at, args, kwargs, result)
            return result if at is None else _columns(result, at, x.layer)


def _columns(y: Tensor, at: int, layer: str) -> Tensor:
    columns = y.as_subclass(Columns)
    columns.at, columns.layer = at, layer
    return columns


def _takes_apart(name: str, x: Tensor, at: int, args: Any, kwargs: Any) -> bool:
    if name == "__iter__":
        return at == 0
    if name == "__getitem__":
        return _is_partial(args[1], x.ndim, at)
    if name not in _TAKING_APART:
        return False
    position, default = _TAKING_APART[name]
    dim = kwargs.get("dim", args[position] if len(args) > position else default)
    size = next(iter([*args[1:2], *kwargs.values()]), None)
    return bool(dim % x.ndim == at and not (name == "chunk" and size == 1))


def _is_partial(index: Any, ndim: int, at: int) -> bool:
    """True if an index selects one element, or a contiguous part, of the dimension `at`."""
    entries = [each for each in (index if isinstance(index, tuple) else (index,)) if each is not None]
    if not all(each is Ellipsis or isinstance(each, int | slice) for each in entries):
        return False  # tensors: which elements they select is not known
    left = [slice(None)] * (ndim - len(entries) + (Ellipsis in entries))
    first = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    chosen = [*entries[:first], *left, *entries[first + 1 :]][at]
    return isinstance(chosen, int) or (chosen.step in (None, 1) and chosen != slice(None))


def _followed(name: str, func: Any, x: Tensor, at: int, args: Any, kwargs: Any, result: Any) -> int | None:
    """The dimension of a view `result` that was `at` in `x`; None: it is no view of all of it."""
    if name in _PERMUTING:  # a tensor whose lengths all differ shows where the dimension goes
        lengths = torch.empty([2 + dim for dim in range(x.ndim)], device="meta")
        return list(func(lengths, *args[1:], **kwargs).shape).index(2 + at)
    if name not in _RESHAPING:
        return None
    before = prod(x.shape[:at])
    found = (dim for dim in range(result.ndim) if prod(result.shape[:dim]) == before and (dim == at or before > 1))
    return next(found, None)
