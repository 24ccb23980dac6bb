"""Activations, messages and collectives of pipelines: measured and counted = closed form, on every rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_stages import InStages
from on_ranks import Checks, mesh_of
from torch import nn

from minifsdp import comm
from minifsdp.cost import pipeline as form
from minifsdp.cost.activations import Sizes
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from minifsdp.fsdp2 import fully_shard
from minifsdp.gpt import GPT, Block
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.losses import cross_entropy
from minifsdp.pipeline import split_gpt
from minifsdp.pipeline.schedules.interleaved import interleaved
from minifsdp.pipeline.schedules.one_f_one_b import one_f_one_b
from minifsdp.pipeline.schedules.zero_bubble import zero_bubble
from minifsdp.pipeline.simulate import simulate
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

check = Checks(__name__)
BLOCKS, WIDTH, HEADS, CONTEXT, VOCABULARY, ROWS = 6, 24, 4, 10, 50, 2
NAMES = ("gpipe", "1f1b", "zb-h1", "looped bfs", "interleaved", "zbv")


class Ours(InStages):
    """This rank's stages of the GPT, and their schedule."""

    def __init__(self, name: str, micros: int, group: Any = None, wrap: Any = lambda module: module) -> None:
        self.tokens = torch.randint(VOCABULARY, (ROWS * micros, CONTEXT))
        super().__init__(
            name, micros, lambda count, stage: wrap(split_gpt(self.whole(), count, stage)), cross_entropy, group
        )

    @staticmethod
    def whole() -> GPT:
        torch.manual_seed(0)
        return GPT(VOCABULARY, WIDTH, BLOCKS, HEADS, CONTEXT)

    def step(self) -> None:
        target = self.tokens if self.is_last else None
        self.schedule.step(*([self.tokens] if self.is_first else []), target=target, return_outputs=False)


@check(ranks=(2, 3), name=NAMES)
def activations_before_each_action(name: str) -> None:
    """With twice as many micro-batches as ranks: GPipe keeps all of them, the others fewer."""
    micros = 2 * dist.get_world_size()
    levels: list[int] = []
    with Ledger() as ledger:
        ours = Ours(name, micros)
        for module in ours.modules.values():
            ledger.watch(module)
        ours.step()
        before = ledger.mark("before")["activations"]
        ours.schedule.executor.observers.append(lambda action: levels.append(ledger.mark("")["activations"] - before))
        ours.step()
        assert ledger.mark("after")["activations"] == before
    sizes = Sizes(ROWS, CONTEXT, WIDTH, HEADS, VOCABULARY)
    stages = form.stages_of(BLOCKS, ours.count)
    assert max(levels) == form.held(ours.schedule.plan, dist.get_rank(), stages, sizes)


@check(ranks=(2, 3), name=NAMES)
def messages_of_a_step(name: str) -> None:
    """Of one size: b s h elements."""
    micros = 2 * dist.get_world_size()
    ours, rank = Ours(name, micros), dist.get_rank()
    homes = [ours.schedule.channels.homes[stage] for stage in range(ours.count)]
    ours.step()  # the first also says what passes
    with comm.record() as log:
        ours.step()
    sent = [call.payload for call in log if call.op == "send"]
    assert len(sent) == form.messages(ours.schedule.plan[rank], homes, rank)
    assert set(sent) == {ROWS * CONTEXT * WIDTH * 4}


def data_parallel(how: str, mesh: Any, module: nn.Module) -> Any:
    dp = mesh.get_group()
    if how == "ddp":
        return DistributedDataParallel(module, process_group=dp, bucket_cap_mb=0.02)
    if how == "fsdp2":
        for block in module.blocks.values():  # type: ignore[union-attr, operator]
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        return fully_shard(module, mesh=mesh, reshard_after_forward=False)
    if how.startswith("fsdp"):
        strategy = ShardingStrategy.SHARD_GRAD_OP if how == "fsdp-grad-op" else ShardingStrategy.FULL_SHARD
        return FullyShardedDataParallel(module, dp, strategy, auto_wrap_policy={Block})
    return module


HOWS = ("ddp", "zero1", "zero2", "fsdp-grad-op", "fsdp", "fsdp2")


@check(ranks=4, name=("1f1b", "interleaved"), how=HOWS)
@check(ranks=4, name=("gpipe",), how=HOWS[::2], wide=True)
@check(ranks=4, name=("looped bfs",), how=HOWS[1::2], wide=True)
@check(ranks=4, slow=(4,), name=("gpipe",), how=HOWS[1::2])
@check(ranks=4, slow=(4,), name=("looped bfs",), how=HOWS[::2])
def collectives_of_data_parallelism(name: str, how: str, micros: int = 4) -> None:
    """On two replicas of two ranks: each bucket or unit is gathered and reduced as often as the closed form says."""
    mesh = mesh_of((2, 2), "dp", "pp")
    dp = mesh["dp"].get_group()
    ours = Ours(name, micros, mesh["pp"].get_group(), lambda module: data_parallel(how, mesh["dp"], module))
    kind = {"zero1": Zero1Optimizer, "zero2": Zero2Optimizer}.get(how)
    optimizers: list[Any] = [torch.optim.SGD(module.parameters(), 0.1) for module in ours.modules.values()]
    if kind is not None:  # one for each stage: ZeRO-2's reduces all that it has in each backward
        optimizers = [kind(module.parameters(), torch.optim.SGD, dp, 0.02, lr=0.1) for module in ours.modules.values()]
    for _ in range(2):  # the second knows what the first has learnt
        with comm.record() as log:
            ours.step()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found: Counter[tuple[str, int]] = Counter((call.op, call.payload) for call in log if call.op != "recv")
    repeats, of_root = (form.data_parallel(how, micros, is_root) for is_root in (False, True))
    if how == "ddp":
        reduced = [payload for (op, payload), count in found.items() if op == "all_reduce" for _ in range(count)]
        assert sum(reduced) == 4 * sum(p.numel() for module in ours.modules.values() for p in module.parameters())
        return
    if kind is not None:
        sizes = Counter(4 * bucket.shard.numel() * 2 for optimizer in optimizers for bucket in optimizer.buckets)
        roots: Counter[int] = Counter()
    else:
        sizes, roots = units_of(ours.modules.values(), how)
    assert sizes.total() > 1
    for op, each, root in (
        ("all_gather", repeats.gathers, of_root.gathers),
        ("reduce_scatter", repeats.reductions, of_root.reductions),
    ):
        expected = Counter({size: each * count for size, count in sizes.items()})
        expected.update({size: root * count for size, count in roots.items()})
        assert Counter({size: count for (kind_, size), count in found.items() if kind_ == op}) == expected, op


def units_of(modules: Any, how: str) -> tuple[Counter[int], Counter[int]]:
    """Padded bytes of the units: blocks, and roots."""
    blocks = Counter[int]()
    roots = Counter[int]()
    for module in modules:
        inner = module.module if how != "fsdp2" else module
        units = list(inner.blocks.values())
        taken = {id(p) for unit in units for p in unit.parameters()}
        for unit in units:
            blocks[padded(list(unit.parameters()), how)] += 1
        rest = [p for p in module.parameters() if id(p) not in taken]
        roots.update([padded(rest, how)] if rest else [])  # a stage between the ends has blocks only
    return blocks, roots


def padded(parameters: list[Any], how: str) -> int:
    """Bytes of a unit's buffer, from this rank's shards."""
    if how != "fsdp2":
        return 2 * 4 * sum(p.numel() for p in parameters)
    rows = sum(-(-p.shape[0] // 2) * p.shape[1:].numel() for p in parameters)
    return 2 * (-(-4 * rows // 16) * 16)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)


# Arithmetic


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_the_formulas_are_those_of_the_simulator(p: int, m: int) -> None:
    units = {"F": 1, "B": 2, "I": 1, "W": 1}
    for v, order in ((1, one_f_one_b), (2, interleaved), (4, interleaved)):
        more = (v,) if v > 1 else ()
        found = simulate([list(order(rank, p, m, *more)) for rank in range(p)], units)  # type: ignore[operator]
        assert found.bubble == pytest.approx(form.bubble(p, m, v))
        assert found.held == [form.micro_batches_held(p, m, rank, v) for rank in range(p)]
    split = simulate([list(zero_bubble(rank, p, m)) for rank in range(p)], units)
    assert split.bubble == pytest.approx(form.zero_bubble(p, m))
    assert max(split.held) == min(m, p)
    slow = {"F": 1.0, "I": 1.5, "W": 0.5}
    split = simulate([list(zero_bubble(rank, p, m)) for rank in range(p)], slow)
    assert split.bubble == pytest.approx(form.zero_bubble(p, m, 1.0, 1.5, 0.5), abs=0.02)


def test_zero_stages_inside_a_pipeline() -> None:
    """C32: of 8 micro-batches ZeRO-2 sends 4.5 times as much as ZeRO-1, ZeRO-3 12 times."""
    sent = {how: form.data_parallel(how, 8).sent(1000, 4) for how in ("ddp", "zero1", "zero2", "fsdp", "fsdp2")}
    assert sent["ddp"] == sent["zero1"] == sent["fsdp2"] == 2 * 750
    assert sent["zero2"] / sent["zero1"] == 4.5
    assert sent["fsdp"] / sent["zero1"] == 12
