"""The models of the FSDP paper's evaluation as programs: recorded on paper at their real widths, with fewer layers.

    shape = SHAPES["T5-11B-like"]
    without, limited = shape.replay(without_limiter()), shape.replay(with_limiter())
    seconds(without) / seconds(limited), without.retries, limited.retries

What comes out, beside the paper (arXiv 2304.11277, sections 3.3.2, 3.4 and 5), its text and its figures, which
differ (read off a copy of them: docs/sources.md):

    T5       without the limiter 2.4 times as long near the memory limit, 2.1 once it has settled (paper: up to 5; its
             bars: 2.23 on two machines, as here, and 3.05 on four). A retry per step: some 100 calls of cudaFree and
             cudaMalloc, and the overlap lost. So it hangs on what a call takes: at nothing 1.03 times, at 0.5 ms 1.6,
             at 2 ms 2.8; and on the work it is measured by: 1.7 with two samples, 1.3 with four. Memory of 1 to 1.1
             times the need with the limiter: 2.2 to 2.4; of 1.4 times: 1.5; of twice: no retries.
    RegNet   no difference (paper: none): nothing piles up that would not fit.
    DeepViT  3 % slower with the limiter, 4 % with 16 layers (paper: 5; its bars: 4 and 5): a unit's communication and
             computation take about as long, and the host, having waited, issues the next gather late by its own
             235 us. Where one of the two has time to spare, with 2 samples or with 8, nothing is lost.
    GPT      backward prefetch makes the whole model 24 % faster with one sample and 12 % with two (paper: 18; its
             points, with one sample: 21.8). It hides a gather and a reduction per block, so the gain falls with the
             bandwidth: 35 % and 18 % at 125 GB/s, 19 % and 10 % at 240. TFLOPS per GPU, recomputation counted: 176 and
             180 (paper: over 173 and over 186), which is no prediction: the efficiency of kernels is taken from there.

Samples per GPU are not the paper's: T5's and DeepViT's are, of those tried, the ones where the limiter matters most.
Left out: the float32 copies of mixed precision (half the memory of parameters and optimizer); that ranks differ, so
that one's retry is another's wait; kernels and collectives that slow each other down; libraries' workspaces; the
driver's bound on how far a host runs ahead; all else that a host does. Kernels are those of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from minifsdp.comm import Group
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.course.machine.architectures import (
    Block,
    Bottleneck,
    Decoder,
    EncoderDecoder,
    RegNet,
    VisionTransformer,
)
from minifsdp.course.machine.hardware import A100, Hardware
from minifsdp.course.machine.paper import record_on_paper
from minifsdp.course.machine.program import STEP, Kernel, Mark, Program, Synchronize
from minifsdp.course.machine.replay import Run, replay
from minifsdp.fsdp import FullyShardedDataParallel, PrefetchSchedule, RateLimitedSchedule, SyncSchedule
from minifsdp.fsdp.schedules.prefetch import PRE
from minifsdp.fsdp.unit import Unit

MakeSchedule = Callable[[Sequence[Unit]], SyncSchedule]


class ReductionFirst(PrefetchSchedule):
    """torch's order with `backward_prefetch=None`: a unit's reduction is issued when its gradients are complete.

    The next unit's gather comes after it, and behind it: a communicator has one queue (FSDP paper, 3.3.2).
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__(units, forward=False, backward=None, depth=1)

    def reduce(self, unit: Unit) -> None:
        super().reduce(unit)
        self.issue_reduction()


@cache
def without_limiter() -> MakeSchedule:
    """torch's defaults, but for `limit_all_gathers=False`."""
    return partial(PrefetchSchedule, forward=False, backward=PRE, depth=1)


@cache
def with_limiter(limit: int = 2) -> MakeSchedule:
    """torch's defaults: at most `limit` units gathered and not yet freed."""
    return partial(RateLimitedSchedule, forward=False, backward=PRE, depth=1, limit=limit)


@dataclass(frozen=True)
class Shape:
    """A model with a setting to train it in, in bfloat16 with AdamW; a block is a unit.

    Attributes:
        name: the paper's, "-like".
        what: its sizes.
        paper: what the paper reports of it.
        ranks: GPUs that it is sharded over.
        batch: samples per GPU.
        model: makes it, of so many layers.
        layers: of the whole model (T5: of encoder and decoder each).
        recorded: layers of what is recorded.
        inputs: makes so many samples.
        device: what to replay it on.
        room: the capacity to give it, in peaks of what it reserves with the limiter; None: the device's own.
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
        """The device, with as much memory as this shape is to have."""
        return self.device if self.room is None else replace(self.device, capacity=int(self.room * _need(self)))

    def record(self, schedule: MakeSchedule, steps: int = 6) -> Program:
        """The program of `steps` training steps, at least 2. Each schedule is recorded once, for two steps.

        The second, when the optimizer has its state and the schedule knows the order, is then repeated: caches take
        some steps to settle, or never do. After each step the host waits, as one that prints the loss.
        """
        program = _record(self, schedule)
        begin = max(at for at, each in enumerate(program.instructions) if each == Mark(STEP))
        first, again = program.instructions[:begin], program.instructions[begin:]
        return Program(first + [Synchronize(None), *again] * (steps - 1), program.buffers)

    def replay(self, schedule: MakeSchedule) -> Run:
        """Replay some steps under a schedule."""
        return replay(self.record(schedule), self.hardware)

    def in_full(self, schedule: MakeSchedule, measure: Callable[[Program, Run], float]) -> float:
        """The whole model's figures from those of a program and its run: layers are alike, if memory suffices.

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
    """Of a step, on average over all but the first."""
    return sum(run.steps[1:]) / len(run.steps[1:])


def flops(program: Program) -> float:
    """Operations of a step's matrix products and attention, by what the recorder counts."""
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
"""The paper's: 8 GPUs and 250 GB/s of network per host, of which NCCL is taken to make three quarters, as in
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
