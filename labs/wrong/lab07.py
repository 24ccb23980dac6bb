"""Wrong answers to lab 07, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 7.1


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


# 7.2

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

# 7.3

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

# 7.4

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

# 7.5


@wrong("7.5", "without a word from the others")
def check_order(number, names, group, device):
    """Compares with what this rank did before."""
    expected = list(range(len(names)))
    if number not in expected:
        raise RuntimeError(f"rank {group.rank()} is about to gather unit {number}")


@wrong("7.5", "a rank that differs cannot be told")
def check_order(number, names, group, device):
    """Compares with the mean."""
    total = torch.tensor([number], device=device)
    comm.all_reduce(total, group).wait()
    if total.item() != number * group.size():
        raise RuntimeError(f"rank {group.rank()} is about to gather {names[number]}, the others something else")


@wrong("7.5", "before the handle's `wait()`")
def check_order(number, names, group, device):
    """Reads what has not arrived."""
    numbers = torch.full((group.size(),), number, device=device)
    comm.all_gather(numbers, torch.tensor([number], device=device), group)
    expected, *others = numbers.tolist()
    for rank, found in enumerate(others, start=1):
        if found != expected:
            raise RuntimeError(f"rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}")


@wrong("7.5", "goes on alone")
def check_order(number, names, group, device):
    """Only the rank that differs raises."""
    mine = torch.tensor([number], device=device)
    numbers = torch.empty(group.size(), dtype=mine.dtype, device=device)
    comm.all_gather(numbers, mine, group).wait()
    expected = int(numbers[0])
    if number != expected:
        raise RuntimeError(f"rank {group.rank()} is about to gather {names[number]}, rank 0 {names[expected]}")


@wrong("7.5", "the first rank that differs from rank 0")
def check_order(number, names, group, device):
    """Every rank speaks of itself."""
    mine = torch.tensor([number], device=device)
    numbers = torch.empty(group.size(), dtype=mine.dtype, device=device)
    comm.all_gather(numbers, mine, group).wait()
    if (numbers != numbers[0]).any():
        raise RuntimeError(f"the order differs: this rank is about to gather {names[number]}")


wrong("7.5", "what that rank is about to gather").diff("""
Says numbers, which nobody can look up.
- raise RuntimeError(
-     f"the order of units differs: rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}"
- )
+ raise RuntimeError(f"rank {rank} is about to gather unit {found}, rank 0 unit {expected}")
""")


@wrong("7.5", "compare all the numbers with rank 0's")
def check_order(number, names, group, device):
    """Compares the last rank's with the first's."""
    mine = torch.tensor([number], device=device)
    numbers = torch.empty(group.size(), dtype=mine.dtype, device=device)
    comm.all_gather(numbers, mine, group).wait()
    expected, found, last = int(numbers[0]), int(numbers[-1]), group.size() - 1
    if found != expected:
        raise RuntimeError(f"rank {last} is about to gather {names[found]}, rank 0 {names[expected]}")


wrong("7.5", "one all-gather brings all numbers").diff("""
Gathers once to see whether something differs, and once more to say what.
- comm.all_gather(numbers, mine, group).wait()
+ for _ in range(2):
+     comm.all_gather(numbers, mine, group).wait()
- raise RuntimeError(
-     f"the order of units differs: rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}"
- )
+ raise RuntimeError(f"rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}")
""")
wrong("7.5", "expected `group`, got the world").diff("""
Asks all ranks, whatever group it was given.
- numbers = torch.empty(group.size(), dtype=mine.dtype, device=device)
- comm.all_gather(numbers, mine, group).wait()
+ numbers = torch.empty(comm.world().size(), dtype=mine.dtype, device=device)
+ comm.all_gather(numbers, mine, comm.world()).wait()
- raise RuntimeError(
-     f"the order of units differs: rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}"
- )
+ raise RuntimeError(f"rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}")
""")
wrong("7.5", "`comm.world()` is about the world").diff("""
Has room for the numbers of all ranks, and asks those of the group.
- numbers = torch.empty(group.size(), dtype=mine.dtype, device=device)
+ numbers = torch.empty(comm.world().size(), dtype=mine.dtype, device=device)
- raise RuntimeError(
-     f"the order of units differs: rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}"
- )
+ raise RuntimeError(f"rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}")
""")
wrong("7.5", "where NCCL cannot reach them").diff("""
Makes its tensors where torch makes them if nothing is said.
- mine = torch.tensor([number], device=device)
- numbers = torch.empty(group.size(), dtype=mine.dtype, device=device)
+ mine = torch.tensor([number])
+ numbers = torch.empty(group.size(), dtype=mine.dtype)
- raise RuntimeError(
-     f"the order of units differs: rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}"
- )
+ raise RuntimeError(f"rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}")
""")
wrong("7.5", "an index is an int64").diff("""
Takes a byte: enough for the names here, and not for 300 units.
- mine = torch.tensor([number], device=device)
+ mine = torch.tensor([number], dtype=torch.uint8, device=device)
- raise RuntimeError(
-     f"the order of units differs: rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}"
- )
+ raise RuntimeError(f"rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}")
""")


@wrong("7.5", "name the first that differs")
def check_order(number, names, group, device):
    """Leaves the looking to whoever reads it."""
    mine = torch.tensor([number], device=device)
    numbers = torch.empty(group.size(), dtype=mine.dtype, device=device)
    comm.all_gather(numbers, mine, group).wait()
    everyone = ", ".join(f"rank {rank} {names[found]}" for rank, found in enumerate(numbers.tolist()))
    if (numbers != numbers[0]).any():
        raise RuntimeError(f"the order differs, about to be gathered are: {everyone}")


wrong("7.5", "so all can say the same").diff("""
Every rank adds what it is about to do itself.
- raise RuntimeError(
-     f"the order of units differs: rank {rank} is about to gather {names[found]}, rank 0 {names[expected]}"
- )
+ here = "the others" if number == expected else "this rank"
+ raise RuntimeError(f"{here}: rank {rank} is to gather {names[found]}, rank 0 {names[expected]}")
""")
