"""Exercise 15.6: The best order on links of two speeds."""

from collections.abc import Mapping
from itertools import permutations
from random import Random
from typing import NamedTuple

from minifsdp.course.workshop.checking import check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.mesh import Mesh


class Link(NamedTuple):
    latency: float
    bandwidth: float


class Traffic(NamedTuple):
    messages: int
    size: float


@reference(
    "15.6",
    hints=(
        "Begin with one rank and one axis: on which hosts are the ranks of its group? One link or the other, never a "
        "mixture. Then add up the axes. Do all ranks of an axis have groups of the same kind?",
        "`hosts = {peer // host for peer in mesh.peers(rank, axis)}`; with more than one, take `across`. An axis takes "
        "`messages * latency + size / bandwidth`. Return the largest sum of all ranks.",
    ),
)
def seconds(mesh: Mesh, host: int, sent: Mapping[str, Traffic], inside: Link, across: Link) -> float:
    """Return the seconds for which the slowest rank communicates in a step.

    Args:
        mesh: with the axes `mesh.divided`, the groups `mesh.peers(rank, axis)` and the number of ranks, `mesh.ranks`.
            Its order of axes decides which ranks are neighbours.
        host: the number of ranks on a host: rank r is on host r // host.
        sent: by axis, the number of messages that a rank sends in a step, and their bytes, all together. It may have
            axes with one rank, whose messages are not sent.
        inside: a link between ranks of one host: seconds of latency for each message, and bytes per second.
        across: a link between hosts.

    A group with ranks on several hosts uses links across hosts, and its slowest link sets the pace of all its messages:
    they take as long as if all went across. A rank's messages follow one after another, also those of different axes.
    """

    def of_rank(rank: int) -> float:
        total = 0.0
        for axis in mesh.divided:
            hosts = {peer // host for peer in mesh.peers(rank, axis)}
            link = inside if len(hosts) == 1 else across
            total += sent[axis].messages * link.latency + sent[axis].size / link.bandwidth
        return total

    return max(of_rank(rank) for rank in range(mesh.ranks))


def cases(variant):
    """Meshes, ranks of a host, and traffic."""
    sent = {"pp": Traffic(4, 1e6), "dp": Traffic(2, 6e6), "tp": Traffic(40, 2e7)}
    for order in permutations(("pp", "dp", "tp")):
        yield Mesh(pp=2, dp=2, tp=2, axes=order), 4, sent
        yield Mesh(pp=2, dp=2, tp=2, axes=order), 2, sent
    yield Mesh(pp=2, dp=2, tp=2), 5, sent  # all axes cross, but no rank has groups of all three across
    yield Mesh(dp=4, tp=2), 4, sent
    yield Mesh(dp=3, tp=4), 6, sent  # the middle group of tp crosses, and its dp group does, too
    yield Mesh(pp=4, tp=3, axes=("pp", "tp")), 4, sent
    yield Mesh(pp=2, dp=3, tp=2, axes=("dp", "tp", "pp")), 7, sent
    yield Mesh(dp=4), 4, sent
    draw = Random(variant.seed)
    for _ in range(5):
        order = draw.sample(("pp", "dp", "tp"), 3)
        drawn = {axis: Traffic(draw.randint(1, 50), draw.uniform(1e5, 1e8)) for axis in order}
        yield Mesh(**{axis: draw.randint(1, 3) for axis in order}, axes=tuple(order)), draw.randint(1, 8), drawn
    yield Mesh(dp=variant.ranks, tp=3), variant.size, sent


INSIDE, ACROSS = Link(1e-5, 1e10), Link(1e-3, 1e9)


@check("15.6")
def check_seconds(answer, variant):
    """A group that crosses hosts takes the slow link for all its messages; the slowest rank counts."""
    rows = [(mesh, host, sent, answer(mesh, host, dict(sent), INSIDE, ACROSS)) for mesh, host, sent in cases(variant)]
    known = [slips_of_seconds(mesh, host, sent) for mesh, host, sent, _ in rows]
    always = [
        text for text in known[0] if all(close(row[-1], each[text]) for row, each in zip(rows, known, strict=True))
    ]
    for mesh, host, sent, got in rows:
        order = ", ".join(f"{axis}={mesh.size(axis)}" for axis in mesh.divided)
        what = f"seconds, axes {order}, {host} ranks on a host"
        expect(what, got, right_seconds(mesh, host, sent), slip=always[0] if always else None)


def close(got, wrong):
    return isinstance(got, int | float) and abs(got - wrong) <= 1e-9 * max(1e-12, abs(wrong))


def took(traffic, link):
    return traffic.messages * link.latency + traffic.size / link.bandwidth


def crosses(mesh, host, rank, axis):
    group = mesh.peers(rank, axis)
    return group[0] // host != group[-1] // host


def right_seconds(mesh, host, sent):
    found = [
        sum([took(sent[axis], ACROSS if crosses(mesh, host, rank, axis) else INSIDE) for axis in mesh.divided])
        for rank in range(mesh.ranks)
    ]
    return float(max(found))


def slips_of_seconds(mesh, host, sent):
    """The results of mistakes."""

    def each(rank, cross=crosses, cost=took, join=sum, axes=mesh.divided):
        links = {axis: ACROSS if cross(mesh, host, rank, axis) else INSIDE for axis in axes}
        return join([cost(sent[axis], link) for axis, link in links.items()] or [0.0])

    def over(join=max, **how):
        return float(join([each(rank, **how) for rank in range(mesh.ranks)]))

    def mixed(traffic_axis, rank):
        group = mesh.peers(rank, traffic_axis)
        share = sum(peer // host != rank // host for peer in group) / len(group)
        return share * took(sent[traffic_axis], ACROSS) + (1 - share) * took(sent[traffic_axis], INSIDE)

    return {
        "this is rank 0's time; on other ranks, more groups may cross hosts": each(0),
        "a step waits for the slowest rank: this is the mean of all": over(join=lambda all: sum(all) / len(all)),
        "this is the fastest rank's time; a step waits for the slowest": over(min),
        "each message also pays the latency of its link": over(
            cost=lambda traffic, link: traffic.size / link.bandwidth
        ),
        "latency is paid for each message, not once for an axis": over(
            cost=lambda traffic, link: link.latency + traffic.size / link.bandwidth
        ),
        "transfers are missing: bytes divided by the bandwidth": over(
            cost=lambda traffic, link: traffic.messages * link.latency
        ),
        "a group is inside a host if all its ranks are, not if its size is at most a host's": over(
            cross=lambda mesh, host, rank, axis: mesh.size(axis) > host
        ),
        "the axes follow one after another: add up their times": over_axes(each, mesh),
        "this adds up the slowest rank of each axis; no single rank has all of them": float(
            sum(max(each(rank, axes=[axis]) for rank in range(mesh.ranks)) for axis in mesh.divided)
        ),
        "`sent` may have axes with one rank, which send nothing: go through `mesh.divided`": over(axes=[*sent]),
        "the slowest link sets the pace of the group: no part of its messages is faster": float(
            max(sum(mixed(axis, rank) for axis in mesh.divided) for rank in range(mesh.ranks))
        ),
        "more than the first axis may cross hosts, and the first need not: look at the hosts of each group": float(
            sum(took(sent[axis], INSIDE if place else ACROSS) for place, axis in enumerate(mesh.divided))
        ),
        "rank r is on host r // host: neighbouring numbers share one": over(
            cross=lambda mesh, host, rank, axis: len({peer % host for peer in mesh.peers(rank, axis)}) > 1
        ),
        "this takes the fast link for groups that cross hosts, and the slow one for the others": over(
            cross=lambda *where: not crosses(*where)
        ),
        "only a rank's next neighbour is looked at; the group may have others on another host": over(
            cross=lambda mesh, host, rank, axis: next_of(mesh, rank, axis) // host != rank // host
        ),
    }


def over_axes(each, mesh):
    return float(max(each(rank, join=max) for rank in range(mesh.ranks)))


def next_of(mesh, rank, axis):
    group = list(mesh.peers(rank, axis))
    return group[(group.index(rank) + 1) % len(group)]
