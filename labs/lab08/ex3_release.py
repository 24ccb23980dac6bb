"""Exercise 8.3: Free while another stream is reading."""

from collections import Counter
from collections.abc import Callable

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.machine.allocator import CachingAllocator

from .shared import ROUND, SEGMENT, Block, FakeEvent, Memory, memory_of, put_back_of


@reference(
    "8.3",
    hints=(
        "If only its own stream has used the block, its next user stands behind the last one in the same queue: it can "
        "go back at once. What another stream has queued up to now may still read it.",
        "For every stream in `block.users` an event, `memory.device.record(stream)`, now; the block and the list of "
        "them go on `memory.waiting`, and `block.users` is emptied. With no users: `put_back(memory, block)`.",
    ),
    forbids=(CachingAllocator.free,),
)
def release(memory: Memory, block: Block, put_back: Callable[[Memory, Block], None]) -> None:
    """Free a block: immediately, or when all other streams that use it have reached this point.

    Args:
        memory: the allocator's state.
        block: a block in use; `block.users` contains the numbers of the other streams that use it.
        put_back: your function from 8.2.

    If no other stream uses it, call `put_back(memory, block)`. Otherwise record an event on each of these streams with
    `memory.device.record(stream)`, put the block on `memory.waiting` as `(block, events)` (once, and on no other list),
    and empty `block.users` for the next owner. The host does not wait.
    """
    if block.users:
        memory.waiting.append((block, [memory.device.record(stream) for stream in sorted(block.users)]))
        block.users.clear()
    else:
        put_back(memory, block)


@check("8.3")
def check_release(answer, variant):
    """At once where only its own stream has used it; else with an event on each of the others, recorded now."""
    size = ROUND * variant.size
    for users, idle in (
        (set(), False),
        ({2}, False),
        ({2, 3}, False),
        ({3, 5, 2}, False),
        ({2}, True),
        ({0}, False),
        ({4, 0}, False),
    ):
        memory, used = memory_of(0, [(size, None), (SEGMENT - size, 1)])
        memory.device.idle = idle
        block, log = used[0], memory.device.log
        block.stream, block.users = 1, set(users)
        memory.waiting.append((Block(9 * SEGMENT, size, 1), [FakeEvent([], 4)]))
        answer(memory, block, put_back_of(log))
        text = f"a block of stream 1, used on {', '.join(map(str, sorted(users))) or 'no other'}"
        text += ", on an idle device" if idle else ""
        found = Counter(log)
        waits = [entry for entry in memory.waiting if entry[0] is block]
        others = len(memory.waiting) - len(waits)
        expect(
            f"{text}: others on `memory.waiting`",
            others,
            1,
            slip="blocks that wait already must stay on the list: append to it",
        )
        if any("host waits" in each for each in log):
            raise AnswerError(
                f"{text}: expected the host to go on, got a host that waits\n"
                "likely slip: recording an event puts a marker into a queue; the block waits for it, not the host"
            )
        if not users:
            slip = "no other stream uses it: what its own stream does next comes after what it has done"
            expect(f"{text}: what was done", log, ["put back 0"], slip=slip)
            expect("entries of it on `memory.waiting`", len(waits), 0, slip=slip)
            continue
        wanted = Counter(f"event on stream {stream}" for stream in users)
        slip = None
        if 0 in users and not found["event on stream 0"]:
            slip = "stream 0 is a valid stream: it is the default one"
        elif found["put back 0"] and idle:
            slip = "`collect` asks before the next `malloc` whether an event has happened"
        elif found["put back 0"]:
            slip = "it is free at once, while other streams still read it" + (
                "; it waits for their events, and `collect` puts it back" if waits else ": reused too early"
            )
        elif found["event on stream 1"]:
            slip = "the event belongs on the streams that use the block, `block.users`, not on the block's own"
        elif not found and waits:
            slip = "call `record` now: it must not be called only when the entry is read later"
        elif sum(found.values()) < len(users):
            slip = "every stream in `block.users` has a queue of its own, and needs an event of its own"
        expect(f"{text}: what was done", sorted(found.elements()), sorted(wanted.elements()), slip=slip)
        expect("entries on `memory.waiting`", len(waits), 1, slip="the block and its events wait there, as one entry")
        events = waits[0][1]
        expect(
            f"{text}: events it waits for",
            sorted(event.stream for event in events),
            sorted(users),
            slip="every stream in `block.users` has a queue of its own: all of their events go into the entry",
        )
        expect(
            "`block.users` afterwards",
            sorted(block.users),
            [],
            slip="the block's next owner starts with no other users: empty `block.users`, once the events are recorded",
        )
