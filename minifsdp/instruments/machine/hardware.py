"""Costs of a device, its link and its driver: the numbers behind the simulated GPU.

Peaks, memory bandwidth and capacity are from the data sheets of the SXM modules, without sparsity (H200:
nvidia.com/en-us/data-center/h200, whose table is with sparsity). The rest is chosen within published measurements:

    efficiency   0.6: assumed; the FSDP paper's GPT-175B reaches 0.60 of peak in whole steps (arXiv 2304.11277)
    latency      50 us: assumed
    bandwidth    hosts of 8 GPUs with 8 network cards of 100 (A100) or 200 Gb/s (H100, H200), of which NCCL reaches up
                 to 12 and 24 GB/s each (NVIDIA/nccl-tests#119). A ring crosses from host to host once, on all cards
                 together, so that each rank sends at their sum
    launch       10 us: assumed; a lesson on eager PyTorch (jiahuanglin.xyz, "From PyTorch op to kernel launch") names
                 5 to 25 us of host time per operator
    issue        235 us: from the end of the limiter's wait to the all-gather, in a trace of FSDP
                 (pytorch/pytorch#108234)
    segment      1 ms per call, plus 1 ms per GiB: assumed. Reported are 0.5 to 1.2 ms for 1 to 64 MiB
                 (rtj1/cuda-mempool). For training without a cache GMLake reports an overhead of 10 times (arXiv
                 2401.08156, A100); in the model a GPT of width 2048 takes 5 times as long with 4 x 2048 tokens, and 12
                 times with 2048. shapes.py shows the sensitivity to this number
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from minifsdp.comm import Call
from minifsdp.instruments.machine.program import Kernel, Program

GB, GIB = 1e9, 2**30


@dataclass(frozen=True)
class Hardware:
    """A device's data sheet, and its host's overheads.

    A kernel takes the longer of its compute and memory times. A collective takes latency + wire / bandwidth, one at a
    time. Interference between the two, and differences between ranks, are not modelled.

    Attributes:
        name: for titles.
        flops: peak operations per second of matrix products, by element size in bytes; other sizes use the lowest.
        memory_bandwidth: bytes per second.
        capacity: bytes that the allocator may reserve.
        latency: fixed seconds per collective.
        bandwidth: bytes per second that a rank sends.
        efficiency: fraction of the peak and of the memory bandwidth that kernels reach.
        launch: host seconds per kernel.
        issue: host seconds per collective, including bookkeeping.
        segment: host seconds to allocate or free a segment on the device: per call, and per GiB.
        runs_ahead: True if the host continues while the device works; False if the host computes, as on CPU.
        fp32: peak of float32 products without TF32; None if `flops` applies to these too.

    Raises:
        ValueError: a rate or the capacity is not positive, or a time is negative.
    """

    name: str
    flops: dict[int, float] = field(hash=False)
    memory_bandwidth: float
    capacity: int
    latency: float
    bandwidth: float
    efficiency: float = 0.6
    launch: float = 10e-6
    issue: float = 235e-6
    segment: tuple[float, float] = (1e-3, 1e-3)
    runs_ahead: bool = True
    fp32: float | None = None

    def __post_init__(self) -> None:
        rates = {name: getattr(self, name) for name in ("memory_bandwidth", "capacity", "bandwidth", "efficiency")}
        rates |= {f"flops[{size}]": peak for size, peak in self.flops.items()}
        times = {"latency": self.latency, "launch": self.launch, "issue": self.issue, "segment": min(self.segment)}
        for name, value in rates.items():
            if not value > 0:
                raise ValueError(f"{self.name}: {name} = {value}; it has to be above 0")
        for name, value in times.items():
            if not value >= 0:
                raise ValueError(f"{self.name}: {name} = {value}; a time in seconds cannot be below 0")

    @property
    def without_tf32(self) -> Hardware:
        """The same device with float32 products in full precision, torch's default (`torch.backends.cuda.matmul`)."""
        return self if self.fp32 is None else replace(self, flops={**self.flops, 4: self.fp32})

    def kernel(self, kernel: Kernel) -> float:  # seconds
        compute = kernel.flops / self.flops.get(kernel.dtype_size, min(self.flops.values()))
        return max(compute, kernel.nbytes / self.memory_bandwidth) / self.efficiency

    def message(self, call: Call) -> float:  # seconds
        return self.latency + call.wire / self.bandwidth

    def segment_seconds(self, nbytes: int) -> float:
        return self.segment[0] + self.segment[1] * nbytes / GIB


@dataclass(frozen=True)
class Measured(Hardware):
    """A device whose kernels take their recorded seconds times `scale`."""

    scale: float = 1.0

    def kernel(self, kernel: Kernel) -> float:  # seconds
        return self.scale * kernel.seconds


A100 = Hardware("A100 80 GB", {2: 312e12, 4: 156e12}, 2.0e12, 80 * GIB, 50e-6, 100 * GB, fp32=19.5e12)
H100 = Hardware("H100 80 GB", {2: 989e12, 4: 495e12}, 3.35e12, 80 * GIB, 50e-6, 200 * GB, fp32=67e12)
H200 = Hardware("H200 141 GB", {2: 989e12, 4: 495e12}, 4.8e12, 141 * GIB, 50e-6, 200 * GB, fp32=67e12)


def measured(
    program: Program, latency: float, bandwidth: float, compute_seconds: float | None = None, runs_ahead: bool = False
) -> Measured:
    """A device as fast as the one that the program was recorded on, on a link of your choice.

    Args:
        program: the recorded run.
        latency, bandwidth: of the link, in seconds and bytes per second.
        compute_seconds: total seconds of the program's kernels without the recorder's overhead; by default the
            recorded total.
        runs_ahead: True if its host runs ahead.

    Raises:
        ValueError: `compute_seconds` is given, but the program has no kernels.
    """
    recorded = sum(each.seconds for each in program.instructions if isinstance(each, Kernel))
    if compute_seconds is not None and not recorded:
        raise ValueError("the program has no kernels that could take these seconds: record a training step")
    scale = 1.0 if compute_seconds is None else compute_seconds / recorded
    name = "this machine" + (", if its host ran ahead" if runs_ahead else "")
    return Measured(
        name,
        flops={},
        memory_bandwidth=1.0,
        capacity=2**62,
        latency=latency,
        bandwidth=bandwidth,
        launch=0.0,
        issue=0.0,
        segment=(0.0, 0.0),
        runs_ahead=runs_ahead,
        scale=scale,
    )
