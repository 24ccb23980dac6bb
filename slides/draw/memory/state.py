"""What must be kept to train a model, by precision and by optimizer."""

from __future__ import annotations

from draw.canvas import GB, canvas
from matplotlib.figure import Figure
from minifsdp.answers.lab00 import training_bytes

from minifsdp.instruments.plots.drawing import tag_patches
from minifsdp.instruments.plots.palette import INK, SOFT, TAG_COLOURS, as_text, ink_on

PSI = 7_500_000_000  # of the ZeRO paper's figure 1
DEVICE = 80 * GB
STATE = ("parameters", "gradients", "optimizer")


def draw_fits() -> Figure:
    """What the parameters are, and what training them takes, beside one device."""
    figure = canvas(4.4)
    axes = figure.subplots()
    mixed = training_bytes([PSI], 2, "adam", master_copy=True)
    left = 0.0
    for tag in STATE:
        colour = TAG_COLOURS[tag]
        axes.barh(0, mixed[tag] / GB, 0.66, left, color=colour)
        seen = min(mixed[tag], DEVICE - left * GB) / GB  # up to the line
        axes.text(left + seen / 2, 0, f"{mixed[tag] / GB:.0f} GB", ha="center", va="center", color=ink_on(colour))
        name_at = {"parameters": 0.0, "gradients": 1.27 * left}.get(tag, left + seen / 2)
        axes.text(name_at, 0.38, tag, ha="center" if tag == "optimizer" else "left", va="bottom", color=as_text(colour))
        left += mixed[tag] / GB
    axes.barh(1, mixed["parameters"] / GB, 0.66, color=TAG_COLOURS["parameters"])
    axes.text(mixed["parameters"] / GB + 1, 1, f"parameters: {mixed['parameters'] / GB:.0f} GB", va="center")
    axes.axvline(DEVICE / GB, color=INK, linewidth=1.6, linestyle=(0, (4, 3)))
    axes.text(DEVICE / GB + 1, 1, f"one device:\n{DEVICE / GB:.0f} GB", va="center")
    axes.set_yticks([0, 1], ["to train", "to load"])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlim(0, left)
    axes.set_xlabel(f"GB; {PSI / 1e9:.1f} billion parameters, mixed precision, Adam")
    return figure


def draw_account() -> Figure:
    """Bytes per parameter in mixed precision with Adam, piece by piece."""
    figure = canvas(4.4)
    axes = figure.subplots()
    pieces = [
        ("parameters", "bf16", 2),
        ("gradients", "bf16", 2),
        ("optimizer", "master copy\nfp32", 4),
        ("optimizer", "momentum\nfp32", 4),
        ("optimizer", "variance\nfp32", 4),
    ]
    left = 0
    for tag, name, size in pieces:
        axes.barh(0, size, 0.9, left, color=TAG_COLOURS[tag], edgecolor="white", linewidth=2)
        axes.text(left + size / 2, 0, name, ha="center", va="center", color=ink_on(TAG_COLOURS[tag]))
        axes.text(left + size / 2, 0.5, str(size), ha="center", va="bottom", fontsize=28)
        left += size
    for tag, at in {"parameters": 0, "gradients": 2.15, "optimizer": 9}.items():
        axes.text(at, 0.88, tag, ha="center" if at == 9 else "left", color=as_text(TAG_COLOURS[tag]))
    axes.annotate("", (0, -0.58), (left, -0.58), arrowprops={"arrowstyle": "<->", "color": SOFT})
    axes.text(left / 2, -0.66, f"{left} bytes per parameter", ha="center", va="top", fontsize=24)
    axes.set_xlim(0, left)
    axes.set_ylim(-1.0, 1.1)
    axes.axis("off")
    return figure


def draw_optimizers() -> Figure:
    """Bytes per parameter in float32, by optimizer."""
    figure = canvas(4.8)
    axes = figure.subplots()
    elements = 10**9  # so many that Adam's count of steps does not show
    for place, name in enumerate(("sgd", "momentum", "adam", "amsgrad")):
        sizes = training_bytes([elements], 4, name)
        bottom = 0.0
        for tag in STATE:
            height = sizes[tag] / elements
            axes.bar(place, height, 0.6, bottom, color=TAG_COLOURS[tag])
            if height:
                axes.text(
                    place,
                    bottom + height / 2,
                    f"{height:.0f}",
                    ha="center",
                    va="center",
                    color=ink_on(TAG_COLOURS[tag]),
                )
            bottom += height
        axes.text(place, bottom + 0.3, f"{bottom:.0f}", ha="center", va="bottom", fontsize=24)
    axes.set_xticks(range(4), ["SGD", "momentum", "Adam", "AMSGrad"])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 23)
    axes.set_ylabel("bytes per parameter, all fp32")
    axes.legend(handles=tag_patches(reversed(STATE)), loc="upper left")
    return figure
