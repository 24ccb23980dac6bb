"""Exercise 9.6: Moving the gradient to the host."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minifsdp import device
from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.flat_unit import FlatUnit

from .shared import FP64, nbytes, numbers


@reference(
    "9.6",
    hints=(
        "`device.copy_to_host` only starts the copy. An event that is recorded behind it on the same stream tells when "
        "it is over; whoever reads the copy has to wait for that, and not before.",
        "Now: copy, `event = device.current_stream(mean.device).record_event()`, `device.free(mean)`. In the function "
        "that you return: `event.synchronize()`, then the copy becomes `shard.grad` or is added to it in place.",
    ),
    forbids=(FlatUnit._deliver, FlatUnit.finish_reduce),
)
def offload_gradient(shard: nn.Parameter, mean: Tensor) -> Callable[[], None]:
    """Start moving `mean` [P / N] to the host, and return the function that adds it to `shard.grad` there.

    Args:
        shard: in host memory. `shard.grad` is None, or holds an earlier micro-batch's gradient,
        to which the new one is added in place.
        mean: on the device, of the shard's dtype. When `offload_gradient` returns, this memory has been freed. Work
            already queued on the device may still read it; `device.free` takes care of that.

    `offload_gradient` does not wait and does not touch `shard.grad`. The returned function is called once, after the
    backward pass: it makes the host wait for this copy only, and then updates `shard.grad`.

    Use `device.copy_to_host(tensor)`, which starts a copy and returns it, `device.current_stream(tensor.device)`, its
    `record_event()`, the event's `synchronize()`, which makes the host wait for it (on a CPU it does nothing), and
    `device.free(buffer)`. Several copies to the same shard may be in flight at the same time.
    """
    on_host = device.copy_to_host(mean)
    copied = device.current_stream(mean.device).record_event()
    device.free(mean)

    def arrive() -> None:
        copied.synchronize()
        if shard.grad is None:
            shard.grad = on_host
        else:
            shard.grad.add_(on_host)

    return arrive


class OnDevice(torch.Tensor):
    """Says that it is on a device of its own, and is in the host's memory as all else is."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

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
