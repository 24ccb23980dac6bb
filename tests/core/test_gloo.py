"""The collectives that gloo gets from us: the same numbers as its own, memory to the byte, and errors on all ranks."""

from __future__ import annotations

import gc
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import reduce
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFsdp
from torch.distributed.tensor.debug import CommDebugMode
from torchs_calls import torchs_calls

from minifsdp import comm, device, gloo
from minifsdp.course import cli
from minifsdp.fsdp import FullyShardedDataParallel as Fsdp
from minifsdp.instruments.launch import launch
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.storages import TAGS

check = Checks(__name__)

FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
DTYPES = (FP32, FP64, BF16, FP16)
OPS = {"sum": comm.SUM, "mean": comm.MEAN}
SIZE = 37  # of a part: no multiple of anything


def inputs(dtype: torch.dtype, size: int = SIZE) -> list[Tensor]:
    """What each rank has [N * size], by rank; every rank knows all."""
    n = dist.get_world_size()
    numbers = torch.Generator().manual_seed(0)
    return [torch.randn(n * size, generator=numbers).to(dtype) for _ in range(n)]


def mine(full: Tensor) -> Tensor:
    return full.chunk(dist.get_world_size())[dist.get_rank()]


def reduced(full: Tensor, op: Any = comm.SUM) -> Tensor:
    output = torch.full_like(mine(full), torch.nan)
    comm.reduce_scatter(output, full, comm.world(), op).wait()
    return output


def functions(do: Callable[[], Any]) -> list[tuple[str, str]]:
    """The operation and the function of each call that is issued."""
    with comm.record() as calls:
        do()
    return [(call.op, call.function) for call in calls]


@contextmanager
def handed_out() -> Iterator[list[weakref.ref[Tensor]]]:
    """Buffers for what arrives, in order, kept alive by nobody here."""
    buffers: list[weakref.ref[Tensor]] = []

    def tell(buffer: Tensor, role: str) -> None:
        if role == "communication":
            buffers.append(weakref.ref(buffer))

    device.buffer_observers.append(tell)
    try:
        yield buffers
    finally:
        device.buffer_observers.remove(tell)


# Reduce-scatter: values


@check(dtype=DTYPES, op=OPS)
def two_ranks_reduce_to_the_bits_of_gloos_own(dtype: torch.dtype, op: Any) -> None:
    full = inputs(dtype)[dist.get_rank()]
    before, native = full.clone(), torch.empty_like(mine(full))
    getattr(dist, comm._REDUCE_SCATTER)(native, full, op)
    assert torch.equal(reduced(full, op), native)
    assert torch.equal(full, before), "the input is to stay"


@check(ranks=3, dtype=DTYPES, op=OPS)
def three_ranks_reduce_to_the_same_within_rounding(dtype: torch.dtype, op: Any) -> None:
    each = inputs(dtype)
    parts, divisor = torch.stack([mine(full) for full in each]).double(), 3 if op == comm.MEAN else 1
    error = reduced(each[dist.get_rank()], op).double() - parts.sum(0) / divisor
    assert (error.abs() <= torch.finfo(dtype).eps * parts.abs().sum(0)).all()


@check(ranks=3, dtype=DTYPES)
def parts_are_added_in_rank_order_whoever_adds_them(dtype: torch.dtype) -> None:
    """So each of the ranks, which here have the same three numbers to add for each part, gets the same bits."""
    size = 5
    values = [part[:size].repeat(3) for part in inputs(dtype)]
    output = reduced(values[dist.get_rank()])
    assert torch.equal(output, reduce(torch.add, values)[:size])


@check(dtype=(FP32, BF16))
def a_maximum_is_the_backends_own(dtype: torch.dtype) -> None:
    each, output = inputs(dtype), torch.empty(SIZE, dtype=dtype)
    with handed_out() as buffers:
        called = functions(lambda: comm.reduce_scatter(output, each[dist.get_rank()], comm.world(), comm.MAX).wait())
    assert called == [("reduce_scatter", comm._REDUCE_SCATTER)]
    assert not buffers
    assert torch.equal(output, mine(torch.stack(each).amax(0)))


@check(ranks=(2, 3, 4), op=OPS)
def the_output_may_be_this_ranks_part_of_the_input(op: Any) -> None:
    full = inputs(FP64)[dist.get_rank()]
    expected, others = reduced(full, op), full.clone()
    comm.reduce_scatter(mine(full), full, comm.world(), op).wait()
    assert torch.equal(mine(full), expected)
    mine(full).copy_(mine(others))
    assert torch.equal(full, others), "the other parts are to stay"


@check()
def to_wait_gives_nothing() -> None:
    """A gradient's hook may end with it: what a hook returns takes the gradient's place."""
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda grad: comm.all_reduce(grad, comm.world()).wait())
    for watching in (nullcontext(), comm.record()):
        with watching:
            weight.grad = None
            weight.sum().backward()
            assert weight.grad.tolist() == [2, 2]


@check(ranks=3)
def several_may_be_under_way_and_be_waited_for_in_any_order() -> None:
    """Of different sizes, so that what arrives for one would not do for another."""
    group, rank = comm.world(), dist.get_rank()
    each = [inputs(FP64, size) for size in (5, 50_000, 1)]
    outputs = [torch.empty_like(mine(full[rank])) for full in each]
    handles = [comm.reduce_scatter(output, full[rank], group) for output, full in zip(outputs, each, strict=True)]
    for index in (1, 2, 0):
        handles[index].wait()
        torch.testing.assert_close(outputs[index], mine(torch.stack(each[index]).sum(0)))


@check(ranks=3)
def a_part_may_be_empty() -> None:
    nothing = torch.empty(0)
    assert reduced(nothing).numel() == 0
    comm.all_gather(nothing, nothing, comm.world()).wait()


@check(ranks=(2, 3))
def to_wait_twice_is_harmless_and_does_nothing_again() -> None:
    full, group = inputs(FP32)[dist.get_rank()], comm.world()
    output, gathered = torch.empty(SIZE), torch.empty_like(full)
    for handle, written in (
        (comm.reduce_scatter(output, full, group), output),
        (comm.all_gather(gathered, mine(full), group), gathered),
    ):
        handle.wait()
        written.add_(1)
        changed = written.clone()
        handle.wait()
        assert torch.equal(written, changed)


# Reduce-scatter: memory


@check(ranks=(2, 3), dtype=(FP32, BF16))
def what_arrives_has_a_buffer_from_the_issue_to_the_wait(dtype: torch.dtype) -> None:
    """By the ledger: N - 1 parts, of the role "communication", and nothing else that it did not know."""
    full, n = inputs(dtype)[dist.get_rank()], dist.get_world_size()
    output = torch.empty(SIZE, dtype=dtype)
    nothing = dict.fromkeys(TAGS, 0)
    with Ledger() as ledger:
        handle = comm.reduce_scatter(output, full, comm.world(), comm.MEAN)
        assert ledger.live() == nothing | {"communication": (n - 1) * SIZE * dtype.itemsize}
        handle.wait()
        assert ledger.live() == nothing
        assert sum(ledger.peak.tags.values()) == (n - 1) * SIZE * dtype.itemsize


@check()
def nothing_is_left_of_the_buffers() -> None:
    full, group = inputs(FP32)[dist.get_rank()], comm.world()
    output = torch.empty(SIZE)
    with handed_out() as buffers:
        kept = [comm.reduce_scatter(output, full, group) for _ in range(3)]
        assert [buffer().untyped_storage().nbytes() for buffer in buffers] == [SIZE * 4] * 3  # type: ignore[union-attr]
        for handle in kept:
            handle.wait()
    for buffer in buffers:
        there = buffer()
        assert there is None or not there.untyped_storage().nbytes()
    del there, kept, handle
    gc.collect()
    assert [buffer() for buffer in buffers] == [None] * 3


# All-gather


@check(ranks=(2, 3), dtype=(*DTYPES, torch.int64, torch.uint8, torch.bool), in_place=(False, True))
def shards_are_gathered_in_rank_order_on_all_ranks(dtype: torch.dtype, in_place: bool) -> None:
    n = dist.get_world_size()
    whole = torch.arange(n * SIZE).remainder(2 if dtype is torch.bool else 100).to(dtype)
    output = torch.zeros_like(whole)
    shard = mine(output).copy_(mine(whole)) if in_place else mine(whole).clone()
    with handed_out() as buffers:
        called = functions(lambda: comm.all_gather(output, shard, comm.world()).wait())
    assert called == [("all_gather", "broadcast")], "one call, whatever it consists of"
    assert not buffers
    assert torch.equal(output, whole)
    assert torch.equal(shard, mine(whole))


# What goes wrong


@check(ranks=(2, 3), kind=("gather", "gather, dtype", "reduce", "reduce, output", "reduce, dtype"))
def other_sizes_and_dtypes_are_an_error_on_all_ranks_and_nothing_is_under_way(kind: str) -> None:
    n, group = dist.get_world_size(), comm.world()
    whole, longer, part = torch.ones(n * 4), torch.ones(n * 4 + 1), torch.ones(4)
    wrong: dict[str, Callable[[], Any]] = {
        "gather": lambda: comm.all_gather(longer, part, group),
        "gather, dtype": lambda: comm.all_gather(whole, part.bfloat16(), group),
        "reduce": lambda: comm.reduce_scatter(part, longer, group),
        "reduce, output": lambda: comm.reduce_scatter(torch.ones(3), whole, group).wait(),
        "reduce, dtype": lambda: comm.reduce_scatter(part.double(), whole, group).wait(),
    }
    with pytest.raises((RuntimeError, ValueError), match="dtype|type" if "dtype" in kind else None):
        wrong[kind]()
    assert torch.equal(reduced(whole), torch.full((4,), float(n)))  # the next one finds no message of that one
    comm.all_gather(whole, 2 * part, group).wait()
    assert torch.equal(whole, torch.full((n * 4,), 2.0))


# Who decides


@contextmanager
def told(choice: str) -> Iterator[None]:
    with patch.object(gloo, "wanted", lambda: choice):
        yield


@check(wanted=gloo.OLD_CHOICES)
def it_is_one_call_by_the_function_that_is_wanted(wanted: str) -> None:
    full, native = inputs(FP32)[dist.get_rank()], wanted == "native"
    with told(wanted), handed_out() as buffers:
        called = functions(lambda: reduced(full))
        gathered = functions(lambda: comm.all_gather(full.clone(), mine(full), comm.world()).wait())
    assert called == [("reduce_scatter", comm._REDUCE_SCATTER if native else "isend")]
    assert gathered == [("all_gather", comm._ALL_GATHER if native else "broadcast")]
    assert len(buffers) == (not native)


@check(wanted=gloo.CHOICES, watched=(True, False), dtype=(torch.float32, torch.complex64))
def a_message_is_a_call_of_torchs_where_someone_may_count_it(wanted: str, watched: bool, dtype: torch.dtype) -> None:
    received, group, other = torch.zeros(3, dtype=dtype), comm.world(), 1 - dist.get_rank()
    with told(wanted), torchs_calls() as calls, comm.record() if watched else nullcontext():
        handles = [comm.send(torch.ones(3, dtype=dtype), other, group), comm.recv(received, other, group)]
        for handle in handles:
            handle.wait()
    assert torch.equal(received, torch.ones_like(received))
    assert [name for name, _ in calls] == (["isend", "irecv"] if watched or wanted == "native" else [])


@contextmanager
def groups_taken(*functions: str) -> Iterator[list[tuple[Any, ...]]]:
    """Of each call of these: its name, and its group."""
    taken: list[tuple[Any, ...]] = []

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*args: Any, **given: Any) -> Any:
            taken.append((name, given["group"]))
            return call(*args, **given)

        return issue

    with ExitStack() as stack:
        for name in functions:
            stack.enter_context(patch.object(dist, name, watched(name, getattr(dist, name))))
        yield taken


@check()
def what_two_ranks_send_each_other_takes_two_connections() -> None:
    with groups_taken("broadcast", "isend", "irecv") as taken:
        comm.all_gather(torch.empty(4), torch.ones(2), comm.world()).wait()
        comm.reduce_scatter(torch.empty(2), torch.ones(4), comm.world()).wait()
    assert [name for name, _ in taken] == ["broadcast", "broadcast", "irecv", "isend"]
    groups = [group for _, group in taken]
    assert groups[0] is not groups[1]  # from rank 0, from rank 1
    assert groups[2] is not groups[3]
    assert [group.size() for group in groups] == [2] * 4


@contextmanager
def connected() -> Iterator[list[Any]]:
    """The groups that are connected once more."""
    made: list[Any] = []
    of = gloo.Connections.of
    with patch.object(gloo.Connections, "of", lambda group: made.append(group) or of(group)):
        yield made


@check()
def a_group_is_connected_once_more_and_only_once() -> None:
    group = dist.new_group()
    with connected() as made:
        for _ in range(3):
            comm.reduce_scatter(torch.empty(2), torch.ones(4), group).wait()
            comm.all_gather(torch.empty(4), torch.ones(2), group).wait()
    assert made == [group]


@check()
def torchs_own_collectives_need_no_second_connection() -> None:
    group = dist.new_group()
    with connected() as made, told("native"):
        comm.all_reduce(torch.ones(2), group).wait()
        comm.all_gather(torch.empty(4), torch.ones(2), group).wait()
    assert made == []


@check(ranks=3)
def ranks_may_be_in_different_numbers_of_groups() -> None:
    """torch's own way to make a group of a part of the world hangs there."""
    part = dist.new_group([1, 2])
    group = dist.new_group()
    gathered = torch.empty(3)
    comm.all_gather(gathered, torch.tensor([float(dist.get_rank())]), group).wait()
    assert gathered.tolist() == [0, 1, 2]
    if dist.get_rank():
        pair = torch.empty(2)
        comm.all_gather(pair, torch.tensor([float(dist.get_rank())]), part).wait()
        assert pair.tolist() == [1, 2]


@check(ranks=1)
def one_rank_has_nobody_to_exchange_with() -> None:
    full = inputs(FP32)[0]
    for wanted in gloo.OLD_CHOICES:
        with told(wanted):
            assert functions(lambda: reduced(full)) == [("reduce_scatter", comm._REDUCE_SCATTER)]
            assert torch.equal(reduced(full, comm.MEAN), full)


@pytest.mark.parametrize(
    ("wanted", "backend", "ranks", "expected"),
    [
        ("auto", "gloo", 2, True),
        ("auto", "nccl", 2, False),
        ("auto", "gloo", 1, False),
        ("native", "gloo", 2, False),
        ("alltoall", "nccl", 2, True),
        ("alltoall", "nccl", 1, False),
    ],
)
def test_where_reductions_are_exchanges(wanted: str, backend: str, ranks: int, expected: bool) -> None:
    with told(wanted):
        assert gloo.reduces_by_all_to_all(backend, ranks) is expected


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        ("", "", "auto"),
        ("auto", "", "auto"),
        ("native", "", "native"),
        ("", "auto", "auto"),
        ("", "native", "native"),
        ("", "alltoall", "alltoall"),
        ("auto", "native", "auto"),
        ("native", "alltoall", "native"),
    ],
)
def test_the_new_name_goes_before_the_old_one(new: str, old: str, expected: str) -> None:
    assert gloo.choice_in({gloo.NAME: new, gloo.OLD_NAME: old}) == expected


@pytest.mark.parametrize(("name", "value"), [(gloo.NAME, "alltoall"), (gloo.NAME, "Native"), (gloo.OLD_NAME, "ring")])
def test_nonsense_is_named_with_the_choices(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value}: set MINIFSDP_COLLECTIVES to auto or native, or unset it$"):
        gloo.choice_in({name: value})


# Who counts torch.distributed's calls

UNITS = 3
COUNTED = {
    "all-gather": ("all_gather", "all_gather_single", "all_gather_into_tensor"),
    "reduce-scatter": ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    "other": ("broadcast", "all_reduce", "isend", "irecv", "all_to_all", "all_to_all_single"),
}


def counted_from_outside(wrap: Callable[..., nn.Module], **options: Any) -> tuple[dict[str, int], list[int]]:
    """The calls of a step by name, by patches of torch.distributed and by torch's own CommDebugMode."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), *(wrap(nn.Linear(4, 4), **options) for _ in range(UNITS - 1)))
    model, x = wrap(net, **options), torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()  # and what comes once
    calls: Counter[str] = Counter()

    def counting(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: calls.update([kind]) or function(*args, **kwargs)

    with ExitStack() as stack:
        for kind, names in COUNTED.items():
            for name in (name for name in names if hasattr(dist, name)):
                stack.enter_context(patch.object(dist, name, counting(kind, getattr(dist, name))))
        seen = stack.enter_context(CommDebugMode())
        model(x).sum().backward()
    return dict(calls), sorted(seen.get_comm_counts().values())


def count_on_a_rank() -> Any:
    theirs = counted_from_outside(TorchsFsdp, device_id=torch.device("cpu"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = counted_from_outside(Fsdp)
    return mine, theirs, [str(each.message) for each in caught if each.category is FutureWarning]


@pytest.mark.parametrize("name", [gloo.NAME, gloo.OLD_NAME])
def test_native_is_torchs_calls_and_no_others(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By one who counts from outside: 2U - 1 all-gathers and U reduce-scatters, as with torch's FSDP."""
    monkeypatch.setenv(name, "native")
    for rank, (mine, theirs, said) in enumerate(launch(count_on_a_rank, 2)):
        assert mine == theirs
        assert mine == ({"all-gather": 2 * UNITS - 1, "reduce-scatter": UNITS}, [UNITS, 2 * UNITS - 1])
        is_warned = name == gloo.OLD_NAME and rank == 0
        assert [each for each in said if "MINIFSDP" in each] == [
            "MINIFSDP_REDUCE_SCATTER is MINIFSDP_COLLECTIVES now, and goes with the next release"
        ] * is_warned


def test_by_default_whoever_counts_sees_what_they_are_made_of() -> None:
    for mine, _, _ in launch(count_on_a_rank, 2):
        assert mine[0] == {"other": 2 * (2 * UNITS - 1) + 2 * UNITS}  # broadcasts, sends and receives


QUICKLY = "MINIFSDP_COLLECTIVES=quickly: set MINIFSDP_COLLECTIVES to auto or native, or unset it"


def test_the_command_line_refuses_it_before_a_rank_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(gloo.NAME, "quickly")
    monkeypatch.setattr(sys, "argv", ["minifsdp", "train", "--steps", "1"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"minifsdp: {QUICKLY}\n")


def reduce_quickly() -> None:
    os.environ[gloo.NAME] = "quickly"
    with pytest.raises(ValueError, match=QUICKLY):
        comm.all_reduce(torch.ones(2), comm.world())


def test_a_rank_refuses_it_at_the_first_collective_whichever() -> None:
    """As in a script of torchrun's, which no command has looked at."""
    launch(reduce_quickly, 1)


def reduce_twice_and_wait_once() -> list[float]:
    comm.reduce_scatter(torch.empty(SIZE), torch.full((2 * SIZE,), 100.0), comm.world())
    return reduced(torch.ones(2 * SIZE)).tolist()


def test_one_that_nobody_waits_for_takes_nothing_from_the_next() -> None:
    """By itself, for ranks that wait for a message that is lost never come back."""
    assert launch(reduce_twice_and_wait_once, 2, timeout=10) == [[2.0] * SIZE] * 2


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
