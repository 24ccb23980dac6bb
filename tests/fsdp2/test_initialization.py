"""Random numbers drawn after sharding are those of one process with the same seed: initialization and dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_torch import ours, whole
from on_ranks import TORCH, Checks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from minifsdp.private import dtensor
from minifsdp.tensor_parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

check = Checks(__name__)
F = nn.functional


def model() -> nn.Module:
    """With rows that 3 ranks share unevenly, and fewer rows than ranks."""
    parts = {"words": nn.Embedding(7, 8, padding_idx=5), "up": nn.Linear(8, 10), "down": nn.Linear(10, 8)}
    return nn.ModuleDict(parts | {"norm": nn.LayerNorm(8), "conv": nn.Conv1d(5, 2, 3), "few": nn.Linear(3, 2)})


def by_fsdp2(m: nn.Module) -> None:
    for each in m.children():
        ours.fully_shard(each)


def by_columns(m: nn.Module) -> None:
    def placed(p: nn.Parameter) -> Shard:
        return Shard(p.ndim - 1 if p.shape[-1] % dist.get_world_size() == 0 else 0)

    for each in m.children():
        ours.fully_shard(each, shard_placement_fn=placed)


def replicated(m: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for each in m.children():
        ours.fully_shard(each, mesh=mesh)


def in_parallel(m: nn.Module, mesh: Any = None) -> None:
    plan = {"words": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(), "norm": SequenceParallel()}
    parallelize_module(m, mesh or init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def in_two_dimensions(m: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    in_parallel(m, mesh["tp"])
    for each in m.children():
        ours.fully_shard(each, mesh=mesh["dp"])


def initialize(m: nn.Module) -> None:
    for each in m.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()


def is_initialized_as_in_one_process(cut: Any) -> None:
    expected = model()
    with torch.device("meta"):
        sharded = model()
    cut(sharded)
    sharded.to_empty(device="cpu")
    after = []
    for m in (expected, sharded):
        torch.manual_seed(7)
        initialize(m)
        after.append(torch.rand(3))
    assert torch.equal(*after)  # the generators of all ranks are where the one process's is
    for (name, p), q in zip(sharded.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(whole(p), q), name


@check(ranks=(2, 3), cut={"rows": by_fsdp2, "columns": by_columns, "tensor": in_parallel})
def modules_are_initialized_as_in_one_process(cut: Any) -> None:
    is_initialized_as_in_one_process(cut)


TWO = {} if TORCH < (2, 12) else {"two": in_two_dimensions}  # torch 2.11 finds no row of a weight that is cut twice


@check(ranks=4, cut={"replicated": replicated, **TWO})
def modules_on_two_dimensions_are_initialized_as_in_one_process(cut: Any) -> None:
    is_initialized_as_in_one_process(cut)


@check(ranks=4)
def replicas_agree_whatever_their_seeds() -> None:
    m = model()
    replicated(m)
    torch.manual_seed(dist.get_rank())
    initialize(m)
    for p in m.parameters():
        mine = dtensor.local_of(p).detach()
        other = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(other, mine, p.device_mesh.get_group(0))
        assert torch.equal(*other)


FUNCTIONS = {
    **{name: getattr(nn.init, name) for name in ("normal_", "trunc_normal_", "xavier_uniform_", "kaiming_normal_")},
    "eye_": nn.init.eye_,
    "with a generator": lambda x: x.uniform_(generator=torch.Generator().manual_seed(3)),
    "random_": lambda x: x.random_(9),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "bernoulli": torch.bernoulli,
    "rand_like": torch.rand_like,
    "another dtype": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "transposed": lambda x: x.t().normal_().t(),
}


@check(ranks=(2, 3), draw=FUNCTIONS, rows=(7, 2))
def an_operator_draws_as_in_one_process(draw: Any, rows: int) -> None:
    start = torch.rand(rows, 2, generator=torch.Generator().manual_seed(1))
    layer = nn.Linear(2, rows, bias=False)
    ours.fully_shard(layer)
    mesh: Any = layer.weight.device_mesh  # type: ignore[union-attr]
    torch.manual_seed(7)
    expected = draw(start.clone())
    torch.manual_seed(7)
    x = distribute_tensor(start.clone(), mesh, [Shard(0)])
    if draw is FUNCTIONS["transposed"] and x.t().placements[0].is_replicate():  # a copy, from torch 2.14 on
        with pytest.raises(NotImplementedError, match="would write to a copy"):
            draw(x)
    else:
        assert torch.equal(whole(draw(x)), expected)


@check()
def the_gradient_of_dropout_has_its_mask() -> None:
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
    x = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)]).requires_grad_()
    y = F.dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(whole(x.grad), whole(y))


def stack() -> Any:
    layer = nn.Linear(4, 12)
    return parallelize_module(layer, init_device_mesh("cpu", (2,)), ColwiseParallel(parts=3))


@check(draw={"reset_parameters": lambda m: m.reset_parameters(), "xavier": lambda m: nn.init.xavier_normal_(m.weight)})
def a_stack_of_matrices_is_not_a_convolutions_weight(draw: Any) -> None:
    layer = stack()
    with pytest.raises(NotImplementedError, match="on each matrix, for part in"):
        draw(layer)
    expected = torch.empty(12, 4)
    torch.manual_seed(7)
    for part in expected.chunk(3):
        nn.init.xavier_uniform_(part)
    torch.manual_seed(7)
    for part in layer.weight.detach().unbind():
        nn.init.xavier_uniform_(part)
    assert torch.equal(whole(layer.weight).flatten(0, 1), expected)


@check(ranks=(2, 3))
def orthogonal_matrices_are_those_of_one_process() -> None:
    start = torch.empty(7, 3)
    parallelize_module(nn.Linear(6, 6), init_device_mesh("cpu", (dist.get_world_size(),)), ColwiseParallel())
    x = distribute_tensor(start.clone(), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    for each in (start, x):
        torch.manual_seed(7)
        nn.init.orthogonal_(each)
    torch.testing.assert_close(whole(x), start)


@check(ranks=(2, 4), low=(-1.0, 1.0))
def ranks_draw_again_as_often_as_one_process(low: float) -> None:
    """Until no element of any rank is out of bounds: the numbers that follow are the same on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
    for seed in range(12):
        expected, x = torch.empty(6, 4), distribute_tensor(torch.empty(6, 4), mesh, [Shard(0)])
        states = []
        for each in (expected, x):
            torch.manual_seed(seed)
            nn.init.trunc_normal_(each, a=low, b=2.0)
            states.append(torch.get_rng_state())
        assert torch.equal(whole(x), expected)
        assert torch.equal(*states)


REFUSED = {
    "dirac_": (lambda x: nn.init.dirac_(x), (6, 4, 3)),
    "sparse_": (lambda x: nn.init.sparse_(x, 0.5), (6, 4)),
    "orthogonal_": (lambda x: nn.init.orthogonal_(x), (4, 6)),
    "rrelu": (lambda x: F.rrelu(x, training=True), (6, 4)),
    "zero_ on a part": (lambda x: x.data[1].zero_(), (6, 4)),
    "normal_ on a part": (lambda x: nn.init.normal_(x[:3]), (6, 4)),
    "uniform_ on a part": (lambda x: [nn.init.xavier_uniform_(each) for each in x.chunk(3)], (6, 4)),
}


@check(name=tuple(REFUSED))
def what_would_be_wrong_is_refused_by_name(name: str) -> None:
    draw, shape = REFUSED[name]
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
    with pytest.raises(NotImplementedError, match=name):
        draw(distribute_tensor(torch.ones(shape), mesh, [Shard(0)]))


@check()
def parts_that_are_no_copies_are_written() -> None:
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
    start = torch.ones(6, 4)
    x = distribute_tensor(start.clone(), mesh, [Shard(0)])
    for each in (start, x):
        each[:, 1].zero_()
        each.t()[2].fill_(3)
        torch.manual_seed(7)
        each.view(-1).normal_()
    assert torch.equal(whole(x), start)


@check()
def other_dtensors_draw_as_torch_has_it() -> None:
    by_fsdp2(nn.ModuleDict({"layer": nn.Linear(2, 2)}))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("of the user",))
    torch.manual_seed(7)
    x: Any = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).normal_()
    torch.manual_seed(7)
    assert torch.equal(dtensor.local_of(x), torch.randn(2, 2))


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
