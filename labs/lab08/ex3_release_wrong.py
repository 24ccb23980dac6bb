"""Wrong answers to exercise 8.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


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
