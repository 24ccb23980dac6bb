"""Figures and numbers of deck 3: flat parameters and FSDP."""

from __future__ import annotations

from typing import Any

from draw.canvas import GIB, MIB, Draw, in_units
from draw.fsdp.flat import draw_gradients, draw_offsets, draw_steps, draw_storage, torch_padding
from draw.fsdp.ladder import draw_batch, draw_rungs, ladder_units, most_rows
from draw.fsdp.norm import draw_norm, norms
from draw.fsdp.runs import SMALL, ranks, whole_hook
from draw.fsdp.scaling import MEASURED, draw_scaling, modelled
from draw.fsdp.step import draw_life, draw_log, draw_strategies
from draw.fsdp.tied import draw_tied
from draw.fsdp.units import LARGE_SETTING, draw_root, draw_trade, draw_units, groupings, refusal
from draw.fsdp.whose import draw_whose
from draw.measured import ladders_gpt, rungs

from minifsdp.cost import data_parallel


def numbers() -> dict[str, Any]:
    """The numbers in the deck's text."""
    (full,) = ranks()[0]["steps"]
    groups = groupings()
    root, *blocks = groups["a block"]
    embedding, *rest = root  # of tokens; positions, a norm, and the head's weight and bias
    small_root = [rest[:-2], [embedding], rest[-2:], *blocks]
    peaks = {name: data_parallel.fsdp(units, LARGE_SETTING).unsharded_peak for name, units in groups.items()}
    return {
        "billion": lambda size: f"{size / 1e9:.1f} billion",
        "gib": in_units("GiB", GIB, 1),
        "mib": in_units("MiB", MIB, 1),
        "large": sum(map(sum, groups["a block"])),
        "whole": peaks,
        "root_in_blocks": sum(root) / sum(blocks[0]),
        "small_root": data_parallel.fsdp(small_root, LARGE_SETTING).unsharded_peak,
        "padding": {orig: torch_padding([60, 10, 132, 11], 2, orig) for orig in (False, True)},
        "refusal": refusal(),
        "hook": whole_hook(),
        "ops": full["ops"],
        "norms": norms(),
        "optimizer": full["optimizer"],
        "small": SMALL,
        "gpt": ladders_gpt(),
        "rungs": rungs(),
        "ladder": ladder_units(),
        "fits": {name: most_rows(tried) for name, tried in ranks()[0]["rows"].items()},
        "shapes": full["shapes"],
        "per_gpu": {"measured": MEASURED, "modelled": {n: modelled(n) for n in (8, 512)}},
    }


FIGURES: dict[str, Draw] = {
    "fsdp-trade": draw_trade,
    "fsdp-units": draw_units,
    "fsdp-whose": draw_whose,
    "fsdp-steps": draw_steps,
    "fsdp-offsets": draw_offsets,
    "fsdp-storage": draw_storage,
    "fsdp-life": draw_life,
    "fsdp-log": draw_log,
    "fsdp-root": draw_root,
    "fsdp-strategies": draw_strategies,
    "fsdp-rungs": draw_rungs,
    "fsdp-gradients": draw_gradients,
    "fsdp-batch": draw_batch,
    "fsdp-scaling": draw_scaling,
    "fsdp-tied": draw_tied,
    "fsdp-norm": draw_norm,
}
