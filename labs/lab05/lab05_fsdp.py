# ---
# jupyter:
#   minifsdp:
#     lab: "05"
#     title: FSDP
#     minutes: 95
#     ranks: 4
# ---

# %% [markdown]
# # Lab 05: fully sharded data parallelism
#
# ZeRO-2 (lab 03) shards the optimizer state and the gradients. But every rank still holds all parameters unsharded. A
# rank needs all parameters, but not all at the same time. While one block is being computed, the others can stay
# sharded. FSDP gathers a *unit* of parameters just before the unit is computed, in the forward pass and again in the
# backward pass, and frees it immediately afterwards.
#
# ![The life of a unit in one step: its parameters are gathered, freed, gathered again and freed,
# and its gradient is reduced to a shard](../slides/figures/fsdp-life.svg)
#
# *From [lecture 3, Flat parameters and FSDP](../slides/fsdp.md), which comes before this lab.*
#
# **After this lab, you will be able to**
#
# - explain when each autograd hook fires, and place the gather, the free and the reduction correctly;
# - free and reallocate a tensor's memory while views and saved tensors refer to it, without an autograd error;
# - predict a rank's peak memory to the byte, and the number of collectives in a step;
# - choose between FULL_SHARD and SHARD_GRAD_OP, and state the traffic of each;
# - explain four common mistakes of FSDP users.
#
# **You need** lab 01 (all-gather, reduce-scatter, `wait()`), lab 03 (ZeRO's sharding) and lab 04
# (the flat parameter).
#
# **Time** 95 minutes. **Runs** on a laptop (gloo, 2 and 4 processes), on one GPU, or on a GPU node
# (NCCL, one rank per GPU). **Memory** at most 18 MiB of tensors per rank (measured below); each process takes a few
# hundred MiB, mostly for torch itself.

# %% tags=["setup"]
# set-up
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.course.workshop import exercise, outcome, predict
from minifsdp.flat_param import FlatParameter, ParamPlaces, find_parameters

# %% [markdown]
# ## What you build
#
# In minifsdp, this function puts all parts of FSDP together. `FlatParameter` is the class from lab 04. A `FlatUnit`
# gathers, frees and reduces (5.2 to 5.4), and the `Engine` registers the hooks (5.1 and 5.5), which notify a
# *schedule*. The schedule decides when the units gather, free and reduce; `RateLimitedSchedule` is the one that you
# build in labs 06 to 08. The remaining names are glue code: `cut` finds the modules that become units, and `Plan`
# issues a unit's collectives. Read the function for its structure now, and again when you have finished this lab.

# %%
import inspect

from minifsdp.fsdp.shard import shard

signature, _, body = inspect.getsource(shard).split('"""')
print(signature.rstrip() + body)

# %% [markdown]
# ## One unit per block, and a root
#
# The model in this lab is the course's GPT. N divides none of its sizes. Each block becomes a unit. The parameters
# outside the blocks (embeddings, the last norm, the head) form the *root* unit. The flat parameter of lab 04 turns each
# unit into one buffer, padded to a multiple of N and split into N shards.

# %%
import tempfile
import time
from pathlib import Path

from torch.profiler import record_function

from minifsdp import FullyShardedDataParallel
from minifsdp.cost import data_parallel as closed_form
from minifsdp.course.ladder import data
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import LEARNING_RATE, RUNGS, Trainer, closed_form_setting, sizes_of
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.gpt import Block
from minifsdp.instruments import plots
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.link.emulated import let_communication_go_first, parse_link
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.timeline import overlap, read_trace
from minifsdp.instruments.watch.trace import record_trace

RANKS = 2
SETTINGS = Settings(ranks=RANKS, batch=2, layers=5, width=105, context=16)
BATCHES = list(SETTINGS.batches())  # the same on every rank; each takes its rows
SIZES = sizes_of(SETTINGS.model())  # elements of each parameter and of each unit, the root first
UNITS = ["root", *(f"block {number}" for number in range(SETTINGS.layers))]


def unit_table(units: list[list[int]], names: list[str], ranks: int) -> None:
    """Print each unit's number of elements, and the padding that makes it divisible by N."""
    print(f"{'unit':9}{'elements':>11}{'padding':>9}")
    for name, unit in zip(names, units, strict=True):
        print(f"{name:9}{sum(unit):11,}{-sum(unit) % ranks:9}")


unit_table(SIZES.units, UNITS, RANKS)
psi = sum(SIZES.parameters)
print(f"Ψ = {psi:,} elements: parameters {4 * psi:,} bytes on every rank of DDP, ZeRO-1 and ZeRO-2")

# %% [markdown]
# ## 5.1 When each hook fires
#
# *15 minutes, medium*
#
# FSDP does not change the model's code. Hooks report five events: a module is about to run, the module has run, its
# backward pass begins, a gradient is complete, and the entire backward pass ends. Write a function that records these
# five events:
#
# | event | when | registered with |
# |---|---|---|
# | `pre-forward` | the module is called | `module.register_forward_pre_hook(f)`, `f(module, args)` |
# | `post-forward` | the module returns | `module.register_forward_hook(f)`, `f(module, args, output)` |
# | `output gradient` | the module's backward pass begins | `output.register_hook(f)`, `f(gradient)` |
# | `gradient of NAME` | the gradient is complete, in `.grad` | `p.register_post_accumulate_grad_hook(f)`, `f(p)` |
# | `end of backward` | the backward pass ends | `Variable._execution_engine.queue_callback(f)`, `f()` |
#
# The last row is not a hook but a callback for one backward pass of the entire model. You can queue it only while that
# backward pass is running. If a module or tensor hook returns a value other than None, this value replaces the input,
# output or gradient.
#
# Predict: a module with 2 linear layers, each with a weight and a bias, is called **twice** in one forward pass. How
# many times is `gradient of ...` recorded in the backward pass?

# %%
predict("5.1", ..., "reports of `gradient of ...` in one backward, 4 parameters, module called twice")


# %% tags=["exercise-5.1"]
from .ex1_watch import watch


# %%
def twice() -> list[str]:
    """Return the events of a module called twice."""
    events: list[str] = []
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    watch(module, events.append)
    module(module(torch.ones(2, 3))).sum().backward()
    return events


events = twice()
slips = {"one per use: autograd adds up the uses of a leaf first, and the hook runs once, on the sum": 8}
outcome("5.1", sum(event.startswith("gradient of") for event in events), slips=slips)
print(*events, sep="\n")

# %% [markdown]
# The two outputs receive their gradients at different times: the output of the last call is first. Each parameter
# receives its gradient once, after both calls have contributed. So a unit's backward pass *begins* with the gradient of
# an output and *ends* with the gradient of its last parameter (*leaf*, in autograd's terms). A module's own backward
# hook does not mark either point reliably:
#
# ### Break it: a hook on the module's backward pass
#
# A full backward hook (`register_full_backward_hook`) runs when the gradients of the module's *inputs* are ready. But
# the inputs of a language model are tokens, which have no gradient. In this case, torch runs the hook when the
# gradients of the *outputs* are ready. How many parameters have a gradient at that point?

# %%
import warnings

model, seen = SETTINGS.model(), []
model.register_full_backward_hook(lambda *_: seen.append(sum(p.grad is not None for p in model.parameters())))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about this too
    model(*BATCHES[0]).backward()
print(f"{seen[0]} of {len(SIZES.parameters)} parameters have their gradient when the root's full backward hook runs")

# %% [markdown]
# A reduction issued at that point would have no gradients to reduce.
#
# ### A storage can be emptied and filled again
#
# A tensor describes a *storage* by its shape and strides. Its views share the storage, and so do the tensors that
# autograd saves for the backward pass. `untyped_storage().resize_(0)` frees the memory of all these tensors.
# `device.free` does exactly this, and `device.allocate` allocates the memory again. (On a GPU, `device.free` first
# calls `record_stream`: the memory may be reused only after the kernels already queued on the current stream have run.
# Lab 06 explains this call.)


# %% tags=["shown"]
def bytes_behind(*tensors: Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


full = device.empty(12, torch.float32, "unsharded", torch.device("cpu"))
full.data.fill_(1.0)
weight, bias = (part.view(shape) for part, shape in zip(full.split([8, 4]), [(4, 2), (4,)], strict=True))
leaf = nn.Parameter(weight)
x = torch.ones(1, 2, requires_grad=True)
y = nn.functional.linear(x, leaf)  # autograd saves the leaf to compute the gradient of x
print("filled: bytes behind full, its views, the leaf:", bytes_behind(full, weight, bias, leaf))
device.free(full)
print("freed:  bytes behind full, its views, the leaf:", bytes_behind(full, weight, bias, leaf), tuple(leaf.shape))
try:
    nn.functional.linear(x, leaf)
except RuntimeError as error:
    print("used while freed:", str(error).split(":")[0], "...", str(error)[-43:])
device.allocate(full)
full.data.fill_(3.0)  # different values, to show that backward reads these
y.sum().backward()
print("refilled: the gradient of x read the new values:", x.grad.tolist())

# %% [markdown]
# Some operators, such as this one, check that the memory exists; others read from address 0, and the process crashes.
# To prevent the use of a parameter while it is freed, minifsdp replaces the parameter with a placeholder that raises an
# error. (The unit of this lab does not.)
#
# Why `full.data`? Autograd counts the changes to its saved tensors, and raises an error in the backward pass if a saved
# tensor has changed. A gather overwrites every byte, but with the same values as before. `.data` is an alias of the
# same storage with its own *version counter*:

# %% tags=["shown"]
for how in ("full", "full.data"):
    leaf = nn.Parameter(weight)
    y = nn.functional.linear(x, leaf)
    device.free(full)
    device.allocate(full)
    before = leaf._version
    (full if how == "full" else full.data).fill_(3.0)
    print(f"filled through {how}: {leaf._version - before} changes counted")
    try:
        y.sum().backward()
        print("    backward runs")
    except RuntimeError as error:
        print_wrapped(f"    backward says: {str(error).partition(':')[0]}")

# %% [markdown]
# ## 5.2 Gather
#
# *8 minutes, medium*
#
# `flat` is lab 04's flat parameter (`minifsdp.FlatParameter`). You need three of its attributes: `flat.full` is the
# unsharded buffer [P], which is initially not allocated; `flat.views` are the parameters as views of this buffer;
# `flat.shard` is this rank's shard [P / N], which the optimizer updates. The shard is a Parameter, so autograd would
# record the collective, which it must not do. Therefore, pass the shard's `.data` as well. Write the function that
# unshards the unit.
#
# Predict: how many bytes does the `flat.full` of one block take?

# %%
predict("5.2", ..., "bytes of one block's `flat.full` on 2 ranks, while it is gathered")


# %% tags=["exercise-5.2"]
from .ex2_gather import gather


# %%
def gather_a_block() -> tuple[int, bool]:
    """Return the bytes that a gather allocates on this rank, and whether all parameters have their values."""
    group = comm.world()
    block = SETTINGS.model().to(rank_device()).blocks[0]
    originals = [p.detach().clone() for p in block.parameters()]
    with Ledger() as ledger:
        flat = FlatParameter(find_parameters(block), group.rank(), group.size())
        gather(flat, group)
        equal = all(torch.equal(a, b) for a, b in zip(flat.views, originals, strict=True))
        return ledger.live()["unsharded"], equal


(unsharded, _), *_ = found = launch(gather_a_block, RANKS)
block_bytes, matrices = 4 * sum(SIZES.units[1]), 4 * 12 * SETTINGS.width**2
slips = {"without the padding": block_bytes, "the shard": unsharded // RANKS}
alone = "the matrices, 12 width² elements; a block has 13 width more, in biases and norms"
outcome("5.2", unsharded, ranks=RANKS, slips=slips | {alone: matrices})
for rank, (held, equal) in enumerate(found):
    print(f"rank {rank}: {held:,} bytes gathered, equal to the block's parameters: {equal}")
assert all(equal for _, equal in found)

# %% [markdown]
# ## 5.3 Free
#
# *5 minutes, easy*
#
# This is the shortest function, and a mistake in it is easy to miss: everything runs and the losses are correct, but
# every rank keeps the full model. Predict: how many bytes of one block's parameters remain on a rank after the free?

# %%
predict("5.3", ..., "bytes of one block's parameters that a rank of 2 holds while the block is freed")


# %% tags=["exercise-5.3"]
from .ex3_free import free


# %%
def there_and_back() -> list[dict[str, int]]:
    """Return the bytes of a block's parameters: initially, gathered, freed, gathered, freed."""
    group, seen = comm.world(), []
    with Ledger() as ledger:
        block = SETTINGS.model().to(rank_device()).blocks[0]
        flat = FlatParameter(find_parameters(block), group.rank(), group.size())
        ledger.tag(flat.shard, "parameters")
        for verb in (None, gather, free, gather, free):
            if verb is not None:
                verb(flat, group) if verb is gather else verb(flat)
            live = ledger.live()
            seen.append({tag: live[tag] for tag in ("parameters", "unsharded")})
    return seen


moments = launch(there_and_back, RANKS)[0]
for name, live in zip(("at first", "gathered", "freed", "gathered", "freed"), moments, strict=True):
    print(f"{name:9} shard {live['parameters']:,}, unsharded {live['unsharded']:,} bytes")
slips = {"nothing: the shard stays, it is all there is": 0, "the whole block": unsharded, alone: matrices // RANKS}
outcome("5.3", sum(moments[-1].values()), ranks=RANKS, slips=slips)

# %% [markdown]
# ## 5.4 Reduce the gradient
#
# *10 minutes, medium*
#
# On every rank, the backward pass computes the unit's unsharded gradient for that rank's samples, so there are N
# different gradients with P elements each. A rank's optimizer needs only one shard of their mean. The collective that
# computes it is a reduce-scatter. With the ring algorithm (lab 01), each rank sends (N - 1) / N of the padded buffer.
#
# Predict: how many bytes does each of **four** ranks send for one block's gradient? (The padding depends on N.)

# %%
predict("5.4", ..., "bytes that a rank of 4 sends to reduce-scatter one block's gradient")


# %% tags=["exercise-5.4"]
from .ex4_reduce_gradient import reduce_gradient


# %%
def reduce_a_block() -> tuple[int, float, list[float]]:
    """Return bytes sent, and first elements: own gradient, the shard's gradient after one and two reductions."""
    group = comm.world()
    block = SETTINGS.model().to(rank_device()).blocks[0]
    flat = FlatParameter(find_parameters(block), group.rank(), group.size())
    means = []
    for _ in range(2):
        gradient = device.empty(flat.full.numel(), torch.float32, "gradients", rank_device())
        own = gradient.fill_(float(group.rank()))[0].item()
        with comm.record() as calls:
            reduce_gradient(flat, gradient, group)
        means.append(flat.shard.grad[0].item())
    return round(sum(call.wire for call in calls)), own, means


reduced = launch(reduce_a_block, 4)
slips = {
    "an all-reduce sends that": 2 * reduced[0][0],
    "the whole gradient: a rank need not send its own shard": 534_672,
    alone: matrices * 3 // 4,
}
outcome("5.4", reduced[0][0], ranks=4, slips=slips)
for rank, (_, own, means) in enumerate(reduced):
    print(f"rank {rank}: own gradient {own}, shard's after one reduction {means[0]}, after two {means[1]}")
assert all(means == [1.5, 3.0] for *_, means in reduced)

# %% [markdown]
# The results of two reductions are added, like the gradients of two backward passes on one device. The padding matters
# even though it belongs to no parameter: its gradient is included in the optimizer state and in the norm for gradient
# clipping.
#
# ## 5.5 Attach the hooks
#
# *25 minutes, hard*
#
# The next cell defines a unit with your functions. It replaces the parameters in the modules by *leaves*: Parameters
# that are views of `flat.full`, one for each original parameter. They remain the same objects throughout training. The
# method `take_gradient` is provided: it moves a leaf's gradient into the unit's unsharded gradient.


# %%
class Pieces(NamedTuple):
    """Your functions from this lab that a unit calls."""

    gather: Callable[[FlatParameter, Group], None]
    free: Callable[[FlatParameter], None]
    reduce_gradient: Callable[[FlatParameter, Tensor, Group], None]
    attach: Callable[[nn.Module, Any], None]


class LabUnit:
    """Parameters that are gathered, freed and reduced together.

    Attributes:
        flat: the flat parameter; the optimizer updates its shard.
        leaves: the Parameters that the modules compute with, each a view of `flat.full`.
        is_root: whether this is the outermost unit.
        events: a log of all calls, shared by all units of a model.
    """

    def __init__(self, name: str, params: ParamPlaces, pieces: Pieces, events: list[str], is_root: bool) -> None:
        self.name, self.pieces, self.events, self.is_root = name, pieces, events, is_root
        self.group = comm.world()
        self.flat = FlatParameter(params, self.group.rank(), self.group.size())
        self.leaves = [nn.Parameter(view) for view in self.flat.views]
        self._index = {leaf: index for index, leaf in enumerate(self.leaves)}
        self._gradient: Tensor | None = None
        for leaf, places in zip(self.leaves, self.flat.places, strict=True):
            for place in places:  # no longer one of the module's parameters, so that no optimizer finds it
                del place.module._parameters[place.attribute]
                place.module.__dict__[place.attribute] = leaf

    @property
    def whole(self) -> bool:
        return device.is_allocated(self.flat.full)

    @property
    def held(self) -> tuple[str, str]:
        """This rank's shard of the parameters and of their gradient, for the explorer."""
        gradient = "whole" if self._gradient is not None else "none" if self.flat.shard.grad is None else "shard"
        return "whole" if self.whole else "shard", gradient

    def gather(self) -> None:
        self.events.append(f"gather {self.name}")
        self.pieces.gather(self.flat, self.group)

    def free(self) -> None:
        self.events.append(f"free {self.name}")
        self.pieces.free(self.flat)

    def take_gradient(self, leaf: Tensor) -> None:
        """Move `leaf.grad` into the unit's unsharded gradient [P]."""
        if self._gradient is None:
            self._gradient = device.empty(self.flat.full.numel(), leaf.dtype, "gradients", leaf.device)
        self.flat.unflatten(self._gradient)[self._index[leaf]].copy_(leaf.grad)
        leaf.grad = None

    def reduce_gradient(self) -> None:
        self.events.append(f"reduce {self.name}")
        gradient, self._gradient = self._gradient, None
        self.pieces.reduce_gradient(self.flat, gradient, self.group)


def shard_model(model: nn.Module, pieces: Pieces, blocks: list[nn.Module] | None = None) -> list[LabUnit]:
    """Make every block a unit and the remainder the root; the shards become the model's parameters."""
    blocks = list(model.blocks) if blocks is None else blocks
    events: list[str] = []
    units = [LabUnit("root", find_parameters(model, skip=blocks), pieces, events, is_root=True)]
    for number, block in enumerate(blocks):
        units.append(LabUnit(f"block {number}", find_parameters(block), pieces, events, is_root=False))
    for module, unit in zip([model, *blocks], units, strict=True):
        module.register_parameter("flat_param", unit.flat.shard)
        pieces.attach(module, unit)
    return units


# %% [markdown]
# The missing part is a *schedule*, which calls these functions. For a root and two blocks, one step is as follows:
#
#     forward    gather root | gather 0, compute, free 0 | gather 1, compute, free 1
#     backward   gather 1, compute, free 1, reduce 1 | gather 0, compute, free 0, reduce 0 | free root, reduce root
#
# - A block is freed after its forward pass and gathered again when its backward pass begins, that is, when its output
#   receives a gradient.
# - Its backward pass ends with the gradient of its last leaf. Until then, an operation may still read its parameters.
#   When a leaf's gradient is complete, call `unit.take_gradient(leaf)`.
# - The root's backward pass begins directly after its forward pass, so the root stays unsharded in between. Otherwise,
#   it is a unit like the others: its backward pass ends with the gradient of its last leaf.
# - **The parameters are freed before the gradient is reduced.** A common mistake is the order "gather, compute,
#   reduce-scatter, free" in the backward pass. The reduction reads only the gradient, so with this order, the
#   parameters would occupy memory unnecessarily during the reduction. torch also frees first (`_post_backward_hook` in
#   `torch/distributed/fsdp/_runtime_utils.py` calls `_post_backward_reshard`, then `_reduce_grad`).
# - A forward pass under `torch.no_grad()` has no backward pass, so all units are freed after it, including the root.
#
# Predict: this lab's model has 6 units. How many all-gathers does one step issue?

# %%
predict("5.5", ..., "all-gathers of one step, 6 units")


# %% tags=["exercise-5.5"]
from .ex5_attach import attach

# %%
PIECES = Pieces(gather, free, reduce_gradient, attach)


def lab_fsdp(pieces: Pieces = PIECES, settings: Settings = SETTINGS) -> Trainer:
    """Your FSDP and its optimizer, built after sharding."""
    model = settings.model().to(rank_device())
    model.units = shard_model(model, pieces)  # a list, so they are not submodules
    return Trainer(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE))


def one_process() -> Trainer:
    model = SETTINGS.model().to(rank_device())
    return Trainer(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE))


def loss_of(model: nn.Module, batch: data.Batch) -> Tensor:
    """Return the loss of this rank's rows of a batch."""
    tokens, targets = data.shard(batch, dist.get_rank(), dist.get_world_size())
    return model(tokens.to(rank_device()), targets.to(rank_device()))


def take_step(trainer: Trainer, batch: data.Batch, tell: Callable[[str], Any] = lambda stage: None) -> Tensor:
    """Forward, backward, optimizer; calls `tell` after each."""
    with record_function("forward"):
        loss = loss_of(trainer.model, batch)
    tell("forward")
    with record_function("backward"):
        loss.backward()
        trainer.after_backward()
    tell("backward")
    with record_function("optimizer"):
        trainer.optimizer.step()
    tell("step")
    trainer.optimizer.zero_grad()
    return loss.detach()


# %% [markdown]
# ### Measured: it trains like a single process
#
# The cell prints the mean of all ranks' losses next to the loss of a single process with the full batch.


# %%
def losses(build: Callable[[], Trainer]) -> list[float]:
    trainer = build()
    return [take_step(trainer, batch).item() for batch in BATCHES[:5]]


(alone,) = launch(losses, 1, one_process)
ours = [sum(each) / RANKS for each in zip(*launch(losses, RANKS, lab_fsdp), strict=True)]
for number in range(5):
    print(f"step {number}: one process {alone[number]:.4f}, {RANKS} ranks of your FSDP {ours[number]:.4f}")
assert all(abs(a - b) < 1e-4 for a, b in zip(alone, ours, strict=True)), "it does not train like one process"

# %% [markdown]
# ### Measured: gathered twice, freed twice, reduce-scattered
#
# The cell prints the events that your hooks record in one step, and counts the collectives.


# %% tags=["C11"]
def follow(pieces: Pieces) -> tuple[list[str], list[comm.Call], list[float]]:
    """Return the events and collectives of a step, and the norm of this rank's own gradient of each unit."""
    own: list[float] = []

    def spy(flat: FlatParameter, gradient: Tensor, group: Group) -> None:
        own.append(gradient[: flat.numel].norm().item())
        pieces.reduce_gradient(flat, gradient, group)

    model = SETTINGS.model().to(rank_device())
    units = shard_model(model, pieces._replace(reduce_gradient=spy))
    events = units[0].events
    with comm.record() as calls:
        loss = loss_of(model, BATCHES[0])
        events.append("| forward")
        loss.backward()
        events.append("| backward")
    return list(events), calls, own


def print_steps(events: list[str]) -> None:
    for stage in ("forward", "backward"):
        end = events.index(f"| {stage}")
        print_wrapped(f"{stage}: {', '.join(events[:end]).replace('block ', '')}")
        events = events[end + 1 :]


(events, calls, own), (_, _, others) = launch(follow, RANKS, PIECES)
print_steps(events)
ops = [call.op for call in calls]
gathers, reductions, number = ops.count("all_gather"), ops.count("reduce_scatter"), len(UNITS)
slips = {"the root is gathered once": 2 * number, "forward alone; backward needs them too": number}
outcome("5.5", gathers, slips=slips)
print(f"all-gathers: expected 2U - 1 = {2 * number - 1}, measured {gathers}")
print(
    f"reduce-scatters: expected U = {number}, measured {reductions}; "
    f"other collectives: expected 0, measured {len(ops) - gathers - reductions}"
)
different = sum(a != b for a, b in zip(own, others, strict=True))
print(f"units whose unsharded gradients differ between the ranks: expected {number}, measured {different}")
assert (gathers, reductions, len(ops), different) == (2 * number - 1, number, 3 * number - 1, number)
for name in UNITS:
    reduced_at = events.index(f"reduce {name}")
    assert max(at for at, event in enumerate(events) if event == f"free {name}") < reduced_at, f"{name}: freed too late"

# %% [markdown]
# The next cell shows the same step with a slider: drag it, or use the arrow keys. Each row is a unit. A gathered unit
# is light blue, and this rank's shard is a thin line. Watch one block: it is unsharded twice, and only while it is
# being computed.

# %% tags=["nbval-ignore-output"]
from functools import partial

from minifsdp.course.ladder.measure import log_step
from minifsdp.instruments.explore.page import show


def log_mine() -> dict[str, Any]:
    return log_step(lab_fsdp, data.shard(BATCHES[0], dist.get_rank(), RANKS))


show("One step of your FSDP", f"GPT of {psi:,} parameters on {RANKS} ranks.", {"yours": launch(log_mine, RANKS)})

# %% [markdown]
# Each rank holds a different shard of the same parameters, so an all-gather puts them together. Each rank has
# *different* gradients for the same elements, so they must be reduced. A rank keeps only a shard of the result, so the
# reduction is a reduce-scatter.
#
# ### Measured: still data parallelism
#
# FSDP shards *storage*. A rank computes on its own samples with unsharded parameters, as in DDP; no matmul is split.
# With tensor parallelism, every rank would keep a shard of the weight and compute with this shard, and all ranks would
# process the same samples.


# %% tags=["C13"]
def look_inside() -> dict[str, tuple[int, ...]]:
    """Return the shapes at a linear layer while it is computing."""
    seen = {}
    model = SETTINGS.model().to(rank_device())
    shard_model(model, PIECES)
    block = model.blocks[0]

    def look(module: nn.Module, args: Any) -> None:
        seen["input, samples x tokens x width"] = tuple(args[0].shape)
        seen["weight inside forward"] = tuple(module.weight.shape)
        seen["bytes of its storage inside forward"] = (module.weight.untyped_storage().nbytes(),)

    block.qkv.register_forward_pre_hook(look)
    loss_of(model, BATCHES[0]).backward()
    seen["bytes of its storage after backward"] = (block.qkv.weight.untyped_storage().nbytes(),)
    seen["the block's shard in the optimizer"] = tuple(block.flat_param.shape)
    return seen


width = SETTINGS.width
inside = launch(look_inside, RANKS)[0]
for what, shape in inside.items():
    print(f"{what}: {list(shape)}")
rows = SETTINGS.batch
print(f"expected of data parallelism: the unsharded weight {[3 * width, width]}, {rows // RANKS} of {rows} samples")
print(f"tensor parallelism would have {[-(-3 * width // RANKS), width]} of it on rank 0, and all {rows} samples")
assert inside["weight inside forward"] == (3 * width, width)

# %% [markdown]
# ### Measured: the same gradients as torch's FSDP
#
# The next cell compares the gradients of the first step, unit by unit: those from your FSDP, from minifsdp's and
# torch's `FullyShardedDataParallel`, and from a single-process run. On two ranks, computing a mean takes one addition
# and one halving. Rounding errors cannot differ, so the gradients of the three FSDP implementations are bitwise equal.


# %%
def gradients_of(kind: str) -> list[Tensor]:
    """Return this rank's gradient shard of each unit."""
    model = SETTINGS.model().to(rank_device())
    if kind == "yours":
        units = shard_model(model, PIECES)
        shards = [unit.flat.shard for unit in units]
    elif kind == "minifsdp":
        model = FullyShardedDataParallel(model, auto_wrap_policy={Block})
        shards = [wrapped.params[0] for wrapped in FullyShardedDataParallel.fsdp_modules(model)]
    else:
        warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives that its own FSDP1 uses
        from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        model = TorchFSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=rank_device())
        shards = [wrapped._flat_param for wrapped in TorchFSDP.fsdp_modules(model)]
    loss_of(model, BATCHES[0]).backward()
    return [shard.grad.detach().cpu() for shard in shards]


def gradients() -> list[list[Tensor]]:
    return [gradients_of(kind) for kind in ("yours", "minifsdp", "torch")]


def alone() -> Tensor:
    """Return the gradients of a single process with all rows, unit by unit."""
    model = SETTINGS.model().to(rank_device())
    loss_of(model, BATCHES[0]).backward()
    units = [find_parameters(model, skip=model.blocks), *(block.parameters() for block in model.blocks)]
    return torch.cat([p.grad.flatten() for unit in units for p in unit]).cpu()


def joined(ranks: list[list[Tensor]]) -> Tensor:
    """Return the gradients of all units one after another, without padding."""
    units = [torch.cat(shards) for shards in zip(*ranks, strict=True)]
    return torch.cat([unit[: sum(sizes)] for unit, sizes in zip(units, SIZES.units, strict=True)])


(whole,) = launch(alone, 1)  # on a GPU, where the ranks are
yours_joined, *others = (joined(ranks) for ranks in zip(*launch(gradients, RANKS), strict=True))
why = "a leaf's gradient came after the reduction: does your unit end when the last of its leaves has come?"
for kind, other in zip(("minifsdp", "torch"), others, strict=True):
    print(f"equal to {kind}'s FSDP bit for bit: {torch.equal(yours_joined, other)}")
    assert (yours_joined - other).abs().max() <= 1e-6 * other.abs().max(), f"not {kind}'s gradients; {why}"
close = bool((yours_joined - whole).abs().max() <= 1e-5 * whole.abs().max())
print(f"equal to one process within 1e-5 of the largest gradient: {close}")
assert close, f"not one process's gradients; {why}"

# %% [markdown]
# ### Measured: a rank never holds the full model, even at its peak
#
# Let R and B be the padded sizes of the root and of the largest block in bytes. The predictions are:
#
# - between steps: the parameter shards and the optimizer-state shards (optimizer state is never gathered);
# - unsharded parameters: at most R + B;
# - gradients: at most R + B + the gradient shards of all blocks, *during* the reduction of block 0, the last block in
#   the backward pass. The root's gradient stays unsharded throughout the backward pass, because the head's gradient is
#   the first to be computed and the embedding's is the last. Only one block at a time has an unsharded gradient; each
#   block that has already been reduced keeps only its gradient shard. While a block is being reduced, it holds both its
#   unsharded gradient and its gradient shard. With gloo, there are also receive buffers for the contributions of the
#   other ranks, (N - 1) / N · B; NCCL needs no such memory;
# - the total: shards + 2 (R + B) + the gradient shards of the other blocks (1 to 4), just *before* this reduction.
#
# At this earlier moment, a rank holds the following tensors in addition to its shards of all parameters and of the
# optimizer state:
#
# | unit | unsharded parameters | gradient |
# |---|---|---|
# | root | R | R, unsharded |
# | block 0 | B | B, unsharded and complete |
# | blocks 1 to 4 | none | a shard each, already reduced |
#
# Then the parameters of block 0 are freed, and only then is its gradient shard allocated. So the reduction does not
# raise the peak, not even with gloo: it needs B / N for the gradient shard and (N - 1) / N · B for the receive buffers,
# which together are the B bytes that have just been freed. If the parameters were freed after the reduction, they would
# still be in memory when the gradient shard is allocated, and the peak would be higher. Even at the peak, a rank never
# holds the full 4Ψ bytes of parameters or of gradients.
#
# The curve does not include activations, which are additional memory in every rung.


# %%
def measure_memory(builds: dict[str, Callable[[], Trainer]]) -> dict[str, dict[str, Any]]:
    """Return the bytes and the collectives of the second step, for each of several rungs."""
    return {name: measure_one(build) for name, build in builds.items()}


def measure_one(build: Callable[[], Trainer]) -> dict[str, Any]:
    with Ledger() as ledger:
        trainer = build()
        ledger.watch(trainer.model, trainer.optimizer)
        take_step(trainer, BATCHES[0])
        ledger.reset_peaks()
        stages = {"before": ledger.mark("before")}
        with comm.record() as calls:
            take_step(trainer, BATCHES[1], lambda stage: stages.update({stage: ledger.mark(stage)}))
        return {
            "stages": stages,
            "peak": ledger.peak.tags,
            "unsharded_peak": ledger.peak_of("unsharded"),
            "gradients_peak": ledger.peak_of("gradients", "communication"),
            "state_peak": ledger.peak_of("parameters", "unsharded", "gradients", "optimizer", "communication"),
            "curve": ledger.curve(),
            "calls": calls,
        }


EARLIER = {"DDP": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2"}
builds: dict[str, Callable[[], Trainer]] = {
    name: (lambda rung=rung: SETTINGS.build(rung, rank_device())) for name, rung in EARLIER.items()
}
usage = launch(measure_memory, RANKS, {"yours": lab_fsdp, **builds})[0]

# %% tags=["C4"]
setting = closed_form_setting(RANKS)
expected = closed_form.fsdp(SIZES.units, setting)
mine = usage["yours"]
measured = {
    "shards of parameters": (expected.parameters, mine["stages"]["step"]["parameters"]),
    "shards of gradients": (expected.gradients, mine["stages"]["backward"]["gradients"]),
    "optimizer, at any time": (expected.optimizer, mine["peak"]["optimizer"]),
    "unsharded after forward: the root": (setting.padded(sum(SIZES.units[0])), mine["stages"]["forward"]["unsharded"]),
    "unsharded after backward": (0, mine["stages"]["backward"]["unsharded"]),
    "unsharded at most: R + B": (expected.unsharded_peak, mine["unsharded_peak"]),
    "gradients at most": (expected.gradients_peak, mine["gradients_peak"]),
}
padded = [setting.padded(sum(unit)) for unit in SIZES.units]
state_peak = expected.parameters + expected.optimizer + 2 * (padded[0] + max(padded[1:])) + sum(padded[2:]) // RANKS
measured["model state at most"] = (state_peak, mine["state_peak"])
for what, (predicted, found) in measured.items():
    print(f"{what:34} predicted {predicted:9,}  measured {found:9,}")
print(f"{'the unsharded model, 4Ψ':34} {'never held':>9}  {4 * psi:19,}")
off = [what for what, (predicted, found) in measured.items() if predicted != found]
assert not off, f"not as predicted: {'; '.join(off)}"
assert mine["unsharded_peak"] < 4 * psi

# %%
MIB = 2**20


def without_activations(curve: dict[str, Any]) -> dict[str, Any]:
    tags = {tag: [0] * len(sizes) if tag == "activations" else sizes for tag, sizes in curve["tags"].items()}
    return {"tags": tags, "marks": curve["marks"]}


plots.curve(
    without_activations(mine["curve"]),
    title=f"Your FSDP's model state peaks at {mine['state_peak'] / MIB:.2f} MiB per rank, DDP's at "
    f"{usage['DDP']['state_peak'] / MIB:.2f}",
    says="One step of your FSDP, without activations: each light blue step is a gathered unit. At the far right, "
    "zero_grad frees the gradients. Lines: the same step under DDP, ZeRO-1 and ZeRO-2.",
    lab="05",
    predicted_peak=state_peak,
    earlier={name: without_activations(usage[name]["curve"]) for name in EARLIER},
)

# %% [markdown]
# From left to right, the forward pass has five plateaus above the level of the root, one per block, with short gaps in
# between, where one block is freed and the next one is gathered. In the backward pass, each block's parameters and
# gradient are allocated at the same time, and then only a shard of the gradient remains.
#
# The next figure shows the same step stage by stage, with activations. The prediction is the model state plus, after
# the forward pass, the activations of a single process for this rank's samples. The peak is not predicted, because it
# depends on details of the model: the activations not yet freed, and the temporary buffers of the backward pass.


# %%
def activations_alone() -> int:
    """Return the bytes saved by autograd after the forward pass of one rank's rows, without FSDP."""
    with Ledger() as ledger:
        model = SETTINGS.model().to(rank_device())
        ledger.watch(model)
        loss = model(*(part[: SETTINGS.batch // RANKS].to(rank_device()) for part in BATCHES[1]))
        held = ledger.mark("forward")["activations"]
        del loss
        return held


(saved,) = launch(activations_alone, 1)
rest = expected.parameters + expected.optimizer
stages = {stage: mine["stages"][stage] for stage in ("before", "forward")}
stages["peak"] = mine["peak"]
stages |= {stage: mine["stages"][stage] for stage in ("backward", "step")}
BARS = {"before": "before the step", "step": "after the optimizer"}
peak_or = {name: {**usage[name]["stages"], "peak": usage[name]["peak"]} for name in EARLIER}
plots.stages(
    {BARS.get(stage, stage): held for stage, held in stages.items()},
    predicted={
        BARS["before"]: rest,
        "forward": rest + padded[0] + saved,
        "backward": rest + expected.gradients,
        BARS["step"]: rest + expected.gradients,
    },
    earlier={
        name: {BARS.get(stage, stage): sum(each[stage].values()) for stage in stages} for name, each in peak_or.items()
    },
    title=f"Before a step, a rank holds {rest / MIB:.2f} MiB instead of DDP's "
    f"{sum(peak_or['DDP']['before'].values()) / MIB:.2f}: everything is sharded",
    says="Bytes of a rank at the end of each stage of a step, before zero_grad, and at its peak. Narrow bars: the "
    "earlier rungs; each peaks at a different moment. minifsdp's DDP keeps its gradient buckets between steps.",
    lab="05",
)

# %% [markdown]
# ### Measured: ZeRO-3 holds the least and sends the most
#
# Like stage 3 of ZeRO, FSDP shards the full model state, including the parameters. The table shows how many bytes a
# rank holds, and how many it sends per step.

# %% tags=["C8"]
share = (RANKS - 1) / RANKS
print(f"{'':8}{'parameters':>12}{'gradients':>12}{'optimizer':>12}{'sent':>12}{'expected to send':>18}")
for name in (*EARLIER, "yours"):
    stage, wire = usage[name]["stages"], round(sum(call.wire for call in usage[name]["calls"]))
    held = RUNGS[EARLIER.get(name, "fsdp")].predict(SIZES, setting, 2)
    moved = 3 * held.parameters * RANKS - padded[0] if name == "yours" else 2 * held.parameters
    if name.startswith("ZeRO"):
        moved += 2 * 4 * sum(map(len, SIZES.units))  # an int32 per parameter, all-reduced: does it have a gradient?
    found = [stage["step"][tag] for tag in ("parameters", "gradients", "optimizer")]
    print(f"{name:8}" + "".join(f"{size:12,}" for size in (*found, wire)) + f"{round(share * moved):18,}")
    assert found == [held.parameters, held.gradients, held.optimizer]
    assert wire == round(share * moved)

# %% [markdown]
# The bytes held are counted after the optimizer's step, before `zero_grad`. DDP sends 2(N - 1)/N times the size of the
# gradient, in an all-reduce. ZeRO-1 and ZeRO-2 send the same number of bytes, in a reduce-scatter of gradients and an
# all-gather of parameters. They also all-reduce 4 bytes per parameter tensor, so that the ranks agree on which tensors
# have a gradient. ZeRO-3 gathers the parameters twice, so it sends 3(N - 1)/N times the size, minus the root's second
# gather.
#
# ## 5.6 SHARD_GRAD_OP
#
# *15 minutes, hard*
#
# If there is enough memory for all unsharded parameters, the second gather is unnecessary: keep the gathered parameters
# after the forward pass. Between steps, everything is still sharded. Which of your hooks changes, and which hook is no
# longer needed?
#
# Predict: how many bytes of unsharded parameters does a rank hold at the end of the forward pass?

# %%
predict("5.6", ..., "bytes of unsharded parameters when forward ends, SHARD_GRAD_OP, 2 ranks")


# %% tags=["exercise-5.6"]
from .ex6_attach_grad_op import attach_grad_op

# %% [markdown]
# ### Measured: SHARD_GRAD_OP spends memory to save traffic
#
# All functions except `attach` are the same as before. Traffic is given as a multiple of DDP's
# all-reduce.

# %% tags=["C12"]
GRAD_OP = PIECES._replace(attach=attach_grad_op)


def follow_and_measure(pieces: Pieces) -> tuple[list[str], dict[str, Any]]:
    return follow(pieces)[0], measure_one(lambda: lab_fsdp(pieces))


events, usage["SHARD_GRAD_OP"] = launch(follow_and_measure, RANKS, GRAD_OP)[0]
usage["FULL_SHARD"] = mine
print_steps(events)
slips = {"without padding": 4 * psi, "the root stays unsharded, too": sum(padded[1:])}
outcome("5.6", usage["SHARD_GRAD_OP"]["stages"]["forward"]["unsharded"], ranks=RANKS, slips=slips)
traffic = {name: sum(call.wire for call in usage[name]["calls"]) for name in ("DDP", "FULL_SHARD", "SHARD_GRAD_OP")}
for name, forward_only in (("FULL_SHARD", padded[0]), ("SHARD_GRAD_OP", sum(padded))):
    ops = [call.op for call in usage[name]["calls"]]
    held = usage[name]["stages"]
    print(
        f"{name:14} {ops.count('all_gather'):2} gathers, {ops.count('reduce_scatter')} reductions, "
        f"{traffic[name] / traffic['DDP']:.4f} of DDP's traffic;"
    )
    print(
        f"{'':14} unsharded bytes after forward {held['forward']['unsharded']:,}, "
        f"after backward {held['backward']['unsharded']}"
    )
    assert (held["forward"]["unsharded"], held["backward"]["unsharded"]) == (forward_only, 0)
ratio = (3 * sum(padded) - padded[0]) / (2 * 4 * psi)
print_wrapped(
    f"expected for FULL_SHARD: 1.5 minus the root's second gather, {ratio:.4f}; for SHARD_GRAD_OP: 1 plus the padding"
)
assert abs(traffic["FULL_SHARD"] / traffic["DDP"] - ratio) < 1e-6
assert abs(traffic["SHARD_GRAD_OP"] / traffic["DDP"] - 1) < 1e-4

# %% [markdown]
# The factor of 1.5 from the ZeRO paper refers to bytes, not to time. Communication costs time only if it is *exposed*,
# that is, if the computation waits for it. DDP's all-reduce can be hidden behind the backward pass. The gathers in this
# lab are exposed, because each is issued only when the next computation needs it. To hide a gather, issue it earlier
# (`minifsdp/fsdp/schedules/prefetch.py`).
#
# ## What FSDP buys
#
# ### Measured: memory buys a larger batch, and a larger batch amortizes the traffic
#
# The next cells give this lab's model a budget of 16 MiB per rank. A binary search, which runs real steps and reads the
# peak from the ledger, finds the largest number of samples per rank that fits in the budget. Then a step with each
# number of samples is timed over an emulated link (2 ms latency, 100 MB/s), on which traffic is as expensive as it is
# between machines.


# %%
BUDGET = 16 * MIB


def batch_of(rows: int) -> data.Batch:
    """Return `rows` random samples for each rank; only their number matters here."""
    tokens = torch.randint(257, (rows * dist.get_world_size(), SETTINGS.context))
    return tokens, tokens


def largest(build: Callable[[], Trainer]) -> dict[int, int]:
    """Return the peak bytes by number of samples, for the numbers that a binary search tries between 1 and 24."""
    with Ledger() as ledger:
        trainer = build()
        ledger.watch(trainer.model, trainer.optimizer)
        take_step(trainer, batch_of(1))  # allocates the optimizer state

        def peak_with(rows: int) -> int:
            ledger.reset_peaks()
            take_step(trainer, batch_of(rows))
            return ledger.peak.total

        peaks, low, high = {1: peak_with(1)}, 1, 24
        while high - low > 1:
            middle = (low + high) // 2
            peaks[middle] = peak_with(middle)
            low, high = (middle, high) if peaks[middle] <= BUDGET else (low, middle)
    return peaks


def largest_of(builds: dict[str, Callable[[], Trainer]]) -> dict[str, dict[int, int]]:
    return {name: largest(build) for name, build in builds.items()}


builds = {"DDP": lambda: SETTINGS.build("ddp", rank_device()), "your FSDP": lab_fsdp}
peaks = launch(largest_of, RANKS, builds)[0]
fits = {name: max(rows for rows, peak in tried.items() if peak <= BUDGET) for name, tried in peaks.items()}

# %% tags=["C37"]
per_row = {name: (tried[fits[name]] - tried[1]) / (fits[name] - 1) for name, tried in peaks.items()}
for name, rows in fits.items():
    print(f"{name}: at most {rows} samples per rank in {BUDGET // MIB} MiB, {per_row[name] / MIB:.2f} MiB per sample")
freed = usage["DDP"]["state_peak"] - mine["state_peak"]
print(f"expected: {freed / MIB:.2f} MiB less model state, room for {freed / per_row['your FSDP']:.1f} samples at least")
assert fits["your FSDP"] >= fits["DDP"] + int(freed / per_row["your FSDP"])
plots.lines(
    {name: (sorted(tried), [tried[rows] / MIB for rows in sorted(tried)]) for name, tried in peaks.items()},
    expected={"budget": ([1, max(peaks["your FSDP"])], [BUDGET / MIB] * 2)},
    xlabel="samples per rank",
    ylabel="peak memory per rank, MiB",
    title=f"The same memory fits {fits['your FSDP']} samples per rank instead of DDP's {fits['DDP']}",
    says=f"Peak of a step on {RANKS} ranks, from the ledger, for each batch size tried. With many samples, it comes "
    "at the start of backward, when DDP already holds its gradient buckets, and FSDP hardly any gradients.",
    lab="05",
)


# %% tags=["C37", "nbval-ignore-output"]
def time_per_row(build: Callable[[], Trainer], sizes: list[int]) -> dict[int, float]:
    """Return milliseconds per sample (of all ranks) in the fastest of three steps, by samples per rank."""
    let_communication_go_first()
    times = {}
    with parse_link("latency=2ms,bandwidth=100MB/s"):
        trainer = build()
        take_step(trainer, batch_of(1))
        for rows in sizes:
            batch, seconds = batch_of(rows), []
            for _ in range(3):
                start = time.perf_counter()
                take_step(trainer, batch)
                device.synchronize(rank_device())
                seconds.append(time.perf_counter() - start)
            times[rows] = 1e3 * min(seconds) / (rows * dist.get_world_size())
    return times


sizes = {name: sorted({1, 3, rows} | ({fits["DDP"]} & set(range(rows)))) for name, rows in fits.items()}


def time_both() -> dict[str, dict[int, float]]:
    return {name: time_per_row(build, sizes[name]) for name, build in builds.items()}


times = launch(time_both, RANKS)[0]
equal, at_most = (times["your FSDP"][fits[name]] / times["DDP"][fits["DDP"]] for name in ("DDP", "your FSDP"))
for name, each in times.items():
    print(f"{name:9} ms per sample:", ", ".join(f"{ms:.2f} with {rows}" for rows, ms in each.items()))
print(
    f"your FSDP's time per sample over DDP's with {fits['DDP']}: "
    f"{equal:.2f} with as many samples, {at_most:.2f} with {fits['your FSDP']}"
)
plots.lines(
    {name: (list(each), list(each.values())) for name, each in times.items()},
    xlabel="samples per rank",
    ylabel="time per sample (of all ranks), ms",
    title=f"Per sample, your FSDP takes {equal:.1f} times DDP's time at {fits['DDP']} samples, and "
    f"{at_most:.1f} times at {fits['your FSDP']}",
    says="Each line ends at the largest batch that fits; both ratios refer to DDP's last point. At equal batch size, "
    "FSDP is slower: it sends more and hides nothing. The traffic of a step does not grow with the batch, so a larger "
    "batch spreads it over more samples.",
    lab="05",
    logx=True,
)

# %% [markdown]
# (On a busy machine, single points may be inaccurate, but the shape of the curves stays the same.)
#
# This is the trade-off: at the same batch size, FSDP costs time, but it makes larger batches or larger models possible.
# The larger batch recovers most of this time, because it amortizes the traffic of a step over more samples. Whether it
# recovers all of the time depends on the link and on the compute per sample. With 1.5 times as many bytes per step and
# twice as many samples, FSDP sends 0.75 times as many bytes per sample. But this FSDP hides none of its communication,
# whereas DDP hides some behind the backward pass, so the two roughly break even. If DDP's batch fits with memory to
# spare, FSDP gains nothing.
#
# ## Break it
#
# ### One unit for everything
#
# "With FSDP, memory is no lower than with DDP" is the complaint in
# [fairscale#1050](https://github.com/facebookresearch/fairscale/issues/1050) and
# [Lightning#15976](https://github.com/Lightning-AI/pytorch-lightning/issues/15976). One cause is a wrapping policy that
# matches no module, so that the root is the only unit. Calling `shard_model` without blocks has a similar effect:


# %%
def only_root() -> Trainer:
    model = SETTINGS.model().to(rank_device())
    shard_model(model, PIECES, blocks=[])
    return Trainer(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE))


usage |= launch(measure_memory, RANKS, {"only the root": only_root})[0]
unit_table([SIZES.parameters], ["root"], RANKS)
for name in ("DDP", "only the root", "yours"):
    print(f"{name:14} peak of model state {usage[name]['state_peak']:10,} bytes")

# %% [markdown]
# The root is gathered before the forward pass and stays unsharded until the end of the backward pass. Its unsharded
# gradient is equally large, so together they take 8Ψ bytes, in addition to the shards. Between steps, everything is
# sharded, so a measurement *between* steps does not reveal the mistake. Always print the table of units.
#
# ### A method other than forward
#
# Hooks run when a module is *called*. If a sharded module is accessed in any other way, by `generate()` or through a
# submodule, its parameters are still sharded:


# %%
def bypass() -> dict[str, str]:
    """Return the error of the root's embedding while the root is sharded."""
    warnings.simplefilter("ignore", FutureWarning)
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

    ours = SETTINGS.model().to(rank_device())
    shard_model(ours, PIECES)
    torchs = TorchFSDP(SETTINGS.model().to(rank_device()), device_id=rank_device(), use_orig_params=True)
    theirs = FullyShardedDataParallel(SETTINGS.model().to(rank_device()), auto_wrap_policy={Block})
    said = {}
    for name, model in (("your FSDP", ours), ("torch", torchs.module), ("minifsdp", theirs)):
        try:
            model.embed(BATCHES[0][0].to(rank_device()))
            said[name] = "no error"
        except RuntimeError as error:
            said[name] = str(error)
    return said


said = launch(bypass, RANKS)[0]
print("your FSDP:", said["your FSDP"][:52], "...")
print_wrapped(f"torch's FSDP: {said['torch']}")
print_wrapped(f"minifsdp: {said['minifsdp']}")

# %% [markdown]
# With torch's FSDP (here with `use_orig_params=True`), the parameter is a slice of the flat shard, which is a 1-D
# tensor. The message does not mention this ([pytorch#124019](https://github.com/pytorch/pytorch/issues/124019),
# [transformers#39186](https://github.com/huggingface/transformers/issues/39186)). minifsdp replaces the parameter with
# a placeholder (`Absent` in `minifsdp/fsdp/absent.py`). The placeholder has the parameter's shape, and its error
# message explains why there are no values.
#
# ### State read outside the forward pass
#
# For the same reason, you cannot compute a norm or a histogram of `model.blocks[0].qkv.weight` or save it to a
# checkpoint, and the `state_dict()` of your FSDP contains only one shard per unit:


# %%
def read_state() -> tuple[str, list[str], str, tuple[int, ...]]:
    ours = SETTINGS.model().to(rank_device())
    shard_model(ours, PIECES)
    model = FullyShardedDataParallel(SETTINGS.model().to(rank_device()), auto_wrap_policy={Block})
    try:
        model.module.blocks[0].qkv.weight.norm()
        said = "no error"
    except RuntimeError as error:
        said = str(error)
    with FullyShardedDataParallel.summon_full_params(model):
        shape = tuple(model.module.blocks[0].qkv.weight.shape)
    return f"{ours.blocks[0].qkv.weight.untyped_storage().nbytes()} bytes", list(ours.state_dict()), said, shape


behind, keys, said, shape = launch(read_state, RANKS)[0]
print_wrapped(f"storage of a weight of your FSDP between steps: {behind}; its state_dict: {', '.join(keys[:3])}, ...")
print("minifsdp:", said.partition(";")[0])
print(f"inside summon_full_params, which gathers: shape {list(shape)}")

# %% [markdown]
# ### The optimizer built before sharding


# %%
def too_early(early: bool) -> tuple[bool, int]:
    """Return whether a step changes the shards, and the bytes of parameters that the optimizer holds."""
    model = SETTINGS.model().to(rank_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = shard_model(model, PIECES)
    if not early:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [unit.flat.shard.detach().clone() for unit in units]
    take_step(Trainer(model, optimizer), BATCHES[0])
    changed = any(not torch.equal(a, unit.flat.shard) for a, unit in zip(before, units, strict=True))
    return changed, sum(4 * p.numel() for group in optimizer.param_groups for p in group["params"])


def both() -> list[tuple[bool, int]]:
    return [too_early(early) for early in (False, True)]


for early, (changed, held) in zip((False, True), launch(both, RANKS)[0], strict=True):
    print(f"optimizer built {'before' if early else 'after'} sharding: trains {changed}, holds {held:,} bytes")

# %% [markdown]
# An optimizer built before sharding refers to the original parameters. The model no longer computes with these
# parameters, so they have no gradient, and the optimizer silently skips all of them. It also keeps their memory
# allocated, as much as the full model takes. So build the optimizer after wrapping.
#
# ## What is still missing
#
# The next cell traces a step with 12 samples per rank over an emulated link (1 ms latency, 100 MB/s). Before you look
# at the result: what does the CPU do while the link is busy?


# %% tags=["nbval-ignore-output"]
def trace_steps(builds: dict[str, Callable[[], Trainer]], folder: Path) -> None:
    let_communication_go_first()
    with parse_link("latency=1ms,bandwidth=100MB/s") as link:
        for name, build in builds.items():
            trainer = build()
            take_step(trainer, batch_of(12))
            with record_trace(folder / f"{name}-{dist.get_rank()}.json", link):
                comm.all_reduce(torch.zeros(1, device=rank_device()), comm.world()).wait()  # start together
                take_step(trainer, batch_of(12))


with tempfile.TemporaryDirectory() as folder:
    launch(trace_steps, RANKS, {"DDP": builds["DDP"], "FSDP": lab_fsdp}, Path(folder))
    spans = {name: read_trace(Path(folder, f"{name}-0.json")) for name in ("DDP", "FSDP")}
plots.timeline(
    {"DDP": spans["DDP"], "your FSDP": spans["FSDP"]},
    title=f"{overlap(spans['FSDP']):.0%} of your FSDP's communication is under compute: it waits for every message",
    says="Lanes of one rank over one step. A gather is issued only when its unit is needed: the host waits while the "
    "link is busy, and the link is idle while the host computes.",
    lab="05",
)

# %% [markdown]
# (On a busy machine, the spans are longer, especially those of the reductions, because their additions need the CPU.)
#
# Every gather and every reduction is on the critical path: compute and communication alternate. This is not necessary.
# A block could be reduced while the next one is being computed, and the next block could be gathered while the current
# one is being computed. Such overlap needs streams, events, and a schedule for issuing the collectives. You will find
# them in `overlap.py`, `prefetch.py` and `rate_limit.py` in `minifsdp/fsdp/schedules`, which are the next rungs of
# `minifsdp ladder`.
#
# ## What to remember
#
# 1. The cycle of a unit is gather, compute, free in the forward pass, and gather, compute, free, reduce-scatter in the
#    backward pass. The parameters are freed before the gradient is reduced. The root stays unsharded from its forward
#    pass to the end of the backward pass.
# 2. The peak consists of the shards, the parameters and gradients of the root and of the largest unit, and the
#    activations. The optimizer state is never gathered. With a single unit, all parameters and all gradients are
#    unsharded at the peak, and little is saved.
# 3. Freeing shrinks the *storage* to 0 bytes, although names, views and saved tensors still refer to it. Gather into
#    the same storage again, through an alias with its own version counter.
# 4. FULL_SHARD takes 2U - 1 gathers, U reduce-scatters and 1.5 times DDP's traffic. SHARD_GRAD_OP takes U gathers, U
#    reduce-scatters and no more than DDP's traffic, but all parameters are unsharded when the forward pass ends.
# 5. FSDP is data parallelism: each rank computes with unsharded parameters on its own samples. Only the storage is
#    sharded.
#
# ## Questions
#
# **1. One layer of your model has half of all its parameters. How much memory does FSDP save?**
#
# <details><summary>Answer</summary>
#
# Between steps, FSDP reduces the model state to 1/N. But at the peak, that layer is unsharded, and so is its gradient;
# together they take 4Ψ bytes. To reduce the peak further, split the layer or its computation (tensor parallelism).
# </details>
#
# **2. Why is the root not freed after its forward pass?**
#
# <details><summary>Answer</summary>
#
# Its forward pass ends with the loss, and its backward pass begins with the loss. A freed root would have to be
# gathered again immediately, so nothing would be gained.
# </details>
#
# **3. Gradients are accumulated over 4 micro-batches. What do 5.4 and 5.5 send, and what could be saved?**
#
# <details><summary>Answer</summary>
#
# They send everything four times: in each micro-batch, a unit is gathered twice, and its gradient is reduced and added
# to the gradient of the shard. Reducing only after the last micro-batch saves three reductions per unit, but keeps the
# unsharded gradients of all units in the meantime (`no_sync`).
# </details>
#
# **4. A parameter is not used in a step. What does your `attach` do with its unit?**
#
# <details><summary>Answer</summary>
#
# The gradient of this parameter never arrives, so the unit is neither freed nor reduced, and its count of missing
# gradients is not reset. The next step is worse: it continues with this stale count, ends the unit's backward pass too
# early, and silently reduces an incomplete gradient. minifsdp and torch finish such units in the end-of-backward
# callback of 5.1 and count the missing gradient as zero.
# </details>
#
# **5. Why is the hook on the output, and not on the gradient of the next module's input?**
#
# <details><summary>Answer</summary>
#
# In a chain of modules, the output and the next input are the same tensor. With a residual connection, a second output
# or a head, they differ. A unit knows only its own outputs.
# </details>
#
# ## Further reading
#
# - FSDP: [arXiv 2304.11277](https://arxiv.org/abs/2304.11277), sections 3.2 (sharding, flat parameter) and 4.3 (hooks).
# - ZeRO: [arXiv 1910.02054](https://arxiv.org/abs/1910.02054), sections 5 (stages) and 7 (communication volume).
# - torch: `torch/distributed/fsdp/_runtime_utils.py` (the hooks), `torch/distributed/fsdp/_flat_param.py` (`unshard`,
#   `reshard`, `resize_` of storages).
# - minifsdp: `fsdp/unit.py`, `fsdp/flat_unit.py`, `fsdp/schedules/sync.py`, `fsdp/engine.py`: your functions,
#   generalized to any model.
