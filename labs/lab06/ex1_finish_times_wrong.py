"""Wrong answers to exercise 6.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("6.1", "every piece before it took a launch").diff("""
Streams and events, and a host that takes no time.
- host, free, ends = 0.0, dict[str, float](), list[float]()
+ free, ends = {}, []
- host += launch
- start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in piece.after))
+ start = max(free.get(piece.stream, 0.0), 0.0, *(ends[number] for number in piece.after))
- if piece.host_waits:
-     host = ends[-1]
""")
wrong("6.1", "a stream takes one piece at a time").diff("""
Every piece starts as soon as it is issued and its events are over.
- host, free, ends = 0.0, dict[str, float](), list[float]()
+ host, ends = 0.0, []
- start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in piece.after))
+ start = max(host, 0.0, *(ends[number] for number in piece.after))
- free[piece.stream] = ends[-1]

- host = ends[-1]
+ host = max(host, ends[-1])
""")


@wrong("6.1", "streams run side by side")
def finish_times(queued, launch):
    """One queue for all."""
    ends, now = [], 0.0
    for piece in queued:
        now += piece.seconds
        ends.append(now)
    return ends


wrong("6.1", "not the host: what comes later on other streams is issued meanwhile").diff("""
The host stands still for events.
- host, free, ends = 0.0, dict[str, float](), list[float]()
+ host, free, ends = 0.0, {}, []
- start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in piece.after))
- ends.append(start + piece.seconds)
+ host = max(host, *(ends[number] for number in piece.after), 0.0)
+ ends.append(max(host, free.get(piece.stream, 0.0)) + piece.seconds)
- host = ends[-1]
+ host = max(host, ends[-1])
""")
wrong("6.1", "a stream holds its piece back until those events are over").diff("""
No events.
- host, free, ends = 0.0, dict[str, float](), list[float]()
+ host, free, ends = 0.0, {}, []
- start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in piece.after))
- ends.append(start + piece.seconds)
+ ends.append(max(host, free.get(piece.stream, 0.0)) + piece.seconds)
- host = ends[-1]
+ host = max(host, ends[-1])
""")
wrong("6.1", "the host issues nothing before such a piece is over").diff("""
Never stops the host.
- host, free, ends = 0.0, dict[str, float](), list[float]()
+ host, free, ends = 0.0, {}, []
- if piece.host_waits:
-     host = ends[-1]
""")
wrong("6.1", "a piece cannot start before it is queued").diff("""
Counts the launch of a piece behind the piece.
- host, free, ends = 0.0, dict[str, float](), list[float]()
+ host, free, ends = 0.0, {}, []
- host += launch

  free[piece.stream] = ends[-1]
+ host += launch
- host = ends[-1]
+ host = max(host, ends[-1])
""")
wrong("6.1", "and not for what else is queued on the device").diff("""
Where the host waits for a piece, it waits for the whole device.
- host, free, ends = 0.0, dict[str, float](), list[float]()
+ host, free, ends = 0.0, {}, []
- host = ends[-1]
+ host = max(ends)
""")
wrong("6.1", "and change nothing").diff("""
Takes the pieces off the list that it was given.
- host, free, ends = 0.0, dict[str, float](), list[float]()
- for piece in queued:
+ host, free, ends = 0.0, {}, []
+ while queued:
+     piece = queued.pop(0)
""")


@wrong("6.1", "the list may be empty")
def finish_times(queued, launch):
    """Looks at the piece that follows the last."""
    host, free, ends = launch, {}, []
    for piece, _ in zip(queued, [*queued[1:], queued[-1]], strict=False):
        end = max([host, free.get(piece.stream, 0.0)] + [ends[n] for n in piece.after]) + piece.seconds
        free[piece.stream] = end
        ends.append(end)
        host = (end if piece.host_waits else host) + launch
    return ends


wrong("6.1", "round nothing").diff("""
Rounds to microseconds.
- ends.append(start + piece.seconds)
+ ends.append(round(start + piece.seconds, 6))
""")
wrong("6.1", "all in its `after`, however many").diff("""
Waits for two events at most.
- start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in piece.after))
+ start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in piece.after[:2]))
""")
wrong("6.1", "the one with the highest number need not finish last").diff("""
Waits for the latest of the pieces that it has to wait for.
- start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in piece.after))
+ start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in sorted(piece.after)[-1:]))
""")
