"""Wrong answers to exercise 6.6, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("6.6", "`stream` has to wait for the current stream, each time").diff("""
Reduces a gradient that is still being computed.
- stream.wait_stream(device.current_stream(unit.device))
- with device.on_stream(stream):
""")
wrong("6.6", "the reduction waits for the gradient, and the compute stream for nothing").diff("""
Lets compute wait for the reductions.
- stream.wait_stream(device.current_stream(unit.device))
+ device.current_stream(unit.device).wait_stream(stream)
""")


@wrong("6.6", "on a CPU that is lab 05 again")
def start_reduction(unit, stream, under_way):
    """Waits for the reduction that it has just started."""
    stream.wait_stream(device.current_stream(unit.device))
    with device.on_stream(stream):
        unit.start_reduce()
        unit.wait_reduce()


wrong("6.6", "here the compute stream waits").diff("""
Waits for the one before on the current stream.
- with device.on_stream(stream):
-     while under_way:
-         under_way.pop().wait_reduce()
+ while under_way:
+     under_way.pop().wait_reduce()
""")
wrong("6.6", "it is behind all compute there").diff("""
Issues on the current stream.
- with device.on_stream(stream):
-     unit.start_reduce()
+ unit.start_reduce()
""")
wrong("6.6", "reductions pile up").diff("""
Never waits.
- with device.on_stream(stream):
-     while under_way:
-         under_way.pop().wait_reduce()
""")
wrong("6.6", "for a moment two unsharded gradients are held").diff("""
Starts the next before it waits for the last.
- with device.on_stream(stream):
-     while under_way:
-         under_way.pop().wait_reduce()

  unit.start_reduce()
+ while under_way:
+     under_way.pop().wait_reduce()
""")
wrong("6.6", "nobody will ever wait for its reduction").diff("""
Does not put the unit under way, and waits for it by a memory of its own.
  def start_reduction(unit, stream, under_way):
+     last = start_reduction.__dict__
- while under_way:
-     under_way.pop().wait_reduce()
+ if last.get("stream") is stream:
+     last["unit"].wait_reduce()
- under_way.append(unit)
+ last.update(unit=unit, stream=stream)
""")
wrong("6.6", "let `stream` wait for it").diff("""
The host waits for the gradient.
- stream.wait_stream(device.current_stream(unit.device))
+ device.current_stream(unit.device).record_event().synchronize()
""")
wrong("6.6", "take what has been waited for out of `under_way`").diff("""
Leaves the old ones in the list.
- while under_way:
-     under_way.pop().wait_reduce()
+ for before in under_way:
+     before.wait_reduce()
""")
wrong("6.6", "it waits for itself").diff("""
Asks for the current stream where that is the reductions' own.
- stream.wait_stream(device.current_stream(unit.device))
- with device.on_stream(stream):
+     stream.wait_stream(device.current_stream(unit.device))
""")
wrong("6.6", "a reduction that has not begun is nothing to wait for").diff("""
Waits for its own reduction, before it has started.
-     while under_way:
-         under_way.pop().wait_reduce()
+     unit.wait_reduce()
+ under_way.clear()
""")
wrong("6.6", "however many there are").diff("""
Waits for one of those that are under way.
- with device.on_stream(stream):
-     while under_way:
+ if under_way:
+     with device.on_stream(stream):
""")
wrong("6.6", "so the old gradient stays until this unit, too, has computed").diff("""
Lets what is behind the old reduction wait for the new gradient.
  def start_reduction(unit, stream, under_way):
+     stream.wait_stream(device.current_stream(unit.device))
- stream.wait_stream(device.current_stream(unit.device))
- with device.on_stream(stream):
""")
wrong("6.6", "a new stream knows nothing of the reductions before").diff("""
Takes a new stream for each reduction.
  def start_reduction(unit, stream, under_way):
+     side = device.new_stream(unit.device)
- stream.wait_stream(device.current_stream(unit.device))
- with device.on_stream(stream):
+ side.wait_stream(device.current_stream(unit.device))
+ with device.on_stream(side):
""")
wrong("6.6", "is added where it is called").diff("""
Waits for the reduction before on a stream of its own.
  def start_reduction(unit, stream, under_way):
-     with device.on_stream(stream):
+     with device.on_stream(device.new_stream(unit.device)):
""")
wrong("6.6", "until the whole device has done all that is queued").diff("""
Waits for the device first, to be safe.
  def start_reduction(unit, stream, under_way):
+     device.synchronize(unit.device)
""")


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


wrong("6.6", "that of `unit.device`").diff("""
Asks for the current stream of the CPU, whatever the unit is on.
- stream.wait_stream(device.current_stream(unit.device))
+ stream.wait_stream(device.current_stream(torch.device("cpu")))
""")
wrong("6.6", "the reduction of 5: expected waited for before the next").diff("""
Waits for the last two that are under way.
- while under_way:
-     under_way.pop().wait_reduce()
+ for each in under_way[-2:]:
+     each.wait_reduce()
- under_way.append(unit)
+ under_way[:] = [unit]
""")
wrong("6.6", "which stream computes the gradient is asked in each call").diff("""
Asks for the current stream in its first call.
- def start_reduction(unit, stream, under_way):
+ def start_reduction(unit, stream, under_way, compute=[]):
+     compute.append(device.current_stream(unit.device))
- stream.wait_stream(device.current_stream(unit.device))
+ stream.wait_stream(compute[0])
""")
wrong("6.6", "reduces a gradient that the first is reducing").diff("""
Issues the reduction twice.
  unit.start_reduce()
+ unit.start_reduce()
""")
wrong("6.6", "`under_way = ...` is another list").diff("""
Names a list of its own.
- while under_way:
-     under_way.pop().wait_reduce()
+ for each in under_way:
+     each.wait_reduce()
- under_way.append(unit)
+ under_way = [unit]
""")
wrong("6.6", "the host polls the event").diff("""
Asks until the gradient is there, and orders the streams as well.
- stream.wait_stream(device.current_stream(unit.device))
+ event = device.current_stream(unit.device).record_event()
+ while not event.query():
+     pass
+ stream.wait_event(event)
""")
wrong("6.6", "`unit` itself may be under way").diff("""
Waits for the other units alone.
- while under_way:
-     under_way.pop().wait_reduce()
+ for each in [each for each in under_way if each is not unit]:
+     each.wait_reduce()
- under_way.append(unit)
+ under_way[:] = [unit]
""")
wrong("6.6", "what is there twice is waited for twice").diff("""
Puts the unit on the list before the reduction, and after it.
  stream.wait_stream(device.current_stream(unit.device))
+ under_way.append(unit)
""")
