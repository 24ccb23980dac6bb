"""The course: commands, ladders, benchmarks, training and the labs' workshop, on the instruments and the library."""

from typing import Any

from minifsdp.moved import warn_moved
from minifsdp.on_first_use import on_first_use

_module = on_first_use(__name__, ())


def __getattr__(name: str) -> Any:
    """A module of the course's; or `describe`, where it was before."""
    if name != "describe":
        return _module(name)
    from minifsdp.instruments import describe

    warn_moved(f"{__name__}.describe", "minifsdp.instruments.describe")
    return describe
