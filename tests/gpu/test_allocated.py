"""The ledger's bytes are the caching allocator's, at the boundary between two steps, for every rung.

The allocator (c10/cuda/CUDACachingAllocator.cpp) counts what was asked for, `requested_bytes`, and what it gave,
`allocated_bytes`: the same rounded up to 512 bytes, and for a block of more than 1 MiB perhaps one that was there, up
to 1 MiB larger. Beside tensors it holds the libraries' workspaces, one of cuBLAS for each thread and stream that
multiplies. They are there once anything has been trained; NCCL's buffers are not the allocator's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from on_gpu import ON_GPU, Figures, GpuChecks, Way
from small_model import batches, make_model, my_share, sgd, step

from minifsdp import device
from minifsdp.course.ladder.rungs import RUNGS, Trainer
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger

pytestmark = ON_GPU
check = GpuChecks(__name__)

BLOCK = 512  # kMinBlockSize: what sizes are rounded up to
LARGE = 2**20  # kSmallSize: larger ones may get a block with up to so much to spare


def rounded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def sizes_on(ledger: Ledger, where: torch.device) -> list[int]:
    """Bytes of every storage on a device that the ledger has in its books."""
    entries = ledger._books._entries.values()
    alive = [(entry, entry.alive()) for entry in entries]
    return [entry.nbytes for entry, storage in alive if storage is not None and storage.device == where]


def allocated(where: torch.device) -> tuple[int, int]:
    """(requested, given) by the caching allocator now, when the device has done all that was queued.

    A block that was freed while another stream used it counts as requested until its event is asked for: by the next
    allocation, or by emptying the cache.
    """
    gc.collect()
    device.synchronize(where)
    torch.cuda.empty_cache()
    stats = torch.cuda.memory_stats(where)
    return stats["requested_bytes.all.current"], stats["allocated_bytes.all.current"]


def train_and_drop() -> None:
    """One process's steps: what they leave allocated is no tensor."""
    trainer = sgd(make_model())
    for batch in batches(2):
        step(trainer, batch)


def watched(rung: str, ledger: Ledger) -> tuple[Trainer, Callable[[], None]]:
    """A trainer that the ledger has seen made, and what takes its next step."""
    trainer = RUNGS[rung].build(make_model(), 2)
    ledger.watch(trainer.model, trainer.optimizer)
    mine = my_share(batches(1)[0])

    def take_step() -> None:
        step(trainer, mine)

    return trainer, take_step


@check(rung=list(RUNGS))
def the_ledger_and_the_allocator_agree(rung: str) -> Figures:
    where = rank_device()
    if where.type == "cpu":
        return ledger_alone(rung)
    train_and_drop()
    workspace = allocated(where)
    with Ledger() as ledger:
        trainer, take_step = watched(rung, ledger)
        for _ in range(3):
            take_step()
            ledger.mark("step")
            requested, given = (now - before for now, before in zip(allocated(where), workspace, strict=True))
            sizes = sizes_on(ledger, where)
            spare = LARGE * sum(size > LARGE for size in sizes)
            assert sum(sizes) == requested, rung
            assert 0 <= given - sum(map(rounded, sizes)) <= spare, rung
        del trainer, take_step
    return {f"ledger.{rung}.bytes": requested, f"ledger.{rung}.allocated": given, "ledger.workspace": workspace[1]}


def ledger_alone(rung: str) -> Figures:
    """On CPU there is no allocator to ask; the books are to be the sum of their entries at least."""
    with Ledger() as ledger:
        trainer, take_step = watched(rung, ledger)
        take_step()
        ledger.mark("step")
        assert sum(sizes_on(ledger, rank_device())) == sum(ledger.live().values()) > 0
        assert sum(p.nbytes for p in trainer.model.parameters()) <= sum(ledger.live().values())
    return {}


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str, world: Way, record_property: Callable[[str, object], None]) -> None:
    check.assert_passed(ranks, name, world, record_property)
