"""What one run of the step benchmark is asked for, and whether it can be had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from minifsdp.course import data
from minifsdp.course.bench.contestants import CONTESTANTS, Contestant
from minifsdp.course.data import Batch
from minifsdp.course.model import GPT
from minifsdp.course.resources import check_names

COUNTS = ("ranks", "batch", "layers", "width", "heads", "context", "steps", "warm_up")
ADAMW_BYTES = 12  # per parameter and between two steps: the parameter and two moments, in float32


@dataclass(frozen=True)
class Settings:
    """See `minifsdp bench --help`.

    Attributes:
        only: names of the contestants, in the order in which they take their steps.
        batch: sequences per step on each rank.
        heads: attention heads; None: the largest divisor of the width up to 8.
        steps: steps of each contestant that are timed.
        warm_up: steps before them.
        weigh: whether the peaks of their memory are taken, when all have been timed.
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
    weigh: bool = True

    def model(self) -> GPT:
        """The same parameters on every rank and for every contestant."""
        torch.manual_seed(self.seed)
        return GPT(width=self.width, layers=self.layers, heads=self.heads, context=self.context)

    def batches(self) -> Iterator[Batch]:
        """The batches of all ranks together, [ranks * batch, context] each: for the warm-up, then for what is timed."""
        rows, total = self.ranks * self.batch, self.warm_up + self.steps
        return data.batches(data.load_text(), rows, self.context, self.seed, total)

    def shape(self) -> dict[str, int]:
        """The model in numbers: "parameters", "layers", "width", "heads" and "context"."""
        with torch.device("meta"):
            one, two = (replace(self, layers=layers).model() for layers in (1, 2))
        first, both = (sum(p.numel() for p in model.parameters()) for model in (one, two))
        heads: Any = one.blocks[0].heads
        sizes = {"layers": self.layers, "width": self.width, "heads": heads, "context": self.context}
        return {"parameters": first + (self.layers - 1) * (both - first), **sizes}

    def check(self, among: Mapping[str, Contestant]) -> None:
        """Refuse what cannot be had.

        Raises:
            ValueError: in one line, with the cure.
        """
        check_names("--only", self.only, among)
        for name in COUNTS:
            if (given := getattr(self, name)) is not None and given < 1:
                raise ValueError(f"--{name.replace('_', '-')} {given}: must be at least 1")
        if self.heads and self.width % self.heads:
            raise ValueError(f"--heads {self.heads} does not divide --width {self.width}: choose a divisor")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"--seed {self.seed}: must fit into 64 bits")
        self.batches()

    def check_host_memory(self) -> None:
        """Refuse what the ranks could not keep in this machine's memory even if all of it were sharded.

        Raises:
            ValueError: in one line, with the cure.
        """
        parameters = self.shape()["parameters"]
        need, have = ADAMW_BYTES * parameters * len(self.only), psutil.virtual_memory().available
        if need > have:
            raise ValueError(
                f"{len(self.only)} models of {parameters:,} parameters with AdamW take at least "
                f"{need / 2**30:.1f} GiB, and {have / 2**30:.1f} GiB are free here: choose a smaller --width or "
                "--layers, or fewer contestants with --only"
            )
