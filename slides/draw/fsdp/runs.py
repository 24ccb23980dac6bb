"""Small GPTs that are run: logs, memory and collectives of steps under FSDP, and what a hook sees."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from draw.peaks import LADDER
from torch import Tensor, nn
from torch.optim import AdamW

from minifsdp import comm
from minifsdp.course.ladder.measure import Settings
from minifsdp.fsdp import FullyShardedDataParallel, ShardingStrategy, SyncSchedule
from minifsdp.fsdp.unit import SHARDED, UNSHARDED, Unit
from minifsdp.gpt import Block
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.step import take_step

SMALL = Settings(ranks=2, batch=2, layers=3, width=105, context=16)  # lab 05's model, with 4 units instead of 6
LAB = Settings(ranks=2, batch=2, layers=5, width=105, context=16)
ROWS = (2, 8, 9, 13, 18, 19, 22)


def whole_hook() -> dict[str, int]:
    """How many parameters have their gradient when the full backward hook of the whole model runs, and of how many."""
    model, seen = LAB.model(), []
    model.register_full_backward_hook(lambda *_: seen.append(sum(p.grad is not None for p in model.parameters())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says so too
        model(*next(LAB.batches())).backward()
    return {"seen": seen[0], "parameters": len(list(model.parameters()))}


class LoggedSchedule(SyncSchedule):
    """The first schedule, which notes what it does to which unit; in `log` others may note what computes."""

    log: list[tuple[str, Unit | int]]

    def begin_forward(self) -> None:
        self.log = []

    def gather(self, unit: Unit) -> None:
        if unit.state is SHARDED:
            self.log.append(("gather", unit))
        super().gather(unit)

    def free(self, unit: Unit) -> None:
        if unit.state is UNSHARDED:
            self.log.append(("free", unit))
        super().free(unit)

    def reduce(self, unit: Unit) -> None:
        self.log.append(("reduce", unit))
        super().reduce(unit)


def log_compute(model: FullyShardedDataParallel, parts: list[nn.Module]) -> None:
    """From now on the log also has what computes, with its place among the parts."""

    def watch(place: int, part: nn.Module) -> None:
        def note(*_: Any) -> None:
            model._lazy_init().schedule.log.append(("compute", place))

        def note_both(_: nn.Module, __: Any, output: Tensor) -> None:
            note()
            output.register_hook(note)

        part.register_forward_hook(note_both)

    for place, part in enumerate(parts):
        watch(place, part)


def run(strategy: ShardingStrategy, settings: Settings) -> dict[str, Any]:
    """The second step of a GPT, a row per rank, on this rank: its log, its memory, its collectives."""
    shapes: dict[str, list[int]] = {}
    batch = [part[comm.world().rank() :][:1] for part in next(settings.batches())]
    with Ledger() as ledger:
        gpt = settings.model()
        parts = [gpt.embed, *(block.qkv for block in gpt.blocks), gpt.head]
        early = AdamW(gpt.parameters())
        look = gpt.blocks[0].qkv.register_forward_pre_hook(
            lambda module, args: shapes.update(input=list(args[0].shape), weight=list(module.weight.shape))
        )
        model = FullyShardedDataParallel(gpt, None, strategy, auto_wrap_policy={Block}, schedule=LoggedSchedule)
        log_compute(model, parts)
        optimizer = AdamW(model.parameters())
        ledger.watch(model, optimizer)
        for step in range(2):
            if step:
                ledger.reset_peaks()
            with comm.record() as calls:
                loss = model(*batch)
                ledger.mark("forward")
                loss.backward()
                ledger.mark("backward")
            if not step:
                optimizer.step()
                optimizer.zero_grad()
        curve = ledger.curve()
    own_norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    look.remove()
    units = list(model._lazy_init().passes)
    held = [sum(p.nbytes for group in o.param_groups for p in group["params"]) for o in (early, optimizer)]
    return {
        "log": [
            (verb, unit % len(units) if isinstance(unit, int) else units.index(unit))  # the head is in the root, too
            for verb, unit in model._lazy_init().schedule.log
        ],
        "ops": [call.op for call in calls],
        "of_ddp": sum(call.wire for call in calls) / held[0],  # of 2 ranks each sends 2 (N - 1) / N of it: all
        "curve": curve,
        "shapes": shapes,
        "own_norm": own_norm,
        "total_norm": model.clip_grad_norm_(1e9).item(),
        "optimizer": {"early": held[0], "late": held[1]},
    }


def measure_memory(rung: str) -> dict[int, int]:
    """Peak bytes of a step on this rank, by rows of its batch."""
    peaks = {}
    with Ledger() as ledger:
        trainer = LAB.build(rung, rank_device())
        ledger.watch(trainer.model, trainer.optimizer)
        for count in (1, *ROWS):
            tokens = torch.zeros(count, LAB.context, dtype=torch.long)
            ledger.reset_peaks()
            take_step(trainer, (tokens, tokens), rank_device())
            peaks[count] = ledger.peak.total
    return {count: peaks[count] for count in ROWS}  # the first step made the optimizer's state


@cache
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks reports.

    A step of each strategy on the ladder's model, a step of a small GPT, and the peaks of DDP and FSDP by rows.
    """

    def measure() -> dict[str, Any]:
        both = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
        strategies = [run(strategy, LADDER) for strategy in both]
        steps = [run(ShardingStrategy.FULL_SHARD, SMALL)]
        return {
            "steps": steps,
            "strategies": strategies,
            "rows": {name.upper(): measure_memory(name) for name in ("ddp", "fsdp")},
        }

    return launch(measure, 2, backend="gloo")
