# ---
# jupyter:
#   minifsdp:
#     lab: "03"
#     title: ZeRO-1 and ZeRO-2
#     minutes: 70
#     ranks: 4
# ---

# %% [markdown]
# # Lab 03: ZeRO-1 and ZeRO-2
#
# Under DDP every rank holds all the parameters, all the gradients and all the optimizer state, and
# all ranks compute the same update. ZeRO (Zero Redundancy Optimizer) removes that redundancy in
# three stages. This lab builds the first two: it shards the optimizer state over the ranks, then
# the gradients too. The computation stays the same, and the traffic almost the same.
#
# ![ZeRO stage 2: every rank has all parameters, and a part of the gradients and of the optimizer
# state](../slides/figures/partition-2.svg)
#
# *From [lecture 1, Where memory goes, and what ZeRO saves](../slides/memory.md), which comes before this lab.*
#
# **Afterwards you can**
# - cut a model's parameters of any size into equal shards;
# - write the ZeRO-1 step: reduce-scatter, update a shard, all-gather;
# - reduce and free gradients while backward runs, as ZeRO-2 does;
# - compute the bytes that each stage holds and sends per step;
# - recognize three mistakes that raise no error: an optimizer over the wrong tensors, clipping by
#   a local norm, a checkpoint of one rank's shard.
#
# **You need** lab 01 (reduce-scatter, all-gather) and lab 02 (buckets, hooks on gradients).
#
# **Time** 70 minutes. **Worlds**: gloo on a laptop (2 and 4 processes), or NCCL with one rank per
# GPU; with one GPU it runs on gloo. **Memory per rank**: 12 MiB of tensors (measured below), about
# 25 for the timeline's larger batch, plus the memory of a process with torch.
#
# Ψ is the number of elements of all parameters, N the number of ranks. Everything is float32, so an element has
# 4 bytes, and Adam's two moments have 8 per element.

# %% tags=["setup"]
# set-up
from collections.abc import Callable
from copy import deepcopy
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Adam, Optimizer
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from minifsdp import comm, device
from minifsdp.course import plots
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.course.ladder import closed_form, data
from minifsdp.course.ladder.closed_form import Setting
from minifsdp.course.launch import launch, rank_device
from minifsdp.course.watch.ledger import Ledger
from minifsdp.course.link.emulated import let_communication_go_first, parse_link
from minifsdp.course.ladder.model import GPT, Block
from minifsdp.course.ladder.rungs import closed_form_setting
from minifsdp.course.watch.timeline import Span, overlap, read_trace
from minifsdp.course.watch.trace import record_trace
from minifsdp.course.workshop import earlier, exercise, outcome, predict
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

MIB = 2**20
CAP = MIB // 2  # bytes at which a bucket is closed
ADAM = {"lr": 1e-3, "eps": 1e-4}

# %% [markdown]
# ## The question: what do N ranks hold N times?
#
# The model is a small GPT, and the batches are random tokens: this lab is about bytes. `measure`
# takes a trainer, runs three of its steps on this rank and returns the measurements of the third.
# The optimizer has its state before that step; "backward" and "step" are the moments after these
# two. Adam's `eps` is larger than usual, 1e-4: with 1e-8 its first steps hardly depend on a
# gradient's size, and a sum instead of a mean over the ranks would go unnoticed.

# %%
SIZES = {"width": 105, "layers": 4}
numels = [p.numel() for p in GPT(**SIZES).parameters()]
PSI = sum(numels)

numbers = torch.Generator().manual_seed(3)
BATCHES = [tuple(torch.randint(257, (2, 8, 24), generator=numbers)) for _ in range(3)]  # (tokens, targets), [8, 24]


class DDP:
    """The rung below (lab 02): average gradients during backward, update all on every rank."""

    def __init__(self, model: GPT) -> None:
        self.model = DistributedDataParallel(model, bucket_cap_mb=CAP / MIB, gradient_as_bucket_view=True)
        self.optimizer = Adam(model.parameters(), **ADAM)

    def after_backward(self) -> None: ...

    def step(self) -> None:
        self.optimizer.step()


def measure(kind: Any, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    where, group = rank_device(), comm.world()
    mine = [[part.to(where) for part in data.shard(batch, group.rank(), group.size())] for batch in batches]
    torch.manual_seed(0)
    with Ledger() as ledger:
        model = GPT(**SIZES).to(where)
        ledger.watch(model)
        trainer = kind(model)
        ledger.watch(trainer.model, trainer.optimizer)
        for tokens, targets in mine:
            ledger.reset_peaks()
            at = {"before": ledger.mark("before")}
            with comm.record() as calls:
                loss = trainer.model(tokens, targets)
                at["forward"] = ledger.mark("forward")
                loss.backward()
                del loss
                trainer.after_backward()
                at["backward"] = ledger.mark("backward")
                early = sum(call.wire for call in calls)
                trainer.step()
                at["step"] = ledger.mark("step")
            trainer.model.zero_grad()
    return {
        "at": at,
        "curve": ledger.curve(),
        "peak": ledger.peak.total,
        "gradients peak": ledger.peak_of("gradients", "communication"),
        "sent": sum(call.wire for call in calls),
        "sent in backward": early,
        "calls": [(call.op, call.payload, call.wire) for call in calls],
        "values": torch.cat([p.detach().flatten().cpu() for p in model.parameters()]),
    }


def measure_each(kinds: list[Any], batches: list[tuple[Tensor, Tensor]]) -> list[dict[str, Any]]:
    return [measure(kind, batches) for kind in kinds]


def alone(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[float]]:
    """The parameters that every rung must reach, and the gradients' norms, from one process."""
    torch.manual_seed(0)
    model, norms = GPT(**SIZES).to(rank_device()), []
    optimizer = Adam(model.parameters(), **ADAM)
    for tokens, targets in batches:
        model(tokens.to(rank_device()), targets.to(rank_device())).backward()
        norms.append(float(get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()]), norms


def far(values: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((values - wanted).abs().max() / wanted.abs().max())


def held(at: dict[str, int]) -> dict[str, int]:
    return {tag: at[tag] for tag in ("parameters", "gradients", "optimizer")}


reference_values, reference_norms = launch(alone, 1, BATCHES)[0]
ddp = launch(measure, 2, DDP, BATCHES)
print(f"Ψ = {PSI:,} elements in {len(numels)} parameters, {4 * PSI:,} bytes")
for rank, books in enumerate(ddp):
    print(f"rank {rank} after backward:", {tag: f"{size:,}" for tag, size in held(books["at"]["backward"]).items()})

# %% [markdown]
# Both ranks hold the same 16Ψ bytes: 4Ψ parameters, 4Ψ gradients, 8Ψ optimizer state (and 4 bytes
# per parameter for Adam's step count). Half of it is optimizer state, three quarters in mixed
# precision (lab 00). Only `optimizer.step()` reads and writes this state, and there every rank
# computes the same result from the same input.
#
# But Adam works element by element. So let rank r update only the r-th part of the elements, keep
# state for that part, and get the rest from the other ranks. Which elements belong to which rank?
#
# ## 3.1 Partition
#
# *10 minutes, medium*
#
# Collectives need equal parts (lab 01), but parameters come in all sizes. So ZeRO ignores
# parameter boundaries: it concatenates the parameters of a bucket in one flat buffer, pads it to a
# multiple of N, and cuts it into N equal shards, even in the middle of a parameter.
#
# ```
# flat [padded]              p0 | p1 | p2 | zeros
# shards [padded / N]      rank 0 |  rank 1  | rank 2
# ```
#
# The buffer is not a copy: it becomes the parameters' memory. Each `p.data` and each shard is a
# view of it, so the model sees an optimizer's write to a shard at once. (`p` itself stays the same
# object, because the model, the optimizer and the hooks refer to it.)
#
# The buckets are those of your lab 02, in the order in which backward makes their gradients.

# %%
assign_buckets = earlier("2.2")
with torch.device("meta"):
    bucketed = assign_buckets(list(GPT(**SIZES).parameters()), CAP)
elements = [sum(p.numel() for p in bucket) for bucket in bucketed]
print("elements of the buckets:", elements)

# %%
predict("3.1", ..., "bytes of parameters in one rank's shards of these buckets, 4 ranks")


# %% tags=["exercise-3.1"]
@exercise("3.1")
def partition(params: list[nn.Parameter], ranks: int) -> tuple[Tensor, list[Tensor]]:
    """Move the parameters into one flat buffer, and cut that into one equal shard per rank.

    Afterwards each `p.data` is a view of the buffer in the parameter's shape, with its old values,
    and no reference to the old memory remains.

    Args:
        params: of one dtype and device, in this order in the buffer.
        ranks: N, which need not divide the number of elements.

    Returns:
        flat [padded], where padded is the least multiple of N that holds all elements; zeros after
        the last one.
        The N shards, each a view of `flat` [padded / N]; shard r is rank r's.
    """
    ...


# %%
def one_shard_of_each(ranks: int) -> int:
    buckets = assign_buckets(list(GPT(**SIZES).parameters()), CAP)
    return sum(partition(params, ranks)[1][0].nbytes for params in buckets)


outcome(
    "3.1",
    one_shard_of_each(4),
    ranks=4,
    slips={
        "a quarter of Ψ without the padding": PSI,
        "one padding for the whole model; each bucket has its own": 4 * -(-PSI // 4),
        "each parameter padded by itself": 4 * sum(-(-numel // 4) for numel in numels),
    },
)

# %% [markdown]
# Padding costs at most N - 1 elements per bucket, for every model.
#
# ## 3.2 An optimizer over shards
#
# *5 minutes, easy*
#
# A torch optimizer updates its own list of tensors, and makes state only for these. Stage 1 gets
# its saving from this: it gives the optimizer only this rank's shards. The optimizer is still a
# real `torch.optim.Adam`, with its learning rate, its weight decay and its fused kernels; it does
# not know that its parameters are slices.

# %%
predict("3.2", ..., "bytes of Adam's state on one rank, 2 ranks")


# %% tags=["exercise-3.2"]
@exercise("3.2")
def shard_optimizer(
    buckets: list[list[Tensor]], rank: int, optimizer_class: type[Optimizer], **defaults: Any
) -> Optimizer:
    """An optimizer over this rank's shard of every bucket.

    Args:
        buckets: for each bucket its N shards, views of a flat buffer as `partition` returns them.
        rank: the rank that owns the optimizer.
        optimizer_class: such as `torch.optim.Adam`; takes a list of leaf tensors.
        **defaults: for `optimizer_class`, such as `lr`.

    Returns:
        The optimizer. Its one parameter group holds one `nn.Parameter` per bucket, in the order of
        the buckets. Each shares its memory with this rank's shard.
    """
    ...


# %% [markdown]
# ## 3.3 Reduce a bucket
#
# *15 minutes, hard*
#
# To update its shard a rank needs the mean gradient of that shard only. DDP's all-reduce would
# deliver the whole gradient. An all-reduce is a reduce-scatter followed by an all-gather (lab 01),
# and here the first half is enough.
#
# `reduce_bucket` only *starts* the reduction and returns a function that finishes it. The split
# costs nothing now, and lets ZeRO-2 compute during the transfer.

# %%
predict("3.3", ..., "bytes one rank sends to reduce all gradients of a step, 2 ranks")


# %% tags=["exercise-3.3"]
@exercise("3.3")
def reduce_bucket(params: list[nn.Parameter], shard: nn.Parameter, group: comm.Group) -> Callable[[], None]:
    """Start the reduce-scatter of a bucket's gradients; return the function that finishes it.

    Copy the gradients into a bucket buffer [N * shard.numel()] in the layout of `partition`. A
    `.grad` of None counts as zeros, and so does the padding. Leave every `.grad` unchanged; the
    caller may free it as soon as this returns.

    Both buffers come from `device.empty(numel, dtype, role, device)`, uninitialized: the bucket with the role
    "communication", the mean [shard.numel()] with the role "gradients".

    Args:
        params: the bucket's parameters, in the same order as for `partition`.
        shard: this rank's shard [padded / N]; its `.grad` takes the result.
        group: the ranks; `group.size()` is N.

    Returns:
        A function without arguments, called once. It waits for the reduction, frees the bucket
        with `device.free`, and sets `shard.grad` to the mean over the ranks [padded / N]. If
        `shard.grad` exists already, from an earlier micro-batch, it adds the mean to it and then
        frees the mean.
    """
    ...


# %% [markdown]
# ## 3.4 Update and gather
#
# *10 minutes, medium*
#
# In an all-reduce the all-gather follows the reduce-scatter directly. ZeRO puts the update between
# them, and gathers updated parameters instead of mean gradients. The all-gather is in place: each
# rank sends its shard from the same position in the buffer at which the others receive it.

# %%
predict("3.4", ..., "bytes one rank sends in a whole ZeRO-1 step, as a multiple of DDP's, two decimals")


# %% tags=["exercise-3.4"]
@exercise("3.4")
def update_and_gather(optimizer: Optimizer, flats: list[Tensor], group: comm.Group) -> None:
    """Update this rank's shards, free their gradients, and gather the updated parameters from all ranks.

    Args:
        optimizer: over this rank's shards, one per bucket, as `shard_optimizer` returns it. Each
            shard has a `.grad` [padded / N]. Between update and gathers, free its memory with
            `device.free` and set it to None.
        flats: the buckets' flat buffers [padded]; the shards are views of them. When this returns
            they are equal on all ranks. One all-gather each, in place, from the shard's `.data`.
        group: the ranks.
    """
    ...


# %% [markdown]
# ### The pieces together: ZeRO-1
#
# Backward is unchanged and leaves whole gradients of this rank's rows in `.grad`. `step` does the
# rest: it reduces bucket by bucket, then updates, then gathers. All ranks start with equal
# parameters because they share the seed; a real implementation broadcasts rank 0's.


# %% tags=["shown"]
class Zero1:
    def __init__(self, model: GPT) -> None:
        self.model, self.group = model, comm.world()
        self.buckets = assign_buckets(list(model.parameters()), CAP)
        cuts = [partition(params, self.group.size()) for params in self.buckets]
        self.flats = [flat for flat, _ in cuts]
        self.optimizer = shard_optimizer([shards for _, shards in cuts], self.group.rank(), Adam, **ADAM)
        self.shards = self.optimizer.param_groups[0]["params"]

    def after_backward(self) -> None: ...

    def step(self) -> None:
        for params, shard in zip(self.buckets, self.shards, strict=True):
            reduce_bucket(params, shard, self.group)()
        update_and_gather(self.optimizer, self.flats, self.group)


zero1 = launch(measure, 2, Zero1, BATCHES)

print("the ranks' parameters equal, bit for bit:", torch.equal(zero1[0]["values"], zero1[1]["values"]))
print("as one process with the whole batches:   ", far(zero1[0]["values"], reference_values) < 1e-4)
reductions = sum(wire for op, _, wire in zero1[0]["calls"] if op == "reduce_scatter")
padded = sum(Setting(2).padded(numel) for numel in elements)
step_counts = {"the step counts, 4 bytes per shard": padded, "the padding and the step counts": 4 * PSI}
outcome("3.2", zero1[0]["at"]["step"]["optimizer"], ranks=2, slips=step_counts)
unpadded = {"without the padding": 2 * PSI}
there_and_back = {"that is what an all-reduce sends, there and back": padded}
outcome("3.3", int(reductions), ranks=2, slips=unpadded | there_and_back)
outcome("3.4", round(zero1[0]["sent"] / ddp[0]["sent"], 2), slips={"the parameters come on top of an all-reduce": 1.5})

# %% [markdown]
# (Values count as equal if they differ by at most 0.0001 of the largest: N ranks, or other
# buckets, add the same gradients in another order.)
#
# ### Measured: the state of a rank under ZeRO-1
#
# The prediction is `closed_form.zero1`: 4Ψ + 4Ψ + 8Ψ/N, including padding and step counts. The
# grey bars are DDP. The line under a plot's title counts how many of the lab's five pieces are
# yours so far.


# %%
def totals(books: dict[str, Any]) -> dict[str, int]:
    return {stage: sum(tags.values()) for stage, tags in books["at"].items()}


def at_rest(form: closed_form.Bytes) -> dict[str, int]:
    """Model state at moments without activations, if gradients are freed in or after the step."""
    rest = form.parameters + form.optimizer
    return {"before": rest, "backward": rest + form.gradients}


expected1 = closed_form.zero1(numels, CAP, closed_form_setting(2))
saved = 1 - totals(zero1[0])["backward"] / totals(ddp[0])["backward"]
plots.stages(
    zero1[0]["at"],
    predicted=at_rest(expected1) | {"step": at_rest(expected1)["backward"]},
    earlier={"DDP": totals(ddp[0])},
    title=f"ZeRO-1 on 2 ranks: half the optimizer state, {saved:.0%} less after backward",
    says="Rank 0 before a step, after forward, after backward, after the step. Parameters and gradients are still "
    "whole. DDP's gradients are views of buckets that live as long as the model, so it holds them before the step too.",
    lab="03",
)

# %% [markdown]
# The gradients are the next redundancy. After the reduction a rank needs 1 / N of them, yet all of
# `.grad` stays until the end of the step, and during each reduction in `step` a bucket comes on
# top.
#
# ## 3.5 Reduce in backward
#
# *15 minutes, hard*
#
# ZeRO-2 frees them as they come. As soon as a bucket's gradients are complete, the hook of the
# last one starts the reduction and frees them; the next bucket's gradients reuse the memory.
#
# - Which gradient is the last? Autograd sets the order, not the list, so count.
# - One reduction may be in flight while backward goes on: finish it when the next bucket is full.
#   All buckets share `in_flight` for this purpose; the training loop finishes the last reduction
#   in it.
# - In the hook, finish the previous reduction (this frees its buffer), start this one (this copies
#   its gradients), and only then clear the gradients.

# %%
predict("3.5", ..., "bytes of gradients on one rank after a ZeRO-2 backward, 2 ranks")


# %% tags=["exercise-3.5"]
@exercise("3.5")
def reduce_in_backward(
    params: list[nn.Parameter],
    shard: nn.Parameter,
    start: Callable[[list[nn.Parameter], nn.Parameter, comm.Group], Callable[[], None]],
    in_flight: list[Callable[[], None]],
    group: comm.Group,
) -> list[RemovableHandle]:
    """Hooks that reduce a bucket during backward, as soon as it is full, and free its gradients.

    The hooks serve any number of backwards. Each backward uses all the bucket's parameters and
    reduces the bucket once.

    Args:
        params: the bucket's parameters.
        shard: this rank's shard of it.
        start: `reduce_bucket`; `start(params, shard, group)` returns the function that finishes the reduction.
        in_flight: the reduction under way, of any bucket: empty or one such function. Before you
            start this bucket's reduction, call that function and remove it; then add this one's.
        group: the ranks.

    Returns:
        The hooks' handles, one per parameter. After the last gradient's hook every `.grad` of the bucket is None.
    """
    ...


# %% [markdown]
# ### The pieces together: ZeRO-2


# %% tags=["shown"]
class Zero2(Zero1):
    def __init__(self, model: GPT) -> None:
        super().__init__(model)
        self.in_flight: list[Callable[[], None]] = []
        for params, shard in zip(self.buckets, self.shards, strict=True):
            reduce_in_backward(params, shard, reduce_bucket, self.in_flight, self.group)

    def after_backward(self) -> None:
        while self.in_flight:
            self.in_flight.pop()()

    def step(self) -> None:
        update_and_gather(self.optimizer, self.flats, self.group)


zero2 = launch(measure, 2, Zero2, BATCHES)
print("the ranks' parameters equal, bit for bit:", torch.equal(zero2[0]["values"], zero2[1]["values"]))
print("as ZeRO-1's, bit for bit:                ", torch.equal(zero2[0]["values"], zero1[0]["values"]))
print("as one process with the whole batches:   ", far(zero2[0]["values"], reference_values) < 1e-4)
outcome(
    "3.5",
    zero2[0]["at"]["backward"]["gradients"],
    ranks=2,
    slips=unpadded | {"whole gradients, as ZeRO-1 has them": 4 * PSI},
)

# %%
expected2 = closed_form.zero2(numels, CAP, closed_form_setting(2))
saved = 1 - totals(zero2[0])["backward"] / totals(ddp[0])["backward"]
plots.stages(
    zero2[0]["at"],
    predicted=at_rest(expected2) | {"step": at_rest(expected2)["before"]},
    earlier={"DDP": totals(ddp[0]), "ZeRO-1": totals(zero1[0])},
    title=f"ZeRO-2 on 2 ranks: half the gradients too, {saved:.0%} less than DDP after backward",
    says="Rank 0 before a step, after forward, after backward, after the step. What is left after backward is one "
    "shard of each bucket, and update_and_gather frees it.",
    lab="03",
)

# %% [markdown]
# ### Measured: the peak of a step
#
# The peak during backward is higher than the memory after it. A reduction needs a bucket's
# `.grad`s and their copy at once, on top of the shards reduced so far; while the next bucket
# fills, the copy is still in transit. So, with $n_b$ elements in bucket b, $s_b$ in the shards of
# buckets 0 to b, and $r_b$ received during the reduction of b, gradients and buckets take at most
#
# $$4 \max_b\; \bigl(\max(n_b, n_{b+1}) + \mathrm{padded}(n_b) + r_b + s_b\bigr)$$
#
# and a little more. On gloo minifsdp receives the other ranks' parts of a bucket, $r_b = (N - 1) /
# N \; \mathrm{padded}(n_b)$, and sums them itself; NCCL needs no such memory, $r_b = 0$. A bucket
# may end inside a block, and a block's gradients do not come in the exact reverse order of its
# parameters: the two gradients of `norm2` come before those of `qkv` and `out`, and wait in
# `.grad` until their bucket fills.


# %%
def gradients_peak(elements: list[int], ranks: int, early: int) -> int:
    padded = [ranks * -(-n // ranks) for n in elements]
    shards = accumulate(n // ranks for n in padded)
    received = [n - n // ranks if closed_form_setting(ranks).by_all_to_all else 0 for n in padded]
    filled = [max(pair) for pair in zip(elements, [*elements[1:], 0], strict=True)]
    return 4 * (max(map(sum, zip(filled, padded, received, shards, strict=True))) + early)


most1, most2 = zero1[0]["gradients peak"], zero2[0]["gradients peak"]
predicted2 = gradients_peak(elements, 2, early=2 * SIZES["width"])
print("most bytes of gradients and buckets in a step")
print(f"ZeRO-1: {most1:,}, predicted {expected1.gradients_peak:,}")
print(f"ZeRO-2: {most2:,}, predicted {predicted2:,}")
assert (most1, most2) == (expected1.gradients_peak, predicted2), "not the predicted peak; has a check above failed?"

plots.curve(
    zero2[0]["curve"],
    earlier={"DDP": ddp[0]["curve"], "ZeRO-1": zero1[0]["curve"]},
    title=f"Peak of a step: DDP {ddp[0]['peak'] / MIB:.1f}, ZeRO-1 {zero1[0]['peak'] / MIB:.1f}, "
    f"ZeRO-2 {zero2[0]['peak'] / MIB:.1f} MiB",
    says="Rank 0 over the allocations of one step. Under ZeRO-2 backward gives away what it makes: gradients rise to a "
    "bucket, go into its buffer, and a shard remains. The spikes of activations in the step are Adam's temporaries.",
    lab="03",
)

# %% [markdown]
# The buckets are large compared with this small model, so they show. Compared with a model of
# gigabytes, 25 MiB do not. `minifsdp.zero.Zero2Optimizer` copies each gradient into its bucket's
# buffer as soon as it is made, and so never holds a bucket twice. It gains little here, because it
# still holds one bucket in flight and one that fills.
#
# ### Measured: when the reductions travel
#
# Backward can hide only the bytes sent during backward. So count first: which part of a step's
# bytes has left by the end of backward?

# %%
rung_names = ("DDP", "ZeRO-1", "ZeRO-2")
early = {
    name: books[0]["sent in backward"] / books[0]["sent"]
    for name, books in zip(rung_names, (ddp, zero1, zero2), strict=True)
}
for name, part in early.items():
    print(f"{name}: {part:.0%} of its bytes leave during backward")
assert [round(part, 3) for part in early.values()] == [1, 0, 0.5]

# %% [markdown]
# ZeRO-1, as written here, sends everything in the step. ZeRO-2 can hide half as much as DDP: its
# reductions leave during backward, but its gathers leave after the update, with no compute to hide
# behind. The clock shows how much really hides. The link is emulated: in every rung a message
# takes at least 1 ms and its bytes at 100 MB/s, longer if the other rank issues it late. The batch
# is larger than above, so that there is enough compute to hide behind.


# %%
def traced() -> dict[str, list[Span]]:
    """The spans of each rung's step on this rank, the fastest of five; the rungs take turns."""
    group, where = comm.world(), rank_device()
    let_communication_go_first()
    torch.manual_seed(group.rank())
    tokens, targets = torch.randint(257, (2, 40, 24), device=where)
    trainers = {name: kind(GPT(**SIZES).to(where)) for name, kind in zip(rung_names, (DDP, Zero1, Zero2), strict=True)}
    steps: dict[str, list[list[Span]]] = {name: [] for name in trainers}
    with parse_link("latency=1ms,bandwidth=100MB/s") as link, TemporaryDirectory() as folder:
        for name in rung_names * 5:
            trainer, path = trainers[name], Path(folder, "trace.json")
            with record_trace(path, link):
                dist.barrier()
                with record_function("forward"):
                    loss = trainer.model(tokens, targets)
                with record_function("backward"):
                    loss.backward()
                    trainer.after_backward()
                with record_function("optimizer"):
                    trainer.step()
            trainer.model.zero_grad()
            steps[name].append(read_trace(path))
    return {name: min(each, key=lambda spans: max(span.end for span in spans)) for name, each in steps.items()}


# %% tags=["nbval-ignore-output"]
spans = launch(traced, 2)[0]
hidden = {name: overlap(each) or 0.0 for name, each in spans.items()}
plots.timeline(
    spans,
    title="Hidden under compute: "
    + ", ".join(f"{name} {share:.0%} (of {early[name]:.0%} possible)" for name, share in hidden.items()),
    says="The fastest of five steps. DDP and ZeRO-2 reduce during backward, ZeRO-1 in the step; gathers come after the "
    "update. A message is under way from the moment it is issued here until the later rank has sent its part. On a CPU "
    "a reduction takes processor time from the computation above it, so the step that hides more may take longer.",
    lab="03",
)

# %% [markdown]
# DDP and ZeRO-2 do not reach their limits, because the last bucket leaves with the last gradient.
# ZeRO-1 hides nothing, because it reduces in the step. The result also depends on both ranks: if
# the other rank lags, a message takes longer, and part of that time is a wait that nothing hides.
# So on a busy machine DDP's share may fall below ZeRO-2's; the bytes above do not change. (On a
# slower link ZeRO-2 would also wait, because it allows one reduction in flight; DDP queues them,
# since it holds all gradients anyway.) The next forward can hide the gathers, layer by layer: FSDP
# does that (labs 05 and 06).
#
# ### What ZeRO-2 pays for it
#
# ZeRO-2 frees the gradients in backward, so they cannot wait for the next micro-batch: it reduces
# them each time. ZeRO-1 accumulates in `.grad` and reduces once per step.


# %%
def accumulate_four(batches: list[tuple[Tensor, Tensor]]) -> dict[str, tuple[int, int]]:
    """Reduce-scatters in a step of four micro-batches, and bytes of gradients at its end."""
    group, where, seen = comm.world(), rank_device(), {}
    for kind in (Zero1, Zero2):
        with Ledger() as ledger:
            trainer = kind(GPT(**SIZES).to(where))
            ledger.watch(trainer.model, trainer.optimizer)
            with comm.record() as calls:
                for batch in (batches * 2)[:4]:
                    tokens, targets = data.shard(batch, group.rank(), group.size())
                    (trainer.model(tokens.to(where), targets.to(where)) / 4).backward()
                    trainer.after_backward()
                gradients = ledger.mark("accumulated")["gradients"]
                trainer.step()
        seen[kind.__name__] = sum(call.op == "reduce_scatter" for call in calls), gradients
    return seen


for name, (messages, gradients) in launch(accumulate_four, 2, BATCHES)[0].items():
    print(f"{name}: {messages:2} reduce-scatters, {gradients:,} bytes of gradients")

# %% [markdown]
# ## Measured: what each stage holds and sends (C8)
#
# The table shows, per rank, the model state after backward and the bytes sent per step by the ring
# algorithm, N = 2. Under each measurement is the closed form; `zero_stages` is the paper's table
# from your lab 00, without padding and step counts. Stage 3 shards the parameters too. Lab 05
# builds it; here it is `minifsdp.FullyShardedDataParallel`, a unit per block.
#
# The expected traffic (section 7 of the paper), in multiples of (N - 1) / N · 4Ψ bytes per rank:
#
# | | reduce-scatter of gradients | all-gather | sum | relative to DDP |
# |---|---|---|---|---|
# | DDP | 1 | 1, of gradients | 2 | 1 |
# | stages 1 and 2 | 1 | 1, of updated parameters | 2 | 1 |
# | stage 3 | 1 | 2, of parameters, for forward and for backward | 3 | 1.5 |


# %% tags=["C8"]
class Stage3:
    def __init__(self, model: GPT) -> None:
        self.model = FullyShardedDataParallel(model, auto_wrap_policy={Block})
        self.optimizer = Adam(self.model.parameters(), **ADAM)

    def after_backward(self) -> None: ...

    def step(self) -> None:
        self.optimizer.step()


two = Setting(2)
blocks = [[p.numel() for p in block.parameters()] for block in GPT(**SIZES).blocks]
root = PSI - sum(map(sum, blocks))
units = sum(two.padded(sum(block)) for block in blocks)  # bytes, padded
stage3 = launch(measure, 2, Stage3, BATCHES)
rungs = {  # measured; expected to be held; expected to be sent, by the whole ring
    "DDP": (ddp[0], closed_form.ddp(numels, two), 2 * 4 * PSI),
    "ZeRO-1": (zero1[0], expected1, 2 * sum(two.padded(n) for n in elements)),
    "ZeRO-2": (zero2[0], expected2, 2 * sum(two.padded(n) for n in elements)),
    "ZeRO-3": (stage3[0], closed_form.fsdp([[root], *blocks], two), 3 * units + 2 * two.padded(root)),
}
paper = dict(zip(rungs, earlier("0.2")(PSI, 2, k=8, itemsize=4).values(), strict=True))

print("\n" + "".join(f"{name:>12}" for name in ("", "parameters", "gradients", "optimizer", "sum", "sent", "/ DDP's")))
for name, (books, form, sent) in rungs.items():
    state = held(books["at"]["backward"])
    sent = sent * (2 - 1) // 2  # (N - 1) / N
    row = [*state.values(), sum(state.values()), int(books["sent"])]
    print(f"{name:>12}" + "".join(f"{size:>12,}" for size in row) + f"{books['sent'] / ddp[0]['sent']:>12.4f}")
    row = [form.parameters, form.gradients, form.optimizer, form.parameters + form.gradients + form.optimizer, sent]
    print(f"{'expected':>12}" + "".join(f"{size:>12,}" for size in row))
    print(f"{'paper':>12}{int(paper[name]):>48,}{'1.5' if name == 'ZeRO-3' else '1':>24}")
    assert state == {"parameters": form.parameters, "gradients": form.gradients, "optimizer": form.optimizer}
    assert books["sent"] == sent

# %% [markdown]
# Stages 1 and 2 send as much as DDP, apart from a few bytes of padding. Stage 3 stays below 1.5
# because the root unit, the embedding and the head, is gathered once and kept until backward ends.


# %% tags=["C8"]
def state_after_backward(form: closed_form.Bytes) -> float:
    return (form.parameters + form.gradients + form.optimizer) / MIB


def state_of(books: dict[str, Any]) -> float:
    return sum(held(books["at"]["backward"]).values()) / MIB


of_four = launch(measure_each, 4, [DDP, Zero1, Zero2], BATCHES[:2])[0]
measured = {
    name: ([2, 4], [state_of(of_two), state_of(books)])
    for name, of_two, books in zip(rung_names, (ddp[0], zero1[0], zero2[0]), of_four, strict=True)
}
many = [1, 2, 4, 8, 16, 32, 64]
forms = {"DDP": lambda n: closed_form.ddp(numels, Setting(n))}
forms |= {"ZeRO-1": lambda n: closed_form.zero1(numels, CAP, Setting(n))}
forms |= {"ZeRO-2": lambda n: closed_form.zero2(numels, CAP, Setting(n))}
expected = {name: (many, [state_after_backward(form(n)) for n in many]) for name, form in forms.items()}
for name, (ranks, sizes) in measured.items():
    assert sizes == [state_after_backward(forms[name](n)) for n in ranks]

floor = 4 * PSI / MIB
expected["4Ψ, the parameters"] = (many, [floor] * len(many))
plots.lines(
    measured,
    expected=expected,
    xlabel="ranks, N",
    ylabel="model state of a rank, MiB",
    title=f"However many ranks: ZeRO-2 stays above the whole parameters, {floor:.2f} MiB",
    says="After backward; measured on 2 and 4 ranks, expected up to 64. Stage 1 tends to half of DDP's bytes, stage 2 "
    "to a quarter: 4Ψ of 16Ψ, the level at the bottom.",
    lab="03",
    logx=True,
)

# %% [markdown]
# ## Compared with torch and with minifsdp
#
# `torch.distributed.optim.ZeroRedundancyOptimizer` is stage 1, with two differences. It assigns
# whole parameters to ranks, the largest first, each to the rank that has least so far. So it needs
# no flat buffer and no padding, but balances only as well as the sizes allow. And it leaves the
# all-reduce of the gradients to DDP, then broadcasts every parameter from its owner. In the units
# of the table above that is 3 instead of 2: the parameters come on top of a whole all-reduce.


# %%
def with_torch(batches: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here, because it imports half of torch

    where, group = rank_device(), comm.world()
    torch.manual_seed(0)
    model = GPT(**SIZES).to(where)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam, **ADAM)
    ddp = nn.parallel.DistributedDataParallel(model)
    for batch in batches:
        tokens, targets = (part.to(where) for part in data.shard(batch, group.rank(), group.size()))
        ddp(tokens, targets).backward()
        with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
            optimizer.step()
        optimizer.zero_grad()
    return {
        "values": torch.cat([p.detach().flatten().cpu() for p in model.parameters()]),
        "broadcasts": broadcast.call_count,
        "this model": state_bytes(optimizer.optim),
        "4,000 tokens": large_vocabulary(ZeroRedundancyOptimizer),
    }


def large_vocabulary(sharded: type[Optimizer]) -> int:
    """Bytes of state for a model that consists mostly of two parameters, embedding and head."""
    model = GPT(vocabulary=4000, width=105, layers=2).to(rank_device())
    optimizer = sharded(model.parameters(), optimizer_class=Adam, **ADAM)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return state_bytes(optimizer.optim)


def state_bytes(optimizer: Optimizer) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


theirs = launch(with_torch, 4, BATCHES)
print("values as one process with the whole batches:", far(theirs[0]["values"], reference_values) < 1e-4)
print("broadcasts in a step:", theirs[0]["broadcasts"])

wide = [p.numel() for p in GPT(vocabulary=4000, width=105, layers=2).parameters()]
for name, sizes in (("this model", numels), ("4,000 tokens", wide)):
    states = [books[name] for books in theirs]
    even = closed_form.zero1(sizes, CAP, Setting(4)).optimizer
    print_wrapped(f"{name}: optimizer bytes by rank {[f'{state:,}' for state in states]}, equal shards {even:,} each")
    print(f"    the fullest rank holds {max(states) / even:.2f} of an equal shard")

# %% [markdown]
# Every rank needs a device large enough for the fullest rank. Blocks of equal layers balance well;
# one large embedding does not.
#
# `minifsdp.zero` cuts the same buckets in the same way as you did:


# %%
class Shipped1:
    stage = Zero1Optimizer

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.optimizer = self.stage(model.parameters(), Adam, bucket_cap_mb=CAP / MIB, **ADAM)

    def after_backward(self) -> None: ...

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Shipped2(Shipped1):
    stage = Zero2Optimizer


for name, shipped, mine in zip(
    ("Zero1Optimizer", "Zero2Optimizer"),
    launch(measure_each, 2, [Shipped1, Shipped2], BATCHES)[0],
    (zero1[0], zero2[0]),
    strict=True,
):
    print(f"{name}: values equal, bit for bit: {torch.equal(shipped['values'], mine['values'])},", end=" ")
    print(f"model state equal: {held(shipped['at']['backward']) == held(mine['at']['backward'])}")
    print(f"    most bytes of gradients and buckets: {shipped['gradients peak']:,}")

# %% [markdown]
# ### "ZeRO-1 is a kind of tensor parallelism"
#
# This sentence is wrong. Tensor parallelism splits the computation: a rank multiplies with its
# part of a weight. ZeRO splits state. Every rank runs the whole model on its own rows, in stage 3
# too, and a shard does not even have the shape of a matrix.


# %%
def shapes(batch: tuple[Tensor, Tensor]) -> str:
    group = comm.world()
    trainer = Zero1(GPT(**SIZES).to(rank_device()))
    up = trainer.model.blocks[0].up
    seen = []
    up.register_forward_hook(lambda module, inputs, _: seen.append((list(inputs[0].shape), list(module.weight.shape))))
    trainer.model(*(part.to(rank_device()) for part in data.shard(batch, group.rank(), group.size())))
    return f"computes {seen[0][0]} with a weight {seen[0][1]}, updates a shard {list(trainer.shards[0].shape)}"


for rank, text in enumerate(launch(shapes, 2, BATCHES[0])):
    print(f"rank {rank} {text}")

# %% [markdown]
# ## Break it on purpose
#
# ### The optimizer sees the parameters, not the shards
#
# A script for one device builds `Adam(model.parameters())`. The rest is ZeRO-1 as above. Will it
# raise?


# %%
class OverParameters(Zero1):
    def __init__(self, model: GPT) -> None:
        super().__init__(model)
        self.optimizer = Adam(model.parameters(), **ADAM)

    def step(self) -> None:
        for params, shard in zip(self.buckets, self.shards, strict=True):
            reduce_bucket(params, shard, self.group)()
        self.optimizer.step()
        for flat, shard in zip(self.flats, self.shards, strict=True):
            shard.grad = None
            comm.all_gather(flat, shard.data, self.group).wait()


broken = launch(measure, 2, OverParameters, BATCHES)
print("the ranks' parameters equal, bit for bit:", torch.equal(broken[0]["values"], broken[1]["values"]))
print("as one process with the whole batches:   ", far(broken[0]["values"], reference_values) < 1e-4)
print(f"bytes of optimizer state: {broken[0]['at']['step']['optimizer']:,}, with shards", end=" ")
print(f"{zero1[0]['at']['step']['optimizer']:,}")

# %% [markdown]
# Nothing raises. Adam uses the `.grad`s of whole parameters, this rank's own, and never looks at
# the reduced ones. Each rank updates all elements with its own gradient, and the gather then
# overwrites all but its shard. So the ranks even agree: part r of the model is trained on rank r's
# rows alone. The loss curve does not show the fault. Two numbers do: the state has not shrunk, and
# the result differs from that of one process.
#
# ### Clipping by a local norm
#
# After a ZeRO-2 backward a rank has the gradients of its shards. `clip_grad_norm_` computes the
# norm of these only.


# %%
def norms(batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    group = comm.world()
    torch.manual_seed(0)
    trainer = Zero2(GPT(**SIZES).to(rank_device()))
    tokens, targets = (part.to(rank_device()) for part in data.shard(batch, group.rank(), group.size()))
    trainer.model(tokens, targets).backward()
    trainer.after_backward()
    local = get_total_norm([shard.grad for shard in trainer.shards])
    total = local.square()
    comm.all_reduce(total, group).wait()
    total = total.sqrt()
    clip_grads_with_norm_(trainer.shards, 0.5, total)  # right; clip_grad_norm_(trainer.shards, 0.5) uses the local one
    return float(local), float(total)


one_process = reference_norms[0]
for rank, (local, total) in enumerate(launch(norms, 2, BATCHES[0])):
    print(f"rank {rank}: norm of its shards {local:.3f}, would scale by {min(1, 0.5 / local):.3f}; total {total:.3f}")
    assert abs(total - one_process) < 1e-4 * one_process
print(f"one process: {one_process:.3f}, scales by {min(1, 0.5 / one_process):.3f}")

# %% [markdown]
# With the local norm every rank scales its part of the model by a different factor, so the clipped
# gradient changes direction, differently for every N. The total norm is the root of the summed
# squares, one all-reduce of one number. (Under ZeRO-1 the trap is one step earlier: every `.grad`
# is whole, but not yet averaged.)
#
# ### A checkpoint of one rank's shard
#
# "Only rank 0 saves" is a habit from DDP, where all ranks have the same state. Here both ranks
# load rank 0's `state_dict` after two steps, and go on.


# %%
def resume_from_rank_0(batches: list[tuple[Tensor, Tensor]]) -> tuple[float, list[int]]:
    group, where = comm.world(), rank_device()

    def train(trainer: Zero1, batch: tuple[Tensor, Tensor]) -> None:
        trainer.model(*(part.to(where) for part in data.shard(batch, group.rank(), group.size()))).backward()
        trainer.step()
        trainer.model.zero_grad()

    torch.manual_seed(0)
    first = Zero1(GPT(**SIZES).to(where))
    for batch in batches[:2]:
        train(first, batch)
    second = Zero1(GPT(**SIZES).to(where))
    second.model.load_state_dict(first.model.state_dict())
    checkpoint = [deepcopy(first.optimizer.state_dict()) if group.rank() == 0 else None]
    dist.broadcast_object_list(checkpoint, src=0)
    second.optimizer.load_state_dict(checkpoint[0])  # no complaint: the shapes fit
    for trainer in (first, second):
        train(trainer, batches[2])
    off = max(far(a.detach(), b.detach()) for a, b in zip(second.shards, first.shards, strict=True))
    return off, list(checkpoint[0]["state"][0]["exp_avg"].shape)


for rank, (off, shape) in enumerate(launch(resume_from_rank_0, 2, BATCHES)):
    print(f"rank {rank}: its shards as without the interruption: {off == 0}; exp_avg of bucket 0 is {shape}")

# %% [markdown]
# Rank 1 goes on with the moments of other elements, without an error. On another N it would at
# least fail, because the shapes would not fit. Together the shards make up the optimizer's state,
# so saving is collective: either every rank saves its own shard and records N, or the shards are
# gathered and cut into the parameters' shapes, as in `Zero1Optimizer.state_dict`. Any number of
# ranks can load that checkpoint, and so can a plain Adam.
#
# ## What is still missing
#
# The parameters are whole on every rank, 4Ψ bytes, before, during and after the step. No number of
# ranks changes that (the floor of the last plot), and ZeRO-2 cannot train a model whose parameters
# alone do not fit. To shard them too, the ranks must gather each layer's parameters before the
# layer computes, and free them afterwards. Lab 04 builds the unit of gathering, the flat parameter;
# lab 05 gathers and frees it.
#
# This lab leaves out some cases that `minifsdp/zero` covers: parameters that a backward does not
# use (their bucket never fills), several parameter groups, rank 0's values at the start, state
# that loads on any N.
#
# ## What to remember
#
# 1. Under DDP all ranks compute the same update. Under ZeRO-1 each computes 1 / N of it: Adam's 8Ψ
#    bytes become 8Ψ/N.
# 2. ZeRO-2 also keeps only 1 / N of the gradients, and must reduce them in backward, in every micro-batch.
# 3. Both send as much as DDP: they split its all-reduce in two, with the update between the
#    halves.
# 4. A shard is a piece of a padded flat buffer, cut without regard to parameter boundaries; the
#    buffer is the parameters' memory.
# 5. A norm of all gradients and a checkpoint of all state now need communication between all
#    ranks.
#
# ## Questions
#
# <details><summary>Why does ZeRO shard the update, and not, say, the norm of a layer?</summary>
#
# Adam, SGD and most other optimizers treat each element by itself, so any cut gives the same
# result. LayerNorm needs all elements of a row. An optimizer over whole matrices, such as Muon or
# Shampoo, cannot work on arbitrary shards either.
# </details>
#
# <details><summary>Take mixed precision: bf16 parameters and gradients, a float32 master copy and
# Adam. How much memory per rank remains in each stage, for large N?</summary>
#
# 2Ψ + 2Ψ + 12Ψ = 16Ψ under DDP. The master copy belongs to the state, so stage 1 leaves 4Ψ, stage
# 2 leaves 2Ψ, and in stage 3 everything shrinks with N.
# </details>
#
# <details><summary>Could ZeRO-1 start its gathers before all buckets are updated?</summary>
#
# Yes: bucket b can be gathered as soon as its shard is updated, during the update of the next
# shards. The gathers could even continue during the next forward, if each layer waits for its own.
# Only the update of a bucket and its own gather must not overlap.
# </details>
#
# <details><summary>With accumulation over 8 micro-batches, how much does ZeRO-2 send compared with
# ZeRO-1?</summary>
#
# ZeRO-2 sends 8 reduce-scatters and 1 all-gather of 4Ψ, ZeRO-1 1 and 1: 9 to 2, or 4.5 times as
# much. That is why pipelines, which depend on micro-batches, are combined with stage 1.
# </details>
#
# <details><summary>Why does the embedding's bucket come last, and what if backward made its gradient first?</summary>
#
# Buckets fill in the reverse order of the parameters, which is roughly the order of their
# gradients. An early gradient waits in `.grad` until its bucket is full. The values stay right,
# but the peak rises.
# </details>
#
# ## Further reading
#
# - Rajbhandari, Rasley, Ruwase, He: *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, arXiv
#   1910.02054. Section 3 (what the memory is for), 5.1 and 5.2 (the two stages of this lab), 7 (communication).
# - `torch/distributed/optim/zero_redundancy_optimizer.py`: stage 1 by whole parameters; `_partition_parameters`.
# - `deepspeed/runtime/zero/stage_1_and_2.py` in DeepSpeed: the same with CUDA streams, offload and overlapping buckets.
# - `minifsdp/zero/stage1.py`, `stage2.py` and `partition.py`: this lab, including the cases that
#   it leaves out.
