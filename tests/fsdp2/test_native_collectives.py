"""With `MINIFSDP_COLLECTIVES=native` a step calls the collectives that torch's `fully_shard` calls, and no other."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import cloudpickle
import pytest
import torch.distributed as dist
from beside_torch import batch, gpt, ours, shard_blocks, theirs
from torch.distributed.device_mesh import init_device_mesh

from minifsdp.course.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NAMES = [  # of everything that sends; two have another name as well, from torch 2.12 on
    name
    for name in dir(dist)
    if name.startswith(
        ("all_", "reduce", "broadcast", "gather", "scatter", "isend", "irecv", "send", "recv", "barrier")
    )
    and callable(getattr(dist, name))
]
SAME = {  # their newer names
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
GATHER, REDUCTION = "all_gather_into_tensor", "reduce_scatter_tensor"


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls by name; one that torch makes inside another does not count."""
    found: Counter[str] = Counter()
    inside = [False]

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return function(*args, **kwargs)
            found[SAME.get(name, name)] += 1
            inside[0] = True
            try:
                return function(*args, **kwargs)
            finally:
                inside[0] = False

        return call

    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(patch.object(dist, name, counting(name, getattr(dist, name))))
        yield found


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
    with counted() as found:
        model(*batch(1)).backward()
    return found


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
