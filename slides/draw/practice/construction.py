"""How a model is built that no rank has memory for."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from draw.canvas import MIB, canvas
from draw.practice.model import RANKS
from matplotlib.figure import Figure
from minifsdp.answers.lab10a import fill_from_meta
from torch import nn

from minifsdp.flat_param import FlatParameter, copy_values, find_parameters
from minifsdp.gpt import GPT
from minifsdp.instruments.plots.drawing import areas
from minifsdp.instruments.plots.palette import INK, SOFT, TAG_COLOURS, as_text
from minifsdp.instruments.watch.ledger import Ledger

SHAPE: dict[str, int] = {"width": 96, "layers": 8, "context": 32}


@cache
def constructions() -> dict[str, tuple[Any, int, int]]:
    """By how rank 0 of 8 builds and shards a model, block by block: the ledger's curve and peak, the model's bytes."""
    found = {}
    for name, where in (("built eagerly", "cpu"), ("built on meta", "meta")):
        with Ledger() as ledger:
            with torch.device(where):
                model = GPT(**SHAPE)
            ledger.watch(model)
            whole = sum(4 * p.numel() for p in model.parameters())
            shards = [shard(module, ledger) for module in (*model.blocks, model)]
            curve = ledger.curve()
            del shards
        tags = curve["tags"]
        tags["parameters"] = [sum(pair) for pair in zip(tags["parameters"], tags["activations"], strict=True)]
        tags["activations"] = [0] * len(tags["activations"])  # a shard that is being cut has no tag yet
        found[name] = curve, ledger.peak.total, whole
    return found


def shard(module: nn.Module, ledger: Ledger) -> nn.Parameter:
    """Flatten what is left in a module, and keep rank 0's part of it."""
    params = find_parameters(module)
    on_meta = next(iter(params)).is_meta
    fill = (lambda views, originals: fill_from_meta(views, params)) if on_meta else copy_values
    flat = FlatParameter(params, 0, RANKS, fill, torch.device("cpu"))
    ledger.tag(flat.shard, "parameters")
    for places in params.values():
        for place in places:
            place.module._parameters[place.attribute] = None
    return flat.shard


def draw_construction() -> Figure:
    """Memory of rank 0 of 8 from nothing to the last shard."""
    figure = canvas(4.8)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (name, (curve, peak, whole)) in zip(panels, constructions().items(), strict=True):
        areas(panel, curve, MIB)
        panel.axhline(whole / MIB, color=INK, linestyle=(0, (4, 3)), linewidth=1.4)
        panel.set_title(f"{name}: {peak / whole:.2f} × the model")
        panel.spines["bottom"].set_visible(False)
        place: dict[str, Any] = {"transform": panel.get_yaxis_transform(), "fontweight": "bold"}
        if name == "built eagerly":
            panel.text(0.5, 1.5, "all parameters", ha="center", color="white", **place)
        else:
            panel.text(0.02, whole / MIB + 0.06, "the full model", va="bottom", transform=panel.get_yaxis_transform())
            panel.text(0.3, 0.95, "one unit", color=as_text(TAG_COLOURS["unsharded"]), ha="center", **place)
            panel.text(0.98, 0.12, "shards", color="white", ha="right", **place)
    psi = next(iter(constructions().values()))[2] // 4
    says = f"allocations and frees, in order; rank 0 of {RANKS}, GPT of {psi / 1e6:.1f} M parameters, fp32"
    figure.supxlabel(says, fontsize=18, color=SOFT)
    panels[0].set_ylabel("MiB")
    return figure
