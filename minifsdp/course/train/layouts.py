"""The recipe of a run, from options, for as many ranks as there are; and if it does not go, the nearest that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import isqrt, log2, prod
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
DIVIDES = {"sequence": "tp", "attention": "cp", "zigzag": "cp"}
"""By word, the axis without which it says nothing."""
NEAREST = 3


def recipe_of(text: str, words: Mapping[str, Any], precision: str | None, ranks: int | None) -> Recipe | None:
    """The recipe of a text and of single words beside it; None: there are none.

    Args:
        text: as `Recipe.parse` takes it.
        words: by name, None where one is not given.
        precision: of what is gathered and computed; "fp32" is the usual one, which only contradicts another.
        ranks: as many as there are, if that is known. Data parallelism takes those that other axes leave, unless its
            size is given.

    Raises:
        ValueError: a word is unknown, given twice, impossible or without effect.
    """
    given = [worded(name, value) for name, value in words.items() if value is not None and value is not False]
    if not text and not given:
        return None
    if several := next((word for word in given if "," in word), ""):
        raise ValueError(f"{several}: give one word, as in --axes dp/tp; only --recipe takes several")
    said = [*split(text), *given]
    values = dict(map(named, said))
    if precision is not None and (precision != "fp32" or values.get("precision", precision) != precision):
        said.append(f"precision={precision}")
    others = prod(int(values[axis]) for axis in PARTS if axis != "dp" and values.get(axis, "").isdecimal())
    if ranks is not None and ranks > 0 < others and ranks % others == 0:
        said += [f"dp={ranks // others}"] * ("dp" not in values)
    recipe = Recipe.parse(",".join(said))
    for word, (name, _) in zip(said, map(named, said), strict=True):
        if (axis := DIVIDES.get(name)) and recipe.mesh.size(axis) == 1:
            raise ValueError(f"{word} has no effect with {axis}=1: give --{axis}")
    return recipe


def check_goes(recipe: Recipe, ranks: int, model: Model, beside: Callable[[Recipe], str]) -> None:
    """
    Args:
        beside: why the run's other settings do not go with a recipe; empty: they do.

    Raises:
        ValueError: so many ranks or the model cannot be divided so, or other settings do not go with it; the message
            has the nearest layouts that go.
    """

    def fault_of(other: Recipe) -> str:
        if other.mesh.ranks != ranks:
            return f"these are {other.mesh.ranks} ranks, and there are {ranks}"
        return fault(model, other) or beside(other)

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
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    for size in sorted({*small, *(number // size for size in small)}):
        for rest in _factored(number // size, names[1:]):
            yield {names[0]: size, **rest}
