"""Wrong answers to exercise 7.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("7.3", "only after the wait").diff("""
torch's order of lines, on a host that blocks.
  schedule.gather(unit)
+ unit.wait_gather()
- unit.wait_gather()
""")
wrong("7.3", "its own gather goes first").diff("""
Gathers the others before its own.
- schedule.gather(unit)

      schedule.gather(following)
+ schedule.gather(unit)
""")
wrong("7.3", "the unit that comes next is the last of `order.ahead`").diff("""
Takes them from the wrong end.
- for following in schedule.order.ahead[::-1][: schedule.depth]:
+ for following in schedule.order.ahead[: schedule.depth]:
""")
wrong("7.3", "forward's recorded order is the first iteration's").diff("""
Goes backwards through the recorded forward.
  def pre_backward(schedule, unit):
+     order = schedule.order.forward or schedule.order.seen
- for following in schedule.order.ahead[::-1][: schedule.depth]:
+ for following in order[: order.index(unit)][::-1][: schedule.depth]:
""")
wrong("7.3", "as many units ahead as `schedule.depth` says").diff("""
Always one.
- for following in schedule.order.ahead[::-1][: schedule.depth]:
+ for following in schedule.order.ahead[-1:]:
""")
wrong("7.3", "nothing is gathered ahead").diff("""
Looks for the unit in `ahead`, which it has left already.
  def pre_backward(schedule, unit):
+     ahead = schedule.order.ahead
- for following in schedule.order.ahead[::-1][: schedule.depth]:
-     schedule.gather(following)
+ if unit in ahead:
+     for following in ahead[: ahead.index(unit)][::-1][: schedule.depth]:
+         schedule.gather(following)
""")
wrong("7.3", "nobody has waited").diff("""
Forgets that its own gather may be under way still.
- unit.wait_gather()
""")
wrong("7.3", "leave it as it is").diff("""
Uses up the list that 7.1 keeps.
  def pre_backward(schedule, unit):
+     ahead = schedule.order.ahead
- for following in schedule.order.ahead[::-1][: schedule.depth]:
-     schedule.gather(following)
+ for _ in range(len(ahead) if schedule.depth is None else min(schedule.depth, len(ahead))):
+     schedule.gather(ahead.pop())
""")
wrong("7.3", "depth counts calls").diff("""
Counts a unit that was called twice in a row once.
- for following in schedule.order.ahead[::-1][: schedule.depth]:
+ for following in list(dict.fromkeys(schedule.order.ahead[::-1]))[: schedule.depth]:
""")
wrong("7.3", "depth 0 gathers nothing ahead").diff("""
Slices from the end, and a depth of 0 is the whole list.
- for following in schedule.order.ahead[::-1][: schedule.depth]:
+ ahead = schedule.order.ahead
+ ahead = ahead if schedule.depth is None else ahead[-schedule.depth :]
+ for following in reversed(ahead):
""")
