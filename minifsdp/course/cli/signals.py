"""The effect of Ctrl-C, SIGTERM and SIGHUP on a command. This module imports nothing slow.

A handler that raises is not safe everywhere: where C code runs Python, as `import torch` does, the exception is lost or
becomes another one. So a signal ends the process at once, unless there are ranks or temporary files to clean up.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130  # the exit code, as in shells


def end_when_interrupted() -> None:
    """Make Ctrl-C print a line and end the process at once; SIGTERM and SIGHUP end it by default."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"minifsdp: interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Make signals raise while there is something to clean up: KeyboardInterrupt for Ctrl-C, else SystemExit.

    Ignored signals stay ignored: SIGHUP under nohup, SIGINT in a background process of a script.
    """
    before = {number: signal.getsignal(number) for number in ENDING}
    heard = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    try:
        for number in heard:
            signal.signal(number, _unwind)
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)


def _unwind(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
