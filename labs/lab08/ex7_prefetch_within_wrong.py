"""Wrong answers to exercise 8.7, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("8.7", "the limit does not hold")
def prefetch_within(limit, whole, units, gather):
    """Gathers all."""
    for unit in units:
        if unit.state is SHARDED:
            gather(unit)
    return []


wrong("8.7", "one too many").diff("""
Gathers once more than there is room.
- while waiting and len(whole) < limit:
+ while waiting and len(whole) <= limit:
""")
wrong("8.7", "return the postponed units").diff("""
Drops what has no room.
- return waiting
+ return []
""")
wrong("8.7", "a unit that is gathered already is not gathered again").diff("""
Gathers whatever is on the list.
- waiting = [unit for unit in units if unit.state is SHARDED]
+ waiting = list(units)
""")
wrong("8.7", "keep the order of use").diff("""
Takes the last first.
- gather(waiting.pop(0))
+ gather(waiting.pop())
""")


@wrong("8.7", "not a negative one")
def prefetch_within(limit, whole, units, gather):
    """Works the room out by subtraction, and slices with it."""
    waiting = [unit for unit in units if unit.state is SHARDED]
    room = limit - len(whole)
    for unit in waiting[:room]:
        gather(unit)
    return waiting[room:]


@wrong("8.7", "a unit that has just been gathered")
def prefetch_within(limit, whole, units, gather):
    """Returns all that it was given."""
    for unit in units:
        if unit.state is SHARDED and len(whole) < limit:
            gather(unit)
    return list(units)


@wrong("8.7", "expected the list of postponed units")
def prefetch_within(limit, whole, units, gather):
    """Returns nothing."""
    for unit in units:
        if unit.state is SHARDED and len(whole) < limit:
            gather(unit)


@wrong("8.7", "the list belongs to the caller")
def prefetch_within(limit, whole, units, gather):
    """Takes from the list that it was given."""
    while units and len(whole) < limit:
        unit = units.pop(0)
        if unit.state is SHARDED:
            gather(unit)
    return [unit for unit in units if unit.state is SHARDED]


@wrong("8.7", "those that are unsharded already count")
def prefetch_within(limit, whole, units, gather):
    """As many as the limit, whatever is whole."""
    waiting = [unit for unit in units if unit.state is SHARDED]
    for unit in waiting[:limit]:
        gather(unit)
    return waiting[limit:]


wrong("8.7", "it takes the room of two").diff("""
Puts what it gathers on `whole` itself, where `gather` has put it.
- gather(waiting.pop(0))
+ unit = waiting.pop(0)
+ gather(unit)
+ whole.append(unit)
""")


@wrong("8.7", "there may be room for later ones")
def prefetch_within(limit, whole, units, gather):
    """Stops at the first unit that is gathered already."""
    units = list(units)
    while units and len(whole) < limit and units[0].state is SHARDED:
        gather(units.pop(0))
    return [unit for unit in units if unit.state is SHARDED]


@wrong("8.7", "units are unsharded that are not on the list")
def prefetch_within(limit, whole, units, gather):
    """Counts those on the list that are gathered, and no others."""
    room = limit - sum(unit.state is not SHARDED for unit in units)
    waiting = [unit for unit in units if unit.state is SHARDED]
    for unit in waiting[: max(0, room)]:
        gather(unit)
    return waiting[max(0, room) :]


wrong("8.7", "not one unit for each call").diff("""
Gathers one at a time: at most one for each call.
- while waiting and len(whole) < limit:
+ if waiting and len(whole) < limit:
""")
wrong("8.7", "one too few").diff("""
Fills up to the limit but one: keeps room for the unit that computes.
- while waiting and len(whole) < limit:
+ while waiting and len(whole) < limit - 1:
""")


@wrong("8.7", "a unit that was gathered before is not postponed")
def prefetch_within(limit, whole, units, gather):
    """Puts gathered units off, too."""
    rest = list(units)
    for unit in units:
        if unit.state is SHARDED and len(whole) < limit:
            gather(unit)
            rest.remove(unit)
    return rest


wrong("8.7", "units in either of the other two states").diff("""
Leaves out units whose gather is under way, not those that are gathered.
  def prefetch_within(limit, whole, units, gather):
+     from minifsdp.fsdp.unit import GATHERING
- waiting = [unit for unit in units if unit.state is SHARDED]
+ waiting = [unit for unit in units if unit.state is not GATHERING]
""")
wrong("8.7", "only read its length").diff("""
Sorts the list of what is unsharded.
  gather(waiting.pop(0))
+ whole.sort(key=lambda unit: unit.name)
""")
