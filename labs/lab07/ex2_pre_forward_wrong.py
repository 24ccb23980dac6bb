"""Wrong answers to exercise 7.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("7.2", "only after the wait").diff("""
torch's order of lines, on a host that blocks.
- order = schedule.order
- here = len(order.seen)
+ order, here = schedule.order, len(schedule.order.seen)
  schedule.gather(unit)
+ unit.wait_gather()
- unit.wait_gather()
""")
wrong("7.2", "its own gather goes first").diff("""
Gathers the others before its own.
- order = schedule.order
- here = len(order.seen)
- schedule.gather(unit)
+ order, here = schedule.order, len(schedule.order.seen)
          schedule.gather(following)
+ schedule.gather(unit)
""")
wrong("7.2", "nobody has waited").diff("""
Leaves the waiting to others.
- order = schedule.order
- here = len(order.seen)
+ order, here = schedule.order, len(schedule.order.seen)
- unit.wait_gather()
""")


@wrong("7.2", "wait for this unit alone")
def pre_forward(schedule, unit):
    """Waits for everything that it has issued."""
    order, here = schedule.order, len(schedule.order.seen)
    units = [unit]
    if order.forward[:here] == order.seen:
        units += order.forward[here:][: schedule.depth]
    for each in units:
        schedule.gather(each)
    for each in units:
        each.wait_gather()


@wrong("7.2", "as many units ahead as `schedule.depth` says")
def pre_forward(schedule, unit):
    """Always one."""
    order, here = schedule.order, len(schedule.order.seen)
    schedule.gather(unit)
    if order.forward[:here] == order.seen and here < len(order.forward):
        schedule.gather(order.forward[here])
    unit.wait_gather()


@wrong("7.2", "in which order units are built says nothing")
def pre_forward(schedule, unit):
    """Follows the list of units."""
    schedule.gather(unit)
    for following in schedule.units[schedule.units.index(unit) + 1 :][: schedule.depth]:
        schedule.gather(following)
    unit.wait_gather()


@wrong("7.2", "has left the recorded order")
def pre_forward(schedule, unit):
    """Goes on with the recorded order whatever this forward does."""
    order, here = schedule.order, len(schedule.order.seen)
    schedule.gather(unit)
    for following in order.forward[here:][: schedule.depth]:
        schedule.gather(following)
    unit.wait_gather()


wrong("7.2", "stands in the order twice").diff("""
Looks the unit up in the order.
- order = schedule.order
- here = len(order.seen)
+ forward = schedule.order.forward
- if order.forward[:here] == order.seen:
-     for following in order.forward[here:][: schedule.depth]:
+ if unit in forward:
+     for following in forward[forward.index(unit) + 1 :][: schedule.depth]:
""")
wrong("7.2", "on the compute stream").diff("""
Calls the unit's verb past the schedule.
- order = schedule.order
- here = len(order.seen)
- schedule.gather(unit)
+ order, here = schedule.order, len(schedule.order.seen)
+ unit.start_gather()
- schedule.gather(following)
+ following.start_gather()
""")
wrong("7.2", "this call alone says little").diff("""
Looks only whether this very call is where it was.
- order = schedule.order
- here = len(order.seen)
+ order, here = schedule.order, len(schedule.order.seen)
- if order.forward[:here] == order.seen:
+ if order.forward[here - 1 : here] == [unit]:
""")
wrong("7.2", "the last two calls say little").diff("""
Looks only at this call and at the one before it.
- order = schedule.order
- here = len(order.seen)
+ order, here = schedule.order, len(schedule.order.seen)
- if order.forward[:here] == order.seen:
+ if order.forward[max(here - 2, 0) : here] == order.seen[-2:]:
""")
wrong("7.2", "depth counts calls").diff("""
Counts a unit that is called twice in a row once.
- order = schedule.order
- here = len(order.seen)
+ order, here = schedule.order, len(schedule.order.seen)
- for following in order.forward[here:][: schedule.depth]:
+ for following in list(dict.fromkeys(order.forward[here:]))[: schedule.depth]:
""")
wrong("7.2", "depth 0 gathers nothing ahead").diff("""
Takes a depth of 0 for all there are.
- for following in order.forward[here:][: schedule.depth]:
+ for following in order.forward[here:][: schedule.depth or None]:
""")
wrong("7.2", "(here: two at most)").diff("""
Knows depths of one and of all.
- for following in order.forward[here:][: schedule.depth]:
+ ahead = order.forward[here:]
+ if schedule.depth is not None:
+     ahead = ahead[:1] + (ahead[1:2] if schedule.depth > 1 else [])
+ for following in ahead:
""")
