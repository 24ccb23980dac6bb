"""With `MINIFSDP_COLLECTIVES=native` a step calls the collectives that torch's `fully_shard` calls, and no other."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import cloudpickle
import pytest
import torch.distributed as dist
from beside_torch import batch, gpt, ours, shard_blocks, theirs
from torch.distributed.device_mesh import init_device_mesh
from torchs_calls import GATHER, REDUCTION, torchs_calls

from minifsdp.instruments.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def in_a_step(lib: Any, frozen: tuple[str, ...] = (), replicas: int = 0, **options: Any) -> Counter[str]:
    """Of the second step, when torch has found out what it wants to know."""
    model = gpt()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    if replicas:
        shape = replicas, dist.get_world_size() // replicas
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = shard_blocks(lib, model, **options)
    model(*batch(0)).backward()
    with torchs_calls() as calls:
        model(*batch(1)).backward()
    return Counter(name for name, _ in calls)


CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {  # three blocks and the root
    "as it comes": ({}, {GATHER: 4 + 3, REDUCTION: 4}),
    "all resharded": ({"reshard_after_forward": True}, {GATHER: 4 + 4, REDUCTION: 4}),
    "kept whole": ({"reshard_after_forward": False}, {GATHER: 4, REDUCTION: 4}),
    "a frozen block": ({"frozen": ("blocks.1",)}, {GATHER: 4 + 3, REDUCTION: 3}),
    "replicated": ({"replicas": 2}, {GATHER: 4 + 3, REDUCTION: 4, "all_reduce": 4}),
}


def measured() -> list[tuple[Counter[str], Counter[str]]]:
    return [(in_a_step(ours, **options), in_a_step(theirs, **options)) for options, _ in CASES.values()]


def test_a_step_makes_torch_s_collectives_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIFSDP_COLLECTIVES", "native")
    for rank in launch(measured, 4):
        for (name, (_, expected)), (mine, torchs) in zip(CASES.items(), rank, strict=True):
            assert mine == expected, name
            assert torchs == expected, name
