"""The ladders: on each axis something else is divided among the ranks, on `3d` on three; `all` has rungs of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minifsdp.course.ladder.rungs import ALL_RUNGS, PIPELINE_RUNGS, RUNGS, TENSOR_RUNGS, THREE_AXES_RUNGS, Rung


@dataclass(frozen=True)
class Axis:
    """One ladder.

    Attributes:
        rungs: by name, from the bottom; the first is the one that the others are compared with.
        sizes: settings other than those of the first ladder.
        folder: for results, unless another is named.
    """

    rungs: Mapping[str, Rung]
    sizes: Mapping[str, Any]
    folder: str


AXES: dict[str, Axis] = {
    "data": Axis(RUNGS, {}, "results/ladder"),
    "tensor": Axis(TENSOR_RUNGS, {"width": 180, "heads": 12, "context": 48}, "results/ladder-tensor"),
    "pipeline": Axis(PIPELINE_RUNGS, {"width": 96, "layers": 8, "heads": 4}, "results/ladder-pipeline"),
    "3d": Axis(THREE_AXES_RUNGS, {"ranks": 8, "width": 96, "layers": 4, "heads": 4}, "results/ladder-3d"),
    "all": Axis(ALL_RUNGS, {"ranks": 8, "width": 128, "layers": 8, "heads": 8}, "results/ladder-all"),
}
"""`tensor`: 12 heads and 48 tokens are for 2, 3, 4 or 6 ranks, a vocabulary of 257 is for none. `pipeline`: 8 blocks
are 2 stages for each of 4 ranks. `all`: 8 blocks, heads and times 3 tokens are for 8 ranks, whatever they divide."""
