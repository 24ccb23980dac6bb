# ---
# jupyter:
#   minifsdp:
#     lab: "11"
#     title: Hybrid sharding
#     minutes: 70
#     ranks: 4
# ---

# %% [markdown]
# # Lab 11: hybrid sharding
#
# Full sharding splits a model across *all* ranks, so every gather also crosses the network between hosts, which is far
# slower than the links inside a host. A model that fits on one host does not need to be split any further. *Hybrid
# sharding* shards inside groups of F ranks, usually one host, and *replicates* across the groups: FSDP inside, data
# parallelism outside. F is the **sharding factor**: F = 1 is data parallelism, and F = N is full sharding.
#
# ![Hybrid sharding: shards inside a group, replicas across groups](../slides/figures/practice-hybrid.svg)
#
# *From [lecture 5, FSDP in practice](../slides/practice.md), which comes before this lab.*
#
# **After this lab, you will be able to**
#
# - list the sharding groups and the replica groups, and create these process groups without a deadlock;
# - reduce a gradient in two stages, and explain why it is accumulated after the second stage and not in between;
# - predict, for every F, how many bytes a rank holds and sends, and how much traffic leaves a host;
# - choose F for a model and a cluster, and recognize when no F works.
#
# **You need** lab 01 (all-reduce, ring, groups) and lab 05 (units, gather, reduce-scatter).
#
# **Time** 70 minutes. **Runs** on a laptop (gloo, 4 processes that represent 2 hosts with 2 ranks each), on one GPU, or
# on a GPU node (NCCL, one rank per GPU). **Memory** less than 20 MiB of tensors per rank. The results for clusters come
# from a cost model, whose assumptions are listed next to it.

# %% tags=["setup"]
# set-up
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from minifsdp import comm, process_groups
from minifsdp.comm import Group, Handle
from minifsdp.course.workshop import exercise, outcome, predict


class Replica(Protocol):
    """A unit with replicas of its shard on other ranks, as 11.3 and 11.4 use it.

    Attributes:
        mean: the reduce-scattered gradient [P / F], which is the mean over the sharding group; None if there is none.
        replicas: the process group of the ranks that hold the same shard.
        across: the handle of the current reduction over the replicas; None if there is none.
    """

    mean: Tensor | None
    replicas: Group
    across: Handle | None

    def deliver(self, mean: Tensor) -> None:
        """Add `mean` [P / F] to the shard's `.grad`, and release its memory."""


class Traffic(NamedTuple):
    """The bytes sent in one step.

    Attributes:
        sharding: sent by a rank in its sharding group.
        replicas: sent by a rank to its replicas.
        leaves: sent out of a host by all of its ranks together.
    """

    sharding: float
    replicas: float
    leaves: float


class Choice(NamedTuple):
    """A strategy ("data parallelism", "hybrid sharding", "full sharding" or another) and its factor."""

    name: str
    factor: int | None


# %% [markdown]
# ## The slowest link sets the pace
#
# In this example, the course's GPT is fully sharded over 4 ranks. Ranks 0 and 1 represent one host, and ranks 2 and 3
# another. The ring of a collective is 0 → 1 → 2 → 3 → 0: two of its four connections are inside a host, and two are
# between hosts. Every connection of a ring carries the same number of bytes, so the slowest connection sets the pace,
# and each gather waits for the network.

# %%
import statistics
import tempfile
import time
import warnings
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
from torch.profiler import record_function

from minifsdp import FullyShardedDataParallel, device
from minifsdp.cost import data_parallel as closed_form
from minifsdp.course.ladder import data
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import Trainer, sizes_of
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp import ShardingStrategy, SyncSchedule
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.plan import Plan
from minifsdp.gpt import Block
from minifsdp.instruments import plots
from minifsdp.instruments.launch import RankError, launch, rank_device
from minifsdp.instruments.link.emulated import EmulatedLink, HostLinks, let_communication_go_first
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.timeline import read_trace
from minifsdp.instruments.watch.trace import record_trace

RANKS, PER_HOST = 4, 2
SETTINGS = Settings(ranks=RANKS, batch=4, layers=5, width=105, context=16)
BATCHES = list(SETTINGS.batches())  # the same on every rank; each takes its rows
SIZES = sizes_of(SETTINGS.model())  # elements of each parameter and of each unit, the root first
UNITS = len(SIZES.units)
MIB, GB = 2**20, 1e9


def unit_bytes(factor: int) -> list[int]:
    """Return the bytes of each unit, padded for `factor` shards, the root first."""
    return [4 * factor * -(-sum(unit) // factor) for unit in SIZES.units]


whole = sum(unit_bytes(1))
print(f"{UNITS} units, {whole:,} bytes of parameters, as many of gradients, twice as many of Adam's state")

# %% [markdown]
# ## 11.1 Plan the groups
#
# *8 minutes, medium*
#
# N ranks form sharding groups of F ranks each. Ranks are numbered host by host, so *consecutive* ranks share a host,
# and a sharding group consists of F consecutive ranks. Rank j of each group holds shard j; the ranks with the same
# shard form a *replica group*. Every rank is in one group of each kind. If the ranks are arranged in a table, sharding
# groups are the rows and replica groups are the columns; this is a 2-D `DeviceMesh`.
#
# Predict: with 64 ranks and F = 8, how many process groups of both kinds are there in total?

# %%
predict("11.1", ..., "process groups of 64 ranks with F = 8")


# %% tags=["exercise-11.1"]
from .ex1_plan_groups import plan_groups

# %%
sharding, replicas = plan_groups(64, 8)
outcome("11.1", len(sharding) + len(replicas), how="computed", slips={"of one sort": 8, "every pair of them": 64})
print("4 ranks, F = 2: sharding groups", *plan_groups(4, 2)[0], "replica groups", *plan_groups(4, 2)[1])
for factor in (1, 2, 4):
    sharding, replicas = plan_groups(RANKS, factor)
    print(f"F = {factor}: {len(sharding)} sharding group(s) of {factor}; {factor} replica group(s) of {len(sharding)}")

# %% [markdown]
# ## 11.2 Create the groups
#
# *10 minutes, medium*
#
# `dist.new_group(ranks)` creates a process group. It is a collective over *all* ranks, not only over the members:
# members find each other by the group's name, which is a count of the rank's calls so far. So **every rank must create
# every group, in the same order**, including the groups of which it is not a member. If a rank skips a group, its count
# differs from that of the other ranks. Ranks then wait for each other in different groups under the same name, or find
# the wrong peers, and the program hangs in `new_group` or, much later, in the first collective. (With
# `use_local_synchronization=True`, the name is derived from the ranks of the group, and only members call `new_group`.
# Overlapping groups such as these can then deadlock unless all ranks create them in the same order; see the docstring
# of torch's `new_group`.)


# %% tags=["exercise-11.2"]
from .ex2_make_groups import make_groups


# %%
def meet(factor: int) -> tuple[list[int], list[int], bool]:
    """Return the ranks in this rank's groups, and whether a DeviceMesh has the same groups."""
    from torch.distributed.device_mesh import init_device_mesh

    mine = [process_groups.global_ranks(group) for group in make_groups(*plan_groups(dist.get_world_size(), factor))]
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size() // factor, factor))
    return *mine, [process_groups.global_ranks(mesh.get_group(dim)) for dim in (1, 0)] == mine


for rank, (together, same_shard, as_mesh) in enumerate(launch(meet, RANKS, PER_HOST)):
    print(f"rank {rank}: shards with {together}, has replicas {same_shard}, a 2-D mesh has the same: {as_mesh}")

# %% [markdown]
# `FullyShardedDataParallel` takes the pair of groups as `process_group`, or a mesh as `device_mesh`. With a wrapping
# policy but without these arguments, it creates its own groups, with `LOCAL_WORLD_SIZE` ranks in each sharding group
# (`minifsdp/fsdp/torch_api/groups.py`).
#
# ### Break it: create only your own groups
#
# This version looks correct: every rank makes two calls, one for each of its own groups.


# %% tags=["nbval-ignore-output"]
def only_mine() -> None:
    rank = dist.get_rank()
    lists = [next(group for group in groups if rank in group) for groups in plan_groups(RANKS, PER_HOST)]
    inside, _ = [dist.new_group(ranks) for ranks in lists]
    comm.all_reduce(torch.ones(1, device=rank_device()), inside).wait()


try:
    launch(only_mine, RANKS, timeout=1)
    print("this run happened to finish")
except RankError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# Ranks 0 and 1 create [0, 1] under the first name, ranks 2 and 3 create [2, 3] under the same name, and all four store
# their addresses under the same keys of one store. Which address a rank finds depends on timing. If you run the cell
# again, other ranks may hang, in `new_group` or in the first collective, far from the mistake.
#
# ## 11.3 Reduce in two stages
#
# *5 minutes, easy*
#
# After the backward pass, each rank has the gradient [P] of its own samples. Its optimizer needs the mean over *all*
# ranks, for its shard [P / F]:
#
#     gradient [P] --reduce-scatter in the sharding group--> mean of F ranks [P / F]
#                  --all-reduce over the replicas----------> mean of N ranks [P / F] --> added to the shard's .grad
#
# The first stage is the same as in lab 05. Hybrid sharding adds the second stage, which is the only traffic to other
# hosts. Nothing in the rest of the backward pass reads its result, so the wait can come later. The all-reduce starts
# after the reduce-scatter, and must finish before the gradients are read (by gradient clipping or by the optimizer) and
# before the unit's next reduction. On a GPU, the all-reduce runs on its own stream, alongside the next reduce-scatters,
# and its buffer must live until both stages have used it (torch's `_reduce_grad` uses `_all_reduce_stream` and
# `record_stream`).
#
# Predict: the model has 6 units and is trained with F = 2 on 2 hosts with 2 ranks each. In one step, how many
# collectives of a *rank* cross hosts? (11.5 counts them.)

# %%
predict("11.3", ..., "collectives of a rank in one step that cross hosts, 6 units")


# %% tags=["exercise-11.3"]
from .ex3_start_across import start_across

# %% [markdown]
# ## 11.4 Finish
#
# *8 minutes, medium*
#
# Your next function is the other half of the second stage. The engine calls it for every unit at the end of the
# backward pass, and before the unit's next reduction. It is therefore also called for units without a pending
# reduction, and more often than your function from 11.3.


# %% tags=["exercise-11.4"]
from .ex4_finish_across import finish_across

# %% [markdown]
# minifsdp's engine does the rest. A unit has a flat parameter and a plan with its sharding group (`plan.inside`) and
# its replica group (`plan.across`). The engine calls `_accumulate` after the unit's reduce-scatter, and `finish_reduce`
# at the end of the backward pass and before the unit's next reduction. The class below calls your functions in these
# methods, and `fsdp_of` passes this class to FSDP (`unit=`).


# %%
class YourHybridUnit(FlatUnit):
    """A unit with replicas that calls your functions."""

    start, finish = staticmethod(start_across), staticmethod(finish_across)

    def __init__(self, flat: FlatParameter, plan: Plan, *args: Any, **kwargs: Any) -> None:
        self.replicas = plan.across
        self.mean: Tensor | None = None
        self.across: Handle | None = None
        super().__init__(flat, plan, *args, **kwargs)

    def _accumulate(self) -> None:
        device.free(self._reduced)  # the unsharded gradient
        self.mean = self._mean
        del self._reduced, self._mean
        self.start(self)

    def finish_reduce(self) -> None:
        self.finish(self)
        super().finish_reduce()

    def deliver(self, mean: Tensor) -> None:
        self._deliver(mean)


def fsdp_of(factor: int, unit: type[FlatUnit] = FlatUnit, **kwargs: Any) -> FullyShardedDataParallel:
    """Build the lab's model with sharding factor F. `unit` is the class of units with replicas."""
    model = SETTINGS.model().to(rank_device())
    ranks = dist.get_world_size()
    strategy, group = ShardingStrategy.HYBRID_SHARD, None
    if factor == 1:
        strategy = ShardingStrategy.NO_SHARD
    elif factor == ranks:
        strategy = ShardingStrategy.FULL_SHARD
    else:
        group = make_groups(*plan_groups(ranks, factor))
        kwargs["unit"] = unit
    return FullyShardedDataParallel(model, group, strategy, auto_wrap_policy={Block}, **kwargs)


def loss_of(model: Any, batch: data.Batch) -> Tensor:
    """Return the loss of this rank's samples of a batch."""
    tokens, targets = data.shard(batch, dist.get_rank(), dist.get_world_size())
    return model(tokens.to(rank_device()), targets.to(rank_device()))


def shard_gradients(model: FullyShardedDataParallel) -> dict[int, Tensor]:
    """Return this rank's gradient shards of all units, one after the other, after one, two and three batches."""
    found = {}
    for count, batch in enumerate(BATCHES[:3], 1):
        loss_of(model, batch).backward()
        found[count] = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])
    return found


# %% [markdown]
# ### Measured: the same gradients
#
# This test compares the gradients from your functions, from minifsdp's HYBRID_SHARD, from torch's HYBRID_SHARD, and
# from a single process with the full batch. It does so after one micro-batch, and after three accumulated micro-batches
# with a reduction each. Computing the mean of two means of two values takes only additions and halvings, so your result
# equals minifsdp's bit for bit.


# %%
def torchs() -> Any:
    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives that its own FSDP1 uses
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
    from torch.distributed.fsdp import ShardingStrategy as Strategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    groups = make_groups(*plan_groups(dist.get_world_size(), PER_HOST))
    policy, model = ModuleWrapPolicy({Block}), SETTINGS.model().to(rank_device())
    return TorchFSDP(model, groups, Strategy.HYBRID_SHARD, auto_wrap_policy=policy, device_id=rank_device())


def compare() -> dict[str, dict[int, Tensor]]:
    """Return, by kind, this rank's gradient shards by the number of batches."""
    makers = {
        "yours": lambda: fsdp_of(PER_HOST, YourHybridUnit),
        "minifsdp": lambda: fsdp_of(PER_HOST),
        "torch": torchs,
    }
    return {name: shard_gradients(make()) for name, make in makers.items()}


def alone() -> dict[int, list[Tensor]]:
    """Return the gradients of a single process, by unit, flat, by the number of batches."""
    model = SETTINGS.model().to(rank_device())
    blocks = [list(block.parameters()) for block in model.blocks]
    inside = {p for block in blocks for p in block}
    units = [[p for p in model.parameters() if p not in inside], *blocks]
    found = {}
    for count, batch in enumerate(BATCHES[:3], 1):
        loss_of(model, batch).backward()
        found[count] = [torch.cat([p.grad.flatten() for p in unit]).cpu() for unit in units]
    return found


def my_shards(units: list[Tensor], factor: int, place: int) -> Tensor:
    """Return the shards of the rank at `place` in a sharding group."""
    padded = [torch.nn.functional.pad(unit, (0, -unit.numel() % factor)) for unit in units]
    return torch.cat([unit.chunk(factor)[place] for unit in padded])


found, (singly,) = launch(compare, RANKS), launch(alone, 1)
for count in (1, 3):
    expected = [my_shards(singly[count], PER_HOST, rank % PER_HOST) for rank in range(RANKS)]
    for kind in ("minifsdp", "torch"):
        equal = all(torch.equal(each["yours"][count], each[kind][count]) for each in found)
        print(f"{count} micro-batches: equal to {kind}'s HYBRID_SHARD bit for bit: {equal}")
    near = [
        bool((each["yours"][count] - wanted).abs().max() <= 1e-5 * wanted.abs().max())
        for each, wanted in zip(found, expected, strict=True)
    ]
    print(f"{count} micro-batches: equal to one process within 1e-5 of the largest gradient: {all(near)}")
    assert all(near), "not one process's gradients"
    same = all(torch.equal(found[rank]["yours"][count], found[rank - PER_HOST]["yours"][count]) for rank in (2, 3))
    print(f"{count} micro-batches: the two hosts hold the same shards' gradients: {same}")

# %% [markdown]
# ### Break it: accumulate before the second stage
#
# Adding to `.grad` first and then all-reducing `.grad` looks equivalent, and saves a buffer. But the reduction over the
# replicas may be a *sum*: torch sums in both stages and divides by N on the way (`_reduce_grad` in
# `torch/distributed/fsdp/_runtime_utils.py`). In that case, gradients from earlier micro-batches, already summed in
# `.grad`, are summed again.
#
# Predict: with three micro-batches and two replicas, how many times does the final gradient count
# the *first* micro-batch?

# %%
predict("11.4", ..., "times that the first of 3 micro-batches is counted on 2 replicas")


# %%
def sum_of_grad(unit: Any, divide: bool) -> None:
    """Accumulate, then reduce `.grad` over the replicas: a sum of divided values, or a mean."""
    if divide:
        unit.mean /= unit.replicas.size()
    unit.deliver(unit.mean)
    op = comm.SUM if divide else comm.MEAN
    unit.across = comm.all_reduce(unit.flat.shard.grad, unit.replicas, op)


def wait_only(unit: Any) -> None:
    if unit.across is not None:
        unit.across.wait()
        unit.across = unit.mean = None


class SumFirst(YourHybridUnit):
    start, finish = staticmethod(lambda unit: sum_of_grad(unit, divide=True)), staticmethod(wait_only)


class MeanFirst(YourHybridUnit):
    start, finish = staticmethod(lambda unit: sum_of_grad(unit, divide=False)), staticmethod(wait_only)


class NeverAcross(YourHybridUnit):
    """Forgets the second stage."""

    start = staticmethod(lambda unit: unit.deliver(unit.mean))
    finish = staticmethod(lambda unit: None)


def broken() -> dict[str, Any]:
    """Return the gradients of three micro-batches, and the parameters with and without the second stage."""
    kinds_of = {"a sum of what is divided": SumFirst, "a mean": MeanFirst}
    found: dict[str, Any] = {name: shard_gradients(fsdp_of(PER_HOST, unit))[3] for name, unit in kinds_of.items()}
    for name, unit in (("never", NeverAcross), ("yours", YourHybridUnit)):
        model = fsdp_of(PER_HOST, unit)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for batch in BATCHES[:3]:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        found[name] = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    return found


ruined = launch(broken, RANKS)
singles = [my_shards(singly[count], PER_HOST, 0) for count in (1, 2, 3)]
parts = [singles[0], singles[1] - singles[0], singles[2] - singles[1]]  # each micro-batch's own gradient
weights = torch.linalg.lstsq(torch.stack(parts, 1).double(), ruined[0]["a sum of what is divided"].double()).solution
outcome("11.4", round(weights[0].item()), slips={"once more in each of two": 3, "as it should be": 1})
print("accumulated before a sum, micro-batches 1, 2, 3 are counted", *(f"{w:.2f}" for w in weights.tolist()), "times")
close = bool((ruined[0]["a mean"] - singles[2]).abs().max() <= 1e-5 * singles[2].abs().max())
print(f"accumulated before a mean: equal to one process: {close}")
assert torch.allclose(weights, torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64), atol=1e-2)

# %% [markdown]
# With one micro-batch, the result is correct; with three, the first is counted 4 times and the second twice. If the
# reduction is a *mean*, the result is correct, because the mean of equal numbers is that number. But this order costs
# more: the all-reduce sends `.grad`, which is in float32 even if the mean is in bf16 (mixed precision). With CPU
# offload, it sends from host memory.
#
# ### Break it: forget the second stage
#
# Without the second stage, every host trains only on its own samples. Nothing hangs, and every loss decreases.

# %%
for name, what in (("never", "without the second stage"), ("yours", "yours")):
    apart = max((ruined[rank][name] - ruined[rank + PER_HOST][name]).abs().max().item() for rank in range(PER_HOST))
    print(f"{what}: the hosts' parameters are {'the same' if apart == 0 else 'different'} after 3 steps")

# %% [markdown]
# Each host now trains a different model, and a checkpoint saves only the model of the first host. Only a comparison of
# replicas reveals the mistake. From time to time, compute a checksum of the shards, and all-reduce its minimum and its
# maximum over the replica group. The minimum and the maximum must be equal.
#
# Replicas with different **initial** parameters or buffers stay different in the same way. With `sync_module_states`,
# torch broadcasts across hosts first and then inside each host (`torch/distributed/fsdp/_init_utils.py`). With either
# order, all ranks end up with the values of rank 0. If the broadcast across hosts comes first, the first rank of every
# host already has these values when the second broadcast begins. If the broadcast inside hosts comes first, every other
# host first distributes its own values, and the second broadcast overwrites them.
#
# All **N** ranks are data-parallel, not only one rank per host: the `num_replicas` of a sampler must be the world size,
# because otherwise the ranks of a host load the same samples.
#
# ## 11.5 The traffic that leaves a host
#
# *10 minutes, medium*
#
# Let M be the size of all padded units in bytes, and R = N / F the number of replicas. All collectives use the ring
# algorithm (lab 01). In a gather or reduce-scatter of n bytes over k ranks, each rank sends (k - 1) / k · n bytes; in
# an all-reduce, it sends twice as many.
#
# - In the sharding group, per step: each unit is gathered twice, except the root, which stays unsharded between the
#   forward and the backward pass and is gathered once; each gradient is reduce-scattered once.
# - In the replica group, per step: an all-reduce of every unit's mean gradient, in a buffer of 1/F of the unit's size.
#
# The traffic that leaves a *host* is a different quantity. A ring in rank order enters and leaves a host once, however
# many of its ranks are on that host. So only **one** rank of a ring sends bytes out of the host. But several rings may
# run at the same time, because each replica group has its own ring. (NCCL splits a collective into several rings over
# the network cards of a host, each with a fraction of the bytes. The total is the same.)
#
# Predict: for this lab's model on 2 hosts with 2 ranks each, how many times as many bytes does full sharding (F = 4)
# send out of a host as hybrid sharding (F = 2)? Ignore the exception for the root.

# %%
predict("11.5", ..., "bytes that leave a host, full sharding over hybrid, 2 hosts of 2")


# %% tags=["exercise-11.5"]
from .ex5_traffic import traffic

# %% [markdown]
# ### Measured: F = 1, 2 and 4
#
# The next cells measure the second step for each F, with the ledger and the log of the collectives. The field `wire` of
# a call is the number of bytes that its rank sends with the ring algorithm. These bytes are attributed to the rank's
# sharding group or to its replica group; they leave the host if the next rank in the ring is on the other host.


# %%
def take_step(trainer: Trainer, batch: data.Batch) -> None:
    with record_function("forward"):
        loss = loss_of(trainer.model, batch)
    with record_function("backward"):
        loss.backward()
    with record_function("optimizer"):
        trainer.optimizer.step()


def trainer_of(factor: int, **kwargs: Any) -> Trainer:
    model = fsdp_of(factor, YourHybridUnit, **kwargs)
    return Trainer(model, torch.optim.AdamW(model.parameters(), 1e-3))


def measure_memory() -> dict[int, dict[str, Any]]:
    return {factor: measure_one(factor) for factor in (1, 2, 4)}


def measure_one(factor: int) -> dict[str, Any]:
    """Return the bytes held and sent by this rank in its second step."""
    with Ledger() as ledger:
        trainer = trainer_of(factor, schedule=SyncSchedule)
        ledger.watch(trainer.model, trainer.optimizer)
        take_step(trainer, BATCHES[0])
        trainer.optimizer.zero_grad()
        ledger.reset_peaks()
        with comm.record() as calls:
            take_step(trainer, BATCHES[1])
        held = ledger.mark("step")
        unsharded, peak = ledger.peak_of("unsharded"), ledger.peak.tags
    sent = {"sharding": 0.0, "replicas": 0.0, "leaves": 0.0, "messages": 0}
    for call in calls:
        ranks = process_groups.global_ranks(dist.distributed_c10d._resolve_process_group(call.group))
        rank = dist.get_rank()
        following = ranks[(ranks.index(rank) + 1) % len(ranks)]
        sent["replicas" if call.op == "all_reduce" else "sharding"] += call.wire
        sent["leaves"] += call.wire if following // PER_HOST != rank // PER_HOST else 0
        sent["messages"] += len({each // PER_HOST for each in ranks}) > 1
    return {"held": held, "peak": peak, "unsharded": unsharded, **sent}


usage = launch(measure_memory, RANKS)

# %% tags=["C25"]
print(f"{'':31}" + "".join(f"{f'F = {factor}':>23}" for factor in (1, 2, 4)))
rows: dict[str, list[tuple[int, int]]] = {}
for factor in (1, 2, 4):
    mine, setting = usage[0][factor], closed_form.Setting(factor)
    held, sent = closed_form.fsdp(SIZES.units, setting), traffic(unit_bytes(factor), RANKS, PER_HOST, factor)
    leaves = sum(usage[rank][factor]["leaves"] for rank in range(PER_HOST))
    for what, predicted, measured in (
        ("holds: parameters", held.parameters, mine["held"]["parameters"]),
        ("holds: gradients", held.gradients, mine["held"]["gradients"]),
        ("holds: optimizer", held.optimizer, mine["held"]["optimizer"]),
        ("holds: unsharded, at most", held.unsharded_peak, mine["unsharded"]),
        ("sends in its sharding group", round(sent.sharding), round(mine["sharding"])),
        ("sends to its replicas", round(sent.replicas), round(mine["replicas"])),
        ("leaves its host", round(sent.leaves), round(leaves)),
    ):
        rows.setdefault(what, []).append((predicted, measured))
for what, pairs in rows.items():
    print(f"{what:31}" + "".join(f"{measured:>11,} / {predicted:<9,}" for predicted, measured in pairs))
print("bytes of rank 0 (last row: of both ranks of its host); measured / expected")
assert all(predicted == measured for pairs in rows.values() for predicted, measured in pairs)
messages = [usage[0][factor]["messages"] for factor in (1, 2, 4)]
outcome("11.3", messages[1], slips={"gathers stay inside": 3 * UNITS - 1, "of both replica groups": 2 * UNITS})
print("collectives of a step that cross hosts, F = 1, 2, 4:", *messages)
out = [measured for _, measured in rows["leaves its host"]]
ratio = 3 * 3 / 4 / (2 * 1 / 2)
slips = {"per rank: the rings of a host's two ranks add up": 2 * ratio, "3 against 2, and (N - 1) / N of both": 1.5}
outcome("11.5", ratio, how="computed", slips=slips)
print(
    f"full sharding sends {out[2] / out[1]:.4f} times as many bytes out of a host as hybrid; without the root {ratio}"
)

# %% [markdown]
# The sharding factor covers the whole range: with F = 1, a rank holds and sends as much as with DDP, and with F = 4 as
# much as with full sharding.
#
# Compare the last row of the table per rank and per host. **Per rank**, hybrid sharding sends 2 (R - 1) / R · M / F
# bytes to other hosts. This is roughly 1/F of a DDP rank's traffic, and with F = 8 about a twelfth of a fully sharded
# rank's traffic. Section 3.2.2 of the FSDP paper also counts per GPU. (Its volume for W ranks on hosts of G ranks, 2 M
# (W - 1) / (G W), is an upper estimate: the replica group of a rank has W / G members, which gives 2 M (W - G) / (G W),
# the formula above with F = G. The paper's F = W / G cannot keep a sharding group inside a host if F is the number of
# ranks in the group: that requires F = G.) But the ranks of a host send at the same time, and share the host's network
# cards. **Per host**, there are F rings with 1/F of the bytes each. Together, they send 2 (R - 1) / R · M bytes, about
# as many as the single ring of DDP. Full sharding sends 3 M bytes, which is 1.5 times as many if there are many hosts.
# Hybrid sharding therefore saves a third of the bytes on the network.
#
# It also matters *which* bytes remain: the computation waits for every gather, but for the all-reduces only at the end
# of the backward pass. Moreover, rings over R hosts have fewer steps, and therefore less latency, than rings over all N
# ranks.

# %%
peaks = {f"F = {factor}": usage[0][factor]["held"] for factor in (1, 2, 4)}
state = {name: {tag: held[tag] for tag in ("parameters", "gradients", "optimizer")} for name, held in peaks.items()}
plots.stages(
    state,
    predicted={
        f"F = {factor}": sum(rows[f"holds: {tag}"][number][0] for tag in ("parameters", "gradients", "optimizer"))
        for number, factor in enumerate((1, 2, 4))
    },
    title=f"On {RANKS} ranks, model state shrinks as 1/F: {sum(state['F = 1'].values()) / MIB:.1f} MiB with F = 1, "
    f"{sum(state['F = 4'].values()) / MIB:.1f} with F = 4",
    says="Bytes of a rank after the optimizer step, by sharding factor: data parallelism, hybrid, fully sharded.",
    lab="11",
)

# %% [markdown]
# ### Measured: a step on two kinds of link
#
# `HostLinks` emulates two links: a fast one between the ranks of a host (1 GB/s, 50 µs), and a slow one shared by the
# ranks of a host (16 MB/s, 2 ms). A message takes at least its transfer time on the link. Steps with F = 1, 2 and 4 are
# interleaved, and the output shows the median. Next to it is a lower bound: the transfer time of the bytes from your
# `traffic` on the slower of the two links, without latency, as if the links never waited for each other.


# %% tags=["nbval-ignore-output"]
INSIDE, ACROSS = (50e-6, 1e9), (2e-3, 16e6)  # seconds, bytes per second
TRACES = 3


def time_and_trace(folder: Path) -> dict[int, list[float]]:
    """Return the seconds of interleaved steps by sharding factor; trace more steps."""
    let_communication_go_first()
    where = rank_device()
    with HostLinks(EmulatedLink(*INSIDE), EmulatedLink(*ACROSS), PER_HOST) as links:
        trainers = {factor: trainer_of(factor) for factor in (1, 2, 4)}
        seconds: dict[int, list[float]] = {factor: [] for factor in trainers}
        for round_ in range(4):
            for factor, trainer in trainers.items():
                comm.all_reduce(torch.zeros(1, device=where), comm.world()).wait()  # start together
                start = time.perf_counter()
                take_step(trainer, BATCHES[round_])
                trainer.optimizer.zero_grad()
                device.synchronize(where)
                seconds[factor].append(time.perf_counter() - start)
        for factor, attempt in product((2, 4), range(TRACES)):
            with record_trace(folder / f"{factor}-{attempt}-{dist.get_rank()}.json", links):
                comm.all_reduce(torch.zeros(1, device=where), comm.world()).wait()
                take_step(trainers[factor], BATCHES[0])
    return {factor: each[1:] for factor, each in seconds.items()}


def by_link(spans: list[Any]) -> list[Any]:
    """Put traffic inside the host in its own lane; a GPU's kernel names do not separate it."""
    if not any(" across " in span.name for span in spans):
        return spans
    return [
        span._replace(lane="communication (inside)")
        if span.lane == "communication" and " across " not in span.name
        else span
        for span in spans
    ]


def fastest(folder: Path, factor: int) -> list[Any]:
    """Return the step least disturbed by other programs on this machine."""
    steps = [read_trace(folder / f"{factor}-{attempt}-0.json") for attempt in range(TRACES)]
    return min(steps, key=lambda spans: max(span.end for span in spans))


with tempfile.TemporaryDirectory() as folder:
    times = launch(time_and_trace, RANKS, Path(folder))[0]
    spans = {factor: by_link(fastest(Path(folder), factor)) for factor in (2, 4)}
medians = {factor: statistics.median(each) for factor, each in times.items()}
for factor, median in medians.items():
    sent = traffic(unit_bytes(factor), RANKS, PER_HOST, factor)
    slow, fast = sent.leaves / ACROSS[1], sent.sharding / INSIDE[1]
    print(f"F = {factor}: {median * 1e3:4.0f} ms a step; the links need {1e3 * max(slow, fast):4.0f} ms for the bytes")
hybrid, fully = (max(span.end for span in spans[factor]) for factor in (2, 4))
plots.timeline(
    {"hybrid, F = 2": spans[2], "fully sharded, F = 4": spans[4]},
    title="Hybrid sharding keeps gathers off the slow link: a step takes "
    f"{1e3 * hybrid:.0f} instead of {1e3 * fully:.0f} ms",
    says=f"Lanes of rank 0, the fastest of {TRACES} steps. Communication is the link between the hosts, the lane below "
    "it a link inside a host. Hybrid sharding needs the former only for all-reduces, and waits for them at the end.",
    lab="11",
)

# %% [markdown]
# Full sharding waits for the slow link before every unit, in both passes. With hybrid sharding, the forward pass does
# not use the slow link. But with so little compute, a hybrid step takes as long as its six all-reduces, and most of
# this time is spent waiting for them at the end of the backward pass. With more samples per rank, the backward pass
# would hide them.
#
# ## 11.6 Choose
#
# *8 minutes, medium*
#
# The largest factor needs the least memory. A *rank* sends the least with the smallest factor; a *host* sends the least
# if F is the number of its ranks. So among the factors that fit in memory, choose the fastest. If none fits, there are
# two possible reasons. First, the *shards* may be too large; then more ranks help. Second, the memory that sharding
# cannot reduce (unsharded units during their computation, and activations) may be too large by itself. Then no number
# of ranks helps, and the layers must be split by tensor or pipeline parallelism. If the activations are too large,
# recomputation helps.


# %% tags=["exercise-11.6"]
from .ex6_choose import choose

# %% [markdown]
# ### Modelled: which to choose when
#
# Everything in the cost model is an assumption that you can change:
#
# - Memory: 16 bytes of model state per parameter (lab 00), divided by F. If F > 1, two units (the limit from lab 08)
#   and the root are also held unsharded in bf16, as are the gradients of one unit and of the root. With recomputation,
#   the activations of a sample take 2 bytes times context · width for each layer, and another 40 bytes times context ·
#   width for the layer being recomputed.
# - Compute: 8 FLOPs per parameter and token (2 forward, 4 backward, 2 for recomputation), at 40 % of the peak rate.
# - Links: your `traffic` in bf16. Bytes that leave a host occupy the network of the host; bytes sent by a rank occupy
#   the links inside the host. A ring over several hosts runs at the speed of its slowest link. Each message takes an
#   additional 50 µs.
# - Overlap is perfect: the step time is the busy time of the device, of the links inside the host or of the network,
#   whichever is longest.
# - The model omits three quantities: bf16 copies of parameters and gradients with F = 1 (the omission favours F = 1 in
#   close cases); the logits, which take 4 bytes times 50,000 for each token unless the loss is computed in slices; and
#   the FLOPs of attention, which grow with the context.
#
# An A100 host has 8 GPUs with 80 GB each, 312 TFLOP/s in bf16, and NVLink with 300 GB/s in each direction (data sheet).
# We assume 8 network cards of 100 Gb/s each, which is 100 GB/s per host. "Ethernet" is the same host with a single card
# of 100 Gb/s. "PCIe" hosts have 4 GPUs with 24 GB and 165 TFLOP/s each, the same single card, and only 10 GB/s between
# two GPUs, because the GPUs share PCIe.


# %%
class Cluster(NamedTuple):
    """Number of hosts; per host, GPUs and network bytes/s; per GPU, memory, operations/s and bytes/s."""

    hosts: int
    per_host: int
    capacity: float = 80 * GB
    flops: float = 312e12
    inside: float = 300 * GB
    network: float = 100 * GB

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def factors(self) -> list[int]:
        """Return the divisors and multiples of the number of ranks on a host."""
        inside = [f for f in range(1, self.per_host + 1) if self.per_host % f == 0]
        return inside + [self.per_host * k for k in range(2, self.hosts + 1) if self.hosts % k == 0]


class Job(NamedTuple):
    """A transformer: layers, width, rows per rank, context. The root has the embedding, 50,000 · width."""

    layers: int
    width: int
    rows: int = 1
    context: int = 2048

    @property
    def units(self) -> list[int]:
        """Return the elements of each unit."""
        return [50_000 * self.width, *[12 * self.width**2] * self.layers]

    @property
    def parameters(self) -> int:
        return sum(self.units)

    @property
    def gathered(self) -> float:
        """Return the unsharded bytes in bf16: two units and the root; gradients of one unit and the root."""
        root, block = self.units[:2]
        return 2 * (2 * block + root) + 2 * (block + root)

    @property
    def activations(self) -> float:
        return self.rows * self.context * self.width * (2 * self.layers + 40)

    def memory(self, factor: int) -> float:
        """Return the bytes of a rank at its peak."""
        return 16 * self.parameters / factor + self.activations + (self.gathered if factor > 1 else 0)


def lanes_of(job: Job, cluster: Cluster, factor: int) -> dict[str, float]:
    """Return the seconds for which a step keeps the device, the links inside a host and its network busy."""
    sent = traffic([2 * unit for unit in job.units], cluster.ranks, cluster.per_host, factor)
    rings = min(factor, cluster.per_host)  # the rings of replicas on a host
    crossing = cluster.ranks > cluster.per_host
    inside = network = 0.0
    if factor > 1:
        pace = min(cluster.inside, cluster.network) if factor > cluster.per_host else cluster.inside
        inside += sent.sharding / pace + 50e-6 * 3 * len(job.units)
    if factor < cluster.ranks:
        pace = min(cluster.inside, cluster.network / rings) if crossing else cluster.inside
        network += sent.replicas / pace + 50e-6 * len(job.units)
    if factor > cluster.per_host:
        network += inside  # the same rings use the network
    elif factor < cluster.per_host or not crossing:
        inside += network  # the rings pass several ranks of a host
    compute = 8 * job.parameters * job.rows * job.context / (0.4 * cluster.flops)
    return {"device": compute, "inside": inside, "network": network}


def step_seconds(job: Job, cluster: Cluster, factor: int) -> float:
    return max(lanes_of(job, cluster, factor).values())


def decide(job: Job, cluster: Cluster) -> Choice:
    return choose(
        cluster.factors,
        cluster.capacity,
        job.memory,
        lambda factor: step_seconds(job, cluster, factor),
        job.gathered + job.activations,
    )


# %% [markdown]
# Predict: a model with 30 billion parameters and 16 bytes per parameter is trained on hosts with 8 GPUs. What is the
# smallest F that divides 8 (including 8 itself) and brings the model state below 80 GB per GPU?

# %%
predict("11.6", ..., "smallest of 1, 2, 4, 8 over which 30 billion parameters' state fits in 80 GB")

# %%
fits = next(factor for factor in (1, 2, 4, 8) if 16 * 30e9 / factor < 80 * GB)
outcome("11.6", fits, how="computed", slips={"parameters alone; gradients and optimizer need eight times that": 1})

# %% tags=["C44"]
CLUSTERS = {
    "8 hosts of 8 A100": Cluster(8, 8),
    "the same, Ethernet": Cluster(8, 8, network=12.5 * GB),
    "64 hosts of 8 A100": Cluster(64, 8),
    "2 hosts of 4, PCIe": Cluster(2, 4, 24 * GB, 165e12, inside=10 * GB, network=12.5 * GB),
}
JOBS = {
    "1.3 billion parameters": Job(24, 2048),
    "4 billion": Job(32, 3072),
    "7 billion": Job(32, 4096),
    "30 billion": Job(60, 6400),
    "70 billion": Job(80, 8448),
    "175 billion": Job(96, 12288),
    "175 billion, context 131,072": Job(96, 12288, context=131_072),
    "layers of 20 billion": Job(20, 41_000),
}
print(f"{'':28}" + "".join(f"{name:>20}" for name in CLUSTERS))
decisions = {}
for name, job in JOBS.items():
    decisions[name] = [decide(job, cluster) for cluster in CLUSTERS.values()]
    says = [f"{each.name.split()[0]}, F = {each.factor}" if each.factor else each.name for each in decisions[name]]
    print(f"{name:28}" + "".join(f"{each:>20}" for each in says))
assert decisions["1.3 billion parameters"][0] == Choice("data parallelism", 1), "it fits, so nothing is to be cut"
assert decisions["30 billion"][0] == Choice("hybrid sharding", 8), "too large for one device, not for a host"
assert decisions["175 billion"][0] == Choice("full sharding", 64), "too large for a host"
assert decisions["layers of 20 billion"][2] == Choice("split layers", None), "more ranks do not help"

# %% [markdown]
# Read the first column from the top: **data parallelism** while the model fits, **hybrid** when it is too large for one
# device but not for a few, **full sharding** when it needs all ranks, and **splitting layers** (tensor or pipeline
# parallelism) when the memory that cannot be sharded is too large. This is the usual advice. The table shows two
# exceptions:
#
# - A sharding group does not have to be one host. On the fast network, 7 billion parameters need only F = 2, and 70
#   billion need F = 16, that is, groups of two hosts, with gathers across hosts. Such groups send *more* bytes out of a
#   host than full sharding does (15/16 of 3 M, plus the all-reduces), so on the slow network, the model chooses full
#   sharding.
# - On a slow network, the model chooses F = 8 although F = 1 or 2 would fit. Rings over 8 ranks, one per host, send 7/8
#   of the data, whereas rings over all 64 ranks send 63/64. So the traffic out of each host is a ninth smaller. (For
#   data parallelism, libraries with a two-stage all-reduce achieve the same gain.)
#
# ### "Hybrid sharding is always faster"
#
# This is wrong. The next cell shows two counterexamples from the model:

# %%
pcie, a100 = CLUSTERS["2 hosts of 4, PCIe"], CLUSTERS["8 hosts of 8 A100"]
small, large = JOBS["1.3 billion parameters"], JOBS["30 billion"]
for title, job, cluster, factors in (
    ("1.3 billion parameters, 2 hosts of 4 on PCIe", small, pcie, (1, 4, 8)),
    ("30 billion parameters, 8 hosts of 8 A100", large, a100, (8, 16, 64)),
):
    print(title)
    for factor in factors:
        busy = ", ".join(f"{lane} {seconds:.2f}" for lane, seconds in lanes_of(job, cluster, factor).items())
        step, held = step_seconds(job, cluster, factor), job.memory(factor) / GB
        print(f"  F = {factor:2}: {step:.2f} s a step; busy seconds: {busy}; {held:5.1f} GB")
assert step_seconds(small, pcie, 1) < step_seconds(small, pcie, 4), "gathers cost what they save where PCIe is slow"
assert step_seconds(large, a100, 8) == step_seconds(large, a100, 64), "where the device is busiest, links do not matter"

# %% [markdown]
# If the links *inside* a host are slow, two gathers and a reduce-scatter inside the host cost more than one all-reduce
# over all ranks, so data parallelism is faster if the model fits. If the device is the bottleneck, the sharding factor
# does not affect speed; a larger factor saves memory, which allows a larger batch (lab 05).
#
# ### "If tensor parallelism stays within a node, data parallelism need not cross nodes"
#
# With tensor parallelism, the ranks of a host hold different shards of each layer. Gradients are averaged over the
# ranks with the *same* parameters. The groups are those of 11.1, with F = 8 for the tensor axis:

# %%
tensor, data_parallel = plan_groups(64, 8)
crossing = sum(len({rank // 8 for rank in group}) > 1 for group in data_parallel)
print_wrapped(f"tensor groups, for instance {tensor[0]}; data-parallel groups, for instance {data_parallel[0]}")
print(f"data-parallel groups that cross hosts: {crossing} of {len(data_parallel)}")
size = 2 * large.parameters
with_tensor, without = (traffic([2 * unit for unit in large.units], 64, 8, factor).leaves for factor in (8, 1))
print(
    f"gradients that leave a host, over the size of the model: {with_tensor / size:.4f}, without tensor parallelism",
    end=" ",
)
print(f"{without / size:.4f}")
assert crossing == len(data_parallel)

# %% [markdown]
# The opposite is true. If tensor parallelism fills the node, *every* data-parallel group crosses nodes, and so do all
# gradients: a rank sends 1/8 of them, and the 8 ranks of a node send all of them. The statement is true only if both
# axes together fit into one node, and either there is only one node or only a third axis (pipeline parallelism) crosses
# nodes.
#
# ### Adding hosts has a limit
#
# The next plot shows the step time of a model with seven billion parameters and a global batch of 512 samples on
# an increasing number of 8-GPU hosts connected by Ethernet. With every doubling, the work of a rank halves, but its
# traffic does not. (The cost model does not check whether the memory of a rank suffices for 64 samples, as a single
# host requires.)

# %%
job, hosts = JOBS["7 billion"], [1, 2, 4, 8, 16, 32, 64]
series: dict[str, tuple[list[int], list[float]]] = {"fully sharded": ([], []), "hybrid": ([], [])}
device_only: list[float] = []
for count in hosts:
    cluster = Cluster(count, 8, network=12.5 * GB)
    each = job._replace(rows=512 // cluster.ranks)
    for name, factor in (("fully sharded", cluster.ranks), ("hybrid", 8)):
        series[name][0].append(cluster.ranks)
        series[name][1].append(step_seconds(each, cluster, factor))
    device_only.append(lanes_of(each, cluster, 8)["device"])
last = {name: seconds[-1] for name, (_, seconds) in series.items()}
both = zip(*(points for _, points in series.values()), strict=True)
together = max(8 * count for count, (one, other) in zip(hosts, both, strict=True) if one < 1.01 * other)
plots.lines(
    series,
    expected={"compute alone": (series["fully sharded"][0], device_only)},
    xlabel="ranks",
    ylabel="time of a step of 512 samples, s",
    title="On 64 times as many ranks, a step is "
    f"{series['fully sharded'][1][0] / last['fully sharded']:.0f} times as fast fully sharded, "
    f"{series['hybrid'][1][0] / last['hybrid']:.0f} times hybrid",
    says="The same work on more ranks. A line leaves the diamonds where the network limits it, and turns flat: a "
    "host sends 3 models fully sharded and 2 with hybrid sharding, however many hosts there are. Up to "
    f"{together} ranks, the lines coincide; on 512, a step takes {last['fully sharded']:.1f} s and "
    f"{last['hybrid']:.1f} s.",
    lab="11",
    model="hosts of 8 A100 with 100 Gb/s",
    logx=True,
    logy=True,
)

# %% [markdown]
# ## What is still missing
#
# The cost model assumes perfect overlap, and that every ring runs at the speed given in the data sheet. It omits the
# latency of long rings, congestion and stragglers, all of which grow with the number of ranks and favour smaller
# groups. Nothing here was measured on a GPU. Also, F is chosen once for the entire model, whereas a policy may choose
# it per module (`minifsdp/fsdp/torch_api/groups.py` passes groups down).
#
# Gradients are clipped by their norm over *one* sharding group, not over all ranks: replicas hold the same shards,
# which would be counted R times (`minifsdp/clip_grad.py`). A checkpoint also needs only one replica.
#
# There are other hybrid strategies. In this lab, there are R copies of the optimizer state (12 of the 16 bytes). ZeRO++
# ([arXiv 2306.10209](https://arxiv.org/abs/2306.10209), hpZ) shards this state over all ranks and keeps a copy of the
# weights inside each host, for the gathers in the backward pass. torch's `_HYBRID_SHARD_ZERO2` uses SHARD_GRAD_OP
# (lab 05) inside the groups.
#
# ## What to remember
#
# 1. A sharding group consists of consecutive ranks; a replica group consists of the ranks at the same position in each
#    sharding group. Every rank must create every group.
# 2. Gradients are reduce-scattered inside the sharding group, the resulting shards are all-reduced across the replicas,
#    and then accumulated. Only code that reads gradients waits for the second stage.
# 3. Memory depends on F, not on N. F = 1 is data parallelism, and F = N is full sharding. Replicas must start equal.
# 4. A rank sends 1/F of the gradients to other hosts; a host sends all gradients. The gathers stay inside the host.
# 5. Choose the smallest F that fits, unless a measurement or a model says otherwise. The layer being computed and the
#    activations cannot be sharded, so they set the limit.
#
# ## Questions
#
# **1. One rank fails on 2 hosts with 8 ranks each and F = 8. How many shards are lost?**
#
# <details><summary>Answer</summary>
#
# None are lost: the replica on the other host has the same shard. But the process groups are broken, and the job
# restarts from a checkpoint, unless something rebuilds them.
# </details>
#
# **2. Why do the sharding groups, and not the replica groups, consist of consecutive ranks?**
#
# <details><summary>Answer</summary>
#
# The sharding group has more traffic, 3 M compared with 2 M / F, including the gathers, which are time-critical.
# Consecutive ranks share a host. If the two kinds of group were swapped, all gathers would cross hosts.
# </details>
#
# **3. Under `no_sync`, which of the two stages is omitted, and could one be kept?**
#
# <details><summary>Answer</summary>
#
# Both are omitted, and the unsharded gradient [P] is kept. You could instead reduce-scatter the gradients of every
# micro-batch inside the host, accumulate a shard [P / F], and all-reduce only the final sum. That saves memory and
# traffic on the slow link. FSDP2 offers this as `set_requires_all_reduce`.
# </details>
#
# **4. Which numbers in the table of 11.5 would change if the two groups were swapped?**
#
# <details><summary>Answer</summary>
#
# The number of bytes held would not change, because both kinds of group have 2 ranks here. The number of bytes that
# leave the host would change: gathers would leave it, in two rings at the same time.
# </details>
#
# **5. A model fits with F = 4 on hosts with 8 GPUs. Why might F = 8 be the better choice?**
#
# <details><summary>Answer</summary>
#
# Each rank holds half as much, which allows a larger batch, and a host sends slightly less: (R - 1) / R · 2 M, with
# half as many replicas. In return, each rank sends 7/8 instead of 3/4 of the data in each gather, inside the host.
# </details>
#
# ## Further reading
#
# - FSDP: [arXiv 2304.11277](https://arxiv.org/abs/2304.11277), section 3.2.2 (hybrid sharding).
# - torch: `torch/distributed/fsdp/_runtime_utils.py` (`_reduce_grad`), `torch/distributed/fsdp/_init_utils.py`
#   (`_init_process_group_state_for_hybrid_shard`).
# - minifsdp: `fsdp/reduction.py` (11.3 and 11.4), `fsdp/torch_api/groups.py`, `process_groups.host_groups` (11.1 and
#   11.2).
