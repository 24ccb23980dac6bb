"""What surrounds training, on CUDA: hybrid sharding, state dicts and checkpoints, construction, whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_gpu import ON_GPU, GpuChecks, Way
from on_ranks import shared_folder
from small_model import State, assert_same, batches, make_model, my_share, sgd, step, train, whole_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import comm, device, process_groups
from minifsdp.checkpoint import StateDictOptions, get_state_dict, set_state_dict
from minifsdp.course.ladder.rungs import Trainer, plain
from minifsdp.fsdp import FullyShardedDataParallel as Fsdp
from minifsdp.fsdp import MixedPrecision, ShardingStrategy
from minifsdp.gpt import GPT, Block
from minifsdp.instruments.launch import rank_device

pytestmark = ON_GPU
check = GpuChecks(__name__)

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 = ShardingStrategy
LOSSES, PARAMETERS = 1e-5, 1e-3  # see test_numerics.py
FULL = StateDictOptions(full_state_dict=True)
GROUPS = ("mesh", "process groups")


def wrapped(model: nn.Module | None = None, **options: Any) -> Fsdp:
    return Fsdp(model or make_model(), auto_wrap_policy={Block}, **options)


def adamw(**options: Any) -> Trainer:
    """As the ladder's rungs: an optimizer with a state, built on the shards."""
    return plain(wrapped(**options))  # type: ignore[arg-type]


def two_by_two(how: str) -> dict[str, Any]:
    """Shard over pairs of neighbours, replicate across: said in either of the two ways.

    Both groups connect here: NCCL ranks that share a GPU must not do that while they compute.
    """
    if how == "mesh":
        mesh = init_device_mesh(rank_device().type, (2, 2))
        inside, across = process_groups.mesh_group(mesh, 1), process_groups.mesh_group(mesh, 0)
    else:
        inside, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    for group in (inside, across):
        comm.all_reduce(torch.zeros(1, device=rank_device()), group).wait()
        device.synchronize(rank_device())
    return {"device_mesh": mesh} if how == "mesh" else {"process_group": (inside, across)}


def assert_equal(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@check(ranks=4, strategy=(HYBRID_SHARD, HYBRID_SHARD_ZERO2), groups=GROUPS)
def hybrid_trains_as_one_process(strategy: ShardingStrategy, groups: str) -> None:
    model = wrapped(sharding_strategy=strategy, **two_by_two(groups))
    held = sum(p.numel() for p in model.parameters())
    whole = sum(p.numel() for p in make_model().parameters())
    assert whole / 2 <= held < whole / 2 + 10, "a rank holds half, for the other half is its neighbour's"
    assert_same(train(sgd(model)), train(sgd(make_model()), alone=True), LOSSES, PARAMETERS)


@check(ranks=4)
def hybrid_in_bf16_stays_the_same_on_all_replicas() -> None:
    bf16 = MixedPrecision(torch.bfloat16, torch.bfloat16)
    trainer = sgd(wrapped(sharding_strategy=HYBRID_SHARD, mixed_precision=bf16, **two_by_two("mesh")))
    train(trainer)
    for shard in trainer.model.parameters():
        everyones = [torch.empty_like(shard) for _ in range(4)]
        dist.all_gather(everyones, shard.detach())
        assert torch.equal(everyones[dist.get_rank()], everyones[(dist.get_rank() + 2) % 4])


@check(source=(FULL_SHARD, SHARD_GRAD_OP, NO_SHARD), target=(FULL_SHARD, SHARD_GRAD_OP, NO_SHARD))
def a_state_is_loaded_by_any_strategy(source: ShardingStrategy, target: ShardingStrategy) -> None:
    """Model and optimizer: a step after loading is the step that would have come."""
    first, second = adamw(sharding_strategy=source), adamw(sharding_strategy=target)
    batch, then = map(my_share, batches(2))
    step(first, batch)
    model_state, optim_state = get_state_dict(first.model, first.optimizer, options=FULL)
    with torch.no_grad():
        for p in second.model.parameters():
            p.zero_()  # whatever it starts from is to be replaced
    set_state_dict(
        second.model, second.optimizer, model_state_dict=model_state, optim_state_dict=optim_state, options=FULL
    )
    assert_equal(whole_state(second.model), whole_state(first.model))
    torch.testing.assert_close(step(second, then), step(first, then), rtol=LOSSES, atol=0)


@check(orig=(False, True), target=(FULL_SHARD, NO_SHARD))
def a_sharded_checkpoint_is_loaded_from_disk(orig: bool, target: ShardingStrategy) -> None:
    first = adamw(use_orig_params=orig)
    step(first, my_share(batches(1)[0]))
    model_state, optim_state = get_state_dict(first.model, first.optimizer)
    on = {shard.device.type for value in model_state.values() for shard in local_tensors(value)}
    assert on == {rank_device().type}
    second = adamw(use_orig_params=orig, sharding_strategy=target)
    with shared_folder() as folder:
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder / "saved")
        model_state, optim_state = get_state_dict(second.model, second.optimizer)
        dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=folder / "saved")
    set_state_dict(second.model, second.optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    assert_equal(whole_state(second.model), whole_state(first.model))
    full, expected = (get_state_dict(t.model, t.optimizer, options=FULL)[1]["state"] for t in (second, first))
    for name, state in expected.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(full[name][key]).cpu(), torch.as_tensor(value).cpu()), (name, key)


def local_tensors(value: Any) -> list[torch.Tensor]:
    """What this rank holds of a sharded tensor of either kind."""
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    return [value.to_local() if hasattr(value, "to_local") else value]


@check()
def a_model_on_meta_gets_its_values_on_the_device() -> None:
    """Rank 0 has them in host memory, the others nothing."""
    where = rank_device()
    if dist.get_rank() == 0:
        model = make_model(where=torch.device("cpu"))
    else:
        with torch.device("meta"):
            model = GPT(width=35, layers=2, context=16)
    fsdp = wrapped(
        model,
        device_id=where,
        sync_module_states=True,
        param_init_fn=lambda module: module.to_empty(device=where, recurse=False),
    )
    assert {p.device for p in fsdp.parameters()} == {where}
    assert_equal(whole_state(fsdp), whole_state(make_model()))


@check()
def a_model_on_meta_initializes_itself_alike_on_all_ranks() -> None:
    class Net(nn.Sequential):
        """Modules that can reset themselves; GPT draws its embeddings in a way of its own."""

    with torch.device("meta"):
        model = Net(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7)))
    fsdp = Fsdp(model, auto_wrap_policy={nn.Sequential}, device_id=rank_device(), sync_module_states=True)
    assert {p.device for p in fsdp.parameters()} == {rank_device()}
    for name, value in whole_state(fsdp).items():
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, value)
        assert all(torch.equal(each, value) for each in everyones), name
        assert torch.isfinite(value).all()


@check()
def device_id_moves_a_model_from_the_host() -> None:
    where = rank_device()
    fsdp = wrapped(make_model(where=torch.device("cpu")), device_id=where)
    assert fsdp.compute_device == where
    assert {p.device for p in fsdp.parameters()} == {where}
    assert_same(train(sgd(fsdp)), train(sgd(make_model()), alone=True), LOSSES, PARAMETERS)


@check(orig=(False, True))
def what_is_written_to_whole_parameters_stays(orig: bool) -> None:
    fsdp = wrapped(use_orig_params=orig)
    with Fsdp.summon_full_params(fsdp), torch.no_grad():
        named = dict(fsdp.module.named_parameters())
        assert {p.device.type for p in named.values()} == {rank_device().type}
        for p in named.values():
            p.mul_(2)
    expected = {name: value * 2 for name, value in whole_state(make_model()).items()}
    assert_equal(whole_state(fsdp), expected)


@check()
def original_parameters_keep_their_names_and_train() -> None:
    fsdp = wrapped(use_orig_params=True)
    assert [name for name, _ in fsdp.named_parameters()] == [name for name, _ in make_model().named_parameters()]
    assert {p.device for p in fsdp.parameters()} == {rank_device()}
    assert_same(train(sgd(fsdp)), train(sgd(make_model()), alone=True), LOSSES, PARAMETERS)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str, world_of_values: Way, record_property: Callable[[str, object], None]) -> None:
    check.assert_passed(ranks, name, world_of_values, record_property)
