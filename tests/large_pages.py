"""Memory of the tests' server in large pages, once it has forked several times: each fork copies its page tables.

Of the 20 ms of CPU time that a fork of 300 MB and its end take, that saves 11, and costs 0.4 s once. Linux only, from
6.1 on; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SIZE = 2 * 2**20
MADV_COLLAPSE = 25  # of linux/mman.h
FEW = 5  # forks for which it does not pay
GROWN = 64 * 2**20  # bytes of imports after which it pays again

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_server = os.getpid()  # its forks' pages are its own: a copy of them would be no gain
_forks, _settled = 0, 0


def collapse() -> int:
    """Put this process's memory into large pages; returns how many."""
    return sum(_madvise(start, SIZE, MADV_COLLAPSE) == 0 for start in _large())


def _large() -> Iterator[int]:
    """Where a large page could be: in writable memory that is no file's and no other process's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, inode, *name = line.split(maxsplit=5)
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(each, 16) for each in span.split("-"))
            yield from range(-(-start // SIZE) * SIZE, end - SIZE + 1, SIZE)


def _before_fork() -> None:
    global _forks, _settled
    _forks += 1
    if _forks <= FEW or os.getpid() != _server:
        return
    with suppress(OSError):
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        if resident > _settled + GROWN:
            collapse()
            _settled = resident


os.register_at_fork(before=_before_fork)
