"""The bytes of tensor parallelism are those of its closed form, on every rank; no number divides the vocabulary."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks, mesh_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from minifsdp.cost.activations import Cut, Sizes, kept_by_block
from minifsdp.course.ladder.measure import Settings, measure_memory
from minifsdp.course.ladder.rungs import closed_form_setting, sizes_of
from minifsdp.gpt import GPT, Block
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.tensor_parallel import parallelize_gpt

check = Checks(__name__)

CASES: list[dict[str, Any]] = [
    {"layers": 2, "width": 24, "context": 12},
    {"layers": 1, "width": 12, "context": 24, "batch": 48, "limit": 1},  # messages larger than the gradients
]


def settings_of(ranks: int, case: dict[str, Any]) -> Settings:
    """With the rungs that so many ranks can climb."""
    settings = Settings.on("tensor", ranks=ranks, **case)
    faults = settings.faults(sizes_of(settings.model()))
    return replace(settings, rungs=tuple(name for name in settings.rungs if name not in faults))


def measured(cases: list[dict[str, Any]]) -> list[dict[str, dict[str, int]]]:
    found, where = [], rank_device()
    for case in cases:
        settings = settings_of(dist.get_world_size(), case)
        rows = {name: batches[0] for name, batches in replace(settings, steps=1).shares(dist.get_rank(), where).items()}
        builds = {name: partial(settings.build, name, where) for name in settings.rungs}
        found.append({name: measure_memory(build, rows[name], where)["bytes"] for name, build in builds.items()})
    return found


# Of the first case CI climbs all rungs on four ranks in commands/test_other_ladders.py.
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, CASES, id="2"),
        pytest.param(4, [CASES[0] | {"rungs": ("tp-fsdp2",)}], id="4"),
        pytest.param(4, [CASES[1] | {"rungs": ("tp-fsdp2",)}], id="4, others", marks=pytest.mark.wide),
        *(pytest.param(ranks, CASES, id=f"{ranks}, all", marks=pytest.mark.slow) for ranks in (1, 3, 4)),
    ],
)
def test_measured_is_predicted_to_the_byte(
    monkeypatch: pytest.MonkeyPatch, ranks: int, cases: list[dict[str, Any]]
) -> None:
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    for rank, of_cases in enumerate(launch(measured, ranks, cases, timeout=300)):
        for case, found in zip(cases, of_cases, strict=True):
            settings = settings_of(ranks, case)
            setting = replace(closed_form_setting(ranks), rank=rank, batch=settings.batch)
            assert ("tp-fsdp2" in found) == (ranks == 4)
            for name, held in found.items():
                predicted = asdict(settings.rung(name).predict(sizes_of(settings.model()), setting, settings.limit))
                assert {key: held[key] for key in predicted} == predicted, (case, name, rank)


# One block

BATCH, CONTEXT, WIDTH, HEADS = 3, 24, 48, 12
CUTS = [
    Cut(sequence=sequence, regather=regather, recomputed=recomputed)
    for (sequence, regather), recomputed in product([(False, False), (True, False), (True, True)], (False, True))
]


def recomputed(block: Block) -> None:
    """A checkpoint without dropout needs no state of random generators, which would count as kept."""
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[method-assign]


def kept(cut: Cut, dtype: torch.dtype) -> tuple[int, list[int]]:
    """What a block adds to the ledger, whose output takes its input's place; the storages that autograd saves."""
    with Ledger() as ledger:
        model = GPT(width=WIDTH, layers=2, heads=HEADS, context=CONTEXT).to(dtype)
        mesh = mesh_of((cut.ranks,))
        first, second = parallelize_gpt(model, mesh, cut.sequence, cut.regather).blocks
        if cut.recomputed:
            recomputed(second)
        ledger.watch(model)
        saved: dict[int, Tensor] = {}
        parameters = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}

        def note(t: Tensor) -> Tensor:
            saved[t.untyped_storage().data_ptr()] = t
            return t

        part = CONTEXT // cut.ranks if cut.sequence else CONTEXT
        x = first(torch.ones(BATCH, part, WIDTH, dtype=dtype, requires_grad=True))
        before = ledger.mark("first block")["activations"]
        with saved_tensors_hooks(note, lambda t: t):
            y = second(x)
        grown = ledger.mark("second block")["activations"] - before
        y.sum().backward()
    sizes = [t.untyped_storage().nbytes() for address, t in saved.items() if address not in parameters]
    return grown, sorted(filter(None, sizes))  # torch 2.11's checkpoint saves a tensor without elements


@check(ranks=(1, 2, 4), slow=(1,), dtype=(torch.float32,))
@check(ranks=(1, 2, 4), slow=(1, 4), dtype=(torch.float64,), wide=True)
def what_a_block_keeps(dtype: torch.dtype) -> None:
    """Term by term, as autograd saves them, and in all, as the ledger has it."""
    sizes = Sizes(BATCH, CONTEXT, WIDTH, HEADS, vocabulary=0, itemsize=dtype.itemsize)
    for cut in CUTS:
        cut = replace(cut, ranks=dist.get_world_size())
        terms = kept_by_block(sizes, cut)
        grown, saved = kept(cut, dtype)
        assert grown == sum(terms.values()), cut
        halves = [[size // 2] * 2 if "statistics" in what else [size] for what, size in terms.items()]
        assert saved == sorted(size for each in halves for size in each), cut


@pytest.mark.parametrize("t", [1, 2, 4])
def test_the_large_terms_are_the_papers(t: int) -> None:
    """In fp16, with the masks of two dropouts, without softmax: arXiv 2205.05198, equations 1, 2 and 4, and table 2."""
    sizes = Sizes(BATCH, CONTEXT, WIDTH, HEADS, vocabulary=0, itemsize=2)
    sbh = BATCH * CONTEXT * WIDTH

    def large(**options: bool) -> float:
        terms = kept_by_block(sizes, Cut(t, **options))
        return sum(size for what, size in terms.items() if "statistics" not in what and what != "logsumexp")

    assert large() + 2 * sbh == sbh * (10 + 24 / t)
    assert large(sequence=True, regather=True) + 2 * sbh / t == sbh * 34 / t
    assert large(sequence=True) - large(sequence=True, regather=True) == 2 * 2 * sbh * (1 - 1 / t)
    assert large(recomputed=True) == 2 * sbh


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
