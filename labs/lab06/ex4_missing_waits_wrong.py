"""Wrong answers to exercise 6.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("6.4", "only a wait that comes before the read helps it")
def missing_waits(log):
    """Asks whether there is a wait for the unit at all."""
    waited = {(line.what, line.stream) for line in log if line.verb == "wait"}
    return [n for n, line in enumerate(log) if line.verb == "read" and (line.what, line.stream) not in waited]


@wrong("6.4", "says nothing of another's")
def missing_waits(log):
    """A wait, of whatever unit, makes everything whole."""
    waited, found = set(), []
    for number, line in enumerate(log):
        if line.verb == "wait":
            waited.add(line.stream)
        if line.verb == "read" and line.stream not in waited:
            found.append(number)
    return found


@wrong("6.4", "a wait holds its own stream back, and no other")
def missing_waits(log):
    """Forgets who waited."""
    last, sure, found = {}, set(), []
    for number, line in enumerate(log):
        if line.verb == "gather":
            last[line.what] = number
        if line.verb == "wait":
            sure.add(last[line.what])
        if line.verb == "read" and last.get(line.what) not in sure:
            found.append(number)
    return found


@wrong("6.4", "that of the last round is over, this one is not")
def missing_waits(log):
    """Once waited for, always there."""
    gathered, waited, found = set(), set(), []
    for number, line in enumerate(log):
        if line.verb == "gather":
            gathered.add(line.what)
        if line.verb == "wait":
            waited.add((line.what, line.stream))
        if line.verb == "read" and (line.what, line.stream) not in waited:
            found.append(number)
    return found


@wrong("6.4", "what was never gathered is not there to be read")
def missing_waits(log):
    """Takes a unit that was never gathered for one that is there."""
    sure, events, last, found = {}, {}, {}, []
    for number, line in enumerate(log):
        known = sure.setdefault(line.stream, set())
        if line.verb == "gather":
            last[line.what] = number
        elif line.verb == "wait":
            known.add(last[line.what])
        elif line.verb == "record":
            events[line.what] = set(known)
        elif line.verb == "wait event":
            known |= events[line.what]
        elif line.what in last and last[line.what] not in known:
            found.append(number)
    return found


@wrong("6.4", "is ordered after all that the event's stream was ordered after")
def missing_waits(log):
    """Knows no events."""
    sure, last, found = {}, {}, []
    for number, line in enumerate(log):
        if line.verb == "gather":
            last[line.what] = number
        if line.verb == "wait":
            sure.setdefault(line.stream, set()).add(last[line.what])
        if line.verb == "read" and last.get(line.what) not in sure.get(line.stream, ()):
            found.append(number)
    return found


@wrong("6.4", "when it was recorded, not later")
def missing_waits(log):
    """An event shares the set of its stream, which goes on growing."""
    sure, events, last, found = {}, {}, {}, []
    for number, line in enumerate(log):
        known = sure.setdefault(line.stream, set())
        if line.verb == "gather":
            last[line.what] = number
        elif line.verb == "wait":
            known.add(last[line.what])
        elif line.verb == "record":
            events[line.what] = known
        elif line.verb == "wait event":
            known |= events[line.what]
        elif last.get(line.what) not in known:
            found.append(number)
    return found


@wrong("6.4", "what was learnt from an event is handed on by the next")
def missing_waits(log):
    """An event hands on its stream's own waits, not what that stream has learnt from others."""
    own, sure, events, last, found = {}, {}, {}, {}, []
    for number, line in enumerate(log):
        known = sure.setdefault(line.stream, set())
        if line.verb == "gather":
            last[line.what] = number
        elif line.verb == "wait":
            known.add(last[line.what])
            own.setdefault(line.stream, set()).add(last[line.what])
        elif line.verb == "record":
            events[line.what] = set(own.get(line.stream, ()))
        elif line.verb == "wait event":
            known |= events[line.what]
        elif last.get(line.what) not in known:
            found.append(number)
    return found


@wrong("6.4", "an event adds to what a stream is ordered after")
def missing_waits(log):
    """An event replaces what its taker knew."""
    sure, events, last, found = {}, {}, {}, []
    for number, line in enumerate(log):
        known = sure.setdefault(line.stream, set())
        if line.verb == "gather":
            last[line.what] = number
        elif line.verb == "wait":
            known.add(last[line.what])
        elif line.verb == "record":
            events[line.what] = set(known)
        elif line.verb == "wait event":
            sure[line.stream] = set(events[line.what])
        elif last.get(line.what) not in known:
            found.append(number)
    return found


@wrong("6.4", "goes on while it is under way")
def missing_waits(log):
    """Takes a gather for done where it was issued, so that an event on its stream says it has arrived."""
    sure, events, last, found = {}, {}, {}, []
    for number, line in enumerate(log):
        known = sure.setdefault(line.stream, set())
        if line.verb == "gather":
            last[line.what] = number
            known.add(number)
        elif line.verb == "wait":
            known.add(last[line.what])
        elif line.verb == "record":
            events[line.what] = set(known)
        elif line.verb == "wait event":
            known |= events[line.what]
        elif last.get(line.what) not in known:
            found.append(number)
    return found


@wrong("6.4", "has to wait for it like any other")
def missing_waits(log):
    """Takes the stream that has issued a gather to be ordered after it."""
    sure, events, last, issuer, found = {}, {}, {}, {}, []
    for number, line in enumerate(log):
        known = sure.setdefault(line.stream, set())
        if line.verb == "gather":
            last[line.what], issuer[line.what] = number, line.stream
        elif line.verb == "wait":
            known.add(last[line.what])
        elif line.verb == "record":
            events[line.what] = set(known)
        elif line.verb == "wait event":
            known |= events[line.what]
        elif issuer.get(line.what) != line.stream and last.get(line.what) not in known:
            found.append(number)
    return found


@wrong("6.4", "an event means its last `record` alone")
def missing_waits(log):
    """An event that is recorded again adds to what it said."""
    sure, events, last, found = {}, {}, {}, []
    for number, line in enumerate(log):
        known = sure.setdefault(line.stream, set())
        if line.verb == "gather":
            last[line.what] = number
        elif line.verb == "wait":
            known.add(last[line.what])
        elif line.verb == "record":
            events.setdefault(line.what, set()).update(known)
        elif line.verb == "wait event":
            known |= events[line.what]
        elif last.get(line.what) not in known:
            found.append(number)
    return found


wrong("6.4", "and change nothing").diff("""
Takes the lines off the log that it was given.
- sure = {}  # by stream, the gathers that are over before whatever it does next
- events = {}
- last = {}
- found = []
- for number, line in enumerate(log):
+ sure, events, last, found, number = {}, {}, {}, [], 0
+ while log:
+     line = log.pop(0)
          found.append(number)
+ number += 1
""")
wrong("6.4", "keep the two apart").diff("""
Notes units and events in one table.
- events = {}
- last = {}
- found = []
+ last, found = {}, []
+ events = last
- case "read" if last.get(line.what) not in known:
+ case "read" if not isinstance(last.get(line.what), int) or last[line.what] not in known:
""")
wrong("6.4", "begin with empty tables").diff("""
Keeps its tables from call to call.
- def missing_waits(log):
-     sure = {}  # by stream, the gathers that are over before whatever it does next
-     events = {}
-     last = {}
+ def missing_waits(log, sure={}, events={}, last={}):
""")
wrong("6.4", "a wait does not use it up").diff("""
Takes an event for over when a stream has waited for it.
- known |= events[line.what]
+ known |= events.pop(line.what, set())
""")
wrong("6.4", "not for all that were issued before it").diff("""
Takes a wait for one of all gathers so far.
- known.add(last[line.what])
+ known |= {number for number in last.values() if number <= last[line.what]}
""")
wrong("6.4", "return the numbers of the lines").diff("""
Returns the lines.
- found.append(number)
+ found.append(line)
""")
wrong("6.4", "not its unit's first alone").diff("""
Finds each unit once.
- found.append(number)
+ if line.what not in [log[each].what for each in found]:
+     found.append(number)
""")
wrong("6.4", "a gather leaves what was waited for").diff("""
Forgets all waits when anything is gathered.
  last[line.what] = number
+ for each in sure.values():
+     each.clear()
""")
wrong("6.4", "a second wait adds").diff("""
A stream is sure of the gather alone that it has waited for last.
- known.add(last[line.what])
+ sure[line.stream] = {last[line.what]}
""")
wrong("6.4", "reads on all streams count").diff("""
Looks at what the compute stream reads.
- case "read" if last.get(line.what) not in known:
+ case "read" if line.stream == "compute" and last.get(line.what) not in known:
""")
wrong("6.4", "whether the log is as it was").diff("""
Marks lines in the log that it was given.
- found.append(number)
+ found.append(number)
+ log[number] = line._replace(verb="early read")
""")
wrong("6.4", "has a first line only if it is not").diff("""
Begins with the first line.
- sure = {}  # by stream, the gathers that are over before whatever it does next
+ sure = {log[0].stream: set()}
""")
