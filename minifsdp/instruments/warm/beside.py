"""Work beside this process's own, in a fork of the server, which has imported what that needs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from minifsdp.instruments.system.lifeline import end_by_signal, wait_for_end
from minifsdp.instruments.warm.client import Process, forks, server


@contextmanager
def beside(what: str, function: Callable[..., Any], *args: Any, needs: Sequence[str]) -> Iterator[None]:
    """Call `function(*args)` in another process while the block runs; return when both have ended.

    If there is no server to fork, or the call fails there, it is made again here, after the block: it raises here.

    Args:
        what: the process's name in `minifsdp ps`.
        function: of a module; what it leaves is in files, since its result is dropped.
        *args: its arguments, which are pickled.
        needs: modules that it uses; see `Server.ask`.
    """
    process: Process | None = None
    their_lifeline, lifeline = os.pipe()
    if forks() and server.runs:
        with suppress(OSError, pickle.PicklingError):
            process = server.start(what, _call, function, *args, fds=(their_lifeline,), needs=needs)
    done = False
    try:
        yield
        done = process is not None and process.wait() == 0
    finally:
        if process is not None:
            process.kill()
            process.wait()
            process.close()
        os.close(their_lifeline)
        os.close(lifeline)
    if not done:
        function(*args)


def _call(function: Callable[..., Any], *args: Any) -> NoReturn:
    """End without a word: who waits makes the same call, which says what is wrong. `args` ends with the lifeline."""
    wait_for_end(args[-1])
    end_by_signal(args[-1])
    code = 1
    try:
        function(*args[:-1])
        code = 0
    finally:
        os._exit(code)
