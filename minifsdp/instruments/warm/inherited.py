"""The state, besides its environment, that a program hands on to a child: a fork of the server gets it by request."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

_LIMITS = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})


@dataclass(frozen=True)
class Inherited:
    """The calling thread's.

    Attributes:
        umask: bits that new files do not get.
        nice: added to its priority.
        cores: those it may run on; empty where the system does not tell.
        limits: of resources, soft and hard.
    """

    umask: int
    nice: int
    cores: frozenset[int]
    limits: Mapping[int, tuple[int, int]]

    @classmethod
    def here(cls) -> Inherited:
        """This process's."""
        cores = frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else frozenset()
        limits = {number: resource.getrlimit(number) for number in _LIMITS}
        return cls(_umask(), os.getpriority(os.PRIO_PROCESS, 0), cores, limits)

    def adopt(self) -> None:
        """Become like that, as far as this process may."""
        mine = Inherited.here()
        os.umask(self.umask)
        if self.nice != mine.nice:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        if self.cores != mine.cores:
            with suppress(OSError):
                os.sched_setaffinity(0, self.cores)
        for number, limits in self.limits.items():
            if limits != mine.limits[number]:
                with suppress(OSError, ValueError):
                    resource.setrlimit(number, limits)


def _umask() -> int:
    with suppress(OSError), open("/proc/self/status") as status:  # reading it, other threads make no files without it
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    os.umask(found := os.umask(0o077))
    return found
