"""What is dropped is gone: hooks on parameters keep neither a model nor an optimizer alive."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from minifsdp.course.ladder.rungs import RUNGS, TENSOR_RUNGS
from minifsdp.gpt import GPT
from minifsdp.instruments.launch import launch
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

EVERY = {**RUNGS, **{name: rung for name, rung in TENSOR_RUNGS.items() if name.startswith("tp-sp") or name == "tp"}}


def remains(name: str) -> list[str]:
    """Names of the parameters, gradients and states that outlive a rung, after one step with it."""
    trainer = EVERY[name].build(GPT(width=16, layers=2, context=8), 2)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    trainer.model(tokens, tokens).backward()
    trainer.after_backward()
    trainer.optimizer.step()
    kept: list[tuple[str, Callable[[], Any]]] = []
    for place, p in enumerate(p for group in trainer.optimizer.param_groups for p in group["params"]):
        kept += (
            [(f"{place}", weakref.ref(p)), (f"gradient of {place}", weakref.ref(p.grad))] if p.grad is not None else []
        )
    kept += [(f"parameter {key}", weakref.ref(p)) for key, p in trainer.model.named_parameters()]
    assert kept
    del trainer, p
    gc.collect()
    patience = time.monotonic() + 10  # gloo's threads let go of what they have reduced a moment later
    while (left := [what for what, alive in kept if alive() is not None]) and time.monotonic() < patience:
        time.sleep(0.01)
    return left


def test_a_rung_that_is_dropped_gives_all_its_memory_back() -> None:
    (found, _) = launch(lambda: {name: remains(name) for name in EVERY}, 2)
    assert found == {name: [] for name in EVERY}


def buckets_that_wait_for_the_collector() -> list[str]:
    model = GPT(width=16, layers=2, context=8)
    optimizers = [kind(model.parameters(), torch.optim.AdamW) for kind in (Zero1Optimizer, Zero2Optimizer)]
    for optimizer in optimizers:
        optimizer.state_dict()
    buckets = [weakref.ref(bucket) for optimizer in optimizers for bucket in optimizer.buckets]
    gc.collect()
    gc.disable()
    optimizers.clear()
    del optimizer
    waiting = [str(bucket().label) for bucket in buckets if bucket() is not None]
    gc.enable()
    return waiting


def test_zeros_buckets_go_at_once() -> None:
    """No cycle holds their memory until Python's collector comes by."""
    assert launch(buckets_that_wait_for_the_collector, 1) == [[]]
