"""Which GPUs there are, with which versions, and which commit of the source is here."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from minifsdp.course.doctor.gpus import ask_cuda, ask_driver
from minifsdp.course.doctor.machine import driver_version
from minifsdp.instruments.system.versions import Versions, versions

COMMIT = "MINIFSDP_COMMIT"  # the commit, where the source came without its repository


@dataclass(frozen=True)
class Machine:
    """What the parts run on.

    Attributes:
        gpu: the name of its GPUs; names, if they are of several kinds.
        count: of the GPUs that CUDA_VISIBLE_DEVICES lets see.
        versions: of python, torch, cuda, nccl, driver, minifsdp.
    """

    gpu: str
    count: int
    versions: Versions


class NoGpuError(Exception):
    """There is no GPU to be used; one line that says why."""


def find_gpus() -> Machine:
    """Ask CUDA, in a process of its own: this one takes no memory of a GPU from the parts.

    Raises:
        NoGpuError: there is none, or CUDA does not answer.
    """
    cuda = ask_cuda()
    if not cuda.gpus:
        raise NoGpuError(cuda.why or "CUDA finds none: is CUDA_VISIBLE_DEVICES set to nothing?")
    names = [gpu["name"] for gpu in cuda.gpus]
    return Machine(" and ".join(dict.fromkeys(names)), len(names), versions(driver_version(ask_driver())))


def commit(root: Path) -> str:
    """The commit of a checkout, "-dirty" if tracked files differ from it; what MINIFSDP_COMMIT says without git.

    Records do not count as source: each part changes them.
    """
    if not (root / ".git").exists():
        return os.environ.get(COMMIT) or "unknown"
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "-uno", "--", ".", ":!benchmarks/records")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get(COMMIT) or "unknown"
    return f"{head}{'-dirty' if changed else ''}"


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
