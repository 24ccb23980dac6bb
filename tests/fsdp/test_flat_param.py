"""The flat parameter on any parameters: values, padding, views, bounds, ties, memory, and errors that name names."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from minifsdp import device
from minifsdp.flat_param import FlatParameter, ParamPlaces, find_parameters
from minifsdp.layout import Layout

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CHILDREN = 3


class Spec(NamedTuple):
    """A parameter to make: its shape, how it lies in memory, and which children of the model hold it."""

    shape: tuple[int, ...]
    layout: str
    users: list[int]

    def values(self, dtype: torch.dtype) -> Tensor:
        if self.layout == "transposed":
            return torch.randn(self.shape[::-1]).to(dtype).permute(tuple(reversed(range(len(self.shape)))))
        if self.layout == "strided" and self.shape:
            return torch.randn(*self.shape[:-1], 2 * self.shape[-1]).to(dtype)[..., ::2]
        if self.layout == "offset":
            numel = torch.Size(self.shape).numel()
            return torch.randn(numel + 3).to(dtype)[3:].view(self.shape)
        return torch.randn(self.shape).to(dtype)


specs = st.lists(
    st.builds(
        Spec,
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from(["contiguous", "transposed", "strided", "offset"]),
        st.lists(st.integers(0, CHILDREN - 1), min_size=1, max_size=CHILDREN, unique=True),
    ),
    min_size=1,
    max_size=6,
)
ranks = st.integers(1, 16)
dtypes = st.sampled_from(DTYPES)
examples = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def build(specs: list[Spec], dtype: torch.dtype, requires_grad: bool = True) -> nn.Module:
    model = nn.Module()
    model.children_ = nn.ModuleList(nn.Module() for _ in range(CHILDREN))
    for i, spec in enumerate(specs):
        p = nn.Parameter(spec.values(dtype), requires_grad)
        for user in spec.users:
            model.children_[user].register_parameter(f"p{i}", p)
    return model


def shard_over(params: ParamPlaces, ranks: int) -> list[FlatParameter]:
    """The flat parameter as each of the ranks holds it."""
    return [FlatParameter(params, rank, ranks) for rank in range(ranks)]


def gather(flats: list[FlatParameter]) -> FlatParameter:
    """Rank 0's flat parameter after an all-gather without a network."""
    first = flats[0]
    device.allocate(first.full)
    first.full.copy_(torch.cat([flat.shard.data for flat in flats]))
    return first


@pytest.mark.behaviour(5)
@examples
@given(specs, dtypes, ranks)
def test_shards_are_the_parameters_in_order_and_zeros(specs: list[Spec], dtype: torch.dtype, ranks: int) -> None:
    params = find_parameters(build(specs, dtype))
    flats = shard_over(params, ranks)
    values = torch.cat([p.detach().reshape(-1) for p in params])
    for flat in flats:
        assert flat.numel == values.numel()
        assert 0 <= flat.padding < ranks
        assert flat.layout.numels == [p.numel() for p in params]
        assert flat.shard.shape == ((flat.numel + flat.padding) // ranks,)
        assert flat.shard.dtype == dtype
    together = torch.cat([flat.shard.detach() for flat in flats])
    assert torch.equal(together, torch.cat([values, values.new_zeros(flats[0].padding)]))


@examples
@given(specs, dtypes, ranks)
def test_views_are_the_parameters_once_gathered(specs: list[Spec], dtype: torch.dtype, ranks: int) -> None:
    params = find_parameters(build(specs, dtype))
    flat = gather(shard_over(params, ranks))
    assert len(flat.views) == len(params)
    offset = 0
    for p, view, shape in zip(params, flat.views, flat.layout.shapes, strict=True):
        assert view.shape == shape == p.shape
        assert view.is_contiguous()
        assert torch.equal(view, p)
        assert view.untyped_storage().data_ptr() == flat.full.untyped_storage().data_ptr()
        assert view.storage_offset() == offset
        offset += p.numel()
        view.fill_(7)
    assert torch.equal(flat.full[: flat.numel], torch.full_like(flat.full[: flat.numel], 7))
    assert torch.equal(flat.padding_of(flat.full), torch.zeros(flat.padding, dtype=dtype))
    device.free(flat.full)
    assert all(view.untyped_storage().nbytes() == 0 for view in flat.views)


@examples
@given(specs, dtypes, ranks)
def test_unflatten_cuts_any_buffer_of_the_layout(specs: list[Spec], dtype: torch.dtype, ranks: int) -> None:
    flat = FlatParameter(find_parameters(build(specs, dtype)), 0, ranks)
    buffer = torch.arange(flat.numel + flat.padding, dtype=torch.float64)
    pieces = flat.unflatten(buffer)
    assert [piece.shape for piece in pieces] == flat.layout.shapes
    assert torch.equal(torch.cat([*(piece.reshape(-1) for piece in pieces), flat.padding_of(buffer)]), buffer)
    assert all(piece._base is pieces[0]._base for piece in pieces)


@examples
@given(specs, dtypes, ranks)
def test_shard_bounds_tile_each_parameter(specs: list[Spec], dtype: torch.dtype, ranks: int) -> None:
    params = find_parameters(build(specs, dtype))
    flats = shard_over(params, ranks)
    owned = torch.zeros(ranks, flats[0].shard.numel(), dtype=torch.int)
    for index, p in enumerate(params):
        pieces = []
        for rank, flat in enumerate(flats):
            low, high = flats[0].layout.bounds(index, rank)
            assert 0 <= low <= high <= flat.shard.numel()
            pieces.append(flat.shard.detach()[low:high])
            owned[rank, low:high] += 1
        assert torch.equal(torch.cat(pieces), p.detach().reshape(-1))
    assert torch.equal(owned.view(-1), torch.tensor([1] * flats[0].numel + [0] * flats[0].padding, dtype=torch.int))


@pytest.mark.behaviour(4)
@examples
@given(specs, dtypes, ranks)
def test_a_tied_parameter_is_flattened_once_with_every_place(specs: list[Spec], dtype: torch.dtype, ranks: int) -> None:
    model = build(specs, dtype)
    params = find_parameters(model)
    flat = FlatParameter(params, 0, ranks)
    assert list(params) == list(model.parameters())
    assert flat.numel == sum(p.numel() for p in model.parameters())
    assert flat.names == [name for name, _ in model.named_parameters()]
    for p, places in zip(params, flat.places, strict=True):
        assert [place.name for place in places] == [
            name for name, q in model.named_parameters(remove_duplicate=False) if q is p
        ]
        assert all(getattr(place.module, place.attribute) is p for place in places)
        assert all(
            getattr(model.get_submodule(place.name.rpartition(".")[0]), place.attribute) is p for place in places
        )


@pytest.mark.behaviour(6)
@examples
@given(specs, dtypes, ranks, st.booleans())
def test_a_shard_owns_its_memory_and_nothing_else_stays(
    specs: list[Spec], dtype: torch.dtype, ranks: int, requires_grad: bool
) -> None:
    params = find_parameters(build(specs, dtype, requires_grad))
    made: list[tuple[Tensor, str]] = []
    device.buffer_observers.append(lambda buffer, role: made.append((buffer, role)))
    try:
        flats = shard_over(params, ranks)
    finally:
        device.buffer_observers.pop()
    assert [role for _, role in made] == ["unsharded"] * ranks
    before = torch.cat([flat.shard.detach() for flat in flats])
    for (buffer, _), flat in zip(made, flats, strict=True):
        assert buffer is flat.full
        assert flat.full.untyped_storage().nbytes() == 0
        assert flat.shard.untyped_storage().nbytes() == flat.shard.numel() * flat.shard.element_size()
        assert isinstance(flat.shard, nn.Parameter)
        assert flat.shard.is_leaf
        assert flat.shard.requires_grad == requires_grad
    with torch.no_grad():
        for p in params:
            p.fill_(9)
    assert torch.equal(torch.cat([flat.shard.detach() for flat in flats]), before)


@pytest.mark.behaviour(2)
def test_find_parameters_leaves_out_what_is_under_skip() -> None:
    model = nn.ModuleDict(
        {
            "left": nn.Linear(2, 2),
            "inner": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)),
            "right": nn.Linear(2, 2),
        }
    )
    model["right"].weight = model["left"].weight
    names = [[place.name for place in places] for places in find_parameters(model, skip=[model["inner"]]).values()]
    assert names == [["left.weight", "right.weight"], ["left.bias"], ["right.bias"]]
    assert [places[0].name for places in find_parameters(model["inner"][0]).values()] == ["weight", "bias"]
    assert find_parameters(nn.BatchNorm1d(3, affine=False)) == {}


def pair(one: nn.Parameter, other: nn.Parameter) -> ParamPlaces:
    model = nn.ModuleDict({"embed": nn.Module(), "head": nn.Module()})
    model["embed"].register_parameter("weight", one)
    model["head"].register_parameter("bias", other)
    return find_parameters(model)


def parameter(dtype: torch.dtype = torch.float32, place: str = "cpu", trained: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.zeros(3, dtype=dtype, device=place), requires_grad=trained)


@pytest.mark.behaviour(3)
@pytest.mark.parametrize(
    ("one", "other", "details"),
    [
        pytest.param(
            parameter(torch.float32),
            parameter(torch.bfloat16),
            ["embed.weight is torch.float32", "head.bias is torch.bfloat16", "the module of head.bias as a unit"],
            id="dtype",
        ),
        pytest.param(
            parameter(torch.float32),
            parameter(torch.int32, trained=False),
            ["embed.weight is torch.float32", "head.bias is torch.int32"],
            id="an integer among floats",
        ),
        pytest.param(
            parameter(),
            parameter(place="meta"),
            ["embed.weight is on cpu", "head.bias on meta", "device_id"],
            id="device",
        ),
        pytest.param(parameter(), parameter(trained=False), ["head.bias is frozen, embed.weight is not"], id="frozen"),
        pytest.param(parameter(trained=False), parameter(), ["embed.weight is frozen, head.bias is not"], id="trained"),
        pytest.param(
            parameter(torch.int64, trained=False),
            parameter(torch.int64, trained=False),
            ["embed.weight is torch.int64"],
            id="integer",
        ),
    ],
)
def test_an_error_starts_as_torch_s_does_and_names_the_parameters(
    one: nn.Parameter, other: nn.Parameter, details: list[str]
) -> None:
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    with pytest.raises(ValueError, match="flatten") as torch_s:
        FlatParamHandle._validate_tensors_to_flatten(SimpleNamespace(_use_orig_params=False), [one, other])
    with pytest.raises(ValueError, match="^" + re.escape(str(torch_s.value))) as ours:
        FlatParameter(pair(one, other), 0, 2)
    assert all(detail in str(ours.value) for detail in details), str(ours.value)
    assert "\n" not in str(ours.value)


def test_nothing_to_flatten_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^Expects non-empty `params`"):
        FlatParameter({}, 0, 2)


@pytest.mark.parametrize(("ranks", "alignment", "kernels"), [(1, 1, 0), (4, 1, 1), (1, 4, 1), (4, 4, 2)])
def test_only_gaps_that_are_there_are_cleared(ranks: int, alignment: int, kernels: int) -> None:
    layout = Layout.of([torch.empty(3, 2), torch.empty(8), torch.empty(1)], ranks, alignment=alignment)
    buffer = torch.ones(layout.padded)
    with Count() as counted:
        layout.clear_gaps(buffer)
    assert counted.zeroed == kernels
    assert buffer.sum() == 15


class Count(TorchDispatchMode):
    zeroed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.zeroed += func is torch.ops.aten.zero_.default
        return func(*args, **(kwargs or {}))
