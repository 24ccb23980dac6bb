"""The units that policies make of a model, and what is kept of gradients if parts are frozen."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from typing import Any

import torch
from draw.canvas import GB, MIB, canvas
from draw.practice.drawing import bare
from draw.practice.model import RANKS, large
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from minifsdp.answers.lab10a import by_size
from minifsdp.answers.lab10b import units_for
from torch import nn

from minifsdp.flat_param import find_parameters
from minifsdp.fsdp.torch_api.policies import ModuleWrapPolicy
from minifsdp.fsdp.torch_api.wrap import wrap_children
from minifsdp.gpt import GPT, Block
from minifsdp.instruments.plots.palette import INK, SOFT, TAG_COLOURS, UNIT_COLOURS


class Unit(nn.Module):
    """Stands for a unit where there is nobody to shard with."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def lab10as() -> GPT:
    with torch.device("meta"):
        return GPT(width=63, layers=6, context=16)


def cut(policy: Any) -> tuple[list[tuple[str, int]], int]:
    """Lab 10a's GPT: each parameter's unit and elements, in order, and the bytes unsharded at the peak of 2 ranks."""
    model = lab10as()
    model.blocks = nn.ModuleList(nn.Sequential(*model.blocks[first : first + 2]) for first in (0, 2, 4))
    wrap_children(model, policy, Unit)
    units = [f"{name}." for name, module in model.named_modules() if isinstance(module, Unit)]
    around = {unit: [outer for outer in units if unit.startswith(outer)] for unit in units}
    owned = [
        (max((unit for unit in units if name.startswith(unit)), key=len, default=""), p.numel())
        for name, p in model.named_parameters()
    ]
    sizes = {unit: sum(numel for owner, numel in owned if owner == unit) for unit in ("", *units)}
    padded = {unit: 4 * (size + size % 2) for unit, size in sizes.items()}
    largest = max((sum(padded[outer] for outer in outers) for outers in around.values()), default=0)
    return owned, padded[""] + largest


POLICIES: dict[str, Any] = {
    "one unit": partial(by_size, least=10**8),
    "pairs of blocks": ModuleWrapPolicy({nn.Sequential}),
    "blocks": ModuleWrapPolicy({Block}),
    "by size": partial(by_size, least=16_000),
    "every Linear": ModuleWrapPolicy({nn.Linear}),
}


class Adapted(nn.Module):
    """A frozen linear layer, and an adapter of rank 16 beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.adapter = nn.Sequential(
            nn.Linear(base.in_features, 16, bias=False), nn.Linear(16, base.out_features, bias=False)
        )


@cache
def tuned() -> dict[str, tuple[int, int]]:
    """By what is trained and how it is wrapped: bytes of gradients of a rank after backward, and units."""
    with torch.device("meta"):
        adapted, last = (GPT(vocabulary=50_000, width=4096, layers=32, context=2048) for _ in range(2))
        adapted.requires_grad_(False)
        for block in adapted.blocks:
            block.qkv, block.down = Adapted(block.qkv), Adapted(block.down)
    last.requires_grad_(False)
    last.blocks[-1].requires_grad_(True)
    ways = {
        "everything": (large(), set(large().blocks)),
        "adapters, in their blocks' units": (adapted, set(adapted.blocks)),
        "adapters, in units of their own": (adapted, units_for(adapted, Block)),
        "the last block": (last, set(last.blocks)),
    }
    found = {}
    for name, (model, units) in ways.items():
        held = [find_parameters(unit, skip=units.intersection(unit.modules()) - {unit}) for unit in (model, *units)]
        trained = [sum(p.numel() for p in params) for params in held if any(p.requires_grad for p in params)]
        found[name] = 4 * sum(trained) // RANKS, len(held)
    return found


def draw_policies() -> Figure:
    """The units that each policy makes of one model, each as wide as its parameters."""
    figure, axes = bare(4.8, 1.82, 5.8, left=-0.3, bottom=-0.6)
    heads = ("units", "collectives", "unsharded\nat the peak")
    for place, head in enumerate(heads):
        axes.text(1.13 + (0.0, 0.36, 0.67)[place], 5.0, head, ha="right", va="bottom", color=SOFT)
    for number, (name, policy) in enumerate(POLICIES.items()):
        bottom = 4.2 - number
        params, peak = cut(policy)
        sizes = Counter({"": 0})  # the root first
        for unit, numel in params:
            sizes[unit] += numel
        axes.text(-0.02, bottom + 0.3, name, ha="right", va="center")
        left = 0.0
        for number, size in enumerate(sizes.values()):
            width = size / sizes.total()
            colour = UNIT_COLOURS[number % len(UNIT_COLOURS)] if number else SOFT
            axes.add_patch(Rectangle((left, bottom), width, 0.6, facecolor=colour, edgecolor="white", linewidth=0.8))
            left += width
        cells = (str(len(sizes)), str(3 * len(sizes) - 1), f"{peak / MIB:.2f} MiB")
        for place, cell in enumerate(cells):
            axes.text(1.13 + (0.0, 0.36, 0.67)[place], bottom + 0.3, cell, ha="right", va="center")
    psi = sum(p.numel() for p in lab10as().parameters())
    about = f"GPT of {psi / 1e6:.1f} M parameters, fp32, 2 ranks; collectives per step"
    axes.text(0.76, -0.4, about, ha="center", va="center", color=SOFT)
    axes.text(0, 5.0, "the root", color=SOFT, va="bottom", fontweight="bold")
    axes.text(0.27, 5.0, "the other units", color=UNIT_COLOURS[0], va="bottom", fontweight="bold")
    return figure


def draw_frozen() -> Figure:
    """Bytes of gradients on a rank after backward, by what is trained and in which units."""
    figure = canvas(4.6)
    axes = figure.subplots()
    for place, (size, _) in enumerate(reversed(tuned().values())):
        axes.barh(place, size / GB, 0.6, color=TAG_COLOURS["gradients"])
        axes.text(size / GB + 0.03, place, f"{size / GB:.2f} GB", va="center")
    axes.set_yticks(range(len(tuned())), [*reversed(tuned())])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xticks(range(4))
    axes.set_xlabel(f"GB of gradients (fp32) per rank on {RANKS} ranks after backward")
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, 4.1)
    axes.text(-0.01, 1.0, "trained:", transform=axes.transAxes, ha="right", color=SOFT)
    return figure
