"""Weights that are a stack of matrices: the evidence is what a model does with the layer's output.

Cut as a single matrix, a stack of queries, keys and values gives one rank the queries and another the values. A model
that takes a rank's part of the output apart, as it would the whole, then computes something else in silence. Names and
shapes show nothing of it. So in a layer's first forward the output is a `Columns`, which follows the sharded dimension
through views and elementwise functions, and cannot be taken apart along it.
"""

from __future__ import annotations

from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from minifsdp.calls import Label
from minifsdp.private import DisableTorchFunctionSubclass, FakeTensor

# By the name of an operator, the position of its argument `dim`, and the default.
_TAKING_APART = {"chunk": (2, 0), "split": (2, 0), "tensor_split": (2, 0), "unbind": (1, 0), "select": (1, 0)}
_TAKING_APART |= {"split_with_sizes": (2, 0), "narrow": (1, 0), "glu": (1, -1), "unfold": (1, 0)}
# By the name of an operator, the positions of its arguments `dim` and `index`.
_TAKING_BY_INDEX = {"index_select": (1, 2), "gather": (1, 2), "take_along_dim": (2, 1)}
_SPLITTING_AT = {"hsplit": 1, "vsplit": 0, "dsplit": 2}
_PERMUTING = {"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT"}
_RESHAPING = {"view", "reshape", "unflatten", "contiguous", "clone"}
_ELEMENTWISE = {"add", "sub", "mul", "div", "__rsub__", "__rdiv__", "pow", "neg", "clamp", "where", "masked_fill"}
_ELEMENTWISE |= {"relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "elu", "leaky_relu", "exp", "square", "dropout"}
_ELEMENTWISE |= {"to", "type", "type_as", "float", "double", "half", "bfloat16", "detach", "data"}

_seen: WeakSet[nn.Module] = WeakSet()


def watched(y: Tensor, module: nn.Module, label: Label | None) -> Tensor:
    """A column-parallel layer's output, in its first forward as a `Columns`."""
    if module in _seen:
        return y
    _seen.add(module)
    return _columns(y, y.ndim - 1, label.what if label else type(module).__name__)


class Columns(Tensor):
    """A rank's part of an output; only views of all of it, and elementwise results, are `Columns`, too.

    Attributes:
        at: the dimension that is sharded.
        layer: whose output it is.
    """

    at: int | None
    layer: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name  # of a property
        with DisableTorchFunctionSubclass():
            first = args[: len(args) if name in _ELEMENTWISE else 1]
            x: Any = next((each for each in first if isinstance(each, Columns)), None)
            at = getattr(x, "at", None)
            if at is None:
                return func(*args, **kwargs)
            if x.shape[at] > 1 and _takes_apart(name, x, at, args, kwargs):
                raise ValueError(
                    f"{x.layer} looks like a stack of matrices, each of which must be sharded, because its output is "
                    "taken apart: give their number, as in ColwiseParallel(parts=3); parts=1 if it is one matrix"
                )
            result = func(*args, **kwargs)
            at = _followed(name, func, x, at, args, kwargs, result)
            return result if at is None or result is x else _columns(result, at, x.layer)


def _columns(y: Tensor, at: int, layer: str) -> Tensor:
    columns = y.as_subclass(Columns)
    columns.at, columns.layer = at, layer
    return columns


def _takes_apart(name: str, x: Tensor, at: int, args: Any, kwargs: Any) -> bool:
    def given(key: str, position: int, default: Any = None) -> Any:
        return kwargs.get(key, args[position] if len(args) > position else default)

    if name == "__iter__":
        return at == 0
    if name == "__getitem__":
        return _is_partial(args[1], x, at)
    if name == "as_strided":
        return bool(prod(given("size", 1)) < x.numel())
    if name in _SPLITTING_AT:
        return at == min(_SPLITTING_AT[name], x.ndim - 1)
    if name in _TAKING_BY_INDEX:
        dim, index = _TAKING_BY_INDEX[name]
        along, chosen = given("dim", dim), given("index", index, kwargs.get("indices"))
        return along is not None and along % x.ndim == at and _is_run(chosen, x, at)
    if name not in _TAKING_APART:
        return False
    position, default = _TAKING_APART[name]
    dim = given("dimension" if name == "unfold" else "dim", position, default)
    size = next(iter([*args[1:2], *kwargs.values()]), None)
    return bool(dim % x.ndim == at and not (name == "chunk" and size == 1))


def _is_partial(index: Any, x: Tensor, at: int) -> bool:
    """True if an index selects one element, or a contiguous part, of the dimension `at`."""
    entries = [each for each in (index if isinstance(index, tuple) else (index,)) if each is not None]
    if not all(each is Ellipsis or isinstance(each, int | slice | list | Tensor) for each in entries):
        return False
    entries = [torch.as_tensor(each) if isinstance(each, list) else each for each in entries]
    entries = [part for each in entries for part in [each] * (each.ndim if _is_mask(each) else 1)]  # one a dimension
    first = next((i for i, each in enumerate(entries) if each is Ellipsis), len(entries))
    left = [slice(None)] * (x.ndim - len(entries) + (first < len(entries)))
    each = [*entries[:first], *left, *entries[first + 1 :]][at]
    if _is_mask(each):
        return each.ndim == 1 and _is_run(each.nonzero(), x, at)
    if isinstance(each, Tensor):
        return _is_run(each, x, at)
    return isinstance(each, int) or (each.step in (None, 1) and each != slice(None))


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dtype == torch.bool


def _is_run(index: Tensor, x: Tensor, at: int) -> bool:
    """True if an index tensor selects one element, or a contiguous part, of the dimension `at`."""
    if torch.compiler.is_compiling() or index.is_meta or isinstance(index, FakeTensor) or not index.numel():
        return False  # the values are not known, or there are none
    chosen = (index % x.shape[at]).unique()
    return len(chosen) < x.shape[at] and int(chosen[-1] - chosen[0]) + 1 == len(chosen)


def _followed(name: str, func: Any, x: Tensor, at: int, args: Any, kwargs: Any, result: Any) -> int | None:
    """The dimension of `result` that was `at` in `x`; None: it is neither a view of all of it nor elementwise."""
    if name in _PERMUTING:  # a tensor whose lengths all differ shows where the dimension goes
        lengths = torch.empty([2 + dim for dim in range(x.ndim)], device="meta")
        return list(func(lengths, *args[1:], **kwargs).shape).index(2 + at)
    if name in _ELEMENTWISE:
        return at if isinstance(result, Tensor) and result.shape == x.shape else None
    if name not in _RESHAPING:
        return None
    before = prod(x.shape[:at])
    found = (dim for dim in range(result.ndim) if prod(result.shape[:dim]) == before and (dim == at or before > 1))
    return next(found, None)
