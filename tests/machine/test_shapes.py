"""The paper's models on the paper GPU: their sizes, what the recorder counts of them, and the four findings."""

from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
from torch import nn

from minifsdp.instruments.machine import DeviceMemoryError, replay
from minifsdp.instruments.machine.architectures import Bottleneck
from minifsdp.instruments.machine.program import Allocate, Free, Issue, Kernel
from minifsdp.instruments.machine.shapes import SHAPES, ReductionFirst, flops, seconds, with_limiter, without_limiter

T5, REGNET, DEEPVIT, GPT = SHAPES.values()
SCHEDULES = {"without": without_limiter(), "limited": with_limiter()}


def named_parameters(shape, layers):
    nothing = dict.fromkeys(("kaiming_uniform_", "uniform_", "normal_"), lambda weight, *_, **__: weight)
    with torch.device("meta"), patch.multiple(nn.init, **nothing):
        return dict(shape.model(layers).named_parameters())


def parameters(shape, layers):
    return sum(p.numel() for p in named_parameters(shape, layers).values())


@cache
def runs_of(shape):
    """Without the limiter, and with it."""
    return tuple(shape.replay(schedule) for schedule in SCHEDULES.values())


@pytest.mark.parametrize(("shape", "billions"), list(zip(SHAPES.values(), (11.4, 9.4, 8.1, 175), strict=True)))
def test_whole_models_have_the_papers_sizes(shape, billions):
    assert parameters(shape, shape.layers) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "context", "inner", "attentions"), [(T5, 512, 16384, 3), (DEEPVIT, 196, 2048, 1), (GPT, 2048, 12288, 1)]
)
def test_operations_counted_are_those_of_the_closed_form(shape, context, inner, attentions):
    """A product of P elements of parameters with T tokens takes 2 P T operations; its backward takes two such.

    Attention takes two products of context x context x inner per sample, and five in backward. A recomputed block runs
    forward once more, up to its last product, whose result nobody needs.
    """
    again = shape is GPT
    block = parameters(shape, 2) - parameters(shape, 1)
    products = (3 + again) * block - again * 4 * inner * inner
    scores = (2 + 2 * again + 5) * attentions * context * inner
    others = (
        3 * named_parameters(shape, 1)["head.weight"].numel() * (shape is not DEEPVIT)
    )  # there of one vector per image
    wanted = 2 * context * shape.batch * (shape.recorded * (products + scores) + others)
    assert flops(shape.record(with_limiter())) == pytest.approx(wanted, rel=0.01)


def test_operations_of_a_convolution_in_groups_are_those_within_its_groups():
    """Forward, gradient of the input and gradient of the weight take the same: weight elements times positions."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Bottleneck(64, 64, group=16, stride=1)

        def forward(self, images, _):
            return self.block(images).mean()

    images = partial(torch.zeros, 2, 64, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    shape = replace(REGNET, model=lambda _: Net(), inputs=lambda _: (images(), images()))
    kernels = [each for each in shape.record(with_limiter()).instructions if isinstance(each, Kernel)]
    dense = 64 * 64 + 64 * 16 * 9 + 64 * 64  # 1 x 1, 3 x 3 in groups of 16, 1 x 1
    squeezed = 2 * 64 * 16  # at one position
    steps = 6
    for name, times in (("convolution", 1), ("convolution_backward", 2)):
        counted = sum(each.flops for each in kernels if each.name.partition(".")[0] == name)
        assert counted == steps * times * 2 * 2 * (dense * 64 + squeezed)


@pytest.mark.slow
def test_every_shape_is_free_of_hazards():
    for shape in SHAPES.values():
        assert [run.hazards for run in runs_of(shape)] == [[], []]
    assert not replay(GPT.record(ReductionFirst), GPT.device).hazards


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_step_that_is_repeated_leaves_nothing_behind(shape):
    first, more = (shape.record(with_limiter(), steps) for steps in (2, 5))
    assert len(more.calls()) / len(first.calls()) == 5 / 2
    again = more.instructions[len(first.instructions) :]
    assert again
    made = [each.buffer for each in again if isinstance(each, Allocate)]
    gone = [each.buffer for each in again if isinstance(each, Free)]
    assert sorted(made) == sorted(gone)


# The limiter


def test_t5_near_its_memory_limit_retries_without_the_limiter_and_takes_several_times_as_long():
    without, limited = runs_of(T5)
    assert limited.retries == 0
    assert without.retries >= len(without.steps) - 1
    assert 2 < seconds(without) / seconds(limited) < 5


def test_t5_with_memory_to_spare_needs_no_limiter():
    run, limited = (replay(T5.record(schedule), replace(T5.device, capacity=2**40)) for schedule in SCHEDULES.values())
    assert run.retries == 0
    assert seconds(run) == pytest.approx(seconds(limited), rel=0.01)
    assert run.peak("active") > 1.1 * limited.peak("active")


def test_what_a_retry_costs_is_what_the_driver_takes():
    """The factor is not put in: with calls that cost nothing there is only overlap to lose."""
    needed = T5.hardware.capacity
    ratios = []
    for call in (0.0, 0.5e-3, 1e-3):
        device = replace(T5.device, capacity=needed, segment=(call, 0.0))
        without, limited = (replay(T5.record(schedule), device) for schedule in SCHEDULES.values())
        assert without.retries > 0 == limited.retries
        ratios.append(seconds(without) / seconds(limited))
    assert ratios == sorted(ratios)
    assert ratios[0] < 1.4


def test_t5_does_not_fit_into_less_than_it_holds():
    with pytest.raises(DeviceMemoryError):
        replay(T5.record(with_limiter()), replace(T5.device, capacity=2**30))


def test_regnet_is_the_same_with_and_without():
    without, limited = runs_of(REGNET)
    assert without.retries == limited.retries == 0
    assert seconds(limited) == pytest.approx(seconds(without), rel=0.01)
    assert limited.overlap > 0.95


def test_deepvit_is_slightly_slower_with_the_limiter():
    without, limited = runs_of(DEEPVIT)
    assert without.retries == 0
    assert 1.005 < seconds(limited) / seconds(without) < 1.1


def test_the_limiter_costs_deepvit_what_the_host_takes_to_issue():
    quick = replace(DEEPVIT.device, issue=0.0, launch=0.0)
    without, limited = (seconds(replay(DEEPVIT.record(schedule), quick)) for schedule in SCHEDULES.values())
    assert limited == pytest.approx(without, rel=0.005)


# Backward prefetch


@pytest.mark.parametrize(
    ("batch", "low", "high"), [(1, 0.19, 0.29), pytest.param(2, 0.09, 0.15, marks=pytest.mark.slow)]
)
def test_backward_prefetch_gains_on_gpt_about_what_the_paper_says(batch, low, high):
    shape = replace(GPT, batch=batch)
    with_prefetch, without = (
        shape.in_full(schedule, lambda _, run: seconds(run)) for schedule in (with_limiter(), ReductionFirst)
    )
    assert low < without / with_prefetch - 1 < high
    operations = shape.in_full(with_limiter(), lambda program, _: flops(program))
    assert operations / with_prefetch / 1e12 == pytest.approx({1: 173, 2: 186}[batch], rel=0.1)


def test_without_prefetch_a_gather_stands_behind_the_reduction():
    def order(schedule):
        calls = [each.call.op for each in GPT.record(schedule, 2).instructions if isinstance(each, Issue)]
        return calls[len(calls) // 2 :]

    blocks = GPT.recorded
    forward, backward = order(ReductionFirst)[: blocks + 1], order(ReductionFirst)[blocks + 1 :]
    assert forward == ["all_gather"] * (blocks + 1)
    assert backward[: 2 * blocks] == ["all_gather", "reduce_scatter"] * blocks
    assert order(with_limiter())[blocks + 1 :][:3] == ["all_gather", "all_gather", "reduce_scatter"]
