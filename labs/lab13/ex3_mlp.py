"""Exercise 13.3: The MLP."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minifsdp import comm
from minifsdp.course.workshop.checking import AnswerError, check, describe, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.tensor_parallel import layouts

from .shared import ITEM, Operator, exact, here, kinds, part, randn


@reference(
    "13.3",
    hints=(
        "The first matrix is split by columns: what has to be applied to x before it? The second matrix is split by "
        "rows: what has to be applied to the partial sum after it? Nothing is sent in between. How often may the "
        "second bias be in the sum?",
        "Compute `F.linear(f(x), up, up_bias)`, then GELU, then `F.linear(.., down)` without a bias, then g. Every "
        "rank then adds the full bias to the sum.",
    ),
)
def mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, f: Operator, g: Operator) -> Tensor:
    """Compute gelu(x up^T + up_bias) down^T + down_bias on t ranks, each with its own shards.

    There is one message in the forward pass, from g, and one in the backward pass, from f.

    Args:
        x: [.., h], with one or more dimensions, replicated.
        up: [inner / t, h], this rank's columns, as `nn.Linear` stores them.
        up_bias: [inner / t], this rank's shard.
        down: [h, inner / t], this rank's rows, as `nn.Linear` stores them.
        down_bias: [h], replicated. Every rank computes the same gradient for it.
        f, g: the functions of 13.2.

    Returns:
        [.., h], the same on every rank.
    """
    hidden = F.gelu(F.linear(f(x), up, up_bias))
    return g(F.linear(hidden, down)) + down_bias


HIDDEN = 6


def mlp_parts(inner, batch, seed):
    """x, up, up_bias, down, down_bias and the gradient of the output."""
    shapes = ((*batch, HIDDEN), (inner, HIDDEN), (inner,), (HIDDEN, inner), (HIDDEN,), (*batch, HIDDEN))
    return [randn(*shape, seed=seed, rank=number) for number, shape in enumerate(shapes)]


def parts_on(whole, t, rank):
    x, up, up_bias, down, down_bias, _ = whole
    return [x, part(up, 0, t, rank), part(up_bias, 0, t, rank), part(down, 1, t, rank), down_bias]


def one_mlp(leaves, gradient, add_bias=True):
    """The output and all gradients, on one process."""
    x, up, up_bias, down, down_bias = (leaf.clone().requires_grad_() for leaf in leaves)
    y = F.linear(F.gelu(F.linear(x, up, up_bias)), down)
    y = y + down_bias if add_bias else y
    y.backward(gradient)
    return y.detach(), [leaf.grad for leaf in (x, up, up_bias, down, down_bias)]


def observe_mlp(answer, whole):
    group, whole = comm.world(), here(*whole)
    leaves = [leaf.clone().requires_grad_() for leaf in parts_on(whole, group.size(), group.rank())]
    before = [leaf.detach().clone() for leaf in leaves]
    f, g = (partial(each, group=group) for each in (layouts.f, layouts.g))
    try:
        with comm.record() as forward:
            y = answer(*leaves, f, g)
    except (IndexError, RuntimeError, ValueError) as error:
        if len(whole[0].shape) == 3:
            raise
        raise AnswerError(
            f"x of shape {list(whole[0].shape)}: it raises {error}\n"
            "likely slip: x is [.., h], with one or more dimensions: `F.linear` and `@` accept all of them"
        ) from error
    if not (isinstance(y, Tensor) and y.requires_grad):
        raise AnswerError(f"expected a tensor with a gradient, got {describe(y)}")
    if y.shape != whole[-1].shape:
        slip = "the output has all features: it is the sum of the ranks' partial sums"
        if y.numel() == whole[-1].numel():
            slip = "the output has the dimensions of x: give back those that you have flattened"
        raise AnswerError(f"the output: expected {list(whole[-1].shape)}, got {list(y.shape)}\nlikely slip: {slip}")
    with comm.record() as backward:
        y.backward(whole[-1])
    same = all(torch.equal(leaf.detach(), was) for leaf, was in zip(leaves, before, strict=True))
    return y.detach(), [leaf.grad for leaf in leaves], kinds(forward), kinds(backward), same


@check("13.3")
def check_mlp(answer, variant):
    """Each pass runs one all-reduce; output and gradients are those of one process."""
    for t, each, batch in ((variant.ranks, 4, (2, 3)), (variant.ranks, 0, (5,)), (3, 0, ())):
        inner = each * t or 3 * t - 1  # even parts, then a short one
        whole = mlp_parts(inner, batch, variant.seed + inner)
        for rank, found in enumerate(on_ranks(t, observe_mlp, answer, whole)):
            compare_mlp(found, whole, t, rank)


def compare_mlp(found, whole, t, rank):
    y, gradients, forward, backward, same = found
    gradient, bias = whole[-1], whole[4]
    wanted, wholes = one_mlp(whole[:-1], gradient)
    mine, alone = one_mlp(parts_on(whole, t, rank), gradient, add_bias=False)
    message = f"all_reduce of {y.numel() * ITEM} bytes"
    where = f"the MLP on {t} ranks"
    linear = F.linear(whole[0], whole[1], whole[2])
    slips = {
        "every rank added the second bias before the sum, so it is in the sum t times": wanted + (t - 1) * bias,
        "this is only this rank's partial sum of the output: g adds up those of all ranks": mine + bias,
        "this is only a partial sum, which g has to add up; the second bias is missing, too": mine,
        "the second bias is missing": wanted - bias,
        "the first bias is missing: each rank adds its shard of it to its shard of the hidden features": F.linear(
            F.gelu(linear - whole[2]), whole[3], bias
        ),
        "the gelu is missing between the two matmuls": F.linear(linear, whole[3], bias),
        "this is the tanh approximation of gelu; the model uses the exact function": F.linear(
            F.gelu(linear, approximate="tanh"), whole[3], bias
        ),
    }
    exact(f"{where}, the output", y, wanted, rank=rank, slips=slips)
    slips = {
        "the only sum is that of g, after the second matmul; the hidden features stay on their rank": [
            *forward[:0],
            f"all_reduce of {y.numel() // HIDDEN * part(whole[1], 0, t, rank).shape[0] * ITEM} bytes",
            message,
        ],
        "nothing was added up": [],
    }
    slip = "the forward pass needs exactly one all-reduce"
    expect(f"{where}, messages forward", forward, [message], rank=rank, slips=slips, slip=slip)
    named = zip(("x", "up", "up_bias", "down", "down_bias"), gradients, range(5), strict=True)
    for name, got, number in named:
        right = wholes[number]
        if number in (1, 2, 3):
            right = part(right, 1 if number == 3 else 0, t, rank)
        slips, slip = gradient_slips(name, right, alone[number], t)
        got = torch.zeros_like(right) if got is None else got
        exact(f"{where}, the gradient of {name}", got, right, rank=rank, slips=slips, slip=slip)
    slip = "the backward pass needs one all-reduce, which f runs on the gradient of x"
    expect(f"{where}, messages backward", backward, [message], rank=rank, slip=slip)
    expect(f"{where}, x and parameters unchanged", same, True, rank=rank, slip="do not change x or the parameters")


def gradient_slips(name, right, partial_sum, t):
    slips = {f"the gradient is {t} times too large: f or g was applied once too often": t * right}
    if name == "x":
        slips["this is only this rank's partial sum: apply f to x before the first matmul"] = partial_sum
    if name == "down_bias":
        slips = {
            "a rank that does not add the bias has no gradient for it, and its copy drifts away from the others: "
            "add the bias on every rank, after the sum": torch.zeros_like(right),
            "adding 1/t of the bias on each rank gives the right sum, but only 1/t of the gradient: add the full bias "
            "after the sum": right / t,
            "every rank already has the complete gradient of the bias, which must not be summed": t * right,
        }
    return slips, "the output is right but the gradient is not: check where f is applied"
