"""The step benchmark on each rank: time all contestants in turn, then measure their memory one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp.batch import Batch
from minifsdp.course.bench.contest import Contest
from minifsdp.course.bench.contestants import Contestant
from minifsdp.course.bench.memory import measure_memory, release
from minifsdp.course.bench.settings import BenchSettings
from minifsdp.course.ladder import data
from minifsdp.course.ladder.rungs import Trainer, plain
from minifsdp.instruments.launch import rank_device, report
from minifsdp.instruments.launch.group import share_cores
from minifsdp.instruments.watch.step import take_step


def train_alone(settings: BenchSettings) -> list[list[float]]:
    """Train in one process on the whole batch, a rank's rows at a time: every contestant must reach these losses.

    Returns:
        For each step, the loss on each rank's rows.
    """
    where = rank_device()
    share_cores(settings.ranks)  # as many threads as a rank has, so that kernels sum in the same order
    trainer = plain(settings.model().to(where))
    losses = []
    for batch in settings.batches():
        parts = [_shard(batch, rank, settings.ranks, where) for rank in range(settings.ranks)]
        each = []
        for tokens, targets in parts:
            loss = trainer.model(tokens, targets)
            (loss / settings.ranks).backward()
            each.append(float(loss.detach()))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        losses.append(each)
    return losses


def compete(settings: BenchSettings, contestants: Mapping[str, Contestant]) -> dict[str, Any]:
    """Run all contestants on this rank.

    Returns:
        "device", its name; "threads" of this rank on CPU; and "contestants", by name: "losses" of each step on this
        rank's rows, "step_seconds" of the timed steps, and "bytes" as of `measure_memory`, None if not measured.
    """
    rank, where = dist.get_rank(), rank_device()
    # Copied to the device before any step is timed: a copy from unpinned memory blocks the host.
    batches = [_shard(batch, rank, settings.ranks, where) for batch in settings.batches()]
    done, total = 0, len(settings.only) * (len(batches) + settings.memory)

    def advance(name: str, what: str) -> None:
        nonlocal done
        done += 1
        if rank == 0:
            report((f"{name}: {what}", done, total))

    trainers = {name: _build(settings, contestants[name], where) for name in settings.only}
    steps = {name: partial(_step, trainer, batches, where) for name, trainer in trainers.items()}
    times = Contest(steps, "wall", settings.steps, settings.warm_up, quiet=False).run(
        where, lambda name, timed: advance(name, "timing" if timed else "warming up")
    )
    del steps
    while trainers:
        release(trainers.popitem()[1])
    results: dict[str, dict[str, Any]] = {
        name: {"losses": each.losses, "step_seconds": each.seconds, "bytes": None} for name, each in times.items()
    }
    for name in settings.only if settings.memory else ():
        results[name]["bytes"] = measure_memory(partial(_build, settings, contestants[name], where), batches[0], where)
        advance(name, "measuring")
    return {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "contestants": results,
    }


def _step(trainer: Trainer, batches: Sequence[Batch], where: torch.device, number: int) -> Tensor:
    return take_step(trainer, batches[number], where)


def _build(settings: BenchSettings, contestant: Contestant, where: torch.device) -> Trainer:
    return contestant.build(settings.model().to(where))


def _shard(batch: Batch, rank: int, ranks: int, where: torch.device) -> Batch:
    tokens, targets = data.shard(batch, rank, ranks)
    return tokens.to(where), targets.to(where)
