"""Exercise 8.4: Collect."""

from collections.abc import Callable

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.machine.allocator import CachingAllocator

from .shared import ROUND, SEGMENT, Block, FakeDevice, FakeEvent, Memory, memory_of, put_back_of


@reference(
    "8.4",
    hints=(
        "An event answers `query()` at once, True or False. A block can come back if all of its events answer True, "
        "and where it stands in the list does not matter.",
        "Go over a copy of `memory.waiting`; where `all(event.query() for event in events)`, remove the entry and "
        "`put_back(memory, block)`.",
    ),
    forbids=(CachingAllocator.collect, CachingAllocator._happened),
)
def collect(memory: Memory, put_back: Callable[[Memory, Block], None]) -> None:
    """Put back the blocks on `memory.waiting` whose events are all complete; keep the others.

    `event.query()` returns whether the event is complete, without waiting for it. The host does not wait. Any block
    may be ready, whatever its position on the list.
    """
    for entry in list(memory.waiting):
        block, events = entry
        if all(event.query() for event in events):
            memory.waiting.remove(entry)
            put_back(memory, block)


class Soon(FakeEvent):
    """One that happens just after it was first asked for."""

    def query(self):
        before, self.past = self.past, True
        return before


@check("8.4")
def check_collect(answer, variant):
    """Every block whose events have all happened is free again, wherever it stands, and the host has not waited."""
    size = ROUND * variant.size
    pasts = [[True], [True], [False], [True, False], [False, True], [True, True], [True], [False], [True]]
    pasts += [[True, False, True], [False, False], [True, True, True]]
    count = len(pasts)
    memory, used = memory_of(0, [*[(size, None)] * count, (SEGMENT - size * count, 1)])
    log = memory.device.log
    for block, past in zip(used, pasts, strict=True):
        events = [memory.device.record(2) for _ in past]
        for event, happened in zip(events, past, strict=True):
            event.past = happened
        memory.waiting.append((block, events))
    every = list(memory.device.events)
    log.clear()
    answer(memory, put_back_of(log))
    if any("host waits" in each for each in log):
        raise AnswerError(
            "expected the host to go on, got a host that waits\n"
            "likely slip: before every `malloc` the host asks what has happened, with `event.query()`, and continues"
        )
    back = [number for number, past in enumerate(pasts) if all(past)]
    got = sorted(int(each.split()[-1].replace(",", "")) // size for each in log if each.startswith("put back"))
    first = next(number for number, past in enumerate(pasts) if not all(past))
    slips = {
        "one event is not enough: each stream that uses the block has one, and all have to have happened": [
            number for number, past in enumerate(pasts) if any(past)
        ],
        "continue after an event that has not happened: later blocks may be free all the same": back[:first],
        "an entry was passed over: a list that loses entries while you go over it skips the next one": None,
        "every event of a block has to have happened, not the last of them alone": [
            number for number, past in enumerate(pasts) if past[-1]
        ],
        "every event of a block has to have happened, not the first of them alone": [
            number for number, past in enumerate(pasts) if past[0]
        ],
        "every event of a block has to have happened, those in the middle as well": [
            number for number, past in enumerate(pasts) if past[0] and past[-1]
        ],
        "continue after the first block: later ones may be free as well": back[:1],
        "`event.query()` says whether an event has happened, and was never called": list(range(count)),
        "the blocks have to be free again: `put_back(memory, block)`": [],
    }
    missing = [number for number in back if number not in got]
    skipped = bool(missing) and all(number - 1 in back for number in missing) and set(got) < set(back)
    chosen = "an entry was passed over: a list that loses entries while you go over it skips the next one"
    usual = {text: wrong for text, wrong in slips.items() if wrong is not None}
    known = any(got == wrong for wrong in usual.values())
    expect(f"blocks put back (of {count})", got, back, slips=usual, slip=chosen if skipped and not known else None)
    left = [used.index(block) for block, _ in memory.waiting]
    expect(
        "blocks still on `memory.waiting`",
        left,
        [number for number in range(count) if number not in back],
        slip="take what is put back off the list: otherwise a later call puts it back again, and two get its bytes",
    )
    answer(memory, put_back_of(log))
    expect("blocks put back by another call, with nothing new", len(log), len(back))
    of_two = next(events for block, events in memory.waiting if block is used[pasts.index([False, False])])
    of_two[0].past = True
    answer(memory, put_back_of(log))
    slip = "each call queries all events of an entry: those that have not happened stay with it"
    expect("blocks put back by a call after one of two events has happened", len(log) - len(back), 0, slip=slip)
    for event in every:
        event.past = True
    answer(memory, put_back_of(log))
    slip = "an event that has not happened yet may have happened by the next call: query it again"
    expect("blocks put back in all, after every event has happened", len(log), count, slip=slip)

    # Many of them
    blocks = [Block(2 * SEGMENT * number, SEGMENT, 1) for number in range(1_500)]
    memory = Memory(FakeDevice(0, idle=True))
    memory.waiting = [(block, [memory.device.record(2)]) for block in blocks]
    try:
        answer(memory, put_back_of([]))
    except RecursionError as error:
        raise AnswerError(
            "1,500 blocks to put back: expected all of them, got RecursionError\n"
            "likely slip: a call for each block is one too many for Python's stack: use a loop"
        ) from error
    expect("blocks still on `memory.waiting`, of 1,500 that can come back", len(memory.waiting), 0)

    # The device goes on meanwhile
    memory, used = memory_of(0, [(size, None), (SEGMENT - size, 1)])
    memory.waiting.append((used[0], [Soon(memory.device.log, 2)]))
    answer(memory, put_back_of(memory.device.log))
    expect(
        "a block whose event happens during the call: lists that it is on",
        len(memory.waiting) + len(memory.free) - 1,
        1,
        slip="two queries can give two answers: query each event once, and use that answer for both lists",
    )
