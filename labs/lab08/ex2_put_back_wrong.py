"""Wrong answers to exercise 8.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


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
