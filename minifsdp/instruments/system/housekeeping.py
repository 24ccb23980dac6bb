"""Labels on all processes that minifsdp starts, by which they are found if their starter died.

The label is an environment variable that a process gets at its start and cannot lose: its role and its starter. It is
never in the starter's own environment, so nothing else that runs in a notebook inherits it. The system would
show the environment of its server for a forked process, which therefore writes its label over the server's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

LABEL = "MINIFSDP_PROCESS"
TREE = "MINIFSDP_CHECK"  # environment variable that marks a check's processes, orphans included
SERVER = "server of processes"
_ROOM = 1000  # bytes for the labels of a forked process
_ENV_START = 50  # the field of /proc/PID/stat, proc(5): where in memory the environment begins


@dataclass(frozen=True)
class Found:
    """One process of minifsdp.

    Attributes:
        process: the process.
        what: "rank 0 of 2", "server of processes", "check 5.2".
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


def padded_label(what: str) -> dict[str, str]:
    """The same for a process whose forks will write labels of their own over this one."""
    return {name: text.ljust(_ROOM) for name, text in label(what).items()}


def show_label() -> None:
    """Let the system show the labels in this forked process's environment, in the place of its server's.

    It shows the memory in which the environment was when the program began (proc(5), `environ`).
    """
    tree = f"\0{TREE}={os.environ[TREE]}" if TREE in os.environ else ""
    mine = f"{LABEL}={os.environ[LABEL].ljust(_ROOM - len(tree))}{tree}".encode()
    with suppress(OSError, ValueError), open("/proc/self/environ", "rb") as file:
        place = file.read().index(f"{LABEL}=".encode())
        with open("/proc/self/stat") as stat, open("/proc/self/mem", "r+b", buffering=0) as memory:
            begin = int(stat.read().rpartition(")")[2].split()[_ENV_START - 3])  # the third field follows the name
            if len(mine) == len(LABEL) + 1 + _ROOM:
                memory.seek(begin + place)
                memory.write(mine)


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
    """All processes of minifsdp that belong to this user, the oldest first."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError, ValueError, KeyError, TypeError, RecursionError):
            if process.pid != os.getpid() and process.uids().real == os.getuid() and (each := _describe(process)):
                found.append(each)
    return sorted(found, key=lambda each: -each.age)


def _describe(process: psutil.Process) -> Found | None:
    said = _label_of(process)
    if said is None or process.status() == psutil.STATUS_ZOMBIE:
        return None
    return Found(
        process,
        what=_what(process, said["what"]),
        starter=said["starter"],
        starter_pid=said["pid"],
        in_use=_runs(said["pid"], said["since"]),
        age=time.time() - process.create_time(),
        memory=process.memory_info().rss,
    )


def _label_of(process: psutil.Process) -> dict[str, Any] | None:
    text = process.environ().get(LABEL)
    return dict(json.loads(text)) if text else None


def _what(process: psutil.Process, said: str) -> str:
    """The name of a labelled process: its role, and its program if that is one that ours has started."""
    return said if "minifsdp.instruments.warm" in " ".join(process.cmdline()) else f"{said}: {process.name()}"


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
