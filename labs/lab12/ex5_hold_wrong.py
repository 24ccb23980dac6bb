"""Wrong answers to exercise 12.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("12.5", "freed without a wait").diff("""
Frees without a wait.
-         device.current_stream(on).wait_event(read)
""")
wrong("12.5", "first the wait, then the free").diff("""
Frees before the wait.
-         device.current_stream(on).wait_event(read)
-         buffer.untyped_storage().resize_(0)
+         buffer.untyped_storage().resize_(0)
+         device.current_stream(on).wait_event(read)
""")
wrong("12.5", "`synchronize` stops the host").diff("""
Lets the host wait.
-         device.current_stream(on).wait_event(read)
+         read.synchronize()
""")
wrong("12.5", "what was given back has to be forgotten").diff("""
Forgets nothing.
-     kept.clear()
""")
wrong("12.5", "views keep a storage alive").diff("""
Drops the reference alone.
-         buffer.untyped_storage().resize_(0)
""")


@wrong("12.5", "the owner's stream could be handed this memory at once")
def hold():
    """Frees in `keep`."""
    events = []

    def keep(buffer):
        events.append(device.current_stream(buffer.device).record_event())
        buffer.untyped_storage().resize_(0)

    def give_back(on):
        for event in events:
            device.current_stream(on).wait_event(event)
        events.clear()

    return keep, give_back


@wrong("12.5", "an event of now is on the wrong stream")
def hold():
    """Records the event when the buffer is given back."""
    readers = []

    def keep(buffer):
        stream = device.current_stream(buffer.device)
        readers.append((buffer, stream, stream.record_event()))

    def give_back(on):
        for buffer, stream, _ in readers:
            device.current_stream(on).wait_event(stream.record_event())
            buffer.untyped_storage().resize_(0)
        readers.clear()

    return keep, give_back


@wrong("12.5", "an event marks the end of this reader")
def hold():
    """Keeps the buffer, and waits for the reader's stream later."""
    kept = []

    def keep(buffer):
        kept.append((buffer, device.current_stream(buffer.device)))

    def give_back(on):
        for buffer, reader in kept:
            device.current_stream(on).wait_stream(reader)
            buffer.untyped_storage().resize_(0)
        kept.clear()

    return keep, give_back


@wrong("12.5", "the oldest alone")
def hold():
    """Gives back one at a time."""
    kept = []

    def keep(buffer):
        kept.append((buffer, device.current_stream(buffer.device).record_event()))

    def give_back(on):
        if kept:
            buffer, read = kept.pop(0)
            device.current_stream(on).wait_event(read)
            buffer.untyped_storage().resize_(0)

    return keep, give_back


@wrong("12.5", "the last event alone")
def hold():
    """Waits for the latest reader only."""
    kept = []

    def keep(buffer):
        kept.append((buffer, device.current_stream(buffer.device).record_event()))

    def give_back(on):
        if kept:
            device.current_stream(on).wait_event(kept[-1][1])
        for buffer, _ in kept:
            buffer.untyped_storage().resize_(0)
        kept.clear()

    return keep, give_back


@wrong("12.5", "the reader goes on")
def hold():
    """Lets the reader's stream wait."""
    kept = []

    def keep(buffer):
        stream = device.current_stream(buffer.device)
        event = stream.record_event()
        stream.wait_event(event)
        kept.append(buffer)

    def give_back(on):
        for buffer in kept:
            buffer.untyped_storage().resize_(0)
        kept.clear()

    return keep, give_back


@wrong("12.5", "is what this replaces")
def hold():
    """Tells the allocator."""
    kept = []

    def keep(buffer):
        device.command_observers[-1](device.Command("record_stream", device.current_stream(buffer.device), buffer))
        kept.append(buffer)

    def give_back(on):
        for buffer in kept:
            buffer.untyped_storage().resize_(0)
        kept.clear()

    return keep, give_back


wrong("12.5", "`device.free` calls `record_stream`").diff("""
Frees with `record_stream`.
-         buffer.untyped_storage().resize_(0)
+         device.free(buffer)
""")
wrong("12.5", "however little it is").diff("""
Waits until two buffers are there.
-     for buffer, read in kept:
+     for buffer, read in kept if len(kept) > 1 else ():
""")
wrong("12.5", "only a weak reference was kept").diff("""
Refers to buffers weakly.
-     kept.append((buffer, device.current_stream(buffer.device).record_event()))
+     import weakref
+     kept.append((weakref.ref(buffer), device.current_stream(buffer.device).record_event()))

-         buffer.untyped_storage().resize_(0)
+         if buffer() is not None:
+             buffer().untyped_storage().resize_(0)
""")
wrong("12.5", "its latest event at least").diff("""
Waits for one event per buffer, the first.
-     for buffer, read in kept:
-         device.current_stream(on).wait_event(read)
-         buffer.untyped_storage().resize_(0)
+     seen = set()
+     for buffer, read in kept:
+         if id(buffer) not in seen:
+             device.current_stream(on).wait_event(read)
+         seen.add(id(buffer))
+         buffer.untyped_storage().resize_(0)
""")
wrong("12.5", "every kept buffer is given back").diff("""
Gives back what has been read.
-     for buffer, read in kept:
-         device.current_stream(on).wait_event(read)
-         buffer.untyped_storage().resize_(0)
-     kept.clear()
+     for buffer, read in [each for each in kept if each[1].query()]:
+         device.current_stream(on).wait_event(read)
+         buffer.untyped_storage().resize_(0)
+     kept[:] = [each for each in kept if not each[1].query()]
""")
wrong("12.5", "this event is another pair's").diff("""
Keeps one list for all pairs.
- def hold():
-     kept = []
+ def hold(kept=[]):
""")
