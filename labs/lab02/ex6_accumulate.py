"""Exercise 2.6: Accumulate without communication."""

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.course.workshop.checking import check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device

from .shared import SECONDS, draw, parameter


@reference(
    "2.6",
    hints=(
        "`backward` adds to `.grad`, so k backward passes give the sum of k gradients. What makes it the gradient of "
        "the mean? And which of the k backward passes may communicate?",
        "For each micro-batch: set `reducer.sync` to whether it is the last, then "
        "`(loss_of(batch) / len(micro_batches)).backward()`.",
    ),
)
def accumulate(micro_batches: list[Tensor], loss_of: Callable[[Tensor], Tensor], reducer: SimpleNamespace) -> None:
    """Compute the gradient of the mean loss over the micro-batches, and communicate only once.

    Args:
        micro_batches: k micro-batches of equal size.
        loss_of: runs the forward pass on a micro-batch and returns its mean loss. Call it and backward once for each.
        reducer: a backward pass communicates if `reducer.sync` is True. It must be True again on return.

    Gradients are zero or None before the call. Only the last backward pass communicates.
    """
    for number, batch in enumerate(micro_batches, start=1):
        reducer.sync = number == len(micro_batches)
        (loss_of(batch) / len(micro_batches)).backward()


def observe_accumulation(answer: Any, size: int, seed: int, micro: int) -> dict[str, Any]:
    rank, group, where = dist.get_rank(), comm.world(), rank_device()
    weight = parameter(draw(seed + 40, 0, size), None)
    scale = parameter(draw(seed + 41, 0, 1), None)
    params = [weight, scale]
    reducer = SimpleNamespace(sync=True, buckets=[params], bucket_of=dict.fromkeys(params, 0))
    given: list[int] = []
    backwards = 0
    reductions: list[int] = []  # in each backward

    def hook(param: nn.Parameter) -> None:
        nonlocal backwards
        if param is weight:
            backwards += 1
        if reducer.sync:
            assert param.grad is not None
            comm.all_reduce(param.grad, group, comm.MEAN).wait()

    saved: list[Any] = []  # by autograd, for the backward of each micro-batch
    kept: list[int] = []

    def loss_of(batch: Tensor) -> Tensor:
        if given:
            reductions.append(len(calls) - sum(reductions))
        given.append(batch.shape[0])
        kept.append(sum(storage() is not None for storage in saved))
        output = ((batch @ weight) * scale).tanh()
        saved.append(weakref.ref(output.untyped_storage()))
        return output.mean()

    for p in params:
        p.register_post_accumulate_grad_hook(hook)
    drawn = [draw(seed + number, rank, 4, size).to(where) for number in range(2)]
    micro_batches = [drawn[number % 2] for number in range(micro)]  # of three the last is the first once more
    list_given, values = list(micro_batches), [batch.clone() for batch in micro_batches]
    with comm.record() as calls:
        answer(list_given, loss_of, reducer)
    reductions.append(len(calls) - sum(reductions))
    in_list = [a is b for a, b in zip(list_given, micro_batches, strict=False)]
    same = [torch.equal(batch, value) for batch, value in zip(micro_batches, values, strict=True)]
    return {
        "list": in_list,
        "kept": kept,
        "values": same,
        "given": given,
        "backwards": backwards,
        "reductions": reductions,
        "sync": reducer.sync,
        "grads": [None if p.grad is None else p.grad.cpu() for p in params],
    }


def gradients_of(ranks: int, size: int, seed: int, micro: int) -> list[list[Tensor]]:
    """For each micro-batch, the mean over the ranks of its loss's gradients, in one process."""
    found = []
    for number in range(micro):
        weight, scale = (nn.Parameter(draw(seed + 40 + i, 0, shape)) for i, shape in enumerate((size, 1)))
        batches = [draw(seed + number % 2, rank, 4, size) for rank in range(ranks)]
        losses = [((batch @ weight) * scale).tanh().mean() for batch in batches]
        found.append(list(torch.autograd.grad(sum(losses, torch.zeros(())) / ranks, [weight, scale])))
    return found


@check("2.6")
def check_accumulate(answer, variant):
    """A backward per micro-batch, communication in the last one only, the gradient of the mean over all of them."""
    for number in (3, 1):
        check_accumulate_case(answer, variant, number)


def check_accumulate_case(answer: Any, variant: Any, number: int) -> None:
    n, size, seed = variant.ranks, variant.size, variant.seed
    seen = on_ranks(n, observe_accumulation, answer, size, seed, number, timeout=SECONDS)
    micro = gradients_of(n, size, seed, number)
    for rank, found in enumerate(seen):
        expect(
            "rows given to loss_of at each call",
            found["given"],
            [4] * number,
            rank=rank,
            slip="one forward per micro-batch: a single large one needs all their activations at once",
        )
        expect(
            "backward passes",
            found["backwards"],
            number,
            rank=rank,
            slip="adding up the losses keeps the graphs of all micro-batches alive until the one backward",
        )
        expect(
            "all-reduces in the backward of each micro-batch (two parameters)",
            found["reductions"],
            [0] * (number - 1) + [2],
            rank=rank,
            slips={
                "every micro-batch is reduced: k times the bytes, and what is reduced is reduced again": [2] * number,
                "the last backward has to communicate, or the ranks' gradients never meet": [0] * number,
                "the first backward communicates: what comes after it stays on its rank": [2] + [0] * (number - 1),
                "one and the same batch may come twice: the last is known by its place, not by what it is": [2, 0, 2],
            },
        )
        expect(
            "reducer.sync afterwards",
            found["sync"],
            True,
            rank=rank,
            slip="the next plain step would not be reduced",
        )
        slip = "a backward frees what its micro-batch has saved, without retain_graph: one is in memory at a time"
        expect("graphs alive at each call of loss_of", found["kept"], [0] * number, rank=rank, slip=slip)
        slip = "the list and its tensors are the caller's, and are only read"
        expect("whether the list holds its micro-batches", found["list"], [True] * number, rank=rank, slip=slip)
        expect("whether the micro-batches are as they were", found["values"], [True] * number, rank=rank, slip=slip)
        for index, grad in enumerate(found["grads"]):
            total = sum(each[index] for each in micro)
            slips = {
                "k times too long: the k gradients are added up, so divide each loss by k": total,
                "only the last micro-batch is left: the gradients of those before it were dropped": micro[-1][index]
                / number,
                "only the last micro-batch is left, and nothing divides by k": micro[-1][index],
                "divided by k twice": total / number**2,
                f"k is {number} here, the length of micro_batches, and not always 4": total / 4,
            }
            if number == 1:
                slips["k is 1 here, and the mean over one micro-batch is divided by 1, not by 2"] = total / 2
            slips["divided by the number of ranks too: the reduction takes the mean already"] = total / (number * n)
            expect(f"gradient of parameter {index}", grad, total / number, rank=rank, slips=slips, tolerance=1e-5)
