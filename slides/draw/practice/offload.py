"""Offload: what stays on the device at three moments of a step, and what goes over the bus."""

from __future__ import annotations

from draw.canvas import GB, canvas
from draw.practice.model import RANKS, elements
from matplotlib.figure import Figure

from minifsdp.instruments.plots.drawing import tag_patches
from minifsdp.instruments.plots.palette import INK, LANE_COLOURS, SOFT, TAG_COLOURS


def draw_offload() -> Figure:
    """Model state on the device at three moments, without offload and with it; below, the bytes over the bus."""
    figure = canvas(4.2)
    psi, root, _ = elements()
    shard = 4 * psi // RANKS
    kept = {"parameters": shard, "optimizer": 2 * shard}
    moments = "between steps", "end of forward:\nunsharded root", "end of backward:\ngradient shards"
    without = [kept, kept | {"unsharded": 4 * root}, kept | {"gradients": shard}]
    ways = {"without offload": without, "offloaded": [{}, {"unsharded": 4 * root}, {}]}
    bus = {
        "without offload": [],
        "offloaded": [(4 * (2 * psi - root) // RANKS, "to the device"), (shard, "to the host")],
    }
    panels = figure.subplots(1, 2, sharey=True, sharex=True)
    for panel, (way, rows) in zip(panels, ways.items(), strict=True):
        for place, held in enumerate(rows):
            left = 0.0
            for tag in (each for each in TAG_COLOURS if each in held):
                panel.barh(place, held[tag] / GB, 0.62, left, color=TAG_COLOURS[tag])
                left += held[tag] / GB
            panel.text(left + 0.2, place, f"{left:.1f} GB" if left else "0", va="center")
        left = 0.0
        for size, _ in bus[way]:
            panel.barh(3.2, size / GB, 0.62, left, color=LANE_COLOURS["copy"], edgecolor="white", linewidth=2)
            left += size / GB
        says = ",\n".join(f"{size / GB:.1f} GB {where}" for size, where in bus[way])
        panel.text(left + 0.2, 3.2, says or "0", va="center")
        panel.set_title(way)
        panel.set_yticks([0, 1, 2, 3.2], [*moments, "over the bus\nper step"])
        panel.tick_params(axis="y", length=0, labelcolor=INK)
        panel.set(xlim=(0, 20.5), xticks=[])
        panel.spines["bottom"].set_visible(False)
    about = f"GPT of {psi / 1e9:.1f} B parameters\non each of {RANKS} ranks, fp32"
    panels[1].text(20.3, 2.05, about, ha="right", va="center", color=SOFT)
    panels[0].invert_yaxis()
    present = [tag for tag in TAG_COLOURS if any(tag in held for held in without)]
    figure.legend(handles=tag_patches(present), loc="outside lower center", ncols=len(present))
    return figure
