"""Exercise 6.4: Find the missing wait."""

import random
from functools import cache
from typing import NamedTuple

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference

from .shared import THE_CALLERS


class Did(NamedTuple):
    """A line of the log, as in the notebook's set-up cell."""

    verb: str
    what: str
    stream: str


@reference(
    "6.4",
    hints=(
        "Keep for each stream the set of gathers that it can be sure of, for each unit the gather that was issued "
        "last, for each event what its stream was sure of when it was recorded. A gather is known by its line's "
        "number, so that the next one of the same unit is another.",
        '"wait" adds `last[unit]` to the set of its own stream. "record" copies the set of its stream: '
        '`events[name] = set(known)`. "wait event" adds that copy to the set of the waiting stream. A "read" is too '
        "early if the last gather of the unit is not in the set of its stream, or if there is none.",
    ),
)
def missing_waits(log: list[Did]) -> list[int]:
    """Find the lines that read a unit whose most recent gather may still be under way, and return their numbers.

    A `read` is correct if its stream is ordered after the unit's most recent gather at that point. Reading a unit that
    was never gathered is an error too. Lines are numbered from 0. Every `wait` and `wait event` comes after a matching
    `gather` or `record`. A unit and an event may have the same name. The log may be empty; do not change it.
    """
    sure: dict[str, set[int]] = {}  # by stream, the gathers that are over before whatever it does next
    events: dict[str, set[int]] = {}
    last: dict[str, int] = {}
    found = []
    for number, line in enumerate(log):
        known = sure.setdefault(line.stream, set())
        match line.verb:
            case "gather":
                last[line.what] = number
            case "wait":
                known.add(last[line.what])
            case "record":
                events[line.what] = set(known)
            case "wait event":
                known |= events[line.what]
            case "read" if last.get(line.what) not in known:
                found.append(number)
    return found


def log_of(text):
    """`gather 0 @link; wait 0 @compute` as a log."""
    return [
        Did(" ".join(words[:-2]), words[-2], words[-1].removeprefix("@")) for words in map(str.split, text.split(";"))
    ]


LOGS = {
    "nothing missing": "gather 0 @link; wait 0 @compute; read 0 @compute; read 0 @compute",
    "no wait at all": "gather 0 @link; read 0 @compute",
    "two units, one wait": "gather 0 @link; gather 1 @link; wait 0 @compute; read 0 @compute; read 1 @compute",
    "the wait comes after the read": "gather 0 @link; read 0 @compute; wait 0 @compute; read 0 @compute",
    "another stream has waited": "gather 0 @link; wait 0 @other; read 0 @other; read 0 @compute",
    "a read on another stream": "gather root @link; wait root @compute; read root @compute; read root @other",
    "gathered again, waited for once": "gather 0 @link; wait 0 @compute; read 0 @compute; gather 0 @link; "
    "read 0 @compute",
    "never gathered": "gather 1 @link; wait 1 @compute; read 0 @compute",
    "an event hands it on": "gather 0 @link; wait 0 @other; record e @other; wait event e @compute; read 0 @compute",
    "an event from before the wait": "gather 0 @link; record e @other; wait 0 @other; wait event e @compute; "
    "read 0 @compute",
    "the event of another stream": "gather 0 @link; wait 0 @other; record e @compute; wait event e @compute; "
    "read 0 @compute",
    "an event handed on twice": "gather 0 @link; wait 0 @a; record e @a; wait event e @b; record f @b; "
    "wait event f @compute; read 0 @compute",
    "an event of the round before": "gather 0 @link; wait 0 @other; record e @other; gather 0 @link; "
    "wait event e @compute; read 0 @compute",
    "one event, recorded twice": "gather 0 @link; record e @other; wait 0 @other; record e @other; "
    "wait event e @compute; read 0 @compute",
    "what the taker knew it keeps": "gather 0 @link; wait 0 @compute; record e @other; wait event e @compute; "
    "read 0 @compute",
    "an event on the gathers' own stream": "gather 0 @link; record e @link; wait event e @compute; read 0 @compute",
    "read where it was issued": "gather 0 @link; read 0 @link",
    "one event, recorded on two streams": "gather 0 @link; wait 0 @a; record e @a; record e @b; "
    "wait event e @compute; read 0 @compute",
    "two waits of one stream": "gather 0 @link; gather 1 @link; wait 0 @compute; wait 1 @compute; read 0 @compute",
    "one event for two streams": "gather 0 @link; wait 0 @a; record e @a; wait event e @b; wait event e @compute; "
    "read 0 @compute",
    "a wait for the later of two": "gather 0 @link; gather 1 @link; wait 1 @compute; read 0 @compute",
    "another unit is gathered": "gather 0 @link; wait 0 @compute; gather 1 @link; read 0 @compute",
    "another unit is gathered, after an event": "gather 0 @link; wait 0 @a; record e @a; gather 1 @link; "
    "wait event e @compute; read 0 @compute",
    "two reads without a wait": "gather root @link; read root @compute; read root @compute",
    "an event that is named like a unit": "gather 0 @link; wait 0 @compute; record 0 @compute; read 0 @compute",
}


def racy(log):
    """By walking back from each read along all that came before it: what happened before, without sets that grow."""

    @cache
    def ordered(number, gather):
        """Whether line `number`, or one that is in order before it, waits for the gather of line `gather`."""
        for before in range(number, -1, -1):
            line = log[before]
            if line.stream != log[number].stream:
                continue
            if line.verb == "wait":
                mine = [n for n in range(before) if log[n].verb == "gather" and log[n].what == line.what]
                if mine and mine[-1] == gather:
                    return True
            if line.verb == "wait event":
                records = [n for n in range(before) if log[n].verb == "record" and log[n].what == line.what]
                if records and ordered(records[-1], gather):
                    return True
        return False

    found = []
    for number, line in enumerate(log):
        if line.verb == "read":
            gathers = [n for n in range(number) if log[n].verb == "gather" and log[n].what == line.what]
            if not gathers or not ordered(number, gathers[-1]):
                found.append(number)
    return found


WHY = {
    "nothing missing": "a wait holds for everything that its stream does afterwards",
    "no wait at all": "a gather is under way until somebody has waited for it",
    "two units, one wait": "a wait belongs to one unit's gather, and says nothing of another's",
    "the wait comes after the read": "only a wait that comes before the read helps it, and helps those behind it",
    "another stream has waited": "a wait holds its own stream back, and no other",
    "gathered again, waited for once": "a wait belongs to one gather: that of the last round is over, this one is not",
    "never gathered": "what was never gathered is not there to be read",
    "an event hands it on": "who waits for an event is ordered after all that the event's stream was ordered after",
    "an event from before the wait": "an event says what its stream was ordered after when it was recorded, not later",
    "the event of another stream": "an event speaks of the stream that recorded it, not of all streams",
    "an event handed on twice": "what was learnt from an event is handed on by the next",
    "an event of the round before": "an event of the round before speaks of that round's gather",
    "one event, recorded twice": "an event that is recorded again has the meaning of the last time",
    "what the taker knew it keeps": "an event adds to what a stream is ordered after, and takes nothing away",
    "an event on the gathers' own stream": "the stream that issues a gather goes on while it is under way: its events "
    "say nothing of the data's arrival",
    "read where it was issued": "the stream that has issued a gather has to wait for it like any other",
    "one event, recorded on two streams": "an event means its last `record` alone: what it said before is gone",
    "two waits of one stream": "a second wait adds to what its stream is ordered after, and takes nothing away",
    "one event for two streams": "an event is there for any number of streams: a wait does not use it up",
    "a wait for the later of two": "a wait is for its own unit's gather, not for all that were issued before it",
    "another unit is gathered": "a gather leaves what was waited for of other units as it is",
    "another unit is gathered, after an event": "a gather leaves what events say of other units as it is",
    "two reads without a wait": "every read that comes too early counts, not its unit's first alone",
    "a read on another stream": "reads on all streams count",
    "an event that is named like a unit": "a name is of a unit or of an event by its verb: keep the two apart",
}


def random_log(generator, length):
    """Actions in any order, with more waits than gathers, so that many reads are right."""
    streams, units, log = ["compute", "other", "link"], ["0", "1"], []
    known = {"wait": [], "wait event": []}
    verbs = ["gather", "wait", "wait", "wait", "record", "wait event", "wait event", "read", "read"]
    while len(log) < length:
        stream, verb = generator.choice(streams), generator.choice(verbs)
        if known.get(verb) == []:
            continue
        if verb == "gather":
            known["wait"].append(what := generator.choice(units))
            stream = "link"
        elif verb == "record":
            known["wait event"].append(what := generator.choice("ef"))
        else:
            what = generator.choice(known.get(verb, units))
        log.append(Did(verb, what, stream))
    return log


@check("6.4")
def check_missing_waits(answer, variant):
    """The reads that may come too early, in short logs by name and in random ones, and no others."""
    again = "what one call has learnt is over in the next: begin with empty tables, made inside the function"
    for name, slip in (("no wait at all", None), ("nothing missing", None), ("no wait at all", again)):
        found_in(answer, log_of(LOGS[name]), f"{name} ({LOGS[name]})", slip or WHY[name])
    for name, text in LOGS.items():
        found_in(answer, log_of(text), f"{name} ({text})", WHY[name])
    generator = random.Random(variant.seed)
    for length in (*(range(6, 46)), 8 * variant.size, 16 * variant.size):
        log = random_log(generator, length)
        short = f" ({'; '.join(f'{verb} {what} @{stream}' for verb, what, stream in log)})" if length < 16 else ""
        found_in(answer, log, f"a random log of {length} lines{short}", None)
    slip = "a log may be empty, and has a first line only if it is not"
    try:
        found_in(answer, [], "an empty log", slip)
    except (IndexError, ValueError) as error:
        raise AnswerError(f"an empty log: it raises {error!r}\nlikely slip: {slip}") from error


def found_in(answer, log, what, slip):
    given, wanted = list(log), racy(log)
    got = answer(given)
    if got is not None and not isinstance(got, list):
        raise AnswerError(f"what is returned: expected a list of line numbers, got {type(got).__name__}")
    if got and got in ([number + 1 for number in wanted], [log[number] for number in wanted]):
        slip = "return the numbers of the lines, the first of which is 0"
    expect(f"{what}: lines that read too early", got, wanted, slip=slip)
    expect(f"{what}: whether the log is as it was", given == log, True, slip=THE_CALLERS)
