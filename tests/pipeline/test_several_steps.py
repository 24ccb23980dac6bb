"""One step after another: smaller batches, gradients that add up, statistics, recomputation, and evaluations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from in_stages import InStages
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from minifsdp import comm
from minifsdp.fsdp2 import fully_shard
from minifsdp.pipeline import PipelineError

check = Checks(__name__)
WIDTH, MICROS = 6, 4


def rows(number: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(number, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double()


class Part(InStages):
    """This rank's stages, all of one kind, and their schedule."""

    def __init__(self, name: str = "1f1b", of: Any = layer, **options: Any) -> None:
        super().__init__(name, MICROS, lambda count, stage: of(), mse_loss, **options)

    def run(self, x: Tensor, target: Tensor, method: str = "step") -> Any:
        return getattr(self.schedule, method)(*([x] if self.is_first else []), target=target if self.is_last else None)

    def parameters(self) -> list[nn.Parameter]:
        return [p for module in self.modules.values() for p in module.parameters()]


@check(ranks=2, method=("step", "eval"), left=(4, 5, 7))
def a_smaller_last_batch_is_one_error_on_all_ranks(method: str, left: int) -> None:
    """Torch sends the short message into the longer buffer, so that an evaluation returns samples of the last batch."""
    part = Part(of=lambda: nn.Linear(WIDTH, WIDTH).double())
    part.run(*rows(), method)
    with pytest.raises((ValueError, PipelineError), match=r"stage 0 passes float64\[1, 6\] where it has passed"):
        part.run(*rows(left), method)


@check(ranks=2, name=("gpipe", "1f1b", "zb-h1", "interleaved"), scaled=(True, False))
def gradients_of_several_steps_add_up(name: str, scaled: bool) -> None:
    """Torch with `scale_grads` divides what was there before by the number of micro-batches, too."""
    part = Part(name, lambda: nn.Linear(WIDTH, WIDTH).double(), scale_grads=scaled)
    part.run(*rows())
    first = [p.grad.clone() for p in part.parameters()]
    for step in (2, 3):
        part.run(*rows())
        for p, gradient in zip(part.parameters(), first, strict=True):
            torch.testing.assert_close(p.grad, step * gradient)


@check(ranks=2, name=("1f1b", "zb-h1", "interleaved"))
def batch_norm_counts_micro_batches(name: str) -> None:
    """Torch infers shapes by a forward pass on zeros, which changes the running statistics."""
    part, (x, target) = Part(name), rows()
    part.run(x, target)
    alone = [layer() for _ in range(part.count)]
    for micro in x.tensor_split(MICROS):
        for module in alone:
            micro = module(micro)
    for stage, module in part.modules.items():
        assert module[1].num_batches_tracked == MICROS
        torch.testing.assert_close(module[1].running_mean, alone[stage][1].running_mean)
        torch.testing.assert_close(module[1].running_var, alone[stage][1].running_var)


class Counted(nn.Module):
    """Linear layers inside an activation checkpoint, which counts how often it is computed."""

    def __init__(self, linears: int, reentrant: bool) -> None:
        super().__init__()
        self.calls, self.reentrant = 0, reentrant
        self.linears = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(linears))).double()

    def compute(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linears(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=self.reentrant)


@check(ranks=2, linears=(1, 2, 5), reentrant=(True, False))
def a_checkpoint_is_recomputed_once_in_a_split_backward(linears: int, reentrant: bool) -> None:
    """Torch recomputes it for each of its linear layers."""
    found = []
    for name in ("zb-h1", "1f1b"):
        torch.manual_seed(0)
        part = Part(name, partial(Counted, linears, reentrant))
        x, target = rows()
        part.run(x.requires_grad_(), target)
        assert [module.calls for module in part.modules.values()] == [2 * MICROS]
        found.append([p.grad for p in part.parameters()])
    torch.testing.assert_close(*found)


@check(ranks=2, reshard=(None, True, False), bare=(False, True))
def an_optimizer_made_after_an_evaluation_trains(reshard: bool | None, bare: bool) -> None:
    """After a bare forward pass, torch leaves the root unsharded, and the optimizer is given plain tensors."""
    part = Part(of=lambda: fully_shard(nn.Linear(WIDTH, WIDTH).double(), reshard_after_forward=reshard, mesh=alone()))
    if bare:
        with torch.no_grad():
            part.modules[part.mine[0]](rows()[0])
    else:
        part.run(*rows(), "eval")
    assert all(isinstance(p, DTensor) for p in part.parameters())
    optimizer = torch.optim.AdamW(part.parameters(), 0.1)
    before = [p.full_tensor().detach().clone() for p in part.parameters()]
    part.run(*rows())
    part.run(*rows(), "eval")
    optimizer.step()
    assert optimizer.state.keys() == set(part.parameters())
    assert all((p.full_tensor() != old).any() for p, old in zip(part.parameters(), before, strict=True))


def alone() -> Any:
    mesh = torch.distributed.init_device_mesh("cpu", (comm.world().size(), 1), mesh_dim_names=("pp", "dp"))
    return mesh["dp"]


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
