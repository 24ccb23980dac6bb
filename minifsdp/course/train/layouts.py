"""The recipe of a run, from options, for as many ranks as there are; and if it does not go, the nearest that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import log2, prod
from typing import Any

from minifsdp.cost.faults import fault
from minifsdp.cost.model import Model
from minifsdp.divisions import ContextParallel, DataParallel, PipelineParallel, TensorParallel
from minifsdp.recipe import Recipe
from minifsdp.words import named, split, worded

PARTS: dict[str, tuple[str, type]] = {
    "pp": ("pipeline", PipelineParallel),
    "dp": ("data", DataParallel),
    "cp": ("context", ContextParallel),
    "tp": ("tensor", TensorParallel),
}
"""By axis, what divides something on it in a recipe."""
NEAREST = 3


def recipe_of(text: str, words: Mapping[str, Any], precision: str, ranks: int | None) -> Recipe | None:
    """The recipe of a text and of single words beside it; None: there are none.

    Args:
        text: as `Recipe.parse` takes it.
        words: by name, None where one is not given.
        precision: of what is gathered and computed; "fp32" is left to the text.
        ranks: as many as there are, if that is known. Data parallelism takes those that other axes leave, unless its
            size is given.

    Raises:
        ValueError: a word is unknown, given twice, impossible or without effect.
    """
    given = [worded(name, value) for name, value in words.items() if value is not None and value is not False]
    if not text and not given:
        return None
    said = [*split(text), *given, *[f"precision={precision}"] * (precision != "fp32")]
    values = dict(map(named, said))
    others = prod(int(values[axis]) for axis in PARTS if axis != "dp" and values.get(axis, "").isdecimal())
    if ranks and others and ranks % others == 0:
        said += [f"dp={ranks // others}"] * ("dp" not in values)
    recipe = Recipe.parse(",".join(said))
    for word, axis in (("sequence", "tp"), ("attention", "cp")):
        if word in values and recipe.mesh.size(axis) == 1:
            raise ValueError(f"{worded(word, words.get(word))} has no effect with {axis}=1: give --{axis}")
    return recipe


def check_goes(recipe: Recipe, ranks: int, model: Model, batch: int, accumulate: int) -> None:
    """
    Raises:
        ValueError: so many ranks, the model or the batch cannot be divided so; the message has the nearest layouts that
            go.
    """

    def fault_of(other: Recipe) -> str:
        if other.mesh.ranks != ranks:
            return f"these are {other.mesh.ranks} ranks, and there are {ranks}"
        parts = other.mesh.dp * other.micro_batches * accumulate
        uneven = f"--batch {batch} is no multiple of {parts}: give one" if batch % parts else ""
        return fault(model, other) or uneven

    if found := fault_of(recipe):
        raise ValueError(f"{recipe}: {found}; layouts that go: {cures(recipe, ranks, lambda it: not fault_of(it))}")


def cures(recipe: Recipe, ranks: int, goes: Callable[[Recipe], bool]) -> str:
    """The nearest recipes that go, in words."""
    near = [str(other) or "dp=1" for _, other in zip(range(NEAREST), nearest(recipe, ranks, goes), strict=False)]
    return " or ".join(near) or "none of these axes with this model and batch"


def nearest(recipe: Recipe, ranks: int, goes: Callable[[Recipe], bool]) -> Iterator[Recipe]:
    """Recipes for so many ranks that go: first those whose axes' sizes differ least, by factors."""
    sizes = {axis: recipe.mesh.size(axis) for axis in PARTS}

    def distance(others: Mapping[str, int]) -> tuple[float, int]:
        return sum(abs(log2(others[axis] / sizes[axis])) for axis in PARTS), -others["dp"]

    for others in sorted(_factored(ranks, [*PARTS]), key=distance):
        try:
            other = resized(recipe, others)
        except ValueError:
            continue
        if goes(other):
            yield other


def resized(recipe: Recipe, sizes: Mapping[str, int]) -> Recipe:
    """The same with other sizes of axes; an axis of one rank divides nothing any longer.

    Raises:
        ValueError: a size does not go with what is divided.
    """
    parts = {
        name: (getattr(recipe, name) or kind()) if sizes[axis] > 1 else None for axis, (name, kind) in PARTS.items()
    }
    if sizes["cp"] > 1:
        parts["data"] = recipe.data or DataParallel()
    replicas = recipe.mesh.replicate if recipe.mesh.replicate < sizes["dp"] * sizes["cp"] else 1
    axes = tuple(dict.fromkeys([*recipe.mesh.axes, *(axis for axis in sizes if sizes[axis] > 1)]))
    return replace(recipe, mesh=replace(recipe.mesh, **sizes, replicate=replicas, axes=axes), **parts)


def _factored(number: int, names: list[str]) -> Iterator[dict[str, int]]:
    """All ways to write a number as a product, by name."""
    if len(names) == 1:
        yield {names[0]: number}
        return
    for size in range(1, number + 1):
        if number % size == 0:
            for rest in _factored(number // size, names[1:]):
                assert prod(rest.values()) * size == number
                yield {names[0]: size, **rest}
