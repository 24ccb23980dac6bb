"""What ends a check and is no fault of the answer is named: a process killed from outside, a limit, no server."""

import io
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from minifsdp.course.workshop import child, notebook, outside, process
from minifsdp.course.workshop.catalogue import setup_of
from minifsdp.course.workshop.outside import unless_from_outside
from minifsdp.course.workshop.process import run_check
from minifsdp.course.workshop.references import find_reference, lab_of
from minifsdp.course.workshop.store import Store
from minifsdp.course.workshop.submission import Submission
from minifsdp.course.workshop.verdict import Verdict, of_result
from minifsdp.instruments.launch import launch, local
from minifsdp.instruments.launch import start as launch_start
from minifsdp.instruments.system import resources
from minifsdp.instruments.warm.client import Server, server


def answer(exercise: str, *first: str) -> Submission:
    """The reference answer, with lines before it inside the function."""
    source = find_reference(exercise).source
    head, docstring, body = source.partition('"""\n')
    lines = "".join(f"    {line}\n" for line in first)
    cell = f'@exercise("{exercise}")\n{head}{docstring}{lines}{body}'
    return Submission(exercise, setup_of(lab_of(exercise)), cell)


@contextmanager
def killing(find: Callable[[int], int], told: Path) -> Iterator[None]:
    """Kill the process that `find` names from the first process id that is written to `told`."""

    def kill() -> None:
        while not (told.exists() and (said := told.read_text())):
            time.sleep(0.01)
        os.kill(find(int(said)), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    yield
    killer.join(60)
    assert not killer.is_alive()


def waits(told: Path) -> tuple[str, ...]:
    part = str(told) + ".part"
    return (
        "import os, time",
        f"if group.rank() == 1: open({part!r}, 'w').write(str(os.getpid())); os.rename({part!r}, {str(told)!r})",
        "time.sleep(4)",
    )


@pytest.mark.parametrize(
    ("find", "who"),
    [
        (lambda rank: rank, r"rank 1 was killed from outside \(SIGKILL\)"),
        (lambda rank: psutil.Process(rank).ppid(), r"the server of the ranks was killed from outside"),
    ],
    ids=["a rank", "their server"],
)
def test_a_process_that_is_killed_from_outside_is_no_wrong_answer(
    find: Callable[[int], int], who: str, tmp_path: Path
) -> None:
    told = tmp_path / "pid"
    with killing(find, told):
        found = run_check(answer("5.2", *waits(told)))
    assert found.state == "unchecked", found
    assert re.fullmatch(f"{who}: check again", found.text), found
    said = notebook.told("5.2", found, Store(tmp_path))
    assert said.startswith("5.2 gather: yours: not checked; ")
    assert "hint" not in said


def test_a_check_whose_server_is_killed_goes_on(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    with killing(lambda rank: server.process.pid if server.process else 0, told):
        assert run_check(answer("5.2", *waits(told)[:2])).state == "passed"


def test_a_server_that_is_killed_before_a_check_has_started_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    ask = Server.ask

    def ask_a_dead_one(self: Server, *args: object, **settings: object) -> object:
        if not asked:
            server.prepare(())
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGSTOP)  # the request is not read
        asked.append(found := ask(self, *args, **settings))  # type: ignore[arg-type]
        if len(asked) == 1:
            server.process.kill()  # type: ignore[union-attr]
        return found

    monkeypatch.setattr(Server, "ask", ask_a_dead_one)
    assert run_check(answer("4.1")).state == "passed"
    assert len(asked) == 2
    assert server._connection is not None
    assert not server._connection.prepared, "the next check of a lab without ranks would wait for their imports"


def test_a_check_runs_with_a_lower_limit_of_files_than_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no privileges cannot raise a hard limit."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**20))
    assert child.at_most(resource.RLIMIT_FSIZE, 2**30) == (2**20, 2**20)
    assert child.at_most(resource.RLIMIT_FSIZE, 2**10) == (2**10, 2**10)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, resource.RLIM_INFINITY))
    assert child.at_most(resource.RLIMIT_FSIZE, 2**30) == (2**30, 2**30)


def test_a_server_that_is_ended_twice_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> Verdict:
        raise ConnectionError

    monkeypatch.setattr(process, "_run_once", run)
    line = "its server was ended twice: free some memory, see `ulimit -a`, and check again"
    assert run_check(answer("4.1")) == Verdict("unchecked", line)


def test_a_check_that_is_killed_is_said_to_be(tmp_path: Path) -> None:
    ended = of_result(tmp_path, io.BytesIO(), "", -signal.SIGKILL)
    line = "its process was killed from outside (SIGKILL): check again"
    assert unless_from_outside(ended, "", 0) == Verdict("unchecked", line)


@pytest.mark.parametrize(
    ("text", "line", "kills", "says"),
    [
        ("rank 1 failed: killed by SIGKILL before fn returned", "", 0, "rank 1 was killed from outside (SIGKILL)"),
        ("rank 1 failed: killed by SIGKILL before fn returned", "", 1, "because the machine ran out of memory: the a"),
        (
            "rank 1 failed: killed by SIGKILL before fn returned",
            "os.kill(os.getpid(), 9)",
            0,
            "by the answer itself or",
        ),
        (
            "its process was killed by SIGTERM without a result",
            "",
            0,
            "its process was killed from outside (SIGTERM): ",
        ),
        (
            "it raises: OSError: [Errno 24] Too many open files",
            "",
            0,
            "this shell allows too little: 100, see `ulimit ",
        ),
        ("it raises: MemoryError", "", 0, "the answer takes too much, or this shell allows too little: 3,145,728 KiB"),
        ("its process was killed by SIGXCPU without a result", "", 0, "too little: 30 s, see `ulimit -t`"),
        ("its process was killed by SIGKILL without a result", "", 0, "too little: 30 s, see `ulimit -t`"),
    ],
)
def test_where_it_cannot_be_told_apart_both_are_said_in_one_line(
    text: str, line: str, kills: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_NOFILE: 100, resource.RLIMIT_AS: 3 * 2**30}
    if "ulimit -t" in says:
        limits[resource.RLIMIT_CPU] = 30
    monkeypatch.setattr(resource, "getrlimit", lambda number: (limits.get(number, resource.RLIM_INFINITY),) * 2)
    monkeypatch.setattr(outside, "kills_so_far", lambda: kills)
    state = "crash" if text.startswith("its") else "failed"
    found = unless_from_outside(Verdict(state, text), line, 0)  # type: ignore[arg-type]
    assert found.state == "unchecked"
    assert says in found.text
    assert len(found.text.splitlines()) == 1


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict("failed", "it raises: OSError: [Errno 24] Too many open files"),  # with as many as a shell allows
        Verdict("failed", "it raises: MemoryError"),
        Verdict("failed", "rank 0 failed: killed by SIGSEGV before fn returned"),
        Verdict("crash", "its process ended with code 0 and without a result"),
        Verdict("passed", "its process was killed by SIGKILL"),
        Verdict("timeout", "no result after 60 s"),
    ],
)
def test_what_an_answer_does_is_still_its_own(verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: 1024}
    monkeypatch.setattr(resource, "getrlimit", lambda number: (limits.get(number, resource.RLIM_INFINITY),) * 2)
    assert unless_from_outside(verdict, "", 0) == verdict


@pytest.mark.parametrize(
    ("number", "limit", "says"),
    [
        (resource.RLIMIT_NOFILE, 32, "this shell allows 32 open files, and ranks need 64: `ulimit -n 1024`"),
        (resource.RLIMIT_AS, 2**29, "allows 524,288 KiB of address space, and ranks need 2,097,152: `ulimit -v unlimi"),
    ],
)
def test_a_limit_that_is_too_low_is_said_before_anything_starts(
    number: int, limit: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda each: (limit, limit) if each == number else here(each))
    fresh = Server()
    for module in (process, local, launch_start):
        monkeypatch.setattr(module, "server", fresh)
    found = run_check(answer("4.1"))
    assert (found.state, says in found.text) == ("unchecked", True), found
    assert fresh.process is None
    with pytest.raises(OSError, match="this shell allows"):
        launch(len, 1, "")
    with pytest.raises(OSError, match=r"in a new shell$"):
        resources.check_shell()
