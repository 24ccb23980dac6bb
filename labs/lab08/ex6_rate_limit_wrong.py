"""Wrong answers to exercise 8.6, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

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
