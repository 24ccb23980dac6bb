"""Exercise 1.6: Ring reduce-scatter."""

from collections.abc import Callable

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device

from .shared import (
    NARROW,
    RINGS,
    UNTOUCHED,
    WHOLE,
    arrived_in,
    check_lengths,
    check_origins,
    check_steps,
    handing_out,
    issued,
    largest,
    numbers,
    pass_on,
    plain,
    run,
    watching,
    worlds,
)


@reference(
    "1.6",
    hints=(
        "What you receive in step s, with your own chunk of that number added, is what you send in step s + 1. Begin "
        "with chunk r - 1, and in step s add chunk r - 2 - s, all modulo N; after N - 1 steps that is chunk r.",
        "`chunks = full.view(N, -1)`; `partial = chunks[(r - 1) % N]`; in each of N - 1 steps a new `arriving`, "
        "`exchange(partial, arriving, group)`, `partial = arriving.add_(chunks[(r - 2 - step) % N])`. At the end copy "
        "`partial` into `output`.",
    ),
    forbids=(*WHOLE, *RINGS),
)
def reduce_scatter(
    output: Tensor, full: Tensor, group: Group, exchange: Callable[[Tensor, Tensor, Group], None]
) -> None:
    """Sum `full` [N * numel], which is only read, across the ranks, and write chunk r of the sum to `output` [numel].

    There are N - 1 steps; in each of them, `exchange(outgoing, incoming, group)` of 1.2 passes on
    one chunk [numel]. An incoming chunk needs a different buffer from the outgoing one:
    `device.empty(numel, dtype, "communication", device)`. `output` may be chunk r of `full`
    itself, so write it last. With one rank there are no steps, and `output` is equal to `full`.
    """
    rank, ranks = group.rank(), group.size()
    chunks = full.view(ranks, output.numel())
    partial = chunks[(rank - 1) % ranks]
    for step in range(ranks - 1):
        arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
        exchange(partial, arriving, group)
        partial = arriving.add_(chunks[(rank - 2 - step) % ranks])
    output.copy_(partial)


def apart(outgoing, incoming):
    """Whether no element is in both."""
    low, high = sorted((outgoing, incoming), key=torch.Tensor.data_ptr)
    return low.data_ptr() + low.numel() * low.element_size() <= high.data_ptr()


def observe_scatter(answer, seed, size, dtype):
    group, disjoint = comm.world(), []

    def step(outgoing, incoming, group):
        disjoint.append(apart(outgoing, incoming))
        pass_on(outgoing, incoming, group)

    full = numbers(seed, group.rank(), group.size() * size, dtype=dtype).to(rank_device())
    output = torch.full_like(full[:size], UNTOUCHED)
    memory = output.detach()
    with watching() as seen, handing_out() as handed:
        answer(output, full, group, step)
    inside = full.clone()
    own = inside.view(group.size(), size)[group.rank()]
    answer(own, inside, group, pass_on)
    buffers = arrived_in(seen, handed), [each.numel() for each in handed]
    return plain(issued(seen)), all(disjoint), *buffers, memory.cpu(), full.cpu(), own.cpu()


@check("1.6")
def check_reduce_scatter(answer, variant):
    """N - 1 sends of one chunk; rank r ends with chunk r of the sum, and the input is as it was."""
    for ranks in worlds(variant):
        check_reduce_scatter_case(answer, variant, ranks, torch.float32)
    check_reduce_scatter_case(answer, variant, largest(variant), NARROW)


def check_reduce_scatter_case(answer, variant, ranks, dtype):
    size = variant.size
    inputs = [numbers(variant.seed, rank, ranks * size, dtype=dtype) for rank in range(ranks)]
    total = torch.stack(inputs).sum(0).view(ranks, size)
    stuck = "all ranks must take the same number of steps"
    seen = run(ranks, observe_scatter, answer, variant.seed, size, dtype, slip=stuck)
    for rank, (log, disjoint, origins, lengths, output, full, own) in enumerate(seen):
        check_steps(rank, ranks, log, size)
        slip = "it sends from the buffer that it receives into: take a new one in each step"
        expect(f"sent and received apart, over {ranks} ranks", disjoint, True, rank=rank, slip=slip)
        if dtype is NARROW:
            check_origins(f"bfloat16 over {ranks} ranks", rank, origins)
            check_lengths(f"over {ranks} ranks", rank, lengths, size)
        expect(f"`full` afterwards, over {ranks} ranks", full, inputs[rank], rank=rank, slip="it is only read")
        mine = [each.view(ranks, size)[rank] for each in inputs]
        expect(
            f"chunk {rank} of the sum, over {ranks} ranks",
            output,
            total[rank],
            rank=rank,
            slips={
                "`output` was never written: `output = ...` only renames, `output.copy_(...)` fills": torch.full_like(
                    output, UNTOUCHED
                ),
                "this is chunk r + 1 of the sum: in step 0 rank r sends chunk r - 1": total[(rank + 1) % ranks],
                "this is chunk r - 1 of the sum": total[(rank - 1) % ranks],
                "a chunk goes round and nothing is added to it": mine[(rank + 1) % ranks],
                "two ranks' parts only: what is passed on is the chunk that arrived, with one's own added": (
                    mine[rank] + mine[(rank - 1) % ranks]
                ),
                "this is the mean: asked is the sum": total[rank] / ranks,
            },
            slip="in step s rank r receives chunk r - 2 - s and adds its own chunk of that number",
        )
        expect(
            f"the output where it is chunk {rank} of `full` itself, over {ranks} ranks",
            own,
            total[rank],
            rank=rank,
            slip="the output is written before chunk r of `full` has been read, in the last step",
        )
