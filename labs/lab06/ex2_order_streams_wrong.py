"""Wrong answers to exercise 6.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("6.2", "`synchronize` stops the host").diff("""
The host waits for the event.
- taker.wait_event(giver.record_event())
+ giver.record_event().synchronize()
""")
wrong("6.2", "the wrong way round").diff("""
Lets the giver wait for the taker.
- taker.wait_event(giver.record_event())
+ giver.wait_event(taker.record_event())
""")
wrong("6.2", "the event was recorded on the current stream").diff("""
An event of the current stream.
- taker.wait_event(giver.record_event())
+ event = device.new_event(torch.device("cpu"))
+ event.record()
+ taker.wait_event(event)
""")
wrong("6.2", "it is the current stream that waits").diff("""
Lets the current stream wait.
- taker.wait_event(giver.record_event())
+ event = giver.record_event()
+ event.wait()
""")


@wrong("6.2", "waits for its own event")
def order_streams(giver, taker):
    """Records and waits on one stream."""
    with device.on_stream(taker):
        event = device.new_event(torch.device("cpu"))
        event.record()
        taker.wait_event(event)


wrong("6.2", "waited before the event was recorded").diff("""
Waits for an event that is recorded a line later.
- taker.wait_event(giver.record_event())
+ event = device.new_event(torch.device("cpu"))
+ taker.wait_event(event)
+ event.record(giver)
""")
wrong("6.2", "an event alone holds nobody back").diff("""
Leaves the event and tells nobody.
- taker.wait_event(giver.record_event())
+ giver.record_event()
""")
wrong("6.2", "nothing was asked of either stream").diff("""
Goes to the taker, as if that put it behind the giver.
- taker.wait_event(giver.record_event())
+ with device.on_stream(taker):
+     pass
""")
wrong("6.2", "until the whole device has done all that is queued").diff("""
Waits for the device first, to be safe.
  def order_streams(giver, taker):
+     device.synchronize(torch.device("cpu"))
""")


@wrong("6.2", "the host polls the event")
def order_streams(giver, taker):
    """The host waits by asking again and again."""
    event = giver.record_event()
    while not event.query():
        pass
    taker.wait_event(event)


wrong("6.2", "a barrier").diff("""
Lets each wait for the other.
  taker.wait_event(giver.record_event())
+ giver.wait_event(taker.record_event())
""")
wrong("6.2", "an old event").diff("""
Records an event once and for all.
- taker.wait_event(giver.record_event())
+ if not hasattr(giver, "event"):
+     giver.event = giver.record_event()
+ taker.wait_event(giver.event)
""")
wrong("6.2", "an event of the CPU orders nothing on a GPU").diff("""
Makes an event of the CPU, whatever the streams are of.
- taker.wait_event(giver.record_event())
+ event = device.new_event(torch.device("cpu"))
+ event.record(giver)
+ event.wait(taker)
""")
wrong("6.2", "a stream that is entered has to be left again").diff("""
Goes to the taker and stays there.
- taker.wait_event(giver.record_event())
+ taker.__enter__()
+ giver.record_event().wait()
""")
wrong("6.2", "either stream may be the current one").diff("""
Takes an order on the current stream for one that is there already.
  def order_streams(giver, taker):
+     if device.current_stream(torch.device("cpu")) in (giver, taker):
+         return
""")
wrong("6.2", "only the giver's counts").diff("""
Lets the taker wait for the current stream as well.
  taker.wait_event(giver.record_event())
+ taker.wait_stream(device.current_stream(torch.device("cpu")))
""")
wrong("6.2", "the current stream waits as well").diff("""
Lets the current stream wait as well.
- taker.wait_event(giver.record_event())
+ event = giver.record_event()
+ taker.wait_event(event)
+ device.current_stream(torch.device("cpu")).wait_event(event)
""")
