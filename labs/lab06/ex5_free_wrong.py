"""Wrong answers to exercise 6.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


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
