"""Wrong answers to exercise 11.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


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
