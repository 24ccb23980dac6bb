"""Wrong answers to lab 11, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 11.1

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

# 11.2


@wrong("11.2", "also those that it is not in")
def make_groups(sharding, replicas):
    """Makes its own two groups only."""
    rank = dist.get_rank()
    inside, across = (dist.new_group(next(g for g in groups if rank in g)) for groups in (sharding, replicas))
    return inside, across


@wrong("11.2", "in an order of this rank's own")
def make_groups(sharding, replicas):
    """Makes its own groups first, then all others."""
    rank, mine = dist.get_rank(), []
    for groups in (sharding, replicas):
        own = next(group for group in groups if rank in group)
        mine.append(dist.new_group(own))
        for group in groups:
            if group is not own:
                dist.new_group(group)
    return tuple(mine)


@wrong("11.2", "the replica group comes second")
def make_groups(sharding, replicas):
    """Returns them the wrong way round."""
    rank, mine = dist.get_rank(), []
    for ranks in [*sharding, *replicas]:
        group = dist.new_group(ranks)
        if rank in ranks:
            mine.insert(0, group)
    return tuple(mine)


@wrong("11.2", "returns a marker on ranks that are outside")
def make_groups(sharding, replicas):
    """Keeps the last of each sort, whoever is in it."""
    for ranks in sharding:
        inside = dist.new_group(ranks)
    for ranks in replicas:
        across = dist.new_group(ranks)
    return inside, across


@wrong("11.2", "and then not all replica groups")
def make_groups(sharding, replicas):
    """Makes all sharding groups, and of the replica groups its own."""
    rank = dist.get_rank()
    inside = [dist.new_group(ranks) for ranks in sharding]
    mine = next(group for group, ranks in zip(inside, sharding, strict=True) if rank in ranks)
    return mine, dist.new_group(next(ranks for ranks in replicas if rank in ranks))


@wrong("11.2", "each is made more than once")
def make_groups(sharding, replicas):
    """Makes all of them, and then again to pick its own."""
    rank = dist.get_rank()
    for ranks in [*sharding, *replicas]:
        dist.new_group(ranks)
    mine = []
    for ranks in [*sharding, *replicas]:
        group = dist.new_group(ranks)
        if rank in ranks:
            mine.append(group)
    return tuple(mine)


@wrong("11.2", "expected a pair of groups, got NoneType")
def make_groups(sharding, replicas):
    """Makes them and returns none."""
    for ranks in [*sharding, *replicas]:
        dist.new_group(ranks)


@wrong("11.2", "not the one asked for")
def make_groups(sharding, replicas):
    """Makes the replica groups first, on every rank."""
    rank, mine = dist.get_rank(), []
    for ranks in [*replicas, *sharding]:
        group = dist.new_group(ranks)
        if rank in ranks:
            mine.insert(0, group)
    return tuple(mine)


@wrong("11.2", "6 ranks, F = 3: rank 2: expected two groups")
def make_groups(sharding, replicas):
    """Takes F for 2."""
    inside, across = ([dist.new_group(ranks) for ranks in groups] for groups in (sharding, replicas))
    me = dist.get_rank()
    return inside[me // 2 % len(inside)], across[me % 2 % len(across)]


@wrong("11.2", "members alone meet")
def make_groups(sharding, replicas):
    """Spares the others the call."""
    rank = dist.get_rank()
    lists = [next(group for group in groups if rank in group) for groups in (sharding, replicas)]
    inside, across = [dist.new_group(ranks, use_local_synchronization=True) for ranks in lists]
    return inside, across


@wrong("11.2", "the default group is not one of its own")
def make_groups(sharding, replicas):
    """Takes the default group where a list has all ranks."""
    mine = []
    for ranks in [*sharding, *replicas]:
        group = dist.group.WORLD if len(ranks) == dist.get_world_size() else dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine.append(group)
    return tuple(mine)


@wrong("11.2", "one to shard in, one of replicas")
def make_groups(sharding, replicas):
    """Looks groups up by their ranks."""
    made = {}
    for ranks in [*sharding, *replicas]:
        if tuple(ranks) not in made:
            made[tuple(ranks)] = dist.new_group(ranks)
    inside, across = (next(g for g in groups if dist.get_rank() in g) for groups in (sharding, replicas))
    return made[tuple(inside)], made[tuple(across)]


wrong("11.2", "and remove nothing").diff("""
Takes lists off those that it was given.
- for ranks in lists:
+ while lists:
+     ranks = lists.pop(0)
- inside, across = mine
- return inside, across
+ return mine[0], mine[1]
""")

# 11.3

wrong("11.3", "overlaps nothing").diff("""
Waits at once.
  unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across.wait()
""")
wrong("11.3", "every further host makes the step larger").diff("""
Sums.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across = comm.all_reduce(unit.mean, unit.replicas)
""")
wrong("11.3", "before the second stage").diff("""
Accumulates first and reduces what is in `.grad`.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.deliver(unit.mean)
+ unit.across = comm.all_reduce(unit.flat.shard.grad, unit.replicas, comm.MEAN)
""")
wrong("11.3", "a copy was reduced").diff("""
Reduces a copy, and forgets it.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across = comm.all_reduce(unit.mean.clone(), unit.replicas, comm.MEAN)
""")
wrong("11.3", "nobody can wait for it").diff("""
Drops the handle.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
""")
wrong("11.3", "the sharding group has had its turn").diff("""
Reduces over the sharding group once more.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across = comm.all_reduce(unit.mean, unit.group, comm.MEAN)
""")
wrong("11.3", "is the task of `finish_across`").diff("""
Does it all in one go.
  unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across.wait()
+ unit.deliver(unit.mean)
""")


@wrong("11.3", "each trains a model of its own")
def start_across(unit):
    """Takes the mean of the sharding group for the mean of all."""


wrong("11.3", "the world has other shards").diff("""
Reduces over all ranks.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across = comm.all_reduce(unit.mean, comm.world(), comm.MEAN)
""")
wrong("11.3", "divided by 2, whatever").diff("""
Takes R for 2.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.mean /= 2
+ unit.across = comm.all_reduce(unit.mean, unit.replicas)
""")
wrong("11.3", "divided twice").diff("""
Divides, and asks for a mean.
  def start_across(unit):
+     unit.mean /= unit.replicas.size()
""")
wrong("11.3", "before, during or after the sum").diff("""
Divides while the sum is under way.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across = comm.all_reduce(unit.mean, unit.replicas)
+ unit.mean /= unit.replicas.size()
""")
wrong("11.3", "in float32 twice as many bytes").diff("""
Reduces in float32, whatever the mean is in.
  def start_across(unit):
+     unit.mean = unit.mean.float()
""")
wrong("11.3", "another costs bytes").diff("""
Reduces a copy, and keeps that.
  def start_across(unit):
+     unit.mean = unit.mean.clone()
""")
wrong("11.3", "stays until the next step").diff("""
Keeps the first stage's mean, too.
  def start_across(unit):
+     unit.inside = unit.mean.clone()
""")
wrong("11.3", "until the other hosts have come as far").diff("""
Meets the other hosts first.
  def start_across(unit):
+     dist.barrier(unit.replicas)
""")
wrong("11.3", "no collective of `comm` is issued").diff("""
Goes past `comm`.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across = dist.all_reduce(unit.mean, comm.MEAN, unit.replicas, async_op=True)
""")
wrong("11.3", "crosses the slow link twice").diff("""
Sums, and makes a mean in a second one.
  def start_across(unit):
+     comm.all_reduce(unit.mean, unit.replicas)
""")
wrong("11.3", "every replica has to take part").diff("""
Lets the first host speak for all.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ if dist.get_rank() == 0:
+     unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
""")


@wrong("11.3", "a replica that is alone reduces too")
def start_across(unit):
    """Leaves out a replica that is alone."""
    assert unit.mean is not None
    if unit.replicas.size() == 1:
        return
    unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)


# 11.4

wrong("11.4", "may be anything").diff("""
Does not wait.
- unit.across.wait()
""")
wrong("11.4", "then there is nothing to do").diff("""
Cannot bear a unit with nothing under way.
- if unit.across is None:
-     return
""")
wrong("11.4", "is delivered twice").diff("""
Does not forget what it has finished.
- unit.across = unit.mean = None
""")
wrong("11.4", "the other way round").diff("""
Delivers and then waits.
- unit.across.wait()

  unit.deliver(unit.mean)
+ unit.across.wait()
""")
wrong("11.4", "divided again").diff("""
Makes a mean of the mean.
- unit.deliver(unit.mean)
+ unit.deliver(unit.mean / unit.replicas.size())
""")
wrong("11.4", "earlier micro-batches are gone").diff("""
Sets `.grad` in place of adding to it.
- unit.deliver(unit.mean)
+ unit.flat.shard.grad = unit.mean
""")
wrong("11.4", "never handed over").diff("""
Waits, and that is all.
- unit.deliver(unit.mean)
""")
wrong("11.4", "a buffer that has been given away").diff("""
Keeps the mean.
- unit.across = unit.mean = None
+ unit.across = None
""")
wrong("11.4", "takes no other dtype").diff("""
Delivers in double.
- unit.deliver(unit.mean)
+ unit.deliver(unit.mean.double())
""")
wrong("11.4", "gives the memory of the copy away").diff("""
Delivers a copy.
- unit.deliver(unit.mean)
+ unit.deliver(unit.mean.clone())
""")
wrong("11.4", "`wait` returns nothing").diff("""
Takes the result from the handle.
- unit.across.wait()
- unit.deliver(unit.mean)
+ unit.deliver(unit.across.wait())
""")
wrong("11.4", "both belong under one condition").diff("""
Delivers in any case.
- if unit.across is None:
-     return
- unit.across.wait()
+ if unit.across is not None:
+     unit.across.wait()
""")


@wrong("11.4", "is not to be forgotten")
def finish_across(unit):
    """Forgets in any case."""
    if unit.across is not None:
        unit.across.wait()
        unit.deliver(unit.mean)
    unit.across = unit.mean = None


wrong("11.4", "has been waited for once is there").diff("""
Waits twice, to be sure.
  unit.across.wait()
+ unit.across.wait()
""")
wrong("11.4", "dtype delivered: expected torch.bfloat16").diff("""
Delivers in float32.
- unit.deliver(unit.mean)
+ unit.deliver(unit.mean.float())
""")

# 11.5


@wrong("11.5", "the root is gathered once")
def traffic(units, ranks, per_host, factor):
    """Gathers the root twice."""
    whole, copies = sum(units), ranks // factor
    sharding = (factor - 1) / factor * 3 * whole
    replicas = 2 * (copies - 1) / copies * whole / factor
    leaves = sharding * (factor > per_host) + min(factor, per_host) * replicas * (ranks > per_host)
    return Traffic(sharding, replicas, leaves)


@wrong("11.5", "gathered twice, in forward and in backward")
def traffic(units, ranks, per_host, factor):
    """One gather and one reduce-scatter."""
    whole, copies = sum(units), ranks // factor
    sharding = (factor - 1) / factor * 2 * whole
    replicas = 2 * (copies - 1) / copies * whole / factor
    leaves = sharding * (factor > per_host) + min(factor, per_host) * replicas * (ranks > per_host)
    return Traffic(sharding, replicas, leaves)


@wrong("11.5", "its rings have F ranks")
def traffic(units, ranks, per_host, factor):
    """Gathers over all ranks."""
    whole, copies = sum(units), ranks // factor
    sharding = (ranks - 1) / ranks * (3 * whole - units[0])
    replicas = 2 * (copies - 1) / copies * whole / factor
    leaves = sharding * (factor > per_host) + min(factor, per_host) * replicas * (ranks > per_host)
    return Traffic(sharding, replicas, leaves)


@wrong("11.5", "1/F of the unit")
def traffic(units, ranks, per_host, factor):
    """All-reduces whole gradients."""
    whole, copies = sum(units), ranks // factor
    sharding = (factor - 1) / factor * (3 * whole - units[0])
    replicas = 2 * (copies - 1) / copies * whole
    leaves = sharding * (factor > per_host) + min(factor, per_host) * replicas * (ranks > per_host)
    return Traffic(sharding, replicas, leaves)


@wrong("11.5", "a reduce-scatter and a gather: twice")
def traffic(units, ranks, per_host, factor):
    """Takes an all-reduce for one pass of the ring."""
    whole, copies = sum(units), ranks // factor
    sharding = (factor - 1) / factor * (3 * whole - units[0])
    replicas = (copies - 1) / copies * whole / factor
    leaves = sharding * (factor > per_host) + min(factor, per_host) * replicas * (ranks > per_host)
    return Traffic(sharding, replicas, leaves)


@wrong("11.5", "whatever the number of hosts")
def traffic(units, ranks, per_host, factor):
    """Replicates over hosts, whatever F."""
    whole, hosts = sum(units), ranks // per_host
    sharding = (factor - 1) / factor * (3 * whole - units[0])
    replicas = 2 * (hosts - 1) / hosts * whole / factor
    leaves = sharding * (factor > per_host) + min(factor, per_host) * replicas
    return Traffic(sharding, replicas, leaves)


wrong("11.5", "however many of its ranks are there").diff("""
Adds up what a host's ranks send.
- leaves = 0.0
- if factor > per_host:
-     leaves += sharding
- if ranks > per_host:
-     leaves += min(factor, per_host) * replicas
+ leaves = per_host * (sharding * (factor > per_host) + replicas * (ranks > per_host))
""")
wrong("11.5", "one for each place").diff("""
Counts one ring of replicas, whatever F.
- leaves = 0.0
- if factor > per_host:
-     leaves += sharding
- if ranks > per_host:
-     leaves += min(factor, per_host) * replicas
+ leaves = sharding * (factor > per_host) + replicas * (ranks > per_host)
""")


@wrong("11.5", "with one host nothing leaves it")
def traffic(units, ranks, per_host, factor):
    """Takes every replica for one on another host."""
    whole, copies = sum(units), ranks // factor
    sharding = (factor - 1) / factor * (3 * whole - units[0])
    replicas = 2 * (copies - 1) / copies * whole / factor
    return Traffic(sharding, replicas, sharding * (factor > per_host) + min(factor, per_host) * replicas)


@wrong("11.5", "send nothing out of it")
def traffic(units, ranks, per_host, factor):
    """Lets every ring leave the host, also those that stay inside."""
    whole, copies = sum(units), ranks // factor
    sharding = (factor - 1) / factor * (3 * whole - units[0])
    replicas = 2 * (copies - 1) / copies * whole / factor
    return Traffic(sharding, replicas, sharding + min(factor, per_host) * replicas)


@wrong("11.5", "expected a Traffic")
def traffic(units, ranks, per_host, factor):
    """Returns a plain tuple."""
    whole, copies = sum(units), ranks // factor
    sharding = (factor - 1) / factor * (3 * whole - units[0])
    replicas = 2 * (copies - 1) / copies * whole / factor
    return sharding, replicas, sharding * (factor > per_host) + min(factor, per_host) * replicas * (ranks > per_host)


@wrong("11.5", "R need not divide a shard")
def traffic(units, ranks, per_host, factor):
    """Counts in whole numbers."""
    whole, copies = sum(units), ranks // factor
    sharding = (factor - 1) * (3 * whole - units[0]) // factor
    replicas = 2 * (copies - 1) * whole // (factor * copies)
    leaves = sharding * (factor > per_host) + min(factor, per_host) * replicas * (ranks > per_host)
    return Traffic(sharding, replicas, leaves)


wrong("11.5", "by their replica rings as well").diff("""
Takes either the sharding rings or the replicas'.
- leaves = 0.0
- if factor > per_host:
-     leaves += sharding
- if ranks > per_host:
-     leaves += min(factor, per_host) * replicas
+ leaves = sharding if factor > per_host else factor * replicas * (ranks > per_host)
""")
wrong("11.5", "inside a host are on other hosts").diff("""
Lets replicas leave a host only where sharding groups fill it.
- leaves = 0.0
- if factor > per_host:
-     leaves += sharding
- if ranks > per_host:
-     leaves += min(factor, per_host) * replicas
+ leaves = sharding * (factor > per_host) + per_host * replicas * (factor >= per_host)
""")
wrong("11.5", "use `units[0]`, not `pop`").diff("""
Takes the root off the list that it was given.
- sharding = (factor - 1) / factor * (3 * whole - units[0])
+ root = units.pop(0)
+ sharding = (factor - 1) / factor * (3 * whole - root)
""")
wrong("11.5", "not the largest").diff("""
Takes the largest unit for the root.
- sharding = (factor - 1) / factor * (3 * whole - units[0])
+ sharding = (factor - 1) / factor * (3 * whole - max(units))
""")
wrong("11.5", "not the last").diff("""
Takes the last unit for the root.
- sharding = (factor - 1) / factor * (3 * whole - units[0])
+ sharding = (factor - 1) / factor * (3 * whole - units[-1])
""")
wrong("11.5", "6 ranks, 1 per host, F = 2: bytes that leave a host").diff("""
Sees no other hosts where each has one rank.
- if ranks > per_host:
+ if ranks > per_host > 1:
""")
wrong("11.5", "the root alone: bytes to the sharding group").diff("""
Leaves the root out if there are other units only.
- sharding = (factor - 1) / factor * (3 * whole - units[0])
+ sharding = (factor - 1) / factor * (3 * whole - (units[0] if len(units) > 1 else 0))
""")

# 11.6


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
