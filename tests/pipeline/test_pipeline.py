"""A model in stages trains as on one process, by every schedule; a failure is one error on all ranks."""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_stages import SCHEDULES, InStages
from on_ranks import Checks, mesh_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss

from minifsdp import comm, pipeline
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp2 import fully_shard
from minifsdp.instruments.launch import RankError, launch
from minifsdp.pipeline import PipelineStage, TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from minifsdp.zero import Zero1Optimizer

check = Checks(__name__)
WIDTH = 6


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    each = (
        nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(count)
    )
    return nn.Sequential(*each).double()


def rows(number: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(number, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, target


class Part(InStages):
    """This rank's stages of `layers`, one layer each, and a schedule for them."""

    def __init__(self, name: str, micros: int, group: Any = None, wrap: Any = lambda module: module, **options: Any):
        super().__init__(name, micros, lambda count, stage: wrap(layers(count)[stage]), mse_loss, group, **options)

    def step(self, x: Tensor, target: Tensor, losses: list[Tensor] | None = None) -> Any:
        return self.schedule.step(
            *([x] if self.is_first else []), target=target if self.is_last else None, losses=losses
        )

    def parameters(self) -> list[Tensor]:
        return [p for module in self.modules.values() for p in module.parameters()]

    def of(self, whole: nn.Sequential) -> list[Tensor]:
        """The same parameters in a whole model."""
        return [p for stage in self.mine for p in whole[stage].parameters()]


def alone(count: int, x: Tensor, target: Tensor, micros: int) -> tuple[nn.Sequential, list[Tensor], Tensor]:
    model = layers(count)
    outputs = [model(part) for part in x.chunk(micros)]
    losses = [mse_loss(*pair) for pair in zip(outputs, target.chunk(micros), strict=True)]
    return model, losses, torch.cat(outputs)


@check(ranks=(2, 3, 4), name=tuple(SCHEDULES), micros=(8, 9))
@check(ranks=(2, 3, 4), name=tuple(SCHEDULES), micros=(4,), wide=True)
def trains_as_one_process(name: str, micros: int) -> None:
    ranks = dist.get_world_size()
    if name == "dualpipe v" and micros < 2 * ranks:
        with pytest.raises(ValueError, match="do not fill DualPipeV"):
            Part(name, micros)
        return
    try:
        part = Part(name, micros)
    except ValueError as error:
        assert "equal rounds" in str(error), error  # noqa: PT017
        return
    x, target = rows(2 * micros)
    model, expected, outputs = alone(part.count, x, target, micros)
    sum(expected).backward()  # type: ignore[union-attr]
    for step in (1, 2):  # the second without the messages that say what is passed
        losses: list[Tensor] = []
        output = part.step(x, target, losses)
        if part.is_last:
            torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=0, atol=1e-14)
            torch.testing.assert_close(output, outputs, rtol=0, atol=1e-14)
        else:
            assert (output, losses) == (None, [])
        for p, q in zip(part.parameters(), part.of(model), strict=True):
            torch.testing.assert_close(p.grad, step * q.grad / micros, rtol=0, atol=1e-12)
        assert not any(stage.alive or stage._later for stage in part.schedule.stages)


@check(ranks=2)
def gradients_are_those_of_the_sum_if_asked_for() -> None:
    part, (x, target) = Part("1f1b", 4, scale_grads=False), rows(8)
    part.step(x, target)
    model, expected, _ = alone(part.count, x, target, 4)
    sum(expected).backward()  # type: ignore[union-attr]
    for p, q in zip(part.parameters(), part.of(model), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)


@check(ranks=2, name=("1f1b", "zbv"))
def evaluates_without_gradients(name: str) -> None:
    part, (x, target) = Part(name, 4), rows(8)
    _, expected, outputs = alone(part.count, x, target, 4)
    losses: list[Tensor] = []
    output = part.schedule.eval(*([x] if part.is_first else []), target=target if part.is_last else None, losses=losses)
    if part.is_last:
        torch.testing.assert_close(output, outputs)
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
    assert all(p.grad is None for p in part.parameters())
    part.step(x, target)
    assert all(p.grad is not None for p in part.parameters())


@check(ranks=(2, 3), micros=(2, 6))
def messages_of_a_step(micros: int) -> None:
    """One for each micro-batch, boundary and direction, and nothing else; at first a header for each boundary."""
    part, (x, target) = Part("1f1b", micros), rows(micros)
    for headers in (1, 0):
        with comm.record() as log:
            part.step(x, target)
        down, up = int(not part.is_last), int(not part.is_first)  # neighbours
        sent = [call.payload for call in log if call.op == "send"]
        assert len(sent) == (down + up) * micros + headers * down
        assert {call.op for call in log} == {"send", "recv"}
        assert sum(sent) == (down + up) * micros * WIDTH * 8 + headers * down * 256 * 8


@check(
    ranks=4,
    name=("gpipe", "1f1b", "zb-h1", "interleaved", "zbv"),
    how=("ddp", "torch's ddp", "fsdp2", "zero1"),
    wide="combinations",
)
def data_parallel_inside_a_stage(name: str, how: str) -> None:
    """Reduced once in a step, whatever the number of micro-batches."""
    mesh, micros = mesh_of((2, 2), "dp", "pp"), 4
    dp = mesh["dp"].get_group()

    def wrap(module: nn.Module) -> Any:
        if how == "ddp":
            return DistributedDataParallel(module, process_group=dp)
        if how == "torch's ddp":
            return nn.parallel.DistributedDataParallel(module, process_group=dp)
        return fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False) if how == "fsdp2" else module

    part = Part(name, micros, mesh["pp"].get_group(), wrap)
    kind = torch.optim.SGD
    mine: Any = Zero1Optimizer(part.parameters(), kind, process_group=dp, lr=0.1) if how == "zero1" else None
    mine = mine or kind(part.parameters(), 0.1)
    model = layers(part.count)
    optimizer = kind(model.parameters(), 0.1)
    for step in range(2):
        batches = [rows(2 * micros, seed=10 * step + replica) for replica in range(2)]
        with comm.record() as log:
            part.step(*batches[dp.rank()])
        reduced = [call.op for call in log if call.op in ("all_reduce", "reduce_scatter")]
        assert len(reduced) == (0 if how in ("zero1", "torch's ddp") else len(part.mine))
        assert sum(call.op == "all_gather" for call in log) == (len(part.mine) if how == "fsdp2" else 0)
        torch.stack([mse_loss(model(x), target) for x, target in batches]).mean().backward()
        for each in (mine, optimizer):
            each.step()
            each.zero_grad()
    for p, q in zip(part.parameters(), part.of(model), strict=True):
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        torch.testing.assert_close(whole, q, rtol=0, atol=1e-12)


TORCHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}


@check(ranks=4, name=("1f1b", "zb-h1"), options=TORCHS, wide="combinations")
def torchs_ddp_inside_a_stage(name: str, options: dict[str, Any]) -> None:
    """It calls its communication hook once in a step for each bucket, unless the user has switched reductions off."""
    mesh = mesh_of((2, 2), "dp", "pp")
    dp = mesh["dp"].get_group()
    called: list[int] = []

    def hook(state, bucket):
        called.append(len(bucket.parameters()))
        return allreduce_hook(dp, bucket)

    def wrap(module: nn.Module) -> nn.Module:
        module.extra = nn.Parameter(torch.ones(2, dtype=torch.float64))  # unused
        ddp = nn.parallel.DistributedDataParallel(module, process_group=dp, **options)
        ddp.register_comm_hook(None, hook)
        return ddp

    part = Part(name, 4, mesh["pp"].get_group(), wrap)
    (ddp,) = part.modules.values()
    model = layers(part.count)
    for step in range(3):
        batches = [rows(8, seed=10 * step + replica) for replica in range(2)]
        if step == 1:
            with ddp.no_sync():
                part.step(*batches[dp.rank()])
            assert not called
        else:
            part.step(*batches[dp.rank()])
            assert sum(called) == len(part.parameters()), "each parameter once"
            called.clear()
        torch.stack([mse_loss(model(x), target) for x, target in batches]).mean().backward()
        if step != 1:
            for p, q in zip((p for p in part.parameters() if p is not ddp.module.extra), part.of(model), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)
            assert (ddp.module.extra.grad is None) == ("find_unused_parameters" in options)
    assert list(dict(ddp.named_parameters())) == [f"module.{n}" for n, _ in ddp.module.named_parameters()]


@check(ranks=2)
def outputs_are_kept_if_asked_for_and_the_loss_may_have_arguments_of_its_own() -> None:
    part, (x, target) = Part("1f1b", 4), rows(8)
    losses: list[Tensor] = []
    given: Any = {"target": target if part.is_last else None, "losses": losses}
    whole = part.schedule.step(*([x] if part.is_first else []), **given)
    halves = list(losses)
    assert (whole is not None) == part.is_last
    more: Any = {"return_outputs": False, "loss_kwargs": {"reduction": "sum"}}
    assert part.schedule.step(*([x] if part.is_first else []), **given, **more) is None
    for mean, total in zip(halves, losses, strict=True):
        torch.testing.assert_close(total, mean * 2 * WIDTH)


@check(ranks=2)
def wrong_calls_are_refused() -> None:
    part, (x, target) = Part("1f1b", 4), rows(8)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"call eval\(\)"):
        part.step(x, target)
    with pytest.raises(TypeError, match=r"with static_graph.*use minifsdp\.ddp's"):
        Part("1f1b", 4, wrap=lambda module: nn.parallel.DistributedDataParallel(module, static_graph=True))


@check(ranks=3)
def a_new_schedule_works_after_one_has_failed() -> None:
    """Also where ranks are in different numbers of groups."""
    dist.new_group([1, 2], use_local_synchronization=True)
    for _ in range(2):
        part, (x, target) = Part("1f1b", 4), rows(8)
        with pytest.raises((ValueError, pipeline.PipelineError), match="no target"):
            part.schedule.step(*([x] if part.is_first else []))
        with pytest.raises(pipeline.PipelineError, match="make another schedule"):
            part.step(x, target)
    part = Part("1f1b", 4)
    part.step(x, target)
    model, expected, _ = alone(part.count, x, target, 4)
    torch.stack(expected).mean().backward()
    for p, q in zip(part.parameters(), part.of(model), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)


@check(ranks=3, wrong=("input_args", "output_args"))
def examples_of_arguments_are_compared(wrong: str) -> None:
    """With the first micro-batch, on both sides."""
    rank = dist.get_rank()
    example = {wrong: torch.empty(3, WIDTH)} if rank == (1 if wrong == "input_args" else 0) else {}
    schedule = pipeline.ScheduleGPipe(PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 3, "cpu", **example), 2, mse_loss)
    x = torch.randn(4, WIDTH)
    with pytest.raises((ValueError, pipeline.PipelineError), match=r"stage 0 passes float32\[2, 6\], where") as known:
        schedule.step(*([x] if rank == 0 else []), target=x if rank == 2 else None)
    dist.barrier()  # all know, while one still has the error and its frames
    del known


class Several(nn.Module):
    """Passes a tensor, one that needs no gradient, one that the next stage ignores, and a mask given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, steps: Any = None, ignored: Any = None, *, mask: Any = None) -> Any:
        steps = torch.zeros(x.shape[0], dtype=torch.int64) if steps is None else steps + 1
        y = self.linear(x) * (1 if mask is None else mask) + steps[:, None]
        return y, steps, 2 * y


@check(ranks=3)
def several_tensors_between_stages() -> None:
    rank, micros = dist.get_rank(), 2
    torch.manual_seed(0)
    model = nn.ModuleList(Several() for _ in range(3)).double()
    x, target = rows(6)
    mask = torch.rand(6, 1, dtype=torch.float64)

    def loss_of(output: Any, wanted: Tensor) -> Tensor:
        return mse_loss(output[0], wanted)

    passed: Any = (x,)
    reference = copy.deepcopy(model)
    for number, each in enumerate(reference):
        passed = each(*passed, mask=mask if number == 0 else None)
    loss_of(passed, target).backward()
    stage = PipelineStage(model[rank], rank, 3, "cpu")
    schedule = pipeline.ScheduleGPipe(stage, micros, loss_of)
    given = {"mask": mask} if rank == 0 else {}
    output = schedule.step(*([x] if rank == 0 else []), target=target if rank == 2 else None, **given)
    for p, q in zip(model[rank].parameters(), reference[rank].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)
    if rank == 2:
        torch.testing.assert_close(output, passed)


@check(ranks=2)
def a_builder_of_weight_gradients() -> None:
    """Called once for each backward; what it returns is called at W, or at once where backward is whole."""
    made: list[str] = []

    def builder() -> Any:
        made.append("built")
        return lambda: made.append("computed")

    for kind, each in (("ScheduleInterleavedZeroBubble", None), ("Schedule1F1B", 0)):
        made.clear()
        stage = PipelineStage(layers(2)[dist.get_rank()], dist.get_rank(), 2, "cpu", dw_builder=builder)
        schedule = getattr(pipeline, kind)([stage] if each is None else stage, 4, mse_loss)
        x, target = rows(4)
        schedule.step(*([x] if stage.is_first else []), target=target if stage.is_last else None)
        assert (made.count("built"), made.count("computed")) == (4, 4)


@check(ranks=2)
def stages_that_do_not_fit_are_refused() -> None:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="stage 2 of 2"):
        PipelineStage(nn.Identity(), 2, 2, "cpu")
    with pytest.raises(ValueError, match="num_stages=3, and 2 ranks with 1 each, as here, have 2"):
        pipeline.ScheduleGPipe(PipelineStage(nn.Identity(), rank, 3, "cpu"), 2)
    with pytest.raises(
        ValueError, match=rf"rank {rank} has stages \[{rank}\] in this plan, and was given \[{1 - rank}\]"
    ):
        pipeline.ScheduleGPipe(PipelineStage(nn.Identity(), 1 - rank, 2, "cpu"), 2)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)


# Failures


class Failing(nn.Linear):
    """Does something else in its third forward on rank 1."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.how, self.calls = how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if dist.get_rank() == 1 and self.calls == 3:
            if self.how == "raises":
                raise ValueError("too hot")
            if self.how == "dies":
                os._exit(9)
            return super().forward(x)[:1] if self.how == "shape" else super().forward(x).double()
        return super().forward(x)


def fail(how: str) -> tuple[str, str, float]:
    rank = dist.get_rank()
    stage = PipelineStage(Failing(how), rank, 3, "cpu")
    schedule = pipeline.Schedule1F1B(stage, 6, mse_loss)
    x = torch.randn(13 if how == "batch" else 12, WIDTH)
    given: Any = ([x] if rank == 0 else [], {"target": x} if rank == 2 and how != "target" else {})
    started = time.monotonic()
    with pytest.raises((ValueError, pipeline.PipelineError)) as first:
        schedule.step(*given[0], **given[1])
    seconds = time.monotonic() - started
    with pytest.raises(pipeline.PipelineError, match="make another schedule") as again:
        schedule.step(*given[0], **given[1])
    return f"{first.type.__name__}: {first.value}", str(again.value), seconds


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "too hot"),
        ("shape", r"stage 1 passes float32[1, 6] where it has passed float32[2, 6] before"),
        ("dtype", r"stage 1 passes float64[2, 6] where it has passed float32[2, 6] before"),
        ("batch", r"stage 0 passes float32[2, 6] where it has passed float32[3, 6] before"),
        ("target", "no target on the rank of the last stage"),
    ],
)
def test_a_failure_is_one_error_on_all_ranks(how: str, words: str) -> None:
    failed = {"batch": 0, "target": 2}.get(how, 1)
    for rank, (first, again, seconds) in enumerate(launch(fail, 3, how)):
        kind = "ValueError" if rank == failed else f"PipelineError: rank {failed} at "
        assert first.startswith(kind)
        assert words in first
        assert words in again
        assert seconds < 10


def test_a_rank_that_dies_ends_all() -> None:
    with pytest.raises(RankError, match="rank 1"):
        launch(fail, 3, "dies")


# Micro-batches


def test_arguments_in_micro_batches_and_back() -> None:
    args = (torch.arange(10.0).view(5, 2), {"a": torch.arange(5)}, "word")
    kwargs = {"columns": torch.arange(6.0).view(2, 3)}
    spec = TensorChunkSpec.from_dict({"columns": 1})
    cut, named = split_args_kwargs_into_chunks(args, kwargs, 3, kwargs_chunk_spec=spec)
    assert [tuple(each[0].shape) for each in cut] == [(2, 2), (2, 2), (1, 2)]
    assert [each[2] for each in cut] == ["word"] * 3
    assert [each["columns"].tolist() for each in named] == [[[0], [3]], [[1], [4]], [[2], [5]]]
    joined = merge_chunks([(each[0], each[1]) for each in cut])
    assert torch.equal(joined[0], args[0])
    assert torch.equal(joined[1]["a"], args[1]["a"])
    assert torch.equal(merge_chunks([each["columns"] for each in named], TensorChunkSpec(1)), kwargs["columns"])


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((torch.ones(2, 2),), {}, r"argument 0 \[2, 2\] cannot be cut into 3 micro-batches along dimension 0"),
        ((torch.ones(()),), {}, r"argument 0 \[\] cannot be cut"),
        ((torch.ones(3),), {"args_chunk_spec": ()}, "1 arguments and 0 in args_chunk_spec"),
        ((), {"kwargs_chunk_spec": {"y": TensorChunkSpec(0)}}, r"differ in \['y'\]"),
    ],
)
def test_what_cannot_be_cut_is_refused(args: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split_args_kwargs_into_chunks(args, {}, 3, **options)
