"""The small GPT that these tests train, and one process's training of it to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from minifsdp import comm
from minifsdp.batch import Batch
from minifsdp.checkpoint import StateDictOptions, get_model_state_dict
from minifsdp.course.ladder import data
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.gpt import GPT
from minifsdp.instruments.launch import rank_device

STEPS, BATCH, CONTEXT, LAYERS = 5, 12, 16, 2
RATE = 0.1  # of SGD, whose steps are as large as the gradients: Adam would hide that they are a sum and no mean

Step = Callable[[Trainer, Batch], Tensor]
State = dict[str, Tensor]


def make_model(seed: int = 0, where: torch.device | None = None) -> GPT:
    """On this rank's device, the same on every rank; odd sizes, so that shards are padded."""
    torch.manual_seed(seed)
    return GPT(width=35, layers=LAYERS, context=CONTEXT).to(where or rank_device())


def batches(steps: int = STEPS) -> list[Batch]:
    """Whole batches, the same on every rank, on the device before anything is measured."""
    generator, where = torch.Generator().manual_seed(1), rank_device()
    tokens = torch.randint(256, (steps, BATCH, CONTEXT + 1), generator=generator).to(where)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def my_share(batch: Batch) -> Batch:
    return data.shard(batch, dist.get_rank(), dist.get_world_size())


def sgd(model: nn.Module) -> Trainer:
    return Trainer(model, SGD(model.parameters(), RATE))


def step(trainer: Trainer, batch: Batch) -> Tensor:
    """Returns the loss, on the device: the host has no reason to wait."""
    loss: Tensor = trainer.model(*batch)
    loss.backward()
    trainer.after_backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss.detach()


class Course(NamedTuple):
    """What training has come to: the loss of each step [steps], the mean over ranks, and the state before and after."""

    losses: Tensor
    before: State
    after: State


def train(trainer: Trainer, take: Step = step, alone: bool = False) -> Course:
    """On this rank's share of each batch; `alone` on whole batches, as one process would."""
    before = whole_state(trainer.model)
    losses = torch.stack([take(trainer, batch if alone else my_share(batch)) for batch in batches()])
    if not alone:
        comm.all_reduce(losses, comm.world(), comm.MEAN).wait()
    return Course(losses.cpu(), before, whole_state(trainer.model))


def whole_state(model: nn.Module) -> State:
    """Copies of all parameters, whole, under their own names, in host memory."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name.removeprefix("module."): value.detach().cpu().clone() for name, value in state.items()}


def distance(course: Course, expected: Course) -> float:
    """Between two trainings: the largest difference of an element, as a part of the largest change of its tensor."""
    assert course.before.keys() == expected.before.keys() == course.after.keys()
    for name, value in expected.before.items():
        assert torch.equal(course.before[name], value), f"{name} did not start from the same values"
    return max(
        float((course.after[name] - value).abs().max() / (value - expected.before[name]).abs().max())
        for name, value in expected.after.items()
    )


def assert_same(course: Course, expected: Course, losses: float, parameters: float) -> dict[str, float]:
    """Within these relative tolerances; returns what was found."""
    torch.testing.assert_close(course.losses, expected.losses, rtol=losses, atol=0)
    found = distance(course, expected)
    assert found <= parameters, f"parameters are off by {found:.1e} of their change"
    return {"parameters": found, "losses": float(((course.losses - expected.losses) / expected.losses).abs().max())}
