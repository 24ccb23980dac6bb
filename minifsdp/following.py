"""Results of operations on unwritten memory, which are unwritten, too.

A cast loses the bits by which unwritten memory is known (unwritten.py): a bool with any other bits than False's becomes
True, and NaNs become integers. So the results of copies, casts and elementwise operations are marked again:

    inside `marking`: of all operations; and memory that is allocated there is marked, as by `to_empty` of any module
    inside `_apply`, which `to` and `to_empty` call: of all operations, if the module contains or is a watched one
    anywhere: of operations on the buffers of such modules that are unwritten after `_apply`. Their class is `Unwritten`
    until they are written

Nothing is left of this when a model computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minifsdp import unwritten
from minifsdp.local_parts import local_of
from minifsdp.private import TorchDispatchMode
from minifsdp.tree import tensors_in
from minifsdp.unwritten import gaps_in, is_unwritten, mark_unwritten, mark_where

ALLOCATING = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
COPYING = ("_to_copy", "copy_")

_watched: WeakSet[nn.Module] = WeakSet()


def watch(module: nn.Module) -> None:
    """From now on mark memory that `to_empty` gives to this module or one inside it, and follow it through casts."""
    _watched.update(module.modules())
    _watch()
    if unwritten.marks:
        _settle(module.buffers())


def is_watched(module: nn.Module) -> bool:
    """True if it is such a module."""
    return module in _watched


@cache
def _watch() -> None:
    """Run `_apply` of all modules, by which `to`, `to_empty` and the like change them, inside `_around`."""
    apply: Any = nn.Module._apply

    @wraps(apply)
    def followed(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        with _around(self):
            return cast(nn.Module, apply(self, fn, recurse))

    nn.Module._apply = followed  # type: ignore[method-assign]


def _mark_what_is_emptied() -> None:
    """Mark what `to_empty` of any module allocates: it may be sharded later."""
    to_empty: Any = nn.Module.to_empty

    @wraps(to_empty)
    def marked(self: nn.Module, *args: Any, **settings: Any) -> nn.Module:
        with marking(self if _is_near_watched(self) else None):
            return cast(nn.Module, to_empty(self, *args, **settings))

    nn.Module.to_empty = marked  # type: ignore[assignment, method-assign]


def _around(module: nn.Module) -> AbstractContextManager[None]:
    return marking(module) if not _Marking.runs and _is_near_watched(module) else nullcontext()


def _is_near_watched(module: nn.Module) -> bool:
    """True if it, or one inside it, is watched."""
    return any(map(is_watched, module.modules()))


@contextmanager
def marking(module: nn.Module | None = None) -> Iterator[None]:
    """Mark all memory that is allocated inside the `with`, by `to_empty`, `torch.empty` and the like.

    Args:
        module: what it is for. Buffers that are unwritten at the end are followed from then on.
    """
    if not _Marking.runs:
        _Marking.runs = True
        try:
            with _Marking():  # type: ignore[no-untyped-call]
                yield
        finally:
            _Marking.runs = False
    else:
        yield
    if module is not None and unwritten.marks:
        _settle(module.buffers())


class _Marking(TorchDispatchMode):
    runs = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        gaps = [*_gaps(func, name, args)] if unwritten.marks else []
        result = func(*args, **(kwargs or {}))
        if name in ALLOCATING:
            mark_unwritten(result)
        elif isinstance(result, Tensor):
            for each in gaps:  # another shape: an operation on DTensors has moved parts between ranks
                if each.shape == local_of(result).shape or not isinstance(result, DTensor):
                    mark_where(result, each)
        return result


def _gaps(func: Any, name: str, args: Any) -> Iterator[Tensor]:
    """Of the tensors that are read element by element, which elements are unwritten; `where` reads only some."""
    if name in COPYING or (torch.Tag.pointwise in func.tags and name != "where"):
        for each in args[1:] if name == "copy_" else args:
            if isinstance(each, Tensor) and (gaps := gaps_in(each)) is not None:
                yield gaps


class Unwritten(Tensor):
    """A buffer without values; as soon as it has some, its class is Tensor again."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = [t for t in tensors_in((args, kwargs)) if type(t) is cls]
        release(held)
        try:
            with marking():
                result = func(*args, **(kwargs or {}))
        finally:
            for t in held:
                t.__class__ = cls
        reads = getattr(func, "__name__", "") == "__get__"
        _settle([*([] if reads else held), *tensors_in(result)])
        return result


unwritten.plain.add(Unwritten)


def release(tensors: Iterable[Tensor]) -> None:
    """Let tensors of the class `Unwritten` be plain ones."""
    for t in tensors:
        if type(t) is Unwritten:
            t.__class__ = Tensor  # type: ignore[assignment]


def _settle(tensors: Iterable[Tensor]) -> None:
    for t in tensors:
        release([t])
        if type(t) is Tensor and is_unwritten(t):
            t.__class__ = Unwritten


_mark_what_is_emptied()
