"""The checks of lab 09."""

import weakref
from collections import defaultdict
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from placing import Homes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minifsdp import FullyShardedDataParallel, comm, device
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.fsdp.engine import Engine
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@contextmanager
def phases():
    """The issues and waits of collectives, in order."""
    seen: list[str] = []

    @contextmanager
    def watcher(call, phase):
        seen.append(f"{phase} {call.op}")
        yield

    comm.observers.append(watcher)
    try:
        yield seen
    finally:
        comm.observers.remove(watcher)


def numbers(seed, size):
    """fp32 values that no shorter dtype can represent."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) / 3


def nbytes(tensor):
    return tensor.untyped_storage().nbytes()


# 9.1 Gather in another dtype


class Gathered(NamedTuple):
    returned: str
    calls: list[tuple[str, int]]
    phases: list[str]
    groups: list[bool]  # whether each was over the given group
    begins: list[int]  # the element of `full` that what is sent begins at; -1: it lies elsewhere
    full: torch.Tensor
    shard: torch.Tensor
    peak: int
    copies: list[bool]  # of each copy into `full`, whether the host goes on at once
    later: list[torch.Tensor]  # what a second call leaves in `full`, and a third in one of fp16, with other shards


class Copies(TorchDispatchMode):
    """Notes of each copy, and of each cast, whether the host waits for it where it is one between devices."""

    def __init__(self):
        super().__init__()
        self.non_blocking = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            self.non_blocking.append(bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))
        return func(*args, **kwargs)


def observe_gather(answer, seed, size):
    """On all ranks but the first, which are the group: its ranks are not those of the world."""
    group, where = dist.new_group(list(range(1, comm.world().size()))), rank_device()
    if comm.world().rank() == 0:
        return None
    gather, groups, begins, issued, copies = comm.all_gather, [], [], [], Copies()

    def spy(output, shard, given):
        groups.append(given.group_name == group.group_name)
        inside = shard.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        begins.append(shard.storage_offset() if inside else -1)
        issued.append(len(copies.non_blocking))
        return gather(output, shard, group)  # another group would not come back

    with Ledger() as ledger:
        shard = numbers(seed + group.rank(), size).to(where)
        full = device.empty(size * group.size(), BF16, "unsharded", where).fill_(torch.nan)
        ledger.reset_peaks()
        before = sum(ledger.live().values())
        with comm.record() as calls, phases() as seen, patch.object(comm, "all_gather", spy), copies:
            handle = answer(full, shard, group)
        peak = ledger.peak.total - before
    returned, order = type(handle).__name__, list(seen)
    if handle is not None:
        handle.wait()
    of_first, first, later = (groups[:], begins[:], issued[:]), full.clone(), []
    with patch.object(comm, "all_gather", spy):
        for buffer in (full, device.empty(size * group.size(), FP16, "unsharded", where).fill_(torch.nan)):
            handle = answer(buffer, 1000.5 * shard, group)
            if handle is not None:
                handle.wait()
            later.append(buffer.cpu())
    (groups, begins, issued), full = of_first, first
    comm.all_reduce(torch.zeros(1, device=where), group).wait()
    calls = [(c.op, c.payload) for c in calls]
    casts = copies.non_blocking[: issued[0]] if issued else []
    return Gathered(returned, calls, order, groups, begins, full.cpu(), shard.cpu(), peak, casts, later)


@check("9.1")
def check_gather_low(answer, variant):
    """The shard is cast straight into its place, and one all-gather in the low dtype fills the rest."""
    ranks, size = max(3, variant.ranks), variant.size
    try:
        seen = on_ranks(ranks + 1, observe_gather, answer, variant.seed, size, timeout=8)[1:]
    except AnswerError as error:
        if "size of tensor" in str(error):
            raise AnswerError(
                f"{error}\nlikely slip: `full` has a part for each of `group.size()` ranks, here {ranks}"
            ) from error
        if "dtype" in str(error):
            raise AnswerError(
                f"{error}\nlikely slip: a collective does not cast: what is sent has to have the dtype of `full`"
            ) from error
        raise
    shards = [numbers(variant.seed + rank, size) for rank in range(ranks)]
    full = torch.cat(shards).to(BF16)
    payload = 2 * ranks * size
    for rank, found in enumerate(seen):
        expect(
            "`shard`",
            found.shard,
            shards[rank],
            rank=rank,
            slip="the fp32 shard is the master copy, which the optimizer updates: cast a copy of it, not itself",
        )
        expect(
            "collectives (operation, bytes)",
            found.calls,
            [("all_gather", payload)],
            rank=rank,
            slips={
                "fp32 went over the wire, twice the bytes: cast before you send": [("all_gather", 2 * payload)],
                "an all-reduce of zero-filled buffers sends twice the bytes of a gather": [("all_reduce", payload)],
                "only this rank's own part is there: the others' have to be fetched": [],
            },
            slip="one all-gather, of what is cast already",
        )
        if not all(found.groups):
            raise AnswerError(
                f"rank {rank}, the group of the all-gather: expected `group`, got another\n"
                "likely slip: a unit's group need not be the world: in another one others wait"
            )
        expect(
            "what is issued and waited for before it returns",
            found.phases,
            ["issue all_gather"],
            rank=rank,
            slip="the caller waits, later: who waits here lets nothing compute during the gather",
        )
        if found.returned == "NoneType":
            raise AnswerError(
                f"rank {rank}, what is returned: expected the handle of the gather, got None\n"
                "likely slip: the handle is lost, so nobody can tell when `full` is filled"
            )
        slip = "this rank sends its part of `full`, and that begins at rank * S"
        expect("`full` after the gather", found.full, full, rank=rank, slip=slip, tolerance=0.0)
        if found.begins != [-1]:
            expect(
                "element of `full` at which what is sent begins",
                found.begins,
                [rank * size],
                rank=rank,
                slip="gloo copies what it sends, NCCL does not: it gathers in place from element rank * S only, and "
                "what lies elsewhere in `full` is overwritten while it is sent",
            )
        expect(
            "bytes allocated meanwhile, at most",
            found.peak,
            0,
            rank=rank,
            slips={"that is a buffer for the cast shard: cast it straight into its part of `full`": 2 * size},
            slip="`full` has room for all of it",
        )
    for rank, found in enumerate(seen):
        expect(
            "copies for which the host waits, where `shard` is in host memory",
            found.copies.count(False),
            0,
            rank=rank,
            slip="`non_blocking=True`: the host queues the copy and goes on, the gather is queued behind it",
        )
        again = torch.cat([1000.5 * shard for shard in shards])
        slip = "the optimizer has changed the shard since the last call: cast it for every gather"
        expect("`full` after a second gather", found.later[0], again.to(BF16), rank=rank, slip=slip, tolerance=0.0)
        slip = "bf16 is one dtype of several, and has fewer digits than fp16: cast once, to the dtype of `full`"
        expect("`full` in fp16", found.later[1], again.to(FP16), rank=rank, slip=slip, tolerance=0.0)


# 9.2 The mean into the shard's gradient


@check("9.2")
def check_deliver(answer, variant):
    """Cast to the shard's dtype and added there; no memory but the shard's gradient."""
    size = variant.size
    pairs = [(BF16, FP32), (FP16, FP32), (FP32, FP32), (FP64, FP32), (FP32, FP64), (FP64, FP64), (BF16, FP64)]
    for dtype, of_shard in pairs:
        means = [scale * numbers(variant.seed + n, size).to(dtype) / 3 for n, scale in ((1, 1), (2, 0.003), (3, 0.01))]
        named = str(dtype).removeprefix("torch.") + ", for a shard in float64" * (of_shard is FP64)
        with unzeroed():
            deliver_three(answer, means, numbers(variant.seed, size).to(of_shard), named)


@contextmanager
def unzeroed():
    """What `device.empty` hands out holds NaN: it may hold anything."""
    empty = device.empty
    with patch.object(device, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan)):
        yield


def deliver_three(answer, means, values, named):
    dtype, wanted, low_sum = values.dtype, torch.zeros_like(values), torch.zeros_like(means[0])
    grad_bytes = nbytes(values)
    tolerance = 1e-7 if dtype is FP32 and means[0].dtype is not FP64 else 1e-14 if dtype is FP64 else 3e-7
    with Ledger() as ledger:
        shard = nn.Parameter(values.clone())
        for number, mean in enumerate(means):
            wanted, low_sum = wanted + mean.to(dtype), low_sum + mean
            buffer = device.empty(mean.numel(), mean.dtype, "gradients", mean.device)
            buffer.copy_(mean)
            grad_before = shard.grad
            ledger.reset_peaks()
            before = sum(ledger.live().values())
            try:
                answer(shard, buffer)
            except RuntimeError as error:
                if "assign" in str(error) and "grad" in str(error):
                    raise AnswerError(
                        f"it raises: {error}\n"
                        "likely slip: a gradient has its parameter's dtype: make a buffer of that and cast into it"
                    ) from error
                raise
            peak = ledger.peak.total - before
            what = f"{('first', 'second', 'third')[number]} mean in {named}"
            expect(
                f"dtype of `shard`, {what}",
                str(shard.dtype),
                str(dtype),
                slip="the optimizer works on fp32: leave the shard alone and cast the gradient",
            )
            expect(f"`shard`, {what}", shard.detach(), values, slip="this is the parameter: add to its `.grad`")
            if shard.grad is None:
                raise AnswerError(f"`shard.grad`, {what}: expected the mean, got None")
            if nbytes(shard.grad) == 0:
                raise AnswerError(
                    f"`shard.grad`, {what}: expected values, got a tensor without memory\n"
                    "likely slip: `shard.grad` and `mean` are one buffer, and that was freed"
                )
            slips = {}
            if number:
                slips = {
                    "the second mean has overwritten the first": mean.to(dtype),
                    "one of them is missing: a mean is added in every call": wanted - mean.to(dtype),
                    "the sum was made in the low precision, where small terms are lost: cast first, then add": (
                        low_sum.to(dtype)
                    ),
                }
            got, slip = shard.grad.detach().clone(), None
            if got.isnan().any():
                slip = "`device.empty` is not zeroed: what is added to it is added to whatever was there"
            expect(f"`shard.grad`, {what}", got, wanted, slips=slips, slip=slip, tolerance=tolerance)
            if buffer.untyped_storage().data_ptr() != shard.grad.untyped_storage().data_ptr() or not nbytes(buffer):
                expect(
                    f"bytes behind `mean`, {what}",
                    nbytes(buffer),
                    0,
                    slip="its memory is still there: release it with `device.free`, even if others refer to it",
                )
            if number and shard.grad is not grad_before:
                raise AnswerError(
                    f"`shard.grad`, {what}: expected the same tensor as before, got another one\n"
                    "likely slip: added out of place, which needs the memory twice for a moment: add in place"
                )
            unseen = "the ledger cannot see this memory: buffers come from `device.empty`"
            if ledger.live().get("unsharded"):
                unseen = 'it is counted as unsharded parameters: the role of this buffer is "gradients"'
            expect(
                f"bytes of gradients by the ledger, {what}",
                ledger.live()["gradients"],
                grad_bytes,
                slips={unseen: 0},
                slip="there is a buffer left besides `shard.grad`: free what was added",
            )
            expect(
                f"bytes allocated meanwhile, {what}",
                peak,
                0 if number else grad_bytes,
                slips={"`mean` became the gradient: its memory is the schedule's, which frees it": 0}
                if not number
                else {},
                slip="a buffer for the cast mean: `copy_` and `add_` cast on the way",
            )


# 9.3 Where to divide


@check("9.3")
def check_divisors(answer, variant):
    """fp16 is divided by about the root of N before the sum and by the rest after it; other dtypes after it only."""
    for ranks in (512, 8, 5, 1, 2, 3, 4, 6, 7, 9, 50, 64, variant.ranks, 100_000):
        for dtype in (FP16, BF16, FP32, FP64, torch.float8_e5m2):
            wanted = (1, ranks / 1)
            while dtype is FP16 and wanted[0] ** 2 < ranks:
                wanted = (2 * wanted[0], ranks / (2 * wanted[0]))
            on = f"{str(dtype).removeprefix('torch.')} on {ranks} rank{'s' * (ranks > 1)}"
            named = f"divisors of {on} (before, after the sum)"
            got = answer(dtype, ranks)
            pair = isinstance(got, tuple) and len(got) == 2 and all(isinstance(each, int | float) for each in got)
            if not pair:
                raise AnswerError(f"{named}: expected two numbers in a tuple, got {got!r}")
            before, after = (float(each) for each in got)
            expect(named, (before, after), tuple(map(float, wanted)), slip=why_divisors(dtype, ranks, before, after))


def why_divisors(dtype, ranks, before, after):
    right = 2 ** ((ranks - 1).bit_length() + 1 >> 1) if ranks > 1 else 1
    if abs(before * after - ranks) > 1e-6 * ranks:
        return f"together they divide by {before * after:g}, and the mean needs {ranks}"
    if dtype is BF16 and before != 1:
        return (
            "bf16 has fp32's range (8 bits of exponent), no sum comes near its limit: dividing first is one more pass "
            "over P elements for nothing"
        )
    if dtype is FP32 and before != 1:
        return "fp32 has range enough: dividing all P elements first is work for nothing"
    if dtype is not FP16 and before != 1:
        return "of all dtypes fp16 alone is divided before the sum"
    if before == 1:
        return "nothing is divided before the sum: N gradients above 65,504 / N overflow in it"
    if before == ranks and ranks > right:
        return "all is divided before the sum: what is below 3e-8 * N is 0 then (underflow)"
    if before != 2 ** round(torch.tensor(before).log2().item()):
        return "not a power of two: the division rounds every element; by a power of two it only changes the exponent"
    if before == torchs(ranks) != right:
        return (
            "torch's loop, which ends at the first power that does not divide N: about as good, and not the rule here, "
            "which does not ask whether N can be divided"
        )
    if before < after and right != before:
        return "rounded down: take the smallest power of two that is not below the root of N"
    return "the smallest power of two that is not below the root of N comes first, the rest after the sum"


def torchs(ranks):
    """`_get_gradient_predivide_factor` of torch's FSDP."""
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return before


# 9.4 All step, or none


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


# 9.5 Accumulate


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)
        self.hidden = []  # weak references to the activations of each forward

    def forward(self, x, target, weight):
        hidden = torch.tanh(self.first(x))
        self.hidden.append(weakref.ref(hidden))
        return (weight * (self.last(hidden) - target)).square().mean()

    def alive(self):
        return sum(each() is not None for each in self.hidden)


MICRO = 3


class Accumulated(NamedTuple):
    reduced: list[int]  # reduce-scatters that had been issued after each backward
    contexts: int  # how often no_sync was entered
    inside: list[bool]  # whether each forward of the first call ran inside no_sync
    rows: list[int]  # of each forward
    most: int  # forwards that were waiting for their backward at once
    first: torch.Tensor
    second: torch.Tensor
    twice: list[int]  # reduce-scatters after each backward of one micro-batch given twice
    third: torch.Tensor  # and the gradients then
    left: int  # micro-batches on the list after the first call
    alive: int  # activations of earlier micro-batches, at most, when a forward begins or a call ends
    one: tuple[list[int], torch.Tensor]  # the same as `twice` and `third`, of one micro-batch


def rows_of(seed, rank):
    generator = torch.Generator().manual_seed(100 + 10 * seed + rank)
    return [tuple(torch.randn(2, size, generator=generator) for size in (3, 1, 1)) for _ in range(MICRO)]


def observe_accumulate(answer, seed):
    group, where = comm.world(), rank_device()
    found = {}
    micro_batches = [tuple(part.to(where) for part in each) for each in rows_of(seed, group.rank())]
    for communicate in (True, False):
        net = Net(seed).to(where)
        model = FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear})
        rows, waiting, reduced, contexts, inside, alive = [], [0, 0], [], [], [], []
        no_sync, end = Engine.no_sync, Engine._end_backward

        def before(module, args, rows=rows, waiting=waiting, alive=alive, net=net, contexts=contexts, inside=inside):
            inside.append(any(contexts))
            alive.append(net.alive())
            rows.append(len(args[0]))
            waiting[0] += 1
            waiting[1] = max(waiting)

        @contextmanager
        def counted(engine, no_sync=no_sync, contexts=contexts):
            contexts.append(True)
            with no_sync(engine):
                yield
            contexts[contexts.index(True)] = False  # it has been left

        with comm.record() as calls:

            def ended(engine, end=end, reduced=reduced, waiting=waiting, calls=calls):
                end(engine)
                waiting[0] -= 1
                reduced.append(sum(c.op == "reduce_scatter" for c in calls))

            model.register_forward_pre_hook(before)
            with patch.object(Engine, "no_sync", counted), patch.object(Engine, "_end_backward", ended):
                given = list(micro_batches)
                answer(model, given, communicate)
                log, gradients = [], []
                log += reduced
                alive.append(net.alive())
                for turn in range(4):
                    if turn == 1:
                        answer(model, micro_batches, communicate)
                    elif turn == 2:
                        two_calls = rows[:], len(reduced), len(contexts), max([0, *reduced])
                        answer(model, 2 * micro_batches[:1], communicate)
                    elif turn == 3:
                        three_calls = len(reduced), max([0, *reduced])
                        answer(model, micro_batches[:1], communicate)
                    gradients.append(
                        torch.cat(
                            [torch.zeros(p.numel()) if p.grad is None else p.grad.cpu() for p in model.parameters()]
                        )
                    )
        rows, ended_before, entered, issued = two_calls
        ended, issued_then = three_calls
        twice = [each - issued for each in reduced[ended_before:ended]]
        one = [each - issued_then for each in reduced[ended:]], gradients[3]
        found[communicate] = Accumulated(
            log,
            entered // 2,
            inside[:MICRO],
            rows,
            waiting[1],
            *gradients[:2],
            twice,
            gradients[2],
            len(given),
            max(alive),
            one,
        )
    return found


@check("9.5")
def check_accumulate(answer, variant):
    """The mean of the micro-batches' gradients, reduced after each of them or once, in the last one's backward."""
    ranks = variant.ranks
    try:
        seen = on_ranks(ranks, observe_accumulate, answer, variant.seed, timeout=10)
    except AnswerError as error:
        if "unpack" in str(error) or "positional argument" in str(error):
            slip = "how many parts a micro-batch has is the model's business, here 3: `model(*micro_batch)`"
            raise AnswerError(f"{error}\nlikely slip: {slip}") from error
        raise
    means = {}
    for what in ("all", "twice"):  # all micro-batches; the first one, given twice
        net = Net(variant.seed)
        for rank in range(ranks):
            micro_batches = rows_of(variant.seed, rank)
            for micro_batch in micro_batches if what == "all" else micro_batches[:1]:
                (net(*micro_batch) / ranks / (MICRO if what == "all" else 1)).backward()
        means[what] = [shards_of(unit, ranks) for unit in (net.first, net.last)]
    for communicate in (True, False):
        at = f"communicate={communicate}: "
        wanted = [2 * number for number in (1, 2, 3)] if communicate else [0, 0, 2]
        for rank, found in enumerate(each[communicate] for each in seen):
            slip = "the list belongs to the caller, who may need it again: iterate over it, and remove nothing"
            expect(f"{at}micro-batches on the list after a call", found.left, MICRO, rank=rank, slip=slip)
            if found.rows != [2] * 2 * MICRO:
                raise AnswerError(
                    f"rank {rank}, {at}rows of all forwards of two calls: expected {[2] * 6}, got {found.rows}\n"
                    "likely slip: micro-batches exist because the whole batch does not fit: one forward for each"
                )
            if found.most > 1:
                raise AnswerError(
                    f"rank {rank}, {at}forwards that wait for their backward at once: expected 1, got {found.most}\n"
                    "likely slip: the activations of all micro-batches are alive together: forward and backward in turn"
                )
            slip = "`backward()` frees a graph's activations, unless it is asked to retain them"
            expect(f"{at}activations of earlier micro-batches in memory", found.alive, 0, rank=rank, slip=slip)
            slip = None
            if communicate and found.contexts:
                slip = "asked to communicate, and some of it ran inside `no_sync`"
            elif not communicate and not any(found.reduced):
                slip = "nothing is ever reduced: the last micro-batch has to run outside `no_sync`"
            elif not communicate and found.reduced[0] and found.contexts:
                slip = "it is the last micro-batch that reduces what has piled up, not the first"
                if found.reduced == [2, 4, 6]:
                    slip = "it is the backward that communicates: run that inside `no_sync`, not the forward alone"
            elif not communicate and not found.contexts:
                slip = "every micro-batch was reduced: `communicate` made no difference"
            elif not communicate and found.reduced[-1] == 0:
                slip = "the gradients of the last are left unsharded"
            expect(
                f"{at}reduce-scatters issued after each backward (2 units)", found.reduced, wanted, rank=rank, slip=slip
            )
            if not communicate:
                expect(
                    f"{at}forward passes inside `no_sync`",
                    found.inside,
                    [True] * (MICRO - 1) + [False],
                    rank=rank,
                    slip="only the backward pass ran inside `no_sync`: a DDP model looks at it in the forward pass",
                )
            mean, again = (torch.cat([unit[rank] for unit in means[what]]) for what in ("all", "twice"))
            last = "dropped what was there: the caller decides when gradients begin anew"
            expect(
                f"{at}the shards' gradients beside one process with all data",
                found.first,
                mean,
                rank=rank,
                tolerance=1e-5,
                slips={f"{MICRO} times the mean: divide each micro-batch's loss by their number": MICRO * mean},
                slip="not the mean of all micro-batches: is every one's gradient in it, and the last's only once?",
            )
            slips = {last: mean}
            expect(f"{at}the same, called twice", found.second, 2 * mean, rank=rank, tolerance=1e-5, slips=slips)
            expect(
                f"{at}reduce-scatters issued after each backward of one micro-batch that is given twice",
                found.twice,
                [2, 4] if communicate else [0, 2],
                rank=rank,
                slip="which one is the last, its place tells and not what is in it",
            )
            expect(
                f"{at}and the gradients of that, added to those before",
                found.third,
                2 * mean + again,
                rank=rank,
                tolerance=1e-5,
                slips={"there are 2 micro-batches now, each counts 1/2": 2 * mean + 2 / MICRO * again},
            )
            slip = "one micro-batch is the first and the last: it is reduced, and counts in full"
            expect(f"{at}reduce-scatters of one micro-batch alone", found.one[0], [2], rank=rank, slip=slip)
            expect(
                f"{at}and the gradients of that, added to those before",
                found.one[1],
                2 * mean + 2 * again,
                rank=rank,
                tolerance=1e-5,
                slip=slip,
            )


def shards_of(unit, ranks):
    """The shards of a unit's flattened and padded gradient, by rank."""
    flat = torch.cat([p.grad.flatten() for p in unit.parameters()])
    padded = torch.zeros(-(-len(flat) // ranks) * ranks)
    padded[: len(flat)] = flat
    return padded.chunk(ranks)


# 9.6 The gradient to the host


class OnDevice(torch.Tensor):
    """Says that it is on a device of its own, and is in the host's memory as all else is."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self):
        return torch.device("cpu", 0)


class Queues:
    """A device whose copies to the host arrive when the host waits for them, and are NaN until then."""

    def __init__(self):
        self.log = []  # (verb, stream, subject) of what is asked of the device, in order
        self.behind = {}  # by event, the copies that it tells of
        self._reached = defaultdict(list)  # by stream, the copies that are over when it gets here
        self._current, self._copy = device.current_stream, device.copy_to_host

    @contextmanager
    def running(self):
        device.command_observers.append(self._watch)
        asking = {name: self._asking(getattr(device, name)) for name in ("current_stream", "new_stream", "new_event")}
        try:
            with patch.multiple(device, copy_to_host=self._copy_to_host, **asking):
                yield self
        finally:
            device.command_observers.remove(self._watch)

    def _copy_to_host(self, tensor):
        if not nbytes(tensor):
            raise AnswerError(
                "memory of what is copied to the host: expected some, got 0 bytes\n"
                "likely slip: freed before it was copied: the copy has to be queued first"
            )
        stream, values = self._current(tensor.device), self._copy(tensor)
        on_host = torch.full_like(values, torch.nan)
        self.log.append(("copy", stream, tensor))
        self._reached[stream].append((on_host, values))
        return on_host

    def _asking(self, function):
        def ask(where, *args, **kwargs):
            self.log.append(("ask", None, where))
            return function(where, *args, **kwargs)

        return ask

    def _watch(self, command):
        self.log.append((command.verb, command.stream, command.subject))
        if command.verb == "record":
            self.behind[command.subject] = list(self._reached[command.stream])
        elif command.verb == "wait":
            self._reached[command.stream] += self.behind.get(command.subject, [])
        elif command.verb == "synchronize":
            for on_host, values in self.behind.get(command.subject, []):
                on_host.copy_(values)


def on_device(values):
    return device.empty(len(values), values.dtype, "gradients", torch.device("cpu")).copy_(values).as_subclass(OnDevice)


@check("9.6")
def check_offload_gradient(answer, variant):
    """The copy starts at once, the device's memory is free, and the host waits only where it reads, and adds."""
    size = variant.size
    shard = nn.Parameter(torch.zeros(size))
    means = [numbers(variant.seed + number, size) for number in range(2)]
    wanted, first = torch.zeros(size), None
    for number, mean in enumerate(means):
        what = f"{'second' if number else 'first'} gradient"
        buffer = on_device(mean)
        with Queues().running() as queues:
            arrive = answer(shard, buffer)
            if nbytes(buffer):
                raise AnswerError(
                    f"bytes behind `mean`, {what}: expected 0, got {nbytes(buffer)}\n"
                    "likely slip: moved to the host, and still on the device as well: free `mean`"
                )
            if not callable(arrive):
                raise AnswerError(f"what is returned, {what}: expected a function, got {type(arrive).__name__}")
            if (shard.grad is None) != (number == 0) or (number and not torch.equal(shard.grad, wanted)):
                raise AnswerError(
                    f"`shard.grad` before the returned function is called, {what}: expected no change, got one\n"
                    "likely slip: nobody knows yet whether the copy is over: the returned function touches the gradient"
                )
            explain_start(what, queues)
            queues.log.clear()
            arrive()
            explain_wait(what, queues)
        wanted = wanted + mean
        if shard.grad is None:
            raise AnswerError(f"`shard.grad`, {what}: expected the gradient, got None")
        if nbytes(shard.grad) == 0:
            raise AnswerError(
                f"`shard.grad`, {what}: expected values, got a tensor without memory\n"
                "likely slip: freed before it was copied, or no copy at all"
            )
        slips = {"the second has overwritten the first, as torch's does: add": mean} if number else None
        slip = "the copy is read before the host has waited for it" if shard.grad.isnan().any() else None
        expect(f"`shard.grad`, {what}", shard.grad.detach().clone(), wanted, slips=slips, slip=slip)
        if number and shard.grad is not first:
            raise AnswerError(
                "`shard.grad`, second gradient: expected the same tensor as before, got another one\n"
                "likely slip: added out of place: `add_` needs no third buffer on the host"
            )
        first = shard.grad
    shard = nn.Parameter(torch.zeros(size))
    means = [numbers(variant.seed + number, size) for number in (2, 3)]
    with Queues().running():
        started = [answer(shard, on_device(mean)) for mean in means]
        started[0]()
        slip = "the function that a call returns brings that call's copy: it waits for no other, and adds no other"
        got = None if shard.grad is None else shard.grad.detach().clone()
        expect("`shard.grad`, two started, the first has arrived", got, means[0], slip=slip)
        started[1]()
    slips = {"whether there is a gradient to add to is known when the copy arrives, not when it starts": means[1]}
    slip = "a buffer that is kept holds the gradient of an earlier call: each call has its own copy"
    got = shard.grad.detach().clone()
    expect("`shard.grad`, two started before one arrives", got, sum(means), slips=slips, slip=slip)
    shard = nn.Parameter(torch.zeros(size, dtype=FP64))
    means = [numbers(variant.seed + number, size).double() / 3 for number in (4, 5)]
    with Queues().running():
        started = [answer(shard, on_device(mean)) for mean in means]
        try:
            started[1]()
            slip = "the function that a call returns brings that call's copy, in whatever order they are called"
            got = None if shard.grad is None else shard.grad.detach().clone()
            expect("`shard.grad` in float64, the second has arrived first", got, means[1], slip=slip, tolerance=1e-14)
            started[0]()
        except RuntimeError as error:
            slip = "the gradient has the dtype of `mean`, here float64, which is the shard's: no cast"
            raise AnswerError(f"a shard in float64: {error}\nlikely slip: {slip}") from error
    got = shard.grad.detach().clone()
    expect("`shard.grad` in float64", got, sum(means), slip="something was cast to a narrower dtype", tolerance=1e-14)


def explain_start(what, queues):
    verbs = [verb for verb, _, _ in queues.log]
    if "copy" not in verbs:
        raise AnswerError(
            f"copies to the host, {what}: expected one by `device.copy_to_host`, got none\n"
            "likely slip: `.cpu()` and `.to` make the host wait on a GPU, and copy nothing on a CPU"
        )
    if "synchronize" in verbs:
        raise AnswerError(
            f"waits of the host before it returns, {what}: expected 0, got {verbs.count('synchronize')}\n"
            "likely slip: waits in the middle of backward: the host has to run on, and wait when backward is over"
        )
    if any(verb == "ask" and where.index is None for verb, _, where in queues.log):
        raise AnswerError(
            f"whose stream or event it is, {what}: expected the device's that `mean` is on, got the host's\n"
            "likely slip: `shard` is in host memory, and there is no queue: on a GPU its event waits for nothing"
        )
    if not any(queues.behind.values()):
        slip = "an event tells of what was queued before it: record it after the copy, on the same stream"
        if not any(verb == "record" for verb, _, _ in queues.log):
            slip = "none was recorded: to wait for all that the device has queued is to wait for what comes later, too"
        raise AnswerError(f"events recorded behind the copy, {what}: expected one, got none\nlikely slip: {slip}")
    at, base = verbs.index("copy"), device.current_stream(torch.device("cpu", 0))
    stream = queues.log[at][1]
    if stream is base:
        return
    if not any(verb == "wait" and where is stream for verb, where, _ in queues.log[:at]):
        raise AnswerError(
            f"what the copy's stream waits for, {what}: expected the stream that fills `mean`, got nothing\n"
            "likely slip: on a stream of its own the copy reads `mean` before it is filled: copy on the current one"
        )
    if not any(verb == "record_stream" and where is stream for verb, where, _ in queues.log):
        raise AnswerError(
            f"streams that `device.free` knows to read `mean`, {what}: expected the copy's, got another\n"
            "likely slip: the memory is given away while the copy still reads it: free it on the copy's stream"
        )


def explain_wait(what, queues):
    waits = [subject for verb, _, subject in queues.log if verb == "synchronize"]
    if any(isinstance(subject, torch.device) for subject in waits):
        raise AnswerError(
            f"what the host waits for, {what}: expected the copy's event, got the whole device\n"
            "likely slip: that waits for all that is queued there, also what has nothing to do with this gradient"
        )
    if not any(queues.behind.get(subject) for subject in waits):
        raise AnswerError(
            f"waits of the host before the gradient is read, {what}: expected one for the copy's event, got none\n"
            "likely slip: on a GPU the optimizer would read memory that the copy has not reached"
        )
