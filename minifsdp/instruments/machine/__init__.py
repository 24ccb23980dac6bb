"""A simulated GPU: host, streams, link and caching allocator in virtual time, and the recorded programs it runs.

    program = record_steps(build, batch)              # watch real training steps, on CPU
    run = replay(program, A100)                       # the same program, as if its host ran ahead of a GPU
    run.seconds, run.retries, run.hazards, run.spans  # a model, not measured

A GPU executes work that its host has queued; on CPU the host does the compute itself. A laptop therefore cannot show
the effects of running ahead: overlap without prefetching, memory that piles up, a limiter that has to hold the host
back. This package computes them from the order in which a real run issued kernels, collectives, waits and allocations.

Not modelled: interference between kernels and collectives, and their minimum durations; differences between ranks;
communicators that send concurrently (there is one link with one queue); host waits for copies to the CPU or `nonzero`
(`item()` and `synchronize` are modelled), and `Event.query` returning False; library workspaces; the allocator's
expandable segments and private pools; NCCL's own `record_stream` in older versions of torch.
"""

from minifsdp.instruments.machine.allocator import CachingAllocator, DeviceMemoryError
from minifsdp.instruments.machine.blocks import Block, Segment
from minifsdp.instruments.machine.hardware import A100, H100, H200, Hardware, measured
from minifsdp.instruments.machine.paper import record_on_paper
from minifsdp.instruments.machine.program import Program
from minifsdp.instruments.machine.recorder import Recorder, record_steps
from minifsdp.instruments.machine.replay import Run, replay

__all__ = [
    "A100",
    "H100",
    "H200",
    "Block",
    "CachingAllocator",
    "DeviceMemoryError",
    "Hardware",
    "Program",
    "Recorder",
    "Run",
    "Segment",
    "measured",
    "record_on_paper",
    "record_steps",
    "replay",
]
