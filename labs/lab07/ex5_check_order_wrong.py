"""Wrong answers to exercise 7.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


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
