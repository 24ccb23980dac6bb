"""A check in a fresh process: the lab's set-up cell, the exercise's cell, then the exercise's one pytest node.

The notebook, the command line and the instructor's marking all come through here with the same two pieces of text, so
they cannot come to different verdicts.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from minifsdp.course.housekeeping import label
from minifsdp.course.workshop.submission import Submission

State = Literal["passed", "failed", "timeout", "crash"]
TREE = "MINIFSDP_CHECK"  # the variable by which all that a check has started is found, orphans too
POLL_SECONDS = 0.1
MIB = 2**20


class Verdict(NamedTuple):
    """What came of a check.

    Attributes:
        state: "crash" is a process that ended without a result, or was ended because it went beyond a limit.
        text: what the check says when it has passed; else what is wrong, a fact to a line.
    """

    state: State
    text: str


@dataclass(frozen=True)
class Limits:
    """What a check may take, with all the processes that it starts.

    Attributes:
        seconds: from the start to the result, importing torch included.
        memory: resident bytes; None is no limit. Pages that processes share count in each of them.
        output: bytes printed or written to temporary files.
        processes: how many at once; they are counted only where memory is limited.
    """

    seconds: float = 90.0
    memory: int | None = None
    output: int = 64 * MIB
    processes: int = 100


LEARNER = Limits()


def run_check(submission: Submission, limits: Limits = LEARNER, variant: Mapping[str, int] | None = None) -> Verdict:
    """Check an answer in a process of its own, which is gone afterwards with all that it has started.

    Args:
        submission: what to run.
        limits: beyond which the process is ended.
        variant: fields of `checking.Variant` that differ from the check's own.
    """
    with tempfile.TemporaryDirectory(prefix="minifsdp-check-", ignore_cleanup_errors=True) as name:
        folder, secret = Path(name), secrets.token_hex(16)
        settings = {"variant": dict(variant or {}), "secret": secret, "file_size": 2 * limits.output}
        (folder / "task.json").write_text(json.dumps({**submission._asdict(), **settings}))
        process = None
        try:
            process = _start(folder, submission.exercise, secret)
            beyond = _watch(process, folder, limits)
        finally:
            if process is not None:
                end_tree(process, secret)
        return beyond or _verdict(folder, secret, process.returncode)


def _start(folder: Path, exercise: str, secret: str) -> subprocess.Popen[bytes]:
    """Start the check. The pipe is a lifeline: the process ends when it closes, however this one ends."""
    environ = os.environ | label(f"check {exercise}") | {TREE: _tree(secret), "TMPDIR": str(folder)}
    if "PYTHONPATH" in environ:
        parts = environ["PYTHONPATH"].split(os.pathsep)
        environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts)
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "minifsdp.course.workshop.child", str(folder)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environ,
            start_new_session=True,
        )


def _tree(secret: str) -> str:
    """What the tree of a check is called; the secret itself is not for its environment."""
    return secret[:8]


def _watch(process: subprocess.Popen[bytes], folder: Path, limits: Limits) -> Verdict | None:
    """Wait for the process to end; the verdict if it went beyond a limit."""
    deadline = time.monotonic() + limits.seconds
    while time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
            return None
        if _bytes_in(folder) > limits.output:
            return Verdict("crash", f"it wrote more than {limits.output / MIB:.0f} MiB")
        if limits.memory is not None:
            sizes = _sizes(process)
            if sum(sizes) > limits.memory:
                return Verdict("crash", f"it took more than {limits.memory / MIB:.0f} MiB of memory")
            if len(sizes) > limits.processes:
                return Verdict("crash", f"it started more than {limits.processes} processes")
    return Verdict("timeout", f"no result after {limits.seconds:.0f} s")


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(root, file)).st_size
    return total


def _sizes(process: subprocess.Popen[bytes]) -> list[int]:
    """Resident bytes of each process of the tree."""
    sizes = []
    with suppress(psutil.Error):
        root = psutil.Process(process.pid)
        for member in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                sizes.append(member.memory_info().rss)
    return sizes


def end_tree(process: subprocess.Popen[bytes], secret: str, patience: float = 5.0) -> None:
    """Close the lifeline of a check and kill all that it has started, its own children's orphans too."""
    if process.stdin is not None:
        process.stdin.close()
    family = _members(_tree(secret))
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True), *family]  # the root first: it may be starting more of them
    deadline = time.monotonic() + patience
    while family and time.monotonic() < deadline:
        for member in family:
            with suppress(psutil.Error):
                member.kill()
        process.poll()
        # What dies has lost its environment before it is gone: those that were found are still asked after.
        family = [member for member in {*family, *_members(_tree(secret))} if _runs(member)]
    process.wait()


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


def _verdict(folder: Path, secret: str, code: int) -> Verdict:
    """The result that the process has left, if it left one with our secret in it."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        if result["secret"] == secret:
            return Verdict(result["state"], str(result["text"]))
    with (folder / "output").open("rb") as output:
        output.seek(max(0, output.seek(0, os.SEEK_END) - 2000))
        last = output.read().decode(errors="replace").strip().splitlines()[-1:]
    return Verdict("crash", "\n".join([f"the process ended with code {code} and without a result", *last]))
