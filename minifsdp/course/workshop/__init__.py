"""The API of a lab's notebook: exercises and their checks, predictions, hints, and answers kept from earlier labs.

@exercise("5.2")
def gather(flat, group):
    ...                         # blank: the reference runs instead; written: checked at once and used from here on

Checks and marking expect honest answers that may go wrong in any way, and contain that; an answer that attacks its own
check or your account needs a container (docs/teaching.md, "Isolation").
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifsdp.course.workshop.lines import print_wrapped
    from minifsdp.course.workshop.notebook import check, earlier, exercise, hint, yours
    from minifsdp.course.workshop.predictions import outcome, predict

__all__ = ["check", "earlier", "exercise", "hint", "outcome", "predict", "print_wrapped", "yours"]


def __getattr__(name: str) -> Any:
    """Import names lazily, so that the command line need not wait for torch."""
    if name in __all__:
        module = {"outcome": "predictions", "predict": "predictions", "print_wrapped": "lines"}.get(name, "notebook")
        return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
