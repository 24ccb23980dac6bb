"""The predicted duration of a step on a GPU that the device model knows. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple
from unittest.mock import patch

import torch

from minifsdp import comm
from minifsdp.batch import Batch
from minifsdp.comm import Group
from minifsdp.course.bench.contestants import CONTESTANTS
from minifsdp.course.bench.settings import BenchSettings
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.instruments.machine import A100, H100, H200, DeviceMemoryError, Program, record_on_paper, replay

GPUS = {"NVIDIA A100-SXM4-80GB": A100, "NVIDIA H100 80GB HBM3": H100, "NVIDIA H200": H200}
"""GPUs by the name that CUDA gives them: other variants have other clocks and memories."""

PREDICTED = (
    "plain",
    "our-fsdp",
    "our-fsdp-grad-op",
    "fsdp-grad-op",
    "fsdp",
    "fsdp-overlap",
    "fsdp-prefetch",
    "fsdp-limit",
)
"""Contestants that can be recorded on paper: DDP and ZeRO read values during set-up, and torch's have no recorder."""


class Prediction(NamedTuple):
    """A prediction, or the reason why there is none.

    Attributes:
        seconds: of a step, by contestant; None: there is no prediction.
        says: the basis of the prediction, or the reason.
    """

    seconds: dict[str, float] | None
    says: str


def predict(settings: BenchSettings, gpu_name: str, bandwidth: float, latency: float) -> Prediction:
    """Replay each contestant that can be recorded on paper, as rank 0 of `settings.ranks` GPUs.

    Args:
        settings: the run; of `only`, the contestants in `PREDICTED`.
        gpu_name: as `torch.cuda.get_device_name()` returns it.
        bandwidth: measured bytes per second that a rank sends in a ring (bus bandwidth in nccl-tests).
        latency: seconds that every collective takes.

    Raises:
        ValueError: bandwidth or latency is impossible.
    """
    known = GPUS.get(gpu_name)
    if known is None:
        return Prediction(None, f"the device model has no numbers of {gpu_name!r}; it knows {', '.join(GPUS)}")
    hardware = replace(known.without_tf32, bandwidth=bandwidth, latency=latency)
    names = [name for name in settings.only if name in PREDICTED]
    try:
        seconds = {name: replay(_record(settings, name), hardware).seconds for name in names}
    except DeviceMemoryError as error:
        return Prediction(None, f"by the device model it does not fit: {error}")
    link = f", {latency * 1e6:.3g} us and {bandwidth / 1e9:.3g} GB/s a message" if settings.ranks > 1 else ""
    return Prediction(seconds, f"model of {hardware.name}{link}; not measured")


@cache
def _record(settings: BenchSettings, name: str) -> Program:
    return record_on_paper(partial(_build, settings, name), partial(_batch, settings), settings.ranks)


def _build(settings: BenchSettings, name: str, group: Group) -> Trainer:
    with _whole_world(group):
        trainer = CONTESTANTS[name].build(settings.model())
    for options in trainer.optimizer.param_groups:
        options["foreach"] = True  # torch's default on CUDA; the CPU's, where this is recorded, is a kernel per tensor
    return trainer


def _batch(settings: BenchSettings) -> Batch:
    tokens = torch.zeros(settings.batch, settings.context, dtype=torch.int64)
    return tokens, tokens


@contextmanager
def _whole_world(group: Group) -> Iterator[None]:
    """Make `group` the default process group inside the `with` block."""
    with patch.object(comm, "world", lambda given=None: given or group):
        yield
