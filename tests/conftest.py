"""What all tests share: the signals that they start with, what a failed one leaves, and how `pytest -n` shares them.

Of a file the tests stay together, for they share launches; the labs' exercises go lab by lab, notebooks one by one.
"""

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Each of these takes a minute or more. They go first, so that no worker begins one when the others are done.
LONGEST = ("labs", "ladder", "train", "launch", "marking", "fsdp_parity", "batch", "doctor")


def pytest_configure(config: pytest.Config) -> None:
    """What the tests start hears signals, also where this process ignores them: under nohup, in a script's background.

    A process inherits what is ignored, but not a handler that does nothing.
    """
    is_worker = hasattr(config, "workerinput")
    if is_worker or not getattr(config.option, "numprocesses", None):  # workers inherit what is ignored
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A command that runs in this process leaves handlers of its own."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A test that fails ends what it has started, and all that this has started."""
    report = yield
    if report.failed and call.when == "call":
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.create_time() >= call.start - 1:  # by the kernel's clock, which is not quite this one
                    process.kill()
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem.removeprefix("test_"), len(place)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """A launch runs those of a file's checks that have not been deselected."""
    for item in session.items:
        if getattr(item, "originalname", "") == "test_on_ranks":
            item.module.check.select(item.callspec.params["ranks"], item.callspec.params["name"])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            if file.endswith("test_labs.py"):
                lab = re.search(r"\[(\d+[ab]?)[].-]", nodeid)  # of [5.1-default], [05-C8] and [10a]
                return f"{file} {lab[1].zfill(2) if lab else ''}"
            return nodeid if file.endswith("test_notebooks.py") else file

    config.option.loadscopereorder = False  # by the number of tests: thousands that share a launch are no work
    return ByFile(config, log)
