"""Tensor parallelism inside data parallelism: FSDP2, HSDP, DDP and ZeRO over the replicas train as one process does.

The norms' gradients are summands under sequence parallelism, the others are sharded or whole: clipping, optimizers and
loss scaling meet all three.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import SCALES_SUMMANDS, Checks, mesh_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as theirs
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from tp_small_model import (
    adamw,
    assert_alike,
    assert_trains_as_one_process,
    clipped_by_torch,
    loss_of,
    parallel,
    small,
    whole,
)

from minifsdp import comm
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp2 import MixedPrecisionPolicy, fully_shard
from minifsdp.fsdp2 import clip_grad_norm_ as our_clip_grad_norm_
from minifsdp.grad_scaler import ShardedGradScaler
from minifsdp.tensor_parallel import SequenceParallel, parallelize_module
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

check = Checks(__name__)
SEQUENCE = {"tp": False, "sequence": True}


def tp_mesh() -> Any:
    return mesh_of((dist.get_world_size(),), "tp")


def mesh(dp: int = 2) -> Any:
    return mesh_of((dp, dist.get_world_size() // dp), "dp", "tp")


def sharded(model: Any, replicas: Any, inner: str = "blocks", **options: Any) -> Any:
    """FSDP2 of each block, or of each layer, and of the rest."""
    layers = [layer for block in model.blocks for layer in (block.up, block.down, block.norm)]
    for module in model.blocks if inner == "blocks" else layers if inner == "layers" else ():
        fully_shard(module, mesh=replicas, **options)
    return fully_shard(model, mesh=replicas, **options)


# FSDP2


@check(ranks=(4, 6, 8), slow=(6, 8), sequence=SEQUENCE)
def fsdp2_over_the_replicas(sequence: bool) -> None:
    """tp = 2, 3 and 4."""
    both = mesh()
    model = sharded(parallel(both["tp"], sequence), both["dp"])
    assert_trains_as_one_process(model, 2, both.get_local_rank("dp"), adamw, clip=clipped_by_torch)


@check(ranks=4, sequence=SEQUENCE, inner=("layers", "root"), wide="combinations")
def fsdp2_of_the_layers_themselves(sequence: bool, inner: str) -> None:
    both = mesh()
    model = sharded(parallel(both["tp"], sequence), both["dp"], inner)
    assert_trains_as_one_process(model, 2, both.get_local_rank("dp"))


@check(ranks=4, sequence=SEQUENCE)
def our_clipping_counts_every_shard_once(sequence: bool) -> None:
    """Columns that FSDP2 cuts again are strided shards."""
    both = mesh()
    model = sharded(parallel(both["tp"], sequence), both["dp"])
    loss_of(model, both.get_local_rank("dp")).backward()
    gradients = [whole(p.grad) for p in model.parameters()]
    norm = our_clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(norm, torch.stack([g.norm() for g in gradients]).norm().to(norm.dtype))


@check(ranks=(4, 8), slow=(4,), sequence=SEQUENCE, options={"sgd": {}})
@check(ranks=(4, 8), slow=(8,), sequence=SEQUENCE, options={"adamw": {"optimizer": adamw, "clip": clipped_by_torch}})
def hybrid_sharding_on_three_dimensions(sequence: bool, options: dict[str, Any]) -> None:
    """Two replicas; of four ranks each is sharded over one, of eight over two."""
    cube = mesh_of((2, dist.get_world_size() // 4, 2), "replicate", "shard", "tp")
    model = sharded(parallel(cube["tp"], sequence), cube["replicate", "shard"])
    assert model.blocks[0].up.weight.device_mesh.mesh_dim_names == ("replicate", "shard", "tp")
    row = cube["replicate", "shard"].size(1) * cube.get_local_rank("replicate") + cube.get_local_rank("shard")
    assert_trains_as_one_process(model, dist.get_world_size() // 2, row, **options)


@check(ranks=4, sequence=SEQUENCE, reentrant=(False, True), wide="combinations")
def activation_checkpointing(sequence: bool, reentrant: bool) -> None:
    both = mesh()
    model = parallel(both["tp"], sequence)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    model = sharded(model, both["dp"])
    assert_trains_as_one_process(model, 2, both.get_local_rank("dp"))


@check(ranks=4, sequence=SEQUENCE)
def gradients_of_several_micro_batches(sequence: bool) -> None:
    both = mesh()
    row = both.get_local_rank("dp")
    model, alone = sharded(parallel(both["tp"], sequence), both["dp"]), small()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        loss_of(model, step, row).backward()
        torch.stack([loss_of(alone, step, each) for each in range(2)]).mean().backward()
    assert_alike(model, alone, lambda p: p.grad)


POLICIES = {
    "bf16": MixedPrecisionPolicy(torch.bfloat16),
    "bf16, fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "fp16": MixedPrecisionPolicy(torch.float16, torch.float32),
}


@check(ranks=4, sequence=SEQUENCE, policy=POLICIES, wide="combinations")
def mixed_precision(sequence: bool, policy: Any) -> None:
    """Layers compute in 16 bits; parameters and gradients stay in fp32."""
    both = mesh()
    row = both.get_local_rank("dp")
    model = sharded(parallel(both["tp"], sequence, dtype=torch.float32), both["dp"], mp_policy=policy)
    seen = []
    model.blocks[0].up.register_forward_hook(lambda layer, args, y: seen.extend([y.dtype, layer.weight.dtype]))
    alone = small(dtype=torch.float32)
    loss_of(model, 0, row).backward()
    torch.stack([loss_of(alone, 0, each) for each in range(2)]).mean().backward()
    assert seen == [policy.param_dtype] * 2
    for p in model.parameters():
        assert p.grad.dtype == p.grad.to_local().dtype == torch.float32
    assert_alike(model, alone, lambda p: p.grad, by=0.02)


MESHES = {"sharded": ((2, 2), ("dp", "tp")), "hybrid": ((2, 1, 2), ("replicate", "shard", "tp"))}


STYLES = {"ours": SequenceParallel, "torch's": theirs.SequenceParallel}


@check(ranks=4, shape=MESHES, style=STYLES, micros=(1, 3), wide="combinations")
def every_sum_is_in_the_dtype_of_the_reduction(shape: Any, style: Any, micros: int) -> None:
    """bf16 computes 256 + 1 = 256: over tensor-parallel ranks, micro-batches, ranks and replicas."""
    both = mesh_of(shape[0], *shape[1])
    norm = parallelize_module(nn.LayerNorm(4, bias=False), both["tp"], style(use_local_output=True))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    outer = both[shape[1][:-1]] if len(shape[1]) > 2 else both["dp"]
    fully_shard(norm, mesh=outer, mp_policy=policy)
    pattern = torch.tensor([1.0, -1, 1, -1])
    mine = 256.0 if both.get_local_rank("tp") == 0 else 1.0
    with comm.record() as log:
        for micro in range(micros):
            norm.set_requires_gradient_sync(micro == micros - 1)
            y = norm(pattern.expand(1, 1, 4))
            y = y.to_local() if isinstance(y, DTensor) else y
            (y.float() * pattern * (mine if micro == 0 else 1.0)).sum().backward()
    assert (whole(norm.weight.grad) == 257 + 2 * (micros - 1)).all()
    assert {call.dtype for call in log if "reduce" in call.op} == {torch.float32}


SCALERS = {"torch's": torch.amp.GradScaler, "ours": ShardedGradScaler}


@check(ranks=4, sequence=SEQUENCE, kind=SCALERS, wide="combinations")
def an_infinity_on_one_rank_skips_the_step_on_all(sequence: bool, kind: Any) -> None:
    both = mesh()
    model = sharded(parallel(both["tp"], sequence, dtype=torch.float32), both["dp"])
    scaler, optimizer = kind("cpu", init_scale=1024.0), torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(loss_of(model, 0, both.get_local_rank("dp"))).backward()
    before = {name: (p.to_local().clone(), p.grad) for name, p in model.named_parameters()}

    def updated(infinite: tuple[int, str] | None) -> list[bool]:
        """Whether this rank's part of each parameter has changed."""
        for name, p in model.named_parameters():
            p.grad = before[name][1].clone()
        if infinite is not None and infinite[0] == dist.get_rank():
            model.get_parameter(infinite[1]).grad.to_local().view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        return [not torch.equal(p.to_local(), before[name][0]) for name, p in model.named_parameters()]

    for infinite in [(rank, name) for rank in range(4) for name in ("blocks.0.up.weight", "norm.weight")]:
        assert not any(updated(infinite)), infinite
    scales: list[Any] = [None] * 4
    dist.all_gather_object(scales, scaler.get_scale())
    assert scales == [1024.0 / 2**8] * 4
    assert all(updated(None))


# DDP and ZeRO

DDP_OPTIONS = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
}


@check(ranks=4, sequence=SEQUENCE, options=DDP_OPTIONS, wide="combinations")
def ddp_over_the_replicas(sequence: bool, options: dict[str, Any]) -> None:
    both = mesh()
    model = DistributedDataParallel(parallel(both["tp"], sequence), process_group=both.get_group("dp"), **options)
    clip = None if options else clipped_by_torch
    assert_trains_as_one_process(model, 2, both.get_local_rank("dp"), clip=clip)


@check(ranks=4, sequence=SEQUENCE)
def ddp_sends_this_rank_s_parts(sequence: bool) -> None:
    """And nothing else over the replicas."""
    both = mesh()
    model = DistributedDataParallel(parallel(both["tp"], sequence), device_mesh=both["dp"])
    group = both.get_group("dp").group_name
    with comm.record() as log:
        loss_of(model, 0).backward()
    assert sum(call.payload for call in log if call.group == group) == sum(
        p.to_local().nbytes for p in model.parameters()
    )


@check(ranks=4, sequence=SEQUENCE)
def ddp_without_synchronization(sequence: bool) -> None:
    both = mesh()
    row = both.get_local_rank("dp")
    model = DistributedDataParallel(parallel(both["tp"], sequence), device_mesh=both["dp"])
    alone = small()
    with model.no_sync():
        loss_of(model, 0, row).backward()
    loss_of(model, 1, row).backward()
    for step in range(2):
        torch.stack([loss_of(alone, step, each) for each in range(2)]).mean().backward()
    assert_alike(model, alone, lambda p: p.grad)


@check(
    ranks=4, sequence=SEQUENCE, kind={"1": Zero1Optimizer, "2": Zero2Optimizer}, cap=(25, 0.0005), wide="combinations"
)
def zero_over_the_replicas(sequence: bool, kind: Any, cap: float) -> None:
    """Its norm is over both dimensions."""
    both = mesh()
    optimizer = partial(
        kind, optimizer_class=torch.optim.AdamW, process_group=both.get_group("dp"), lr=1e-2, bucket_cap_mb=cap
    )
    assert_trains_as_one_process(
        parallel(both["tp"], sequence),
        2,
        both.get_local_rank("dp"),
        optimizer=optimizer,
        reference=adamw,
        clip=lambda zero, limit: zero.clip_grad_norm_(limit),
    )


@check(ranks=4, sequence=SEQUENCE)
def zero_s_state_is_of_dtensors(sequence: bool) -> None:
    """As that of the plain optimizer, whole; it is loaded into a new optimizer."""
    both = mesh()
    model, alone = parallel(both["tp"], sequence), small()
    zero = Zero1Optimizer(model.parameters(), torch.optim.AdamW, process_group=both.get_group("dp"), lr=1e-2)
    plain = adamw(alone.parameters())
    for m, optimizer in ((model, zero), (alone, plain)):
        loss_of(m, 0).backward()
        optimizer.step()
    state, expected = zero.state_dict(), plain.state_dict()
    for index, own in expected["state"].items():
        torch.testing.assert_close(whole(state["state"][index]["exp_avg"]), own["exp_avg"])
        assert state["state"][index]["exp_avg"].placements == list(model.parameters())[index].placements
    other = Zero1Optimizer(model.parameters(), torch.optim.AdamW, process_group=both.get_group("dp"), lr=1e-2)
    other.load_state_dict(state)
    again = other.state_dict()["state"]
    assert all(torch.equal(whole(own["exp_avg"]), whole(again[i]["exp_avg"])) for i, own in state["state"].items())
    with pytest.raises(ValueError, match="is a plain tensor: load the DTensor that state_dict returned"):
        other.load_state_dict(expected)


@check(ranks=4)
def parameters_that_the_group_has_sharded_are_refused() -> None:
    both = mesh()
    model = parallel(both["tp"], False)
    for wrap in (
        lambda: DistributedDataParallel(model),
        lambda: Zero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1),
    ):
        with pytest.raises(
            ValueError, match=r"is a DTensor on ranks \[., .\], among which .* mesh.get_group"
        ) as caught:
            wrap()
        assert "\n" not in str(caught.value)


@check(ranks=4)
def torch_s_ddp_is_refused_in_a_line() -> None:
    """It replaces parameters by attributes."""
    both = mesh()
    model = parallel(both["tp"], False, vocabulary=16, tied=False)
    torchs = nn.parallel.DistributedDataParallel(model, device_mesh=both["dp"])
    with pytest.raises(TypeError, match="is no parameter any more: wrap models by minifsdp's DDP"):
        loss_of(torchs, 0)


# Gradients of three layouts


@check(ranks=2)
def the_layouts_of_gradients() -> None:
    model = parallel(tp_mesh(), True)
    loss_of(model, 0).backward()
    assert {p.grad.placements for p in model.parameters()} == {(Partial(),), (Replicate(),), (Shard(0),), (Shard(1),)}


@check(
    ranks=2,
    sequence=SEQUENCE,
    p=(1.0, 2.0, 3.0, float("inf")),
    foreach=(None, True, False) if SCALES_SUMMANDS else (False,),
    wide="combinations",
)
def norms_of_gradients(sequence: bool, p: float, foreach: bool | None) -> None:
    model, alone = parallel(tp_mesh(), sequence), small()
    for m in (model, alone):
        loss_of(m, 0).backward()
    norms = [whole(clip_grad_norm_(m.parameters(), 0.1, p, foreach=foreach)) for m in (model, alone)]
    assert abs(norms[0] - norms[1]) < 1e-9
    assert_alike(model, alone, lambda p: p.grad)


OPTIMIZERS = {
    "adamw, loop": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "adamw, foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw, fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adam, amsgrad": partial(torch.optim.Adam, lr=1e-2, foreach=True, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, foreach=True),
}


@check(ranks=2, sequence=SEQUENCE, optimizer=OPTIMIZERS, wide="combinations")
def optimizers(sequence: bool, optimizer: Any) -> None:
    model = parallel(tp_mesh(), sequence)
    assert_trains_as_one_process(model, optimizer=optimizer)


@check(ranks=2, sequence=SEQUENCE)
def micro_batches_add_up(sequence: bool) -> None:
    """Also onto zeros that the optimizer has left."""
    model, alone = parallel(tp_mesh(), sequence), small()
    for set_to_none in (True, False):
        for m in (model, alone):
            m.zero_grad(set_to_none=set_to_none)
            for step in range(3):
                loss_of(m, step).backward()
        assert_alike(model, alone, lambda p: p.grad)


FROZEN = {  # and the collectives of backward that they save, of 4 without sequence parallelism and of 6 with it
    "nothing": ((), 0, 0),
    "embedding": (("embed",), 0, 1),
    "embedding, first block": (("embed", "blocks.0"), 1, 3),
    "all but the head": (("embed", "blocks", "norm"), 3, 6),
    "layers of the second block": (("blocks.1.up", "blocks.1.down"), 0, 0),
}


@check(ranks=2, sequence=SEQUENCE, case=FROZEN)
def frozen_parameters_save_what_only_they_need(sequence: bool, case: tuple[tuple[str, ...], int, int]) -> None:
    frozen, saved, saved_of_sequence = case
    model, alone = parallel(tp_mesh(), sequence, tied=False), small(tied=False)
    for m in (model, alone):
        for name, p in m.named_parameters():
            p.requires_grad_(not name.startswith(frozen) if frozen else True)
        loss = loss_of(m, 0)
        with comm.record() as log:
            loss.backward()
        if m is model:
            assert len(log) == (6 - saved_of_sequence if sequence else 3 - saved), [call.op for call in log]
    trained = [(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True) if q.grad is not None]
    assert trained
    assert all(torch.allclose(whole(p.grad), q.grad, rtol=0, atol=1e-12) for p, q in trained)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


# Dropout


@check(ranks=4, sequence=SEQUENCE)
def masks_agree_on_replicated_activations_only(sequence: bool) -> None:
    """Rows of data parallelism have masks of their own."""
    both = mesh()
    model = parallel(both["tp"], sequence, p=0.5)
    masks: list[Any] = []
    model.drop.register_forward_hook(lambda _, args, y: masks.append(y != 0))
    torch.manual_seed(both.get_local_rank("dp"))
    loss_of(model, 0)
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, (torch.stack(masks), torch.get_rng_state()))
    (m0, s0), (m1, s1), (m2, s2), (m3, s3) = found
    assert torch.equal(m0, m1) == torch.equal(m2, m3) == (not sequence)
    assert torch.equal(s0, s1)
    assert torch.equal(s2, s3)
    assert not torch.equal(m0, m2)
    assert not torch.equal(m1, m3)


@check(ranks=2, sequence=SEQUENCE, reentrant=(False, True), wide="combinations")
def recomputation_and_restored_states_repeat_the_masks(sequence: bool, reentrant: bool) -> None:
    model = parallel(tp_mesh(), sequence, p=0.5)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    loss_of(model, 0).backward()
    expected = [p.grad.to_local().clone() for p in model.parameters()]
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    model.zero_grad()
    torch.set_rng_state(state)
    loss_of(model, 0).backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.to_local(), gradient, rtol=0, atol=1e-12)
    assert loss_of(model, 0) != loss_of(model, 0)


EXPERTS = {"on a part of the mesh": "tp", "plain": None, "the same on all": "same"}


@check(ranks=4, p=(2.0, float("inf")), order=(1, -1), experts=EXPERTS, wide="combinations")
def norms_that_differ_between_ranks_are_refused(p: float, order: int, experts: str | None) -> None:
    both = mesh()
    own = 1.0 if experts == "same" else 1.0 + dist.get_rank() // (2 if experts else 1)
    shared = nn.Parameter(distribute_tensor(torch.ones(4, 2), both, [Shard(0), Shard(1)]))
    values = torch.full((4, 2), own)
    expert = nn.Parameter(distribute_tensor(values, both["tp"], [Shard(0)]) if experts else values)
    params = [shared, expert][:: order if dist.get_rank() else 1]
    for _ in range(2):
        for each in params:
            each.grad = each.detach().clone()
        if experts == "same":
            expected = torch.linalg.vector_norm(torch.ones(16), p)
            assert abs(our_clip_grad_norm_(params, 0.5, p) - expected) < 1e-5
            continue
        with pytest.raises(ValueError, match=r"norms from .* to .* on ranks that share parameters"):
            our_clip_grad_norm_(params, 0.5, p)
        assert torch.equal(whole(shared.grad), torch.ones(4, 2))  # not scaled


@check(ranks=4, placement=(Shard(0), Replicate()))
def parameters_on_other_ranks_are_refused(placement: Any) -> None:
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [placement])) for mesh in meshes]
    with pytest.raises(ValueError, match=r"^clip_grad_norm_ has parameters on ranks \[.*\], and this is rank"):
        our_clip_grad_norm_(params, 0.5)
    own = params[dist.get_rank() // 2]
    own.grad = own.detach().clone()
    assert abs(our_clip_grad_norm_([own], 0.5) - 8**0.5) < 1e-5


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
