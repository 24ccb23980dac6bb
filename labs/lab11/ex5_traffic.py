"""Exercise 11.5: The traffic that leaves a host."""

from collections.abc import Sequence
from typing import NamedTuple

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference

from .shared import planned


class Traffic(NamedTuple):
    sharding: float
    replicas: float
    leaves: float


@reference(
    "11.5",
    hints=(
        "With M = sum(units), R = ranks / F: in the sharding group two gathers and a reduce-scatter, (F - 1) / F each, "
        "less the root's second gather. To the replicas an all-reduce of M / F bytes over R ranks.",
        "sharding = (F - 1) / F * (3 M - root), replicas = 2 (R - 1) / R * M / F. Sharding rings leave a host only if "
        "F > per_host, and then there is one of them there. Replica rings: min(F, per_host) of them touch a host, and "
        "each leaves it if it has ranks elsewhere.",
    ),
)
def traffic(units: Sequence[int], ranks: int, per_host: int, factor: int) -> Traffic:
    """Return the bytes sent in a step of FULL_SHARD in groups of `factor` ranks, replicated across groups.

    Args:
        units: bytes of each unit, padded, the root first.
        ranks: N.
        per_host: G, the number of ranks on a host, which divides N.
        factor: F, which divides N, and either divides G or is a multiple of it.

    Returns:
        The bytes that a rank sends in its sharding group, the bytes that it sends to its replicas,
        and the bytes that leave a host. Each ring with ranks both on the host and elsewhere leaves
        the host once, with the bytes of one of its ranks.
    """
    whole, copies = sum(units), ranks // factor
    sharding = (factor - 1) / factor * (3 * whole - units[0])
    replicas = 2 * (copies - 1) / copies * whole / factor
    leaves = 0.0
    if factor > per_host:
        leaves += sharding
    if ranks > per_host:
        leaves += min(factor, per_host) * replicas
    return Traffic(sharding, replicas, leaves)


def walk(units, ranks, per_host, factor):
    """What each rank sends along each ring of a step, and what of it goes to another host. Of rank 0 and its host."""
    sharding, replicas = planned(ranks, factor)
    sent = {"sharding": [0.0] * ranks, "replicas": [0.0] * ranks, "leaves": [0.0] * ranks}

    def ring(kind, members, nbytes, rounds):
        for place, rank in enumerate(members):
            following = members[(place + 1) % len(members)]
            moved = rounds * (len(members) - 1) * nbytes / len(members)
            sent[kind][rank] += moved
            if following // per_host != rank // per_host:
                sent["leaves"][rank] += moved

    for number, nbytes in enumerate(units):
        for members in sharding:
            ring("sharding", members, nbytes, 2 if number == 0 else 3)  # gathers and a reduce-scatter
        for members in replicas:
            ring("replicas", members, nbytes / factor, 2)
    return sent["sharding"][0], sent["replicas"][0], sum(sent["leaves"][:per_host])


ALONE = (8, 4, 2)  # ranks, per host, factor: of a model that is one unit


@check("11.5")
def check_traffic(answer, variant):
    """What a rank sends to either group, and what leaves its host, is what its rings carry, for every F."""
    shards = [3 * variant.size + 1, 3 * variant.size + 6, 3, 9 + 3 * variant.seed]  # elements; 3 does not divide all
    for ranks, per_host, factor in (
        (24, 4, 2),
        (24, 4, 8),
        (24, 4, 4),
        (24, 4, 1),
        (24, 4, 24),
        (4, 4, 2),
        (4, 4, 4),
        (2 * variant.ranks, variant.ranks, variant.ranks),
        (18, 6, 3),
        (36, 6, 12),
        (6, 1, 2),
        (6, 1, 1),
        (12, 3, 1),
        (1, 1, 1),
        ALONE,
    ):
        units = [4 * factor * shard for shard in shards]  # padded for F, not for R
        if (ranks, per_host, factor) == ALONE:
            units = units[:1]
        whole = sum(units)
        given = list(units)
        got = answer(given, ranks, per_host, factor)
        sharding, replicas, leaves = walk(units, ranks, per_host, factor)
        setting = f"{ranks} ranks, {per_host} per host, F = {factor}" + ", the root alone" * (len(units) == 1)
        if getattr(got, "_fields", None) != ("sharding", "replicas", "leaves"):
            raise AnswerError(f"{setting}: expected a Traffic, `Traffic(...)`, got {type(got).__name__}")
        slip = "the list belongs to the caller, who may need it again: use `units[0]`, not `pop`"
        expect(f"{setting}: `units` afterwards", given, units, slip=slip)
        share, copies = (factor - 1) / factor, ranks // factor
        expect(
            f"{setting}: bytes to the sharding group",
            float(got[0]),
            sharding,
            slips={
                "the root is gathered once: it stays whole from forward to backward": share * 3 * whole,
                "every other unit is gathered twice, in forward and in backward": share * 2 * whole,
                "the root is the first of the units, not the largest": share * (3 * whole - max(units)),
                "the root is the first of the units, not the last": share * (3 * whole - units[-1]),
                "its rings have F ranks, not N": (ranks - 1) / ranks * (3 * whole - units[0]),
                "a rank need not send to itself: (F - 1) / F": float(3 * whole - units[0]),
            },
        )
        expect(
            f"{setting}: bytes to the replicas",
            float(got[1]),
            replicas,
            slips={
                "what is all-reduced is a shard, 1/F of the unit": 2 * (copies - 1) / copies * whole,
                "an all-reduce is a reduce-scatter and a gather: twice": (copies - 1) / copies * whole / factor,
                "its rings have R = N / F ranks, whatever the number of hosts": (
                    2 * (ranks // per_host - 1) / (ranks // per_host) * whole / factor
                ),
                "`//` drops what `/` keeps: R need not divide a shard": replicas // 1,
            },
        )
        expect(
            f"{setting}: bytes that leave a host",
            float(got[2]),
            leaves,
            slips={} if ranks == per_host else why_leaves(sharding, replicas, per_host, factor),
            slip="with one host nothing leaves it" if ranks == per_host else None,
        )


def why_leaves(sharding, replicas, per_host, factor):
    """What is left out or counted twice, by its words."""
    outside = sharding if factor > per_host else 0.0
    silent = "replicas of a group inside a host are on other hosts" if factor < per_host else ""
    return {
        silent or "larger groups leave the host by their replica rings as well": 0.0 if silent else sharding,
        "several replica rings leave a host at once, one for each place": outside + replicas,
        "a ring leaves a host once, with what one rank sends, however many of its ranks are there": per_host
        * (outside + replicas),
        "sharding groups inside a host send nothing out of it": sharding + min(factor, per_host) * replicas,
        "sharding groups larger than a host send out of it, too": min(factor, per_host) * replicas,
        "no more replica rings touch a host than it has ranks": outside + factor * replicas,
    }
