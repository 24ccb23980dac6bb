"""Exercise 13.6: A norm on a part of the sequence."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minifsdp import comm
from minifsdp.course.workshop.checking import AnswerError, check, describe, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.tensor_parallel import layouts

from .shared import ITEM, Operator, exact, here, kinds, randn


@reference(
    "13.6",
    hints=(
        "A rank sees only a shard of the tokens, so its gradients of weight and bias are partial sums. You already "
        "have a function that changes nothing in the forward pass and sums gradients in the backward pass.",
        "Return `F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))`. f is applied to the parameters, not to "
        "the tokens.",
    ),
)
def norm(part: Tensor, weight: Tensor, bias: Tensor, f: Operator) -> Tensor:
    """Apply LayerNorm (eps 1e-5) to this rank's tokens. The gradients of weight and bias are sums over all tokens.

    Args:
        part: [b, s / t, h], this rank's tokens.
        weight, bias: [h], the same on every rank.
        f: the f of 13.2, which copies in the forward pass and sums gradients in the backward pass.

    Returns:
        [b, s / t, h].
    """
    return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))


NORMED = ((2, None, 5), (1, 1, 4))  # samples, tokens and features; None: the variant's size


def shape_of(each, size):
    return tuple(size if number is None else number for number in each)


def observe_norms(answer, seed, size):
    return [observe_norm(answer, seed, shape_of(each, size)) for each in NORMED]


def observe_norm(answer, seed, shape):
    group = comm.world()
    mine, weight, bias, gradient = here(
        randn(*shape, seed=seed, rank=group.rank()),
        *(randn(shape[2], seed=seed + number) for number in (11, 12)),
        randn(*shape, seed=seed + 1, rank=group.rank()),
    )
    leaves = [leaf.requires_grad_() for leaf in (mine, weight, bias)]
    given = [leaf.detach().clone() for leaf in leaves]
    with comm.record() as forward:
        y = answer(mine, weight, bias, partial(layouts.f, group=group))
    if not (isinstance(y, Tensor) and y.requires_grad):
        raise AnswerError(f"expected a tensor with a gradient, got {describe(y)}")
    same = [torch.equal(leaf.detach(), was) for leaf, was in zip(leaves, given, strict=True)]
    with comm.record() as backward:
        y.backward(gradient)
    return y.detach(), [leaf.grad for leaf in leaves], kinds(forward), kinds(backward), same


@check("13.6")
def check_norm(answer, variant):
    """Each token is normalized independently; gradients of weight and bias cover all tokens on every rank."""
    for t in dict.fromkeys((variant.ranks, 3)):
        seen = on_ranks(t, observe_norms, answer, variant.seed, variant.size)
        for number, each in enumerate(NORMED):
            compare_norms([found[number] for found in seen], variant.seed, shape_of(each, variant.size), t)


def compare_norms(seen, seed, shape, t):
    own = [one_norm(seed, shape, rank) for rank in range(t)]
    for rank, (y, gradients, forward, backward, unchanged) in enumerate(seen):
        what = f"the norm of {list(shape)} on {t} ranks"
        wanted, mine = own[rank]
        slip = "a norm treats each token independently, so the forward pass needs no message"
        expect(f"{what}, messages forward", forward, [], rank=rank, slip=slip)
        slip = "apply LayerNorm over the last dimension, with eps 1e-5"
        exact(f"{what}, the output", y, wanted, rank=rank, slip=slip)
        slip = "the tokens and the parameters belong to the caller: do not change them"
        expect(f"{what}, tokens, weight and bias unchanged", unchanged, [True] * 3, rank=rank, slip=slip)
        totals = [sum(each[1][number] for each in own) for number in range(3)]
        slips = {
            "f was applied to the tokens and added up gradients of different tokens: apply it to the parameters": (
                totals[0]
            ),
            "f was applied to the output and added up gradients of different tokens: apply it to weight and bias": (
                one_norm(seed, shape, rank, gradients_of=range(t))[1][0]
            ),
        }
        slip = "only the gradients of weight and bias are summed; that of the input covers only this rank's tokens"
        exact(f"{what}, the gradient of its input", gradients[0], mine[0], rank=rank, slips=slips, slip=slip)
        for number, name in ((1, "weight"), (2, "bias")):
            got = torch.zeros_like(totals[number]) if gradients[number] is None else gradients[number]
            slips = {
                f"this covers only this rank's tokens: the ranks' gradients of the {name} are partial sums": (
                    mine[number]
                ),
                "partial sums are added up; a mean also divides by t": totals[number] / t,
                "f was applied once too often: this is a sum of sums": t * totals[number],
                f"the {name} is a parameter and needs a gradient": torch.zeros_like(got),
            }
            exact(f"{what}, the gradient of its {name}", got, totals[number], rank=rank, slips=slips)
        size_of = sum(int(each.split()[2]) for each in backward)
        slip = "the gradients of weight and bias are summed, and nothing else is sent"
        expect(f"{what}, bytes of messages backward", size_of, 2 * shape[2] * ITEM, rank=rank, slip=slip)


def one_norm(seed, shape, rank, gradients_of=None):
    """One rank's output, and its gradients from the output gradients of that rank alone, or of several ranks."""
    x = randn(*shape, seed=seed, rank=rank).requires_grad_()
    weight, bias = (randn(shape[2], seed=seed + number).requires_grad_() for number in (11, 12))
    y = F.layer_norm(x, shape[2:], weight, bias)
    y.backward(sum(randn(*shape, seed=seed + 1, rank=each) for each in gradients_of or (rank,)))
    return y.detach(), [x.grad, weight.grad, bias.grad]
