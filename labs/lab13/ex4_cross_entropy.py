"""Exercise 13.4: The loss from sharded logits."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, describe, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.tensor_parallel import layouts, loss

from .shared import Operator, exact, here, kinds, part, randn


@reference(
    "13.4",
    hints=(
        "The loss is log(sum of exp(x - m)) - (x_target - m), for any m that is the same on all ranks. Each rank has a "
        "part of the sum; only one rank has the target's logit. Which of the three numbers must be known first?",
        "The maximum comes first: all-reduce `logits.detach().amax(-1)` with `comm.MAX`. Then compute this rank's sum "
        "of exponentials, and the target's logit, or 0 if another rank has the target: gather with the index replaced "
        "by 0 in that case, then mask. `g(torch.stack([sums, wanted]))` sums both over the ranks, and autograd does "
        "the rest.",
    ),
    forbids=(loss.cross_entropy, loss._TokenLosses.forward),
)
def cross_entropy(logits: Tensor, targets: Tensor, first: int, group: Group, g: Operator) -> Tensor:
    """Compute the mean cross-entropy of logits that are sharded along the vocabulary.

    The backward pass needs no message if `g` computes the two sums. The maximum over the ranks needs no
    gradient: use `comm.all_reduce(tensor, group, comm.MAX).wait()` on a detached tensor.

    Args:
        logits: [tokens, V_r], the logits of this rank's classes. There is at least one, and values are finite.
        targets: [tokens] int64, from 0 to V - 1, replicated. Most are classes of other ranks.
        first: the index of this rank's first class.
        group: the t ranks.
        g: the g of 13.2, which sums in the forward pass and copies in the backward pass.

    Returns:
        The mean over the tokens: a scalar of the logits' dtype, the same on every rank.
    """
    largest = logits.detach().amax(-1)
    comm.all_reduce(largest, group, comm.MAX).wait()
    shifted = logits - largest[:, None]
    index = targets - first
    here = (index >= 0) & (index < logits.shape[1])
    wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
    sums = g(torch.stack([shifted.exp().sum(-1), wanted]))
    return (sums[0].log() - sums[1]).mean()


IN_FLOAT32 = "float32"
TOKENS_APART, ONE_LARGE = "large and small tokens", "large logits on one rank"


def losses_of(variant):
    """Ranks, name, logits and targets of each case: even parts, a short part, and logits far from zero."""
    for t in dict.fromkeys((variant.ranks, 3)):
        for name, classes, far, spread in (
            ("even parts", 4 * t, 0.0, t),
            ("a short part", 3 * t - 1, 0.0, t),
            ("large logits", 4 * t, 2e3, t),
            (ONE_LARGE, 4 * t, 2e3, 1),
            (TOKENS_APART, 4 * t, 0.0, t),
            ("the lab's vocabulary", 257, 0.0, t),
            ("one class for each rank", t, 0.0, t),
            (IN_FLOAT32, 4 * t, 0.0, t),
        ):
            logits = randn(variant.size + 4, classes, seed=variant.seed + classes)
            logits[:, : classes * spread // t] += far
            if name == TOKENS_APART:
                logits[::2] -= 2e3
            width, even = -(-classes // t), classes // t
            edges = [5, 0, width - 1, width, classes - 1, even - 1, even, 2 * even - 1, 2 * even, 2 * width]
            targets = torch.tensor(edges + list(range(variant.size)))[: variant.size + 4] % classes
            yield t, name, logits.float() if name == IN_FLOAT32 else logits, targets
            if name == "even parts":
                yield t, "one token", logits[:1], targets[:1]


def observe_losses(answer, cases):
    group = comm.world()
    t, rank, found = group.size(), group.rank(), []
    for name, *case in cases:
        logits, targets = here(*case)
        mine = part(logits, 1, t, rank).clone().requires_grad_()
        first = min(rank * -(-logits.shape[1] // t), logits.shape[1])
        given = mine.detach().clone(), targets.clone()
        try:
            with comm.record() as forward:
                loss = answer(mine, targets, first, group, partial(layouts.g, group=group))
        except (IndexError, RuntimeError) as error:
            if "index" not in str(error):
                raise
            raise AnswerError(
                f"{name}, rank {rank}: it raises {error}\nlikely slip: a token's target may be on another rank: "
                "subtract `first` from it, read column 0 if the target is not on this rank, and replace that value by 0"
            ) from error
        if not isinstance(loss, Tensor):
            raise AnswerError(f"expected the loss as a tensor, got {describe(loss)}")
        if not loss.requires_grad:
            raise AnswerError(
                "the loss: expected a tensor that requires a gradient, got one that does not\nlikely slip: only the "
                "maximum needs no gradient: sum the exponentials and the target's logit over the ranks with `g`, "
                "without `detach()` or `no_grad()`"
            )
        with comm.record() as backward:
            (3 * loss).sum().backward()
        gradient = torch.zeros_like(mine) if mine.grad is None else mine.grad
        same = torch.equal(mine.detach(), given[0]) and torch.equal(targets, given[1])
        found.append((loss.detach(), gradient, kinds(forward), kinds(backward), same))
    return found


@check("13.4")
def check_cross_entropy(answer, variant):
    """Loss and gradient are those of the full logits, even large ones; only three numbers per token are sent."""
    cases = list(losses_of(variant))
    for t in dict.fromkeys(each[0] for each in cases):
        mine = [each[1:] for each in cases if each[0] == t]
        for rank, found in enumerate(on_ranks(t, observe_losses, answer, mine)):
            for case, seen in zip(mine, found, strict=True):
                compare_loss(seen, case, t, rank)


def compare_loss(seen, case, t, rank):
    loss, gradient, forward, backward, same = seen
    name, logits, targets = case
    where = f"{name}: {logits.shape[1]} classes on {t} ranks"
    whole = logits.clone().requires_grad_()
    right = F.cross_entropy(whole, targets)
    (3 * right).backward()
    gathered = [each for each in forward if each.startswith("all_gather")]
    if gathered:
        raise AnswerError(
            f"rank {rank}, messages of {where}: expected all-reduces of three numbers per token, got {gathered[0]}\n"
            "likely slip: logits must not be gathered, because they are the largest tensor of all"
        )
    slips = loss_slips(logits, targets, t, rank)
    slip = (
        "compare with log(sum of exp(x - m)) - (x_target - m): the maximum m and the sum are over all ranks, and only "
        "the rank with the target contributes x_target - m, the others 0"
    )
    if not bool(torch.isfinite(loss).all()):
        slip = "exp of a large logit is inf: first subtract the token's maximum over all ranks"
        if name == TOKENS_APART:
            slip = "each token has a maximum of its own, over its classes: all exponentials of the others become 0"
        elif name == ONE_LARGE and bool(loss.gt(0).all()):
            slip = (
                "the target's probability is 0 in floating point, and log 0 is -inf: subtract x_target - m from the log"
            )
        elif bool(loss.lt(0).all()):
            slip = "all exponentials are 0, because the ranks' maxima were added up: reduce them with `comm.MAX`"
    close = exact if logits.dtype == torch.float64 else partial(expect, tolerance=1e-5)
    if loss.dtype != logits.dtype:
        slip = f"the loss has the dtype of the logits, {logits.dtype}"
    close(f"the loss, {where}", loss, right.detach(), rank=rank, slips=slips, slip=slip)
    numbers = len(targets) * logits.dtype.itemsize
    slips = {
        "either the sum of exponentials or the target's logit was not summed over the ranks": (
            [f"all_reduce of {numbers} bytes"] * 2
        ),
    }
    sizes = [int(each.split()[2]) for each in forward if each.startswith("all_reduce")]
    if len(sizes) != len(forward) or sum(sizes) != 3 * numbers:
        expect(
            f"messages, {where}",
            forward,
            [f"all_reduce of {numbers} bytes", f"all_reduce of {2 * numbers} bytes"],
            rank=rank,
            slips=slips,
            slip="send three numbers per token: first a maximum, then a sum and the target's logit",
        )
    wanted = part(whole.grad, 1, t, rank)
    own = part(logits, 1, t, rank).softmax(1) * 3 / len(targets)
    hot = part(F.one_hot(targets, logits.shape[1]).double(), 1, t, rank) * 3 / len(targets)
    slips = {
        "the gradient is t times too large: it must not be summed in the backward pass": t * wanted,
        "this is the softmax over only this rank's classes; divide by the sum over all ranks": own - hot,
        "the gradient of the target's logit is missing": wanted + hot,
        "the softmax is missing: the sum of exponentials went through a collective without a derivative; use g": -hot,
    }
    slip = "the maximum cancels in the loss, so it needs no gradient: `detach()` it"
    close(f"the gradient of the logits, {where}", gradient, wanted, rank=rank, slips=slips, slip=slip)
    expect(
        f"messages backward, {where}", backward, [], rank=rank, slip="nothing is sent in the backward pass: g copies"
    )
    expect(f"logits and targets unchanged, {where}", same, True, rank=rank, slip="do not change logits or targets")


def loss_slips(logits, targets, t, rank):
    """The losses that usual mistakes give on a rank."""
    parts = [part(logits, 1, t, r) for r in range(t)]
    owners = targets // -(-logits.shape[1] // t)
    wanted, largest = logits.gather(1, targets[:, None])[:, 0], logits.amax(1)
    maxima = torch.stack([each.amax(1) for each in parts])
    sums = torch.stack([(each - m[:, None]).exp().sum(1) for each, m in zip(parts, maxima, strict=True)])
    total = (logits - largest[:, None]).exp().sum(1)
    own = (parts[rank] - largest[:, None]).exp().sum(1)
    theirs = maxima.gather(0, owners[None])[0]
    right = total.log() - (wanted - largest)
    centred = [each - largest[:, None] for each in parts]
    firsts = [sum(each.shape[1] for each in parts[:r]) for r in range(t)]
    shift = sum(
        F.pad(each - largest[:, None], (0, logits.shape[1])).gather(1, targets[:, None])[:, 0] for each in parts
    )
    slips = {
        "this is the sum over the tokens; return their mean": right.sum(),
        "these are the losses of the tokens; return their mean, a single number": right,
        "each rank has subtracted its own maximum: exponentials add up only if all ranks subtract the same one": (
            sums.sum(0).log() - (wanted - theirs)
        ).mean(),
        "the sum of exponentials is only this rank's: add up those of all ranks": (
            own.log() - (wanted - largest)
        ).mean(),
        "the maximum was subtracted in the sum, but not from the target's logit": (total.log() - wanted).mean(),
        "the index of a target on this rank is relative to `first`": (total.log() - shift).mean(),
        "`first` is given: rank times this rank's number of classes is another number where the last rank has fewer": (
            total.log() - found_at(centred, targets, [r * each.shape[1] for r, each in enumerate(parts)])
        ).mean(),
        "a rank has the classes from `first` to `first` + V_r - 1: one more was counted": (
            total.log() - found_at(centred, targets, firsts, more=1)
        ).mean(),
        "the target's logit is missing": total.log().mean(),
        "the target's logit is missing on ranks that do not have it: sum it over the ranks": (
            total.log() - (wanted - largest) * (owners == rank)
        ).mean(),
    }
    for column, others in foreign_logits([each - largest[:, None] for each in parts], targets, owners).items():
        text = f"{column} was counted on ranks that do not have the target; those ranks contribute 0"
        slips[text] = (right - others).mean()
    return {text: wrong for text, wrong in slips.items() if bool(torch.isfinite(wrong).all())}


def found_at(parts, targets, firsts, more=0):
    """The sum of what the ranks find for each target, if classes begin at `firsts`, with some `more` at the end."""
    total = 0.0
    for each, first in zip(parts, firsts, strict=True):
        index, last = targets - first, each.shape[1] - 1
        here = (index >= 0) & (index <= last + more)
        total = total + each.gather(1, index.clamp(0, last)[:, None])[:, 0] * here
    return total


def foreign_logits(parts, targets, owners):
    """For each way to choose a column for another rank's target: the sum of these logits, [tokens]."""
    sums, first = {}, 0
    for r, each in enumerate(parts):
        index, last = targets - first, each.shape[1] - 1
        columns = {"column 0": 0 * index, "the nearest column": index.clamp(0, last), "a column": index % (last + 1)}
        for name, column in columns.items():
            sums[name] = sums.get(name, 0) + each.gather(1, column[:, None])[:, 0] * (owners != r)
        first += each.shape[1]
    return sums
