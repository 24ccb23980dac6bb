"""Everything that a process has started: found by descent and by the label of its tree, and ended."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

from minifsdp.instruments.system.housekeeping import TREE


def end_members(pid: int | None, tree: str, patience: float = 5.0) -> None:
    """Kill everything that a process has started, orphans with the tree's label included, but not the process itself.

    Args:
        pid: the process's id; None if it has ended.
        tree: the label.
        patience: seconds after which what cannot be killed is left.
    """
    root = psutil.Process(pid) if pid is not None and psutil.pid_exists(pid) else None
    deadline = time.monotonic() + patience
    family: set[psutil.Process] = set()
    while time.monotonic() < deadline:
        # A dying process loses its environment before it is gone, so keep track of the ones found earlier.
        family = {member for member in {*family, *_members(tree), *children(root)} if _runs(member)} - {root}
        if not family:
            break
        for member in family:
            with suppress(psutil.Error):
                member.kill()


def children(root: psutil.Process | None) -> list[psutil.Process]:
    """All that descends from a process."""
    with suppress(psutil.Error):
        return list(root.children(recursive=True)) if root is not None else []
    return []


def is_stopped(process: psutil.Process) -> bool:
    """True if a signal has stopped it (SIGSTOP)."""
    with suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


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
