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

Operator = Callable[[Tensor], Tensor]


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
    """Compute x w. Each rank multiplies only by its shard of w."""
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
        "An autograd function has a forward and a backward. Each of your two functions returns its input unchanged in "
        "one of these directions, and a sum over the ranks in the other.",
        "Write `class Enter(torch.autograd.Function)` with two static methods, `forward(ctx, x)` and `backward(ctx, "
        "gradient)`, and a class `Leave` in the same way. To sum, all-reduce a contiguous *copy*, because x or the "
        "gradient may be in use elsewhere. Return `Enter.apply, Leave.apply`.",
    ),
    forbids=(layouts.f, layouts.g, layouts.move, layouts.relaid, layouts.all_reduced),
)
def f_and_g(group: Group) -> tuple[Operator, Operator]:
    """Return f, which copies forward and sums gradients, and g, which sums forward and copies gradients."""

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
        "The first matrix is split by columns: what has to be applied to x before it? The second matrix is split by "
        "rows: what has to be applied to the partial sum after it? Nothing is sent in between. How often may the "
        "second bias be in the sum?",
        "Compute `F.linear(f(x), up, up_bias)`, then GELU, then `F.linear(.., down)` without a bias, then g. Every "
        "rank then adds the full bias to the sum.",
    ),
)
def mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, f: Operator, g: Operator) -> Tensor:
    """Compute gelu(x up^T + up_bias) down^T + down_bias from this rank's shards of the weights."""
    hidden = F.gelu(F.linear(f(x), up, up_bias))
    return g(F.linear(hidden, down)) + down_bias


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
    """Compute the mean cross-entropy of logits that are sharded along the vocabulary."""
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
        "The backward pass is the transpose of the forward pass. After a gather, every rank multiplies the full "
        "sequence by its own weights, so the gradients have to be summed, and each rank keeps its shard of the sum. "
        "Collectives join and split tensors along the first dimension, but the sequence is the second dimension.",
        "Write two helpers. `gathered(x)` takes `x.movedim(1, 0).contiguous()` [s / t, b, h], gathers it into "
        "[s, b, h], and moves the dimension back. `scattered(x)` does the same with a reduce-scatter, from s to s / t. "
        "f calls `gathered` in the forward and `scattered` in the backward pass; g does the opposite.",
    ),
    forbids=(layouts.move, layouts.relaid, layouts.all_gathered, layouts.reduce_scattered),
)
def sequence_f_and_g(group: Group) -> tuple[Operator, Operator]:
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
        "A rank sees only a shard of the tokens, so its gradients of weight and bias are partial sums. You already "
        "have a function that changes nothing in the forward pass and sums gradients in the backward pass.",
        "Return `F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))`. f is applied to the parameters, not to "
        "the tokens.",
    ),
)
def norm(part: Tensor, weight: Tensor, bias: Tensor, f: Operator) -> Tensor:
    """Apply LayerNorm to this rank's tokens."""
    return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))


@reference(
    "13.7",
    hints=(
        "Tensor parallelism sends activations. How many all-reduces does a block need per step, and what does a ring "
        "send for each? FSDP sends parameters and gradients. How many times does it send each of them, and what does a "
        "ring send for an all-gather or a reduce-scatter?",
        "Tensor parallelism needs 4 all-reduces of tokens · width elements, and for each a rank sends 2 (t - 1) / t "
        "of these elements. Sequence parallelism sends the same number of bytes, because it replaces each all-reduce "
        "with its two halves. FSDP needs two all-gathers and one reduce-scatter, and for each a rank sends (t - 1) / t "
        "of the parameters.",
    ),
)
def bytes_sent(tokens: int, width: int, parameters: int, ranks: int, itemsize: int) -> tuple[float, float]:
    """Compute the bytes that a rank sends for one block in one step, with tensor parallelism and with FSDP."""
    per_element = itemsize * (ranks - 1) / ranks
    return 8 * tokens * width * per_element, 3 * parameters * per_element
