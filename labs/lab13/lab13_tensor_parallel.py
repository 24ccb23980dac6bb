# ---
# jupyter:
#   minifsdp:
#     lab: "13"
#     title: Tensor parallelism
#     minutes: 85
#     ranks: 4
# ---

# %% [markdown]
# # Lab 13: tensor parallelism
#
# FSDP shards the *storage*. While a layer is being computed, its parameters are unsharded, and each rank has its own
# samples of the batch. Tensor parallelism shards the *computation*. Each rank keeps one shard of a matrix and
# multiplies only by that shard, and all ranks work on the same samples. The ranks send activations and never
# parameters.
#
# ![The matmul of a 2 by 3 and a 3 by 2 matrix, computed in two ways: with the second matrix split by columns, where the
# results are placed side by side, and split by rows, where the partial sums are
# added](../slides/figures/split-product.svg)
#
# *From [lecture 7, Tensor parallelism and pipelines](../slides/split.md). Its first half comes before this lab.*
#
# **After this lab, you will be able to**
#
# - split the weight of a matmul by columns and by rows, and name the collective that each split needs;
# - explain where a transformer block sums over the ranks in the forward and the backward pass, and why it needs no
#   other sums;
# - compute a cross-entropy when no rank has all the logits;
# - shard norms and dropout along the sequence, and name the parameters whose gradients then become partial sums;
# - predict activation memory and traffic from b, s, h and t, and decide when tensor parallelism sends less than FSDP.
#
# **You need** labs 00 to 05: all-reduce, all-gather and reduce-scatter, and the number of bytes that a ring sends for
# each of them.
#
# **Time** 85 minutes. **Runs** on a laptop (gloo, 2 to 4 processes), on one GPU, or on a GPU node (NCCL, one rank per
# GPU). **Memory** less than 40 MiB of tensors per rank.
#
# As in the literature, t is the number of tensor-parallel ranks, and b, s and h are the batch size, the sequence length
# and the width. A tensor is *replicated* if every rank holds a full copy of it. It is *sharded* if each rank holds one
# part, its shard. It is a *partial sum* if the ranks have to add up their tensors to get the result. All-reduce,
# all-gather and reduce-scatter are *collectives*: operations that all ranks of a group run together. This lab counts
# each collective as one message.

# %% tags=["setup"]
# set-up
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop import exercise, outcome, predict

Operator = Callable[[Tensor], Tensor]  # of activations, such as f and g in 13.2

# %% [markdown]
# ## 13.1 Multiply
#
# *14 minutes, medium*
#
# In the drawing, x is [[1, 2, 3], [4, 5, 6]], w is [[1, 2], [3, 4], [5, 6]], and there are two ranks.
#
# **Splitting w by columns.** Each rank has some columns of w and all of x, and computes the same columns of x w. An
# all-gather then places the ranks' columns side by side. It needs shards of equal size. If t does not divide the number
# of columns, the last ranks have fewer columns, or none. They have to pad their results before the gather, and every
# rank removes the padding afterwards.
#
# **Splitting w by rows.** Each rank has some rows of w and multiplies the matching *columns* of x by them. The result
# has the full shape, but it is only a partial sum: an all-reduce has to add up the ranks' results.
#
# `group` is a process group, as in lab 01: `group.size()` is t, and `group.rank()` is this rank's number in the group,
# from 0.
#
# Predict: both collectives use a ring. Compare the two splits for the same matmul on the same ranks. How many times as
# many bytes does a rank send with w split by rows as with w split by columns?

# %%
predict("13.1", ..., "ratio of bytes sent: w split by rows to w split by columns")


# %% tags=["exercise-13.1"]
from .ex1_multiply import multiply

# %%
import tempfile
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel
from minifsdp.course.ladder import data
from minifsdp.course.ladder.measure import Settings
from minifsdp.fsdp import SyncSchedule
from minifsdp.gpt import GPT, Block
from minifsdp.instruments import plots
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.link.emulated import let_communication_go_first, parse_link
from minifsdp.instruments.machine.pieces import NETWORK, NVLINK, products_of_block, spans_of_block
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.timeline import Span, overlap, read_trace
from minifsdp.instruments.watch.trace import record_trace
from minifsdp.tensor_parallel.dropout import own_random_numbers

X, W = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([[1.0, 2], [3, 4], [5, 6]])

# %% [markdown]
# ### Measured: the smallest example, split by columns and by rows


# %% tags=["C27"]
def smallest(by: Literal["columns", "rows"]) -> tuple[Any, list[str], float]:
    """Return this rank's result, the collectives, and the number of bytes sent."""
    x, w = X.to(rank_device()), W.to(rank_device())
    with comm.record() as calls:
        product = multiply(x, w, by, comm.world())
    return product.tolist(), [call.op for call in calls], sum(call.wire for call in calls)


sent = {}
for by in ("columns", "rows"):
    found = launch(smallest, 2, by)
    sent[by] = found[0][2]
    print(
        f"by {by:7} {found[0][0]} on both ranks: {found[0][0] == found[1][0]}; {found[0][1]}, {sent[by]:.0f} bytes sent"
    )
print("expected  [[22, 28], [49, 64]]")
slips = {"an all-reduce goes around the ring twice, an all-gather once": 1}
outcome("13.1", sent["rows"] / sent["columns"], ranks=2, slips=slips)

# %% [markdown]
# Two consecutive layers need fewer messages than two separate ones. Split the first matrix by columns and the second by
# rows. In the first layer, each rank computes exactly the columns that it needs as input to the second, so the ranks
# send nothing between the two layers. A single sum at the end is enough. This pair is the idea behind Megatron-LM
# ([Shoeybi et al., section 3](https://arxiv.org/abs/1909.08053)).
#
# ## 13.2 f and g
#
# *8 minutes, medium*
#
# The backward pass needs messages, too, and autograd does not record the collectives in `comm`. A buffer that a
# collective has filled has no gradient. If a collective has summed a tensor in place, autograd computes its gradient as
# if there had been no sum. torch reports this only as a warning, if at all. Two autograd functions, called f and g in
# Megatron-LM, therefore supply the messages in both directions.
#
# **f** is applied where a replicated activation enters the sharded layers. All ranks have the same x, and each
# multiplies it by a different shard of the weight, so each rank's gradient of x is a partial sum. In the backward pass,
# f adds up these gradients.
#
# **g** is applied where partial sums leave the sharded layers. In the forward pass, g adds them up. All ranks continue
# with the same sum, so each rank already receives the complete gradient in the backward pass.
#
# | | forward | backward |
# |---|---|---|
# | f | nothing | all-reduce |
# | g | all-reduce | nothing |
#
# Predict: a common mistake is a g that also runs an all-reduce in the backward pass. Consider a model with two such
# pairs of layers, one after the other, on 2 ranks. By what factor does this mistake multiply the gradients of the
# *first* pair's weights?

# %%
predict("13.2", ..., "factor in the gradients of the first of two pairs, on 2 ranks")


# %% tags=["exercise-13.2"]
from .ex2_f_and_g import f_and_g

# %% [markdown]
# ## 13.3 The MLP
#
# *5 minutes, easy*
#
# The block's MLP is `down(gelu(up(x)))`. `nn.Linear` stores its weight as [out, in], so splitting `up` by columns means
# splitting the *first* dimension of its stored weight. GELU works on each feature independently, so it needs no
# message. The inner width, between `up` and `down`, is 4 h.
#
# There are two biases. The bias of `up` is sharded in the same way as the columns of `up`. The bias of `down` is
# replicated. Where should it be added?
#
# Predict: attention is sharded in the same way. Each rank has some of the heads: some columns of q, k and v, and the
# matching rows of the output projection. The embedding is sharded along the vocabulary and followed by a g. The head
# starts with an f. How many messages of size [b, s, h] does a rank send in one forward and backward pass of a model
# with 4 blocks? An all-reduce counts as one message.

# %%
predict("13.3", ..., "messages of size [b, s, h] in a step, with 4 blocks")


# %% tags=["exercise-13.3"]
from .ex3_mlp import mlp

# %% [markdown]
# ### Break it: a bias added before the sum
#
# `F.linear` accepts a bias, so it is easy to add the bias before g by mistake. The cell runs only the forward pass, on
# 1, 2 and 3 ranks, and compares the output with that of one process.


# %%
SETTINGS = Settings(ranks=2, batch=8, layers=4, width=96, context=24)
BATCHES = list(SETTINGS.batches())  # all tensor-parallel ranks take the same samples


def whole(layers: int = 4, dtype: torch.dtype = torch.float32) -> GPT:
    """Return a model with the same values on every rank. 2, 3 or 4 ranks can share its heads."""
    torch.manual_seed(0)
    return GPT(width=96, layers=layers, heads=12, context=24).to(rank_device(), dtype)


def too_early() -> tuple[float, float]:
    """Return the error of the output in units of the bias, first for your MLP, then with the mistake."""
    group, block = comm.world(), whole(1, torch.float64).blocks[0]
    f, g = f_and_g(group)
    x = torch.randn(2, 3, 96, dtype=torch.float64, device=rank_device())
    up, up_bias, down = (
        p.detach().chunk(group.size(), dim)[group.rank()]
        for p, dim in ((block.up.weight, 0), (block.up.bias, 0), (block.down.weight, 1))
    )
    bias, right = block.down.bias, block.down(F.gelu(block.up(x)))
    slipped = g(F.linear(F.gelu(F.linear(f(x), up, up_bias)), down, bias))
    yours = mlp(x, up, up_bias, down, bias, f, g)
    return tuple(((each - right).abs().max() / bias.abs().max()).item() for each in (yours, slipped))


for ranks in (1, 2, 3):
    yours, slipped = launch(too_early, ranks)[0]
    print(f"{ranks} rank(s): error / bias: {yours:.0e} for yours, {slipped:.6f} with the bias added before the sum")
    assert yours < 1e-9 < abs(slipped - (ranks - 1)) + 1e-6

# %% [markdown]
# On one rank, where code is usually tested first, the mistake has no effect. On t ranks, the bias is added t times.
# Training adapts to that, and the resulting checkpoint is wrong for any other number of ranks.
#
# ### Break it: an all-reduce in both directions
#
# The model consists of two MLPs, one after the other, on 2 ranks. The cell prints gradient norms relative to those of
# one process, first with your g and then with a g that also sums in the backward pass.


# %%
class Doubled(torch.autograd.Function):
    """A g that sums in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        comm.all_reduce(total, comm.world()).wait()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Doubled.forward(ctx, gradient.contiguous())


def two_pairs(doubled: bool) -> tuple[float, list[float]]:
    """Return the ratio of the loss to one process's loss, and the same ratio for the gradient norm of each pair."""
    group, model = comm.world(), whole(2, torch.float64)
    f, g = f_and_g(group)
    x = torch.randn(2, 3, 96, dtype=torch.float64, device=rank_device())
    y = z = x
    ups = []
    for block in model.blocks:
        y = block.down(F.gelu(block.up(y)))
        parts = [
            p.detach().chunk(group.size(), dim)[group.rank()].requires_grad_()
            for p, dim in ((block.up.weight, 0), (block.up.bias, 0), (block.down.weight, 1))
        ]
        ups.append(parts[0])
        z = mlp(z, *parts, block.down.bias, f, Doubled.apply if doubled else g)
    loss, alone = z.square().mean(), y.square().mean()
    loss.backward()
    alone.backward()
    mine = [block.up.weight.grad.chunk(group.size())[group.rank()] for block in model.blocks]
    return (loss / alone).item(), [(a.grad.norm() / b.norm()).item() for a, b in zip(ups, mine, strict=True)]


for name, doubled in (("yours", False), ("both ways", True)):
    loss, factors = launch(two_pairs, 2, doubled)[0]
    print(
        f"{name:10} ratios to one process: loss {loss:.6f}; gradients: first pair {factors[0]:.6f}, "
        f"second pair {factors[1]:.6f}"
    )
slips = {"in the backward pass, the g of each pair multiplies by t, so there are two factors": 2}
outcome("13.2", round(factors[0], 6), slips=slips)

# %% [markdown]
# The loss does not reveal the mistake, because the forward pass is correct. AdamW divides each gradient by its own
# magnitude, so the model even trains. But gradient clipping sees a norm that is too large, and SGD takes steps that are
# too long. So compare *gradients* with those of one process; the first loss is not enough.
#
# ## 13.4 The loss from sharded logits
#
# *12 minutes, hard*
#
# The head is a matrix like the others. If it is split by columns, each rank computes the logits for its part of the
# vocabulary. With a vocabulary of 128,256 tokens (Llama 3), the logits are the largest activation of a model, too large
# to gather. Cross-entropy needs only a little information from them:
#
# $$\text{loss} = \log \sum_v e^{x_v - m} - (x_\text{target} - m), \qquad m = \max_v x_v$$
#
# The ranks have to combine only three numbers per token, each by an all-reduce: the maximum m, the sum, and the
# target's logit, which only one rank has. m prevents overflow of $e^x$. It cancels in the loss, so it needs no
# gradient. The other two numbers do.
#
# Predict: there are 1,024 classes in float32 on 2 ranks. How many times as many bytes would an all-gather of the logits
# send as your function? Within 5 % is close enough.

# %%
predict("13.4", ..., "ratio of bytes sent: gathering the logits to your function")


# %% tags=["exercise-13.4"]
from .ex4_cross_entropy import cross_entropy


# %%
def bytes_of_a_loss(classes: int, tokens: int = 64) -> tuple[float, float]:
    """Return the bytes that a rank sends, first for the loss and its gradient, then to gather the logits."""
    group = comm.world()
    mine = torch.randn(tokens, classes // group.size(), device=rank_device(), requires_grad=True)
    targets = torch.randint(classes, (tokens,), generator=torch.Generator().manual_seed(0)).to(rank_device())
    with comm.record() as calls:
        loss = cross_entropy(mine, targets, mine.shape[1] * group.rank(), group, f_and_g(group)[1])
        loss.backward()
    with comm.record() as gathers:
        logits = mine.new_empty(group.size() * mine.numel())
        comm.all_gather(logits, mine.detach().view(-1), group).wait()
    return sum(call.wire for call in calls), sum(call.wire for call in gathers)


for classes in (256, 1024, 4096):
    yours, gathered = launch(bytes_of_a_loss, 2, classes)[0]
    print(
        f"{classes:5} classes: {yours:5.0f} bytes sent; {gathered:9,.0f} bytes to gather the logits, "
        f"{gathered / yours:5.1f} times as many"
    )
    if classes == 1024:
        slips = {
            "an all-reduce goes around the ring twice": 2 * gathered / yours,
            "there are three numbers per token": 3 * gathered / yours,
        }
        outcome("13.4", round(gathered / yours, 1), ranks=2, slips=slips)

# %% [markdown]
# Does the loss need g at all? An in-place `comm.all_reduce` on the stacked sums gives the same loss and even the same
# gradient: autograd does not record the collective, so the backward pass returns the gradient unchanged, as g does. The
# check therefore accepts this answer. Do not rely on it. In the backward pass, torch warns that no autograd kernel is
# registered for the collective, and calls this behaviour deprecated. Where the backward pass has to send a message, as
# in f, such an operation gives wrong gradients and raises no error.
#
# ## Build a GPT from your functions
#
# The next cell builds one rank's part of a block from f, g and your MLP. Attention follows the same pattern: `qkv` is
# split by columns, so that each rank has complete heads of q, k and v, and `out` is split by rows. The block applies
# four functions, which a `Way` collects. For now, `enter` and `leave` are f and g, and `norm` is torch's. `replicated`
# is applied to replicated parameters, such as the biases added after g. Their gradients are already complete, so for
# now it returns its input unchanged. Exercises 13.5 and 13.6 will replace all four functions.


# %% tags=["shown"]
class Way(NamedTuple):
    """The functions that make a block tensor-parallel."""

    enter: Operator  # on activations, before a column-parallel layer
    leave: Operator  # on partial sums, after a row-parallel layer
    replicated: Operator  # on replicated parameters, except those of norms
    norm: Callable[..., Tensor]  # of activations, weight and bias


class ShardedBlock(nn.Module):
    """This rank's part of a block."""

    def __init__(self, block: Any, group: Group, way: Way) -> None:
        super().__init__()
        mine = partial(part_of, group=group)
        self.way, self.heads = way, block.heads // group.size()
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.qkv = mine(block.qkv.weight.unflatten(0, (3, -1)), 1)  # a shard of each of q, k and v
        self.qkv_bias = mine(block.qkv.bias.unflatten(0, (3, -1)), 1)
        self.up, self.up_bias = mine(block.up.weight, 0), mine(block.up.bias, 0)
        self.out, self.down = mine(block.out.weight, 1), mine(block.down.weight, 1)
        self.out_bias, self.down_bias = block.out.bias, block.down.bias  # replicated

    def forward(self, x: Tensor) -> Tensor:
        enter, leave, replicated, norm = self.way
        x = x + self.attend(norm(x, self.norm1.weight, self.norm1.bias))
        x2 = norm(x, self.norm2.weight, self.norm2.bias)
        return x + mlp(x2, self.up, self.up_bias, self.down, replicated(self.down_bias), enter, leave)

    def attend(self, x: Tensor) -> Tensor:
        enter, leave, replicated, _ = self.way
        qkv = F.linear(enter(x), self.qkv.flatten(0, 1), self.qkv_bias.flatten())
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return leave(F.linear(mixed.transpose(1, 2).flatten(2), self.out)) + replicated(self.out_bias)


# %%
def part_of(p: Tensor, dim: int, group: Group) -> nn.Parameter:
    return nn.Parameter(p.detach().chunk(group.size(), dim)[group.rank()].clone())


class ShardedGPT(nn.Module):
    """This rank's part of the GPT. Its vocabulary of 257 tokens is split into uneven shards."""

    def __init__(self, model: Any, group: Group, way: Way) -> None:
        super().__init__()
        self.group, self.way, self.g = group, way, f_and_g(group)[1]
        self.first = group.rank() * -(-model.head.out_features // group.size())
        self.embed, self.position, self.norm = part_of(model.embed.weight, 0, group), model.position.weight, model.norm
        self.blocks = nn.ModuleList(ShardedBlock(block, group, way) for block in model.blocks)
        self.head, self.head_bias = part_of(model.head.weight, 0, group), part_of(model.head.bias, 0, group)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        enter, leave, replicated, norm = self.way
        index = tokens - self.first
        here = (index >= 0) & (index < len(self.embed))
        partial_sum = F.embedding(torch.where(here, index, 0), self.embed) * here[..., None]
        x = leave(partial_sum)  # with sequence parallelism, only this rank's tokens
        position, length = replicated(self.position), x.shape[1]
        start = self.group.rank() * length if length < len(position) else 0
        x = x + position[start : start + length]
        for block in self.blocks:
            x = block(x)
        x = enter(norm(x, self.norm.weight, self.norm.bias))
        logits = F.linear(x, self.head, self.head_bias).flatten(0, 1)
        return cross_entropy(logits, targets.flatten(), self.first, self.group, self.g)


def whole_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def as_it_is(x: Tensor) -> Tensor:
    return x


def tensor_parallel(group: Group) -> Way:
    f, g = f_and_g(group)
    return Way(f, g, as_it_is, whole_norm)


MakeWay = Callable[[Group], Way]


def build(way: MakeWay | None, layers: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    """Return this rank's part of the model, or the full model if `way` is None."""
    model = whole(layers, dtype)
    return model if way is None else ShardedGPT(model, comm.world(), way(comm.world())).to(rank_device())


def batch(number: int = 0) -> data.Batch:
    return data.to_device(BATCHES[number], rank_device())


# %% [markdown]
# ### Measured: the losses are those of one process
#
# The cell runs three steps of AdamW in float64 and compares the losses on every rank with those of one process.


# %%
def losses(way: MakeWay | None) -> list[float]:
    model = build(way, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for number in range(3):
        loss = model(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def difference(way: MakeWay, ranks: int) -> float:
    return max(abs(a - b) for seen in launch(losses, ranks, way) for a, b in zip(seen, alone, strict=True))


(alone,) = launch(losses, 1, None)
print("one process:", *(f"{loss:.6f}" for loss in alone))
for ranks in (2, 3, 4):
    far = difference(tensor_parallel, ranks)
    print(f"your tensor parallelism on {ranks} ranks: losses equal within 1e-9: {far < 1e-9}")
    assert far < 1e-9


def messages(way: MakeWay, layers: int = 4) -> list[comm.Call]:
    """Return the collectives of one step with tensors of size [b, s, h]."""
    model = build(way, layers)
    with comm.record() as calls:
        model(*batch()).backward()
    return [call for call in calls if call.payload == 4 * 8 * 24 * 96]


slips = {
    "the embedding adds one message to the forward pass, and the head's f one to the backward pass": 16,
    "the backward pass sends as many messages as the forward pass": 9,
}
outcome("13.3", len(launch(messages, 2, tensor_parallel)[0]), slips=slips)

# %% [markdown]
# ### Measured: unsharded and sharded parameters
#
# With FSDP and with your tensor parallelism, the cell prints the shape of the activations that enter the first block
# and the shape of the weight of its `up`. There are 2 ranks and 8 sequences.


# %% tags=["C13"]
def fsdp(layers: int = 4) -> nn.Module:
    return FullyShardedDataParallel(whole(layers), auto_wrap_policy={Block}, schedule=SyncSchedule)


def shapes() -> dict[str, tuple[list[int], list[int]]]:
    """Return the shapes of the activations that enter the first block, and of the weight of its `up`."""
    found = {}
    theirs, yours = fsdp(), build(tensor_parallel)

    def look(name: str, weight: Callable[[Any], Tensor], module: Any, args: Any) -> None:
        found[name] = list(args[0].shape), list(weight(module).shape)

    first = next(module for module in theirs.modules() if isinstance(module, Block))
    first.up.register_forward_pre_hook(partial(look, "FSDP", lambda module: module.weight))
    yours.blocks[0].register_forward_pre_hook(partial(look, "yours", lambda module: module.up))
    theirs(*data.shard(batch(), dist.get_rank(), dist.get_world_size()))
    yours(*batch())
    return found


for name, (activation, weight) in launch(shapes, 2)[0].items():
    print(f"{name:6} activations {activation}, weight {weight}")
print("expected: FSDP has 4 of 8 sequences and all 384 rows of the weight; yours has 8 sequences and 192 rows")

# %% [markdown]
# FSDP is a form of data parallelism. Tensor parallelism is not: all its ranks see the same batch. To the data loader,
# they are therefore *one* worker, and the batch does not grow with t.
#
# ## Only some activations are sharded
#
# The parameters, gradients and optimizer state of sharded layers shrink to 1/t. Of the activations, only some are
# sharded. Count the tensors that autograd keeps for one block on one process, in units of s b h elements. The inputs of
# the two norms (2) and the inputs of `qkv` and `up` (2) are replicated. The rest is sharded: q, k and v (3), the output
# of attention (1), the output of `up` (4, because the inner width is 4 h) and the output of GELU (4). Attention scores,
# whose size is [b, heads, s, s], are not kept: `F.scaled_dot_product_attention` recomputes them in the backward pass.
#
# Predict: what fraction of one process's activations does a block keep on each of 4 ranks?

# %%
predict("activations", ..., "fraction of a block's activations that each of 4 ranks keeps")


# %%
def kept(way: MakeWay | None, layers: int) -> int:
    """Return the bytes of activations that are kept between the forward and the backward pass."""
    with Ledger() as ledger:
        model = build(way, layers)
        ledger.watch(model)
        loss = model(*batch())
        held = ledger.mark("forward")["activations"]
        loss.backward()
    return held


def of_a_block(way: MakeWay | None) -> float:
    """Return the bytes for one block: half of what two additional blocks keep."""
    return (kept(way, 4) - kept(way, 2)) / 2


SBH = 24 * 8 * 96 * 4  # bytes of a [b, s, h] tensor
(one,) = launch(of_a_block, 1, None)
activations = {"tensor parallel": {1: one}}
for ranks in (2, 3, 4):
    activations["tensor parallel"][ranks] = launch(of_a_block, ranks, tensor_parallel)[0]
for ranks, held in activations["tensor parallel"].items():
    print(f"t = {ranks}: {held:9,.0f} bytes, {held / SBH:6.3f} s b h")
slips = {"the inputs of norms and of column-parallel layers are replicated": 1 / 4}
outcome("activations", activations["tensor parallel"][4] / one, ranks=4, slips=slips)

# %% [markdown]
# Four tensors are replicated and twelve are sharded, so a rank keeps 4 + 12 / t tensors, and a few numbers per token
# for the norms and the softmax. The 4 replicated tensors do not shrink, however many ranks there are.
#
# [Korthikanti et al.](https://arxiv.org/abs/2205.05198) make the same count in bytes of fp16, with dropout, and get s b
# h (10 + 24 / t + 5 a s / (h t)), where a is the number of heads. Their 10 consists of your 4 tensors in fp16 and two
# dropout masks of one byte per element. The last term is for the attention scores: the softmax's output, a dropout mask
# and the output of this dropout, with 2, 1 and 2 bytes for each score. The paper removes this term by recomputing the
# scores in the backward pass. `F.scaled_dot_product_attention` recomputes them, too, so your count has no such term.
#
# ## 13.5 Shard the sequence
#
# *10 minutes, medium*
#
# Between g and the next f, every rank does the same work: a norm, dropout and a residual sum. Each of these treats
# every token independently. So let each rank do this work for s / t of the tokens. An all-reduce is a reduce-scatter
# followed by an all-gather (lab 01). g becomes the reduce-scatter, f becomes the all-gather, and everything between
# them works on a shard of the sequence.
#
# | | forward | backward |
# |---|---|---|
# | f | all-gather along s | reduce-scatter |
# | g | reduce-scatter along s | all-gather |
#
# In each row, the backward operation is the transpose of the forward operation. In the backward pass of f, each rank
# cannot simply take its own tokens out of its own gradient. Every rank has multiplied all tokens by its shard of the
# weight, so each rank's gradient is a partial sum.
#
# Predict: a block now sends twice as many messages. By what factor does the number of bytes change?

# %%
predict("13.5", ..., "ratio of bytes sent: with sequence parallelism to without")


# %% tags=["exercise-13.5"]
from .ex5_sequence_f_and_g import sequence_f_and_g

# %% [markdown]
# ## 13.6 A norm on a part of the sequence
#
# *4 minutes, easy*
#
# The weight and bias of a norm are replicated, but each rank applies them to only s / t tokens. What does that mean for
# their gradients? If nothing is done, each rank updates its copy differently, and the copies drift apart without any
# error. Megatron-LM sums these gradients after the backward pass, in one message. Here, one of the functions that you
# have already written does it.
#
# Predict: how many of a block's 12 parameters, including those of the norms, need such a sum?

# %%
predict("13.6", ..., "parameters of a block with gradients that are partial sums")


# %% tags=["exercise-13.6"]
from .ex6_norm import norm


# %%
def sequence_parallel(group: Group) -> Way:
    f, _ = f_and_g(group)
    return Way(*sequence_f_and_g(group), f, partial(norm, f=f))


def unshared(group: Group) -> Way:
    """A mistake: the gradients of replicated parameters are not summed."""
    return Way(*sequence_f_and_g(group), as_it_is, whole_norm)


def gradients() -> dict[str, Tensor]:
    """Return the gradients of the replicated parameters of the first block."""
    model = build(unshared)
    model(*batch()).backward()
    return {name: p.grad.cpu() for name, p in model.blocks[0].named_parameters() if p.shape == (96,)}


def block_bytes(way: MakeWay) -> tuple[list[str], float]:
    """Return the messages with a block's activations in one step, and the bytes that a rank sends for them."""
    more, fewer = messages(way, 4), messages(way, 2)
    counts = Counter(call.op for call in more) - Counter(call.op for call in fewer)
    nbytes = (sum(call.wire for call in more) - sum(call.wire for call in fewer)) / 2
    return [f"{count // 2} {op}" for op, count in sorted(counts.items())], nbytes


# %% [markdown]
# ### Measured: the same losses, the same bytes, fewer activations


# %%
for ranks in (2, 3, 4):
    far = difference(sequence_parallel, ranks)
    print(f"your sequence parallelism on {ranks} ranks: losses equal to one process's within 1e-9: {far < 1e-9}")
    assert far < 1e-9
sent = {way.__name__: launch(block_bytes, 4, way)[0] for way in (tensor_parallel, sequence_parallel)}
for name, (counts, nbytes) in sent.items():
    print(
        f"{name:18} {', '.join(counts)} per block: {nbytes:,.0f} bytes; "
        f"expected 8 b s h (t - 1) / t: {8 * SBH * 3 / 4:,.0f}"
    )
    assert nbytes == 8 * SBH * 3 / 4
slips = {"each of the messages is half an all-reduce": 2, "every all-reduce is replaced by both of its halves": 0.5}
outcome("13.5", sent["sequence_parallel"][1] / sent["tensor_parallel"][1], slips=slips)
first, second = launch(gradients, 2)
differ = [name for name in first if not torch.equal(first[name], second[name])]
print("without f, these gradients differ between two ranks:", *differ)
outcome("13.6", len(differ), slips={"the two biases added after g are applied to a shard of the sequence, too": 4})

# %%
activations["with sequence parallelism"] = {1: one}
for ranks in (2, 3, 4):
    activations["with sequence parallelism"][ranks] = launch(of_a_block, ranks, sequence_parallel)[0]
expected = {
    "tensor parallel": {t: 4 + 12 / t for t in (1, 2, 3, 4, 6, 8)},
    "with sequence parallelism": {t: 2 + 14 / t for t in (1, 2, 3, 4, 6, 8)},
    "16 / t": {t: 16 / t for t in (1, 2, 3, 4, 6, 8)},
}
for name, formula in (("tensor parallel", "4 + 12 / t"), ("with sequence parallelism", "2 + 14 / t")):
    for ranks, held in activations[name].items():
        wanted = expected[name][ranks]
        print(
            f"{name:25} t = {ranks}: {held / SBH:6.3f} s b h; "
            f"expected {formula} = {wanted:6.3f}, plus a few numbers per token"
        )
        assert 1 <= held / (SBH * wanted) < 1.03
plots.lines(
    {name: (list(each), [held / SBH for held in each.values()]) for name, each in activations.items()},
    expected={name: (list(each), list(each.values())) for name, each in expected.items()},
    xlabel="ranks t",
    ylabel="activations of a block, s b h elements",
    title=f"On 4 ranks, a block keeps {activations['tensor parallel'][4] / one:.0%} of its activations, "
    f"and {activations['with sequence parallelism'][4] / one:.0%} with sequence parallelism",
    says="Activations that each rank keeps until the backward pass, in tensors of s b h elements. Diamonds: expected, "
    "4 + 12 / t and, with sequence parallelism, 2 + 14 / t. Squares: 16 / t, if everything were sharded. The numbers "
    "per token that norms and softmax keep add 1 %.",
    lab="13",
)

# %% [markdown]
# Why 2 + 14 / t and not 16 / t? Your f gathers the sequence, and the two layers after it, `qkv` and `up`, keep the
# gathered tensor until the backward pass. Megatron-LM keeps only this rank's shard and gathers it again in the backward
# pass. `minifsdp.tensor_parallel` does the same with `regather=True`, which costs two additional gathers per block.
#
# ### Measured: the memory of a step, stage by stage
#
# The chart compares sequence parallelism on 4 ranks with tensor parallelism alone and with one process.


# %%
STAGES = ("before the step", "after forward", "after backward", "after the optimizer step")


def step_with(way: MakeWay | None) -> dict[str, dict[Any, int]]:
    """Return the number of bytes by kind of tensor at the end of each stage of the second step."""
    with Ledger() as ledger:
        model = build(way)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        ledger.watch(model, optimizer)
        for number in range(2):
            optimizer.zero_grad()
            found = [ledger.mark("before the step")]
            loss = model(*batch(number))
            found.append(ledger.mark("forward"))
            loss.backward()
            found.append(ledger.mark("backward"))
            optimizer.step()
            found.append(ledger.mark("step"))
    return dict(zip(STAGES, found, strict=True))


held = {
    "one process": launch(step_with, 1, None)[0],
    "t = 4": launch(step_with, 4, tensor_parallel)[0],
    "t = 4, sequence": launch(step_with, 4, sequence_parallel)[0],
}
totals = {name: {stage: sum(tags.values()) for stage, tags in each.items()} for name, each in held.items()}
forward = {name: each["after forward"] / 2**20 for name, each in totals.items()}
plots.stages(
    held["t = 4, sequence"],
    earlier={name: totals[name] for name in ("one process", "t = 4")},
    title=f"With t = 4, a rank holds {forward['t = 4']:.1f} MiB instead of {forward['one process']:.1f} MiB after the "
    f"forward pass; with sequence parallelism, {forward['t = 4, sequence']:.1f} MiB",
    says="Memory of rank 0 in the second step. Colours: t = 4 with sequence parallelism. All ranks work on the same 8 "
    "sequences. Norms, positions and two biases per block are replicated; a rank holds a quarter of all other "
    "parameters.",
    lab="13",
)

# %% [markdown]
# ## 13.7 Compare the traffic
#
# *4 minutes, easy*
#
# Tensor parallelism sends activations; FSDP sends parameters and gradients. The size of the activations depends on the
# batch, and the size of the parameters does not, so there is a batch for which both send the same number of bytes.
# Compare them on the same t ranks with the same total number of tokens. With FSDP, each rank has 1/t of the tokens;
# with tensor parallelism, every rank has all of them.
#
# Predict: a block of this model has 111,840 parameters, and h is 96. For how many tokens per step do both send the same
# number of bytes? Within 5 % is close enough.

# %%
predict("13.7", ..., "tokens per step for which both send the same number of bytes")


# %% tags=["exercise-13.7"]
from .ex7_bytes_sent import bytes_sent

# %% [markdown]
# ### Measured: the batch up to which tensor parallelism sends less


# %%
def sent_by(sequences: int) -> tuple[float, float]:
    """Return the bytes that a rank sends for one block: half the difference between models of four and two blocks."""
    tokens, targets = (t.repeat(-(-sequences // 8), 1)[:sequences] for t in batch())
    mine = data.shard((tokens, targets), dist.get_rank(), dist.get_world_size())
    found = []
    for model_of, rows in ((partial(build, tensor_parallel), (tokens, targets)), (fsdp, mine)):
        sums = []
        for layers in (2, 4):
            model = model_of(layers)
            with comm.record() as calls:
                model(*rows).backward()
            sums.append(sum(call.wire for call in calls))
        found.append((sums[1] - sums[0]) / 2)
    return found[0], found[1]


parameters, counts = 12 * 96**2 + 13 * 96, (4, 8, 16, 24, 32)
measured = {sequences: launch(sent_by, 2, sequences)[0] for sequences in counts}
print(f"{'tokens':>6}   tensor parallel: sent   expected   FSDP: sent   expected   (bytes per rank for one block)")
for sequences, (mine, theirs) in measured.items():
    a, b = bytes_sent(24 * sequences, 96, parameters, 2, 4)
    print(f"{24 * sequences:6}{mine:24,.0f}{a:11,.0f}{theirs:13,.0f}{b:11,.0f}")
    assert (mine, theirs) == (a, b)
even = bytes_sent(1, 96, parameters, 2, 4)
slips = {"this counts no biases and norms": 4.5 * 96, "this counts the tokens of one rank": 4.5 * 96 / 2}
outcome("13.7", round(even[1] / even[0]), how="computed", slips=slips)

# %%
plots.lines(
    {
        "activations, tensor parallel": ([24 * n for n in counts], [each[0] / 1e6 for each in measured.values()]),
        "parameters, FSDP": ([24 * n for n in counts], [each[1] / 1e6 for each in measured.values()]),
    },
    xlabel="tokens per step, on both ranks together",
    ylabel="sent per rank for one block, MB",
    title=f"Below {even[1] / even[0]:.0f} tokens, tensor parallelism sends less than FSDP",
    says="One step on 2 ranks, fp32. The lines cross at 4.5 h = 432 tokens for the weight matrices, plus 5 tokens for "
    "biases and norms. Activations grow with the number of tokens, parameters with the square of h.",
    lab="13",
)

# %% [markdown]
# Both numbers contain the factor (t - 1) / t, so the batch at which they are equal does not depend on t. Counting only
# the weight matrices, 12 h² per block, it is exactly 4.5 h tokens for all ranks together: 432 tokens here. The biases
# and norms, which FSDP sends, too, add about 5 tokens. For h = 4,096, 4.5 h is about 18,000 tokens, or two long
# sequences. Training steps have millions of tokens, far more than that, so tensor parallelism sends much more per step
# than FSDP.
#
# Tensor parallelism is used where FSDP cannot divide the work any further. With FSDP, each rank computes at least one
# sequence. If there are more GPUs than sequences, or if the activations of one sequence do not fit on a GPU, only the
# computation itself is left to shard. Because it sends so much, tensor parallelism is kept inside a host, where links
# are fast.
#
# ### Measured: each matmul waits for the sum before it
#
# FSDP gathers the next unit while the current one is computing. With tensor parallelism, nothing is left to compute
# while a sum is in progress. The timeline shows one step of a model with a single block, first with tensor parallelism,
# then with sequence parallelism, over an emulated link (1 ms of latency, 100 MB/s). In both rows, compare the compute
# and communication lanes: a message starts only after the compute before it, and the next compute starts only after the
# message.


# %% tags=["nbval-ignore-output"]
STEPS = 4


def trace_steps(folder: Path) -> None:
    let_communication_go_first()
    rows = tuple(t.repeat(4, 1) for t in batch())  # 32 sequences, so that compute takes long enough to see
    with parse_link("latency=1ms,bandwidth=100MB/s") as link:
        for way in (tensor_parallel, sequence_parallel):
            model = build(way, layers=1)
            model(*rows).backward()
            for number in range(STEPS):
                with record_trace(folder / f"{way.__name__}-{number}-{dist.get_rank()}.json", link):
                    comm.all_reduce(torch.zeros(1, device=rank_device()), comm.world()).wait()  # start together
                    with torch.profiler.record_function("forward"):
                        loss = model(*rows)
                    with torch.profiler.record_function("backward"):
                        loss.backward()


def fastest(folder: Path, name: str) -> list[Span]:
    """Return the step that was least disturbed by other programs on this machine."""
    steps = [read_trace(folder / f"{name}-{number}-0.json") for number in range(STEPS)]
    return min(steps, key=lambda spans: max(span.end for span in spans))


with tempfile.TemporaryDirectory() as folder:
    launch(trace_steps, 2, Path(folder))
    spans = {way.__name__: fastest(Path(folder), way.__name__) for way in (tensor_parallel, sequence_parallel)}
hidden = {name: overlap(each) or 0.0 for name, each in spans.items()}
plots.timeline(
    {"your tensor parallelism": spans["tensor_parallel"], "with sequence parallelism": spans["sequence_parallel"]},
    title=f"Compute hides {hidden['tensor_parallel']:.0%} of tensor parallelism's communication",
    says="Lanes of rank 0 of 2. Embedding, block and head need six all-reduces; the loss needs two small ones, the "
    "last two in forward: the link takes 1 ms for each, and the rest of the bar is the wait for the other rank. With "
    "sequence parallelism, each of the six becomes a reduce-scatter and an all-gather; the small all-reduces in the "
    "backward pass sum the gradients of nine replicated parameters.",
    lab="13",
)

# %% [markdown]
# The second row is longer, but do not conclude that sequence parallelism is slow. The six all-reduces and the two
# halves of each send the same number of bytes. Sequence parallelism sends more messages, each message pays the latency,
# and the latency of this link, 1 ms, is a hundred times that of NVLink in the model below. The small all-reduces in the
# backward pass sum the gradients of replicated parameters one by one; Megatron-LM sums them in a single message. The
# benefit of sequence parallelism is the memory that it saves.
#
# ### Modelled: pieces hide the messages of a fast link
#
# Async tensor parallelism splits the sequence into t pieces. A column-parallel layer multiplies one piece while it
# receives the next. A row-parallel layer sends the partial sum of one piece while it multiplies the next.
# `minifsdp/instruments/machine/pieces.py` computes the times of a block's four matmuls in the forward pass from data
# sheets (H100, bf16, 8,192 tokens of width 8,192, 60 % of the peak). This is a model; nothing was measured.
#
# The table gives three times in ms: for the matmuls alone, for matmuls and messages in turn (one after the other), and
# for both in pieces. The last two columns give the fraction of the time in which a rank waits for messages, in turn and
# in pieces.


# %%
print(f"{'H100':22}{'ranks':>6}{'matmuls':>10}{'in turn':>9}{'in pieces':>11}{'waits in turn':>15}{'in pieces':>11}")
for link in (NVLINK, NETWORK):
    for ranks in (2, 4, 8):
        products = products_of_block(8192, 8192, ranks).values()
        alone = sum(each.compute(link) for each in products)
        after = sum(each.one_after_the_other(link) for each in products)
        pieces = sum(each.in_pieces(link) for each in products)
        print(f"{link.name.removeprefix('H100, '):22}{ranks:6}{1e3 * alone:10.2f}{1e3 * after:9.2f}", end="")
        print(f"{1e3 * pieces:11.2f}{1 - alone / after:15.0%}{1 - alone / pieces:11.0%}")

# %% [markdown]
# On NVLink, 8 ranks wait for messages for 28 % of the time. With pieces, they wait for 4 %: the matmuls hide the
# rest. With one network card of 400 Gb/s per GPU, even with pieces, 4 ranks wait for 43 % of the time and 8 ranks
# for 73 %, because the messages take longer than the matmuls that should hide them. The timeline shows the same four
# matmuls on 4 ranks:

# %%
rows = {
    "NVLink, in turn": spans_of_block(8192, 8192, 4, NVLINK, pieces=False),
    "NVLink, in pieces": spans_of_block(8192, 8192, 4, NVLINK, pieces=True),
    "400 Gb/s, in pieces": spans_of_block(8192, 8192, 4, NETWORK, pieces=True),
}
hidden = {name: overlap(each) or 0.0 for name, each in rows.items()}
plots.timeline(
    rows,
    title=f"With pieces, compute hides {hidden['NVLink, in pieces']:.0%} of the communication on NVLink, "
    f"{hidden['400 Gb/s, in pieces']:.0%} on the network",
    says="Forward pass of a block on one of 4 ranks: its four matmuls and their messages. Adjacent pieces of a matmul "
    "are one bar. qkv and up gather their input; out and down reduce their output. Where a bar is too narrow for its "
    "name, the order is the same: qkv, out, up, down.",
    model="H100, 8,192 tokens of width 8,192, bf16",
)

# %% [markdown]
# On NVLink, a message takes less time than the matmul of one piece, so the matmul hides the message. On the network,
# the message takes longer, and the next matmul waits for it. Tensor parallelism therefore stays inside a host, even if
# matmuls are split into pieces.
#
# The authors of torchtitan measured a model of 70 billion parameters in bf16 on 256 H100s, with tensor parallelism
# inside each host (t = 8) and FSDP across the hosts: 597 tokens per second per GPU without pieces, and 652 with pieces.
#
# ### Break it: equal and different random numbers
#
# Dropout on a *sharded* activation (hidden features, attention weights, a shard of the sequence) needs a different mask
# on each rank. Dropout on a *replicated* activation needs the same mask on all ranks. The cell applies dropout with p =
# 0.1 on two ranks, first correctly and then with each of the two possible mistakes.


# %%
def drops(own: bool, features: int) -> Tensor:
    """Return a mask drawn from either this rank's own generator or the shared one."""
    with own_random_numbers(comm.world(), rank_device()) if own else nullcontext():
        return F.dropout(torch.ones(64, features, device=rank_device()), 0.1) > 0


def masks(own_parts: bool, own_wholes: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)  # the same on every rank, as in one process
    return drops(own_parts, 192).cpu(), drops(own_wholes, 96).cpu()


print("Fraction of mask elements that are equal on both ranks:")
print(f"{'':44}{'hidden features':>16}{'full activation':>18}")
for name, own in {
    "own seed for shards, shared seed elsewhere": (True, False),
    "one seed for everything": (False, False),
    "a seed for each rank": (True, True),
}.items():
    ours, theirs = launch(masks, 2, *own)
    same = [(a == b).double().mean().item() for a, b in zip(ours, theirs, strict=True)]
    print(f"{name:44}{same[0]:16.0%}{same[1]:18.0%}")
print(f"expected: {0.9**2 + 0.1**2:.0%} if the masks are independent, 100% if they are the same")

# %% [markdown]
# With one seed for everything, features i and i + 192 of the hidden layer are always dropped together. This weakens the
# regularization and raises no error. With one seed per rank, the copies of the residual stream differ between ranks. x
# is then no longer the same at the input of f, and the summed gradients do not belong to any single model. minifsdp
# draws a seed for sharded activations from the shared generator (`tensor_parallel/dropout.py`); Megatron-LM keeps a
# second generator.
#
# ## What is still missing
#
# - Parameters that keep their names: `parallelize_module` in `minifsdp/tensor_parallel` turns them into DTensors, as in
#   torch. Lab 12's checkpoints work with these, and so does an outer `fully_shard` on a 2-D mesh.
# - Decomposed matmuls that really overlap with their messages. They require kernels that copy from another GPU's memory
#   (`torch/distributed/_symmetric_memory`).
# - Models with fewer key and value heads than ranks. An implementation has to either reject them or replicate these
#   heads.
#
# ## What to remember
#
# 1. A column-parallel layer takes the replicated input and computes a shard of the output; the gradient of its input
#    has to be summed. A row-parallel layer takes a shard of the input, and its output has to be summed. A
#    column-parallel layer followed by a row-parallel one needs one sum in each direction.
# 2. f copies in the forward pass and sums in the backward pass; g does the opposite. The bias of a row-parallel layer
#    is added after g.
# 3. The loss needs three numbers per token. The logits stay sharded.
# 4. Activations fall from 16 to 4 + 12 / t. Sharding the sequence reduces the 4 as well, and sends no additional bytes.
#    Parameters that are applied to only a shard of the tokens then need their gradients summed.
# 5. A rank sends 8 b s h (t - 1) / t elements per block, all on the critical path. Tensor parallelism therefore belongs
#    on the fastest link available.
#
# ## Questions
#
# **1. Why not split both matrices of the MLP by columns?**
# <details><summary>Answer</summary>The second matrix would need all hidden features. This would require an all-gather
# of 4 h elements per token between the two layers, and another all-gather after the second. With columns first and rows
# second, a single sum of h elements per token is enough.</details>
#
# **2. A model runs on 16 GPUs, with t = 8 and 2 data-parallel replicas. How many times as large as the batch of one
# rank is the global batch?**
# <details><summary>Answer</summary>Twice as large. The 8 ranks of a tensor-parallel group all have the same
# batch.</details>
#
# **3. Why does the number of attention heads have to be divisible by t, but not the size of the vocabulary?**
# <details><summary>Answer</summary>The softmax over positions needs a complete head. Each class of the vocabulary, by
# contrast, can be on any rank, so uneven shards work. Large models pad the vocabulary all the same, so that every rank
# has the same amount of work.</details>
#
# **4. The dropout between g and f has probability 0, and the ranks start from different seeds. Is anything wrong?**
# <details><summary>Answer</summary>Nothing is wrong with the dropout, but initialization draws random numbers, too.
# Replicated parameters, such as norms and the biases added after g, must start with equal values on all ranks, and
# sharded parameters must start with different ones.</details>
#
# ## Further reading
#
# - Shoeybi et al., [Megatron-LM](https://arxiv.org/abs/1909.08053), section 3; Korthikanti et al., [Reducing activation
#   recomputation](https://arxiv.org/abs/2205.05198), sections 4 and 5.
# - torch: `torch/distributed/tensor/parallel/style.py`, `torch/distributed/tensor/parallel/loss.py`.
# - minifsdp: `tensor_parallel/layouts.py` (13.2, 13.5), `columns.py`, `rows.py`, `loss.py`, `sequence.py`, and
#   `gpt.py`, which applies them to this GPT.
