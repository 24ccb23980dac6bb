"""Exercise 6.1: When does each piece finish?"""

import random
from itertools import accumulate
from typing import NamedTuple

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference

from .shared import THE_CALLERS


class Piece(NamedTuple):
    """A piece of work, as in the notebook's set-up cell."""

    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    host_waits: bool = False


@reference(
    "6.1",
    hints=(
        "Keep three things: where the host is, when each stream is free, and when each piece was over. A piece starts "
        "at the latest of what it has to wait for; nothing else delays it.",
        "In the loop the host moves on by `launch`. Then `start = max(host, free.get(piece.stream, 0.0), "
        "*(ends[number] for number in piece.after))`. Where `piece.host_waits` the host is then where the piece ends.",
    ),
)
def finish_times(queued: list[Piece], launch: float) -> list[float]:
    """Compute the time at which each piece of work finishes, in seconds.

    Args:
        queued: the pieces in the order in which the host queues them, on any number of streams.
        launch: the number of seconds that the host needs to queue a piece.

    The host begins at 0 and queues one piece after the other, each in `launch` seconds; after a piece with
    `host_waits`, it continues only when that piece has finished. A piece starts as soon as it has been queued, all
    earlier pieces on its stream have finished, and all pieces in its `after` have finished.
    """
    host, free, ends = 0.0, dict[str, float](), list[float]()
    for piece in queued:
        host += launch
        start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in piece.after))
        ends.append(start + piece.seconds)
        free[piece.stream] = ends[-1]
        if piece.host_waits:
            host = ends[-1]
    return ends


def finish(queued, launch, *, fifo=True, events=True, host=True, blocked=False, early=False, stops=True, whole=False):
    """By going over the pieces until nothing moves; the flags leave something out, as usual mistakes do."""
    starts = [0.0] * len(queued)
    issued = [0.0] * len(queued)
    while True:
        before = (list(starts), list(issued))
        for k, piece in enumerate(queued):
            ends = [start + each.seconds for start, each in zip(starts, queued, strict=True)]
            free = issued[k - 1] if k else -launch if early else 0.0  # the host, when it comes to this piece
            if k and queued[k - 1].host_waits and stops:
                over = max(ends[:k]) if whole else ends[k - 1]
                free = max(free, over - early * launch)
            issued[k] = free + launch
            if blocked:
                issued[k] = max([issued[k], *(ends[j] for j in piece.after)])
            same = [j for j in range(k) if queued[j].stream == piece.stream] if fifo else []
            reasons = [issued[k]] if host else []
            reasons += [ends[j] for j in same]
            reasons += [ends[j] for j in piece.after] if events else []
            starts[k] = max(reasons, default=0.0)
        if before == (starts, issued):
            return [start + piece.seconds for start, piece in zip(starts, queued, strict=True)]


SINGLE = [Piece("a", 2.0), Piece("a", 1.0), Piece("a", 3.0)]
SIDE = [Piece("a", 4.0), Piece("b", 3.0), Piece("a", 1.0), Piece("b", 1.0)]
EVENTS = [Piece("link", 2.0), Piece("compute", 3.0, (0,)), Piece("link", 4.0), Piece("compute", 1.0, (2,))]
RUNS_ON = [Piece("link", 5.0), Piece("compute", 1.0, (0,)), Piece("other", 2.0)]
SLOW_HOST = [Piece("a", 0.25), Piece("b", 0.5), Piece("a", 0.25), Piece("a", 0.25)]
STOPS = [Piece("a", 3.0, (), True), Piece("b", 1.0), Piece("a", 1.0)]
SEVERAL = [Piece("a", 1.0), Piece("b", 5.0), Piece("c", 2.0), Piece("d", 1.0, (0, 1, 2)), Piece("e", 1.0, (3, 2, 0))]
STOPS_FOR_ONE = [Piece("b", 5.0), Piece("a", 1.0, (), True), Piece("a", 1.0)]

PROGRAMS = {
    "one stream": (SINGLE, 0.0),
    "two streams, no events": (SIDE, 0.0),
    "two streams with events": (EVENTS, 0.0),
    "a stream that waits, and another that does not": (RUNS_ON, 0.0),
    "pieces that wait for several": (SEVERAL, 0.0),
    "short pieces and a slow host": (SLOW_HOST, 1.0),
    "a piece that the host waits for": (STOPS, 0.5),
    "a piece that the host waits for, beside a longer one": (STOPS_FOR_ONE, 0.5),
    "nothing queued": ([], 0.5),
}

HOST_SLIPS = {
    "the host has to come to a piece: every piece before it took a launch, and so does it": {"host": False},
    "a stream takes one piece at a time, in the order in which they were queued": {"fifo": False},
    "`after` is forgotten: a stream holds its piece back until those events are over": {"events": False},
    "an event holds the stream back, not the host: what comes later on other streams is issued meanwhile": {
        "blocked": True
    },
    "a piece cannot start before it is queued, so its own `launch` comes first": {"early": True},
    "`host_waits` is forgotten: the host issues nothing before such a piece is over": {"stops": False},
    "the host waits for this piece, and not for what else is queued on the device": {"whole": True},
}


def one_after_another(queued):
    return list(accumulate(piece.seconds for piece in queued))


@check("6.1")
def check_finish_times(answer, variant):
    """Each piece starts at the latest of host, stream and events, on seven programs and a long random one."""
    generator = random.Random(variant.seed)
    long = [
        Piece(
            generator.choice("abc"),
            float(generator.randrange(1, 9)),
            tuple(sorted(generator.sample(range(k), min(k, generator.randrange(5))))),
            generator.random() < 0.1,
        )
        for k in range(4 * variant.size)
    ]
    short = [piece._replace(seconds=piece.seconds / 3e7) for piece in SLOW_HOST]
    more = {"a long one": (long, 0.5), "pieces shorter than a microsecond": (short, 1 / 3e7)}
    for name, (queued, launch) in {**PROGRAMS, **more}.items():
        wanted = finish(queued, launch)
        usual = {text: finish(queued, launch, **flags) for text, flags in HOST_SLIPS.items()}
        usual["one after another, as on a CPU: streams run side by side"] = one_after_another(queued)
        few = [piece._replace(after=piece.after[:2]) for piece in queued]
        usual["a piece waits for all in its `after`, however many they are"] = finish(few, launch)
        last = [piece._replace(after=tuple(sorted(piece.after)[-1:])) for piece in queued]
        usual["of the pieces in `after`, the one with the highest number need not finish last"] = finish(last, launch)
        slips = {text: ends for text, ends in usual.items() if ends != wanted}
        given = list(queued)
        try:
            got = answer(given, launch)
        except IndexError as error:
            slip = "the list may be empty, and has a first and a last piece only if it is not"
            raise AnswerError(f"{name}: expected a list, got IndexError: {error}\nlikely slip: {slip}") from error
        if isinstance(got, list):
            got = [float(end) if isinstance(end, int | float) else end for end in got]
        slip = "times are fractions of a second, however short: round nothing" if queued is short else None
        expect(f"{name}, when each piece is over, in seconds", got, wanted, slips=slips, slip=slip)
        expect(f"{name}, pieces on the list afterwards", len(given), len(queued), slip=THE_CALLERS)
