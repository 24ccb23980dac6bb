"""The course's tools: starting ranks, counting bytes, drawing, the command line. Upstairs imports nothing of it.

`describe` is imported when it is first asked for, so that what needs no torch can do without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifsdp.course.watch.description import describe

__all__ = ["describe"]


def __getattr__(name: str) -> Any:
    if name == "describe":
        return import_module("minifsdp.course.watch.description").describe
    raise AttributeError(f"module 'minifsdp.course' has no attribute {name!r}")
