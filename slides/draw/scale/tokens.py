"""The weight of a token in the loss of two ranks with two micro-batches each: by three ways to take a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from draw.canvas import canvas
from draw.fsdp.drawing import say
from matplotlib.figure import Figure
from torch import Tensor

from minifsdp.instruments.plots.palette import INK, OUTCOME_COLOURS, RANK_COLOURS, SOFT
from minifsdp.losses import IGNORED, cross_entropy, token_mean

COUNTS = ((6, 3), (3, 0))  # targets of each micro-batch, by rank
VOCABULARY, LENGTH = 8, 6


def _targets(count: int) -> Tensor:
    """Targets [1, s]; only the first `count` are not ignored."""
    return torch.where(torch.arange(LENGTH)[None] < count, 0, IGNORED)


def _each_alike(targets: Tensor) -> Tensor:
    """Logits [1, s, V] with which every target's loss is log V."""
    return torch.zeros(*targets.shape, VOCABULARY)


def _weights(losses: Sequence[Sequence[Tensor]]) -> list[list[float]]:
    """Of one token of each micro-batch, relative to a mean over all tokens; losses are summed, then averaged."""
    every = sum(sum(counts) for counts in COUNTS)
    return [
        [loss.item() / math.log(VOCABULARY) / len(COUNTS) / max(count, 1) * every
         for loss, count in zip(of_rank, counts, strict=True)]
        for of_rank, counts in zip(losses, COUNTS, strict=True)
    ]  # fmt: skip


def ways() -> dict[str, list[list[float]]]:
    """By way, the weights by rank and micro-batch."""
    batches = [[_targets(count) for count in counts] for counts in COUNTS]
    share = token_mean(torch.cat([each for of_rank in batches for each in of_rank]))
    right = [[share(_each_alike(each), each) * len(COUNTS) for each in of_rank] for of_rank in batches]
    of_ranks = [
        [cross_entropy(_each_alike(each), each, "sum") / sum(counts) for each in of_rank]
        for of_rank, counts in zip(batches, COUNTS, strict=True)
    ]
    of_micros = [
        [cross_entropy(_each_alike(each), each).nan_to_num() / len(of_rank) for each in of_rank] for of_rank in batches
    ]
    return {
        "a mean\nover all tokens": _weights(right),
        "a mean of\nranks' means": _weights(of_ranks),
        "a mean of\nmicro-batches' means": _weights(of_micros),
    }


def draw_tokens() -> Figure:
    """A bar for each token, as high as its weight; a panel for each way."""
    figure = canvas(3.9)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, (name, weights) in zip(panels, ways().items(), strict=True):
        place = 0.0
        for rank, counts in enumerate(COUNTS):
            begin = place
            for count, weight in zip(counts, weights[rank], strict=True):
                for token in range(count):
                    axes.bar(place + token, weight, 0.86, color=RANK_COLOURS[2 * rank])
                if count:
                    says = f"{weight:.2f}".rstrip("0").rstrip(".")
                    say(axes, place + (count - 1) / 2, weight + 0.12, says, fontweight="bold")
                place += count + 0.7 * (count > 0)
            say(axes, (begin + place - 1.7) / 2, -0.22, f"rank {rank}", color=INK)
            place += 0.5
        axes.axhline(1, color=OUTCOME_COLOURS["right"], lw=2, ls=(0, (4, 3)), zorder=0)
        axes.set_title(name)
        axes.set(xlim=(-0.8, place - 1.4), xticks=[], yticks=[], ylim=(-0.4, 2.3))
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks([0, 1, 2])
    panels[0].set_ylabel("weight of a token", color=SOFT)
    return figure
