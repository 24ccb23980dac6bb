"""Exercise 15.9: A checkpoint from one layout to another."""

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod
from random import Random
from typing import NamedTuple

import torch

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect
from minifsdp.course.workshop.references import reference

Box = tuple[tuple[int, int], ...]


class Read(NamedTuple):
    file: int
    name: str
    source: tuple[slice, ...]
    target: tuple[slice, ...]


@reference(
    "15.9",
    hints=(
        "Take one wanted part and one saved part of the same parameter. In each dimension, both are intervals; what "
        "they have in common is an interval, too, or empty. Where does it begin in the saved part, and where in the "
        "wanted one?",
        "`low, high = max(a, c), min(b, d)` in each dimension; leave the pair out if any `low >= high`. The source is "
        "`slice(low - c, high - c)` for a saved interval (c, d), the target `slice(low - a, high - a)` for a wanted "
        "interval (a, b). Of equal saved parts, use the first.",
    ),
)
def reads(saved: Sequence[Mapping[str, Box]], wanted: Mapping[str, Box]) -> list[Read]:
    """Return the reads that make up a rank's new parts of parameters from the files of a checkpoint.

    A part is a box of a parameter: for each dimension of the parameter, the first index and the one after the last.

    Args:
        saved: for each file, the parts in it by the name of their parameter. Parts of a parameter in two files are
            either equal, because the ranks that have saved them were replicas, or have nothing in common. All together
            they are the whole parameter.
        wanted: the rank's new parts, by name.

    Returns:
        Reads, in any order, that fill every element of the wanted parts once: the number of a file, the name of a
        parameter, the slices of the saved part, and the slices of the wanted part that they go to. Both count from the
        first element of their part. No read is empty.
    """
    found = []
    for name, box in wanted.items():
        seen = set()
        for file, parts in enumerate(saved):
            part = parts.get(name)
            if part is None or part in seen:
                continue
            seen.add(part)
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, part, strict=True)]
            if all(low < high for low, high in common):
                source = tuple(slice(low - c, high - c) for (low, high), (c, _) in zip(common, part, strict=True))
                target = tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(common, box, strict=True))
                found.append(Read(file, name, source, target))
    return found


SHAPES = {"embed": (12, 4), "0.up": (8, 6), "0.norm": (5,), "1.down": (6, 8), "1.bias": (7,), "head": (9, 4)}
STAGES = [["embed", "0.up", "0.norm"], ["1.down", "1.bias", "head"]]
DIMS = {"embed": 0, "0.up": 0, "1.down": 1, "head": 0}  # along which tensor parallelism cuts


def cut(size, parts, place):
    each = -(-size // parts)
    return min(place * each, size), min((place + 1) * each, size)


def part_of(name, tp, place):
    """A rank's box: cut along one dimension, or whole."""
    return tuple(cut(size, tp, place) if dim == DIMS.get(name) else (0, size) for dim, size in enumerate(SHAPES[name]))


def layout(pp, tp, dp=1):
    """The parts of each rank of a mesh pp x dp x tp; replicas have the same."""
    stages = STAGES if pp == 2 else [[*SHAPES]]
    ranks = [(stage, place) for stage in stages for _ in range(dp) for place in range(tp)]
    return [without_empty({name: part_of(name, tp, place) for name in stage}) for stage, place in ranks]


def without_empty(parts):
    return {name: box for name, box in parts.items() if all(a < b for a, b in box)}


def rows_of(dp):
    """Fully sharded along the first dimension."""
    whole = {name: tuple((0, size) for size in shape) for name, shape in SHAPES.items()}
    return [
        without_empty({name: (cut(box[0][1], dp, rank), *box[1:]) for name, box in whole.items()}) for rank in range(dp)
    ]


def drawn_boxes(seed):
    """A parameter of two dimensions in boxes, saved by several files in any order; a box of it is wanted."""
    draw = Random(seed)
    for _ in range(6):
        shape = draw.randint(2, 9), draw.randint(2, 9)
        cuts = [sorted({0, size, *(draw.randint(0, size) for _ in range(2))}) for size in shape]
        boxes = list(product(*map(pairwise, cuts)))
        files = [{"w": box} for box in boxes + draw.sample(boxes, 1)]
        draw.shuffle(files)
        low = [draw.randrange(size) for size in shape]
        yield (
            files,
            {"w": tuple((at, draw.randint(at + 1, size)) for at, size in zip(low, shape, strict=True))},
            {"w": shape},
        )


def cases(variant):
    """By name: the files, what each rank wants, and the shapes."""
    yield "pp=2, tp=2 to tp=4", layout(2, 2), layout(1, 4), SHAPES
    yield "pp=2, tp=2 to one process", layout(2, 2), layout(1, 1), SHAPES
    yield "pp=2, dp=2, tp=2 to pp=2, tp=2", layout(2, 2, 2), layout(2, 2), SHAPES
    yield "tp=4 to pp=2, tp=2", layout(1, 4), layout(2, 2), SHAPES
    yield "pp=2, tp=2 to rows of dp=2", layout(2, 2), rows_of(2), SHAPES
    yield "tp=2 to tp=3", layout(1, 2), layout(1, 3), SHAPES
    yield f"rows of dp={variant.ranks} to tp={variant.size}", rows_of(variant.ranks), layout(1, variant.size), SHAPES
    for number, (files, wanted, shapes) in enumerate(drawn_boxes(variant.seed)):
        yield f"boxes of {list(shapes['w'])}, number {number}", files, [wanted], shapes


def box_slices(box):
    return tuple(slice(a, b) for a, b in box)


def size_of(box):
    return tuple(b - a for a, b in box)


@check("15.9")
def check_reads(answer, variant):
    """Each wanted element is read once, from the right place of a file that has it."""
    for where, saved, of_ranks, shapes in cases(variant):
        first = 0
        whole = {}
        for name, shape in shapes.items():
            whole[name] = torch.arange(first, first + prod(shape)).view(shape)
            first += prod(shape)
        files = [{name: whole[name][box_slices(box)] for name, box in parts.items()} for parts in saved]
        for rank, wanted in enumerate(of_ranks):
            given = [dict(parts) for parts in saved], dict(wanted)
            got = answer(*given)
            slip = "`saved` and `wanted` are the caller's: do not change them"
            expect(f"the arguments, after {where}", given == ([*saved], wanted), True, slip=slip)
            explained(listed(got, where), files, saved, wanted, whole, f"{where}, rank {rank}")


def explained(found, *there):
    """Carry the reads out; if they are wrong and become right once a mistake is undone, name the mistake."""
    try:
        carry_out(found, *there)
    except AnswerError as error:
        said = str(error).partition("\nlikely slip")[0]
        for slip, undone in UNDONE.items():
            if is_right([undone(*each) for each in found], *there):
                raise AnswerError(f"{said}\nlikely slip: {slip}") from None
        raise


def is_right(found, *there):
    try:
        carry_out(found, *there)
    except AnswerError:
        return False
    return True


def to_the_end(slices):
    return tuple(slice(each.start, (each.start or 0) + (each.stop or 0)) for each in slices)


UNDONE = {
    "source and target have changed places": lambda file, name, source, target: (file, name, target, source),
    "a slice ends after its last index: add its length to its start": lambda file, name, source, target: (
        (file, name, to_the_end(source), to_the_end(target))
    ),
}


def listed(got, where):
    """The learner's reads, as tuples."""
    if not isinstance(got, list | tuple):
        raise AnswerError(f"{where}: expected a list of Read, got {describe(got)}")
    for each in got:
        if not (isinstance(each, tuple) and len(each) == 4 and all(is_slices(part) for part in each[2:])):
            raise AnswerError(f"{where}: expected a Read with two tuples of slices, got {describe(each)}")
    return [tuple(each) for each in got]


def is_slices(value):
    return isinstance(value, tuple) and all(isinstance(each, slice) for each in value)


def carry_out(found, files, saved, wanted, whole, where):
    """Copy what the reads say, and compare."""
    there = {name: torch.full(size_of(box), -1) for name, box in wanted.items()}
    times = {name: torch.zeros(size_of(box), dtype=torch.int64) for name, box in wanted.items()}
    for file, name, source, target in found:
        what = f"{where}, {name} of file {file}"
        if name not in wanted:
            raise AnswerError(
                f"{what}: this parameter is not wanted\nlikely slip: go through `wanted`, not through all names"
            )
        if type(file) is not int or not 0 <= file < len(files) or name not in files[file]:
            raise AnswerError(
                f"{what}: the file does not have it\nlikely slip: a stage's files have its own parameters only"
            )
        check_slices(source, files[file][name].shape, f"{what}, source", SOURCE)
        check_slices(target, there[name].shape, f"{what}, target", TARGET)
        piece = files[file][name][source]
        place = there[name][target]
        if piece.shape != place.shape:
            raise AnswerError(
                f"{what}: the source has shape {list(piece.shape)}, the target {list(place.shape)}\nlikely slip: both "
                "are the part in common, counted from different elements"
            )
        place.copy_(piece)
        times[name][target] += 1
    for name, box in wanted.items():
        if (most := int(times[name].max())) > 1:
            several = sum(name in parts for parts in saved) > len({parts[name] for parts in saved if name in parts})
            slip = "replicas have saved equal parts: read one of them" if several else "parts overlap: read each once"
            raise AnswerError(f"{where}, {name}: elements are read {most} times\nlikely slip: {slip}")
        if int(times[name].min()) == 0:
            missing = int((times[name] == 0).sum())
            raise AnswerError(
                f"{where}, {name}: {missing} of {times[name].numel()} elements are not read\nlikely slip: a wanted "
                "part may lie in several files, and in any dimension"
            )
        slip = "the elements are read from another place: both slices begin at the part in common"
        expect(f"{where}, the elements of {name}", there[name], whole[name][box_slices(box)], slip=slip)


SOURCE = "slices of a file count from the first element of the saved part, not of the parameter"
TARGET = "slices of the target count from the first element of the wanted part, not of the parameter"


def check_slices(slices, shape, what, slip):
    if len(slices) != len(shape):
        raise AnswerError(
            f"{what}: expected {len(shape)} slices, got {len(slices)}\nlikely slip: one for each dimension"
        )
    for each, size in zip(slices, shape, strict=True):
        begin, end = each.start or 0, size if each.stop is None else each.stop
        if each.step not in (None, 1):
            raise AnswerError(f"{what}: expected a slice without a step, got {each}")
        if begin >= end:
            raise AnswerError(
                f"{what}: the slice {begin}:{end} is empty\nlikely slip: parts with nothing in common: leave them out"
            )
        if begin < 0 or end > size:
            raise AnswerError(f"{what}: the slice {begin}:{end} is outside of 0:{size}\nlikely slip: {slip}")
