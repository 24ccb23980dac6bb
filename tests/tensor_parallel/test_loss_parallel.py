"""Cross-entropy of logits that no rank has whole: as torch's of all of them, and three numbers per token are sent."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import Checks, mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from minifsdp import comm
from minifsdp.tensor_parallel import ColwiseParallel, cross_entropy, loss_parallel, parallelize_module
from minifsdp.tensor_parallel.layouts import part_of

check = Checks(__name__)
TOKENS = 10


def mesh() -> Any:
    return mesh_of((dist.get_world_size(),))


def logits(*shape: int, scale: float = 30.0) -> Tensor:
    """Large ones: without the maximum their exponentials overflow float32."""
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)


def targets(*shape: int, classes: int) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


OPTIONS = {
    f"{reduction}{', weights' * weighted}{', smoothing' * smoothing}{', ignored' * ignored}": (
        reduction,
        weighted,
        smoothing,
        ignored,
    )
    for reduction, weighted, smoothing, ignored in product(("mean", "sum", "none"), *[(False, True)] * 3)
}


@check(ranks=(2, 3), options=OPTIONS, classes=(12, 13))
def it_is_that_of_all_logits(options: tuple[str, bool, bool, bool], classes: int) -> None:
    reduction, weighted, smoothing, ignored = options
    x, y = logits(TOKENS, classes), targets(TOKENS, classes=classes)
    if ignored:
        y[::3] = 7
    given = {
        "reduction": reduction,
        "weight": torch.linspace(0.5, 2, classes, dtype=torch.float64) if weighted else None,
        "label_smoothing": 0.2 if smoothing else 0.0,
        "ignore_index": 7 if ignored else -100,
    }
    alone = x.clone().requires_grad_()
    expected = F.cross_entropy(alone, y, **given)
    expected.sum().backward()

    cut = distribute_tensor(x, mesh(), [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(cut, y, **given)
    assert isinstance(loss, DTensor)
    assert loss.placements == (Replicate(),)
    torch.testing.assert_close(loss.to_local(), expected, rtol=1e-13, atol=1e-12)
    loss.sum().backward()
    assert cut.grad.placements == (Shard(1),)
    torch.testing.assert_close(cut.grad.full_tensor(), alone.grad, rtol=0, atol=1e-13)


@check(ranks=(2, 4))
def three_numbers_per_token_are_sent() -> None:
    """The maximum; then the sum of exponentials and the target's logit together. Backward sends nothing."""
    x = part_of(logits(TOKENS, 1000), 1, comm.world()).contiguous().requires_grad_()
    with comm.record() as log:
        loss = cross_entropy(x, targets(TOKENS, classes=1000), 1000, comm.world())
        loss.backward()
    assert [(call.op, call.payload) for call in log] == [("all_reduce", 8 * TOKENS), ("all_reduce", 2 * 8 * TOKENS)]


@check(ranks=2, shape=((13,), (4, 13), (4, 13, 5), (4, 13, 5, 2)))
def shapes_that_torch_takes(shape: tuple[int, ...]) -> None:
    x, classes = logits(*shape), 13
    y = targets(*(size for dim, size in enumerate(shape) if dim != min(1, len(shape) - 1)), classes=classes)
    cut = distribute_tensor(x, mesh(), [Shard(min(1, len(shape) - 1))]).requires_grad_()
    with loss_parallel():
        for module in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="none")):
            torch.testing.assert_close(module(cut, y).to_local(), module(x, y))


@check(ranks=2)
def logits_in_half_precision() -> None:
    x, y = logits(TOKENS, 12, scale=1.0).to(torch.bfloat16), targets(TOKENS, classes=12)
    loss = cross_entropy(part_of(x, 1, comm.world()), y, 12, comm.world())
    assert loss.dtype == torch.bfloat16
    assert abs(loss.float() - F.cross_entropy(x.float(), y)) < 0.02


@check(ranks=2, dtype=(torch.float16, torch.bfloat16, torch.float32), smoothing=(0.0, 0.1))
def sums_are_in_fp32(dtype: torch.dtype, smoothing: float) -> None:
    """Over 1000 classes: in fp16 they overflow, in bf16 they are off by a hundredth."""
    x, y = logits(64, 1000, scale=5.0).to(dtype), targets(64, classes=1000)
    expected = F.cross_entropy(x.float(), y, reduction="none", label_smoothing=smoothing)
    for autocast in (False, True):
        cut = distribute_tensor(x, mesh(), [Shard(1)]).requires_grad_()
        with loss_parallel(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = F.cross_entropy(cut, y, reduction="none", label_smoothing=smoothing).to_local()
        assert losses.dtype == (torch.float32 if autocast else dtype)
        tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}[losses.dtype]
        torch.testing.assert_close(losses, expected.to(losses.dtype), rtol=tolerance, atol=0)
        losses.sum().backward()
        assert cut.grad.dtype == dtype


@check(ranks=2)
def classes_that_are_masked_on_a_rank() -> None:
    """Logits of minus infinity, as models have them for the padding of a vocabulary."""
    x, y = logits(TOKENS, 12), targets(TOKENS, classes=6) + 6
    x[:, :6] = -torch.inf
    alone = x.clone().requires_grad_()
    cut = distribute_tensor(x, mesh(), [Shard(1)]).requires_grad_()
    expected = F.cross_entropy(alone, y)
    with loss_parallel():
        loss = F.cross_entropy(cut, y)
    assert abs(loss.to_local() - expected) < 1e-12
    loss.backward()
    expected.backward()
    torch.testing.assert_close(cut.grad.full_tensor(), alone.grad, rtol=0, atol=1e-13)


@check(ranks=2, reduction=("mean", "sum", "none"))
def a_batch_of_padding_has_a_gradient_of_zero(reduction: str) -> None:
    """Also where its mean is the mean of nothing."""
    cut = distribute_tensor(logits(TOKENS, 12), mesh(), [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(cut, torch.full((TOKENS,), -100), reduction=reduction)
    assert loss.to_local().isnan().all() == (reduction == "mean")
    loss.sum().backward()
    assert not cut.grad.to_local().any()


@check(ranks=2, dtype=(torch.uint8, torch.int32, torch.int16))
def targets_of_any_integers(dtype: torch.dtype) -> None:
    x, y = logits(TOKENS, 12), targets(TOKENS, classes=12)
    cut = distribute_tensor(x, mesh(), [Shard(1)])
    with loss_parallel():
        assert abs(F.cross_entropy(cut, y.to(dtype)).to_local() - F.cross_entropy(x, y)) < 1e-12


@check(ranks=2)
def names_of_reductions_before_torch_1() -> None:
    x, y = logits(TOKENS, 12), targets(TOKENS, classes=12)
    cut = distribute_tensor(x, mesh(), [Shard(1)])
    for old in ({"size_average": False}, {"reduce": False}, {"size_average": True}):
        with loss_parallel():
            loss = F.cross_entropy(cut, y, **old)
        torch.testing.assert_close(loss.to_local(), F.cross_entropy(x, y, **old), rtol=1e-13, atol=1e-12)


@check(ranks=4)
def a_rank_may_have_no_class() -> None:
    x, y = logits(TOKENS, 5), targets(TOKENS, classes=5)
    cut = distribute_tensor(x, mesh(), [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(cut, y)
    assert abs(loss.to_local() - F.cross_entropy(x, y)) < 1e-12
    loss.backward()
    assert cut.grad.full_tensor().sum().abs() < 1e-12


@check(ranks=2)
def other_losses_are_left_alone() -> None:
    x, y = logits(TOKENS, 12), targets(TOKENS, classes=12)
    with loss_parallel():
        assert torch.equal(F.cross_entropy(x, y), F.cross_entropy(x, y))
        assert F.mse_loss(x, x) == 0


@check(ranks=2)
def a_head_by_columns_before_it() -> None:
    """The logits are never whole: no message is as large."""
    torch.manual_seed(0)
    head = nn.Linear(8, 300).double()
    x = torch.randn(TOKENS, 8, dtype=torch.float64)
    expected = F.cross_entropy(head(x), targets(TOKENS, classes=300)).item()
    parallelize_module(head, mesh(), ColwiseParallel(use_local_output=False))
    x.requires_grad_()
    with loss_parallel(), comm.record() as log:
        loss = F.cross_entropy(head(x), targets(TOKENS, classes=300))
        loss.backward()
    assert abs(loss.item() - expected) < 1e-12
    assert max(call.payload for call in log) == TOKENS * 8 * 8  # the gradient of x


def refused(*, layout: Any = None, y: Any = None, **options: Any) -> Any:
    def call() -> None:
        cut = distribute_tensor(logits(TOKENS, 12), mesh(), [layout or Shard(1)])
        target = targets(TOKENS, classes=12) if y is None else y()
        given = {name: value() if callable(value) else value for name, value in options.items()}
        F.cross_entropy(cut, target, **given)

    return call


def nll() -> None:
    cut = distribute_tensor(logits(TOKENS, 12), mesh(), [Shard(1)])
    F.nll_loss(F.log_softmax(cut, 1), targets(TOKENS, classes=12))


def in_parts(t: Tensor) -> Any:
    return lambda: distribute_tensor(t, mesh(), [Shard(0)])


REFUSED = {
    "class": (refused(y=lambda: torch.full((TOKENS,), 12)), IndexError, "is not one of 12 classes"),
    "probabilities": (refused(y=lambda: torch.rand(TOKENS, 12)), ValueError, "class indices"),
    "fewer": (refused(y=lambda: targets(3, classes=12)), ValueError, r"\[3\]: logits \[10, 12\] have one of \[10\]"),
    "shape": (refused(y=lambda: targets(1, TOKENS, classes=12)), ValueError, r"target is \[1, 10\]"),
    "target in parts": (refused(y=in_parts(targets(TOKENS, classes=12))), ValueError, "target of loss_parallel"),
    "weight in parts": (refused(weight=in_parts(torch.ones(12))), ValueError, "weight of loss_parallel"),
    "weight": (refused(weight=torch.ones(9)), ValueError, r"weight is \[9\]: give one number for each of 12 classes"),
    "reduction": (refused(reduction="all"), ValueError, "reduction = 'all': give"),
    "smoothing": (refused(label_smoothing=2.0), ValueError, "label_smoothing = 2.0"),
    "whole": (refused(layout=Replicate()), ValueError, r"logits as Shard\(1\)"),
    "batch": (refused(layout=Shard(0)), ValueError, r"logits as Shard\(1\)"),
    "nll_loss": (nll, NotImplementedError, "call cross_entropy"),
}


@check(ranks=2, case=REFUSED)
def what_it_does_not_take_is_refused_in_a_line(case: tuple[Any, type[Exception], str]) -> None:
    run, kind, text = case
    with loss_parallel(), pytest.raises(kind, match=text) as caught:
        run()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
