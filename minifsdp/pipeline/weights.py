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
_may_split = False  # a forward is under way whose backward may be split


def split_linears(module: nn.Module) -> None:
    """Prepare every `nn.Linear` in a module for backwards in two parts. Its parameters stay where they are.

    One whose weight is computed, as by `weight_norm`, keeps its backward in one part.
    """
    for child in module.modules():
        if type(child) is nn.Linear and "weight" in child._parameters:
            child.forward = partial(_forward, child)  # type: ignore[method-assign]


def _forward(linear: nn.Linear, input: Tensor) -> Tensor:
    if not _may_split and _postponed is None:  # outside a step, and neither recomputed in one
        return nn.Linear.forward(linear, input)
    leaves = linear.weight, linear.bias
    rows: list[Tensor] = []
    anchor = torch.empty(0, requires_grad=any(map(_is_trained, leaves)))
    y: Tensor = _Linear.apply(input, leaves, _Weights.apply(anchor, leaves, rows), rows)  # type: ignore[no-untyped-call]
    return y


@contextmanager
def may_split() -> Iterator[None]:
    """The backward of a forward inside may be split."""
    global _may_split
    before, _may_split = _may_split, True
    try:
        yield
    finally:
        _may_split = before


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
    """A matmul that autocast may have computed in a lower dtype; the gradient has the dtype of the input.

    To autograd the weight is no input: its hooks, such as an optimizer's, would run here without a gradient, and again
    with it later. In its place the output of `_Weights` needs a gradient, so that backward comes here even if the input
    needs none, and goes on there.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, leaves: tuple[Tensor, Tensor | None], anchor: Tensor, rows: list[Tensor]
    ) -> Tensor:
        y = F.linear(x, *leaves)
        ctx.save_for_backward(x.to(y.dtype), leaves[0])
        ctx.rows, ctx.x_dtype = rows, x.dtype
        return y.data  # of a batch of matrices it is a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.rows[:] = [_as_rows(gradient), _as_rows(x)] if ctx.needs_input_grad[2] else []
        x_gradient = (gradient @ weight.to(gradient.dtype).conj()).to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
        return x_gradient, None, None, None


class _Weights(torch.autograd.Function):
    """Gradients of the weight and the bias, now or later; not in a backward that only wants those of inputs.

    They are computed from `rows`, which the backward of `_Linear` fills with its gradient [rows, out] and its input
    [rows, in].
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, leaves: tuple[Tensor, Tensor | None], rows: list[Tensor]) -> Tensor:
        ctx.leaves, ctx.rows = leaves, rows  # a checkpoint gives back a copy of a saved weight
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        (weight, _), (gradient, x) = ctx.leaves, ctx.rows
        ctx.rows.clear()
        computing: tuple[Callable[[], Tensor], ...] = (
            lambda: (gradient.T @ x.conj()).to(weight.dtype),
            lambda: gradient.sum(0).to(weight.dtype),
        )
        later = [partial(_accumulate, p, f) for p, f in zip(ctx.leaves, computing, strict=True) if _is_trained(p)]
        if _postponed is None:  # a backward of the user's inside a forward
            for accumulate in later:
                accumulate()
        else:
            _postponed.extend(later)
        return None, None, None


def _as_rows(x: Tensor) -> Tensor:
    """[.., features] as [rows, features], without the graph behind it."""
    return x.data.reshape(x.shape[:-1].numel(), x.shape[-1])


def _is_trained(p: Tensor | None) -> bool:
    return p is not None and p.requires_grad


def _accumulate(p: Tensor, gradient: Callable[[], Tensor]) -> None:
    """Add a gradient to `.grad` by autograd's own node, so that a data-parallel wrapper's hooks run."""
    torch.autograd.backward(p, gradient())
