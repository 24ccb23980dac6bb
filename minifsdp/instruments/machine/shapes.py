"""The models of the FSDP paper's evaluation as programs, recorded without hardware: real widths, fewer layers.

    shape = SHAPES["T5-11B-like"]
    without, limited = shape.replay(without_limiter()), shape.replay(with_limiter())
    seconds(without) / seconds(limited), without.retries, limited.retries

Results beside the paper's (arXiv 2304.11277, sections 3.3.2, 3.4 and 5). Its text and its figures differ (the figures
were read off a copy: docs/sources.md):

    T5       without the limiter 2.4 times as long near the memory limit, 2.1 once it has settled (paper: up to 5; its
             bars: 2.23 on two machines, as here, and 3.05 on four). Each step has a retry: about 100 calls of cudaFree
             and cudaMalloc, and no overlap. The ratio depends on the cost of a call: 1.03 if free, 1.6 at 0.5 ms, 2.8
             at 2 ms; and on the work per step: 1.7 with two samples, 1.3 with four. With 1 to 1.1 times the memory
             that the limiter needs, it is 2.2 to 2.4; with 1.4 times, 1.5; with twice, there are no retries.
    RegNet   no difference (paper: none): everything that piles up fits.
    DeepViT  3 % slower with the limiter, 4 % with 16 layers (paper: 5; its bars: 4 and 5): a unit's communication and
             computation take about equally long, and the host, having waited, issues the next gather 235 us late, its
             own issue time. With 2 or 8 samples one of the two has slack, and nothing is lost.
    GPT      backward prefetch makes the whole model 24 % faster with one sample and 12 % with two (paper: 18; its
             points, with one sample: 21.8). It hides a gather and a reduction per block, so the gain falls with the
             bandwidth: 35 % and 18 % at 125 GB/s, 19 % and 10 % at 240. TFLOPS per GPU, recomputation counted: 176 and
             180 (paper: over 173 and over 186), which is no prediction: the efficiency of kernels is taken from there.

Samples per GPU are not the paper's: for T5 and DeepViT they are, of those tried, the ones where the limiter matters
most. Not modelled: the float32 copies of mixed precision (half the memory of parameters and optimizer); differences
between ranks, where one rank's retry is another's wait; interference between kernels and collectives; library
workspaces; the driver's limit on running ahead; any other host work. Kernels are those of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from minifsdp.comm import Group
from minifsdp.fsdp import FullyShardedDataParallel, PrefetchSchedule, RateLimitedSchedule, SyncSchedule
from minifsdp.fsdp.schedules.prefetch import PRE
from minifsdp.fsdp.unit import Unit
from minifsdp.instruments.machine.architectures import (
    Block,
    Bottleneck,
    Decoder,
    EncoderDecoder,
    RegNet,
    VisionTransformer,
)
from minifsdp.instruments.machine.hardware import A100, Hardware
from minifsdp.instruments.machine.paper import record_on_paper
from minifsdp.instruments.machine.program import STEP, Kernel, Mark, Program, Synchronize
from minifsdp.instruments.machine.replay import Run, replay
from minifsdp.trainer import Trainer

MakeSchedule = Callable[[Sequence[Unit]], SyncSchedule]


class ReductionFirst(PrefetchSchedule):
    """torch's order with `backward_prefetch=None`: a unit's reduction is issued when its gradients are complete.

    The next unit's gather is queued behind it: a communicator has one queue (FSDP paper, 3.3.2).
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__(units, forward=False, backward=None, depth=1)

    def reduce(self, unit: Unit) -> None:
        super().reduce(unit)
        self.issue_reduction()


@cache
def without_limiter() -> MakeSchedule:
    """torch's defaults, except `limit_all_gathers=False`."""
    return partial(PrefetchSchedule, forward=False, backward=PRE, depth=1)


@cache
def with_limiter(limit: int = 2) -> MakeSchedule:
    """torch's defaults: at most `limit` units gathered and not yet freed."""
    return partial(RateLimitedSchedule, forward=False, backward=PRE, depth=1, limit=limit)


@dataclass(frozen=True)
class Shape:
    """A model and its training setup, in bfloat16 with AdamW; each block is a unit.

    Attributes:
        name: the paper's name with "-like".
        what: its sizes.
        paper: the paper's result.
        ranks: GPUs that it is sharded over.
        batch: samples per GPU.
        model: makes the model, given the number of layers.
        layers: layers of the whole model (T5: of encoder and decoder each).
        recorded: layers of the recorded model.
        inputs: makes a batch, given the number of samples.
        device: the device for the replay.
        room: capacity, as a multiple of the peak reserved memory with the limiter; None for the device's own.
    """

    name: str
    what: str
    paper: str
    ranks: int
    batch: int
    model: Callable[[int], nn.Module]
    layers: int
    recorded: int
    inputs: Callable[[int], tuple[Tensor, Tensor]]
    device: Hardware
    room: float | None = None

    @property
    def hardware(self) -> Hardware:
        """The device, with the capacity set by `room`."""
        return self.device if self.room is None else replace(self.device, capacity=int(self.room * _need(self)))

    def record(self, schedule: MakeSchedule, steps: int = 6) -> Program:
        """The program of `steps` training steps, at least 2. Each schedule is recorded once, for two steps.

        The second step, with the optimizer's state created and the order known, is then repeated: caches take several
        steps to settle, or never do. After each step the host waits, as it would to print the loss.
        """
        program = _record(self, schedule)
        begin = max(at for at, each in enumerate(program.instructions) if each == Mark(STEP))
        first, again = program.instructions[:begin], program.instructions[begin:]
        return Program(first + [Synchronize(None), *again] * (steps - 1), program.buffers)

    def replay(self, schedule: MakeSchedule) -> Run:
        """Replay the recorded steps of a schedule on the device."""
        return replay(self.record(schedule), self.hardware)

    def in_full(self, schedule: MakeSchedule, measure: Callable[[Program, Run], float]) -> float:
        """Extrapolate a measure of a program and its run to all layers, which cost the same if memory suffices.

        shape.in_full(schedule, lambda program, run: seconds(run))
        """
        half = replace(self, recorded=self.recorded // 2)
        here, there = (
            measure(program, replay(program, self.device)) for program in (self.record(schedule), half.record(schedule))
        )
        return here + (self.layers - self.recorded) * (here - there) / (self.recorded - half.recorded)

    def build(self, schedule: MakeSchedule, group: Group) -> Trainer:
        """A fresh model with its units and its optimizer."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = self.model(self.recorded)
        finally:
            torch.set_default_dtype(before)
        model = FullyShardedDataParallel(model, group, auto_wrap_policy={Block, Bottleneck}, schedule=schedule)
        return Trainer(model, AdamW(model.parameters(), foreach=False))


def seconds(run: Run) -> float:
    """Seconds per step, averaged over all steps except the first."""
    return sum(run.steps[1:]) / len(run.steps[1:])


def flops(program: Program) -> float:
    """Floating-point operations of the last step, as counted by the recorder."""
    *_, last = [at for at, each in enumerate(program.instructions) if each == Mark(STEP)]
    return sum(each.flops for each in program.instructions[last:] if isinstance(each, Kernel))


@cache
def _record(shape: Shape, schedule: MakeSchedule) -> Program:
    return record_on_paper(partial(shape.build, schedule), partial(shape.inputs, shape.batch), shape.ranks)


@cache
def _need(shape: Shape) -> int:  # bytes
    return replay(shape.record(with_limiter()), replace(shape.device, capacity=2**62)).peak("reserved")


def _text(context: int, batch: int) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(batch, context, dtype=torch.int64)
    return tokens, tokens


def _images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, 3, 224, 224, dtype=torch.bfloat16), torch.zeros(batch, dtype=torch.int64)


def _regnet(layers: int) -> nn.Module:
    depths = {27: (2, 7, 17, 1), 6: (1, 2, 2, 1)}[layers]
    return RegNet(depths, (2020, 4040, 11110, 28280), group=1010, stem=32, classes=1000)


HOSTS = replace(A100, name="A100 80 GB, 2 Tb/s per host", bandwidth=187.5e9)
"""The paper's hosts: 8 GPUs and 250 GB/s of network each, of which NCCL is assumed to reach three quarters, as in
NVIDIA/nccl#495 (600 of 800 Gb/s between two hosts)."""

_SHAPES = (
    Shape(
        "T5-11B-like",
        "24 + 24 blocks of width 1024, 128 heads of 128, feed-forward 65536; one sample of 512 + 512 tokens",
        "up to 5 times as fast with the limiter (bars: 2.23 and 3.05)",
        ranks=16,
        batch=1,
        model=partial(EncoderDecoder, width=1024, heads=128, inner=16384, hidden=65536, vocabulary=32128),
        layers=24,
        recorded=4,
        inputs=partial(_text, 512),
        device=HOSTS,
        room=1.05,
    ),
    Shape(
        "RegNet-9B-like",
        "27 Y blocks, widths 2020, 4040, 11110 and 28280 (those of SEER's RegNet of 10 B); 32 images of 224 x 224",
        "no difference",
        ranks=16,
        batch=32,
        model=_regnet,
        layers=27,
        recorded=6,
        inputs=_images,
        device=HOSTS,
    ),
    Shape(
        "DeepViT-8B-like",
        "160 blocks of width 2048, 32 heads; 4 images of 224 x 224 in patches of 16 x 16",
        "5 % slower with the limiter (bars: 4 and 5)",
        ranks=16,
        batch=4,
        model=partial(VisionTransformer, width=2048, heads=32, patch=16, image=224, classes=1000),
        layers=160,
        recorded=6,
        inputs=_images,
        device=HOSTS,
    ),
    Shape(
        "GPT-175B-like",
        "96 blocks of width 12288, 96 heads; one sample of 2048 tokens; every block checkpointed",
        "18 % faster with backward prefetch (points: 21.8); over 173 TFLOPS per GPU, over 186 with two samples",
        ranks=128,
        batch=1,
        model=partial(Decoder, width=12288, heads=96, vocabulary=50257, context=2048),
        layers=96,
        recorded=4,
        inputs=partial(_text, 2048),
        device=HOSTS,
    ),
)
SHAPES: dict[str, Shape] = {shape.name: shape for shape in _SHAPES}
