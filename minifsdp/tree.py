"""Tensors in any nesting of containers: the arguments and outputs of a forward.

A changed copy of an object is made without its `__init__`, `__new__` or `__setattr__`, which may compute: a dataclass
whose `__post_init__` scales its input would scale it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from minifsdp.private import tree_flatten, tree_unflatten

_ATOMS = (str, bytes, int, float, complex, type(None), type)
_PLAIN = (tuple, list, dict, MappingProxyType)
_MADE_BY_CLASS = 1 << 9  # a flag of classes (Py_TPFLAGS_HEAPTYPE): not one of Python's own


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in any nesting of containers and dataclasses, each once."""
    if isinstance(tree, Tensor):
        return [tree]
    found: dict[int, Any] = {}  # containers too, kept alive so that no other object gets their ids
    _find(tree, found)
    return [each for each in found.values() if isinstance(each, Tensor)]


def _find(tree: Any, found: dict[int, Any]) -> None:
    for each in _inside(tree):
        if not isinstance(each, _ATOMS) and id(each) not in found:
            found[id(each)] = each
            if not isinstance(each, Tensor):
                _find(each, found)


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with every tensor changed; containers are copied, not written to.

    Each object is changed once, so those that share a tensor still do. An object without a changed tensor stays itself.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    done: dict[int, tuple[Any, Any]] = {}  # with the original, so that no other object gets its id

    def changed(each: Any) -> Any:
        if isinstance(each, _ATOMS):
            return each
        if id(each) not in done:
            done[id(each)] = (each, each)  # what contains itself
            done[id(each)] = (each, change(each) if isinstance(each, Tensor) else _rebuilt(each, changed))
        return done[id(each)][1]

    return changed(tree)


def cast_inputs(inputs: Any, dtype: torch.dtype | None, to: torch.device) -> Any:
    """The arguments of a forward on device `to`, the floating-point ones in `dtype`; None: in their own.

    The host waits for copies from its memory, as in torch: the caller may write the next batch there.
    """

    def wanted(tensor: Tensor) -> torch.dtype:
        return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device=to, dtype=wanted(tensor))

    fit = all(t.device == to and t.dtype == wanted(t) for t in tensors_in(inputs))
    return inputs if fit else map_tensors(move, inputs)


def _inside(tree: Any) -> Iterable[Any]:
    """The objects directly inside; nothing, if that is unknown."""
    attributes = [value for _, value in _attributes(tree)] if _is_dataclass(tree) else []
    if isinstance(tree, list | tuple | set | frozenset):
        return [*tree, *attributes] if attributes else tree
    if isinstance(tree, Mapping):
        return [*tree.values(), *attributes]
    return attributes or _registered(tree)[0]


def _rebuilt(tree: Any, changed: Callable[[Any], Any]) -> Any:
    """A copy with everything inside changed, or the object itself if nothing has."""
    if isinstance(tree, PackedSequence):
        new = [each if name == "batch_sizes" else changed(each) for name, each in tree._asdict().items()]
        return _like(tree, new)  # batch_sizes stays on CPU
    if isinstance(tree, dict | MappingProxyType):
        items = {key: changed(value) for key, value in tree.items()}
        pairs = list(zip(items.values(), tree.values(), strict=True))
    elif isinstance(tree, list | tuple | set | frozenset):
        items = [changed(each) for each in tree]  # type: ignore[assignment]
        pairs = list(zip(items, tree, strict=True))
    elif _has_state(tree):
        items, pairs = {}, []
    else:
        before, form = _registered(tree)
        values = [changed(each) for each in before]
        same = all(one is other for one, other in zip(values, before, strict=True))
        return tree if same else tree_unflatten(values, form)
    has_state = _has_state(tree)
    items_of = {id(old): new for new, old in pairs if new is not old}  # an attribute may also be an item
    if not items_of and not has_state:
        return tree
    inside = changed if has_state else lambda each: items_of.get(id(each), each)
    attributes = [(slot, value, inside(value)) for slot, value in _attributes(tree)]
    if not items_of and all(new is old for _, old, new in attributes):
        return tree
    made = _like(tree, items)
    for slot, old, new in attributes:
        if new is not old:
            _set(made, slot, new)
    return made


def _like(tree: Any, items: Any) -> Any:
    """An object of the same class with these items, and with the attributes of `tree`."""
    cls: Any = type(tree)
    if cls in _PLAIN:
        return cls(items)
    if hasattr(cls, "n_sequence_fields"):  # a result of torch's, such as that of torch.max
        return cls(items)
    base: Any = next(each for each in cls.__mro__ if not each.__flags__ & _MADE_BY_CLASS)
    if isinstance(tree, dict):
        made = base.__new__(cls)
        for key, value in items.items():
            base.__setitem__(made, key, value)
    elif isinstance(tree, list):
        made = base.__new__(cls)
        base.extend(made, items)
    elif isinstance(tree, set):
        made = base.__new__(cls)
        base.update(made, items)
    else:
        made = base.__new__(cls, items) if isinstance(tree, tuple | frozenset) else base.__new__(cls)
    if getattr(tree, "__dict__", None) is tree:
        made.__dict__ = made
    for slot, value in _attributes(tree):
        _set(made, slot, value)
    return made


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _has_state(tree: Any) -> bool:
    """True if its attributes hold what is inside: a dataclass, or a mapping that is neither a dict nor torch's to make.

    A mapping's own methods may share, lose or refuse items; what has its items elsewhere, as in C, stays as it is.
    """
    if _is_dataclass(tree):
        return True
    return isinstance(tree, Mapping) and not isinstance(tree, dict) and not _registered(tree)[0]


def _attributes(tree: Any) -> list[tuple[Any, Any]]:
    """Of an object: by name those in its `__dict__`, and by slot those in its slots; not what are its items anyway."""
    cls: Any = type(tree)
    if hasattr(cls, "n_sequence_fields"):
        return []
    own = getattr(tree, "__dict__", {})
    found = list(own.items()) if own is not tree else []
    for slot in _slots(cls):
        try:
            found.append((slot, slot.__get__(tree)))
        except AttributeError:  # without a value
            continue
    return found


@lru_cache(maxsize=1024)
def _slots(cls: type) -> tuple[Any, ...]:
    return tuple(s for each in cls.__mro__ for s in vars(each).values() if isinstance(s, MemberDescriptorType))


def _set(made: Any, slot: Any, value: Any) -> None:
    """Set an attribute, even of a frozen dataclass, and past a `__setattr__` that does more."""
    if isinstance(slot, str):
        made.__dict__[slot] = value
    else:
        slot.__set__(made, value)


def _registered(tree: Any) -> tuple[list[Any], Any]:
    """The objects inside a container that torch knows, such as a deque, and what it takes to put them together."""
    inside, form = tree_flatten(tree, is_leaf=lambda each: each is not tree)
    return (inside, form) if not (len(inside) == 1 and inside[0] is tree) else ([], form)
