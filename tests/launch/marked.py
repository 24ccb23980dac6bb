"""The processes of one test, by a variable that all of them inherit; a fork shows it as TREE only."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import psutil


def marked(word: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if word in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def within(seconds: float, holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
