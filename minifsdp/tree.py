"""Tensors in any nesting of containers: the arguments and outputs of a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from minifsdp.private import tree_leaves


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in any nesting of containers and dataclasses."""
    for leaf in [tree] if isinstance(tree, Tensor) else tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):  # one that tree_leaves does not know, as a subclass of dict
            yield from tensors_in(list(leaf.values()))
        elif isinstance(leaf, list | tuple | set | frozenset):
            yield from tensors_in(list(leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with every tensor changed; containers are copied, not written to."""
    recurse = partial(map_tensors, change)
    match tree:
        case Tensor():
            return change(tree)
        case PackedSequence():
            order = {key: recurse(getattr(tree, key)) for key in ("sorted_indices", "unsorted_indices")}
            return tree._replace(data=change(tree.data), **order)  # batch_sizes stays on CPU
        case Mapping():
            copy: Any = tree.copy() if hasattr(tree, "copy") else dict(tree)
            for key, value in tree.items():
                copy[key] = recurse(value)
            return copy
        case tuple() if hasattr(tree, "_fields"):
            return type(tree)(*map(recurse, tree))
        case list() | tuple() | set() | frozenset():
            return type(tree)(map(recurse, tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return dataclasses.replace(tree, **{f.name: recurse(getattr(tree, f.name)) for f in dataclasses.fields(tree)})
    return tree
