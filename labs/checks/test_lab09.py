"""The checks of lab 09."""

from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel, comm, device
from minifsdp.course.launch import rank_device
from minifsdp.course.ledger import Ledger
from minifsdp.course.workshop.checking import AnswerError, expect, on_ranks
from minifsdp.fsdp.engine import Engine

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@contextmanager
def phases():
    """The issues and waits of collectives, in order."""
    seen: list[str] = []

    @contextmanager
    def watcher(call, phase):
        seen.append(f"{phase} {call.op}")
        yield

    comm.watchers.append(watcher)
    try:
        yield seen
    finally:
        comm.watchers.remove(watcher)


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
    full: torch.Tensor
    shard: torch.Tensor
    peak: int


def observe_gather(answer, seed, size):
    group, where = comm.world(), rank_device()
    with Ledger() as ledger:
        shard = numbers(seed + group.rank(), size).to(where)
        full = device.empty(size * group.size(), BF16, "unsharded", where).fill_(torch.nan)
        ledger.reset_peaks()
        before = sum(ledger.live().values())
        with comm.record() as calls, phases() as seen:
            handle = answer(full, shard, group)
        peak = ledger.peak.total - before
    returned, order = type(handle).__name__, list(seen)
    if handle is not None:
        handle.wait()
    comm.all_reduce(torch.zeros(1, device=where), group).wait()
    return Gathered(returned, [(c.op, c.payload) for c in calls], order, full.cpu(), shard.cpu(), peak)


@pytest.mark.exercise(id="9.1")
def test_gather_low(answer, variant):
    """The shard is cast straight into its place, and one all-gather in the low dtype fills the rest."""
    ranks, size = variant.ranks, variant.size
    try:
        seen = on_ranks(ranks, observe_gather, answer, variant.seed, size, timeout=8)
    except AnswerError as error:
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
        expect(
            "bytes allocated meanwhile, at most",
            found.peak,
            0,
            rank=rank,
            slips={"that is a buffer for the cast shard: cast it straight into its part of `full`": 2 * size},
            slip="`full` has room for all of it",
        )


# 9.2 The mean into the shard's gradient


@pytest.mark.exercise(id="9.2")
def test_deliver(answer, variant):
    """Cast to the shard's dtype and added there; no memory is left but the shard's gradient."""
    size = variant.size
    for dtype in (BF16, FP16, FP32):
        means = [numbers(variant.seed + 1, size).to(dtype), 0.003 * numbers(variant.seed + 2, size).to(dtype)]
        deliver_two(answer, means, numbers(variant.seed, size), str(dtype).removeprefix("torch."))


def deliver_two(answer, means, values, named):
    first, both = means[0].float(), means[0].float() + means[1].float()
    low_sum = (means[0] + means[1]).float()
    with Ledger() as ledger:
        shard = nn.Parameter(values.clone())
        for number, (mean, wanted) in enumerate(zip(means, (first, both), strict=True)):
            buffer = device.empty(mean.numel(), mean.dtype, "gradients", mean.device)
            buffer.copy_(mean)
            grad_before = shard.grad
            try:
                answer(shard, buffer)
            except RuntimeError as error:
                if "assign" in str(error) and "grad" in str(error):
                    raise AnswerError(
                        f"it raises: {error}\n"
                        "likely slip: a gradient has its parameter's dtype: make a buffer of that and cast into it"
                    ) from error
                raise
            what = f"{'second' if number else 'first'} mean in {named}"
            expect(
                f"dtype of `shard`, {what}",
                str(shard.dtype),
                "torch.float32",
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
                    "the second mean has overwritten the first": means[1].float(),
                    "the sum was made in the low precision, where small terms are lost: cast first, then add": low_sum,
                }
            got = shard.grad.detach().clone()
            expect(f"`shard.grad`, {what}", got, wanted, slips=slips, tolerance=1e-7)
            if buffer.untyped_storage().data_ptr() != shard.grad.untyped_storage().data_ptr() or not nbytes(buffer):
                expect(
                    f"bytes behind `mean`, {what}",
                    nbytes(buffer),
                    0,
                    slip="its memory is still there, whoever may refer to it: `device.free`",
                )
            if number and shard.grad is not grad_before:
                raise AnswerError(
                    f"`shard.grad`, {what}: expected the same tensor as before, got another one\n"
                    "likely slip: added out of place, which needs the memory twice for a moment: add in place"
                )
            expect(
                f"bytes of gradients by the ledger, {what}",
                ledger.live()["gradients"],
                4 * values.numel(),
                slips={"the ledger cannot see this memory: buffers come from `device.empty`": 0},
                slip="there is a buffer left besides `shard.grad`: free what was added",
            )


# 9.3 Where to divide


@pytest.mark.exercise(id="9.3")
def test_divisors(answer, variant):
    """fp16 is divided by about the root of N before the sum and by the rest after it; other dtypes after it only."""
    for ranks in sorted({1, 2, 3, 4, 6, 8, 64, 512, variant.ranks}):
        for dtype in (FP16, BF16, FP32):
            wanted = (1, ranks / 1)
            while dtype is FP16 and wanted[0] ** 2 < ranks:
                wanted = (2 * wanted[0], ranks / (2 * wanted[0]))
            named = f"divisors of {str(dtype).removeprefix('torch.')} on {ranks} ranks (before, after the sum)"
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
    if before == 1:
        return "nothing is divided before the sum: N gradients of 65,504 / N and more overflow in it"
    if before == ranks and ranks > right:
        return "all is divided before the sum: what is below 3e-8 * N is 0 then (underflow)"
    if before != 2 ** round(torch.tensor(before).log2().item()):
        return "not a power of two: the division rounds every element; by a power of two it only changes the exponent"
    if before < after and right != before:
        return "rounded down: take the smallest power of two that is not below the root of N"
    return "the smallest power of two that is not below the root of N comes first, the rest after the sum"


# 9.4 All step, or none


class Stepped(NamedTuple):
    scale: float
    values: torch.Tensor
    calls: list[str]
    bytes: int


BAD = {"all finite": None, "an infinity on the last rank": torch.inf, "a NaN on the last rank": torch.nan}


def observe_steps(answer, seed, size):
    group, where = comm.world(), rank_device()
    rank, found = group.rank(), {}
    for what, bad in BAD.items():
        shards = [nn.Parameter(torch.zeros(size, device=where)), nn.Parameter(torch.zeros(size + rank, device=where))]
        unused = nn.Parameter(torch.zeros(2, device=where))
        optimizer = torch.optim.SGD([*shards, unused], lr=1.0)
        for number, shard in enumerate(shards):
            shard.grad = 1024.0 * numbers(seed + rank + number, shard.numel()).to(where)
        if bad is not None and rank == group.size() - 1:
            shards[0].grad[size // 2] = bad
        with comm.record() as calls:
            scale = answer(optimizer, 1024.0, group)
        moved = torch.cat([shard.detach() for shard in shards]).cpu()
        found[what] = Stepped(scale, moved, [c.op for c in calls], sum(c.payload for c in calls))
    return found


@pytest.mark.exercise(id="9.4")
def test_step_together(answer, variant):
    """All ranks step with unscaled gradients, or all of them skip and halve the scale."""
    ranks = variant.ranks
    slip = (
        "a rank waits in a collective that another has not called: take part in every step, whether you have found "
        "anything or not"
    )
    seen = on_ranks(ranks, observe_steps, answer, variant.seed, variant.size, timeout=6, slip=slip)
    for what in BAD:
        for rank, found in enumerate(each[what] for each in seen):
            at = f"{what}: "
            gradients = [numbers(variant.seed + rank + n, variant.size + n * rank) for n in range(2)]
            stepped = -torch.cat(gradients)
            if found.bytes > 64:
                raise AnswerError(
                    f"rank {rank}, {at}bytes communicated: expected one number's, got {found.bytes}\n"
                    "likely slip: gradients are shards, of other elements on every rank: only the verdict is shared"
                )
            if what == "all finite":
                expect(
                    f"{at}parameters after a step of 1.0 times the gradient",
                    found.values,
                    stepped,
                    rank=rank,
                    slips={
                        "the gradients are still scaled: divide them by the scale": 1024 * stepped,
                        "multiplied by the scale once more": 1024**2 * stepped,
                        "no step was made, though all gradients were finite": 0 * stepped,
                    },
                )
                expect(
                    f"{at}scale",
                    found.scale,
                    1024.0,
                    rank=rank,
                    slip="nothing has overflowed: the scale stays as it is",
                )
                continue
            if not found.calls:
                raise AnswerError(
                    f"rank {rank}, {at}collectives: expected an all-reduce of the verdict, got none\n"
                    "likely slip: each rank decides alone, from its own shards: some step while others skip"
                )
            slip = "a step was made, with an infinity or a NaN somewhere: one rank's finding is everybody's"
            if found.values.isfinite().all() and rank == ranks - 1 and found.values.any():
                slip = "what has overflowed is no zero: the gradient is worth nothing, and the step has to be skipped"
            elif "NaN" in what and found.scale == 1024.0:
                slip = "a NaN is no infinity for `isinf`: an overflow can become one (inf - inf), ask for `isfinite`"
            elif found.scale == 512.0:
                slip = "the scale is halved, and the step made all the same: skip it"
            expect(f"{at}parameters", found.values, 0 * stepped, rank=rank, slip=slip)
            expect(
                f"{at}scale",
                found.scale,
                512.0,
                rank=rank,
                slips={"skipped, and the next step will overflow again: halve the scale": 1024.0},
                slip="half of it, the same on every rank",
            )


# 9.5 Accumulate


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x, target):
        return (self.last(torch.tanh(self.first(x))) - target).square().mean()


MICRO = 3


class Accumulated(NamedTuple):
    reduced: list[int]  # reduce-scatters that had been issued after each backward
    forwards: int
    backwards: int
    contexts: int  # how often no_sync was entered
    rows: list[int]  # of each forward
    most: int  # forwards that were waiting for their backward at once
    first: torch.Tensor
    second: torch.Tensor


def rows_of(seed, rank):
    generator = torch.Generator().manual_seed(100 + 10 * seed + rank)
    return [(torch.randn(2, 3, generator=generator), torch.randn(2, 1, generator=generator)) for _ in range(MICRO)]


def observe_accumulate(answer, seed):
    group, where = comm.world(), rank_device()
    found = {}
    micro_batches = [tuple(part.to(where) for part in each) for each in rows_of(seed, group.rank())]
    for communicate in (True, False):
        model = FullyShardedDataParallel(Net(seed).to(where), auto_wrap_policy={nn.Linear})
        rows, waiting, reduced, contexts = [], [0, 0], [], []
        no_sync, end = Engine.no_sync, Engine._end_backward

        def before(module, args, rows=rows, waiting=waiting):
            rows.append(len(args[0]))
            waiting[0] += 1
            waiting[1] = max(waiting)

        @contextmanager
        def counted(engine, no_sync=no_sync, contexts=contexts):
            contexts.append(True)
            with no_sync(engine):
                yield

        with comm.record() as calls:

            def ended(engine, end=end, reduced=reduced, waiting=waiting, calls=calls):
                end(engine)
                waiting[0] -= 1
                reduced.append(sum(c.op == "reduce_scatter" for c in calls))

            model.register_forward_pre_hook(before)
            with patch.object(Engine, "no_sync", counted), patch.object(Engine, "_end_backward", ended):
                answer(model, micro_batches, communicate)
                log, gradients = [], []
                log += reduced
                for turn in range(2):
                    if turn:
                        answer(model, micro_batches, communicate)
                    gradients.append(
                        torch.cat(
                            [torch.zeros(p.numel()) if p.grad is None else p.grad.cpu() for p in model.parameters()]
                        )
                    )
        found[communicate] = Accumulated(
            log, len(rows) // 2, len(reduced) // 2, len(contexts) // 2, rows, waiting[1], *gradients
        )
    return found


@pytest.mark.exercise(id="9.5")
def test_accumulate(answer, variant):
    """The mean of the micro-batches' gradients, reduced after each of them or once, in the last one's backward."""
    ranks = variant.ranks
    seen = on_ranks(ranks, observe_accumulate, answer, variant.seed, timeout=10)
    net = Net(variant.seed)
    for rank in range(ranks):
        for micro_batch in rows_of(variant.seed, rank):
            (net(*micro_batch) / MICRO / ranks).backward()
    units = [net.first, net.last]
    for communicate in (True, False):
        at = f"communicate={communicate}: "
        wanted = [2 * number for number in (1, 2, 3)] if communicate else [0, 0, 2]
        for rank, found in enumerate(each[communicate] for each in seen):
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
            gradients = []
            for unit in units:
                flat = torch.cat([p.grad.flatten() for p in unit.parameters()])
                padded = torch.zeros(-(-len(flat) // ranks) * ranks)
                padded[: len(flat)] = flat
                gradients.append(padded.chunk(ranks)[rank])
            mean = torch.cat(gradients)
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


# 9.6 The gradient to the host


@contextmanager
def commands(log):
    """What the host asks of a device with queues, and copies to the host, in order."""
    copy = device.copy_to_host

    def copy_to_host(tensor):
        log.append(("copy", tensor))
        return copy(tensor)

    def watch(command):
        if command.verb in ("record", "synchronize"):
            log.append((command.verb, command.subject))

    device.watchers.append(watch)
    try:
        with patch.object(device, "copy_to_host", copy_to_host):
            yield
    finally:
        device.watchers.remove(watch)


@pytest.mark.exercise(id="9.6")
def test_offload_gradient(answer, variant):
    """The copy starts at once, the device's memory is free, and the host waits only where it reads, and adds."""
    size = variant.size
    shard = nn.Parameter(torch.zeros(size))
    means = [numbers(variant.seed + number, size) for number in range(2)]
    wanted, first = torch.zeros(size), None
    for number, mean in enumerate(means):
        what = f"{'second' if number else 'first'} gradient"
        buffer = device.empty(size, FP32, "gradients", torch.device("cpu")).copy_(mean)
        log: list[Any] = []
        with commands(log):
            arrive = answer(shard, buffer)
            began = list(log)
            log.clear()
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
            explain_start(what, [verb for verb, _ in began])
            events = [subject for verb, subject in began if verb == "record"]
            arrive()
            explain_wait(what, log, events)
        wanted = wanted + mean
        if shard.grad is None:
            raise AnswerError(f"`shard.grad`, {what}: expected the gradient, got None")
        if nbytes(shard.grad) == 0:
            raise AnswerError(
                f"`shard.grad`, {what}: expected values, got a tensor without memory\n"
                "likely slip: freed before it was copied, or no copy at all"
            )
        slips = {"the second has overwritten the first, as torch's does: add": mean} if number else None
        expect(f"`shard.grad`, {what}", shard.grad.detach().clone(), wanted, slips=slips)
        if number and shard.grad is not first:
            raise AnswerError(
                "`shard.grad`, second gradient: expected the same tensor as before, got another one\n"
                "likely slip: added out of place: `add_` needs no third buffer on the host"
            )
        first = shard.grad


def explain_start(what, began):
    if "copy" not in began:
        raise AnswerError(
            f"copies to the host, {what}: expected one by `device.copy_to_host`, got none\n"
            "likely slip: `.cpu()` and `.to` make the host wait on a GPU, and copy nothing on a CPU"
        )
    if "synchronize" in began:
        raise AnswerError(
            f"waits of the host before it returns, {what}: expected 0, got {began.count('synchronize')}\n"
            "likely slip: waits in the middle of backward: the host has to run on, and wait when backward is over"
        )
    if "record" not in began or began.index("record") < began.index("copy"):
        raise AnswerError(
            f"events recorded behind the copy, {what}: expected one, got none\n"
            "likely slip: an event tells of what was queued before it: record it after the copy, on the same stream"
        )


def explain_wait(what, log, events):
    waits = [subject for verb, subject in log if verb == "synchronize"]
    if any(isinstance(subject, torch.device) for subject in waits):
        raise AnswerError(
            f"what the host waits for, {what}: expected the copy's event, got the whole device\n"
            "likely slip: that waits for all that is queued there, also what has nothing to do with this gradient"
        )
    if not any(subject is event for subject in waits for event in events):
        raise AnswerError(
            f"waits of the host before the gradient is read, {what}: expected one for the copy's event, got none\n"
            "likely slip: on a GPU the optimizer would read memory that the copy has not reached"
        )
