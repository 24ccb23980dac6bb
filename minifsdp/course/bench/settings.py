"""The settings of one run of the step benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from minifsdp.batch import Batch
from minifsdp.course.bench.contestants import CONTESTANTS
from minifsdp.course.ladder import data
from minifsdp.course.ladder.outline import count_elements
from minifsdp.gpt import GPT, usual_heads


@dataclass(frozen=True)
class BenchSettings:
    """The settings of one run; see `minifsdp bench --help`.

    Attributes:
        only: names of the contestants, in the order in which they take their steps.
        batch: sequences per step on each rank.
        heads: attention heads; None: the largest divisor of the width up to 8.
        steps: timed steps of each contestant.
        warm_up: steps before them.
        memory: whether to measure peaks of memory, after all contestants have been timed.
    """

    ranks: int = 2
    only: tuple[str, ...] = tuple(CONTESTANTS)
    batch: int = 2
    layers: int = 8
    width: int = 256
    heads: int | None = None
    context: int = 64
    steps: int = 10
    warm_up: int = 3
    seed: int = 0
    memory: bool = True

    def model(self) -> GPT:
        """The same parameters on every rank and for every contestant."""
        torch.manual_seed(self.seed)
        return GPT(width=self.width, layers=self.layers, heads=self.heads, context=self.context)

    def batches(self) -> Iterator[Batch]:
        """The batches of all ranks together, [ranks * batch, context] each: first the warm-up's, then the timed."""
        rows, total = self.ranks * self.batch, self.warm_up + self.steps
        return data.batches(data.load_text(), rows, self.context, self.seed, total)

    def shape(self) -> dict[str, int]:
        """The model in numbers: "parameters", "layers", "width", "heads" and "context"."""
        heads = self.heads or usual_heads(self.width)
        sizes = {"width": self.width, "heads": heads, "context": self.context}
        return {"parameters": count_elements(self.layers, **sizes), "layers": self.layers, **sizes}
