"""The ladders of tensor parallelism and of pipelines on CUDA: the bytes predicted, and one process's losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from on_gpu import ON_GPU
from other_ladders import assert_bytes_are_as_predicted_on_every_rank, assert_losses_equal_one_process, record_in

pytestmark = ON_GPU


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_every_rung_holds_what_is_predicted(axis: str, tmp_path: Path) -> None:
    ladder = [sys.executable, "-m", "minifsdp", "ladder", "--axis", axis, "--ranks", "4", "--steps", "1"]
    subprocess.run([*ladder, "--device", "cuda", "--share-gpu", "--out", str(tmp_path)], check=True)
    record = record_in(tmp_path)
    assert_losses_equal_one_process(record)
    assert_bytes_are_as_predicted_on_every_rank(record)
