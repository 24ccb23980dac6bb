"""A GPU on paper: host, streams, link and caching allocator in virtual time, and the recorded programs that run on it.

    program = record_steps(build, batch)              # watch real training steps, on CPU
    run = replay(program, A100)                       # the same program, as if its host ran ahead of a GPU
    run.seconds, run.retries, run.hazards, run.spans  # a model, not measured

A GPU executes what its host has queued; on CPU the host is the compute. What follows from running ahead (overlap
without prefetching, memory that piles up, a limiter that has to hold the host back) a laptop cannot show, so it is
worked out here from the order in which the real run asked for kernels, collectives, waits and memory.

Left out: kernels and collectives that slow each other down, and the time that each takes at least; ranks that differ;
communicators that send at the same time (there is one link, and one queue to it); that a host waits for a copy to the
CPU or for `nonzero` (`item()` and `synchronize` are heard), and that `Event.query` may say no; workspaces of libraries,
expandable segments and private pools of the allocator; NCCL's own `record_stream` in older versions of torch.
"""

from minifsdp.course.machine.allocator import CachingAllocator, DeviceMemoryError
from minifsdp.course.machine.blocks import Block, Segment
from minifsdp.course.machine.hardware import A100, H100, H200, Hardware, measured
from minifsdp.course.machine.paper import record_on_paper
from minifsdp.course.machine.program import Program
from minifsdp.course.machine.recorder import Recorder, record_steps
from minifsdp.course.machine.replay import Run, replay

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
