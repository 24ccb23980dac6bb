"""Stages and calls that a user gets wrong: refused in words on every rank, or right after all."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_stages import InStages
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from minifsdp import comm, pipeline
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp2 import fully_shard
from minifsdp.pipeline import PipelineStage, TensorChunkSpec
from minifsdp.pipeline.actions import Action

check = Checks(__name__)
WIDTH, MICROS = 6, 4


class Counting(nn.Linear):
    """Passes on a tensor that it changes in place in its next forward."""

    def __init__(self, clones: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.clones = clones
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Any:
        if seen is not None:
            return super().forward(x) * seen
        self.seen += 1
        return super().forward(x), self.seen.clone() if self.clones else self.seen


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, WIDTH), torch.randn(8, WIDTH)


def step(schedule: Any, x: Tensor, target: Tensor, method: str = "step", **kwargs: Any) -> list[Tensor]:
    rank, losses = dist.get_rank(), []
    last = rank == dist.get_world_size() - 1
    getattr(schedule, method)(*([x] if rank == 0 else []), target=target if last else None, losses=losses, **kwargs)
    return losses


@check(ranks=2)
def a_tensor_that_changes_after_it_was_passed_on_is_an_error() -> None:
    stage = PipelineStage(Counting(clones=False), dist.get_rank(), 2, "cpu")
    with pytest.raises((RuntimeError, pipeline.PipelineError), match="stage 0 has changed a tensor in place"):
        step(pipeline.ScheduleGPipe(stage, MICROS, mse_loss), *rows())
    stage = PipelineStage(Counting(clones=True), dist.get_rank(), 2, "cpu")
    step(pipeline.ScheduleGPipe(stage, MICROS, mse_loss), *rows())


@check(ranks=1)
def so_it_is_between_two_stages_of_a_rank() -> None:
    with pytest.raises(RuntimeError, match="stage 0 has changed a tensor in place"):
        step(InStages("looped bfs", MICROS, lambda count, stage: Counting(clones=False), mse_loss).schedule, *rows())


@check(ranks=2)
def evaluation_takes_the_arguments_of_the_loss() -> None:
    def loss_fn(y: Tensor, target: Tensor, factor: float = 1.0) -> Tensor:
        return factor * mse_loss(y, target)

    schedule = pipeline.ScheduleGPipe(
        PipelineStage(nn.Linear(WIDTH, WIDTH), dist.get_rank(), 2, "cpu"), MICROS, loss_fn
    )
    plain, scaled = (step(schedule, *rows(), "eval", loss_kwargs={"factor": factor}) for factor in (1.0, 100.0))
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(100 * a, b)


@check(ranks=2)
def outputs_that_cannot_be_joined_are_an_error_on_all_ranks() -> None:
    class Shrinks(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)[:, : WIDTH - (self.calls == MICROS and dist.get_rank() == 1)]

    schedule = pipeline.ScheduleGPipe(
        PipelineStage(Shrinks(WIDTH, WIDTH), dist.get_rank(), 2, "cpu"), MICROS, lambda y, _: y.mean()
    )
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            step(schedule, *rows())
    else:
        with pytest.raises(pipeline.PipelineError, match="rank 1"):
            twice(schedule)  # it may have ended the first step when the other fails


def twice(schedule: Any) -> None:
    for _ in range(2):
        step(schedule, *rows())


@check(ranks=2)
def plans_and_ties_that_do_not_fit_are_refused() -> None:
    rank = dist.get_rank()
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 2, "cpu")
    one = [Action(stage, kind, 0) for kind in "FB" for stage in ((0, 1) if kind == "F" else (1, 0))]
    with pytest.raises(ValueError, match="a plan for 1 ranks on 2"):
        pipeline.Schedule([one], stage, 1, mse_loss)
    schedule = pipeline.ScheduleGPipe(stage, MICROS, mse_loss)
    with pytest.raises(ValueError, match=r"stages=\[1, 0\]: give them in order"):
        schedule.tie({rank: stage.submod.weight}, [1, 0])


@check(ranks=2)
def all_ranks_may_have_the_specs_of_the_arguments() -> None:
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), dist.get_rank(), 2, "cpu")
    step(pipeline.ScheduleGPipe(stage, MICROS, mse_loss, args_chunk_spec=(TensorChunkSpec(0),)), *rows())


class Named(nn.Module):
    """Calls a layer by keyword."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(input=x)


@check(ranks=2, kind=("named", "weight_norm", "conjugate"))
def a_split_backward_of_a_stranger_layer(kind: str) -> None:
    normed = nn.utils.weight_norm if kind == "weight_norm" else lambda linear: linear

    def model() -> nn.ModuleList:
        torch.manual_seed(1)
        return nn.ModuleList(Named(normed(nn.Linear(WIDTH, WIDTH))) for _ in range(2))

    stages, reference, (x, target) = model(), model(), rows()
    if kind == "conjugate":
        stages.to(torch.complex64), reference.to(torch.complex64)
        x, target = torch.complex(x, x.flip(0)), torch.complex(target, target)
        for p in (*stages.parameters(), *reference.parameters()):
            p.data *= 1 + 0.5j
        for each in (stages[0], reference[0]):
            each.register_forward_hook(lambda module, args, y: y.conj())

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).abs().square().mean()

    for a, b in zip(x.chunk(MICROS), target.chunk(MICROS), strict=True):
        (loss_fn(reference[1](reference[0](a)), b) / MICROS).backward()
    stage = PipelineStage(stages[dist.get_rank()], dist.get_rank(), 2, "cpu")
    step(pipeline.ScheduleInterleavedZeroBubble([stage], MICROS, loss_fn), x, target)
    for p, q in zip(stage.submod.parameters(), reference[dist.get_rank()].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


class Forces(nn.Module):
    """Its output contains a gradient of an energy, with or without a graph of its own."""

    def __init__(self, graph: bool) -> None:
        super().__init__()
        self.linear, self.graph = nn.Linear(WIDTH, WIDTH), graph

    def forward(self, x: Tensor) -> Tensor:
        y = x if x.requires_grad else x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.linear(y).cos().sum(), y, create_graph=self.graph)
        return self.linear(x) + force


class InPlace(nn.Linear):
    """Changes the output of a layer whose input has three dimensions, and has an inner layer of no features."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.layer, self.narrow, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 0), nn.Linear(0, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x[:, None]).mul_(2)[:, 0]
        return y + self.wide(self.narrow(x))


STRANGE = {"forces": lambda: Forces(False), "forces with a graph": lambda: Forces(True), "in place": InPlace}


@check(ranks=2, build=STRANGE)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def a_split_backward_is_the_backward(build: Any) -> None:
    torch.manual_seed(1)
    stages = nn.ModuleList(build() for _ in range(2)).double()
    reference, (x, target) = copy.deepcopy(stages), (each.double() for each in rows())
    for a, b in zip(x.chunk(MICROS), target.chunk(MICROS), strict=True):
        (mse_loss(reference[1](reference[0](a)), b) / MICROS).backward()
    rank = dist.get_rank()
    schedule = pipeline.ScheduleInterleavedZeroBubble([PipelineStage(stages[rank], rank, 2, "cpu")], MICROS, mse_loss)
    step(schedule, x, target)
    for p, q in zip(stages[rank].parameters(), reference[rank].parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)


@check(ranks=1)
def outside_a_step_a_layer_of_a_split_backward_is_as_it_was() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    pipeline.ScheduleInterleavedZeroBubble([PipelineStage(linear, 0, 1, "cpu")], MICROS, mse_loss)
    x = torch.randn(3, WIDTH, requires_grad=True)
    torch.autograd.grad(linear(x).sum(), x)
    linear(x).sum().backward(inputs=[x])
    assert linear.weight.grad is None
    (found,) = torch.autograd.grad(linear(x).sum(), linear.weight)
    torch.testing.assert_close(found, x.sum(0).expand(WIDTH, WIDTH))
    torch.func.grad(lambda x: linear(x).sum())(x)


@check(ranks=2)
def a_weights_hooks_run_once_for_each_micro_batch() -> None:
    """An optimizer in such a hook would step twice, the first time with the gradient of an earlier micro-batch."""
    linear, given, ready = nn.Linear(WIDTH, WIDTH), [], []
    linear.weight.register_hook(lambda gradient: given.append(gradient is not None))
    linear.weight.register_post_accumulate_grad_hook(lambda p: ready.append(p.grad is not None))
    stage = PipelineStage(linear, dist.get_rank(), 2, "cpu")
    step(pipeline.ScheduleInterleavedZeroBubble([stage], MICROS, mse_loss), *rows())
    assert given == ready == [True] * MICROS


@check(ranks=3, op=("send", "recv"), phase=("issue", "wait"))
def a_rank_that_keeps_its_error_lets_go_of_its_connections(op: str, phase: str) -> None:
    """The frames of an error hold what they worked with. The others hear of it all the same."""
    seen: list[str] = []

    @contextmanager
    def observe(call: comm.Call, now: str) -> Iterator[None]:
        if (call.op, now) == (op, phase):
            seen.append(op)
            if len(seen) == MICROS:
                raise ArithmeticError("an observer's")
        yield

    schedule = pipeline.Schedule1F1B(
        PipelineStage(nn.Linear(WIDTH, WIDTH), dist.get_rank(), 3, "cpu"), MICROS, mse_loss
    )
    if dist.get_rank() == 1:
        comm.observers.append(observe)
    try:
        step(schedule, *rows())
    except (ArithmeticError, pipeline.PipelineError) as error:
        kept = error
    finally:
        comm.observers.clear()
    comm.all_reduce(torch.zeros(1), comm.world()).wait()  # all have come here, and rank 1 still has its error
    assert "an observer's" in str(kept)


@check(ranks=4)
def a_rank_that_ends_without_a_word_is_looked_for_once() -> None:
    """Its neighbour waits for a word that does not come. What it then says itself, the others find at once."""
    rank, cause = dist.get_rank(), ""
    schedule = pipeline.Schedule1F1B(PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 4, "cpu"), MICROS, mse_loss)
    if rank == 3:
        schedule.channels.close()
    else:
        with pytest.raises(pipeline.PipelineError) as caught:
            step(schedule, *rows())
        cause = str(caught.value)
    found = comm.gather_objects(cause, comm.world())
    assert found[0] == found[1] == found[2]
    assert found[2].startswith("a neighbour of rank 2 ended without a word, while that was at 2")


@check(ranks=2)
def ranks_with_other_schedules_say_so_before_anything_is_connected() -> None:
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), dist.get_rank(), 2, "cpu")
    kinds = pipeline.ScheduleGPipe, pipeline.Schedule1F1B
    with pytest.raises(
        ValueError, match=r"^ranks \[1\] have another plan than rank 0: make the same schedule on all ranks"
    ):
        kinds[dist.get_rank()](stage, MICROS, mse_loss)


class Passes(nn.Linear):
    """Its output as something else."""

    def __init__(self, change: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return self.change(super().forward(x)) if dist.get_rank() == 0 else super().forward(x)


STRANGERS: dict[str, Any] = {
    "DTensor": lambda y: DTensor.from_local(y, init_device_mesh("cpu", (dist.get_world_size(),))),
    "torch.sparse_coo": lambda y: y.to_sparse(),
    "torch.quint8": lambda y: torch.quantize_per_tensor(y, 0.1, 0, torch.quint8),
}


@check(ranks=2, kind=STRANGERS)
def what_cannot_be_sent_is_refused(kind: Any) -> None:
    stage = PipelineStage(Passes(kind), dist.get_rank(), 2, "cpu")
    says = (
        r"a stage passes a tensor that cannot be sent \(.*(DTensor|torch.sparse_coo|torch.quint8).*\): pass dense ones"
    )
    with pytest.raises((TypeError, pipeline.PipelineError), match=says):
        step(pipeline.Schedule1F1B(stage, MICROS, mse_loss), *rows())


@check(ranks=2)
def an_evaluation_in_inference_mode() -> None:
    torch.manual_seed(1)
    models, (x, target) = [nn.Linear(WIDTH, WIDTH) for _ in range(2)], rows()
    stage = PipelineStage(models[dist.get_rank()], dist.get_rank(), 2, "cpu")
    with torch.inference_mode():
        losses = step(pipeline.Schedule1F1B(stage, MICROS, mse_loss), x, target, "eval")
        expected = mse_loss(nn.Sequential(*models)(x), target)
    if dist.get_rank() == 1:
        torch.testing.assert_close(torch.stack(losses).mean(), expected)


class Fails(nn.Linear):
    """Raises in the backward of one micro-batch."""

    at: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, self.calls = super().forward(x), getattr(self, "calls", 0) + 1
        if self.calls == self.at:
            y.register_hook(self.fail)
        return y

    def fail(self, gradient: Tensor) -> None:
        raise RuntimeError(self.says)

    says = "the stage's own server: connection reset by peer"


@check(ranks=4, at=(2, MICROS))
def a_step_after_a_failed_one_has_its_own_gradients_alone(at: int) -> None:
    """With FSDP2 gradients wait in its units for their reduction; and no connection of the pipeline was reset."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    group, rank = mesh.get_group("pp"), mesh.get_local_rank("pp")
    torch.manual_seed(1)
    models = [Fails(WIDTH, WIDTH) for _ in range(2)]
    reference = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    for a, b in zip(models, reference, strict=True):
        b.load_state_dict(a.state_dict())
    models[0].at = at
    model = fully_shard(models[rank], mesh=mesh["dp"])
    stage = PipelineStage(model, rank, 2, "cpu", group=group)
    x, target = rows()
    given, wanted = ([x] if rank == 0 else []), (target if rank == 1 else None)
    error = RuntimeError if rank == 0 else pipeline.PipelineError
    schedule = pipeline.Schedule1F1B(stage, MICROS, mse_loss)

    def train() -> None:
        for _ in range(2):  # rank 1's part of the first may have been over when rank 0 fails
            schedule.step(*given, target=wanted)

    with pytest.raises(error, match="connection reset by peer"):
        train()
    model.zero_grad()
    schedule = pipeline.Schedule1F1B(stage, MICROS, mse_loss)
    schedule.step(*given, target=wanted)
    mse_loss(reference(x), target).backward()
    assert_equal_gradients(model, reference[rank])
    schedule.close()
    with pytest.raises(pipeline.PipelineError, match=r"make another schedule: close\(\) has been called"):
        schedule.step(*given, target=wanted)


@check(ranks=4, wrap=("ddp", "fsdp2"))
def reduction_stays_off_where_the_user_has_switched_it_off(wrap: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    group, rank, replica = mesh.get_group("pp"), mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    torch.manual_seed(1)
    reference = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    model: Any = copy.deepcopy(reference[rank])
    model = (
        fully_shard(model, mesh=mesh["dp"])
        if wrap == "fsdp2"
        else DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    )
    schedule = pipeline.Schedule1F1B(PipelineStage(model, rank, 2, "cpu", group=group), MICROS, mse_loss)
    batches = [torch.randn(2, 8, WIDTH) for _ in range(4)]  # two steps, two replicas

    def run(index: int) -> None:
        x, target = batches[2 * index + replica]
        schedule.step(*([x] if rank == 0 else []), target=target if rank == 1 else None)

    if wrap == "ddp":
        with model.no_sync():
            run(0)
        mse_loss(reference(batches[replica][0]), batches[replica][1]).backward()
        assert_equal_gradients(model, reference[rank])
        reference.zero_grad()
    else:
        model.set_requires_gradient_sync(False)
        run(0)
        for p in model.parameters():
            with pytest.raises(RuntimeError, match="accumulated without gradient sync have not been reduced"):
                p.grad.full_tensor()
        model.set_requires_gradient_sync(True)
    run(1)
    for x, target in batches:
        (mse_loss(reference(x), target) / 2).backward()
    assert_equal_gradients(model, reference[rank])


def assert_equal_gradients(model: nn.Module, reference: nn.Module) -> None:
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad, q.grad)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
