"""Idle time of a recipe's pipeline, by the papers' formulas (pipeline.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minifsdp.cost import pipeline

if TYPE_CHECKING:
    from minifsdp.recipe import Recipe


def bubble(recipe: Recipe) -> float:
    """The idle share of all ranks' time if backward takes twice as long as forward; 0 without a pipeline."""
    if recipe.pipeline is None:
        return 0.0
    ranks, micros = recipe.mesh.pp, recipe.micro_batches
    if recipe.pipeline.order == "zb-h1":
        return pipeline.zero_bubble(ranks, micros)
    return pipeline.bubble(ranks, micros, recipe.pipeline.stages)
