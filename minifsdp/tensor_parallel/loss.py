"""Cross-entropy of sharded logits: three numbers per token are reduced instead of V logits.

    loss = log sum_v exp(x_v - m) - (x_t - m),    m = max_v x_v

Each rank has V / N of the x_v. One all-reduce computes the maximum m. A second all-reduce computes the sum of
exponentials and, as another sum, the target's logit x_t, which only one rank has. The gradient, softmax minus one at
the target, is local (Megatron-LM, arXiv 1909.08053, section 3; torch/distributed/tensor/parallel/loss.py).
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
    """`torch.nn.functional.cross_entropy` from this rank's part of the logits; the result is the same on every rank.

    Args:
        logits: [tokens, V / N], where V is split as by `torch.chunk`. Sums over them are in fp32 or higher precision.
        targets: [tokens] integers, whole on every rank.
        classes: V.
        weight: [V], the weights of the classes, whole on every rank.

    Returns:
        The loss in the dtype of the logits; under autocast in fp32.

    Raises:
        ValueError: torch's function does not accept an option, or the sizes do not fit.
        IndexError: a target is not a class (checked only on CPU, where the host does not have to wait for the value).
    """
    _check_options(weight, classes, reduction, label_smoothing)
    counted, targets = targets != ignore_index, targets.long()
    targets = torch.where(counted, targets, 0)
    if targets.is_cpu and not bool(((targets >= 0) & (targets < classes)).all()):
        raise IndexError(f"a target is not one of {classes} classes, nor ignore_index {ignore_index}")
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.new_ones(classes, dtype=wide) if weight is None else weight.to(wide)
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
    losses = losses.masked_fill(~counted, 0)
    if reduction != "none":
        losses = losses.sum() / (scale.sum() if reduction == "mean" else 1)
    return losses if torch.is_autocast_enabled(logits.device.type) else losses.to(logits.dtype)


def _check_options(weight: Tensor | None, classes: int, reduction: str, label_smoothing: float) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction = {reduction!r}: give 'mean', 'sum' or 'none'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing = {label_smoothing}: give a number from 0 to 1")
    if weight is not None and weight.shape != (classes,):
        raise ValueError(f"weight is {list(weight.shape)}: give one number for each of {classes} classes")


class _TokenLosses(torch.autograd.Function):
    """sum_v t_v log(Z / exp x_v) of each token, where t is `share` at its target and `everywhere` at all classes."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, index: Tensor, share: Tensor, everywhere: Tensor | None, total: Tensor, group: Group
    ) -> Tensor:
        mine = logits.shape[1]
        largest = logits.amax(-1) if mine else logits.new_full(index.shape, -torch.inf)
        comm.all_reduce(largest, group, comm.MAX, _LOSS).wait()
        shifted = logits.to(total.dtype) - largest[:, None]

        here = (index >= 0) & (index < mine)
        index, share = torch.where(here, index, 0)[:, None], share * here
        found = shifted.gather(1, index)[:, 0] if mine else torch.zeros_like(total)
        wanted = torch.where(here, share * found, 0)  # a logit elsewhere may be -inf, and 0 times that is nan
        if everywhere is not None:
            wanted = wanted + (shifted * everywhere).sum(-1)  # no matmul, which autocast would round
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), wanted])
        comm.all_reduce(sums, group, label=_LOSS).wait()

        probabilities = exponentials.div_(sums[0][:, None]).to(logits.dtype)
        ctx.save_for_backward(probabilities, index, share, everywhere, total)
        return total * sums[0].log() - sums[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        probabilities, index, share, everywhere, total = ctx.saved_tensors
        inner = probabilities * total[:, None]
        if everywhere is not None:
            inner -= everywhere
        if inner.shape[1]:
            inner.scatter_add_(1, index, -share[:, None])
        return (inner * gradient[:, None]).to(probabilities.dtype), None, None, None, None, None


class _LossParallel(TorchFunctionMode):
    """Replaces `torch.nn.functional.cross_entropy` for DTensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.cross_entropy, F.nll_loss):
            call = inspect.signature(func).bind(*args, **(kwargs or {}))
            call.apply_defaults()
            if isinstance(call.arguments["input"], DTensor):
                if func is F.nll_loss:
                    raise NotImplementedError("loss_parallel has no nll_loss: call cross_entropy of the logits instead")
                return _of_dtensor(**call.arguments)
        return func(*args, **(kwargs or {}))


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Let `torch.nn.functional.cross_entropy` accept logits that are sharded by classes, without gathering them.

    The loss is a DTensor, the same on all ranks.

    Raises:
        ValueError: when the loss is computed, the logits are not sharded by classes on a mesh of one dimension, targets
            are probabilities or have a different shape, or targets or weights are not whole.
        NotImplementedError: `nll_loss` of a DTensor.
    """
    with _LossParallel():
        yield


def _of_dtensor(
    input: Any,
    target: Any,
    weight: Any,
    size_average: bool | None,
    ignore_index: int,
    reduce: bool | None,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    dim = min(1, input.ndim - 1)
    _check_layouts(input, dim, target, weight)
    if size_average is not None or reduce is not None:  # torch's names until version 0.4
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    ranks, classes = Ranks.of(input.device_mesh), input.shape[dim]
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


def _check_layouts(logits: Any, dim: int, target: Any, weight: Any) -> None:
    if len(logits.placements) > 1 or not logits.placements[0].is_shard(dim):
        raise ValueError(f"loss_parallel takes logits as Shard({dim}) on one mesh dimension, not {logits.placements}")
    for name, each in (("target", target), ("weight", weight)):
        if isinstance(each, DTensor) and each.placements != (Replicate(),):
            raise ValueError(f"the {name} of loss_parallel is {each.placements}: give all of it to every rank")
    if target.is_floating_point():
        raise ValueError("loss_parallel takes class indices as targets, not probabilities")
    wanted = [size for each, size in enumerate(logits.shape) if each != dim]
    if list(target.shape) != wanted:
        raise ValueError(f"the target is {list(target.shape)}: logits {list(logits.shape)} have one of {wanted}")
