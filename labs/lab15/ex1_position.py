"""Exercise 15.1: A mesh by hand."""

from math import prod
from random import Random

import torch

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect
from minifsdp.course.workshop.references import reference
from minifsdp.mesh import Mesh

from .shared import made_everywhere


@reference(
    "15.1",
    hints=(
        "Rank numbers count along the last axis, like the digits of a number: the last digit changes fastest. By how "
        "much does a rank's number grow if its place on an axis grows by one?",
        "Go through the axes from the last to the first, with `stride = 1`. The place on an axis is `rank // stride % "
        "size`, and the group begins at `rank - place * stride` and has steps of `stride`. Then multiply `stride` by "
        "`size`. Build the results in the order of `sizes`.",
    ),
    forbids=(Mesh.place, Mesh.peers),
)
def position(rank: int, sizes: dict[str, int]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return a rank's place on each axis of a mesh, and its group on each axis.

    Args:
        rank: from 0 to the number of ranks - 1.
        sizes: the number of ranks on each axis, outermost axis first: rank numbers count along the last axis.

    Returns:
        First by axis the place, from 0 to the axis's size - 1. Then by axis the ranks that differ from this one on
        this axis only, and the rank itself, in the order of their places. Both have all axes, in any order.
    """
    places, groups, stride = {}, {}, 1
    for axis, size in reversed(sizes.items()):
        places[axis] = rank // stride % size
        first = rank - places[axis] * stride
        groups[axis] = [first + place * stride for place in range(size)]
        stride *= size
    return places, groups


MESHES = [
    {"pp": 2, "dp": 2, "tp": 2},
    {"dp": 8, "tp": 8},
    {"tp": 2, "pp": 4},
    {"pp": 3, "dp": 2, "tp": 4},
    {"dp": 6},
    {"pp": 1, "dp": 4, "cp": 1, "tp": 2},
    {"pp": 2, "dp": 3, "cp": 2, "tp": 2},
]


def drawn_meshes(seed):
    draw = Random(seed)
    for _ in range(8):
        axes = draw.sample(["pp", "dp", "cp", "ep", "tp"], draw.randint(1, 3))
        yield {axis: draw.choice((1, 2, 3, 4)) for axis in axes}


@check("15.1")
def check_position(answer, variant):
    """Places and groups are those of a grid of ranks, for every rank and every order of axes."""
    for sizes in (*MESHES, {"dp": variant.ranks, "tp": variant.size}, *drawn_meshes(variant.seed)):
        where = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        for number, name in enumerate(("places", "groups")):
            found = [located(answer, rank, sizes, where)[number] for rank in range(prod(sizes.values()))]
            slips = [slips_of_position(rank, sizes)[number] for rank in range(len(found))]
            ordered = [{axis: got[axis] for axis in sizes if axis in got} | got for got in found]
            for rank, (got, named) in enumerate(zip(ordered, made_everywhere(ordered, slips), strict=True)):
                slip = grouped_wrongly(got, rank) if number else None
                expect(
                    f"{name} of rank {rank}, {where}", got, right_position(rank, sizes)[number], slips=named, slip=slip
                )


def located(answer, rank, sizes, where):
    """The learner's two results, as dicts of numbers and of lists."""
    given = dict(sizes)
    got = answer(rank, given)
    expect(
        f"the sizes, after {where}",
        list(given.items()),
        list(sizes.items()),
        slip="`sizes` is the caller's: do not change it",
    )
    if not (isinstance(got, tuple | list) and len(got) == 2 and all(isinstance(each, dict) for each in got)):
        raise AnswerError(f"rank {rank}, {where}: expected two dicts, places and groups, got {describe(got)}")
    places, groups = got
    if odd := [each for each in groups.values() if not isinstance(each, list | tuple | range)]:
        raise AnswerError(f"rank {rank}, {where}: expected a list of ranks for each axis, got {describe(odd[0])}")
    return dict(places), {axis: list(group) for axis, group in groups.items()}


def grid_of(sizes):
    return torch.arange(prod(sizes.values())).view(*sizes.values())


def right_position(rank, sizes, grid=None):
    """Looked up in a grid of ranks."""
    grid = grid_of(sizes) if grid is None else grid
    at = [int(each) for each in (grid == rank).nonzero()[0]]
    places = dict(zip(sizes, at, strict=True))
    lines = [tuple(slice(None) if other == dim else place for other, place in enumerate(at)) for dim in range(len(at))]
    return places, {axis: grid[line].tolist() for axis, line in zip(sizes, lines, strict=True)}


def slips_of_position(rank, sizes):
    """The results of mistakes."""
    places, groups = right_position(rank, sizes)
    reverse = grid_of(dict(reversed(sizes.items())))
    first = right_position(rank, sizes, reverse.permute(*reversed(range(reverse.ndim))))
    strides, stride = {}, 1
    for axis, size in reversed(sizes.items()):
        strides[axis], stride = stride, stride * size
    return (
        {
            "rank numbers count along the last axis; here they count along the first": first[0],
            "an axis begins anew after its last rank: take the quotient modulo the axis's size": {
                axis: rank // strides[axis] for axis in sizes
            },
            "the step along an axis is the product of the sizes of the axes after it, not the size of the next one": {
                axis: rank // step % sizes[axis] for axis, step in nearest_steps(sizes).items()
            },
            "a place is counted in steps of the axes after this one: divide by their product first": {
                axis: rank % size for axis, size in sizes.items()
            },
            "these are the places of the axes in the opposite order": dict(
                zip(sizes, reversed(places.values()), strict=True)
            ),
        },
        {
            "rank numbers count along the last axis; here they count along the first": first[1],
            "neighbouring numbers are a group only on the last axis: others have larger steps": {
                axis: [rank // size * size + n for n in range(size)] for axis, size in sizes.items()
            },
            "the group contains the rank itself": {
                axis: [other for other in group if other != rank] for axis, group in groups.items()
            },
            "the group is in the order of places, which does not depend on the rank that asks": {
                axis: group[places[axis] :] + group[: places[axis]] for axis, group in groups.items()
            },
            "these are places within the group; return the ranks' numbers": {
                axis: [*range(len(group))] for axis, group in groups.items()
            },
            "these ranks have the same place on this axis; a group has those that differ on this axis only": {
                axis: grid_of(sizes).select(dim, places[axis]).flatten().tolist() for dim, axis in enumerate(sizes)
            },
            "the group begins with the rank whose place is 0, here it begins with the rank that asks": {
                axis: [rank + n * strides[axis] for n in range(size)] for axis, size in sizes.items()
            },
        },
    )


def nearest_steps(sizes):
    after = [*list(sizes.values())[1:], 1]
    return dict(zip(sizes, after, strict=True))


def grouped_wrongly(groups, rank):
    without = [axis for axis, group in groups.items() if rank not in group]
    return f"the rank's own number is missing in its group on {without[0]}" if without else None
