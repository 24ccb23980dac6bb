"""Tensors in any nesting of containers: the arguments and outputs of a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from minifsdp.private import tree_leaves


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in any nesting of containers and dataclasses."""
    if isinstance(tree, Tensor):
        return [tree]
    inside: Iterable[Any]
    if isinstance(tree, list | tuple | set | frozenset):
        inside = tree
    elif isinstance(tree, Mapping):
        inside = tree.values()
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        inside = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    else:
        inside = [leaf for leaf in tree_leaves(tree) if leaf is not tree]  # a container that torch knows
    found = []
    for each in inside:
        if isinstance(each, Tensor):
            found.append(each)
        elif each is not None:
            found += tensors_in(each)
    return found


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with every tensor changed; containers are copied, not written to."""
    if isinstance(tree, Tensor):
        return change(tree)
    recurse = partial(map_tensors, change)
    match tree:
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
