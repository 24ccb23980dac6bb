"""Exercise 1.3: Wait: the contents of a buffer before wait()."""

from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device

from .shared import NARROW, RINGS, Message, check_origins, handing_out, numbers, origin, run, watching


@reference(
    "1.3",
    hints=(
        "Three things happen in order: the reduce-scatter is issued, `work` runs, the handle is waited for. Only then "
        "is there anything in the output to return.",
        'Take the output from `device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)`, '
        "keep the handle that `comm.reduce_scatter(part, full, group)` returns, and call `handle.wait()` last.",
    ),
    forbids=(comm.all_reduce, comm.reduce, *RINGS),
)
def reduce_while(full: Tensor, work: Callable[[], Tensor], group: Group) -> tuple[Tensor, Tensor]:
    """Reduce-scatter `full` [N * numel] with `comm.reduce_scatter` while `work()` runs.

    Returns this rank's shard of the sum, [numel], and the result of `work()`. Issue the collective,
    call `work` once, then wait. `full` may have any dtype and is not changed. In this lab, all
    buffers for communication come from `device.empty(numel, dtype, "communication", device)`, so
    that the ledger can count them.
    """
    part = device.empty(full.numel() // group.size(), full.dtype, "communication", full.device)
    handle = comm.reduce_scatter(part, full, group)
    result = work()
    handle.wait()
    return part, result


def observe_while(answer, seed, size, dtype):
    group = comm.world()
    full = numbers(seed, group.rank(), group.size() * size, dtype=dtype).to(rank_device())
    written = []
    with watching() as seen, handing_out() as handed, writing(written):

        def work():
            seen.append(Message("work", -1))
            return torch.full((2,), float(group.rank()))

        returned = answer(full, work, group)
        order = [m.what for m in seen]
        answer(full + 1, work, group)  # leaves alone what the first has returned
        if dtype is NARROW:
            answer(full.double(), work, group)
    got = [each.cpu() if isinstance(each, torch.Tensor) else each for each in returned] if returned else returned
    return order, got, full.cpu(), [origin(output, handed) for output in written[:1]]


@contextmanager
def writing(written):
    """Collects the outputs of the reduce-scatters inside the `with`; two dtypes are an error that says which."""
    real = comm.reduce_scatter

    def call(output, full, *rest, **named):
        written.append(output)
        if output.dtype != full.dtype:
            raise ValueError(f"the output is {output.dtype}, the input {full.dtype}: the dtype is that of `full`")
        return real(output, full, *rest, **named)

    with mock.patch.object(comm, "reduce_scatter", call):
        yield


@check("1.3")
def check_reduce_while(answer, variant):
    """The reduction is issued, the work runs, the wait comes last, and only then is the part read."""
    size = variant.size
    issue, wait = "reduce_scatter", "wait for reduce_scatter"
    for ranks, dtype in ((variant.ranks, torch.float32), (variant.ranks + 1, NARROW)):
        inputs = [numbers(variant.seed, rank, ranks * size, dtype=dtype) for rank in range(ranks)]
        total = torch.stack(inputs).sum(0)
        seen = run(ranks, observe_while, answer, variant.seed, size, dtype)
        for rank, (order, returned, full, origins) in enumerate(seen):
            expect(
                "order",
                order,
                [issue, "work", wait],
                rank=rank,
                slips={
                    "it waits at once: right, and nothing runs while the message is under way": [issue, wait, "work"],
                    "the work is done before anything is under way": ["work", issue, wait],
                    "nobody waits: on gloo the part is unwritten until `wait`": [issue, "work"],
                    "nobody waits, and the work is done first": ["work", issue],
                },
                slip="issue, work, wait",
            )
            if not isinstance(returned, list) or len(returned) != 2:
                raise AnswerError(f"rank {rank}: expected (part of the sum, what work returned), got {returned!r}")
            part, result = returned
            slip = "a buffer under way is neither freed nor changed, and the output is not a part of `full`"
            expect("`full` afterwards", full, inputs[rank], rank=rank, slip=slip)
            if dtype is NARROW:
                check_origins("bfloat16", rank, origins)
            expect(
                "its part of the sum",
                part,
                total[rank * size :][:size],
                rank=rank,
                slips={
                    "the whole sum: asked is this rank's part": total,
                    "this is the mean: asked is the sum, comm.SUM": total[rank * size :][:size] / ranks,
                    "its own data": inputs[rank][rank * size :][:size],
                    "the two results are exchanged: the part comes first": torch.full((2,), float(rank)),
                    "the next call has overwritten it: every call needs a buffer of its own, for its caller keeps it": (
                        total[rank * size :][:size] + ranks
                    ),
                },
                slip="what is copied out before the wait is not the sum",
            )
            expect("what work returned", result, torch.full((2,), float(rank)), rank=rank)
