"""The server that has imported torch: what it forks, what its forks inherit, and when it ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from marked import within

from minifsdp.course.needs import PICTURES_NEED, RANKS_USE
from minifsdp.course.workshop.catalogue import all_labs
from minifsdp.instruments.system.housekeeping import LABEL, SERVER, TREE, label
from minifsdp.instruments.warm import beside, client
from minifsdp.instruments.warm.client import Process, Server
from minifsdp.instruments.warm.needs import RANKS_NEED
from minifsdp.instruments.warm.server import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's folder for temporary files."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    """One with no module but what itself needs, except where a test asks for more."""
    server = Server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(place))
        patch.setattr(tempfile, "tempdir", None)
        server.prepare(())
    yield server
    assert server.process is not None
    server._connection.close()  # type: ignore[union-attr]
    assert server.process.wait(5) in (0, -signal.SIGKILL)


def look(out: int) -> None:
    """Tell what a process sees of itself, through a file descriptor that came with the request."""
    told = {
        "argv": sys.argv,
        "folder": os.getcwd(),
        "fds": [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")],
        "environ": {name: os.environ.get(name) for name in ("ADDED", LABEL, TREE)},
        "leads": os.getsid(0) == os.getpgrp() == os.getpid(),
        "torch": "torch" in sys.modules,
        "signals": [signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, signal.set_wakeup_fd(-1)],
    }
    os.write(out, json.dumps(told).encode())


def end(how: str) -> None:
    if how == "raise":
        raise ValueError("mine")
    if how == "exit":
        sys.exit(7)
    os.kill(os.getpid(), int(how))


def wait(*_: Any) -> None:
    time.sleep(1000)


def seen(server: Server, **settings: Any) -> dict[str, Any]:
    read, write = os.pipe()
    with open(read, "rb") as out:
        try:
            process = server.start("looks", look, fds=(write,), **settings)
        finally:
            os.close(write)
        assert process.wait(30) == 0
        process.close()
        return dict(json.loads(out.read()))


def test_a_process_is_what_was_asked_for_and_inherits_nothing_else(server: Server, tmp_path: Path) -> None:
    environ = os.environ | {"ADDED": "é", TREE: "abcd"}
    told = seen(server, environ=environ, folder=str(tmp_path), argv=["name", "word"], needs=())
    assert told["argv"] == ["name", "word"]
    assert told["folder"] == str(tmp_path)
    assert len(told["fds"]) == 4, "three streams and the one that was sent"
    assert told["environ"]["ADDED"] == "é"
    assert told["environ"][TREE] == "abcd"
    assert json.loads(told["environ"][LABEL])["what"] == "looks"
    assert told["leads"]
    assert told["signals"] == [True, -1]
    assert not told["torch"]
    assert LABEL not in os.environ


def test_it_imports_what_is_needed_once_and_has_one_thread_and_no_cuda_before_and_after(
    server: Server, place: Path
) -> None:
    def threads() -> int:
        assert server.process is not None
        return len(os.listdir(f"/proc/{server.process.pid}/task"))

    answers = [f"minifsdp.answers.lab{lab}" for lab in all_labs()]  # what labs launch may name them
    assert seen(server, needs=())["torch"] is False
    for _ in range(2):
        assert seen(server, needs=(*RANKS_NEED, *RANKS_USE, *PICTURES_NEED, *answers))["torch"]
        assert threads() == 1
    assert seen(server, needs=())["torch"], "the server has it from now on"
    assert not list(place.iterdir()), "torch._dynamo makes a folder for its cache when it is imported"
    assert seen(server, needs=("no_such_module",))["torch"]


def test_it_imports_ahead_of_a_request_what_it_is_told_to() -> None:
    server = Server()
    server.prepare(("torch",))
    assert seen(server, needs=())["torch"]
    server._connection.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 7), ("9", -9), ("15", -15)])
def test_the_exit_code_is_told(server: Server, how: str, code: int, tmp_path: Path) -> None:
    with open(tmp_path / "errors", "wb+") as errors:
        stdio = (os.open(os.devnull, os.O_RDONLY), errors.fileno(), errors.fileno())
        process = server.start("ends", end, how, stdio=stdio, needs=())
        assert process.wait(30) == process.poll() == code
        process.kill()
        process.close()
        os.close(stdio[0])
    assert (tmp_path / "errors").read_text().endswith("ValueError: mine\n") == (how == "raise")


def test_one_that_has_ended_before_a_request_is_replaced() -> None:
    server = Server()
    server.prepare(())
    ended = server.process
    assert ended is not None
    ended.kill()
    ended.wait()
    process = server.start("ends", end, "exit", needs=())
    assert process.wait(30) == 7
    process.close()
    assert server.process is not None
    assert server.process is not ended
    server._connection.close()  # type: ignore[union-attr]
    server.process.wait(5)


def label_shown(process: Process) -> dict[str, str]:
    return {name: text for name, text in psutil.Process(process.pid).environ().items() if name in (LABEL, TREE)}


def test_the_system_shows_each_forks_own_label(server: Server) -> None:
    checks = [server.start(f"check {n}", wait, environ=os.environ | {TREE: str(n)}, needs=()) for n in range(3)]
    plain = server.start("a rank", wait, needs=())
    try:
        within(5, lambda: "a rank" in label_shown(plain)[LABEL])
        assert TREE not in label_shown(plain)
        for number, check in enumerate(checks):
            within(5, lambda check=check: TREE in label_shown(check))
            shown = label_shown(check)
            assert shown[TREE] == str(number)
            assert json.loads(shown[LABEL]) == json.loads(label(f"check {number}")[LABEL])
        assert server.process is not None
        assert json.loads(psutil.Process(server.process.pid).environ()[LABEL])["what"] == SERVER
    finally:
        for each in (*checks, plain):
            each.kill()
            assert each.wait(5) == -signal.SIGKILL
            each.close()


def test_a_starter_with_a_long_name_keeps_the_servers_label(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    process = server.start(1000 * "x", wait, needs=())
    try:
        time.sleep(0.1)
        assert json.loads(label_shown(process)[LABEL])["what"] == SERVER
    finally:
        process.kill()
        process.wait()
        process.close()


def test_nobody_else_can_reach_it(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    seen(server, needs=())
    assert server.process is not None
    sockets = psutil.Process(server.process.pid).net_connections("unix")
    assert [each.laddr for each in sockets] == [""], "a socket with a name"
    assert not list(tmp_path.iterdir())


SCRIPT = """
    import os, sys, time
    from minifsdp.instruments.warm.client import server
    sys.path.insert(0, os.getcwd())
    process = server.ask("waits", time.sleep, 1000, needs={needs})
    print(server.process.pid, flush=True)
    if not {needs}:
        process.started()
        print(process.pid, flush=True)
    for _ in range({seconds}):  # a signal that comes as Python enters a call of sleep does not end that call
        time.sleep(1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, 0])
@pytest.mark.parametrize("importing", [True, False])
def test_it_ends_with_its_program(number: int, importing: bool, tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time; open('imports', 'w').close(); time.sleep(1000)")
    script = SCRIPT.format(needs=("slow_to_import",) if importing else (), seconds=1000 if number else 0)
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        if importing and number:
            within(30, (tmp_path / "imports").exists)
        forked = [] if importing else [psutil.Process(int(parent.stdout.readline()))]
        if number:
            parent.send_signal(number)
        parent.wait(20)
    if number != signal.SIGKILL:
        for each in forked:  # ranks and checks, which have lifelines, end by themselves
            each.kill()
    within(PATIENCE + 3, lambda: is_gone(server))
    within(1, lambda: all(map(is_gone, forked)))  # the server kills what does not end


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


IN_A_FOLDER = """
    import os, sys, time
    from minifsdp.instruments.warm.client import server
    from minifsdp.instruments.system.scratch import scratch_folder
    with scratch_folder() as folder:
        server.prepare({needs})
        (folder / "nested").mkdir()
        (folder / "nested" / "file").touch()
        print(server.process.pid, flush=True)
        for _ in range(1000):
            time.sleep(1)
"""


@pytest.mark.parametrize("importing", [True, False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_folder_is_left_by_a_killed_program(number: int, importing: bool, tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time; open('imports', 'w').close(); time.sleep(1000)")
    script = IN_A_FOLDER.format(needs=("slow_to_import",) if importing else ())
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as program:
        assert program.stdout is not None
        server = psutil.Process(int(program.stdout.readline()))
        assert [each.name for each in tmp_path.glob("minifsdp-*/nested/file")] == ["file"]
        if importing:
            within(30, (tmp_path / "imports").exists)
        program.send_signal(number)
        program.wait(20)
    within(5, lambda: not list(tmp_path.glob("minifsdp-*")))
    within(5, lambda: is_gone(server))


def test_a_fork_of_the_program_asks_a_server_of_its_own(server: Server) -> None:
    before = client.server.start("nothing", end, "9", needs=())
    before.close()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            mine = client.server.start("nothing", end, "9", needs=())
            assert client.server.process is not None
            os.write(write, f"{mine.wait(20)} {client.server.process.pid}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as said:
        code, pid = said.read().split()
    os.waitpid(child, 0)
    assert client.server.process is not None
    assert (int(code), int(pid) != client.server.process.pid) == (-9, True)
    after = client.server.start("nothing", end, "9", needs=())
    assert after.wait(20) == -9
    after.close()


def run_script(script: str, *redirections: str) -> str:
    """What a script prints to the file descriptor that its first argument names."""
    read, write = os.pipe()
    command = [sys.executable, "-c", textwrap.dedent(script), str(write)]
    shell = ["bash", "-c", f'"$@" {" ".join(redirections)}', "bash", *command]
    done = subprocess.run(shell, pass_fds=[write], stderr=subprocess.PIPE, check=False, timeout=60, text=True)
    os.close(write)
    with open(read) as said:
        found = said.read()
    assert done.returncode == 0, done.stderr
    return found


START = """
    import os, pathlib, signal, sys
    from minifsdp.instruments.warm.client import server
    def ended():
        process = server.start("nothing", os._exit, 7, needs=())
        code = process.wait(20)
        process.close()
        return code
    {before}
    print([ended() for _ in range(2)], end="", file=open(int(sys.argv[1]), "w"))
"""


@pytest.mark.parametrize(
    ("before", "redirections"),
    [
        ("held = [open(os.devnull) for _ in range(1100)]", ()),
        ("", ("<&-", ">&-")),
        ("", ("<&-", ">&-", "2>&-")),
        ("sys.path.insert(0, pathlib.Path('.'))", ()),
        ("ended(); os.closerange(3, int(sys.argv[1])); os.closerange(1 + int(sys.argv[1]), 256)", ()),
        ("ended(); os.kill(server.process.pid, signal.SIGKILL)", ()),
    ],
    ids=["many files", "no input or output", "no standard streams", "a path that is none", "all closed", "killed"],
)
def test_it_serves_a_program_with(before: str, redirections: tuple[str, ...]) -> None:
    assert run_script(START.format(before=before), *redirections) == "[7, 7]"


STOPPED = """
    import os, signal, sys, time
    import psutil
    from minifsdp.instruments.warm import beside, client
    client.LONGEST_START = 0.5
    client.server.prepare(())
    stopped = client.server.process.pid
    os.kill(stopped, signal.SIGSTOP)
    asked = client.server.ask("nothing", os._exit, 7, needs=())
    found = [asked.wait(0.1), asked.kill(), asked.pid]
    try:
        client.server.start("nothing", os._exit, 7, needs=())
    except TimeoutError as error:
        found.append(str(error))
    client.LONGEST_START = 60
    found += [asked.wait(5), client.server.start("nothing", os._exit, 7, needs=()).wait(20)]
    os.kill(client.server.process.pid, signal.SIGSTOP)
    while psutil.Process(client.server.process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    print(found, stopped, client.server.process.pid, file=open(int(sys.argv[1]), "w"))
"""


def test_one_that_is_stopped_costs_nobody_else_his_life_and_is_replaced() -> None:
    found, _, pids = run_script(STOPPED).strip().rpartition("] ")
    late = "the server did not start nothing within 0 s: try again"
    assert found == f"[None, None, 0, {late!r}, {client.GONE}, 7"
    for pid in map(int, pids.split()):
        within(5, lambda pid=pid: not psutil.pid_exists(pid) or is_gone(psutil.Process(pid)))


KILLED = """
    import os, signal, sys, threading, time
    import psutil
    from minifsdp.instruments.warm.client import server
    start = threading.Thread(target=server.start, args=("nothing", os._exit, 7), kwargs=dict(needs=()))
    (start.start(), start.join()) if {in_a_thread} else start.run()
    while len(os.listdir("/proc/self/task")) > 1:  # a thread's end, too, lets go on what it has started
        time.sleep(0.01)
    process = server.process.pid
    os.kill(process, signal.SIGSTOP)
    while psutil.Process(process).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    print(process, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_one_that_is_stopped_ends_with_its_killed_program(in_a_thread: bool) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED.format(in_a_thread=in_a_thread))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
        assert program.stdout is not None
        server = psutil.Process(int(program.stdout.readline()))
        assert server.status() == psutil.STATUS_STOPPED
        program.kill()
    within(PATIENCE, lambda: is_gone(server))


STOPPED_EARLY = """
    import os, signal, subprocess, time
    from minifsdp.instruments.warm.client import server
    class Stopped(subprocess.Popen):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            os.kill(self.pid, signal.SIGSTOP)
    subprocess.Popen = Stopped
    server.prepare(())
    print(server.process.pid, flush=True)
    time.sleep(1000)
"""


def test_one_that_is_stopped_before_it_has_done_anything_ends_with_its_killed_program() -> None:
    command = [sys.executable, "-c", textwrap.dedent(STOPPED_EARLY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
        assert program.stdout is not None
        server = psutil.Process(int(program.stdout.readline()))
        within(5, lambda: server.status() == psutil.STATUS_STOPPED)
        program.kill()
    try:
        within(5, lambda: is_gone(server))
    finally:
        with suppress(psutil.NoSuchProcess):
            server.kill()


INTERRUPTED = """
    import os, signal, sys
    from minifsdp.instruments.warm.client import server
    server.prepare(())
    stopped = server.process.pid
    os.kill(stopped, signal.SIGSTOP)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.alarm(1)
    try:
        server.ask("nothing", len, bytes(10_000_000), needs=())
    except KeyboardInterrupt:
        code = server.start("nothing", os._exit, 7, needs=()).wait(20)
        print("interrupted", code, stopped, end="", file=open(int(sys.argv[1]), "w"))
"""


def test_a_large_request_to_one_that_is_stopped_hears_ctrl_c() -> None:
    *found, stopped = run_script(INTERRUPTED).split()
    assert found == ["interrupted", "7"]
    assert not psutil.pid_exists(int(stopped))


TELL = """
import os, resource
limits = [resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)]
print(oct(os.umask(0)), os.nice(0), len(os.sched_getaffinity(0)), limits)
"""
CHANGED = """
    import os, resource, sys
    from minifsdp.instruments.warm.client import server
    out = int(sys.argv[1])
    def told():
        process = server.start("tells", exec, {tell!r}, {{}}, stdio=(0, out, 2), needs=())
        process.wait(20)
        process.close()
    told()
    os.umask(0o027)
    os.nice(3)
    os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 400))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
    told()
"""


def test_a_process_inherits_what_its_program_has_changed_since_the_server_started() -> None:
    _, after = run_script(CHANGED.format(tell=TELL)).splitlines()
    assert after == f"0o27 {os.nice(0) + 3} 1 [(300, 400), (1000000, 1000000)]"


def test_modules_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(client, "send", lambda channel, request, fds: sent.append(request.needs))
    server = Server()
    for needs in (("abc",), ("abc",), ("abc", "bisect"), ("bisect",)):
        server.prepare(needs)
    assert sent == [("abc",), ("abc", "bisect")]
    server.end()
    server.prepare(("abc",))
    assert sent == [("abc",), ("abc", "bisect"), ("abc",)]
    server.end()


def random_number(write: int) -> None:
    import numpy

    os.write(write, b"%.12f " % numpy.random.rand())
    os._exit(0)


def test_forks_draw_other_numbers(server: Server) -> None:
    read, write = os.pipe()
    for _ in range(2):
        process = server.start("draws", random_number, fds=[write], needs=("numpy",))
        assert process.wait(20) == 0
        process.close()
    os.close(write)
    with open(read) as said:
        first, second = said.read().split()
    assert first != second


# Beside a block


def leave_id(file: Path, fails_in: str, ours: int) -> None:
    """Leave this process's id, then fail in the "fork" or "everywhere"."""
    file.write_text(str(os.getpid()))
    if fails_in == "everywhere" or (fails_in == "fork" and os.getpid() != ours):
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("fails_in", "has_server", "is_ours"),
    [("", True, False), ("fork", True, True), ("everywhere", True, True), ("", False, True)],
)
def test_a_call_beside_a_block_is_made_in_a_fork_and_here_if_that_fails(
    server: Server, monkeypatch: Any, tmp_path: Path, capfd: Any, fails_in: str, has_server: bool, is_ours: bool
) -> None:
    server.prepare(())
    monkeypatch.setattr(beside, "server", server if has_server else Server())
    file = tmp_path / "id"
    raised = pytest.raises(ValueError, match="mine") if fails_in == "everywhere" else nullcontext()
    with raised, beside.beside("leaves its id", leave_id, file, fails_in, os.getpid(), needs=()):
        within(10, lambda: file.exists() or not has_server)
    assert (int(file.read_text()) == os.getpid()) == is_ours
    assert beside.server.runs == has_server, "none is started for this"
    assert capfd.readouterr() == ("", ""), "the fork says nothing"


def leave_id_and_wait(file: Path) -> None:
    leave_id(file, "", 0)
    wait()


BESIDE = """
    import os, time
    import psutil
    from minifsdp.instruments.warm.beside import beside
    from minifsdp.instruments.warm.client import server
    server.prepare(())
    with beside("waits", time.sleep, 1000, needs=()):
        print(server.process.pid, *(each.pid for each in psutil.Process(server.process.pid).children()), flush=True)
        time.sleep(1000)
"""


def test_a_call_beside_a_block_ends_with_its_program_even_if_the_server_is_killed_too() -> None:
    command = [sys.executable, "-c", textwrap.dedent(BESIDE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        server, call = (psutil.Process(int(pid)) for pid in program.stdout.readline().split())
        program.kill()
        server.kill()
    try:
        within(5, lambda: is_gone(call))
    finally:
        with suppress(psutil.NoSuchProcess):
            call.kill()


def test_a_block_that_is_interrupted_ends_the_call_beside_it(server: Server, monkeypatch: Any, tmp_path: Path) -> None:
    server.prepare(())
    monkeypatch.setattr(beside, "server", server)
    file = tmp_path / "id"

    def interrupted() -> None:
        within(10, lambda: file.exists() and file.read_text())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), beside.beside("waits", leave_id_and_wait, file, needs=()):
        interrupted()
    assert not psutil.pid_exists(int(file.read_text()))
