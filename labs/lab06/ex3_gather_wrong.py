"""Wrong answers to exercise 6.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

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
