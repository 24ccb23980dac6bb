"""Wrong answers to lab 11, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 11.1


@wrong("11.1", "are in each other's place")
def plan_groups(ranks, factor):
    """Exchanges the two sorts."""
    if factor < 1 or ranks % factor:
        raise ValueError
    sharding = [list(range(low, low + factor)) for low in range(0, ranks, factor)]
    return [list(range(place, ranks, factor)) for place in range(factor)], sharding


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


@wrong("11.1", "not the first of each group alone")
def plan_groups(ranks, factor):
    """Lets the first ranks speak for their groups, as in a reduction tree."""
    if factor < 1 or ranks % factor:
        raise ValueError
    sharding = [list(range(low, low + factor)) for low in range(0, ranks, factor)]
    return sharding, [list(range(0, ranks, factor))]


@wrong("11.1", "of one place in *different* sharding groups")
def plan_groups(ranks, factor):
    """Takes neighbours for replicas as well."""
    if factor < 1 or ranks % factor:
        raise ValueError
    size = ranks // factor
    sharding = [list(range(low, low + factor)) for low in range(0, ranks, factor)]
    return sharding, [list(range(low, low + size)) for low in range(0, ranks, size)]


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


# 11.3


@wrong("11.3", "overlaps nothing")
def start_across(unit):
    """Waits at once."""
    unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
    unit.across.wait()


@wrong("11.3", "every further host makes the step larger")
def start_across(unit):
    """Sums."""
    unit.across = comm.all_reduce(unit.mean, unit.replicas)


@wrong("11.3", "before the second stage")
def start_across(unit):
    """Accumulates first and reduces what is in `.grad`."""
    unit.deliver(unit.mean)
    unit.across = comm.all_reduce(unit.flat.shard.grad, unit.replicas, comm.MEAN)


@wrong("11.3", "a copy was reduced")
def start_across(unit):
    """Reduces a copy, and forgets it."""
    unit.across = comm.all_reduce(unit.mean.clone(), unit.replicas, comm.MEAN)


@wrong("11.3", "nobody can wait for it")
def start_across(unit):
    """Drops the handle."""
    comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)


@wrong("11.3", "the sharding group has had its turn")
def start_across(unit):
    """Reduces over the sharding group once more."""
    unit.across = comm.all_reduce(unit.mean, unit.group, comm.MEAN)


@wrong("11.3", "is the task of `finish_across`")
def start_across(unit):
    """Does it all in one go."""
    unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
    unit.across.wait()
    unit.deliver(unit.mean)


@wrong("11.3", "each trains a model of its own")
def start_across(unit):
    """Takes the mean of the sharding group for the mean of all."""


# 11.4


@wrong("11.4", "may be anything")
def finish_across(unit):
    """Does not wait."""
    if unit.across is None:
        return
    unit.deliver(unit.mean)
    unit.across = unit.mean = None


@wrong("11.4", "then there is nothing to do")
def finish_across(unit):
    """Cannot bear a unit with nothing under way."""
    unit.across.wait()
    unit.deliver(unit.mean)
    unit.across = unit.mean = None


@wrong("11.4", "is delivered twice")
def finish_across(unit):
    """Does not forget what it has finished."""
    if unit.across is None:
        return
    unit.across.wait()
    unit.deliver(unit.mean)


@wrong("11.4", "the other way round")
def finish_across(unit):
    """Delivers and then waits."""
    if unit.across is None:
        return
    unit.deliver(unit.mean)
    unit.across.wait()
    unit.across = unit.mean = None


@wrong("11.4", "divided again")
def finish_across(unit):
    """Makes a mean of the mean."""
    if unit.across is None:
        return
    unit.across.wait()
    unit.deliver(unit.mean / unit.replicas.size())
    unit.across = unit.mean = None


@wrong("11.4", "earlier micro-batches are gone")
def finish_across(unit):
    """Sets `.grad` in place of adding to it."""
    if unit.across is None:
        return
    unit.across.wait()
    unit.flat.shard.grad = unit.mean
    unit.across = unit.mean = None


@wrong("11.4", "never handed over")
def finish_across(unit):
    """Waits, and that is all."""
    if unit.across is None:
        return
    unit.across.wait()
    unit.across = unit.mean = None


@wrong("11.4", "a buffer that has been given away")
def finish_across(unit):
    """Keeps the mean."""
    if unit.across is None:
        return
    unit.across.wait()
    unit.deliver(unit.mean)
    unit.across = None


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


@wrong("11.5", "however many of its ranks are there")
def traffic(units, ranks, per_host, factor):
    """Adds up what a host's ranks send."""
    whole, copies = sum(units), ranks // factor
    sharding = (factor - 1) / factor * (3 * whole - units[0])
    replicas = 2 * (copies - 1) / copies * whole / factor
    leaves = per_host * (sharding * (factor > per_host) + replicas * (ranks > per_host))
    return Traffic(sharding, replicas, leaves)


@wrong("11.5", "one for each place")
def traffic(units, ranks, per_host, factor):
    """Counts one ring of replicas, whatever F."""
    whole, copies = sum(units), ranks // factor
    sharding = (factor - 1) / factor * (3 * whole - units[0])
    replicas = 2 * (copies - 1) / copies * whole / factor
    leaves = sharding * (factor > per_host) + replicas * (ranks > per_host)
    return Traffic(sharding, replicas, leaves)


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


# 11.6


@wrong("11.6", "what does not fit cannot be chosen")
def choose(factors, capacity, memory, seconds, rest):
    """Looks at time alone."""
    factor = min(sorted(factors), key=seconds)
    names = {1: "data parallelism", max(factors): "full sharding"}
    return Choice(names.get(factor, "hybrid sharding"), factor)


@wrong("11.6", "and not always: ask `seconds`")
def choose(factors, capacity, memory, seconds, rest):
    """Takes the smallest that fits."""
    names = {1: "data parallelism", max(factors): "full sharding"}
    for factor in sorted(factors):
        if memory(factor) <= capacity:
            return Choice(names.get(factor, "hybrid sharding"), factor)
    return Choice("more ranks" if rest < capacity else "split layers", None)


@wrong("11.6", "not more than the capacity fits")
def choose(factors, capacity, memory, seconds, rest):
    """Wants room to spare."""
    fitting = [factor for factor in sorted(factors) if memory(factor) < capacity]
    if not fitting:
        return Choice("more ranks" if rest < capacity else "split layers", None)
    factor = min(fitting, key=seconds)
    return Choice({1: "data parallelism", max(factors): "full sharding"}.get(factor, "hybrid sharding"), factor)


@wrong("11.6", "in whatever order the factors come")
def choose(factors, capacity, memory, seconds, rest):
    """Takes the first of equally fast ones as they come."""
    fitting = [factor for factor in factors if memory(factor) <= capacity]
    if not fitting:
        return Choice("more ranks" if rest < capacity else "split layers", None)
    factor = min(fitting, key=seconds)
    return Choice({1: "data parallelism", max(factors): "full sharding"}.get(factor, "hybrid sharding"), factor)


@wrong("11.6", "goes by the name of full sharding")
def choose(factors, capacity, memory, seconds, rest):
    """Calls everything above 1 hybrid."""
    fitting = [factor for factor in sorted(factors) if memory(factor) <= capacity]
    if not fitting:
        return Choice("more ranks" if rest < capacity else "split layers", None)
    factor = min(fitting, key=seconds)
    return Choice("data parallelism" if factor == 1 else "hybrid sharding", factor)


@wrong("11.6", "between 1 and the largest it is hybrid")
def choose(factors, capacity, memory, seconds, rest):
    """Calls everything above 1 full sharding."""
    fitting = [factor for factor in sorted(factors) if memory(factor) <= capacity]
    if not fitting:
        return Choice("more ranks" if rest < capacity else "split layers", None)
    factor = min(fitting, key=seconds)
    return Choice("data parallelism" if factor == 1 else "full sharding", factor)


@wrong("11.6", "so there is none to return")
def choose(factors, capacity, memory, seconds, rest):
    """Shards as far as it goes if nothing fits."""
    fitting = [factor for factor in sorted(factors) if memory(factor) <= capacity]
    factor = min(fitting, key=seconds) if fitting else max(factors)
    return Choice({1: "data parallelism", max(factors): "full sharding"}.get(factor, "hybrid sharding"), factor)


@wrong("11.6", "only splitting what is whole helps")
def choose(factors, capacity, memory, seconds, rest):
    """Believes that more ranks always help."""
    fitting = [factor for factor in sorted(factors) if memory(factor) <= capacity]
    if not fitting:
        return Choice("more ranks", None)
    factor = min(fitting, key=seconds)
    return Choice({1: "data parallelism", max(factors): "full sharding"}.get(factor, "hybrid sharding"), factor)
