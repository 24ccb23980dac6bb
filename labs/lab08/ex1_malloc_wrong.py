"""Wrong answers to exercise 8.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

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
