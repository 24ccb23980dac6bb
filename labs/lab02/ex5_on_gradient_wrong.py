"""Wrong answers to exercise 2.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("2.5", "out of turn")
def on_gradient(param, reducer):
    """Launches a bucket as soon as it is full, in whatever order this rank's buckets fill."""
    if not reducer.sync:
        return
    number = reducer.bucket_of[param]
    reducer.missing[number] -= 1
    if reducer.missing[number] == 0:
        reducer.in_flight.append(reducer.start(reducer.buckets[number]))
    if len(reducer.in_flight) == len(reducer.buckets):
        at_end_of_backward(reducer.finish)


wrong("2.5", "wait in finish only").diff("""
Waits for each bucket at once: right values, no overlap.
- buckets, in_flight = reducer.buckets, reducer.in_flight

- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
-     in_flight.append(reducer.start(buckets[len(in_flight)]))
- if len(in_flight) == len(buckets):
+ while len(reducer.in_flight) < len(reducer.buckets) and reducer.missing[len(reducer.in_flight)] == 0:
+     flat, handle = reducer.start(reducer.buckets[len(reducer.in_flight)])
+     handle.wait()
+     reducer.in_flight.append((flat, handle))
+ if len(reducer.in_flight) == len(reducer.buckets):
""")
wrong("2.5", "leave with the last gradient").diff("""
Waits for all gradients before the first launch: rung 2 inside a hook.
- buckets, in_flight = reducer.buckets, reducer.in_flight

- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
-     in_flight.append(reducer.start(buckets[len(in_flight)]))
- if len(in_flight) == len(buckets):
+ if sum(reducer.missing) == 0:
+     for bucket in reducer.buckets:
+         reducer.in_flight.append(reducer.start(bucket))
""")
wrong("2.5", "the last bucket is never launched").diff("""
Launches a bucket when a gradient of a later one arrives, so never flushes the last.
- buckets, in_flight = reducer.buckets, reducer.in_flight

- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
-     in_flight.append(reducer.start(buckets[len(in_flight)]))
- if len(in_flight) == len(buckets):
+ behind = [n for n in range(len(reducer.buckets) - 1) if reducer.missing[n] == 0]
+ if not any(reducer.missing[:-1]) or behind[-1:] == [len(reducer.in_flight)]:
+     for number in range(len(reducer.in_flight), len(behind)):
+         reducer.in_flight.append(reducer.start(reducer.buckets[number]))
+ if len(reducer.in_flight) == len(reducer.buckets) - 1 and sum(reducer.missing) == 0:
""")


@wrong("2.5", "has to leave at once if reducer.sync is False")
def on_gradient(param, reducer):
    """Does not look at `sync`: every micro-batch is reduced."""
    reducer.missing[reducer.bucket_of[param]] -= 1
    while len(reducer.in_flight) < len(reducer.buckets) and reducer.missing[len(reducer.in_flight)] == 0:
        reducer.in_flight.append(reducer.start(reducer.buckets[len(reducer.in_flight)]))
    if len(reducer.in_flight) == len(reducer.buckets):
        at_end_of_backward(reducer.finish)


@wrong("2.5", "a gradient that is only accumulated is not counted")
def on_gradient(param, reducer):
    """Counts under no_sync as well, so that the next backward finds its counters spent."""
    reducer.missing[reducer.bucket_of[param]] -= 1
    if not reducer.sync:
        return
    while len(reducer.in_flight) < len(reducer.buckets) and reducer.missing[len(reducer.in_flight)] == 0:
        reducer.in_flight.append(reducer.start(reducer.buckets[len(reducer.in_flight)]))
    if len(reducer.in_flight) == len(reducer.buckets):
        at_end_of_backward(reducer.finish)


@wrong("2.5", "the means stay in the buffers")
def on_gradient(param, reducer):
    """Launches all and finishes none."""
    if not reducer.sync:
        return
    reducer.missing[reducer.bucket_of[param]] -= 1
    while len(reducer.in_flight) < len(reducer.buckets) and reducer.missing[len(reducer.in_flight)] == 0:
        reducer.in_flight.append(reducer.start(reducer.buckets[len(reducer.in_flight)]))


@wrong("2.5", "holds up the rest of backward")
def on_gradient(param, reducer):
    """Finishes inside the last hook: right values, but backward still has work that could run meanwhile."""
    if not reducer.sync:
        return
    reducer.missing[reducer.bucket_of[param]] -= 1
    while len(reducer.in_flight) < len(reducer.buckets) and reducer.missing[len(reducer.in_flight)] == 0:
        reducer.in_flight.append(reducer.start(reducer.buckets[len(reducer.in_flight)]))
    if len(reducer.in_flight) == len(reducer.buckets):
        reducer.finish()


wrong("2.5", "never left: after each launch look at the next").diff("""
Launches at most one bucket a gradient, so one that was full before its turn stays behind.
- buckets, in_flight = reducer.buckets, reducer.in_flight

- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
-     in_flight.append(reducer.start(buckets[len(in_flight)]))
- if len(in_flight) == len(buckets):
+ if len(reducer.in_flight) < len(reducer.buckets) and reducer.missing[len(reducer.in_flight)] == 0:
+     reducer.in_flight.append(reducer.start(reducer.buckets[len(reducer.in_flight)]))
+ if len(reducer.in_flight) == len(reducer.buckets):
""")
wrong("2.5", "after 6 gradients, rest of backward, return]").diff("""
Queues `finish` once in a lifetime.
- buckets, in_flight = reducer.buckets, reducer.in_flight
+ b, f = reducer.buckets, reducer.in_flight
- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
-     in_flight.append(reducer.start(buckets[len(in_flight)]))
- if len(in_flight) == len(buckets):
+ while len(f) < len(b) and reducer.missing[len(f)] == 0:
+     f.append(reducer.start(b[len(f)]))
+ if len(f) == len(b) and not hasattr(reducer, "queued"):
+     reducer.queued = True
""")
wrong("2.5", "the hook serves any number of backwards").diff("""
Remembers the parameters that it has seen, for ever.
- buckets, in_flight = reducer.buckets, reducer.in_flight
+ if not hasattr(reducer, "done"):
+     reducer.done = set()
+ reducer.done.add(param)
+ b, f = reducer.buckets, reducer.in_flight
- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
-     in_flight.append(reducer.start(buckets[len(in_flight)]))
- if len(in_flight) == len(buckets):
+ while len(f) < len(b) and all(p in reducer.done for p in b[len(f)]):
+     f.append(reducer.start(b[len(f)]))
+ if len(f) == len(b):
""")


@wrong("2.5", "finish waits for buckets that have left")
def on_gradient(param, reducer):
    """Queues finish when the first bucket leaves."""
    if not reducer.sync:
        return
    b, f = reducer.buckets, reducer.in_flight
    reducer.missing[reducer.bucket_of[param]] -= 1
    while len(f) < len(b) and reducer.missing[len(f)] == 0:
        f.append(reducer.start(b[len(f)]))
        if len(f) == 1:
            at_end_of_backward(reducer.finish)


wrong("2.5", "got [rest of backward, return]").diff("""
Keeps the counts of the first backward, where `finish` makes new ones.
- reducer.missing[reducer.bucket_of[param]] -= 1
- while len(in_flight) < len(buckets) and reducer.missing[len(in_flight)] == 0:
+ reducer.counts = missing = getattr(reducer, "counts", reducer.missing)
+ missing[reducer.bucket_of[param]] -= 1
+ while len(in_flight) < len(buckets) and missing[len(in_flight)] == 0:
""")
