# ---
# jupyter:
#   minifsdp:
#     lab: "12"
#     title: Per-parameter FSDP
#     minutes: 60
#     ranks: 3
# ---

# %% [markdown]
# # Lab 12: per-parameter FSDP
#
# A flat parameter is easy to communicate: it is a single buffer with equal shards and needs no copies. But it hides the
# original parameters. An optimizer sees one long vector per unit. A frozen weight gets a gradient because another
# weight in the unit is trained. Checkpointing needs code that knows the offsets. FSDP2 (`fully_shard` in torch) keeps
# each parameter under its own name in its own module, and shards it individually. A unit is still gathered with a
# single all-gather, so the shards have to be *copied* into a buffer, and the parameters out of it.
#
# ![One step of a unit whose parameters stay separate: shards, a buffer in rank order, unsharded parameters, packed
# gradients, and shards again](../slides/figures/scale-life.svg)
#
# *From [lecture 6, Beyond the flat parameter](../slides/scale.md). Its first part comes before this lab.*
#
# **After this lab, you will be able to**
#
# - state which shard of a parameter each rank holds, even if there are few rows or their number is not divisible by N;
# - explain rank order and parameter order, and the copies between them;
# - free a buffer that another stream is still reading, without `record_stream` and without a limiter;
# - compute the cost of per-parameter sharding compared with a flat parameter, in bytes, copies and padding;
# - explain what becomes simpler: names, frozen parameters and checkpoints.
#
# **You need** lab 04 (the flat parameter), lab 05 (units, gather, reduce-scatter) and, for 12.5, lab 06 (streams,
# events).
#
# **Time** 60 minutes. **Runs** on a laptop (gloo, 2 and 3 processes), on one GPU, or on a GPU node (NCCL, one rank per
# GPU). **Memory** less than 40 MiB of tensors per rank. Streams are examined on a simulated GPU, as in lab 08. Those
# results are marked "model".

# %% tags=["setup"]
# set-up
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from minifsdp import device
from minifsdp.course.workshop import exercise, outcome, predict

# %% [markdown]
# ## Flat parameters hide the model's parameters
#
# The next cell shards the course's GPT twice: once with flat parameters, and once with `minifsdp.fsdp2.fully_shard`,
# which you rebuild in this lab. Which parameters does an optimizer find in each case? And can a rule such as "no weight
# decay for biases" be applied to them?

# %%
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel, comm
from minifsdp.course.ladder import data
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.fsdp import PrefetchSchedule, SyncSchedule
from minifsdp.fsdp2 import Held, Recorded, fully_shard, use_schedule
from minifsdp.fsdp2 import gradients as gradients_module
from minifsdp.fsdp2.cut import Cut, Rows
from minifsdp.fsdp2.gather import Gather
from minifsdp.fsdp2.gradients import Gradients
from minifsdp.fsdp2.hooks import state_of
from minifsdp.gpt import GPT, Block
from minifsdp.instruments import plots
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.machine import A100, Recorder, Run, replay
from minifsdp.instruments.machine.program import STEP
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.step import take_step as take_step_of

RANKS, MIB = 2, 2**20
SETTINGS = Settings(ranks=RANKS, batch=6, layers=5, width=105, context=16)
BATCHES = list(SETTINGS.batches())  # the same on every rank; each takes its rows


def my_rows(batch: data.Batch) -> data.Batch:
    return data.to_device(data.shard(batch, dist.get_rank(), dist.get_world_size()), rank_device())


def flat(model: nn.Module, **kwargs: Any) -> nn.Module:
    return FullyShardedDataParallel(model, auto_wrap_policy={Block}, schedule=SyncSchedule, **kwargs)


def names() -> dict[str, list[str]]:
    """Return the first parameters that an optimizer gets, with their shapes on this rank."""
    model, other = SETTINGS.model().to(rank_device()), SETTINGS.model().to(rank_device())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    found = {"flat": list(flat(other).named_parameters()), "by parameter": list(model.named_parameters())}
    local = {"flat": lambda p: p, "by parameter": lambda p: p.to_local()}
    return {
        kind: [f"{name}: {list(local[kind](p).shape)} of {list(p.shape)}" for name, p in each[1:4]] + [f"{len(each)}"]
        for kind, each in found.items()
    }


for kind, (*some, number) in launch(names, RANKS)[0].items():
    print(f"{kind}: {number} parameters, such as", *some, sep="\n    ")

# %% [markdown]
# With flat parameters, an optimizer finds six vectors; with `fully_shard`, it finds every parameter. Each parameter is
# a *DTensor*, which consists of this rank's shard, the global shape, and the placements, here `Shard(0)` on a mesh of 2
# ranks. torch's optimizers, gradient clipping and checkpoints support DTensors, so none of them needs additional code.
# Random numbers do: on a CPU, with one seed, torch initializes all ranks' shards with the same numbers. In minifsdp,
# each rank draws the full tensor for a moment and keeps its part (`minifsdp/draws.py`).
#
# ## 12.1 Shard a parameter
#
# *8 minutes, medium*
#
# The shard boundaries of a flat parameter can fall anywhere, even inside a row. FSDP2 splits each parameter along one
# dimension, dimension 0 by default, as `torch.chunk` does. The first shards have ceil(length / N) rows, the next shard
# has the remaining rows, and the ranks after that have **nothing**, that is, a shard with 0 rows. Rows are never split,
# as block-wise quantization and matrix-based optimizers require.
#
# Predict: the weight of a LayerNorm has 105 elements. How many of 64 ranks hold no element of it?

# %%
predict("12.1", ..., "ranks of 64 that hold nothing of a parameter with 105 rows")


# %% tags=["exercise-12.1"]
from .ex1_cut import cut

# %%
norm = torch.arange(105)
lengths = [cut(norm, 64, rank).numel() for rank in range(64)]
slips = {"ceil(105 / 64) = 2 rows: 52 ranks have two, and one has the last row": 12, "64 ranks share 105 rows": 0}
outcome("12.1", lengths.count(0), how="computed", slips=slips)
for shape, ranks, dim in (([5, 3], 2, 0), ([4], 3, 0), ([4, 6], 2, 1)):
    print(shape, "over", ranks, "ranks:", [list(cut(torch.zeros(shape), ranks, r, dim).shape) for r in range(ranks)])

# %% [markdown]
# If the first dimension is small, some ranks have nothing to store. `shard_placement_fn` may then choose another
# dimension, whose length must be divisible by N: with padding at the end of *each row*, the parameter could not be a
# contiguous view.
#
# ## 12.2 Copy in
#
# *5 minutes, easy*
#
# A single all-gather serves the entire unit. Its buffer [N · S] has a row of S elements for each rank, and each row has
# a column for each parameter. On every rank, a column is as wide as the first rank's shard; a shorter shard leaves the
# end of its column unused. The last column, the *gap*, belongs to no parameter (12.6).
#
#     w [5, d], b [4] on 2 ranks       gathered [N, S]
#     rank 0   w 0-2 | b 0-1           w 0-2      | b 0-1 | gap
#     rank 1   w 3-4 | b 2-3           w 3-4, pad | b 2-3 | gap
#
# The gather works in place: the input of rank r is row r of its output. So a rank packs its shards directly into that
# row. If the computation is in bf16, the copy also casts the values.


# %% tags=["exercise-12.2"]
from .ex2_copy_in import copy_in

# %%
w, b = torch.arange(15.0).view(5, 3), 100 + torch.arange(4.0)
toy = torch.full((2 * 12,), -1.0)
for rank in range(2):
    copy_in(toy, [cut(w, 2, rank), cut(b, 2, rank)], [9, 2, 1], 2, rank)
print("w [5, 3] and b [4], packed by both ranks; -1 was never written:")
print(*toy.view(2, 12).int().tolist(), sep="\n")

# %% [markdown]
# ## 12.3 Copy out
#
# *10 minutes, medium*
#
# The buffer is now in *rank order*: row r contains rank r's shard of every parameter. A layer needs *parameter order*,
# in which all shards of one parameter are together. Each order is the transpose of the other. With a flat parameter,
# the two orders are the same, because the shards are consecutive slices, so the parameters are views of the gathered
# buffer. Here, a copy is inevitable, and so is a second buffer: while the copy runs, the gathered buffer and the
# unsharded parameters exist at the same time.
#
# Predict: at the peak of a gather, how many buffers as large as the unit does a rank hold? (With a flat parameter, the
# answer is 1.)

# %%
predict("12.3", ..., "buffers as large as the unit that a rank holds during the copy out")


# %% tags=["exercise-12.3"]
from .ex3_copy_out import copy_out

# %%
whole = [torch.full_like(w, -1), torch.full_like(b, -1)]
copy_out(toy, whole, [0, 0], [9, 2, 1], 2)
print("copied out: w", whole[0].int().tolist(), "b", whole[1].int().tolist())

# %% [markdown]
# ## 12.4 Chunk and concatenate
#
# *8 minutes, medium*
#
# The backward pass produces one unsharded gradient per parameter, and autograd allocates each of them separately. A
# single reduce-scatter handles all gradients of a unit. Its input is [N, S], and row r contains the chunks that rank r
# will keep. So each gradient is chunked, each chunk is padded, and the chunks for one rank are concatenated. This time,
# the unused elements must be zero: a sum reads every element, and a communication hook or a check for infinities reads
# the result.
#
# A frozen parameter gets no column. With flat parameters, this is not possible, because the gradient of a flat
# parameter is as long as the entire unit.
#
# Predict: suppose that only the biases of this GPT are trained. A block has 133,665 elements; 1,155 of them are in its
# six biases. Approximately how many times as many gradient bytes do flat units reduce as your units?

# %%
predict("12.4", ..., "bytes of gradients sent, flat over per-parameter, if only the biases are trained")


# %% tags=["exercise-12.4"]
from .ex4_chunk_cat import chunk_cat

# %% [markdown]
# ### Your unit in the engine
#
# minifsdp's engine decides *when* to gather, free and reduce, as in labs 05 to 08. Your functions replace `Cut.of`,
# `Gather.start`, `Gather.copy_out` and `Gradients.pack` of the package. The package implements each of these steps with
# one kernel per group of parameters: `torch._foreach_copy_`, `torch.split_with_sizes_copy` and `torch._chunk_cat`.


# %%
class YourCut(Cut):
    def of(self, whole: Tensor, rank: int) -> Tensor:
        return cut(whole, self.ranks, rank, self.dim)


class YourGather(Gather):
    """A gather that uses your two copy functions."""

    def __init__(self, cuts: Sequence[Cut], group: Any, memories: Any, dtypes: Any, on: torch.device) -> None:
        super().__init__(cuts, group, memories, dtypes, on)
        self.dims = [each.dim for each in cuts]
        # `.data`: for autograd, gathering must not count as modifying a saved tensor.
        wholes = zip(cuts, memories, self.rows.sizes, strict=False)
        self.params = [each.whole(memory.data[: group.size() * size]) for each, memory, size in wholes]

    @torch.no_grad()
    def start(self, pieces: list[Tensor], label: Any) -> Any:
        self.keeper.give_back(self.device)
        device.allocate(self.gathered)
        row = copy_in(self.gathered, pieces, self.rows.sizes, self.group.size(), self.group.rank())
        return comm.all_gather(self.gathered, row, self.group, label)

    @torch.no_grad()
    def copy_out(self) -> None:
        copy_out(self.gathered, self.params, self.dims, self.rows.sizes, self.group.size())
        self.keeper.keep(self.gathered)


class YourGradients(Gradients):
    """Gradients packed by your function."""

    def __init__(self, cuts: Sequence[Cut], on: torch.device) -> None:
        super().__init__(cuts, on)
        self.rows_of = gradients_module.Rows

    @torch.no_grad()
    def pack(self, trained: list[int], ranks: int, dtype: torch.dtype) -> tuple[Tensor, Rows, list[int]]:
        if self.held.keys() != set(trained):  # some parameters had no gradient this time
            return super().pack(trained, ranks, dtype)
        cuts = [self.cuts[index] for index in trained]
        rows = self.rows_of(cuts, ranks, [dtype] * len(trained))
        held, self.held = self.held, {}
        packed = device.empty(rows.numel, dtype, "gradients", self.device)
        dims = [each.dim for each in cuts]
        chunk_cat(packed.view(ranks, -1), [held[index] for index in trained], dims, rows.sizes)
        return packed, rows, []


YOURS: dict[str, Any] = {  # the package's names, and what replaces them
    "minifsdp.fsdp2.api.Cut": YourCut,
    "minifsdp.fsdp2.unsharded.Gather": YourGather,
    "minifsdp.fsdp2.unit.Gradients": YourGradients,
}


@contextmanager
def made_of(parts: dict[str, Any]) -> Iterator[None]:
    with ExitStack() as patches:
        for name, part in parts.items():
            patches.enter_context(patch(name, part))
        yield


def each_sharded(model: nn.Module, modules: Sequence[nn.Module], parts: dict[str, Any]) -> nn.Module:
    """Shard these modules and the model around them, with units built from `parts`."""
    with made_of(parts):
        for module in modules:
            fully_shard(module)
        fully_shard(model)
        for state in state_of(model).tree():
            if state.unit is not None:
                state.unit.refresh()  # creates the buffers
    return model


def by_parameter(
    model: Any, parts: dict[str, Any] | None = None, schedule: Any = SyncSchedule, keeper: Any = Held
) -> Any:
    each_sharded(model, list(model.blocks), YOURS if parts is None else parts)
    use_schedule(model, schedule, keeper)
    return model


WAYS: dict[str, Callable[[Any], Any]] = {
    "flat": flat,
    "yours": by_parameter,
    "minifsdp.fsdp2": partial(by_parameter, parts={}),
}

# %% [markdown]
# ### Measured: the same losses
#
# The next cell trains with three kinds of units on 2 and on 3 ranks (flat units, your units and the package's), and in
# one process with the full batch. The sum of two numbers does not depend on their order, so on 2 ranks, the losses of
# all three are bitwise equal. On 3 ranks, the order depends on the backend: gloo adds in rank order here, so the losses
# are equal again; with NCCL, the order depends on the position of an element in the buffer.


# %%
def losses(wrap: Callable[[Any], Any]) -> list[float]:
    model = wrap(SETTINGS.model().to(rank_device()))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for batch in BATCHES[:4]:
        loss = model(*my_rows(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def all_losses() -> dict[str, list[float]]:
    return {name: losses(wrap) for name, wrap in WAYS.items()}


(alone,) = launch(partial(losses, lambda model: model), 1)
for ranks in (2, 3):
    seen = launch(all_losses, ranks)
    means = {name: [statistics.fmean(each) for each in zip(*(s[name] for s in seen), strict=True)] for name in WAYS}
    equal = all(each == means["flat"] for each in means.values())
    near = all(abs(a / b - 1) < 1e-5 for a, b in zip(means["yours"], alone, strict=True))
    print(f"{ranks} ranks, 4 steps: three ways equal bit for bit: {equal}; equal to one process within 1e-5: {near}")
    assert near
    assert equal or ranks > 2

# %% [markdown]
# ### Measured: the memory that a gather holds
#
# The next cell runs a forward pass without gradients through one block, on 2 ranks. The ledger counts the unsharded
# parameters as "unsharded" and the buffer in rank order as "communication".


# %%
def one_block(wrap: Callable[[Block], Any]) -> tuple[int, int]:
    """Return the peak bytes of gathered parameters, and the bytes of one full buffer."""
    with Ledger() as ledger:
        module = wrap(Block(SETTINGS.width, 7).to(rank_device()))
        ledger.reset_peaks()
        with torch.no_grad():
            module(torch.ones(1, 4, SETTINGS.width, device=rank_device()))
        return ledger.peak_of("unsharded", "communication"), ledger.peak_of("unsharded")


def both_blocks() -> dict[str, tuple[int, int]]:
    flat_block = partial(FullyShardedDataParallel, schedule=SyncSchedule)
    return {"flat": one_block(flat_block), "yours": one_block(partial(each_sharded, modules=[], parts=YOURS))}


gathers = launch(both_blocks, RANKS)[0]
outcome("12.3", gathers["yours"][0] / gathers["yours"][1], slips={"as with views of one buffer": 1})
for name, (most, one) in gathers.items():
    print(f"{name:6} {most:10,} bytes at the peak, {one:9,} bytes after the gather")
assert gathers["flat"][0] == gathers["flat"][1]

# %% [markdown]
# The second buffer exists only until the copy out has finished. The peak of an entire step is in the backward pass,
# when activations and gradients are allocated, too; there, such a buffer adds a short spike of one unit (see below).
#
# ### Measured: flat versus per-parameter
#
# The next cells measure the second training step with each kind of unit. Copies are calls to torch's copy operators
# outside of collectives, counted in bytes written. We expect two gathers and one reduction per unit, with one gather
# fewer for the root. We also expect that this rank's shards are copied into each gather, that all parameters are copied
# out of each gather, and that each gradient is copied once.


# %%
class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts copying operators, and the bytes they write, while no collective runs."""

    NAMES = ("copy_", "_foreach_copy_", "split_with_sizes_copy", "_chunk_cat", "cat")

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.nbytes, self.paused = 0, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.NAMES and not self.paused:
            written = (kwargs or {}).get("out", args[0])
            self.calls += 1
            self.nbytes += sum(each.nbytes for each in (written if isinstance(written, list | tuple) else [written]))
        return made

    @contextmanager
    def pause(self, call: comm.Call, phase: str) -> Iterator[None]:
        self.paused = True
        yield
        self.paused = False


def take_step(model: Any, optimizer: Any, batch: data.Batch, mark: Callable[[str], Any] = str) -> None:
    loss = model(*my_rows(batch))
    mark("forward")
    loss.backward()
    mark("backward")
    optimizer.step()
    mark("optimizer")


def watched_step(wrap: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the bytes held after the second step and at its peak, the collectives, and the bytes sent."""
    with Ledger() as ledger:
        model = wrap(SETTINGS.model().to(rank_device()))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        ledger.watch(model, optimizer)
        take_step(model, optimizer, BATCHES[0])
        optimizer.zero_grad()
        ledger.reset_peaks()
        with comm.record() as calls:
            take_step(model, optimizer, BATCHES[1], ledger.mark)
        held, peak, curve = ledger.live(), ledger.peak.total, ledger.curve()
    sent = {op: round(sum(call.wire for call in calls if call.op == op)) for op in ("all_gather", "reduce_scatter")}
    return {"held": held, "peak": peak, "curve": curve, "messages": Counter(call.op for call in calls), "sent": sent}


def count_copies(wrap: Callable[[Any], Any]) -> tuple[int, int]:
    model = wrap(SETTINGS.model().to(rank_device()))
    model(*my_rows(BATCHES[0])).backward()
    batch, counted = my_rows(BATCHES[1]), Copies()
    comm.observers.append(counted.pause)
    with counted:
        loss = model(*batch)
        loss.backward()
    comm.observers.remove(counted.pause)
    return counted.calls, counted.nbytes


def compare() -> dict[str, dict[str, Any]]:
    found = {name: {**watched_step(wrap), "copies": count_copies(wrap)} for name, wrap in WAYS.items()}
    plain = count_copies(lambda model: model)  # the copies that the model itself makes
    return {
        name: {**each, "copies": [a - b for a, b in zip(each["copies"], plain, strict=True)]}
        for name, each in found.items()
    }


def units_of(model: GPT) -> list[list[torch.Size]]:
    """Return the shapes of each unit's parameters, those of the root first."""
    inside = {p for block in model.blocks for p in block.parameters()}
    blocks = [[p.shape for p in block.parameters()] for block in model.blocks]
    return [[p.shape for p in model.parameters() if p not in inside], *blocks]


usage = launch(compare, RANKS)[0]

# %% tags=["C26"]
SHAPES = units_of(SETTINGS.model())
rows = [Rows([Cut(shape, 0, RANKS) for shape in unit], RANKS, [torch.float32] * len(unit)) for unit in SHAPES]
mine = [sum(prod(each.local(0)) for each in row.cuts) for row in rows]  # elements of rank 0's shards
elements = [sum(map(prod, unit)) for unit in SHAPES]
gathers_of = [1, *[2] * SETTINGS.layers]
copied = sum(4 * (n * (m + w) + w) for n, m, w in zip(gathers_of, mine, elements, strict=True))
lines_of = {
    "all-gathers": [each["messages"]["all_gather"] for each in usage.values()],
    "reduce-scatters": [each["messages"]["reduce_scatter"] for each in usage.values()],
    "bytes sent": [sum(each["sent"].values()) for each in usage.values()],
    "bytes held after the step": [sum(each["held"].values()) for each in usage.values()],
    "bytes at the peak": [each["peak"] for each in usage.values()],
    "copies": [each["copies"][0] for each in usage.values()],
    "bytes copied": [each["copies"][1] for each in usage.values()],
}
print(f"{'':28}" + "".join(f"{name:>16}" for name in usage))
for what, values in lines_of.items():
    print(f"{what:28}" + "".join(f"{value:16,}" for value in values))
shares = [4 * row.row for row in rows]
sent = sum(n * share for n, share in zip([g + 1 for g in gathers_of], shares, strict=True)) * (RANKS - 1)
print(
    f"expected for yours: {sum(gathers_of)} and {len(rows)} collectives, {sent:,} bytes sent, {copied:,} bytes copied"
)
assert lines_of["all-gathers"] == [sum(gathers_of)] * 3
assert lines_of["reduce-scatters"] == [len(rows)] * 3
assert lines_of["bytes sent"][1:] == [sent] * 2

# %% [markdown]
# The cost of per-parameter sharding is the copies, and a second buffer in each gather. Flat units copy each gradient
# once, into the flat gradient; per-parameter units also copy parameters into and out of each gather. The number of
# *kernels* is a smaller problem: the package's three multi-tensor operators replace hundreds of calls to `copy_`
# (compare the last two columns). It copies slightly more bytes than yours, because it also copies the padding. The
# collectives are the same, and the bytes sent differ only by padding.
#
# Here, per-parameter sharding does not increase peak memory. A flat gradient is as large as its unit as soon as the
# first parameter has a gradient, and the root's flat gradient is held from the start of the backward pass to its end.
# Your units hold only the gradients that autograd has computed so far; for the root, these are at first only the
# gradients of the head.

# %%
peak = usage["yours"]["peak"] / MIB
drawn = plots.curve(
    usage["yours"]["curve"],
    earlier={"flat": usage["flat"]["curve"]},
    title=f"Your per-parameter units peak at {peak:.2f} MiB, flat units at {usage['flat']['peak'] / MIB:.2f}",
    says="Bytes of rank 0 over the second step, in the order of allocations and frees. Communication: gathered buffers "
    "in rank order, until they are copied out; such a spike is your peak (the arrow).",
    lab="12",
)
held = [sum(tags) for tags in zip(*usage["yours"]["curve"]["tags"].values(), strict=True)]
at_peak = held.index(max(held))
arrow = {"arrowstyle": "-|>", "color": "black"}
drawn.figure.axes[0].annotate("your peak", (at_peak, peak), (0.2 * at_peak, peak), va="center", arrowprops=arrow)
drawn

# %%
state = {
    name: {tag: each["held"][tag] for tag in ("parameters", "gradients", "optimizer")} for name, each in usage.items()
}
flat_bytes = [4 * -(-sum(map(prod, unit)) // RANKS) for unit in SHAPES]
plots.stages(
    state,
    predicted={
        "flat": 4 * sum(flat_bytes) + 4 * len(flat_bytes),
        "yours": 3 * 4 * sum(mine) + sum(shares) + 4 * sum(map(len, SHAPES)),
    },
    title="Rows are never split: rank 0 of 2 holds "
    f"{sum(state['yours'].values()) / sum(state['flat'].values()) - 1:.1%} more model state than a flat shard",
    says="Bytes of rank 0 after the optimizer step. Diamonds: 16 bytes for each element of its shards, where gradients "
    "are padded, and 4 bytes for each parameter's step count in Adam. A flat unit is a single parameter.",
    lab="12",
)


# %% [markdown]
# ### Measured: host time
#
# How much time does the Python code of a unit take? The next cell times 16 units of eight parameters each, on rank 0 of
# 2, with collectives that return immediately. It prints the additional CPU time compared with the plain module. The
# numbers depend on the machine.


# %% tags=["nbval-ignore-output"]
class Part(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


def torchs(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for module in [*model, model]:
        torch_fully_shard(module, mesh=mesh)
    return model


def host_seconds(units: int = 16, steps: int = 20) -> dict[str, float]:
    """Return the median CPU seconds of a step; the ways take turns."""
    torch.set_num_threads(1)
    ways: dict[str, Callable[[Any], Any]] = {
        "plain": lambda model: model,
        "flat": partial(FullyShardedDataParallel, auto_wrap_policy={Part}),
        "yours": lambda model: each_sharded(model, list(model), YOURS),
        "minifsdp.fsdp2": lambda model: each_sharded(model, list(model), {}),
        "torch's fully_shard": torchs,
    }
    models = {name: wrap(nn.Sequential(*(Part() for _ in range(units)))) for name, wrap in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(steps):
        for name, model in models.items():
            start = time.process_time()
            model(torch.ones(1, 8)).sum().backward()
            model.zero_grad()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(each[5:]) for name, each in seconds.items()}


host = launch(host_seconds, RANKS, backend="fake", timeout=120)[0]
for name in list(host)[1:]:
    print(f"{name:20} {(host[name] - host['plain']) / 16 * 1e6:6.0f} µs per unit and step beyond the plain module")

# %% [markdown]
# More parameters mean more Python work: a unit has as many leaf tensors, hooks and shards as parameters. The host
# spends this time while it queues work, so the time matters only if the device computes a unit faster.
#
# ### Measured: frozen parameters without gradient memory
#
# In this measurement, only the biases are trained. The flat units keep the original parameters
# (`use_orig_params=True`); otherwise, frozen and trainable parameters could not be in the same unit (lab 10b).


# %%
def with_biases_alone() -> dict[str, dict[str, int]]:
    import warnings

    warnings.simplefilter("ignore", UserWarning)  # it warns of exactly what is measured here
    return {
        name: biases_alone(wrap)
        for name, wrap in (("flat", partial(flat, use_orig_params=True)), ("yours", by_parameter))
    }


def biases_alone(wrap: Callable[[Any], Any]) -> dict[str, int]:
    """Return the bytes of gradients at the peak and after backward, and the bytes sent to reduce them."""
    model = SETTINGS.model().to(rank_device())
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    with Ledger() as ledger:
        model = wrap(model)
        ledger.watch(model)
        for batch in BATCHES[:2]:
            model.zero_grad()
            ledger.reset_peaks()
            with comm.record() as calls:
                model(*my_rows(batch)).backward()
        left, peak = ledger.mark("backward")["gradients"], ledger.peak_of("gradients")
    return {"peak": peak, "left": left, "sent": round(sum(each.wire for each in calls if each.op == "reduce_scatter"))}


tuned = launch(with_biases_alone, RANKS)[0]
ratio = tuned["flat"]["sent"] / tuned["yours"]["sent"]
outcome("12.4", round(ratio), slips={"the same bytes, as if all were trained": 1})
for name, each in tuned.items():
    print(
        f"{name:6} bytes of gradients: {each['peak']:9,} at the peak, {each['left']:9,} after backward, "
        f"{each['sent']:9,} sent"
    )
biases = [[prod(p.shape) for n, p in m.named_parameters() if n.endswith("bias")] for m in SETTINGS.model().blocks]
print(f"all biases' gradients, unsharded: {4 * (sum(map(sum, biases)) + 105 + 257):,} bytes")
assert ratio > 100

# %% [markdown]
# In a flat unit, a single trainable bias is enough: a gradient as long as the entire unit is sent. In your units,
# frozen parameters are gathered, because the computation needs them, but no gradients are stored or sent for them. LoRA
# needs no special wrapping.
#
# ## 12.5 Hold a buffer without `record_stream`
#
# *10 minutes, medium*
#
# On a GPU, the buffer is allocated on the gather stream, and its last reader is the copy out on the *compute* stream.
# The caching allocator gives a freed block immediately to the next request on the stream that allocated it. The
# solution in lab 08 is `record_stream`: the allocator holds the block back until an event recorded behind the reader is
# complete, and it polls this event only when memory is requested. If the host runs ahead, the memory is still in use at
# that time, so a limiter is needed.
#
# FSDP2 needs neither `record_stream` nor a limiter. It *keeps a reference* to the buffer. Before the stream that owns
# the buffer allocates the next one, the host queues a wait on that stream for an event recorded after the last reader;
# then it frees the memory. Any later use of this memory by the owner comes after the wait in the same stream, so the
# block may be reused immediately, however far ahead the host is. The host itself never waits.
#
# Predict: at any moment, `active - allocated` is the number of bytes that the program has freed but the allocator must
# hold back. What is the maximum of this difference in a step with your pair of functions?

# %%
predict("12.5", ..., "bytes that are freed and held back, at most, with your `keep` and `give_back`")


# %% tags=["exercise-12.5"]
from .ex5_hold import hold

# %% [markdown]
# ### Modelled: the memory that each way holds
#
# The next cells record training steps of rank 0, with collectives that return immediately, and replay them without a
# limiter on a simulated GPU that is slow enough for the host to run far ahead. The copies are the package's, with one
# kernel each. Gathered buffers and packed gradients are released in three ways: with your functions, with
# `record_stream`, and without any wait.


# %%
class YourHeld(Held):
    """Your pair of functions. On a CPU, a buffer has been read by the time `keep` is called, and need not stay."""

    def __init__(self) -> None:
        super().__init__()
        self._keep, self._give_back = hold()

    def keep(self, buffer: Tensor) -> None:
        self._keep(buffer)
        if not device.runs_behind(buffer.device):
            self.clear()

    def give_back(self, on: torch.device) -> None:
        self._on, self._owner = on, device.current_stream(on)
        self._give_back(on)

    def clear(self) -> None:
        """Called when no other buffer will be allocated for the time being."""
        if self._owner is not None:
            with device.on_stream(self._owner):
                self._give_back(self._on)


class Careless(Held):
    """Gives back without a wait."""

    def clear(self) -> None:
        for buffer, _ in self._kept:
            buffer.untyped_storage().resize_(0)
        self._kept.clear()


LARGER = Settings(ranks=RANKS, layers=8, width=128)
SLOW = replace(
    A100,
    name="a slow A100",
    flops={each: flops / 400 for each, flops in A100.flops.items()},
    memory_bandwidth=A100.memory_bandwidth / 40,
    issue=20e-6,
)
KEEPERS = {"yours, held": YourHeld, "record_stream": Recorded, "no wait": Careless}


def record_all() -> dict[str, Any]:
    return {name: record(keeper) for name, keeper in KEEPERS.items()}


def record(keeper: Any, steps: int = 4) -> Any:
    """Return this rank's program; by the last step, the allocator's cache has reached its full size."""
    batch = next(LARGER.batches())
    with Recorder() as recorder:
        model = by_parameter(LARGER.model(), {}, PrefetchSchedule, keeper)
        trainer = Trainer(model, torch.optim.AdamW(model.parameters(), 1e-3))
        recorder.watch(model, trainer.optimizer)
        for number, state in enumerate(state_of(model).tree()):
            name = f"block {number - 1}" if number else "root"
            recorder.name_unit(name, SimpleNamespace(buffers={"parameters": state.unit.unsharded.full}))
        recorder.reset_peaks()
        for _ in range(steps):
            recorder.mark(STEP)
            take_step_of(trainer, batch, torch.device("cpu"), recorder.mark)
    return recorder.program()


with patch.dict("os.environ", MINIFSDP_DEVICE="cpu"):
    programs = launch(record_all, RANKS, backend="fake", timeout=120)[0]
runs: dict[str, Run] = {name: replay(program, SLOW) for name, program in programs.items()}
behind = {name: max(at.active - at.allocated for at in run.memory) for name, run in runs.items()}
outcome("12.5", behind["yours, held"], how="model", slips={"as with record_stream": behind["record_stream"]})
print(f"{'MiB, model, not measured':26}{'allocated':>10}{'held back':>11}{'reserved':>10}{'step, ms':>10}  hazards")
for name, run in runs.items():
    sizes = [size / MIB for size in (run.peak("allocated"), behind[name], run.peak("reserved"))]
    print(f"{name:26}{sizes[0]:10.1f}{sizes[1]:11.1f}{sizes[2]:10.1f}{run.seconds * 1e3:10.2f}  {len(run.hazards)}")
print_wrapped(
    f"hazards: unordered accesses to the same memory; the first without a wait: {runs['no wait'].hazards[0].text}"
)

# %%
plots.device_memory(
    {name: runs[name] for name in ("yours, held", "record_stream")},
    title=f"Held buffers need {runs['yours, held'].peak('reserved') / MIB:.0f} MiB of reserved memory, record_stream "
    f"{runs['record_stream'].peak('reserved') / MIB:.0f} MiB",
    says="Bytes over the host's time, which ends long before the device's. Memory held by reference counts as "
    "allocated, and is reused once a wait for its last reader is in the owner's queue. Memory that another stream was "
    "recorded on stays active after its free.",
    lab="12",
    model=SLOW.name,
)

# %%
plots.timeline(
    {name: runs[name] for name in ("yours, held", "record_stream")},
    title="Waits in the queue spread the gathers out at no cost: "
    f"{runs['yours, held'].seconds * 1e3:.0f} ms a step, {runs['record_stream'].seconds * 1e3:.0f} without",
    says="One step; the host begins it while the device is still busy with the one before. Yours: in forward, each "
    "gather waits on its stream until an earlier buffer has been read. With record_stream, nothing delays gathers: all "
    "of forward's run at once, each into memory of its own. Stream 1 copies shards into the gathers' buffers; the "
    "copies out are part of compute.",
    lab="12",
)

# %% [markdown]
# With `record_stream`, up to 18.7 MiB are held back: the first figure shows them as freed but waiting for an event.
# Only the *host* could delay these gathers, as it does with the limiter of lab 08. With your functions, the streams
# delay the gathers (first row of the second figure), and the host queues the entire step without stopping.
#
# The third way, freeing without a wait, needs no more memory and no more time, but it is wrong: a packing kernel gets
# memory that a transfer may still be using. On a GPU, no error would be raised, but a loss would occasionally be wrong.
#
# ## 12.6 Pad to 16 bytes
#
# *5 minutes, easy*
#
# Each column is as wide as the largest shard, so a row can have any number of elements, S, and row r begins at element
# r · S. If the size of a row is not a multiple of 16 bytes, some rows begin at addresses from which NCCL cannot load 16
# bytes at once, and the collective becomes much slower:
# [pytorch#195450](https://github.com/pytorch/pytorch/issues/195450) reports this for FSDP2's layout, and
# [nccl#413](https://github.com/NVIDIA/nccl/issues/413) and
# [nccl-tests#97](https://github.com/NVIDIA/nccl-tests/issues/97) explain it. torch 2.13 does not pad rows; minifsdp
# adds a gap to each row.
#
# Predict: what is the maximum size, in bytes, of the gap in a row of float32 elements?

# %%
predict("12.6", ..., "bytes of the largest gap in rows of float32")


# %% tags=["exercise-12.6"]
from .ex6_columns_of import columns_of


# %%
class YourRows(Rows):
    """Rows as wide as your function says."""

    def __init__(self, cuts: Sequence[Cut], ranks: int, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__(cuts, ranks, dtypes)
        self.sizes = columns_of([c.shape for c in cuts], [c.dim for c in cuts], ranks, self.dtype.itemsize)
        self.gap, self.row = self.sizes[-1], sum(self.sizes)
        self.numel = ranks * self.row


YOURS |= {f"minifsdp.fsdp2.{name}.Rows": YourRows for name in ("unsharded", "gather", "gradients")}
WAYS["yours"] = partial(by_parameter, keeper=YourHeld)  # all six
seen = launch(partial(losses, WAYS["yours"]), 3)
near = all(abs(statistics.fmean(each) / b - 1) < 1e-5 for *each, b in zip(*seen, alone, strict=True))
print("all six of your pieces on 3 ranks, losses equal to one process within 1e-5:", near)
assert near

# %% [markdown]
# ### Computed: the cost and the benefit of padding
#
# There are two kinds of padding. Padding of *rows* rounds a parameter's length up to a multiple of N. It grows with N,
# and costs most if a parameter has few long rows. The *gap* takes at most 15 bytes per rank and unit. A flat unit is
# padded by at most N - 1 elements (lab 04). The table is for the course's GPT in bf16, with the dimensions of a small
# real model.

# %% tags=["C26"]
with torch.device("meta"):
    REAL = units_of(GPT(vocabulary=50_257, width=768, layers=12, context=1024))
WORLDS = [2, 3, 4, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000]
psi = sum(prod(shape) for unit in REAL for shape in unit)
costs: dict[str, dict[int, float]] = {"flat": {}, "whole rows": {}, "the gap": {}}
print(f"{'':6}{'padding, % of the parameters':^42}{'shares of 13 units, not multiples of 16 bytes':>48}")
print(f"{'ranks':6}" + "".join(f"{name:>14}" for name in [*costs, "flat", "without gap", "with"]))
for n in WORLDS:
    columns = [columns_of(unit, [0] * len(unit), n, 2) for unit in REAL]
    even = [-(-sum(map(prod, unit)) // n) for unit in REAL]
    without = [sum(sizes[:-1]) for sizes in columns]
    padded = [sum(sizes) for sizes in columns]
    costs["flat"][n] = 100 * (n * sum(even) / psi - 1)
    costs["whole rows"][n] = 100 * (n * sum(without) / psi - 1)
    costs["the gap"][n] = 100 * n * (sum(padded) - sum(without)) / psi
    odd = [sum(2 * share % 16 != 0 for share in each) for each in (even, without, padded)]
    assert odd[-1] == 0, "a share is no multiple of 16 bytes"
    if n in (2, 3, 7, 8, 16, 64, 256, 1000):
        print(
            f"{n:<6}" + "".join(f"{each[n]:14.4f}" for each in costs.values()) + "".join(f"{each:14}" for each in odd)
        )
most = max(columns_of([(length,)], [0], n, 4)[-1] for length in range(1, 200) for n in (2, 3, 64))
slips = {"15 bytes are not a whole number of elements": 15, "a row that needs 16 bytes needs none": 16}
outcome("12.6", 4 * most, how="computed", slips=slips)

# %%
plots.lines(
    {
        name.replace("the gap", "the gap, to multiples of 16 bytes"): (list(each), list(each.values()))
        for name, each in costs.items()
    },
    xlabel="ranks",
    ylabel="padding, % of the parameters",
    title=f"On 1,000 ranks, whole rows cost {costs['whole rows'][1000]:.0f}% of padding, and gaps for alignment "
    f"{costs['the gap'][1000]:.2f}%",
    says="A GPT with 12 blocks of width 768 in bf16. A line is interrupted where there is no padding. A parameter with "
    "768 rows divides evenly over 768 ranks, and leaves 232 of 1,000 with only padding.",
    lab="12",
    logx=True,
    logy=True,
)

# %% [markdown]
# Whether the gap helps depends on the sizes. On 8 or 16 ranks, the blocks of this model have aligned shards anyway;
# only the root's shards are not aligned, because the vocabulary size is odd. On 7, 64 or 256 ranks, hardly any unit has
# aligned shards, whether flat or per-parameter. (On 64 ranks, a LayerNorm's 768 elements leave 12 for each rank, which
# is 24 bytes.) On 1,000 ranks, all blocks of the flat layout are aligned, and without the gap, no unit is aligned
# per parameter. The cost is at most 15 bytes per rank and unit.
#
# ### Measured: names and checkpoints unchanged
#
# After three steps on 2 ranks, the next cell makes three checks. First, it compares the keys of `state_dict()` with
# those of the plain model. Second, it saves the full values with `torch.save` and loads them into a plain model. Third,
# it saves the sharded state with `torch.distributed.checkpoint` and loads it on 3 ranks into newly sharded models.

# %%
import tempfile


def save(folder: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    model = WAYS["yours"](SETTINGS.model().to(rank_device()))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for batch in BATCHES[:3]:
        take_step(model, optimizer, batch)
        optimizer.zero_grad()
    state = model.state_dict()
    dcp.save(state, checkpoint_id=folder / "sharded")
    whole = {name: each.full_tensor().cpu() for name, each in state.items()}  # collectives: on every rank
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
    return {"keys": list(state), "kind": type(state["head.weight"]).__name__}


def load(folder: Path) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp

    with torch.no_grad():
        model = SETTINGS.model().to(rank_device())
        for p in model.parameters():
            p.zero_()
    state = WAYS["yours"](model).state_dict()
    dcp.load(state, checkpoint_id=folder / "sharded")
    return {name: each.full_tensor().cpu() for name, each in state.items()}


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    saved = launch(save, RANKS, folder)[0]
    plain = SETTINGS.model()
    keys = list(plain.state_dict())
    plain.load_state_dict(torch.load(folder / "whole.pt"))
    loaded = launch(load, 3, folder)
equal = [all(torch.equal(each[name], value) for name, value in plain.state_dict().items()) for each in loaded]
print(f"keys as in the plain model: {saved['keys'] == keys}, {len(keys)} of them, each a {saved['kind']}")
print("torch.save on 2 ranks, strict load_state_dict into the plain model: loaded")
print_wrapped(f"torch.distributed.checkpoint, 2 ranks to 3: equal to the plain model's on each rank: {equal}")
assert saved["keys"] == keys
assert all(equal)

# %% [markdown]
# FSDP needs no code for any of this. A DTensor knows its global shape and its placements, and a checkpoint needs
# nothing else. In lab 10b, by contrast, you wrote this code yourself.
#
# ## What is still missing
#
# - A unit may mix dtypes. The package gathers such parameters as bytes, wide dtypes first (`minifsdp/fsdp2/cut.py`).
# - A parameter may have no gradient on some ranks. The package then fills its column with -0.0, so that a rank can
#   distinguish "no rank had a gradient" from a gradient of zero (`minifsdp/fsdp2/gradients.py`).
# - Your functions do not support replicas on a 2-D mesh, re-gathering in the backward pass within a smaller group, or
#   float8 gathers through extensions. `fully_shard` has arguments for these, and the package supports all of them.
# - The results for the simulated GPU come from a model in which copies take negligible time. Measuring copy times
#   requires a real GPU.
#
# ## What to remember
#
# 1. Each parameter is split along dimension 0, as `torch.chunk` does. The last ranks may hold less, or nothing.
# 2. Collectives need rank order, and computation needs parameter order. So per-parameter sharding costs a copy in, a
#    copy out, and a second buffer during the gather.
# 3. Gathering a unit still takes one collective, and so does reducing its gradients, however many parameters it has.
#    Gradients are packed once all of them are complete; frozen parameters have none.
# 4. Keep a reference to a buffer, make the stream that owns it wait, then free the buffer: this needs neither
#    `record_stream` nor a limiter.
# 5. Padding is the cost of never splitting a row; aligning shards to 16 bytes is nearly free.
# 6. Names, checkpoints and optimizers stay unchanged; this is the purpose of FSDP2.
#
# ## Questions
#
# **1. The weight of a Linear, [3, 4096], is sharded over 8 ranks. What does each rank hold, and how could you shard it
# better?**
#
# <details><summary>Answer</summary>
#
# Ranks 0 to 2 hold one row each, and the others hold nothing. In the buffer, all 8 ranks reserve space for one row of
# this weight, so most of the traffic is padding. Shard the weight along dimension 1 with `shard_placement_fn`, so that
# each rank holds 512 columns. </details>
#
# **2. Why must unused elements be zero in 12.4, but not in 12.2?**
#
# <details><summary>Answer</summary>
#
# The unused elements of a gathered row, those of the gap included, are never read, because the copy out skips them. A
# reduction sums all elements.
# The sums of unused elements do not reach any parameter, but hooks and checks for infinities read them, and a single
# NaN there would spoil the result.
# </details>
#
# **3. With `record_stream`, flat parameters need a limiter. Could they be held by reference instead?**
#
# <details><summary>Answer</summary>
#
# Yes: nothing in 12.5 depends on the layout. The last reader of a flat buffer is the unit's computation. So the memory
# is held until the entire unit has been computed, and not only until a copy has finished.
# </details>
#
# **4. For which optimizers would it be wrong to split a parameter between any two elements, as a flat parameter does?**
#
# <details><summary>Answer</summary>
#
# It would be wrong for optimizers that work on matrices or rows, such as Muon, Shampoo and Adafactor. Adam is
# elementwise, so it is not affected. Even a shard with complete rows is not the complete matrix, so matrix-based
# optimizers first gather the matrices.
# </details>
#
# ## Further reading
#
# - torch: `torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py` (12.2 to 12.4),
#   `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py` (12.5),
#   `torch/distributed/fsdp/_fully_shard/_fsdp_param.py` (12.1).
# - minifsdp: `fsdp2/cut.py` (12.1 and 12.6), `fsdp2/gather.py`, `fsdp2/gradients.py`, `fsdp2/held.py`, `fsdp2/unit.py`.
# - [RFC for per-parameter FSDP](https://github.com/pytorch/pytorch/issues/114299).
