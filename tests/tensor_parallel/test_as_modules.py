"""A parallel layer stays a module: called twice, copied, saved, compiled, hooked, frozen, differentiated twice.

Next to the same module on one process, in float64.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks, mesh_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from minifsdp import comm
from minifsdp.fsdp2 import fully_shard
from minifsdp.tensor_parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

check = Checks(__name__)
WIDTH = 6


def mesh() -> Any:
    return mesh_of((dist.get_world_size(),))


class MLP(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12, bias=bias), nn.Linear(12, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


def cut(model: nn.Module, **rows: Any) -> Any:
    return parallelize_module(model, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel(**rows)})


def pair(**options: Any) -> tuple[Any, Any]:
    """On one process, and parallel."""
    torch.manual_seed(0)
    alone = MLP(**options).double()
    return alone, cut(copy.deepcopy(alone))


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def whole(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, DTensor) else t


def assert_equal_gradients(model: nn.Module, alone: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@check(ranks=(2, 3), shape=((), (4,), (2, 1, 3), (0,)), bias=(True, False))
def inputs_of_any_number_of_dimensions(shape: tuple[int, ...], bias: bool) -> None:
    alone, model = pair(bias=bias)
    mine, other = data(*shape), data(*shape)
    for m, x in ((model, mine), (alone, other)):
        m(x.requires_grad_()).square().sum().backward()
    assert_equal_gradients(model, alone)
    torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-12)


@check(ranks=2)
def called_twice_and_by_keyword() -> None:
    alone, model = pair()
    for m in (model, alone):
        (m(x=data(3)) + m(m(data(3)))).square().sum().backward()
    assert_equal_gradients(model, alone)


@check(ranks=2, of=("inputs", "parameters"))
def backward_of_backward(of: str) -> None:
    """A gradient penalty."""
    alone, model = pair()
    for m in (model, alone):
        x = data(3).requires_grad_()
        wanted = [x] if of == "inputs" else list(m.parameters())
        gradients = torch.autograd.grad(m(x).square().sum(), wanted, create_graph=True)
        penalty = sum(whole(g).square().sum() for g in gradients)
        penalty.backward()
    assert_equal_gradients(model, alone)


@check(ranks=2)
def frozen_parameters_are_not_differentiated() -> None:
    """Biases alone are trained: half the operations of one process, in forward and backward."""
    alone, model = pair()
    operations = []
    for m in (model, alone):
        for name, p in m.named_parameters():
            p.requires_grad_("bias" in name)
        with FlopCounterMode(display=False) as counter:
            m(data(3)).square().sum().backward()
        operations.append(counter.get_total_flops())
        assert [name for name, p in m.named_parameters() if p.grad is not None] == ["up.bias", "down.bias"]
    assert 2 * operations[0] == operations[1]
    for m in (model, alone):
        m.zero_grad()
        m.requires_grad_()
        m(data(3)).square().sum().backward()
    assert_equal_gradients(model, alone)


@check(ranks=2)
def other_parameters_in_a_functional_call() -> None:
    alone, model = pair()
    x = data(3)
    doubled = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    y = torch.func.functional_call(model, doubled, x)
    torch.testing.assert_close(y, torch.func.functional_call(alone, {n: 2 * p for n, p in alone.named_parameters()}, x))
    y.sum().backward()
    assert all(p.grad is not None for p in doubled.values())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(TypeError, match=r"weight of a parallel Linear is a plain tensor: .* distribute_tensor"):
        torch.func.functional_call(model, {"up.weight": alone.up.weight}, x)
    assert torch.equal(model(x), model(x))


@check(ranks=2)
def a_file_of_its_state() -> None:
    _, model = pair()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = cut(MLP().double())
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(data(3)), model(data(3)))


@check(ranks=2)
def hooks_of_users() -> None:
    """They see this rank's part; those of parameters see DTensors."""
    _, model = pair()
    seen: dict[str, Any] = {}
    model.up.register_forward_hook(lambda _, args, y: seen.update(forward=(args[0].shape, y.shape)))
    model.up.register_full_backward_hook(lambda _, inputs, outputs: seen.update(backward=outputs[0].shape))
    model.up.weight.register_hook(lambda g: seen.update(gradient=type(g)))
    model.up.weight.register_post_accumulate_grad_hook(lambda p: seen.update(accumulated=type(p.grad)))
    model(data(3).requires_grad_()).sum().backward()
    assert seen == {
        "forward": ((3, WIDTH), (3, 6)),
        "backward": (3, 6),
        "gradient": DTensor,
        "accumulated": DTensor,
    }


@check(ranks=2)
def compiled() -> None:
    """The collectives are outside of its graphs."""
    alone, model = pair()
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        for m in (compiled, alone):
            m(data(3 + step)).square().sum().backward()
        assert_equal_gradients(model, alone)


@check(ranks=2)
def converted_and_materialized_afterwards() -> None:
    model = cut(MLP()).to(torch.float64)
    model(data(3)).sum().backward()
    assert {p.grad.to_local().dtype for p in model.parameters()} == {torch.float64}
    with torch.device("meta"):
        empty = MLP()
    model = cut(empty).to_empty(device="cpu")
    for p in model.parameters():
        nn.init.ones_(p)
    y = model(torch.zeros(1, WIDTH))
    torch.testing.assert_close(y, 12 * torch.tanh(torch.ones(1, WIDTH)) + 1)


@check(ranks=2, dtype=(torch.float16, torch.bfloat16))
def under_autocast(dtype: torch.dtype) -> None:
    alone, model = pair()
    alone, model = alone.float(), model.float()
    results = []
    for m in (model, alone):
        with torch.autocast("cpu", dtype):
            y = m(data(3).float())
        y.float().sum().backward()
        results.append(y)
    assert results[0].dtype == results[1].dtype == dtype
    torch.testing.assert_close(*results, rtol=0, atol=0.02)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@check(ranks=3)
def a_mesh_of_some_ranks() -> None:
    part = DeviceMesh("cpu", [0, 2])
    alone = MLP().double()
    model = copy.deepcopy(alone)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="this rank is not on"):
            parallelize_module(model, part, plan)
    else:
        torch.testing.assert_close(parallelize_module(model, part, plan)(data(3)), alone(data(3)))


@check(ranks=2)
def a_mesh_of_one_rank() -> None:
    alone = MLP().double()
    single = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    model = parallelize_module(copy.deepcopy(alone), single, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for m in (model, alone):
        m(data(3)).square().sum().backward()
    assert_equal_gradients(model, alone)


class InTwo(nn.Module):
    """Two MLPs with a norm in between, on parts of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = MLP(), nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.norm(self.first(x)))
        return y


def in_two(local: bool, regather: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(0)
    alone = InTwo().double()
    plan = {
        "first.up": ColwiseParallel(),
        "first.down": RowwiseParallel(output_layouts=Shard(0), use_local_output=local),
        "norm": SequenceParallel(sequence_dim=0, use_local_output=local),
        "second.up": ColwiseParallel(input_layouts=Shard(0), regather=regather),
        "second.down": RowwiseParallel(),
    }
    return alone, parallelize_module(copy.deepcopy(alone), mesh(), plan)


@check(ranks=(2, 3), regather=(False, True))
def a_sequence_without_equal_parts(regather: bool) -> None:
    """As DTensors, which carry its length; plain ones are refused on all ranks, where torch's ends one of them."""
    alone, model = in_two(False, regather)
    for m in (model, alone):
        m(data(7)).square().sum().backward()
    assert_equal_gradients(model, alone)
    _, model = in_two(True, regather)
    with pytest.raises(
        ValueError, match=r"dimension 0 of \[7, 6\] has no equal parts on . ranks: pad it, or set use_l"
    ):
        model(data(7))
    model(data(6)).sum().backward()


@check(ranks=2)
def an_empty_batch_that_is_gathered_again() -> None:
    for local in (True, False):
        _, model = in_two(local, regather=True)
        with comm.record() as log:
            model(data(0).requires_grad_()).sum().backward()
        assert [call.op for call in log].count("all_gather") >= 2


def column(x: Any) -> None:
    parallelize_module(nn.Linear(WIDTH, 4), mesh(), ColwiseParallel())(x)


def on(mesh: Any, *layouts: Any) -> Any:
    return lambda: column(distribute_tensor(torch.ones(2, WIDTH), mesh(), layouts))


def average() -> None:
    column(DTensor.from_local(torch.ones(2, WIDTH), mesh(), [Partial("avg")]))


def styled_twice() -> None:
    layer = nn.Linear(4, 4)
    for style in (ColwiseParallel(), RowwiseParallel()):
        parallelize_module(nn.ModuleDict({"up": layer}), mesh(), {"up": style})


def sharded_before() -> None:
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    layer = fully_shard(nn.Linear(4, 4), mesh=both["dp"])
    parallelize_module(layer, both["tp"], ColwiseParallel())


def normalized() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    parallelize_module(layer, mesh(), ColwiseParallel())


def other_ranks() -> Any:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]


def two_dimensions() -> Any:
    return init_device_mesh("cpu", (1, 2))


REFUSED = {
    "nothing": (
        lambda: parallelize_module(nn.Linear(4, 4), mesh(), ColwiseParallel())(),
        TypeError,
        "without an input",
    ),
    "list": (lambda: column([1.0]), TypeError, "is a list: pass a tensor"),
    "mesh": (on(two_dimensions, Replicate(), Replicate()), ValueError, "on its tensor-parallel ranks only"),
    "ranks": (on(other_ranks, Replicate()), ValueError, "in a layer on DeviceMesh"),
    "average": (average, ValueError, "give Shard"),
    "no layout": (lambda: ColwiseParallel(input_layouts="x"), TypeError, "input_layouts = 'x': give Shard"),
    "no sum": (lambda: RowwiseParallel(output_layouts=Partial("max")), ValueError, "output_layouts"),
    "dimension": (
        lambda: parallelize_module(nn.Linear(4, 4), mesh(), ColwiseParallel(input_layouts=Shard(5)))(torch.ones(2, 4)),
        ValueError,
        "with 2 dimensions",
    ),
    "two styles": (styled_twice, ValueError, r"RowwiseParallel of up \(Linear\), which has a style"),
    "sharded before": (sharded_before, ValueError, "parallelize modules before they are wrapped"),
    "normalized": (normalized, ValueError, "computes its weight from parametrizations.weight.original0"),
    "embedding in parts": (
        lambda: parallelize_module(nn.Embedding(4, 4), mesh(), ColwiseParallel(parts=2)),
        ValueError,
        "parts are those of an nn.Linear",
    ),
}


@check(ranks=2, case=REFUSED)
def what_it_does_not_take_is_refused_in_a_line(case: tuple[Any, type[Exception], str]) -> None:
    run, kind, text = case
    with pytest.raises(kind, match=text) as caught:
        run()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
