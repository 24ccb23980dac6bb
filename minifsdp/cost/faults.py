"""Why a model cannot be trained by a recipe."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

from minifsdp.cost.model import Model

if TYPE_CHECKING:
    from minifsdp.recipe import Recipe


def fault(model: Model, recipe: Recipe) -> str:
    """In words, with the cure; empty: it can."""
    if found := indivisible(recipe, model.root["position.weight"][0]):
        return found
    if recipe.tensor is not None:
        tp, (vocabulary, _) = recipe.mesh.tp, model.root["embed.weight"]
        if model.heads % tp:
            return f"{model.heads} heads cannot be shared by {tp} ranks: choose a multiple of {tp} heads"
        if vocabulary <= -(-vocabulary // tp) * (tp - 1):
            return f"{vocabulary} tokens of the vocabulary leave one of {tp} ranks without any: choose fewer ranks"
    if recipe.pipeline is not None:
        stages, layers = recipe.mesh.pp * recipe.pipeline.stages, len(model.blocks)
        if layers < stages:
            return f"{layers} blocks make no {stages} stages: choose {stages} or more layers"
        if stages > 1 and "head.weight" not in model.root:
            return "the embedding's weight is the head's, too, and they are in two stages: leave tied=True or pp out"
    return ""


def indivisible(recipe: Recipe, tokens: int) -> str:
    """Why sequences of so many tokens cannot be shared, with the cure; empty: they can."""
    ranks = recipe.mesh.cp * (recipe.mesh.tp if recipe.tensor is not None and recipe.tensor.sequence else 1)
    in_two = recipe.context is not None and recipe.context.zigzag
    multiple = lcm(ranks, 2 * recipe.mesh.cp if in_two else 1)
    if tokens % multiple == 0:
        return ""
    how = ", in two chunks each" if in_two else ""
    return f"{tokens} tokens cannot be shared by {ranks} ranks{how}: choose a context that is a multiple of {multiple}"


def unpredicted(model: Model, recipe: Recipe) -> str:
    """Why `cost` and `sent` have no numbers for a model that can be trained, with the cure; empty: they have."""
    if recipe.data is not None and recipe.data.precision != "fp32":
        return f"there is no arithmetic of precision={recipe.data.precision} yet: leave it out"
    if model.frozen:
        return f"there is no arithmetic of frozen parameters, such as {model.frozen[0]}: train all of them"
    return ""
