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
# With DDP, every rank holds all parameters, all gradients and the full optimizer state, and all ranks compute the same
# update. ZeRO (Zero Redundancy Optimizer) removes this redundancy in three stages. This lab builds the first two
# stages: it shards the optimizer state over the ranks, and then the gradients as well. The computation stays the same,
# and the traffic is almost the same.
#
# ![ZeRO stage 2: every rank has all the parameters, but only a shard of the gradients and of the optimizer
# state](../slides/figures/partition-2.svg)
#
# *From [lecture 1, Where memory goes, and what ZeRO saves](../slides/memory.md), which comes before this lab.*
#
# **After this lab, you will be able to**
# - split the parameters of any model into equal shards;
# - write the ZeRO-1 step: reduce-scatter the gradients, update a shard, all-gather the parameters;
# - reduce and free gradients while the backward pass is running, as ZeRO-2 does;
# - compute the bytes that each stage holds and sends per step;
# - recognize three mistakes that raise no error: an optimizer over the wrong tensors, clipping by a local norm, and a
#   checkpoint with only one rank's shard.
#
# **You need** lab 01 (reduce-scatter, all-gather) and lab 02 (buckets, hooks on gradients).
#
# **Time** 70 minutes. **Runs** on a laptop (gloo, 2 and 4 processes), on one GPU, or on a GPU node (NCCL, one rank per
# GPU). **Memory** at most 12 MiB of tensors per rank (measured below), 25 MiB for the larger batch of the timeline;
# each process takes a few hundred MiB, mostly for torch itself.
#
# Ψ is the total number of parameter elements, and N is the number of ranks. All tensors are in float32, so an element
# takes 4 bytes, and Adam's two moments take 8 bytes per element.

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
from minifsdp.cost import data_parallel as closed_form
from minifsdp.cost.data_parallel import Setting
from minifsdp.course.ladder import data
from minifsdp.course.ladder.rungs import closed_form_setting
from minifsdp.course.workshop import earlier, exercise, outcome, predict
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.gpt import GPT, Block
from minifsdp.instruments import plots
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.link.emulated import let_communication_go_first, parse_link
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.timeline import Span, overlap, read_trace
from minifsdp.instruments.watch.trace import record_trace
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

MIB = 2**20
CAP = MIB // 2  # the number of bytes at which a bucket is closed
ADAM = {"lr": 1e-3, "eps": 1e-4}

# %% [markdown]
# ## The question: what is stored N times?
#
# The model is a small GPT, and the batches are random tokens, because this lab is about bytes. `measure` takes a
# trainer, runs three of its steps on this rank and returns the measurements of the third step, when the optimizer state
# already exists. The marks "backward" and "step" are set after the backward pass and after the optimizer step. Adam's
# `eps` is 1e-4, which is larger than usual. With 1e-8, Adam's first steps would hardly depend on the scale of the
# gradients, so you would not notice if gradients were summed over the ranks instead of averaged.

# %%
SIZES = {"width": 105, "layers": 4}
numels = [p.numel() for p in GPT(**SIZES).parameters()]
PSI = sum(numels)

numbers = torch.Generator().manual_seed(3)
BATCHES = [tuple(torch.randint(257, (2, 8, 24), generator=numbers)) for _ in range(3)]  # (tokens, targets), [8, 24]


class DDP:
    """The previous rung (lab 02): average gradients during backward, update all parameters on every rank."""

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
    """Return the parameters that every rung must reach, and the norms of the gradients, from a single process."""
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
    """Return the largest difference, relative to the largest value."""
    return float((values - wanted).abs().max() / wanted.abs().max())


def held(at: dict[str, int]) -> dict[str, int]:
    return {tag: at[tag] for tag in ("parameters", "gradients", "optimizer")}


reference_values, reference_norms = launch(alone, 1, BATCHES)[0]
ddp = launch(measure, 2, DDP, BATCHES)
print(f"Ψ = {PSI:,} elements in {len(numels)} parameters, {4 * PSI:,} bytes")
for rank, books in enumerate(ddp):
    print(f"rank {rank} after backward:", {tag: f"{size:,}" for tag, size in held(books["at"]["backward"]).items()})

# %% [markdown]
# Both ranks hold the same 16Ψ bytes: 4Ψ of parameters, 4Ψ of gradients and 8Ψ of optimizer state
# (plus 4 bytes per parameter tensor for Adam's step count). Half of this memory is optimizer state;
# in mixed precision, it is three quarters (lab 00). Only `optimizer.step()` reads and writes the optimizer state, and
# every rank computes the same result from the same input.
#
# But Adam is an elementwise optimizer. So rank r can update only the r-th of N equal shards, keep state only for that
# shard, and receive the other updated elements from the other ranks. Which elements belong to which rank?
#
# ## 3.1 Partition
#
# *10 minutes, medium*
#
# Collectives need shards of equal size (lab 01), but parameters have different sizes. So ZeRO ignores parameter
# boundaries: it concatenates the parameters of a bucket in one flat buffer, pads the buffer to a multiple of N, and
# splits it into N equal shards, even if a shard boundary falls in the middle of a parameter.
#
# ```
# flat [padded]              p0 | p1 | p2 | zeros
# shards [padded / N]      rank 0 |  rank 1  | rank 2
# ```
#
# The buffer is not a copy: it becomes the storage of the parameters. Each `p.data` and each shard is a view of it, so
# when an optimizer updates a shard, the model sees the change immediately. (`p` itself stays the same object, because
# the model, the optimizer and the hooks refer to it.)
#
# The buckets come from your answer in lab 02, in the order in which the backward pass computes their gradients.

# %%
assign_buckets = earlier("2.2")
with torch.device("meta"):
    bucketed = assign_buckets(list(GPT(**SIZES).parameters()), CAP)
elements = [sum(p.numel() for p in bucket) for bucket in bucketed]
print("elements of the buckets:", elements)

# %%
predict("3.1", ..., "bytes of parameters in one rank's shards of these buckets, 4 ranks")


# %% tags=["exercise-3.1"]
from .ex1_partition import partition


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
# For any model, padding costs at most N - 1 elements per bucket.
#
# ## 3.2 An optimizer over shards
#
# *5 minutes, easy*
#
# A torch optimizer updates the tensors passed to it, and allocates state only for these tensors. Stage 1 uses this fact
# to save memory: the optimizer gets only this rank's shards. It is still an unmodified `torch.optim.Adam`, with its
# learning rate, its weight decay and its fused kernels; it does not know that its parameters are slices.

# %%
predict("3.2", ..., "bytes of Adam's state on one rank, 2 ranks")


# %% tags=["exercise-3.2"]
from .ex2_shard_optimizer import shard_optimizer

# %% [markdown]
# ## 3.3 Reduce a bucket
#
# *15 minutes, hard*
#
# To update its shard, a rank needs only that shard of the mean gradient. DDP's all-reduce would deliver the full
# gradient. An all-reduce is a reduce-scatter followed by an all-gather (lab 01), and here the first half is enough.
#
# `reduce_bucket` only *starts* the reduction and returns a function that finishes it. Separating the two costs nothing
# here, and it lets ZeRO-2 compute during the transfer.

# %%
predict("3.3", ..., "bytes one rank sends to reduce all gradients of a step, 2 ranks")


# %% tags=["exercise-3.3"]
from .ex3_reduce_bucket import reduce_bucket

# %% [markdown]
# ## 3.4 Update and gather
#
# *10 minutes, medium*
#
# In an all-reduce, the all-gather follows the reduce-scatter directly. ZeRO puts the update between
# them, and gathers updated parameters instead of mean gradients. The all-gather is in place: each rank's shard already
# lies at the offset where the other ranks receive it.

# %%
predict("3.4", ..., "bytes one rank sends in an entire ZeRO-1 step, as a multiple of DDP's, two decimals")


# %% tags=["exercise-3.4"]
from .ex4_update_and_gather import update_and_gather

# %% [markdown]
# ### Putting it together: ZeRO-1
#
# The backward pass is unchanged: it leaves the unsharded gradients of this rank's samples in `.grad`. `step` does the
# rest: it reduces the gradients bucket by bucket, updates the shards, and gathers the parameters. All ranks start with
# equal parameters because they share the seed; a real implementation broadcasts the parameters of rank 0.


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
print("equal to one process on the full batches:", far(zero1[0]["values"], reference_values) < 1e-4)
reductions = sum(wire for op, _, wire in zero1[0]["calls"] if op == "reduce_scatter")
padded = sum(Setting(2).padded(numel) for numel in elements)
step_counts = {"the step counts, 4 bytes per shard": padded, "the padding and the step counts": 4 * PSI}
outcome("3.2", zero1[0]["at"]["step"]["optimizer"], ranks=2, slips=step_counts)
unpadded = {"without the padding": 2 * PSI}
there_and_back = {"that is what an all-reduce sends, there and back": padded}
outcome("3.3", int(reductions), ranks=2, slips=unpadded | there_and_back)
outcome("3.4", round(zero1[0]["sent"] / ddp[0]["sent"], 2), slips={"the parameters come on top of an all-reduce": 1.5})

# %% [markdown]
# (Values are considered equal if they differ by at most 0.0001 times the largest value, because the order in which
# gradients are summed depends on N and on the buckets.)
#
# ### Measured: the model state of a rank under ZeRO-1
#
# The prediction is `closed_form.zero1`: 4Ψ + 4Ψ + 8Ψ/N, including padding and step counts. The grey bars show DDP. The
# grey line below the title of each plot states whether the plot uses your answers or the reference answers.


# %%
def totals(books: dict[str, Any]) -> dict[str, int]:
    return {stage: sum(tags.values()) for stage, tags in books["at"].items()}


def at_rest(form: closed_form.Bytes) -> dict[str, int]:
    """Return the model state at moments without activations, if gradients are freed in or after the step."""
    rest = form.parameters + form.optimizer
    return {"before": rest, "backward": rest + form.gradients}


expected1 = closed_form.zero1(numels, CAP, closed_form_setting(2))
saved = 1 - totals(zero1[0])["backward"] / totals(ddp[0])["backward"]
plots.stages(
    zero1[0]["at"],
    predicted=at_rest(expected1) | {"step": at_rest(expected1)["backward"]},
    earlier={"DDP": totals(ddp[0])},
    title=f"ZeRO-1 on 2 ranks halves the optimizer state: a rank holds {saved:.0%} less after backward",
    says="Rank 0 before the step, after forward, after backward and after the step. Parameters and gradients are still "
    "unsharded. DDP's gradients are views of buckets that live as long as the model: they exist before the step, too.",
    lab="03",
)

# %% [markdown]
# The gradients are the next redundant copy to remove. After the reduction, a rank needs only 1 / N of them, yet every
# `.grad` stays in memory until the end of the step, and each reduction in `step` needs additional memory for a bucket.
#
# ## 3.5 Reduce during the backward pass
#
# *15 minutes, hard*
#
# ZeRO-2 frees the gradients during the backward pass. As soon as all gradients of a bucket have been computed, the hook
# of the last gradient starts their reduction and frees them; the gradients of the next bucket reuse this memory.
#
# - Which gradient is the last? Autograd determines the order, not the list of parameters, so count the gradients.
# - One reduction may be in progress while the backward pass continues: finish it when the next bucket is full. All
#   buckets share the list `in_flight` for this purpose; the training loop finishes the last reduction in this list.
# - In the hook, finish the previous reduction (which frees its buffer), start the new one (which
#   copies the gradients), and only then set the gradients to None.

# %%
predict("3.5", ..., "bytes of gradients on one rank after a ZeRO-2 backward, 2 ranks")


# %% tags=["exercise-3.5"]
from .ex5_reduce_in_backward import reduce_in_backward

# %% [markdown]
# ### Putting it together: ZeRO-2


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
print("equal to ZeRO-1's, bit for bit:          ", torch.equal(zero2[0]["values"], zero1[0]["values"]))
print("equal to one process on the full batches:", far(zero2[0]["values"], reference_values) < 1e-4)
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
    title=f"ZeRO-2 on 2 ranks halves the gradients too: {saved:.0%} less than DDP after backward",
    says="Rank 0 before the step, after forward, after backward and after the step. After backward, one shard of each "
    "bucket is left; update_and_gather frees it.",
    lab="03",
)

# %% [markdown]
# ### Measured: the peak of a step
#
# Memory use peaks during the backward pass, not at its end. A reduction needs a bucket's `.grad`s and their copy at the
# same time, in addition to the shards reduced so far. The copy is still being sent while the next bucket is being
# filled. Let $n_b$ be the number of elements in bucket b, $s_b$ the number in the shards of buckets 0 to b, and $r_b$
# the number received during the reduction of bucket b. Then gradients and buckets take at most the following number of
# bytes, plus a small excess:
#
# $$4 \max_b\; \bigl(\max(n_b, n_{b+1}) + \mathrm{padded}(n_b) + r_b + s_b\bigr)$$
#
# With gloo, minifsdp receives the contributions of the other ranks to a bucket, $r_b = (N - 1) / N \;
# \mathrm{padded}(n_b)$, and sums them itself; NCCL needs no such memory, so $r_b = 0$. The excess occurs because a
# bucket may end inside a block, and the backward pass does not compute a block's gradients in the exact reverse order
# of its parameters. The two gradients of `norm2` come before those of `qkv` and `out`, and wait in `.grad` until their
# bucket is full.


# %%
def gradients_peak(elements: list[int], ranks: int, early: int) -> int:
    padded = [ranks * -(-n // ranks) for n in elements]
    shards = accumulate(n // ranks for n in padded)
    received = [n - n // ranks if closed_form_setting(ranks).by_all_to_all else 0 for n in padded]
    filled = [max(pair) for pair in zip(elements, [*elements[1:], 0], strict=True)]
    return 4 * (max(map(sum, zip(filled, padded, received, shards, strict=True))) + early)


most1, most2 = zero1[0]["gradients peak"], zero2[0]["gradients peak"]
predicted2 = gradients_peak(elements, 2, early=2 * SIZES["width"])
print("peak bytes of gradients and buckets in a step")
print(f"ZeRO-1: {most1:,}, predicted {expected1.gradients_peak:,}")
print(f"ZeRO-2: {most2:,}, predicted {predicted2:,}")
assert (most1, most2) == (expected1.gradients_peak, predicted2), "not the predicted peak; has a check above failed?"

plots.curve(
    zero2[0]["curve"],
    earlier={"DDP": ddp[0]["curve"], "ZeRO-1": zero1[0]["curve"]},
    title=f"A step peaks at {ddp[0]['peak'] / MIB:.1f} MiB with DDP, {zero1[0]['peak'] / MIB:.1f} with ZeRO-1 and "
    f"{zero2[0]['peak'] / MIB:.1f} with ZeRO-2",
    says="Rank 0 over the allocations of one step. Under ZeRO-2, gradients do not accumulate in backward: they fill a "
    "bucket, go into its buffer, and only a shard remains. The spikes of activations in the step are Adam's "
    "temporaries.",
    lab="03",
)

# %% [markdown]
# The buckets are large compared with this small model, so they are visible in the plot. In a model of several
# gigabytes, buckets of 25 MiB would not be noticeable. `minifsdp.zero.Zero2Optimizer` copies each gradient into the
# buffer of its bucket as soon as the gradient has been computed, so it never holds a bucket twice. This saves little
# here, because two buckets are still allocated: one being reduced and one being filled.
#
# ### Measured: when the bytes are sent
#
# The backward pass can hide only the communication that takes place while it is running. So the first question is: what
# fraction of a step's bytes has been sent by the end of the backward pass?

# %%
rung_names = ("DDP", "ZeRO-1", "ZeRO-2")
early = {
    name: books[0]["sent in backward"] / books[0]["sent"]
    for name, books in zip(rung_names, (ddp, zero1, zero2), strict=True)
}
for name, part in early.items():
    print(f"{name} sends {part:.0%} of its bytes during backward")
assert [round(part, 3) for part in early.values()] == [1, 0, 0.5]

# %% [markdown]
# ZeRO-1, as implemented here, sends everything in `step`. ZeRO-2 can hide half as much as DDP: its reductions run
# during the backward pass, but its gathers run after the update, when there is no compute to overlap with. The next
# cell measures how much communication is actually hidden. The link is emulated: in every rung, a message takes at least
# 1 ms plus its transfer time at 100 MB/s, and longer if the other rank issues it late. The batch is larger than above,
# so that there is enough compute to hide the messages.


# %%
def traced() -> dict[str, list[Span]]:
    """Return the spans of each rung's step on this rank, the fastest of three; the rungs take turns."""
    group, where = comm.world(), rank_device()
    let_communication_go_first()
    torch.manual_seed(group.rank())
    tokens, targets = torch.randint(257, (2, 40, 24), device=where)
    trainers = {name: kind(GPT(**SIZES).to(where)) for name, kind in zip(rung_names, (DDP, Zero1, Zero2), strict=True)}
    steps: dict[str, list[list[Span]]] = {name: [] for name in trainers}
    with parse_link("latency=1ms,bandwidth=100MB/s") as link, TemporaryDirectory() as folder:
        for name in rung_names * 3:
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
    title=" and ".join(f"{name} hides {share:.0%}" for name, share in hidden.items() if early[name])
    + " of the communication under compute",
    says="The fastest of three steps. "
    + ", ".join(f"{name} could hide {share:.0%}" for name, share in early.items())
    + ". DDP and ZeRO-2 reduce during backward, ZeRO-1 in the step; gathers come after the "
    "update. A message is in progress from its issue on this rank until the later rank has sent its part. On a CPU, "
    "a reduction takes CPU time from the computation above it, so the step that hides more may take longer.",
    lab="03",
)

# %% [markdown]
# DDP and ZeRO-2 do not reach their limits, because the last bucket is sent only when the last gradient is complete.
# ZeRO-1 hides nothing, because it reduces in `step`. The result also depends on both ranks: if the other rank lags, a
# message takes longer, and part of that time is exposed. So on a busy machine, DDP may hide a smaller fraction than
# ZeRO-2, although the byte counts above do not change. (On a slower link, ZeRO-2 would also wait, because it allows
# only one reduction at a time; DDP can queue its reductions because it holds all gradients anyway.) The gathers could
# be hidden in the next forward pass, layer by layer, as FSDP does (labs 05 and 06).
#
# ### The price of ZeRO-2
#
# ZeRO-2 frees the gradients during the backward pass, so they cannot accumulate across micro-batches, and must be
# reduced in every micro-batch. ZeRO-1 accumulates gradients in `.grad` and reduces them once per step.


# %%
def accumulate_four(batches: list[tuple[Tensor, Tensor]]) -> dict[str, tuple[int, int]]:
    """Return the reduce-scatters in a step of four micro-batches, and the bytes of gradients at its end."""
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
# ## Measured: what each stage holds and sends
#
# The table shows the model state of a rank after the backward pass and the bytes sent per step with the ring algorithm,
# for N = 2. Below each measurement are the closed form and the value from the ZeRO paper, computed by your
# `zero_stages` from lab 00 without padding and step counts. Stage 3 also shards the parameters. You will build it in
# lab 05; here, it is `minifsdp.FullyShardedDataParallel` with one unit per block.
#
# The expected traffic (section 7 of the paper), in multiples of (N - 1) / N · 4Ψ bytes per rank:
#
# | | reduce-scatter of gradients | all-gather | sum | relative to DDP |
# |---|---|---|---|---|
# | DDP | 1 | 1, of gradients | 2 | 1 |
# | stages 1 and 2 | 1 | 1, of updated parameters | 2 | 1 |
# | stage 3 | 1 | 2, of parameters, for the forward and for the backward pass | 3 | 1.5 |


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
rungs = {  # measured; expected bytes held; expected bytes sent, before the factor (N - 1) / N
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
# Stages 1 and 2 send as many bytes as DDP, apart from a few bytes of padding. The factor for stage 3 is below 1.5
# because the root unit, which contains the embedding and the head, is gathered only once and kept until the end of the
# backward pass.


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
    ylabel="model state per rank, MiB",
    title=f"On any number of ranks, ZeRO-2 holds more than the unsharded parameters, {floor:.2f} MiB",
    says="State after backward, measured on 2 and 4 ranks, expected up to 64. Stage 1 approaches half of DDP's bytes, "
    "and stage 2 a quarter: 4Ψ of 16Ψ, the level at the bottom.",
    lab="03",
    logx=True,
)

# %% [markdown]
# ## Compared with torch and with minifsdp
#
# `torch.distributed.optim.ZeroRedundancyOptimizer` is stage 1, with two differences. First, it assigns entire
# parameters to ranks in order of decreasing size, each to the rank with the fewest elements so far. So it needs no flat
# buffer and no padding, but the ranks are balanced only as well as the parameter sizes allow. Second, it leaves the
# all-reduce of the gradients to DDP, and then broadcasts every parameter from its owner. The sum in the table above
# would therefore be 3 instead of 2, because the parameters are sent in addition to a complete all-reduce.


# %%
def with_torch(batches: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # imported late, because it imports half of torch

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
    """Return the bytes of state for a model that consists mostly of two parameters, embedding and head."""
    model = GPT(vocabulary=4000, width=105, layers=2).to(rank_device())
    optimizer = sharded(model.parameters(), optimizer_class=Adam, **ADAM)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return state_bytes(optimizer.optim)


def state_bytes(optimizer: Optimizer) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


theirs = launch(with_torch, 4, BATCHES)
print("values equal to one process on the full batches:", far(theirs[0]["values"], reference_values) < 1e-4)
print("broadcasts in a step:", theirs[0]["broadcasts"])

wide = [p.numel() for p in GPT(vocabulary=4000, width=105, layers=2).parameters()]
for name, sizes in (("this model", numels), ("4,000 tokens", wide)):
    states = [books[name] for books in theirs]
    even = closed_form.zero1(sizes, CAP, Setting(4)).optimizer
    print_wrapped(f"{name}: optimizer bytes by rank: {[f'{state:,}' for state in states]}; equal shards: {even:,}")
    print(f"    the fullest rank holds {max(states) / even:.2f} times an equal shard")

# %% [markdown]
# Every device must be large enough for the rank with the most elements. A model with equal blocks is well balanced; a
# model with one large embedding is not.
#
# `minifsdp.zero` shards the same buckets in the same way as you did:


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
    print(f"    peak bytes of gradients and buckets: {shipped['gradients peak']:,}")

# %% [markdown]
# ### "ZeRO-1 is a kind of tensor parallelism"
#
# This is wrong. Tensor parallelism splits the computation: a rank multiplies by its shard of a weight. ZeRO splits the
# state. Even in stage 3, every rank runs the full model on its own samples, and a ZeRO shard does not even have the
# shape of a matrix.


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
# A single-device script creates `Adam(model.parameters())`. Here, we keep this line, and otherwise use ZeRO-1 as above.
# Will there be an error?


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
print("equal to one process on the full batches:", far(broken[0]["values"], reference_values) < 1e-4)
print(f"bytes of optimizer state: {broken[0]['at']['step']['optimizer']:,}, with shards", end=" ")
print(f"{zero1[0]['at']['step']['optimizer']:,}")

# %% [markdown]
# There is no error. Adam uses the `.grad`s of the full parameters, which come only from this rank's samples, and
# ignores the reduced gradients. Each rank updates all elements with its own gradient, and the gather then overwrites
# all elements outside its shard. So all ranks hold the same parameters, but shard r of the model is trained only on
# rank r's samples. The shape of the loss curve does not reveal the mistake, but two numbers do: the size of the
# optimizer state, which has not shrunk, and the loss itself, which differs from that of a single process.
#
# ### Clipping by a local norm
#
# After a ZeRO-2 backward pass, a rank has only the gradients of its shards, so `clip_grad_norm_` computes only the norm
# of these gradients.


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
    clip_grads_with_norm_(trainer.shards, 0.5, total)  # clip_grad_norm_(trainer.shards, 0.5) would use the local norm
    return float(local), float(total)


one_process = reference_norms[0]
for rank, (local, total) in enumerate(launch(norms, 2, BATCHES[0])):
    print(
        f"rank {rank}: norm of its shards {local:.3f}, scale factor {min(1, 0.5 / local):.3f}; total norm {total:.3f}"
    )
    assert abs(total - one_process) < 1e-4 * one_process
print(f"one process: norm {one_process:.3f}, scale factor {min(1, 0.5 / one_process):.3f}")

# %% [markdown]
# With the local norm, every rank scales its shards of the gradient by a different factor, so clipping changes the
# direction of the gradient, and the change depends on N. The total norm is the square root of the sum of squares over
# all ranks, which takes one all-reduce of one number. (In ZeRO-1, there is a similar pitfall before the reduction:
# every `.grad` is unsharded, but not yet averaged.)
#
# ### A checkpoint of one rank's shard
#
# "Only rank 0 saves" is a habit from DDP, where all ranks have the same state. Here, both ranks load rank 0's
# `state_dict` after two steps and continue training.


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
    second.optimizer.load_state_dict(checkpoint[0])  # raises no error, because the shapes match
    for trainer in (first, second):
        train(trainer, batches[2])
    off = max(far(a.detach(), b.detach()) for a, b in zip(second.shards, first.shards, strict=True))
    return off, list(checkpoint[0]["state"][0]["exp_avg"].shape)


for rank, (off, shape) in enumerate(launch(resume_from_rank_0, 2, BATCHES)):
    print(f"rank {rank}: its shards equal an uninterrupted run's: {off == 0}; exp_avg of bucket 0: {shape}")

# %% [markdown]
# Rank 1 continues with the moments of other elements, and no error is raised. With a different N, loading would at
# least fail, because the shapes would not match. The optimizer state consists of all shards, so saving it is a
# collective operation: either every rank saves its own shard and records N, or the shards are gathered and split into
# tensors with the shapes of the parameters, as in `Zero1Optimizer.state_dict`. A gathered checkpoint can be loaded on
# any number of ranks, and also by a plain Adam.
#
# ## What is still missing
#
# Every rank holds all parameters unsharded before, during and after the step, which takes 4Ψ bytes. Adding ranks does
# not reduce these bytes (they are the minimum in the plot above), so ZeRO-2 cannot train a model whose parameters alone
# do not fit. If the parameters are also sharded, the ranks must gather each layer's parameters before the layer is
# computed, and free them afterwards. Lab 04 builds the unit of gathering, the flat parameter; lab 05 gathers and frees
# it.
#
# This lab omits some cases that `minifsdp/zero` covers: parameters unused in a backward pass (their bucket never
# fills), several parameter groups, broadcasting the initial values of rank 0, and optimizer state that can be loaded
# for any N.
#
# ## What to remember
#
# 1. With DDP, all ranks compute the same update. With ZeRO-1, each rank computes 1 / N of it, so
#    Adam's 8Ψ bytes become 8Ψ/N.
# 2. ZeRO-2 also keeps only 1 / N of the gradients, and must therefore reduce them during the backward pass of every
#    micro-batch.
# 3. Both stages send as many bytes as DDP: they split its all-reduce into two halves and put the update in between.
# 4. A shard is a slice of a padded flat buffer, taken without regard to parameter boundaries; the buffer is the storage
#    of the parameters.
# 5. The norm of all gradients and a checkpoint of the full optimizer state now need communication between all ranks.
#
# ## Questions
#
# **1. Why does ZeRO shard the update and not, say, a LayerNorm?**
#
# <details><summary>Answer</summary>
#
# Adam, SGD and most other optimizers are elementwise, so the result does not depend on how the elements are split.
# LayerNorm needs all elements of a row. An optimizer that works on entire matrices, such as Muon or Shampoo, cannot
# work on arbitrary shards either.
# </details>
#
# **2. Consider mixed precision: bf16 parameters and gradients, a float32 master copy and Adam. How much memory per rank
# remains in each stage for large N?**
#
# <details><summary>Answer</summary>
#
# With DDP, each rank holds 2Ψ + 2Ψ + 12Ψ = 16Ψ bytes. The master copy belongs to the optimizer state, so 4Ψ bytes
# remain in stage 1 and 2Ψ bytes in stage 2; in stage 3, everything shrinks with N.
# </details>
#
# **3. Could ZeRO-1 start its gathers before all buckets are updated?**
#
# <details><summary>Answer</summary>
#
# Yes: bucket b can be gathered as soon as its shard has been updated, while the next shards are being updated. The
# gathers could even continue during the next forward pass if each layer waited for its own gather. Only the update and
# the gather of the same bucket must not overlap.
# </details>
#
# **4. With accumulation over 8 micro-batches, how much does ZeRO-2 send compared with ZeRO-1?**
#
# <details><summary>Answer</summary>
#
# ZeRO-2 needs 8 reduce-scatters and 1 all-gather of 4Ψ bytes, and ZeRO-1 needs 1 of each. So ZeRO-2
# sends 9 / 2 = 4.5 times as much. This is why pipeline parallelism, which depends on micro-batches,
# is combined with stage 1.
# </details>
#
# **5. Why does the bucket with the embedding come last, and what would happen if the backward pass computed the
# embedding's gradient first?**
#
# <details><summary>Answer</summary>
#
# Buckets fill in the reverse order of the parameters, which is roughly the order in which the backward pass computes
# their gradients. A gradient that is computed early stays in `.grad` until its bucket is full. The values stay correct,
# but the peak rises.
# </details>
#
# ## Further reading
#
# - Rajbhandari, Rasley, Ruwase, He: *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, arXiv
#   1910.02054. Section 3 (what the memory is for), 5.1 and 5.2 (the two stages of this lab), 7 (communication).
# - `torch/distributed/optim/zero_redundancy_optimizer.py`: stage 1, which assigns entire parameters to ranks;
#   `_partition_parameters`.
# - `deepspeed/runtime/zero/stage_1_and_2.py` in DeepSpeed: the same two stages with CUDA streams,
#   offload and overlapping buckets.
# - `minifsdp/zero/stage1.py`, `stage2.py` and `partition.py`: this lab, including the cases that
#   it leaves out.
