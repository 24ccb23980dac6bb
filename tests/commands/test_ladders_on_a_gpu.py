"""What the second ladders predict for a GPU, whose kernels of attention keep other things for backward than a CPU's.

Measured by `minifsdp ladder --axis tensor --ranks 4` and `--axis pipeline --ranks 4` with ranks that share one H200,
torch 2.11.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minifsdp.cost.activations import Sizes, kept_by_attention
from minifsdp.cost.data_parallel import Setting
from minifsdp.course.ladder.axes import AXES
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.ladder.rungs import sizes_of

BATCH = {"tensor": 12, "pipeline": 16}
ACTIVATIONS = {
    "tensor": {
        "ddp": [12314696, 12314696, 12314696, 12314696],
        "tp": [20463368, 20463368, 20463368, 20456456],
        "tp-sp": [16374920, 16374920, 16374920, 16368008],
        "tp-sp-regather": [12642440, 12642440, 12642440, 12635528],
        "tp-fsdp2": [13670600, 13669448, 13670600, 13669448],
    },
    "pipeline": {
        "alone": [19682120, 19682120, 19682120, 19682120],
        "naive": [4894944, 4894752, 4894752, 5440040],
        "gpipe": [4896512, 4894976, 4894976, 5440320],
        "1f1b": [2448256, 1854048, 1242176, 698500],
        "interleaved": [3505072, 2873232, 2242928, 1680820],
        "zb-h1": [2448256, 2443872, 2421824, 2671300],
        "1f1b-ddp": [2411008, 1291924, 2411008, 1291924],
        "1f1b-fsdp2": [2411008, 1291924, 2411008, 1291924],
    },
}


@pytest.mark.parametrize("axis", ACTIVATIONS)
def test_a_gpu_keeps_what_is_predicted(axis: str) -> None:
    settings = Settings.on(axis, ranks=4, batch=BATCH[axis])
    setting = Setting(4, runs_behind=True, batch=settings.batch)
    with torch.device("meta"):
        sizes = sizes_of(settings.model())
    for name, measured in ACTIVATIONS[axis].items():
        rung = AXES[axis].rungs[name]
        held = [rung.predict(sizes, replace(setting, rank=rank), settings.limit) for rank in range(4)]
        assert [vars(each)["activations"] for each in held] == measured, name


def test_what_attention_keeps() -> None:
    """The tensor ladder's heads are 15 wide, so no fused kernel takes them; those of the pipelines are 24 wide."""
    sizes = Sizes(batch=3, context=48, width=96, heads=4, vocabulary=0)
    assert kept_by_attention(sizes, 2) == {"logsumexp": 4 * 3 * 2 * 48}
    on_gpu = replace(sizes, on_gpu=True)
    assert kept_by_attention(on_gpu, 2) == {"logsumexp": 4 * 3 * 2 * 64, "random state": 16}
    assert kept_by_attention(replace(on_gpu, width=60), 2) == {"softmax": 4 * 3 * 2 * 48 * 48}
