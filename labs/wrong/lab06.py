"""Wrong answers to lab 06, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 6.1


@wrong("6.1", "every piece before it took a launch")
def finish_times(queued, launch):
    """Streams and events, and a host that takes no time."""
    free, ends = {}, []
    for piece in queued:
        start = max(free.get(piece.stream, 0.0), 0.0, *(ends[number] for number in piece.after))
        ends.append(start + piece.seconds)
        free[piece.stream] = ends[-1]
    return ends


@wrong("6.1", "a stream takes one piece at a time")
def finish_times(queued, launch):
    """Every piece starts as soon as it is issued and its events are over."""
    host, ends = 0.0, []
    for piece in queued:
        host += launch
        start = max(host, 0.0, *(ends[number] for number in piece.after))
        ends.append(start + piece.seconds)
        if piece.host_waits:
            host = max(host, ends[-1])
    return ends


@wrong("6.1", "streams run side by side")
def finish_times(queued, launch):
    """One queue for all."""
    ends, now = [], 0.0
    for piece in queued:
        now += piece.seconds
        ends.append(now)
    return ends


@wrong("6.1", "not the host: what comes later on other streams is issued meanwhile")
def finish_times(queued, launch):
    """The host stands still for events."""
    host, free, ends = 0.0, {}, []
    for piece in queued:
        host += launch
        host = max(host, *(ends[number] for number in piece.after), 0.0)
        ends.append(max(host, free.get(piece.stream, 0.0)) + piece.seconds)
        free[piece.stream] = ends[-1]
        if piece.host_waits:
            host = max(host, ends[-1])
    return ends


@wrong("6.1", "a stream holds its piece back until those events are over")
def finish_times(queued, launch):
    """No events."""
    host, free, ends = 0.0, {}, []
    for piece in queued:
        host += launch
        ends.append(max(host, free.get(piece.stream, 0.0)) + piece.seconds)
        free[piece.stream] = ends[-1]
        if piece.host_waits:
            host = max(host, ends[-1])
    return ends


@wrong("6.1", "the host issues nothing before such a piece is over")
def finish_times(queued, launch):
    """Never stops the host."""
    host, free, ends = 0.0, {}, []
    for piece in queued:
        host += launch
        start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in piece.after))
        ends.append(start + piece.seconds)
        free[piece.stream] = ends[-1]
    return ends


@wrong("6.1", "a piece cannot start before it is queued")
def finish_times(queued, launch):
    """Counts the launch of a piece behind the piece."""
    host, free, ends = 0.0, {}, []
    for piece in queued:
        start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in piece.after))
        ends.append(start + piece.seconds)
        free[piece.stream] = ends[-1]
        host += launch
        if piece.host_waits:
            host = max(host, ends[-1])
    return ends


@wrong("6.1", "and not for what else is queued on the device")
def finish_times(queued, launch):
    """Where the host waits for a piece, it waits for the whole device."""
    host, free, ends = 0.0, {}, []
    for piece in queued:
        host += launch
        start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in piece.after))
        ends.append(start + piece.seconds)
        free[piece.stream] = ends[-1]
        if piece.host_waits:
            host = max(ends)
    return ends


@wrong("6.1", "take nothing away")
def finish_times(queued, launch):
    """Takes the pieces off the list that it was given."""
    host, free, ends = 0.0, {}, []
    while queued:
        piece = queued.pop(0)
        host += launch
        start = max(host, free.get(piece.stream, 0.0), *(ends[number] for number in piece.after))
        ends.append(start + piece.seconds)
        free[piece.stream] = ends[-1]
        if piece.host_waits:
            host = ends[-1]
    return ends


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


@wrong("6.2", "`synchronize` stops the host")
def hand_over(giver, taker):
    """The host waits for the event."""
    giver.record_event().synchronize()


@wrong("6.2", "the wrong way round")
def hand_over(giver, taker):
    """Lets the giver wait for the taker."""
    giver.wait_event(taker.record_event())


@wrong("6.2", "the event was recorded on the current stream")
def hand_over(giver, taker):
    """An event of the current stream."""
    event = device.new_event(torch.device("cpu"))
    event.record()
    taker.wait_event(event)


@wrong("6.2", "it is the current stream that waits")
def hand_over(giver, taker):
    """Lets the current stream wait."""
    event = giver.record_event()
    event.wait()


@wrong("6.2", "waits for its own event")
def hand_over(giver, taker):
    """Records and waits on one stream."""
    with device.on_stream(taker):
        event = device.new_event(torch.device("cpu"))
        event.record()
        taker.wait_event(event)


@wrong("6.2", "waited before the event was recorded")
def hand_over(giver, taker):
    """Waits for an event that is recorded a line later."""
    event = device.new_event(torch.device("cpu"))
    taker.wait_event(event)
    event.record(giver)


@wrong("6.2", "an event alone holds nobody back")
def hand_over(giver, taker):
    """Leaves the event and tells nobody."""
    giver.record_event()


@wrong("6.2", "nothing was asked of either stream")
def hand_over(giver, taker):
    """Goes to the taker, as if that put it behind the giver."""
    with device.on_stream(taker):
        pass


@wrong("6.2", "until the whole device has done all that is queued")
def hand_over(giver, taker):
    """Waits for the device first, to be safe."""
    device.synchronize(torch.device("cpu"))
    taker.wait_event(giver.record_event())


@wrong("6.2", "the host asks until the event has happened")
def hand_over(giver, taker):
    """The host waits by asking again and again."""
    event = giver.record_event()
    while not event.query():
        pass
    taker.wait_event(event)


@wrong("6.2", "a barrier")
def hand_over(giver, taker):
    """Lets each wait for the other."""
    taker.wait_event(giver.record_event())
    giver.wait_event(taker.record_event())


@wrong("6.2", "an old event")
def hand_over(giver, taker):
    """Records an event once and for all."""
    if not hasattr(giver, "event"):
        giver.event = giver.record_event()
    taker.wait_event(giver.event)


@wrong("6.2", "an event of the CPU orders nothing on a GPU")
def hand_over(giver, taker):
    """Makes an event of the CPU, whatever the streams are of."""
    event = device.new_event(torch.device("cpu"))
    event.record(giver)
    event.wait(taker)


@wrong("6.2", "a stream that is entered has to be left again")
def hand_over(giver, taker):
    """Goes to the taker and stays there."""
    taker.__enter__()
    giver.record_event().wait()


# 6.3


@wrong("6.3", "stands still until the data is there")
def gather(flat, group, stream):
    """Lab 05's: waits for the message that it sends."""
    with device.on_stream(stream):
        device.allocate(flat.full)
        handle = comm.all_gather(flat.full.data, flat.shard.data, group)
        handle.wait()
    return handle


@wrong("6.3", "Allocate inside")
def gather(flat, group, stream):
    """Allocates on the current stream."""
    device.allocate(flat.full)
    with device.on_stream(stream):
        return comm.all_gather(flat.full.data, flat.shard.data, group)


@wrong("6.3", "issued on the current stream")
def gather(flat, group, stream):
    """Takes the stream for the allocation alone."""
    with device.on_stream(stream):
        device.allocate(flat.full)
    return comm.all_gather(flat.full.data, flat.shard.data, group)


@wrong("6.3", "would start when all compute queued so far is over")
def gather(flat, group, stream):
    """Orders the gather behind all compute, to be safe."""
    stream.wait_stream(device.current_stream(flat.full.device))
    with device.on_stream(stream):
        device.allocate(flat.full)
        return comm.all_gather(flat.full.data, flat.shard.data, group)


@wrong("6.3", "the compute stream waits: it may, just before it uses the data")
def gather(flat, group, stream):
    """Lets the compute stream wait for the gathers as soon as one is issued."""
    with device.on_stream(stream):
        device.allocate(flat.full)
        handle = comm.all_gather(flat.full.data, flat.shard.data, group)
    device.current_stream(flat.full.device).wait_stream(stream)
    return handle


@wrong("6.3", "without the handle nobody can wait")
def gather(flat, group, stream):
    """Returns nothing."""
    with device.on_stream(stream):
        device.allocate(flat.full)
        comm.all_gather(flat.full.data, flat.shard.data, group)


@wrong("6.3", "not into a buffer to copy from")
def gather(flat, group, stream):
    """Gathers into a second buffer."""
    with device.on_stream(stream):
        device.allocate(flat.full)
        whole = device.empty(flat.full.numel(), flat.full.dtype, "unsharded", flat.full.device)
        handle = comm.all_gather(whole, flat.shard.data, group)
        flat.full.data.copy_(whole)
    return handle


@wrong("6.3", "`device.allocate` first")
def gather(flat, group, stream):
    """Forgets that the buffer has no memory yet."""
    with device.on_stream(stream):
        return comm.all_gather(flat.full.data, flat.shard.data, group)


@wrong("6.3", "until the whole device has done all that is queued")
def gather(flat, group, stream):
    """Waits for the device first, to be safe."""
    device.synchronize(flat.full.device)
    with device.on_stream(stream):
        device.allocate(flat.full)
        return comm.all_gather(flat.full.data, flat.shard.data, group)


@wrong("6.3", "a stream that is entered has to be left again")
def gather(flat, group, stream):
    """Goes to the stream and stays there."""
    stream.__enter__()
    device.allocate(flat.full)
    return comm.all_gather(flat.full.data, flat.shard.data, group)


@wrong("6.3", "for a change of what it has saved")
def gather(flat, group, stream):
    """Gathers into the tensor whose views autograd has saved."""
    with device.on_stream(stream):
        device.allocate(flat.full)
        return comm.all_gather(flat.full, flat.shard.data, group)


@wrong("6.3", "autograd has no part in it")
def gather(flat, group, stream):
    """Gathers the parameter in place of its data."""
    with device.on_stream(stream):
        device.allocate(flat.full)
        return comm.all_gather(flat.full.data, flat.shard, group)


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


@wrong("6.4", "can be sure of all that the event's stream was sure of")
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


@wrong("6.4", "an event adds to what a stream is sure of")
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
    """Takes the stream that has issued a gather for sure of it."""
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


@wrong("6.4", "take nothing away")
def missing_waits(log):
    """Takes the lines off the log that it was given."""
    sure, events, last, found, number = {}, {}, {}, [], 0
    while log:
        line = log.pop(0)
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
        number += 1
    return found


# 6.5


@wrong("6.5", "nobody has told the allocator that other streams read it")
def free(buffer, readers):
    """Frees under the readers' eyes."""
    buffer.untyped_storage().resize_(0)


@wrong("6.5", "what is told after the storage has gone is not heard")
def free(buffer, readers):
    """Tells the allocator when there is no block any more."""
    storage = buffer.untyped_storage()
    storage.resize_(0)
    for reader in readers:
        with device.on_stream(reader):
            device.record_stream(buffer)


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


@wrong("6.5", "the allocator can wait in its place")
def free(buffer, readers):
    """The host waits for every reader."""
    for reader in readers:
        reader.record_event().synchronize()
    buffer.untyped_storage().resize_(0)


@wrong("6.5", "it is not a stream that has to wait")
def free(buffer, readers):
    """Lets the current stream wait for the readers."""
    for reader in readers:
        device.current_stream(buffer.device).wait_stream(reader)
    buffer.untyped_storage().resize_(0)


@wrong("6.5", "the storage has to shrink to 0 bytes")
def free(buffer, readers):
    """Drops the name."""
    for reader in readers:
        with device.on_stream(reader):
            device.record_stream(buffer)
    del buffer


@wrong("6.5", "the tensor has changed")
def free(buffer, readers):
    """Resizes the tensor."""
    for reader in readers:
        with device.on_stream(reader):
            device.record_stream(buffer)
    buffer.resize_(0)


@wrong("6.5", "is the answer to 6.5")
def free(buffer, readers):
    """Calls what does it."""
    for reader in readers:
        with device.on_stream(reader):
            device.free(buffer)


@wrong("6.5", "the current stream reads, too")
def free(buffer, readers):
    """Leaves the current stream out, as if the memory were its own."""
    for reader in readers:
        if reader is not device.current_stream(buffer.device):
            with device.on_stream(reader):
                device.record_stream(buffer)
    buffer.untyped_storage().resize_(0)


@wrong("6.5", "until the whole device has done all that is queued")
def free(buffer, readers):
    """Waits for the device."""
    device.synchronize(buffer.device)
    buffer.untyped_storage().resize_(0)


@wrong("6.5", "a stream that is entered has to be left again")
def free(buffer, readers):
    """Goes to the readers and stays there."""
    for reader in readers:
        reader.__enter__()
        device.record_stream(buffer)
    buffer.untyped_storage().resize_(0)


@wrong("6.5", "there may be one reader")
def free(buffer, readers):
    """Knows of two readers."""
    first, second = readers
    for reader in (first, second):
        with device.on_stream(reader):
            device.record_stream(buffer)
    buffer.untyped_storage().resize_(0)


@wrong("6.5", "take nothing away")
def free(buffer, readers):
    """Takes the readers off the list that it was given."""
    while readers:
        with device.on_stream(readers.pop()):
            device.record_stream(buffer)
    buffer.untyped_storage().resize_(0)


@wrong("6.5", "it knows of compute and the third reader alone")
def free(buffer, readers):
    """The first and the last reader."""
    for reader in (readers[0], readers[-1]):
        with device.on_stream(reader):
            device.record_stream(buffer)
    buffer.untyped_storage().resize_(0)


@wrong("6.5", "after the loop over the readers, not in it")
def free(buffer, readers):
    """Frees at the last reader, if there is one."""
    for number, stream in enumerate(readers):
        with device.on_stream(stream):
            device.record_stream(buffer)
        if number == len(readers) - 1:
            buffer.untyped_storage().resize_(0)


# 6.6


@wrong("6.6", "`stream` has to wait for the current stream, each time")
def start_reduction(unit, stream, under_way):
    """Reduces a gradient that is still being computed."""
    with device.on_stream(stream):
        while under_way:
            under_way.pop().wait_reduce()
        unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "the reduction waits for the gradient, and the compute stream for nothing")
def start_reduction(unit, stream, under_way):
    """Lets compute wait for the reductions."""
    with device.on_stream(stream):
        while under_way:
            under_way.pop().wait_reduce()
    device.current_stream(unit.device).wait_stream(stream)
    with device.on_stream(stream):
        unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "on a CPU that is lab 05 again")
def start_reduction(unit, stream, under_way):
    """Waits for the reduction that it has just started."""
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
        unit.wait_reduce()


@wrong("6.6", "here the compute stream waits")
def start_reduction(unit, stream, under_way):
    """Waits for the one before on the current stream."""
    while under_way:
        under_way.pop().wait_reduce()
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "it is behind all compute there")
def start_reduction(unit, stream, under_way):
    """Issues on the current stream."""
    with device.on_stream(stream):
        while under_way:
            under_way.pop().wait_reduce()
    stream.wait_stream(device.current_stream(unit.device))
    unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "reductions pile up")
def start_reduction(unit, stream, under_way):
    """Never waits."""
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "for a moment two unsharded gradients are held")
def start_reduction(unit, stream, under_way):
    """Starts the next before it waits for the last."""
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
        while under_way:
            under_way.pop().wait_reduce()
    under_way.append(unit)


@wrong("6.6", "nobody will ever wait for its reduction")
def start_reduction(unit, stream, under_way):
    """Does not put the unit under way, and waits for it by a memory of its own."""
    last = start_reduction.__dict__
    with device.on_stream(stream):
        if last.get("stream") is stream:
            last["unit"].wait_reduce()
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
    last.update(unit=unit, stream=stream)


@wrong("6.6", "let `stream` wait for it")
def start_reduction(unit, stream, under_way):
    """The host waits for the gradient."""
    with device.on_stream(stream):
        while under_way:
            under_way.pop().wait_reduce()
    device.current_stream(unit.device).record_event().synchronize()
    with device.on_stream(stream):
        unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "take what has been waited for out of `under_way`")
def start_reduction(unit, stream, under_way):
    """Leaves the old ones in the list."""
    with device.on_stream(stream):
        for before in under_way:
            before.wait_reduce()
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "it waits for itself")
def start_reduction(unit, stream, under_way):
    """Asks for the current stream where that is the reductions' own."""
    with device.on_stream(stream):
        while under_way:
            under_way.pop().wait_reduce()
        stream.wait_stream(device.current_stream(unit.device))
        unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "a reduction that has not begun is nothing to wait for")
def start_reduction(unit, stream, under_way):
    """Waits for its own reduction, before it has started."""
    with device.on_stream(stream):
        unit.wait_reduce()
    under_way.clear()
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "however many there are")
def start_reduction(unit, stream, under_way):
    """Waits for one of those that are under way."""
    if under_way:
        with device.on_stream(stream):
            under_way.pop().wait_reduce()
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "so the old gradient stays until this unit, too, has computed")
def start_reduction(unit, stream, under_way):
    """Lets what is behind the old reduction wait for the new gradient."""
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        while under_way:
            under_way.pop().wait_reduce()
        unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "a new stream knows nothing of the reductions before")
def start_reduction(unit, stream, under_way):
    """Takes a new stream for each reduction."""
    side = device.new_stream(unit.device)
    with device.on_stream(stream):
        while under_way:
            under_way.pop().wait_reduce()
    side.wait_stream(device.current_stream(unit.device))
    with device.on_stream(side):
        unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "is added where it is called")
def start_reduction(unit, stream, under_way):
    """Waits for the reduction before on a stream of its own."""
    with device.on_stream(device.new_stream(unit.device)):
        while under_way:
            under_way.pop().wait_reduce()
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "until the whole device has done all that is queued")
def start_reduction(unit, stream, under_way):
    """Waits for the device first, to be safe."""
    device.synchronize(unit.device)
    with device.on_stream(stream):
        while under_way:
            under_way.pop().wait_reduce()
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
    under_way.append(unit)


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


@wrong("6.6", "that of `unit.device`")
def start_reduction(unit, stream, under_way):
    """Asks for the current stream of the CPU, whatever the unit is on."""
    with device.on_stream(stream):
        while under_way:
            under_way.pop().wait_reduce()
    stream.wait_stream(device.current_stream(torch.device("cpu")))
    with device.on_stream(stream):
        unit.start_reduce()
    under_way.append(unit)


@wrong("6.6", "the reduction of 5: expected waited for before the next")
def start_reduction(unit, stream, under_way):
    """Waits for the last two that are under way."""
    with device.on_stream(stream):
        for each in under_way[-2:]:
            each.wait_reduce()
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
    under_way[:] = [unit]
