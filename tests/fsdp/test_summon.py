"""`summon_full_params` and `apply`: whole parameters outside forward and backward, in whose memory, on which ranks."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from minifsdp.fsdp.unit import SHARDED

check = Checks(__name__)

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = ShardingStrategy

Fsdp = FullyShardedDataParallel
summon = FullyShardedDataParallel.summon_full_params
ALREADY = "Cannot manually unshard parameters when already unsharding parameters"
RUNNING = "Cannot manually unshard parameters during forward/backward"


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)
        self.down.bias.requires_grad_(False)
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 3), Inner(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))

    def generate(self, x: Tensor) -> Tensor:
        """A method that calls submodules, not the wrapped model itself."""
        for _ in range(3):
            x = self.first(torch.cat([self.inner(self.first(x)), x[:, :1]], 1)).repeat(1, 2)[:, :4]
        return x


def plain(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def sharded(seed: int = 0, use_orig_params: bool = True, **options: Any) -> Fsdp:
    model = plain(seed)
    if not use_orig_params:
        model.requires_grad_()
    return Fsdp(model, auto_wrap_policy={Inner}, use_orig_params=use_orig_params, **options)


def x() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(dist.get_rank()))


def backward(model: nn.Module) -> None:
    model(x()).float().square().sum().backward()


def units(model: nn.Module) -> list[Any]:
    return [m._unit for m in Fsdp.fsdp_modules(model)]


def whole_bytes(model: nn.Module) -> list[int]:
    return [unit.flat.full.untyped_storage().nbytes() for unit in units(model)]


def assert_same(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(values) == list(expected)
    for name, value in expected.items():
        assert values[name].dtype == value.dtype, name
        assert torch.equal(values[name], value), name


MIXED = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
KINDS = {
    "flat": {"use_orig_params": False},
    "original": {},
    "shard_grad_op": {"sharding_strategy": SHARD_GRAD_OP},
    "no_shard": {"sharding_strategy": NO_SHARD},
    "no_shard_flat": {"sharding_strategy": NO_SHARD, "use_orig_params": False},
    "mixed": {"mixed_precision": MIXED},
    "mixed_flat_offloaded": {"mixed_precision": MIXED, "cpu_offload": CPUOffload(True), "use_orig_params": False},
    "mixed_no_shard": {"mixed_precision": MIXED, "sharding_strategy": NO_SHARD},
    "offloaded": {"cpu_offload": CPUOffload(True)},
}


@check(behaviour=(34, 38), options=KINDS)
def whole_parameters_have_clean_names_and_full_precision(options: dict[str, Any]) -> None:
    """Before the first forward, and after one that has left some whole in another precision."""
    model = sharded(**options)
    for _ in range(2):
        with summon(model, writeback=False):
            assert_same(dict(model.named_parameters()), dict(plain().named_parameters()))
            assert list(dict(model.named_buffers())) == ["inner.mean"]
            for m in (model.module.first, model.inner.module.down):
                assert m.weight is m._parameters["weight"]
                assert m.weight.shape == (m.out_features, m.in_features)
        with torch.no_grad():
            model(x())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward(model)
    optimizer.step()


@check(behaviour=38, options=KINDS)
def changes_stay_with_writeback_alone(options: dict[str, Any]) -> None:
    model = sharded(**options)
    model(x())  # the root stays whole
    stays = {True: True, False: options.get("sharding_strategy") is NO_SHARD}  # no memory but the summoned one
    for writeback, value in ((True, 2.0), (False, 3.0)):
        before = [p.data_ptr() for p in model.parameters()]
        with summon(model, writeback=writeback), torch.no_grad():
            for p in model.parameters():
                p.fill_(value)
        assert [p.data_ptr() for p in model.parameters()] == before
        expected = value if stays[writeback] else 2.0
        assert all((p == expected).all() for name, p in model.state_dict().items() if "mean" not in name)
        reference = plain()
        for p in reference.parameters():
            p.data.fill_(expected)
        with torch.no_grad():
            torch.testing.assert_close(model(x()).float(), reference(x()), rtol=2e-2, atol=0)


@check(behaviour=38, options=KINDS)
def on_rank_0_alone_no_memory_is_held_elsewhere(options: dict[str, Any]) -> None:
    no_shard = options.get("sharding_strategy") is NO_SHARD
    for offload_to_cpu in (False, True) if not no_shard else (False,):
        model = sharded(**options)
        shapes = [p.shape for p in model.parameters()]
        full = [unit.flat.full.numel() * 4 for unit in units(model)]
        with comm.record() as log, summon(model, True, False, rank0_only=True, offload_to_cpu=offload_to_cpu):
            if dist.get_rank() == 0:
                assert_same(dict(model.named_parameters()), dict(plain().named_parameters()))
                if not no_shard:
                    assert whole_bytes(model) == ([0, 0] if offload_to_cpu else full)
            else:
                assert [p.shape for p in model.parameters()] == shapes
                assert whole_bytes(model) == [0, 0]
            dist.barrier()  # all are inside at once
        assert len(log) == (0 if no_shard else 2)
        assert whole_bytes(model) == [0, 0]
        backward(model)


@check(behaviour=38)
def what_is_offloaded_is_other_memory_and_can_be_written_back() -> None:
    for use_orig_params in (False, True):
        model = sharded(use_orig_params=use_orig_params)
        warns = pytest.warns(UserWarning, match="offload_to_cpu=True and rank0_only=False may result in the")
        with warns, summon(model, offload_to_cpu=True), torch.no_grad():
            assert whole_bytes(model) == [0, 0]
            for p in model.parameters():
                assert p.device == torch.device("cpu")
                p.fill_(2)
        assert all((p == 2).all() for name, p in model.state_dict().items() if "mean" not in name)


@check(behaviour=38, options={name: options for name, options in KINDS.items() if options.get("use_orig_params", True)})
def gradients_are_whole_if_wanted(options: dict[str, Any]) -> None:
    model, reference = sharded(**options), plain()
    backward(model)
    with torch.no_grad():
        dict(model.named_parameters())["inner.up.weight"].grad = None  # on this rank, and on the other
    slices = {name: p.grad for name, p in model.named_parameters()}
    for rank in range(2):
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
        (reference(inputs).square().sum() / 2).backward()
    with summon(model, with_grads=True):
        kept = [p.grad for p in model.parameters() if p.grad is not None]
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            if name in ("inner.up.weight", "inner.down.bias"):
                assert p.grad is None, name
                continue
            tolerance = 0.2 if "mixed_precision" in options else 1e-6
            torch.testing.assert_close(p.grad, q.grad, atol=tolerance, rtol=tolerance)
            p.grad.fill_(5)
    assert all((gradient == 5).all() for gradient in kept)  # outside, too
    after = {name: p.grad for name, p in model.named_parameters()}
    assert all(after[name] is slices[name] for name in slices)
    assert all((gradient == 5).all() for gradient in after.values() if gradient is not None)
    with summon(model):
        sharding = options.get("sharding_strategy") is not NO_SHARD
        assert all(p.grad is None for p in model.parameters()) or not sharding
    assert all(p.grad is slices[name] for name, p in model.named_parameters())
    with summon(model, writeback=False, with_grads=True):
        for p in model.parameters():
            if p.grad is not None:
                p.grad = p.grad * 2
    values = [p.grad for p in model.parameters() if p.grad is not None]
    assert all((gradient == 5).all() for gradient in values)
    with summon(model, with_grads=True):
        for p in model.parameters():
            p.grad = None
    assert all(p.grad is None for p in model.parameters())


@check(behaviour=38)
def what_has_no_meaning_is_refused_before_anything_starts() -> None:
    original, flat = sharded(), sharded(use_orig_params=False)
    refusals = [
        (original, {"rank0_only": True}, "writeback=True and rank0_only=True is not supported yet"),
        (sharded(sharding_strategy=NO_SHARD), {"offload_to_cpu": True}, "offload_to_cpu=True and NO_SHARD is not"),
        (flat, {"with_grads": True}, "with_grads=True, use_orig_params=False, offload_to_cpu=False is not supported"),
        (original, {"with_grads": True, "offload_to_cpu": True}, "with_grads=True, use_orig_params=True, offload_to_c"),
    ]
    for model, arguments, text in refusals:
        with comm.record() as log, pytest.raises(NotImplementedError, match=text), summon(model, **arguments):
            pass
        assert log == []


@check(behaviour=38)
def one_inside_another_has_what_the_outer_one_gives() -> None:
    model = sharded()
    with summon(model), comm.record() as log:
        with summon(model), summon(model, writeback=False), summon(model.inner, writeback=False, rank0_only=True):
            model.first.weight.data.fill_(7)
        assert (model.state_dict()["first.weight"] == 7).all()
        assert log == []
        with pytest.raises(AssertionError, match=ALREADY), summon(model, with_grads=True):
            pass
    assert (model.state_dict()["first.weight"] == 7).all()
    for arguments in ({"rank0_only": True}, {}):
        with summon(model, writeback=False, **arguments):
            with pytest.raises(AssertionError, match=ALREADY), summon(model):
                pass
            with pytest.raises(AssertionError, match=ALREADY):
                model.load_state_dict(plain().state_dict())
    with summon(model.inner), summon(model):
        assert model.first.weight.shape == (3, 4)
    assert whole_bytes(model) == [0, 0]


@check(behaviour=38)
def it_is_refused_inside_forward_and_backward() -> None:
    for use_orig_params in (False, True):
        model = sharded(use_orig_params=use_orig_params)
        for register in (model.module.last.register_forward_hook, model.module.last.register_full_backward_hook):

            def hook(*_: Any, model: Fsdp = model) -> None:
                for part in (model, model.inner):
                    with pytest.raises(AssertionError, match=RUNNING), summon(part):
                        pass
                with pytest.raises(ValueError, match=r"expected to be in states .* is TrainingState.FORWARD_BACKW"):
                    model.apply(lambda module: None)

            handle = register(hook)
            backward(model)
            handle.remove()
        backward(model)


@check(behaviour=38)
def an_exception_inside_leaves_everything_sharded() -> None:
    for options in KINDS.values():
        model = sharded(**options)
        before = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(ZeroDivisionError), summon(model):
            raise ZeroDivisionError
        assert [p.data_ptr() for p in model.parameters()] == before
        assert whole_bytes(model) == [0, 0]
        backward(model)
        model.module.last.register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(model)
        with summon(model):  # the backward that has raised is over
            pass
        model.state_dict()


@check(behaviour=(38, 45))
def a_method_of_the_root_s_own_runs_with_its_parameters_summoned() -> None:
    """torch's way to `generate`: the root is whole all the time, units inside when they run."""
    for use_orig_params in (False, True):
        model = sharded(use_orig_params=use_orig_params)
        with summon(model, recurse=False, writeback=False), torch.no_grad():
            assert torch.equal(model.generate(x()), plain().generate(x()))
            assert units(model)[1].state is SHARDED
        backward(model)
        assert whole_bytes(model) == [0, 0]


class Parts(nn.Module):
    """No parameters but those of the units inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 3), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@check(behaviour=38, options={"flat": {"use_orig_params": False}, "original": {"use_orig_params": True}})
def a_forward_inside_computes_with_what_is_whole(options: dict[str, Any]) -> None:
    """Without communication, also where the root has no parameters of its own; with what is not, as ever."""
    make = {"root": lambda: sharded(**options), "none of its own": lambda: Fsdp(parts(**options), **options)}
    for name, reference in (("root", plain()), ("none of its own", Parts())):
        model = make[name]()
        with summon(model, writeback=False), comm.record() as log, torch.no_grad():
            for _ in range(2):
                assert torch.equal(model(x()), reference(x()))
        assert log == []
        with summon(model, recurse=False, writeback=False), torch.no_grad():
            assert torch.equal(model(x()), reference(x()))
        model(x()).sum().backward()


def parts(**options: Any) -> Parts:
    module = Parts().requires_grad_()
    module.a, module.b = Fsdp(module.a, **options), Fsdp(module.b, **options)
    return module


@check(
    behaviour=38,
    options={"flat": {"use_orig_params": False}, "original": {}, "no_shard": {"sharding_strategy": NO_SHARD}},
)
def a_forward_with_what_only_rank_0_has_is_refused_elsewhere(options: dict[str, Any]) -> None:
    """The others would wait for rank 0 in a gather, and rank 0 for them where units inside are not summoned."""
    model = sharded(**options)
    refused = partial(pytest.raises, ValueError, match=r"is TrainingState\.SUMMON_FULL_PARAMS: .*rank0_only")
    with summon(model, writeback=False, rank0_only=True), comm.record() as log, torch.no_grad():
        if dist.get_rank() == 0:
            assert torch.equal(model(x()), plain()(x()))
        for part in (model, model.inner) if dist.get_rank() else ():
            with refused():
                part(x())
    assert log == []
    with summon(model, recurse=False, writeback=False, rank0_only=True), comm.record() as log, refused():
        model(x())
    assert log == []
    backward(model)


@check(options=KINDS)
def a_forward_around_what_is_summoned_is_refused(options: dict[str, Any]) -> None:
    """It would gather and free the summoned unit, and compute with other values than those that are shown."""
    model = sharded(**options)
    for _ in range(2):
        with summon(model.module.inner), pytest.raises(ValueError, match="parameters of Inner are summoned, those of"):
            model(x())
        backward(model)


@check(behaviour=38)
def gradients_of_a_backward_inside_are_not_lost_in_silence() -> None:
    refused = partial(pytest.raises, RuntimeError, match=r"has left gradients of whole parameters of .*Inner\)?: up")
    for options in ({}, {"use_orig_params": False}, {"use_orig_params": False, "sharding_strategy": NO_SHARD}):
        model = sharded(**options)
        with refused(), summon(model):
            backward(model)
        assert not any(whole_bytes(model))
        assert all(p.grad is None for p in model.parameters())
        backward(model)


@check(behaviour=8, options=KINDS)
def an_optimizer_built_where_parameters_are_unsharded_updates_the_shards_or_is_refused(options: dict[str, Any]) -> None:
    """Original parameters are the same objects inside `summon_full_params`, and others in a forward."""
    model = sharded(**options)
    inner, inside = model.module.inner, []
    inner.module.up.register_forward_hook(lambda *_: inside.append(torch.optim.SGD(inner.parameters(), 0.1)))
    with summon(model):
        inside.append(torch.optim.SGD(model.parameters(), 0.1))
    backward(model)
    refused, right = inside if not options.get("use_orig_params", True) else inside[::-1]
    with pytest.raises(RuntimeError, match=r"^the optimizer was built (inside summon_full|while parameters were uns)"):
        refused.step()
    before = model.state_dict()
    right.step()
    assert not torch.equal(model.state_dict()["inner.up.weight"], before["inner.up.weight"])


@check(behaviour=38)
def between_two_micro_batches_what_is_whole_stays_whole() -> None:
    """Inside no_sync under SHARD_GRAD_OP; all ranks gather again on leaving, whoever has had the parameters."""
    for rank0_only, offload_to_cpu in itertools.product((False, True), (False, True)):
        model, reference = sharded(sharding_strategy=SHARD_GRAD_OP), plain()
        with model.no_sync():
            backward(model)
            with summon(model, writeback=False, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu):
                dist.barrier()
            backward(model)
        backward(reference)
        backward(reference)
        gradients = [unit.gradient.full for unit in units(model)]
        expected = torch.cat([reference.first.weight.grad.view(-1), reference.first.bias.grad])
        torch.testing.assert_close(gradients[0][: 12 + 3][:12], expected[:12])


# apply


@check(behaviour=45, options=KINDS)
def apply_sees_whole_parameters_and_keeps_what_it_writes(options: dict[str, Any]) -> None:
    model, reference, seen = sharded(**options), plain(), []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.copy_(torch.arange(module.weight.numel()).view_as(module.weight))
                module.bias.fill_(module.in_features)

    assert model.apply(init) is model
    ours, seen = seen, []
    reference.apply(init)
    assert [name for name in ours if name != "FullyShardedDataParallel"] == seen
    assert_same(model.state_dict(), reference.state_dict())
    assert whole_bytes(model) == [0, 0]
    nn.Sequential(model).apply(lambda module: None)
    with summon(model), pytest.raises(ValueError, match=r"but current state is TrainingState\.SUMMON_FULL_PARAMS"):
        model.apply(init)


@check()
def everything_is_freed_that_was_allocated() -> None:
    made: list[Tensor] = []
    model = sharded()
    device.buffer_observers.append(lambda buffer, role: made.append(buffer) if role == "unsharded" else None)
    backward(model)
    with summon(model, with_grads=True):
        pass
    device.buffer_observers.pop()
    assert not any(buffer.untyped_storage().nbytes() for buffer in made)
    assert whole_bytes(model) == [0, 0]


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
