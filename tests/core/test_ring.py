"""The ring: equal to torch.distributed on any shape, dtype and N, and exactly the bytes that the algorithm promises."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minifsdp import gloo, ring
from minifsdp.instruments.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])

GLOO_REDUCES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64]
DTYPES = [*GLOO_REDUCES, torch.int16, torch.complex64]
BIG = 1 << 20  # elements: more than any transport buffers, so a send finishes only once its receive is posted


class Example(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool
    seed: int

    def tensor(self, rank: int) -> Tensor:
        """Rank `rank`'s input: small whole numbers, so that sums are exact in every dtype and in any order."""
        numbers = torch.Generator().manual_seed(1000 * self.seed + rank)
        shape = self.shape[::-1] if self.transposed else self.shape
        tensor = torch.randint(-5, 6, shape, generator=numbers).to(self.dtype)
        return tensor.permute(tuple(reversed(range(tensor.dim())))) if self.transposed else tensor


def draw_examples(count: int) -> list[Example]:
    """The same examples on every run: ranks that saw different ones would wait for each other for ever."""
    drawn: list[Example] = []
    shapes = st.one_of(st.just(()), st.tuples(st.integers(0, 40)), st.lists(st.integers(0, 6), max_size=3).map(tuple))

    @settings(max_examples=count, derandomize=True, database=None, deadline=None)
    @given(st.builds(Example, shapes, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99)))
    def draw(example: Example) -> None:
        drawn.append(example)

    draw()
    return drawn


@contextmanager
def posted() -> Iterator[list[tuple[str, Any]]]:
    """Everything that goes to `isend` and `irecv`, and every wait for it, in order: (what, tensor or None)."""
    log: list[tuple[str, Any]] = []

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            log.append(("wait", None))
            self.work.wait()

    def watch(name: str) -> Any:
        real = getattr(dist, name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Watched:
            log.append((name, tensor))
            return Watched(real(tensor, *args, **kwargs))

        return mock.patch.object(dist, name, call)

    with mock.patch.object(gloo, "wanted", return_value="native"), watch("isend"), watch("irecv"):
        yield log


def bytes_sent(log: list[tuple[str, Any]]) -> int:
    return sum(tensor.numel() * tensor.element_size() for what, tensor in log if what == "isend")


def check_example(example: Example) -> None:
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    inputs = [example.tensor(r) for r in range(ranks)]
    total = torch.stack(inputs).sum(0, dtype=example.dtype)
    numel = total.numel()
    length = -(-numel // ranks)
    padded = torch.zeros(ranks * length, dtype=example.dtype)
    padded[:numel] = total.reshape(-1)
    step_bytes = length * total.element_size()

    mine = inputs[rank].clone(memory_format=torch.preserve_format)
    with posted() as log:
        ring.all_reduce(mine, group)
    assert mine.stride() == inputs[rank].stride()
    assert torch.equal(mine, total)
    assert bytes_sent(log) == 2 * (ranks - 1) * step_bytes
    if example.dtype in GLOO_REDUCES:
        torchs = inputs[rank].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(torchs)
        assert torch.equal(mine, torchs)

    full, shard = inputs[rank].clone(memory_format=torch.preserve_format), torch.empty(length, dtype=example.dtype)
    with posted() as log:
        ring.reduce_scatter(shard, full, group)
    assert torch.equal(shard, padded.view(ranks, length)[rank])
    assert torch.equal(full, inputs[rank]), "reduce_scatter must leave its input alone"
    assert bytes_sent(log) == (ranks - 1) * step_bytes

    output = torch.empty_like(total)
    with posted() as log:
        ring.all_gather(output, shard, group)
    assert torch.equal(output, total)
    assert bytes_sent(log) == (ranks - 1) * step_bytes


def check_examples(examples: list[Example]) -> int:
    for example in examples:
        try:
            check_example(example)
        except Exception as error:
            raise AssertionError(f"{example}: {error!r}") from error
    return len(examples)


def check_mean_and_determinism() -> None:
    """The mean equals torch's; rounding is the same on every rank, as all of them copy one sum."""
    group = dist.group.WORLD
    torch.manual_seed(dist.get_rank())
    mine = torch.randn(1003)
    torchs = mine.clone()
    dist.all_reduce(torchs, op=dist.ReduceOp.AVG)
    ring.all_reduce(mine, group, "mean")
    torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=1e-6)
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, mine)
    assert all(torch.equal(mine, other) for other in others)


def check_schedule() -> None:
    """Each step posts its send and its receive, then waits; the chunks are those of the module's table."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    output, shard = torch.empty(ranks * BIG), torch.full((BIG,), float(rank))
    with posted() as log:
        ring.all_gather(output, shard, group)
    assert torch.equal(output, torch.arange(ranks).float().repeat_interleave(BIG))
    steps = [log[i : i + 4] for i in range(0, len(log), 4)]
    assert len(steps) == ranks - 1
    for s, step in enumerate(steps):
        assert sorted(what for what, _ in step[:2]) == ["irecv", "isend"]
        assert [what for what, _ in step[2:]] == ["wait", "wait"]
        chunk = {what: (tensor.data_ptr() - output.data_ptr()) // (4 * BIG) for what, tensor in step[:2]}
        assert chunk == {"isend": (rank - s) % ranks, "irecv": (rank - 1 - s) % ranks}
    with posted() as log:
        ring.reduce_scatter(shard, output, group)  # in step s, what came in step s - 1 goes out
    sends, receives = ([t for what, t in log if what == name] for name in ("isend", "irecv"))
    assert [t.data_ptr() for t in sends[1:]] == [t.data_ptr() for t in receives[:-1]]
    assert torch.equal(shard, torch.full((BIG,), float(ranks * rank)))


def check_rank(examples: list[Example]) -> int:
    check_mean_and_determinism()
    check_schedule()
    return check_examples(examples)


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.wide) for n in (1, 2, 4))])
def test_the_ring_equals_torch_and_sends_exactly_its_share(ranks: int) -> None:
    examples = draw_examples(60)
    assert launch(check_rank, ranks, examples) == [len(examples)] * ranks


def check_subgroup() -> list[float] | None:
    members = [1, 3]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    tensor = torch.full((3,), float(dist.get_rank()), requires_grad=True)
    ring.all_reduce(tensor, group)
    return tensor.tolist()


def test_ranks_are_those_of_the_group() -> None:
    assert launch(check_subgroup, 4) == [None, [4.0] * 3, None, [4.0] * 3]


def check_errors() -> None:
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="has 3 elements; over 2 ranks it must have 2"):
        ring.reduce_scatter(torch.empty(3), torch.empty(4), group)
    with pytest.raises(ValueError, match="has 1 elements; over 2 ranks it must have 2"):
        ring.all_gather(torch.empty(3), torch.empty(1), group)
    with pytest.raises(ValueError, match=r"torch.float64, the full tensor torch.float32"):
        ring.all_gather(torch.empty(4), torch.empty(2, dtype=torch.float64), group)
    with pytest.raises(ValueError, match="give 'sum' or 'mean'"):
        ring.all_reduce(torch.empty(4), group, "max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="convert to a floating dtype"):
        ring.all_reduce(torch.ones(4, dtype=torch.int64), group, "mean")


def test_wrong_input_is_refused_before_anything_is_sent() -> None:
    launch(check_errors, 2)
