"""Pictures: memory over a step, peaks beside their prediction, timelines, curves.

One style and the same colours everywhere. Equal input gives equal bytes.

Matplotlib, whose import takes half a second, is loaded only on first use: a check, or a command's help, draws nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifsdp.instruments.plots.allocator import allocator_figure, allocator_memory
    from minifsdp.instruments.plots.bench import bench_figure
    from minifsdp.instruments.plots.device import blocks, device_memory
    from minifsdp.instruments.plots.ladder import Timeline, memory_figure, timeline_figure
    from minifsdp.instruments.plots.layout import flat_layout, units
    from minifsdp.instruments.plots.memory import curve, stages
    from minifsdp.instruments.plots.picture import Picture
    from minifsdp.instruments.plots.quantities import lines, timeline, versus
    from minifsdp.instruments.plots.schedules import pipeline, pipeline_figure
    from minifsdp.instruments.plots.steps import memory_steps

__all__ = [
    "Picture",
    "Timeline",
    "allocator_figure",
    "allocator_memory",
    "bench_figure",
    "blocks",
    "curve",
    "device_memory",
    "flat_layout",
    "lines",
    "memory_figure",
    "memory_steps",
    "pipeline",
    "pipeline_figure",
    "stages",
    "timeline",
    "timeline_figure",
    "units",
    "versus",
]

_MODULES = ("picture", "memory", "quantities", "layout", "allocator", "device", "bench", "ladder", "steps", "schedules")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            if (found := getattr(import_module(f"{__name__}.{module}"), name, None)) is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
