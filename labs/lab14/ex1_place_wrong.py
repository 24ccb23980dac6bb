"""Wrong answers to exercise 14.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("14.1", "every rank has the same number of layers, whatever they cost")
def place(costs, ranks):
    """Places by number."""
    return [len(part) for part in torch.arange(len(costs)).tensor_split(ranks)]


@wrong("14.1", "a stage closed as soon as it has reached the average")
def place(costs, ranks):
    """Fills each stage up to the average."""
    counts, filled = [0], 0
    for cost in costs:
        if filled >= sum(costs) / ranks and len(counts) < ranks:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += cost
    return counts


@wrong("14.1", "a layer across a share of the total may belong on either side")
def place(costs, ranks):
    """Cuts at multiples of the average."""
    counts, passed = [0] * ranks, 0
    for cost in costs:
        counts[min(ranks - 1, int(passed / (sum(costs) / ranks)))] += 1
        passed += cost
    return counts


wrong("14.1", "these are the ranks' first layers").diff("""
Returns where the stages begin.
- return best(len(costs), ranks)[1]
+ counts = best(len(costs), ranks)[1]
+ return [sum(counts[:rank]) for rank in range(ranks)]
""")
wrong("14.1", "a stage without a layer").diff("""
Lets a stage be empty.
- for begin in range(stages - 1, end):
+ for begin in range(end, -1, -1):
- return min(found)
+ return min(found, key=lambda each: each[0])
""")
wrong("14.1", "this minimizes the sum of the squares").diff("""
Makes the stages alike, by the squares of their sums.
-         return sum(costs[:end]), [end]
+         return sum(costs[:end]) ** 2, [end]
-         found.append((max(slowest, sum(costs[begin:end])), [*counts, end - begin]))
+         found.append((slowest + sum(costs[begin:end]) ** 2, [*counts, end - begin]))
""")
wrong("14.1", "with the ranks from last to first").diff("""
Puts the last stage first.
-         found.append((max(slowest, sum(costs[begin:end])), [*counts, end - begin]))
+         found.append((max(slowest, sum(costs[begin:end])), [end - begin, *counts]))
""")
wrong("14.1", "each layer is on one rank").diff("""
Forgets the last layer.
- return best(len(costs), ranks)[1]
+ return best(len(costs) - 1 or 1, ranks if len(costs) > ranks else ranks - 1 or 1)[1]
""")
wrong("14.1", "these are the ends of the ranks' layers").diff("""
Returns where the stages end.
- return best(len(costs), ranks)[1]
+ counts = best(len(costs), ranks)[1]
+ return [sum(counts[: rank + 1]) for rank in range(ranks)]
""")


@wrong("14.1", "and the rest is on the last, whatever they cost")
def place(costs, ranks):
    """Places by number, the rest on the last rank."""
    each = len(costs) // ranks
    return [each] * (ranks - 1) + [len(costs) - each * (ranks - 1)]


@wrong("14.1", "a stage closed before it passes the average")
def place(costs, ranks):
    """Fills each stage within the average."""
    counts, filled = [0], 0
    for cost in costs:
        if counts[-1] and filled + cost > sum(costs) / ranks and len(counts) < ranks:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += cost
    return counts


wrong("14.1", "the slowest stage costs 11 instead of 9").diff("""
Adds up the stages instead of taking the slowest.
-         found.append((max(slowest, sum(costs[begin:end])), [*counts, end - begin]))
+         found.append((slowest + sum(costs[begin:end]), [*counts, end - begin]))
""")
wrong("14.1", "need not be whole numbers, and here they are rounded down").diff("""
Drops the costs' fractions.
- return best(len(costs), ranks)[1]
+ costs = [int(cost) for cost in costs]
+ return best(len(costs), ranks)[1]
""")
wrong("14.1", "fractions of any size").diff("""
Rounds costs to one decimal.
- return best(len(costs), ranks)[1]
+ costs = [round(cost, 1) for cost in costs]
+ return best(len(costs), ranks)[1]
""")
wrong("14.1", "the slowest stage costs 5 instead of 3").diff("""
Leaves out the layers that cost nothing.
- return best(len(costs), ranks)[1]
+ free = sum(cost == 0 for cost in costs)
+ costs = [cost for cost in costs if cost]
+ counts = best(len(costs), ranks)[1]
+ return counts[:-1] + [counts[-1] + free]
""")


@wrong("14.1", "the slowest stage costs 3 instead of 2")
def place(costs, ranks):
    """Cuts the slowest stage into halves until there are enough."""
    found = [list(costs)]
    while len(found) < ranks:
        slowest = max((part for part in found if len(part) > 1), key=sum)
        cut = min(range(1, len(slowest)), key=lambda at: max(sum(slowest[:at]), sum(slowest[at:])))
        at = next(at for at, part in enumerate(found) if part is slowest)
        found[at : at + 1] = [slowest[:cut], slowest[cut:]]
    return [len(part) for part in found]


@wrong("14.1", "cuts nearest to equal shares of the total")
def place(costs, ranks):
    """Cuts at the layer nearest to each share of the total."""
    sums, cuts = [sum(costs[:at]) for at in range(len(costs) + 1)], [0]
    for rank in range(1, ranks):
        options = range(cuts[-1] + 1, len(costs) - (ranks - rank) + 1)
        cuts.append(min(options, key=lambda at: abs(sums[at] - sums[-1] * rank / ranks)))
    cuts.append(len(costs))
    return [cuts[rank + 1] - cuts[rank] for rank in range(ranks)]


@wrong("14.1", "the list is halved, and each half again")
def place(costs, ranks):
    """Halves the list, then each half."""
    if ranks == 1:
        return [len(costs)]
    left, total = ranks // 2, sum(costs)
    options = range(left, len(costs) - (ranks - left) + 1)
    cut = min(options, key=lambda at: abs(sum(costs[:at]) - total * left / ranks))
    return place(costs[:cut], left) + place(costs[cut:], ranks - left)


wrong("14.1", "costs 9.12016e+06 instead of 6.02427e+06").diff("""
Computes in a dtype that ends at 65,504.
- return best(len(costs), ranks)[1]
+ costs = torch.tensor(costs, dtype=torch.float16).tolist()
+ return best(len(costs), ranks)[1]
""")
wrong("14.1", "the slowest stage costs 2 instead of 1").diff("""
Lets a layer that costs nothing cost 1.
- return best(len(costs), ranks)[1]
+ costs = [cost or 1 for cost in costs]
+ return best(len(costs), ranks)[1]
""")
