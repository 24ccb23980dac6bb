"""Checks of `build` before it divides anything: a plain model with values, the same one on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp import comm
from minifsdp.nesting import keeper_of
from minifsdp.process_groups import has_store
from minifsdp.recipe import Recipe


def divided_before(model: Any) -> str:
    """The wrapper or the styles that have a model, with the cure; empty: none."""
    cure = "give build a plain GPT, which it divides as the recipe says"
    if not isinstance(model, nn.Module):
        return ""
    for name, module in model.named_modules():
        if (keeper := keeper_of(module)) is not None:
            return f"{keeper} has {name or 'the model'} ({type(module).__name__}) already: {cure}"
    names = (f"{name} is a DTensor already: {cure}" for name, p in model.named_parameters() if isinstance(p, DTensor))
    return next(names, "")


def without_values(model: nn.Module) -> str:
    """A parameter or buffer on the meta device, with the cure; empty: none."""
    cure = "call model.to_empty(device=...) and initialize it, or load it"
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next((f"{name} is on the meta device, without values: {cure}" for name, t in tensors if t.is_meta), "")


def check_same(model: Any, recipe: Any) -> None:
    """Compare recipes and models among all ranks, if there are several, in one message that is not a step's.

    Raises:
        ValueError: they differ; all ranks raise, and say which ranks have what.
    """
    if not comm.has_world() or comm.world().size() < 2 or not has_store(comm.world()):
        return
    said = str(recipe) if isinstance(recipe, Recipe) else repr(recipe)
    recipes, models = zip(*comm.gather_objects((said, _digest(model)), comm.world()), strict=True)
    if found := _different(recipes):
        raise ValueError(f"recipes differ: {found}; give all ranks the same")
    if found := _different(models):
        raise ValueError(f"models differ in names, shapes, dtypes or heads: {found}; give all ranks the same")


def _digest(model: Any) -> str:
    """A few letters, the same for models that are divided in the same way."""
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        return kind
    heads = [getattr(module, "heads", None) for module in model.modules()]
    tensors = [(n, [*p.shape], p.dtype, p.requires_grad, p.is_meta) for n, p in model.named_parameters()]
    return f"{kind} {sha256(repr((heads, tensors)).encode()).hexdigest()[:8]}"


def _different(values: Sequence[str]) -> str:
    """The ranks with other values than most, such as "dp=4 on rank 2, dp=2 on the others"; empty: none."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    usual = max(ranks, key=lambda value: len(ranks[value]))
    others = [
        f"{value} on rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
        for value, found in ranks.items()
        if value != usual
    ]
    return ", ".join([*others, f"{usual} on the others"]) if others else ""
