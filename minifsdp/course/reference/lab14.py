"""Reference answers of lab 14, pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minifsdp.course.workshop.references import reference
from minifsdp.pipeline import simulate, weights
from minifsdp.pipeline.actions import Action, Plan
from minifsdp.pipeline.schedules import gpipe as gpipe_schedule
from minifsdp.pipeline.schedules import interleaved, zero_bubble
from minifsdp.pipeline.schedules import one_f_one_b as one_f_one_b_schedule

Later = list[Callable[[], None]]


@reference(
    "14.1",
    hints=(
        "Suppose that the last stage begins at layer i. The rest is the same question with fewer layers and "
        "one rank less. A stage is never empty.",
        "`best(end, stages)`: the slowest stage and the counts for the first `end` layers on `stages` ranks. With one "
        "stage it is their sum. Otherwise take the minimum, over all beginnings of the last stage, of the larger of "
        "`best(begin, stages - 1)` and the sum of the layers from `begin` to `end`. `@cache` makes it fast.",
    ),
)
def place(costs: Sequence[float], ranks: int) -> list[int]:
    """The number of consecutive layers on each rank for which the slowest stage is as fast as possible."""

    @cache
    def best(end: int, stages: int) -> tuple[float, list[int]]:
        if stages == 1:
            return sum(costs[:end]), [end]
        found = []
        for begin in range(stages - 1, end):
            slowest, counts = best(begin, stages - 1)
            found.append((max(slowest, sum(costs[begin:end])), [*counts, end - begin]))
        return min(found)

    return best(len(costs), ranks)[1]


@reference(
    "14.2",
    hints=(
        "The loss of the batch is a mean over its samples. What share of that mean comes from a micro-batch? Gradients "
        "add up in `.grad` by themselves. When can the activations of a micro-batch be freed?",
        "For each pair of `x.tensor_split(micros)` and `target.tensor_split(micros)`: compute the loss, scale it "
        "by len(rows) / len(x), and call `backward()` at once. Add up `loss.detach()`.",
    ),
)
def accumulate(
    forward: Callable[[Tensor], Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    target: Tensor,
    micros: int,
) -> Tensor:
    """Run the forward and backward passes of a batch in micro-batches; return the batch's loss."""
    losses = []
    for rows, wanted in zip(x.tensor_split(micros), target.tensor_split(micros), strict=True):
        loss = loss_fn(forward(rows), wanted) * (len(rows) / len(x))
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@reference(
    "14.3",
    hints=(
        "Each rank has one stage, and both have the same number. Which forward passes does the rank run, and when may "
        "its first backward pass start?",
        '`Action(rank, "F", micro)` for every micro-batch, then `Action(rank, "B", micro)` for every micro-batch.',
    ),
    forbids=(gpipe_schedule.gpipe,),
)
def gpipe(rank: int, ranks: int, micros: int) -> list[Action]:
    """All forward passes, then all backward passes."""
    return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]


@reference(
    "14.4",
    hints=(
        "The last rank has its first gradient at once: F0 B0 F1 B1 and so on. The rank before it has time for one more "
        "forward pass until its first gradient comes back. How many does rank r have time for? What if there are fewer "
        "micro-batches than that?",
        "First `ahead = min(ranks - 1 - rank, micros)` forward passes; then pairs of F of `micro` and B of `micro - "
        "ahead`; then the remaining `ahead` backward passes.",
    ),
    forbids=(one_f_one_b_schedule.one_f_one_b, interleaved.interleaved, zero_bubble.zero_bubble),
)
def one_f_one_b(rank: int, ranks: int, micros: int) -> list[Action]:
    """Forward passes until the first gradient comes back, then forward and backward passes in turn."""
    ahead = min(ranks - 1 - rank, micros)
    found = [Action(rank, "F", micro) for micro in range(ahead)]
    for micro in range(ahead, micros):
        found += [Action(rank, "F", micro), Action(rank, "B", micro - ahead)]
    found += [Action(rank, "B", micro) for micro in range(micros - ahead, micros)]
    return found


@reference(
    "14.5",
    hints=(
        "An action begins when the previous one on its rank has ended and its inputs are available. F needs one "
        "other action; B needs two, except in the last stage. In which order do you get to know the ends?",
        "Keep a clock and a position for each rank. Go around the ranks: while the next action of a rank has all its "
        "inputs in `end`, its end is max(clock, inputs) + seconds[kind]; move the clock and the position. If a full "
        "round makes no progress and actions are left, raise.",
    ),
    forbids=(simulate.simulate, simulate._Inputs.of),
)
def ends(plan: Plan, seconds: Mapping[str, float]) -> dict[Action, float]:
    """The end of each action of a plan."""
    last = max(action.stage for actions in plan for action in actions)
    end: dict[Action, float] = {}
    clocks, positions = [0.0] * len(plan), [0] * len(plan)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan):
            while positions[rank] < len(actions):
                stage, kind, micro = action = actions[positions[rank]]
                needed = [Action(stage - 1, "F", micro)] if kind == "F" and stage > 0 else []
                if kind == "B":
                    needed = [Action(stage, "F", micro)]
                    needed += [Action(stage + 1, "B", micro)] if stage < last else []
                if any(each not in end for each in needed):
                    break
                clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
                end[action] = clocks[rank]
                positions[rank] += 1
                moved = True
    if len(end) < sum(map(len, plan)):
        raise RuntimeError("the plan is a deadlock")
    return end


@reference(
    "14.6",
    hints=(
        "y = x w^T + b. Which of the three gradients does another rank wait for? The other two need x and the "
        "gradient of y: keep both until they are computed.",
        "In `backward`, return `gradient @ weight, None, None`, with None first where `ctx.needs_input_grad[0]` is "
        "False. Append a function that adds `rows.T @ x_rows` to `weight.grad` and `rows.sum(0)` to `bias.grad`, where "
        "`rows = gradient.flatten(0, -2)`. Use `x.detach()`: outside the backward pass, autograd would record the "
        "matmul.",
    ),
    forbids=(weights._Linear.backward, weights._forward, weights._accumulate),
)
def linear_later(later: Later) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return F.linear with a backward pass that leaves the gradients of weight and bias to functions in `later`."""

    def add(parameter: Tensor, gradient: Tensor) -> None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight, bias)
            return F.linear(x, weight, bias)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, weight, bias = ctx.saved_tensors
            rows, x_rows = gradient.flatten(0, -2), x.detach().flatten(0, -2)

            def finish() -> None:
                add(weight, rows.T @ x_rows)
                add(bias, rows.sum(0))

            later.append(finish)
            return gradient @ weight if ctx.needs_input_grad[0] else None, None, None

    return Linear.apply


@reference(
    "14.7",
    hints=(
        "A stage's gradients are complete after the last action that adds to them. After which kinds of actions are a "
        "micro-batch's gradients complete: F, B, I or W?",
        '`done = [at for at, action in enumerate(actions) if action.kind in ("B", "W")]`. ZeRO-2 reduces after each '
        "of them, ZeRO-1 after the last one of each stage.",
    ),
)
def when_to_reduce(actions: Sequence[Action], zero: Literal[1, 2]) -> list[int]:
    """Positions in a rank's list after which gradients of a stage are reduced."""
    done = [at for at, action in enumerate(actions) if action.kind in ("B", "W")]
    if zero == 2:
        return done
    return sorted({actions[at].stage: at for at in done}.values())
