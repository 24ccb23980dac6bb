"""Wrong answers to exercise 7.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("7.4", "free first").diff("""
Gathers before the unit is freed.
- schedule.free(unit)

      schedule.gather(following)
+ schedule.free(unit)
""")
wrong("7.4", "stands behind the reduction").diff("""
Gathers when everything else is done.
  schedule.free(unit)
+ schedule.reduce(unit)
- schedule.reduce(unit)
""")
wrong("7.4", "the unit stays whole").diff("""
Leaves the free to the end of backward.
- schedule.free(unit)
""")
wrong("7.4", "do not wait for it here").diff("""
Waits for the gather before it reduces.
  schedule.gather(following)
+ following.wait_gather()
""")
wrong("7.4", "the unit that comes next is the last of `order.ahead`").diff("""
Takes them from the wrong end.
- for following in schedule.order.ahead[::-1][: schedule.depth]:
+ for following in schedule.order.ahead[: schedule.depth]:
""")
wrong("7.4", "the unit's gradient is never reduced").diff("""
Frees and gathers, and forgets what backward was for.
- schedule.reduce(unit)
""")
wrong("7.4", "the parameters wait for the wire").diff("""
Reduces first.
  def post_backward(schedule, unit):
+     schedule.reduce(unit)
- schedule.reduce(unit)
""")
wrong("7.4", "issue on the compute stream").diff("""
Calls the unit's verbs past the schedule.
- schedule.reduce(unit)
+ unit.start_reduce()
""")
wrong("7.4", "depth counts calls").diff("""
Counts a unit that was called twice in a row once.
- for following in schedule.order.ahead[::-1][: schedule.depth]:
+ for following in list(dict.fromkeys(schedule.order.ahead[::-1]))[: schedule.depth]:
""")
wrong("7.4", "depth 0 gathers nothing ahead").diff("""
Slices from the end, and a depth of 0 is the whole list.
- for following in schedule.order.ahead[::-1][: schedule.depth]:
+ ahead = schedule.order.ahead
+ ahead = ahead if schedule.depth is None else ahead[-schedule.depth :]
+ for following in reversed(ahead):
""")
wrong("7.4", "was changed here: leave it as it is").diff("""
Takes off the list what it gathers.
- for following in schedule.order.ahead[::-1][: schedule.depth]:
-     schedule.gather(following)
+ ahead = schedule.order.ahead
+ for _ in range(len(ahead) if schedule.depth is None else min(schedule.depth, len(ahead))):
+     schedule.gather(ahead.pop())
""")
