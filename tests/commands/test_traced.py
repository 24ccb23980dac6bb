"""The step in a timeline is one that can be shown: close to the median of the unprofiled ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from minifsdp.course.ladder import traced
from minifsdp.course.ladder.traced import TracedStep, trace_step
from minifsdp.instruments.launch import launch


def trace(folder: Path, lengths: list[float], usual: float | None) -> tuple[int, float | None, str]:
    """Steps taken by this rank, and what rank 0 keeps of those that take `lengths` seconds."""
    left: Iterator[float] = iter(lengths)
    taken: list[Any] = []

    def profiled(_: Any, __: Any, ___: Any, path: Path, *____: Any) -> TracedStep:
        seconds = next(left)
        path.write_text(str(seconds))
        taken.append(seconds)
        return TracedStep([], [], seconds, usual)

    path = folder / "trace.json"
    with patch.object(traced, "_profiled", profiled), patch.object(traced, "take_step", lambda *_: taken.append(0)):
        kept = trace_step(None, None, torch.device("cpu"), path, None, usual)  # type: ignore[arg-type]
    dist.barrier()
    return len(taken), kept.seconds if kept else None, ",".join(sorted(each.name for each in folder.iterdir()))


@pytest.mark.parametrize(
    ("lengths", "usual", "taken", "kept"),
    [
        ([1.2, 1.0], 1.0, 1, 1.2),
        ([3.0, 0.9, 1.0], 1.0, 2, 0.9),
        ([3.0, 9.0, 0.5], 1.0, 3, 0.5),
        ([2.0, 9.0, 0.1], 1.0, 3, 2.0),
        ([7.0], None, 1, 7.0),
    ],
)
def test_the_most_usual_of_three_steps_is_kept_on_all_ranks_alike(
    tmp_path: Path, lengths: list[float], usual: float | None, taken: int, kept: float
) -> None:
    first, second = launch(trace, 2, tmp_path, lengths, usual)
    assert first == (taken, kept, "trace.json")
    assert second[:2] == (taken, None)
    assert (tmp_path / "trace.json").read_text() == str(kept)
