"""Wrong answers to exercise 8.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("8.4", "all have to have happened").diff("""
Takes a block back when one of its streams is through.
- block, events = entry
- if all(event.query() for event in events):
+ if any(event.query() for event in entry[1]):
- put_back(memory, block)
+ put_back(memory, entry[0])
""")


@wrong("8.4", "continue after an event that has not happened")
def collect(memory, put_back):
    """Looks at the head of the list only."""
    while memory.waiting and all(event.query() for event in memory.waiting[0][1]):
        put_back(memory, memory.waiting.pop(0)[0])


@wrong("8.4", "asks what has happened")
def collect(memory, put_back):
    """Waits for the device."""
    memory.device.synchronize()
    while memory.waiting:
        put_back(memory, memory.waiting.pop()[0])


wrong("8.4", "otherwise a later call puts it back again").diff("""
Leaves what it takes back on the list.
- for entry in list(memory.waiting):
-     block, events = entry
+ for block, events in memory.waiting:
- memory.waiting.remove(entry)
""")


@wrong("8.4", "a list that loses entries while you go over it")
def collect(memory, put_back):
    """Removes from the list that it goes over."""
    for entry in memory.waiting:
        if all(event.query() for event in entry[1]):
            memory.waiting.remove(entry)
            put_back(memory, entry[0])


@wrong("8.4", "and was never called")
def collect(memory, put_back):
    """Takes everything back, happened or not."""
    while memory.waiting:
        put_back(memory, memory.waiting.pop(0)[0])


@wrong("8.4", "the blocks have to be free again")
def collect(memory, put_back):
    """Strikes them off and loses them."""
    memory.waiting[:] = [entry for entry in memory.waiting if not all(event.query() for event in entry[1])]


@wrong("8.4", "two queries can give two answers")
def collect(memory, put_back):
    """Asks once to put back, and once more to strike off."""
    for block, events in memory.waiting:
        if all(event.query() for event in events):
            put_back(memory, block)
    memory.waiting = [entry for entry in memory.waiting if not all(event.query() for event in entry[1])]


wrong("8.4", "not the last of them alone").diff("""
Looks at the last event of each.
- block, events = entry
- if all(event.query() for event in events):
+ if entry[1][-1].query():
- put_back(memory, block)
+ put_back(memory, entry[0])
""")
wrong("8.4", "later ones may be free as well").diff("""
Stops after one block.
- block, events = entry
- if all(event.query() for event in events):
+ if all(event.query() for event in entry[1]):
- put_back(memory, block)
+ put_back(memory, entry[0])
+ return
""")
wrong("8.4", "those in the middle as well").diff("""
Asks for the first event and the last.
- if all(event.query() for event in events):
+ if events[0].query() and events[-1].query():
""")
wrong("8.4", "may have happened by the next call").diff("""
Keeps each event's first answer.
- if all(event.query() for event in events):
+ for event in events:
+     event.done = getattr(event, "done", None) or (event.query() if not hasattr(event, "done") else False)
+ if all(event.done for event in events):
""")
wrong("8.4", "those that have not happened stay with it").diff("""
Goes on waiting for the first event that has not happened, and forgets the others.
- if all(event.query() for event in events):
-     memory.waiting.remove(entry)
+ still = [event for event in events if not event.query()]
+ memory.waiting.remove(entry)
+ if still:
+     memory.waiting.append((block, still[:1]))
+ else:
""")
wrong("8.4", "use a loop").diff("""
Begins anew after each block, by a call.
- put_back(memory, block)
+ put_back(memory, block)
+ return collect(memory, put_back)
""")
wrong("8.4", "is waiting for it: query it once").diff("""
Asks until the events have happened.
- if all(event.query() for event in events):
-     memory.waiting.remove(entry)
-     put_back(memory, block)
+ while not all(event.query() for event in events):
+     pass
+ memory.waiting.remove(entry)
+ put_back(memory, block)
""")
