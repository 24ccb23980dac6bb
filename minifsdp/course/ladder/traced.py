"""One profiled step, as usual a one as can be had on a machine that others may use too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from minifsdp import comm
from minifsdp.batch import Batch
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.instruments.explore.log import Moment, StepLog
from minifsdp.instruments.link.emulated import EmulatedLink, HostLinks
from minifsdp.instruments.watch.step import align, take_step
from minifsdp.instruments.watch.timeline import Span
from minifsdp.instruments.watch.trace import record_trace

NAMES = {"rest": "zero_grad"}  # of a log's moments, where they differ from the phases
_TRACES, _CLOSE = 3, 1.25  # steps traced at most, until one is so close to the usual time


@dataclass(frozen=True)
class TracedStep:
    """A profiled step of rank 0.

    Attributes:
        moments: of its log.
        spans: its lanes; none until `read_trace` has read its trace.
        seconds: its length on the host.
        usual: the median of the same trainer's unprofiled steps, in seconds; None: none were taken.
    """

    moments: list[Moment]
    spans: list[Span]
    seconds: float
    usual: float | None


def trace_step(
    trainer: Trainer,
    batch: Batch,
    where: torch.device,
    path: Path,
    link: EmulatedLink | HostLinks | None,
    usual: float | None,
) -> TracedStep | None:
    """Profile a step on rank 0, again if it takes much longer or shorter than usual; keep the most usual one.

    The other ranks take the same steps unprofiled, and return None.
    """
    best: TracedStep | None = None
    for _ in range(_TRACES if usual else 1):
        align(where)
        close = torch.ones(1, device=where)
        if dist.get_rank() == 0:
            step = _profiled(trainer, batch, where, path.with_suffix(".part"), link, usual)
            if best is None or _off(step) < _off(best):
                best = step
                path.with_suffix(".part").replace(path)
            close.fill_(_off(best) <= _CLOSE)
        else:
            take_step(trainer, batch, where)
        comm.broadcast(close, 0, comm.world()).wait()
        if close.item():
            break
    path.with_suffix(".part").unlink(missing_ok=True)
    return best


def _profiled(
    trainer: Trainer,
    batch: Batch,
    where: torch.device,
    path: Path,
    link: EmulatedLink | HostLinks | None,
    usual: float | None,
) -> TracedStep:
    with record_trace(path, link), StepLog() as log:
        take_step(trainer, batch, where, lambda phase: log.mark(NAMES.get(phase, phase)))
    return TracedStep(log.moments, [], log.moments[-1].at - log.moments[0].at, usual)


def _off(step: TracedStep) -> float:
    """The factor between this step and the usual one, 1 or more."""
    return max(step.seconds / step.usual, step.usual / step.seconds) if step.usual else 1.0
