"""Why a model cannot be trained by a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minifsdp.cost.model import Model

if TYPE_CHECKING:
    from minifsdp.recipe import Recipe


def fault(model: Model, recipe: Recipe) -> str:
    """In words, with the cure; empty: it can."""
    tp, context = recipe.mesh.tp, model.root["position.weight"][0]
    if recipe.tensor is not None and recipe.tensor.sequence and context % tp:
        return f"{context} tokens cannot be shared by {tp} ranks: choose a multiple for --context"
    if recipe.tensor is not None and model.heads % tp:
        return f"{model.heads} heads cannot be shared by {tp} ranks: choose --heads or --ranks so that they can"
    vocabulary, _ = model.root["embed.weight"]
    if recipe.tensor is not None and vocabulary <= -(-vocabulary // tp) * (tp - 1):
        return f"{vocabulary} tokens of the vocabulary leave one of {tp} ranks without any: choose fewer ranks"
    if recipe.data is not None and recipe.data.precision != "fp32":
        return f"there is no arithmetic of precision={recipe.data.precision} yet: leave it out"
    if recipe.pipeline is not None:
        stages, layers = recipe.mesh.pp * recipe.pipeline.stages, len(model.blocks)
        if layers < stages:
            return f"{layers} blocks make no {stages} stages: choose --layers {stages} or more"
    return ""
