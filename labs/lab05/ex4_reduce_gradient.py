"""Exercise 5.4: Reduce the gradient."""

from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.gradient import Gradient
from minifsdp.fsdp.reduction import Reduction
from minifsdp.fsdp.view import FlatView
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger

from .shared import flat_parameter, nbytes, phases, values


@reference(
    "5.4",
    hints=(
        "The padding belongs to no parameter, so nobody has written its gradient. The output is a buffer of the "
        "shard's size with the role `gradients`; `comm.reduce_scatter` sums unless you say otherwise.",
        "Zero `flat.padding_of(gradient)`; `mean = device.empty(...)`; `comm.reduce_scatter(mean, gradient, group, "
        "comm.MEAN)` and wait; `device.free(gradient)`. Then `flat.shard.grad` becomes `mean`, or `mean` is added to "
        "it and freed.",
    ),
    forbids=(FlatUnit._reduce, Reduction.start, FlatUnit._accumulate, Gradient.complete, FlatView.add),
)
def reduce_gradient(flat: FlatParameter, gradient: Tensor, group: Group) -> None:
    """Add the ranks' mean of `gradient` [P] to `flat.shard.grad` [P / N], and free `gradient`.

    Args:
        flat: the unit's flat parameter; `flat.padding_of(buffer)` is the padding at its end.
        gradient: this rank's unsharded gradient, in the layout of `flat.full`. Its padding is
            undefined, but must be 0 in `flat.shard.grad`.
        group: the ranks.

    Issue one reduce-scatter and wait for it. `flat.shard.grad` is None at first, and then the output
    buffer may become the gradient; later results are added to it. Afterwards free `gradient` and every other
    buffer of your own, even if other tensors refer to them: only `flat.shard.grad` remains.

    Use `device.empty(numel, dtype, "gradients", device)`, `comm.reduce_scatter(output, full, group, op)` with
    `comm.MEAN`, and `device.free(buffer)`.
    """
    flat.padding_of(gradient).zero_()
    mean = device.empty(flat.shard.numel(), gradient.dtype, "gradients", gradient.device)
    comm.reduce_scatter(mean, gradient, group, comm.MEAN).wait()
    device.free(gradient)
    if flat.shard.grad is None:
        flat.shard.grad = mean
    else:
        flat.shard.grad.add_(mean)
        device.free(mean)


class Reduced(NamedTuple):
    calls: list[tuple[str, int]]
    phases: list[str]
    parameter: torch.Tensor
    first: Any  # shard.grad after the first reduction
    kept: int  # bytes that the unsharded gradient still has
    gradients: int
    second: Any
    after_second: int


def unsharded_gradient(seed, rank, micro, flat, ranks):
    generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + micro)
    padded = torch.zeros(-(-flat.numel // ranks) * ranks, dtype=flat.full.dtype)
    padded[: flat.numel] = torch.randn(flat.numel, generator=generator)
    return padded


def observe_reductions(answer, seed, sizes):
    return [observe_reduce(answer, seed, size) for size in sizes]


def kept_in(buffers):
    """`device.empty`, with another reference to each result: only `device.free` frees its memory."""
    empty = device.empty

    def keep(*args, **kwargs):
        buffers.append(empty(*args, **kwargs))
        return buffers[-1]

    return keep


def observe_reduce(answer, seed, size):
    group, where = comm.world(), rank_device()
    rank, ranks = group.rank(), group.size()
    with Ledger() as ledger:
        flat = flat_parameter(seed, size, rank, ranks, where)
        flat.shard.data.add_(rank)
        buffers, seen = [], []
        for micro in range(2):
            values_of = unsharded_gradient(seed, rank, micro, flat, ranks).to(where)
            buffer = device.empty(values_of.numel(), values_of.dtype, "gradients", values_of.device)
            buffer.copy_(values_of)
            flat.padding_of(buffer).fill_(torch.nan)  # nobody has written there
            buffers.append(buffer)
            own = []  # the answer's buffers, until its next call
            with comm.record() as calls, phases() as order, patch.object(device, "empty", kept_in(own)):
                answer(flat, buffer, group)
            kept, gradients = nbytes(buffer), ledger.live()["gradients"]
            seen.append((calls, order, None if flat.shard.grad is None else values(flat.shard.grad), kept, gradients))
    comm.all_reduce(torch.zeros(1, device=where), group).wait()
    (calls, order, first, kept, gradients), (_, _, second, _, after_second) = seen
    log = [(c.op, c.payload) for c in calls]
    return Reduced(log, order, values(flat.shard), first, kept, gradients, second, after_second)


NO_PADDING = ", of a unit without padding"


@check("5.4")
def check_reduce_gradient(answer, variant):
    """One reduce-scatter of the mean, zeros for the padding, accumulated; only the shard's gradient is left."""
    ranks = max(3, variant.ranks)
    sizes = {variant.size: "", 0: ", of one element in bfloat16", -1: NO_PADDING}
    try:
        seen = on_ranks(ranks, observe_reductions, answer, variant.seed, tuple(sizes), timeout=8)
    except AnswerError as error:
        if "of dtype torch.bfloat16" in str(error):
            slip = "the mean has the dtype of `gradient`, which need not be float32: a collective does not cast"
            raise AnswerError(f"{error}\nlikely slip: {slip}") from error
        raise
    for number, (size, which) in enumerate(sizes.items()):
        check_reduced([each[number] for each in seen], variant.seed, size, which)


def check_reduced(seen, seed, size, which):
    """Of two reductions of one unit, seen on each rank."""
    ranks = len(seen)
    flats = [flat_parameter(seed, size, rank, ranks) for rank in range(ranks)]
    each = [
        torch.stack([unsharded_gradient(seed, rank, micro, flats[0], ranks) for rank in range(ranks)])
        for micro in range(2)
    ]
    item, rounding = flats[0].full.dtype.itemsize, 1e-5 if size else 2e-2
    payload, length = each[0].shape[1] * item, each[0].shape[1] // ranks
    for rank, found in enumerate(seen):
        first, second = (gradients.mean(0)[rank * length :][:length] for gradients in each)
        own = each[0][rank][rank * length :][:length]
        padding = length - max(0, min(length, flats[0].numel - rank * length))
        expect(
            "`flat.shard` (the parameter)",
            found.parameter,
            flats[rank].shard.detach() + rank,
            rank=rank,
            slip="this reduces the parameter; what the ranks have to agree on is the gradient",
        )
        expect(
            f"collectives (operation, bytes){which}",
            found.calls,
            [("reduce_scatter", payload)],
            rank=rank,
            slips={
                "every rank receives the whole mean to keep 1/N of it: the values are right, and the bytes on the "
                "wire twice those of a reduce-scatter": [("all_reduce", payload)],
                "gradients differ between ranks, as their data does: without communication this is not training on "
                "all of it": [],
            },
        )
        expect(
            "what was issued and waited for",
            found.phases,
            ["issue reduce_scatter", "wait reduce_scatter"],
            rank=rank,
            slips={"the output is unwritten until the handle's `wait()`, and its input still read": found.phases[:1]},
        )
        if padding and found.first is not None and bool(found.first[length - padding :].isnan().any()):
            raise AnswerError(
                f"rank {rank}, the last {padding} of `flat.shard.grad`: expected 0, got what lay in memory (nan)\n"
                "likely slip: the padding has no gradient, and nobody but you writes it: every rank zeroes its own "
                "before the reduction, which takes the mean of what all ranks have there"
            )
        if which == NO_PADDING and found.first is not None and not found.first.any():
            raise AnswerError(
                f"rank {rank}, `flat.shard.grad`{which}: expected the mean, got zeros\n"
                "likely slip: `buffer[-0:]` is all of the buffer: `flat.padding_of(gradient)` is right for any padding"
            )
        expect(
            f"`flat.shard.grad`{which}",
            found.first,
            first,
            rank=rank,
            tolerance=rounding,
            slips={
                "the sum over the ranks, not their mean: `comm.MEAN`": first * ranks,
                "divided by 2, whatever the number of ranks: `comm.MEAN`, or `group.size()`": first * ranks / 2,
                "this rank's own gradient": own,
                "it is the optimizer's input: put the mean there": None,
            },
        )
        expect(
            f"`flat.shard.grad` after a second reduction{which}",
            found.second,
            first + second,
            rank=rank,
            tolerance=rounding,
            slips={
                "the second gradient has overwritten the first: backward accumulates": second,
                "what was reduced before is reduced again: add to `flat.shard.grad` after the reduction": second
                + first / ranks,
            },
        )
        expect(
            "bytes of the unsharded gradient afterwards",
            found.kept,
            0,
            rank=rank,
            slip="the unsharded gradient is still there: dropping the name is not enough, since others may refer to "
            "it; `device.free` it",
        )
        shard_bytes = length * item
        unseen = {
            '`flat.shard.grad` is not a buffer of `device.empty(..., "gradients", ...)`: the ledger cannot see it': 0
        }
        expect(
            "bytes of gradients afterwards",
            found.gradients,
            shard_bytes,
            rank=rank,
            slips=unseen,
            slip="keep the shard's alone",
        )
        expect(
            "bytes of gradients after the second reduction",
            found.after_second,
            shard_bytes,
            rank=rank,
            slips={"`flat.shard.grad` is another tensor than before, which the ledger cannot see: add in place": 0},
            slip="the second mean has been added: free its buffer",
        )
