"""Output streams whose failure does not stop a command, but is reported at its end.

No run may fail because a message could not be written. This module imports nothing slow.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


class Output:
    """A stream that takes any text and raises no OSError: it keeps the first one, and drops all text after it."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115  # None: it was closed when Python started
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        try:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError:  # a file's name may be undecodable
                encoding = self._stream.encoding
                return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Redirect the stream to /dev/null: Python flushes its buffer once more at exit, and that would fail again."""
        self.error = self.error or error
        with suppress(OSError, ValueError):  # it may have no file
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def going_on() -> Iterator[None]:
    """Keep a full, closed or lost stdout or stderr from stopping the block; exit code 1 if stdout was not written."""
    _open_closed()
    before, out, err = (sys.stdout, sys.stderr), Output(sys.stdout), Output(sys.stderr)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield
    except SystemExit as end:
        out.flush()
        if out.error is None:
            raise
        if out.error.errno != errno.EPIPE:  # the reader of a pipe has closed it
            print(f"minifsdp: cannot write to stdout: {out.error.strerror}", file=sys.stderr)
        raise SystemExit(end.code or 1) from None
    finally:
        err.flush()
        sys.stdout, sys.stderr = before


def _open_closed() -> None:
    """Open closed standard streams on /dev/null, or the next file opened would get their number, and the output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def was_written() -> bool:
    """Flush stdout; return whether everything printed so far was written."""
    sys.stdout.flush()
    return getattr(sys.stdout, "error", None) is None
