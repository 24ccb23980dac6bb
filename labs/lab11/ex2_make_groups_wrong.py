"""Wrong answers to exercise 11.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


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
