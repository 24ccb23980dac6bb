"""Right answers that are not the reference's: each must pass."""

from minifsdp.course.workshop.wrong import right


@right("6.2")
def order_streams(giver, taker):
    """Goes to the taker, and lets the event be waited for there."""
    mark = giver.record_event()
    with device.on_stream(taker):
        mark.wait()


@right("6.3")
def gather(flat, group, stream):
    """Resizes the storage itself, and goes to the stream twice."""
    output = flat.full.detach()
    with device.on_stream(stream):
        output.untyped_storage().resize_(output.numel() * output.element_size())
    with device.on_stream(stream):
        return comm.all_gather(output.data, flat.shard.detach(), group)


@right("6.4")
def missing_waits(log):
    """Counts each unit's gathers, and of how many a stream is sure."""
    made, sure, events, found = {}, {}, {}, []
    for number, (verb, what, stream) in enumerate(log):
        have = sure.setdefault(stream, {})
        if verb == "gather":
            made[what] = made.get(what, 0) + 1
        if verb == "wait":
            have[what] = made[what]
        if verb == "record":
            events[what] = dict(have)
        if verb == "wait event":
            for unit, count in events[what].items():
                have[unit] = max(count, have.get(unit, 0))
        if verb == "read" and (what not in made or have.get(what) != made[what]):
            found.append(number)
    return found


@right("6.4")
def missing_waits(log):
    """Keeps names of units; a gather takes its own out of all sets."""
    sure, events, found = {}, {}, []
    for number, line in enumerate(log):
        mine = sure.setdefault(line.stream, set())
        if line.verb == "gather":
            for each in [*sure.values(), *events.values()]:
                each.discard(line.what)
        elif line.verb == "wait":
            mine.add(line.what)
        elif line.verb == "record":
            events[line.what] = mine.copy()
        elif line.verb == "wait event":
            mine.update(events[line.what])
        elif line.what not in mine:
            found.append(number)
    return found


@right("6.5")
def free(buffer, readers):
    """Goes down into one reader's stream after the other."""

    def tell(others):
        if others:
            with device.on_stream(others[0]):
                device.record_stream(buffer.detach())
            tell(others[1:])

    tell(list(dict.fromkeys(readers)))
    buffer.untyped_storage().resize_(0)


@right("6.6")
def start_reduction(unit, stream, under_way):
    """Asks for the compute stream first, and puts the unit on the list before anything is waited for."""
    before, under_way[:] = list(under_way), [unit]
    compute = device.current_stream(unit.device)
    with device.on_stream(stream):
        for each in before:
            each.wait_reduce()
        compute.record_event().wait()
        unit.start_reduce()
