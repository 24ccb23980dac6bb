"""What has memory and no values is named before the first forward, on all ranks, however it is allocated."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from minifsdp import checkpoint, fsdp2, unwritten
from minifsdp.ddp import DistributedDataParallel as Ddp
from minifsdp.following import Unwritten, marking, watch
from minifsdp.fsdp import FullyShardedDataParallel as Fsdp
from minifsdp.fsdp import MixedPrecision
from minifsdp.pipeline import materialize, parameters_on_meta
from minifsdp.tensor_parallel import ColwiseParallel, parallelize_module
from minifsdp.unwritten import is_unwritten, mark_unwritten

check = Checks(__name__)


class Rotary(nn.Module):
    """Buffers of several dtypes, of which no state dict has any."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv", 1.0 / 10 ** torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("count", torch.tensor(3), persistent=False)
        self.register_buffer("code", torch.tensor([7, 8], dtype=torch.uint8), persistent=False)
        self.register_buffer("none", torch.empty(0, 3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inv.sum() * self.mask.sum() * self.count * self.code.sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.rot = Rotary()
        self.register_buffer("ones", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.rot(self.a(x)) * self.ones.sum()


def same() -> Net:
    """One model on all ranks."""
    torch.manual_seed(5)
    return Net()


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def by_fsdp2(model: Net) -> Any:
    fsdp2.fully_shard(model.a)
    return fsdp2.fully_shard(model).to_empty(device="cpu")


def units_alone(model: Net) -> Any:
    """The model itself, with its buffer, is nobody's."""
    for child in model.children():
        fsdp2.fully_shard(child)
    model.to_empty(device="cpu")
    model.ones.fill_(1)
    return model


def sharded(model: Net) -> Any:
    fsdp2.fully_shard(model.a)
    return fsdp2.fully_shard(model)


def parallel(model: Net) -> Net:
    mesh = init_device_mesh("cpu", (2,))
    return parallelize_module(model, mesh, {"a": ColwiseParallel(output_layouts=Replicate())})  # type: ignore[return-value]


def by_fsdp1(model: Net, **options: Any) -> Any:
    init = lambda module: module.to_empty(device="cpu", recurse=False)  # noqa: E731
    return Fsdp(model, auto_wrap_policy={nn.Linear}, param_init_fn=init, **options)


def with_originals(model: Net) -> Any:
    return by_fsdp1(model, use_orig_params=True)


def in_low_precision(model: Net) -> Any:
    return by_fsdp1(model, mixed_precision=MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16))


def allocated_by_hand(model: Net) -> Any:
    def init(module: nn.Module) -> None:
        for table in (module._parameters, module._buffers):
            for name, t in table.items():
                made = torch.empty(t.shape, dtype=t.dtype)
                table[name] = nn.Parameter(made) if isinstance(t, nn.Parameter) else made

    return Fsdp(model, auto_wrap_policy={nn.Linear}, param_init_fn=init)


WRAPS = {
    **{"fsdp2": by_fsdp2, "fsdp1": by_fsdp1, "originals": with_originals},
    **{"low": in_low_precision, "by hand": allocated_by_hand},
}


def load(model: Any, source: nn.Module) -> None:
    checkpoint.set_model_state_dict(
        model, source.state_dict(), options=checkpoint.StateDictOptions(full_state_dict=True)
    )


ROT = ("rot.inv", "rot.mask", "rot.count", "rot.code")
X = torch.ones(2, 6)


def named(model: Any, x: Tensor = X) -> list[str]:
    """What the forward's refusal names, the same on all ranks; twice, as it may be tried again."""
    texts = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            model(x)
        texts.append(str(error.value))
    assert texts[0] == texts[1]
    assert "\n" not in texts[0]
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, texts[0])
    assert said == said[:1] * len(said)
    return texts[0].removeprefix("nothing has initialized ").partition(":")[0].split(", ")


def computes_as(model: Any, expected: nn.Module, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(model(X).float(), expected(X), rtol=tolerance, atol=tolerance)


@check(wrap=WRAPS)
def all_that_has_no_values_is_named(wrap: Callable[[Net], Any]) -> None:
    assert sorted(named(wrap(on_meta()))) == sorted(["a.weight", "a.bias", "ones", *ROT])


@check(wrap=WRAPS, behaviour=12)
def a_state_dict_leaves_the_buffers_that_it_has_not(wrap: Callable[[Net], Any]) -> None:
    model, source = wrap(on_meta()), same()
    load(model, source)
    assert named(model) == list(ROT)
    rot = model.rot
    for name, value in source.rot.named_buffers():
        getattr(rot, name).copy_(value)
    computes_as(model, source, 0.5 if wrap is in_low_precision else 1e-5)


@check()
def units_of_an_unsharded_model_are_checked_one_by_one() -> None:
    model = units_alone(on_meta())
    assert named(model) == ["a.weight", "a.bias"]
    load(model.a, same().a)
    assert named(model) == list(ROT)


@check()
def what_is_in_no_unit_is_checked_with_the_first() -> None:
    model = on_meta()
    fsdp2.fully_shard(model.a)
    nn.Sequential(model).to_empty(device="cpu")
    load(model.a, same().a)
    assert sorted(named(model)) == sorted(["ones", *ROT])
    by_data(model.rot, Rotary())
    model.ones.fill_(1)
    computes_as(model, same())


@check(recurse=(True, False))
def to_empty_module_by_module_is_seen_as_a_whole(recurse: bool) -> None:
    model = on_meta()
    fsdp2.fully_shard(fsdp2.fully_shard(model.a) and model)
    for module in model.modules() if not recurse else (*model.children(), model):
        module.to_empty(device="cpu", recurse=module is not model and recurse)
    load(model, same())
    assert named(model) == list(ROT)


@check(wrap=(sharded, Fsdp, Ddp, parallel), forgets=(True, False))
def to_empty_before_wrapping_is_seen(wrap: Callable[[Net], Any], forgets: bool) -> None:
    model = on_meta().to_empty(device="cpu")
    model.load_state_dict(same().state_dict())
    if not forgets:
        by_data(model.rot, Rotary())
    wrapped = wrap(model)
    if forgets:
        assert [name.removeprefix("module.") for name in named(wrapped)] == list(ROT)
    else:
        computes_as(wrapped, same())


@check(forgets=(True, False), copied=(True, False))
def ddp_checks_what_it_wraps(forgets: bool, copied: bool) -> None:
    model = copy.deepcopy(Ddp(Net())) if copied else Ddp(Net())
    model.to_empty(device="cpu")
    model.module.load_state_dict(same().state_dict())
    if forgets:
        assert named(model) == [f"module.{name}" for name in ROT]
    if dist.get_rank() == 0:  # the others get the buffers in forward
        by_data(model.module.rot, Rotary())
    computes_as(model, same())


@check()
def one_rank_alone_may_evaluate_with_ddp() -> None:
    model: Any = Ddp(nn.Linear(6, 6)).eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(X)


@check(rank=(0, 1, None))
def ddp_names_what_is_on_meta(rank: int | None) -> None:
    model: nn.Module = on_meta() if rank in (None, dist.get_rank()) else Net()
    with pytest.raises(RuntimeError, match=r"parameter a\.weight.* on meta") as error:
        Ddp(model)
    assert ("finds" in str(error.value)) == (rank is not None)


@check()
def tensor_parallelism_checks_before_the_first_forward() -> None:
    model = parallel(on_meta())
    with pytest.raises(RuntimeError, match="are on meta"):
        model(X)
    model.to_empty(device="cpu")
    assert sorted(named(model)) == sorted(["a.weight", "a.bias", "ones", *ROT])
    load(model, same())
    assert named(model) == list(ROT)
    if dist.get_rank() == 0:
        by_data(model.rot, Rotary())
    assert named(model) == list(ROT)
    by_data(model.rot, Rotary())
    computes_as(model, same())
    assert not model._forward_pre_hooks


@check()
def parallel_parts_are_named_by_their_place() -> None:
    model = nn.Sequential(parallel(on_meta()))
    model.to_empty(device="cpu")
    load(model[0], same())
    assert named(model) == [f"0.{name}" for name in ROT]


@check()
def inner_units_of_fsdp1_are_named_by_their_place() -> None:
    model: Any = nn.Sequential(by_fsdp1(on_meta()))
    model[0].load_state_dict(same().state_dict())
    assert named(model) == [f"0.{name}" for name in ROT]


def by_data(rot: Any, good: Any) -> None:
    for name, value in good.named_buffers():
        getattr(rot, name).data.copy_(value)


def by_index(rot: Any, good: Any) -> None:
    for name, value in good.named_buffers():
        getattr(rot, name)[...] = value


def by_assignment(rot: Any, good: Any) -> None:
    for name, value in good.named_buffers():
        setattr(rot, name, value.clone())


def registered_anew(rot: Any, good: Any) -> None:
    for name, value in good.named_buffers():
        rot.register_buffer(name, value.clone(), persistent=False)


def assigned_by_a_state_dict(rot: Any, good: Any) -> None:
    for name, _ in good.named_buffers():
        rot.register_buffer(name, getattr(rot, name))  # persistent from now on
    rot.load_state_dict({name: value.clone() for name, value in good.named_buffers()}, assign=True)


def by_init(rot: Any, good: Any) -> None:
    nn.init.constant_(rot.inv, 1.111 / 4)
    rot.mask.zero_().logical_not_()[1:].fill_(False)
    rot.count.fill_(3)
    torch.add(torch.tensor([3, 4], dtype=torch.uint8), 4, out=rot.code)


def built_again(rot: Any, good: Any) -> None:
    rot.__dict__.update(good.__dict__)


def odd_values(rot: Any, good: Any) -> None:
    """NaN, the least integers and bytes of all kinds may be meant."""
    by_data(rot, good)
    rot.inv.fill_(float("nan"))
    rot.count.fill_(torch.iinfo(torch.int64).min)
    rot.code.fill_(0xA5)


WRITES = (by_data, by_index, by_assignment, registered_anew, assigned_by_a_state_dict, by_init, built_again, odd_values)


@check(wrap={name: WRAPS[name] for name in ("fsdp2", "fsdp1")}, write={f.__name__: f for f in WRITES})
def values_may_come_in_any_way(wrap: Callable[[Net], Any], write: Callable[[Any, Any], None]) -> None:
    model, source = wrap(on_meta()), same()
    load(model, source)
    write(model.rot, Rotary())
    if write is odd_values:
        assert model(X).isnan().all()
    else:
        computes_as(model, source)


@check(wrap={name: WRAPS[name] for name in ("fsdp2", "fsdp1")})
def one_rank_s_gap_is_every_rank_s_error(wrap: Callable[[Net], Any]) -> None:
    model = wrap(on_meta())
    load(model, same())
    by_data(model.rot, Rotary())
    if dist.get_rank() == 1:
        mark_unwritten(model.rot.inv[2:3])
    assert named(model) == ["rot.inv"]
    model.rot.inv.fill_(1)
    model(X)


@check()
def only_some_ranks_may_come_from_meta() -> None:
    for forgets in (True, False):
        model, source = (Net() if dist.get_rank() == 0 else on_meta()), same()
        fsdp2.fully_shard(model)
        if dist.get_rank():
            model.to_empty(device="cpu")
        load(model, source)
        if forgets:
            assert named(model) == list(ROT)
        else:
            by_data(model.rot, source.rot)
            model(X)


@check()
def a_part_of_a_parameter_is_enough() -> None:
    model = fsdp2.fully_shard(on_meta()).to_empty(device="cpu")
    load(model, same())
    by_data(model.rot, Rotary())
    assert isinstance(model.a.weight, DTensor)
    if dist.get_rank() == 0:
        mark_unwritten(model.a.weight.to_local()[0, :1])
    assert named(model) == ["a.weight"]


@check()
def what_is_still_on_meta_is_named() -> None:
    model = fsdp2.fully_shard(on_meta())
    everything = r"from meta device .*: a\.weight, a\.bias, ones, rot\.inv, .* are on meta\. Call model\.to_empty"
    with pytest.raises(RuntimeError, match=everything):
        model(X)
    model.a.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"FSDP buffers .*: to_empty.. would discard the parameters' values"):
        model(X)


@check()
def memory_of_a_later_to_empty_is_seen_too() -> None:
    model = fsdp2.fully_shard(Net())
    model(X)
    model.to_empty(device="cpu")
    assert sorted(named(model)) == sorted(["a.weight", "a.bias", "ones", *ROT])
    load(model, same())
    by_data(model.rot, Rotary())
    model(X)


@check(original=(False, True))
def to_empty_of_a_wrapped_module_is_seen(original: bool) -> None:
    model: Any = Fsdp(same(), use_orig_params=original).to_empty(device="cpu")
    assert sorted(named(model)) == sorted(["a.weight", "a.bias", "ones", *ROT])
    load(model, same())
    by_data(model.module.rot, Rotary())
    model.module.ones.fill_(1)
    computes_as(model, same())


@check()
def what_is_cast_in_between_is_still_unwritten() -> None:
    for dtype in (torch.bfloat16, torch.float64, torch.float16):
        model = fsdp2.fully_shard(on_meta()).to_empty(device="cpu").to(dtype)
        assert sorted(named(model, X.to(dtype))) == sorted(["a.weight", "a.bias", "ones", *ROT])


def of_each(change: Callable[[Tensor], Any]) -> Callable[[Any], None]:
    """A function that puts what it returns for a buffer into its place."""

    def change_all(rot: Any) -> None:
        for name, buffer in list(rot.named_buffers()):
            setattr(rot, name, change(buffer))

    return change_all


def inverted(t: Tensor) -> Tensor:
    return -t if t.is_floating_point() else ~t


def inverted_in_place(t: Tensor) -> Tensor:
    return t.neg_() if t.is_floating_point() else t.bitwise_not_()


def added_to(t: Tensor) -> Tensor:
    return t.logical_not_() if t.dtype is torch.bool else t.add_(1)


COPIES: dict[str, Callable[[Any], Any]] = {
    "clone": of_each(torch.clone),
    "deepcopy": of_each(copy.deepcopy),
    "cast and back": of_each(lambda t: t.to(torch.bfloat16).to(t.dtype)),
    "integers and back": of_each(lambda t: t.int().to(t.dtype)),
    "copied to": of_each(lambda t: torch.zeros_like(t).copy_(t)),
    "inverted": of_each(inverted),
    "inverted in place": of_each(inverted_in_place),
    "added to": of_each(added_to),
    "apply": lambda rot: rot._apply(torch.clone),
    "child": lambda rot: rot.to(torch.bfloat16).to(torch.float32),
    "view": lambda rot: [b.view(-1).data.neg_() for b in rot.buffers() if b.dtype is not torch.bool],
}


@check(wrap={name: WRAPS[name] for name in ("fsdp2", "fsdp1")}, copy=COPIES)
def what_is_computed_from_unwritten_memory_is_unwritten(wrap: Callable[[Net], Any], copy: Callable[[Any], Any]) -> None:
    model = wrap(on_meta())
    load(model, same())
    copy(model.rot)
    counts = [COPIES[name] for name in ("inverted in place", "added to", "copied to", "deepcopy")]
    assert named(model) == list(ROT[:3] if copy in counts else ROT)  # a write, where all values of a byte may be meant
    by_data(model.rot, Rotary().to(model.rot.inv.dtype))
    model(X)
    assert {type(b) for b in model.buffers()} == {Tensor}


@check()
def what_is_computed_inside_param_init_fn_is_unwritten_too() -> None:
    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        if isinstance(module, Rotary):
            module.inv = torch.empty(4).double().neg()
            module.mask = torch.empty(2).bool()
            module.count = torch.Tensor(1)[0].long() + 1
            module.code = torch.empty(2, dtype=torch.bool).to(torch.uint8)

    model = Fsdp(on_meta(), auto_wrap_policy={nn.Linear}, param_init_fn=init)
    load(model, same())
    assert named(model) == list(ROT)


@check()
def a_cast_of_a_child_alone_loses_nothing() -> None:
    model = by_fsdp2(on_meta())
    model.a.to(torch.bfloat16)
    assert named(model)[:2] == ["a.weight", "a.bias"]


class Cached(nn.Module):
    """Writes to its cache before it reads it, and has a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.unused = nn.Parameter(torch.empty(2))
        self.register_buffer("cache", torch.empty(2, 6), persistent=False)

    def forward(self, x: Tensor) -> Any:
        self.cache.copy_(x)
        return self.a(self.cache)


@check()
def what_is_not_read_needs_values_once() -> None:
    with torch.device("meta"):
        model: Any = Cached()
    fsdp2.fully_shard(model).to_empty(device="cpu")
    model.a.reset_parameters()
    with pytest.raises(RuntimeError, match=r"initialized unused, cache: .* or zero_\(\) what is not used, or not read"):
        model(X)
    nn.init.zeros_(model.unused)
    model.cache.zero_()
    model(X)


def test_what_has_been_written_is_a_plain_tensor() -> None:
    model = nn.Sequential(Rotary())
    watch(model)
    model.to_empty(device="cpu")
    rot: Any = model[0]
    assert {type(b) for b in rot.buffers() if b.numel()} == {Unwritten}
    assert type(torch.ones_like(rot.mask)) is Tensor
    assert type(rot.mask.shape) is torch.Size
    assert "tensor" in repr(rot.mask)
    assert type(rot.mask.float()) is Unwritten
    assert type(pickle.loads(pickle.dumps(rot.mask))) is Tensor
    rot.mask[0] = True
    assert is_unwritten(rot.mask)
    rot.mask[1:] = False
    assert type(rot.mask) is Tensor
    rot.inv.numpy()[:] = 1
    assert rot.inv.sum() == 4
    assert type(rot.inv) is Tensor
    rot.count.data = torch.tensor(3)
    assert type(rot.count) is Tensor


@check()
def no_forward_but_the_first_looks() -> None:
    model = fsdp2.fully_shard(on_meta()).to_empty(device="cpu")
    load(model, same())
    by_data(model.rot, Rotary())
    model(X)
    looks = []
    original = unwritten.unwritten_in
    unwritten.unwritten_in = lambda tensors: looks.append(tensors) or original(tensors)  # type: ignore[func-returns-value]
    try:
        model(X)
    finally:
        unwritten.unwritten_in = original
    assert not looks


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)


# Without ranks


def test_modules_of_others_stay_as_they_are() -> None:
    """Their memory has a mark from `to_empty`, as it may be sharded later, but nothing follows it."""
    for model in (Net().to_empty(device="cpu"), on_meta().to_empty(device="cpu")):
        assert {type(t) for t in model.buffers()} == {Tensor}
        assert all(map(is_unwritten, model.state_dict().values()))
    seen = unwritten.marks
    Net().double().half()
    assert unwritten.marks == seen


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn),
        *(torch.int64, torch.int32, torch.int16, torch.uint16, torch.int8, torch.uint8, torch.bool),
    ],
)
def test_every_dtype_has_a_mark(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    with marking():
        made = [torch.empty(shape, dtype=dtype), torch.empty_like(torch.ones(shape, dtype=dtype, device="meta"))]
    assert is_unwritten(made[0])
    assert made[1].is_meta
    assert is_unwritten(nn.Parameter(made[0], requires_grad=False))
    made[0].copy_(torch.ones(shape))
    assert not is_unwritten(made[0])
    values = [float("nan"), -float("inf")] if dtype.is_floating_point else [0, 1]
    assert not is_unwritten(torch.tensor(values).to(dtype))


def test_no_nan_that_arithmetic_gives_is_a_mark() -> None:
    """CUDA's NaN has all bits set but the sign, torch's casts to bfloat16 on CPU set that too."""
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16)):
        largest = torch.iinfo(bits).max
        infinity = int(torch.tensor(torch.inf, dtype=dtype).view(bits))
        quiet = infinity + round(0.5 / torch.finfo(dtype).eps)
        found = torch.tensor([largest, -1, quiet, quiet + torch.iinfo(bits).min, infinity + 1], dtype=bits).view(dtype)
        assert found.isnan().all()
        assert not is_unwritten(found)
    for dtype in (torch.float32, torch.float64, torch.complex64):
        assert is_unwritten(-mark_unwritten(torch.empty(2, dtype=dtype)))


def test_a_stage_of_a_pipeline_has_all_its_values() -> None:
    whole = Net().state_dict()
    with parameters_on_meta():
        model = Net()
    materialize(model, "cpu", whole)
    with pytest.raises(RuntimeError, match=r"nothing has initialized rot\.inv, rot\.mask, rot\.count, rot\.code: "):
        materialize(on_meta(), "cpu", whole)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        if isinstance(module, Rotary):
            by_data(module, Rotary())

    with pytest.raises(RuntimeError, match=r"nothing has initialized ones: "):
        materialize(on_meta(), "cpu", init)

    def allocate(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    with pytest.raises(RuntimeError, match=r"initialized ones, rot\.inv, rot\.mask, rot\.count, rot\.code: "):
        materialize(on_meta(), "cpu", allocate)
