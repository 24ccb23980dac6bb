# ---
# jupyter:
#   minifsdp:
#     lab: "12"
#     title: Per-parameter sharding
#     minutes: 60
#     ranks: 4
# ---

# %% [markdown]
# # Lab 12: per-parameter sharding
#
# A flat parameter (lab 04) is one buffer for all parameters of a unit, cut into N equal shards
# wherever the cut falls. FSDP2, torch's `fully_shard`, gives the buffer up. It cuts every parameter
# by itself, along its first dimension, and leaves it in its module under its own name. The
# schedules of labs 05 to 08 stay as they are. Only the unit changes, and in this lab you write it.
#
# ![A per-parameter unit's life in one step: pieces, copied in, gathered, copied out, freed,
# gradients packed, reduced to pieces](../slides/figures/scale-life.svg)
#
# *From [lecture 6, Beyond the flat parameter](../slides/scale.md), which comes before this lab.*
#
# **Afterwards you can**
#
# - cut a parameter over N ranks as `torch.chunk` does, empty pieces included;
# - explain why a per-parameter gather needs two copies where a flat one needs none, and write both;
# - pack the gradients of a unit for one reduce-scatter;
# - give a buffer back to another stream without `record_stream`;
# - state what per-parameter sharding costs in copies and padding, and what it makes simple: names,
#   frozen parameters, checkpoints.
#
# **You need** lab 04 (the flat parameter), lab 05 (units), lab 08 (streams and the allocator).
#
# **Time** 60 minutes. **To run** on a laptop (gloo, 2 to 4 processes), on one GPU, or on a GPU node
# (NCCL, one rank per GPU). **Memory** a rank's tensors take less than 20 MiB here.

# %% tags=["setup"]
# set-up
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minifsdp import device
from minifsdp.course.workshop import exercise, outcome, predict

# %% [markdown]
# ## What hurts now
#
# The model is the course's GPT with odd sizes. Its blocks become units. The next cell cuts one
# block's flat parameter over 4 ranks, and prints where each rank's shard begins.

# %%
import warnings
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW

from minifsdp import FullyShardedDataParallel, comm
from minifsdp.comm import Group
from minifsdp.course import plots
from minifsdp.course.bench import overhead
from minifsdp.course.ladder import closed_form, data
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.model import Block
from minifsdp.course.ladder.per_parameter import fsdp2 as fsdp2_bytes
from minifsdp.course.ladder.rungs import LEARNING_RATE, RUNGS, Trainer, closed_form_setting, sizes_of
from minifsdp.course.launch import launch, rank_device
from minifsdp.course.machine import A100, record_steps, replay
from minifsdp.course.watch.ledger import Ledger
from minifsdp.flat_param import ParamPlaces, find_parameters
from minifsdp.fsdp import PrefetchSchedule
from minifsdp.fsdp.engine import Engine
from minifsdp.fsdp.schedules.sync import SyncSchedule
from minifsdp.fsdp.shard import cut as units_of
from minifsdp.fsdp.shard import hook_forward
from minifsdp.fsdp.unit import Unit
from minifsdp.fsdp2 import Held, Recorded, fully_shard, use_schedule
from minifsdp.fsdp2.dtensors import like, local_of
from minifsdp.fsdp2.view import InPlaceView

RANKS = 2
SETTINGS = Settings(ranks=RANKS, batch=2, layers=5, width=105, context=16)
BATCHES = list(SETTINGS.batches())  # the same on every rank; each takes its rows
SIZES = sizes_of(SETTINGS.model())
BLOCK = {name: p.shape for name, p in SETTINGS.model().blocks[0].named_parameters()}
MIB = 2**20


def where_it_falls(offset: int) -> str:
    """The parameter of a block's flat parameter at an offset, and the row and the element of it there."""
    for name, shape in BLOCK.items():
        if offset < shape.numel():
            row, element = divmod(offset, shape[1:].numel())
            return f"{name:12} {list(shape)!s:11} row {row:3}, element {element:3}"
        offset -= shape.numel()
    return "padding"


elements = sum(shape.numel() for shape in BLOCK.values())
for rank in range(4):
    print(f"rank {rank}'s shard begins in {where_it_falls(rank * -(-elements // 4))}")

# %% [markdown]
# The shards begin in the middle of rows. Such a shard has no shape that an optimizer, a checkpoint
# or a quantizer could use. Lab 10b gave every parameter its name back, at the price of a layer of
# bookkeeping. And all of a unit's parameters share one dtype, and one buffer for gradients: if one
# parameter of a unit is trained, memory is allocated for the gradients of all.
#
# ## 12.1 Cut one parameter
#
# *6 minutes, easy*
#
# Cut dimension 0: a rank holds whole rows. `torch.chunk(w, N)` cuts into pieces of `ceil(d / N)`
# rows. The last piece may be shorter, and there may be fewer than N pieces. A rank without a piece
# gets an empty tensor, so that every rank has the same number of parameters.
#
# Predict: a weight of 5 rows is cut over 4 ranks. How many rows does rank 3, the last one, get?

# %%
predict("12.1", ..., "rows of rank 3, if 5 rows are cut over 4 ranks")


# %% tags=["exercise-12.1"]
@exercise("12.1")
def cut(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's piece of a parameter: rows `rank * ceil(d / N)` and following, at most `ceil(d / N)` of them.

    Args:
        whole: the parameter [d, ...].
        rank: 0 to N - 1.
        ranks: N.

    Returns:
        a view of `whole`, without padding; [0, ...] if no rows are left for this rank.
    """
    ...


# %%
five = torch.arange(10.0).view(5, 2)
pieces = [cut(five, rank, 4) for rank in range(4)]
slips = {"rows are not dealt out evenly: the first ranks get two each": 1, "2 + 2 + 1 are 5": 2}
outcome("12.1", pieces[3].shape[0], how="computed", slips=slips)
theirs = five.chunk(4)
for rank, piece in enumerate(pieces):
    chunk = [list(each.shape) for each in theirs[rank : rank + 1]]
    print(f"rank {rank}: shape {list(piece.shape)}; torch.chunk: {chunk}")
largest = max(BLOCK.values(), key=lambda shape: shape.numel())
print(f"a weight {list(largest)} over 4 ranks:", [list(cut(torch.empty(largest), rank, 4).shape) for rank in range(4)])

# %% [markdown]
# A piece is a tensor with rows, so it can be described by a mesh and a placement: `Shard(0)`. That
# is torch's `DTensor`. It knows the whole shape and computes on the local piece. An optimizer over
# DTensors works without a line of ours.
#
# ## 12.2 Plan a row
#
# *8 minutes, medium*
#
# A unit is still gathered with *one* message. Its pieces travel in a buffer of N *rows*, one per
# rank, all equally long. A row has a column for each parameter, as wide as the longest piece
# (rank 0's), and at the end a *gap*:
#
#     w [5, 2], b [4] over 2 ranks     column w    column b   gap
#     rank 0                           w0 w1 w2    b0 b1      .. ..
#     rank 1                           w3 w4 pad   b2 b3      .. ..
#
# The gap makes a row a multiple of 16 bytes. Where a rank's share of a collective is no multiple of
# 16, NCCL falls back to narrower copies
# ([NCCL issue 413](https://github.com/NVIDIA/nccl/issues/413)).
#
# Predict: one block of this lab (fp32) is cut over 4 ranks. How many bytes of the buffer's 4 rows
# are padding and gaps, together?

# %%
predict("12.2", ..., "bytes of padding and gaps in the gather buffer of one block over 4 ranks")


# %% tags=["exercise-12.2"]
@exercise("12.2")
def plan_row(shapes: Sequence[torch.Size], ranks: int, itemsize: int) -> list[int]:
    """The elements of each column of a row, in the order of `shapes`, and of the gap that follows them.

    Args:
        shapes: of the whole parameters, none of them a scalar.
        ranks: N.
        itemsize: bytes per element: 8, 4 or 2.

    Returns:
        a number for each parameter and, last, the gap (perhaps 0): the sum is a multiple of 16 bytes.
    """
    ...


# %% tags=["C26"]
def padding_of(shapes: Sequence[torch.Size], ranks: int) -> tuple[int, int]:
    """Bytes of padding and gaps that a unit's gather buffer has, flat and per parameter."""
    used = 4 * sum(shape.numel() for shape in shapes)
    return 4 * ranks * -(-used // (4 * ranks)) - used, 4 * ranks * sum(plan_row(shapes, ranks, 4)) - used


shapes = list(BLOCK.values())
slips = {
    "without the gaps": padding_of(shapes, 4)[1] - 16 * plan_row(shapes, 4, 4)[-1],
    "of one rank": padding_of(shapes, 4)[1] // 4,
}
outcome("12.2", padding_of(shapes, 4)[1], how="computed", slips=slips)
print(f"{'ranks':>5} {'flat, bytes':>12} {'per parameter':>14}   of the block")
for ranks in (2, 4, 8, 16, 64, 128):
    flat, each = padding_of(shapes, ranks)
    print(f"{ranks:5} {flat:12,} {each:14,}{each / (4 * elements):14.2%}")
even = [torch.Size(128 * side for side in shape) for shape in ((3, 1), (4, 4), (1,), (4,))]
assert padding_of(even, 128) == (0, 4 * 128 * plan_row(even, 128, 4)[-1]), "multiples of N need no padding"

# %% [markdown]
# A flat parameter is padded once, by less than N elements. Here every parameter is padded by itself:
# with 128 ranks and 105 rows, 23 ranks have nothing of most of the parameters, and still send
# padding. Real models have sizes that are multiples of the number of ranks, and pay only the gaps.
#
# ## 12.3 Copy in
#
# *5 minutes, easy*
#
# Before the gather every rank packs its pieces into its row. The copy casts, too: with mixed
# precision the row is in bf16 and the pieces stay in fp32. Padding and gap may hold anything,
# because nobody reads them.


# %% tags=["exercise-12.3"]
@exercise("12.3")
def copy_in(row: Tensor, pieces: Sequence[Tensor], sizes: list[int]) -> None:
    """Copy each piece to the beginning of its column.

    Args:
        row: this rank's row [S] of the gather's buffer, perhaps of another dtype than the pieces.
        pieces: this rank's, in the order of the columns, contiguous; perhaps shorter than their columns.
        sizes: as from `plan_row`: the columns, and the gap last.

    Write to the elements of the pieces only: padding and gap keep what they have.
    """
    ...


# %% [markdown]
# ## 12.4 Copy out
#
# *8 minutes, medium*
#
# The gather leaves the rows in *rank order*: all of rank 0's pieces, then all of rank 1's. A
# computation needs *parameter order*: all pieces of `w` together. The second copy is a
# transposition of blocks:
#
#     gathered    w0 w1 w2 b0 b1 ..  |  w3 w4 pad b2 b3 ..        [N, S]
#     memories    w0 w1 w2 w3 w4 pad    b0 b1 b2 b3               [N * size] each
#
# Padding ends up behind the last row of the parameter. The parameter itself is a view of the
# beginning of its memory.
#
# A flat parameter needs neither copy: its shard is gathered straight into place. Predict: to gather
# one block over 2 ranks, how many bytes does a rank write in `copy_in` and `copy_out`, together?
# (The block has 13 · 105 + 12 · 105² elements; count padding as copied, and forget the gap.)

# %%
predict("12.4", ..., "bytes that both copies write on a rank to gather one block over 2 ranks")


# %% tags=["exercise-12.4"]
@exercise("12.4")
def copy_out(gathered: Tensor, memories: Sequence[Tensor], sizes: list[int], ranks: int) -> None:
    """Copy the rows' columns to where the parameters are.

    Args:
        gathered: the buffer [N * S] in rank order.
        memories: of each parameter [N * size], which the parameter is a view of; of the same dtype.
        sizes: as from `plan_row`: the columns, and the gap last. The gap has no memory.
        ranks: N.
    """
    ...


# %%
def gather_a_block() -> tuple[int, bool, list[str]]:
    """Bytes that the copies write; whether the parameters have arrived; the collectives."""
    group = comm.world()
    rank, ranks = group.rank(), group.size()
    block = SETTINGS.model().blocks[0]
    whole = [p.detach().clone() for p in block.parameters()]
    sizes = plan_row([p.shape for p in whole], ranks, 4)
    gathered = torch.empty(ranks * sum(sizes), device=rank_device())
    memories = [torch.empty(ranks * size, device=rank_device()) for size in sizes[:-1]]
    mine = [cut(p.to(rank_device()), rank, ranks) for p in whole]
    row = gathered.view(ranks, -1)[rank]
    with comm.record() as calls:
        copy_in(row, mine, sizes)
        comm.all_gather(gathered, row, group).wait()
        copy_out(gathered, memories, sizes, ranks)
    arrived = all(
        torch.equal(memory[: p.numel()].view(p.shape).cpu(), p) for memory, p in zip(memories, whole, strict=True)
    )
    written = sum(piece.nbytes for piece in mine) + sum(memory.nbytes for memory in memories)
    return written, arrived, [call.op for call in calls]


found = launch(gather_a_block, RANKS)
slips = {
    "copy_in writes a rank's share, too": sum(2 * 4 * size for size in plan_row(shapes, 2, 4)[:-1]),
    "copy_in writes a rank's share only": 2 * sum(2 * 4 * size for size in plan_row(shapes, 2, 4)[:-1]),
}
outcome("12.4", found[0][0], ranks=RANKS, slips=slips)
for rank, (written, arrived, ops) in enumerate(found):
    print(f"rank {rank}: {ops}, {written:,} bytes written by copies, parameters as before: {arrived}")
assert all(arrived for _, arrived, _ in found)

# %% [markdown]
# ## 12.5 Pack gradients
#
# *8 minutes, hard*
#
# Autograd makes a gradient for each parameter, in the parameter's shape. They are kept until the
# unit's last one is there. Then they are packed into *one* buffer for *one* reduce-scatter: row r
# holds what rank r keeps. This is `copy_out` backwards. torch calls it *chunk-cat*, and has a kernel
# for it.
#
# The reduce-scatter adds padding and gaps, too, and its result becomes the memory of `.grad`. So
# here they must be zero. A parameter of which this rank has no gradient, perhaps because its data
# took another branch, adds zeros to the sum of the others.
#
# A frozen parameter has no column at all. Predict: only the biases and norms of a block (13 · 105
# elements) are trained. How many bytes does the packed buffer have on 2 ranks, gap included?

# %%
predict("12.5", ..., "bytes of the packed gradients of a block on 2 ranks if only biases and norms are trained")


# %% tags=["exercise-12.5"]
@exercise("12.5")
def pack(
    gradients: Sequence[Tensor | None],
    packed: Tensor,
    sizes: list[int],
    ranks: int,
    cut: Callable[[Tensor, int, int], Tensor],
) -> None:
    """Fill `packed` [N * S'] with every rank's rows of all gradients, and with zeros elsewhere.

    Args:
        gradients: of the trained parameters, in their shapes, perhaps not contiguous; None: this rank has none.
        packed: uninitialized, perhaps of another dtype than the gradients.
        sizes: as from `plan_row` for the trained parameters: the columns, and the gap last.
        ranks: N.
        cut: as in 12.1.
    """
    ...


# %%
trained = [shape for shape in shapes if len(shape) == 1]
row = plan_row(trained, RANKS, 4)
whole_block = 4 * RANKS * sum(plan_row(shapes, RANKS, 4))
slips = {
    "with the columns of what is frozen": whole_block,
    "one row": 4 * sum(row),
    "without the gaps": 8 * sum(row[:-1]),
}
outcome("12.5", 4 * RANKS * sum(row), how="computed", slips=slips)
print(f"all trained: {whole_block:,} bytes packed; biases and norms alone: {4 * RANKS * sum(row):,}")

# %% [markdown]
# ## 12.6 Hold instead of `record_stream`
#
# *6 minutes, medium*
#
# On a GPU the gathered buffer is allocated on the stream that communicates, and read last by
# `copy_out` on the stream that computes. In lab 08 such a buffer was freed with `record_stream`:
# the allocator takes it back once it finds the reader's event done, when the host happens to ask.
# A host far ahead of its device asks too early, finds nothing, and takes new memory. That is why lab
# 08 needed a limiter.
#
# FSDP2 keeps a reference instead. When the owning stream is about to allocate the next buffer, it is
# first told to wait for the reader, by an event on the device. After that the memory may be used
# again *in this stream's order*, however far ahead the host is. So the host frees the buffer at once
# and gets the same block back.


# %% tags=["exercise-12.6"]
@exercise("12.6")
def hold(where: torch.device) -> tuple[Callable[[Tensor], None], Callable[[], None]]:
    """Make two functions, `keep(buffer)` and `give_back()`, that share a list of buffers.

    Args:
        where: the device of the buffers.

    `keep` is called while the reader's stream is current, with the last kernel that reads the buffer queued. It frees
    nothing. `give_back` is called while the owner's stream is current, about to allocate: it makes this stream wait for
    the reader of every buffer that is kept, then frees their memory, and forgets them.

    Use `device.current_stream(where)`, a stream's `record_event()` and `wait_event(event)`, and
    `buffer.untyped_storage().resize_(0)`, which frees without `record_stream`. The host waits for nothing.
    """
    ...


# %% [markdown]
# ## The unit
#
# Your six functions are a unit. The class below has the verbs of lab 05's unit, and nothing about
# order: `Engine`, `hook_forward` and the schedules are those of flat parameters. Read it from
# `_gather` on. `InPlaceView` puts the DTensors into their modules while the unit is sharded, and the
# whole parameters while it is not.


# %% tags=["shown"]
class YourUnit(Unit):
    """Parameters that are sharded one by one and gathered together."""

    def __init__(self, name: str, params: ParamPlaces, mesh: Any, pairs: Any) -> None:
        super().__init__(name)
        self.group, self.device = mesh.get_group(), rank_device()
        self.sizes = plan_row([p.shape for p in params], self.group.size(), 4)
        pieces = [cut(p.detach(), self.group.rank(), self.group.size()).clone() for p in params]
        self.shards = [as_dtensor(piece, p, mesh) for piece, p in zip(pieces, params, strict=True)]
        self.view = InPlaceView(list(params.values()), self.shards)
        numel = self.group.size() * sum(self.sizes)
        self.gathered, self.full = self.empty(numel, "communication"), self.empty(numel, "unsharded")
        *whole, _ = self.full.split([self.group.size() * size for size in self.sizes])
        self.leaves = [view_of(memory, p) for memory, p in zip(whole, params, strict=True)]
        self.memories = [memory.data for memory in whole]  # version counters of their own, as in lab 05
        self.gradients: dict[int, Tensor] = {}
        (self.keep, self.give_back), (self.keep_packed, self.give_packed_back) = pairs
        self._train(self.view.trained)
        self.view.attach(self)
        device.free(self.gathered)
        device.free(self.full)

    def empty(self, numel: int, role: Any) -> Tensor:
        return device.empty(numel, torch.float32, role, self.device)

    def _gather(self) -> Any:
        self.give_back()
        device.allocate(self.gathered)
        row = self.gathered.view(self.group.size(), -1)[self.group.rank()]
        copy_in(row, [local_of(p) for p in self.shards], self.sizes)
        return comm.all_gather(self.gathered, row, self.group, self.label)

    def _arrived(self) -> None:
        device.allocate(self.full)
        copy_out(self.gathered, self.memories, self.sizes, self.group.size())
        self.keep(self.gathered)

    def _release(self) -> None:
        device.free(self.full)

    def take_gradient(self, index: int) -> None:
        self.gradients[index], self.leaves[index].grad = self.leaves[index].grad, None
        device.retag(self.gradients[index], "gradients")

    @property
    def has_gradient(self) -> bool:
        return bool(self.gradients)

    def _reduce(self) -> Any:
        self.give_packed_back()
        self.columns = plan_row([self.leaves[index].shape for index in self.trained], self.group.size(), 4)
        self.packed = self.empty(self.group.size() * sum(self.columns), "gradients")
        held, self.gradients = self.gradients, {}
        pack([held.get(index) for index in self.trained], self.packed, self.columns, self.group.size(), cut)
        self.mean = self.empty(sum(self.columns), "gradients")
        return comm.reduce_scatter(self.mean, self.packed, self.group, comm.MEAN, self.label)

    def _accumulate(self) -> None:
        self.keep_packed(self.packed)
        for index, column in zip(self.trained, self.mean.split(self.columns), strict=False):
            piece = local_of(self.shards[index])
            self.view.add([(index, column[: piece.numel()].view(piece.shape))])
        del self.mean, self.packed

    def finish_reduce(self) -> None:
        self.give_back()
        self.give_packed_back()


# %%
def as_dtensor(piece: Tensor, p: nn.Parameter, mesh: Any) -> nn.Parameter:
    """A piece as this rank's part of a parameter."""
    placed = DTensor.from_local(piece, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())
    return nn.Parameter(placed, p.requires_grad)


def view_of(memory: Tensor, p: nn.Parameter) -> nn.Parameter:
    """A whole parameter as a view of its memory."""
    return nn.Parameter(memory[: p.numel()].view(p.shape), p.requires_grad)


def yours(model: nn.Module, schedule: Callable[..., SyncSchedule] = SyncSchedule) -> Trainer:
    """`shard` of lab 05, with your units."""
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))
    pairs = hold(rank_device()), hold(rank_device())
    units = {module: YourUnit(name, params, mesh, pairs) for name, module, params in [*units_of(model, is_block)]}
    units[model].is_root = True
    engine = Engine([*units.values()], schedule([*units.values()]))
    model.register_forward_pre_hook(lambda *_: engine.begin())
    for module, unit in units.items():
        hook_forward(module, unit, engine)
    model.register_forward_hook(lambda *_: engine.end(), always_call=True)
    return Trainer(model, AdamW(model.parameters(), LEARNING_RATE))


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def flat(model: nn.Module) -> Trainer:
    """The rung `fsdp`: flat parameters, nothing ahead of time."""
    return RUNGS["fsdp"].build(model, 2)


def take_step(trainer: Trainer, batch: data.Batch, tell: Callable[[str], Any] = lambda stage: None) -> float:
    """One step on this rank's rows; `tell` gets the name of each stage as it ends. Returns the loss."""
    mine = data.shard(batch, dist.get_rank(), dist.get_world_size())
    loss = trainer.model(*data.to_device(mine, rank_device()))
    tell("forward")
    loss.backward()
    trainer.after_backward()
    tell("backward")
    trainer.optimizer.step()
    tell("step")
    trainer.optimizer.zero_grad()
    return float(loss.detach())


def measure(build: Callable[[nn.Module], Trainer]) -> dict[str, Any]:
    """Losses of three steps; bytes, calls and the curve of the last, on this rank."""
    with Ledger() as ledger:
        trainer = build(SETTINGS.model().to(rank_device()))
        ledger.watch(trainer.model, trainer.optimizer)
        losses = [take_step(trainer, batch) for batch in BATCHES[:2]]
        ledger.reset_peaks()
        stages = {"before": ledger.mark("before")}
        with comm.record() as calls:
            losses.append(take_step(trainer, BATCHES[2], lambda stage: stages.update({stage: ledger.mark(stage)})))
        return {
            "losses": losses,
            "stages": stages,
            "peak": ledger.peak.tags,
            "unsharded_peak": ledger.peak_of("unsharded"),
            "gradients_peak": ledger.peak_of("gradients", "communication"),
            "curve": ledger.curve(),
            "calls": calls,
        }


usage = {name: launch(measure, RANKS, build) for name, build in (("flat", flat), ("yours", yours))}
for rank in range(RANKS):
    print(f"rank {rank}: losses flat {usage['flat'][rank]['losses']}")
    print(f"        losses yours {usage['yours'][rank]['losses']}")
assert [each["losses"] for each in usage["flat"]] == [each["losses"] for each in usage["yours"]], "to the last bit"

# %% [markdown]
# Equal to the last bit: the same gradients are added in the same order, and elsewhere numbers are
# only copied.
#
# ## Measured: flat against per parameter (C26)
#
# One step on 2 ranks, rank 0. *Messages* are collectives, *sent* their bytes by the ring. *Copies*
# are the bytes that a unit writes beyond what collectives and autograd write, computed from the
# layout.

# %% tags=["C26"]
setting = closed_form_setting(RANKS)
predicted = {
    "flat": closed_form.fsdp(SIZES.units, setting),
    "yours": fsdp2_bytes(SIZES.shapes, SIZES.head, setting, ahead=0, limited=False, holds=False),
}
rows = [sum(plan_row([torch.Size(shape) for shape in unit], RANKS, 4)[:-1]) for unit in SIZES.shapes]
padded = [setting.padded(sum(unit)) for unit in SIZES.units]
once_more = sum(rows[1:])  # the root is gathered once, every block twice
copied = {
    "flat": sum(4 * sum(unit) for unit in SIZES.units),  # gradients, into the flat gradient
    "yours": 4 * (1 + RANKS) * (sum(rows) + once_more) + 4 * RANKS * sum(rows),
}
for name, held in usage.items():
    stage, calls = held[0]["stages"]["step"], held[0]["calls"]
    ops = [call.op for call in calls]
    print(
        f"{name:6} {ops.count('all_gather')} gathers, {ops.count('reduce_scatter')} reductions, "
        f"{sum(call.wire for call in calls):12,.0f} bytes sent, {copied[name]:12,} copied; holds "
        f"{stage['parameters']:,} + {stage['gradients']:,} + {stage['optimizer']:,}, unsharded at most "
        f"{held[0]['unsharded_peak']:,}"
    )
    expected = predicted[name]
    at_rest = f"{expected.parameters:,} + {expected.gradients:,} + {expected.optimizer:,}"
    print(f"       predicted: holds {at_rest}, unsharded at most {expected.unsharded_peak:,}")
    held_now = (stage["parameters"], stage["gradients"], stage["optimizer"])
    assert held_now == (expected.parameters, expected.gradients, expected.optimizer)
    assert held[0]["unsharded_peak"] == expected.unsharded_peak
gathers = [[call.op for call in each[0]["calls"]].count("all_gather") for each in usage.values()]
assert len(set(gathers)) == 1, "as many messages"

# %% [markdown]
# The same messages, a little more padding in each, and the copies: two for every gather and one for
# every reduction. The flat unit copies each gradient into its buffer, and nothing else. On a GPU
# the copies take a few percent of a gather's time, because memory is faster than any link. On a
# laptop, where gloo's messages are copies themselves, they are felt.

# %%
stages = usage["yours"][0]["stages"]
rest = predicted["yours"].parameters + predicted["yours"].optimizer
names = {"before": "before the step", "step": "after the optimizer"}
earlier = {names.get(stage, stage): sum(held.values()) for stage, held in usage["flat"][0]["stages"].items()}
plots.stages(
    {names.get(stage, stage): held for stage, held in stages.items()},
    predicted={
        names["before"]: rest,
        "backward": rest + predicted["yours"].gradients,
        names["step"]: rest + predicted["yours"].gradients,
    },
    earlier={"flat": earlier},
    title=f"Between steps your unit holds {rest / MIB:.2f} MiB, the flat one {earlier[names['before']] / MIB:.2f}",
    says="Bytes of a rank at the end of each stage of a step, before zero_grad; grey: the rung fsdp with flat "
    "parameters. What is added is padding.",
    lab="12",
)

# %%
plots.curve(
    usage["yours"][0]["curve"],
    title=f"Every gather needs a second buffer: 2 x {4 * RANKS * max(rows) / MIB:.2f} MiB for the largest unit",
    says="One step. A tooth of communication on each gather: the rows as they arrive. It is gone after the copy out. "
    "Grey: the flat unit, which is gathered in place.",
    lab="12",
    earlier={"flat": usage["flat"][0]["curve"]},
)

# %% [markdown]
# ## Measured: frozen parameters cost no gradient memory
#
# Fine-tuning often trains a few parameters of each block. Here only biases and norms are trained.
# The flat unit allocates a gradient for the whole unit as soon as one of its parameters has one
# (`use_orig_params=True`; without it, FSDP refuses a unit of both kinds). Yours packs what is trained.


# %%
def frozen(build: Callable[[nn.Module], Trainer], model: nn.Module) -> Trainer:
    """Only vectors are trained: biases and norms."""
    for p in model.parameters():
        p.requires_grad_(p.ndim == 1)
    return build(model)


def flat_in_modules(model: nn.Module) -> Trainer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of what is measured here
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy={Block}, use_orig_params=True)
    return Trainer(wrapped, AdamW(wrapped.parameters(), LEARNING_RATE))


BUILDS = {"flat": flat_in_modules, "yours": yours}
partly = {name: launch(measure, RANKS, partial(frozen, build))[0] for name, build in BUILDS.items()}
reduced = {}
for name, held in partly.items():
    reduced[name] = sum(call.wire for call in held["calls"] if call.op == "reduce_scatter")
    at_most = held["gradients_peak"]
    print(f"{name:6} gradients and messages at most {at_most:9,} bytes, {reduced[name]:11,.0f} sent to reduce them")
assert partly["yours"]["losses"] == partly["flat"]["losses"]
assert reduced["yours"] < reduced["flat"] / 20

# %% [markdown]
# (Messages of gathers are counted, too: they are what is left of yours.)
#
# ## Measured: names and checkpoints stay as they are
#
# No name was changed, so every tool that works with names works. torch's functions gather DTensors
# by themselves:


# %%
def into_a_plain_model() -> tuple[list[str], bool, bool]:
    """The state dict's names; whether they are a plain model's; whether a plain model with it computes the same."""
    model = SETTINGS.model().to(rank_device())
    trainer = yours(model)
    take_step(trainer, BATCHES[0])
    names = list(model.state_dict())
    content = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    batch = data.to_device(BATCHES[1], rank_device())
    loss = float(model(*batch).detach())
    plain = SETTINGS.model()
    if not content:  # only rank 0 gets it
        return names, names == list(plain.state_dict()), True
    plain.load_state_dict(content)
    return names, names == list(plain.state_dict()), float(plain.to(rank_device())(*batch).detach()) == loss


for rank, (found_names, as_plain, same_loss) in enumerate(launch(into_a_plain_model, RANKS)):
    print(f"rank {rank}: {found_names[0]} ... {found_names[-1]}; a plain model's: {as_plain}; same loss: {same_loss}")
    assert as_plain
    assert same_loss

# %% [markdown]
# ## Measured: what Python costs
#
# For each parameter there is now a DTensor, a piece, a column, a memory. The next cell runs the
# package's two units, and torch's, with tiny tensors on a process group whose messages cost
# nothing. What is left is the host's time.

# %%
costs = overhead.measure(overhead.Settings(units=12, steps=15))
for name in ("our-fsdp", "our-fsdp2", "torch-fsdp1", "torch-fsdp2"):
    print(f"{name:12} {1e6 * costs[name].median:6.0f} µs of the host per unit and step")

# %% [markdown]
# Host time is hidden while the device is busy. It shows when layers are small.
#
# ## On paper: hold against `record_stream`
#
# Lab 08 replayed a step on the model of a GPU. This one is an A100 with arithmetic 400 times and
# memory 40 times slower, so that the host of a small model runs far ahead. There are three ways to
# give back the gathers' buffers: `record_stream` without a limiter, with one (k = 2), and your way,
# held. *Active* includes memory that the program has freed and cannot use again yet.

# %%
GPU = Settings(ranks=RANKS, layers=8, width=128)
SLOW = replace(
    A100,
    name="an A100, slowed down",
    flops={dtype: flops / 400 for dtype, flops in A100.flops.items()},
    memory_bandwidth=A100.memory_bandwidth / 40,
    issue=20e-6,
)


def on_paper(model: nn.Module, schedule: Any, keeper: Any) -> Trainer:
    """The package's `fully_shard`, block by block."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    use_schedule(model, schedule, keeper)
    return Trainer(model, AdamW(model.parameters(), LEARNING_RATE))


def limited(model: nn.Module) -> Trainer:
    return RUNGS["fsdp2"].build(model, 2)


WAYS: dict[str, Callable[[nn.Module], Trainer]] = {
    "recorded": partial(on_paper, schedule=PrefetchSchedule, keeper=Recorded),
    "recorded, k = 2": limited,
    "held": partial(on_paper, schedule=PrefetchSchedule, keeper=Held),
}


def programs() -> dict[str, Any]:
    """Two recorded steps for each way."""
    batch = next(GPU.batches())
    return {name: record_steps(partial(build, GPU.model()), batch) for name, build in WAYS.items()}


replayed = {name: replay(program, SLOW) for name, program in launch(programs, RANKS, backend="gloo")[0].items()}
print(f"{'way':18}{'allocated':>11}{'active':>9}{'reserved':>10}  MiB at most   seconds (model)")
for name, run in replayed.items():
    peaks = [run.peak(what) / MIB for what in ("allocated", "active", "reserved")]
    print(f"{name:18}{peaks[0]:11.2f}{peaks[1]:9.2f}{peaks[2]:10.2f}{run.seconds:29.4f}")
    assert not run.hazards
behind = {name: run.peak("active") - run.peak("allocated") for name, run in replayed.items()}
assert behind["held"] == 0 < behind["recorded, k = 2"] < behind["recorded"]
assert replayed["held"].seconds <= 1.02 * replayed["recorded"].seconds

# %%
plots.timeline(
    {name: run for name, run in replayed.items() if name != "recorded"},
    title=f"Held, {behind['held'] / MIB:.0f} MiB wait for a reader; recorded and limited to 2, "
    f"{behind['recorded, k = 2'] / MIB:.2f}",
    says="Lanes of one rank over the last step. With a limiter the host stops to wait for frees. Without it, and with "
    "buffers held, it issues the whole step, and the streams wait for each other.",
    lab="12",
)

# %% [markdown]
# No way has a hazard. Held buffers take no longer than recorded ones, and need no limiter, because
# nothing piles up: that is why FSDP2 has no `limit_all_gathers`. The limiter makes the host wait,
# which costs time here.
#
# ## What is still missing
#
# `minifsdp.fsdp2` has the rest of `fully_shard`: other dtypes for parameters and gradients, offload,
# replicas on a 2-D mesh, `reshard_after_forward` as a number of ranks, dimensions other than 0,
# and extensions by which a tensor subclass decides what is gathered (float8, for instance).
# `docs/parity.md` compares it with torch's, call by call.
#
# ## What to remember
#
# 1. A parameter is cut along dimension 0, as by `torch.chunk`. The last ranks may have nothing.
# 2. One message per unit needs rank order, a computation needs parameter order. Copy-in and
#    copy-out go from one to the other; a flat parameter needs neither.
# 3. Every parameter is padded by itself, and a row to 16 bytes. Sizes that are multiples of N are
#    not padded.
# 4. Names, shapes, dtypes, frozen parameters and checkpoints stay a plain model's, because a
#    parameter stays a parameter.
# 5. A buffer that another stream reads last can be held until its owner waits for the reader. Then
#    neither `record_stream` nor a limiter is needed.
#
# ## Questions
#
# **1. Why are the columns as wide on every rank, though the last ranks have less?**
# <details><summary>Answer</summary>An all-gather moves equal shares, and every rank has to know
# where the others' columns begin. With equal rows it is arithmetic; otherwise it would be a message
# of its own.</details>
#
# **2. A bias of 1 element is sharded over 64 ranks. What does each rank hold, and what does it send?**
# <details><summary>Answer</summary>Rank 0 holds the element, the others an empty tensor. Each sends a
# column of 1 element, 63 of them padding. Together with the unit's other parameters this is one
# message, so it costs bytes and no latency.</details>
#
# **3. Could the copy out be avoided by gathering every parameter with a message of its own?**
# <details><summary>Answer</summary>Yes: a parameter cut along dimension 0 would arrive in order. But
# a block has 12 parameters, so there would be 12 messages instead of 1, most of them tiny (lab
# 04).</details>
#
# **4. Why does a flat parameter allocate gradients for frozen parameters, and this unit none?**
# <details><summary>Answer</summary>In a flat gradient each parameter has a fixed place, so that rank
# r's shard of the gradient lies like its shard of the parameters. Here gradients are delivered
# parameter by parameter, so the packed buffer may have other columns than the gathered
# one.</details>
#
# **5. When is it safe to free a held buffer without an event?**
# <details><summary>Answer</summary>If the reader is queued on the owner's own stream: one stream runs
# in order. That is the case without overlap, and on CPU, where the copy is over when it
# returns.</details>
#
# ## Further reading
#
# - torch: `torch/distributed/fsdp/_fully_shard` (`_fsdp_collectives.py` has the copies,
#   `_fsdp_param_group.py` the held buffers).
# - The design: [pytorch issue 114299](https://github.com/pytorch/pytorch/issues/114299), *Per-Parameter-Sharding FSDP*.
# - torchtitan, which trains with it: [arXiv 2410.06511](https://arxiv.org/abs/2410.06511).
# - minifsdp: `fsdp2/cut.py` (12.1, 12.2), `fsdp2/gather.py` (12.3, 12.4), `fsdp2/gradients.py` (12.5), `fsdp2/held.py`
#   (12.6).
