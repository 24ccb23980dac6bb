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
    y: Tensor = _Linear.apply(input, linear.weight, linear.bias)  # type: ignore[no-untyped-call]
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
    """A product that autocast may have taken in a lower dtype; gradients have the dtypes of what they belong to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, weight, bias)
        ctx.save_for_backward(x.to(y.dtype), weight)
        ctx.leaves, ctx.x_dtype = (weight, bias), x.dtype  # a checkpoint gives back a copy of a saved weight
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, *of_leaves = ctx.needs_input_grad
        x_gradient = (gradient @ weight.to(gradient.dtype)).to(ctx.x_dtype) if of_x else None
        rows, x_rows = (each.data.reshape(-1, each.shape[-1]) for each in (gradient, x))  # without the graph behind x
        computing: tuple[Callable[[], Tensor], ...] = (
            lambda: (rows.T @ x_rows).to(weight.dtype),
            lambda: rows.sum(0).to(weight.dtype),
        )
        if _postponed is None:
            pairs = zip(computing, of_leaves, strict=True)
            return x_gradient, *(compute() if needed else None for compute, needed in pairs)
        for leaf, compute, needed in zip(ctx.leaves, computing, of_leaves, strict=True):
            if needed:
                _postponed.append(partial(_accumulate, leaf, compute))
        return x_gradient, None, None


def _accumulate(p: Tensor, gradient: Callable[[], Tensor]) -> None:
    """Add a gradient to `.grad` by autograd's own node, so that a data-parallel wrapper's hooks run."""
    torch.autograd.backward(p, gradient())
