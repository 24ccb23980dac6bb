"""Arguments of a wrong kind are refused by name in one line, on all ranks, before anything has started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from on_ranks import Checks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from minifsdp import fsdp, fsdp2
from minifsdp import pipeline as pp
from minifsdp import tensor_parallel as tp
from minifsdp.ddp import DistributedDataParallel
from minifsdp.zero import Zero1Optimizer

check = Checks(__name__)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


def ranks() -> Any:
    return init_device_mesh("cpu", (2,))


def stage(index: Any = None, number: Any = 2) -> pp.PipelineStage:
    return pp.PipelineStage(model(), dist.get_rank() if index is None else index, number, "cpu")


def zero(kind: Any = torch.optim.SGD, **options: Any) -> None:
    Zero1Optimizer(model().parameters(), kind, lr=0.1, **options)


def sharded(**options: Any) -> None:
    fsdp2.fully_shard(model(), **options)


def wrapped(**options: Any) -> None:
    fsdp.FullyShardedDataParallel(model(), **options)


def ddp(**options: Any) -> None:
    DistributedDataParallel(model(), **options)


def parallel(plan: Any, **options: Any) -> None:
    tp.parallelize_module(model(), ranks(), plan, **options)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a policy of FSDP1": (lambda: sharded(mp_policy=fsdp.MixedPrecision(torch.bfloat16)), "mp_policy=MixedPrecision"),
    "a class as a policy": (lambda: sharded(mp_policy=fsdp2.MixedPrecisionPolicy), "mp_policy="),
    "a dtype by its name": (lambda: sharded(mp_policy=fsdp2.MixedPrecisionPolicy("bf16")), "param_dtype in mp_policy="),
    "FSDP1's offload": (lambda: sharded(offload_policy=fsdp.CPUOffload(True)), "offload_policy=CPUOffload"),
    "a class as offload": (lambda: sharded(offload_policy=fsdp2.CPUOffloadPolicy), "offload_policy="),
    "a flag as offload": (lambda: sharded(offload_policy=True), "offload_policy=True"),
    "a group as a mesh": (lambda: sharded(mesh=dist.group.WORLD), "mesh="),
    "half a flag": (lambda: sharded(reshard_after_forward="no"), "reshard_after_forward='no'"),
    "ignored names": (lambda: sharded(ignored_params={"0.weight"}), "ignored_params with='0.weight'"),
    "ignored modules": (lambda: sharded(ignored_params=[nn.Linear(2, 2)]), "ignored_params with=Linear"),
    "an ignored parameter": (lambda: sharded(ignored_params=nn.Parameter(torch.ones(2))), "ignored_params="),
    "ignored by name": (lambda: sharded(ignored_params=dict(model().named_parameters())), "ignored_params with="),
    "a placement": (lambda: sharded(shard_placement_fn=Shard(0)), "shard_placement_fn=Shard"),
    "a list of names": (lambda: fsdp2.fully_shard(["0"]), "module="),
    "FSDP1: a flag in words": (lambda: wrapped(use_orig_params="False"), "use_orig_params='False'"),
    "FSDP1: a prefetch": (lambda: wrapped(forward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE), "forward_prefetch="),
    "FSDP1: a dtype by name": (
        lambda: wrapped(mixed_precision=fsdp.MixedPrecision(buffer_dtype="bf16")),
        "buffer_dtype in mixed_precision='bf16'",
    ),
    "FSDP1: a group as a mesh": (lambda: wrapped(device_mesh=dist.group.WORLD), "device_mesh="),
    "DDP: a flag in words": (lambda: ddp(static_graph="False"), "static_graph='False'"),
    "DDP: a size in words": (lambda: ddp(bucket_cap_mb="25"), "bucket_cap_mb='25'"),
    "DDP: a group as a mesh": (lambda: ddp(device_mesh=dist.group.WORLD), "device_mesh="),
    "ZeRO: an optimizer": (lambda: zero(torch.optim.SGD(model().parameters(), 0.1)), "optimizer_class=SGD"),
    "ZeRO: a name": (lambda: zero("AdamW"), "optimizer_class='AdamW'"),
    "ZeRO: a size in words": (lambda: zero(bucket_cap_mb="25"), "bucket_cap_mb='25'"),
    "a plan by module": (lambda: parallel({nn.Linear(2, 2): tp.ColwiseParallel()}), "a key of the plan=Linear"),
    "a source in words": (lambda: parallel({"0": tp.ColwiseParallel()}, src_data_rank="0"), "src_data_rank='0'"),
    "a style's flag": (lambda: tp.ColwiseParallel(use_local_output="False"), "use_local_output='False'"),
    "a layout of 0": (lambda: tp.RowwiseParallel(input_layouts=0), "input_layouts = 0"),
    "micro-batches in words": (lambda: pp.ScheduleGPipe(stage(), "4"), "n_microbatches='4'"),
    "a class as a loss": (lambda: pp.ScheduleGPipe(stage(), 4, nn.MSELoss), "loss_fn="),
    "a flag of a schedule": (lambda: pp.ScheduleGPipe(stage(), 4, scale_grads="no"), "scale_grads='no'"),
    "a spec": (lambda: pp.ScheduleGPipe(stage(), 4, args_chunk_spec=(0,)), "args_chunk_spec with=0"),
    "a module as a stage": (lambda: pp.ScheduleGPipe(model(), 4), "stages="),
    "one stage of several": (lambda: pp.ScheduleInterleaved1F1B(stage(), 4), "stages="),
    "half a stage": (lambda: stage(0.5), "stage_index=0.5"),
}


@check(case=REFUSED)
def it_is_refused_by_name(case: tuple[Callable[[], Any], str]) -> None:
    run, begin = case
    with pytest.raises(TypeError) as error:
        run()
    text = str(error.value)
    assert text.startswith(begin), text
    assert ": give " in text
    assert "\n" not in text


@check()
def what_is_meant_is_taken() -> None:
    class Own(torchs.MixedPrecisionPolicy):
        """Of the caller's."""

    def ignored(module: nn.Module) -> Any:
        return (p for p in module[0].parameters())  # type: ignore[index]

    for options in (
        {"mp_policy": Own(torch.bfloat16), "offload_policy": torchs.CPUOffloadPolicy(pin_memory=False)},
        {"mp_policy": None, "offload_policy": None, "ignored_params": None},
        {"reshard_after_forward": 2, "shard_placement_fn": lambda p: None},
    ):
        whole = fsdp2.fully_shard(model(), **options)
        whole(torch.ones(2, 4)).sum().backward()
    left = model()
    fsdp2.fully_shard(left, ignored_params=ignored(left))
    assert type(left[0].weight) is nn.Parameter
    wrapped(use_orig_params=1, limit_all_gathers=None)
    tp.RowwiseParallel(output_layouts=Replicate(), use_local_output=False)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
