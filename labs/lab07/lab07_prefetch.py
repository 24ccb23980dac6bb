# ---
# jupyter:
#   minifsdp:
#     lab: "07"
#     title: Prefetch
#     minutes: 65
#     ranks: 2
# ---

# %% [markdown]
# # Lab 07: prefetch
#
# Communication now has its own stream (lab 06). But each unit's gather is still issued only when the unit is about to
# run, and the unit's computation then waits for the gather. In this lab, you issue the gather earlier. In what order
# should units be gathered, when should each gather be issued, and how much memory does an early gather cost? And what
# happens if the ranks do not agree on the order?
#
# ![Backward with and without prefetch: the next gather before or after the
# reduction](../slides/figures/overlap-backward.svg)
#
# *From [lecture 4, Overlap, prefetch, rate limit, and the allocator](../slides/overlap.md), which comes before this
# lab.*
#
# **After this lab, you will be able to**
#
# - record the order in which a model uses its units, in the forward and the backward pass, and say when to trust that
#   order;
# - issue the next unit's gather early: in the forward pass, before a unit's backward pass (PRE) and after it (POST);
# - predict, to the byte, the memory cost of each kind of prefetch, and of prefetching more than one unit ahead;
# - explain why torch prefetches in the backward pass although its host runs ahead, and why it does not prefetch in the
#   forward pass;
# - predict whether ranks that gather in different orders get wrong values or hang, and turn either case into an error.
#
# **You need** lab 05 (units, hooks, the memory that a rank holds) and lab 06 (streams, events, a host that runs ahead).
#
# **Time** 65 minutes. **Runs** on a laptop (gloo, 2 processes), on one GPU that the ranks share
# (`MINIFSDP_SHARE_GPU=1`), or on a GPU node (NCCL, one rank per GPU). **Memory** a few MiB of tensors per rank; each
# process takes a few hundred MiB, mostly for torch itself.
#
# The order, the bytes and the values are measured on your machine. The gain from prefetching is always measured over
# gloo on the CPU; for a host that runs ahead, it is modelled.

# %% tags=["setup"]
# set-up
from dataclasses import dataclass, field
from typing import Literal

import torch

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop import exercise, outcome, predict
from minifsdp.fsdp import OverlapSchedule
from minifsdp.fsdp.unit import Unit

# %% [markdown]
# ## The time lost without prefetch
#
# A *schedule* decides when a unit is gathered, freed and reduced. It is called at six events: the start of the forward
# pass, before and after a unit's forward pass, before and after its backward pass, and the end of the model's backward
# pass. The next cell implements torch's order without any prefetch, on top of minifsdp's `OverlapSchedule` (which
# manages the streams). A gather is issued when its unit is about to run, and a reduction is issued as soon as the
# unit's gradients are complete. The schedule waits for each reduction just before it issues the next one.

# %%
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minifsdp import FullyShardedDataParallel
from minifsdp.cost import data_parallel as closed_form
from minifsdp.course.ladder import data
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import LEARNING_RATE, Trainer, closed_form_setting, sizes_of
from minifsdp.course.workshop.lines import print_wrapped
from minifsdp.device import current_stream
from minifsdp.fsdp import SyncSchedule
from minifsdp.fsdp.unit import SHARDED
from minifsdp.gpt import GPT, Block
from minifsdp.instruments import plots
from minifsdp.instruments.launch import RankError, launch, rank_device
from minifsdp.instruments.machine import A100, Hardware, Program, record_on_paper, replay
from minifsdp.instruments.machine.shapes import SHAPES
from minifsdp.instruments.machine.versus import versus
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.records import show_record
from minifsdp.instruments.watch.timeline import Span

RANKS = 2
SETTINGS = Settings(ranks=RANKS, batch=2, layers=5, width=105, context=16)  # for bytes and values
TIMED = Settings(ranks=RANKS, batch=24, layers=3, width=175, context=48)  # for time
SIZES = sizes_of(SETTINGS.model())
UNITS = ["root", *(f"block {number}" for number in range(SETTINGS.layers))]
BATCHES = list(SETTINGS.batches())


class Unhurried(OverlapSchedule):
    """torch's order without prefetch: each gather is issued when its unit is reached, each reduction immediately."""

    def reduce(self, unit: Unit) -> None:
        super().reduce(unit)
        self.issue_reduction()


def on_paper(schedule: Any, settings: Settings = TIMED) -> Program:
    """What one of two ranks requests of its device in two training steps, recorded without starting any ranks."""

    def build(group: Any) -> Trainer:
        model = FullyShardedDataParallel(settings.model(), group, auto_wrap_policy={Block}, schedule=schedule)
        return Trainer(model, torch.optim.AdamW(model.parameters(), foreach=False))

    def batch() -> data.Batch:
        tokens = torch.zeros(settings.batch // settings.ranks, settings.context, dtype=torch.int64)
        return tokens, tokens

    return record_on_paper(build, batch, settings.ranks)


# %% [markdown]
# To show the lost time without the noise of a busy machine, we record this program (its kernels, collectives and waits,
# in order) and replay it in virtual time on a simulated machine. This machine is a laptop that computes on its CPU at
# 20 GFLOP/s; its link has a latency of 2 ms and a bandwidth of 50 MB/s. The times are modelled, not measured; a
# measurement follows below, next to the model's prediction.

# %%
LAPTOP = Hardware(
    "a simulated laptop: 20 GFLOP/s, link 2 ms + 50 MB/s, its host computes",
    flops={4: 20e9},
    memory_bandwidth=10e9,
    capacity=2**34,
    latency=2e-3,
    bandwidth=50e6,
    efficiency=1.0,
    launch=0.0,
    issue=0.0,
    segment=(0.0, 0.0),
    runs_ahead=False,
)
plain_program = on_paper(Unhurried)
without = replay(plain_program, LAPTOP)
computes = sum(span.duration for span in without.last_step() if span.lane == "compute")
print(f"a step: {1e3 * without.seconds:.0f} ms, of which it computes {1e3 * computes:.0f} ms")
plots.timeline(
    {"no prefetch": without},
    title=f"Compute takes {1e3 * computes:.0f} of a step's {1e3 * without.seconds:.0f} ms; the rest is waiting",
    says="One step of 3 blocks. In forward, every unit waits for its gather; in backward, for the reduction of the "
    "previous unit and for its own gather behind it.",
)

# %% [markdown]
# Look at the backward pass: a unit's reduction is queued on the link *before* the next unit's gather. Like an NCCL
# communicator, a link executes collectives one after another. So the next unit waits for two collectives, although it
# needs the result of only one of them. (minifsdp's `OverlapSchedule` postpones the reduction until the next gather has
# been issued. torch does not postpone it, so neither does this lab.)
#
# ## 7.1 Record the order
#
# *12 minutes, medium*
#
# To gather a unit early, the schedule has to know which unit comes next. A PyTorch model is a program, so the order of
# its units is unknown before it runs. But the order is usually the same in every iteration. So the schedule keeps two
# records:
#
# - **forward**: the order of units in the forward pass of the *first iteration* (an iteration is a forward pass and its
#   backward pass). This record is kept permanently, because the order is assumed to be *static*, as in torch (which
#   records only the first use of each unit).
# - **backward**: the units of *this* iteration whose backward pass has not started yet, in the order in which their
#   forward passes ended. The backward pass processes this record from its end.
#
# The records must also be correct for a unit that is called twice in a forward pass (each call counts). Moreover, a
# forward pass without a backward pass (under `no_grad`, as in an evaluation) must not leave entries that affect later
# steps.


# %% tags=["shown"]
@dataclass
class Order:
    """The order in which units run, as recorded so far.

    Attributes:
        forward: every call in the forward pass of the first iteration; empty until that iteration has ended.
        seen: every call that has begun in the current forward pass, or in the last one if none is under way.
        ahead: the units whose backward is still to come, one entry for each call, the next one last.
    """

    forward: list[Unit] = field(default_factory=list)
    seen: list[Unit] = field(default_factory=list)
    ahead: list[Unit] = field(default_factory=list)


Event = Literal["begin forward", "pre-forward", "post-forward", "pre-backward", "end backward"]

# %% [markdown]
# | event | effect on `order` |
# |---|---|
# | `begin forward` | `seen` and `ahead` are emptied, even if entries were left by a backward pass that failed |
# | `pre-forward` | a call to `unit` begins: `unit` becomes the last entry of `seen` |
# | `post-forward` | a call to `unit` ends: `unit` becomes the last entry of `ahead`, if `backward_follows` |
# | `pre-backward` | `unit` begins its backward pass: remove its **last** entry in `ahead`, if any, and all later ones |
# | `end backward` | `ahead` is emptied; `forward`, if it is still empty, becomes a copy of `seen` |
#
# Why are all later entries removed? The backward pass has skipped those units (their outputs were not used); otherwise,
# their backward passes would have come first. A unit that was called twice reports its backward pass only once, when
# the backward pass of its last call begins.
#
# Predict: a root contains 5 blocks, and block 2 is called twice in a row. How long is `ahead` when the forward pass
# ends?

# %%
predict("7.1", ..., "entries of `ahead` after a forward of root and 5 blocks, one of them called twice")


# %% tags=["exercise-7.1"]
from .ex1_record import record


# %%
def follow(calls: list[str], order: Order) -> int:
    """Run one iteration of a root that contains blocks, units by name; return the length of `ahead` after forward."""
    record(order, "begin forward")
    record(order, "pre-forward", "root")
    for name in calls:
        record(order, "pre-forward", name)
        record(order, "post-forward", name, True)
    record(order, "post-forward", "root", True)
    length = len(order.ahead)
    for name in dict.fromkeys(["root", *reversed(calls)]):
        record(order, "pre-backward", name)
        print(f"backward of {name}: then {' '.join(reversed(order.ahead)) or 'nothing'}")
    record(order, "end backward")
    return length


order = Order()
length = follow(["0", "1", "2", "2", "3", "4"], order)
slips = {"the root's forward ends, too: last of all": 6, "each call counts": 6, "the root is in it, and each call": 5}
outcome("7.1", length, how="computed", slips=slips)
print("forward's order:", *order.forward)

# %% [markdown]
# ## The schedule that uses your functions
#
# This schedule is `Unhurried` with four functions to fill in, called *pieces*. Until you replace them, the default
# pieces below keep the current behaviour. `gather` starts a unit's gather on the gather stream. It does nothing if the
# unit is already unsharded or its gather is in progress, so no gather is issued twice.


# %%
class Pieces(NamedTuple):
    """What a `LabSchedule` does at three events, and how it keeps its order."""

    record: Callable[..., None]
    pre_forward: Callable[[Any, Unit], None]
    pre_backward: Callable[[Any, Unit], None]
    post_backward: Callable[[Any, Unit], None]
    check_order: Callable[[int, list[str], Group, torch.device], None] | None = None


class LabSchedule(Unhurried):
    """torch's order, with your pieces filled in.

    Attributes:
        units: all units, the root first, in the order in which they were built.
        order: what `record` keeps.
        depth: how many calls to gather ahead; None means all of them. At most as many reductions may be under way.
        log: what has been done to which unit: g: gather, f: free, r: reduce, [...]: it computes.
    """

    def __init__(self, units: Sequence[Unit], pieces: Pieces, depth: int | None = 1) -> None:
        super().__init__(units)
        self.pieces, self.depth, self.reductions = pieces, depth, depth
        self.order, self.log = Order(), list[str]()
        self._short = {unit: "R" if number == 0 else str(number - 1) for number, unit in enumerate(units)}

    def begin_forward(self) -> None:
        super().begin_forward()
        self.log.clear()
        self.pieces.record(self.order, "begin forward")

    def pre_forward(self, unit: Unit) -> None:
        self.compare(unit)
        self.pieces.record(self.order, "pre-forward", unit)
        self.pieces.pre_forward(self, unit)
        self.log.append(f"[{self._short[unit]}]")

    def post_forward(self, unit: Unit, backward_follows: bool) -> None:
        super().post_forward(unit, backward_follows)
        self.pieces.record(self.order, "post-forward", unit, backward_follows)
        if unit.is_root:
            self.log.append("|")

    def pre_backward(self, unit: Unit) -> None:
        self.compare(unit)
        self.pieces.record(self.order, "pre-backward", unit)
        self.pieces.pre_backward(self, unit)
        self.log.append(f"[{self._short[unit]}]")

    def post_backward(self, unit: Unit) -> None:
        self.pieces.post_backward(self, unit)

    def end_backward(self) -> None:
        super().end_backward()
        self.pieces.record(self.order, "end backward")

    def gather(self, unit: Unit) -> None:
        self.tell("g", unit, unit.state is SHARDED)
        super().gather(unit)

    def free(self, unit: Unit) -> None:
        self.tell("f", unit, unit.state is not SHARDED)
        super().free(unit)

    def reduce(self, unit: Unit) -> None:
        self.tell("r", unit, True)
        super().reduce(unit)

    def tell(self, what: str, unit: Unit, happens: bool) -> None:
        if happens:
            self.log.append(what + self._short[unit])

    def compare(self, unit: Unit) -> None:
        """Check that all ranks are at the same unit; only in the first iteration, as in torch."""
        if self.pieces.check_order is not None and not self.order.forward:
            self.pieces.check_order(self.units.index(unit), UNITS, comm.world(), self.device)


def gather_and_wait(schedule: LabSchedule, unit: Unit) -> None:
    """No prefetch."""
    schedule.gather(unit)
    unit.wait_gather()


def free_and_reduce(schedule: LabSchedule, unit: Unit) -> None:
    """No prefetch."""
    schedule.free(unit)
    schedule.reduce(unit)


NONE = Pieces(record, gather_and_wait, gather_and_wait, free_and_reduce)


def train(pieces: Pieces, depth: int | None, plain: bool = False) -> dict[str, Any]:
    """Run three steps on this rank; return the losses, and the last step's peak bytes, log and memory."""
    schedules: list[LabSchedule] = []

    def schedule(units: Sequence[Unit]) -> SyncSchedule:
        if plain:
            return SyncSchedule(units)
        schedules.append(LabSchedule(units, pieces, depth))
        return schedules[0]

    where, losses = rank_device(), []
    with Ledger() as ledger:
        model = FullyShardedDataParallel(SETTINGS.model().to(where), auto_wrap_policy={Block}, schedule=schedule)
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
        ledger.watch(model, optimizer)
        for batch in BATCHES[:3]:
            ledger.reset_peaks()
            tokens, targets = (part.to(where) for part in data.shard(batch, dist.get_rank(), RANKS))
            loss = model(tokens, targets)
            ledger.mark("forward")
            loss.backward()
            ledger.mark("backward")
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return {
            "losses": losses,
            "unsharded": ledger.peak_of("unsharded"),
            "gradients": ledger.peak_of("gradients", "communication"),
            "state": ledger.peak_of("parameters", "unsharded", "gradients", "optimizer", "communication"),
            "log": " ".join(schedules[0].log) if schedules else "",
            "curve": ledger.curve(),
        }


def train_all(variants: dict[str, tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    return {name: train(*variant) for name, variant in variants.items()}


seen = {"none": launch(train, RANKS, NONE, 1)[0]}
print_wrapped(f"none: {seen['none']['log']}")

# %% [markdown]
# This is the log of one step; `|` separates the forward pass from the backward pass. `g2` means that unit 2's gather is
# issued, `[2]` that unit 2 computes, `f2` that it is freed, and `r2` that its reduction is issued. R is the root.
#
# ## 7.2 Prefetch in the forward pass
#
# *10 minutes, medium*
#
# When a unit's forward pass begins, its own gather is issued first, because its parameters are needed first and the
# link preserves the order. Then the gathers of the next units are issued, and only then does the schedule wait for the
# unit's own gather. On a GPU, `wait_gather` makes the compute stream wait, and the host continues immediately. On a
# CPU, `wait_gather` blocks the host, so the next gathers must be issued before the wait. (torch prefetches after the
# wait, in `_pre_forward_unshard` of `torch/distributed/fsdp/_runtime_utils.py`. This works because the wait there
# blocks a stream, not the host.)
#
# No unit is gathered ahead if there is no record yet, or once the current forward pass has deviated from the recorded
# order: gathering the wrong unit wastes a collective and memory.
#
# Predict: with depth 1, how many bytes of gathered parameters does a rank hold at most in the forward pass? The next
# cell prints the sizes of the units.

# %%
padded = [closed_form.Setting(RANKS).padded(sum(unit)) for unit in SIZES.units]
for name, size in zip(UNITS, padded, strict=True):
    print(f"{name:8} {size:9,} bytes gathered")
predict("7.2", ..., "peak bytes of gathered parameters on a rank, forward prefetch, depth 1")


# %% tags=["exercise-7.2"]
from .ex2_pre_forward import pre_forward

# %%
FORWARD = NONE._replace(pre_forward=pre_forward)
seen["forward"] = launch(train, RANKS, FORWARD, 1)[0]
print_wrapped(f"forward: {seen['forward']['log']}")
slips = {
    "the root stays unsharded all the time": padded[1] + padded[2],
    "without prefetch": padded[0] + padded[1],
    "the whole model": sum(padded),
}
outcome("7.2", seen["forward"]["unsharded"], ranks=RANKS, slips=slips)

# %% [markdown]
# Block 0's gather is now issued directly after the root's, before any computation, and each later block's gather is
# issued before the previous block is computed. While one block is being computed, the next one is being gathered, so
# two blocks are unsharded instead of one.
#
# ## 7.3 Prefetch in the backward pass: PRE
#
# *8 minutes, medium*
#
# With `BACKWARD_PRE`, a unit's own gather is issued when its backward pass begins, unless the unit has already been
# gathered. Then the next unit's gather is issued, *before* the gradients are computed. `ahead` contains the next units.
# The reduction is issued once the gradients are complete, so it is queued behind that gather. The cost is one more
# unsharded unit while gradients are being computed.
#
# With a `depth` of None, all remaining units are gathered. Predict: how many bytes of gathered parameters does a rank
# then hold at most?

# %%
predict("7.3", ..., "peak bytes of gathered parameters on a rank, PRE, depth None")


# %% tags=["exercise-7.3"]
from .ex3_pre_backward import pre_backward

# %%
PRE = NONE._replace(pre_backward=pre_backward)
found = launch(train_all, RANKS, {"PRE": (PRE, 1), "PRE, all": (PRE, None)})[0]
seen |= found
for name, each in found.items():
    print(f"{name + ':':10}{each['log'].partition(' | ')[2]}")
slips = {"depth 1": padded[0] + 2 * padded[1], "the root stays unsharded, too": sum(padded[1:])}
outcome("7.3", seen["PRE, all"]["unsharded"], ranks=RANKS, slips=slips)

# %% [markdown]
# With depth None, all parameters are unsharded soon after the backward pass begins, so at that moment, sharding saves
# no memory for parameters. (In addition, as many reductions may be in progress as units have been gathered ahead, and
# each reduction holds its unit's unsharded gradient.)
#
# ## 7.4 Prefetch in the backward pass: POST
#
# *8 minutes, medium*
#
# `BACKWARD_POST` prefetches only after the unit has been freed: it frees the unit, gathers the next one, and then
# issues the freed unit's reduction. The gather still precedes the reduction on the link. But the gather is issued after
# the unit's computation, so on a CPU, where the host itself computes, it overlaps with nothing. In this case, POST
# saves only the wait for the reduction.
#
# Predict: at the peak, how many more bytes of gathered parameters does a rank hold with POST and depth 1 than without
# prefetch?

# %%
predict("7.4", ..., "bytes of gathered parameters at the peak that POST, depth 1, adds to no prefetch")


# %% tags=["exercise-7.4"]
from .ex4_post_backward import post_backward

# %%
POST = NONE._replace(post_backward=post_backward)
BOTH = PRE._replace(pre_forward=pre_forward)
variants = {"POST": (POST, 1), "both": (BOTH, 1), "both, all": (BOTH, None), "SyncSchedule": (NONE, 1, True)}
found = launch(train_all, RANKS, variants)[0]
reference = found.pop("SyncSchedule")["losses"]
seen |= found
for name in ("none", "POST", "PRE"):
    print(f"{name + ':':6}{seen[name]['log'].partition(' | ')[2]}")
added = seen["POST"]["unsharded"] - seen["none"]["unsharded"]
outcome("7.4", added, ranks=RANKS, slips={"that is PRE": padded[1]})

# %% [markdown]
# ### Measured: the same values
#
# A collective's result does not depend on when it is issued. The next cell checks that the losses of three steps are
# bitwise equal to those of lab 05's synchronous schedule (`SyncSchedule`).

# %%
for name, each in seen.items():
    print(f"{name:10} {', '.join(f'{loss:.6f}' for loss in each['losses'])}  equal: {each['losses'] == reference}")
assert all(each["losses"] == reference for each in seen.values()), "a schedule may change when, not what"

# %% [markdown]
# ### Measured: the memory cost of each kind of prefetch
#
# The closed form is derived independently of the schedules' code. The unsharded units are the unit being computed and
# the units gathered ahead. Without prefetch, these are the root and the largest block, R + B; with depth d, they are
# the root and the largest d + 1 consecutive blocks. With POST, the unit itself has already been freed, so only d blocks
# count. The unsharded gradients are those of the root, of the unit being computed, and of the units with a reduction in
# progress: at most as many as the units gathered ahead. (With gloo, each of these reductions also has receive buffers
# for the other ranks' contributions, which take (N - 1) / N of the unit's size. NCCL needs no such memory.)

# %% tags=["C15"]
AHEAD: dict[str, dict[str, Any]] = {
    "none": {"reductions": 1},
    "forward": {"reductions": 1, "forward_depth": 1},
    "POST": {"reductions": 1, "backward": "post"},
    "PRE": {"reductions": 1, "backward": "pre"},
    "both": {"reductions": 1, "forward_depth": 1, "backward": "pre"},
    "PRE, all": {"reductions": None, "backward": "pre", "backward_depth": None},
    "both, all": {"reductions": None, "forward_depth": None, "backward": "pre", "backward_depth": None},
}
setting = closed_form_setting(RANKS)
bounds = {name: closed_form.fsdp(SIZES.units, setting, **ahead) for name, ahead in AHEAD.items()}
print(f"{'':10}{'gathered: predicted':>20}{'measured':>11}{'gradients: predicted':>22}{'measured':>11}")
for name, bound in bounds.items():
    each = seen[name]
    print(
        f"{name:10}{bound.unsharded_peak:20,}{each['unsharded']:11,}{bound.gradients_peak:22,}{each['gradients']:11,}"
    )
    assert (each["unsharded"], each["gradients"]) == (bound.unsharded_peak, bound.gradients_peak), name

# %%
shown = ("none", "POST", "PRE", "PRE, all")
plots.stages(
    {
        f"{name}: {what}": {tag: seen[name][tag]}
        for tag, what in (("unsharded", "gathered"), ("gradients", "gradients"))
        for name in shown
    },
    predicted={f"{name}: gathered": bounds[name].unsharded_peak for name in shown}
    | {f"{name}: gradients": bounds[name].gradients_peak for name in shown},
    title="At depth 1, POST costs no memory and PRE one unit; with no bound, all units",
    says="Peak bytes of gathered parameters in a step, then of gradients; the host computes. Diamonds: the "
    "closed form.",
    lab="07",
    ylabel="peak per rank",
)


# %%
def without_activations(curve: dict[str, Any]) -> dict[str, Any]:
    tags = {tag: [0] * len(sizes) if tag == "activations" else sizes for tag, sizes in curve["tags"].items()}
    return {"tags": tags, "marks": curve["marks"]}


MIB = 2**20
plots.curve(
    without_activations(seen["both, all"]["curve"]),
    title=f"Model state peaks at {seen['both, all']['state'] / MIB:.2f} MiB with all gathered ahead, at "
    f"{seen['none']['state'] / MIB:.2f} without prefetch",
    says="One step, without activations. Teeth (grey lines) become stairs: all parameters are unsharded when "
    "forward begins and again when backward begins, and are freed unit by unit. At the far right, the optimizer runs.",
    lab="07",
    earlier={name: without_activations(seen[name]["curve"]) for name in ("none", "PRE")},
)

# %% [markdown]
# The next cell shows the same steps in the explorer. Compare `none` with `PRE`: at what point is the next block
# unsharded, and which gather is in progress (hatched) while a block's gradient is being reduced?

# %% tags=["nbval-ignore-output"]
from minifsdp.instruments.explore.page import show

from minifsdp.course.ladder.measure import log_step


def build_mine(pieces: Pieces, depth: int | None) -> Trainer:
    model = SETTINGS.model().to(rank_device())
    schedule = partial(LabSchedule, pieces=pieces, depth=depth)
    model = FullyShardedDataParallel(model, auto_wrap_policy={Block}, schedule=schedule)
    return Trainer(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE))


def log_mine() -> dict[str, Any]:
    batch = data.shard(BATCHES[0], dist.get_rank(), RANKS)
    mine = {"none": (NONE, 1), "POST": (POST, 1), "both, all": (BOTH, None), "PRE": (PRE, 1)}
    return {name: log_step(partial(build_mine, *variant), batch) for name, variant in mine.items()}


logged = launch(log_mine, RANKS)
show(
    "One step under your schedules",
    f"GPT of {sum(SIZES.parameters):,} parameters on {RANKS} ranks.",
    {name: [rank[name] for rank in logged] for name in logged[0]},
)

# %% [markdown]
# ## The gain from prefetch
#
# ### Measured: prefetch on an emulated link, next to the model
#
# Two ranks run over gloo on an emulated link with a latency of 2 ms and a bandwidth of 50 MB/s, always on the CPU, even
# if there are GPUs. The schedules take turns, step by step. The inputs of the model are the recorded programs, the
# latency and bandwidth of the link, and the measured compute time of each schedule; the model predicts the waiting
# time.

# %% tags=["C15", "nbval-ignore-output"]
schedules = {name: partial(LabSchedule, pieces=pieces) for name, pieces in (("none", NONE), ("both", BOTH))}
results = versus(TIMED, schedules, steps=3)
for name, result in results.items():
    print(
        f"{name:5} measured {1e3 * result.median:4.0f} ms, predicted {1e3 * result.predicted:4.0f} ms, "
        f"error {result.error:+.0%}, of the waiting time alone {result.waiting_error:+.0%}"
    )
waits = {name: result.predicted - result.computing for name, result in results.items()}
assert waits["both"] < waits["none"]
plots.versus(
    results,
    title=f"Prefetch shortens a step from {1e3 * results['none'].median:.0f} to {1e3 * results['both'].median:.0f} ms; "
    f"the model predicts {1e3 * results['none'].predicted:.0f} and {1e3 * results['both'].predicted:.0f}",
    says="Two ranks on an emulated link, 3 steps of each schedule. The model takes the link and each schedule's "
    "measured compute time, and predicts from its program how long it waits.",
    lab="07",
)

# %% [markdown]
# (These are medians of a few steps. Other load on the machine changes the measured times, and changes the model's
# predictions even more, because the model's kernels come from a single recorded step.
# `minifsdp/instruments/machine/versus.py` lists the other simplifications of the model.)
#
# The next cell repeats the comparison without noise, on the simulated laptop and on a similar machine whose host runs
# ahead of a device of the same speed.

# %%
programs = {
    "none": plain_program,
    "POST": on_paper(partial(LabSchedule, pieces=POST)),
    "PRE": on_paper(partial(LabSchedule, pieces=PRE)),
    "both": on_paper(partial(LabSchedule, pieces=BOTH)),
    "both, all": on_paper(partial(LabSchedule, pieces=BOTH, depth=None)),
}
AHEAD_LAPTOP = dataclasses.replace(LAPTOP, runs_ahead=True)


def in_milliseconds(programs: dict[str, Program]) -> None:
    """Replay a step of each program on a host that computes itself and on one that runs ahead."""
    print("a step, ms (model)     host computes   host runs ahead")
    for name, program in programs.items():
        computes, ahead = (replay(program, hardware) for hardware in (LAPTOP, AHEAD_LAPTOP))
        print(f"{name:25}{1e3 * computes.seconds:11.0f}{1e3 * ahead.seconds:18.0f}")
        assert not ahead.hazards, "on a GPU something would be read before it has arrived, or written while it is read"


in_milliseconds(programs)
plots.timeline(
    {name: replay(programs[name], LAPTOP) for name in ("none", "both", "both, all")},
    title="Prefetching one unit ahead closes the gaps; gathering all first gains no more",
    says="When forward begins, no compute can hide a gather; when backward begins, only the root's can; at the end, "
    "none hides the last reductions. A unit gathered more than one ahead only waits in memory.",
    lab="07",
)

# %% [markdown]
# Prefetching one unit ahead closes the gap. A greater depth helps if units differ in size and one unit's
# computation is too short to hide a large gather. Exercise 7.3 shows its cost. torch uses a depth of 1. With a host
# that runs ahead, POST is as fast as PRE, because the host issues POST's gather long before the device reaches that
# point. (But by then, the freed unit's memory is not yet available on the device; lab 08 explains why.)
#
# ### Break it: the same lines in a different order
#
# The next cell swaps the last two steps of 7.4: it reduces first and gathers afterwards.


# %%
def behind_the_reduction(schedule: LabSchedule, unit: Unit) -> None:
    """POST with the gather after the reduction, where it no longer helps."""
    free_and_reduce(schedule, unit)
    for following in schedule.order.ahead[::-1][: schedule.depth]:
        schedule.gather(following)


BEHIND = NONE._replace(post_backward=behind_the_reduction)
in_milliseconds({"POST behind the reduction": on_paper(partial(LabSchedule, pieces=BEHIND))})

# %% [markdown]
# With the gather after the reduction, prefetching has no effect on either host. The values and the bytes are still
# correct; only the order of events reveals the mistake.
#
# ### Why prefetch at all, if the host runs ahead?
#
# Even without prefetch, a host that runs ahead reaches the next unit long before the device does, and issues the unit's
# gather at that point. In the forward pass, this is early enough. In the backward pass, the reduction of the previous
# unit delays the gather: the reduction is issued first and cannot start before that unit's gradients have been
# computed, and a communicator's collectives run in issue order on one stream (FSDP paper, 3.3.2). So the gather waits
# for the reduction, the reduction waits for the computation, and the next unit's computation waits for the gather.
# Backward prefetch changes this *issue order*.
#
# The paper's text reports a gain of about 18 % for GPT-175B (section 5). Figure 6(b) shows 142.4 TFLOPS per GPU without
# prefetch and 173.5 TFLOPS with prefetch, on 128 GPUs. This is 21.8 % more with prefetch, or 18 % less without it. We
# do not have such a machine. Instead, this lab records the program that rank 0 of 128 would run for a model of that
# width, and replays it in virtual time with the numbers from a data sheet.

# %% tags=["C15"]
shape = SHAPES["GPT-175B-like"]
print_wrapped(f"{shape.name}: {shape.what}; rank 0 of {shape.ranks}; {shape.hardware.name}")
big = {
    name: replay(shape.record(partial(LabSchedule, pieces=pieces)), shape.hardware)
    for name, pieces in (("none", NONE), ("PRE", PRE))
}


def layer_seconds(run: Any) -> tuple[float, float]:
    """The time from one layer to the next, in forward and in backward; layers 2 and 3 are like all others."""
    spans = run.last_step()
    begins = {name: min(s.start for s in spans if (s.lane, s.name) == ("compute", name)) for name in LAYER}
    reduced = {name: min(s.start for s in spans if s.name == f"reduce_scatter {name}") for name in LAYER}
    return begins[LAYER[1]] - begins[LAYER[0]], reduced[LAYER[0]] - reduced[LAYER[1]]


LAYER = ("blocks.2", "blocks.3")
whole = {}
for name, run in big.items():
    forward, backward = layer_seconds(run)
    whole[name] = run.seconds + (shape.layers - shape.recorded) * (forward + backward)
    print(
        f"{name:5} a layer: forward {1e3 * forward:5.1f} ms, backward {1e3 * backward:5.1f} ms; "
        f"{shape.recorded} layers and the rest {run.seconds:.3f} s; {shape.layers} layers {whole[name]:.2f} s"
    )
gain = whole["none"] / whole["PRE"] - 1
print_wrapped(f"backward prefetch: {gain:.1%} more steps per second (model). In the paper: {shape.paper}")
assert 0.02 < gain < 0.5
assert abs(layer_seconds(big["none"])[0] - layer_seconds(big["PRE"])[0]) < 1e-6, "forward is not its business"


# %%
def cut(spans: Sequence[Span], begin: float, end: float) -> list[Span]:
    """The spans between two moments (in seconds); the first moment becomes 0."""
    parts = [(span, max(span.start, begin), min(span.end, end)) for span in spans]
    return [Span(span.lane, span.name, first - begin, last - first) for span, first, last in parts if first < last]


begin = {
    name: min(span.start for span in run.last_step() if "reduce_scatter blocks" in span.name)
    for name, run in big.items()
}
plots.timeline(
    {
        f"{name}, two layers": cut(run.last_step(), begin[name], begin[name] + 2 * layer_seconds(run)[1])
        for name, run in big.items()
    },
    title="Without prefetch, a layer waits for a reduction and the gather behind it; with it, for neither",
    says="Two layers of backward, from the end of the last layer on. The numbers are layers.",
    lab="07",
    model=shape.hardware.name,
)

# %% [markdown]
# The time printed for the full model includes the layers that were not recorded, which are assumed to behave like layer
# 2. The simulation omits three effects: NCCL's kernels take multiprocessors and memory bandwidth away from the compute
# kernels, a shared network does not deliver its nominal bandwidth to every user, and ranks wait for the slowest rank.
# Kernels are assumed to reach 60 % of peak performance. The gain depends on how long a layer's two collectives take
# relative to its computation, and therefore on the assumed bandwidth. So the simulation shows that there is a gain, and
# explains it; the size of the gain depends on the hardware.
#
# ### Does prefetch help in the forward pass?
#
# torch has an option `forward_prefetch`, which is off by default; its documentation calls it "only useful for CPU-bound
# workloads". The next cell models three blocks of width 1024 on 2 ranks, each an A100 with a link of 100 GB/s. In one
# case, the host runs ahead. In the other case, the host waits in every block for a value from the device, as it does
# when `.item()` reads a loss for logging or a routing decision. From column to column, the host gets slower; `launch`
# is its time per kernel launch.


# %% tags=["C15"]
class HeldUp(LabSchedule):
    """A host that waits for the device at the end of every unit's forward."""

    def post_forward(self, unit: Unit, backward_follows: bool) -> None:
        current_stream(self.device).record_event().synchronize()
        super().post_forward(unit, backward_follows)


WIDE = Settings(ranks=RANKS, batch=4, layers=3, width=1024, context=512)
LINKED = dataclasses.replace(A100, name="A100, link 100 GB/s", bandwidth=100e9, segment=(0.0, 0.0))  # memory: lab 08
LAUNCH = [4e-6, 8e-6, 16e-6, 24e-6, 32e-6, 48e-6, 64e-6]  # seconds


def forward_seconds(program: Program, hardware: Hardware) -> float:
    """The duration of the last step, until the device has finished all of it."""
    done = {mark.name: mark.done for mark in replay(program, hardware).marks}
    return done["backward"] - done["forward"]


wide = {
    (host, name): on_paper(partial(kind, pieces=pieces), WIDE)
    for host, kind in (("runs ahead", LabSchedule), ("held up", HeldUp))
    for name, pieces in (("no prefetch", PRE), ("forward prefetch", BOTH))
}
took = {
    case: [forward_seconds(program, dataclasses.replace(LINKED, launch=launch)) for launch in LAUNCH]
    for case, program in wide.items()
}
gains = {
    host: [1 - after / before for before, after in zip(took[host, "no prefetch"], seconds, strict=True)]
    for (host, name), seconds in took.items()
    if name == "forward prefetch"
}
first = {}  # span by name: what is first of a block belongs to its forward
for span in replay(wide["runs ahead", "no prefetch"], LINKED).last_step():
    first.setdefault(span.name, span)
computing = first["blocks.2"].start - first["blocks.1"].start
print(f"gather of a block {1e3 * first['all_gather blocks.1'].duration:.2f} ms, its forward {1e3 * computing:.2f} ms")
print(f"{'launch, µs':37}" + "".join(f"{1e6 * each:8.0f}" for each in LAUNCH))
for (host, name), seconds in took.items():
    print(f"{f'host {host}, {name}, ms':37}" + "".join(f"{1e3 * each:8.2f}" for each in seconds))
assert first["all_gather blocks.1"].duration < computing
assert gains["held up"][0] > 0.3 > 0.15 > max(gains["runs ahead"])
assert gains["runs ahead"][0] < 1e-6

# %%
plots.lines(
    {
        f"host {host}": ([1e6 * each for each in LAUNCH], [round(100 * gain, 1) + 0.0 for gain in several])
        for host, several in gains.items()
    },
    xlabel="host time per kernel launch, µs",
    ylabel="forward time saved, %",
    title=f"At {1e6 * LAUNCH[0]:.0f} µs per launch, forward prefetch saves {gains['held up'][0]:.0%} of forward if the "
    f"host is held up, and {gains['runs ahead'][0]:.0%} if it runs ahead",
    says="Three equal blocks. A host that runs ahead has issued the gather anyway; one that is slower than its device "
    "starves it, prefetch or not. At 32 µs, the two are about as fast: the host is too late for a gather only without "
    "prefetch.",
    lab="07",
    model=LINKED.name,
    logx=True,
)

# %% [markdown]
# A host that runs ahead issues the gather of a block while the previous block is being computed, with or without
# forward prefetch; in the forward pass, there is no reduction to delay the gather. If the host has to wait in every
# block, as it does on a CPU, prefetching saves the part of each gather that compute can hide. With these blocks, this
# is 0.83 ms of the 0.91 ms for three gathers. A host that is about as slow as its device (here, at 32 µs per kernel) is
# hardly ahead and issues gathers slightly late, so prefetch saves about a tenth. With an even slower host, the device
# waits for kernels, and every gather has enough time.

# %% tags=["nbval-ignore-output"]
show_record(
    "07",
    says="""
The record shows a step of the ladder's rungs: `fsdp-overlap` does not prefetch, and `fsdp-prefetch` gathers all
units ahead. Compare it with your measurements: your host computes, so prefetch shortened forward, too; does a GPU
have any gaps in forward to close? Compare it with the model: does a gather in backward start before the previous
unit's reduction, and does compute then wait for neither? (`fsdp-overlap` also issues that gather first.) If the
ranks shared a GPU, as the first line of the record would say, compare only the order.
""",
)

# %% [markdown]
# ## What happens if the ranks disagree
#
# Collectives have no names. The third all-gather of one rank is matched with the third all-gather of the others,
# whatever its purpose. So all ranks must gather in the same order, and prefetching changes that order. Consider a model
# in which each rank chooses its own order of blocks, because of a data-dependent branch, a random order with different
# seeds, or iteration over a set. All blocks have the same size.
#
# Predict: block 0 has 133,665 elements, 133,666 with padding. Rank 0 gathers it while rank 1 gathers block 1. How many
# of the elements in rank 0's buffer for block 0 belong to block 0 afterwards?

# %%
predict("7.5", ..., "correct elements of block 0 on rank 0, of 133,666 gathered")


# %%
class OwnWay(GPT):
    """The course's GPT, whose blocks run in an order that each rank chooses."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for number in self.ways[dist.get_rank()]:
            x = self.blocks[number](x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def own_way(ways: list[list[int]]) -> OwnWay:
    torch.manual_seed(SETTINGS.seed)
    model = OwnWay(width=SETTINGS.width, layers=SETTINGS.layers, context=SETTINGS.context)
    model.ways = ways
    return model.to(rank_device())


class Looking(LabSchedule):
    """Keeps a copy of what was gathered as block 0 the first time."""

    found: torch.Tensor | None = None

    def pre_forward(self, unit: Unit) -> None:
        super().pre_forward(unit)
        if unit is self.units[1] and self.found is None:
            self.found = unit.flat.full.data.clone()


def run_own_ways(
    ways: list[list[int]], pieces: Pieces, steps: int = 4, agreed: int = 0
) -> tuple[str, int, list[tuple[float, float]]]:
    """Return this rank's error message, how many elements of block 0 were right, and pairs of losses, found and right.

    In the first `agreed` steps, all ranks use the order of rank 0.
    """
    made: list[Looking] = []

    def schedule(units: Sequence[Unit]) -> Looking:
        made.append(Looking(units, pieces))
        return made[0]

    sharded = FullyShardedDataParallel(own_way(ways), auto_wrap_policy={Block}, schedule=schedule)
    alone = own_way(ways)  # the same, unsharded: an all-reduce per gradient, in the same order on every rank
    block = torch.cat([p.detach().flatten() for p in alone.blocks[0].parameters()])
    optimizers = [torch.optim.AdamW(model.parameters(), LEARNING_RATE) for model in (sharded, alone)]
    losses = []
    try:
        for step, batch in enumerate(BATCHES[:steps]):
            sharded.module.ways = alone.ways = ways if step >= agreed else ways[:1] * RANKS
            rows = [part.to(rank_device()) for part in data.shard(batch, dist.get_rank(), RANKS)]
            each = [model(*rows) for model in (sharded, alone)]
            for loss, optimizer in zip(each, optimizers, strict=True):
                loss.backward()
                if loss is each[1]:
                    for p in alone.parameters():
                        comm.all_reduce(p.grad, comm.world(), comm.MEAN).wait()
                optimizer.step()
                optimizer.zero_grad()
            losses.append((each[0].item(), each[1].item()))
    except RuntimeError as error:
        return str(error), 0, losses
    shards = zip(made[0].found.chunk(RANKS), F.pad(block, (0, padded[1] // 4 - len(block))).chunk(RANKS), strict=True)
    return "no error", sum(len(right) for got, right in shards if torch.equal(got, right)), losses


WAYS = [[0, 1, 2, 3, 4], [1, 0, 2, 3, 4]]
disorder = launch(run_own_ways, RANKS, WAYS, NONE)
outcome("7.5", disorder[0][1], slips={"all of them": padded[1] // 4, "a gather brings the others' shards, too": 0})
for rank, (said, right, losses) in enumerate(disorder):
    print(f"rank {rank}: {said}; {right:,} of {padded[1] // 4:,} elements of block 0 were correct")
    print(f"  loss     {', '.join(f'{found:.4f}' for found, _ in losses)}")
    print(f"  expected {', '.join(f'{should:.4f}' for _, should in losses)}")
assert all(abs(found - should) > 1e-3 for _, _, losses in disorder for found, should in losses)

# %% [markdown]
# There is no error or warning, and the losses look like those of normal training. But on each rank, the gathered
# parameters of blocks 0 and 1 consist of halves of two different blocks. Without a reference run, the mistake goes
# unnoticed.
#
# If the blocks differ in size, gloo aborts one process immediately ("Received data size doesn't match expected size"),
# and the other loses its connection; NCCL itself checks nothing. If one rank skips a block (a randomly dropped layer),
# it issues one collective fewer than the other rank, and sooner or later, the ranks wait for each other forever. With
# gloo, the hosts wait in `wait()`. With NCCL, the streams wait, and each host continues until it needs a value, such as
# the loss here. The next cell runs one step with the same order on both ranks and one step in which one rank skips a
# block, each with a time limit of 5 seconds.

# %% tags=["nbval-ignore-output"]
for what, ways in (("same order", [WAYS[0]] * 2), ("one left out", [WAYS[0], [0, 1, 2, 4]])):
    try:
        print(f"{what}: {launch(run_own_ways, RANKS, ways, NONE, 1, timeout=5.0)[0][0]}")
    except RankError as error:
        print(f"{what}: {error}")

# %% [markdown]
# A job on hundreds of GPUs would hang like this for ten minutes, until the collective times out and the watchdog aborts
# the job.
#
# ## 7.5 Compare the order
#
# *10 minutes, medium*
#
# Before a gather, the ranks exchange the index of the unit to be gathered, which takes 8 bytes. If the indices differ,
# *all* ranks raise an error: if only one rank did, the others would wait forever. The message names the first rank that
# differs from rank 0, and the units that these two ranks are about to gather. (torch makes this check in the first
# iteration under `TORCH_DISTRIBUTED_DEBUG=DETAIL`. In later iterations, it only warns if a rank deviates from its own
# order: `torch/distributed/fsdp/_exec_order_utils.py`.)


# %% tags=["exercise-7.5"]
from .ex5_check_order import check_order

# %%
CHECKED = NONE._replace(check_order=check_order)
CASES = {
    "same order": ([WAYS[0]] * 2, 0),
    "swapped": (WAYS, 0),
    "one left out": ([WAYS[0], [0, 1, 2, 4]], 0),
    "swapped from step 2 on": (WAYS, 1),
}


def run_cases(cases: dict[str, tuple[list[list[int]], int]]) -> dict[str, tuple[str, int]]:
    """Return this rank's error message in each case, and the number of steps before the error."""
    ran = {what: run_own_ways(ways, CHECKED, 2, agreed) for what, (ways, agreed) in cases.items()}
    return {what: (said, len(losses)) for what, (said, _, losses) in ran.items()}


for rank, ran in enumerate(launch(run_cases, RANKS, CASES)):
    for what, (said, steps) in ran.items():
        print_wrapped(f"rank {rank}, {what}: {said}, after {steps} steps")

# %% [markdown]
# In the first iteration, both the silent case and the hang become an error at the first unit that differs. Later
# iterations are not compared: if the orders differ in step 2, the ranks train with wrong values, and if a rank skips a
# block, the job hangs. Comparing in every step costs a small collective per unit and blocks the host, so it is useful
# only for debugging.
#
# ## What is still missing
#
# So far, prefetching is unlimited. With depth None, the entire model is gathered. A host that runs ahead causes the
# same problem even without prefetch: it issues one gather after another, long before the device has released the memory
# of earlier units. This cannot happen on a CPU; on a GPU, it causes out-of-memory errors or makes steps many times
# slower. The next lab limits how far the host runs ahead (`minifsdp/fsdp/schedules/rate_limit.py`).
#
# ## What to remember
#
# 1. A schedule decides the order in which collectives are issued. A link executes one collective at a time, so every
#    collective queued before a gather delays the computation that waits for the gather.
# 2. The forward order is recorded once and assumed to be static; the backward order is recorded anew in every forward
#    pass. A schedule never gathers a unit speculatively.
# 3. PRE issues the unit's own gather and the next unit's gather, and then computes. Its cost is one more unsharded
#    unit. POST frees the unit, gathers the next one and then reduces; with depth 1 on a CPU, where the host itself
#    computes, it needs no extra memory. Prefetching more than one unit ahead is rarely worthwhile.
# 4. A host that is well ahead needs no prefetch in the forward pass, but does need it in the backward pass, because the
#    reduction is in the same queue.
# 5. Collectives have no names: unless the order is the same on all ranks, you get either wrong values without an error,
#    or a hang.
#
# ## Questions
#
# **1. Layers are dropped at random; a new selection is drawn in every step, with the same seed on all ranks. What does
# forward prefetch do, and what does backward prefetch do?**
#
# <details><summary>Answer</summary>
#
# All ranks agree, so the values are correct. The forward record comes from the first iteration: after the first missing
# or additional layer, a forward pass prefetches nothing more. (In torch, which looks up its record by unit, a
# dropped layer is gathered unnecessarily.) The backward record comes from the current forward pass, so backward
# prefetch works well.
# </details>
#
# **2. Why does the backward record list the units in the order in which their forward passes *end*?**
#
# <details><summary>Answer</summary>
#
# Units may be nested: the root's forward pass begins first and ends last, and its backward pass begins first. For a
# chain of blocks, the two orders are the same.
# </details>
#
# **3. With PRE and depth 1, how many units are unsharded while the gradients of the last block are being computed, and
# how many while those of the first block are being computed?**
#
# <details><summary>Answer</summary>
#
# For the last block, three units are unsharded: the root, the last block and the block before it. For the first block,
# no unit is left to prefetch, so only two are unsharded: the root and that block.
# </details>
#
# **4. With two communicators, one for gathers and one for reductions, is backward prefetch still needed?**
#
# <details><summary>Answer</summary>
#
# If the host runs ahead, prefetch is not needed: its only reason is the single queue, and with two queues, the gather
# is not queued behind the reduction. The two queues still share the link, though, and each communicator needs its own
# buffers and multiprocessors. On a CPU, where the host itself computes, prefetch is still needed.
# </details>
#
# **5. Gradients are accumulated under `no_sync`. Is backward prefetch still useful?**
#
# <details><summary>Answer</summary>
#
# Under `no_sync`, there is no reduction to delay the gathers, so a host that runs ahead needs no prefetch in the
# backward pass, just as it needs none in the forward pass. On a CPU, prefetch is still useful: under FULL_SHARD, the
# backward pass of every micro-batch gathers the parameters again. Under SHARD_GRAD_OP, the parameters stay unsharded
# after the forward pass, and the backward pass gathers nothing at all.
# </details>
#
# ## Further reading
#
# - FSDP: [arXiv 2304.11277](https://arxiv.org/abs/2304.11277), 3.3.1 to 3.3.3 (overlap, backward and forward prefetch),
#   section 5 (the gain from backward prefetch).
# - torch: `torch/distributed/fsdp/_exec_order_utils.py` (the records and the check), `_prefetch_handle` in
#   `torch/distributed/fsdp/_runtime_utils.py`.
# - minifsdp: `fsdp/schedules/prefetch.py`, a schedule like yours, with four differences: it follows the previous
#   forward pass rather than that of the first iteration; it checks only the current call against that record; it takes
#   the backward order from the engine, which handles several forward passes before a backward pass, as in pipelines;
#   and it postpones each reduction until the next gather has been issued.
# - Also in minifsdp: `fsdp/schedules/overlap.py`, the schedule of lab 06 with the gather first; `instruments/machine/`,
#   the simulated GPU.
