"""Exercise 15.7: A mean over tokens, not over ranks."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minifsdp import comm
from minifsdp import losses as course_losses
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, describe, on_ranks, same
from minifsdp.course.workshop.references import reference
from minifsdp.losses import IGNORED

from .shared import EXACT, here, randn


@reference(
    "15.7",
    hints=(
        "Start from the end. Which loss would one process compute, and by which number does it divide? Then ask what "
        "your result goes through: the gradients of micro-batches are added up, those of ranks are averaged. What has "
        "to be undone?",
        "T is the number of targets that are not `IGNORED`, summed over the micro-batches and, with one all-reduce, "
        "over the ranks. A micro-batch's loss is the *sum* of its tokens' losses (`reduction=\"sum\"`), times N / T. "
        "`clamp(min=1)` protects against T = 0.",
    ),
    forbids=(course_losses.cross_entropy, course_losses.token_mean, course_losses.TokenMean.__call__),
)
def token_losses(logits: Sequence[Tensor], targets: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Return a loss for each micro-batch, so that the step minimizes the mean over all tokens of all ranks.

    Afterwards, a training loop calls `backward` on each of them, which adds up the gradients of the micro-batches, and
    averages the gradients over the ranks, as DDP and FSDP do. These must then be the gradients of the mean loss of all
    tokens that have a target.

    Args:
        logits: of each of this rank's micro-batches, [b, s, V].
        targets: for each of them, [b, s] int64: the class of each token, or `IGNORED` for a token without a target,
            such as padding. Their number differs from micro-batch to micro-batch and from rank to rank, and may be 0.
        group: the N ranks, which have different tokens.

    Returns:
        Scalars with a graph. They are 0 if no token has a target. There is one message, an all-reduce of one number.
    """
    tokens = torch.stack([(each != IGNORED).sum() for each in targets]).sum()
    comm.all_reduce(tokens, group).wait()
    sums = [
        F.cross_entropy(rows.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
        for rows, wanted in zip(logits, targets, strict=True)
    ]
    return [each * group.size() / tokens.clamp(min=1) for each in sums]


CLASSES, LENGTH = 5, 4  # tokens of a sequence


def counts_of(ranks, variant):
    """Cases: by their name, the number of targets of each micro-batch of each rank."""
    return {
        "5 targets on rank 0, 1 on each other rank": [[5 if rank == 0 else 1] for rank in range(ranks)],
        "ranks and micro-batches of different sizes": [[7 - rank, 1 + rank, 3] for rank in range(ranks)],
        "a rank without targets": [[3, 2 + rank] if rank < ranks - 1 else [0, 0] for rank in range(ranks)],
        "a micro-batch without targets": [[0, 4 + rank] for rank in range(ranks)],
        "one target in all": [[1 if rank == 0 else 0] for rank in range(ranks)],
        "no targets at all": [[0, 0]] * ranks,
        "as many everywhere": [[variant.size % 8, variant.size % 8]] * ranks,
    }


def micro_batch(count, seed, rank):
    """Logits [b, s, V] and targets [b, s]; `count` targets, in random places, are not ignored."""
    rows = max(2, -(-count // LENGTH) + rank % 2)
    draw = torch.Generator().manual_seed(31 * seed + rank)
    targets = torch.full((rows * LENGTH,), IGNORED)
    places = torch.randperm(len(targets), generator=draw)[:count]
    targets[places] = torch.randint(CLASSES, (count,), generator=draw)
    return randn(rows, LENGTH, CLASSES, seed=seed + 5, rank=rank), targets.view(rows, LENGTH)


def of_rank(counts, seed, rank):
    return [micro_batch(count, seed + 10 * at, rank) for at, count in enumerate(counts[rank])]


def observe_losses(answer, cases, seed):
    group = comm.world()
    found = []
    for counts in cases.values():
        logits, targets = zip(*of_rank(counts, seed, group.rank()), strict=True)
        leaves = [each.requires_grad_() for each in here(*logits)]
        with comm.record() as calls:
            got = answer(leaves, here(*targets), group)
        if not isinstance(got, list | tuple) or not all(isinstance(each, Tensor) and each.ndim == 0 for each in got):
            raise AnswerError(f"expected a list of scalars, one for each micro-batch, got {describe(got)}")
        if len(got) != len(leaves):
            raise AnswerError(f"expected {len(leaves)} losses, one for each micro-batch, got {len(got)}")
        if without := [at for at, each in enumerate(got) if not each.requires_grad]:
            empty = not any(counts[group.rank()][at] for at in without)
            raise AnswerError(f"a loss has no graph: `backward` fails\nlikely slip: {EMPTY if empty else DETACHED}")
        for each in got:
            each.backward()
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        sent = [(call.op, call.payload) for call in calls]
        found.append((torch.stack([each.detach() for each in got]), gradients, sent))
    return found


DETACHED = "use the logits, not a detached copy"
EMPTY = "a micro-batch without targets needs a zero with a graph: a sum over no tokens"


def summed(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


@check("15.7")
def check_token_losses(answer, variant):
    """Every token counts the same, on any rank and in any micro-batch."""
    cases = counts_of(variant.ranks, variant)
    seen = on_ranks(variant.ranks, observe_losses, answer, cases, variant.seed)
    rows = [
        (where, counts, rank, *found[at])
        for at, (where, counts) in enumerate(cases.items())
        for rank, found in enumerate(seen)
    ]
    for where, _, rank, losses, _, _ in rows:
        if not losses.isfinite().all():
            raise AnswerError(
                f"rank {rank}, losses, {where}: expected numbers, got {describe(losses)}\nlikely slip: the mean over "
                "no tokens is 0 / 0; a sum over none is 0, and a count may be clamped to 1"
            )
    known = [weighed(counts, rank, variant) for _, counts, rank, *_ in rows]
    slips = {
        text
        for text in known[0][1]
        if all(same(row[3], each[text], 1e-9) for row, (_, each) in zip(rows, known, strict=True))
    }
    for (where, counts, rank, losses, gradients, sent), (right, wrong) in zip(rows, known, strict=True):
        named = {text: value for text, value in wrong.items() if text in slips}
        EXACT(f"losses, {where}", losses, right, rank=rank, slips=named, slip=USUAL)
        mine = of_rank(counts, variant.seed, rank)
        shares = (right / torch.stack([summed(*each) for each in mine])).nan_to_num()
        for micro, ((logits, targets), share) in enumerate(zip(mine, shares, strict=True)):
            leaf = logits.requires_grad_()
            (wanted,) = torch.autograd.grad(summed(leaf, targets) * share, leaf)
            EXACT(f"gradient of the logits of micro-batch {micro}, {where}", gradients[micro], wanted, rank=rank)
        if len(sent) > 1 or any(op != "all_reduce" or size > 8 for op, size in sent):
            said = ", ".join(f"{op} of {size} bytes" for op, size in sent)
            raise AnswerError(
                f"rank {rank}, messages, {where}: expected one all_reduce of one number, got {said}\nlikely slip: "
                "add up the counts of the micro-batches first, and send one number; losses need not be sent"
            )


USUAL = "a loss is the sum of its own tokens' losses, times the number of ranks, over the number of all targets"


def weighed(counts, rank, variant):
    """The right losses of a rank's micro-batches, and those that mistakes give, by their explanation."""
    mine = of_rank(counts, variant.seed, rank)
    sums = torch.stack([summed(*each) for each in mine])
    tokens = torch.tensor(counts[rank], dtype=torch.float64)
    ranks, micros, total = len(counts), len(mine), float(sum(map(sum, counts)))
    of_micro = torch.tensor(counts, dtype=torch.float64).sum(0)
    everything = sum(logits[..., 0].numel() for r in range(ranks) for logits, _ in of_rank(counts, variant.seed, r))
    own = sums / tokens.clamp(min=1)
    return sums * ranks / max(1.0, total), {
        "this is a mean of means: a rank's mean is over its own tokens, and the mean over ranks gives all ranks the "
        "same weight": sums / tokens.sum().clamp(min=1),
        "this is a mean of means: each micro-batch is divided by its own number of tokens": own / micros,
        "the gradients of the micro-batches add up: these are m means": own,
        "tokens without a target are counted, too": sums * ranks / everything,
        "the gradients are averaged over the ranks afterwards, which divides by N once more: multiply by N": (
            sums / max(1.0, total)
        ),
        "this divides by the tokens of the same micro-batch on all ranks: micro-batches also differ in size": (
            sums * ranks / of_micro.clamp(min=1) / micros
        ),
        "the gradients of micro-batches add up, and nothing divides by m: N / T is all": sums
        * ranks
        / max(1.0, total)
        / micros,
        "the gradients of micro-batches add up, and nothing divides by m: no factor m is missing": sums
        * ranks
        * micros
        / max(1.0, total),
        "the mean number of targets of a rank may lie between 0 and 1: clamp the number of all targets": (
            sums / max(1.0, total / ranks)
        ),
        "T is the number of targets of all ranks; this is N times this rank's number": sums
        / tokens.sum().clamp(min=1)
        / ranks,
    }
