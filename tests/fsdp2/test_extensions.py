"""Parameters that say themselves what is gathered of them: under ours as under torch's `fully_shard`."""

from __future__ import annotations

from datetime import timedelta
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_torch import batch, compare, gpt, local, ours, shard_blocks, theirs
from on_ranks import Checks
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as keep_version
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from minifsdp import comm, first_forward

check = Checks(__name__)
ANY = (2, 3)


def sent_in_bf16(self: Tensor, mesh: Any) -> Any:
    """The former signature."""
    assert mesh.ndim == 1
    return (self.to(torch.bfloat16),), None


def padded_in_bf16(self: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    assert outer_stride == (outer_size[1], 1)
    assert isinstance(module, nn.Module)
    rows = -(-outer_size[0] // mesh.size())
    padded = self.new_zeros((rows, *self.shape[1:]), dtype=torch.bfloat16)
    padded[: self.shape[0]].copy_(self)
    return (padded,), None


def cast(self: Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    (received,) = outputs
    if out is None:
        whole = received.to(dtype)
        return whole, (received, whole)
    with torch.no_grad(), keep_version(out):
        out.copy_(received[: len(out)])
    return None


def in_eight_bits(self: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    """Integers, padded, and each rank's scale."""
    scale = self.abs().max().clamp(min=1e-6) / 127
    rows = -(-outer_size[0] // mesh.size())
    padded = torch.zeros(rows, *self.shape[1:], dtype=torch.int8)
    padded[: self.shape[0]].copy_((self / scale).round())
    return (padded, scale.to(torch.float32).reshape(1)), (outer_size[0], mp_policy.param_dtype)


def from_eight_bits(self: Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    integers, scales = outputs
    each = scales.repeat_interleave(len(integers) // len(scales))[:, None]
    whole = (integers * each).to(dtype)
    if out is None:
        return whole, (integers, scales, whole)
    with torch.no_grad(), keep_version(out):
        out.copy_(whole[: metadata[0]])
    return None


def patched(model: nn.Module, before: Any, after: Any) -> nn.Module:
    """Its matrices extend the gather, each object by itself, as a user may do after `fully_shard`."""
    for p in model.parameters():
        if p.ndim == 2:
            tensor = p._local_tensor
            tensor.fsdp_pre_all_gather = MethodType(before, tensor)
            tensor.fsdp_post_all_gather = MethodType(after, tensor)
    return model


EVEN = {"vocabulary": 42, "width": 12, "context": 12}


@check(ranks=ANY)
def values_in_fewer_bits() -> None:
    def apply(lib: Any, model: Any) -> Any:
        return patched(shard_blocks(lib, model), sent_in_bf16, cast)

    mine, _ = compare(lambda: gpt(torch.float32, **EVEN), apply, most=0.0 if dist.get_world_size() == 2 else 1e-6)
    with comm.record() as log:
        mine(*batch(5)).backward()
    assert sum(call.op == "all_gather" for call in log) == 7


@check(ranks=ANY)
def uneven_pieces_are_padded_by_the_parameter() -> None:
    def apply(lib: Any, model: Any) -> Any:
        return patched(shard_blocks(lib, model), padded_in_bf16, cast)

    compare(lambda: gpt(torch.float32), apply, most=0.0 if dist.get_world_size() == 2 else 1e-6)


@check(ranks=2)
def several_tensors_and_metadata() -> None:
    def apply(lib: Any, model: Any) -> Any:
        policy = lib.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return patched(shard_blocks(lib, model, mp_policy=policy), in_eight_bits, from_eight_bits)

    compare(lambda: gpt(torch.float32, **EVEN), apply)
    mine = apply(ours, gpt(torch.float32, **EVEN))
    mine(*batch(0)).backward()
    with comm.record() as log:
        mine(*batch(1))
    assert {call.dtype for call in log} == {torch.uint8}


def frozen_in_part() -> nn.Module:
    model = gpt(torch.float32, **EVEN)
    for name, p in model.named_parameters():
        p.requires_grad_("up" in name or "norm" in name)
    return model


def whole_for_three_micro_batches(model: Any, micro: int) -> None:
    model.set_requires_gradient_sync(micro == 2)
    model.set_reshard_after_backward(micro == 2)


@check(ranks=2, kind=("frozen in part", "offloaded", "whole from micro-batch to micro-batch"))
def beside_what_else_there_is(kind: str) -> None:
    def apply(lib: Any, model: Any) -> Any:
        options: dict[str, Any] = {}
        if kind == "offloaded":
            options["offload_policy"] = lib.CPUOffloadPolicy(pin_memory=False)
        elif kind != "frozen in part":
            options["reshard_after_forward"] = False
        return patched(shard_blocks(lib, model, **options), sent_in_bf16, cast)

    if kind == "frozen in part":
        compare(frozen_in_part, apply)
    elif kind == "offloaded":
        compare(lambda: gpt(torch.float32, **EVEN), apply)
    else:
        compare(lambda: gpt(torch.float32, **EVEN), apply, micros=3, between=whole_for_three_micro_batches)


@check(ranks=2)
def only_the_mesh_of_the_shards_is_passed() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    compare(
        lambda: gpt(torch.float32, **EVEN),
        lambda lib, model: patched(shard_blocks(lib, model, mesh=mesh), sent_in_bf16, cast),
    )


@check(ranks=2)
def memory_comes_and_goes_with_the_leaf() -> None:
    mine: Any = patched(shard_blocks(ours, gpt(torch.float32, **EVEN)), sent_in_bf16, cast)
    mine(*batch(0)).backward()
    leaf = mine.blocks[0]._units(False)[0].leaves[0]
    assert all(not leaf.untyped_storage().nbytes() for m in mine.blocks for leaf in m._units(False)[0].leaves)
    mine.blocks[0].unshard()
    assert leaf is mine.blocks[0]._units(False)[0].leaves[0]
    assert leaf.untyped_storage().nbytes()


class Pair(TwoTensor):
    """Two values at once, which are gathered as two tensors."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        a, b = outputs
        if out is not None:
            assert isinstance(out, TwoTensor)
            assert out.a.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
            return None
        return Pair(a, b), (a, b)


def of_pairs() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(3)))
    for layer in model:
        layer.weight = nn.Parameter(Pair(layer.weight.detach(), layer.weight.detach().clone()))
    return model


@check(ranks=2)
def tensors_of_a_class() -> None:
    losses: list[Any] = []
    for lib in (ours, theirs):
        model = of_pairs()
        for layer in model:
            lib.fully_shard(layer)
        lib.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses.append([])
        for step in range(3):
            loss = model(torch.randn(3, 12, generator=torch.Generator().manual_seed(step + dist.get_rank()))).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.detach().a)
    assert torch.equal(*map(torch.stack, losses))
    assert type(local(model[0].weight)) is Pair


@check(ranks=2)
def what_is_refused() -> None:
    def one_of_two(lib: Any) -> Any:
        model = lib.fully_shard(nn.Linear(4, 4))
        model.weight._local_tensor.fsdp_pre_all_gather = lambda mesh: None
        return model

    def of_two_arguments(self: Tensor, mesh: Any, outer_size: Any) -> Any: ...

    def not_padded(self: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self,), None

    for lib in (ours, theirs):
        with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined"):
            one_of_two(lib)(torch.ones(2, 4))
        with pytest.raises(AssertionError, match="Invalid fsdp_pre_all_gather"):
            patched(lib.fully_shard(nn.Linear(4, 4)), of_two_arguments, cast)(torch.ones(2, 4))
    if dist.get_rank() == 1:  # the other rank's piece is as long as the padded one
        model: Any = patched(ours.fully_shard(nn.Linear(4, 3)), not_padded, cast)
        with pytest.MonkeyPatch.context() as patch:  # the other rank has no forward
            patch.setattr(first_forward, "_PATIENCE", timedelta(milliseconds=1))
            with pytest.raises(AssertionError, match="When a parameter is unevenly sharded"):
                model(torch.ones(2, 4))
    else:
        ours.fully_shard(nn.Linear(4, 3))


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
