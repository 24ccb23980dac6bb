"""Exercise 1.8: All-reduce: the two rings together."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device

from .shared import NARROW, RINGS, check_origins, handing_out, largest, numbers, origin, run, worlds


@reference(
    "1.8",
    hints=(
        "The two pieces want N chunks of one length: that is `-(-numel // N)`, rounded up, in a buffer N times as long "
        "whose last elements are zero. Chunk r of the buffer can be the reduce-scatter's output.",
        "Copy `tensor.flatten()` to the front of a zeroed `full` [N * length]; `mine = full.view(N, length)[r]`; "
        "`reduce_scatter(mine, full, group)`; divide `mine` by N for a mean; `all_gather(full, mine, group)`; copy the "
        "first numel elements back.",
    ),
    forbids=(comm.all_reduce, comm.reduce, comm.broadcast, comm.all_to_all, *RINGS),
)
def all_reduce(
    tensor: Tensor,
    op: Literal["sum", "mean"],
    group: Group,
    reduce_scatter: Callable[[Tensor, Tensor, Group], None],
    all_gather: Callable[[Tensor, Tensor, Group], None],
) -> None:
    """Replace `tensor` [any shape, contiguous or not] in place by its sum or mean over the ranks.

    Copy it to the front of a zeroed buffer of N chunks of ceil(numel / N) elements each, which
    comes from `device.empty` as before. Call `reduce_scatter(output, full, group)` once, with chunk
    r of the buffer as the output. For a mean, divide that chunk by N. Call
    `all_gather(output, shard, group)` once, with the buffer as the output, and copy the result back
    without the padding. Neither call returns a handle: both have finished when they return.
    """
    ranks, numel = group.size(), tensor.numel()
    length = -(-numel // ranks)
    full = device.empty(ranks * length, tensor.dtype, "communication", tensor.device).zero_()
    full[:numel] = tensor.flatten()
    mine = full.view(ranks, length)[group.rank()]
    reduce_scatter(mine, full, group)
    if op == "mean":
        mine /= ranks
    all_gather(full, mine, group)
    tensor.copy_(full[:numel].view_as(tensor))


class Collected(NamedTuple):
    """What one all-reduce has given to its two pieces, and what the tensor then holds."""

    calls: list[str]
    given: torch.Tensor | None
    gathered: torch.Tensor | None
    origins: list[str]
    in_place: bool
    logged: int
    tensor: torch.Tensor


def observe_all_reduce(answer, seed, cases):
    return [all_reduce_once(answer, seed, *case) for case in cases]


def all_reduce_once(answer, seed, shape, op, dtype):
    group, calls, given, gathered, buffers, places = comm.world(), [], [], [], [], []

    def scatter(output, full, where):
        calls.append(f"reduce_scatter {full.numel()}")
        given.append(full.flatten().clone())
        buffers.append(full)
        places.append(output.data_ptr() == full.data_ptr() + where.rank() * output.nbytes)
        comm.reduce_scatter(output, full.view(-1), where).wait()

    def gather(output, shard, where):
        calls.append(f"all_gather {output.numel()}")
        gathered.append(shard.flatten().clone())
        buffers.append(output)
        comm.all_gather(output.view(-1), shard, where).wait()

    tensor = a_tensor(seed, group.rank(), shape, dtype).to(rank_device())
    memory = tensor.detach()
    with comm.record() as log, handing_out() as handed:
        try:
            answer(tensor, op, group, scatter, gather)
        except RuntimeError as error:
            if not calls and any(buffer.numel() < tensor.numel() for buffer in handed):
                short = f"{tensor.numel()} elements do not fit into a buffer of {handed[0].numel()}"
                raise ValueError(f"{short}: N chunks of numel // N are too short, round up") from None
            raise ValueError(f"of a tensor {list(shape)}: {error}") from None
    origins = [origin(buffer, handed) for buffer in buffers]
    first = [each[0].cpu() if each else None for each in (given, gathered)]
    return Collected(calls, *first, origins, all(places), len(log), memory.cpu())


def a_tensor(seed, rank, shape, dtype):
    """Several dimensions lie in memory in columns, so that there is no flat view."""
    made = numbers(seed, rank, *shape, dtype=dtype)
    return made.transpose(0, -1).contiguous().transpose(0, -1) if len(shape) > 1 else made


@check("1.8")
def check_all_reduce(answer, variant):
    """One reduce-scatter, one all-gather of the padded tensor, in place, for any shape; sum and mean."""
    for ranks in worlds(variant):
        cases = [(shape, op, torch.float32) for shape in ((variant.size,), (), (12,)) for op in ("sum", "mean")]
        if ranks == largest(variant):
            cases += [
                ((variant.size, 3), "sum", NARROW),
                ((2, 2, 3), "sum", torch.float32),
                ((variant.size, 3), "mean", torch.float32),
            ]
        seen = run(ranks, observe_all_reduce, answer, variant.seed, cases)
        for number, case in enumerate(cases):
            for rank, results in enumerate(seen):
                check_all_reduce_case(variant.seed, ranks, rank, *case, results[number])


def check_all_reduce_case(seed, ranks, rank, shape, op, dtype, got):
    inputs = [a_tensor(seed, each, shape, dtype) for each in range(ranks)]
    total = torch.stack(inputs).sum(0)
    numel = total.numel()
    padded = -(-numel // ranks) * ranks
    wanted = total if op == "sum" else total / ranks
    kept = numel // ranks * ranks
    where = f"{op} of {list(shape)} over {ranks} ranks"
    expect(
        f"{where}: collectives and their elements",
        got.calls,
        [f"reduce_scatter {padded}", f"all_gather {padded}"],
        rank=rank,
        slips={
            f"rounded down: {numel % ranks} elements are never reduced": [
                f"reduce_scatter {kept}",
                f"all_gather {kept}",
            ],
            "all ranks' whole tensors are gathered and then added up: N times the memory": [
                f"all_gather {ranks * numel}"
            ],
        },
        slip="the tensor, padded to a multiple of N, is reduce-scattered and then all-gathered, once each",
    )
    expect(f"{where}: messages in all", got.logged, 2, rank=rank, slip="use the two pieces, and nothing else")
    expect(
        f"{where}: the tensor",
        got.tensor,
        wanted,
        rank=rank,
        slips={
            "unchanged: the result belongs in the tensor itself": inputs[rank],
            "this is the sum: a mean divides by N": total if op == "mean" else None,
            "this is the mean: asked is the sum": total / ranks if op == "sum" else None,
            "divided by N twice: each rank divides its chunk, and a gather only copies": wanted / ranks,
        },
        slip="each rank's chunk comes back at its own place",
    )
    if dtype is NARROW:
        check_origins(where, rank, got.origins)
    slip = "memory from `device.empty` holds anything: zero it before the tensor is copied in"
    expect(f"{where}: elements reduced that nobody has set", int(got.given.isnan().sum()), 0, rank=rank, slip=slip)
    chunks = [torch.nn.functional.pad(each.flatten(), (0, padded - numel)) for each in (inputs[rank], total, wanted)]
    slip = "the tensor's own elements in order, then zeros"
    expect(f"{where}: what is reduced", got.given, chunks[0], rank=rank, slip=slip)
    before, after = (each.view(ranks, -1)[rank] for each in chunks[1:])
    slips = {"each rank divides the whole after the gather, N times the work: divide your chunk before": before}
    expect(f"{where}: the chunk that is gathered", got.gathered, after, rank=rank, slips=slips)
    slip = "chunk r of the buffer is the output of the reduce-scatter; another one is memory for nothing"
    expect(f"{where}: reduced in place", got.in_place, True, rank=rank, slip=slip)
