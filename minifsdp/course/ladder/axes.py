"""The ladders: on each axis something else is divided among the ranks. Another one is another file of rungs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minifsdp.course.ladder.pipeline import MICROS
from minifsdp.course.ladder.pipeline_rungs import PIPELINE_RUNGS
from minifsdp.course.ladder.rungs import RUNGS, Rung, Sizes
from minifsdp.course.ladder.tensor_rungs import TENSOR_RUNGS


@dataclass(frozen=True)
class Axis:
    """One ladder.

    Attributes:
        rungs: by name, from the bottom; the first is the one that the others are compared with.
        sizes: settings other than those of the first ladder.
        folder: for results, unless another is named.
        micros: micro-batches for each rank, into which a batch is cut; 0: it is cut for the ranks alone.
    """

    rungs: Mapping[str, Rung]
    sizes: Mapping[str, Any]
    folder: str
    micros: int = 0

    def rows(self, ranks: int) -> int:
        """A batch has to be a multiple of so many sequences."""
        return ranks * max(1, self.micros)

    def faults(self, sizes: Sizes, ranks: int) -> dict[str, str]:
        """Why these rungs cannot be climbed by so many ranks, by name."""
        faults = {name: rung.fault(sizes, ranks) for name, rung in self.rungs.items()}
        return {name: fault for name, fault in faults.items() if fault}


AXES: dict[str, Axis] = {
    "data": Axis(RUNGS, {}, "results/ladder"),
    "tensor": Axis(TENSOR_RUNGS, {"width": 180, "heads": 12, "context": 48}, "results/ladder-tensor"),
    "pipeline": Axis(PIPELINE_RUNGS, {"width": 96, "layers": 8, "heads": 4}, "results/ladder-pipeline", MICROS),
}
"""`tensor`: 12 heads and 48 tokens are for 2, 3, 4 or 6 ranks, a vocabulary of 257 is for none. `pipeline`: 8 blocks
are 2 stages for each of 4 ranks."""
