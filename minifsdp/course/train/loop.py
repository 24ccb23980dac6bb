"""The training loop, as every rank runs it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp import comm, device
from minifsdp.batch import Batch
from minifsdp.course.ladder import data
from minifsdp.course.train.checkpoint import restore, save
from minifsdp.course.train.folder import held
from minifsdp.course.train.progress import Dial
from minifsdp.course.train.settings import TrainSettings
from minifsdp.course.train.state import State, begin, without_sync
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger


def train(settings: TrainSettings, text: str, saved: Path | None = None) -> dict[str, Any]:
    """Train, saving checkpoints along the way.

    Args:
        settings: the run's settings.
        text: name of the training text in the checkpoints.
        saved: the checkpoint to resume from; None to begin.

    Returns:
        "losses": the loss of every step since the first, as means over all ranks; "seconds" of this run's steps,
        including saves; "peak": this rank's peak bytes in a step, in blocks of the allocator on a GPU and by the ledger
        on CPU; None if not measured.
    """
    where, rank = rank_device(), dist.get_rank()
    on_gpu = where.type == "cuda"
    corpus = data.load_text(settings.data)
    peak = _measure_memory(settings, where) if settings.ledger and not on_gpu else None
    state = begin(settings, where)
    dial = Dial(settings.steps, where) if rank == 0 else None
    with held(settings.checkpoint) if settings.checkpoint and rank == 0 else nullcontext():
        if saved is not None:
            restore(state, saved)
        start = time.perf_counter()
        while state.step < settings.steps:
            batch = settings.draw(corpus, state.draws)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(where)  # measure steps only, not building, restoring and saving
            loss = take_step(state, settings.rows_of(batch, rank), settings, where)
            if on_gpu:
                peak = max(peak or 0, torch.cuda.max_memory_allocated(where))
            state.losses[state.step] = loss
            state.step += 1
            if dial is not None:
                dial.turn(state.step, loss)
            if settings.saves_after(state.step):
                save(state, settings, text)
        device.synchronize(where)
        seconds = time.perf_counter() - start
    return {"losses": state.losses.tolist(), "seconds": seconds, "peak": peak}


def take_step(state: State, batch: Batch, settings: TrainSettings, where: torch.device) -> Tensor:
    """One optimizer step on this rank's rows of the batch, in micro-batches.

    Returns:
        The loss before the step, averaged over all ranks: a scalar on the device, without a host wait.
    """
    trainer, scaler, parts = state.trainer, state.scaler, settings.accumulate
    tokens, targets, loss_of = trainer.share(*data.to_device(batch, where))
    assert loss_of is not None

    def scaled(logits: Tensor, targets: Tensor) -> Tensor:
        return scaler.scale(loss_of(logits, targets))

    total = torch.zeros((), device=where)
    for part, micro_batch in enumerate(zip(tokens.chunk(parts), targets.chunk(parts), strict=True)):
        is_last = part == parts - 1
        with without_sync(trainer.model) if settings.no_sync and not is_last else nullcontext():
            total += trainer.backward(*micro_batch, scaled, is_last=is_last)
    total /= scaler.scale(torch.ones((), device=where))  # `get_scale` would wait for the device
    scaler.step(trainer.optimizer)
    scaler.update()
    trainer.optimizer.zero_grad()
    comm.all_reduce(total, comm.world(), comm.MEAN).wait()
    return total


def _measure_memory(settings: TrainSettings, where: torch.device) -> int:
    """Peak bytes of a step, measured on a throw-away model so that the ledger does not slow down training."""
    tokens = torch.zeros(settings.batch // settings.mesh.dp, settings.context, dtype=torch.int64)
    with Ledger() as ledger:
        state = begin(settings, where)
        ledger.watch(state.trainer.model, state.trainer.optimizer)
        take_step(state, (tokens, tokens), settings, where)  # creates the optimizer's state
        ledger.reset_peaks()
        take_step(state, (tokens, tokens), settings, where)
        return ledger.peak.total
