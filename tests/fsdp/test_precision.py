"""Mixed precision, loss scaling and clipping: which dtype each stage has, and that nothing overflows on the way."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchsScaler

from minifsdp import comm, device
from minifsdp.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from minifsdp.grad_scaler import ShardedGradScaler
from minifsdp.instruments.watch.ledger import Ledger

check = Checks(__name__)

WIDTH = 5
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, _ = ShardingStrategy
Fsdp = FullyShardedDataParallel


class Block(nn.Module):
    """30 elements, and a buffer; notes what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        self.seen = {"input": x.dtype, "weight": self.linear.weight.dtype, "buffer": self.scale.dtype}
        return torch.tanh(self.linear(x.to(self.linear.weight.dtype))) * self.scale


class Net(Block):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        return self.blocks(super().forward(x, *others, **named))


def plain() -> Net:
    torch.manual_seed(0)
    return Net()


def wrapped(module: nn.Module | None = None, **options: Any) -> Fsdp:
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy({Block}))
    return Fsdp(plain() if module is None else module, **options)


def batch(rows: int = 3) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def instances(model: nn.Module) -> list[Fsdp]:
    return Fsdp.fsdp_modules(model)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@contextmanager
def buffers() -> Iterator[list[tuple[Tensor, str]]]:
    """Every buffer that is handed out, with its role."""
    found: list[tuple[Tensor, str]] = []

    def tell(buffer: Tensor, role: str) -> None:
        found.append((buffer, role))

    device.buffer_observers.append(tell)
    try:
        yield found
    finally:
        device.buffer_observers.remove(tell)


# Checks

EVERY_KIND: dict[str, Any] = {"strategy": (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD), "orig": (False, True)}
DTYPES = {"bf16": (BF16, None), "bf16, fp32": (BF16, FP32), "fp16": (FP16, None), "none, bf16": (None, BF16)}


@check(behaviour=33, precision=tuple(DTYPES), offload=(False, True), orig=(False, True))
def each_stage_has_its_dtype(precision: str, offload: bool, orig: bool) -> None:
    param_dtype, reduce_dtype = DTYPES[precision]
    low, reduced = param_dtype or FP32, reduce_dtype or param_dtype
    with buffers() as handed_out:
        model = wrapped(
            mixed_precision=MixedPrecision(param_dtype, reduce_dtype, buffer_dtype=BF16),
            cpu_offload=CPUOffload(offload),
            use_orig_params=orig,
        )
        units = [instance._unit for instance in instances(model)]
        sizes = {unit.flat.full.numel() for unit in units}
        taken = set()

        def take(take_gradient: Any, unit: Any, index: int) -> None:
            taken.add(unit.leaves[index].grad.dtype)
            take_gradient(index)

        for unit in units:
            unit.take_gradient = partial(take, unit.take_gradient, unit)
        built = len(handed_out)
        with comm.record() as calls:
            model(batch()).float().sum().backward()
    (size,) = sizes
    assert taken == {low}
    for block in (model.module, *(m.module for m in instances(model)[1:])):
        assert block.seen["weight"] is low
        assert block.seen["buffer"] is BF16
    assert {call.payload for call in calls if call.op == "all_gather"} == {size * low.itemsize}
    assert {call.payload for call in calls if call.op == "reduce_scatter"} == {size * reduced.itemsize}
    # No low-precision shard: the shard is cast into its place in the gathered buffer
    for buffer, _ in handed_out[built:]:
        assert buffer.dtype is (reduced if buffer.numel() == size else buffer.dtype)
    # ... and beside the gradients there is only what a rank receives of the other's on gloo, to sum it
    assert {role for _, role in handed_out[built:]} == {"gradients", "communication"}
    received = [buffer for buffer, role in handed_out if role == "communication"]
    assert [buffer.numel() for buffer in received] == [size // 2] * len(units)
    assert not any(buffer.untyped_storage().nbytes() for buffer in received)
    assert all(buffer.numel() == size for buffer, role in handed_out if role == "unsharded")
    assert all(not buffer.untyped_storage().nbytes() for buffer, role in handed_out if role == "unsharded")
    assert {unit.flat.shard.dtype for unit in units} == {p.dtype for p in model.parameters()} == {FP32}
    assert {gradient.dtype for gradient in gradients(model)} == {FP32}
    assert {value.dtype for value in model.state_dict().values()} == {FP32}


@check(behaviour=35, **EVERY_KIND, offload=(False, True))
def low_precision_gradients_are_kept_if_wanted(strategy: ShardingStrategy, orig: bool, offload: bool) -> None:
    precision = MixedPrecision(BF16, keep_low_precision_grads=True)
    model = wrapped(
        sharding_strategy=strategy,
        mixed_precision=precision,
        use_orig_params=orig,
        cpu_offload=CPUOffload(offload),
    )
    for set_to_none in (False, True):
        model(batch()).float().sum().backward()
        once = [gradient.clone() for gradient in gradients(model)]
        assert once
        assert {gradient.dtype for gradient in once} == {BF16}
        model(batch()).float().sum().backward()
        assert all(torch.equal(twice, 2 * g) for twice, g in zip(gradients(model), once, strict=True))
        model.zero_grad(set_to_none)
    assert {p.dtype for p in model.parameters()} == {FP32}


class Product(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum(dtype=FP32)


def mean_of(gradient: float, half: bool = False, **options: Any) -> float:
    """The mean in fp16 of a gradient that is the same on all ranks; a `half` model's, or mixed precision's."""
    precision = None if half else MixedPrecision(FP16)
    model = wrapped(Product().half() if half else Product(), mixed_precision=precision, **options)
    model(torch.full((8,), gradient)).backward()
    return float(next(iter(gradients(model)))[0])


@check(behaviour=23, strategy=(FULL_SHARD, NO_SHARD))
def the_mean_of_two_large_gradients_is_finite(strategy: ShardingStrategy) -> None:
    assert mean_of(40_000.0, sharding_strategy=strategy) == 40_000.0  # the sum of two is infinite in fp16


@check(ranks=4, behaviour=23, strategy=(FULL_SHARD, NO_SHARD), half=(False, True))
def the_mean_of_four_gradients_is_finite_and_not_zero(strategy: ShardingStrategy, half: bool) -> None:
    assert mean_of(30_000.0, half, sharding_strategy=strategy) == 30_000.0
    assert mean_of(2.0**-23, half, sharding_strategy=strategy) == 2.0**-23  # a quarter of it is zero in fp16


@check(ranks=4, behaviour=(23, 24))
def the_mean_over_replicas_is_finite_and_not_zero() -> None:
    options = {"sharding_strategy": HYBRID_SHARD, "device_mesh": init_device_mesh("cpu", (2, 2))}
    assert mean_of(30_000.0, **options) == 30_000.0
    assert mean_of(2.0**-23, **options) == 2.0**-23


@check(ranks=4, behaviour=24, orig=(False, True), precision=("bf16", "bf16, fp32"))
def only_a_shard_crosses_between_replicas(orig: bool, precision: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = wrapped(
        sharding_strategy=HYBRID_SHARD,
        device_mesh=mesh,
        use_orig_params=orig,
        mixed_precision=MixedPrecision(*DTYPES[precision]),
    )
    size = next(iter(instances(model)))._unit.flat.full.numel()
    with comm.record() as calls:
        model(batch()).float().sum().backward()
    inside, across = (mesh.get_group(dim).group_name for dim in (1, 0))
    width = (DTYPES[precision][1] or BF16).itemsize
    made = {
        op: {(c.group, c.payload) for c in calls if c.op == op} for op in ("all_gather", "reduce_scatter", "all_reduce")
    }
    assert made["all_gather"] == {(inside, size * BF16.itemsize)}
    assert made["reduce_scatter"] == {(inside, size * width)}
    assert made["all_reduce"] == {(across, size // 2 * width)}


@check(ranks=4, behaviour=24, offload=(False, True))
def gradients_of_earlier_backwards_do_not_cross_again(offload: bool) -> None:
    """They are added to after the all-reduce, so that a second backward doubles them and no more."""
    options = {"sharding_strategy": HYBRID_SHARD, "device_mesh": init_device_mesh("cpu", (2, 2))}
    model = wrapped(**options, cpu_offload=CPUOffload(offload))
    model(batch()).sum().backward()
    once = [gradient.clone() for gradient in gradients(model)]
    model(batch()).sum().backward()
    for twice, gradient in zip(gradients(model), once, strict=True):
        torch.testing.assert_close(twice, 2 * gradient)


@check(behaviour=34, **EVERY_KIND)
def evaluation_may_have_full_precision(strategy: ShardingStrategy, orig: bool) -> None:
    precision = MixedPrecision(BF16, buffer_dtype=BF16, cast_forward_inputs=True)
    model = wrapped(sharding_strategy=strategy, mixed_precision=precision, use_orig_params=orig)
    blocks = [instance.module for instance in instances(model)]
    expected = plain()
    for block in (m for m in expected.modules() if isinstance(m, Block)):
        block.scale = block.scale.to(BF16).float()  # buffers were cast when training began, and are cast back

    def dtypes() -> set[torch.dtype]:
        return {dtype for block in blocks for dtype in block.seen.values()}

    model(batch())
    assert dtypes() == {BF16, FP32} - {FP32 if blocks[0].seen["input"] is BF16 else None}
    with patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
        model.eval()
        assert torch.equal(model(batch()), expected(batch()))
        assert dtypes() == {FP32}
        with comm.record() as calls:
            model(batch()).sum().backward()  # in eval mode, but a backward
        reductions = {c.payload for c in calls if c.op in ("reduce_scatter", "all_reduce")}
        assert reductions == {instances(model)[0]._unit.flat.full.numel() * FP32.itemsize}
        model.train()
        model(batch()).float().sum().backward()
        assert dtypes() == {BF16}
    model.eval()
    model(batch())
    assert dtypes() == {BF16}


@check(behaviour=(15, 16), root=(False, True), others=(False, True))
def inputs_are_cast_as_wanted(root: bool, others: bool) -> None:
    """The root casts its own if either is asked for, as torch's does."""
    precision = MixedPrecision(BF16, cast_root_forward_inputs=root, cast_forward_inputs=others)
    kept: list[Any] = []

    class Keeping(Block):
        def forward(self, *args: Any, **named: Any) -> Tensor:
            kept.append((args, named))
            return super().forward(*args, **named).float()

    model = wrapped(nn.Sequential(Keeping(), Keeping()), auto_wrap_policy={Keeping}, mixed_precision=precision)
    model(batch())
    assert [args[0].dtype for args, _ in kept] == [BF16 if root or others else FP32, BF16 if others else FP32]
    kept.clear()
    alone = wrapped(Keeping(), mixed_precision=precision, auto_wrap_policy=None)
    numbers = torch.arange(3)
    alone(batch(), numbers, {"deep": [batch().double()]}, mask=numbers > 1)
    ((_, integers, tree), named) = kept[0]
    assert integers is numbers
    assert named["mask"].dtype is torch.bool
    assert tree["deep"][0].dtype is (BF16 if root or others else FP64)


@check(behaviour=(26, 33), reduce_dtype=(None, FP32))
def accumulation_inside_no_sync_is_in_the_dtype_of_the_reduction(reduce_dtype: torch.dtype | None) -> None:
    model = wrapped(Product(), mixed_precision=MixedPrecision(BF16, reduce_dtype))
    with model.no_sync():
        model(torch.ones(8)).backward()
        for _ in range(3):
            model(torch.full((8,), 2.0**-9)).backward()
    model(torch.full((8,), 2.0**-9)).backward()
    lost_in_bf16 = 4 * 2.0**-9
    assert gradients(model)[0][0] == 1 + (lost_in_bf16 if reduce_dtype is FP32 else 0)


@check(behaviour=14, kind=("bf16", "offload"))
def without_a_collective_the_computation_waits_for_the_copy(kind: str) -> None:
    """NO_SHARD gathers nothing, but what it casts or moves it does on the stream of the gathers."""
    options = {"bf16": {"mixed_precision": MixedPrecision(BF16)}, "offload": {"cpu_offload": CPUOffload(True)}}[kind]
    model = wrapped(sharding_strategy=NO_SHARD, **options)
    model(batch()).float().sum().backward()
    with watched_commands() as commands:
        model(batch())
    gathers = model._engine.schedule.gather_stream
    copied = [command.subject for command in commands if command.verb == "record" and command.stream is gathers]
    waited = [command.subject for command in commands if command.verb == "wait" and command.stream is not gathers]
    assert sum(event in waited for event in copied) == 3  # others are for a host that writes to the shards


@contextmanager
def watched_commands() -> Iterator[list[device.Command]]:
    """What a device with queues would have been asked."""
    commands: list[device.Command] = []
    device.command_observers.append(commands.append)
    try:
        yield commands
    finally:
        device.command_observers.remove(commands.append)


# Memory


@check(behaviour=33, reduce_dtype=(BF16, FP32), orig=(False, True))
def gathered_memory_is_in_low_precision(reduce_dtype: torch.dtype, orig: bool) -> None:
    """By the ledger: two gathered units at 2 bytes per element, and no more than the root's and one's in forward."""
    torch.ones(1, requires_grad=True).sum().backward()
    with Ledger() as ledger:
        model = wrapped(
            mixed_precision=MixedPrecision(BF16, reduce_dtype), use_orig_params=orig, auto_wrap_policy={Block}
        )
        ledger.watch(model)
        size = instances(model)[0]._unit.flat.full.numel()
        shard = size // 2 * FP32.itemsize
        ledger.reset_peaks()
        output = model(batch())
        assert ledger.peak_of("unsharded") == 2 * size * BF16.itemsize  # the root and a block
        output.float().sum().backward()
        del output
        live = ledger.mark("after backward")
        assert live["unsharded"] == 0
        assert live["gradients"] == 3 * shard
        # Of two blocks one at a time (schedules/host.py)
        assert ledger.peak_of("unsharded") == 2 * size * BF16.itemsize
        assert live["communication"] == 0
        # What a rank receives of the other's gradients, to sum it: half a unit's, and one unit at a time
        assert ledger.peak_of("communication") == size // 2 * reduce_dtype.itemsize


@check(behaviour=33, orig=(False, True), reduce_dtype=(None, BF16))
def replicated_parameters_need_no_copy(orig: bool, reduce_dtype: torch.dtype | None) -> None:
    """Of another dtype on the wire as well: what is computed with are views of what the optimizer updates."""
    with buffers() as handed_out:
        precision = MixedPrecision(reduce_dtype=reduce_dtype)
        model = wrapped(sharding_strategy=NO_SHARD, use_orig_params=orig, mixed_precision=precision)
        for _ in range(2):
            output = model(batch())
            assert not any(buffer.untyped_storage().nbytes() for buffer, role in handed_out if role == "unsharded")
            output.sum().backward()
    wire = {buffer.dtype for buffer, role in handed_out if role == "gradients"}
    assert wire == ({FP32, BF16} if reduce_dtype else {FP32})


@check(behaviour=44, orig=(False, True))
def offloaded_shards_are_not_on_the_device(orig: bool) -> None:
    """What the unit's roles count is on the device: units and their gradients; nothing is left there after a step."""
    with buffers() as handed_out:
        model = wrapped(cpu_offload=CPUOffload(True), use_orig_params=orig)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(batch()).sum().backward()
            assert gradients(model)
            assert not any(buffer.untyped_storage().nbytes() for buffer, _ in handed_out)
            storages = {buffer.untyped_storage()._cdata for buffer, _ in handed_out}
            assert not any(g.untyped_storage()._cdata in storages for g in gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        assert not any(p.untyped_storage()._cdata in storages for p in model.parameters())


# Loss scaling


def scaled_step(model: Fsdp, scaler: Any, optimizer: Any, poison: bool) -> None:
    scaler.scale(model(batch()).float().sum()).backward()
    mine = gradients(model)
    if poison and mine:
        mine[-1].view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@check(behaviour=37, **EVERY_KIND, offload=(False, True), precision=("bf16", "fp16"))
def an_overflow_of_one_rank_is_everybody_s(
    strategy: ShardingStrategy, orig: bool, offload: bool, precision: str
) -> None:
    low = MixedPrecision(*DTYPES[precision], keep_low_precision_grads=precision == "fp16")
    model = wrapped(
        sharding_strategy=strategy, use_orig_params=orig, cpu_offload=CPUOffload(offload), mixed_precision=low
    )
    optimizer = torch.optim.SGD([*model.parameters()], 0.1)
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    steps: list[int] = []
    scaler = ShardedGradScaler(init_scale=4.0)
    assert scaler.is_enabled()
    with comm.record() as calls:
        if precision == "fp16":  # SGD wants the gradients in the parameters' dtype: only up to there
            scaler.scale(model(batch()).float().sum()).backward()
            gradients(model)[0].view(-1)[0] = float("inf") if dist.get_rank() == 1 else 1.0
            scaler.unscale_(optimizer)
            assert [float(f) for f in scaler._found_inf_per_device(optimizer).values()] == [1.0]
            return
        scaled_step(model, scaler, optimizer, poison=dist.get_rank() == 1)
    assert [c.payload for c in calls][-1] == 4  # one scalar
    assert not steps
    assert scaler.get_scale() == 2.0
    scaled_step(model, scaler, optimizer, poison=False)
    assert steps == [1]
    assert scaler.get_scale() == 2.0


@check(behaviour=37)
def without_agreement_ranks_part() -> None:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaled_step(model, scaler, optimizer, poison=dist.get_rank() == 1)
    assert scaler.get_scale() == (2.0 if dist.get_rank() == 1 else 4.0)


class OneOnly(nn.Module):
    """Rank 1 has padding and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=FP64))

    def forward(self, x: Tensor) -> Tensor:
        return x.double() * self.weight


@check(behaviour=37, fused=(False, True))
def a_rank_without_gradients_takes_part(fused: bool) -> None:
    """Also if the optimizer does the unscaling itself."""
    model = wrapped(OneOnly(), use_orig_params=True, auto_wrap_policy=None)
    (p,) = model.parameters()
    assert p.numel() == 1 - dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=fused)
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=dist.group.WORLD)
    before = model.state_dict()["weight"]
    scaled_step(model, scaler, optimizer, poison=dist.get_rank() == 0)
    assert scaler.get_scale() == 2.0
    assert torch.equal(model.state_dict()["weight"], before)
    scaled_step(model, scaler, optimizer, poison=False)
    assert not torch.equal(model.state_dict()["weight"], before)


@check(behaviour=37)
def gradients_that_fsdp_does_not_know_count() -> None:
    model = plain()
    ignored = model.linear
    model = wrapped(model, ignored_modules=[ignored])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = ShardedGradScaler(init_scale=4.0)
    scaler.scale(model(batch()).sum()).backward()
    if dist.get_rank() == 1:
        ignored.bias.grad[0] = float("nan")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    off = ShardedGradScaler(enabled=False)
    assert off.scale(torch.ones(1)) == 1


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64], ids=str)
def test_a_scaled_loss_keeps_its_dtype(dtype: torch.dtype) -> None:
    """As torch's, to the bit: a number, one in a vector, and those in containers and iterators."""
    mine, theirs = (kind("cpu", init_scale=4.0) for kind in (ShardedGradScaler, TorchsScaler))
    loss = torch.tensor(0.3, dtype=dtype, requires_grad=True)
    outputs = [loss, (loss.view(1), [loss])]
    scaled = mine.scale(loss)
    assert (scaled.dtype, scaled.item()) == (dtype, theirs.scale(loss).item())
    scaled.backward()
    assert loss.grad is not None
    assert (loss.grad.dtype, loss.grad.item()) == (dtype, 4.0)
    for given in (outputs, tuple(outputs)):
        assert repr(mine.scale(given)) == repr(theirs.scale(given))  # dtypes and containers too
    first, second = mine.scale(iter([loss, loss.view(1)]))
    assert (first.dtype, second.dtype) == (dtype, dtype)
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        mine.scale(3)
    assert ShardedGradScaler("cpu", enabled=False).scale(outputs) is outputs


def test_a_scaler_s_device_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA its default "cuda" means the CPU; one that is named by an index does not."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for wanted in (0, "cuda:0", torch.device("cuda", 0)):
        with pytest.raises(ValueError, match=r"^device=.* is a CUDA device, and there is none here: leave device out"):
            ShardedGradScaler(wanted)
    for wanted in ("cuda", "cpu", torch.device("cpu")):
        assert ShardedGradScaler(wanted).scale(torch.ones(1)) == 2.0**16


# Clipping


def mixed_model(orig: bool, offload: bool, low: bool, **options: Any) -> Fsdp:
    """A sharded root and block, a NO_SHARD block, and an ignored layer whose gradient is the same on all ranks."""
    model = plain()
    model.extra = nn.Linear(WIDTH, WIDTH)
    precision = MixedPrecision(BF16, keep_low_precision_grads=True) if low else None
    common = {"use_orig_params": orig, "mixed_precision": precision, "cpu_offload": CPUOffload(offload)}
    model.blocks[0] = Fsdp(model.blocks[0], sharding_strategy=NO_SHARD, **common)
    model.blocks[1] = Fsdp(model.blocks[1], **options, **common)
    return Fsdp(model, ignored_modules=[model.extra], **options, **common)


def everyones(model: Fsdp) -> list[Tensor]:
    """All gradients, whole, once each: the sharded ones from the ranks of the group."""
    found = []
    for instance in instances(model):
        unit = instance._unit
        grads = [p.grad.float().reshape(-1).clone() for p in unit.shards if p.grad is not None]
        if instance.sharding_strategy is NO_SHARD:
            found += grads
        else:
            parts: list[Any] = [None] * unit.group.size()
            dist.all_gather_object(parts, grads, group=unit.group)
            found += [g for part in parts for g in part]
    return [*found, model.module.extra.weight.grad.reshape(-1).clone()]


def check_clipping(model: Fsdp, norm_type: float, low: bool) -> None:
    model.module.extra.weight.grad = torch.full((WIDTH, WIDTH), 0.3)
    model(batch()).float().sum().backward()
    before = everyones(model)
    expected = torch.linalg.vector_norm(torch.cat(before), norm_type)
    norm = model.clip_grad_norm_(0.5 * float(expected), norm_type)
    assert norm.dtype is FP32  # the ignored gradient's
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for gradient, old in zip(everyones(model), before, strict=True):
        torch.testing.assert_close(gradient, old * 0.5, rtol=2**-7 if low else 1e-5, atol=1e-7)
    model.module.extra.weight.grad = None
    norms: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(norms, float(norm))
    assert len(set(norms)) == 1
    if low and gradients(model):
        assert model.clip_grad_norm_(1.0, norm_type).dtype is BF16


@check(
    behaviour=43,
    p=(1, 2, float("inf"), 0.5),
    orig=(False, True),
    offload=(False, True),
    low=(False, True),
    wide="combinations",
)
def clipping_is_by_the_norm_of_everything(p: float, orig: bool, offload: bool, low: bool) -> None:
    check_clipping(mixed_model(orig, offload, low), p, low)


@check(ranks=4, behaviour=(24, 43), p=(2, float("inf")))
def clipping_counts_a_replicated_shard_once(p: float) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = mixed_model(False, False, False, sharding_strategy=HYBRID_SHARD, device_mesh=mesh)
    with comm.record() as calls:
        check_clipping(model, p, False)
    (scalar,) = {c.group for c in calls if c.payload == 4}
    assert scalar == mesh.get_group(1).group_name


@check(behaviour=43)
def clipping_without_gradients_on_a_rank() -> None:
    model = wrapped(OneOnly(), use_orig_params=True, auto_wrap_policy=None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.clip_grad_norm_(1.0)
        text = f"Called FSDP.clip_grad_norm_() on rank {dist.get_rank()} with no gradients -- returning the total norm"
        assert any(str(w.message).startswith(text) for w in said)
    model(torch.ones(1)).backward()
    assert model.clip_grad_norm_(0.5) == 1.0  # also where the only gradient is another rank's, of another dtype
    assert [float(g) for g in gradients(model)] == pytest.approx([0.5] * (1 - dist.get_rank()))


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
