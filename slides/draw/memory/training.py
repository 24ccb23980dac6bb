"""A small GPT's memory over two steps, measured, and its activations by batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from draw.canvas import MIB, canvas
from matplotlib.figure import Figure
from minifsdp.answers.lab00 import saved_bytes, training_bytes
from torch.optim import AdamW

from minifsdp.gpt import GPT
from minifsdp.instruments.plots.drawing import areas, tag_patches
from minifsdp.instruments.plots.palette import INK, SOFT, TAG_COLOURS, as_text, ink_on
from minifsdp.instruments.watch.ledger import Ledger

SHAPE: dict[str, int] = {"width": 96, "layers": 4, "context": 32}
BATCHES = (1, 2, 4, 8, 16, 32)


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
            ledger.mark(f"{number} zero_grad")
    return _from_the_first(
        ledger.curve(), {"model built": "parameters", "first step": "optimizer", "second step": "optimizer"}
    )


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


def draw_step() -> Figure:
    """Memory over the first two steps of a training, by tag."""
    figure = canvas(4.9)
    axes = figure.subplots()
    curve = step()
    events = areas(axes, curve, MIB)
    begin, style = 0, {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top"}
    ends: dict[str, list[int]] = {}
    for at, name in curve["marks"]:
        axes.axvline(at, color=INK, linewidth=0.8)
        number, _, phase = name.partition(" ")
        words = {"forward": "fwd", "step": "step()"}.get(phase, phase)
        if number in ("first", "second") and at - begin > events / 25:
            axes.text((begin + at) / 2, -0.02, words, **style)
        if number in ("first", "second"):
            ends.setdefault(number, [begin]).append(at)
        if phase == "zero_grad":
            arrow = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
            axes.annotate(
                "zero_grad()",
                ((begin + at) / 2, 8.0),
                (begin - events / 90, 10.5),
                ha="right",
                arrowprops=arrow,
                backgroundcolor="white",
            )
        begin = at
    for number, (first, *_, last) in ends.items():
        axes.text((first + last) / 2, -0.12, f"{number} step", color=SOFT, **style)
    axes.set_xlabel(f"allocations and frees, in order; GPT of {_millions()}, fp32", labelpad=58)
    axes.set_ylabel("MiB")
    axes.set(ylim=(0, 15), yticks=(0, 5, 10, 15))
    look: Any = {"labelspacing": 0.25, "framealpha": 1.0, "edgecolor": "white"}
    present = [tag for tag in reversed(TAG_COLOURS) if any(curve["tags"][tag])]
    axes.legend(handles=tag_patches(present), loc="upper left", bbox_to_anchor=(0.0, 1.06), frameon=True, **look)
    return figure


def _millions() -> str:
    return f"{sum(p.numel() for p in model().parameters()) / 1e6:.1f} M parameters"


def draw_activations() -> Figure:
    """Measured: what autograd keeps, by batch, beside the model state."""
    figure = canvas(4.8)
    axes = figure.subplots()
    saved = activations()
    state = sum(training_bytes([p.numel() for p in model().parameters()], 4, "adam").values()) / MIB
    axes.plot(
        list(saved),
        [size / MIB for size in saved.values()],
        "o-",
        color=as_text(TAG_COLOURS["activations"], 2.0),
    )
    axes.text(BATCHES[-2], saved[BATCHES[-2]] / MIB + 1.5, "activations", ha="right")
    axes.axhline(state, color=INK, linestyle=(0, (4, 3)), linewidth=1.6)
    axes.text(BATCHES[-1], state + 1, "parameters, gradients and Adam's state", ha="right", va="bottom")
    axes.set_xticks(BATCHES)
    axes.set_xlabel(f"sequences of {SHAPE['context']} tokens per batch; GPT of {_millions()}, fp32")
    axes.set_ylabel("MiB")
    axes.set_ylim(0)
    return figure


def draw_kept() -> Figure:
    """Model state after each of the first phases, by tag."""
    figure = canvas(4.3)
    axes = figure.subplots()
    tags = "parameters", "gradients", "optimizer"
    phases = {
        "model built": "model\nbuilt",
        "optimizer built": "optimizer\nbuilt",
        "first backward": "first\nbackward",
        "first step": "first\nstep()",
        "first zero_grad": "zero_grad()",
    }
    for place, phase in enumerate(phases):
        bottom = 0.0
        for tag in tags:
            size = kept()[phase][tag] / MIB
            axes.bar(place, size, 0.62, bottom, color=TAG_COLOURS[tag])
            if size > 0.05:
                look: dict[str, Any] = {"ha": "center", "va": "center", "color": ink_on(TAG_COLOURS[tag])}
                axes.text(place, bottom + size / 2, f"{size:.1f}", **look)
            bottom += size
    axes.set_xticks(range(len(phases)), list(phases.values()))
    axes.tick_params(axis="x", length=0)
    axes.set(ylim=(0, 8.4), ylabel=f"MiB; GPT of {_millions()}".replace("M ", "M\n"))
    axes.legend(handles=tag_patches(reversed(tags)), loc="upper left")
    return figure
