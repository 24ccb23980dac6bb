"""Exercise 9.2: Return the gradient to the shard."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minifsdp import device
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.instruments.watch.ledger import Ledger

from .shared import BF16, FP16, FP32, FP64, nbytes, numbers


@reference(
    "9.2",
    hints=(
        "Two cases: there is no gradient yet, or there is one. The sum has to be made in the shard's dtype; in-place "
        "operations keep that of the tensor which they change.",
        "None: `device.empty(..., shard.dtype, ...)` becomes `shard.grad`, and `copy_` casts into it. Else "
        "`shard.grad.add_(mean)` casts and adds. In both cases `device.free(mean)` at the end.",
    ),
    forbids=(FlatUnit._deliver,),
)
def deliver(shard: nn.Parameter, mean: Tensor) -> None:
    """Add `mean` [P / N] to `shard.grad` in the shard's dtype, and free `mean`.

    Either may be of any floating-point dtype. `shard.grad` is None at first. Once created, it stays the same tensor,
    and later means are added in place. Use no other memory; only `shard.grad` remains afterwards.

    Use `device.empty(numel, dtype, "gradients", device)` to allocate `shard.grad`, so that it is accounted for
    (its initial contents are arbitrary), and `device.free(buffer)`.
    """
    if shard.grad is None:
        shard.grad = device.empty(mean.numel(), shard.dtype, "gradients", mean.device)
        shard.grad.copy_(mean)
    else:
        shard.grad.add_(mean)
    device.free(mean)


@check("9.2")
def check_deliver(answer, variant):
    """Cast to the shard's dtype and added there; no memory but the shard's gradient."""
    size = variant.size
    pairs = [(BF16, FP32), (FP16, FP32), (FP32, FP32), (FP64, FP32), (FP32, FP64), (FP64, FP64), (BF16, FP64)]
    for dtype, of_shard in pairs:
        means = [scale * numbers(variant.seed + n, size).to(dtype) / 3 for n, scale in ((1, 1), (2, 0.003), (3, 0.01))]
        named = str(dtype).removeprefix("torch.") + ", for a shard in float64" * (of_shard is FP64)
        with unzeroed():
            deliver_three(answer, means, numbers(variant.seed, size).to(of_shard), named)


@contextmanager
def unzeroed():
    """What `device.empty` hands out holds NaN: it may hold anything."""
    empty = device.empty
    with patch.object(device, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan)):
        yield


def deliver_three(answer, means, values, named):
    dtype, wanted, low_sum = values.dtype, torch.zeros_like(values), torch.zeros_like(means[0])
    grad_bytes = nbytes(values)
    tolerance = 1e-7 if dtype is FP32 and means[0].dtype is not FP64 else 1e-14 if dtype is FP64 else 3e-7
    with Ledger() as ledger:
        shard = nn.Parameter(values.clone())
        for number, mean in enumerate(means):
            wanted, low_sum = wanted + mean.to(dtype), low_sum + mean
            buffer = device.empty(mean.numel(), mean.dtype, "gradients", mean.device)
            buffer.copy_(mean)
            grad_before = shard.grad
            ledger.reset_peaks()
            before = sum(ledger.live().values())
            try:
                answer(shard, buffer)
            except RuntimeError as error:
                if "assign" in str(error) and "grad" in str(error):
                    raise AnswerError(
                        f"it raises: {error}\n"
                        "likely slip: a gradient has its parameter's dtype: make a buffer of that and cast into it"
                    ) from error
                raise
            peak = ledger.peak.total - before
            what = f"{('first', 'second', 'third')[number]} mean in {named}"
            expect(
                f"dtype of `shard`, {what}",
                str(shard.dtype),
                str(dtype),
                slip="the optimizer works on fp32: leave the shard alone and cast the gradient",
            )
            expect(f"`shard`, {what}", shard.detach(), values, slip="this is the parameter: add to its `.grad`")
            if shard.grad is None:
                raise AnswerError(f"`shard.grad`, {what}: expected the mean, got None")
            if nbytes(shard.grad) == 0:
                raise AnswerError(
                    f"`shard.grad`, {what}: expected values, got a tensor without memory\n"
                    "likely slip: `shard.grad` and `mean` are one buffer, and that was freed"
                )
            slips = {}
            if number:
                slips = {
                    "the second mean has overwritten the first": mean.to(dtype),
                    "one of them is missing: a mean is added in every call": wanted - mean.to(dtype),
                    "the sum was made in the low precision, where small terms are lost: cast first, then add": (
                        low_sum.to(dtype)
                    ),
                }
            got, slip = shard.grad.detach().clone(), None
            if got.isnan().any():
                slip = "`device.empty` is not zeroed: what is added to it is added to whatever was there"
            expect(f"`shard.grad`, {what}", got, wanted, slips=slips, slip=slip, tolerance=tolerance)
            if buffer.untyped_storage().data_ptr() != shard.grad.untyped_storage().data_ptr() or not nbytes(buffer):
                expect(
                    f"bytes behind `mean`, {what}",
                    nbytes(buffer),
                    0,
                    slip="its memory is still there: release it with `device.free`, even if others refer to it",
                )
            if number and shard.grad is not grad_before:
                raise AnswerError(
                    f"`shard.grad`, {what}: expected the same tensor as before, got another one\n"
                    "likely slip: added out of place, which needs the memory twice for a moment: add in place"
                )
            unseen = "the ledger cannot see this memory: buffers come from `device.empty`"
            if ledger.live().get("unsharded"):
                unseen = 'it is counted as unsharded parameters: the role of this buffer is "gradients"'
            expect(
                f"bytes of gradients by the ledger, {what}",
                ledger.live()["gradients"],
                grad_bytes,
                slips={unseen: 0},
                slip="there is a buffer left besides `shard.grad`: free what was added",
            )
            expect(
                f"bytes allocated meanwhile, {what}",
                peak,
                0 if number else grad_bytes,
                slips={"`mean` became the gradient: its memory is the schedule's, which frees it": 0}
                if not number
                else {},
                slip="a buffer for the cast mean: `copy_` and `add_` cast on the way",
            )
