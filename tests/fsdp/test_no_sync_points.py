"""The host runs ahead of a GPU: where it waits for one in a training step, which is where it should.

On paper (pretend_gpu.py), and in a process of its own. The values of collectives are missing, so nothing here is about
numbers.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import pretend_gpu
import pytest
import torch
import torch.distributed as dist
from pretend_gpu import pretend, waits_of_steps
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils import backend_registration

from minifsdp import device
from minifsdp.checkpoint import from_rank_0
from minifsdp.course.ladder.rungs import RUNGS, Trainer
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from minifsdp.gpt import GPT
from minifsdp.grad_scaler import ShardedGradScaler
from minifsdp.instruments.warm.client import server
from minifsdp.zero import Zero1Optimizer, Zero2Optimizer

STEPS = 2
UNITS = 3  # two blocks and the root
FULL, HYBRID, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD
BF16 = MixedPrecision(torch.bfloat16, torch.float32)
FP16 = MixedPrecision(torch.float16, torch.float16)
LIMITER, ARRIVALS = "event: fsdp/schedules/rate_limit.py", "event: fsdp/offload.py"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Small(nn.Module):
    """As many units as a GPT of two blocks, and few operators: none of them asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(257, 48), nn.Linear(48, 257)
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def small() -> Small:
    with pretend_gpu.GPU:
        return Small()


class Then(nn.Module):
    """A model that is run, or whose loss is used, in another way than once and as it is."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        return self.run(self.model, tokens, targets)


def rung(name: str) -> Trainer:
    with pretend_gpu.GPU:
        gpt = GPT(width=48, layers=2, context=8)
    return RUNGS[name].build(gpt, 2)


def fsdp(
    strategy: ShardingStrategy = FULL,
    accumulate: Callable[..., Any] | None = None,
    scaled: bool = False,
    **kwargs: Any,
) -> Trainer:
    """Everything that a step can have beside: clipping, a scaler, several backwards."""
    groups = None
    if strategy.is_hybrid:
        groups = tuple(dist.new_subgroups_by_enumeration(of_all)[0] for of_all in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    model = small()
    if "cpu_offload" in kwargs:
        model, kwargs["device_id"] = Small(), pretend_gpu.GPU
    wrapped = FullyShardedDataParallel(model, groups, strategy, auto_wrap_policy={Layer}, **kwargs)
    optimizer, scaler = SGD(wrapped.parameters(), 0.1, momentum=0.9), ShardedGradScaler()

    def after_backward() -> None:
        if scaled:
            scaler.unscale_(optimizer)
            scaler.update()
        wrapped.clip_grad_norm_(1.0)

    if scaled:
        return Trainer(Then(wrapped, lambda model, *batch: scaler.scale(model(*batch))), optimizer, [after_backward])
    if accumulate is not None:
        return Trainer(Then(wrapped, partial(accumulate, optimizer)), optimizer, [after_backward])
    return Trainer(wrapped, optimizer, [after_backward])


def four_micro_batches(optimizer: SGD, model: Any, *batch: Tensor) -> Any:
    """No communication of gradients, communication, none, and what is there is zeroed in place before the last."""
    with model.no_sync():
        model(*batch).backward()
    model(*batch).backward()
    with model.no_sync():
        model(*batch).backward()
    optimizer.zero_grad(set_to_none=False)
    return model(*batch)


def ddp(accumulates: bool = False, **kwargs: Any) -> Trainer:
    model = small()
    model.register_buffer("mean", torch.zeros(3, device=pretend_gpu.GPU))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.05, **kwargs)
    optimizer = AdamW(wrapped.parameters())
    run = two_micro_batches if accumulates else lambda model, *batch: model(*batch)
    clip = partial(nn.utils.clip_grad_norm_, list(wrapped.parameters()), 1.0)
    return Trainer(Then(wrapped, run), optimizer, [clip])


def two_micro_batches(model: Any, *batch: Tensor) -> Any:
    with model.no_sync():
        model(*batch).backward()
    return model(*batch)


def zero(stage: Any) -> Trainer:
    model, scaler = small(), ShardedGradScaler()
    optimizer = stage(model.parameters(), SGD, bucket_cap_mb=0.05, lr=0.1)

    def after_backward() -> None:
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        scaler.update()

    return Trainer(Then(model, lambda model, *batch: scaler.scale(model(*batch))), optimizer, [after_backward])


NOWHERE: dict[str, Callable[[], Trainer]] = {
    **{name: partial(rung, name) for name in RUNGS if name != "fsdp-limit"},
    "bf16": partial(fsdp, mixed_precision=BF16),
    "fp16 with a scaler": partial(fsdp, mixed_precision=FP16, scaled=True),
    "original parameters": partial(fsdp, mixed_precision=BF16, use_orig_params=True),
    "hybrid": partial(fsdp, HYBRID, mixed_precision=BF16),
    "hybrid, fp16, original parameters": partial(fsdp, HYBRID, mixed_precision=FP16, use_orig_params=True, scaled=True),
    "not sharded": partial(fsdp, NO_SHARD),
    "not sharded, bf16": partial(fsdp, NO_SHARD, mixed_precision=BF16),
    "accumulation": partial(fsdp, accumulate=four_micro_batches),
    "accumulation, original parameters": partial(fsdp, HYBRID, accumulate=four_micro_batches, use_orig_params=True),
    "DDP that copies": ddp,
    "DDP, accumulation": partial(ddp, accumulates=True),
    "DDP that looks for unused parameters": partial(ddp, find_unused_parameters=True),
    "ZeRO-1 with scaler and clipping": partial(zero, Zero1Optimizer),
    "ZeRO-2 with scaler and clipping": partial(zero, Zero2Optimizer),
}
OFFLOADED: dict[str, Callable[[], Trainer]] = {
    "offload": partial(fsdp, cpu_offload=CPUOffload(True)),
    "offload, bf16, original parameters": partial(
        fsdp, cpu_offload=CPUOffload(True), mixed_precision=BF16, use_orig_params=True
    ),
    "offload, hybrid": partial(fsdp, HYBRID, cpu_offload=CPUOffload(True)),
    "offload, not sharded": partial(fsdp, NO_SHARD, cpu_offload=CPUOffload(True)),
    "offload, fp16 with a scaler": partial(fsdp, cpu_offload=CPUOffload(True), mixed_precision=FP16, scaled=True),
}


COMBINED = (  # with nothing that the others do not have in some way
    *("fp16 with a scaler", "original parameters", "hybrid", "not sharded"),
    *("accumulation, original parameters", "DDP that copies", "offload", "offload, hybrid"),
)


def titles(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.wide] * (name in COMBINED)) for name in cases]


def waits_of(name: str) -> list[str]:
    """In the other process. (At construction DDP and ZeRO compare the ranks' models, for which the host may wait.)"""
    with (
        patch("minifsdp.ddp.sync.check_same_on_all_ranks"),
        patch("minifsdp.zero.parameters.check_same_on_all_ranks"),
    ):
        return waits_of_steps((NOWHERE | OFFLOADED | {"limit": partial(rung, "fsdp-limit")})[name], STEPS)


def answer(fd: int) -> None:
    """In the other process."""
    pretend_gpu.register()
    with Connection(fd) as asked:
        while True:
            try:
                function, args = asked.recv()
            except EOFError:
                break
            try:
                asked.send(function(*args))
            except Exception:
                asked.send([traceback.format_exc()])
    gc.freeze()  # looking through torch's objects at the end takes half a second


class Elsewhere:
    """A process with the device; a new one after each that torch has aborted, for an error in the device's thread."""

    def __init__(self) -> None:
        self.asked, theirs = Pipe()
        with theirs:
            self.process = server.start("a device on paper", answer, fds=[theirs.fileno()])

    def run(self, function: Callable[..., list[Any]], *args: Any) -> list[Any]:
        self.asked.send((function, args))
        try:
            found: list[Any] = self.asked.recv()
        except (EOFError, ConnectionResetError):
            self.close()
            self.__init__()  # type: ignore[misc]
            return ["aborted: a hook of backward has asked for a value, or has failed otherwise"]
        return found

    def close(self) -> None:
        self.asked.close()
        self.process.wait(10)
        self.process.kill()
        self.process.close()


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} lets no Python program register a device")
    process = Elsewhere()
    yield process
    process.close()


@pytest.mark.parametrize("name", titles(NOWHERE))
def test_the_host_waits_for_nothing_but_the_limiter(elsewhere: Elsewhere, name: str) -> None:
    assert set(elsewhere.run(waits_of, name)) - {LIMITER} == set()


def test_the_limiter_waits_for_events(elsewhere: Elsewhere) -> None:
    assert set(elsewhere.run(waits_of, "limit")) == {LIMITER}


@pytest.mark.parametrize("name", titles(OFFLOADED))
def test_with_cpu_offload_also_for_each_gradient_and_the_norm(elsewhere: Elsewhere, name: str) -> None:
    """The optimizer on the host needs them; a scaler's scale as well. Nothing is read before it is there."""
    waits = Counter(elsewhere.run(waits_of, name))
    waits.pop(LIMITER, None)
    expected = {ARRIVALS: UNITS * STEPS, "copy to cpu: clip_grad.py": STEPS}
    if "scaler" in name:
        expected["copy to cpu: grad_scaler.py"] = STEPS
    assert waits == expected


def evaluated(name: str) -> list[str]:
    """A forward without backward, and a host that changes the shards at once."""
    with pretend() as waits:
        trainer = OFFLOADED[name]()
        waits.seen.clear()
        tokens = torch.zeros(2, 8, dtype=torch.int64, device=pretend_gpu.GPU)
        with torch.no_grad():
            trainer.model(tokens, tokens)
            for shard in trainer.optimizer.param_groups[0]["params"]:
                shard.mul_(0.99)
    return waits.seen


@pytest.mark.parametrize("name", titles(name for name in OFFLOADED if "scaler" not in name))
def test_with_cpu_offload_nothing_reads_the_shards_any_longer_when_a_forward_without_backward_is_over(
    elsewhere: Elsewhere, name: str
) -> None:
    waits = Counter(elsewhere.run(evaluated, name))
    waits.pop(LIMITER, None)
    assert waits == {ARRIVALS: UNITS}


def outlined() -> list[str]:
    with pretend():
        outline = from_rank_0.outline({"step": torch.ones((), device=pretend_gpu.GPU), "mean": torch.ones(2)})
        return [outline["step"].device.type, outline["mean"].device.type]


def test_numbers_that_rank_0_describes_are_not_on_its_gpu(elsewhere: Elsewhere) -> None:
    """Pickled, they would be put on that GPU by every rank."""
    assert elsewhere.run(outlined) == ["cpu", "meta"]


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_rank_0_sends_values_of_every_dtype(elsewhere: Elsewhere, dtype: torch.dtype) -> None:
    """NCCL and gloo know some."""
    assert elsewhere.run(dtypes_sent, dtype) == [torch.uint8]


def dtypes_sent(dtype: torch.dtype) -> list[torch.dtype]:
    with patch.object(dist, "broadcast", side_effect=dist.broadcast) as broadcast:
        from_rank_0.receive(torch.zeros(2, 3).to(dtype), dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    return [call.args[0].dtype for call in broadcast.call_args_list]


# What the list is worth


def read(x: Tensor, event_before: bool = False, event_after: bool = False) -> None:
    stream = device.current_stream(x.device)
    event = stream.record_event() if event_before else None
    copied = device.copy_to_host(x)
    event = stream.record_event() if event_after else event
    if event is not None:
        event.synchronize()
    copied.add_(1)


def send_and_write(x: Tensor, wait: bool) -> None:
    mine = torch.ones(4)
    x.copy_(mine, non_blocking=True)
    if wait:
        device.current_stream(x.device).record_event().synchronize()
    mine.add_(1)


EARLY = "read before it is there"
CARELESS: dict[str, tuple[Any, ...]] = {
    "copies to the host": (Tensor.cpu, ["copy to cpu"]),
    "copies from the host": (lambda x: x.copy_(torch.ones(4)), ["copy to pretend"]),
    "sends from the host": (lambda x: x.copy_(torch.ones(4), non_blocking=True), []),
    "sends to the host": (lambda x: x.to("cpu", non_blocking=True).add_(1), [EARLY]),
    "writes what is being sent": (partial(send_and_write, wait=False), ["written while it is read"]),
    "writes what was sent": (partial(send_and_write, wait=True), ["event"]),
    "waits for the device": (lambda x: device.synchronize(x.device), ["device"]),
    "reads without an event": (read, [EARLY]),
    "reads after an event": (partial(read, event_after=True), ["event"]),
    "reads after another event": (partial(read, event_before=True), ["event", EARLY]),
    "item": (lambda x: x.sum().item(), ["raised"]),
    "if": (lambda x: 1 if x.any() else 0, ["raised"]),
    "nonzero": (Tensor.nonzero, ["raised"]),
    "tolist": (Tensor.tolist, ["raised"]),
    "tensor": (
        lambda x: torch.tensor([1.0], device=x.device),
        ["raised"],
        ["copy to pretend"],
    ),  # as torch's version has it
}


def notices(name: str) -> list[str]:
    with pretend() as waits:
        x = torch.ones(4, device=pretend_gpu.GPU)
        try:
            CARELESS[name][0](x)
        except Exception:
            return ["raised"]
    return [line.partition(":")[0] for line in waits.seen]


@pytest.mark.parametrize("name", CARELESS)
def test_it_would_be_noticed(elsewhere: Elsewhere, name: str) -> None:
    _, *accepted = CARELESS[name]
    assert elsewhere.run(notices, name) in accepted
