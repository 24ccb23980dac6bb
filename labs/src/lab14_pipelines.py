# ---
# jupyter:
#   minifsdp:
#     lab: "14"
#     title: Pipelines
#     minutes: 95
#     ranks: 4
# ---

# %% [markdown]
# # Lab 14: pipelines
#
# Data parallelism gives every rank all layers and a part of the batch. Tensor parallelism gives every rank a part of
# every layer. A *pipeline* gives every rank some of the layers, whole, and the whole batch passes through all ranks.
# The only messages are activations between neighbours, and their gradients on the way back. That is little to send,
# so pipelines are used across slow links. The price is idle time, because a rank has nothing to do until its input
# arrives.
#
# ![Four ranks over time: with one batch only one rank computes at any moment; with four micro-batches the ranks work
# at the same time, and only the corners are idle](../slides/figures/split-micro-batches.svg)
#
# *From [lecture 7, Tensor parallelism and pipelines](../slides/split.md), whose second half comes before this lab.*
#
# **After this lab, you will be able to**
#
# - place layers so that no stage holds up the others;
# - write the lists of actions of GPipe and 1F1B, and compute when each action ends;
# - predict idle time and the activations held, and choose the number of micro-batches;
# - split a backward in two, and use the second part to fill idle time;
# - combine a pipeline with data parallelism, and explain why ZeRO stops at stage 1 there.
#
# **You need** labs 02 and 03 (DDP, ZeRO-1 and ZeRO-2); for micro-batches, the gradient accumulation of lab 09;
# and for 14.6 `torch.autograd.Function`, as in lab 13.
#
# **Time** 95 minutes, in two sessions; the break is marked. **Runs** on a laptop (gloo, 4 processes), on one GPU that
# the ranks share (`MINIFSDP_SHARE_GPU=1`), or on a GPU node (NCCL, one rank per GPU). **Memory** less than 20 MiB of
# tensors per rank.
#
# | word | meaning | symbol |
# |---|---|---|
# | stage | consecutive layers on one rank | p ranks, v stages on each |
# | micro-batch | some rows of the batch; the stages take one after the other | m micro-batches in a batch |
# | bubble | the idle share of all ranks' time in a step | |
# | schedule | for each rank, the order of its forwards and backwards | |

# %% tags=["setup"]
# set-up
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minifsdp.course.workshop import exercise, outcome, predict
from minifsdp.pipeline.actions import Action, Plan

Later = list[Callable[[], None]]  # work that has been put off

# %% [markdown]
# # Session one: schedules
#
# ## 14.1 Place the layers
#
# *12 minutes, hard*
#
# Each rank gets consecutive layers; they are its stage. In a pipeline every rank waits for the slowest stage, so the
# best placement is the one whose slowest stage is as fast as possible. Equal numbers of layers do not achieve this,
# because layers differ: looking up an embedding takes next to no time, and a head with a large vocabulary may take as
# long as several blocks.
#
# The model of this lab has an embedding, six blocks and a head: eight layers, for four ranks. Its width is 96 and its
# vocabulary 2,304. Count only products with weights. A block has 12 · 96² of these weights, the head 96 · 2,304.
#
# Predict: with two layers on each rank, how many times as long as with the best placement does the slowest stage
# take?

# %%
predict("14.1", ..., "slowest stage with two layers each, over that of the best placement")


# %% tags=["exercise-14.1"]
@exercise("14.1")
def place(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the number of consecutive layers on each rank for which the slowest stage is as fast as possible.

    If several placements are equally good, any of them will do.

    Args:
        costs: time of each layer, in order, at least 0; at least as many layers as ranks. Leave the list as it is.
        ranks: p.

    Returns:
        p numbers, each at least 1, whose sum is the number of layers.
    """
    ...


# %%
import textwrap
import time
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from minifsdp import comm
from minifsdp.course import plots
from minifsdp.course.ladder.model import GPT
from minifsdp.course.launch import launch, rank_device
from minifsdp.course.machine.sleeping import run_asleep
from minifsdp.course.watch.ledger import Ledger
from minifsdp.pipeline import PipelineStage, Schedule
from minifsdp.pipeline.gpt import cross_entropy
from minifsdp.pipeline.schedules.interleaved import interleaved
from minifsdp.pipeline.schedules.naive import naive
from minifsdp.pipeline.schedules.zero_bubble import zero_bubble
from minifsdp.pipeline.simulate import bubble_of, length_of, most_held, simulate

RANKS, MICROS, ROWS = 4, 8, 16
WIDTH, CONTEXT, VOCABULARY = 96, 24, 2304
UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class Embed(nn.Module):
    """The first layer: from tokens [rows, context] to activations [rows, context, width]."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.embed, self.position = model.embed, model.position

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Head(nn.Module):
    """The last layer: from activations to logits [rows, context, vocabulary], or to the loss of a micro-batch, [1]."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.head(self.norm(x))
        return logits if targets is None else cross_entropy(logits, targets)[None]


class Layers(nn.Module):
    """Consecutive layers: the whole model, or a stage."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, **targets: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](x, **targets)


def layers_of(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """The model's layers, the same on every rank."""
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, width=WIDTH, layers=6, heads=4, context=CONTEXT).to(rank_device(), dtype)
    return [Embed(model), *model.blocks, Head(model)]


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(VOCABULARY, (rows, CONTEXT), generator=generator).to(rank_device()) for _ in range(2))


def products() -> list[float]:
    """Millions of floating-point operations by layer, in products with weights, for 2 rows."""
    (x, _), found = batch(2), []
    for layer in layers_of():
        with FlopCounterMode(display=False) as counter:
            x = layer(x)
        found.append(counter.get_total_flops() / 1e6)
    return found


# %% [markdown]
# ### Measured: two layers each, and your placement

# %%
(costs,) = launch(products, 1)
print("millions of floating-point operations by layer:", *(f"{cost:.1f}" for cost in costs))
slowest = {}
for name, counts in {"two layers each": [2, 2, 2, 2], "yours": place(costs, RANKS)}.items():
    stages = [sum(costs[sum(counts[:rank]) : sum(counts[: rank + 1])]) for rank in range(RANKS)]
    slowest[name] = max(stages)
    print(f"{name:16}{counts}: stages take {', '.join(f'{each:.1f}' for each in stages)}")
slips = {"the head costs as much as two blocks, and the embedding nothing": 8 / 6, "a head is one layer": 1}
outcome("14.1", slowest["two layers each"] / slowest["yours"], slips=slips)

# %% [markdown]
# The head takes as long as two blocks. Llama 3's 405B model has one layer less in its first and in its last stage for
# this reason ([section 3.3.2](https://arxiv.org/abs/2407.21783)). Balancing *memory* would lead to another placement:
# the embedding has as many parameters as two blocks.
#
# ### Measured: naive placement
#
# The simplest way to run these stages is *naive placement*: the whole batch goes through all stages and its gradients
# come back. All measurements in this lab use stages that *sleep* instead of computing: 40 ms for a
# forward and 80 ms for a backward of an eighth of the batch. The messages and processes are real, and so is
# minifsdp's *executor*, which works through the ranks' lists. A sleeping rank uses no CPU time, so the
# measured times of four ranks are right even on a laptop with two cores.
#
# Predict: the forward of the whole batch takes 320 ms on each of the 4 ranks, the backward 640 ms. What share of the
# ranks' time is idle?

# %%
predict("naive", ..., "share of all ranks' time in which they are idle, from 0 to 1")

# %% tags=["nbval-ignore-output", "C28"]
SECONDS = {"F": 0.04, "B": 0.08}
clock = {"naive": run_asleep([list(naive(rank, RANKS)) for rank in range(RANKS)], {"F": 0.32, "B": 0.64})}
by_lists = simulate([list(naive(rank, RANKS)) for rank in range(RANKS)], UNITS).bubble
print(f"measured idle time: {bubble_of(clock['naive']):.1%}")
outcome("naive", by_lists, how="computed", slips={"one rank of four computes at a time": 0.25})
plots.pipeline(
    {"naive": clock["naive"]},
    title=f"One rank computes at a time: {bubble_of(clock['naive']):.0%} of four ranks' time is idle",
    says="Measured on 4 gloo ranks. Light bars are forwards, dark ones backwards.",
    lab="14",
)

# %% [markdown]
# This is model parallelism without a pipeline. With it, a model fits that is too large for one device, but the step
# is no faster than on one device with enough memory.
#
# ## 14.2 Micro-batches
#
# *7 minutes, medium*
#
# The ranks can work at the same time if the batch is cut into *micro-batches* of a few rows each. While rank 1 has
# the first, rank 0 has the second. The weights must not change in the meantime, so a step is still one step:
# gradients add up, and the optimizer runs once. This is the gradient accumulation of lab 09. It needs no pipeline, so
# one process can compute the gradients that all schedules have to reproduce.
#
# The loss of the batch is a mean over its rows. So a micro-batch counts in proportion to its rows, and the
# micro-batches need not all have the same number of rows.
#
# Predict: the batch is cut into 8 micro-batches of equal size. One process takes them one after the other, each
# forward and then backward. What share of the whole batch's activations does it hold at most?

# %%
predict("14.2", ..., "activations held with 8 micro-batches, over those with one")


# %% tags=["exercise-14.2"]
@exercise("14.2")
def accumulate(
    forward: Callable[[Tensor], Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    target: Tensor,
    micros: int,
) -> Tensor:
    """Forward and backward of a batch in micro-batches, one after the other.

    Adds to `.grad` of the parameters what one backward of the whole batch would add. The activations of at most one
    micro-batch are alive.

    Args:
        forward: the model.
        loss_fn: the mean loss over the rows that it is given.
        x: [rows, ..], tokens perhaps.
        target: [rows, ..].
        micros: m, at most the number of rows; micro-batches are those of `tensor_split(m)`.

    Returns:
        The loss of the whole batch, a tensor without dimensions and without a graph.
    """
    ...


# %%
def held_alone(micros: int) -> tuple[int, float, float]:
    """Take a step on one process; return the most bytes of activations, the loss, and the norm of all gradients."""
    with Ledger() as ledger:
        model, levels = Layers(layers_of()), []
        ledger.watch(model)
        tokens, targets = batch()
        before = ledger.mark("before")["activations"]

        def forward(rows: Tensor) -> Tensor:
            logits = model(rows)
            levels.append(ledger.mark("forward")["activations"] - before)
            return logits

        loss = accumulate(forward, cross_entropy, tokens, targets, micros)
    return max(levels), loss.item(), torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()


# %% [markdown]
# ### Measured: gradients and activations of one process

# %%
alone = {micros: launch(held_alone, 1, micros)[0] for micros in (1, 2, 4, 8)}
for micros, (held, loss, norm) in alone.items():
    print(f"m = {micros}: {held:10,} bytes of activations; loss {loss:.5f}, norm of the gradient {norm:.5f}")
    assert abs(norm / alone[1][2] - 1) < 1e-4
outcome("14.2", round(alone[8][0] / alone[1][0], 3), slips={"all of them are needed until backward": 1})

# %% [markdown]
# ## 14.3 GPipe: all forwards, then all backwards
#
# *4 minutes, easy*
#
# A *schedule* is a list of actions for each rank. An action is a stage, a kind and a micro-batch: `Action(2, "F",
# 0)`, written 2F0, is the forward of micro-batch 0 through stage 2, and 2B0 is its backward. The list does not
# mention messages. The executor receives an action's input before it and sends its output afterwards. So a rank waits
# when its next action has no input yet, and the order of the lists determines all waiting.
#
# [GPipe](https://arxiv.org/abs/1811.06965) has the simplest lists: all forwards, then all backwards. Let a forward
# take 1 and a backward 2, with p ranks and m micro-batches. Rank 0 works for 3 m. It also waits while the last
# micro-batch travels to the last rank and the first gradient travels back.
#
# The idle share of all ranks' time, over the whole step, is called the *bubble*.
#
# Predict: how large is the bubble on 4 ranks with 8 micro-batches?

# %%
predict("14.3", ..., "bubble with p = 4 and m = 8, from 0 to 1, to two digits")


# %% tags=["exercise-14.3"]
@exercise("14.3")
def gpipe(rank: int, ranks: int, micros: int) -> list[Action]:
    """The actions of a rank, whose one stage has the rank's number.

    Backwards go from micro-batch 0 to the last, as in torch. (The paper's figure goes the other way.)

    Args:
        rank: from 0.
        ranks: p.
        micros: m.
    """
    ...


# %% [markdown]
# ### Measured: your list on four ranks


# %%
def plan_of(order: Callable[..., Any], ranks: int = RANKS, micros: int = MICROS, *more: int) -> list[list[Action]]:
    return [list(order(rank, ranks, micros, *more)) for rank in range(ranks)]


def stage_of(counts: Sequence[int], dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """This rank's stage, and the whole model, which has the same parameters."""
    layers, rank = layers_of(dtype), dist.get_rank()
    return Layers(layers[sum(counts[:rank]) : sum(counts[: rank + 1])]), Layers(layers)


def step(schedule: Schedule, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """A step of the pipeline; the losses of the micro-batches, on the last rank."""
    losses: list[Tensor] = []
    first, last = (any(getattr(each, end) for each in schedule.stages) for end in ("is_first", "is_last"))
    given = {"target": targets, "targets": targets} if last else {}
    schedule.step(*([tokens] if first else []), losses=losses, **given)
    return losses


def far_from_one_process(plan: Plan, counts: Sequence[int]) -> float:
    """The largest difference of a gradient from that of one process, in float64, over the largest gradient."""
    module, whole = stage_of(counts, torch.float64)
    tokens, targets = batch()
    whole(tokens, targets=targets).sum().backward()
    expected = [p.grad for p in module.parameters()]  # the stage's layers are the whole model's
    for p in module.parameters():
        p.grad = None
    stage = PipelineStage(module, dist.get_rank(), len(plan), rank_device())
    step(Schedule(plan, stage, MICROS, lambda loss, _: loss.sum()), tokens, targets)
    pairs = zip(module.parameters(), expected, strict=True)
    return max(((p.grad - q).abs().max() / q.abs().max()).item() for p, q in pairs)


def compare(name: str, plan: Plan) -> None:
    far = max(launch(far_from_one_process, RANKS, plan, PLACED))
    print(f"{name}: gradients of all stages equal those of one process within 1e-12: {far < 1e-12}")
    assert far < 1e-12


PLACED = place(costs, RANKS)
compare("your GPipe", plan_of(gpipe))

# %% tags=["nbval-ignore-output", "C28"]
clock["GPipe"] = run_asleep(plan_of(gpipe), SECONDS)
print(f"a step takes {length_of(clock['naive']):.2f} s naively, {length_of(clock['GPipe']):.2f} s with your list")
print(f"measured bubble: {bubble_of(clock['GPipe']):.1%}")
outcome(
    "14.3",
    round(simulate(plan_of(gpipe), UNITS).bubble, 2),
    how="computed",
    slips={"of the work, not of the whole time: the step is longer than the work": 3 / 8, "one rank in four": 0.25},
)
plots.pipeline(
    {"GPipe": clock["GPipe"]},
    title=f"With 8 micro-batches, {bubble_of(clock['GPipe']):.0%} of four ranks' time is idle",
    says="Measured on 4 gloo ranks. Numbers and colours are micro-batches; light is forward, dark backward.",
    lab="14",
)

# %% [markdown]
# A rank waits for (p - 1) forwards and (p - 1) backwards, and works for m of each. So the bubble is
#
# $$\frac{p - 1}{m + p - 1}$$
#
# of the step. Papers also write (p - 1) / m: the same idle time, over the *work* instead of the whole step. Check
# which of the two a number refers to. The clock's figure is a little higher than the formula's, because a message
# takes time, too.
#
# ## 14.4 1F1B: one forward, one backward
#
# *10 minutes, hard*
#
# Look at the figure again. When rank 0 starts its first backward, it holds the activations of all m micro-batches,
# and more micro-batches, which make the bubble smaller, would make this worse. But the last rank could do the
# backward of micro-batch 0 as soon as its forward is done. 1F1B, "one forward, one backward", does so
# ([PipeDream-Flush](https://arxiv.org/abs/2006.09503)). A rank's list has three parts:
#
# 1. **warm-up**: a few forwards, until the first gradient can arrive;
# 2. **steady state**: one forward and one backward in turn, so that every backward frees what a forward has stored;
# 3. **cool-down**: the backwards that are left.
#
# How many forwards does the warm-up have? The last rank needs none before its first pair of forward and backward. The
# rank before it has the time for one forward more while the first micro-batch is at the last rank.
#
# Predict: p = 4, m = 8. Of how many micro-batches does rank 1 (the second of the four) hold activations at most?

# %%
predict("14.4", ..., "micro-batches that rank 1 of 4 holds at most, m = 8")


# %% tags=["exercise-14.4"]
@exercise("14.4")
def one_f_one_b(rank: int, ranks: int, micros: int) -> list[Action]:
    """The actions of a rank, whose one stage has the rank's number.

    Forwards and backwards each go from micro-batch 0 to the last.

    Args:
        rank: from 0.
        ranks: p.
        micros: m, perhaps less than p.
    """
    ...


# %%
def held(plan: Plan) -> tuple[int, dict[str, int]]:
    """The most bytes of activations on this rank before an action, and all bytes by tag at that moment."""
    with Ledger() as ledger:
        module = stage_of(PLACED, torch.float32)[0]  # the other stages' layers are freed
        ledger.watch(module)
        micros = 1 + max(action.micro for action in plan[0])
        stage = PipelineStage(module, dist.get_rank(), len(plan), rank_device())
        schedule = Schedule(plan, stage, micros, lambda loss, _: loss.sum())
        tokens, targets = batch(ROWS // MICROS * micros)
        step(schedule, tokens, targets)  # connects the ranks; gradients exist from here on
        levels = [ledger.mark("before")]
        schedule.executor.observers.append(lambda action: levels.append(ledger.mark(str(action))))
        step(schedule, tokens, targets)
    most = max(levels, key=lambda level: level["activations"])
    return most["activations"] - levels[0]["activations"], most


SENT = ROWS // MICROS * CONTEXT * WIDTH * 4  # bytes of a micro-batch's activations between two stages

# %% [markdown]
# ### Measured: gradients, and the activations that each rank holds
#
# In bytes, a rank holds what autograd keeps of each micro-batch between its forward and its backward. A tensor that a
# rank sends has to stay until it has arrived. The executor waits for no send: it drops the tensor as soon as a later
# message from the receiver shows that it has come. So in 1F1B every rank but the first also holds a gradient on its
# way, of `SENT` bytes. (The last rank keeps the values of the losses as well.)

# %% tags=["C28"]
compare("your 1F1B", plan_of(one_f_one_b))
one = [most for most, _ in launch(held, RANKS, plan_of(gpipe, RANKS, 1))]
measured = {each.__name__: launch(held, RANKS, plan_of(each)) for each in (gpipe, one_f_one_b)}
for name, order in (("gpipe", gpipe), ("one_f_one_b", one_f_one_b)):
    for rank, (most, _) in enumerate(measured[name]):
        alive = most_held(order(rank, RANKS, MICROS))
        rest = most - alive * one[rank]
        print(f"{name:12} rank {rank}: {most:9,} bytes of activations, {alive} x {one[rank]:7,} + {rest:6,}")
print(f"a gradient on its way: {SENT:,} bytes")
slips = {"rank 0 holds p, and each rank after it one fewer": 4, "the ranks behind it, without its own pair": 2}
outcome("14.4", most_held(one_f_one_b(1, RANKS, MICROS)), slips=slips)

# %%
sums = {
    name: {f"rank {r}": sum(tags.values()) for r, (_, tags) in enumerate(found)} for name, found in measured.items()
}
fewer = [a / b for (a, _), (b, _) in zip(measured["one_f_one_b"], measured["gpipe"], strict=True)]
whole = {name: sum(found.values()) / 2**20 for name, found in sums.items()}
plots.stages(
    {f"rank {rank}": tags for rank, (_, tags) in enumerate(measured["one_f_one_b"])},
    earlier={"GPipe": sums["gpipe"]},
    title=f"1F1B needs {whole['one_f_one_b']:.1f} MiB on 4 ranks, GPipe {whole['gpipe']:.1f}: activations shrink to "
    f"{fewer[0]:.0%} on rank 0, {fewer[2]:.0%} on rank 2",
    says="All memory of each rank when it holds the most activations, m = 8. Colours: your 1F1B. Parameters and "
    "gradients are the same with GPipe. With a larger m, GPipe's bars grow, and 1F1B's do not.",
    lab="14",
)

# %% tags=["nbval-ignore-output", "C28"]
clock["1F1B"] = run_asleep(plan_of(one_f_one_b), SECONDS)
plots.pipeline(
    {name: clock[name] for name in ("GPipe", "1F1B")},
    title="The order has changed, the bubble has not: "
    f"{bubble_of(clock['GPipe']):.0%} and {bubble_of(clock['1F1B']):.0%}",
    says="Measured on 4 gloo ranks. Numbers and colours are micro-batches; light is forward, dark backward.",
    lab="14",
)

# %% [markdown]
# 1F1B is not faster than GPipe. It is what makes many micro-batches affordable: rank r holds at most p - r of them,
# however large m is. Together p - r micro-batches on rank r with a p-th of the layers are about as much as one
# micro-batch takes in the whole model. So *activations on rank 0 do not fall with p*
# ([Korthikanti et al.](https://arxiv.org/abs/2205.05198), section 4.2.3).
#
# ## 14.5 The bubble, computed
#
# *16 minutes, hard*
#
# Schedules can be compared without running them, because the lists determine when each action ends. An action begins
# as soon as the action before it on its rank has ended *and* its inputs are there. A forward needs the forward of the
# stage before. A backward needs the forward of its own stage and the backward of the stage after it. If ranks wait
# for actions that come later in each other's lists, the plan is a *deadlock*. A simulator finds it before anything
# starts.
#
# Predict: how many micro-batches do 4 ranks need for a bubble of at most 5 %?

# %%
predict("14.5", ..., "least number of micro-batches for a bubble of at most 5 %, p = 4")


# %% tags=["exercise-14.5"]
@exercise("14.5")
def ends(plan: Plan, seconds: Mapping[str, float]) -> dict[Action, float]:
    """When each action of a plan ends; the first begins at 0. Messages take no time.

    Args:
        plan: the list of each rank, with forwards "F" and whole backwards "B". A rank may have several stages, and
            the last stage may be on any rank; stages count from 0. Leave the lists as they are.
        seconds: the duration of "F" and of "B".

    Raises:
        RuntimeError: the plan is a deadlock. (A RecursionError does not count: a long plan may raise it, too.)
    """
    ...


# %%
def bubble(plan: Plan, seconds: Mapping[str, float]) -> float:
    """The share of all ranks' time that is idle, by your simulator."""
    length = max(ends(plan, seconds).values())
    return 1 - sum(seconds[action.kind] for actions in plan for action in actions) / (len(plan) * length)


# %% [markdown]
# ### The bubble, simulated and measured

# %% tags=["C28"]
counts = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
simulated = {}
for ranks in (2, 4, 8):
    for order in (gpipe, one_f_one_b):
        found = [bubble(plan_of(order, ranks, micros), UNITS) for micros in counts]
        formula = [(ranks - 1) / (micros + ranks - 1) for micros in counts]
        equal = all(abs(a - b) < 1e-9 for a, b in zip(found, formula, strict=True))
        print(f"p = {ranks}, {order.__name__:12} m = 8: {found[5]:.4f}, expected {formula[5]:.4f}; for all m: {equal}")
        assert equal
    simulated[f"p = {ranks}"] = (counts, [100 * each for each in found])
least = next(m for m in range(1, 1000) if bubble(plan_of(one_f_one_b, RANKS, m), UNITS) < 0.05 + 1e-9)
slips = {"(p - 1) / m is the idle time over the work, and the bubble is a share of the step": 60}
outcome("14.5", least, how="computed", slips=slips)

# %% tags=["nbval-ignore-output", "C28"]
by_clock = {MICROS: bubble_of(clock["1F1B"])}
for micros in (1, 2, 4, 16):
    by_clock[micros] = bubble_of(run_asleep(plan_of(one_f_one_b, RANKS, micros), SECONDS, steps=2))
for micros, found in sorted(by_clock.items()):
    print(f"m = {micros:2}: measured {found:.1%}, expected {3 / (micros + 3):.1%}")
plots.lines(
    {"1F1B measured, p = 4": (sorted(by_clock), [100 * by_clock[micros] for micros in sorted(by_clock)])},
    expected=simulated,
    xlabel="micro-batches m",
    ylabel="bubble, % of the step",
    title=f"With 8 micro-batches on 4 ranks, the formula says {3 / 11:.0%}; measured are {by_clock[MICROS]:.0%}",
    says="Hollow markers: your simulator, GPipe and 1F1B alike. Twice as many ranks need about twice as many "
    "micro-batches for the same bubble.",
    lab="14",
)

# %% [markdown]
# ### Break it: wait for the gradient before you send
#
# There are two ranks and two micro-batches. Rank 0 wants the gradient of micro-batch 1 before it has sent micro-batch
# 1. Your simulator finds the deadlock at once. On real ranks, without a check, two processes would wait until
# somebody stops them. That is why minifsdp's executor simulates a plan before it runs it.

# %%
stuck = [
    [Action(0, "F", 0), Action(0, "B", 1), Action(0, "F", 1), Action(0, "B", 0)],
    [Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1)],
]
for name, find in (("yours", ends), ("minifsdp's", simulate)):
    try:
        find(stuck, UNITS)
        print(f"{name:12} finds nothing")
    except RuntimeError as error:
        found = f"{name:12} {error if name != 'yours' else 'finds it'}"
        print(textwrap.fill(found, 90, subsequent_indent=" " * 13))

# %% [markdown]
# # Break. Session two: less idle time, and data parallelism
#
# ## Interleaving: several stages on each rank
#
# A rank waits for p - 1 other *stages*. If stages are smaller, the wait is shorter. So give each rank v stages that
# are p apart: with v = 2, rank 1 of 4 has stages 1 and 5 of 8. A micro-batch then goes around the ranks v times, and
# the wait is a v-th as long ([Narayanan et al.](https://arxiv.org/abs/2104.04473), section 2.2). The order within a
# rank is 1F1B's, in rounds of p micro-batches. This is *interleaved* 1F1B.
#
# Predict: p = 4, v = 2. A step now has how many times as many messages, on all ranks together?

# %%
predict("interleaved", ..., "messages with 2 stages on each of 4 ranks, over those with 1")

# %%
for per_rank in (1, 2, 4):
    plan = plan_of(interleaved, RANKS, MICROS, per_rank) if per_rank > 1 else plan_of(one_f_one_b)
    seconds = {"F": 1 / per_rank, "B": 2 / per_rank}
    expected = (RANKS - 1) / (per_rank * MICROS + RANKS - 1)
    held_here = [each / per_rank for each in simulate(plan, seconds).held]
    print(
        f"v = {per_rank}: bubble {bubble(plan, seconds):.1%}, expected {expected:.1%}; "
        f"{2 * MICROS * (per_rank * RANKS - 1):3} messages; rank 0 holds {held_here[0]:g} micro-batches' activations"
    )
    assert abs(bubble(plan, seconds) - expected) < 1e-9
outcome(
    "interleaved",
    round((2 * RANKS - 1) / (RANKS - 1), 2),
    how="computed",
    slips={"v p - 1 boundaries, not v (p - 1)": 2},
)

# %% [markdown]
# There are v p - 1 boundaries between stages, and each micro-batch crosses each of them twice.
#
# Rank 0 also holds more activations than the p micro-batches of 1F1B. For v > 1, its warm-up has (v - 1) p forwards of
# its other stages, and 2 (p - 1) for the way of the first micro-batch to the last rank and back, where 1F1B does p - 1
# and then waits. With the forward of the first pair, these are v p + p - 1 forwards, and each keeps a v-th of a
# micro-batch's activations on the rank:
#
# $$p + \frac{p - 1}{v} \text{ micro-batches' activations}$$
#
# On 4 ranks these are 5.5 for v = 2 and 4.75 for v = 4 ([Korthikanti et al.](https://arxiv.org/abs/2205.05198),
# section 4.2.3, have the same factor).

# %% tags=["nbval-ignore-output", "C28"]
clock["interleaved"] = run_asleep(plan_of(interleaved, RANKS, MICROS, 2), {"F": 0.02, "B": 0.04})
plots.pipeline(
    {name: clock[name] for name in ("1F1B", "interleaved")},
    title=f"With two stages on each rank, the bubble is {bubble_of(clock['interleaved']):.0%} instead of "
    f"{bubble_of(clock['1F1B']):.0%}",
    says="Measured on 4 gloo ranks. An action of a stage half as large takes half as long, and each micro-batch "
    "passes each rank twice.",
    lab="14",
)

# %% [markdown]
# By the clock the gain is smaller than by the formula. A rank waits for more than twice as many messages, and each of
# them takes time.
#
# ## 14.6 Split the backward
#
# *14 minutes, hard*
#
# A backward computes two things. The stage before waits for the gradient of the *input*. No rank waits for the
# gradients of the *weights*; they are needed only when the optimizer steps. So split the backward in two: **I**
# computes the gradient of the input and sends it, and **W** computes the gradients of the weights later, when the
# rank would be idle. With only I on the way back, gradients arrive sooner, and the W's fill most of the rest of the
# bubble ([Qi et al., Zero bubble pipeline parallelism](https://arxiv.org/abs/2401.10241)).
#
# The split is easy for a linear layer: the backward of y = x wᵀ + b has two products of equal size, one for x and one
# for w. So F, I and W take about equally long, and a whole backward twice as long as a forward. Write it with a
# `torch.autograd.Function`. Autograd is enabled when the function that you append is called.
#
# The schedule ZB-H1 ("zero bubble") has 1F1B's order, except that rank r delays its W's by r micro-batches. On the
# way back a micro-batch takes I instead of I + W on each rank. The ranks after the first do their delayed W's at the
# end of the step, when 1F1B would leave them idle.
#
# Predict: with F = I = W, how long is a rank idle, as a share of its idle time with 1F1B?

# %%
predict("14.6", ..., "idle time with ZB-H1, over that with 1F1B, if F = I = W")


# %% tags=["exercise-14.6"]
@exercise("14.6")
def linear_later(later: Later) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return `linear(x, weight, bias)`, which is F.linear with a backward in two parts.

    Its backward computes the gradient of x, if x needs one, and appends to `later` one function without arguments.
    That function computes the gradients of weight and bias, and adds them to their `.grad`, which may be None. It
    is called after backward, and need not be the next one to be called. Each product is computed once.

    x: [.., in], at least two dimensions; weight: [out, in]; bias: [out]; the latter two are parameters.
    """
    ...


# %%
class LaterLinear(nn.Module):
    """An nn.Linear whose backward is your function's."""

    def __init__(self, linear: nn.Linear, later: Later) -> None:
        super().__init__()
        self.weight, self.bias, self.linear = linear.weight, linear.bias, linear_later(later)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, self.bias)


def with_later(module: nn.Module, later: Later) -> None:
    """Replace every linear layer by one with your function."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LaterLinear(child, later))
        else:
            with_later(child, later)


def far_with_yours(plan: Plan) -> float:
    """As `far_from_one_process`, with your linear layers, whose work is done at W."""
    module, whole = stage_of(PLACED, torch.float64)
    tokens, targets = batch()
    whole(tokens, targets=targets).sum().backward()
    parameters = list(module.parameters())
    expected = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    later: Later = []
    with_later(module, later)

    def take() -> Callable[[], None]:
        """The work that the last backward has put off, as one function for the executor to call at W."""
        mine = list(later)
        later.clear()
        return lambda: [call() for call in mine] and None

    stage = PipelineStage(module, dist.get_rank(), len(plan), rank_device(), dw_builder=take)
    step(Schedule(plan, stage, MICROS, lambda loss, _: loss.sum()), tokens, targets)
    return max(((p.grad - q).abs().max() / q.abs().max()).item() for p, q in zip(parameters, expected, strict=True))


# %% [markdown]
# ### Measured: gradients and idle time

# %%
far = max(launch(far_with_yours, RANKS, plan_of(zero_bubble)))
print(f"your linear layers in ZB-H1: gradients equal those of one process within 1e-12: {far < 1e-12}")
assert far < 1e-12
runs = {"1F1B": simulate(plan_of(one_f_one_b), UNITS), "ZB-H1": simulate(plan_of(zero_bubble), UNITS)}
for name, run in runs.items():
    print(f"{name:6} bubble {run.bubble:.1%}, {run.length:.0f} units; micro-batches held by rank: {run.held}")
idle = {name: run.bubble * run.length for name, run in runs.items()}
slips = {"(p - 1)(F + I - W) against (p - 1)(F + I + W)": 2 / 3, "W is a third of the work": 2 / 3}
outcome("14.6", round(idle["ZB-H1"] / idle["1F1B"], 3), how="computed", slips=slips)

# %% tags=["nbval-ignore-output", "C28"]
THIRDS = {"F": 0.04, "B": 0.08, "I": 0.04, "W": 0.04}
clock["ZB-H1"] = run_asleep(plan_of(zero_bubble), THIRDS)
formula = {"naive": 3 / 4, "GPipe": 3 / 11, "1F1B": 3 / 11, "interleaved": 3 / 19, "ZB-H1": 3 / 27}
for name, rows in clock.items():
    print(f"{name:12} measured {bubble_of(rows):.1%}, expected {formula[name]:.1%}")
plots.pipeline(
    {name: clock[name] for name in ("1F1B", "ZB-H1")},
    title=f"Weight gradients fill idle time: the bubble is {bubble_of(clock['ZB-H1']):.0%} instead of "
    f"{bubble_of(clock['1F1B']):.0%}",
    says="Measured on 4 gloo ranks. Colours are micro-batches, from light to dark: forward, gradient of the "
    "input, gradients of weights.",
    lab="14",
)

# %% [markdown]
# With ZB-H1 a rank is idle for (p - 1)(F + I - W). In exchange every rank holds p micro-batches, as rank 0 does with
# 1F1B, because the inputs of a W are kept until it has run. ZB-H2 holds 2 p - 1 micro-batches on rank 0 and has no
# bubble at all, provided that the optimizer does not have to wait for all ranks.
#
# ## Micro-batches: how many, of what size?
#
# More micro-batches make the bubble smaller. But if a batch of 48 samples is cut into 24 micro-batches, each has only
# 2 samples, and a device needs a certain time for each micro-batch, whatever its size: kernels are launched, and small
# products use only a part of the device. Suppose that a forward of a stage takes 4 ms and another 1 ms per sample, and
# a backward twice as long. A step then takes
#
# $$(m + p - 1) \cdot 3 \cdot \left(4 + \frac{48}{m}\right) \text{ ms}.$$
#
# Predict: for which m from 1 to 48 is this shortest, on 4 ranks?

# %%
predict("size", ..., "number of micro-batches for the shortest step")


# %% tags=["nbval-ignore-output", "C28"]
def of_size(micros: int) -> dict[str, float]:
    """Seconds of a forward and a backward of a micro-batch, of 48 samples in total."""
    forward = 0.004 + 0.001 * 48 / micros
    return {"F": forward, "B": 2 * forward}


plans = {micros: plan_of(one_f_one_b, RANKS, micros) for micros in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)}
said = {micros: 1e3 * max(ends(plan, of_size(micros)).values()) for micros, plan in plans.items()}
took = {micros: 1e3 * length_of(run_asleep(plans[micros], of_size(micros), steps=2)) for micros in (2, 6, 24)}
best = min(said, key=said.__getitem__)
outcome("size", best, how="computed", slips={"the bubble alone would want as many as possible": 48})
plots.lines(
    {"measured": (list(took), list(took.values()))},
    expected={"your simulator": (list(said), list(said.values()))},
    xlabel="micro-batches, of 48 samples in total",
    ylabel="step time, ms",
    logx=True,
    title=f"A step is fastest with {best} micro-batches, {said[best]:.0f} ms; with 48 it takes {said[48]:.0f} ms",
    says="1F1B on 4 ranks. A stage needs 4 ms, and 1 ms per sample. On the left, the bubble costs most; on the right, "
    "the 4 ms of each micro-batch.",
    lab="14",
)

# %% [markdown]
# Without a pipeline, the largest micro-batch that fits is the best. With a pipeline, there is an optimum in between,
# and memory limits the choice: GPipe holds m micro-batches, 1F1B only p.
#
# ## 14.7 When to reduce
#
# *6 minutes, easy*
#
# Pipelines are combined with data parallelism: d copies of a pipeline of p ranks, each with other rows of the batch,
# use p · d ranks. Each stage then has d replicas, whose gradients have to be averaged by DDP or ZeRO. A stage's
# gradients add up over m micro-batches. With DDP and ZeRO-1 they are whole on every rank during the step, so they are
# reduced once, after the last micro-batch. ZeRO-2 keeps only a shard of each gradient, so it would have to reduce the
# gradients of every micro-batch as they appear.
#
# The list of actions determines when that is. A micro-batch's gradients are complete after its B, or after its W if
# the backward is split.
#
# Predict: in bytes, how many times as much as ZeRO-1 does ZeRO-2 send for a stage's gradients and parameters in a
# step with 8 micro-batches? Both also gather the updated parameters once. A reduce-scatter and an all-gather send
# equally much.

# %%
predict("14.7", ..., "bytes that ZeRO-2 sends in a step, over those of ZeRO-1, m = 8")


# %% tags=["exercise-14.7"]
@exercise("14.7")
def when_to_reduce(actions: Sequence[Action], zero: Literal[1, 2]) -> list[int]:
    """Return the positions in a rank's list after which gradients of a stage are reduced, in ascending order.

    Args:
        actions: F, and B or I and W, of one or several stages.
        zero: 1: each stage's gradients once, as soon as they are complete for the step. 2: those of each micro-batch,
            as soon as they are complete.
    """
    ...


# %%
Grid = tuple[comm.Group, comm.Group]


def grid() -> Grid:
    """2 replicas of a pipeline of 2 stages: the group of this rank's stage, and that of its pipeline."""
    mesh = dist.device_mesh.init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("data", "pipeline"))
    return mesh["data"].get_group(), mesh["pipeline"].get_group()


class Reducer:
    """Reduces a stage's gradients into this rank's shard of them, where your positions say so."""

    def __init__(self, module: nn.Module, actions: Sequence[Action], zero: Literal[1, 2], group: comm.Group) -> None:
        self.parameters, self.group = list(module.parameters()), group
        self.left, self.at = when_to_reduce(actions, zero), 0
        self.shard: Tensor | float = 0.0

    def before(self, action: Action | None) -> None:
        """Called before each action, and at the end of the list."""
        if self.at - 1 in self.left:
            self.reduce()
        self.at += 1

    def reduce(self) -> None:
        flat = self.flat([p.grad for p in self.parameters])
        shard = flat.new_empty(len(flat) // self.group.size())
        comm.reduce_scatter(shard, flat, self.group, comm.MEAN).wait()
        self.shard = self.shard + shard
        for p in self.parameters:
            p.grad = None

    def gather(self) -> None:
        """The updated parameters, from all shards."""
        flat = self.flat(self.parameters)
        shard = flat.chunk(self.group.size())[self.group.rank()].clone()
        comm.all_gather(flat, shard, self.group).wait()

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        joined = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return F.pad(joined, (0, -len(joined) % self.group.size()))


def with_replicas(zero: Literal[1, 2]) -> tuple[float, list[str], float]:
    """The difference of the shard from one process, the messages within a stage, and the bytes sent for them."""
    data, pipeline = grid()
    layers, place_of = layers_of(torch.float64), pipeline.rank()
    whole, module = Layers(layers), Layers(layers[:5] if place_of == 0 else layers[5:])
    tokens, targets = batch()
    whole(tokens, targets=targets).sum().backward()  # all rows; each replica gets half of them
    plan = plan_of(one_f_one_b, 2)
    reducer = Reducer(module, plan[place_of], zero, data)
    expected = reducer.flat([p.grad for p in reducer.parameters]).chunk(2)[data.rank()]
    for p in reducer.parameters:
        p.grad = None
    stage = PipelineStage(module, place_of, 2, rank_device(), group=pipeline)
    schedule = Schedule(plan, stage, MICROS, lambda loss, _: loss.sum())
    schedule.executor.observers.append(reducer.before)
    with comm.record() as calls:
        step(schedule, tokens.chunk(2)[data.rank()], targets.chunk(2)[data.rank()])
        reducer.before(None)
        reducer.gather()
    mine = [call for call in calls if call.op in ("reduce_scatter", "all_gather")]
    far = (reducer.shard - expected).abs().max() / expected.abs().max()
    return far.item(), [call.op for call in mine], sum(call.wire for call in mine)


def kept_whole() -> list[str]:
    """The messages within a stage with FSDP2, which keeps parameters for the step and reduces once."""
    data, pipeline = grid()
    layers = layers_of()
    module = Layers(layers[:5] if pipeline.rank() == 0 else layers[5:])
    mesh = dist.device_mesh.DeviceMesh.from_group(data, rank_device().type)
    module = fully_shard(module, mesh=mesh, reshard_after_forward=False)
    stage = PipelineStage(module, pipeline.rank(), 2, rank_device(), group=pipeline)
    tokens, targets = batch()
    schedule = Schedule(plan_of(one_f_one_b, 2), stage, MICROS, lambda loss, _: loss.sum())
    with comm.record() as calls:
        step(schedule, tokens.chunk(2)[data.rank()], targets.chunk(2)[data.rank()])
    return [call.op for call in calls if call.op in ("reduce_scatter", "all_gather")]


# %% [markdown]
# ### Measured: two replicas of a pipeline, and the messages between them

# %% tags=["C29", "C32"]
from collections import Counter

from minifsdp.fsdp2 import fully_shard


def in_words(ops: Sequence[str]) -> str:
    return ", ".join(f"{count} {op}" for op, count in sorted(Counter(ops).items()))


sent = {}
for zero in (1, 2):
    far, ops, sent[zero] = launch(with_replicas, RANKS, zero)[0]
    print(
        f"your ZeRO-{zero}: gradients of one process {far < 1e-12}; a stage: {in_words(ops)}, {sent[zero]:,.0f} bytes"
    )
print(f"FSDP2, parameters kept for the step, reduced once: a stage: {in_words(launch(kept_whole, RANKS)[0])}")
slips = {"both also gather the parameters once": 8, "the gather is as large as a reduce-scatter": 8}
outcome("14.7", round(sent[2] / sent[1], 2), slips=slips)

# %% [markdown]
# ZeRO-2 sends m + 1 messages where ZeRO-1 sends two, and saves little memory, because the gradients of a micro-batch
# are whole anyway until they have been reduced. ZeRO-3 would also gather the parameters before each F and each B, 2 m
# times. So pipelines are combined with ZeRO-1, or with FSDP2 that keeps its parameters for the step, whose messages
# are those of ZeRO-1 in the other order. Llama 3 does the latter, and torchtitan sets `reshard_after_forward=False`
# if there is a pipeline.
#
# Which reductions can be hidden? With 1F1B the ranks finish one after the other, the last one first:

# %%
done = ends(plan_of(one_f_one_b), UNITS)
for rank, actions in enumerate(plan_of(one_f_one_b)):
    (at,) = when_to_reduce(actions, 1)
    print(
        f"rank {rank}: gradients complete {max(done.values()) - done[actions[at]]:.0f} units before the end of the step"
    )

# %% [markdown]
# Only rank 0's reduction delays the step. The other ranks reduce while rank 0 is still working.
#
# ### Measured: torch's list is the same
#
# `torch.distributed.pipelining` has the same parts under the same names: stages, and schedules that are lists. Older
# code may import `torch.distributed.pipeline.sync.Pipe` (torch 1.8 to 2.3): one process that drove all GPUs of a
# host, with RPC across hosts. It was removed in June 2024
# ([pytorch#127354](https://github.com/pytorch/pytorch/pull/127354)).


# %% tags=["C29"]
def with_torch() -> tuple[list[Action], float]:
    """torch's list of this rank, and the difference of its gradients from those of one process."""
    from torch.distributed import pipelining

    from minifsdp.pipeline.actions import parse

    module, whole = stage_of(PLACED, torch.float64)
    tokens, targets = batch()
    cross_entropy(whole(tokens), targets).backward()
    parameters, rank = list(module.parameters()), dist.get_rank()
    expected = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    stage = pipelining.PipelineStage(module, rank, RANKS, rank_device())
    schedule = pipelining.Schedule1F1B(stage, MICROS, cross_entropy)
    schedule.step(*([tokens] if rank == 0 else []), **({"target": targets} if rank == RANKS - 1 else {}))
    far = max(((p.grad - q).abs().max() / q.abs().max()).item() for p, q in zip(parameters, expected, strict=True))
    theirs = [action for cell in schedule.pipeline_order[rank] if cell is not None for action in parse(str(cell))]
    return theirs, far


found = launch(with_torch, RANKS)
print("torch's gradients equal those of one process within 1e-12:", max(far for _, far in found) < 1e-12)
for rank, (theirs, _) in enumerate(found):
    same = theirs == one_f_one_b(rank, RANKS, MICROS)
    print(f"rank {rank}: torch's list equals yours: {same}; it goes from {theirs[0]} to {theirs[-1]}")

# %% [markdown]
# The list that torch 2.13 shows for the last rank counts its forwards from 1, so it ends with a micro-batch that does
# not exist. Nothing depends on it: torch's 1F1B does not run that list.
#
# ## What is still missing
#
# - Messages behind computation. Here a rank waits for each input when it needs it; on GPUs, receives are posted one
#   action ahead.
# - Tied weights. An embedding and a head that share their weight are on different stages, so their gradients have to
#   be added up between the first and the last rank.
# - Values that depend on all stages and are needed before the optimizer steps: the norm of all gradients for
#   clipping, and fp16's check for infinities. With ZB-H2, ranks step before they know them, and may have to undo the
#   step.
# - Two stages on each rank, placed in a V, so that the first and the last are on one rank: ZBV and DualPipeV, in
#   `minifsdp/pipeline/schedules`.
#
# ## What to remember
#
# 1. A schedule is a list of actions for each rank. The lists determine the time of a step, the memory, and whether
#    there is a deadlock.
# 2. The bubble is (p - 1) / (m + p - 1) with GPipe and with 1F1B. With v stages on each rank, the wait is a v-th as
#    long.
# 3. 1F1B holds p - r micro-batches on rank r, GPipe all m. This is the reason to use 1F1B.
# 4. No rank waits for the gradients of weights. ZB-H1 computes them in idle time, of which (p - 1)(F + I - W)
#    remains.
# 5. Use many micro-batches, until they are too small for the device.
# 6. With data parallelism, reduce once per step: use ZeRO-1, or FSDP2 with parameters kept for the step.
# 7. A pipeline sends 2 b s h elements per step and boundary, the least of all kinds of parallelism. So it is used
#    across hosts.
#
# ## More: the shortest step with 6 micro-batches held
#
# *20 to 40 minutes, not counted in the lab's time*
#
# This is an open task without a reference answer. There are 4 ranks and 8 micro-batches, and the backward is split.
# Attention has no weights, so the three parts are not equal: F takes two time units of 10 ms, I two, W one. No rank
# may hold more than 6 micro-batches between F and W. Write the list of each rank so that the step is as short as
# possible. A plan does not run if it is incomplete, is a deadlock, or receives messages in another order than they
# are sent. You can start from this one:

# %% tags=["shown", "nbval-ignore-output"]
from minifsdp.course.workshop.scores import enter_order


def my_order(rank: int, ranks: int, micros: int) -> list[Action]:
    """W at once, or later? More forwards ahead on the first ranks? You decide."""
    ahead = min(ranks - 1 - rank, micros)
    found = [Action(rank, "F", micro) for micro in range(ahead)]
    for micro in range(micros):
        if ahead + micro < micros:
            found.append(Action(rank, "F", ahead + micro))
        found += [Action(rank, "I", micro), Action(rank, "W", micro)]
    return found


enter_order("my order", my_order)

# %% [markdown]
# GPipe and 1F1B take 550 ms, and GPipe holds too much. ZB-H1 takes 490 ms and holds 4 micro-batches. No list is
# shorter than 460 ms; 470 ms can be reached. `minifsdp lab score 14` shows the table of your attempts.
#
# ## Questions
#
# **1. A pipeline of 8 stages runs with 8 micro-batches. Which is better, 16 micro-batches or 2 stages on each rank?**
#
# <details><summary>Answer</summary>
#
# Both make the bubble 7/23 instead of 7/15. 16 micro-batches of the same size double the batch, which training may
# not want; 16 of half the size may be too small for the device. 2 stages on each rank double the messages and more,
# and hold more activations.
# </details>
#
# **2. Rank 0 prints its loss and finds none. Why?**
#
# <details><summary>Answer</summary>
#
# Only the last stage computes a loss. The other ranks have none, unless the last rank sends it to them.
# </details>
#
# **3. GPipe's paper recomputes activations in backward. What does rank 0 then hold, and what does it cost?**
#
# <details><summary>Answer</summary>
#
# It holds the inputs of m micro-batches and all activations of one. It pays one more forward for each micro-batch,
# which makes a step's work a third longer if a backward takes as long as two forwards.
# </details>
#
# **4. Your pipeline hangs in its first step, on two of four ranks. What do you look at first?**
#
# <details><summary>Answer</summary>
#
# The order of messages. Either the lists of two neighbours disagree on the next micro-batch, or a rank waits for its
# send to end before it receives, and so does its neighbour. A simulation of the lists finds the first before anything
# starts; the executor avoids the second, because it waits for no send.
# </details>
#
# **5. The gradients are 8 times as large as those of one process, with m = 8. What has been forgotten?**
#
# <details><summary>Answer</summary>
#
# Each micro-batch's loss is a mean over its own rows, so it counts for an m-th of the batch's loss. Divide it by m
# before backward. In torch and minifsdp the schedule does so by itself, unless you pass `scale_grads=False`.
# </details>
#
# ## Further reading
#
# - Huang et al., [GPipe](https://arxiv.org/abs/1811.06965); Narayanan et al.,
#   [Memory-efficient pipeline-parallel DNN training](https://arxiv.org/abs/2006.09503) and
#   [Megatron-LM on GPU clusters](https://arxiv.org/abs/2104.04473); Qi et al.,
#   [Zero bubble pipeline parallelism](https://arxiv.org/abs/2401.10241).
# - torch: `torch/distributed/pipelining/schedules.py`.
# - minifsdp: `pipeline/schedules/`, one file each; `pipeline/simulate.py` (14.5 with latency), `pipeline/weights.py`
#   (14.6), `pipeline/executor.py`, which runs any list.
