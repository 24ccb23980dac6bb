"""The failure of a rank in few words: the cause first, its line, and none of the launcher's own frames."""

import enum
import linecache
import os
import re
import sys
import sysconfig
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minifsdp.instruments.system import lifeline

_OURS = str(Path(__file__).parent) + os.sep
_LIBRARIES = ("<frozen", *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|communicator was aborted",
    re.IGNORECASE,
)
_HINTS = {
    "busy or unavailable": "the GPU is in exclusive mode, or several MPS daemons serve it: `minifsdp doctor`",
    "initialization error|driver initialization failed|re-initialize CUDA in forked": "CUDA was initialized before the"
    " ranks were forked, by something that torch imports",
    "CUDA error": "it may come from an earlier line; CUDA_LAUNCH_BLOCKING=1 names it, unless ranks share a GPU",
}  # by part of CUDA's error message
_DUMPED_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class RankError(RuntimeError):
    """One or more ranks failed, died or did not answer; the message names the rank that caused it.

    Attributes:
        failures: rank -> its traceback (or stack, if it was stuck), the cause first, then its consequences.
    """

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message, failures)
        self.failures = failures
        for rank, text in failures.items():
            self.add_note(f"{f' rank {rank} ':-^60}\n{text.rstrip()}")

    def __str__(self) -> str:
        return str(self.args[0])

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows instead of the frames between the cell and the launcher."""
        return [line for note in self.__notes__ for line in note.splitlines()] + [f"RankError: {self}"]


class Kind(enum.IntEnum):
    """Kinds of failure, the likeliest cause first.

    A rank that dies takes its peers' connections with it. A rank that raises does not: it stays until the parent ends
    it. A lost connection is always the fault of another rank.
    """

    DIED = 0
    RAISED = 1
    LOST_PEER = 2


@dataclass(frozen=True)
class Failure:
    """The reason why one rank has no result. `when` orders failures of one kind (seconds, or a count)."""

    rank: int
    kind: Kind
    headline: str
    text: str
    where: tuple[str, int] | None = None
    when: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failure":
        """The failure of a rank that raised `error`, its traceback without the launcher's frames."""
        told = traceback.TracebackException.from_exception(error)
        frames = [frame for frame in told.stack if not frame.filename.startswith(_OURS)]
        told.stack = traceback.StackSummary.from_list(frames)
        written = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
        where = (written[-1].filename, written[-1].lineno or 0) if written else None
        headline = _headline(error)
        lost_peer = isinstance(error, (RuntimeError, OSError)) and _LOST_PEER.search(headline)
        return cls(rank, Kind.LOST_PEER if lost_peer else Kind.RAISED, headline, "".join(told.format()), where)


def _headline(error: BaseException) -> str:
    try:
        message, _, more = str(error).strip().partition("\n")
        if "Last error:" in more:  # NCCL names the cause last, below its own source file and version
            message = f"{message} {' '.join(more.partition('Last error:')[2].split())}"
    except Exception:
        message = "(its message cannot be shown)"
    return f"{type(error).__name__}: {message}".removesuffix(": ")


def rank_error(failures: list[Failure]) -> RankError:
    """The error to raise for these failures, the most likely cause first."""
    failures = sorted(failures, key=lambda failure: (failure.kind, failure.when))
    first = failures[0]
    alike = [failure for failure in failures if (failure.kind, failure.headline) == (first.kind, first.headline)]
    cause = min(alike, key=lambda failure: failure.rank)  # the same error on all ranks: blame the lowest one
    failures.sort(key=lambda failure: failure is not cause)
    where = f" ({cause.where[0]}:{cause.where[1]})" if cause.where else ""
    return RankError(
        name_cells(f"rank {cause.rank} failed: {cause.headline}{where}{_hint(cause.headline)}"),
        {failure.rank: name_cells(failure.text) for failure in failures},
    )


def _hint(headline: str) -> str:
    return next((f"; {hint}" for said, hint in _HINTS.items() if re.search(said, headline)), "")


def stuck_stack(dump: str) -> str:
    """The user's frames, innermost first and with their source, from faulthandler's dump of one process."""
    stacks: list[list[tuple[str, int, str]]] = []
    for section in dump.split("(most recent call first):\n"):
        frames = [(name, int(line), function) for name, line, function in _DUMPED_FRAME.findall(section)]
        ours = [name.startswith(_OURS) for name, _, _ in frames]
        if any(ours):  # the rank's main thread: leave out the launcher and its callers
            stacks.insert(0, frames[: _last_user_frame(frames)])
        elif any(not name.startswith((*_LIBRARIES, lifeline.__file__)) for name, _, _ in frames):
            stacks.append(frames)
    shown = [
        "".join(_format_frame(*frame) for frame in frames if not frame[0].startswith(_OURS))
        for frames in stacks
        if frames
    ]
    return name_cells("another thread:\n".join(shown)) or "(not inside fn)\n"


def _last_user_frame(frames: list[tuple[str, int, str]]) -> int:
    """Index of the launcher's `call_user`, the frame around the user's function (0 if it is not there)."""
    return next(
        (i for i, (name, _, function) in enumerate(frames) if function == "call_user" and name.startswith(_OURS)), 0
    )


def _format_frame(filename: str, line: int, function: str) -> str:
    source = linecache.getline(filename, line).strip()
    return f'  File "{filename}", line {line}, in {function}\n' + (f"    {source}\n" if source else "")


def name_cells(text: str) -> str:
    """Replace the made-up file names of notebook cells by `Cell In[5]`, as IPython's own tracebacks do."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        for filename in linecache.cache:
            name = shell.compile.format_code_name(filename)
            if name and filename in text:
                cell = " ".join(name)
                text = text.replace(f'File "{filename}"', cell).replace(filename, cell)
    return text
