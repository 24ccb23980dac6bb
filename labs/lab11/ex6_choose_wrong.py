"""Wrong answers to exercise 11.6, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("11.6", "what does not fit cannot be chosen")
def choose(factors, capacity, memory, seconds, rest):
    """Looks at time alone."""
    factor = min(sorted(factors), key=seconds)
    names = {max(factors): "full sharding", 1: "data parallelism"}
    return Choice(names.get(factor, "hybrid sharding"), factor)


@wrong("11.6", "and not always: ask `seconds`")
def choose(factors, capacity, memory, seconds, rest):
    """Takes the smallest that fits."""
    names = {max(factors): "full sharding", 1: "data parallelism"}
    for factor in sorted(factors):
        if memory(factor) <= capacity:
            return Choice(names.get(factor, "hybrid sharding"), factor)
    return Choice("more ranks" if rest < capacity else "split layers", None)


wrong("11.6", "not more than the capacity fits").diff("""
Wants room to spare.
- fitting = [factor for factor in sorted(factors) if memory(factor) <= capacity]
+ fitting = [factor for factor in sorted(factors) if memory(factor) < capacity]
- if factor == 1:
-     return Choice("data parallelism", 1)
- return Choice("full sharding" if factor == max(factors) else "hybrid sharding", factor)
+ return Choice({max(factors): "full sharding", 1: "data parallelism"}.get(factor, "hybrid sharding"), factor)
""")
wrong("11.6", "in whatever order the factors come").diff("""
Takes the first of equally fast ones as they come.
- fitting = [factor for factor in sorted(factors) if memory(factor) <= capacity]
+ fitting = [factor for factor in factors if memory(factor) <= capacity]
- if factor == 1:
-     return Choice("data parallelism", 1)
- return Choice("full sharding" if factor == max(factors) else "hybrid sharding", factor)
+ return Choice({max(factors): "full sharding", 1: "data parallelism"}.get(factor, "hybrid sharding"), factor)
""")
wrong("11.6", "goes by the name of full sharding").diff("""
Calls everything above 1 hybrid.
- if factor == 1:
-     return Choice("data parallelism", 1)
- return Choice("full sharding" if factor == max(factors) else "hybrid sharding", factor)
+ return Choice("data parallelism" if factor == 1 else "hybrid sharding", factor)
""")
wrong("11.6", "between 1 and the largest it is hybrid").diff("""
Calls everything above 1 full sharding.
- if factor == 1:
-     return Choice("data parallelism", 1)
- return Choice("full sharding" if factor == max(factors) else "hybrid sharding", factor)
+ return Choice("data parallelism" if factor == 1 else "full sharding", factor)
""")


@wrong("11.6", "so there is none to return")
def choose(factors, capacity, memory, seconds, rest):
    """Shards as far as it goes if nothing fits."""
    fitting = [factor for factor in sorted(factors) if memory(factor) <= capacity]
    factor = min(fitting, key=seconds) if fitting else max(factors)
    return Choice({max(factors): "full sharding", 1: "data parallelism"}.get(factor, "hybrid sharding"), factor)


wrong("11.6", "only splitting what is whole helps").diff("""
Believes that more ranks always help.
- return Choice("more ranks" if rest < capacity else "split layers", None)
+ return Choice("more ranks", None)
- if factor == 1:
-     return Choice("data parallelism", 1)
- return Choice("full sharding" if factor == max(factors) else "hybrid sharding", factor)
+ return Choice({max(factors): "full sharding", 1: "data parallelism"}.get(factor, "hybrid sharding"), factor)
""")
wrong("11.6", "not the last in the list").diff("""
Takes the last for the largest.
- if factor == 1:
-     return Choice("data parallelism", 1)
- return Choice("full sharding" if factor == max(factors) else "hybrid sharding", factor)
+ return Choice({factors[-1]: "full sharding", 1: "data parallelism"}.get(factor, "hybrid sharding"), factor)
""")
wrong("11.6", "not the largest that fits").diff("""
Takes the largest that fits for the largest.
- if factor == 1:
-     return Choice("data parallelism", 1)
- return Choice("full sharding" if factor == max(factors) else "hybrid sharding", factor)
+ return Choice({max(fitting): "full sharding", 1: "data parallelism"}.get(factor, "hybrid sharding"), factor)
""")


@wrong("11.6", "a larger one need not hold less")
def choose(factors, capacity, memory, seconds, rest):
    """Asks `memory` until one fits."""
    ordered = sorted(factors)
    while ordered and memory(ordered[0]) > capacity:
        ordered.pop(0)
    if not ordered:
        return Choice("more ranks" if rest < capacity else "split layers", None)
    factor = min(ordered, key=seconds)
    return Choice({max(factors): "full sharding", 1: "data parallelism"}.get(factor, "hybrid sharding"), factor)


wrong("11.6", "changes the caller's list").diff("""
Sorts the list that it was given.
- fitting = [factor for factor in sorted(factors) if memory(factor) <= capacity]
+ factors.sort()
+ fitting = [factor for factor in factors if memory(factor) <= capacity]
- if factor == 1:
-     return Choice("data parallelism", 1)
- return Choice("full sharding" if factor == max(factors) else "hybrid sharding", factor)
+ return Choice({max(factors): "full sharding", 1: "data parallelism"}.get(factor, "hybrid sharding"), factor)
""")
wrong("11.6", "though it be the largest, too").diff("""
Asks for full sharding first.
- if factor == 1:
-     return Choice("data parallelism", 1)
- return Choice("full sharding" if factor == max(factors) else "hybrid sharding", factor)
+ return Choice({1: "data parallelism", max(factors): "full sharding"}.get(factor, "hybrid sharding"), factor)
""")
wrong("11.6", "expected a `Choice(...)`").diff("""
Returns a plain tuple.
- return Choice("more ranks" if rest < capacity else "split layers", None)
+ return ("more ranks" if rest < capacity else "split layers", None)
- if factor == 1:
-     return Choice("data parallelism", 1)
- return Choice("full sharding" if factor == max(factors) else "hybrid sharding", factor)
+ return {max(factors): "full sharding", 1: "data parallelism"}.get(factor, "hybrid sharding"), factor
""")
wrong("11.6", "is an argument: `capacity`").diff("""
Knows the capacity: 100.
- fitting = [factor for factor in sorted(factors) if memory(factor) <= capacity]
+ fitting = [factor for factor in sorted(factors) if memory(factor) <= 100]
- return Choice("more ranks" if rest < capacity else "split layers", None)
+ return Choice("more ranks" if rest < 100 else "split layers", None)
""")


@wrong("11.6", "behind one that is not faster")
def choose(factors, capacity, memory, seconds, rest):
    """Goes up the factors and stops at the first that is not faster."""
    best = None
    for f in sorted(factors):
        if memory(f) > capacity:
            continue
        if best is not None and seconds(f) >= seconds(best):
            break
        best = f
    if best is None:
        return Choice("more ranks" if rest < capacity else "split layers", None)
    return Choice(
        "data parallelism" if best == 1 else "full sharding" if best == max(factors) else "hybrid sharding", best
    )


wrong("11.6", "seconds have fractions").diff("""
Rounds seconds to a hundredth.
- factor = min(fitting, key=seconds)
+ factor = min(fitting, key=lambda each: round(seconds(each), 2))
""")
wrong("11.6", "bytes per rank have fractions").diff("""
Rounds what stays.
- return Choice("more ranks" if rest < capacity else "split layers", None)
+ return Choice("more ranks" if round(rest + 0.1) < capacity else "split layers", None)
""")
wrong("11.6", "not the smallest that is on the list").diff("""
Calls the smallest factor data parallelism.
- if factor == 1:
-     return Choice("data parallelism", 1)
+ if factor == min(factors):
+     return Choice("data parallelism", factor)
""")
wrong("11.6", "though it be the smallest, too").diff("""
Does not call an only factor full sharding.
- return Choice("full sharding" if factor == max(factors) else "hybrid sharding", factor)
+ return Choice("full sharding" if factor == max(factors) > min(factors) else "hybrid sharding", factor)
""")
