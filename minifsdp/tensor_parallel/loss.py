"""Cross-entropy of logits that no rank has whole: three numbers per token are reduced instead of V logits.

    loss = log sum_v exp(x_v - m) - (x_t - m),    m = max_v x_v

Each rank has V / N of the x_v. It needs m, one all-reduce of a maximum, then the sum of exponentials and the target's
logit x_t, which one rank has: one all-reduce of both sums. The gradient, softmax minus one at the target, is local
(Megatron-LM, arXiv 1909.08053, section 3; torch/distributed/tensor/parallel/loss.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from minifsdp import comm
from minifsdp.comm import Group, Label
from minifsdp.tensor_parallel.layouts import first_of, part_of
from minifsdp.tensor_parallel.parameters import Ranks, local_part, placed

_LOSS = Label("the loss (cross_entropy)")


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    classes: int,
    group: Group,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of this rank's part of the logits, the same on every rank.

    Args:
        logits: [tokens, V / N], as `torch.chunk` cuts V.
        targets: [tokens] int64, whole on every rank.
        classes: V.
        weight: [V], of the classes, whole on every rank.
    """
    counted = targets != ignore_index
    targets = torch.where(counted, targets, 0)
    if targets.is_cpu and not bool(((targets >= 0) & (targets < classes)).all()):
        raise IndexError(f"a target is not one of {classes} classes, nor ignore_index {ignore_index}")
    weights = logits.new_ones(classes) if weight is None else weight
    scale = weights[targets] * counted
    everywhere = label_smoothing / classes * weights  # a share of every class, with smoothing
    losses: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        logits,
        targets - first_of(classes, group),
        (1 - label_smoothing) * scale,
        part_of(everywhere, 0, group) if label_smoothing else None,
        (1 - label_smoothing) * scale + everywhere.sum(),
        group,
    )
    losses = losses * counted
    if reduction == "none":
        return losses
    return losses.sum() / scale.sum() if reduction == "mean" else losses.sum()


class _TokenLosses(torch.autograd.Function):
    """sum_v t_v log(Z / exp x_v) of each token, where t is `share` at its target and `everywhere` at all classes."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, index: Tensor, share: Tensor, everywhere: Tensor | None, total: Tensor, group: Group
    ) -> Tensor:
        mine = logits.shape[1]
        largest = logits.amax(-1) if mine else logits.new_full(index.shape, -torch.inf)
        comm.all_reduce(largest, group, comm.MAX, _LOSS).wait()
        shifted = logits - largest[:, None]

        here = (index >= 0) & (index < mine)
        index, share = torch.where(here, index, 0)[:, None], share * here
        wanted = share * shifted.gather(1, index)[:, 0] if mine else torch.zeros_like(largest)
        if everywhere is not None:
            wanted = wanted + shifted @ everywhere
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), wanted])
        comm.all_reduce(sums, group, label=_LOSS).wait()

        probabilities = exponentials.div_(sums[0][:, None])
        ctx.save_for_backward(probabilities, index, share, everywhere, total)
        return total * sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        probabilities, index, share, everywhere, total = ctx.saved_tensors
        inner = probabilities * total[:, None]
        if everywhere is not None:
            inner -= everywhere
        if inner.shape[1]:
            inner.scatter_add_(1, index, -share[:, None])
        return inner * gradient[:, None], None, None, None, None, None


class _LossParallel(TorchFunctionMode):
    """Replaces `torch.nn.functional.cross_entropy` of DTensors that are cut along the classes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy:
            call = inspect.signature(F.cross_entropy).bind(*args, **(kwargs or {}))
            call.apply_defaults()
            logits = call.arguments["input"]
            if isinstance(logits, DTensor) and logits.placements[-1].is_shard(min(1, logits.ndim - 1)):
                return _of_dtensor(**call.arguments)
        return func(*args, **(kwargs or {}))


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, `torch.nn.functional.cross_entropy` takes logits that are cut along the classes, and never gathers them.

    The loss is a DTensor, the same on all ranks.

    Raises:
        ValueError: at the loss: the logits lie on several dimensions of a mesh, or targets are probabilities.
    """
    with _LossParallel():
        yield


def _of_dtensor(
    input: Any, target: Tensor, weight: Any, ignore_index: int, reduction: str, label_smoothing: float, **_: Any
) -> Tensor:
    if len(input.placements) > 1:
        raise ValueError(f"loss_parallel takes logits on a mesh of one dimension, not {input.placements}")
    if target.is_floating_point():
        raise ValueError("loss_parallel takes class indices as targets, not probabilities")
    ranks, dim = Ranks.of(input.device_mesh), min(1, input.ndim - 1)
    classes = input.shape[dim]
    logits = local_part(input).movedim(dim, -1)  # [batch, .., V / N]
    rows = cross_entropy(
        logits.flatten(0, -2) if logits.ndim > 1 else logits[None],
        local_part(target).reshape(-1),
        classes,
        ranks.group,
        None if weight is None else local_part(weight),
        ignore_index,
        reduction,
        label_smoothing,
    )
    loss = rows.reshape(target.shape) if reduction == "none" else rows
    return placed(loss, Replicate(), Replicate(), ranks, loss.shape)
