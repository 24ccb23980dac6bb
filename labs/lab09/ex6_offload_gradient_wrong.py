"""Wrong answers to exercise 9.6, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("9.6", "has overwritten the first, as torch's does").diff("""
Overwrites.
- if shard.grad is None:
-     shard.grad = on_host
- else:
-     shard.grad.add_(on_host)
+ shard.grad = on_host
""")
wrong("9.6", "memory that the copy has not reached").diff("""
Does not wait for the copy.
- copied = device.current_stream(mean.device).record_event()
+ device.current_stream(mean.device).record_event()
- copied.synchronize()
""")
wrong("9.6", "waits in the middle of backward").diff("""
Waits at once.
- copied = device.current_stream(mean.device).record_event()
+ device.current_stream(mean.device).record_event().synchronize()
- copied.synchronize()
""")
wrong("9.6", "record it after the copy").diff("""
Records the event before the copy.
- on_host = device.copy_to_host(mean)

  copied = device.current_stream(mean.device).record_event()
+ on_host = device.copy_to_host(mean)
""")
wrong("9.6", "still on the device as well").diff("""
Keeps the device's copy.
- device.free(mean)
""")
wrong("9.6", "and copy nothing on a CPU").diff("""
Copies by `.cpu()`, which on a CPU is no copy.
- on_host = device.copy_to_host(mean)
+ on_host = mean.cpu()
""")


@wrong("9.6", "the returned function touches the gradient")
def offload_gradient(shard, mean):
    """Adds before the copy is known to be over."""
    on_host = device.copy_to_host(mean)
    copied = device.current_stream(mean.device).record_event()
    device.free(mean)
    if shard.grad is None:
        shard.grad = on_host
    else:
        shard.grad.add_(on_host)
    return copied.synchronize


wrong("9.6", "waits for all that is queued there").diff("""
Waits for the whole device.
- on_host = device.copy_to_host(mean)
- copied = device.current_stream(mean.device).record_event()
+ on_host, where = device.copy_to_host(mean), mean.device
+ device.current_stream(where).record_event()
- copied.synchronize()
+ device.synchronize(where)
""")
wrong("9.6", "added out of place").diff("""
Adds out of place.
- if shard.grad is None:
-     shard.grad = on_host
- else:
-     shard.grad.add_(on_host)
+ shard.grad = on_host if shard.grad is None else shard.grad + on_host
""")
wrong("9.6", "there is no queue").diff("""
Records the event on the stream of the shard's device, which is the host.
- copied = device.current_stream(mean.device).record_event()
+ copied = device.current_stream(shard.device).record_event()
""")
wrong("9.6", "not when it starts").diff("""
Asks for a gradient to add to when the copy starts.
  device.free(mean)
+ first = shard.grad is None
- if shard.grad is None:
+ if first:
""")
wrong("9.6", "before it is filled").diff("""
Copies on a stream of its own, which waits for nothing.
- on_host = device.copy_to_host(mean)
- copied = device.current_stream(mean.device).record_event()
+ stream = device.new_stream(mean.device)
+ with device.on_stream(stream):
+     on_host = device.copy_to_host(mean)
+     copied = stream.record_event()
""")
wrong("9.6", "while the copy still reads it").diff("""
Copies on a stream of its own, of which the allocator does not know.
- on_host = device.copy_to_host(mean)
- copied = device.current_stream(mean.device).record_event()
+ stream = device.new_stream(mean.device)
+ stream.wait_stream(device.current_stream(mean.device))
+ with device.on_stream(stream):
+     on_host = device.copy_to_host(mean)
+     copied = stream.record_event()
""")
wrong("9.6", "before the host has waited for it").diff("""
Adds, and then waits.
- copied.synchronize()

- shard.grad = on_host
+ shard.grad = on_host.clone()
      shard.grad.add_(on_host)
+ copied.synchronize()
""")
wrong("9.6", "the copy has to be queued first").diff("""
Frees, and then copies.
  def offload_gradient(shard, mean):
+     device.free(mean)
- device.free(mean)
""")
wrong("9.6", "none was recorded").diff("""
Waits for all that the device has queued.
- copied = device.current_stream(mean.device).record_event()
+ where = mean.device
- copied.synchronize()
+ device.synchronize(where)
""")
wrong("9.6", "holds the gradient of an earlier call").diff("""
Keeps its first buffer on the host.
- def arrive():
+ kept = offload_gradient.__dict__
+ def arrive():
-         shard.grad.add_(on_host)
+         shard.grad.add_(kept.setdefault("buffer", on_host))
""")
wrong("9.6", "which is the shard's: no cast").diff("""
Makes the gradient one of float32.
- shard.grad = on_host
+ shard.grad = on_host.float()
""")
wrong("9.6", "it waits for no other, and adds no other").diff("""
Lets the first function that is called bring all that was started.
  device.free(mean)
+ pending = offload_gradient.__dict__.setdefault("pending", [])
+ pending.append((on_host, copied))
- copied.synchronize()
- if shard.grad is None:
-     shard.grad = on_host
- else:
-     shard.grad.add_(on_host)
+ for values, event in pending:
+     event.synchronize()
+     if shard.grad is None:
+         shard.grad = values
+     else:
+         shard.grad.add_(values)
+ pending.clear()
""")
wrong("9.6", "in whatever order they are called").diff("""
Brings what was started first, whichever function is called.
  device.free(mean)
+ pending = offload_gradient.__dict__.setdefault("pending", [])
+ pending.append((on_host, copied))
- copied.synchronize()
- if shard.grad is None:
-     shard.grad = on_host
- else:
-     shard.grad.add_(on_host)
+ values, event = pending.pop(0)
+ event.synchronize()
+ if shard.grad is None:
+     shard.grad = values
+ else:
+     shard.grad.add_(values)
""")
wrong("9.6", "something was cast to a narrower dtype").diff("""
Adds in float32.
- shard.grad.add_(on_host)
+ shard.grad.copy_(shard.grad.float() + on_host.float())
""")
