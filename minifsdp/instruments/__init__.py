"""The instruments: starting ranks, counting bytes, timing, simulating a machine, drawing. For any program.

They read the library, and know nothing of the course. `describe` is imported when it is first asked for, so that what
needs no torch can do without.
"""

from typing import TYPE_CHECKING

from minifsdp.on_first_use import on_first_use

if TYPE_CHECKING:
    from minifsdp.instruments.watch.description import describe

__all__ = ["describe"]

__getattr__ = on_first_use(__name__, __all__, ".watch.description")
