"""A checkpoint of any kind of model is loaded into every other: flat, sharded by parameter, torch's, plain.

Saved on two ranks by torch.distributed.checkpoint, model and optimizer; loaded on three.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from beside_torch import gpt, ours, shard_blocks, theirs
from torch.distributed.checkpoint import state_dict as torch_s

from minifsdp import checkpoint as our_s
from minifsdp.fsdp import FullyShardedDataParallel as Fsdp
from minifsdp.gpt import Block
from minifsdp.instruments.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])

KINDS: dict[str, tuple[Callable[[Any], Any], Any]] = {  # how it is made, and whose functions know its state
    "flat": (partial(Fsdp, auto_wrap_policy={Block}), our_s),
    "flat, original parameters": (partial(Fsdp, auto_wrap_policy={Block}, use_orig_params=True), our_s),
    "by parameter": (partial(shard_blocks, ours), torch_s),
    "by parameter, our functions": (partial(shard_blocks, ours), our_s),
    "torch's by parameter": (partial(shard_blocks, theirs), torch_s),
    "plain": (lambda model: model, torch_s),
}
RESUMED = range(2, 4)  # the first step has the model from the checkpoint, the next one is of the optimizer, too
SAVED = ("flat", "by parameter", "torch's by parameter", "plain")  # the others' state has one of these forms


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on all ranks, whose mean is that of one process."""
    rows = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(step))
    return rows[:, :-1], rows[:, 1:]


def made(kind: str) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and the functions."""
    wrap, functions = KINDS[kind]
    model = wrap(gpt(layers=1))
    return model, torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3), functions


def steps(model: Any, optimizer: Any, numbers: range) -> list[float]:
    losses = []
    for step in numbers:
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(model: Any, optimizer: Any, functions: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), functions.get_state_dict(model, optimizer), strict=True))


def save(folder: Path) -> dict[str, list[float]]:
    """By kind, the losses of what goes on without a checkpoint."""
    found = {}
    for kind in SAVED:
        model, optimizer, functions = made(kind)
        steps(model, optimizer, range(2))
        dcp.save(state_of(model, optimizer, functions), checkpoint_id=folder / kind)
        found[kind] = steps(model, optimizer, RESUMED)
    return found


Pair = tuple[str, str]


def load(folder: Path, pairs: list[Pair]) -> dict[Pair, list[float]]:
    """By kind saved and kind loaded into, the losses of what goes on."""
    found = {}
    for source, kind in pairs:
        model, optimizer, functions = made(kind)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        state = state_of(model, optimizer, functions)
        dcp.load(state, checkpoint_id=folder / source)
        functions.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found[source, kind] = steps(model, optimizer, RESUMED)
    return found


PAIRS = list(product(SAVED, KINDS))
SOME = [(SAVED[number % len(SAVED)], kind) for number, kind in enumerate(KINDS, 1)]  # each kind once, of each form


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """A folder of a checkpoint of each form, and what goes on without one."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, launch(save, 2, folder, timeout=100)[0]


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(SOME, id="some"),
        pytest.param([pair for pair in PAIRS if pair not in SOME], id="the others", marks=pytest.mark.wide),
    ],
)
def test_every_kind_loads_what_every_kind_has_saved(
    saved: tuple[Path, dict[str, list[float]]], pairs: list[Pair]
) -> None:
    model, optimizer, _ = made("plain")
    expected = steps(model, optimizer, range(RESUMED.stop))[RESUMED.start :]
    folder, went_on = saved
    assert went_on == {kind: pytest.approx(expected, rel=1e-12) for kind in SAVED}
    for (source, kind), losses in launch(load, 3, folder, pairs, timeout=100)[0].items():
        assert losses == pytest.approx(expected, rel=1e-12), f"{source} -> {kind}"


def whole_state_of(kind: str) -> dict[str, Any]:
    """What rank 0 writes to a file."""
    model, optimizer, _ = made(kind)
    steps(model, optimizer, range(2))
    options = our_s.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = our_s.get_state_dict(model, optimizer, options=options)
    if dist.get_rank():
        assert state == ({}, {})
    return state[0]


def load_from_rank_0(kind: str) -> list[float]:
    plain, optimizer, _ = made("plain")
    steps(plain, optimizer, range(2))
    options = our_s.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model_state, optim_state = our_s.get_state_dict(plain, optimizer)
    if dist.get_rank():
        model_state, optim_state = {}, {}
    model, optimizer, _ = made(kind)
    our_s.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state, options=options)
    return steps(model, optimizer, RESUMED)


def whole_states() -> None:
    plain, optimizer, _ = made("plain")
    steps(plain, optimizer, range(2))
    expected = steps(plain, optimizer, RESUMED)
    plain, optimizer, _ = made("plain")
    steps(plain, optimizer, range(2))
    for kind in ("flat", "by parameter"):
        state = whole_state_of(kind)
        for name, value in state.items():
            assert type(value) is torch.Tensor, (kind, name)
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-12, atol=0)
        assert load_from_rank_0(kind) == pytest.approx(expected, rel=1e-12)


def test_whole_states_are_rank_0_s_of_every_kind() -> None:
    launch(whole_states, 2)
