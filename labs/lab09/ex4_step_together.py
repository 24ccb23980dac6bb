"""Exercise 9.4: fp16: all ranks step, or no rank does."""

from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.placing import Homes
from minifsdp.course.workshop.references import reference
from minifsdp.grad_scaler import ShardedGradScaler
from minifsdp.instruments.launch import rank_device

from .shared import FP32, FP64, numbers, phases


@reference(
    "9.4",
    hints=(
        "Each rank sees its own shards' gradients only. All have to do the same, so they have to know what the others "
        "have found, also those that have found nothing: a collective needs all of them.",
        "A tensor of one element, 1 if any gradient is not finite, else 0; `comm.all_reduce(found, group, "
        "comm.MAX).wait()` on every rank, in every step. If it is 1: return `scale / 2`. Else divide each gradient by "
        "`scale`, step, return `scale`.",
    ),
    forbids=(ShardedGradScaler._unscale_grads_,),
)
def step_together(optimizer: torch.optim.Optimizer, scale: float, group: Group) -> float:
    """Unscale the gradients and step, unless a gradient on any rank is not finite; return the next scale.

    Args:
        optimizer: the optimizer of this rank's shards, `p for each in optimizer.param_groups for p in each["params"]`.
            A `p.grad` may be None. The gradients are `scale` times too large.
        scale: the current scale, the same on all ranks.
        group: the ranks that have to agree: all ranks that hold a shard of the model.

    If all gradients on all ranks are finite, they are divided by `scale`, the optimizer steps, and `scale` is returned.
    If any gradient on any rank is infinite or NaN, no rank steps, and all ranks return `scale / 2`.

    Communicate exactly one number in every step, as a tensor [1] on the parameters' device, with
    `comm.all_reduce(tensor, group, comm.MAX).wait()`.
    """
    params = [p for param_group in optimizer.param_groups for p in param_group["params"]]
    found = torch.zeros(1, device=params[0].device)
    for p in params:
        if p.grad is not None:
            p.grad.div_(scale)
            found += (~p.grad.isfinite()).any()
    comm.all_reduce(found, group, comm.MAX).wait()
    if found.item():
        return scale / 2
    optimizer.step()
    return scale


class Stepped(NamedTuple):
    scale: float
    values: torch.Tensor
    bytes: int
    phases: list[str]  # issues and waits
    sent: list[tuple[float, bool]]  # the first number of each all-reduce, and whether MAX was asked for
    groups: list[bool]  # whether each was over the given group
    steps: int  # of the optimizer
    homeless: int  # tensors sent that were made without a word on where
    gradients: torch.Tensor | None  # of the shards afterwards; None: not all have one
    gained: bool  # the parameter without a gradient has one now


class Case(NamedTuple):
    """What is in the gradient of shard `at` of the last rank; the third shard is in a parameter group of its own."""

    what: str
    value: float | None = None
    at: int = 0
    alone: bool = False  # the other ranks have no gradients
    scale: float = 1024.0
    third: torch.dtype = FP32  # of the third shard


FINITE = Case("all finite")
LARGE = Case("all finite, two of 3e38 on the last rank", 3e38)
MINUS = Case("minus infinity on the last rank", -torch.inf, 1)
NAN = Case("a NaN on the last rank", torch.nan)
SECOND = Case("an infinity in the last rank's second parameter group", torch.inf, 2)
ALONE = Case("an infinity on the last rank, no gradients on the others", torch.inf, alone=True)
SMALL = Case("all finite, a scale of 0.5", scale=0.5)
HALVED = Case("an infinity on the last rank, a scale of 1", torch.inf, scale=1.0)
INFINITE = Case("an infinity on the last rank", torch.inf)
TINY = Case("an infinity on the last rank, a scale of 2**-20", torch.inf, scale=2**-20)
DOUBLE = Case("all finite, two of 1e300 in float64 on the last rank", 1e300, 2, third=FP64)
CASES = (FINITE, INFINITE, LARGE, MINUS, NAN, SECOND, ALONE, SMALL, HALVED, TINY, DOUBLE)
STEPS = (FINITE, LARGE, SMALL, DOUBLE)


def gradients_in(case, rank, ranks, seed, size):
    """Of the three shards of a rank, scaled; None: they have none."""
    gradients = [case.scale * numbers(seed + rank + n, size + n * rank) for n in range(3)]
    gradients[2] = gradients[2].to(case.third)
    if rank == ranks - 1 and case.value is not None:
        gradients[case.at][size // 2 : size // 2 + 2] = case.value
    return None if case.alone and rank < ranks - 1 else gradients


def observe_steps(answer, seed, size):
    group, where, found = dist.new_group(), rank_device(), []  # all ranks, and not the world's own group
    all_reduce = comm.all_reduce
    for case in CASES:
        sizes = [(size + n * group.rank(), dtype) for n, dtype in enumerate((FP32, FP32, case.third))]
        shards = [nn.Parameter(torch.zeros(numel, device=where, dtype=dtype)) for numel, dtype in sizes]
        unused = nn.Parameter(torch.zeros(2, device=where))
        optimizer = torch.optim.SGD([{"params": [*shards[:2], unused]}, {"params": shards[2:]}], lr=1.0)
        gradients = gradients_in(case, group.rank(), group.size(), seed, size)
        for shard, gradient in zip(shards, gradients or (), strict=False):
            shard.grad = gradient.to(where)
        sent, groups, steps, homes, homeless = [], [], [], Homes(where), []
        optimizer.register_step_pre_hook(lambda *args, steps=steps: steps.append(True))

        def spy(tensor, given, op=comm.SUM, sent=sent, groups=groups, homes=homes, homeless=homeless):
            homeless.append(homes.lacks(tensor))
            sent.append((float(tensor.detach().flatten()[0]), op == comm.MAX))
            groups.append(given.group_name == group.group_name)
            return all_reduce(tensor, group, op)

        with comm.record() as calls, phases() as seen, patch.object(comm, "all_reduce", spy), homes:
            scale = answer(optimizer, case.scale, group)
        moved = torch.cat([shard.detach() for shard in shards]).cpu()
        payload, left = sum(c.payload for c in calls), [shard.grad for shard in shards]
        left = None if any(each is None for each in left) else torch.cat(left).cpu()
        gained = unused.grad is not None
        found.append(Stepped(scale, moved, payload, list(seen), sent, groups, len(steps), sum(homeless), left, gained))
        if not calls:  # for those who wait for this rank
            all_reduce(torch.zeros(1, device=where), group, comm.MAX).wait()
        if len(calls) > 1:
            break
    return found


@check("9.4")
def check_step_together(answer, variant):
    """All ranks step with unscaled gradients, or all of them skip and halve the scale."""
    ranks = variant.ranks
    slip = "a rank waits for others that have left: all have to make the same calls"
    seen = on_ranks(ranks, observe_steps, answer, variant.seed, variant.size, timeout=6, slip=slip)
    for number, case in enumerate(CASES):
        found = [each[number] for each in seen]
        explain_verdict(case, found)
        for rank, each in enumerate(found):
            gradients = gradients_in(case, rank, ranks, variant.seed, variant.size)
            unscaled = torch.cat(gradients) / case.scale if gradients else torch.zeros_like(each.values)
            if case in STEPS:
                check_step(case, each, -unscaled, rank, variant.size)
            else:
                check_skip(case, each, 0 * each.values.nan_to_num(), rank, found[-1], seen[-1][0])
    slip = "`torch.zeros(1, device=p.device)`: NCCL cannot reach what is in the host's memory"
    homeless = sum(each.homeless for found in seen for each in found)
    expect("tensors sent that were made without the parameters' device", homeless, 0, slip=slip)


def explain_verdict(case, found):
    """How the ranks have told each other."""
    for rank, each in enumerate(found):
        at = f"rank {rank}, {case.what}: "
        if each.bytes > 64:
            raise AnswerError(
                f"{at}bytes communicated: expected one number's, got {each.bytes}\n"
                "likely slip: gradients are shards, of other elements on every rank: only the verdict is shared"
            )
        if len(each.sent) > 1:
            raise AnswerError(
                f"{at}all-reduces: expected one, got {len(each.sent)}\n"
                "likely slip: one verdict for all gradients: with one for each, a rank with fewer leaves others waiting"
            )
        if not all(each.groups):
            raise AnswerError(
                f"{at}the group of the all-reduce: expected `group`, got another\n"
                "likely slip: `group` holds the ranks that have to agree, the world may have more"
            )
        if len(each.phases) == 1:
            raise AnswerError(
                f"{at}waits for the all-reduce: expected one, got none\n"
                "likely slip: it is only started: before `.wait()` the number is this rank's own"
            )
    silent = [rank for rank, each in enumerate(found) if not each.sent]
    if silent and len(silent) < len(found):
        slip = "a rank waits in a collective that another has not called: take part in every step"
        if case.alone:
            slip = "without gradients there is nothing to find, and others still wait for this rank's number"
        raise AnswerError(f"rank {silent[0]}, {case.what}: all-reduces: expected one, got none\nlikely slip: {slip}")
    if silent and case not in STEPS:
        raise AnswerError(
            f"{case.what}: all-reduces: expected one of the verdict, got none\n"
            "likely slip: each rank decides alone, from its own shards: some step while others skip"
        )


def check_step(case, found, stepped, rank, size):
    slips = {
        "the gradients are still scaled: divide them by the scale": case.scale * stepped,
        "multiplied by the scale once more": case.scale**2 * stepped,
        "divided by 1,024, whatever the scale is": case.scale / 1024 * stepped,
        "no step was made, though all gradients were finite": 0 * stepped,
        "those of the second parameter group are still scaled": torch.cat(
            [stepped[: -size - 2 * rank], case.scale * stepped[-size - 2 * rank :]]
        ),
    }
    if case is DOUBLE:
        slips = {"1e300 is finite in float64: ask for each gradient in its own dtype": 0 * stepped}
    if case is LARGE:
        slips = {"finite numbers have a sum that is not: look at each element": 0 * stepped}
    what = f"{case.what}: parameters after a step of 1.0 times the gradient"
    expect(what, found.values, stepped, rank=rank, slips=slips)
    slip = "nothing has overflowed: the scale stays as it is"
    expect(f"{case.what}: scale", found.scale, case.scale, rank=rank, slip=slip)
    slip = "the gradients themselves are divided, and stay: Adam's step hardly depends on their size"
    expect(f"{case.what}: gradients after the step", found.gradients, -stepped, rank=rank, slip=slip)
    slip = "a parameter without a gradient is not in the step: with zeros, momentum and weight decay would move it"
    expect(f"{case.what}: a parameter without a gradient has one", found.gained, False, rank=rank, slip=slip)


def check_skip(case, found, unmoved, rank, last, last_finite):
    """`last`: what the last rank has done, which has the infinity; `last_finite`: and when it had none."""
    number, with_max = last.sent[0]
    if number != number and with_max:
        raise AnswerError(
            f"{case.what}: the number that this rank sends: expected a finding, got nan\n"
            "likely slip: MAX may lose a NaN, all comparisons with it are false: send 1 for a finding and 0 for none"
        )
    slip = "a step was made, with an infinity or a NaN somewhere: one rank's finding is everybody's"
    if found.values.isfinite().all() and found is last and found.values.any():
        slip = "what has overflowed is no zero: the gradient is worth nothing, and the step has to be skipped"
    elif found.scale == case.scale / 2:
        slip = "the scale is halved, and the step made all the same: skip it"
    elif number == last_finite.sent[0][0]:
        slip = {
            NAN: "a NaN is no infinity for `isinf`: an overflow can become one (inf - inf), ask for `isfinite`",
            MINUS: "minus infinity is an overflow, too: ask for `isfinite`",
            SECOND: "`optimizer.param_groups` can be several: look at all of them",
        }.get(case, "the rank that has it sends what it sends without: is every gradient looked at, none forgotten?")
    elif case is MINUS and number < torch.inf:
        slip = "minus infinity is not the largest value: it is the largest magnitude that tells"
    expect(f"{case.what}: parameters", found.values, unmoved, rank=rank, slip=slip)
    expect(
        f"{case.what}: steps of the optimizer",
        found.steps,
        0,
        rank=rank,
        slip="with gradients of zero, too, momentum and weight decay move the parameters: do not step",
    )
    expect(
        f"{case.what}: scale",
        found.scale,
        case.scale / 2,
        rank=rank,
        slips={
            "half of 1 is 0.5: whole numbers end in a scale of 0, by which every gradient becomes a NaN": 0.0,
            "skipped, and the next step will overflow again: halve the scale": case.scale,
            "there is no lower limit here: gradients may be larger than the largest number of fp16": max(
                0.5, case.scale
            ),
        },
        slip="half of it, the same on every rank",
    )
