"""Wrong answers to exercise 8.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

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
