"""Architectures from `transformers` under `fully_shard`: they train, save and load as one process does, in float64.

Of three ranks two train and save, while the third is the one process. Then all three load, into ours, into torch's and
into the plain model.
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
from torch.distributed.device_mesh import DeviceMesh
from transformers_models import MODELS, batch, import_before_launch, plain

import minifsdp.fsdp2 as ours
from minifsdp.instruments.launch import launch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS, CLOSE = 3, 1e-9


def sharded(lib: Any, name: str, seed: int = 0, mesh: DeviceMesh | None = None) -> Any:
    """Every block a unit, from the inside out, and the rest another."""
    model, blocks = plain(name, seed), tuple(MODELS[name]().blocks)
    for module in reversed([each for each in model.modules() if isinstance(each, blocks)]):
        lib.fully_shard(module, mesh=mesh)
    return lib.fully_shard(model, mesh=mesh)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3)


def steps(name: str, model: Any, optimizer: Any, numbers: range, group: Any = None) -> list[float]:
    """Each step's loss, of the rows of all ranks of the group; without one this process has all rows."""
    rank, ranks = (group.rank(), group.size()) if group else (0, 1)
    losses = []
    for step in numbers:
        given = batch(name, step, rank, ranks)
        logits = model(**given).logits  # their own loss is in float32
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), given["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        if group:
            dist.all_reduce(mean, group=group)
        losses.append(mean.item())
    return losses


def trained_and_saved(names: list[str], folder: Path) -> dict[str, list[float]]:
    """By model, the losses on the first two ranks; the third trains in one process, and goes on."""
    found, mesh = {}, DeviceMesh("cpu", [0, 1])
    for name in names:
        if dist.get_rank() == 2:
            model = plain(name)
            found[name] = steps(name, model, optimizer_of(model), range(STEPS + 2))
            continue
        model, pair = sharded(ours, name, mesh=mesh), mesh.get_group()
        optimizer = optimizer_of(model)
        found[name] = steps(name, model, optimizer, range(STEPS), pair)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder / name, process_group=pair)
    return found


def loaded_and_trained(names: list[str], folder: Path) -> dict[str, dict[str, list[float]]]:
    """By model, the losses of what has been loaded: by ours, by torch's, in one process."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for name in names:
        for kind, model in (
            ("ours", sharded(ours, name, 1)),
            ("torch's", sharded(theirs, name, 1)),
            ("plain", plain(name, 1)),
        ):
            optimizer = optimizer_of(model)
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(state, checkpoint_id=folder / name)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            group = None if kind == "plain" else dist.group.WORLD
            found[name][kind] = steps(name, model, optimizer, range(STEPS, STEPS + 2), group)
    return found


def on_a_rank(names: list[str], folder: Path) -> tuple[dict[str, list[float]], dict[str, dict[str, list[float]]]]:
    torch.set_default_dtype(torch.float64)
    trained = trained_and_saved(names, folder)
    dist.barrier()
    return trained, loaded_and_trained(names, folder)


@pytest.mark.parametrize(
    "names", [["t5"], pytest.param(["llama", "gpt2", "mixtral", "vit"], marks=pytest.mark.wide)], ids=" and ".join
)
def test_they_train_save_and_load_as_one_process_does(tmp_path: Path, names: list[str]) -> None:
    import_before_launch()
    (trained, loaded), _, (expected, _) = launch(on_a_rank, 3, names, tmp_path)
    for name in names:
        assert trained[name] == pytest.approx(expected[name][:STEPS], rel=CLOSE), name
        for kind, more in loaded[name].items():
            assert more == pytest.approx(expected[name][STEPS:], rel=CLOSE), (name, kind)
