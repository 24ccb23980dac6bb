"""A check in a fresh process: the lab's set-up cell, the exercise's cell, then the exercise's check.

A supervisor sits between that process and this one: an answer that kills or stops its parent hits the supervisor.

The notebook, the command line and the instructor's marking all use this module with the same two pieces of text, so
that they cannot reach different verdicts.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import psutil

from minifsdp.course.system.housekeeping import label
from minifsdp.course.system.plain_files import files_below, read_plain
from minifsdp.course.workshop.submission import Submission

State = Literal["passed", "failed", "timeout", "crash"]
TREE = "MINIFSDP_CHECK"  # environment variable that marks a check's processes, orphans included
SUPERVISOR = Path(__file__).with_name("supervisor.py")
POLL_SECONDS = 0.1
MIB = 2**20
LARGEST_RESULT = MIB  # bytes


class Verdict(NamedTuple):
    """The outcome of a check.

    Attributes:
        state: "crash" if the process ended without a result, or was killed for exceeding a limit other than time.
        text: the check's message if it passed; else the errors, one fact per line.
    """

    state: State
    text: str


@dataclass(frozen=True)
class Limits:
    """Resource limits of a check, including all the processes that it starts.

    Attributes:
        seconds: from the start to the result, including the import of torch.
        memory: resident bytes; None for no limit. Shared pages count once per process.
        output: bytes printed or written to temporary files.
        processes: largest number at once; counted only if memory is limited.
    """

    seconds: float = 90.0
    memory: int | None = None
    output: int = 64 * MIB
    processes: int = 100


LEARNER = Limits()


def run_check(
    submission: Submission,
    limits: Limits = LEARNER,
    variant: Mapping[str, int] | None = None,
    alive: Callable[[int], None] = lambda seconds: None,
) -> Verdict:
    """Check an answer in a fresh process; afterwards the process and everything that it started are gone.

    Args:
        submission: the answer and its set-up cell.
        limits: the process is killed if it exceeds them.
        variant: fields of `checking.Variant` that differ from the check's own.
        alive: called with 0 at the start, and with the whole seconds so far after each further second.
    """
    with (
        _new_folder() as folder,
        tempfile.TemporaryFile() as output,  # unnamed, so that the answer cannot replace it
    ):
        secret = secrets.token_hex(16)
        settings = {"variant": dict(variant or {}), "secret": secret, "file_size": 2 * limits.output}
        (folder / "task.json").write_text(json.dumps({**submission._asdict(), **settings}))
        process = None
        try:
            process = _start(folder, output, submission.exercise, secret)
            ended = _watch(process, folder, output, limits, alive)
        finally:
            if process is not None:
                end_tree(process, secret, adopts=True)
        return ended if isinstance(ended, Verdict) else _verdict(folder, output, secret, ended)


@contextmanager
def _new_folder() -> Iterator[Path]:
    """A temporary folder, removed afterwards with anything that an answer has left in it."""
    made = tempfile.TemporaryDirectory(prefix="minifsdp-check-", ignore_cleanup_errors=True)
    try:
        yield Path(made.name)
    finally:
        with suppress(RecursionError):
            made.cleanup()
        if os.path.lexists(made.name):  # nested deeper than Python's recursion limit
            subprocess.run(["rm", "-rf", "--", made.name], stderr=subprocess.DEVNULL, check=False)


def _start(folder: Path, output: IO[bytes], exercise: str, secret: str) -> subprocess.Popen[bytes]:
    """Start the check. Standard input is a lifeline: when this process ends, the pipe closes and the check ends too."""
    environ = os.environ | label(f"check {exercise}") | {TREE: _tree(secret), "TMPDIR": str(folder)}
    if "PYTHONPATH" in environ:
        parts = environ["PYTHONPATH"].split(os.pathsep)
        environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts)
    check = [sys.executable, "-m", "minifsdp.course.workshop.child", str(folder)]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(SUPERVISOR), *check],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
        cwd=folder,
        env=environ,
        start_new_session=True,
    )


def _tree(secret: str) -> str:
    """The label of a check's process tree; the full secret must not appear in its environment."""
    return secret[:8]


def _watch(
    process: subprocess.Popen[bytes], folder: Path, output: IO[bytes], limits: Limits, alive: Callable[[int], None]
) -> Verdict | int:
    """Wait for the check; returns its exit code, or a verdict if it exceeded a limit or lost its supervisor."""
    assert process.stdout is not None
    began, shown, said, supervisor = time.monotonic(), -1, b"", psutil.Process(process.pid)
    while (seconds := time.monotonic() - began) < limits.seconds:
        if int(seconds) > shown:
            shown = int(seconds)
            alive(shown)
        if select.select([process.stdout], [], [], POLL_SECONDS)[0]:
            said = os.read(process.stdout.fileno(), 16)
            if not said:
                return Verdict("crash", _ended(process, output))
        if _bytes_in(folder) + os.fstat(output.fileno()).st_size > limits.output:
            return Verdict("crash", f"it wrote more than {limits.output / MIB:.0f} MiB")
        if said:
            return int(said)
        if _is_stopped(supervisor):
            return Verdict("crash", "its supervisor was stopped")
        if limits.memory is not None:
            sizes = _sizes(supervisor)
            if sum(sizes) > limits.memory:
                return Verdict("crash", f"it used more than {limits.memory / MIB:.0f} MiB of memory")
            if len(sizes) > limits.processes:
                return Verdict("crash", f"it started more than {limits.processes} processes")
    stopped = ": one of its processes was stopped" if any(map(_is_stopped, _children(supervisor))) else ""
    return Verdict("timeout", f"no result after {limits.seconds:.0f} s{stopped}")


def _ended(supervisor: subprocess.Popen[bytes], output: IO[bytes]) -> str:
    """The reason for a supervisor's end: killed, perhaps by an answer, or unable to start the check."""
    code = supervisor.wait(5.0)
    if code < 0:
        return f"its supervisor was ended by {signal.Signals(-code).name}: mark the others again"
    return "\n".join([f"its supervisor ended with code {code}", *_last_line(output)])


def _is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in files_below(folder):
        with suppress(OSError):
            total += file.lstat().st_size
    return total


def _sizes(supervisor: psutil.Process) -> list[int]:
    """Resident bytes of each process under the supervisor."""
    sizes = []
    for member in _children(supervisor):
        with suppress(psutil.Error):
            sizes.append(member.memory_info().rss)
    return sizes


def end_tree(process: subprocess.Popen[bytes], secret: str, patience: float = 5.0, adopts: bool = False) -> None:
    """Kill everything that a process has started, orphans included; then close its lifeline and kill the process.

    The process itself goes last: one that `adopts`, a supervisor, kills the remaining orphans when its lifeline closes.
    """
    root = psutil.Process(process.pid) if process.poll() is None else None
    deadline = time.monotonic() + patience
    family: set[psutil.Process] = set()
    while time.monotonic() < deadline:
        # A dying process loses its environment before it is gone, so keep track of the ones found earlier.
        family = {member for member in {*family, *_members(_tree(secret)), *_children(root)} if _runs(member)} - {root}
        if not family:
            break
        for member in family:
            with suppress(psutil.Error):
                member.kill()
    for end in filter(None, (process.stdin, process.stdout)):
        end.close()
    with suppress(subprocess.TimeoutExpired):  # it is stopped (SIGSTOP)
        process.wait(patience if adopts else 0)
    if root is not None:
        with suppress(psutil.Error):
            root.kill()
    process.wait()


def _children(root: psutil.Process | None) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return list(root.children(recursive=True)) if root is not None else []
    return []


def _members(tree: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(TREE) == tree and _runs(process):
                found.append(process)
    return found


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running()) and str(process.status()) != psutil.STATUS_ZOMBIE
    return False


def _verdict(folder: Path, output: IO[bytes], secret: str, code: int) -> Verdict:
    """The verdict from the result file if it holds this check's secret, else a crash."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        result: dict[str, Any] = json.loads(read_plain(folder / "result.json", LARGEST_RESULT))
        if result["secret"] == secret:
            if result["state"] not in ("passed", "failed"):
                return Verdict("crash", f"its result has an unknown state: {result['state']!r}")
            return Verdict(result["state"], str(result["text"]))
    return Verdict(
        "crash", "\n".join([f"the process ended with code {code} and without a result", *_last_line(output)])
    )


def _last_line(output: IO[bytes]) -> list[str]:
    output.seek(max(0, output.seek(0, os.SEEK_END) - 2000))
    return output.read(2000).decode(errors="replace").strip().splitlines()[-1:]
