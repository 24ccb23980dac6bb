"""Labels on all processes that the course starts, by which they are found if their starter died.

The label is an environment variable that a process gets at its start and cannot lose: its role and its starter. It is
in the starter's environment only while a process is being started, so nothing else that runs in a notebook inherits
it. Ranks are forked, with their server's label; they add a name of their own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

LABEL = "MINIFSDP_PROCESS"
SERVER = "server of ranks"


@dataclass(frozen=True)
class Found:
    """One process of the course.

    Attributes:
        process: the process.
        what: "rank 0 of 2", "server of ranks", "check 5.2".
        starter: the program that started it, such as "lab05_fsdp.ipynb".
        starter_pid: its process id.
        in_use: whether the starter still runs.
        age: seconds since the start.
        memory: resident bytes, pages shared with other processes included.
    """

    process: psutil.Process
    what: str
    starter: str
    starter_pid: int
    in_use: bool
    age: float
    memory: int


def label(what: str) -> dict[str, str]:
    """The variable that labels the processes that this one starts."""
    since = psutil.Process().create_time()
    return {LABEL: json.dumps({"what": what, "starter": _own_name(), "pid": os.getpid(), "since": since})}


@contextmanager
def labelled(what: str) -> Iterator[None]:
    """Label the processes that start inside the `with` block."""
    before = os.environ.get(LABEL)
    os.environ.update(label(what))
    try:
        yield
    finally:
        if before is None:
            del os.environ[LABEL]
        else:
            os.environ[LABEL] = before


def name_process(name: str) -> None:
    """Set this process's name in `ps` and `top`, if the system has names (Linux: up to 15 bytes)."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _own_name() -> str:
    """The user's name for this process: its notebook, its script, its check."""
    if LABEL in os.environ:
        return str(json.loads(os.environ[LABEL])["what"])
    if "ipykernel" in sys.modules:
        return Path(os.environ.get("JPY_SESSION_NAME", "a notebook")).name
    return "python -c" if sys.argv[0] in ("", "-c") else Path(sys.argv[0]).name


def find_processes() -> list[Found]:
    """All processes of the course that belong to this user, the oldest first."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError, ValueError, KeyError, TypeError, RecursionError):
            if process.pid != os.getpid() and process.uids().real == os.getuid() and (each := _describe(process)):
                found.append(each)
    return sorted(found, key=lambda each: -each.age)


def _describe(process: psutil.Process) -> Found | None:
    said = _label_of(process)
    what = _what(process, said["what"]) if said else None
    if said is None or what is None or process.status() == psutil.STATUS_ZOMBIE:
        return None
    return Found(
        process,
        what,
        starter=said["starter"],
        starter_pid=said["pid"],
        in_use=_runs(said["pid"], said["since"]),
        age=time.time() - process.create_time(),
        memory=process.memory_info().rss,
    )


def _label_of(process: psutil.Process) -> dict[str, Any] | None:
    text = process.environ().get(LABEL)
    return dict(json.loads(text)) if text else None


def _what(process: psutil.Process, said: str) -> str | None:
    """The kind of a labelled process; None for multiprocessing's own, and for other forks of our server."""
    name, command = str(process.name()), " ".join(process.cmdline())
    if "multiprocessing.resource_tracker" in command:
        return None
    if name.startswith("rank "):
        return name
    if "multiprocessing.forkserver" in command:
        parent = process.parent()
        forked = parent is not None and "multiprocessing.forkserver" in " ".join(parent.cmdline())
        return None if forked else SERVER
    ours = "multiprocessing.spawn" in command or "minifsdp.course.workshop.child" in command
    return said if ours else f"{said}: {name}"


def _runs(pid: int, since: float) -> bool:
    try:
        starter = psutil.Process(pid)
        return abs(float(starter.create_time()) - since) < 2 and str(starter.status()) != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_processes(found: list[Found], patience: float = 3.0) -> list[Found]:
    """Ask these processes to end, kill those that do not within `patience` seconds; return those still left."""
    processes = [each.process for each in found]
    for process in processes:
        _send(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=patience)
    for process in alive:
        _send(process, signal.SIGKILL)
    _, alive = psutil.wait_procs(alive, timeout=patience)
    return [each for each in found if each.process in alive and each.process.status() != psutil.STATUS_ZOMBIE]


def _send(process: psutil.Process, number: signal.Signals) -> None:
    """Signal a process, and its group if it leads one, as ranks and checks do."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        if process.is_running() and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)  # psutil detects a process id that was reused
