"""Wrong answers to lab 08, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 8.1

wrong("8.1", "sizes are multiples of 512 bytes").diff("""
Does not round the request.
- size = -(-nbytes // ROUND) * ROUND
- fitting = [block for block in memory.free if block.stream == stream and block.size >= size]
+ fitting = [block for block in memory.free if block.stream == stream and block.size >= nbytes]
- whole = -(-size // SEGMENT) * SEGMENT
+ whole = -(-nbytes // SEGMENT) * SEGMENT
- if block.size > size:
-     memory.free.append(Block(block.start + size, block.size - size, stream))
-     block.size = size
+ if block.size > nbytes:
+     memory.free.append(Block(block.start + nbytes, block.size - nbytes, stream))
+     block.size = nbytes
""")
wrong("8.1", "the first that is large enough").diff("""
First fit.
- fitting = [block for block in memory.free if block.stream == stream and block.size >= size]
- if fitting:
-     block = min(fitting, key=lambda each: each.size)
+ block = next((b for b in memory.free if b.stream == stream and b.size >= size), None)
+ if block is not None:
""")
wrong("8.1", "the largest block, which another request will miss").diff("""
Worst fit.
- block = min(fitting, key=lambda each: each.size)
+ block = max(fitting, key=lambda each: each.size)
""")
wrong("8.1", "got free memory of stream").diff("""
Hands one stream what another may still be using.
- fitting = [block for block in memory.free if block.stream == stream and block.size >= size]
- if fitting:
-     block = min(fitting, key=lambda each: each.size)
+ fitting = [block for block in memory.free if block.size >= size]
+ mine = [block for block in fitting if block.stream == stream] or fitting
+ if mine:
+     block = min(mine, key=lambda each: each.size)
- memory.free.append(Block(block.start + size, block.size - size, stream))
+ memory.free.append(Block(block.start + size, block.size - size, block.stream))
""")


@wrong("8.1", "the whole block was handed out for a part of it")
def malloc(memory, nbytes, stream):
    """Never splits."""
    size = -(-nbytes // ROUND) * ROUND
    fitting = [block for block in memory.free if block.stream == stream and block.size >= size]
    if fitting:
        block = min(fitting, key=lambda each: each.size)
        memory.free.remove(block)
        return block
    whole = -(-size // SEGMENT) * SEGMENT
    start = memory.device.new_segment(whole)
    if start is None:
        return None
    memory.segments[start] = whole
    return Block(start, whole, stream)


wrong("8.1", "a block of 0 bytes is left").diff("""
Splits even where nothing is left over.
- if block.size > size:
-     memory.free.append(Block(block.start + size, block.size - size, stream))
-     block.size = size
+ memory.free.append(Block(block.start + size, block.size - size, stream))
+ block.size = size
""")


@wrong("8.1", "the next request gets the same bytes")
def malloc(memory, nbytes, stream):
    """Leaves the block on the list."""
    size = -(-nbytes // ROUND) * ROUND
    fitting = [block for block in memory.free if block.stream == stream and block.size >= size]
    if fitting:
        block = min(fitting, key=lambda each: each.size)
        return Block(block.start, size, stream)
    whole = -(-size // SEGMENT) * SEGMENT
    start = memory.device.new_segment(whole)
    if start is None:
        return None
    memory.segments[start] = whole
    memory.free.append(Block(start + size, whole - size, stream))
    return Block(start, size, stream)


@wrong("8.1", "the device is slow")
def malloc(memory, nbytes, stream):
    """No cache: every request goes to the device."""
    size = -(-nbytes // ROUND) * ROUND
    whole = -(-size // SEGMENT) * SEGMENT
    start = memory.device.new_segment(whole)
    if start is None:
        return None
    memory.segments[start] = whole
    if whole > size:
        memory.free.append(Block(start + size, whole - size, stream))
    return Block(start, size, stream)


wrong("8.1", "a segment is a multiple of 2 MiB").diff("""
Asks the device for what was asked of it.
- whole = -(-size // SEGMENT) * SEGMENT
- start = memory.device.new_segment(whole)
+ start = memory.device.new_segment(size)
- memory.segments[start] = whole
- block = Block(start, whole, stream)
+ memory.segments[start] = size
+ block = Block(start, size, stream)
""")
wrong("8.1", "the caller decides what to do").diff("""
Gives up where there is a way out.
- return None
+ raise MemoryError
""")
wrong("8.1", "every segment is entered in `memory.segments`").diff("""
Forgets which segments there are.
- memory.segments[start] = whole
""")
wrong("8.1", "only a retry is counted").diff("""
Counts a retry where there is none yet.
  if start is None:
+     memory.retries += 1
""")
wrong("8.1", "`>=`, not `>`").diff("""
Wants a block that is larger, not as large.
- fitting = [block for block in memory.free if block.stream == stream and block.size >= size]
+ fitting = [block for block in memory.free if block.stream == stream and block.size > size]
""")
wrong("8.1", "0 is a valid address: the device returns None").diff("""
Takes address 0 for no address.
- if start is None:
+ if not start:
""")
wrong("8.1", "as many bytes more lie idle").diff("""
One segment more than is needed where the size is a multiple.
- whole = -(-size // SEGMENT) * SEGMENT
+ whole = (size // SEGMENT + 1) * SEGMENT
""")
wrong("8.1", "goes one further").diff("""
Rounds a multiple of 512 up to the next.
- size = -(-nbytes // ROUND) * ROUND
+ size = (nbytes // ROUND + 1) * ROUND
""")


@wrong("8.1", "nothing of the segment is left over")
def malloc(memory, nbytes, stream):
    """Splits a new segment in any case, and leaves nothing on the list."""
    size = -(-nbytes // ROUND) * ROUND
    for block in sorted(memory.free, key=lambda each: each.size):
        if block.stream == stream and block.size >= size:
            memory.free.remove(block)
            if block.size > size:
                memory.free.append(Block(block.start + size, block.size - size, stream))
                block.size = size
            return block
    whole = -(-size // SEGMENT) * SEGMENT
    start = memory.device.new_segment(whole)
    if start is None:
        return None
    memory.segments[start] = whole
    memory.free.append(Block(start + size, whole - size, stream))
    return Block(start, size, stream)


wrong("8.1", "two blocks share one set").diff("""
The rest shares the set of users with the block that is handed out.
  def malloc(memory, nbytes, stream):
+     from dataclasses import replace
- memory.free.append(Block(block.start + size, block.size - size, stream))
+ memory.free.append(replace(block, start=block.start + size, size=block.size - size))
""")
wrong("8.1", "and no other size").diff("""
Doubles the segment until the request fits.
- whole = -(-size // SEGMENT) * SEGMENT
+ whole = SEGMENT
+ while whole < size:
+     whole *= 2
""")
wrong("8.1", "however small it is").diff("""
torch's rule for large requests: a rest of less than 1 MiB stays with the block.
- if block.size > size:
+ if block.size - size >= (ROUND if size <= 2**20 else 2**20):
""")
wrong("8.1", "waiting for the device and asking again is a retry").diff("""
Waits for the device when it is full.
  if start is None:
+     memory.device.synchronize()
""")
wrong("8.1", "for stream 0: expected one of a new segment").diff("""
Takes stream 0 for no stream in particular.
- fitting = [block for block in memory.free if block.stream == stream and block.size >= size]
+ fitting = [block for block in memory.free if (not stream or block.stream == stream) and block.size >= size]
""")
wrong("8.1", "they come back when their events have happened").diff("""
Forgets what waits when the device is full.
  if start is None:
+     memory.waiting.clear()
""")

# 8.2


@wrong("8.2", "otherwise memory is fragmented")
def put_back(memory, block):
    """Never merges."""
    memory.free.append(block)


wrong("8.2", "there can be a free neighbour before it, after it, or both").diff("""
Looks behind the block only.
- if other.start + other.size == block.start or block.start + block.size == other.start:
+ if block.start + block.size == other.start:
- block.start = min(block.start, other.start)
""")


@wrong("8.2", "take them off `memory.free`")
def put_back(memory, block):
    """Joins its neighbours, and leaves them on the list."""
    start, end = block.start, block.start + block.size
    for other in memory.free:
        if other.start + other.size == start:
            start = other.start
        elif other.start == end:
            end += other.size
    block.start, block.size = start, end - start
    memory.free.append(block)


@wrong("8.2", "neighbours are free blocks of which one ends where the other begins")
def put_back(memory, block):
    """Joins everything that is free on the stream."""
    for other in [each for each in memory.free if each.stream == block.stream]:
        memory.free.remove(other)
        block.start = min(block.start, other.start)
        block.size += other.size
    memory.free.append(block)


wrong("8.2", "begins where the first of its parts began").diff("""
Keeps its own start when a block before it joins.
- block.start = min(block.start, other.start)
""")


@wrong("8.2", "the block is nowhere")
def put_back(memory, block):
    """Joins free neighbours, and forgets the block if there are none."""
    before = [other for other in memory.free if other.start + other.size == block.start]
    after = [other for other in memory.free if block.start + block.size == other.start]
    for other in before + after:
        memory.free.remove(other)
        block.start = min(block.start, other.start)
        block.size += other.size
    if before + after:
        memory.free.append(block)


@wrong("8.2", "blocks on `memory.waiting`")
def put_back(memory, block):
    """Takes in what waits for an event as if it were free."""
    for other in [*memory.free, *(each for each, _ in memory.waiting)]:
        if other.start + other.size == block.start or block.start + block.size == other.start:
            if other in memory.free:
                memory.free.remove(other)
                block.start = min(block.start, other.start)
                block.size += other.size
            else:
                memory.waiting = [entry for entry in memory.waiting if entry[0] is not other]
    memory.free.append(block)


@wrong("8.2", "belongs to the stream of its parts")
def put_back(memory, block):
    """Makes a new block, of stream 0."""
    start, size = block.start, block.size
    for other in list(memory.free):
        if other.start + other.size == start or start + size == other.start:
            memory.free.remove(other)
            start, size = min(start, other.start), size + other.size
    memory.free.append(Block(start, size, 0))


@wrong("8.2", "look for neighbours by their addresses")
def put_back(memory, block):
    """Takes the list to be in the order of addresses, and does not sort it."""
    at = sum(each.start < block.start for each in memory.free)
    if at < len(memory.free) and block.start + block.size == memory.free[at].start:
        block.size += memory.free.pop(at).size
    if at and memory.free[at - 1].start + memory.free[at - 1].size == block.start:
        memory.free[at - 1].size += block.size
    else:
        memory.free.insert(at, block)


wrong("8.2", "not by 2 MiB").diff("""
Joins within 2 MiB only.
  for other in list(memory.free):
+     if other.start // SEGMENT != block.start // SEGMENT:
+         continue
""")


@wrong("8.2", "0 is a valid address and a valid stream")
def put_back(memory, block):
    """Takes address 0 for no neighbour."""
    before = next((each for each in memory.free if each.start + each.size == block.start), None)
    after = next((each for each in memory.free if block.start + block.size == each.start), None)
    start = (before.start if before else 0) or block.start
    end = after.start + after.size if after else block.start + block.size
    memory.free = [each for each in memory.free if each is not before and each is not after]
    memory.free.append(Block(start, end - start, block.stream))


wrong("8.2", "only a retry gives it back").diff("""
Strikes out a segment that is free from end to end.
  memory.free.append(block)
+ if memory.segments.get(block.start) == block.size:
+     del memory.segments[block.start]
""")

# 8.3


@wrong("8.3", "while other streams still read it: reused too early")
def release(memory, block, put_back):
    """Frees at once, whoever uses it."""
    block.users.clear()
    put_back(memory, block)


wrong("8.3", "not on the block's own").diff("""
Waits for the stream that the block was allocated on.
- memory.waiting.append((block, [memory.device.record(stream) for stream in sorted(block.users)]))
+ memory.waiting.append((block, [memory.device.record(block.stream)]))
""")
wrong("8.3", "and needs an event of its own").diff("""
Waits for one of the streams.
- memory.waiting.append((block, [memory.device.record(stream) for stream in sorted(block.users)]))
+ memory.waiting.append((block, [memory.device.record(min(block.users))]))
""")
wrong("8.3", "and `collect` puts it back").diff("""
Puts it on both lists.
- memory.waiting.append((block, [memory.device.record(stream) for stream in sorted(block.users)]))
+ memory.waiting.append((block, [memory.device.record(stream) for stream in block.users]))
- else:
-     put_back(memory, block)
+ put_back(memory, block)
""")
wrong("8.3", "the block's next owner starts with no other users").diff("""
Leaves the users on the block.
- memory.waiting.append((block, [memory.device.record(stream) for stream in sorted(block.users)]))
- block.users.clear()
+ memory.waiting.append((block, [memory.device.record(stream) for stream in block.users]))
""")
wrong("8.3", "the block waits for it, not the host").diff("""
Lets the host wait until nobody uses it.
- memory.waiting.append((block, [memory.device.record(stream) for stream in sorted(block.users)]))
+ memory.device.synchronize()
- else:
-     put_back(memory, block)
+ put_back(memory, block)
""")


@wrong("8.3", "what its own stream does next comes after")
def release(memory, block, put_back):
    """Lets every block wait, its own stream's too."""
    memory.waiting.append((block, [memory.device.record(stream) for stream in (block.stream, *block.users)]))
    block.users.clear()


@wrong("8.3", "all of their events go into the entry")
def release(memory, block, put_back):
    """Records all, and keeps the last."""
    if not block.users:
        put_back(memory, block)
        return
    for stream in sorted(block.users):
        event = memory.device.record(stream)
    memory.waiting.append((block, [event]))
    block.users.clear()


@wrong("8.3", "`collect` asks before the next `malloc`")
def release(memory, block, put_back):
    """Asks at once whether the events have happened."""
    events = [memory.device.record(stream) for stream in block.users]
    block.users.clear()
    if all(event.query() for event in events):
        put_back(memory, block)
    else:
        memory.waiting.append((block, events))


wrong("8.3", "must stay on the list: append").diff("""
Puts a new list in the place of those that wait.
- memory.waiting.append((block, [memory.device.record(stream) for stream in sorted(block.users)]))
+ memory.waiting = [(block, [memory.device.record(stream) for stream in block.users])]
""")


@wrong("8.3", "only when the entry is read later")
def release(memory, block, put_back):
    """Records lazily."""
    if not block.users:
        put_back(memory, block)
    else:
        users = sorted(block.users)
        block.users.clear()
        memory.waiting.append((block, map(memory.device.record, users)))


wrong("8.3", "stream 0 is a valid stream").diff("""
Takes stream 0 for no stream.
- if block.users:
+ if any(block.users):
""")

# 8.4

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

# 8.5

wrong("8.5", "given back too early").diff("""
Gives segments back before it takes back what waits.
- while memory.waiting:
-     put_back(memory, memory.waiting.pop()[0])

      memory.device.give_back(free.start)
+ while memory.waiting:
+     put_back(memory, memory.waiting.pop()[0])
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "put back before its events had happened").diff("""
Does not wait for the device.
- memory.device.synchronize()

- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "part of a segment cannot go back").diff("""
Gives every free block back.
- for free in [each for each in memory.free if memory.segments.get(each.start) == each.size]:
-     memory.free.remove(free)
-     del memory.segments[free.start]
+ while memory.free:
+     free = memory.free.pop(0)
  memory.device.give_back(free.start)
+ memory.segments.pop(free.start, None)
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "it would be handed out although it is gone").diff("""
Leaves what it has given back on the list of free blocks.
- for free in [each for each in memory.free if memory.segments.get(each.start) == each.size]:
-     memory.free.remove(free)
-     del memory.segments[free.start]
-     memory.device.give_back(free.start)
+ for free in memory.free:
+     if memory.segments.get(free.start) == free.size:
+         del memory.segments[free.start]
+         memory.device.give_back(free.start)
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "users look at this number").diff("""
Does not count.
- memory.retries += 1

- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "would write to address 0").diff("""
Returns None where nothing helps.
- if block is None:
-     raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
""")


@wrong("8.5", "this is what makes a retry slow")
def malloc_or_retry(memory, nbytes, stream, malloc, put_back):
    """Empties the cache before every request."""
    memory.device.synchronize()
    while memory.waiting:
        put_back(memory, memory.waiting.pop()[0])
    for free in [each for each in memory.free if memory.segments.get(each.start) == each.size]:
        memory.free.remove(free)
        del memory.segments[free.start]
        memory.device.give_back(free.start)
    block = malloc(memory, nbytes, stream)
    if block is None:
        memory.retries += 1
        raise MemoryError
    return block


wrong("8.5", "the device has to get it back").diff("""
Takes back what waits, and gives nothing back.
- for free in [each for each in memory.free if memory.segments.get(each.start) == each.size]:
-     memory.free.remove(free)
-     del memory.segments[free.start]
-     memory.device.give_back(free.start)

- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "only `put_back` merges").diff("""
Puts what has waited on the list by hand.
- while memory.waiting:
-     put_back(memory, memory.waiting.pop()[0])
+ for waited, _ in memory.waiting:
+     memory.free.append(waited)
+ memory.waiting.clear()
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "two of them are no room for one that is larger").diff("""
Keeps whole segments of the request's own stream.
- for free in [each for each in memory.free if memory.segments.get(each.start) == each.size]:
+ for free in [
+     each for each in memory.free if each.stream != stream and memory.segments.get(each.start) == each.size
+ ]:
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "need not be all of it").diff("""
Gives back what is as large as some segment.
- for free in [each for each in memory.free if memory.segments.get(each.start) == each.size]:
+ for free in [each for each in memory.free if each.size in memory.segments.values()]:
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "of two blocks on `memory.waiting` one was passed over").diff("""
Removes from the list of those that wait while it goes over it.
- while memory.waiting:
-     put_back(memory, memory.waiting.pop()[0])
+ for entry in memory.waiting:
+     memory.waiting.remove(entry)
+     put_back(memory, entry[0])
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "a whole segment was passed over").diff("""
Removes from the free blocks while it goes over them.
- for free in [each for each in memory.free if memory.segments.get(each.start) == each.size]:
-     memory.free.remove(free)
-     del memory.segments[free.start]
-     memory.device.give_back(free.start)
+ for free in memory.free:
+     if memory.segments.get(free.start) == free.size:
+         memory.free.remove(free)
+         del memory.segments[free.start]
+         memory.device.give_back(free.start)
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "only then is it known which segments").diff("""
Makes its list of whole segments too early.
  memory.device.synchronize()
+ whole = [each for each in memory.free if memory.segments.get(each.start) == each.size]
- for free in [each for each in memory.free if memory.segments.get(each.start) == each.size]:
+ for free in whole:
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "this was a retry, too").diff("""
Counts only the retries that helped.
- memory.retries += 1

- if block is None:
-     raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+     if block is None:
+         raise MemoryError
+     memory.retries += 1
""")
wrong("8.5", "segments given back: expected").diff("""
Takes every segment for one of 2 MiB.
- for free in [each for each in memory.free if memory.segments.get(each.start) == each.size]:
+ for free in [each for each in memory.free if each.size == SEGMENT]:
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "not only one of them").diff("""
Gives back one segment, the first.
- for free in [each for each in memory.free if memory.segments.get(each.start) == each.size]:
-     memory.free.remove(free)
-     del memory.segments[free.start]
-     memory.device.give_back(free.start)
+ for free in list(memory.free):
+     if memory.segments.get(free.start) == free.size:
+         memory.free.remove(free)
+         del memory.segments[free.start]
+         memory.device.give_back(free.start)
+         break
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "and keep those before").diff("""
Sets the count to 1.
- memory.retries += 1
+ memory.retries = 1
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "give its segments back, too").diff("""
Gives back only segments of the request's own stream.
- for free in [each for each in memory.free if memory.segments.get(each.start) == each.size]:
+ for free in [b for b in memory.free if b.stream == stream and memory.segments.get(b.start) == b.size]:
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "waiting for each event stops the host as often").diff("""
Waits for the events of those that wait, block by block, not for the device.
- memory.device.synchronize()
- while memory.waiting:
-     put_back(memory, memory.waiting.pop()[0])
+ for waiting, events in memory.waiting:
+     for event in events:
+         event.synchronize()
+     put_back(memory, waiting)
+ memory.waiting.clear()
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "even if no block was waiting").diff("""
Raises at once if there is nothing to give back.
  block = malloc(memory, nbytes, stream)
  if block is None:
+     if not memory.waiting:
+         raise MemoryError
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise MemoryError
""")
wrong("8.5", "for the same request").diff("""
Rounds the second attempt up.
  def malloc_or_retry(memory, nbytes, stream, malloc, put_back):
+     whole = -(-nbytes // SEGMENT) * SEGMENT
-     block = malloc(memory, nbytes, stream)
- if block is None:
+     block = malloc(memory, whole, stream)
+ if block is None:
""")
wrong("8.5", "and the caller catches nothing else").diff("""
Raises what torch raises.
- raise MemoryError(f"no {nbytes:,} bytes, even with every unused segment given back")
+ raise RuntimeError("out of memory")
""")

# 8.6

wrong("8.6", "the host never waits: before a gather").diff("""
Records events, and waits for none.
- frees = deque()
- def limited_gather(unit):
-     if unit.state is SHARDED and unit.freed_after_forward:
-         while len(frees) >= limit:
-             frees.popleft().synchronize()
-     gather(unit)
+ frees = deque(maxlen=limit)
- return limited_gather, limited_free
+ return gather, limited_free
""")
wrong("8.6", "the oldest free, which is the first to happen").diff("""
Waits for the newest free.
- frees.popleft().synchronize()
+ frees.pop().synchronize()
""")
wrong("8.6", "as soon as `limit` frees are ahead").diff("""
One too many.
- while len(frees) >= limit:
+ while len(frees) > limit:
""")
wrong("8.6", "units that stay unsharded do not count").diff("""
Counts the root like the others.
- if unit.state is SHARDED and unit.freed_after_forward:
+ if unit.state is SHARDED:
- counts = unit.state is not SHARDED and unit.freed_after_forward
+ counts = unit.state is not SHARDED
""")
wrong("8.6", "of a unit that is sharded already frees nothing").diff("""
An event for every call of free.
- counts = unit.state is not SHARDED and unit.freed_after_forward

- if counts:
+ if unit.freed_after_forward:
""")
wrong("8.6", "gathered already needs no room, so").diff("""
Waits before every call of gather.
- if unit.state is SHARDED and unit.freed_after_forward:
+ if unit.freed_after_forward:
""")
wrong("8.6", "the host waits for more than it must").diff("""
Waits for all frees once there are `limit`.
- if unit.state is SHARDED and unit.freed_after_forward:
-     while len(frees) >= limit:
+ if unit.state is SHARDED and unit.freed_after_forward and len(frees) >= limit:
+     while frees:
""")
wrong("8.6", "once the host has waited for it").diff("""
Waits for the first free again and again.
- if unit.state is SHARDED and unit.freed_after_forward:
-     while len(frees) >= limit:
-         frees.popleft().synchronize()
+ if unit.state is SHARDED and unit.freed_after_forward and len(frees) >= limit:
+     frees[0].synchronize()
""")
wrong("8.6", "there is no free to wait for").diff("""
Counts gathers and waits for frees that nobody has issued.
- frees = deque()
+ frees, whole = deque(), []
- while len(frees) >= limit:
+ whole.append(unit)
+ if len(whole) > limit:
""")
wrong("8.6", "wait as long as there are `limit` or more").diff("""
Waits for one event, however many have piled up: torch's rule.
- if unit.state is SHARDED and unit.freed_after_forward:
-     while len(frees) >= limit:
-         frees.popleft().synchronize()
+ if unit.state is SHARDED and unit.freed_after_forward and len(frees) >= limit:
+     frees.popleft().synchronize()
""")
wrong("8.6", "ask for it then").diff("""
Asks for the stream once, when the limiter is made.
  frees = deque()
+ stream = device.current_stream(device.torch.device("cpu"))
- frees.append(device.current_stream(unit.device).record_event())
+ frees.append(stream.record_event())
""")
wrong("8.6", "is no reason to wait").diff("""
Waits before the root's gather, too.
- if unit.state is SHARDED and unit.freed_after_forward:
+ if unit.state is SHARDED:
""")
wrong("8.6", "it finds no free memory").diff("""
Gathers, and waits then.
- if unit.state is SHARDED and unit.freed_after_forward:
-     while len(frees) >= limit:
-         frees.popleft().synchronize()
+ starts = unit.state is SHARDED and unit.freed_after_forward
+ room = len(frees)
  gather(unit)
+ while starts and room >= limit:
+     frees.popleft().synchronize()
+     room -= 1
""")
wrong("8.6", "after a free it goes on").diff("""
Waits after a free.
- if unit.state is SHARDED and unit.freed_after_forward:
-     while len(frees) >= limit:
-         frees.popleft().synchronize()

  frees.append(device.current_stream(unit.device).record_event())
+ while len(frees) >= limit:
+     frees.popleft().synchronize()
""")
wrong("8.6", "expected `gather kept`, got `wait for 5`").diff("""
Counts all but the root.
- if unit.state is SHARDED and unit.freed_after_forward:
+ if unit.state is SHARDED and not unit.is_root:
- counts = unit.state is not SHARDED and unit.freed_after_forward
+ counts = unit.state is not SHARDED and not unit.is_root
""")
wrong("8.6", "freeing it frees memory").diff("""
No event for a unit whose gather is still under way.
  def rate_limit(gather, free, limit):
+     from minifsdp.fsdp.unit import UNSHARDED
- counts = unit.state is not SHARDED and unit.freed_after_forward
+ counts = unit.state is UNSHARDED and unit.freed_after_forward
""")
wrong("8.6", "that of `unit.device`").diff("""
Asks for the CPU's stream, whatever the unit is on.
  def rate_limit(gather, free, limit):
+     import torch
- frees.append(device.current_stream(unit.device).record_event())
+ frees.append(device.current_stream(torch.device("cpu")).record_event())
""")
wrong("8.6", "current at its free").diff("""
Asks once for the stream.
  frees = deque()
+ streams = {}
- frees.append(device.current_stream(unit.device).record_event())
+ stream = streams.setdefault(unit.device, device.current_stream(unit.device))
+ frees.append(stream.record_event())
""")
wrong("8.6", "each free has an event of its own").diff("""
Keeps one event for each unit.
- frees = deque()
+ frees = {}
- frees.popleft().synchronize()
+ frees.pop(next(iter(frees))).synchronize()
- frees.append(device.current_stream(unit.device).record_event())
+ frees[unit.name] = device.current_stream(unit.device).record_event()
""")
wrong("8.6", "read `unit.freed_after_forward` at each call").diff("""
Remembers of each unit whether it is freed after forward.
- frees = deque()
+ frees, counted = deque(), {}
- if unit.state is SHARDED and unit.freed_after_forward:
+ if unit.state is SHARDED and counted.setdefault(unit, unit.freed_after_forward):
- counts = unit.state is not SHARDED and unit.freed_after_forward
+ counts = unit.state is not SHARDED and counted.setdefault(unit, unit.freed_after_forward)
""")
wrong("8.6", "got `wait for None`").diff("""
One queue for all limiters.
- frees = deque()
+ frees = rate_limit.__dict__.setdefault("frees", deque())
""")

# 8.7


@wrong("8.7", "the limit does not hold")
def prefetch_within(limit, whole, units, gather):
    """Gathers all."""
    for unit in units:
        if unit.state is SHARDED:
            gather(unit)
    return []


wrong("8.7", "one too many").diff("""
Gathers once more than there is room.
- while waiting and len(whole) < limit:
+ while waiting and len(whole) <= limit:
""")
wrong("8.7", "return the postponed units").diff("""
Drops what has no room.
- return waiting
+ return []
""")
wrong("8.7", "a unit that is gathered already is not gathered again").diff("""
Gathers whatever is on the list.
- waiting = [unit for unit in units if unit.state is SHARDED]
+ waiting = list(units)
""")
wrong("8.7", "keep the order of use").diff("""
Takes the last first.
- gather(waiting.pop(0))
+ gather(waiting.pop())
""")


@wrong("8.7", "not a negative one")
def prefetch_within(limit, whole, units, gather):
    """Works the room out by subtraction, and slices with it."""
    waiting = [unit for unit in units if unit.state is SHARDED]
    room = limit - len(whole)
    for unit in waiting[:room]:
        gather(unit)
    return waiting[room:]


@wrong("8.7", "a unit that has just been gathered")
def prefetch_within(limit, whole, units, gather):
    """Returns all that it was given."""
    for unit in units:
        if unit.state is SHARDED and len(whole) < limit:
            gather(unit)
    return list(units)


@wrong("8.7", "expected the list of postponed units")
def prefetch_within(limit, whole, units, gather):
    """Returns nothing."""
    for unit in units:
        if unit.state is SHARDED and len(whole) < limit:
            gather(unit)


@wrong("8.7", "the list belongs to the caller")
def prefetch_within(limit, whole, units, gather):
    """Takes from the list that it was given."""
    while units and len(whole) < limit:
        unit = units.pop(0)
        if unit.state is SHARDED:
            gather(unit)
    return [unit for unit in units if unit.state is SHARDED]


@wrong("8.7", "those that are unsharded already count")
def prefetch_within(limit, whole, units, gather):
    """As many as the limit, whatever is whole."""
    waiting = [unit for unit in units if unit.state is SHARDED]
    for unit in waiting[:limit]:
        gather(unit)
    return waiting[limit:]


wrong("8.7", "it takes the room of two").diff("""
Puts what it gathers on `whole` itself, where `gather` has put it.
- gather(waiting.pop(0))
+ unit = waiting.pop(0)
+ gather(unit)
+ whole.append(unit)
""")


@wrong("8.7", "there may be room for later ones")
def prefetch_within(limit, whole, units, gather):
    """Stops at the first unit that is gathered already."""
    units = list(units)
    while units and len(whole) < limit and units[0].state is SHARDED:
        gather(units.pop(0))
    return [unit for unit in units if unit.state is SHARDED]


@wrong("8.7", "units are unsharded that are not on the list")
def prefetch_within(limit, whole, units, gather):
    """Counts those on the list that are gathered, and no others."""
    room = limit - sum(unit.state is not SHARDED for unit in units)
    waiting = [unit for unit in units if unit.state is SHARDED]
    for unit in waiting[: max(0, room)]:
        gather(unit)
    return waiting[max(0, room) :]


wrong("8.7", "not one unit for each call").diff("""
Gathers one at a time: at most one for each call.
- while waiting and len(whole) < limit:
+ if waiting and len(whole) < limit:
""")
wrong("8.7", "one too few").diff("""
Fills up to the limit but one: keeps room for the unit that computes.
- while waiting and len(whole) < limit:
+ while waiting and len(whole) < limit - 1:
""")


@wrong("8.7", "a unit that was gathered before is not postponed")
def prefetch_within(limit, whole, units, gather):
    """Puts gathered units off, too."""
    rest = list(units)
    for unit in units:
        if unit.state is SHARDED and len(whole) < limit:
            gather(unit)
            rest.remove(unit)
    return rest


wrong("8.7", "units in either of the other two states").diff("""
Leaves out units whose gather is under way, not those that are gathered.
  def prefetch_within(limit, whole, units, gather):
+     from minifsdp.fsdp.unit import GATHERING
- waiting = [unit for unit in units if unit.state is SHARDED]
+ waiting = [unit for unit in units if unit.state is not GATHERING]
""")
wrong("8.7", "only read its length").diff("""
Sorts the list of what is unsharded.
  gather(waiting.pop(0))
+ whole.sort(key=lambda unit: unit.name)
""")

# 8.8


@wrong("8.8", "unless they are neighbours")
def largest_limit(budget, blocks, held):
    """Takes the k largest blocks, wherever they are."""
    heaviest = sorted(blocks, reverse=True)
    fits = [k for k in range(1, len(blocks) + 1) if max(held) + sum(heaviest[:k]) <= budget]
    if not fits:
        raise ValueError("not even one unit fits")
    return max(fits)


wrong("8.8", "belong to different moments").diff("""
Adds two maxima of different moments.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if max(held) + max(sum(blocks[i : i + k]) for i in range(len(blocks) - k + 1)) <= budget:
- raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
+ raise ValueError("not even one unit fits")
""")
wrong("8.8", "next to block j, blocks j - 1").diff("""
Gathers ahead in the wrong direction.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if max(held[j] + sum(blocks[j : j + k]) for j in range(len(blocks))) <= budget:
- raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
+ raise ValueError("not even one unit fits")
""")
wrong("8.8", "`held` has to fit as well").diff("""
Looks at the gathered units alone.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if max(sum(blocks[max(0, j + 1 - k) : j + 1]) for j in range(len(blocks))) <= budget:
- raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
+ raise ValueError("not even one unit fits")
""")


@wrong("8.8", "that is one more than fits")
def largest_limit(budget, blocks, held):
    """Returns the first k that does not fit."""
    peak = 0
    for k in range(1, len(blocks) + 1):
        peak = max(held[j] + sum(blocks[max(0, j + 1 - k) : j + 1]) for j in range(len(blocks)))
        if peak > budget:
            if k == 1:
                raise ValueError("not even one unit fits")
            return k
    return len(blocks)


wrong("8.8", "exactly as many bytes as the budget are within it").diff("""
Wants a byte to spare.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if max(held[j] + sum(blocks[max(0, j + 1 - k) : j + 1]) for j in range(len(blocks))) < budget:
- raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
+ raise ValueError("not even one unit fits")
""")
wrong("8.8", "raise ValueError if it does not").diff("""
Returns 0 where nothing fits.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if max(held[j] + sum(blocks[max(0, j + 1 - k) : j + 1]) for j in range(len(blocks))) <= budget:
- if not fits:
-     raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
""")
wrong("8.8", "a slice that begins below 0").diff("""
Slices from before block 0.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if max(held[j] + sum(blocks[j - k + 1 : j + 1]) for j in range(len(blocks))) <= budget:
- raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
+ raise ValueError("not even one unit fits")
""")
wrong("8.8", "the heaviest of them has to fit, not the last").diff("""
Looks at the moment of the last block only.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if held[-1] + sum(blocks[-k:]) <= budget:
- raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
+ raise ValueError
""")


@wrong("8.8", "use `reversed`, not `reverse`")
def largest_limit(budget, blocks, held):
    """Reverses the lists that it was given."""
    blocks.reverse()
    held.reverse()
    for k in range(len(blocks), 0, -1):
        if max(h + sum(blocks[j : j + k]) for j, h in enumerate(held)) <= budget:
            return k
    raise ValueError


wrong("8.8", "near block 0 fewer than k blocks are unsharded").diff("""
Looks at the moments with k blocks only.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
+ peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(k - 1, len(blocks)))
""")
wrong("8.8", "Python's int is exact").diff("""
Computes with tensors of float32.
  def largest_limit(budget, blocks, held):
+     import torch
+     sizes, beside = torch.tensor(blocks, dtype=torch.float32), torch.tensor(held, dtype=torch.float32)
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
+ peak = max(beside[j] + sizes[max(0, j - k + 1) : j + 1].sum() for j in range(len(blocks)))
""")
