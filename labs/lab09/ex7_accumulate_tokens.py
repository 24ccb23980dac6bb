"""Exercise 9.7: A mean over tokens, on ranks with different numbers of them."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifsdp import FullyShardedDataParallel, comm
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks, same
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.engine import Engine
from minifsdp.instruments.launch import rank_device
from minifsdp.losses import IGNORED, TokenMean, token_mean

from .shared import FP64, shards_of


@reference(
    "9.7",
    hints=(
        "One process with all micro-batches of all ranks would divide by a number. Which? No rank knows it, but it is "
        "needed before the first backward. Then follow a gradient: micro-batches are added up, ranks are averaged. "
        "What has to be undone?",
        "T is the number of targets that are not `IGNORED`, summed over this rank's micro-batches and, with one "
        "all-reduce, over the ranks; `clamp(min=1)` protects against T = 0. The loss of every micro-batch is the *sum* "
        "of what the model returns, times N / T. The rest is 9.5 without communication.",
    ),
    forbids=(token_mean, TokenMean.__call__),
)
def accumulate_tokens(model: Any, micro_batches: Sequence[tuple[Tensor, Tensor]], group: Group) -> None:
    """Add the gradient of the mean loss over the targets of all ranks and micro-batches to the shards' `.grad`.

    Args:
        model: an FSDP model that returns the loss of each token, [b, s]: `model(tokens, targets)`. A mask multiplies
            the losses of tokens without a target by 0. Gradients are averaged over the ranks; `model.no_sync()` is the
            one of 9.5.
        micro_batches: this rank's k pairs of tokens and targets, [b, s] int64 each. A token without a target, such as
            padding, has `IGNORED`. The number of targets differs between micro-batches and ranks, and may be 0.
        group: the N ranks, which have different tokens and the same k.

    Every target counts the same, on any rank and in any micro-batch. If there is none at all, the gradient is 0.

    All-reduce one number, with `comm.all_reduce(tensor, group).wait()`, before the first backward pass. Run one forward
    and one backward pass per micro-batch, in turn, and reduce all gradients together, in the backward of the last one.
    Add to any gradients already in `.grad`.
    """
    targets = torch.stack([(each != IGNORED).sum() for _, each in micro_batches]).sum()
    comm.all_reduce(targets, group).wait()
    weight = group.size() / targets.clamp(min=1)
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if number == len(micro_batches) else model.no_sync():
            (weight * model(*micro_batch).sum()).backward()


CLASSES, LENGTH = 7, 4  # tokens of a sequence

Counts = list[list[int]]  # targets of each micro-batch of each rank


class Net(nn.Module):
    """Returns the loss of each token, times a mask of those with a target, as many trainers do: 0 times NaN is NaN."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(CLASSES, 5, dtype=FP64), nn.Linear(5, CLASSES, dtype=FP64)

    def forward(self, tokens, targets):
        logits = self.last(torch.tanh(self.first(F.one_hot(tokens, CLASSES).to(FP64))))
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten().clamp(min=0), reduction="none")
        return losses.view_as(targets) * (targets != IGNORED)


def cases_of(ranks, size) -> dict[str, Counts]:
    """By name; only the last case is one that a mean of means gets right."""
    return {
        "5 targets on rank 0, 1 on each other rank": [[5 if rank == 0 else 1] for rank in range(ranks)],
        "ranks and micro-batches of different sizes": [[7 + rank, 1, 3 * rank + 2] for rank in range(ranks)],
        "a micro-batch without targets": [[4 + rank, 0 if rank == 0 else 2, 3] for rank in range(ranks)],
        "a rank without targets": [[3, 2 + rank] if rank < ranks - 1 else [0, 0] for rank in range(ranks)],
        "a last micro-batch without targets": [[4 + rank, 0] for rank in range(ranks)],
        "no targets at all": [[0, 0]] * ranks,
        "more than 256 targets": [[257 if rank == 0 else 256, 2 * rank] for rank in range(ranks)],  # their sum is odd
        "as many everywhere": [[1 + size % 8, 1 + size % 8]] * ranks,
    }


def rows_for(count, rank):
    """Sequences of a micro-batch: more than it needs, and not as many on all ranks."""
    return max(2, -(-count // LENGTH)) + rank % 2


def micro_batches_of(counts, rank, seed):
    """Pairs of tokens and targets; those that are not ignored are in different places."""
    draw = torch.Generator().manual_seed(100 * seed + rank)
    pairs = []
    for count in counts[rank]:
        rows = rows_for(count, rank)
        tokens = torch.randint(CLASSES, (rows, LENGTH), generator=draw)
        targets = torch.full((rows * LENGTH,), IGNORED)
        targets[torch.randperm(len(targets), generator=draw)[:count]] = torch.randint(CLASSES, (count,), generator=draw)
        pairs.append((tokens, targets.view(rows, LENGTH)))
    return pairs


class Found(NamedTuple):
    """One rank's observations of a case."""

    sent: list[tuple[str, int]]  # operation and bytes of all but FSDP's gathers and reductions
    early: int  # of these, before the end of the first backward
    rows: list[int]  # of each forward
    most: int  # forwards that were waiting for their backward at once
    reduced: list[int]  # reduce-scatters that had been issued after each backward
    first: Tensor  # the shards' gradients
    second: Tensor  # and when called twice


def observe_tokens(answer, cases, seed):
    group = comm.world()
    return [observe_case(answer, micro_batches_of(counts, group.rank(), seed), seed, group) for counts in cases]


def observe_case(answer, pairs, seed, group):
    where = rank_device()
    pairs = [(tokens.to(where), targets.to(where)) for tokens, targets in pairs]
    model = FullyShardedDataParallel(Net(seed).to(where), auto_wrap_policy={nn.Linear})
    rows, reduced, early, waiting = [], [], [], [0, 0]
    end = Engine._end_backward

    def before(module, args):
        rows.append(len(args[0]))
        waiting[0] += 1
        waiting[1] = max(waiting)

    def own():
        return [(call.op, call.payload) for call in calls if call.op not in ("all_gather", "reduce_scatter")]

    def ended(engine):
        end(engine)
        waiting[0] -= 1
        early.append(len(own()))
        reduced.append(sum(call.op == "reduce_scatter" for call in calls))

    def gradients():
        return torch.cat(
            [torch.zeros_like(p).cpu() if p.grad is None else p.grad.cpu().clone() for p in model.parameters()]
        ).detach()

    model.register_forward_pre_hook(before)
    with comm.record() as calls, patch.object(Engine, "_end_backward", ended):
        answer(model, pairs, group)
        sent, forwards, after = own(), rows[:], reduced[:]
        first = gradients()
        answer(model, pairs, group)
    return Found(sent, early[0] if early else 0, forwards, waiting[1], after, first, gradients())


@check("9.7")
def check_accumulate_tokens(answer, variant):
    """The gradient of one process with all tokens, for one all-reduce of one number."""
    cases = cases_of(variant.ranks, variant.size)
    seen = on_ranks(
        variant.ranks,
        observe_tokens,
        answer,
        list(cases.values()),
        variant.seed,
        timeout=10,
        slip="a rank without targets also has to run all forward and backward passes, and the all-reduce: the others "
        "wait for it in each of them",
    )
    found = [list(each) for each in zip(*seen, strict=True)]  # by case, then rank
    sums = [sums_of(counts, variant.seed) for counts in cases.values()]
    weights = [weights_of(counts) for counts in cases.values()]
    made = [text for text in weights[0][1] if all(map(explains(text), found, sums, weights))]
    for (case, counts), ranks, of_case, (right, wrong) in zip(cases.items(), found, sums, weights, strict=True):
        for rank, each in enumerate(ranks):
            check_passes(each, case, counts, rank)
            wanted = weighted(of_case, right)[rank]
            check_numbers(each.first, case, counts, rank)
            expect(
                f"the shards' gradients beside one process with all tokens, {case}",
                each.first,
                wanted,
                rank=rank,
                slips={text: weighted(of_case, wrong[text])[rank] for text in made},
                slip=NEARLY if same(each.first, wanted, 1e-2) else USUAL,
            )
            slips = {
                "dropped what was there: the caller decides when gradients begin anew": wanted,
                "what was in `.grad` before is multiplied, too: give the losses their weight, not the gradients": (
                    wanted + wanted * float(right[0, 0])
                ),
            }
            expect(f"the same, called twice, {case}", each.second, 2 * wanted, rank=rank, slips=slips)
    for (case, _), ranks in zip(cases.items(), found, strict=True):
        for rank, each in enumerate(ranks):
            check_messages(each, case, rank)


USUAL = "the weight of every loss is N / T, with N ranks and T targets on all of them together"
NEARLY = (
    "the count or the weight was rounded: bf16 has no odd numbers above 256, nor fp16 above 2,048; count in integers"
)
NOTHING = "the mean over no targets is 0 / 0: a *sum* over none is 0, and T is clamped to 1"


def check_passes(found, case, counts, rank):
    """One forward and one backward for each micro-batch, in turn; the last one reduces."""
    micros = len(counts[rank])
    slip = "micro-batches exist because the whole batch does not fit: one forward for each"
    expect(
        f"samples of each forward, {case}", found.rows, [rows_for(n, rank) for n in counts[rank]], rank=rank, slip=slip
    )
    slip = "the activations of all micro-batches are alive together: forward and backward in turn"
    expect(f"forwards that wait for their backward at once, {case}", found.most, 1, rank=rank, slip=slip)
    slips = {
        "every micro-batch was reduced: run all but the last inside `no_sync`": [2 * n for n in range(1, micros + 1)],
        "nothing is ever reduced: the last micro-batch has to run outside `no_sync`": [0] * micros,
    }
    wanted = [0] * (micros - 1) + [2]
    expect(
        f"reduce-scatters issued after each backward (2 units), {case}", found.reduced, wanted, rank=rank, slips=slips
    )


def check_numbers(gradients, case, counts, rank):
    if not gradients.isfinite().all():
        slip = (
            NOTHING if any(map(any, counts)) else "N / 0 is infinite, and times a sum of 0 not a number: clamp T to 1"
        )
        raise AnswerError(f"rank {rank}, the shards' gradients, {case}: expected numbers, got NaN\nlikely slip: {slip}")


def check_messages(found, case, rank):
    said = ", ".join(f"{op} of {size} bytes" for op, size in found.sent) or "none"
    if len(found.sent) != 1 or found.sent[0][0] != "all_reduce" or found.sent[0][1] > 8:
        raise AnswerError(
            f"rank {rank}, messages besides FSDP's, {case}: expected one all_reduce of one number, got {said}\nlikely "
            "slip: add up the counts of the micro-batches first, and send one number; losses need not be sent"
        )
    slip = "T is needed before the first backward pass, so count all micro-batches first"
    expect(f"messages before the end of the first backward, {case}", found.early, 1, rank=rank, slip=slip)


def sums_of(counts, seed):
    """[N, k, N, shard]: for each micro-batch of each rank, the shards of the gradient of its tokens' summed losses."""
    found = []
    for rank in range(len(counts)):
        for pair in micro_batches_of(counts, rank, seed):
            net = Net(seed)
            net(*pair).sum().backward()
            shards = [shards_of(unit, len(counts)) for unit in (net.first, net.last)]
            found.append(torch.stack([torch.cat(parts) for parts in zip(*shards, strict=True)]))
    return torch.stack(found).view(len(counts), len(counts[0]), *found[0].shape)


def weighted(sums, weights):
    """[N, shard]: the shards if the losses of micro-batches have these weights [N, k] and FSDP averages over ranks."""
    return (sums * weights[..., None, None]).sum((0, 1)) / len(weights)


def explains(text):
    """True if a mistake explains all finite gradients of a case."""

    def does(found, sums, weights):
        return all(
            same(each.first, wrong, 1e-6)
            for each, wrong in zip(found, weighted(sums, weights[1][text]), strict=True)
            if each.first.isfinite().all()
        )

    return does


def weights_of(counts):
    """The right weights of a case's losses [N, k], and those that mistakes give, by their explanation."""
    targets = torch.tensor(counts, dtype=FP64)
    samples = torch.tensor([[rows_for(n, rank) for n in own] for rank, own in enumerate(counts)], dtype=FP64)
    ranks, micros = targets.shape
    one, all_targets = torch.ones_like(targets), targets.sum().clamp(min=1)
    of_rank, of_micro = targets.sum(1, keepdim=True).clamp(min=1), targets.clamp(min=1)
    across = targets.sum(0).clamp(min=1)
    right = one * ranks / all_targets
    return right, {
        "this is a mean of means: each rank divides by its own number of targets, and the average over the ranks gives "
        "every rank the same weight": one / of_rank,
        "this is a mean of means: each micro-batch is divided by its own number of targets": 1 / of_micro / micros,
        "the gradients of micro-batches add up: these are k means, and nothing makes a mean of them": 1 / of_micro,
        "the mean of a micro-batch is given the share of its samples, and samples differ in targets": (
            samples / samples.sum(1, keepdim=True) / of_micro
        ),
        "FSDP averages the gradients afterwards, which divides by N once more: multiply by N": one / all_targets,
        "N divides twice, and FSDP's average has divided already: multiply by N": one / ranks / all_targets,
        "N is in it twice: FSDP's average takes it out once": right * ranks,
        "nothing divides by the number of targets: these are sums, and FSDP divides them by N": one,
        "nothing divides by the number of targets: these are sums, which N multiplies": one * ranks,
        "tokens without a target are counted, too": one * ranks / samples.sum() / LENGTH,
        "`mean` also divides by the tokens without a target": 1 / samples / LENGTH / micros,
        "k divides as well: the gradients of micro-batches add up, as sums should": right / micros,
        "k multiplies: the gradients of micro-batches add up, and nothing has divided them": right * micros,
        "this divides by the targets of the same micro-batch on all ranks: micro-batches differ in size, too": (
            one * ranks / across / micros
        ),
        "a micro-batch without targets counts as one with a target: clamp the sum, not what is summed": (
            one * ranks / of_micro.sum()
        ),
    }
