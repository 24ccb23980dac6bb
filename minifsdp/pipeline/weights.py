"""Backward in two parts: gradients of inputs at once, those of weights later.

A stage before waits for the gradient of the input. No other rank waits for the gradients of the weights, so they can
fill idle time (arXiv 2401.10241, section 2). An `nn.Linear` is where most of them come from: while a backward is split,
its part of the graph computes the gradient of its input and puts the rest off. All other parameters (norms, embeddings,
convolutions, subclasses of `nn.Linear`) get their gradients with those of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Later = Callable[[], None]

_postponed: list[Later] | None = None  # of the backward under way, if it is split


def split_linears(module: nn.Module) -> None:
    """Prepare every `nn.Linear` in a module for backwards in two parts. Its parameters stay where they are.

    One whose weight is computed, as by `weight_norm`, keeps its backward in one part.
    """
    for child in module.modules():
        if type(child) is nn.Linear and "weight" in child._parameters:
            child.forward = partial(_forward, child)  # type: ignore[method-assign]


def _forward(linear: nn.Linear, input: Tensor) -> Tensor:
    leaves = linear.weight, linear.bias
    anchor = torch.empty(0, requires_grad=any(map(_is_trained, leaves)))
    y: Tensor = _Linear.apply(input, leaves, anchor)  # type: ignore[no-untyped-call]
    return y


@contextmanager
def splitting() -> Iterator[list[Later]]:
    """A backward inside leaves the gradients of weights to the functions in this list."""
    global _postponed
    before, _postponed = _postponed, []
    try:
        yield _postponed
    finally:
        _postponed = before


class _Linear(torch.autograd.Function):
    """A product that autocast may have taken in a lower dtype; gradients have the dtypes of what they belong to.

    To autograd the weight is no input: its hooks, such as an optimizer's, would run here without a gradient, and again
    with it later. In its place `anchor` needs a gradient, so that backward comes here even if the input needs none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaves: tuple[Tensor, Tensor | None], anchor: Tensor) -> Tensor:
        y = F.linear(x, *leaves)
        ctx.save_for_backward(x.to(y.dtype), leaves[0])
        ctx.leaves, ctx.x_dtype = leaves, x.dtype  # a checkpoint gives back a copy of a saved weight
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        x_gradient = (gradient @ weight.to(gradient.dtype)).to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
        rows, x_rows = (each.data.reshape(-1, each.shape[-1]) for each in (gradient, x))  # without the graph behind x
        computing: tuple[Callable[[], Tensor], ...] = (
            lambda: (rows.T @ x_rows).to(weight.dtype),
            lambda: rows.sum(0).to(weight.dtype),
        )
        later = [partial(_accumulate, p, f) for p, f in zip(ctx.leaves, computing, strict=True) if _is_trained(p)]
        if _postponed is None:  # the stage is used outside its schedule
            for accumulate in later:
                accumulate()
        else:
            _postponed.extend(later)
        return x_gradient, None, None


def _is_trained(p: Tensor | None) -> bool:
    return p is not None and p.requires_grad


def _accumulate(p: Tensor, gradient: Callable[[], Tensor]) -> None:
    """Add a gradient to `.grad` by autograd's own node, so that a data-parallel wrapper's hooks run."""
    torch.autograd.backward(p, gradient())
