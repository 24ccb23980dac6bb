"""One error on all ranks: a rank that fails leaves word of it and hangs up; the others notice, and pass it on.

A pipeline's ranks wait for each other's messages, most of the time in turn. When a rank raises, its neighbours would
wait for ever for what it does not send. So it writes the cause into the group's key-value store and closes its
channels: gloo's end of a connection fails at once when the other one closes, as it does when a process dies. Each rank
that is waiting then raises with the cause from the store, and closes its own.
"""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from typing import Any

from minifsdp.comm import Group
from minifsdp.order import next_on
from minifsdp.process_groups import store_of

PATIENCE = 1.0  # seconds for which a rank looks for the word of another, once its connection is closed


class PipelineError(RuntimeError):
    """Another rank of the pipeline has failed; says which, where and why."""


class Failures:
    """The messages of one pipeline's ranks about their failures."""

    def __init__(self, group: Group) -> None:
        self.rank, self.failed = group.rank(), ""
        self._store: Any = store_of(group, f"pipeline {next_on(group)}")

    def check(self) -> None:
        """
        Raises:
            PipelineError: a rank has failed before, or the schedule was closed.
        """
        if self.failed:
            raise PipelineError(f"this pipeline's channels are closed, make another schedule: {self.failed}")

    def shared(self, error: BaseException, where: str) -> BaseException:
        """The error for this rank to raise, when it has hung up: its own, or another rank's that is behind it."""
        cause = self._cause_of(error, where)
        return error if cause is None else PipelineError(cause)

    def _cause_of(self, error: BaseException, where: str) -> str | None:
        """The failure of another rank that is behind this error; None if it is this rank's own."""
        if _is_broken(error):
            self.failed = (
                self._found() or f"a neighbour of rank {self.rank} ended without a word, while that was at {where}"
            )
            self._leave_word()  # the next ranks need not look for it as long
            return self.failed
        self.failed = f"rank {self.rank} at {where}: {type(error).__name__}: {error}"
        self._leave_word()
        return None

    def _leave_word(self) -> None:
        with suppress(RuntimeError):  # the rank with the store is gone, too
            if self._store.add("failures", 1) == 1:
                self._store.set("cause", self.failed)

    def _found(self) -> str:
        """The cause, as the first rank that failed has written it."""
        end = time.monotonic() + PATIENCE
        try:
            while time.monotonic() < end:
                if self._store.check(["cause"]):
                    return str(self._store.get("cause").decode())
                time.sleep(0.02)
        except RuntimeError:
            pass
        return ""


def let_go(error: BaseException | None) -> None:
    """Empty the frames of ours that an error keeps. Their variables hold connections, which close with the last
    reference; until then other ranks wait.
    """
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("minifsdp."):
                with suppress(RuntimeError):  # it still runs
                    frame.clear()
        error = error.__context__


def _is_broken(error: BaseException) -> bool:
    """True for the error of a connection that the other end has closed."""
    words = ("closed by peer", "connection reset", "broken pipe", "connection refused", "socket timeout")
    text = str(error).lower()  # with the place in gloo's or NCCL's source: a model may have connections of its own
    is_backends = any(name in text for name in ("gloo", "nccl"))
    return isinstance(error, RuntimeError) and is_backends and any(word in text for word in words)
