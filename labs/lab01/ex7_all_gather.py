"""Exercise 1.7: Ring all-gather."""

from collections.abc import Callable

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device

from .shared import (
    NARROW,
    RINGS,
    UNTOUCHED,
    WHOLE,
    address,
    check_steps,
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
    "1.7",
    hints=(
        "Put your own shard in its place first. Then what you receive in step s is what you send in step s + 1: in "
        "step 0 you send chunk r. Which chunk does your left neighbour send in step 0?",
        "`chunks = output.view(N, -1)`; `chunks[r].copy_(shard)`; in each of N - 1 steps "
        "`exchange(chunks[(r - step) % N], chunks[(r - 1 - step) % N], group)`.",
    ),
    forbids=(*WHOLE, *RINGS),
)
def all_gather(output: Tensor, shard: Tensor, group: Group, exchange: Callable[[Tensor, Tensor, Group], None]) -> None:
    """Gather every rank's `shard` [numel], which is only read, into `output` [N * numel], in rank order.

    There are N - 1 steps; in each of them, `exchange(outgoing, incoming, group)` of 1.2 passes on
    one chunk. Send and receive chunks of `output` in place, without another buffer. `shard` may be chunk
    r of `output` itself.
    """
    rank, ranks = group.rank(), group.size()
    chunks = output.view(ranks, shard.numel())
    chunks[rank].copy_(shard)
    for step in range(ranks - 1):
        exchange(chunks[(rank - step) % ranks], chunks[(rank - 1 - step) % ranks], group)


def a_shard(seed, rank, size, dtype):
    """No two ranks' are equal."""
    return numbers(seed, rank, size, dtype=dtype) + 32 * rank


def whose(row, shards):
    if bool((row == UNTOUCHED).any()):
        return "none"
    return next((str(rank) for rank, shard in enumerate(shards) if torch.equal(shard, row)), "?")


def observe_gather(answer, seed, size, dtype):
    group = comm.world()
    shard = a_shard(seed, group.rank(), size, dtype).to(rank_device())
    output = torch.full((group.size() * size,), UNTOUCHED, dtype=dtype, device=shard.device)
    memory = output.detach()
    with watching() as seen:
        answer(output, shard, group, pass_on)
    inside = torch.full_like(output, UNTOUCHED)
    own = inside.view(group.size(), size)[group.rank()]
    own.copy_(shard)
    answer(inside, own, group, pass_on)
    in_place = [address(message.tensor) == address(output) for message in issued(seen, "recv")]
    return plain(issued(seen)), all(in_place), memory.cpu(), shard.cpu(), inside.cpu()


@check("1.7")
def check_all_gather(answer, variant):
    """N - 1 sends of one chunk; every rank ends with all shards in rank order."""
    for ranks in worlds(variant):
        check_all_gather_case(answer, variant, ranks, torch.float32)
    check_all_gather_case(answer, variant, largest(variant), NARROW)


def check_all_gather_case(answer, variant, ranks, dtype):
    size = variant.size
    shards = [a_shard(variant.seed, rank, size, dtype) for rank in range(ranks)]
    stuck = "all ranks must take the same number of steps"
    seen = run(ranks, observe_gather, answer, variant.seed, size, dtype, slip=stuck)
    for rank, (log, in_place, output, shard, inside) in enumerate(seen):
        check_steps(rank, ranks, log, size)
        names = [whose(row, shards) for row in output.view(ranks, size)]
        expect(
            f"whose shards are in the output, over {ranks} ranks",
            names,
            [str(r) for r in range(ranks)],
            rank=rank,
            slips={
                "`output` was never written: `output = ...` only renames": ["none"] * ranks,
                "its own shard is missing: a ring brings only the others'": [
                    "none" if r == rank else str(r) for r in range(ranks)
                ],
                "the left neighbour's shard N - 1 times: pass on what has arrived, not your own shard": [
                    str(rank if r == rank else (rank - 1) % ranks) for r in range(ranks)
                ],
                "shards stand in the order of arrival, its own first: asked is rank order": [
                    str((rank - r) % ranks) for r in range(ranks)
                ],
                "each shard stands one place too far: in step 0 chunk r - 1 arrives": [
                    str((r - 1) % ranks) for r in range(ranks)
                ],
            },
            slip="in step s rank r sends chunk r - s and receives chunk r - 1 - s, modulo N",
        )
        slip = "a chunk of `output` is what it receives into; another buffer is memory for nothing"
        if ranks == largest(variant):
            expect(f"received in place, over {ranks} ranks", in_place, True, rank=rank, slip=slip)
        expect("`shard` afterwards", shard, shards[rank], rank=rank, slip="it is only read")
        slip = "the output is changed before the shard, which is a part of it, has been read"
        expect("the output where `shard` is chunk r of it", inside, torch.cat(shards), rank=rank, slip=slip)
