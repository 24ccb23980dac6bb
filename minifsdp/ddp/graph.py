"""Autograd's graph between the outputs of a forward and the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from minifsdp.private import base_of
from minifsdp.tree import tensors_in


def nodes_of(outputs: Any) -> set[Any]:
    """The nodes through which a backward reaches the outputs of a forward."""
    tensors = [t for t in tensors_in(outputs) if t.grad_fn is not None]
    # An in-place change of a view replaces its node, not that of its base.
    return {t.grad_fn for t in (*tensors, *map(base_of, tensors)) if t is not None and t.grad_fn is not None}


def leaves_behind(nodes: Iterable[Any]) -> Iterator[Any]:
    """The nodes of the leaves, their `variable`, that may get a gradient in a backward from these nodes."""
    stack = list(nodes)
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node.name() == "torch::autograd::AccumulateGrad":  # where the gradient of a leaf ends up
            yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
