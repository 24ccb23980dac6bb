"""Exercise 8.6: Hold the host back."""

from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from minifsdp import device
from minifsdp.course.workshop.checking import AnswerError, check
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.schedules.rate_limit import RateLimitedSchedule
from minifsdp.fsdp.unit import GATHERING, SHARDED, UNSHARDED, Unit

from .shared import FakeUnit


@reference(
    "8.6",
    hints=(
        "The schedule calls both functions more often than something happens: `gather` of what is gathered already, "
        "`free` of what is sharded. And of units that are not freed after forward no free will come.",
        "Keep a `deque` in the outer function. Where a unit is SHARDED and `unit.freed_after_forward`: "
        "`while len(frees) >= limit: frees.popleft().synchronize()`, then `gather(unit)`. In the other, look at the "
        "state before `free(unit)`, and afterwards append `device.current_stream(unit.device).record_event()`.",
    ),
    forbids=(RateLimitedSchedule.gather, RateLimitedSchedule.release),
)
def rate_limit(
    gather: Callable[[Unit], None], free: Callable[[Unit], None], limit: int
) -> tuple[Callable[[Unit], None], Callable[[Unit], None]]:
    """Return replacements for `gather` and `free` that hold the host back; they share one queue.

    Args:
        gather: starts a unit's gather; does nothing if the gather has already been started.
        free: frees a unit; does nothing if the unit is sharded.
        limit: at least 1.

    Returns:
        `limited_gather(unit)`: if `gather(unit)` will start a gather of a unit that is freed after
        forward, then, while the queue contains `limit` or more events, first wait for the oldest
        with `event.synchronize()` and remove it. Then call `gather(unit)` in any case.
        `limited_free(unit)`: call `free(unit)`. If the unit was not sharded before, and is freed
        after forward, append an event to the queue, recorded just before or after that call:
        `device.current_stream(unit.device).record_event()`.
    """
    frees: deque[Any] = deque()

    def limited_gather(unit: Unit) -> None:
        if unit.state is SHARDED and unit.freed_after_forward:
            while len(frees) >= limit:
                frees.popleft().synchronize()
        gather(unit)

    def limited_free(unit: Unit) -> None:
        counts = unit.state is not SHARDED and unit.freed_after_forward
        free(unit)
        if counts:
            frees.append(device.current_stream(unit.device).record_event())

    return limited_gather, limited_free


ELSEWHERE = " on a stream that is not current"


@contextmanager
def told(log):
    """The events that are recorded, and those that the host waits for, by the number of the record."""
    numbers: dict[int, int] = {}
    kept: list[Any] = []

    def watch(command):
        if command.verb == "record":
            kept.append(command.subject)
            numbers[id(command.subject)] = len(kept)
            here = command.stream is device.current_stream(FakeUnit.device)
            log.append(f"event {len(kept)}" + ("" if here else ELSEWHERE))
        elif command.verb == "synchronize":
            log.append(f"wait for {numbers.get(id(command.subject))}")

    device.command_observers.append(watch)
    try:
        yield
    finally:
        device.command_observers.remove(watch)


def limited_log(answer, limit, program):
    """What happens when a program of (verb, unit) runs through the answer's pair."""
    log: list[str] = []

    def gather(unit):
        log.append(f"gather {unit.name}")
        if unit.state is SHARDED:
            unit.state = GATHERING

    def free(unit):
        log.append(f"free {unit.name}")
        unit.state = SHARDED

    def of_the_unit(where):
        if where != FakeUnit.device:
            raise AnswerError(
                f"whose current stream it is: expected that of `unit.device`, got that of {where}\n"
                "likely slip: on a GPU the unit's last kernels are there: `device.current_stream(unit.device)`"
            )
        return current_stream(where)

    current_stream = device.current_stream
    pair = answer(gather, free, limit)
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(callable, pair))):
        raise AnswerError("expected two functions, the limited gather and the limited free")
    other = device.new_stream(FakeUnit.device)
    with told(log), patch.object(device, "current_stream", of_the_unit):
        for verb, unit in program:
            if verb == "use":
                unit.state = UNSHARDED
            elif verb == "becomes root":
                unit.freed_after_forward = False
            elif verb == "free elsewhere":
                with device.on_stream(other):
                    pair[1](unit)
            else:
                pair[verb == "free"](unit)
    return log


def expected_log(limit, program):
    """The same by counting: of all frees so far at most `limit` - 1 may not have been waited for."""
    log, state, kept, frees, waited = [], {}, set(), 0, 0
    for verb, unit in program:
        whole = state.get(unit.name, False)
        if verb == "becomes root":
            kept.add(unit.name)
        if verb in ("use", "becomes root"):
            continue
        counts = unit.freed_after_forward and unit.name not in kept
        if verb == "gather":
            if not whole and counts:
                log += [f"wait for {number}" for number in range(waited + 1, frees - limit + 2)]
                waited = max(waited, frees - limit + 1)
            log.append(f"gather {unit.name}")
            state[unit.name] = True
        else:
            log.append(f"free {unit.name}")
            if whole and counts:
                frees += 1
                log.append(f"event {frees}")
            state[unit.name] = False
    return log


@check("8.6")
def check_rate_limit(answer, variant):
    """An event for every free of a unit that is freed after forward; a gather waits while `limit` are queued."""
    count = 4 + variant.size % 3
    units = [FakeUnit(str(number)) for number in range(count)]
    root, kept = FakeUnit("root", stays=True), FakeUnit("kept", stays=True)
    for limit in (1, 2, 3, 5):
        for each in (*units, root, kept):
            each.state = SHARDED
        plain = [(verb, unit) for unit in units for verb in ("gather", "use", "free")]
        check_limited(answer, limit, plain, f"units one after the other, limit {limit}")
        ahead = [("gather", units[0])]
        for unit, after in zip(units, [*units[1:], None], strict=True):
            ahead += [("gather", unit), ("use", unit)]  # gathered before: nothing to wait for
            ahead += [("gather", after)] if after is not None else []
            ahead += [("free", unit)]
        check_limited(answer, limit, ahead, f"each gathered while the one before computes, limit {limit}")
        stays = [("gather", root), ("use", root), *plain, ("gather", kept), ("use", kept), *plain]
        stays += [("free", kept), ("free", root), *plain]
        check_limited(answer, limit, stays, f"with units that stay unsharded, limit {limit}")
        again = [*plain, *[("free", unit) for unit in units], *plain]  # the engine frees everything at the end
        check_limited(answer, limit, again, f"all freed once more when backward ends, limit {limit}")
        together = [(verb, unit) for verb in ("gather", "use", "free") for unit in units[:3]] + plain
        check_limited(answer, limit, together, f"three freed one after the other, limit {limit}")
        same = [(verb, units[0]) for _ in range(4) for verb in ("gather", "use", "free")]
        check_limited(answer, limit, same, f"one unit, again and again, limit {limit}")
        lead = FakeUnit("late")
        late = [(verb, lead) for verb in ("gather", "becomes root", "use", "free", "gather", "use", "free")]
        check_limited(answer, limit, [*plain, *late, *plain], f"a root known after its gather, limit {limit}")
        unused = [step for step in plain if step[0] != "use"]
        check_limited(answer, limit, unused, f"gathered and freed without a use, limit {limit}")
        elsewhere = [(verb + " elsewhere" * (verb == "free"), unit) for verb, unit in plain]
        check_limited(answer, limit, elsewhere, f"freed while another stream is current, limit {limit}")
        every_other = [
            (verb + " elsewhere" * (verb == "free" and number // 3 % 2), unit)
            for number, (verb, unit) in enumerate(plain)
        ]
        check_limited(
            answer, limit, every_other, f"every other one freed while another stream is current, limit {limit}"
        )


def check_limited(answer, limit, program, what):
    states = {id(unit): unit.state for _, unit in program}
    wanted = expected_log(limit, program)
    try:
        got = limited_log(answer, limit, program)
    except IndexError as error:
        raise AnswerError(
            f"{what}: {error}\nlikely slip: there is no free to wait for: check the length of the queue first"
        ) from error
    for _, unit in program:
        unit.state = states[id(unit)]
    plain = [each.replace("event", "free's event") for each in got]
    if normal(got) == normal(wanted):
        return
    raise AnswerError(f"{what}: {first_difference(plain, wanted)}\nlikely slip: {why_limited(got, wanted, what)}")


def normal(log):
    """A log in which an event recorded just before its free counts as one just after: a free queues no kernel."""
    log = list(log)
    for at in range(len(log) - 1):
        own = not log[at - 1].startswith("free") if at else True  # else it is the event of the free before it
        if own and log[at].startswith("event") and log[at + 1].startswith("free"):
            log[at], log[at + 1] = log[at + 1], log[at]
    return log


def first_difference(got, wanted):
    wanted = [each.replace("event", "free's event") for each in wanted]
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    before = f"after `{wanted[at - 1]}` " if at else ""
    expected = f"`{wanted[at]}`" if at < len(wanted) else "nothing more"
    found = f"`{got[at]}`" if at < len(got) else "nothing more"
    return f"{before}expected {expected}, got {found}"


def why_limited(got, wanted, what):
    """The slip behind a wrong log."""

    def of(log, word):
        return [each for each in log if each.startswith(word)]

    if of(got, "gather") != of(wanted, "gather") or of(got, "free") != of(wanted, "free"):
        return "pass every call on to `gather` and `free`, whatever else is done"
    if "known after" in what:
        return "it is known late which unit is the root: read `unit.freed_after_forward` at each call"
    if "again and again" in what and len(of(got, "wait")) < len(of(wanted, "wait")):
        return "a unit is freed twice in a step, and more often in several: each free has an event of its own"
    waits, right = of(got, "wait"), of(wanted, "wait")
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), len(wanted))
    if got[-1].startswith("wait"):
        return "the host waits when a unit is about to be gathered; after a free it goes on"
    if any(ELSEWHERE in each for each in got):
        return "the unit's last kernels are on the stream that is current at its free: ask for it then"
    if len(of(got, "event")) > len(of(wanted, "event")):
        if "stay unsharded" in what:
            return "units that stay unsharded do not count: they are freed much later, and no gather needs their memory"
        return "`free` of a unit that is sharded already frees nothing: no event for it"
    if "without a use" in what:
        return "a unit whose gather is in progress is not sharded: freeing it frees memory, too"
    if not of(got, "event"):
        return "after a free an event has to be recorded, or there is nothing to wait for"
    if not waits:
        return "the host never waits: before a gather it has to wait for the oldest of `limit` frees"
    if got[at : at + 2] == wanted[at : at + 2][::-1] and wanted[at].startswith("wait"):
        return "wait first, then issue the gather: otherwise it finds no free memory"
    following = next((each for each in got[at:] if not each.startswith("wait")), "")
    if following in ("gather root", "gather kept") and got[at].startswith("wait"):
        return "gathering a unit that stays unsharded is no reason to wait"
    if "wait for None" in waits:
        return "the events to wait for are those recorded at the frees"
    if any("wait" in each for each in got[:4]) or len(waits) > len(set(waits)):
        return "remove an event from the queue once the host has waited for it"
    numbers = [int(each.split()[-1]) for each in waits]
    oldest = [int(each.split()[-1]) for each in right]
    if set(oldest) < set(numbers) and len(numbers) > len(oldest):
        if "while the one before" in what:
            return "a unit that is gathered already needs no room, so the host does not wait"
        return "the host waits for more than it must: fewer than `limit` frees may stay ahead of the device"
    if set(numbers) < set(oldest) and "three" in what:
        return "more than one event may have to leave the queue: wait as long as there are `limit` or more"
    if set(numbers) < set(oldest):
        return "one unit too many: the host has to wait as soon as `limit` frees are ahead of the device"
    return "the host waits for the oldest free, which is the first to happen: a queue, first in, first out"
