"""Plans: names and patterns, tied and fused parameters, copies, and what is refused."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks, mesh_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as theirs

from minifsdp import comm
from minifsdp.fsdp2 import fully_shard
from minifsdp.tensor_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    parallelize_gpt,
    parallelize_module,
)
from minifsdp.tensor_parallel.replicas import Print, report

check = Checks(__name__)


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def mesh() -> Any:
    return mesh_of((dist.get_world_size(),))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def cut(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if isinstance(p, DTensor)}


@check(ranks=2)
def patterns() -> None:
    expected = {
        "layers.*.up": range(12),
        "layers.?.up": range(10),
        "layers.[13].up": (1, 3),
        "layers.1?.up": (10, 11),
        "layers.7.up": (7,),
        "*.7.u*": (7,),
    }
    for pattern, numbers in expected.items():
        model = parallelize_module(Nested(), mesh(), {pattern: ColwiseParallel()})
        assert cut(model) == {f"layers.{i}.up.{name}" for i in numbers for name in ("weight", "bias")}, pattern
    nested = Nested()
    parallelize_module(nested, mesh(), {"layers": PrepareModuleInput(), "layers.0": PrepareModuleInput()})
    assert not cut(nested)


@check(ranks=2)
def calls_one_after_another_and_inside_a_mesh() -> None:
    torch.manual_seed(0)
    model, x = Nested(), torch.randn(3, 6)
    expected = model(x)
    with mesh():
        for layer in model.layers:
            parallelize_module(layer, parallelize_plan={"up": ColwiseParallel()})
            parallelize_module(layer.down, parallelize_plan=RowwiseParallel())
    torch.testing.assert_close(model(x), expected)


@check(ranks=2)
def nothing_to_do_is_said() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = parallelize_module(Nested(), mesh())
        parallelize_module(model, mesh(), {"layers.*.across": ColwiseParallel()})
    assert ["changes nothing" in str(each.message) for each in caught] == [True, True]
    assert "layers.*.across" in str(caught[1].message)
    assert not cut(model)


@check(ranks=2)
def values_are_the_first_rank_s_or_each_rank_s_own() -> None:
    for source, equal in ((0, True), (None, False)):
        torch.manual_seed(dist.get_rank())
        norm = nn.LayerNorm(4)
        nn.init.normal_(norm.weight)
        mine = norm.weight.detach().clone()
        parallelize_module(norm, mesh(), Replicated(), src_data_rank=source)
        other = mine.clone()
        dist.broadcast(other, 0)
        assert torch.equal(norm.weight.to_local(), other if equal else mine)


@check(ranks=2)
def a_plan_may_have_another_order_on_each_rank() -> None:
    torch.manual_seed(0)
    model, x = Nested(), torch.randn(3, 6)
    expected = model(x)
    plan = {f"layers.{i}.{name}": style for i in range(12) for name, style in PLAN.items()}
    parallelize_module(model, mesh(), dict(list(plan.items())[:: -1 if dist.get_rank() else 1]))
    torch.testing.assert_close(model(x), expected)


@check(ranks=2)
def styles_are_torch_s_too() -> None:
    """Ours in torch's `parallelize_module`, and torch's in ours."""
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(3, 6)
    expected = model(x)
    ours = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    torch.testing.assert_close(theirs.parallelize_module(copy.deepcopy(model), mesh(), ours)(x), expected)
    torchs = {"up": theirs.ColwiseParallel(), "down": theirs.RowwiseParallel()}
    torch.testing.assert_close(parallelize_module(copy.deepcopy(model), mesh(), torchs)(x), expected)


@check(ranks=2)
def a_copy_is_one_of_its_own() -> None:
    torch.manual_seed(0)
    model = parallelize_module(MLP(), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    other, x = copy.deepcopy(model), torch.randn(3, 6)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert other(x).abs().max() == 0
    assert model(x).abs().max() > 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(tokens))
        return y


@check(ranks=(2, 3))
def tied_parameters_stay_tied() -> None:
    torch.manual_seed(0)
    model, tokens = Tied(), torch.arange(10)
    expected = model(tokens)
    expected.square().sum().backward()
    gradient = model.embed.weight.grad
    whole = {"input_layouts": Replicate()}
    plan = {"embed": RowwiseParallel(**whole), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh(), plan)
    assert model.head.weight is model.embed.weight
    y = model(tokens)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    torch.testing.assert_close(model.embed.weight.grad.full_tensor(), gradient)


SECOND = {
    "two calls": lambda model, style: parallelize_module(model.head, mesh(), style),
    "two calls, tied by hand": lambda model, style: (
        parallelize_module(model.head, mesh(), style),
        setattr(model.head, "weight", model.embed.weight),
    ),
}


@check(ranks=2, second=SECOND)
def tied_parameters_of_two_calls_stay_tied(second: Any) -> None:
    torch.manual_seed(0)
    model, tokens = Tied(), torch.arange(10)
    model(tokens).square().sum().backward()
    gradient, model.embed.weight.grad = model.embed.weight.grad, None
    parallelize_module(model, mesh(), {"embed": RowwiseParallel(input_layouts=Replicate())})
    with torch.no_grad():
        model(tokens)  # both copies are equal
    second(model, ColwiseParallel(output_layouts=Replicate()))
    assert model.head.weight is model.embed.weight
    model(tokens).square().sum().backward()
    torch.testing.assert_close(model.embed.weight.grad.full_tensor(), gradient)


@check(ranks=2)
def a_weight_untied_by_hand_trains_alone() -> None:
    model = Tied()
    parallelize_module(model, mesh(), {"embed": RowwiseParallel(input_layouts=Replicate())})
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model(torch.arange(10)).sum().backward()
    assert model.head.weight.grad is not None


class Head(nn.Module):
    """Shares the bias of its layer, as BERT's does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.bias = self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


@check(ranks=2)
def a_second_name_of_a_layers_bias_stays_one() -> None:
    head = parallelize_module(Head(), mesh(), {"layer": ColwiseParallel()})
    assert head.bias is head.layer.bias
    head(torch.ones(2, 4)).sum().backward()
    assert isinstance(head.bias.grad, DTensor)


class Uses(nn.Module):
    """A layer and what is done with its output."""

    def __init__(self, use: Any, features: int = 24) -> None:
        super().__init__()
        self.qkv, self.use = nn.Linear(4, features), use

    def forward(self, x: Tensor) -> Any:
        return self.use(self.qkv(x))


TAKEN_APART = {
    "chunk": lambda y: y.chunk(3, -1),
    "torch.chunk": lambda y: torch.chunk(y, 3, dim=2),
    "split": lambda y: y.split(4, dim=-1),
    "slices": lambda y: y[..., :4],
    "glu": lambda y: nn.functional.glu(y),
    "view, unbind": lambda y: y.view(2, 5, 3, 2, 2).unbind(2),
    "unflatten, index": lambda y: y.unflatten(-1, (3, 2, 2))[:, :, 0],
    "reshape, permute, iterated": lambda y: list(y.reshape(2, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)),
    "transposed": lambda y: y.transpose(1, 2).contiguous().chunk(3, 1),
    "split_with_sizes": lambda y: y.split_with_sizes([4, 4, 4], -1),
    "hsplit": lambda y: y.transpose(1, 2).hsplit(3),
    "unfold": lambda y: y.unfold(-1, 4, 4),
    "mT": lambda y: y.mT.chunk(3, 1),
    "index tensor": lambda y: y[..., torch.arange(4, 8)],
    "list": lambda y: y[:, :, [0, 1, 2, 3]],
    "mask": lambda y: y[..., torch.arange(12) < 4],
    "index_select": lambda y: y.index_select(-1, torch.arange(4)),
    "gather": lambda y: y.gather(-1, torch.arange(4).expand(2, 5, 4)),
    "take_along_dim": lambda y: y.take_along_dim(torch.arange(4)[None, None], -1),
    "as_strided": lambda y: y.as_strided((2, 5, 4), (60, 12, 1)),
    "scaled": lambda y: (2 * y).chunk(3, -1),
    "activation": lambda y: nn.functional.gelu(y + torch.ones(12)).chunk(3, -1),
    "in place": lambda y: torch.ones(2, 5, 12).mul(y).add_(1).relu_()[..., :4],
    "dtype": lambda y: y.bfloat16().to(torch.float64).split(4, -1),
}
NOT_TAKEN_APART = {
    "as it is": lambda y: y.relu(),
    "heads": lambda y: y.view(2, 5, 3, 4).transpose(1, 2) @ torch.ones(4, 4),
    "by heads": lambda y: y.view(2, 5, 2, 3, 2).unbind(3),
    "one head": lambda y: y.view(2, 5, 1, 3, 4).unbind(3),
    "every second": lambda y: y[..., ::2] * y[..., 1::2],
    "last token": lambda y: y[:, -1],
    "batch": lambda y: y.chunk(2),
    "head dimension": lambda y: y.view(2, 5, 3, 4)[..., :2],
    "all": lambda y: y[:, :, :],
    "heads by index": lambda y: y.view(2, 5, 3, 4)[:, :, torch.arange(3).repeat_interleave(2)],
    "tokens by index": lambda y: y[:, torch.tensor([0, 1])] + y.index_select(1, torch.arange(2)),
    "tokens by mask": lambda y: y[torch.arange(10).view(2, 5) < 6],
    "every second by index": lambda y: y[..., torch.arange(0, 12, 2)] * y[:, :, [1, 3, 5, 7, 9, 11]],
    "a product": lambda y: (y.relu() @ torch.ones(12, 12)).chunk(3, -1),
    "new dimension": lambda y: y[:, None].expand(2, 3, 5, 12),
}


@check(ranks=2, use=TAKEN_APART)
def a_stack_that_is_taken_apart_is_refused(use: Any) -> None:
    """Unless its parts are given, or it is gathered."""
    x = torch.ones(2, 5, 4)
    with pytest.raises(ValueError, match=r"qkv \(Linear\) looks like a stack of matrices.*parts=3") as caught:
        parallelize_module(Uses(use), mesh(), {"qkv": ColwiseParallel()})(x)
    assert "\n" not in str(caught.value)
    for parts in (1, 3):
        parallelize_module(Uses(use), mesh(), {"qkv": ColwiseParallel(parts=parts)})(x)
    parallelize_module(Uses(use, 12), mesh(), {"qkv": ColwiseParallel(output_layouts=Replicate())})(x)


@check(ranks=2, use=NOT_TAKEN_APART)
def a_name_is_no_evidence_of_a_stack(use: Any) -> None:
    model = parallelize_module(Uses(use), mesh(), {"qkv": ColwiseParallel()})
    first, second = model(torch.ones(2, 5, 4)), model(torch.ones(2, 5, 4))
    torch.testing.assert_close(first, second)
    assert type(model.qkv(torch.ones(2, 5, 4))) is Tensor


@check(ranks=(2, 3))
def a_padding_token_has_no_gradient() -> None:
    for padding in (0, 4, 9):
        torch.manual_seed(0)
        embed = nn.Embedding(10, 4, padding_idx=padding)
        with torch.no_grad():
            embed.weight[padding] = 1.0  # a value, but no gradient
        alone = copy.deepcopy(embed)
        parallelize_module(embed, mesh(), RowwiseParallel(input_layouts=Replicate()))
        tokens = torch.arange(10)
        assert torch.equal(embed(tokens), alone(tokens))
        embed(tokens).sum().backward()
        alone(tokens).sum().backward()
        assert torch.equal(embed.weight.grad.full_tensor(), alone.weight.grad)
        assert embed.padding_idx == padding


@check(ranks=(2, 3))
def a_fused_weight_is_cut_in_each_of_its_parts() -> None:
    torch.manual_seed(0)
    fused = nn.Linear(6, 3 * 12)
    q, k, v = fused.weight.detach().chunk(3)
    parallelize_module(fused, mesh(), ColwiseParallel(parts=3))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.cat([each.chunk(ranks)[rank] for each in (q, k, v)])
    assert torch.equal(fused.weight.to_local().flatten(0, 1), mine)
    x = torch.randn(2, 6)
    expected = x @ mine.T + fused.bias.to_local().flatten()
    torch.testing.assert_close(fused(x), expected)


@check(ranks=2)
def dropout_has_one_mask_on_the_whole_and_another_on_each_part() -> None:
    """And afterwards all ranks draw the same numbers again."""
    torch.manual_seed(0)
    drop, cut_drop = nn.Dropout(), parallelize_module(nn.Dropout(), mesh(), SequenceParallel(use_local_output=True))
    x = torch.ones(2, 50)
    for _ in range(2):
        whole, part, after = drop(x), cut_drop(x), torch.rand(3)
        for mine, equal in ((whole, True), (part, False), (after, True)):
            first = mine.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, mine) or (not equal and dist.get_rank() > 0)
            assert equal or dist.get_rank() == 0 or not torch.equal(first, mine)


@check(ranks=2)
def recomputation_repeats_the_masks() -> None:
    torch.manual_seed(0)
    drop = parallelize_module(nn.Dropout(), mesh(), SequenceParallel(use_local_output=True))
    x = torch.ones(2, 50, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: drop(x) * drop(x) * x, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal((x.grad > 0), (y > 0))
    assert 0 < (y > 0).sum() < y.numel()


@check(ranks=2)
def a_frozen_or_evaluated_model_records_nothing() -> None:
    model = parallelize_module(MLP(), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, comm.record() as log:
            assert model(torch.ones(2, 6)).grad_fn is None
        assert [call.op for call in log] == ["all_reduce"]


class Heads(nn.Module):
    """A norm of the input, one of each head, and a parameter of no layer between two that are parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.head_norm = nn.LayerNorm(6), nn.Linear(6, 12), nn.RMSNorm(3)
        self.scale, self.down = nn.Parameter(torch.ones(3), requires_grad=False), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.head_norm(self.up(self.norm(x)).unflatten(-1, (-1, 3))) * self.scale
        y: Tensor = self.down(torch.tanh(heads).flatten(-2))
        return y


SUMMED = SequenceParallel(sequence_dim=2, use_local_output=True)
OF_HEADS: dict[str, tuple[dict[str, Any], str, bool, str]] = {  # plan, trained parameter, sharded too, what is said
    "summed": ({"head_norm": SUMMED}, "", False, ""),
    "summed, all in the plan": ({"head_norm": SUMMED, "norm": Replicated()}, "", False, ""),
    "summed, FSDP2": ({"head_norm": SUMMED, "norm": Replicated()}, "", True, ""),
    "replicated": ({"head_norm": Replicated()}, "", False, "error: head_norm.weight:"),
    "replicated, FSDP2": ({"head_norm": Replicated()}, "", True, "error: head_norm.weight:"),
    "no style": ({}, "", False, "warning: head_norm.weight:"),
    "no style, FSDP2": ({}, "", True, "warning: head_norm.weight:"),
    "no style, an optimizer of its own": ({}, "head_norm", False, "warning: head_norm.weight:"),
    "no layer": ({"head_norm": SUMMED}, "scale", False, "warning: scale:"),
}


@check(ranks=2, case=OF_HEADS)
def copies_do_not_part_in_silence(case: tuple[dict[str, Any], str, bool, str]) -> None:
    more, trained, is_sharded, said = case
    devices = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Heads()
    alone = copy.deepcopy(model)
    parallelize_module(model, devices["tp"], {**PLAN, **more})
    if is_sharded:
        fully_shard(model, mesh=devices["dp"])
    model.scale.requires_grad_(trained == "scale")
    named = [(name, p) for name, p in model.named_parameters() if trained in name]
    optimizer = torch.optim.SGD([p for _, p in named][:: 1 - 2 * dist.get_rank()], 0.1)  # in another order on each
    x = torch.randn(2, 5, 6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # a warning comes once
            model(x).square().sum().backward()
            if said.startswith("error"):
                with pytest.raises(ValueError, match=said.removeprefix("error: ")) as error:
                    optimizer.step()
                assert "\n" not in str(error.value)
                return
            optimizer.step()
            optimizer.zero_grad()
    if said:
        (warning,) = (str(each.message) for each in caught if "tensor-parallel" in str(each.message))
        assert warning.startswith(said.removeprefix("warning: "))
        return
    assert not caught
    reference = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(2):
        alone(x).square().sum().backward()
        reference.step()
        reference.zero_grad()
    for (name, p), q in zip(named, alone.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor() if isinstance(p, DTensor) else p.data, q.data, msg=name)


@pytest.mark.parametrize(("size", "is_refused"), [(1e-8, False), (1e-3, True)])
def test_a_gradient_that_is_zero_on_paper_is_not_compared(size: float, is_refused: bool) -> None:
    """A bias before a norm has noise for a gradient, and each rank may have its own."""
    same, own = (1.0, 1.0, 0.5), [(size, sign * size, 0.0) for sign in (1, -1)]
    of_ranks = [{(0, "weight"): Print(True, same, same), (0, "bias"): Print(True, same, each)} for each in own]
    with pytest.raises(ValueError, match=r"^bias: 2 tensor-parallel ranks") if is_refused else nullcontext():
        report(of_ranks)


def refused_plan() -> Any:
    return parallelize_module(MLP(), mesh(), [ColwiseParallel()])


def refused_mesh() -> Any:
    return parallelize_module(MLP(), init_device_mesh("cpu", (1, 2)), {})


def columns(module: nn.Module, **options: Any) -> Any:
    return lambda: parallelize_module(module, mesh(), ColwiseParallel(**options))


def rows(module: nn.Module) -> Any:
    return lambda: parallelize_module(module, mesh(), RowwiseParallel())


def by_name(module: nn.Module, style: Any) -> None:
    parallelize_module(module, mesh(), {"head": style})


def alone(module: nn.Module, style: Any) -> None:
    parallelize_module(module.head, mesh(), style)


def half_tied(apply: Any) -> nn.Module:
    model = Tied()
    apply(model, ColwiseParallel(output_layouts=Replicate()))
    return model


class Cosine(nn.Linear):
    """Needs all of its features at once."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, nn.functional.normalize(self.weight))


class Wrapped(nn.Embedding):
    """Takes tokens of any size."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens % self.num_embeddings)


def norm_of(module: nn.Module, *shape: int, **options: Any) -> Any:
    def run() -> None:
        parallelize_module(module, mesh(), SequenceParallel(**options))(torch.ones(*shape))

    return run


def unknown_tokens() -> None:
    parallelize_module(nn.Embedding(6, 4), mesh(), RowwiseParallel())(torch.tensor([1, 6]))


def no_such_argument() -> None:
    prepare = PrepareModuleInput(input_kwarg_layouts={"y": Shard(0)}, desired_input_kwarg_layouts={"y": Replicate()})
    parallelize_module(MLP(), mesh(), prepare)


def two_layouts_for_one() -> Any:
    return PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Shard(0))


def one_layout_for_two_inputs() -> None:
    prepare = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    parallelize_module(nn.Bilinear(2, 2, 2), mesh(), prepare)(torch.ones(2, 2), torch.ones(2, 2))


REFUSED = {
    "mesh": (refused_mesh, ValueError, "2 dimensions"),
    "plan": (refused_plan, TypeError, "not a list"),
    "columns": (columns(MLP()), TypeError, "not MLP"),
    "rows": (rows(nn.ReLU()), TypeError, "not ReLU"),
    "norm": (columns(nn.Embedding(4, 4, max_norm=1.0)), ValueError, "max_norm"),
    "sparse": (rows(nn.Embedding(4, 4, sparse=True)), ValueError, "sparse"),
    "parts": (columns(nn.Linear(2, 4), parts=3), ValueError, "3 equal parts"),
    "tied": (
        lambda: half_tied(by_name)(torch.arange(10)).sum().backward(),
        ValueError,
        "embed and head share.*two calls, and they stay tied$",
    ),
    "tied, no plan": (lambda: half_tied(alone)(torch.arange(10)).sum().backward(), ValueError, r"\[10, 4\] share"),
    "tied, FSDP2": (lambda: fully_shard(half_tied(by_name), mesh=mesh()), ValueError, "embed and head share"),
    "own forward": (columns(Cosine(4, 4)), ValueError, "Cosine is an nn.Linear with its own forward"),
    "own forward, rows": (rows(Cosine(4, 4)), ValueError, "Cosine is an nn.Linear with its own forward"),
    "own tokens": (rows(Wrapped(4, 4)), ValueError, "Wrapped does not look up the tokens"),
    "own embedding, columns": (columns(Wrapped(4, 4)), ValueError, "Wrapped is an nn.Embedding with its own forward"),
    "attention": (rows(nn.MultiheadAttention(4, 2).out_proj), ValueError, "reads its weight without a call"),
    "spectral": (columns(nn.utils.spectral_norm(nn.Linear(4, 4))), ValueError, "computes its weight from weight_orig"),
    "tokens": (unknown_tokens, IndexError, "tokens from 1 to 6 in an nn.Embedding of 6"),
    "batch norm": (norm_of(nn.BatchNorm1d(4), 2, 4, 4), ValueError, "BatchNorm1d computes statistics of several"),
    "groups": (norm_of(nn.GroupNorm(2, 4), 2, 4, 4), ValueError, "GroupNorm computes statistics of several"),
    "over tokens": (norm_of(nn.LayerNorm((4, 4)), 2, 4, 4), ValueError, "LayerNorm computes statistics of several"),
    "dimension": (norm_of(nn.LayerNorm(4), 2, 4, 4, sequence_dim="1"), TypeError, "give the number of a dimension"),
    "no parts": (columns(nn.Linear(2, 4), parts=0), ValueError, "parts = 0: give the number"),
    "class": (lambda: parallelize_module(MLP(), mesh(), ColwiseParallel), TypeError, "with parentheses"),
    "class by name": (
        lambda: parallelize_module(MLP(), mesh(), {"up": ColwiseParallel}),
        TypeError,
        "with parentheses",
    ),
    "no mesh": (lambda: parallelize_module(MLP(), 2, {}), TypeError, "device_mesh is a int"),
    "argument": (no_such_argument, ValueError, "MLP has no argument 'y'"),
    "gpt": (lambda: parallelize_gpt(MLP(), mesh()), TypeError, "a MLP instead of the course's GPT"),
    "regather": (lambda: parallelize_gpt(MLP(), mesh(), regather=True), ValueError, "without sequence=True"),
    "inner": (lambda: parallelize_module(MLP(), mesh(), SequenceParallel()), ValueError, "has up.weight"),
    "layouts": (two_layouts_for_one, ValueError, "give as many"),
    "names": (lambda: PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)}), ValueError, "differ in"),
    "inputs": (one_layout_for_two_inputs, ValueError, "the module has 2 inputs"),
}


@check(ranks=2, case=REFUSED)
def what_it_does_not_take_is_refused_in_a_line(case: tuple[Any, type[Exception], str]) -> None:
    run, kind, text = case
    with pytest.raises(kind, match=text) as caught:
        run()
    assert "\n" not in str(caught.value)


@check(ranks=2)
def a_refused_embedding_is_as_it_was() -> None:
    """A lookup with max_norm, even a trial one, scales rows of the weight."""
    module = nn.Embedding(4, 4, max_norm=0.1)
    before = module.weight.detach().clone()
    with pytest.raises(ValueError, match="max_norm"):
        rows(module)()
    assert torch.equal(module.weight, before)


@check()
def hooks_that_would_be_lost_are_refused() -> None:
    for kind in ("register_hook", "register_post_accumulate_grad_hook"):
        layer = nn.Linear(4, 4)
        getattr(layer.weight, kind)(lambda _: None)
        with pytest.raises(
            ValueError, match=r"hooks of a parameter \[4, 4\] would be lost: .*after parallelize_module$"
        ):
            parallelize_module(layer, init_device_mesh("cpu", (2,)), ColwiseParallel())


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
