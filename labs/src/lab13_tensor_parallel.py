# ---
# jupyter:
#   minifsdp:
#     lab: "13"
#     title: Tensor parallelism
#     minutes: 60
#     ranks: 4
# ---

# %% [markdown]
# # Lab 13: tensor parallelism
#
# FSDP shards the *storage*. When a layer computes, its parameters are whole, and each rank has its own
# rows of the batch. Tensor parallelism shards the *computation*: a rank keeps its part of a matrix,
# multiplies with that part alone, and all ranks work on the same rows. Parameters never travel.
# Activations do.
#
# ![One product of a 2 by 3 and a 3 by 2 matrix, cut by columns, where the parts are put side by side, and by rows,
# where the summands are added](../slides/figures/scale-product.svg)
#
# *From [lecture 6, Beyond the flat parameter](../slides/scale.md), which comes before this lab: its second half.*
#
# **Afterwards you can**
#
# - cut a matrix product by columns and by rows, and name the message that each needs;
# - say where a transformer block sums in forward, where in backward, and why nowhere else;
# - compute a cross-entropy from logits that no rank has whole;
# - cut norms and dropout along the sequence, and name the gradients that are then summands;
# - predict activations and traffic from b, s, h and t, and say when tensor parallelism is the cheaper.
#
# **You need** labs 00 to 05: all-reduce, all-gather, reduce-scatter and what a ring sends for each.
#
# **Time** 60 minutes. **To run** on a laptop (gloo, 2 to 4 processes), on one GPU, or on a GPU node.
# **Memory** a rank's tensors take less than 40 MiB here.
#
# The papers write t for the number of ranks, b, s and h for batch, sequence length and width. So does
# this lab.

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

Crossing = Callable[[Tensor], Tensor]  # what activations go through on their way into or out of a cut layer

# %% [markdown]
# ## 13.1 Multiply
#
# *9 minutes, medium*
#
# In the drawing x is [[1, 2, 3], [4, 5, 6]] and w is [[1, 2], [3, 4], [5, 6]], on two ranks.
#
# **By columns.** A rank has some columns of w, and all of x. It makes those columns of the product.
# The ranks' columns are put side by side.
#
# **By rows.** A rank has some rows of w. They meet the same *columns* of x. The product of the two has
# the full shape and is a *summand*: the ranks' products have to be added up.
#
# Predict: rings carry both messages. How many times as many bytes does a rank send by rows as by
# columns, for the same product on the same ranks?

# %%
predict("13.1", ..., "bytes that a rank sends by rows, over those by columns")


# %% tags=["exercise-13.1"]
@exercise("13.1")
def multiply(x: Tensor, w: Tensor, by: Literal["columns", "rows"], group: Group) -> Tensor:
    """x w on all ranks, of products with parts of w.

    `comm.all_gather(output, part, group).wait()` joins parts of equal size along the first dimension,
    `comm.all_reduce(tensor, group).wait()` sums in place. Both take contiguous tensors.

    Args:
        x: [rows, in], the same on every rank of `group`.
        w: [in, out], the same on every rank; a rank multiplies with its part alone.
        by: along which dimension w is cut. Parts are those of `torch.chunk`: ceil(length / t) columns
            or rows each, the last ones fewer, perhaps none.
        group: the t ranks, perhaps a part of the world.

    Returns:
        [rows, out], the whole product, on every rank, after one collective.
    """
    ...


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
from minifsdp.course import plots
from minifsdp.course.ladder import data
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.model import GPT, Block
from minifsdp.course.launch import launch, rank_device
from minifsdp.course.link.emulated import let_communication_go_first, parse_link
from minifsdp.course.watch.ledger import Ledger
from minifsdp.course.watch.timeline import Span, overlap, read_trace
from minifsdp.course.watch.trace import record_trace
from minifsdp.fsdp import SyncSchedule
from minifsdp.tensor_parallel.dropout import own_random_numbers

X, W = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([[1.0, 2], [3, 4], [5, 6]])

# %% [markdown]
# ### Measured: the smallest example, by columns and by rows


# %% tags=["C27"]
def smallest(by: Literal["columns", "rows"]) -> tuple[Any, list[str], float]:
    """The product on this rank, the messages, and the bytes sent."""
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
# Two layers in a row need less than twice that. Cut the first matrix by columns and the second by
# rows: what the first makes on a rank is just what the second needs there, so nothing is sent between
# them. One sum at the end is all. That pair is the idea of Megatron-LM
# ([Shoeybi et al., section 3](https://arxiv.org/abs/1909.08053)).
#
# ## 13.2 f and g
#
# *7 minutes, medium*
#
# Backward needs messages, too, and autograd knows nothing of `comm`. Two autograd functions bring
# the pair in. **f** stands where a whole activation enters cut layers: all ranks have the same x, and
# each uses it with its own part of the weight. So each rank's gradient of x is a summand, and f adds
# them up. **g** stands where summands leave: forward it adds them up. All ranks go on alike from
# there, so the gradient that comes back is the whole one on each.
#
# | | forward | backward |
# |---|---|---|
# | f | nothing | all-reduce |
# | g | all-reduce | nothing |
#
# Predict: a g that all-reduces in backward as well is an easy slip. The model is two such pairs of
# layers, one after the other, on 2 ranks. By which factor are the gradients of the *first* pair's
# weights wrong?

# %%
predict("13.2", ..., "factor in the first pair's gradients, of two, on 2 ranks")


# %% tags=["exercise-13.2"]
@exercise("13.2")
def f_and_g(group: Group) -> tuple[Crossing, Crossing]:
    """Return f and g, for tensors of any shape.

    f(x): x forward; backward the sum over `group` of the ranks' gradients.
    g(x): the sum over `group` of the ranks' x; backward the gradient as it comes.

    Neither changes its input, nor the gradient that it is handed: others may have a reference to it. A
    gradient need not be contiguous. A message is.
    """
    ...


# %% [markdown]
# ## 13.3 The MLP
#
# *5 minutes, easy*
#
# The block's MLP is `down(gelu(up(x)))`. `nn.Linear` stores its weight as [out, in], so `up` by columns
# is a part of its *first* dimension. Gelu works on each feature by itself, so it needs no message.
#
# Two biases: the one of `up` is cut with its columns. The one of `down` is whole on every rank. Where
# does it go?
#
# Predict: attention is cut in the same way. Each rank has some heads, that is columns of q, k and v,
# and the same rows of the output projection. The embedding is cut along the vocabulary and ends in a
# g, the head begins with an f. How many messages of [b, s, h] does a forward and backward of a model
# with 4 blocks send?

# %%
predict("13.3", ..., "messages of [b, s, h] in a step, 4 blocks, embedding and head")


# %% tags=["exercise-13.3"]
@exercise("13.3")
def mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, f: Crossing, g: Crossing) -> Tensor:
    """gelu(x up^T + up_bias) down^T + down_bias, on t ranks, each with its parts.

    One message forward, g's, and one backward, f's.

    Args:
        x: [.., h], whole on every rank.
        up: [inner / t, h], this rank's columns, as `nn.Linear` stores them.
        up_bias: [inner / t], this rank's part.
        down: [h, inner / t], this rank's rows, as `nn.Linear` stores them.
        down_bias: [h], whole on every rank, where it gets the same gradient.
        f, g: of 13.2.

    Returns:
        [.., h], the same on every rank.
    """
    ...


# %% [markdown]
# ### Break it: a bias added before the sum
#
# `F.linear` takes a bias, and so it slips in before g. Forward on 1, 2 and 3 ranks, against one process:


# %%
SETTINGS = Settings(ranks=2, batch=8, layers=4, width=96, context=24)
BATCHES = list(SETTINGS.batches())  # tensor-parallel ranks all take the same rows


def whole(layers: int = 4, dtype: torch.dtype = torch.float32) -> GPT:
    """The same on every rank, with heads for 2, 3 and 4 ranks."""
    torch.manual_seed(0)
    return GPT(width=96, layers=layers, heads=12, context=24).to(rank_device(), dtype)


def too_early() -> tuple[float, float]:
    """How far the output is off, in units of the bias; without the slip, and with it."""
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
    print(f"{ranks} rank(s): yours off by {yours:.0e} of the bias, with the bias before the sum by {slipped:.6f}")
    assert yours < 1e-9 < abs(slipped - (ranks - 1)) + 1e-6

# %% [markdown]
# On one rank, where code is tested first, the slip is right. On t ranks the bias counts t times,
# training adapts to that, and the checkpoint is wrong everywhere else.
#
# ### Break it: an all-reduce in both directions
#
# Two MLPs, one after the other, on 2 ranks. Norms of gradients, with your g and with one that also sums
# backward, over those of one process.


# %%
class Doubled(torch.autograd.Function):
    """g, summing in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        comm.all_reduce(total, comm.world()).wait()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Doubled.forward(ctx, gradient.contiguous())


def two_pairs(doubled: bool) -> tuple[float, list[float]]:
    """The loss and each pair's gradient, over those of one process."""
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
        f"{name:10} loss {loss:.6f} times the right one, gradients of the first pair {factors[0]:.6f} times, "
        f"of the second {factors[1]:.6f} times"
    )
outcome("13.2", round(factors[0], 6), slips={"every g on the way back multiplies by t, the second pair's, too": 2})

# %% [markdown]
# The loss does not show it: forward is right. AdamW divides a gradient by its own size, so the model
# even trains. Clipping sees a norm that is too large, and SGD takes steps that are too long. So
# compare *gradients* with one process, not the first loss.
#
# ## 13.4 The loss, of logits that are cut
#
# *10 minutes, hard*
#
# The head is a matrix like others: by columns, each rank makes the logits of its part of the
# vocabulary. With 128,256 tokens (Llama 3) the logits are a model's largest activation, too large to
# gather. Cross-entropy needs little of them:
#
# $$\text{loss} = \log \sum_v e^{x_v - m} - (x_\text{target} - m), \qquad m = \max_v x_v$$
#
# Three numbers per token come from all ranks: the maximum m, against overflow of $e^x$; the sum; and
# the target's logit, from the one rank that has it.
#
# Predict: 1,024 classes in float32 on 2 ranks. How many times as many bytes as yours does an
# all-gather of the logits send? 5 % off is fine.

# %%
predict("13.4", ..., "bytes that gathering logits sends, over those of three numbers per token")


# %% tags=["exercise-13.4"]
@exercise("13.4")
def cross_entropy(logits: Tensor, targets: Tensor, first: int, group: Group, g: Crossing) -> Tensor:
    """Mean cross-entropy of logits that are cut along the vocabulary, the same on every rank.

    Backward needs no message, if it goes through `g`. `comm.MAX` is the operation of a maximum, as in
    `comm.all_reduce(tensor, group, comm.MAX)`.

    Args:
        logits: [tokens, V_r], this rank's classes, at least one; any finite values.
        targets: [tokens] int64, from 0 to V - 1, whole on every rank: most are other ranks' classes.
        first: this rank's first class.
        group: the t ranks.
        g: of 13.2: sums forward, copies backward.

    Returns:
        The mean over the tokens, a scalar.
    """
    ...


# %%
def bytes_of_a_loss(classes: int, tokens: int = 64) -> tuple[float, float]:
    """Bytes that a rank sends for the loss and its gradient; to gather the logits."""
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
        f"{classes:5} classes: {yours:5.0f} bytes sent, {gathered:9,.0f} to gather the logits, "
        f"{gathered / yours:5.1f} times as many"
    )
    if classes == 1024:
        slips = {
            "an all-reduce goes around the ring twice": 2 * gathered / yours,
            "three numbers": 3 * gathered / yours,
        }
        outcome("13.4", round(gathered / yours, 1), ranks=2, slips=slips)

# %% [markdown]
# ## Your pieces make a GPT
#
# A block on a rank, of f, g and your MLP. Attention is the same pair: `qkv` by columns, whole heads of
# each of q, k and v; `out` by rows. `enter` and `leave` are f and g for now, `share` changes nothing,
# and `norm` is torch's. 13.5 and 13.6 will put other functions in their places.


# %% tags=["shown"]
class Way(NamedTuple):
    """How activations enter and leave cut layers, and what whole parameters go through."""

    enter: Crossing
    leave: Crossing
    share: Crossing
    norm: Callable[..., Tensor]


class CutBlock(nn.Module):
    """This rank's part of a block."""

    def __init__(self, block: Any, group: Group, way: Way) -> None:
        super().__init__()
        mine = partial(part_of, group=group)
        self.way, self.heads = way, block.heads // group.size()
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.qkv = mine(block.qkv.weight.unflatten(0, (3, -1)), 1)  # of q, of k and of v, each
        self.qkv_bias = mine(block.qkv.bias.unflatten(0, (3, -1)), 1)
        self.up, self.up_bias = mine(block.up.weight, 0), mine(block.up.bias, 0)
        self.out, self.down = mine(block.out.weight, 1), mine(block.down.weight, 1)
        self.out_bias, self.down_bias = block.out.bias, block.down.bias  # whole

    def forward(self, x: Tensor) -> Tensor:
        enter, leave, share, norm = self.way
        x = x + self.attend(norm(x, self.norm1.weight, self.norm1.bias))
        x2 = norm(x, self.norm2.weight, self.norm2.bias)
        return x + mlp(x2, self.up, self.up_bias, self.down, share(self.down_bias), enter, leave)

    def attend(self, x: Tensor) -> Tensor:
        enter, leave, share, _ = self.way
        qkv = F.linear(enter(x), self.qkv.flatten(0, 1), self.qkv_bias.flatten())
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return leave(F.linear(mixed.transpose(1, 2).flatten(2), self.out)) + share(self.out_bias)


# %%
def part_of(p: Tensor, dim: int, group: Group) -> nn.Parameter:
    return nn.Parameter(p.detach().chunk(group.size(), dim)[group.rank()].clone())


class CutGPT(nn.Module):
    """Embedding and head are cut along the vocabulary, of 257 tokens: uneven parts."""

    def __init__(self, model: Any, group: Group, way: Way) -> None:
        super().__init__()
        self.group, self.way, self.g = group, way, f_and_g(group)[1]
        self.first = group.rank() * -(-model.head.out_features // group.size())
        self.embed, self.position, self.norm = part_of(model.embed.weight, 0, group), model.position.weight, model.norm
        self.blocks = nn.ModuleList(CutBlock(block, group, way) for block in model.blocks)
        self.head, self.head_bias = part_of(model.head.weight, 0, group), part_of(model.head.bias, 0, group)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        enter, leave, share, norm = self.way
        index = tokens - self.first
        here = (index >= 0) & (index < len(self.embed))
        summand = F.embedding(torch.where(here, index, 0), self.embed) * here[..., None]
        x = leave(summand)  # with sequence parallelism: this rank's tokens
        position, length = share(self.position), x.shape[1]
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
    """The model on this rank; None: the whole one."""
    model = whole(layers, dtype)
    return model if way is None else CutGPT(model, comm.world(), way(comm.world())).to(rank_device())


def batch(number: int = 0) -> data.Batch:
    return data.to_device(BATCHES[number], rank_device())


# %% [markdown]
# ### Measured: the losses of one process
#
# Four steps of AdamW in float64: the largest difference from one process, on any rank.


# %%
def losses(way: MakeWay | None) -> list[float]:
    model = build(way, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for number in range(4):
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
    print(f"your tensor parallelism on {ranks} ranks: equal within 1e-9: {far < 1e-9}")
    assert far < 1e-9


def messages(way: MakeWay, layers: int = 4) -> list[comm.Call]:
    """Those of a step whose tensors are [b, s, h]."""
    model = build(way, layers)
    with comm.record() as calls:
        model(*batch()).backward()
    return [call for call in calls if call.payload == 4 * 8 * 24 * 96]


slips = {"the embedding sums once forward, and the head's f once backward": 16, "backward has as many": 9}
outcome("13.3", len(launch(messages, 2, tensor_parallel)[0]), slips=slips)

# %% [markdown]
# ### Measured: whole parameters and parts of them
#
# What goes into `up` of the first block, with FSDP and with yours, on 2 ranks and 8 sequences.


# %% tags=["C13"]
def fsdp(layers: int = 4) -> nn.Module:
    return FullyShardedDataParallel(whole(layers), auto_wrap_policy={Block}, schedule=SyncSchedule)


def shapes() -> dict[str, tuple[list[int], list[int]]]:
    """Of the activations that the first block gets, and of the weight it multiplies with."""
    found = {}
    sharded, cut = fsdp(), build(tensor_parallel)

    def look(name: str, weight: Callable[[Any], Tensor], module: Any, args: Any) -> None:
        found[name] = list(args[0].shape), list(weight(module).shape)

    first = next(module for module in sharded.modules() if isinstance(module, Block))
    first.up.register_forward_pre_hook(partial(look, "FSDP", lambda module: module.weight))
    cut.blocks[0].register_forward_pre_hook(partial(look, "yours", lambda module: module.up))
    sharded(*data.shard(batch(), dist.get_rank(), dist.get_world_size()))
    cut(*batch())
    return found


for name, (activation, weight) in launch(shapes, 2)[0].items():
    print(f"{name:6} activations {activation}, weight {weight}")
print("expected of FSDP 4 of 8 sequences and all 384 rows of the weight, of yours 8 and 192")

# %% [markdown]
# FSDP is data parallelism. Tensor parallelism is not: all its ranks see the same batch, so they count
# as *one* worker for the data loader, and the batch does not grow with t.
#
# ## What it leaves in memory
#
# Parameters, gradients and optimizer state of cut layers are 1/t. Activations are not all cut. Count a
# block's, in tensors of s b h elements, that autograd keeps on one process: the inputs of two norms (2)
# and of two cut layers (2), which are whole on every rank; q, k and v (3), attention's output (1), `up`'s
# output (4) and gelu's (4), which are parts.
#
# Predict: which fraction of one process's activations does a block keep on 4 ranks?

# %%
predict("activations", ..., "activations of a block on 4 ranks, over those on one process")


# %%
def kept(way: MakeWay | None, layers: int) -> int:
    """Bytes of activations between forward and backward."""
    with Ledger() as ledger:
        model = build(way, layers)
        ledger.watch(model)
        loss = model(*batch())
        held = ledger.mark("forward")["activations"]
        loss.backward()
    return held


def of_a_block(way: MakeWay | None) -> float:
    """What two blocks more keep, halved."""
    return (kept(way, 4) - kept(way, 2)) / 2


SBH = 24 * 8 * 96 * 4  # bytes of a tensor [b, s, h]
(one,) = launch(of_a_block, 1, None)
activations = {"tensor parallel": {1: one}}
for ranks in (2, 3, 4):
    activations["tensor parallel"][ranks] = launch(of_a_block, ranks, tensor_parallel)[0]
for ranks, held in activations["tensor parallel"].items():
    print(f"t = {ranks}: {held:9,.0f} bytes, {held / SBH:6.3f} s b h; expected {4 + 12 / ranks:6.3f}, and some sums")
    assert 1 <= held / (SBH * (4 + 12 / ranks)) < 1.03
slips = {"whole on every rank: the inputs of norms and of cut layers": 1 / 4}
outcome("activations", activations["tensor parallel"][4] / one, ranks=4, slips=slips)

# %% [markdown]
# [Korthikanti et al.](https://arxiv.org/abs/2205.05198) count the same in bytes of fp16, with dropout:
# s b h (10 + 24 / t). 10 is your 4 in fp16, and two masks of a byte. However many ranks there are, the
# 10 stay.
#
# ## 13.5 Cut the sequence
#
# *8 minutes, medium*
#
# Between g and the next f every rank does the same: a norm, dropout, a residual sum, each token by
# itself. So let each rank do it for s / t of the tokens. An all-reduce is a reduce-scatter and an
# all-gather (lab 01): g becomes the first half, f the second, and what lies between works on a part.
#
# | | forward | backward |
# |---|---|---|
# | f | all-gather along s | reduce-scatter |
# | g | reduce-scatter along s | all-gather |
#
# Each is the other's transpose. In f's backward a rank does not simply take its tokens out of its own
# gradient: every rank has used all tokens, with its part of the weight, so gradients are summands.
#
# Predict: a block now has twice as many messages. How many times as many bytes does it send?

# %%
predict("13.5", ..., "bytes that a block sends with sequence parallelism, over those without")


# %% tags=["exercise-13.5"]
@exercise("13.5")
def sequence_f_and_g(group: Group) -> tuple[Crossing, Crossing]:
    """Return f and g for activations that are cut along dimension 1, the sequence, in rank order.

    f(part): [b, s / t, h] -> [b, s, h], all ranks' tokens. Its gradient [b, s, h] is a summand.
    g(summand): [b, s, h] -> [b, s / t, h], this rank's tokens of the sum. t divides s.

    One collective in each direction, along the first dimension of contiguous tensors:
    `comm.all_gather(output, part, group).wait()`, `comm.reduce_scatter(part, whole, group).wait()`.
    """
    ...


# %% [markdown]
# ## 13.6 A norm on a part
#
# *4 minutes, easy*
#
# A norm's weight and bias are whole on every rank, and meet s / t tokens there. What does that do to
# their gradients? Left as they are, each rank updates its copy in its own way: the copies drift apart,
# without an error. Megatron-LM sums these gradients after backward, in one message. Here one of your
# functions does it.
#
# Predict: how many of a block's 12 parameters are in this position, the norms' included?

# %%
predict("13.6", ..., "parameters of a block whose gradients are summands with sequence parallelism")


# %% tags=["exercise-13.6"]
@exercise("13.6")
def norm(part: Tensor, weight: Tensor, bias: Tensor, f: Crossing) -> Tensor:
    """LayerNorm (eps 1e-5) of this rank's tokens; gradients of weight and bias are those of all tokens.

    Args:
        part: [b, s / t, h], this rank's tokens.
        weight, bias: [h], the same on every rank.
        f: of 13.2: copies forward, sums gradients backward.

    Returns:
        [b, s / t, h].
    """
    ...


# %%
def sequence_parallel(group: Group) -> Way:
    f, _ = f_and_g(group)
    return Way(*sequence_f_and_g(group), f, partial(norm, f=f))


def unshared(group: Group) -> Way:
    """A slip: whole parameters' gradients are left as they come."""
    return Way(*sequence_f_and_g(group), as_it_is, whole_norm)


def gradients() -> dict[str, Tensor]:
    """Of the first block's parameters that are whole on every rank."""
    model = build(unshared)
    model(*batch()).backward()
    return {name: p.grad.cpu() for name, p in model.blocks[0].named_parameters() if p.shape == (96,)}


def block_bytes(way: MakeWay) -> tuple[list[str], float]:
    """A block's messages of activations in a step, and the bytes that a rank sends for them."""
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
slips = {"each of the messages is half an all-reduce": 2, "all of what was sent is still needed": 0.5}
outcome("13.5", sent["sequence_parallel"][1] / sent["tensor_parallel"][1], slips=slips)
first, second = launch(gradients, 2)
differ = [name for name in first if not torch.equal(first[name], second[name])]
print("without f on them, gradients of two ranks differ:", *differ)
outcome("13.6", len(differ), slips={"and the two biases that are added behind g, on a part of the sequence": 4})

# %%
activations["with sequence parallelism"] = {1: one}
for ranks in (2, 3, 4):
    activations["with sequence parallelism"][ranks] = launch(of_a_block, ranks, sequence_parallel)[0]
    held = activations["with sequence parallelism"][ranks]
    print(f"t = {ranks}: {held / SBH:6.3f} s b h; expected 2 + 14 / t = {2 + 14 / ranks:.3f}, and sums")
expected = {
    "tensor parallel": {t: 4 + 12 / t for t in (1, 2, 3, 4, 6, 8)},
    "with sequence parallelism": {t: 2 + 14 / t for t in (1, 2, 3, 4, 6, 8)},
    "everything / t": {t: 16 / t for t in (1, 2, 3, 4, 6, 8)},
}
plots.lines(
    {name: (list(each), [held / SBH for held in each.values()]) for name, each in activations.items()},
    expected={name: (list(each), list(each.values())) for name, each in expected.items()},
    xlabel="ranks t",
    ylabel="activations of a block, s b h elements",
    title=f"On 4 ranks a block keeps {activations['tensor parallel'][4] / one:.0%} of its activations, "
    f"with the sequence cut {activations['with sequence parallelism'][4] / one:.0%}",
    says="Between forward and backward, on each rank, in tensors of s b h elements. Diamonds: 4 + 12 / t, and "
    "2 + 14 / t. Norms' and softmax's sums come on top, about 1 %.",
    lab="13",
)

# %% [markdown]
# Why 2 + 14 / t and not 16 / t? Your f gathers, and the two layers behind it keep what was gathered,
# whole. Megatron-LM keeps the part and gathers once more in backward. `minifsdp.tensor_parallel` does so
# with `regather=True`: two gathers more for each block.
#
# ### Measured: the memory of a step, stage by stage
#
# On 4 ranks with the sequence cut, next to one process and to tensor parallelism alone.


# %%
STAGES = ("at rest", "after forward", "after backward", "after the optimizer's step")


def step_with(way: MakeWay | None) -> dict[str, dict[Any, int]]:
    """Bytes by tag at the end of each stage of the second step."""
    with Ledger() as ledger:
        model = build(way)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        ledger.watch(model, optimizer)
        for number in range(2):
            optimizer.zero_grad()
            found = [ledger.mark("at rest")]
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
    title=f"After forward: {forward['one process']:.1f} MiB on one process, {forward['t = 4']:.1f} with t = 4, "
    f"{forward['t = 4, sequence']:.1f} with the sequence cut",
    says="Bytes of rank 0 in the second step; colours: t = 4 with the sequence cut. All ranks work on the same 8 "
    "sequences. Norms, positions and two biases per block are whole, all other parameters a quarter.",
    lab="13",
)

# %% [markdown]
# ## 13.7 What crosses
#
# *4 minutes, easy*
#
# Tensor parallelism sends activations, FSDP parameters and gradients. Neither depends on the other's
# size, so at some batch they are equal. Take the same t ranks and the same tokens in all: with FSDP
# each rank has 1/t of them, with tensor parallelism all ranks have all.
#
# Predict: a block of this model has 111,840 parameters, and h is 96. At how many tokens in a step do
# both send as many bytes? 5 % off is fine.

# %%
predict("13.7", ..., "tokens in a step at which both send as many bytes")


# %% tags=["exercise-13.7"]
@exercise("13.7")
def crossing(tokens: int, width: int, parameters: int, ranks: int, itemsize: int) -> tuple[float, float]:
    """Bytes that a rank sends for one block in a step, by rings.

    Args:
        tokens: b s, those of a step on all ranks together.
        width: h.
        parameters: elements of the block.
        ranks: t.
        itemsize: bytes of an element.

    Returns:
        With tensor parallelism (with or without a cut sequence); with FSDP, whose units are freed
        after forward. Sums of norms' gradients are left out.
    """
    ...


# %% [markdown]
# ### Measured: at which batch tensor parallelism is the cheaper


# %%
def sent_by(sequences: int) -> tuple[float, float]:
    """Bytes that a rank sends for a block: what four blocks send more than two, halved."""
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
print(f"{'tokens':>6}{'tensor parallel':>24}{'FSDP':>24}   bytes sent for a block, and expected")
for sequences, (mine, theirs) in measured.items():
    a, b = crossing(24 * sequences, 96, parameters, 2, 4)
    print(f"{24 * sequences:6}{mine:12,.0f} {a:11,.0f}{theirs:12,.0f} {b:11,.0f}")
    assert (mine, theirs) == (a, b)
even = crossing(1, 96, parameters, 2, 4)
slips = {"without biases and norms": 4.5 * 96, "with tokens of one rank of t": 4.5 * 96 / 2}
outcome("13.7", round(even[1] / even[0]), how="computed", slips=slips)

# %%
plots.lines(
    {
        "activations, tensor parallel": ([24 * n for n in counts], [each[0] / 1e6 for each in measured.values()]),
        "parameters, FSDP": ([24 * n for n in counts], [each[1] / 1e6 for each in measured.values()]),
    },
    xlabel="tokens in a step, on both ranks together",
    ylabel="sent by a rank for a block, MB",
    title=f"Below {even[1] / even[0]:.0f} tokens, 4.5 h, activations are less to send than parameters",
    says="One step on 2 ranks, fp32. Activations grow with tokens, parameters with the square of the width.",
    lab="13",
)

# %% [markdown]
# Both have the factor (t - 1) / t, so the batch at which they are equal does not depend on t: about
# 4.5 h tokens for all ranks together. For h = 4,096 these are 18,000 tokens, two long sequences. Training
# steps of millions of tokens are far on the other side: per step tensor parallelism sends much more than
# FSDP. It is used all the same, inside a host, because a rank's batch cannot be less than one sequence:
# with more GPUs than sequences, or one sequence that does not fit, FSDP has nothing left to divide.
#
# ### Measured: nothing can hide it
#
# FSDP gathers the next unit while one computes. Here every product waits for the sum before it. One step
# of each over an emulated link (1 ms, 100 MB/s).


# %% tags=["nbval-ignore-output"]
STEPS = 8


def trace_steps(folder: Path) -> None:
    let_communication_go_first()
    rows = tuple(t.repeat(4, 1) for t in batch())  # 32 sequences, so that there is something to compute
    with parse_link("latency=1ms,bandwidth=100MB/s") as link:
        for way in (tensor_parallel, sequence_parallel):
            model = build(way)
            model(*rows).backward()
            for number in range(STEPS):
                with record_trace(folder / f"{way.__name__}-{number}-{dist.get_rank()}.json", link):
                    comm.all_reduce(torch.zeros(1, device=rank_device()), comm.world()).wait()  # start together
                    with torch.profiler.record_function("forward"):
                        loss = model(*rows)
                    with torch.profiler.record_function("backward"):
                        loss.backward()


def fastest(folder: Path, name: str) -> list[Span]:
    """The step least disturbed by other programs on this machine."""
    steps = [read_trace(folder / f"{name}-{number}-0.json") for number in range(STEPS)]
    return min(steps, key=lambda spans: max(span.end for span in spans))


with tempfile.TemporaryDirectory() as folder:
    launch(trace_steps, 2, Path(folder))
    spans = {way.__name__: fastest(Path(folder), way.__name__) for way in (tensor_parallel, sequence_parallel)}
hidden = {name: overlap(each) or 0.0 for name, each in spans.items()}
plots.timeline(
    {"your tensor parallelism": spans["tensor_parallel"], "with sequence parallelism": spans["sequence_parallel"]},
    title=f"{hidden['tensor_parallel']:.0%} of tensor parallelism's communication is under compute",
    says="Lanes of rank 0 of 2. Each message is on the critical path: four per block and step, or eight of half the "
    "size with sequence parallelism, and small ones for gradients of whole parameters. Each pays the latency.",
    lab="13",
)

# %% [markdown]
# ### Break it: random numbers, equal and different
#
# Dropout on a *part* (hidden features, attention weights, a part of the sequence) needs a mask of its
# own on each rank. Dropout on a *whole* activation needs the same mask on all. Two ranks, 10 % dropped,
# and both slips.


# %%
def drops(own: bool, features: int) -> Tensor:
    """A mask, from a generator that is this rank's own or all ranks'."""
    with own_random_numbers(comm.world(), rank_device()) if own else nullcontext():
        return F.dropout(torch.ones(64, features, device=rank_device()), 0.1) > 0


def masks(own_parts: bool, own_wholes: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)  # on every rank, as one process would
    return drops(own_parts, 192).cpu(), drops(own_wholes, 96).cpu()


print(f"{'':44}{'hidden features':>16}{'whole activation':>18}   decisions that are equal on both ranks")
for name, own in {
    "own numbers on parts, common ones on wholes": (True, False),
    "one seed for everything": (False, False),
    "a seed for each rank": (True, True),
}.items():
    ours, theirs = launch(masks, 2, *own)
    same = [(a == b).double().mean().item() for a, b in zip(ours, theirs, strict=True)]
    print(f"{name:44}{same[0]:16.0%}{same[1]:18.0%}")
print(f"expected, if independent: {0.9**2 + 0.1**2:.0%}; if one mask: 100%")

# %% [markdown]
# With one seed, features i and i + 192 of the hidden layer are dropped together: a weaker
# regularization, without an error. With a seed for each rank, the copies of the residual stream differ
# between ranks: x is no longer the same in front of f, and the summed gradients belong to no single
# model. minifsdp draws a seed for parts from the common generator (`tensor_parallel/dropout.py`);
# Megatron-LM keeps a second generator.
#
# ## What is still missing
#
# - Parameters under their names: `parallelize_module` in `minifsdp/tensor_parallel`, as in torch, makes
#   them DTensors, which lab 12's checkpoints and `fully_shard` outside, on a 2-D mesh, take.
# - Overlap: cut a product in pieces and send one while the next computes (async tensor parallelism in
#   torch and Megatron-LM).
# - Fewer key and value heads than ranks: refuse, or replicate them.
#
# ## What to remember
#
# 1. By columns: whole input, parts of the output, gradient of the input summed. By rows: parts of the
#    input, output summed. A pair of them needs one sum in each direction.
# 2. f copies and sums backward, g sums and copies backward. A row-parallel bias comes behind g.
# 3. The loss takes three numbers per token. Logits stay cut.
# 4. Activations fall to 4 + 12 / t of 16; with the sequence cut the 4 fall, too, for the same bytes.
#    Parameters that meet a part of the tokens need their gradients summed.
# 5. 8 b s h (t - 1) / t elements per block, on the critical path: on the fastest link there is.
#
# ## Questions
#
# **1. Why not cut both matrices of the MLP by columns?**
# <details><summary>Answer</summary>The second would need all hidden features: an all-gather of 4 h per
# token between the two, and another one behind. By columns, then by rows, there is one sum of h.</details>
#
# **2. A model is on 16 GPUs, t = 8 and 2 data-parallel copies. How large is its global batch, in copies of a
# rank's batch?**
# <details><summary>Answer</summary>2. The 8 ranks of a tensor-parallel group have the same batch.</details>
#
# **3. Why must layers with heads, or their number, be divided by t, and a vocabulary need not be?**
# <details><summary>Answer</summary>Softmax over positions needs a head whole. A class is an element by itself,
# so uneven parts work; large models pad the vocabulary so that all ranks have equally much to do.</details>
#
# **4. Dropout with probability 0 between g and f, and ranks that start from different seeds. Is anything wrong?**
# <details><summary>Answer</summary>Not here; but initialization draws, too. Whole parameters, such as norms and
# biases, must start equal, and parts different.</details>
#
# ## Further reading
#
# - Shoeybi et al., [Megatron-LM](https://arxiv.org/abs/1909.08053), section 3; Korthikanti et al.,
#   [Reducing activation recomputation](https://arxiv.org/abs/2205.05198), sections 4 and 5.
# - torch: `torch/distributed/tensor/parallel/style.py`, `torch/distributed/tensor/parallel/loss.py`.
# - minifsdp: `tensor_parallel/layouts.py` (13.2, 13.5), `columns.py`, `rows.py`, `loss.py`, `sequence.py`, and
#   `gpt.py`, which applies them to this GPT.
