"""The tests' server: memory in large pages has the values that it had."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands_in_forks import run_fork
from large_pages import SIZE, collapse

MOST = 16  # large pages of the test


def in_large_pages() -> None:
    """Print how many bytes of this process are in large pages, before and after."""
    held = bytearray(bytes(range(256)) * (MOST * SIZE // 256))
    before = large_bytes()
    collapse()
    assert held == bytes(range(256)) * (MOST * SIZE // 256)
    print(before, large_bytes())


def large_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_what_was_in_memory_is_there_in_large_pages() -> None:
    done = run_fork(in_large_pages)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    if before == after:
        pytest.skip("this kernel makes no large pages of small ones")
    assert after >= before + SIZE  # memory in pieces may give fewer than all
