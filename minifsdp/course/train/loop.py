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
from minifsdp.course.ladder import data
from minifsdp.course.ladder.data import Batch
from minifsdp.course.launch import rank_device
from minifsdp.course.train.checkpoint import restore, save
from minifsdp.course.train.folder import held
from minifsdp.course.train.progress import Dial
from minifsdp.course.train.settings import Settings
from minifsdp.course.train.state import State, begin
from minifsdp.course.watch.ledger import Ledger


def train(settings: Settings, text: str, whole: Path | None = None) -> dict[str, Any]:
    """Train, saving on the way.

    Args:
        text: what the checkpoints call the text that is trained on.
        whole: the checkpoint to go on from; None: from the beginning.

    Returns:
        "losses": of every step since the first, means over all ranks; "seconds" that the steps of this run took, saving
        included; "peak": the most bytes of this rank in a step: on a GPU in blocks of its allocator, on CPU by the
        ledger; None if nobody counted.
    """
    where, rank = rank_device(), dist.get_rank()
    on_gpu = where.type == "cuda"
    corpus = data.load_text(settings.data)
    peak = _measure_memory(settings, where) if settings.ledger and not on_gpu else None
    state = begin(settings, where)
    dial = Dial(settings.steps, where) if rank == 0 else None
    with held(settings.checkpoint) if settings.checkpoint and rank == 0 else nullcontext():
        if whole is not None:
            restore(state, whole)
        start = time.perf_counter()
        while state.step < settings.steps:
            batch = data.draw(corpus, settings.batch, settings.context, state.draws)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(where)  # of steps only: not of building, restoring and saving
            loss = take_step(state, data.shard(batch, rank, settings.ranks), settings, where)
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


def take_step(state: State, batch: Batch, settings: Settings, where: torch.device) -> Tensor:
    """One optimizer step on this rank's rows of the batch, in micro-batches.

    Returns:
        The loss before the step, the mean over all ranks: a scalar on the device, which the host has not waited for.
    """
    parts = settings.accumulate
    micro_batches = zip(*(rows.chunk(parts) for rows in data.to_device(batch, where)), strict=True)
    total = torch.zeros((), device=where)
    for part, (tokens, targets) in enumerate(micro_batches):
        last = part == parts - 1
        with state.model.no_sync() if settings.no_sync and not last else nullcontext():
            loss = state.model(tokens, targets) / parts
            state.scaler.scale(loss).backward()
        total += loss.detach()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad()
    comm.all_reduce(total, comm.world(), comm.MEAN).wait()
    return total


def _measure_memory(settings: Settings, where: torch.device) -> int:
    """Peak bytes of a step, of a model that is thrown away: what counts shall not slow down what is trained."""
    tokens = torch.zeros(settings.batch // settings.ranks, settings.context, dtype=torch.int64)
    with Ledger() as ledger:
        state = begin(settings, where)
        ledger.watch(state.model, state.optimizer)
        take_step(state, (tokens, tokens), settings, where)  # makes the optimizer's state
        ledger.reset_peaks()
        take_step(state, (tokens, tokens), settings, where)
        return ledger.peak.total
