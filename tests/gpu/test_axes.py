"""The ladders of tensor parallelism and of pipelines on CUDA: the bytes predicted, and one process's losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from on_gpu import ON_GPU

pytestmark = ON_GPU


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_every_rung_holds_what_is_predicted(axis: str, tmp_path: Path) -> None:
    ladder = [sys.executable, "-m", "minifsdp", "ladder", "--axis", axis, "--ranks", "4", "--steps", "1"]
    subprocess.run([*ladder, "--device", "cuda", "--share-gpu", "--out", str(tmp_path)], check=True)
    record = json.loads((tmp_path / "ladder.json").read_text())
    for rung in record["rungs"]:
        assert rung["losses"] == pytest.approx(record["reference_losses"], rel=1e-4), rung["name"]
        for measured, predicted in zip(rung["bytes"], rung["predicted"], strict=True):
            assert {key: measured[key] for key in predicted} == predicted, rung["name"]
