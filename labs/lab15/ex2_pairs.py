"""Exercise 15.2: Who talks to whom."""

from functools import partial
from itertools import combinations, pairwise, permutations
from random import Random

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect
from minifsdp.course.workshop.references import reference
from minifsdp.mesh import Mesh


@reference(
    "15.2",
    hints=(
        "Collect the groups of an axis first: `mesh.peers(rank, axis)` of all ranks, each group once. Which pairs in a "
        "group take part in one collective? Which stages exchange activations?",
        "The groups are `{tuple(mesh.peers(rank, axis)) for rank in range(mesh.ranks)}`. On `pp`, take "
        "`itertools.pairwise(group)`; on the other axes, `itertools.combinations(group, 2)`. Sort the pairs of all "
        "groups of an axis.",
    ),
)
def pairs(mesh: Mesh) -> dict[str, list[tuple[int, int]]]:
    """Return the pairs of ranks that exchange messages in a step, by axis.

    Any two members of one collective form a pair, with any algorithm of the backend. A pipeline has one stage on each
    rank, and only neighbouring stages exchange messages. Losses that are reported to all ranks do not count.

    Args:
        mesh: with the axes `mesh.divided`, the groups `mesh.peers(rank, axis)`, the places `mesh.place(rank, axis)` and
            the number of ranks, `mesh.ranks`. Of its axes, only `pp`, `dp` and `tp` occur here.

    Returns:
        For each axis of `mesh.divided` the pairs (a, b) with a < b, sorted, each once.
    """
    found = {}
    for axis in mesh.divided:
        groups = {tuple(mesh.peers(rank, axis)) for rank in range(mesh.ranks)}
        of_group = pairwise if axis == "pp" else partial(combinations, r=2)
        found[axis] = sorted(pair for group in groups for pair in of_group(group))
    return found


def meshes(seed):
    yield Mesh(pp=2, dp=2, tp=2)
    yield Mesh(pp=4, tp=2)
    yield Mesh(pp=2, dp=2, tp=4)
    yield Mesh(dp=4)
    yield Mesh(pp=3, dp=3, axes=("dp", "pp"))
    draw = Random(seed)
    for order in permutations(("pp", "dp", "tp")):
        yield Mesh(**{axis: draw.randint(1, 4) for axis in order}, axes=order)


@check("15.2")
def check_pairs(answer, variant):
    """Every pair of a tensor- or data-parallel group, and neighbouring stages of a pipeline; no others."""
    for mesh in (*meshes(variant.seed), Mesh(pp=variant.ranks, dp=2), Mesh(pp=variant.size, tp=2)):
        where = ", ".join(f"{axis}={mesh.size(axis)}" for axis in mesh.divided)
        got = answer(mesh)
        if not isinstance(got, dict):
            raise AnswerError(f"{where}: expected a dict of lists of pairs, got {describe(got)}")
        slip = "an axis with one rank has no pairs and is not in `mesh.divided`; all others are in the result"
        expect(f"axes, {where}", sorted(got), sorted(mesh.divided), slip=slip)
        for axis in mesh.divided:
            if not isinstance(got[axis], list | tuple) or not all(is_pair(each) for each in got[axis]):
                raise AnswerError(f"{axis}, {where}: expected a list of pairs of ranks, got {describe(got[axis])}")
        found = [[tuple(pair) for pair in got[axis]] for axis in mesh.divided]
        slips = [slips_of_pairs(mesh, axis) for axis in mesh.divided]
        for axis, one, named in zip(mesh.divided, found, slips, strict=True):
            expect(f"pairs along {axis}, {where}", one, right_pairs(mesh, axis), slips=named, slip=usual(one))


def is_pair(value):
    return isinstance(value, list | tuple) and len(value) == 2 and all(type(each) is int for each in value)


def right_pairs(mesh, axis):
    """Tested one by one: both ranks have the same place on all other axes."""
    ranks = range(mesh.ranks)
    return [(a, b) for a in ranks for b in ranks if a < b and are_along(mesh, axis, a, b)]


def are_along(mesh, axis, a, b):
    same = all(mesh.place(a, other) == mesh.place(b, other) for other in mesh.divided if other != axis)
    return same and (axis != "pp" or abs(mesh.place(a, axis) - mesh.place(b, axis)) == 1)


def slips_of_pairs(mesh, axis):
    """The results of mistakes."""
    groups = sorted({tuple(mesh.peers(rank, axis)) for rank in range(mesh.ranks)})
    ranks, right = range(mesh.ranks), right_pairs(mesh, axis)
    every = sorted(pair for group in groups for pair in combinations(group, 2))
    ends = [(group[0], group[-1]) for group in groups if len(group) > 2]
    ring = sorted({*right, *ends}) if axis == "pp" else sorted({*[p for g in groups for p in pairwise(g)], *ends})
    far = [(a, b) for a in ranks for b in ranks if a < b and mesh.place(a, axis) != mesh.place(b, axis)]
    return {
        "stages that are not neighbours exchange nothing: activations pass through the stages between them": (
            every if axis == "pp" else None
        ),
        "the last stage sends nothing to the first: a pipeline with one stage on each rank is no ring": (
            ring if axis == "pp" else None
        ),
        "all members of a collective form pairs, not only neighbours in a ring, which is one of several algorithms": (
            ring if axis != "pp" else None
        ),
        "this takes neighbours only; on this axis, all ranks of a group take part in one collective": (
            sorted(pair for group in groups for pair in pairwise(group)) if axis != "pp" else None
        ),
        "each pair occurs twice: return it once, smaller rank first": sorted([*right, *((b, a) for a, b in right)]),
        "a pair has the smaller rank first": sorted((b, a) for a, b in right),
        "these are the pairs of rank 0's group only; every rank has a group": sorted(
            pair for pair in right if set(pair) <= set(groups[0])
        ),
        "these are places within the group; return the ranks' numbers": sorted(
            pair
            for group in groups
            for pair in (pairwise if axis == "pp" else partial(combinations, r=2))(range(len(group)))
        ),
        "ranks of one group agree on all other axes: these differ on others, too": far,
        "the pairs are sorted, each once": [pair for group in groups for pair in right if pair[0] in group],
    }


def usual(got):
    if len(set(got)) < len(got):
        return "each pair occurs once: take each group once, not once for each of its ranks"
    return None
