"""Wrong answers to lab 06, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 6.1

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


# 6.2

wrong("6.2", "`synchronize` stops the host").diff("""
The host waits for the event.
- taker.wait_event(giver.record_event())
+ giver.record_event().synchronize()
""")
wrong("6.2", "the wrong way round").diff("""
Lets the giver wait for the taker.
- taker.wait_event(giver.record_event())
+ giver.wait_event(taker.record_event())
""")
wrong("6.2", "the event was recorded on the current stream").diff("""
An event of the current stream.
- taker.wait_event(giver.record_event())
+ event = device.new_event(torch.device("cpu"))
+ event.record()
+ taker.wait_event(event)
""")
wrong("6.2", "it is the current stream that waits").diff("""
Lets the current stream wait.
- taker.wait_event(giver.record_event())
+ event = giver.record_event()
+ event.wait()
""")


@wrong("6.2", "waits for its own event")
def order_streams(giver, taker):
    """Records and waits on one stream."""
    with device.on_stream(taker):
        event = device.new_event(torch.device("cpu"))
        event.record()
        taker.wait_event(event)


wrong("6.2", "waited before the event was recorded").diff("""
Waits for an event that is recorded a line later.
- taker.wait_event(giver.record_event())
+ event = device.new_event(torch.device("cpu"))
+ taker.wait_event(event)
+ event.record(giver)
""")
wrong("6.2", "an event alone holds nobody back").diff("""
Leaves the event and tells nobody.
- taker.wait_event(giver.record_event())
+ giver.record_event()
""")
wrong("6.2", "nothing was asked of either stream").diff("""
Goes to the taker, as if that put it behind the giver.
- taker.wait_event(giver.record_event())
+ with device.on_stream(taker):
+     pass
""")
wrong("6.2", "until the whole device has done all that is queued").diff("""
Waits for the device first, to be safe.
  def order_streams(giver, taker):
+     device.synchronize(torch.device("cpu"))
""")


@wrong("6.2", "the host polls the event")
def order_streams(giver, taker):
    """The host waits by asking again and again."""
    event = giver.record_event()
    while not event.query():
        pass
    taker.wait_event(event)


wrong("6.2", "a barrier").diff("""
Lets each wait for the other.
  taker.wait_event(giver.record_event())
+ giver.wait_event(taker.record_event())
""")
wrong("6.2", "an old event").diff("""
Records an event once and for all.
- taker.wait_event(giver.record_event())
+ if not hasattr(giver, "event"):
+     giver.event = giver.record_event()
+ taker.wait_event(giver.event)
""")
wrong("6.2", "an event of the CPU orders nothing on a GPU").diff("""
Makes an event of the CPU, whatever the streams are of.
- taker.wait_event(giver.record_event())
+ event = device.new_event(torch.device("cpu"))
+ event.record(giver)
+ event.wait(taker)
""")
wrong("6.2", "a stream that is entered has to be left again").diff("""
Goes to the taker and stays there.
- taker.wait_event(giver.record_event())
+ taker.__enter__()
+ giver.record_event().wait()
""")

wrong("6.2", "either stream may be the current one").diff("""
Takes an order on the current stream for one that is there already.
  def order_streams(giver, taker):
+     if device.current_stream(torch.device("cpu")) in (giver, taker):
+         return
""")
wrong("6.2", "only the giver's counts").diff("""
Lets the taker wait for the current stream as well.
  taker.wait_event(giver.record_event())
+ taker.wait_stream(device.current_stream(torch.device("cpu")))
""")
wrong("6.2", "the current stream waits as well").diff("""
Lets the current stream wait as well.
- taker.wait_event(giver.record_event())
+ event = giver.record_event()
+ taker.wait_event(event)
+ device.current_stream(torch.device("cpu")).wait_event(event)
""")

# 6.3

wrong("6.3", "stands still until the data is there").diff("""
Lab 05's: waits for the message that it sends.
-     return comm.all_gather(flat.full.data, flat.shard.data, group)
+     handle = comm.all_gather(flat.full.data, flat.shard.data, group)
+     handle.wait()
+ return handle
""")
wrong("6.3", "Allocate inside").diff("""
Allocates on the current stream.
  def gather(flat, group, stream):
+     device.allocate(flat.full)
- device.allocate(flat.full)
""")
wrong("6.3", "issued on the current stream").diff("""
Takes the stream for the allocation alone.
-     return comm.all_gather(flat.full.data, flat.shard.data, group)
+ return comm.all_gather(flat.full.data, flat.shard.data, group)
""")
wrong("6.3", "would start when all compute queued so far is over").diff("""
Orders the gather behind all compute, to be safe.
  def gather(flat, group, stream):
+     stream.wait_stream(device.current_stream(flat.full.device))
""")
wrong("6.3", "the compute stream waits: it may, just before it uses the data").diff("""
Lets the compute stream wait for the gathers as soon as one is issued.
-     return comm.all_gather(flat.full.data, flat.shard.data, group)
+     handle = comm.all_gather(flat.full.data, flat.shard.data, group)
+ device.current_stream(flat.full.device).wait_stream(stream)
+ return handle
""")
wrong("6.3", "without the handle nobody can wait").diff("""
Returns nothing.
- return comm.all_gather(flat.full.data, flat.shard.data, group)
+ comm.all_gather(flat.full.data, flat.shard.data, group)
""")
wrong("6.3", "not into a buffer to copy from").diff("""
Gathers into a second buffer.
-     return comm.all_gather(flat.full.data, flat.shard.data, group)
+     whole = device.empty(flat.full.numel(), flat.full.dtype, "unsharded", flat.full.device)
+     handle = comm.all_gather(whole, flat.shard.data, group)
+     flat.full.data.copy_(whole)
+ return handle
""")
wrong("6.3", "`device.allocate` first").diff("""
Forgets that the buffer has no memory yet.
- device.allocate(flat.full)
""")
wrong("6.3", "until the whole device has done all that is queued").diff("""
Waits for the device first, to be safe.
  def gather(flat, group, stream):
+     device.synchronize(flat.full.device)
""")


@wrong("6.3", "a stream that is entered has to be left again")
def gather(flat, group, stream):
    """Goes to the stream and stays there."""
    stream.__enter__()
    device.allocate(flat.full)
    return comm.all_gather(flat.full.data, flat.shard.data, group)


wrong("6.3", "for a change of what it has saved").diff("""
Gathers into the tensor whose views autograd has saved.
- return comm.all_gather(flat.full.data, flat.shard.data, group)
+ return comm.all_gather(flat.full, flat.shard.data, group)
""")
wrong("6.3", "autograd has no part in it").diff("""
Gathers the parameter in place of its data.
- return comm.all_gather(flat.full.data, flat.shard.data, group)
+ return comm.all_gather(flat.full.data, flat.shard, group)
""")

wrong("6.3", "an element has not always 4 bytes").diff("""
Gives every element four bytes.
- device.allocate(flat.full)
+ flat.full.untyped_storage().resize_(4 * flat.full.numel())
""")
wrong("6.3", "the handle of an earlier one tells nothing of this").diff("""
Gathers each unit once.
- def gather(flat, group, stream):
+ def gather(flat, group, stream, handles={}):
+     if flat in handles:
+         return handles[flat]
- return comm.all_gather(flat.full.data, flat.shard.data, group)
+ handles[flat] = comm.all_gather(flat.full.data, flat.shard.data, group)
+ return handles[flat]
""")
wrong("6.3", "neither cloned nor cast").diff("""
Sends a copy, in case the shard changes.
- return comm.all_gather(flat.full.data, flat.shard.data, group)
+ return comm.all_gather(flat.full.data, flat.shard.data.clone(), group)
""")
wrong("6.3", "a collective does not cast").diff("""
Sends float32, whatever the unit has.
- return comm.all_gather(flat.full.data, flat.shard.data, group)
+ return comm.all_gather(flat.full.data, flat.shard.data.float(), group)
""")
wrong("6.3", "a stream of its own is in no order with the optimizer").diff("""
Takes a new stream for each gather.
- with device.on_stream(stream):
+ with device.on_stream(device.new_stream(flat.full.device)):
""")
wrong("6.3", "the padding is gathered, too").diff("""
Gathers the elements without the padding.
- return comm.all_gather(flat.full.data, flat.shard.data, group)
+ return comm.all_gather(flat.full.data[: flat.numel], flat.shard.data, group)
""")
wrong("6.3", "gather over `group`").diff("""
Gathers over all ranks there are.
- return comm.all_gather(flat.full.data, flat.shard.data, group)
+ return comm.all_gather(flat.full.data, flat.shard.data, comm.world())
""")


@wrong("6.3", "one issued at the wait hides under nothing")
def gather(flat, group, stream):
    """Gathers when somebody waits."""

    class Later:
        def wait(self):
            with device.on_stream(stream):
                device.allocate(flat.full)
                comm.all_gather(flat.full.data, flat.shard.data, group).wait()

    return Later()


wrong("6.3", "its part of `flat.full` holds nothing yet").diff("""
Gathers in place, from a part that nothing has been written to.
- return comm.all_gather(flat.full.data, flat.shard.data, group)
+ mine = flat.full.data.chunk(group.size())[group.rank()]
+ return comm.all_gather(flat.full.data, mine, group)
""")


@wrong("6.3", "that is an all-gather")
def gather(flat, group, stream):
    """Sums what is zero but for this rank's part."""
    with device.on_stream(stream):
        device.allocate(flat.full)
        flat.full.data.zero_().chunk(group.size())[group.rank()].copy_(flat.shard.data)
        return comm.all_reduce(flat.full.data, group)


# 6.4


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

# 6.5


@wrong("6.5", "nobody has told the allocator that other streams read it")
def free(buffer, readers):
    """Frees under the readers' eyes."""
    buffer.untyped_storage().resize_(0)


wrong("6.5", "what is told after the storage has gone is not heard").diff("""
Tells the allocator when there is no block any more.
  def free(buffer, readers):
+     storage = buffer.untyped_storage()
+     storage.resize_(0)
- buffer.untyped_storage().resize_(0)
""")


@wrong("6.5", "speaks of the current stream")
def free(buffer, readers):
    """Tells of the stream that the caller happens to be on."""
    for _ in readers:
        device.record_stream(buffer)
    buffer.untyped_storage().resize_(0)


@wrong("6.5", "every reader has to be told of")
def free(buffer, readers):
    """Tells of the first reader."""
    with device.on_stream(readers[0]):
        device.record_stream(buffer)
    buffer.untyped_storage().resize_(0)


wrong("6.5", "the allocator can wait in its place").diff("""
The host waits for every reader.
- with device.on_stream(reader):
-     device.record_stream(buffer)
+ reader.record_event().synchronize()
""")
wrong("6.5", "it is not a stream that has to wait").diff("""
Lets the current stream wait for the readers.
- with device.on_stream(reader):
-     device.record_stream(buffer)
+ device.current_stream(buffer.device).wait_stream(reader)
""")
wrong("6.5", "the storage has to shrink to 0 bytes").diff("""
Drops the name.
- buffer.untyped_storage().resize_(0)
+ del buffer
""")
wrong("6.5", "the tensor has changed").diff("""
Resizes the tensor.
- buffer.untyped_storage().resize_(0)
+ buffer.resize_(0)
""")
wrong("6.5", "is the answer to 6.5").diff("""
Calls what does it.
-         device.record_stream(buffer)
- buffer.untyped_storage().resize_(0)
+         device.free(buffer)
""")
wrong("6.5", "the current stream reads, too").diff("""
Leaves the current stream out, as if the memory were its own.
- with device.on_stream(reader):
-     device.record_stream(buffer)
+ if reader is not device.current_stream(buffer.device):
+     with device.on_stream(reader):
+         device.record_stream(buffer)
""")


@wrong("6.5", "until the whole device has done all that is queued")
def free(buffer, readers):
    """Waits for the device."""
    device.synchronize(buffer.device)
    buffer.untyped_storage().resize_(0)


wrong("6.5", "a stream that is entered has to be left again").diff("""
Goes to the readers and stays there.
- with device.on_stream(reader):
-     device.record_stream(buffer)
+ reader.__enter__()
+ device.record_stream(buffer)
""")
wrong("6.5", "there may be one reader").diff("""
Knows of two readers.
- for reader in readers:
+ first, second = readers
+ for reader in (first, second):
""")
wrong("6.5", "and change nothing").diff("""
Takes the readers off the list that it was given.
- for reader in readers:
-     with device.on_stream(reader):
+ while readers:
+     with device.on_stream(readers.pop()):
""")
wrong("6.5", "it knows of compute and the third reader alone").diff("""
The first and the last reader.
- for reader in readers:
+ for reader in (readers[0], readers[-1]):
""")


@wrong("6.5", "after the loop over the readers, not in it")
def free(buffer, readers):
    """Frees at the last reader, if there is one."""
    for number, stream in enumerate(readers):
        with device.on_stream(stream):
            device.record_stream(buffer)
        if number == len(readers) - 1:
            buffer.untyped_storage().resize_(0)


wrong("6.5", "the host polls the event").diff("""
Asks until each reader is done.
  for reader in readers:
+     event = reader.record_event()
+     while not event.query():
+         pass
""")
wrong("6.5", "says nothing of the next").diff("""
Tells of each stream once and for all.
- def free(buffer, readers):
-     for reader in readers:
-         with device.on_stream(reader):
+ def free(buffer, readers, told=[]):
+     for reader in [each for each in readers if each not in told]:
+         told.append(reader)
+         with device.on_stream(reader):
""")
wrong("6.5", "to free computes nothing").diff("""
Writes zeros, so that nobody takes old values for new ones.
- buffer.untyped_storage().resize_(0)
+ buffer.zero_()
+ buffer.untyped_storage().resize_(0)
""")
wrong("6.5", "a copy is other memory").diff("""
Keeps a copy for those that still read.
- def free(buffer, readers):
+ def free(buffer, readers, copies=[]):
+     copies.append(buffer.clone())
""")
wrong("6.5", "whether the list of readers is as it was").diff("""
Begins with the last reader, and leaves the list so.
  def free(buffer, readers):
+     readers.reverse()
""")

# 6.6

wrong("6.6", "`stream` has to wait for the current stream, each time").diff("""
Reduces a gradient that is still being computed.
- stream.wait_stream(device.current_stream(unit.device))
- with device.on_stream(stream):
""")
wrong("6.6", "the reduction waits for the gradient, and the compute stream for nothing").diff("""
Lets compute wait for the reductions.
- stream.wait_stream(device.current_stream(unit.device))
+ device.current_stream(unit.device).wait_stream(stream)
""")


@wrong("6.6", "on a CPU that is lab 05 again")
def start_reduction(unit, stream, under_way):
    """Waits for the reduction that it has just started."""
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
        unit.wait_reduce()


wrong("6.6", "here the compute stream waits").diff("""
Waits for the one before on the current stream.
- with device.on_stream(stream):
-     while under_way:
-         under_way.pop().wait_reduce()
+ while under_way:
+     under_way.pop().wait_reduce()
""")
wrong("6.6", "it is behind all compute there").diff("""
Issues on the current stream.
- with device.on_stream(stream):
-     unit.start_reduce()
+ unit.start_reduce()
""")
wrong("6.6", "reductions pile up").diff("""
Never waits.
- with device.on_stream(stream):
-     while under_way:
-         under_way.pop().wait_reduce()
""")
wrong("6.6", "for a moment two unsharded gradients are held").diff("""
Starts the next before it waits for the last.
- with device.on_stream(stream):
-     while under_way:
-         under_way.pop().wait_reduce()

  unit.start_reduce()
+ while under_way:
+     under_way.pop().wait_reduce()
""")
wrong("6.6", "nobody will ever wait for its reduction").diff("""
Does not put the unit under way, and waits for it by a memory of its own.
  def start_reduction(unit, stream, under_way):
+     last = start_reduction.__dict__
- while under_way:
-     under_way.pop().wait_reduce()
+ if last.get("stream") is stream:
+     last["unit"].wait_reduce()
- under_way.append(unit)
+ last.update(unit=unit, stream=stream)
""")
wrong("6.6", "let `stream` wait for it").diff("""
The host waits for the gradient.
- stream.wait_stream(device.current_stream(unit.device))
+ device.current_stream(unit.device).record_event().synchronize()
""")
wrong("6.6", "take what has been waited for out of `under_way`").diff("""
Leaves the old ones in the list.
- while under_way:
-     under_way.pop().wait_reduce()
+ for before in under_way:
+     before.wait_reduce()
""")
wrong("6.6", "it waits for itself").diff("""
Asks for the current stream where that is the reductions' own.
- stream.wait_stream(device.current_stream(unit.device))
- with device.on_stream(stream):
+     stream.wait_stream(device.current_stream(unit.device))
""")
wrong("6.6", "a reduction that has not begun is nothing to wait for").diff("""
Waits for its own reduction, before it has started.
-     while under_way:
-         under_way.pop().wait_reduce()
+     unit.wait_reduce()
+ under_way.clear()
""")
wrong("6.6", "however many there are").diff("""
Waits for one of those that are under way.
- with device.on_stream(stream):
-     while under_way:
+ if under_way:
+     with device.on_stream(stream):
""")
wrong("6.6", "so the old gradient stays until this unit, too, has computed").diff("""
Lets what is behind the old reduction wait for the new gradient.
  def start_reduction(unit, stream, under_way):
+     stream.wait_stream(device.current_stream(unit.device))
- stream.wait_stream(device.current_stream(unit.device))
- with device.on_stream(stream):
""")
wrong("6.6", "a new stream knows nothing of the reductions before").diff("""
Takes a new stream for each reduction.
  def start_reduction(unit, stream, under_way):
+     side = device.new_stream(unit.device)
- stream.wait_stream(device.current_stream(unit.device))
- with device.on_stream(stream):
+ side.wait_stream(device.current_stream(unit.device))
+ with device.on_stream(side):
""")
wrong("6.6", "is added where it is called").diff("""
Waits for the reduction before on a stream of its own.
  def start_reduction(unit, stream, under_way):
-     with device.on_stream(stream):
+     with device.on_stream(device.new_stream(unit.device)):
""")
wrong("6.6", "until the whole device has done all that is queued").diff("""
Waits for the device first, to be safe.
  def start_reduction(unit, stream, under_way):
+     device.synchronize(unit.device)
""")


@wrong("6.6", "a stream that is entered has to be left again")
def start_reduction(unit, stream, under_way):
    """Goes to the stream and stays there."""
    compute = device.current_stream(unit.device)
    stream.__enter__()
    while under_way:
        under_way.pop().wait_reduce()
    stream.wait_stream(compute)
    unit.start_reduce()
    under_way.append(unit)


wrong("6.6", "that of `unit.device`").diff("""
Asks for the current stream of the CPU, whatever the unit is on.
- stream.wait_stream(device.current_stream(unit.device))
+ stream.wait_stream(device.current_stream(torch.device("cpu")))
""")
wrong("6.6", "the reduction of 5: expected waited for before the next").diff("""
Waits for the last two that are under way.
- while under_way:
-     under_way.pop().wait_reduce()
+ for each in under_way[-2:]:
+     each.wait_reduce()
- under_way.append(unit)
+ under_way[:] = [unit]
""")


wrong("6.6", "which stream computes the gradient is asked in each call").diff("""
Asks for the current stream in its first call.
- def start_reduction(unit, stream, under_way):
+ def start_reduction(unit, stream, under_way, compute=[]):
+     compute.append(device.current_stream(unit.device))
- stream.wait_stream(device.current_stream(unit.device))
+ stream.wait_stream(compute[0])
""")
wrong("6.6", "reduces a gradient that the first is reducing").diff("""
Issues the reduction twice.
  unit.start_reduce()
+ unit.start_reduce()
""")
wrong("6.6", "`under_way = ...` is another list").diff("""
Names a list of its own.
- while under_way:
-     under_way.pop().wait_reduce()
+ for each in under_way:
+     each.wait_reduce()
- under_way.append(unit)
+ under_way = [unit]
""")
wrong("6.6", "the host polls the event").diff("""
Asks until the gradient is there, and orders the streams as well.
- stream.wait_stream(device.current_stream(unit.device))
+ event = device.current_stream(unit.device).record_event()
+ while not event.query():
+     pass
+ stream.wait_event(event)
""")
wrong("6.6", "`unit` itself may be under way").diff("""
Waits for the other units alone.
- while under_way:
-     under_way.pop().wait_reduce()
+ for each in [each for each in under_way if each is not unit]:
+     each.wait_reduce()
- under_way.append(unit)
+ under_way[:] = [unit]
""")
wrong("6.6", "what is there twice is waited for twice").diff("""
Puts the unit on the list before the reduction, and after it.
  stream.wait_stream(device.current_stream(unit.device))
+ under_way.append(unit)
""")

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
