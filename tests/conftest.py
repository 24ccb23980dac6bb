"""What all tests share: the signals that they start with, what a failed one leaves, and how `pytest -n` shares them.

Of a file the tests stay together, for they share launches; the labs' exercises go lab by lab, notebooks one by one.
What took longest goes first, so that no worker begins it when the others are done. seconds.json says how long it took;
`make test-seconds` writes it, with the option `--add-seconds`. Each worker imports the tests in another order, so that
each compiles a part of them, and finds the others' compiled.
"""

import gc
import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from minifsdp.instruments.warm.client import server

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SECONDS = Path(__file__).with_name("seconds.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--add-seconds", action="store_true", help=f"add what each file takes to {SECONDS.name}")


def pytest_configure(config: pytest.Config) -> None:
    """What the tests start hears signals, also where this process ignores them: under nohup, in a script's background.

    A process inherits what is ignored, but not a handler that does nothing. It also has one thread where a rank or this
    process would have more: on busy cores, threads that share an operator mostly wait for each other. And on Linux a
    thread that a message wakes waits for its turn: if it took the sender's core in the middle of a send, gloo's thread
    there would poll for the sender's lock until the sender has a core again.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported
    gc.set_threshold(100_000)  # what torch and thousands of tests have made stays: Python need not look through it
    is_worker = hasattr(config, "workerinput")
    if is_worker or not getattr(config.option, "numprocesses", None):  # workers inherit what is ignored
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
    if config.option.add_seconds and not is_worker:
        config.pluginmanager.register(Stopwatch())


@pytest.fixture(autouse=True, scope="session")
def _ranks_find_pytest_imported() -> None:
    server.prepare(("pytest", "large_pages"))


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
        killed = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.create_time() >= call.start - 1.1:  # counted from a boot in whole seconds, by ticks
                    process.kill()
                    killed.append(process)
        psutil.wait_procs(killed, timeout=10)  # a signal that is sent has not ended anything yet
    return report


def unit(nodeid: str) -> str:
    """What one worker runs together: "fsdp/test_shard", "labs/test_labs 05", "labs/test_notebooks 05-blank"."""
    file = nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
    pattern = {
        "labs/test_labs": r"\[(\d+[ab]?)[].-]",  # of [5.1-default], [05-C8] and [10a]
        "labs/test_notebooks": r"\[(.+)\]",
    }.get(file)
    found = re.search(pattern, nodeid) if pattern else None
    return f"{file} {found[1].zfill(2)}" if found else file


def known_seconds() -> dict[str, int]:
    return json.loads(SECONDS.read_text()) if SECONDS.exists() else {}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """In a folder and in those in it, the second of three workers begins after a third, and so on."""
    report = yield
    if isinstance(collector, pytest.Dir) and (worker := getattr(collector.config, "workerinput", None)):
        first = int(worker["workerid"].removeprefix("gw")) * len(report.result) // worker["workercount"]
        report.result = report.result[first:] + report.result[:first]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, in the same order for all workers; a file that is new takes the median."""
    seconds = known_seconds()
    usual = median(seconds.values() or [0])
    units = {item: unit(item.nodeid) for item in items}
    items.sort(key=lambda item: (-seconds.get(units[item], usual), units[item]))


class Stopwatch:
    """What each unit takes: set-ups, tests and their ends. Added at the end to what is in the file."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[unit(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        before = known_seconds()
        taken = {name: before.get(name, 0) + round(seconds) for name, seconds in self.seconds.items()}
        SECONDS.write_text(json.dumps(dict(sorted({**before, **taken}.items())), indent=0) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """A launch runs those of a file's checks that have not been deselected. What has been imported stays."""
    gc.freeze()  # or pytest would look through it three times at its end
    for item in session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if {"ranks", "name"} <= params.keys():
            for checks in (each for each in vars(item.module).values() if type(each).__name__ == "Checks"):
                checks.select(params["ranks"], params["name"])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByUnit(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False  # by the number of tests: thousands that share a launch are no work
    return ByUnit(config, log)
