"""Exercise 11.4: Finish."""

from types import SimpleNamespace

import torch
from torch import nn

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.flat_unit import FlatUnit

from .shared import Replica


@reference(
    "11.4",
    hints=(
        "It is called for every unit, also for those that have nothing under way, and more than once. How do you see "
        "that there is something? And how will the next call?",
        "If `unit.across` is None, there is nothing to do. Otherwise wait for it, hand `unit.mean` to `unit.deliver`, "
        "and set both attributes to None.",
    ),
    forbids=(FlatUnit.finish_reduce,),
)
def finish_across(unit: Replica) -> None:
    """Wait for the reduction from `start_across`, and deliver the mean to the shard's gradient,
    once.

    `unit.deliver(mean)` adds to the current `.grad`. Afterwards the unit has neither a mean nor a
    reduction under way: `unit.mean` and `unit.across` are None. If no reduction was under way, do
    nothing.
    """
    if unit.across is None:
        return
    unit.across.wait()
    assert unit.mean is not None
    unit.deliver(unit.mean)
    unit.across = unit.mean = None


class FakeHandle:
    """A reduction whose result is there once somebody waits."""

    def __init__(self, log, buffer, result):
        self.log, self.buffer, self.result = log, buffer, result

    def wait(self):
        self.log.append("wait")
        self.buffer.copy_(self.result)


class FakeUnit:
    def __init__(self, size, dtype=torch.float32):
        self.log = []
        self.across = self.mean = self.delivered = None
        self.replicas = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        self.group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        self.averaged_over = 4
        self.flat = SimpleNamespace(shard=nn.Parameter(torch.zeros(size, dtype=dtype)))
        self.flat.shard.grad = torch.ones(size, dtype=dtype)  # of an earlier micro-batch

    def begin(self, result):
        self.mean = torch.full_like(result, float("nan"))
        self.across = FakeHandle(self.log, self.mean, result)

    def deliver(self, mean):
        self.log.append("deliver" if isinstance(mean, torch.Tensor) else "deliver of what is no tensor")
        self.delivered = None
        if isinstance(mean, torch.Tensor):
            self.delivered = mean.dtype, mean.data_ptr()
            self.flat.shard.grad += mean
            mean.fill_(float("nan"))  # its memory is somebody else's


def finished(answer, unit, when):
    """What one call did; a call that cannot bear an idle unit is told so."""
    unit.log.clear()
    try:
        answer(unit)
    except AttributeError as error:
        if "NoneType" not in str(error):
            raise
        raise AnswerError(
            f"{when}: it raises {error}\n"
            "likely slip: `unit.across` is None where nothing is under way, and then there is nothing to do"
        ) from error
    return list(unit.log)


def why_finished(log, grad_kept):
    match log:
        case ["wait"]:
            if grad_kept:
                return "waited for, and never handed over: the optimizer finds an old gradient or none"
            return "`.grad` is overwritten, and earlier micro-batches are gone: `unit.deliver` adds"
        case ["wait", "deliver of what is no tensor"]:
            return "`wait` returns nothing: what it waited for is in `unit.mean`"
        case ["wait", "wait", *_]:
            return "what has been waited for once is there"
        case ["deliver"]:
            return "the mean is not there before `wait()`: what is delivered may be anything"
        case ["deliver", "wait"]:
            return "delivered first and waited for afterwards: the other way round"
    return None


@check("11.4")
def check_finish_across(answer, variant):
    """Waited for, delivered once, and forgotten; nothing where nothing is under way."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        check_finished(answer, variant.size, variant.seed, dtype)
    size = variant.size
    unit = FakeUnit(size)
    finished(answer, unit, "a unit that never had a reduction")
    unit.mean = torch.zeros(size)
    when = "a mean whose reduction has not started"
    log = finished(answer, unit, when)
    expect(f"{when}: what was called", log, [], slip="`unit.across` says what is under way")
    expect(f"{when}: it stays", unit.mean is not None, True, slip="what nobody has waited for is not to be forgotten")
    units = [FakeUnit(size) for _ in range(3)]
    for each in units:
        each.begin(torch.ones(size))
    for at in (1, 2, 0):
        log = finished(answer, units[at], f"unit {at} of three that are under way")
        slip = "a unit is finished by itself, in whatever order: keep nothing of one for another"
        expect(f"unit {at} of three that are under way: what was called", log, ["wait", "deliver"], slip=slip)


def check_finished(answer, size, seed, dtype):
    """Two reductions of a unit in a dtype, and a call with nothing under way after each."""
    unit, grad = FakeUnit(size, dtype), torch.ones(size, dtype=dtype)
    for number in (1, 2):
        result = torch.randn(size, generator=torch.Generator().manual_seed(seed + number)).to(dtype)
        unit.begin(result)
        buffer = unit.mean
        log = finished(answer, unit, f"reduction {number}")
        kept = torch.equal(unit.flat.shard.grad, grad)
        what = f"reduction {number}: what was called"
        expect(what, log, ["wait", "deliver"], slip=why_finished(log, kept))
        expect(
            f"reduction {number}: `.grad`",
            unit.flat.shard.grad,
            grad + result,
            slips={"divided again: `start_across` has made a mean of it": grad + result / 2},
            slip="the mean as it is after the wait is to be added, once",
        )
        dtype, place = unit.delivered
        slip = "`.grad` takes no other dtype than its parameter's"
        expect(f"reduction {number}: dtype delivered", str(dtype), str(buffer.dtype), slip=slip)
        slip = "a copy is a second buffer, and `deliver` gives the memory of the copy away, not the mean's"
        expect(f"reduction {number}: `unit.mean` itself is delivered", place == buffer.data_ptr(), True, slip=slip)
        grad = grad + result
        forgotten = unit.across is None
        again = finished(answer, unit, "the next call, with nothing under way")
        expect(
            "the next call, with nothing under way: what was called",
            again,
            [],
            slip="nothing was waited for, so there is nothing to deliver: both belong under one condition"
            if forgotten
            else "what has been delivered is delivered twice: `unit.across` has to become None",
        )
        expect("`.grad` after it", unit.flat.shard.grad, grad)
        expect("`unit.across` is None", unit.across is None, True)
        expect(
            "`unit.mean` is None",
            unit.mean is None,
            True,
            slip="a name that stays keeps a buffer that has been given away",
        )
