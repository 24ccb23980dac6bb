"""Architectures from `transformers` under `fully_shard`: they train, save and load as one process does, in float64.

A launch on two ranks trains and saves, one on three loads, into ours, into torch's and into the plain model.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers_models import MODELS, batch, plain

import minifsdp.fsdp2 as ours
from minifsdp.course.launch import launch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS, CLOSE = 3, 1e-9


def sharded(lib: Any, name: str, seed: int = 0) -> Any:
    """Every block a unit, from the inside out, and the rest another."""
    model, blocks = plain(name, seed), tuple(MODELS[name]().blocks)
    for module in reversed([each for each in model.modules() if isinstance(each, blocks)]):
        lib.fully_shard(module)
    return lib.fully_shard(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3)


def steps(name: str, model: Any, optimizer: Any, numbers: range, rank: int = 0, ranks: int = 1) -> list[float]:
    """Each step's loss, of all ranks' rows."""
    losses = []
    for step in numbers:
        given = batch(name, step, rank, ranks)
        logits = model(**given).logits  # their own loss is in float32
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), given["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def trained_and_saved(names: list[str], folder: Path) -> dict[str, list[float]]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        model = sharded(ours, name)
        optimizer = optimizer_of(model)
        found[name] = steps(name, model, optimizer, range(STEPS), dist.get_rank(), dist.get_world_size())
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder / name)
    return found


def loaded_and_trained(names: list[str], folder: Path) -> dict[str, dict[str, list[float]]]:
    """By model, the losses of what has been loaded: by ours, by torch's, in one process."""
    torch.set_default_dtype(torch.float64)
    rank, ranks, found = dist.get_rank(), dist.get_world_size(), {}
    for name in names:
        found[name] = {}
        for kind, model in (
            ("ours", sharded(ours, name, 1)),
            ("torch's", sharded(theirs, name, 1)),
            ("plain", plain(name, 1)),
        ):
            optimizer = optimizer_of(model)
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(state, checkpoint_id=folder / name)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            share = (0, 1) if kind == "plain" else (rank, ranks)
            found[name][kind] = steps(name, model, optimizer, range(STEPS, STEPS + 2), *share)
    return found


def test_they_train_save_and_load_as_one_process_does(tmp_path: Path) -> None:
    expected = {}
    torch.set_default_dtype(torch.float64)
    try:
        for name in MODELS:
            model = plain(name)
            expected[name] = steps(name, model, optimizer_of(model), range(STEPS + 2))
    finally:
        torch.set_default_dtype(torch.float32)
    trained = launch(trained_and_saved, 2, list(MODELS), tmp_path)[0]
    loaded = launch(loaded_and_trained, 3, list(MODELS), tmp_path)[0]
    for name, losses in expected.items():
        assert trained[name] == pytest.approx(losses[:STEPS], rel=CLOSE), name
        for kind, more in loaded[name].items():
            assert more == pytest.approx(losses[STEPS:], rel=CLOSE), (name, kind)
