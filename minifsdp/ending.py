"""The end of a backward: autograd calls it once, or drops it if the backward raises an error."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

from minifsdp.private import at_end_of_backward


class Ending:
    """The call that ends the current backward."""

    def __init__(self) -> None:
        self._due: weakref.ref[partial[None]] | None = None

    @property
    def is_due(self) -> bool:
        """True if the backward for which an end was arranged is under way."""
        return self._due is not None and self._due() is not None

    def arrange(self, end: Callable[[], None]) -> None:
        """Call `end` when the backward under way has made all its gradients."""
        due = partial(self._run, end)  # autograd has the only reference
        self._due = weakref.ref(due)
        at_end_of_backward(due)

    def _run(self, end: Callable[[], None]) -> None:
        try:
            end()
        finally:
            self._due = None

    def check(self) -> None:
        """
        Raises:
            RuntimeError: the backward has raised, and no forward since has cleared away what it left.
        """
        if self._due is not None and self._due() is None:
            raise RuntimeError(
                "the last backward raised, and this one's forward came before it: zero the gradients and run this "
                "micro-batch's forward again"
            )
