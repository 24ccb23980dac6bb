"""Reference answers of lab 13, tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.references import reference
from minifsdp.tensor_parallel import layouts, loss

Crossing = Callable[[Tensor], Tensor]


@reference(
    "13.1",
    hints=(
        "`w.chunk(t, dim)` has the parts, perhaps fewer than t of them. By rows: which columns of x meet my rows of w? "
        "What do the ranks' products have to do with the result? By columns: the gather wants equal parts, and joins "
        "them along the first dimension.",
        "By columns: put my part of w at the front of zeros [in, ceil(out / t)], gather the products into [t, rows, "
        "ceil(out / t)], `movedim(0, 1)`, `flatten(1)`, and drop the columns behind `out`. By rows: the same slice of "
        "x's columns and of w's rows, then one all-reduce of the product; an empty slice makes zeros.",
    ),
    forbids=(layouts.move, layouts.relaid, layouts.all_gathered, layouts.all_reduced, layouts.part_of),
)
def multiply(x: Tensor, w: Tensor, by: Literal["columns", "rows"], group: Group) -> Tensor:
    """x w on all ranks, of products with parts of w."""
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


@reference(
    "13.2",
    hints=(
        "An autograd function has a forward and a backward. In one of its two directions each of yours returns what it "
        "got; in the other it returns a sum over the ranks.",
        "`class Enter(torch.autograd.Function)` with two static methods, `forward(ctx, x)` and `backward(ctx, "
        "gradient)`. A sum is an all-reduce of a contiguous *copy*: x, or the gradient, may be in use elsewhere. "
        "Return `Enter.apply, Leave.apply`.",
    ),
    forbids=(layouts.f, layouts.g, layouts.move, layouts.relaid, layouts.all_reduced),
)
def f_and_g(group: Group) -> tuple[Crossing, Crossing]:
    """Return f, a copy that sums gradients, and g, a sum that copies gradients."""

    def summed(x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total, group).wait()
        return total

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return summed(gradient)

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    return Enter.apply, Leave.apply


@reference(
    "13.3",
    hints=(
        "The first matrix is cut by columns: what does x need in front of it? The second by rows: what do the products "
        "need behind it? Nothing is sent in between. How many ranks may add the second bias?",
        "`F.linear(f(x), up, up_bias)`, gelu, `F.linear(.., down)` without a bias, g. Each rank then adds the whole "
        "bias to the sum.",
    ),
)
def mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, f: Crossing, g: Crossing) -> Tensor:
    """gelu(x up^T + up_bias) down^T + down_bias, of this rank's parts of the weights."""
    hidden = F.gelu(F.linear(f(x), up, up_bias))
    return g(F.linear(hidden, down)) + down_bias


@reference(
    "13.4",
    hints=(
        "log(sum of exp(x - m)) - (x_target - m), for any m that is the same on all ranks. Of the sum each rank has a "
        "part, of the target's logit one rank has all. Which of the three numbers must be known before the others?",
        "The maximum: `logits.detach().amax(-1)`, an all-reduce with `comm.MAX`. Then the rank's sum of exponentials, "
        "and its target's logit, 0 where the target is another rank's: gather with the index clamped to 0, and mask. "
        "`g(torch.stack([sums, wanted]))` adds both up, and autograd does the rest.",
    ),
    forbids=(loss.cross_entropy, loss._TokenLosses.forward),
)
def cross_entropy(logits: Tensor, targets: Tensor, first: int, group: Group, g: Crossing) -> Tensor:
    """Mean cross-entropy of logits that are cut along the vocabulary."""
    largest = logits.detach().amax(-1)
    comm.all_reduce(largest, group, comm.MAX).wait()
    shifted = logits - largest[:, None]
    index = targets - first
    here = (index >= 0) & (index < logits.shape[1])
    wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
    sums = g(torch.stack([shifted.exp().sum(-1), wanted]))
    return (sums[0].log() - sums[1]).mean()


@reference(
    "13.5",
    hints=(
        "Forward and backward are each other's transposes: the transpose of a gather, if every rank then uses "
        "the whole in its own way, is a sum that leaves each rank its part. Collectives join and cut along the first "
        "dimension, and the sequence is the second one.",
        "Two helpers: `gathered(x)` takes `x.movedim(1, 0).contiguous()` [s / t, b, h], gathers it into [s, b, h], and "
        "moves the dimension back; `scattered(x)` does the same with a reduce-scatter, from s to s / t. One function "
        "has gathered forward and scattered backward, the other one the other way round.",
    ),
    forbids=(layouts.move, layouts.relaid, layouts.all_gathered, layouts.reduce_scattered),
)
def sequence_f_and_g(group: Group) -> tuple[Crossing, Crossing]:
    """Return f, a gather whose gradient is reduce-scattered, and g, a reduce-scatter whose gradient is gathered."""

    def gathered(x: Tensor) -> Tensor:
        part = x.movedim(1, 0).contiguous()
        whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
        comm.all_gather(whole.view(-1), part.view(-1), group).wait()
        return whole.movedim(0, 1).contiguous()

    def scattered(x: Tensor) -> Tensor:
        whole = x.movedim(1, 0).contiguous()
        part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
        comm.reduce_scatter(part.view(-1), whole.view(-1), group).wait()
        return part.movedim(0, 1).contiguous()

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return scattered(gradient)

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return scattered(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gathered(gradient)

    return Enter.apply, Leave.apply


@reference(
    "13.6",
    hints=(
        "A rank sees a part of the tokens, so its gradients of weight and bias are summands. You have a function that "
        "changes nothing forward and sums gradients backward.",
        "`F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))`: f on the parameters, not on the tokens.",
    ),
)
def norm(part: Tensor, weight: Tensor, bias: Tensor, f: Crossing) -> Tensor:
    """LayerNorm of this rank's part of the sequence."""
    return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))


@reference(
    "13.7",
    hints=(
        "Tensor parallelism sends activations: how many all-reduces does a block have in a step, and what does a ring "
        "send for each? FSDP sends parameters: how often, and what does a ring send for a gather?",
        "4 all-reduces of tokens · width elements, each 2 (t - 1) / t of that; it makes no difference in bytes that "
        "sequence parallelism halves them. FSDP: two gathers and one reduce-scatter, each (t - 1) / t of the "
        "parameters.",
    ),
)
def crossing(tokens: int, width: int, parameters: int, ranks: int, itemsize: int) -> tuple[float, float]:
    """Bytes that a rank sends for a block in a step: with tensor parallelism, with FSDP."""
    share = itemsize * (ranks - 1) / ranks
    return 8 * tokens * width * share, 3 * parameters * share
