# ---
# jupyter:
#   minifsdp:
#     lab: "15"
#     title: Three axes at once
#     minutes: 120
#     ranks: 8
# ---

# %% [markdown]
# # Lab 15: three axes at once
#
# Data parallelism divides the batch, tensor parallelism divides every layer, and a pipeline divides the list of layers.
# Large models use all three at once: a rank is then a member of three groups, and each group has its own messages. This
# lab builds such a step on 8 ranks, counts its bytes by axis, and asks which axis belongs on the fast links inside a
# host. It then adds what goes wrong most often: a loss that is a mean over ranks instead of a mean over tokens. The
# last two parts divide the sequence, and move a checkpoint from one layout to another.
#
# ![64 ranks as a grid with one host per row: ranks in a row exchange messages inside their host, ranks in a column
# exchange messages across hosts](../slides/figures/scale-mesh.svg)
#
# *From [lecture 6, Beyond the flat parameter](../slides/scale.md), whose second part comes before this lab. There, both
# axes are data-parallel: this is hybrid sharding, with `Shard(0)` along a row and `Replicate()` down a column. In this
# lab, the same grid has other axes.*
#
# **After this lab, you will be able to**
#
# - compute the place and the groups of any rank, for any order of axes;
# - write a step that combines a pipeline, data and tensor parallelism, and show that it equals one process;
# - compute the bytes of each axis, and choose the order of axes for given links;
# - write a loss in which every token counts the same, wherever it is;
# - write ring attention, and balance its work;
# - plan the reads that take a checkpoint to another layout.
#
# **You need** labs 02 (DDP), 13 (tensor parallelism) and 14 (pipelines). Lab 10b introduces checkpoints, and lab 11
# introduces hosts and links.
#
# **Time** 120 minutes, in two sessions; the break is marked. **Runs** on a laptop (gloo, up to 8 processes), on one GPU
# that the ranks share (`MINIFSDP_SHARE_GPU=1`), or on a GPU node (NCCL, one rank per GPU). **Memory** less than 20 MiB
# of tensors per rank.
#
# | axis | its ranks have different | symbol |
# |---|---|---|
# | `pp`, pipeline parallelism | layers | p |
# | `dp`, data parallelism | samples | d |
# | `tp`, tensor parallelism | parts of every layer | t |
# | `cp`, context parallelism | parts of every sequence | c |

# %% tags=["setup"]
# set-up
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop import exercise, outcome, predict
from minifsdp.losses import IGNORED
from minifsdp.mesh import Mesh

Box = tuple[tuple[int, int], ...]  # of a parameter: for each dimension, the first index and the one after the last
Sums = tuple[Tensor, Tensor, Tensor]  # of a block of attention: out, top and total


class Link(NamedTuple):
    """Seconds of latency for each message, and bytes per second."""

    latency: float
    bandwidth: float


class Traffic(NamedTuple):
    """Messages that a rank sends in a step, and their bytes, all together."""

    messages: int
    size: float


class Read(NamedTuple):
    """The number of a file, the name of a parameter, slices of the saved part, and slices of the wanted part."""

    file: int
    name: str
    source: tuple[slice, ...]
    target: tuple[slice, ...]


# %% [markdown]
# # Session one: a step on three axes
#
# ## 15.1 A mesh by hand
#
# *8 minutes, easy*
#
# A *mesh* arranges the ranks in a grid with one dimension for each axis. The axes have an order: rank numbers count
# along the last axis, so its groups consist of neighbours. With 8 ranks and the order `pp`, `dp`, `tp`, a rank's number
# has three binary digits: rank 6 = 110 is in stage 1, in replica 1, and has part 0 of each layer.
#
# On each axis, a rank has a *group*: the ranks that differ from it on this axis only. Rank 6 and rank 7 hold parts of
# the same layers, rank 6 and rank 4 average gradients, and rank 6 receives activations from rank 2.
#
# Ranks are usually numbered host by host, so the order of axes decides which groups are inside a host. Take 64 ranks on
# 8 hosts with 8 ranks each, as `dp` = 8 and `tp` = 8, with `tp` last. There are 8 groups of each kind.
#
# Predict: how many of the 16 groups are inside a host?

# %%
predict("15.1", ..., "groups of 64 ranks, 8 x 8, that are inside a host of 8 ranks")


# %% tags=["exercise-15.1"]
from .ex1_position import position

# %%
import math
import tempfile
import time
from collections import Counter
from itertools import permutations
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from minifsdp.build import build, loss_of_parts
from minifsdp.context_parallel import Cut, RingAttention, UlyssesAttention
from minifsdp.gpt import GPT
from minifsdp.instruments import plots
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.link.emulated import EmulatedLink, HostLinks
from minifsdp.instruments.plots.mesh_text import drawing
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.losses import cross_entropy
from minifsdp.pipeline import split_gpt
from minifsdp.pipeline.schedules.gpipe import gpipe
from minifsdp.pipeline.simulate import simulate
from minifsdp.recipe import Recipe
from minifsdp.tensor_parallel import parallelize_gpt
from minifsdp.tensor_parallel.parameters import local_part

AXES = ("pp", "dp", "tp")
VOCABULARY, WIDTH, LAYERS, CONTEXT = 64, 32, 4, 16
ROWS, MICROS, RATE = 16, 4, 1e-2


def grid_of_torch(sizes: Mapping[str, int]) -> list[int]:
    """Return the ranks of torch's mesh, one after another."""
    mesh = dist.device_mesh.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return mesh.mesh.flatten().tolist()


def rank_at(places: Mapping[str, int], sizes: Mapping[str, int], grid: Sequence[int]) -> int:
    """Look a rank up by its places."""
    number = 0
    for axis, size in sizes.items():
        number = number * size + places[axis]
    return grid[number]


# %% [markdown]
# ### Measured: 64 ranks as 8 x 8, and torch's mesh of them
#
# The backend "fake" starts one rank of 64: its collectives carry nothing, but its meshes have all ranks.

# %% tags=["C30"]
inside = {}
for order in (("dp", "tp"), ("tp", "dp")):
    sizes = dict.fromkeys(order, 8)
    (grid,) = launch(grid_of_torch, 64, sizes, backend="fake")[:1]
    found = [position(rank, sizes) for rank in range(64)]
    same = all(rank_at(places, sizes, grid) == rank for rank, (places, _) in enumerate(found))
    groups = {(axis, tuple(group)) for _, mine in found for axis, group in mine.items()}
    inside[order] = Counter(axis for axis, group in groups if len({rank // 8 for rank in group}) == 1)
    print(f"order {', '.join(order)}: places equal torch's: {same}; groups inside a host: {dict(inside[order])}")
outcome(
    "15.1",
    sum(inside["dp", "tp"].values()),
    slips={
        "a group of the first axis has one rank on each host": 16,
        "the groups of the last axis are inside a host": 0,
    },
)

# %% [markdown]
# The last axis is inside the hosts. The mesh does not know what its axes are for. You put `tp` last, because its
# messages are the largest and the most frequent; 15.5 and 15.6 compute by how much. Megatron-LM, torchtitan and Llama 3
# all do so.
#
# Here are 8 ranks as 2 x 2 x 2 on two hosts of 4. The number below a rank is its place on `pp`, `dp` and `tp`:

# %%
eight = Mesh(pp=2, dp=2, tp=2)
print("\n".join(drawing(eight, host=4)))
print("groups of rank 6, by your function:", position(6, {axis: eight.size(axis) for axis in AXES})[1])

# %% [markdown]
# ## 15.2 Who talks to whom
#
# *8 minutes, medium*
#
# Each axis has its own kind of messages. The ranks of a `tp` group all-reduce activations, several times in every
# block. The ranks of a `dp` group all-reduce gradients. The stages of a pipeline send activations to the next stage and
# gradients to the one before, so that two stages that are not neighbours never exchange anything.
#
# Ranks that differ on more than one axis have nothing to say to each other: they have different layers or different
# parts of them, so their gradients belong to different elements.
#
# Predict: 8 ranks as 2 x 2 x 2 have 28 pairs. How many of the pairs exchange messages in a step?

# %%
predict("15.2", ..., "pairs of 8 ranks, as 2 x 2 x 2, that exchange messages")


# %% tags=["exercise-15.2"]
from .ex2_pairs import pairs


# %%
def model_of(dtype: torch.dtype = torch.float64, device: torch.device | None = None) -> GPT:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "width": WIDTH, "layers": LAYERS, "heads": 4, "context": CONTEXT}
    return GPT(**sizes).to(device or rank_device(), dtype)


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, the same on every rank."""
    draw = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(VOCABULARY, (rows, CONTEXT), generator=draw).to(rank_device()) for _ in range(2))
    return tokens, targets


def groups_of(mesh: Mesh) -> dict[str, Group]:
    """Return this rank's groups."""
    return {axis: each.get_group() for axis, each in mesh.device_meshes(rank_device().type, AXES).items()}


def talked(recipe: Recipe) -> dict[str, set[tuple[int, int]]]:
    """Train one step, and return the pairs to which this rank belongs, by axis, from the log of its calls."""
    trainer = build(model_of(), recipe)
    replica = recipe.mesh.place(dist.get_rank(), "dp")
    mine = [each.chunk(recipe.mesh.dp)[replica] for each in batch()]
    sent_to: set[int] = set()
    send = comm.send

    def noted(tensor: Tensor, target: int, group: Group) -> Any:
        sent_to.add(dist.get_process_group_ranks(group)[target])
        return send(tensor, target, group)

    with comm.record() as calls, mock.patch.object(comm, "send", noted):
        trainer.step(*mine)
    me, found = dist.get_rank(), {}
    for axis in recipe.mesh.divided:
        group = groups_of(recipe.mesh)[axis]
        collectives = {call.op for call in calls if call.group == group.group_name} - {"send", "recv", "broadcast"}
        others = sent_to if axis == "pp" else {*dist.get_process_group_ranks(group)} if collectives else set()
        found[axis] = {(min(me, other), max(me, other)) for other in others if other != me}
    return found


# %% [markdown]
# ### Measured: the pairs in the log of 8 ranks
#
# A *recipe* is minifsdp's description of a mesh and of what each axis divides.

# %%
texts = ("pp=2,dp=2,tp=2,zero=1", "pp=4,tp=2", "dp=2,pp=2,tp=2,zero=1,axes=dp/pp/tp")
recipes = [Recipe.parse(text) for text in texts]
logs = launch(lambda: [talked(recipe) for recipe in recipes], 8)
measured = []
for text, recipe, *of_ranks in zip(texts, recipes, *logs, strict=True):
    heard = {axis: sorted(set().union(*(log[axis] for log in of_ranks))) for axis in recipe.mesh.divided}
    measured.append(sum(map(len, heard.values())))
    print(f"{text}: the log has the pairs that your function returns: {heard == pairs(recipe.mesh)}")
    for axis, found in heard.items():
        print(f"    {axis}: {' '.join(f'{a}-{b}' for a, b in found)}")
slips = {
    "a rank talks to one rank on each axis; ranks that differ on several axes exchange nothing": 28,
    "each rank has three partners, and each pair has two ranks": 24,
}
outcome("15.2", measured[0], slips=slips)

# %% [markdown]
# Groups of the same axis have no rank in common, so they talk at the same time: four all-reduces of gradients run side
# by side, each on its own two ranks, and none waits for another.
#
# ## 15.3 Two axes: which gradients are summed over which group
#
# *8 minutes, medium*
#
# Before three axes, two: `dp` = 2 and `tp` = 2 on 4 ranks. Tensor parallelism completes the gradients of sharded
# parameters by itself: f and g of lab 13 see to it. With sequence parallelism, one kind of gradient is left. Norms and
# positions are replicated, but each rank applies them to its own tokens only. Its gradient contains these tokens'
# contributions, and the other ranks of `tp` have the rest.
#
# Data parallelism is different: its ranks have other samples, and the loss is a mean over samples.
#
# So there are two reductions, with two operations and two groups. Mixing them up gives gradients that look plausible:
# training goes on, a little worse.
#
# Predict: suppose that you averaged the gradient of a norm over all 4 ranks. How many times as large as the right
# gradient would the result be?

# %%
predict("15.3", ..., "gradient of a norm averaged over all 4 ranks, relative to the right one")


# %% tags=["exercise-15.3"]
from .ex3_reduce_gradients import reduce_gradients


# %%
def alone(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train one process; return its losses, and the gradients of its first step."""
    model, first = model_of(), {}
    optimizer = AdamW(model.parameters(), RATE)
    losses = []
    for _ in range(steps):
        loss = model(*batch())
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first


class Parts:
    """This rank's parts of a model's parameters, with an optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self.parts = {name: nn.Parameter(local_part(p.detach())) for name, p in self.parameters.items()}
        self.optimizer = AdamW(self.parts.values(), RATE)

    def gradients(self) -> dict[str, Tensor]:
        return {name: local_part(p.grad) for name, p in self.parameters.items()}

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        for name, part in self.parts.items():
            part.grad = gradients[name]
        self.optimizer.step()
        for name, part in self.parts.items():
            part.grad = self.parameters[name].grad = None


def on_two_axes(steps: int, one_group: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Train on a mesh dp x tp with sequence parallelism; return losses, and the first gradients of norms."""
    mesh = Mesh(dp=2, tp=2)
    groups, meshes = groups_of(mesh), mesh.device_meshes(rank_device().type, AXES)
    model = parallelize_gpt(model_of(), meshes["tp"], sequence=True)
    parts = Parts(model)
    own_tokens = {name for name in parts.parts if name.split(".")[-2] in ("norm", "norm1", "norm2", "position")}
    mine = [each.chunk(2)[groups["dp"].rank()] for each in batch()]
    losses, first = [], {}
    for _ in range(steps):
        loss = model(*mine)
        loss.backward()
        gradients = parts.gradients()
        if one_group:
            for gradient in gradients.values():
                comm.all_reduce(gradient, comm.world(), comm.MEAN).wait()
        else:
            reduce_gradients(gradients, own_tokens, groups["tp"], groups["dp"])
        first = first or {name: gradients[name].clone() for name in own_tokens}
        parts.step(gradients)
        total = loss.detach().clone()
        comm.all_reduce(total, groups["dp"], comm.MEAN).wait()
        losses.append(total.item())
    return losses, first


# %% [markdown]
# ### Measured: 4 ranks and one process
#
# Everything is in float64 here, so that a difference of 1e-12 is rounding, and a difference of 1e-3 is a mistake.

# %% tags=["C30"]
((by_one, right),) = launch(alone, 1, 4)
(by_four, ours), (mixed, theirs) = launch(lambda: [on_two_axes(4), on_two_axes(4, one_group=True)], 4)[0]
for name, losses in (("one process", by_one), ("4 ranks, yours", by_four), ("4 ranks, one mean over all", mixed)):
    print(f"{name:28}" + ", ".join(f"{loss:.6f}" for loss in losses))
far = max(abs(a - b) for a, b in zip(by_one, by_four, strict=True))
print(f"losses equal those of one process within 1e-12: {far < 1e-12}")
assert far < 1e-12
name = "blocks.0.norm1.weight"
ratio = (theirs[name].norm() / ours[name].norm()).item()
outcome(
    "15.3",
    round(ratio, 6),
    slips={
        "each of the two ranks of tp has a summand: their mean is half of their sum": 1,
        "the mean over dp divides by 2, as it should; the mean over tp divides by 2 more": 0.25,
    },
)

# %% [markdown]
# With one mean over all ranks, the gradients of norms are half as large as they should be, and those of sharded
# parameters are mixtures of different parts. The losses do not explode. AdamW divides each gradient by its own size, so
# half a gradient is hardly noticed. This is why such bugs live long, and why we compare with one process.
#
# ## 15.4 Three axes: a step from its parts
#
# *15 minutes, hard*
#
# Now add the pipeline: 8 ranks as 2 x 2 x 2. The parts of the step are given to you, or are yours already: stages whose
# layers are tensor-parallel, groups, micro-batches, and the reduction of 15.3. What is missing is the order in which
# they are used. Take that of GPipe: all forward passes, then all backward passes, then one reduction.
#
# Tensor parallelism is invisible in your function. The two ranks of a `tp` group run the same list of actions, and meet
# in the all-reduces inside of `stage`. Data parallelism is one call at the end.
#
# Predict: which share of the model's parameters does a rank hold, on average?

# %%
predict("15.4", ..., "share of the parameters on a rank, as 2 x 2 x 2")


# %% tags=["exercise-15.4"]
from .ex4_step import step


# %%
class Stage(NamedTuple):
    """This rank's part of a model on three axes."""

    model: nn.Module
    parts: Parts
    groups: dict[str, Group]
    tokens: Sequence[Tensor]
    targets: Sequence[Tensor]


def stage_of(mesh: Mesh, dtype: torch.dtype) -> Stage:
    groups, meshes = groups_of(mesh), mesh.device_meshes(rank_device().type, AXES)
    model = parallelize_gpt(split_gpt(model_of(dtype), mesh.pp, groups["pp"].rank()), meshes["tp"])
    tokens, targets = (each.chunk(mesh.dp)[groups["dp"].rank()].chunk(MICROS) for each in batch())
    return Stage(model, Parts(model), groups, tokens, targets)


def run_step(mine: Stage, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Run your step on this rank, and then the optimizer."""
    dtype = next(iter(mine.parts.parts.values())).dtype
    gradients: dict[str, Tensor] = {}

    def reduce() -> None:
        gradients.update(mine.parts.gradients())
        reduce_gradients(gradients, (), mine.groups["tp"], mine.groups["dp"])

    def buffer() -> Tensor:
        return torch.empty(len(mine.tokens[0]), CONTEXT, WIDTH, dtype=dtype, device=rank_device())

    def loss_of(logits: Tensor, micro: int) -> Tensor:
        return loss_of_parts(logits, mine.targets[micro])

    losses = step(forward, mine.tokens, loss_of, buffer, mine.groups["pp"], reduce)
    mine.parts.step(gradients)
    return losses


class Sent(NamedTuple):
    """A message of a step: its axis, its operation, the bytes of its tensor, and the bytes that this rank sends."""

    axis: str
    op: str
    payload: int
    wire: float


class Trained(NamedTuple):
    """A rank's run: the losses of its stage, its parameters, the log of a step, and bytes by tag at the peak."""

    losses: list[float]
    parameters: int
    log: list[Sent]
    peak: dict[str, int]


def on_three_axes(mesh: Mesh, steps: int) -> Trained:
    mine = stage_of(mesh, torch.float64)
    axes = {group.group_name: axis for axis, group in mine.groups.items()}
    losses = []
    for _ in range(steps):
        with comm.record() as calls:
            found = run_step(mine, mine.model)
        losses += [torch.stack(found).mean().item()] if found else []
    log = [Sent(axes[call.group], call.op, call.payload, call.wire) for call in calls]
    return Trained(losses, sum(part.numel() for part in mine.parts.parts.values()), log, at_peak(mesh))


def at_peak(mesh: Mesh) -> dict[str, int]:
    """Return the bytes of this rank by tag when all forward passes have run, in the second step."""
    with Ledger() as ledger:
        mine = stage_of(mesh, torch.float32)
        ledger.watch(mine.model, mine.parts.optimizer)
        levels = []

        def forward(x: Tensor) -> Tensor:
            y = mine.model(x)
            levels.append(ledger.mark("forward"))
            return y

        for _ in range(2):
            run_step(mine, forward)
    return max(levels, key=lambda level: sum(level.values()))


def alone_at_peak() -> dict[str, int]:
    """Return the same for one process with the entire batch."""
    with Ledger() as ledger:
        model = model_of(torch.float32)
        optimizer = AdamW(model.parameters(), RATE)
        ledger.watch(model, optimizer)
        for _ in range(2):
            loss = model(*batch())
            level = ledger.mark("forward")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return level


# %% [markdown]
# ### Measured: 8 ranks and one process

# %% tags=["C31"]
MESH = Mesh(pp=2, dp=2, tp=2)
found = launch(on_three_axes, 8, MESH, 4)
last = [each.losses for each in found if each.losses]
by_eight = [sum(each) / len(last) for each in zip(*last, strict=True)]
print("one process: " + ", ".join(f"{loss:.6f}" for loss in by_one))
print("8 ranks:     " + ", ".join(f"{loss:.6f}" for loss in by_eight))
far = max(abs(a - b) for a, b in zip(by_one, by_eight, strict=True))
print(f"losses equal those of one process within 1e-12: {far < 1e-12}")
assert far < 1e-12
whole = sum(p.numel() for p in model_of(device=torch.device("cpu")).parameters())
held = [each.parameters for each in found]
print(f"parameters: {whole:,}; by rank: {', '.join(f'{each:,}' for each in held)}")
slips = {
    "ranks of a dp group hold the same parameters": 0.125,
    "both pp and tp divide the parameters": 0.5,
    "right for the matrices; norms, positions and some biases are replicated over tp": 0.25,
}
outcome("15.4", round(sum(held) / len(held) / whole, 3), slips=slips)

# %%
level = {f"rank {rank}": each.peak for rank, each in enumerate(found)}
(one,) = launch(alone_at_peak, 1)
sums = [sum(tags.values()) / 2**10 for tags in level.values()]
of_one = sum(one.values()) / 2**10
plots.stages(
    level,
    title=f"A rank of 2 x 2 x 2 holds {min(sums):.0f} to {max(sums):.0f} KiB, one process {of_one:,.0f}",
    says="Memory of each rank in the second step, after all forward passes. Ranks 0 to 3 are stage 0, ranks 4 to 7 "
    "stage 1, which has the head. Replicas, such as ranks 0 and 2, hold the same.",
    lab="15",
)

# %% [markdown]
# Data parallelism divides no parameters, but it divides the samples, and therefore activations. The replicas hold the
# same optimizer state twice. ZeRO-1 over `dp` removes this copy, and it is the only stage of ZeRO that goes with a
# pipeline for free: lab 14 counted the messages of the others.
#
# Your step runs the list of actions of GPipe, and has its bubble. The package's schedule, simulated:

# %%
order = simulate([list(gpipe(rank, 2, MICROS)) for rank in range(2)], {"F": 1.0, "B": 2.0})
plots.pipeline(
    {"GPipe": order},
    title=f"With 2 stages and {MICROS} micro-batches, {order.bubble:.0%} of the ranks' time is idle (simulated)",
    says="Rank 0 stands for the four ranks of stage 0, rank 1 for those of stage 1: they run the same list. Numbers "
    "are micro-batches; light: forward pass, dark: backward pass.",
)

# %% [markdown]
# ## 15.5 Bytes by axis
#
# *12 minutes, hard*
#
# The log of a step contains every message, and a message names its group. So bytes can be counted by axis, and
# predicted to the byte. The formulas are those of labs 02, 13 and 14; new is that each axis divides the sizes of the
# others:
#
# - `tp` sends activations of *its* stage's blocks, for *its* replica's samples;
# - `dp` sends gradients of the parameters that a rank holds, which `pp` and `tp` have divided;
# - `pp` sends activations of its replica's samples.
#
# The model of 15.4 has two blocks in each stage, and its first stage also has the embedding.
#
# Predict: on a rank of the first stage, how many times as many bytes does `tp` send as `pp`?

# %%
predict("15.5", ..., "ratio of bytes on a rank of stage 0: tp to pp")


# %% tags=["exercise-15.5"]
from .ex5_bytes_sent import bytes_sent

# %% [markdown]
# ### Measured: the log of 15.4, and your formulas

# %% tags=["C31", "C45"]
tokens = ROWS // MESH.dp // MICROS * CONTEXT
expected = [bytes_sent(MESH, rank, tokens, WIDTH, LAYERS // MESH.pp, held[rank], MICROS, 8) for rank in range(8)]
sent = [{axis: sum(each.wire for each in rank.log if each.axis == axis) for axis in AXES} for rank in found]
for rank, by_axis in enumerate(sent):
    shown = ", ".join(f"{axis} {by_axis[axis]:9,.0f}" for axis in AXES)
    print(f"rank {rank}: {shown}; equal to yours: {by_axis == expected[rank]}")
    assert by_axis == expected[rank]
slips = {
    "an all-reduce among 2 ranks sends 2 (t - 1) / t = 1 times its tensor": 18,
    "the embedding has an all-reduce, too": 8,
    "a block has four all-reduces in a step": 5,
}
outcome("15.5", sent[0]["tp"] / sent[0]["pp"], slips=slips)
ranks = [*range(8)]
plots.lines(
    {axis: (ranks, [each[axis] / 1e3 for each in sent]) for axis in AXES},
    expected={axis: (ranks, [each[axis] / 1e3 for each in expected]) for axis in AXES},
    xlabel="rank",
    ylabel="kB sent in a step",
    logy=True,
    title="Tensor parallelism sends the most, then data parallelism, then the pipeline",
    says="Measured on 8 ranks, as 2 x 2 x 2, in float64. Ranks 4 to 7 are the last stage, which has the head and the "
    "loss. Hollow markers: your formulas.",
    lab="15",
)

# %% [markdown]
# A model of realistic size has the same order. Its tensor-parallel messages grow with the tokens, its gradients do
# not:

# %% tags=["C45"]
BLOCK = 12 * 4096**2 + 13 * 4096  # parameters of a block of width 4,096
print("GB sent by a rank in a step: 32 blocks of width 4,096, 64 sequences of 4,096 tokens in all, bf16")
for text in ("dp=8", "dp=4,tp=2", "pp=2,dp=2,tp=2", "pp=4,dp=2"):
    mesh = Recipe.parse(text).mesh
    micros = 64 // mesh.dp if mesh.pp > 1 else 1
    tokens, blocks = 64 // mesh.dp // micros * 4096, 32 // mesh.pp
    each = bytes_sent(mesh, 0, tokens, 4096, blocks, blocks * BLOCK // mesh.tp, micros, 2)
    print(f"    {text:16}" + ", ".join(f"{axis} {each[axis] / 1e9:7.2f}" for axis in AXES))

# %% [markdown]
# Compare the `dp` column of the first and the third row. With `dp` = 8, every rank sends the gradients of the entire
# model; as 2 x 2 x 2, it sends those of a quarter. Its bytes are even a seventh, because the factor 2 (d - 1) / d is
# 7/4 for d = 8 and 1 for d = 2.

# %% [markdown]
# # Break. Session two: links, tokens, sequences, checkpoints
#
# ## 15.6 The best order on links of two speeds
#
# *8 minutes, medium*
#
# Inside a host, GPUs exchange hundreds of gigabytes per second; between hosts, tens. 15.1 showed that the order of axes
# decides which groups are inside a host. 15.5 showed what each axis sends. Together, they give the seconds of each
# order: a group that spans several hosts communicates at the speed of its slowest link.
#
# The example is the model above, as 2 x 2 x 2 on two hosts of 4 ranks: 300 GB/s and 5 µs inside a host, 25 GB/s and 20
# µs across. There are six orders.
#
# Predict: how many times as long does the slowest order communicate as the fastest? Overlap is not considered.

# %%
predict("15.6", ..., "seconds of communication: slowest order to fastest order")


# %% tags=["exercise-15.6"]
from .ex6_seconds import seconds

# %% [markdown]
# ### Computed: all orders

# %% tags=["C31"]
INSIDE, ACROSS = Link(5e-6, 300e9), Link(20e-6, 25e9)
micros = 32
size = bytes_sent(MESH, 0, 4096, 4096, 16, 8 * BLOCK, micros, 2)
count = {"tp": micros * (4 * 16 + 1), "dp": 16, "pp": micros}  # dp: once per step, in a message for each block
traffic = {axis: Traffic(count[axis], size[axis]) for axis in AXES}
times = {}
for axes in permutations(AXES):
    mesh = Mesh(pp=2, dp=2, tp=2, axes=axes)
    crossing = [axis for axis in axes if len({rank // 4 for rank in mesh.peers(0, axis)}) > 1]
    times[" ".join(axes), ", ".join(crossing)] = seconds(mesh, 4, traffic, INSIDE, ACROSS)
for (order, crossing), said in sorted(times.items(), key=lambda item: item[1]):
    print(f"{order}: {said:5.2f} s; across hosts: {crossing}")
slips = {
    "this is the ratio of the two bandwidths; the slowest order also has axes inside a host": 12,
    "the order decides which of the axes crosses hosts": 1,
}
outcome("15.6", round(max(times.values()) / min(times.values()), 2), how="computed", slips=slips)

# %% [markdown]
# Only the first axis crosses hosts, so the six orders take three different times. The best order is the default of
# minifsdp's recipes: `pp` first, `tp` last.
#
# One often reads that if tensor parallelism stays inside a host, data parallelism need not cross hosts. The table tests
# it. In two orders, `tp` is inside a host and so is `dp`, because `pp` crosses. In two others, `tp` is inside and `dp`
# crosses. The sentence is right only if a host has room for both groups, t · d ranks, and if `pp` or another axis is
# outside of them. With `tp` = 8 on hosts of 8 ranks, as in most clusters, every other axis crosses hosts.
#
# ### Measured: the messages of your step on emulated links
#
# Each rank repeats the messages that its step of 15.4 has logged, axis by axis and without computation. `HostLinks`
# carries them on two kinds of links: 4 ms and 25 MB/s inside a host, 40 ms and 1 MB/s for each rank across hosts. Real
# links are faster. These are slow enough that messages take longer than anything else that 8 processes on a laptop do.
# Three of the six orders are enough, one for each axis that crosses hosts. Measured times are longer than those of the
# formula, by some 100 ms on an idle machine and by several hundred on a busy one: compare the order of the three.


# %% tags=["nbval-ignore-output", "C31"]
def on_links(logs: Sequence[Sequence[Sent]], meshes: Sequence[Mesh], fast: Link, slow: Link) -> list[float]:
    """Return for each mesh the seconds that the messages of its ranks take; logs are those of the ranks of `MESH`."""
    found = []
    for mesh in meshes:
        groups, places = groups_of(mesh), {axis: mesh.place(dist.get_rank(), axis) for axis in AXES}
        mine = logs[rank_at(places, {axis: MESH.size(axis) for axis in AXES}, range(8))]
        dist.barrier()
        with HostLinks(EmulatedLink(*fast), EmulatedLink(slow.latency, 4 * slow.bandwidth), 4):  # shared by a host
            begin = time.perf_counter()
            for axis, op, payload, _ in sorted(mine, key=lambda each: each.axis):
                tensor, group = torch.zeros(payload, dtype=torch.uint8, device=rank_device()), groups[axis]
                if op == "all_reduce":
                    comm.all_reduce(tensor, group).wait()
                elif op == "send":  # each neighbour sends as many
                    other = 1 - group.rank()
                    handles = [comm.send(tensor, other, group), comm.recv(torch.empty_like(tensor), other, group)]
                    [handle.wait() for handle in handles]
            found.append(time.perf_counter() - begin)
    return found


FAST, SLOW = Link(4e-3, 25e6), Link(40e-3, 1e6)
meshes = [Mesh(pp=2, dp=2, tp=2, axes=axes) for axes in (("pp", "dp", "tp"), ("dp", "pp", "tp"), ("tp", "pp", "dp"))]
times_of = launch(on_links, 8, [each.log for each in found], meshes, FAST, SLOW)
most = {}
for axis in AXES:
    wires = [[each.wire for each in rank.log if each.axis == axis and each.op != "recv"] for rank in found]
    most[axis] = Traffic(max(map(len, wires)), max(map(sum, wires)))
for mesh, took in zip(meshes, map(max, zip(*times_of, strict=True)), strict=True):
    said = seconds(mesh, 4, most, FAST, SLOW)
    print(f"{' '.join(mesh.axes)}: measured {1e3 * took:4.0f} ms, by your formula {1e3 * said:4.0f} ms")

# %% [markdown]
# `minifsdp mesh pp=2,dp=2,tp=2 --host 4 --link inside=4ms@25MB/s,across=40ms@4MB/s,host=4` draws these ranks on their
# hosts and computes the same for a recipe, with sequence parallelism, ZeRO and all other axes; `across` is then the
# bandwidth of a host, which its ranks share. Its last line is more than the sum of its rows: a stage also waits while
# other stages exchange messages.
#
# How much does the choice matter on other networks?

# %%
speeds = [6.25, 12.5, 25.0, 50.0, 100.0, 200.0, 300.0]
by_first = {}
for first in AXES:
    mesh = Mesh(pp=2, dp=2, tp=2, axes=(first, *(axis for axis in AXES if axis != first)))
    by_first[f"{first} across hosts"] = (
        speeds,
        [seconds(mesh, 4, traffic, INSIDE, Link(20e-6, speed * 1e9)) for speed in speeds],
    )
slow, fast = by_first["tp across hosts"][1][2], by_first["pp across hosts"][1][2]
plots.lines(
    by_first,
    xlabel="GB/s between hosts",
    ylabel="seconds of communication in a step",
    logx=True,
    logy=True,
    title=f"At 25 GB/s, with tp across hosts, a step communicates for {slow:.2f} s; with pp across, for {fast:.2f} s",
    says="Seconds of all three axes. Two hosts of 4 ranks, 2 x 2 x 2, 300 GB/s inside a host. At equal speeds, only "
    "the latency differs.",
    model="links as in your formula",
)

# %% [markdown]
# ## 15.7 A mean over tokens, not over ranks
#
# *10 minutes, medium*
#
# So far, all ranks had as many targets. With padding, masked prompts or packed sequences they do not, and then there
# are two losses. A rank that divides by the number of *its own* tokens contributes a mean, and averaging the gradients
# gives a mean of means: the fewer targets a rank has, the more each of its tokens counts. One process would divide by
# the number of *all* tokens.
#
# The same happens to micro-batches, whose gradients add up. Several trainers have had to correct one or both:
# [torchtune](https://github.com/meta-pytorch/torchtune/pull/1875) micro-batches,
# [torchtitan](https://github.com/pytorch/torchtitan/pull/2206) ranks and the micro-batches of a pipeline,
# [speculators](https://github.com/vllm-project/speculators/pull/942) ranks,
# [ms-swift](https://github.com/modelscope/ms-swift/pull/10165) both. The wrong losses look healthy, because they are
# right for equal numbers of tokens.
#
# Predict: rank 0 has 5 targets, rank 1 has 1. With a mean of means, how many times as much does the token of rank 1
# count as a token of rank 0?

# %%
predict("15.7", ..., "weight of rank 1's token, relative to a token of rank 0, in a mean of means")


# %% tags=["exercise-15.7"]
from .ex7_token_losses import token_losses


# %%
def uneven() -> tuple[list[Tensor], list[Tensor]]:
    """Return 4 micro-batches: the first 2 are rank 0's. They have 40, 12, 8 and no targets."""
    tokens, targets = batch(16)
    targets = targets.clone()
    for part, left in zip(targets.chunk(4), (40, 12, 8, 0), strict=True):
        part.flatten()[:] = torch.where(torch.arange(part.numel()) < left, part.flatten(), IGNORED)
    return list(tokens.chunk(4)), list(targets.chunk(4))


Loss = Callable[[Sequence[Tensor], Sequence[Tensor], Group], list[Tensor]]


def mean_of_means(logits: Sequence[Tensor], targets: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Divide each micro-batch by its own number of targets."""
    counts = [(each != IGNORED).sum().clamp(min=1) for each in targets]
    sums = [cross_entropy(a, b, "sum") for a, b in zip(logits, targets, strict=True)]
    return [each / count / len(counts) for each, count in zip(sums, counts, strict=True)]


def per_rank(logits: Sequence[Tensor], targets: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Divide by the number of targets of this rank."""
    count = sum((each != IGNORED).sum() for each in targets).clamp(min=1)
    return [cross_entropy(a, b, "sum") / count for a, b in zip(logits, targets, strict=True)]


def without_n(logits: Sequence[Tensor], targets: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Divide by the number of all targets, and forget that the gradients are averaged."""
    return [each / group.size() for each in token_losses(logits, targets, group)]


def logits_of(model: GPT, tokens: Tensor) -> Tensor:
    found: list[Tensor] = []
    model(tokens, tokens, lambda logits, _: (found.append(logits), logits.sum())[1])
    return found[0]


def gradient_with(losses_of: Loss) -> Tensor:
    """Return the averaged gradient of 2 ranks with 2 micro-batches each, as one vector."""
    model, group = model_of(), comm.world()
    tokens, targets = (each[2 * group.rank() : 2 * group.rank() + 2] for each in uneven())
    for loss in losses_of([logits_of(model, each) for each in tokens], targets, group):
        loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    comm.all_reduce(flat, group, comm.MEAN).wait()
    return flat.cpu()


def gradient_alone() -> Tensor:
    model = model_of()
    tokens, targets = uneven()
    model(torch.cat(tokens), torch.cat(targets)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()


# %% [markdown]
# ### Measured: the gradient of two ranks with two micro-batches each
#
# They have 40, 12, 8 and no targets.

# %%
(right,) = launch(gradient_alone, 1)
ways = {
    "yours": token_losses,
    "mean of means": mean_of_means,
    "means of ranks": per_rank,
    "without the factor N": without_n,
}
gradients = launch(lambda: [gradient_with(way) for way in ways.values()], 2)[0]
for name, gradient in zip(ways, gradients, strict=True):
    far = ((gradient - right).norm() / right.norm()).item()
    cosine = F.cosine_similarity(gradient, right, dim=0).item()
    length = (gradient.norm() / right.norm()).item()
    print(f"{name:22} {length:.2f} times as long; cosine of the angle {cosine:.3f}; off by {far:.0%}")
    assert name != "yours" or far < 1e-12
slips = {
    "each rank's mean counts 1/2: a token of rank 0 has 1/10, the token of rank 1 has 1/2": 1,
    "rank 1's weight is 3 times too large and rank 0's 3/5 of the right one": 3,
}
outcome("15.7", (1 / 2) / (1 / 2 / 5), how="computed", slips=slips)

# %% [markdown]
# A missing factor N changes the length of the gradient only. AdamW notices it through its epsilon only; clipping of the
# gradients, which comes before AdamW, does notice. A mean of means changes the gradient's *direction*. No learning rate
# repairs that.
#
# Your function needs the number of all targets *before* the first backward pass, so all micro-batches of a step have to
# be there when it begins. One can also run backward on the sums, as each micro-batch arrives, count the targets
# meanwhile, and multiply the gradients by N / T before the optimizer step and before clipping:
# [torchtune](https://github.com/meta-pytorch/torchtune/pull/1917) changed to this.
#
# With context parallelism, ranks have parts of the same sequences and count, too: the group then has d · c ranks. Ranks
# of `tp` have the same targets and do not count. Neither do the stages of `pp`, of which only the last has a loss.
#
# ## 15.8 Ring attention
#
# *15 minutes, hard*
#
# Context parallelism cuts the *sequences*. All layers but attention treat tokens separately. In attention, a query
# needs the keys and values of all tokens before it. In ring attention ([Liu et al.](https://arxiv.org/abs/2310.01889)),
# queries stay where they are, and keys and values go round: in each of c rounds, a rank attends to the keys that it
# has, while it passes them on to the next rank.
#
# Softmax divides by a sum over all keys, which no single round can compute. But sums can be combined. With weights
# exp(score - top), where top is the block's largest score, a block gives a weighted sum of values and a sum of weights.
# Two blocks have different tops, so both are rescaled to the larger one before they are added. The final division comes
# last. This is *online softmax*, and FlashAttention computes its tiles in the same way.
#
# Under a causal mask, late queries have more work. If each rank has one contiguous chunk, the last rank attends to
# everything. In a zig-zag cut, each rank has two chunks: the i-th from the start and the i-th from the end.
#
# Predict: 4 ranks have one contiguous chunk each. How many times the mean work does the last rank have?

# %%
predict("15.8", ..., "work of the last of 4 ranks, relative to the mean, with contiguous chunks")


# %% tags=["exercise-15.8"]
from .ex8_ring_attention import ring_attention


# %%
def block(work: list[float], q: Tensor, k: Tensor, v: Tensor, diagonal: bool) -> Sums:
    """Attend from a chunk to a chunk, and count the work: a masked half is left out, as kernels do."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if diagonal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    work.append(q.shape[1] * k.shape[1] * (0.5 if diagonal else 1.0))
    return weights @ v, top, weights.sum(-1, keepdim=True)


def sequence(tokens: int = 64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randn(4, tokens, 8, generator=draw, dtype=torch.float64).to(rank_device()) for _ in range(3)]


def around(cut: Cut) -> tuple[float, float, float]:
    """Return the largest difference from one process, this rank's work, and the bytes that it sends."""
    group, work = comm.world(), []
    q, k, v = (cut.take(each, group.rank(), 1).contiguous() for each in sequence())
    chunks = [cut.of_rank(rank) for rank in range(group.size())]
    with comm.record() as calls:
        out = ring_attention(q, k, v, chunks, partial(block, work), group)
    whole = F.scaled_dot_product_attention(*(each[None] for each in sequence()), is_causal=True)[0]
    far = (out - cut.take(whole, group.rank(), 1)).abs().max().item()
    return far, sum(work), sum(call.wire for call in calls)


# %% [markdown]
# ### Measured: the attention, and the work of each rank

# %%
RING = 4
work = {}
cuts = {"contiguous": Cut(RING), "zig-zag": Cut(RING, zigzag=True)}
by_rank = launch(lambda: [around(cut) for cut in cuts.values()], RING)
for name, seen in zip(cuts, zip(*by_rank, strict=True), strict=True):
    mean = sum(each for _, each, _ in seen) / RING
    work[name] = [each / mean for _, each, _ in seen]
    print(f"{name}: equal to one process within 1e-12: {max(far for far, _, _ in seen) < 1e-12}")
    shown = ", ".join(f"{each:.2f}" for each in work[name])
    print(f"    work of each rank: {shown} of the mean; {seen[0][2]:,.0f} bytes sent by rank 0")
outcome(
    "15.8",
    work["contiguous"][-1],
    slips={
        "the chunk on the diagonal is half masked: 3.5 of 8 units, where the mean is 2": 2,
        "the last rank has the most work of all, but its own chunk is half masked": 1.6,
        "this is relative to all work, not to the mean": 7 / 16,
    },
)
ranks = [*range(RING)]
formula = {name: (ranks, [RING * cut.work(rank) for rank in ranks]) for name, cut in cuts.items()}
plots.lines(
    {name: (ranks, each) for name, each in work.items()},
    expected=formula,
    xlabel="rank",
    ylabel="work, relative to the mean",
    title=f"With contiguous chunks, the last rank has {work['contiguous'][-1]:.2f} times the mean work; with zig-zag, "
    "all have the same",
    says="Pairs of a query and a key that your ring computes on 4 ranks. Hollow markers: (2 i + 1) / c for chunk i of "
    "c, and two chunks of 2 c.",
    lab="15",
)

# %% [markdown]
# With contiguous chunks, the ranks wait for the last one: attention takes (2 c - 1) / c times as long as with equal
# work, nearly twice. The bytes are the same.
#
# ### A published comparison whose units differ
#
# The ring is one way. *Ulysses* ([Jacobs et al.](https://arxiv.org/abs/2309.14509)) exchanges heads for tokens in
# all-to-alls: each rank then has all tokens of some heads, and attention is that of one process. With grouped heads,
# let r be the number of key heads divided by the number of query heads. A [public
# discussion](https://github.com/vllm-project/vllm-omni/issues/5092) compares volumes on P ranks, all "∝ Q": 2 + 2 r for
# Ulysses, and 2 r (P - 1) / P for the ring and for an all-gather of keys and values. With r = 1/8, these are 2.25 and
# 0.22 on 8 ranks, a factor of ten. P is our c.
#
# Check the units. A rank of the ring passes on the keys and values of *all* ranks but one. A rank of Ulysses exchanges
# its *own* tokens' queries, keys, values and outputs, a P-th of the sequence each.
#
# Predict: with 8 ranks and r = 1/8, how many times as many bytes does a rank of Ulysses send as a rank of the ring?

# %%
predict("units", ..., "bytes of Ulysses to bytes of the ring, forward pass, 8 ranks, r = 1/8")


# %%
def sent_by(kind: type) -> float:
    """Return the bytes that a rank sends in the forward pass of an attention with 64 heads of queries, 8 of keys."""
    ranks = dist.get_world_size()
    q, k, v = (torch.randn(1, heads, 16 // ranks, 8, device=rank_device()) for heads in (64, 8, 8))
    with torch.no_grad(), comm.record() as calls:
        kind(comm.world(), Cut(ranks, zigzag=False))(q, k, v)
    return sum(call.wire for call in calls)


whole = 4 * 64 * 16 * 8  # bytes of the queries of the whole sequence
factor = {}
for ranks in (4, 8):
    ulysses, ring = launch(lambda: [sent_by(kind) for kind in (UlyssesAttention, RingAttention)], ranks)[0]
    factor[ranks] = ulysses / ring
    print(f"{ranks} ranks, in units of all queries: Ulysses {ulysses / whole:.4f}, ring {ring / whole:.4f}")
slips = {
    "2 + 2 r is in units of a rank's own queries, 2 r (P - 1) / P in units of all queries": 72 / 7,
    "a rank's own part of the all-to-all stays where it is: a factor (P - 1) / P for Ulysses, too": 9 / 7,
}
outcome("units", round(factor[8], 4), slips=slips)

# %% [markdown]
# In the units of the whole sequence's queries, Q, the forward pass sends
#
# $$\text{ring: } 2 r \, Q \, \frac{c - 1}{c} \qquad \text{Ulysses: } (2 + 2 r) \, \frac{Q}{c} \, \frac{c - 1}{c}$$
#
# so they are equal at c = 1 + 1/r: for c = 2 if every query head has keys of its own, and for c = 9 with r = 1/8. On
# more ranks than that, Ulysses sends less. Ulysses needs enough heads, however, and the ring overlaps its messages with
# computation.
#
# ## 15.9 A checkpoint from one layout to another
#
# *10 minutes, medium*
#
# A job was saved as `pp` = 2, `tp` = 2, and goes on as `tp` = 4. Each rank has written one file with its parts.
# Gathering the entire model to cut it again would need the memory of one process: a rank should read what it needs, and
# no more.
#
# A part of a parameter is a *box*: an interval in each dimension. What a saved and a wanted box have in common is a
# box, too, with one place in the file and another in the new part. That is all of resharding, whatever the axes are:
# `pp` decides which names are in a file, `tp` and FSDP decide the intervals, and replicas have saved equal boxes.
#
# Predict: from how many of the 4 files does rank 0 of `tp` = 4 have to read, at the least?

# %%
predict("15.9", ..., "files that rank 0 of tp = 4 reads, saved as pp = 2, tp = 2")


# %% tags=["exercise-15.9"]
from .ex9_reads import reads

# %%
FIRST, SECOND = ("q", "k", "v", "up", "head", "embed"), ("out", "down")  # layers, by the dimension of the weight's cut


def parameters_of() -> dict[str, Tensor]:
    """Return the model's parameters; q, k and v separately, because a rank's part of all three is not one box."""
    found = {}
    for name, p in model_of(torch.float32, torch.device("cpu")).state_dict().items():
        if ".qkv." in name:
            found |= {name.replace("qkv", each): part for each, part in zip("qkv", p.chunk(3), strict=True)}
        else:
            found[name] = p
    return found


def interval(size: int, parts: int, place: int) -> tuple[int, int]:
    return place * size // parts, (place + 1) * size // parts


def stage_with(name: str, stages: int) -> int:
    """Return the stage that has a parameter."""
    first, *others = name.split(".")
    if first == "blocks":
        return int(others[0]) * stages // LAYERS
    return 0 if first in ("embed", "position") else stages - 1


def box_of(name: str, shape: Sequence[int], mesh: Mesh, rank: int) -> Box:
    """Return a rank's part: an interval by tp, or rows by dp as in FSDP."""
    layer, box = name.split(".")[-2], [(0, size) for size in shape]
    dim = 0 if layer in FIRST else 1 if layer in SECOND and len(shape) == 2 else None
    if dim is not None:
        box[dim] = interval(shape[dim], mesh.tp, mesh.place(rank, "tp"))
    if mesh.dp > 1:
        box[0] = interval(shape[0], mesh.dp, mesh.place(rank, "dp"))
    return tuple(box)


def boxes(text: str) -> list[dict[str, Box]]:
    """Return the boxes of each rank of a mesh."""
    mesh = Recipe.parse(text).mesh
    shapes = {name: tuple(p.shape) for name, p in parameters_of().items()}
    names = [
        [name for name in shapes if stage_with(name, mesh.pp) == mesh.place(rank, "pp")] for rank in range(mesh.ranks)
    ]
    return [{name: box_of(name, shapes[name], mesh, rank) for name in mine} for rank, mine in enumerate(names)]


def elements(box: Box) -> int:
    return math.prod(max(0, b - a) for a, b in box)


def fewest_files(saved: Sequence[Mapping[str, Box]], mine: Mapping[str, Box]) -> int:
    """Return the smallest number of files that have all parts of a rank."""

    def found(name: str, files: Collection[int]) -> int:
        there = {saved[file][name] for file in files if name in saved[file]}
        pairs = [zip(box, mine[name], strict=True) for box in there]
        return sum(elements(tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pair)) for pair in pairs)

    numbers = range(len(saved))
    choices = [files for count in range(1, len(saved) + 1) for files in combinations(numbers, count)]
    return min(len(files) for files in choices if all(found(name, files) == elements(mine[name]) for name in mine))


def cut_out(p: Tensor, box: Box) -> Tensor:
    return p[tuple(slice(a, b) for a, b in box)].clone()


def save(folder: Path, text: str) -> None:
    """Write this rank's file."""
    rank, whole = dist.get_rank(), parameters_of()
    torch.save({name: cut_out(whole[name], box) for name, box in boxes(text)[rank].items()}, folder / f"{rank}.pt")


def load(folder: Path, saved: str, wanted: str) -> tuple[bool, int, int, int]:
    """Read this rank's parts by your plan; are they right, and how many bytes of which size from how many files?"""
    mine, whole = boxes(wanted)[dist.get_rank()], parameters_of()
    parts = {name: torch.full([b - a for a, b in box], float("nan")) for name, box in mine.items()}
    plan = reads(boxes(saved), mine)
    files = {number: torch.load(folder / f"{number}.pt", mmap=True) for number in {each.file for each in plan}}
    for file, name, source, target in plan:
        parts[name][target] = files[file][name][source]
    right = all(torch.equal(part, cut_out(whole[name], mine[name])) for name, part in parts.items())
    size = sum(files[each.file][each.name][each.source].nbytes for each in plan)
    return right, size, sum(part.nbytes for part in parts.values()), len(files)


# %% [markdown]
# ### Measured: one checkpoint, four layouts
#
# Files are opened with `mmap=True`, so a read touches only its own slices.

# %%
SAVED = "pp=2,tp=2"
with tempfile.TemporaryDirectory() as folder:
    launch(save, 4, Path(folder), SAVED)
    in_files = sum(part.nbytes for part in parameters_of().values())
    print(f"saved as {SAVED}; the model has {in_files:,} bytes")
    for wanted in ("tp=4", "dp=2", "pp=4", "dp=1"):
        loaded = launch(load, Recipe.parse(wanted).mesh.ranks, Path(folder), SAVED, wanted)
        assert all(right and size == needed for right, size, needed, _ in loaded)
        for rank, (right, size, _, files) in enumerate(loaded):
            print(f"{wanted:6} rank {rank}: parts are right: {right}; {size:7,} bytes from {files} files")
slips = {
    "the quarter of a layer lies in one half of it, but each stage has its own files": 1,
    "a rank reads one half of each layer: the other half's files have nothing for it": 4,
}
outcome("15.9", fewest_files(boxes(SAVED), boxes("tp=4")[0]), how="computed", slips=slips)

# %% [markdown]
# Every rank reads exactly the bytes that it keeps. Some ranks may open more files than they have to: replicated
# parameters are in several files, and a plan that always takes the first of them, or the last, also opens that one.
# `torch.distributed.checkpoint` makes the same plan from the metadata of the files. It
# saves replicated parameters only once, and deals them out among the ranks.
#
# The optimizer state is cut as its parameters are, so it takes the same plan. A *fused* qkv does not: a tensor-parallel
# rank has a part of q, of k and of v, three boxes of one parameter. A checkpoint has to say so.
#
# ## Expert parallelism
#
# There is a fifth axis, which this course does not build yet. In a mixture of experts, the MLP of a block is replaced
# with many, the *experts*, and a router sends each token to a few of them. Expert parallelism gives each rank some of
# the experts, and moves the tokens instead of the weights: an all-to-all takes each token to the ranks of its experts,
# another one brings the results back, and the backward pass repeats both. The axis `ep` usually lies inside `dp`: ranks
# that have different samples for attention exchange tokens for the experts. So two kinds of parameters have different
# data-parallel groups: those of attention are averaged over all of `dp`, those of an expert only over the ranks that
# hold this expert. But both gradients are divided by the same number, that of all tokens, as in 15.7.
#
# ## What is still missing
#
# - Overlap. Here, a rank waits for every message immediately. In practice, gradients are reduced during the last
#   backward passes, and pipeline messages are received ahead. Tensor-parallel messages are the hardest to hide, which
#   is one more reason to keep them inside a host.
# - The backward pass of ring attention, in which gradients of keys and values go round as well: see
#   `minifsdp/context_parallel`.
# - A check of the gradient's norm. Clipping needs the norm of *all* gradients: summed over `pp` and `tp`, where
#   replicated parameters count once.
#
# ## What to remember
#
# 1. A rank has a place and a group on each axis. Ranks that differ on more than one axis never talk.
# 2. The last axis has neighbouring ranks. Put the axis with the most bytes there: `tp`. Without overlap, `dp` comes
#    next, and then `pp`. Llama 3 has TP, CP, PP, DP from the inside: data-parallel messages can be overlapped with
#    computation, and those of a pipeline are small, but the next stage waits for them.
# 3. Over `tp`, gradients of what each rank applied to its own tokens are summed. Over `dp`, all gradients are averaged.
#    No gradient is averaged over `tp`.
# 4. Each axis divides what the others send: `dp` sends the gradients of 1 / (p t) of the model.
# 5. The loss is a mean over tokens. Where N ranks average their gradients, multiply a sum over tokens by N / T, with T
#    the number of all targets: before backward, or the gradients afterwards.
# 6. Blocks of attention combine by their maxima and sums. Under a causal mask, cut the sequence in zig-zag.
# 7. A layout is a list of boxes. Two layouts have boxes in common, and these are all the reads that resharding needs.
#
# ## Questions
#
# **1. A colleague averages all gradients over all ranks of a mesh dp x tp with one all-reduce, "because it is simpler".
# The loss goes down. What do you say?**
#
# <details><summary>Answer</summary>
#
# Ranks of tp hold different parts of most parameters, so the average mixes gradients of different elements. Gradients
# of norms under sequence parallelism become t times too small. Compare the losses of three steps with one process in
# float64: they differ in the second step.
# </details>
#
# **2. You double t from 4 to 8 and halve d. What happens to the bytes that a rank sends on each axis?**
#
# <details><summary>Answer</summary>
#
# Each replica has twice as many samples, so a rank's pipeline messages double. Tensor parallelism sends more than twice
# as much: the factor (t - 1) / t grows as well. A rank holds half of the parameters, so data parallelism sends less
# than half. If hosts have 8 ranks, every dp group now spans hosts.
# </details>
#
# **3. The published figures of a run say: pp = 4, dp = 16, tp = 8 on hosts of 8 ranks. Which axes cross hosts, if tp is
# last?**
#
# <details><summary>Answer</summary>
#
# A host is full with one tp group. So both dp and pp cross hosts, in either order. The order of pp and dp matters only
# if there is a third level, such as racks.
# </details>
#
# **4. Rank 3 has only padding in this step. May it skip its backward pass?**
#
# <details><summary>Answer</summary>
#
# No. Its loss is 0, but its gradients take part in the all-reduce, and tensor-parallel ranks wait for it in every
# block. With a sum, divided by the number of all targets, it contributes zeros. With its own mean, it would contribute
# nan.
# </details>
#
# **5. Why does zig-zag take 2 c chunks and not c chunks in another order?**
#
# <details><summary>Answer</summary>
#
# Chunk i of c has (2 i + 1) / c² of the work. With one chunk on each rank, these differ, in any order. Two chunks whose
# numbers add up to 2 c - 1 have the same work together on every rank.
# </details>
#
# **6. A checkpoint of a pipeline with tied weights has the embedding in the first stage's files and the head in those
# of the last. What does your plan read for one process?**
#
# <details><summary>Answer</summary>
#
# If both names are saved, it reads both, and they are equal. If the tied weight is saved under one name, the plan reads
# it once, and the loader ties the modules again. A plan by names cannot know that two names are one parameter.
# </details>
#
# ## Further reading
#
# - Narayanan et al., [Megatron-LM on GPU clusters](https://arxiv.org/abs/2104.04473), section 3: which axis where;
#   Llama Team, [Llama 3](https://arxiv.org/abs/2407.21783), section 3.3.2: the order TP, CP, PP, DP, and zig-zag
#   chunks.
# - Liu et al., [Ring attention](https://arxiv.org/abs/2310.01889); Milakov and Gimelshein, [Online
#   softmax](https://arxiv.org/abs/1805.02867); Brandon et al., [Striped attention](https://arxiv.org/abs/2311.09431);
#   Jacobs et al., [DeepSpeed Ulysses](https://arxiv.org/abs/2309.14509).
# - torch: `torch/distributed/device_mesh.py`, `torch/distributed/checkpoint/resharding.py`.
# - minifsdp: `mesh.py` (15.1), `build.py` (15.4), `cost/traffic.py` (15.5), `losses.py` (15.7), `context_parallel/`
#   (15.8), `checkpoint/` (15.9).
