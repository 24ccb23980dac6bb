"""Wrong answers to exercise 11.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("11.1", "are in each other's place").diff("""
Exchanges the two sorts.
- raise ValueError(f"{ranks} ranks do not make groups of {factor}")
+ raise ValueError
- replicas = [list(range(place, ranks, factor)) for place in range(factor)]
- return sharding, replicas
+ return [list(range(place, ranks, factor)) for place in range(factor)], sharding
""")


@wrong("11.1", "consecutive ranks live on one host")
def plan_groups(ranks, factor):
    """Deals ranks out to the sharding groups in turn."""
    if factor < 1 or ranks % factor:
        raise ValueError
    count = ranks // factor
    sharding = [list(range(place, ranks, count)) for place in range(count)]
    return sharding, [list(range(low, low + count)) for low in range(0, ranks, count)]


@wrong("11.1", "not the number of them")
def plan_groups(ranks, factor):
    """Takes F for the number of sharding groups."""
    if factor < 1 or ranks % factor:
        raise ValueError
    size = ranks // factor
    sharding = [list(range(low, low + size)) for low in range(0, ranks, size)]
    return sharding, [list(range(place, ranks, size)) for place in range(size)]


wrong("11.1", "not the first of each group alone").diff("""
Lets the first ranks speak for their groups, as in a reduction tree.
- raise ValueError(f"{ranks} ranks do not make groups of {factor}")
+ raise ValueError
- replicas = [list(range(place, ranks, factor)) for place in range(factor)]
- return sharding, replicas
+ return sharding, [list(range(0, ranks, factor))]
""")
wrong("11.1", "of one place in *different* sharding groups").diff("""
Takes neighbours for replicas as well.
-     raise ValueError(f"{ranks} ranks do not make groups of {factor}")
+     raise ValueError
+ size = ranks // factor
- replicas = [list(range(place, ranks, factor)) for place in range(factor)]
- return sharding, replicas
+ return sharding, [list(range(low, low + size)) for low in range(0, ranks, size)]
""")


@wrong("11.1", "ranks would be left over")
def plan_groups(ranks, factor):
    """Refuses nothing."""
    sharding = [list(range(low, low + factor)) for low in range(0, ranks, max(1, factor))]
    return sharding, [list(range(place, ranks, factor)) for place in range(factor)]


@wrong("11.1", "expected a ValueError, got AssertionError")
def plan_groups(ranks, factor):
    """Asserts, which `python -O` leaves out."""
    assert factor >= 1
    assert ranks % factor == 0
    sharding = [list(range(low, low + factor)) for low in range(0, ranks, factor)]
    return sharding, [list(range(place, ranks, factor)) for place in range(factor)]


@wrong("11.1", "though F divides N")
def plan_groups(ranks, factor):
    """Refuses data parallelism."""
    if factor < 2 or ranks % factor:
        raise ValueError
    sharding = [list(range(low, low + factor)) for low in range(0, ranks, factor)]
    return sharding, [list(range(place, ranks, factor)) for place in range(factor)]


@wrong("11.1", "as lists of ranks")
def plan_groups(ranks, factor):
    """Returns ranges."""
    if factor < 1 or ranks % factor:
        raise ValueError
    sharding = [range(low, low + factor) for low in range(0, ranks, factor)]
    return sharding, [range(place, ranks, factor) for place in range(factor)]


wrong("11.1", "a negative factor divides, too").diff("""
Refuses 0, and takes what is negative.
- if factor < 1 or ranks % factor:
-     raise ValueError(f"{ranks} ranks do not make groups of {factor}")
+ if factor == 0 or ranks % factor:
+     raise ValueError
""")
wrong("11.1", "1 ranks, F = 1: it raises").diff("""
Has no groups for one rank.
- if factor < 1 or ranks % factor:
+ if factor < 1 or ranks % factor or ranks < 2:
""")
