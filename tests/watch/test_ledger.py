"""The ledger: bytes worked out by hand, torch.profiler's word against ours, and the same events in every run."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from minifsdp import comm, device
from minifsdp.gpt import GPT
from minifsdp.instruments.launch import launch
from minifsdp.instruments.link.emulated import EmulatedLink
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.storages import TAGS

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")


def bytes_of(**tags: int) -> dict[str, int]:
    return dict.fromkeys(TAGS, 0) | tags


# By hand


def test_a_training_step_of_a_linear_layer() -> None:
    with Ledger() as ledger:
        model = nn.Linear(3, 5)  # 15 + 5 elements
        optimizer = torch.optim.AdamW(model.parameters())
        assert ledger.live() == bytes_of(activations=80)
        ledger.watch(model, optimizer)
        assert ledger.live() == bytes_of(parameters=80)

        x = torch.ones(2, 3)
        y = model(x)
        loss = y.sum()
        assert ledger.mark("forward") == bytes_of(parameters=80, activations=24 + 40 + 4)
        del y  # the sum's backward needs its shape only
        assert ledger.live() == bytes_of(parameters=80, activations=28)
        loss.backward()
        assert ledger.live() == bytes_of(parameters=80, activations=28, gradients=80)
        optimizer.step()  # two moments, and a step count of 4 bytes for each of two parameters
        trained = bytes_of(parameters=80, activations=28, gradients=80, optimizer=160 + 8)
        assert ledger.live() == trained
        optimizer.step()
        assert ledger.live() == trained
        optimizer.zero_grad()
        del x, loss
        assert ledger.live() == bytes_of(parameters=80, optimizer=168)
        del model, optimizer
        assert ledger.live() == bytes_of(), "the ledger keeps something alive"


def test_listeners_hear_of_operators_that_change_a_storage() -> None:
    with Ledger() as ledger:
        heard: list[int] = []
        ledger.listeners.append(lambda: heard.append(len(ledger.events)))
        x = torch.ones(4)
        y = x + x
        y.mul_(2)
        y[:2].add_(1)
        assert heard == [1, 2]
        y.untyped_storage().resize_(0)
        assert heard == [1, 2, 3]


def test_what_autograd_saved_is_freed_as_backward_reaches_it() -> None:
    x = torch.ones(10, requires_grad=True)
    with Ledger() as ledger:
        y = x.exp().exp().sum()
        assert ledger.live() == bytes_of(activations=40 + 40 + 4)
        y.backward()
        assert ledger.live() == bytes_of(activations=4 + 40), "the result and the gradient of what nobody watches"


def test_views_and_inplace_operators_are_the_same_memory() -> None:
    with Ledger() as ledger:
        x = torch.zeros(6)
        views = [x.view(2, 3), x[1:], x.detach(), *x.split(2)]
        x.add_(1)
        torch._foreach_add_(views[3:], 1.0)
        assert ledger.live() == bytes_of(activations=24)
        del x
        assert ledger.live() == bytes_of(activations=24), "a view keeps its memory alive"
        del views
        assert ledger.live() == bytes_of()


def test_memory_from_before_is_not_counted() -> None:
    old = torch.zeros(6)
    with Ledger() as ledger:
        old.add_(1)
        keep = [old.view(2, 3), old.detach()]
        assert ledger.live() == bytes_of()
        model = nn.Linear(1, 1)
        ledger.watch(model)
        new = old + 1
        assert ledger.live() == bytes_of(parameters=8, activations=24)
        assert len(keep) == new.dim() + 1
    with Ledger() as ledger:
        ledger.watch(model)
        assert ledger.live() == bytes_of(parameters=8), "it is, where it is watched"


def test_resized_storages() -> None:
    before = torch.zeros(5)
    with Ledger() as ledger:
        buffer = torch.empty(10)
        view = buffer[:5]
        buffer.untyped_storage().resize_(0)
        assert ledger.live() == bytes_of()
        buffer.untyped_storage().resize_(40)
        assert ledger.live() == bytes_of(activations=40)
        buffer.resize_(20)
        assert ledger.live() == bytes_of(activations=80), "an operator may resize too"
        before.untyped_storage().resize_(0)
        before.untyped_storage().resize_(20)
        assert ledger.live() == bytes_of(activations=100), "memory allocated now is new, whenever its tensor was made"
        del buffer, view, before
        assert ledger.live() == bytes_of()


def test_tensors_made_from_data_count() -> None:
    with Ledger() as ledger:
        x = torch.tensor([1.0, 2.0])
        assert ledger.live() == bytes_of(activations=8)
        del x
        assert ledger.live() == bytes_of()


@pytest.mark.parametrize("role", ["unsharded", "gradients", "communication"])
def test_a_buffer_keeps_its_role(role: device.Role) -> None:
    with Ledger() as ledger:
        buffer = device.empty(10, torch.float32, role, CPU)
        assert [event.changes for event in ledger.events] == [{role: 40}], "it never was anything else"
        device.free(buffer)
        assert ledger.live() == bytes_of()
        device.allocate(buffer)
        assert ledger.live() == bytes_of(**{role: 40})
        ledger.tag(buffer, "parameters")
        assert ledger.live() == bytes_of(**{role: 40})
        del buffer
        assert ledger.live() == bytes_of()
        assert [(event.cause, event.changes) for event in ledger.events[1:]] == [
            ("resize_", {role: -40}),
            ("resize_", {role: 40}),
            ("free", {role: -40}),
        ]


def test_a_tag_moves_bytes() -> None:
    with Ledger() as ledger:
        x, y = torch.zeros(2), torch.zeros(3)
        ledger.tag(x, "optimizer")
        assert ledger.live() == bytes_of(activations=12, optimizer=8)
        last = ledger.events[-1]
        assert (last.cause, last.changes) == ("tag", {"activations": -8, "optimizer": 8})
        del x, y
        assert ledger.live() == bytes_of()


def test_a_tag_may_come_after_a_reset() -> None:
    with Ledger() as ledger:
        x = torch.zeros(2)
        ledger.reset_peaks()
        ledger.tag(x, "optimizer")
        assert ledger.live() == bytes_of(optimizer=8)
        assert ledger.peak.total == 8


def test_gradients_from_accumulation_on() -> None:
    seen: dict[str, dict[str, int]] = {}
    with Ledger() as ledger:
        model = nn.Linear(4, 4, bias=False)  # 64 bytes
        x = torch.ones(1, 4)  # 16 bytes
        model.weight.register_hook(lambda grad: seen.setdefault("made", ledger.live()) and None)
        ledger.watch(model)
        for _ in range(2):
            model(x).sum().backward()
            seen["accumulated"] = ledger.live()
    assert seen["made"]["gradients"] == 0
    assert seen["made"]["activations"] >= 16 + 64
    assert seen["accumulated"] == bytes_of(parameters=64, gradients=64, activations=16)


def test_a_gradient_that_a_hook_takes_is_never_one() -> None:
    with Ledger() as ledger:
        model = nn.Linear(4, 4, bias=False)
        bucket = device.empty(16, torch.float32, "gradients", CPU)

        def take(p: Tensor) -> None:
            assert p.grad is not None
            bucket.copy_(p.grad.flatten())
            p.grad = None

        model.weight.register_post_accumulate_grad_hook(take)
        ledger.watch(model)
        ledger.reset_peaks()
        model(torch.ones(1, 4)).sum().backward()
        assert ledger.live() == bytes_of(parameters=64, gradients=64)
        assert ledger.peak_of("gradients") == 64


def test_gradients_that_view_a_bucket_count_once() -> None:
    with Ledger() as ledger:
        model = nn.Linear(4, 4)  # 64 + 16 bytes
        bucket = device.empty(20, torch.float32, "gradients", CPU).zero_()
        for p, view in zip(model.parameters(), bucket.split([16, 4]), strict=True):
            p.grad = view.view_as(p)
        ledger.watch(model)
        ledger.reset_peaks()
        model(torch.ones(1, 4)).sum().backward()
        assert ledger.live() == bytes_of(parameters=80, gradients=80)
        assert ledger.peak_of("gradients") == 80


def test_leaves_that_are_nobodys_parameters() -> None:
    """An FSDP unit's leaves: views of an unsharded buffer, held outside `module.parameters()`."""
    with Ledger() as ledger:
        shard = nn.Linear(2, 1, bias=False)
        full = device.empty(4, torch.float32, "unsharded", CPU).zero_()
        leaf = nn.Parameter(full.view(2, 2))
        optimizer = torch.optim.SGD(shard.parameters())
        ledger.watch(shard, optimizer, leaves=[leaf])
        leaf.sum().backward()
        assert ledger.live() == bytes_of(parameters=8, unsharded=16, gradients=16)
        shard.weight.grad = torch.ones(1, 2)
        assert ledger.live()["gradients"] == 16
        assert ledger.mark("set by hand")["gradients"] == 16 + 8


class Wrapped(torch.optim.Optimizer):
    """Like ZeRO's: whole parameters outside, an optimizer over other tensors inside."""

    def __init__(self, params: Any, shard: nn.Parameter) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.Adam([shard])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_the_state_of_an_optimizer_inside_another() -> None:
    with Ledger() as ledger:
        model = nn.Linear(4, 4, bias=False)
        shard = nn.Parameter(model.weight.detach().view(-1)[:8])
        optimizer = Wrapped(model.parameters(), shard)
        ledger.watch(model, optimizer)
        shard.grad = torch.zeros(8)
        optimizer.step()
        assert ledger.live() == bytes_of(parameters=64, activations=32, optimizer=2 * 32 + 4)
        assert ledger.mark("step") == bytes_of(parameters=64, gradients=32, optimizer=2 * 32 + 4)


def test_buffers_tied_and_frozen_parameters() -> None:
    with Ledger() as ledger:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
        model[2].weight = model[0].weight
        model[1].requires_grad_(False)
        ledger.watch(model)
        norm = 4 * 4 * 4 + 8  # weight, bias, running mean and variance; the count of batches is an int64
        assert ledger.live() == bytes_of(parameters=64 + norm)
        model(torch.ones(2, 4)).sum().backward()
        assert ledger.live() == bytes_of(parameters=64 + norm, gradients=64)


# Peaks and curves


def test_the_peak_of_a_sum_is_not_the_sum_of_the_peaks() -> None:
    def one_then_the_other(together: bool) -> None:
        first = device.empty(10, torch.float32, "gradients", CPU)
        if not together:
            device.free(first)
        second = device.empty(5, torch.float32, "communication", CPU)
        device.free(second)
        device.free(first)

    with Ledger() as ledger:
        one_then_the_other(together=False)
        assert ledger.peak_of("gradients") == ledger.peak_of("gradients", "communication") == 40
        assert ledger.peak_of("communication") == 20
        ledger.reset_peaks()
        one_then_the_other(together=True)
        assert ledger.peak_of("gradients", "communication") == 60
        assert ledger.peak == (60, bytes_of(gradients=40, communication=20))
        ledger.reset_peaks()
        assert ledger.peak_of("gradients", "communication") == 0


def test_a_reset_starts_from_what_is_alive() -> None:
    with Ledger() as ledger:
        x = torch.zeros(10)
        ledger.reset_peaks()
        assert ledger.events == []
        del x
        assert ledger.live() == bytes_of()
        assert ledger.peak.total == 40


def test_curve() -> None:
    with Ledger() as ledger:
        x = torch.zeros(10)
        ledger.reset_peaks()
        ledger.mark("start")
        y = torch.zeros(5)
        at_mark = ledger.mark("both")
        del x
        ledger.tag(y, "gradients")
        curve = json.loads(json.dumps(ledger.curve()))
    assert set(curve["tags"]) == set(TAGS)
    assert curve["tags"]["activations"] == [40, 40, 60, 60, 20, 0]
    assert curve["tags"]["gradients"] == [0, 0, 0, 0, 0, 20]
    assert curve["marks"] == [[1, "start"], [3, "both"]]
    assert {tag: levels[3] for tag, levels in curve["tags"].items()} == at_mark


# Other ways to run a model


def test_no_grad_and_inference_mode_leave_nothing() -> None:
    with Ledger() as ledger:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        ledger.watch(model)
        for mode in (torch.no_grad, torch.inference_mode):
            ledger.reset_peaks()
            with mode():
                model(torch.ones(8, 4))
            assert ledger.live() == bytes_of(parameters=160)
            assert ledger.peak_of("activations") == 3 * 128, "input, hidden, output"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_trade_activations_for_nothing_else(reentrant: bool) -> None:
    def step(run: Callable[..., Tensor]) -> tuple[int, dict[str, int]]:
        with Ledger() as ledger:
            model = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.GELU()) for _ in range(4))
            x = torch.ones(16, 8, requires_grad=True)
            ledger.watch(model, leaves=[x])
            h = x
            for block in model:
                h = run(block, h)
            kept = ledger.live()["activations"] - 512  # without the input: [16, 8] floats are 512 bytes
            h.sum().backward()
            del h
            return kept, ledger.live()

    plain, after_plain = step(lambda block, h: block(h))
    checkpointed, after = step(lambda block, h: checkpoint(block, h, use_reentrant=reentrant))  # type: ignore[no-any-return]
    assert plain == 4 * 3 * 512
    assert checkpointed - 4 * 512 in range(0, 4 * 16), "each block's output, and at most a random state each"
    assert after == after_plain == bytes_of(parameters=4 * 288, gradients=4 * 288 + 512, activations=512)


def test_meta_tensors_weigh_nothing_and_fake_ones_what_real_ones_would() -> None:
    with Ledger() as ledger, torch.device("meta"):
        model = GPT()
        ledger.watch(model)
        assert ledger.live() == bytes_of()

    def step() -> tuple[dict[str, int], Any]:
        with Ledger() as ledger:
            model = GPT(layers=1, width=15)
            optimizer = torch.optim.AdamW(model.parameters())
            ledger.watch(model, optimizer)
            tokens = torch.zeros(2, 8, dtype=torch.int64)
            model(tokens, tokens).backward()
            optimizer.step()
            return ledger.live(), ledger.peak

    real = step()
    with FakeTensorMode():
        assert step() == real


def test_sparse_gradients_do_no_harm() -> None:
    with Ledger() as ledger:
        model = nn.Embedding(10, 4, sparse=True)
        ledger.watch(model)
        model(torch.tensor([1, 2])).sum().backward()
        assert ledger.mark("backward")["parameters"] == 160


# A second opinion


def profiled_changes(step: Callable[[], None], path: Path) -> list[int]:
    """Every allocation (+) and release (-) that torch.profiler sees in `step`, in bytes and in order."""
    with profile(profile_memory=True) as prof:
        step()
    prof.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "[memory]"]
    return [e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"])]


def test_the_profiler_agrees(tmp_path: Path) -> None:
    """What each stage leaves and how high it goes, with the ledger on and without it.

    The step aside: operators make tensors of 8 bytes out of Python numbers, which they do not return.
    """

    def step_of(ledger: Ledger | None) -> Iterator[tuple[list[int], int, int]]:
        torch.manual_seed(0)
        model = GPT(layers=2, width=33, context=64)
        optimizer = torch.optim.AdamW(model.parameters())
        if ledger:
            ledger.watch(model, optimizer)
        tokens = torch.zeros(4, 64, dtype=torch.int64)
        losses: list[Tensor] = []

        def forward() -> None:
            losses.append(model(tokens, tokens))

        def backward() -> None:
            losses.pop().backward()

        for stage in (forward, backward, optimizer.step, optimizer.zero_grad):
            if ledger:
                ledger.reset_peaks()
            before = total(ledger)
            changes = profiled_changes(stage, tmp_path / "trace.json")
            yield changes, total(ledger) - before, ledger.peak.total - before if ledger else 0

    with Ledger() as ledger:
        watched = list(step_of(ledger))
    for stage, (changes, left, peak), (unwatched, _, _) in zip("fbsz", watched, step_of(None), strict=True):
        assert sum(changes) == sum(unwatched) == left, stage
        slack = 32 if stage == "s" else 0
        assert 0 <= highest(changes) - peak <= slack, stage
        assert 0 <= highest(unwatched) - peak <= slack, stage


def total(ledger: Ledger | None) -> int:
    return sum(ledger.live().values()) if ledger else 0


def highest(changes: list[int]) -> int:
    level = peak = 0
    for change in changes:
        level += change
        peak = max(peak, level)
    return peak


def test_a_recount_of_all_tensors_agrees() -> None:
    def storages() -> dict[int, int]:
        tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and not x.is_meta]
        grads = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors + grads}

    gc.collect()
    before = storages().keys()

    def recount() -> int:
        return sum(nbytes for key, nbytes in storages().items() if key not in before)

    with Ledger() as ledger:
        model = GPT(layers=1, width=10, context=8)
        optimizer = torch.optim.AdamW(model.parameters())
        ledger.watch(model, optimizer)
        for name in ("first", "second"):
            tokens = torch.zeros(2, 8, dtype=torch.int64)
            model(tokens, tokens).backward()
            assert recount() == sum(ledger.mark(f"{name} backward").values())
            optimizer.step()
            assert recount() == sum(ledger.mark(f"{name} step").values())
            optimizer.zero_grad()
            del tokens
            assert recount() == sum(ledger.mark(f"{name} end").values())


# On and off


def test_leaves_no_trace() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    resize = torch.UntypedStorage.resize_
    ledger = Ledger()

    def fail(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with ledger:
            ledger.watch(model, optimizer)
            assert not gc.isenabled()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail(model, optimizer)
    assert gc.isenabled()
    assert torch.UntypedStorage.resize_ is resize
    assert "resize_" not in vars(torch.UntypedStorage)
    assert device.buffer_observers == comm.observers == []
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_post_hooks
    at_exit = ledger.live()
    assert at_exit == bytes_of(parameters=24)
    x = model(torch.ones(1, 2))
    del model, optimizer, x
    assert ledger.live() == at_exit, "it can still be read, and counts no more"


def test_memory_in_a_reference_cycle_shows_until_the_next_mark() -> None:
    with Ledger() as ledger:
        x: Any = torch.zeros(10)
        x.me = x
        del x
        assert ledger.live() == bytes_of(activations=40)
        assert ledger.mark("collected") == bytes_of()


def test_a_mark_waits_until_gloos_threads_have_dropped_the_last_tensors() -> None:
    def held_after_a_collective() -> list[int]:
        held = []
        with Ledger() as ledger:
            for _ in range(20):
                x = torch.ones(18432)
                comm.all_reduce(x, comm.world()).wait()
                del x
                held.append(ledger.mark("reduced")["activations"])
        return held

    assert launch(held_after_a_collective, 4) == [[0] * 20] * 4


def test_one_at_a_time() -> None:
    with Ledger() as ledger:
        with pytest.raises(RuntimeError, match="counting already"), Ledger():
            pass
        with pytest.raises(RuntimeError, match="counting already"), ledger:
            pass
        x = torch.zeros(1)
        assert ledger.live() == bytes_of(activations=4), "the refusals have not switched it off"
        del x
    with pytest.raises(RuntimeError, match="make a new one"), ledger:
        pass
    with pytest.raises(RuntimeError, match="inside the `with`"):
        ledger.watch(nn.Linear(1, 1))
    with Ledger(), pytest.raises(RuntimeError, match="inside the `with`"):
        ledger.watch(nn.Linear(1, 1))


def test_unknown_tag() -> None:
    with pytest.raises(ValueError, match=r"no such tag: grads; choose from parameters, unsharded"):
        Ledger().peak_of("grads")  # type: ignore[arg-type]


def test_a_pause_is_this_threads_only() -> None:
    call = comm.Call("all_gather", "all_gather_single", "group", 0, 0, 1)
    paused, go_on = threading.Event(), threading.Event()

    def wait_for_a_collective() -> None:
        with comm.observers[-1](call, "wait"):
            paused.set()
            go_on.wait(10)

    with Ledger() as ledger:
        other = threading.Thread(target=wait_for_a_collective)
        other.start()
        paused.wait(10)
        x = torch.zeros(3)
        assert ledger.live() == bytes_of(activations=12)
        with comm.observers[-1](call, "issue"):
            backends = torch.zeros(100)
            del x
        assert ledger.live() == bytes_of(), "what dies inside a collective is seen to"
        backends.add_(1)
        assert ledger.live() == bytes_of()
        go_on.set()
        other.join()


# On two ranks


def sharded_steps(group: comm.Group) -> None:
    """Two steps of one sharded layer: gather, compute, reduce-scatter, update."""
    rank, n = group.rank(), group.size()
    full = device.empty(16 * n, torch.float32, "unsharded", CPU)
    target = full.data
    layer = nn.Module()
    layer.shard = nn.Parameter(torch.full((16,), float(rank)))
    leaf = nn.Parameter(full)
    optimizer = torch.optim.Adam(layer.parameters())
    ledger = Ledger._counting
    assert ledger is not None
    ledger.watch(layer, optimizer, leaves=[leaf])
    device.free(full)
    for _ in range(2):
        device.allocate(full)
        gathering = comm.all_gather(target, layer.shard.data, group)
        x = torch.ones(3, 16 * n)
        gathering.wait()
        (x * leaf).relu().sum().backward()
        gradient = device.empty(16 * n, torch.float32, "gradients", CPU)
        assert leaf.grad is not None
        gradient.copy_(leaf.grad)
        leaf.grad = None
        reduced = device.empty(16, torch.float32, "gradients", CPU)
        reduction = comm.reduce_scatter(reduced, gradient, group, comm.MEAN)
        device.free(full)
        reduction.wait()
        device.free(gradient)
        layer.shard.grad = reduced
        optimizer.step()
        optimizer.zero_grad()
        device.free(reduced)


class Busy:
    """A link that allocates on the caller's thread, as gloo does, more or less each time."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def submit(self, call: comm.Call, collective: Callable[[], Any]) -> Any:
        self.kept.append(torch.zeros(len(self.kept) + 1))
        self.work = collective()
        return self

    def wait(self) -> None:
        self.kept.append(torch.zeros(1000))
        self.work.wait()


def events_on_this_rank() -> dict[str, Any]:
    group = comm.world()

    def once() -> tuple[list[Any], int]:
        with Ledger() as ledger:
            sharded_steps(group)
        return [(event.cause, event.changes) for event in ledger.events], ledger.peak_of("gradients", "communication")

    direct = [once() for _ in range(5)]
    with EmulatedLink(latency=1e-3, bandwidth=1e8):
        linked = [once() for _ in range(5)]
    comm.link = Busy()
    busy = once()
    comm.link = None

    with Ledger() as ledger:
        model = nn.Linear(8, 8)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        ledger.watch(model, optimizer)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        torchs = ledger.mark("step")
    dist.barrier()
    return {"direct": direct, "linked": linked, "busy": busy, "torch's FSDP2": torchs}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Any]]:
    return launch(events_on_this_rank, 2)


def test_the_same_events_in_every_run(on_two_ranks: list[dict[str, Any]]) -> None:
    first = on_two_ranks[0]["direct"][0]
    assert len(first[0]) > 30
    assert first[1] == (32 + 16 + 16) * 4, "a gradient, its mean's shard, and what the other rank sends of its own"
    for rank in on_two_ranks:
        assert rank["direct"] == [first] * 5


def test_the_same_events_on_an_emulated_link(on_two_ranks: list[dict[str, Any]]) -> None:
    for rank in on_two_ranks:
        assert rank["linked"] == rank["direct"]


def test_what_a_backend_allocates_inside_a_collective_is_not_seen(on_two_ranks: list[dict[str, Any]]) -> None:
    for rank in on_two_ranks:
        assert rank["busy"] == rank["direct"][0]


def test_a_dtensor_weighs_what_its_shard_does(on_two_ranks: list[dict[str, Any]]) -> None:
    for rank in on_two_ranks:
        bytes_by_tag = rank["torch's FSDP2"]
        assert bytes_by_tag["parameters"] == bytes_by_tag["gradients"] == 72 * 4 // 2
        assert bytes_by_tag["optimizer"] == 72 * 4 + 2 * 4
