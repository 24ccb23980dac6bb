"""Figures and numbers of deck 1: where memory goes, and what ZeRO saves."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from draw.canvas import INK, LINE, PALE, SOFT, Draw, canvas, in_units
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch.optim import AdamW

from minifsdp.course.ledger import Ledger
from minifsdp.course.model import GPT
from minifsdp.course.plots.drawing import areas
from minifsdp.course.plots.style import TAG_COLOURS
from minifsdp.course.reference.lab00 import saved_bytes, training_bytes, zero_stages

GB, MIB = 10**9, 2**20
PSI, RANKS = 7_500_000_000, 64  # of the ZeRO paper's figure 1
DEVICE = 80 * GB
STATE = ("parameters", "gradients", "optimizer")
STAGES = {  # how many of the three are divided by the ranks: the last ones
    "replicated": 0,
    "stage 1": 1,
    "stage 2": 2,
    "stage 3": 3,
}
SHAPE: dict[str, int] = {"width": 96, "layers": 4, "context": 32}
BATCHES = (1, 2, 4, 8, 16, 32)


def numbers() -> dict[str, Any]:
    """What the deck's text says in numbers."""
    mixed = training_bytes([PSI], 2, "adam", master_copy=True)
    stages = zero_stages(PSI, RANKS)
    saved = activations()
    state = sum(training_bytes([p.numel() for p in model().parameters()], 4, "adam").values())
    return {
        "gb": in_units("GB", GB, 0),
        "mib": in_units("MiB", MIB, 1),
        "psi": PSI,
        "ranks": RANKS,
        "mixed": mixed,
        "total": sum(mixed.values()),
        "stages": stages,
        "state": state,
        "saved": saved,
        "outgrown": next(batch for batch, size in saved.items() if size > state),
        "kept": kept(),
    }


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(**SHAPE)


def tokens(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.arange(batch * (SHAPE["context"] + 1)).reshape(batch, -1) % 257
    return text[:, :-1], text[:, 1:]


@cache
def step() -> Any:
    """The ledger's curve from an empty process to the end of a second step."""
    with Ledger() as ledger:
        gpt = model()
        ledger.watch(gpt)
        ledger.mark("model built")
        optimizer = AdamW(gpt.parameters())
        ledger.watch(gpt, optimizer)
        ledger.mark("optimizer built")
        for number in ("first", "second"):
            loss = gpt(*tokens(8))
            ledger.mark(f"{number} forward")
            loss.backward()
            ledger.mark(f"{number} backward")
            del loss
            optimizer.step()
            ledger.mark(f"{number} step")
            optimizer.zero_grad()
        ledger.mark("zero_grad")
    return _from_the_first(ledger.curve(), {"model built": "parameters", "first step": "optimizer"})


def _from_the_first(curve: Any, tags: dict[str, str]) -> Any:
    """Gives what a phase allocates the tag that the ledger knows at its end only; till then it was of no known use."""
    begin = 0
    for at, name in curve["marks"]:
        if name in tags:
            unknown, known = curve["tags"]["activations"], curve["tags"][tags[name]]
            for event in range(begin, at):
                known[event], unknown[event] = known[event] + unknown[event], 0
        begin = at
    return curve


def kept() -> dict[str, dict[str, int]]:
    """Bytes by tag at each mark of `step`."""
    curve = step()
    return {name: {tag: values[at] for tag, values in curve["tags"].items()} for at, name in curve["marks"]}


@cache
def activations() -> dict[int, int]:
    """By batch, the bytes that autograd keeps for backward."""
    gpt = model()
    return {batch: saved_bytes(lambda batch=batch: gpt(*tokens(batch)), gpt) for batch in BATCHES}


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


def draw_step() -> Figure:
    """Memory over the first two steps of a training, by tag."""
    figure = canvas(4.9)
    axes = figure.subplots()
    curve = step()
    events = areas(axes, curve, MIB)
    begin = 0
    for at, name in curve["marks"]:
        axes.axvline(at, color=INK, linewidth=0.8)
        if at - begin > events / 25:
            words = {"model built": "build"}.get(name, name).replace(" ", "\n")
            style: Any = {"fontsize": 13, "transform": axes.get_xaxis_transform()}
            axes.text((begin + at) / 2, -0.02, words, ha="center", va="top", **style)
        begin = at
    axes.set_ylabel("MiB")
    present = [tag for tag in reversed(TAG_COLOURS) if any(curve["tags"][tag])]
    handles = [Patch(color=TAG_COLOURS[tag], label=tag) for tag in present]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.35, 1.0))
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
    handles = [Patch(color=TAG_COLOURS[tag], label=tag) for tag in reversed(STATE)]
    axes.legend(handles=handles, loc="upper left")
    return figure


def draw_activations() -> Figure:
    """Measured: what autograd keeps, by batch, beside the model state."""
    figure = canvas(4.6)
    axes = figure.subplots()
    saved = activations()
    state = sum(training_bytes([p.numel() for p in model().parameters()], 4, "adam").values()) / MIB
    axes.plot(list(saved), [size / MIB for size in saved.values()], "o-", color="#b3a600", label="activations")
    axes.axhline(state, color=INK, linestyle=(0, (4, 3)), linewidth=1.6)
    axes.text(BATCHES[-1], state + 1, "parameters, gradients and Adam's state", ha="right", va="bottom")
    axes.set_xticks(BATCHES)
    axes.set_xlabel(f"sequences of {SHAPE['context']} tokens in a batch")
    axes.set_ylabel("MiB")
    axes.set_ylim(0)
    return figure


def draw_partitions(stage: str) -> Figure:
    """What each of four ranks holds of the three; what it does not, in outline."""
    figure = canvas(4.1)
    axes = figure.subplots()
    ranks, heights = 4, {"parameters": 2, "gradients": 2, "optimizer": 12}
    divided = STATE[len(STATE) - STAGES[stage] :]
    for rank in range(ranks):
        bottom = 0.0
        for tag in STATE:
            height = heights[tag]
            _stripes(axes, rank * 1.25, bottom, height, ranks, rank if tag in divided else None, TAG_COLOURS[tag])
            bottom += height + 0.5
        axes.text(rank * 1.25 + 0.5, -0.5, f"rank {rank}", ha="center", va="top")
    middles = {"parameters": 1.0, "gradients": 3.5, "optimizer": 11.0}
    for tag, middle in middles.items():
        axes.text(-0.1, middle, tag, ha="right", va="center", color=TAG_COLOURS[tag])
    axes.set_xlim(-0.9, 4.9)
    axes.set_ylim(-1.8, 17.2)
    axes.axis("off")
    return figure


def _stripes(axes: Axes, left: float, bottom: float, height: float, parts: int, mine: int | None, colour: str) -> None:
    """`parts` columns, of which one is held, or all."""
    for part in range(parts):
        held = mine is None or part == mine
        face, edge = (colour, "white") if held else (PALE, LINE)
        box = Rectangle((left + part / parts, bottom), 1 / parts, height, facecolor=face, edgecolor=edge, linewidth=1)
        axes.add_patch(box)


def draw_stages() -> Figure:
    """Bytes on each rank under each stage."""
    figure = canvas(4.7)
    axes = figure.subplots()
    mixed = training_bytes([PSI], 2, "adam", master_copy=True)
    for place, count in enumerate(STAGES.values()):
        bottom, divided = 0.0, STATE[len(STATE) - count :]
        for tag in STATE:
            height = mixed[tag] / (RANKS if tag in divided else 1) / GB
            axes.bar(place, height, 0.6, bottom, color=TAG_COLOURS[tag])
            bottom += height
        axes.text(place, bottom + 1.5, f"{bottom:.1f} GB", ha="center", va="bottom", fontsize=19)
    axes.axhline(DEVICE / GB, color=INK, linewidth=1.4, linestyle=(0, (4, 3)))
    axes.text(3.4, DEVICE / GB + 1, f"a device of {DEVICE / GB:.0f} GB", ha="right", va="bottom")
    axes.set_xticks(range(len(STAGES)), STAGES)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 138)
    axes.set_ylabel("GB on each rank")
    axes.legend(handles=[Patch(color=TAG_COLOURS[tag], label=tag) for tag in reversed(STATE)], loc="upper right")
    return figure


def draw_floor() -> Figure:
    """Bytes on each rank over the number of ranks."""
    figure = canvas(4.7)
    axes = figure.subplots()
    counts = [2**power for power in range(11)]
    colours = {"replicated": SOFT, "stage 1": "#009E73", "stage 2": "#D55E00", "stage 3": "#0072B2"}
    for stage, colour in colours.items():
        sizes = [zero_stages(PSI, count)[stage] / GB for count in counts]
        axes.plot(counts, sizes, color=colour)
        nudge = {"stage 1": 1.12, "stage 2": 0.9}.get(stage, 1.0)
        axes.text(counts[-1] * 1.1, sizes[-1] * nudge, stage, va="center", color=colour)
    axes.axhline(DEVICE / GB, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(1.06, DEVICE / GB * 0.86, f"{DEVICE / GB:.0f} GB", va="top")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    ticks = [0.1, 1, 10, 100]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(1, 2600)
    axes.set_xlabel("ranks")
    axes.set_ylabel("GB on each rank")
    return figure


FIGURES: dict[str, Draw] = {
    "fits": draw_fits,
    "account": draw_account,
    "step": draw_step,
    "optimizers": draw_optimizers,
    "activations": draw_activations,
    **{f"partition-{count}": lambda stage=stage: draw_partitions(stage) for stage, count in STAGES.items()},
    "stages": draw_stages,
    "floor": draw_floor,
}
