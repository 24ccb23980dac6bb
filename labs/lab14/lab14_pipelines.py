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
# every layer. A *pipeline* gives every rank a few complete layers, and the entire batch passes through all ranks.
# Neighbours exchange only activations and, on the way back, their gradients. These messages are small, so pipelines are
# used across slow links. The price is idle time, because a rank has nothing to do until its input arrives.
#
# ![Four ranks over time: with one batch only one rank computes at any moment; with four micro-batches the ranks work at
# the same time, and only the corners are idle](../slides/figures/split-micro-batches.svg)
#
# *From [lecture 7, Tensor parallelism and pipelines](../slides/split.md). Its second half comes before this lab.*
#
# **After this lab, you will be able to**
#
# - place layers so that no stage holds up the others;
# - write the action lists for GPipe and 1F1B, and compute when each action ends;
# - predict idle time and activation memory, and choose the number of micro-batches;
# - split a backward pass in two, and use the second part to fill idle time;
# - combine a pipeline with data parallelism, and explain why this combination uses only ZeRO-1.
#
# **You need** labs 02 and 03 (DDP, ZeRO-1 and ZeRO-2), gradient accumulation from lab 09 (for micro-batches), and
# `torch.autograd.Function` from lab 13 (for 14.6).
#
# **Time** 95 minutes, in two sessions; the break is marked. **Runs** on a laptop (gloo, 4 processes), on one GPU that
# the ranks share (`MINIFSDP_SHARE_GPU=1`), or on a GPU node (NCCL, one rank per GPU). **Memory** less than 20 MiB of
# tensors per rank.
#
# | word | meaning | symbol |
# |---|---|---|
# | stage | consecutive layers on one rank | p ranks, v stages on each |
# | micro-batch | some samples of the batch; a stage computes one micro-batch at a time | m micro-batches in a batch |
# | bubble | the idle share of all ranks' time in a step | |
# | schedule | for each rank, the order of its forward and backward passes | |

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

Later = list[Callable[[], None]]  # postponed work

# %% [markdown]
# # Session one: schedules
#
# ## 14.1 Place the layers
#
# *12 minutes, hard*
#
# Each rank gets consecutive layers; they are its stage. In a pipeline, every rank waits for the slowest stage, so the
# best placement is the one whose slowest stage is as fast as possible. Equal numbers of layers do not achieve this,
# because layers differ: an embedding lookup takes next to no time, and a head with a large vocabulary may take as long
# as several blocks.
#
# The model of this lab has eight layers for four ranks: an embedding, six blocks and a head. Its width is 96 and its
# vocabulary 2,304. Count only matmuls with weights. A block has 12 · 96² of these weights, the head 96 · 2,304.
#
# Predict: by what factor is the slowest stage slower with two layers on each rank than with the best placement?

# %%
predict("14.1", ..., "ratio of slowest stages: two layers each to the best placement")


# %% tags=["exercise-14.1"]
from .ex1_place import place

# %%
import textwrap
import time
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from minifsdp import comm
from minifsdp.gpt import GPT
from minifsdp.instruments import plots
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.machine.sleeping import run_asleep
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.pipeline import PipelineStage, Schedule
from minifsdp.losses import cross_entropy
from minifsdp.pipeline.schedules.interleaved import interleaved
from minifsdp.pipeline.schedules.naive import naive
from minifsdp.pipeline.schedules.zero_bubble import zero_bubble
from minifsdp.pipeline.simulate import bubble_of, length_of, most_held, simulate

RANKS, MICROS, ROWS = 4, 8, 16
WIDTH, CONTEXT, VOCABULARY = 96, 24, 2304
UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class Embed(nn.Module):
    """The first layer: from tokens [samples, context] to activations [samples, context, width]."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.embed, self.position = model.embed, model.position

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Head(nn.Module):
    """The last layer: from activations to logits [samples, context, vocabulary], or to a micro-batch's loss, [1]."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.head(self.norm(x))
        return logits if targets is None else cross_entropy(logits, targets)[None]


class Layers(nn.Module):
    """Consecutive layers: the full model, or a stage."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, **targets: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](x, **targets)


def layers_of(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """Return the model's layers, the same on every rank."""
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, width=WIDTH, layers=6, heads=4, context=CONTEXT).to(rank_device(), dtype)
    return [Embed(model), *model.blocks, Head(model)]


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(VOCABULARY, (rows, CONTEXT), generator=generator).to(rank_device()) for _ in range(2))


def products() -> list[float]:
    """Return millions of floating-point operations by layer, in matmuls with weights, for 2 samples."""
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
    print(f"{name:16}{counts}: cost of each stage {', '.join(f'{each:.1f}' for each in stages)}")
slips = {
    "the head costs as much as two blocks, and the embedding costs nothing": 8 / 6,
    "the head costs more than a block": 1,
}
outcome("14.1", slowest["two layers each"] / slowest["yours"], slips=slips)

# %% [markdown]
# The head takes as long as two blocks. For this reason, the first and the last stage of Llama 3 405B each have one
# layer fewer than the others ([section 3.3.2](https://arxiv.org/abs/2407.21783)). Balancing *memory* would lead to
# another placement: the embedding has as many parameters as two blocks.
#
# ### Measured: naive placement
#
# *Naive placement* is the simplest way to run these stages: the entire batch passes through all stages, and its
# gradients come back. In all measurements of time in this lab, the stages *sleep* instead of computing: 40 ms for the
# forward pass and 80 ms for the backward pass of an eighth of the batch. The messages and processes are real, and so is
# minifsdp's *executor*, which runs the ranks' lists of actions. A sleeping rank uses no CPU time, so the times of four
# ranks are correct even on a laptop with two cores.
#
# Predict: on each of the 4 ranks, the forward pass of the entire batch takes 320 ms, and the backward pass takes 640
# ms. What share of the ranks' time is idle?

# %%
predict("naive", ..., "idle share of all ranks' time, from 0 to 1")

# %% tags=["nbval-ignore-output", "C28"]
SECONDS = {"F": 0.04, "B": 0.08}
clock = {"naive": run_asleep([list(naive(rank, RANKS)) for rank in range(RANKS)], {"F": 0.32, "B": 0.64})}
by_lists = simulate([list(naive(rank, RANKS)) for rank in range(RANKS)], UNITS).bubble
print(f"measured idle time: {bubble_of(clock['naive']):.1%}")
outcome("naive", by_lists, how="computed", slips={"this is the share in which a rank computes": 0.25})
plots.pipeline(
    {"naive": clock["naive"]},
    title=f"One rank works at a time: {bubble_of(clock['naive']):.0%} of four ranks' time is idle (sleeping stages)",
    says="Measured on 4 gloo ranks, where stages sleep instead of computing. Light bars are forward "
    "passes; dark bars are backward passes.",
    lab="14",
)

# %% [markdown]
# This is model parallelism without a pipeline. It makes room for a model that is too large for one device, but a step
# is no faster than on one device with enough memory.
#
# ## 14.2 Micro-batches
#
# *7 minutes, medium*
#
# The ranks can work at the same time if the batch is split into *micro-batches* of a few samples each. While rank 1
# computes the first micro-batch, rank 0 computes the second. The weights must not change in the meantime, so a step is
# still one step: gradients add up, and the optimizer runs once. This is the gradient accumulation of lab 09. It needs
# no pipeline, so one process can compute the gradients that all schedules have to reproduce.
#
# The loss of the batch is the mean over its samples. So a micro-batch counts in proportion to its number of samples,
# and micro-batches may have different sizes.
#
# Predict: the batch is split into 8 micro-batches of equal size. One process takes them one by one, each with a forward
# pass followed by a backward pass. At its peak, what share of the entire batch's activations does it hold?

# %%
predict("14.2", ..., "peak activations with 8 micro-batches, as a share of those with one")


# %% tags=["exercise-14.2"]
from .ex2_accumulate import accumulate


# %%
def held_alone(micros: int) -> tuple[int, float, float]:
    """Take a step on one process; return the peak bytes of activations, the loss, and the norm of all gradients."""
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
    print(f"m = {micros}: {held:10,} bytes of activations; loss {loss:.5f}, gradient norm {norm:.5f}")
    assert abs(norm / alone[1][2] - 1) < 1e-4
slips = {"each backward pass frees the activations of its micro-batch": 1}
outcome("14.2", round(alone[8][0] / alone[1][0], 3), slips=slips)

# %% [markdown]
# ## 14.3 GPipe: all forwards, then all backwards
#
# *4 minutes, easy*
#
# A *schedule* is a list of actions for each rank. An action is a stage, a kind and a micro-batch: `Action(2, "F", 0)`,
# written 2F0, is the forward pass of micro-batch 0 through stage 2, and 2B0 is its backward pass. The list does not
# mention messages. The executor receives an action's input before the action and sends its output afterwards. So a rank
# waits when its next action has no input yet, and the order of the lists determines all waiting.
#
# [GPipe](https://arxiv.org/abs/1811.06965) has the simplest lists: all forward passes, then all backward passes. Let a
# forward pass take 1 and a backward pass 2 units of time, with p ranks and m micro-batches. Rank 0 works for 3 m units.
# It also waits while the last micro-batch travels to the last rank and the first gradient travels back.
#
# The idle share of all ranks' time, over the entire step, is called the *bubble*.
#
# Predict: how large is the bubble on 4 ranks with 8 micro-batches?

# %%
predict("14.3", ..., "bubble with p = 4 and m = 8, from 0 to 1, to two decimals")


# %% tags=["exercise-14.3"]
from .ex3_gpipe import gpipe

# %% [markdown]
# ### Measured: your list on four ranks


# %%
def plan_of(order: Callable[..., Any], ranks: int = RANKS, micros: int = MICROS, *more: int) -> list[list[Action]]:
    return [list(order(rank, ranks, micros, *more)) for rank in range(ranks)]


def stage_of(counts: Sequence[int], dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return this rank's stage, and the full model with the same parameters."""
    layers, rank = layers_of(dtype), dist.get_rank()
    return Layers(layers[sum(counts[:rank]) : sum(counts[: rank + 1])]), Layers(layers)


def step(schedule: Schedule, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """Run a step of the pipeline, and return the losses of the micro-batches, on the last rank."""
    losses: list[Tensor] = []
    first, last = (any(getattr(each, end) for each in schedule.stages) for end in ("is_first", "is_last"))
    given = {"target": targets, "targets": targets} if last else {}
    schedule.step(*([tokens] if first else []), losses=losses, **given)
    return losses


def far_from_one_process(plan: Plan, counts: Sequence[int]) -> float:
    """Return the largest difference from one process's gradients, relative to the largest gradient, in float64."""
    module, whole = stage_of(counts, torch.float64)
    tokens, targets = batch()
    whole(tokens, targets=targets).sum().backward()
    expected = [p.grad for p in module.parameters()]  # the stage's layers are those of the full model
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
print(f"step time: {length_of(clock['naive']):.2f} s with naive placement")
print(f"           {length_of(clock['GPipe']):.2f} s with your list")
print(f"measured bubble: {bubble_of(clock['GPipe']):.1%}")
outcome(
    "14.3",
    round(simulate(plan_of(gpipe), UNITS).bubble, 2),
    how="computed",
    slips={
        "this is relative to the work; the bubble is a share of the entire step": 3 / 8,
        "this is the share of one rank in four": 0.25,
    },
)
plots.pipeline(
    {"GPipe": clock["GPipe"]},
    title=f"With 8 micro-batches, {bubble_of(clock['GPipe']):.0%} of four ranks' time is idle (sleeping stages)",
    says="Measured on 4 gloo ranks, where stages sleep instead of computing. Numbers and colours are micro-batches. "
    "Light: forward pass; dark: backward pass.",
    lab="14",
)

# %% [markdown]
# A rank waits for p - 1 forward passes and p - 1 backward passes, and computes m of each. So the bubble is
#
# $$\frac{p - 1}{m + p - 1}$$
#
# of the step. Papers also use (p - 1) / m: the same idle time, relative to the *work* instead of the entire step. For
# any number that you read, check which of the two it is. The measured bubble is a little larger than the formula's,
# because messages take time, too.
#
# ## 14.4 1F1B: one forward, one backward
#
# *10 minutes, hard*
#
# Look at the figure again. When rank 0 starts its first backward pass, it holds the activations of all m micro-batches.
# More micro-batches make the bubble smaller, but would increase this memory. The last rank, however, could run the
# backward pass of micro-batch 0 right after its forward pass. 1F1B, "one forward, one backward", does so
# ([PipeDream-Flush](https://arxiv.org/abs/2006.09503)). A rank's list has three parts:
#
# 1. **warm-up**: a few forward passes, until the first gradient can arrive;
# 2. **steady state**: forward and backward passes in turn, so that every backward pass frees what a forward pass has
#    stored;
# 3. **cool-down**: the remaining backward passes.
#
# How many forward passes does the warm-up have? The last rank needs none before its first pair of forward and backward
# passes. The rank before it has time for one more forward pass while the first micro-batch is at the last rank.
#
# Predict: p = 4, m = 8. At its peak, for how many micro-batches does rank 1 (the second of the four) hold activations?

# %%
predict("14.4", ..., "peak number of micro-batches that rank 1 of 4 holds, m = 8")


# %% tags=["exercise-14.4"]
from .ex4_one_f_one_b import one_f_one_b


# %%
def held(plan: Plan) -> tuple[int, dict[str, int]]:
    """Return this rank's peak bytes of activations before an action, and all bytes by tag at that moment."""
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
# A rank holds what autograd keeps of each micro-batch between its forward and its backward pass. A rank also has to
# keep a tensor that it sends until the tensor has arrived. The executor does not wait for its sends: it drops the
# tensor as soon as a later message from the receiver shows that the tensor has arrived. So in 1F1B, every rank but the
# first also holds a gradient that is being sent, of `SENT` bytes. (The last rank keeps the values of the losses as
# well.)

# %% tags=["C28"]
compare("your 1F1B", plan_of(one_f_one_b))
one = [most for most, _ in launch(held, RANKS, plan_of(gpipe, RANKS, 1))]
measured = {each.__name__: launch(held, RANKS, plan_of(each)) for each in (gpipe, one_f_one_b)}
for name, order in (("gpipe", gpipe), ("one_f_one_b", one_f_one_b)):
    for rank, (most, _) in enumerate(measured[name]):
        alive = most_held(order(rank, RANKS, MICROS))
        rest = most - alive * one[rank]
        print(f"{name:12} rank {rank}: {most:9,} bytes of activations, {alive} x {one[rank]:7,} + {rest:6,}")
print(f"a gradient that is being sent: {SENT:,} bytes")
slips = {
    "rank 0 holds p micro-batches, and each rank after it one fewer": 4,
    "this counts the warm-up without the forward pass of the first pair": 2,
}
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
    title=f"1F1B needs {whole['one_f_one_b']:.1f} MiB on 4 ranks, GPipe {whole['gpipe']:.1f} MiB: activations shrink "
    f"to {fewer[0]:.0%} on rank 0, {fewer[2]:.0%} on rank 2",
    says="All memory of each rank at its peak of activations, m = 8. Colours: your 1F1B. Parameters and gradients are "
    "the same with GPipe. With a larger m, the bars of GPipe grow, and those of 1F1B do not.",
    lab="14",
)

# %% tags=["nbval-ignore-output", "C28"]
clock["1F1B"] = run_asleep(plan_of(one_f_one_b), SECONDS)
plots.pipeline(
    {name: clock[name] for name in ("GPipe", "1F1B")},
    title="GPipe runs all forward passes first, 1F1B alternates: bubbles of "
    f"{bubble_of(clock['GPipe']):.0%} and {bubble_of(clock['1F1B']):.0%}",
    says="Measured on 4 gloo ranks, where stages sleep instead of computing. Numbers and colours are micro-batches. "
    "Light: forward pass; dark: backward pass.",
    lab="14",
)

# %% [markdown]
# 1F1B is not faster than GPipe, but it makes many micro-batches affordable: rank r holds at most p - r of them, however
# large m is. On rank r, p - r micro-batches with a p-th of the layers take about (p - r) / p times as much memory as
# one micro-batch in the entire model. So *activations on rank 0 do not fall with p* ([Korthikanti et
# al.](https://arxiv.org/abs/2205.05198), section 4.2.3).
#
# ## 14.5 The bubble, computed
#
# *16 minutes, hard*
#
# Schedules can be compared without running them, because the lists determine when each action ends. An action begins as
# soon as the previous action on its rank has ended *and* its inputs are available. A forward pass needs the forward
# pass of the previous stage. A backward pass needs the forward pass of its own stage and the backward pass of the next
# stage. If ranks wait for actions that come later in each other's lists, the plan is a *deadlock*. A simulator finds it
# before anything starts.
#
# Predict: how many micro-batches do 4 ranks need for a bubble of at most 5 %?

# %%
predict("14.5", ..., "smallest number of micro-batches for a bubble of at most 5 %, p = 4")


# %% tags=["exercise-14.5"]
from .ex5_ends import ends


# %%
def bubble(plan: Plan, seconds: Mapping[str, float]) -> float:
    """Return the idle share of all ranks' time, computed by your simulator."""
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
slips = {"(p - 1) / m is relative to the work; the bubble is a share of the entire step": 60}
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
    title=f"With 8 micro-batches on 4 ranks, the measured bubble is {by_clock[MICROS]:.0%}; "
    f"the formula gives {3 / 11:.0%}",
    says="Hollow markers: your simulator, for both GPipe and 1F1B. Twice as many ranks need about twice as many "
    "micro-batches for the same bubble.",
    lab="14",
)

# %% [markdown]
# ### Break it: wait for the gradient before you send
#
# There are two ranks and two micro-batches. Rank 0 waits for the gradient of micro-batch 1 before it has sent
# micro-batch 1. Your simulator finds the deadlock at once. On real ranks, without a check, two processes would wait
# until they are killed. Therefore, minifsdp's executor simulates a plan before it runs it.

# %%
stuck = [
    [Action(0, "F", 0), Action(0, "B", 1), Action(0, "F", 1), Action(0, "B", 0)],
    [Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1)],
]
for name, find in (("yours", ends), ("minifsdp's", simulate)):
    try:
        find(stuck, UNITS)
        print(f"{name:12} finds no deadlock")
    except RuntimeError as error:
        found = f"{name:12} {error if name != 'yours' else 'finds the deadlock'}"
        print(textwrap.fill(found, 90, subsequent_indent=" " * 13))

# %% [markdown]
# # Break. Session two: less idle time, and data parallelism
#
# ## Interleaving: several stages on each rank
#
# A rank waits for p - 1 other *stages*. If stages are smaller, the wait is shorter. So give each rank v stages that are
# p apart: with v = 2, rank 1 of 4 has stages 1 and 5 of 8. A micro-batch then goes around the ranks v times, and the
# wait is 1/v as long ([Narayanan et al.](https://arxiv.org/abs/2104.04473), section 2.2). Within a rank, the order is
# that of 1F1B, in rounds of p micro-batches. This is *interleaved* 1F1B.
#
# Predict: p = 4, v = 2. How many times as many messages does a step now have, on all ranks together?

# %%
predict("interleaved", ..., "ratio of messages: 2 stages on each of 4 ranks to 1")

# %%
for per_rank in (1, 2, 4):
    plan = plan_of(interleaved, RANKS, MICROS, per_rank) if per_rank > 1 else plan_of(one_f_one_b)
    seconds = {"F": 1 / per_rank, "B": 2 / per_rank}
    expected = (RANKS - 1) / (per_rank * MICROS + RANKS - 1)
    held_here = [each / per_rank for each in simulate(plan, seconds).held]
    print(
        f"v = {per_rank}: bubble {bubble(plan, seconds):.1%}, expected {expected:.1%}; "
        f"{2 * MICROS * (per_rank * RANKS - 1):3} messages; rank 0 holds activations of {held_here[0]:g} micro-batches"
    )
    assert abs(bubble(plan, seconds) - expected) < 1e-9
outcome(
    "interleaved",
    round((2 * RANKS - 1) / (RANKS - 1), 2),
    how="computed",
    slips={"there are v p - 1 boundaries instead of v (p - 1)": 2},
)

# %% [markdown]
# There are v p - 1 boundaries between stages, and each micro-batch crosses each boundary twice.
#
# Rank 0 also holds more activations than the p micro-batches of 1F1B. For v > 1, its warm-up has (v - 1) p forward
# passes of its other stages. It has 2 (p - 1) more for the time in which the first micro-batch travels to the last rank
# and back. 1F1B computes p - 1 in this time and then waits. Together with the forward pass of the first pair, rank 0
# runs v p + p - 1 forward passes, and each keeps 1/v of a micro-batch's activations on the rank:
#
# $$p + \frac{p - 1}{v} \text{ micro-batches' activations}$$
#
# On 4 ranks, this is 5.5 for v = 2 and 4.75 for v = 4 ([Korthikanti et al.](https://arxiv.org/abs/2205.05198), section
# 4.2.3, have the same factor).

# %% tags=["nbval-ignore-output", "C28"]
clock["interleaved"] = run_asleep(plan_of(interleaved, RANKS, MICROS, 2), {"F": 0.02, "B": 0.04})
plots.pipeline(
    {name: clock[name] for name in ("1F1B", "interleaved")},
    title=f"With two stages on each rank, the bubble is {bubble_of(clock['interleaved']):.0%} instead of "
    f"{bubble_of(clock['1F1B']):.0%} (sleeping stages)",
    says="Measured on 4 gloo ranks, where stages sleep instead of computing. With half as many layers in a stage, an "
    "action takes half as long, and each micro-batch visits each rank twice.",
    lab="14",
)

# %% [markdown]
# The measured gain is smaller than the formula's. A rank waits for more than twice as many messages, and each message
# takes time.
#
# ## 14.6 Split the backward
#
# *14 minutes, hard*
#
# A backward pass computes two things. The previous stage waits for the gradient of the *input*. No rank waits for the
# gradients of the *weights*; only the optimizer step needs them. So split the backward pass in two: **I** computes the
# gradient of the input and sends it, and **W** computes the gradients of the weights later, when the rank would be
# idle. With only I on the way back, gradients arrive sooner, and the W actions fill most of the remaining bubble ([Qi
# et al., Zero bubble pipeline parallelism](https://arxiv.org/abs/2401.10241)).
#
# The split is easy for a linear layer: the backward pass of y = x wᵀ + b has two matmuls of equal size, one for x and
# one for w. So F, I and W take about equally long, and a full backward pass takes twice as long as a forward pass.
# Write it with a `torch.autograd.Function`. Autograd is enabled when the function that you append is called.
#
# The schedule ZB-H1 ("zero bubble") has the order of 1F1B, except that rank r delays each W by r micro-batches. On the
# way back, a micro-batch takes I instead of I + W on each rank. All ranks except the first run their delayed W actions
# at the end of the step, when 1F1B would leave these ranks idle.
#
# Predict: if F = I = W, how long is a rank idle, as a share of its idle time with 1F1B?

# %%
predict("14.6", ..., "ratio of a rank's idle times: ZB-H1 to 1F1B, if F = I = W")


# %% tags=["exercise-14.6"]
from .ex6_linear_later import linear_later


# %%
class LaterLinear(nn.Module):
    """An nn.Linear with the backward pass of your function."""

    def __init__(self, linear: nn.Linear, later: Later) -> None:
        super().__init__()
        self.weight, self.bias, self.linear = linear.weight, linear.bias, linear_later(later)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, self.bias)


def with_later(module: nn.Module, later: Later) -> None:
    """Replace every linear layer with one that uses your function."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LaterLinear(child, later))
        else:
            with_later(child, later)


def far_with_yours(plan: Plan) -> float:
    """Return the same as `far_from_one_process`, with your linear layers, which compute weight gradients at W."""
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
        """Return the work that the last backward pass has postponed, as one function that the executor calls at W."""
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
slips = {"the idle times are (p - 1)(F + I - W) and (p - 1)(F + I + W)": 2 / 3}
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
    f"{bubble_of(clock['1F1B']):.0%} (sleeping stages)",
    says="Measured on 4 gloo ranks, where stages sleep instead of computing. Colours are micro-batches. From light "
    "to dark: forward pass, gradient of the input, gradients of the weights.",
    lab="14",
)

# %% [markdown]
# With ZB-H1, a rank is idle for (p - 1)(F + I - W). In exchange, every rank holds p micro-batches, as rank 0 does with
# 1F1B, because a rank keeps the inputs of a W until it has run. ZB-H2 holds 2 p - 1 micro-batches on rank 0 and has no
# bubble at all, provided that the optimizer does not have to wait for all ranks.
#
# ## Micro-batches: number and size
#
# More micro-batches make the bubble smaller. But if a batch of 48 samples is split into 24 micro-batches, each has only
# 2 samples, and each micro-batch has a fixed cost, whatever its size: the host launches kernels, and small matmuls use
# only a part of the device. Suppose that the forward pass of a stage takes 4 ms and 1 ms more per sample, and a
# backward pass takes twice as long. A step then takes
#
# $$(m + p - 1) \cdot 3 \cdot \left(4 + \frac{48}{m}\right) \text{ ms}.$$
#
# Predict: for which m from 1 to 48 is a step shortest, on 4 ranks?

# %%
predict("size", ..., "number of micro-batches for the shortest step")


# %% tags=["nbval-ignore-output", "C28"]
def of_size(micros: int) -> dict[str, float]:
    """Return the seconds of a micro-batch's forward and backward pass, for 48 samples in total."""
    forward = 0.004 + 0.001 * 48 / micros
    return {"F": forward, "B": 2 * forward}


plans = {micros: plan_of(one_f_one_b, RANKS, micros) for micros in (1, 2, 4, 6, 8, 12, 16, 24, 48)}
said = {micros: 1e3 * max(ends(plan, of_size(micros)).values()) for micros, plan in plans.items()}
took = {micros: 1e3 * length_of(run_asleep(plans[micros], of_size(micros), steps=2)) for micros in (2, 6, 24)}
best = min(said, key=said.__getitem__)
outcome("size", best, how="computed", slips={"this minimizes only the bubble": 48})
plots.lines(
    {"measured": (list(took), list(took.values()))},
    expected={"your simulator": (list(said), list(said.values()))},
    xlabel="micro-batches, of 48 samples in total",
    ylabel="time of a step, ms",
    logx=True,
    title=f"{best} micro-batches give the shortest simulated step, {said[best]:.0f} ms; 48 take {said[48]:.0f} ms",
    says="1F1B on 4 ranks. A stage needs 4 ms, and 1 ms per sample. On the left, the bubble dominates; on the right, "
    "the fixed 4 ms of each micro-batch.",
    lab="14",
)

# %% [markdown]
# Without a pipeline, the largest micro-batch that fits is the best. With a pipeline, the optimum is in between, and
# memory limits the choice: GPipe holds m micro-batches, 1F1B only p.
#
# ## 14.7 When to reduce
#
# *6 minutes, easy*
#
# Pipelines are combined with data parallelism: d copies of a pipeline of p ranks use p · d ranks, and each copy has
# other samples of the batch. Each stage then has d replicas, and DDP or ZeRO has to average their gradients. A stage's
# gradients add up over m micro-batches. With DDP and ZeRO-1, every rank holds unsharded gradients during the step, so
# they are reduced once, after the last micro-batch. ZeRO-2 keeps only a shard of each gradient, so it would have to
# reduce the gradients of every micro-batch as soon as they are computed.
#
# The list of actions determines when that is. A micro-batch's gradients are complete after its B, or after its W if the
# backward pass is split.
#
# Predict: for a stage's gradients and parameters in a step with 8 micro-batches, how many times as many bytes does
# ZeRO-2 send as ZeRO-1? Both also gather the updated parameters once. A reduce-scatter and an all-gather send the same
# number of bytes.

# %%
predict("14.7", ..., "ratio of the bytes sent in a step: ZeRO-2 to ZeRO-1, m = 8")


# %% tags=["exercise-14.7"]
from .ex7_when_to_reduce import when_to_reduce

# %%
Grid = tuple[comm.Group, comm.Group]


def grid() -> Grid:
    """Return the group of this rank's stage and that of its pipeline, for 2 replicas of a pipeline of 2 stages."""
    mesh = dist.device_mesh.init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("data", "pipeline"))
    return mesh["data"].get_group(), mesh["pipeline"].get_group()


class Reducer:
    """Reduces a stage's gradients to this rank's shard after the actions at your positions."""

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
        """Gather the updated parameters from all shards."""
        flat = self.flat(self.parameters)
        shard = flat.chunk(self.group.size())[self.group.rank()].clone()
        comm.all_gather(flat, shard, self.group).wait()

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        joined = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return F.pad(joined, (0, -len(joined) % self.group.size()))


def with_replicas(zero: Literal[1, 2]) -> tuple[float, list[str], float]:
    """Return the shard's difference from one process, the messages between replicas, and the bytes sent for them."""
    data, pipeline = grid()
    layers, place_of = layers_of(torch.float64), pipeline.rank()
    whole, module = Layers(layers), Layers(layers[:5] if place_of == 0 else layers[5:])
    tokens, targets = batch()
    whole(tokens, targets=targets).sum().backward()  # all samples; each replica gets half of them
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
    """Return the messages between replicas with FSDP2, which keeps unsharded parameters and reduces once per step."""
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
    print(f"your ZeRO-{zero}: gradients equal those of one process within 1e-12: {far < 1e-12}")
    print(f"             messages of a stage: {in_words(ops)}; {sent[zero]:,.0f} bytes")
print(f"FSDP2 with parameters kept unsharded: messages of a stage: {in_words(launch(kept_whole, RANKS)[0])}")
slips = {"both also gather the parameters once, which is as many bytes as a reduce-scatter": 8}
outcome("14.7", round(sent[2] / sent[1], 2), slips=slips)

# %% [markdown]
# ZeRO-2 sends m + 1 messages instead of two. It saves little memory, because the gradients of a micro-batch are
# unsharded anyway until they have been reduced. ZeRO-3 would also gather the parameters before each F and each B, 2 m
# times. So pipelines are combined with ZeRO-1, or with FSDP2 that keeps its parameters unsharded for the step. FSDP2
# then sends the messages of ZeRO-1 in the opposite order. Llama 3 uses this combination, and torchtitan sets
# `reshard_after_forward=False` if there is a pipeline.
#
# Which reductions can be hidden? With 1F1B, the ranks finish one after the other, the last one first:

# %%
done = ends(plan_of(one_f_one_b), UNITS)
for rank, actions in enumerate(plan_of(one_f_one_b)):
    (at,) = when_to_reduce(actions, 1)
    print(
        f"rank {rank}: gradients are complete {max(done.values()) - done[actions[at]]:.0f} units before the step ends"
    )

# %% [markdown]
# Only rank 0's reduction delays the step. The other ranks reduce their gradients while rank 0 is still working.
#
# ### Measured: torch's list is the same
#
# `torch.distributed.pipelining` has the same parts under the same names: stages, and schedules that are lists. Older
# code may import `torch.distributed.pipeline.sync.Pipe` (torch 1.8 to 2.3): one process that drove all GPUs of a host,
# with RPC across hosts. It was removed in June 2024 ([pytorch#127354](https://github.com/pytorch/pytorch/pull/127354)).


# %% tags=["C29"]
def with_torch() -> tuple[list[Action], float]:
    """Return torch's list for this rank, and the difference of its gradients from those of one process."""
    from torch.distributed import pipelining

    from minifsdp.pipeline.torch_api.csv_files import parse

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
# The list that torch 2.13 shows for the last rank counts its forward passes from 1, so it ends with a micro-batch that
# does not exist. This has no effect: torch's 1F1B does not run that list.
#
# ## What is still missing
#
# - Messages that overlap with computation. Here, a rank waits for each input when it needs it; on GPUs, receives are
#   posted one action ahead.
# - Tied weights. An embedding and a head that share their weight are on different stages, so the first and the last
#   rank have to add up their gradients.
# - Values that depend on all stages and are needed before the optimizer step: the norm of all gradients for clipping,
#   and fp16's check for infinities. With ZB-H2, ranks step before they know these values, and may have to undo the
#   step.
# - Two stages on each rank, placed in a V, so that the first and the last stage are on one rank: ZBV and DualPipeV, in
#   `minifsdp/pipeline/schedules`.
#
# ## What to remember
#
# 1. A schedule is a list of actions for each rank. The lists determine the step time, the memory, and whether there is
#    a deadlock.
# 2. The bubble is (p - 1) / (m + p - 1) with GPipe and with 1F1B. With v stages on each rank, the wait is 1/v as long.
# 3. 1F1B holds p - r micro-batches on rank r, GPipe all m. This is the reason to use 1F1B.
# 4. No rank waits for the gradients of weights. ZB-H1 computes them in idle time and leaves an idle time of (p - 1)(F +
#    I - W).
# 5. Use many micro-batches, until they are too small for the device.
# 6. With data parallelism, reduce once per step: use ZeRO-1, or FSDP2 that keeps its parameters unsharded for the step.
# 7. A pipeline sends 2 b s h elements per step across each boundary, the least of all kinds of parallelism. So it is
#    used across hosts.
#
# ## More: the shortest step with 6 micro-batches held
#
# *20 to 40 minutes, not counted in the lab's time*
#
# This is an open-ended task without a reference answer. There are 4 ranks and 8 micro-batches, and the backward pass is
# split. Attention has no weights, so the three parts are not equal: F takes two time units of 10 ms, I takes two, and W
# takes one. No rank may hold more than 6 micro-batches between F and W. Write the list of each rank so that the step is
# as short as possible. A plan does not run if it is incomplete, is a deadlock, or receives messages in a different
# order from that in which they are sent. You can start from this one:

# %% tags=["shown", "nbval-ignore-output"]
from minifsdp.course.workshop.scores import enter_order


def my_order(rank: int, ranks: int, micros: int) -> list[Action]:
    """Run each W at once, or later? Run more forward passes ahead on the first ranks? You decide."""
    ahead = min(ranks - 1 - rank, micros)
    found = [Action(rank, "F", micro) for micro in range(ahead)]
    for micro in range(micros):
        if ahead + micro < micros:
            found.append(Action(rank, "F", ahead + micro))
        found += [Action(rank, "I", micro), Action(rank, "W", micro)]
    return found


enter_order("my order", my_order)

# %% [markdown]
# GPipe and 1F1B take 550 ms, and GPipe holds too much. ZB-H1 takes 490 ms and holds 4 micro-batches. No list is shorter
# than 460 ms; 470 ms can be reached. `minifsdp lab score 14` shows the table of your attempts.
#
# ## Questions
#
# **1. A pipeline of 8 stages runs with 8 micro-batches. Which is better, 16 micro-batches or 2 stages on each rank?**
#
# <details><summary>Answer</summary>
#
# With either one, the bubble is 7/23 instead of 7/15. 16 micro-batches of the same size double the batch, which may be
# undesirable for training; 16 micro-batches of half the size may be too small for the device. 2 stages on each rank
# more than double the number of messages, and hold more activations.
# </details>
#
# **2. Rank 0 tries to print its loss but has none. Why?**
#
# <details><summary>Answer</summary>
#
# Only the last stage computes a loss. The other ranks have none, unless the last rank sends it to them.
# </details>
#
# **3. The GPipe paper recomputes activations in the backward pass. What does rank 0 then hold, and what does the
# recomputation cost?**
#
# <details><summary>Answer</summary>
#
# It holds the inputs of m micro-batches and all activations of one. The cost is one more forward pass for each
# micro-batch. If a backward pass takes as long as two forward passes, a step has a third more work.
# </details>
#
# **4. Your pipeline hangs in its first step, on two of four ranks. What do you look at first?**
#
# <details><summary>Answer</summary>
#
# Look at the order of messages. Either the lists of two neighbours disagree on the next micro-batch, or a rank waits
# for its send to complete before it receives, and so does its neighbour. A simulation of the lists finds the first case
# before anything starts. The executor avoids the second case, because it does not wait for its sends.
# </details>
#
# **5. With m = 8, the gradients are 8 times as large as those of one process. What is missing?**
#
# <details><summary>Answer</summary>
#
# The loss of each micro-batch is a mean over its own samples, so it contributes 1/m of the batch's loss. Divide it by m
# before the backward pass. In torch and minifsdp, the schedule does so by itself, unless you pass `scale_grads=False`.
# </details>
#
# ## Further reading
#
# - Huang et al., [GPipe](https://arxiv.org/abs/1811.06965); Narayanan et al., [Memory-efficient pipeline-parallel DNN
#   training](https://arxiv.org/abs/2006.09503) and [Megatron-LM on GPU clusters](https://arxiv.org/abs/2104.04473); Qi
#   et al., [Zero bubble pipeline parallelism](https://arxiv.org/abs/2401.10241).
# - torch: `torch/distributed/pipelining/schedules.py`.
# - minifsdp: `pipeline/schedules/`, one file each; `pipeline/simulate.py` (14.5 with latency), `pipeline/weights.py`
#   (14.6), `pipeline/executor.py`, which runs any list.
