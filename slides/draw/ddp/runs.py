"""A GPT as large as GPT-2 under DDP on a simulated GPU: its gradients, its buckets, and the seconds of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from draw.canvas import MIB
from torch import nn
from torch.optim import SGD

from minifsdp.batch import Batch
from minifsdp.comm import Call
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.ddp import BucketedDDP, DistributedDataParallel, NaiveDDP, naive
from minifsdp.ddp.bucketed import assign_buckets
from minifsdp.gpt import GPT
from minifsdp.instruments.machine import A100, Program, Run, record_on_paper, replay

gpt2: Callable[[], GPT] = partial(GPT, vocabulary=50257, width=768, layers=12, heads=12, context=1024, tied=True)
SIZE = "GPT as large as GPT-2"
GPUS = 16
PAPER = replace(A100, issue=A100.launch, segment=(0.0, 0.0))  # the table's issue is FSDP's bookkeeping
ON_PAPER = f"simulated {PAPER.name}, {GPUS} ranks: modelled, not measured"
CAP = 25  # MiB of every bucket, on all slides; torch's class closes its first one at 1


@cache
def parameters() -> dict[str, nn.Parameter]:
    """By name, in order of registration; without memory."""
    with torch.device("meta"):
        return dict(gpt2().named_parameters())


@cache
def recorded(kind: str, cap: float = CAP) -> Program:
    """A step of rank 0 on one sequence. Nobody is there to compare models with, so that is left out."""

    def build(group: Any) -> Trainer:
        model = gpt2()
        if kind == "ddp":
            options: Any = {"init_sync": False, "gradient_as_bucket_view": True, "bucket_cap_mb": cap}
            ddp = DistributedDataParallel(model, process_group=group, **options)
            return Trainer(ddp, SGD(ddp.parameters(), foreach=True))
        with patch.object(naive, "start_from_rank_0"):
            rung = NaiveDDP(model, group) if kind == "naive" else BucketedDDP(model, group, cap)
        return Trainer(rung, SGD(rung.parameters(), foreach=True), [rung.sync_gradients])

    def batch() -> Batch:
        tokens = torch.zeros(1, 1024, dtype=torch.int64)
        return tokens, tokens

    return record_on_paper(build, batch, GPUS, steps=1)


@cache
def rung(kind: str) -> Run:
    return replay(recorded(kind), PAPER)


def backward_of(run: Run) -> float:
    """Seconds from the end of forward until the optimizer can begin."""
    done = {mark.name: mark.done for mark in run.marks}
    return done["optimizer"] - done["backward"]


@cache
def ready() -> list[float]:
    """When each gradient is there, the last parameter's first: with a bucket each, and a link that takes no time."""
    run = replay(recorded("ddp", 0), replace(PAPER, latency=0.0, bandwidth=1e30))
    return [span.start for span in run.spans if span.lane == "communication"]


def all_reduce(nbytes: int) -> float:  # seconds
    return PAPER.message(Call("all_reduce", "", "", 0, nbytes, GPUS))


def bucket_sizes(*caps: int) -> list[int]:
    """Bytes of each bucket; of several caps in MiB the last is for the rest."""
    buckets = assign_buckets(parameters().values(), [cap * MIB for cap in caps])
    return [sum(p.nbytes for p in bucket) for bucket in buckets]


def exposed(cap: int) -> float:
    """Seconds from the last gradient to the end of the last bucket's reduction."""
    free, gradients = 0.0, 0
    for bucket in assign_buckets(parameters().values(), cap * MIB):
        gradients += len(bucket)
        free = max(free, ready()[gradients - 1]) + all_reduce(sum(p.nbytes for p in bucket))
    return free - ready()[-1]
