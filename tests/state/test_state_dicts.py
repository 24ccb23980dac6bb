"""State dicts of each type: what is in them, whose memory it is, and who can load them."""

from __future__ import annotations

import itertools
import re
import warnings
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import Checks, shared_folder
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Torchs
from torch.distributed.fsdp import LocalStateDictConfig as TorchsLocalStateDictConfig
from torch.distributed.fsdp import ShardedStateDictConfig as TorchsShardedStateDictConfig
from torch.distributed.fsdp import StateDictType as TorchsStateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchsPolicy
from torch.distributed.tensor import DTensor

from minifsdp import comm
from minifsdp.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from minifsdp.instruments.launch import launch

check = Checks(__name__)

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, _ = ShardingStrategy
FULL, LOCAL, SHARDED = StateDictType
CPU = torch.device("cpu")

Fsdp = FullyShardedDataParallel
type_is = FullyShardedDataParallel.state_dict_type


class Inner(nn.Module):
    """Dimensions that two and three ranks do not divide, one weight under two names, buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.same = nn.Linear(3, 5), nn.Linear(3, 5, bias=False)
        self.same.weight = self.up.weight
        self.norm = nn.BatchNorm1d(5)
        self.down = nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.randn(1))
        self.register_buffer("wide", torch.ones(2, dtype=torch.float64))
        self.register_buffer("scratch", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x) + self.same(x))) * self.gain


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 3), Inner(), nn.Linear(3, 2)
        self.register_buffer("mask", torch.ones(3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x) * self.mask))


def plain(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def sharded(seed: int = 0, **options: Any) -> Fsdp:
    return Fsdp(plain(seed), auto_wrap_policy={Inner}, **options)


def train_a_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(4, 4)).float().square().sum().backward()
    optimizer.step()


def mesh(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes)


def assert_same(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert type(state[name]) is Tensor, name
        assert state[name].dtype == value.dtype, name
        assert torch.equal(state[name], value), name


def bytes_unsharded(model: nn.Module) -> list[int]:
    return [m._unit.flat.full.untyped_storage().nbytes() for m in Fsdp.fsdp_modules(model) if m._unit is not None]


KINDS = {
    "full_shard": {},
    "shard_grad_op": {"sharding_strategy": SHARD_GRAD_OP},
    "no_shard": {"sharding_strategy": NO_SHARD},
    "original": {"use_orig_params": True},
    "original_no_shard": {"use_orig_params": True, "sharding_strategy": NO_SHARD},
    "offloaded": {"cpu_offload": CPUOffload(True)},
    "mixed": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)},
    "mixed_original_offloaded": {
        "mixed_precision": MixedPrecision(torch.bfloat16, buffer_dtype=torch.float16),
        "use_orig_params": True,
        "cpu_offload": CPUOffload(True),
    },
    "mixed_no_shard": {"mixed_precision": MixedPrecision(torch.bfloat16), "sharding_strategy": NO_SHARD},
}


# FULL


@check(behaviour=39, options=KINDS)
def a_state_dict_past_the_wrapper_is_refused_where_it_would_be_of_shards(options: dict[str, Any]) -> None:
    """`model.module.state_dict()`, and what calls it inside, as `model.save_pretrained(path)`."""
    model = sharded(**options)
    model.module.save_pretrained = lambda: model.module.state_dict()
    is_whole = {"use_orig_params", "sharding_strategy"} <= options.keys()
    refused = partial(pytest.raises, RuntimeError, match=r"holds shards.*call state_dict\(\) on the FSDP .*dict=")
    up = model.inner.module.up
    for read in (model.module.state_dict, model.save_pretrained, up.state_dict):
        for _ in range(2):
            with nullcontext() if is_whole else refused():
                state = read()
        with Fsdp.summon_full_params(model, writeback=False):
            state = read()
            assert_same(state, plain().inner.up.state_dict() if read == up.state_dict else plain().state_dict())
    with comm.record() as log, suppress(RuntimeError):
        model.module.state_dict()
    assert log == []  # it is refused before the units inside gather
    assert_same(model.state_dict(), plain().state_dict())
    assert_same(nn.Sequential(model).state_dict(), plain().state_dict(prefix="0."))
    for kind in (SHARDED, LOCAL):
        with type_is(model, kind):
            model.state_dict()
    with type_is(model, FULL, FullStateDictConfig(rank0_only=True)):
        model.state_dict()
    with nullcontext() if is_whole else refused():
        model.module.state_dict()


@check()
def an_error_in_a_state_dict_leaves_the_refusal_in_place() -> None:
    model = sharded()
    handle = model.inner.module.register_state_dict_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.state_dict()
    handle.remove()
    with pytest.raises(RuntimeError, match="holds shards"):
        model.inner.module.state_dict()
    assert_same(model.state_dict(), plain().state_dict())


@check(behaviour=(33, 39), options=KINDS)
def the_full_state_is_the_plain_model_s(options: dict[str, Any]) -> None:
    """In fp32, buffers included, before the first forward and after it, when buffers have been cast."""
    model = sharded(**options)
    assert_same(model.state_dict(), plain().state_dict())
    assert_same(model.state_dict(prefix="x.y."), plain().state_dict(prefix="x.y."))
    with torch.no_grad():
        model.eval()(torch.randn(4, 4))
    precision = options.get("mixed_precision", MixedPrecision())
    assert model.inner.wide.dtype == (precision.buffer_dtype or torch.float64)
    assert model.inner.norm.running_mean.dtype == torch.float32  # a batch norm keeps its precision
    assert_same(model.state_dict(), plain().state_dict())
    assert not any(value.requires_grad for value in model.state_dict().values())
    assert type(model.state_dict(keep_vars=True)["first.weight"]) is Tensor
    with pytest.warns(FutureWarning, match="Positional args are being deprecated"):
        assert_same(model.state_dict(None, "x.y."), plain().state_dict(prefix="x.y."))


@check(behaviour=41, options=KINDS)
def the_full_state_loads(options: dict[str, Any]) -> None:
    model, saved = sharded(1, **options), plain(0).state_dict()
    model.eval()(torch.randn(4, 4))
    saved["inner.norm.running_mean"].fill_(0.5)
    assert str(model.load_state_dict(saved)) == "<All keys matched successfully>"
    assert_same(model.state_dict(), saved)
    reference = plain(1)
    reference.load_state_dict(saved)
    x = torch.ones(4, 4)
    expected = reference.eval()(x)
    torch.testing.assert_close(
        model.eval()(x).float(), expected, atol=0.1 if "mixed_precision" in options else 0, rtol=0
    )


@check(behaviour=39)
def rank_0_alone_has_the_state_if_wanted() -> None:
    """The other ranks have an empty dict, and never more than one unit whole."""
    for use_orig_params in (False, True):
        model = sharded(use_orig_params=use_orig_params)
        most = 0

        def at_each_call(call: Any, phase: str, model: Fsdp = model) -> Any:
            nonlocal most
            most = max(most, sum(size > 0 for size in bytes_unsharded(model)))
            return nullcontext()

        with type_is(model, FULL, FullStateDictConfig(rank0_only=True, offload_to_cpu=True)), comm.record() as log:
            comm.observers.append(at_each_call)
            state = model.state_dict()
            comm.observers.pop()
        assert [call.op for call in log] == ["all_gather"] * 2
        if dist.get_rank() == 0:
            assert_same(state, plain().state_dict())
            assert most == 2
        else:
            assert state == {}
            assert most == 1
        assert bytes_unsharded(model) == [0, 0]
        outer = nn.Sequential(model, nn.Linear(2, 1))
        with type_is(outer, FULL, FullStateDictConfig(rank0_only=True)):
            names = list(outer.state_dict())
        assert names[-2:] == ["1.weight", "1.bias"]
        assert len(names) == (len(plain().state_dict()) if dist.get_rank() == 0 else 0) + 2


@check(behaviour=39, options=KINDS)
def what_is_offloaded_is_a_copy(options: dict[str, Any]) -> None:
    model = sharded(**options)
    with type_is(model, FULL, FullStateDictConfig(offload_to_cpu=True)):
        state = model.state_dict()
    for name, p in plain().named_parameters(remove_duplicate=False):
        assert state[name].device == CPU
        assert state[name].untyped_storage().nbytes() == p.numel() * 4, name
        state[name].fill_(9)
    assert_same(model.state_dict(), plain().state_dict())


# SHARDED


@check(behaviour=40, options={k: v for k, v in KINDS.items() if "no_shard" not in k})
def a_sharded_state_has_each_rank_s_rows(options: dict[str, Any]) -> None:
    for device_mesh, kind in ((None, ShardedTensor), (mesh(2), DTensor)):
        model = sharded(**options, device_mesh=device_mesh)
        with type_is(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=bool(device_mesh))):
            state = model.state_dict()
        expected = plain().state_dict()
        assert list(state) == list(expected)
        parameters = dict(plain().named_parameters(remove_duplicate=False))
        for name, value in expected.items():
            if name not in parameters:
                assert torch.equal(state[name], value)
                continue
            assert type(state[name]) is kind, name
            assert state[name].size() == value.size()
            assert state[name].dtype == torch.float32
            mine = [*value.chunk(2), value[:0]][dist.get_rank()]
            if kind is DTensor:
                assert torch.equal(state[name].to_local(), mine)
                rows = state[name].to_local()
            else:
                rows = state[name].local_shards()[0].tensor
                assert torch.equal(rows, mine), name
            assert rows.untyped_storage().nbytes() == mine.numel() * 4  # not a piece of all of it
        assert not any(bytes_unsharded(model))


@check(behaviour=40)
def a_sharded_state_is_torch_s() -> None:
    for device_mesh, use_orig_params in itertools.product((None, mesh(2)), (False, True)):
        options = {"device_mesh": device_mesh, "use_orig_params": use_orig_params}
        ours = Fsdp(plain(0), auto_wrap_policy={Inner}, **options)
        theirs = Torchs(plain(0), auto_wrap_policy=TorchsPolicy({Inner}), device_id=CPU, **options)
        with type_is(ours, SHARDED), Torchs.state_dict_type(theirs, TorchsStateDictType.SHARDED_STATE_DICT):
            a, b = ours.state_dict(), theirs.state_dict()
        assert list(a) == list(b)
        for name, value in b.items():
            assert type(a[name]) is type(value), name
            if isinstance(value, ShardedTensor):
                # but for the shards of ranks without rows, which torch leaves out
                mine = a[name].metadata()
                mine.shards_metadata = [shard for shard in mine.shards_metadata if shard.shard_sizes[0]]
                assert mine == value.metadata()
                for x, y in zip(a[name].local_shards(), value.local_shards(), strict=False):
                    assert x.metadata == y.metadata
                    assert torch.equal(x.tensor, y.tensor)
            elif isinstance(value, DTensor):
                assert (a[name].placements, a[name].device_mesh) == (value.placements, value.device_mesh)
                assert torch.equal(a[name].to_local(), value.to_local())
            else:
                assert torch.equal(a[name], value)


@check(behaviour=(40, 41), options=KINDS)
def a_sharded_state_loads(options: dict[str, Any]) -> None:
    """Directly, and through a checkpoint; after a forward that has left something whole; into a plain module too."""
    for device_mesh in (None, mesh(2)):
        model, other = sharded(0, **options, device_mesh=device_mesh), sharded(1, **options, device_mesh=device_mesh)
        third = sharded(2, **options, device_mesh=device_mesh)
        train_a_step(model)
        third(torch.randn(4, 4))
        expected = model.state_dict()
        with type_is(model, SHARDED), type_is(other, SHARDED), type_is(third, SHARDED):
            saved = model.state_dict()
            assert str(other.load_state_dict(saved)) == "<All keys matched successfully>"
            with shared_folder() as directory:
                dcp.save(saved, checkpoint_id=directory)
                wanted = third.state_dict()
                dcp.load(wanted, checkpoint_id=directory)
                third.load_state_dict(wanted)
                alone = plain(3)
                whole = alone.state_dict()
                dcp.load(whole, checkpoint_id=directory, no_dist=True)
                alone.load_state_dict(whole)
        statistics = ("running", "wide", "batches")  # a rank's own
        for loaded in (other.state_dict(), third.state_dict(), alone.state_dict()):
            for name, value in expected.items():
                assert torch.equal(loaded[name], value) or any(word in name for word in statistics), name
        assert bytes_unsharded(other) == bytes_unsharded(model)


@check()
def a_whole_value_in_a_sharded_state_is_taken_and_a_misfit_named() -> None:
    model = sharded(1)
    with type_is(model, SHARDED):
        model.load_state_dict(plain(0).state_dict())
        state = model.state_dict()
        state["inner.down.weight"] = state["inner.up.weight"]
        with pytest.raises(RuntimeError, match=r"size mismatch for inner\.down\.weight"):
            model.load_state_dict(state)
        del state["inner.down.weight"]
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "inner\.down\.weight"\.'):
            model.load_state_dict(state)
        assert str(model.load_state_dict(state, strict=False).missing_keys) == "['inner.down.weight']"
    assert_same(model.state_dict(), plain(0).state_dict())
    assert bytes_unsharded(model) == [0, 0]


# LOCAL


@check(behaviour=40, options={k: v for k, v in KINDS.items() if "no_shard" not in k})
def a_local_state_is_the_flat_shard(options: dict[str, Any]) -> None:
    model, other = sharded(0, **options), sharded(1, **options)
    with type_is(model, LOCAL), type_is(other, LOCAL), comm.record() as log:
        saved = model.state_dict()
        units = ["_flat_param", "inner._flat_param", *["inner.norm._flat_param"] * ("mixed_precision" in options)]
        assert sorted(saved) == sorted([*units, *dict(plain().named_buffers()).keys() - {"inner.scratch"}])
        flat = saved["_flat_param"]
        assert flat.size() == (model._unit.flat.numel,)
        assert flat.local_shards()[0].tensor.data_ptr() == model._unit.flat.shard.data_ptr()
        before = [p.data_ptr() for p in other.parameters()]
        assert str(other.load_state_dict(saved)) == "<All keys matched successfully>"
        assert [p.data_ptr() for p in other.parameters()] == before
    assert log == []
    assert_same(other.state_dict(), plain().state_dict())


@check()
def what_a_user_has_put_in_place_of_data_is_in_every_state() -> None:
    for kind in (FULL, SHARDED, LOCAL):
        model, other = sharded(0, use_orig_params=True), sharded(1, use_orig_params=True)
        for p in model.parameters():
            p.data = torch.full_like(p, 7)
        with type_is(model, kind), type_is(other, kind):
            other.load_state_dict(model.state_dict())
        state = other.state_dict()
        assert all((state[name] == 7).all() for name, _ in plain().named_parameters())


@check()
def what_a_local_state_cannot_be_is_an_error() -> None:
    model = sharded()
    with type_is(model, LOCAL):
        with pytest.raises(
            AssertionError, match="No `FlatParameter` in `state_dict` for this FSDP instance but it has"
        ):
            model.load_state_dict(plain().state_dict())
        state = model.state_dict()
        with pytest.raises(AssertionError, match=r"Tensors in local_state_dict should be ShardedTensor"):
            model.load_state_dict(state | {"_flat_param": torch.zeros(3)})
        with pytest.raises(RuntimeError, match=r"_flat_param has 49 elements, the unit of Model 23: .* same model"):
            model.load_state_dict(state | {"_flat_param": state["inner._flat_param"]})
        alone = Fsdp(plain(), dist.new_group([dist.get_rank()], use_local_synchronization=True))
        wider = Fsdp(nn.Linear(4, 3), sharding_strategy=FULL_SHARD)
        with type_is(wider, LOCAL):
            cut = wider.state_dict()
        cut["_flat_param"].metadata().shards_metadata.pop()
        with (
            pytest.raises(RuntimeError, match=r"of 15 rows is cut into \[8\], but 2 ranks hold \[8, 7\]"),
            type_is(wider, LOCAL),
        ):
            wider.load_state_dict(cut)
        with type_is(alone, LOCAL), pytest.warns(UserWarning, match="When using ``NO_SHARD`` for ``ShardingStrategy``"):
            assert_same(alone.state_dict(), plain().state_dict())
        with Fsdp.summon_full_params(model), pytest.raises(AssertionError, match="leave summon_full_params first"):
            model.state_dict()
    with_mesh = sharded(device_mesh=mesh(2))
    with (
        type_is(with_mesh, LOCAL),
        pytest.raises(RuntimeError, match="DeviceMesh is not compatible with LOCAL_STATE_DICT"),
    ):
        with_mesh.state_dict()


# Which type


@check()
def the_type_is_full_unless_set() -> None:
    model = sharded()
    default = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
    assert Fsdp.get_state_dict_type(model) == default
    assert Fsdp.get_state_dict_type(nn.Linear(2, 2)) == default
    config = ShardedStateDictConfig(offload_to_cpu=True)
    with suppress(ZeroDivisionError), type_is(nn.Sequential(model), SHARDED, config):
        expected = StateDictSettings(SHARDED, config, ShardedOptimStateDictConfig())
        assert [m._settings for m in Fsdp.fsdp_modules(model)] == [expected] * 2
        raise ZeroDivisionError
    assert Fsdp.get_state_dict_type(model) == default
    assert Fsdp.set_state_dict_type(model, LOCAL) == default
    assert Fsdp.get_state_dict_type(model).state_dict_config == LocalStateDictConfig()
    Fsdp.set_state_dict_type(model.inner, SHARDED)
    with pytest.raises(AssertionError, match="All FSDP modules must have the same state dict settings"):
        Fsdp.get_state_dict_type(model)


@check()
def torch_s_types_and_configurations_will_do() -> None:
    model = sharded()
    Fsdp.set_state_dict_type(model, TorchsStateDictType.SHARDED_STATE_DICT, TorchsShardedStateDictConfig(True))
    assert Fsdp.get_state_dict_type(model).state_dict_config == ShardedStateDictConfig(True)
    for wrong in (FullStateDictConfig(), TorchsLocalStateDictConfig()):
        with pytest.raises(
            RuntimeError, match=r"Expected state_dict_config of type .*ShardedStateDictConfig.* but got"
        ):
            Fsdp.set_state_dict_type(model, SHARDED, wrong)
    with pytest.raises(RuntimeError, match="Expected optim_state_dict_config of type"):
        Fsdp.set_state_dict_type(model, SHARDED, None, FullOptimStateDictConfig())
    with pytest.raises(ValueError, match="state_dict_type='sharded'"):
        Fsdp.set_state_dict_type(model, "sharded")


@check()
def what_is_not_sharded_has_a_full_state() -> None:
    model = sharded(sharding_strategy=NO_SHARD)
    for kind in (SHARDED, LOCAL):
        with type_is(model, kind), pytest.warns(UserWarning, match="When using ``NO_SHARD`` for ``ShardingStrategy``"):
            assert_same(model.state_dict(), plain().state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()
    with type_is(model, FULL, FullStateDictConfig(rank0_only=True)):
        assert bool(model.state_dict()) == (dist.get_rank() == 0)


# What else may be in a model


@check(behaviour=45)
def checkpointed_modules_leave_no_trace() -> None:
    """Inside the unit, around it, and around the whole model."""
    expected = plain().state_dict()
    for kind, use_orig_params in itertools.product((FULL, SHARDED, LOCAL), (False, True)):

        def wrap(seed: int, where: str, use_orig_params: bool = use_orig_params) -> nn.Module:
            model = plain(seed)
            if where == "inside":
                model.inner.up = checkpoint_wrapper(model.inner.up)
            inner = model.inner if where != "between" else checkpoint_wrapper(model.inner)
            model.inner = Fsdp(inner, use_orig_params=use_orig_params)
            if where == "outside":
                model.inner = checkpoint_wrapper(model.inner)
            return Fsdp(model, use_orig_params=use_orig_params)

        for where in ("inside", "between", "outside"):
            model, other = wrap(0, where), wrap(1, where)
            assert list(model.state_dict()) == list(expected), where
            with type_is(model, kind), type_is(other, kind):
                assert str(other.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
            assert_same(other.state_dict(), expected)
            assert isinstance(Fsdp.fsdp_modules(model)[1].module, Inner)


def compiled_modules_keep_their_names() -> None:
    """`_orig_mod.` stays, as in a plain model and in torch; `minifsdp.checkpoint` strips it."""
    model, other, reference = plain(0), plain(1), plain(0)
    for m in (model, other, reference):
        m.inner.down = torch.compile(m.inner.down)
    model, other = Fsdp(model, auto_wrap_policy={Inner}), Fsdp(other, auto_wrap_policy={Inner})
    assert_same(model.state_dict(), reference.state_dict())
    with type_is(model, SHARDED), type_is(other, SHARDED):
        other.load_state_dict(model.state_dict())
    assert_same(other.state_dict(), reference.state_dict())


@check()
def what_is_ignored_is_there_and_untouched() -> None:
    for kind in (FULL, SHARDED, LOCAL):
        models = []
        for seed in (0, 1):
            model = plain(seed)
            model.last.double()
            ignored = [model.last.weight, model.last.bias, model.inner.norm.weight]
            values = [p.data_ptr() for p in ignored]
            wrapped = Fsdp(model, auto_wrap_policy={Inner}, ignored_states=ignored)
            models.append(wrapped)
            assert [p.data_ptr() for p in ignored] == values
        model, other = models
        with type_is(model, kind), type_is(other, kind):
            state = model.state_dict()
            assert state["inner.norm.weight"].data_ptr() == model.inner.norm.weight.data_ptr()
            assert state["last.weight"].dtype == torch.float64
            other.load_state_dict(state)
        expected = plain().state_dict() | {f"last.{n}": p.data.double() for n, p in plain().last.named_parameters()}
        assert {k: v.tolist() for k, v in other.state_dict().items()} == {k: v.tolist() for k, v in expected.items()}


@check()
def nothing_warns_of_what_is_deprecated_in_torch() -> None:
    model = sharded()
    for kind in (FULL, SHARDED, LOCAL):
        with type_is(model, kind), warnings.catch_warnings():
            warnings.simplefilter("error")
            model.load_state_dict(model.state_dict())


@check()
def a_sparse_buffer_is_no_obstacle() -> None:
    models = [plain(seed) for seed in (0, 1)]
    for seed, model in enumerate(models):
        model.inner.register_buffer("graph", (torch.eye(2) * seed).to_sparse())
    model, other = (Fsdp(model, auto_wrap_policy={Inner}) for model in models)
    for kind in (FULL, SHARDED, LOCAL):
        with type_is(model, kind), type_is(other, kind):
            model.load_state_dict(other.state_dict())
        assert torch.equal(model.inner.graph.to_dense(), torch.eye(2))


@check()
def hooks_of_the_user_s_are_run() -> None:
    model, seen = sharded(), []
    model.register_state_dict_pre_hook(lambda module, prefix, keep_vars: seen.append(("before", prefix)))
    model.register_state_dict_post_hook(lambda module, state, prefix, meta: seen.append(("after", list(state))))
    model.inner._register_state_dict_hook(lambda module, state, prefix, meta: state.pop(f"{prefix}gain") and None)
    state = model.state_dict()
    assert seen == [("before", ""), ("after", list(state))]
    assert list(state) == [name for name in plain().state_dict() if name != "inner.gain"]


@check()
def inside_forward_and_backward_it_is_refused() -> None:
    model = sharded()
    refused = pytest.raises(AssertionError, match="Cannot manually unshard parameters during forward/backward")
    for hook in (model.last.register_forward_hook, model.last.register_full_backward_hook):

        def save(*_: Any) -> None:
            with refused:
                model.state_dict()
            with refused:
                model.load_state_dict(plain().state_dict())

        handle = hook(save)
        train_a_step(model)
        handle.remove()
    model.state_dict()


@check()
def a_load_that_raises_leaves_everything_sharded() -> None:
    model = sharded()

    def hook(*_: Any) -> None:
        raise ZeroDivisionError

    handle = model.inner.module.register_load_state_dict_pre_hook(hook)
    with pytest.raises(ZeroDivisionError):
        model.load_state_dict(plain(1).state_dict())
    handle.remove()
    assert bytes_unsharded(model) == [0, 0]
    model.load_state_dict(plain(1).state_dict())
    assert_same(model.state_dict(), plain(1).state_dict())


@check()
def a_rank_that_does_not_take_part_is_named() -> None:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIFSDP_ORDER_TIMEOUT", "0.5")
        model = Fsdp(plain(), dist.new_group([0, 1]), auto_wrap_policy={Inner})
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=r"rank 1: nothing in 0.5 s"):
                model.state_dict()
    dist.set_debug_level(before)
    dist.barrier()


# On four ranks


@check(behaviour=(39, 40), ranks=4)
def a_hybrid_model_s_states_are_any_replica_s() -> None:
    whole = plain().state_dict()
    inside, _ = dist.new_subgroups(2)
    across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    for where, use_orig_params in itertools.product(
        ({"device_mesh": mesh(2, 2)}, {"process_group": (inside, across)}), (False, True)
    ):
        options = {"sharding_strategy": HYBRID_SHARD, "use_orig_params": use_orig_params, **where}
        model, other, third = sharded(0, **options), sharded(1, **options), sharded(2, **options)
        assert_same(model.state_dict(), whole)
        with type_is(model, FULL, FullStateDictConfig(rank0_only=True)):
            assert bool(model.state_dict()) == (dist.get_rank() % 2 == 0)
        with type_is(model, SHARDED), type_is(other, SHARDED), type_is(third, SHARDED):
            state = model.state_dict()
            other.load_state_dict(state)
            with shared_folder() as directory:
                dcp.save(state, checkpoint_id=directory)
                wanted = third.state_dict()
                dcp.load(wanted, checkpoint_id=directory)
                third.load_state_dict(wanted)
        assert_same(other.state_dict(), whole)
        assert_same(third.state_dict(), whole)
        if "process_group" in where:
            with type_is(model, LOCAL), type_is(other, LOCAL):
                other.load_state_dict(model.state_dict())
            assert_same(other.state_dict(), whole)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)


# From one number of ranks to another, between torch's FSDP, ours and a plain module


def models(seed: int) -> dict[str, tuple[Any, Any, Any]]:
    """Wrapped models, with the class and the type for a sharded state."""
    ours, theirs = partial(Fsdp, auto_wrap_policy={Inner}), partial(Torchs, auto_wrap_policy=TorchsPolicy({Inner}))
    made: dict[str, tuple[Any, Any, Any]] = {}
    for name, options in (("", {}), (" by mesh", {"device_mesh": mesh(dist.get_world_size())})):
        made[f"ours{name}"] = ours(plain(seed), **options), Fsdp, SHARDED
        theirs_type = TorchsStateDictType.SHARDED_STATE_DICT
        made[f"theirs{name}"] = theirs(plain(seed), device_id=CPU, **options), Torchs, theirs_type
    made["ours, original"] = ours(plain(seed), use_orig_params=True), Fsdp, SHARDED
    return made


def save_all(directory: str) -> dict[str, Any]:
    """Saves sharded, returns full."""
    warnings.simplefilter("ignore")
    full = {}
    for name, (model, fsdp, kind) in models(0).items():
        full[name] = model.state_dict()
        with fsdp.state_dict_type(model, kind):
            dcp.save(model.state_dict(), checkpoint_id=f"{directory}/{name}")
    return full


def load_all(directory: str, full: dict[str, Any], sources: list[str]) -> None:
    warnings.simplefilter("ignore")
    expected = plain(0).state_dict()
    for source in sources:
        for name, (model, fsdp, kind) in models(1).items():
            with fsdp.state_dict_type(model, kind):
                wanted = model.state_dict()
                dcp.load(wanted, checkpoint_id=f"{directory}/{source}")
                model.load_state_dict(wanted)
            assert_same(model.state_dict(), expected), (source, name)
        for name, (model, _, _) in models(2).items():
            model.load_state_dict(full[source])
            assert_same(model.state_dict(), expected), (source, name)
        model = plain(3)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=f"{directory}/{source}", no_dist=True)
        assert_same(state, expected)


@pytest.mark.slow
def test_compiled_modules_keep_their_names() -> None:
    launch(compiled_modules_keep_their_names, 2)


@pytest.mark.behaviour(40, 41)
def test_saved_on_two_ranks_loads_on_three_into_ours_torch_s_and_a_plain_module(tmp_path: Path) -> None:
    full = launch(save_all, 2, str(tmp_path))[0]
    sources = ["ours", "ours by mesh", "ours, original", "theirs", "theirs by mesh"]
    assert sorted(full) == sorted(sources)
    launch(load_all, 3, str(tmp_path), full, sources)


def test_a_local_state_of_another_number_of_ranks_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "rank0.pt")

    def save() -> None:
        model = sharded()
        with type_is(model, LOCAL):
            state = model.state_dict()
        if dist.get_rank() == 0:
            torch.save(state, path)

    def load() -> None:
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=re.escape("world size at save time was 2, but at load time was 3")):
                torch.load(path, weights_only=False)

    launch(save, 2)
    launch(load, 3)
