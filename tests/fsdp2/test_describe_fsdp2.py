"""`minifsdp.instruments.describe` of a model under `fully_shard`: its numbers are what the ledger then measures."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from minifsdp.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from minifsdp.gpt import GPT
from minifsdp.instruments.launch import launch
from minifsdp.instruments.watch.description import Prediction, describe
from minifsdp.instruments.watch.ledger import Ledger

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "kept whole": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    "bf16, reduced in fp32": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "frozen": {"frozen": ("blocks.1", "head")},
    "among fewer": {"reshard_after_forward": 2},
}
PARTS = ("parameters", "gradients", "optimizer", "unsharded_peak", "gradients_peak")


def sharded(frozen: tuple[str, ...] = (), root: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    model = GPT(width=35, layers=3, context=16)  # sizes that neither 2 nor 4 divides
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **({} if "reshard_after_forward" in options else options)) if root else model


def measure(options: dict[str, Any]) -> tuple[Prediction, Prediction]:
    """What is predicted before the first step, and what the second one holds."""
    with Ledger() as ledger:
        model = sharded(**options)
        predicted = describe(model).predicted
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        ledger.watch(model, optimizer)
        for step in range(2):
            ledger.reset_peaks()
            tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(step))
            model(tokens, tokens).backward()
            optimizer.step()
            held = ledger.live()
            measured = Prediction(
                held["parameters"],
                held["gradients"],
                held["optimizer"],
                ledger.peak_of("unsharded"),
                ledger.peak_of("gradients", "communication"),
                ledger.peak_of("parameters", "optimizer", "unsharded", "gradients", "communication"),
            )
            optimizer.zero_grad()
    assert describe(model).predicted == predicted  # running changes nothing
    return predicted, measured


def measure_all() -> dict[str, tuple[Prediction, Prediction]]:
    warnings.simplefilter("ignore")
    return {name: measure(options) for name, options in CASES.items()}


def test_a_step_holds_what_is_predicted() -> None:
    for rank in launch(measure_all, 4):
        for name, (predicted, found) in rank.items():
            exact = PARTS[:3] if name == "among fewer" else PARTS[:4]
            for part in exact:
                assert getattr(found, part) == getattr(predicted, part), (name, part)
            # Which of the outermost module's gradients come first is not known before a step.
            for part in (*PARTS, "peak"):
                assert 0.5 * getattr(predicted, part) < getattr(found, part) <= getattr(predicted, part), (name, part)


def rows_and_refusals() -> None:
    warnings.simplefilter("ignore")
    model = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16), offload_policy=CPUOffloadPolicy(pin_memory=False))
    description = describe(model)
    root, block, *_ = description.rows
    assert [row.name for row in description.rows] == ["root (GPT)", *(f"blocks.{i} (Block)" for i in range(3))]
    assert (root.strategy, block.strategy, root.resharded, block.resharded) == ("kept whole", "resharded", False, True)
    assert block.dtypes == ("float32", "bfloat16", "bfloat16")
    assert block.numel == sum(p.numel() for p in model.blocks[0].parameters())
    assert description.predicted.peak == description.predicted.unsharded_peak + description.predicted.gradients_peak
    assert "blocks.2 (Block)" in repr(description)
    frozen = describe(sharded(frozen=("head", "blocks.1")))
    assert not [line for line in frozen.warnings if "frozen" in line]  # their gradients have no place in a buffer
    assert (frozen.rows[2].gradient.unsharded, frozen.rows[2].optimizer) == (0, 0)
    (warning,) = describe(fully_shard(nn.Linear(40, 40))).warnings
    assert warning == (
        "root (Linear) holds 100% of all parameters: once it is gathered, nothing is sharded. Apply fully_shard to "
        "its layers first."
    )
    assert "dimension 0" in describe(fully_shard(nn.Linear(40, 3))).warnings[1]
    with pytest.raises(ValueError, match=r"GPT is not sharded itself: describe its blocks\.0"):
        describe(sharded(root=False))
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        describe(fully_shard(nn.ReLU()))


def test_rows_say_what_units_are() -> None:
    launch(rows_and_refusals, 2)
