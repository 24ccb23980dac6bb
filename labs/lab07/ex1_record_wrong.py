"""Wrong answers to exercise 7.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("7.1", "two names of one list")
def record(order, event, unit=None, backward_follows=False):
    """Keeps the very list of this forward, which the next one clears."""
    if event == "begin forward":
        order.seen.clear()
        order.ahead.clear()
    elif event == "pre-forward":
        order.seen.append(unit)
    elif event == "post-forward" and backward_follows:
        order.ahead.append(unit)
    elif event == "pre-backward" and unit in order.ahead:
        while order.ahead.pop() is not unit:
            pass
    elif event == "end backward":
        order.forward = order.forward or order.seen
        order.ahead.clear()


@wrong("7.1", "must not fix the order")
def record(order, event, unit=None, backward_follows=False):
    """Takes the first forward that ends for the first iteration, an evaluation too."""
    if event == "begin forward":
        if not order.forward:
            order.forward = list(order.seen)
        order.seen.clear()
        order.ahead.clear()
    elif event == "pre-forward":
        order.seen.append(unit)
    elif event == "post-forward":
        if backward_follows:
            order.ahead.append(unit)
        if unit is order.seen[0] and not order.forward:
            order.forward = list(order.seen)
    elif event == "pre-backward" and unit in order.ahead:
        while order.ahead.pop() is not unit:
            pass
    elif event == "end backward":
        order.ahead.clear()


wrong("7.1", "the recorded order is static").diff("""
Records forward's order anew in every iteration.
- order.forward = order.forward or list(order.seen)
+ order.forward = list(order.seen)
""")
wrong("7.1", "no backward follows a forward under no_grad").diff("""
Appends to `ahead` in an evaluation, too.
- case "post-forward" if backward_follows:
+ case "post-forward":
""")
wrong("7.1", "what stands behind the unit was skipped").diff("""
Takes the unit out alone.
- while order.ahead.pop() is not unit:
-     pass
+ del order.ahead[len(order.ahead) - 1 - order.ahead[::-1].index(unit)]
""")
wrong("7.1", "found at its first place").diff("""
Cuts `ahead` where the unit was called first.
- while order.ahead.pop() is not unit:
-     pass
+ order.ahead = order.ahead[: order.ahead.index(unit)]
""")
wrong("7.1", "each call counts in `seen`").diff("""
Notes the first use of a unit only.
- case "pre-forward":
+ case "pre-forward" if unit not in order.seen:
""")
wrong("7.1", "a backward that raised has left its units behind").diff("""
Relies on every backward to come to its end.
  order.seen.clear()
- order.ahead.clear()
""")
wrong("7.1", "pop from empty list").diff("""
Looks for a unit that may not be there.
- case "pre-backward" if unit in order.ahead:
+ case "pre-backward":
""")
wrong("7.1", "when backward is over nothing is to come").diff("""
Relies on backward to reach every unit.
  order.forward = order.forward or list(order.seen)
- order.ahead.clear()
""")


@wrong("7.1", "it is kept for all models together")
def record(order, event, unit=None, backward_follows=False, recorded=[]):  # noqa: B006
    """Keeps forward's order in a default argument, which all models share."""
    if event == "begin forward":
        order.seen.clear()
        order.ahead.clear()
    elif event == "pre-forward":
        order.seen.append(unit)
    elif event == "post-forward" and backward_follows:
        order.ahead.append(unit)
    elif event == "pre-backward" and unit in order.ahead:
        while order.ahead.pop() is not unit:
            pass
    elif event == "end backward":
        if not recorded:
            recorded.extend(order.seen)
        order.forward = recorded
        order.ahead.clear()
