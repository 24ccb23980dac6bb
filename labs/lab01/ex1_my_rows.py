"""Exercise 1.1: Who am I."""

from itertools import pairwise

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device

from .shared import numbers, run, worlds


@reference(
    "1.1",
    hints=(
        "`group.rank()` is r, `group.size()` is N. With N = 2 and 7 rows the blocks are 0 to 2 and 3 to 6: where does "
        "the block of rank r begin, if that of rank 0 begins at 0 and that of a rank N would begin at 7?",
        "The block of rank r begins at `r * rows // N` and ends where that of rank r + 1 begins; slice `batch` there.",
    ),
)
def my_rows(batch: Tensor, group: Group) -> Tensor:
    """Return this rank's block of the rows of `batch` [rows, ...], as a view.

    The blocks of ranks 0, 1, ..., N - 1, concatenated in this order, give the batch. Their sizes
    differ by at most one row. Copy nothing and send no message: `group.rank()` and `group.size()`
    are enough.
    """
    rank, ranks, rows = group.rank(), group.size(), len(batch)
    return batch[rank * rows // ranks : (rank + 1) * rows // ranks]


def observe_all_rows(answer, batches):
    return [observe_rows(answer, batch) for batch in batches]


def observe_rows(answer, batch):
    batch = batch.to(rank_device())
    with comm.record() as log:
        mine = answer(batch, comm.world())
    shares = isinstance(mine, torch.Tensor) and mine.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()
    return mine.cpu() if isinstance(mine, torch.Tensor) else mine, shares, [call.op for call in log], batch.cpu()


@check("1.1")
def check_my_rows(answer, variant):
    """Every row on exactly one rank, in rank order, no rank with more than one row above another, and no message."""
    for ranks in worlds(variant):
        batches = [numbers(variant.seed, 0, rows, 3) for rows in (4 * ranks, variant.size, 2 * ranks + 1)]
        few = numbers(variant.seed, 1, max(1, ranks - 1), 2, 3)  # of a batch of three dimensions
        columns = numbers(variant.seed, 2, 3, 2 * ranks).t()  # in memory, so that there is no flat view
        batches += [few, columns, numbers(variant.seed, 3, variant.size + 1), torch.ones(0, 2)]
        found = run(ranks, observe_all_rows, answer, batches)
        for number, batch in enumerate(batches):
            seen, rows, shape = [each[number] for each in found], len(batch), list(batch.shape[1:])
            for rank, (mine, shares, log, after) in enumerate(seen):
                expect("messages", log, [], rank=rank, slip="every rank has the batch and knows who it is")
                if not isinstance(mine, torch.Tensor) or list(mine.shape[1:]) != shape or mine.dim() != batch.dim():
                    raise AnswerError(
                        f"rank {rank}: expected rows of the batch, a tensor {['any', *shape]}, got {mine!r}"
                    )
                expect("`batch` afterwards", after, batch, rank=rank, slip="it is only read")
                expect("whether its rows are a view of the batch", shares, True, rank=rank, slip="an index list copies")
            parts = [mine for mine, *_ in seen]
            where = f"{rows} rows over {ranks} ranks"
            together = torch.cat(parts)
            kept = rows // ranks * ranks
            every = torch.cat([batch[rank::ranks] for rank in range(ranks)])
            begins = [rank * rows // ranks for rank in range(ranks)]
            least = torch.cat([batch[begin:][: max(1, end - begin)] for begin, end in pairwise([*begins, rows])])
            few_rows = {"with fewer rows than ranks some ranks have none, not one that another has, too": least}
            lost = f"rows // N drops the remainder: of {rows} rows {rows % ranks} on no rank"
            expect(
                f"{where}: all ranks' rows, put together",
                together,
                batch,
                slips=(few_rows if rows < ranks else {})
                | {
                    lost: batch[:kept],
                    "every N-th row is fair too, as torch's DistributedSampler takes it; asked is a block": every,
                    "every rank has all rows: the same data on all ranks teaches the model nothing more": torch.cat(
                        [batch] * ranks
                    ),
                    "the first block is on no rank, ranks count from 0 to N - 1": batch[-(-rows // ranks) :],
                },
                slip="the blocks of the ranks must meet: one ends where the next begins",
            )
            sizes = [len(part) for part in parts]
            expect(
                f"{where}: most rows of a rank less fewest",
                max(sizes) - min(sizes) <= 1,
                True,
                slip=f"the ranks have {sizes} rows: the slowest rank sets the pace, so spread the remainder",
            )
