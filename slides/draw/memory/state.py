"""What must be kept to train a model, by precision and by optimizer."""

from __future__ import annotations

from draw.canvas import GB, canvas
from matplotlib.figure import Figure

from minifsdp.course.plots.drawing import tag_patches
from minifsdp.course.plots.palette import INK, SOFT, TAG_COLOURS
from minifsdp.course.reference.lab00 import training_bytes

PSI = 7_500_000_000  # of the ZeRO paper's figure 1
DEVICE = 80 * GB
STATE = ("parameters", "gradients", "optimizer")


def draw_fits() -> Figure:
    """What the parameters are, and what training them takes, beside one device."""
    figure = canvas(4.0)
    axes = figure.subplots()
    mixed = training_bytes([PSI], 2, "adam", master_copy=True)
    left = 0.0
    for tag in STATE:
        axes.barh(0, mixed[tag] / GB, 0.6, left, color=TAG_COLOURS[tag])
        label = f"{tag}\n{mixed[tag] / GB:.0f} GB"
        axes.text(left + mixed[tag] / GB / 2, 0, label, ha="center", va="center", color="white", fontsize=13)
        left += mixed[tag] / GB
    axes.barh(1, mixed["parameters"] / GB, 0.6, color=TAG_COLOURS["parameters"])
    axes.axvline(DEVICE / GB, color=INK, linewidth=1.6, linestyle=(0, (4, 3)))
    axes.text(DEVICE / GB + 1, 1.25, f"one device: {DEVICE / GB:.0f} GB", va="center")
    axes.set_yticks([0, 1], ["to train", "to load"])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlim(0, left)
    axes.set_xlabel("GB")
    return figure


def draw_account() -> Figure:
    """Bytes per parameter in mixed precision with Adam, piece by piece."""
    figure = canvas(4.2)
    axes = figure.subplots()
    pieces = [
        ("parameters", "parameters\nbf16", 2),
        ("gradients", "gradients\nbf16", 2),
        ("optimizer", "parameters\nfp32", 4),
        ("optimizer", "momentum\nfp32", 4),
        ("optimizer", "variance\nfp32", 4),
    ]
    left = 0
    for tag, name, size in pieces:
        axes.barh(0, size, 0.9, left, color=TAG_COLOURS[tag], edgecolor="white", linewidth=2)
        axes.text(left + size / 2, 0, name, ha="center", va="center", color="white", fontsize=13)
        axes.text(left + size / 2, 0.5, str(size), ha="center", va="bottom", fontsize=24, color=TAG_COLOURS[tag])
        left += size
    for share, start, end in (("1", 0, 2), ("1", 2, 4), ("6", 4, 16)):
        axes.annotate("", (start, -0.62), (end, -0.62), arrowprops={"arrowstyle": "<->", "color": SOFT})
        axes.text((start + end) / 2, -0.7, share, ha="center", va="top", color=SOFT, fontsize=18)
    axes.set_xlim(0, left)
    axes.set_ylim(-1.0, 1.0)
    axes.axis("off")
    return figure


def draw_optimizers() -> Figure:
    """Bytes per parameter in float32, by optimizer."""
    figure = canvas(4.6)
    axes = figure.subplots()
    elements = 10**9  # so many that Adam's count of steps does not show
    for place, name in enumerate(("sgd", "momentum", "adam", "amsgrad")):
        sizes = training_bytes([elements], 4, name)
        bottom = 0.0
        for tag in STATE:
            height = sizes[tag] / elements
            axes.bar(place, height, 0.6, bottom, color=TAG_COLOURS[tag])
            if height:
                axes.text(place, bottom + height / 2, f"{height:.0f}", ha="center", va="center", color="white")
            bottom += height
        axes.text(place, bottom + 0.3, f"{bottom:.0f}", ha="center", va="bottom", fontsize=18)
    axes.set_xticks(range(4), ["SGD", "SGD with momentum", "Adam", "AMSGrad"])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 23)
    axes.set_ylabel("bytes per parameter, fp32")
    axes.legend(handles=tag_patches(reversed(STATE)), loc="upper left")
    return figure
