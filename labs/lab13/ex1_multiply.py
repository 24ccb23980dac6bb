"""Exercise 13.1: Multiply."""

import re
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, describe, expect, on_ranks, same
from minifsdp.course.workshop.late import link_of
from minifsdp.course.workshop.references import reference
from minifsdp.tensor_parallel import layouts

from .shared import ITEM, exact, here, kinds, part, randn


@reference(
    "13.1",
    hints=(
        "`w.chunk(t, dim)` returns the parts, possibly fewer than t. For rows: which columns of x does a rank multiply "
        "by its rows of w, and how do the ranks' matmuls combine into the result? For columns: the gather needs "
        "shards of equal size, and joins them along the first dimension.",
        "For columns: pad this rank's shard of w with zeros at the end to [in, ceil(out / t)], gather the results into "
        "[t, rows, ceil(out / t)], apply `movedim(0, 1)` and `flatten(1)`, and drop the columns beyond `out`. For "
        "rows: take the same slice of x's columns and of w's rows, then all-reduce the partial sum. An empty slice "
        "gives a partial sum of zeros.",
    ),
    forbids=(layouts.move, layouts.relaid, layouts.all_gathered, layouts.all_reduced, layouts.part_of),
)
def multiply(x: Tensor, w: Tensor, by: Literal["columns", "rows"], group: Group) -> Tensor:
    """Compute x w. Each rank multiplies only by its shard of w.

    `comm.all_gather(output, part, group).wait()` joins shards of equal size along the first dimension.
    `comm.all_reduce(tensor, group).wait()` sums in place. Both need contiguous tensors.

    Args:
        x: [rows, in], the same on every rank of `group`.
        w: [in, out], the same on every rank. Each rank multiplies only by its shard.
        by: the dimension along which w is split. The shards are those of `torch.chunk`: ceil(length / t)
            columns or rows each; the last ranks may have fewer, or none.
        group: the t ranks, which may be only some of the ranks in the world.

    Returns:
        [rows, out], the full result on every rank, in any memory layout, after a single collective.
    """
    t, rank = group.size(), group.rank()
    if by == "rows":
        size = -(-w.shape[0] // t)
        mine = slice(rank * size, (rank + 1) * size)
        product = x[:, mine] @ w[mine]
        comm.all_reduce(product, group).wait()
        return product
    size = -(-w.shape[1] // t)
    part = w[:, rank * size : (rank + 1) * size]
    product = x @ F.pad(part, (0, size - part.shape[1]))
    gathered = product.new_empty(t, *product.shape)
    comm.all_gather(gathered.view(-1), product.view(-1), group).wait()
    return gathered.movedim(0, 1).flatten(1)[:, : w.shape[1]]


def tensor(what, got, rank):
    if not isinstance(got, Tensor):
        raise AnswerError(f"rank {rank}, {what}: expected a tensor, got {describe(got)}")
    return got.detach()


def factors(variant, t):
    """x [rows, in] and w [in, out]: the example, then even parts, short parts, and ranks without a part."""
    rows = variant.size
    even = (rows, 2 * t, 3 * t)
    sizes = (even, (3, 2 * t + 1, 2 * t + 1), (rows, 1, 5), (2, 5, 1), (1, t + 1, t + 1))
    example = torch.tensor([[1.0, 2, 3], [4, 5, 6]]).double(), torch.tensor([[1.0, 2], [3, 4], [5, 6]]).double()
    others = [(randn(m, k, seed=variant.seed), randn(k, n, seed=variant.seed + 1)) for m, k, n in sizes]
    again = randn(*even[:2], seed=variant.seed + 2), randn(*even[1:], seed=variant.seed + 3)
    turned = [each.t().contiguous().t() for each in again]  # the same, stored column by column
    return [example, *others, again, turned]


TOO_FEW = (
    "`chunk` returns fewer than t parts if the dimension is short: the last ranks then have no columns, or no rows"
)
UNEQUAL = (
    "an all-gather needs shards of equal size, but the last ranks have fewer columns: pad every rank's result with "
    "zeros to ceil(out / t) columns, and remove the columns beyond `out` after the gather"
)


class Sent:
    """A link that notes what this rank sends."""

    def __init__(self, link):
        self.link, self.values = link, []

    def submit(self, call, collective):
        self.values.append([each for each in collective.args if isinstance(each, Tensor)][-1].flatten().tolist())
        return collective() if self.link is None else self.link.submit(call, collective)


def observe_multiply(answer, cases):
    """For each case and split: product, messages, floating-point operations, whether x and w are unchanged, values."""
    found = []
    for by in ("columns", "rows"):
        for case in cases:
            x, w = here(*case)
            given = x.clone(), w.clone()
            try:
                with (
                    link_of(Sent(comm.link)) as sent,
                    comm.record() as calls,
                    FlopCounterMode(display=False) as counter,
                ):
                    got = answer(x, w, by, comm.world())
            except (IndexError, RuntimeError, ValueError) as error:
                slip = TOO_FEW if isinstance(error, IndexError) else UNEQUAL
                if slip == UNEQUAL and not re.search(r"are not \d+ parts of|world_size times input", str(error)):
                    raise
                where = f"{by}, {list(x.shape)} times {list(w.shape)}"
                raise AnswerError(f"{where}: it raises {error!r}\nlikely slip: {slip}") from error
            unchanged = torch.equal(x, given[0]) and torch.equal(w, given[1])
            got = got.cpu() if isinstance(got, Tensor) else got
            found.append((by, *case, got, kinds(calls), counter.get_total_flops(), unchanged, sent.values))
    return found


@check("13.1")
def check_multiply(answer, variant):
    """Every rank has the full result, after one all-gather for columns and one all-reduce for rows."""
    for t in dict.fromkeys((variant.ranks, 3)):
        check_multiply_on(t, answer, variant)


def check_multiply_on(t, answer, variant):
    for rank, found in enumerate(on_ranks(t, observe_multiply, answer, factors(variant, t), slip=UNEQUAL)):
        for by, x, w, got, calls, flops, unchanged, sent in found:
            where = f"{by}, {list(x.shape)} times {list(w.shape)} on {t} ranks"
            dim = 1 if by == "columns" else 0
            size = -(-w.shape[dim] // t)
            slips, usual = (columns_slips if by == "columns" else rows_slips)(x, w, t, rank, size)
            later = [a @ b for _, a, b, *_ in found if (a.shape, b.shape) == (x.shape, w.shape)]
            if any(same(got, each, 1e-12) for each in later):
                usual = "its buffer is kept from call to call, and a later call overwrites what this one returned"
            exact(f"result by {where}", tensor(where, got, rank), x @ w, rank=rank, slips=slips, slip=usual)
            messages(where, calls, (x, w, t, size), by, rank)
            most = 2 * x.shape[0] * w.numel() // w.shape[dim] * size
            if flops > most:
                raise AnswerError(
                    f"rank {rank}, {where}: expected at most {most:,} floating-point operations, got {flops:,}\n"
                    "likely slip: each rank has to multiply only by its shard of w; otherwise, nothing is gained"
                )
            mine = part(w, dim, t, rank)
            own = x @ mine if by == "columns" else part(x, 1, t, rank) @ mine
            slip = "the shards are those of `chunk`, ceil(length / t) long: `tensor_split` evens lengths out"
            missing = [value for value in own.flatten().tolist() if min(abs(value - v) for v in sent[0]) > 1e-9]
            expect(f"values of its own result that it does not send, {where}", missing, [], rank=rank, slip=slip)
            slip = "x and w belong to the caller: do not change them"
            expect(f"x and w unchanged, {where}", unchanged, True, rank=rank, slip=slip)


def columns_slips(x, w, t, rank, size):
    padded = F.pad(w, (0, t * size - w.shape[1]))
    parts = [x @ part for part in padded.split(size, 1)]
    slips = {
        "the gather joins along the first dimension, [t, rows, out / t]; `movedim` places the shards side by side": (
            torch.cat(parts).view(x.shape[0], -1)[:, : w.shape[1]]
        ),
        "the shards belong side by side, along dimension 1, not one below the other": torch.cat(parts),
        "the columns beyond `out` are padding": x @ padded,
        "this is only this rank's shard; return the full result": x @ w[:, rank * size : (rank + 1) * size],
        "each column of the result is counted t times in a sum over the ranks": t * (x @ w),
    }
    return slips, "rank r has the columns of w and of the result that start at r · ceil(out / t)"


def rows_slips(x, w, t, rank, size):
    mine = slice(rank * size, (rank + 1) * size)
    partial_sum = x[:, mine] @ w[mine]
    some = -(-w.shape[0] // size)  # ranks with rows
    last = slice((some - 1) * size, some * size)
    slips = {
        "a rank without rows adds zeros; here, the last rows are added again": (
            x @ w + (t - some) * (x[:, last] @ w[last]) if some < t else None
        ),
        "this is only this rank's partial sum: the partial sums of all ranks have to be added up": partial_sum,
        "partial sums are added up; a mean also divides by t": x @ w / t,
        "this is the maximum of the ranks' partial sums, not their sum": torch.stack(
            [x[:, each] @ w[each] for each in (slice(r * size, (r + 1) * size) for r in range(t))]
        ).amax(0),
    }
    return slips, "rank r multiplies its columns of x by its rows of w; both start at r · ceil(in / t)"


def messages(where, calls, sizes, by, rank):
    x, w, t, size = sizes
    rows = x.shape[0]
    product = rows * w.shape[1] * ITEM
    one = f"all_gather of {t * rows * size * ITEM} bytes" if by == "columns" else f"all_reduce of {product} bytes"
    weight = "the weight was gathered, as FSDP does; here each rank keeps its shard of the weight and sends its result"
    slips = {
        "nothing was sent: either every rank has multiplied full matrices, or the collective is not from `comm`": [],
        "partial sums need no gather: an all-reduce adds them up and sends only 2 (t - 1) / t of their size": [
            f"all_gather of {t * product} bytes"
        ],
        "an all-reduce of columns padded with zeros sends twice as much as a gather": [
            f"all_reduce of {product} bytes"
        ],
        "an all-reduce of padded columns sends twice as much as a gather": [
            f"all_reduce of {t * rows * size * ITEM} bytes"
        ],
        weight: [f"all_gather of {w.numel() * ITEM} bytes"],
    }
    slip = "columns need one all-gather of the results; rows need one all-reduce"
    op, size_of = one.split()[0], int(one.split()[2])
    slips |= {
        f"the result is sent in another dtype than that of x and w: {factor} times the bytes": [
            f"{op} of {int(size_of * factor)} bytes"
        ]
        for factor in (0.25, 0.5, 2)
        if not any([f"{op} of {int(size_of * factor)} bytes"] == each for each in slips.values())
    }
    if len(calls) > 1:
        slip = "one message is enough: " + ("an all-gather" if by == "columns" else "an all-reduce")
    expect(f"messages of {where}", calls, [one], rank=rank, slips=slips, slip=slip)
