"""Checkpoints of tensor-parallel models: to and from one process, other meshes, and torch's own styles and FSDP2.

By torch.distributed.checkpoint, and as whole tensors. A fused weight is [3, width, ..] in the model; as a whole tensor
it has the plain model's shape [3 width, ..].
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor.parallel as theirs
from on_ranks import Checks, mesh_of, shared_folder
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_s
from torch.distributed.fsdp import fully_shard as theirs_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from tp_small_model import adamw, parallel, small, whole

from minifsdp import checkpoint as our_s
from minifsdp.checkpoint import StateDictOptions
from minifsdp.checkpoint.parts import cut
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp2 import fully_shard
from minifsdp.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

check = Checks(__name__)


def mesh(dp: int, tp: int) -> Any:
    return mesh_of((dp, tp), "dp", "tp")


def ours(dp: int, tp: int, vocabulary: int) -> Any:
    both = mesh(dp, tp)
    model = parallel(both["tp"], True, vocabulary=vocabulary, tied=False)
    if dp > 1:
        for block in model.blocks:
            fully_shard(block, mesh=both["dp"])
        fully_shard(model, mesh=both["dp"])
    return model


def torchs(vocabulary: int) -> Any:
    both = mesh(2, 2)
    plan: dict[str, Any] = {
        "embed": theirs.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": theirs.SequenceParallel(use_local_output=True),
        "blocks.*.up": theirs.ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": theirs.RowwiseParallel(output_layouts=Shard(1)),
        "norm": theirs.SequenceParallel(use_local_output=True),
        "head": theirs.ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    model = theirs.parallelize_module(small(vocabulary, tied=False), both["tp"], plan)
    return theirs_fully_shard(model, mesh=both["dp"])


KINDS: dict[str, Callable[[int], Any]] = {
    "dp 2 x tp 2": lambda v: ours(2, 2, v),
    "dp 1 x tp 4": lambda v: ours(1, 4, v),
    "dp 4 x tp 1": lambda v: ours(4, 1, v),
    "torch's dp 2 x tp 2": torchs,
    "one process": lambda v: small(v, tied=False),
}


def trained(make: Callable[[int], Any], vocabulary: int) -> tuple[Any, Any]:
    """A model and its optimizer after a step that is the same for all kinds."""
    model = make(vocabulary)
    optimizer = adamw(model.parameters())
    numbers = torch.Generator().manual_seed(0)
    for p in model.parameters():
        gradient = torch.randn(p.shape, dtype=p.dtype, generator=numbers)
        p.grad = cut(p, gradient) if isinstance(p, DTensor) else gradient
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), torch_s.get_state_dict(model, optimizer), strict=True))


def assert_equal_states(
    model: Any, optimizer: Any, other: Any, other_optimizer: Any, of: Callable[[Any, Any], tuple[Tensor, Tensor]]
) -> None:
    """Bit by bit; `of` gives what to compare of two values, of which the second is whole."""
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(*of(p, q)), name
        for key, value in optimizer.state[p].items():
            assert torch.equal(*of(value, other_optimizer.state[q][key])), (name, key)


def wholes(mine: Any, other: Tensor) -> tuple[Tensor, Tensor]:
    return whole(mine), other


def local_parts(mine: Any, other: Tensor) -> tuple[Tensor, Tensor]:
    """Without communication, of tensors whose parts are known to be right."""
    return (mine.to_local(), cut(mine, other).to_local()) if isinstance(mine, DTensor) else (mine, other)


Target = tuple[Any, Any]


def zeroed(made: dict[tuple[str, int], Target], name: str, vocabulary: int) -> Target:
    """A model and an optimizer to load into: new ones first, then the same again with zeros."""
    if (name, vocabulary) not in made:
        model = KINDS[name](vocabulary)
        made[name, vocabulary] = (model, adamw(model.parameters()))
    model, optimizer = made[name, vocabulary]
    with torch.no_grad():
        for p in model.parameters():
            for each in (p, *optimizer.state[p].values()):
                (each.to_local() if isinstance(each, DTensor) else each).zero_()
    return model, optimizer


TARGETS: dict[tuple[str, int], Target] = {}


IN_TWO_DIMENSIONS = {name: KINDS[name] for name in ("torch's dp 2 x tp 2", "dp 2 x tp 2")}
OTHERS = {name: make for name, make in KINDS.items() if name not in IN_TWO_DIMENSIONS}
OURS = {name: make for name, make in KINDS.items() if make is not torchs}


@check(ranks=4, source=IN_TWO_DIMENSIONS, vocabulary=(16,))
@check(ranks=4, source=OURS, vocabulary=(13,))
@check(ranks=4, source=OTHERS, vocabulary=(16,), wide=True)
def dcp_from_any_to_any(source: Callable[[int], Any], vocabulary: int) -> None:
    """Also where both dimensions cut a vocabulary of 13, which torch's own styles do not take."""
    model, optimizer = trained(source, vocabulary)
    alone = trained(KINDS["one process"], vocabulary)
    assert_equal_states(model, optimizer, *alone, wholes)
    with shared_folder() as folder:
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)
        for name, make in KINDS.items():
            if make is torchs and vocabulary == 13:
                continue
            other, other_optimizer = zeroed(TARGETS, name, vocabulary)
            state = state_of(other, other_optimizer)
            dcp.load(state, checkpoint_id=folder)
            torch_s.set_state_dict(
                other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            assert_equal_states(other, other_optimizer, *alone, local_parts)


@check(
    ranks=4,
    source={name: make for name, make in KINDS.items() if "torch" not in name},
    broadcast=(False, True),
    wide="combinations",
)
def whole_states(source: Callable[[int], Any], broadcast: bool) -> None:
    """With a vocabulary of 13, at which torch's `distribute_tensor` fails."""
    alone, alone_optimizer = trained(KINDS["one process"], 13)
    model_state, optim_state = our_s.get_state_dict(alone, alone_optimizer)
    if broadcast and dist.get_rank() > 0:
        model_state, optim_state = {}, {}
    model = source(13)
    optimizer = adamw(model.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    our_s.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state, options=options)
    assert_equal_states(model, optimizer, alone, alone_optimizer, local_parts)
    whole_state, _ = our_s.get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(whole_state[name], p) for name, p in alone.state_dict().items())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(5, 15), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1)).unbind(-2)
        y: Tensor = self.out(q * k.sigmoid() + v)
        return y


def attention(dp: int = 0, tp: int = 0, ddp: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(dp + tp)
    model: Any = Attention().double()
    if tp:
        both = mesh(dp, tp)
        parallelize_module(model, both["tp"], {"qkv": ColwiseParallel(parts=3), "out": RowwiseParallel()})
        if dp > 1:
            model = (
                DistributedDataParallel(model, device_mesh=both["dp"]) if ddp else fully_shard(model, mesh=both["dp"])
            )
    return model, adamw(model.parameters())


def step(model: Any, optimizer: Any) -> Tensor:
    y: Tensor = model(torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5))
    y.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


FUSED = {"dp 1 x tp 4": (1, 4), "dp 2 x tp 2": (2, 2), "ddp 2 x tp 2": (2, 2, True)}


@check(ranks=4, layout=FUSED, broadcast=(False, True), wide="combinations")
def a_fused_weight_to_one_process_and_back(layout: Any, broadcast: bool) -> None:
    """Of 5 columns, which the ranks do not divide."""
    pair = attention(*layout)
    step(*pair)
    states = copy.deepcopy(our_s.get_state_dict(*pair, options=StateDictOptions(full_state_dict=True)))
    assert states[0]["qkv.weight"].shape == (15, 5)
    assert states[1]["state"]["qkv.bias"]["exp_avg"].shape == (15,)
    alone = attention()
    our_s.set_state_dict(*alone, model_state_dict=states[0], optim_state_dict=states[1])
    again = attention(*layout)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    given = our_s.get_state_dict(*alone) if not broadcast or dist.get_rank() == 0 else ({}, {})
    our_s.set_state_dict(*again, model_state_dict=given[0], optim_state_dict=given[1], options=options)
    for _ in range(2):
        expected = step(*alone)
        for each in (pair, again):
            torch.testing.assert_close(step(*each), expected, rtol=0, atol=1e-10)


@check(ranks=4)
def a_fused_weight_between_meshes() -> None:
    pair = attention(2, 2)
    step(*pair)
    with shared_folder() as folder:
        dcp.save(state_of(*pair), checkpoint_id=folder)
        other = attention(1, 4)
        state = state_of(*other)
        dcp.load(state, checkpoint_id=folder)
        torch_s.set_state_dict(*other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.testing.assert_close(step(*other), step(*pair), rtol=0, atol=1e-12)


@check(ranks=2)
def a_plain_fused_weight_is_refused_by_the_other_functions() -> None:
    """With the cure by `load_state_dict`; with both shapes by torch.distributed.checkpoint."""
    model, _ = attention(1, 2)
    plain = attention()[0].state_dict()
    with pytest.raises(
        ValueError, match=r"qkv.weight is \[15, 5\] in the checkpoint and \[3, 5, 5\] here: .*set_model_st"
    ):
        model.load_state_dict(plain)
    step(model, adamw(model.parameters()))
    model.load_state_dict(model.state_dict())
    with shared_folder() as folder:
        dcp.save(plain, checkpoint_id=folder)
        with pytest.raises(BaseException, match=r"Size mismatch .* for qkv\."):
            dcp.load(model.state_dict(), checkpoint_id=folder)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
