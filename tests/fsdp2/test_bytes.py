"""FSDP2's bytes are those of its closed form, on every rank, for shapes that no number of ranks divides."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from minifsdp import device
from minifsdp.course.ladder import data
from minifsdp.course.ladder.measure import Settings, measure_memory
from minifsdp.course.ladder.rungs import RUNGS, closed_form_setting, sizes_of
from minifsdp.instruments.launch import launch, rank_device

SIZES: list[dict[str, Any]] = [
    {"layers": 3, "width": 35},
    {"layers": 1, "width": 7},  # rows: on four ranks the last has none of some parameters
    {"layers": 5, "width": 20, "limit": 1},
    {"layers": 5, "width": 20, "limit": 3},
    {"layers": 2, "width": 35, "limit": 4},  # of more units than there are
]
CASES = [(size, "fsdp2", False) for size in SIZES] + [
    (size, "fsdp2-hold", behind) for size in SIZES if "limit" not in size for behind in (False, True)
]
EACH = [CASES[0], *CASES[2:5], (SIZES[1], "fsdp2-hold", True)]  # each size, rung and way to follow the device

Case = tuple[dict[str, Any], str, bool]


def measured(of: list[Case]) -> list[dict[str, int]]:
    """Where `behind`, someone follows the commands to the device, so that buffers are held as they are on a GPU."""
    found = []
    for size, name, behind in of:
        settings = Settings(ranks=dist.get_world_size(), **size)
        batch = data.shard(next(settings.batches()), dist.get_rank(), settings.ranks)
        with ExitStack() as on_exit:
            if behind:
                device.command_observers.append(lambda command: None)
                on_exit.callback(device.command_observers.pop)
            found.append(measure_memory(partial(settings.build, name, rank_device()), batch, rank_device())["bytes"])
    return found


@pytest.mark.parametrize(
    ("ranks", "of"),
    [
        pytest.param(2, CASES, id="2"),
        pytest.param(4, EACH, id="4", marks=pytest.mark.wide),
        *(pytest.param(ranks, CASES, id=f"{ranks}, all", marks=pytest.mark.slow) for ranks in (1, 3, 4)),
    ],
)
def test_measured_is_predicted_to_the_byte(monkeypatch: pytest.MonkeyPatch, ranks: int, of: list[Case]) -> None:
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    for rank, cases in enumerate(launch(measured, ranks, of)):
        for (size, name, behind), found in zip(of, cases, strict=True):
            settings = Settings(ranks=ranks, **size)
            setting = replace(closed_form_setting(ranks), rank=rank, runs_behind=behind)
            predicted = asdict(RUNGS[name].predict(sizes_of(settings.model()), setting, settings.limit))
            del predicted["activations"]  # are those of a GPU's attention where the host runs ahead
            assert {key: found[key] for key in predicted} == predicted, (size, name, behind, rank)


def test_a_buffer_that_is_held_counts_once_its_stream_runs_behind() -> None:
    settings = Settings(ranks=2)
    sizes, setting = sizes_of(settings.model()), closed_form_setting(2)
    at_once, held = (
        RUNGS["fsdp2-hold"].predict(sizes, replace(setting, runs_behind=each), 2) for each in (False, True)
    )
    assert held.gradients_peak > at_once.gradients_peak
    assert replace(held, gradients_peak=0) == replace(at_once, gradients_peak=0)
