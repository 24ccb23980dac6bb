"""`minifsdp lab mark`: a submission, whatever it holds, costs only its own row, and nothing of it stays behind."""

import contextlib
import csv
import io
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands_in_forks import minifsdp

from minifsdp.course import cli
from minifsdp.course.workshop import handed_in, marking
from minifsdp.course.workshop.catalogue import cells_with, setup_of, stubs_of
from minifsdp.course.workshop.copies import fresh
from minifsdp.course.workshop.handed_in import Problem, find_tasks
from minifsdp.course.workshop.process import MIB, Limits, run_check
from minifsdp.course.workshop.references import find_reference
from minifsdp.course.workshop.submission import Submission
from minifsdp.course.workshop.verdict import Verdict, of_result
from minifsdp.instruments.warm.client import server

RIGHT = find_reference("4.1").source
PATIENT = Limits(seconds=120)
SETUP = "from minifsdp.course.workshop import exercise"


def slow(*values: Any) -> Any:
    """One more case of the same kind."""
    return pytest.param(*values, marks=pytest.mark.slow)


def cell(*body: str) -> str:
    """An answer to exercise 4.1 with these lines in it."""
    return "\n    ".join(['@exercise("4.1")\ndef pad_and_chunk(flat, ranks):', *body])


def hand_in(folder: Path, *sources: str | None, tag: str = "exercise-4.1") -> Path:
    """A notebook of lab 04 with these cells instead of exercise 4.1's; None is the stub."""
    notebook = fresh("04")
    (stub,) = cells_with(notebook["cells"], "exercise-4.1")
    at = notebook["cells"].index(stub)
    given = [stub if source is None else {**stub, "source": source, "metadata": {"tags": [tag]}} for source in sources]
    notebook["cells"][at : at + 1] = given
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lab04_flat_parameter.ipynb"
    path.write_text(json.dumps(notebook))
    return path


def row(folder: Path, limits: Limits = PATIENT, variants: Any = None) -> marking.Row:
    """The row of exercise 4.1 of the only submission in a folder."""
    (task,) = [task for task in handed_in.find_tasks(folder) if task.exercise in ("4.1", "")]
    return marking.mark(task, variants or {}, limits)


@pytest.fixture(autouse=True)
def _no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    marker = uuid.uuid4().hex
    monkeypatch.setenv("MARKER", marker)
    yield
    deadline = time.monotonic() + 2  # the system's own part of ending a process
    while left := [each for each in _marked(marker) if server.process is None or each.pid != server.process.pid]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _marked(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


# What runs


def test_own_pass_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hand_in(tmp_path / "ada", f'@exercise("4.1")\n{RIGHT}')
    assert row(tmp_path)[:4] == ("ada", "04", "4.1", "own-pass")
    monkeypatch.setattr(marking, "run_check", lambda *_: Verdict("passed", "as before"))
    (path.parent / ".minifsdp/reveals").mkdir(parents=True)
    (path.parent / ".minifsdp/reveals/4.1.json").write_text("true")
    assert row(tmp_path).state == "read"


def test_own_fail_says_what_the_check_says_in_one_line(tmp_path: Path) -> None:
    hand_in(tmp_path / "ada", cell("return list(flat.chunk(ranks))"))
    found = row(tmp_path)
    assert found.state == "own-fail"
    assert re.match(r"rank \d.*expected .*, got .*; likely slip: ", found.remark)


@pytest.mark.parametrize(
    ("body", "state", "remark"),
    [
        (("import os", "os._exit(0)"), "crash", "ended with code 0 and without a result"),
        slow(("raise SystemExit(0)",), "own-fail", "SystemExit: 0"),
        slow(("input()",), "own-fail", "raises"),
        slow(("import ctypes", "ctypes.string_at(0)"), "crash", "killed by SIGSEGV without a result"),
    ],
    ids=["ends the process", "exits", "asks", "segmentation fault"],
)
def test_ends_without_a_result(body: tuple[str, ...], state: str, remark: str, tmp_path: Path) -> None:
    hand_in(tmp_path / "ada", cell(*body))
    found = row(tmp_path)
    assert (found.state, remark in found.remark) == (state, True), found


def test_a_result_that_the_answer_wrote_is_none(tmp_path: Path) -> None:
    forged = json.dumps({"state": "passed", "text": "", "secret": "guessed"})
    hand_in(
        tmp_path / "ada",
        cell(
            "import os, pathlib",
            "assert not pathlib.Path('task.json').exists()",
            f"for name in ('result.json', 'result.part'): pathlib.Path(name).write_text({forged!r})",
            f"print({forged!r}, flush=True)",
            "os._exit(0)",
        ),
    )
    assert row(tmp_path).state == "crash"


DEADLOCK = (
    "from minifsdp.instruments.launch import launch",
    "def step():",
    "    import torch, torch.distributed as dist",
    "    dist.recv(torch.ones(1), 1) if dist.get_rank() == 0 else dist.all_reduce(torch.ones(1))",
    "launch(step, 2, timeout=1000)",
)


@pytest.mark.parametrize(
    ("body", "limits", "state", "remark"),
    [
        slow(("while True: pass",), Limits(seconds=5), "timeout", "no result after 5 s"),
        (("sum(range(10**15))",), Limits(seconds=5), "timeout", "after 5 s; it was in line 3: sum(range(10**15))"),
        (DEADLOCK, Limits(seconds=7), "timeout", "no result after 7 s"),
        slow(("while True: print('x' * 10**5)",), Limits(output=8 * MIB), "crash", "wrote more than 8 MiB"),
        (
            ("held = []", "while True: held.append(bytearray(b'1') * 2**25)"),
            Limits(memory=1500 * MIB),
            "crash",
            "more than 1500 MiB of memory",
        ),
        slow(
            ("import subprocess", "while True: subprocess.Popen(['sleep', '4321'], start_new_session=True)"),
            Limits(memory=10000 * MIB, processes=30),
            "crash",
            "more than 30 processes",
        ),
    ],
    ids=["loops", "loops in C", "ranks wait for each other", "prints", "takes memory", "starts processes"],
)
def test_goes_beyond_a_limit(body: tuple[str, ...], limits: Limits, state: str, remark: str, tmp_path: Path) -> None:
    hand_in(tmp_path / "ada", cell(*body))
    found = row(tmp_path, limits)
    assert (found.state, remark in found.remark) == (state, True), found


def test_what_an_answer_leaves_running_is_ended() -> None:
    """An orphan in a session of its own too: its environment says where it comes from."""
    leaves = cell("import os", "os.system('setsid sleep 4321 >/dev/null 2>&1 &')", "raise ValueError('mine')")
    assert "ValueError: mine" in run_check(Submission("4.1", SETUP, leaves), PATIENT).text


def test_every_variant_must_pass(tmp_path: Path) -> None:
    of_no_eleven = RIGHT.replace("return", "assert flat.numel() != 11\n    return")
    hand_in(tmp_path / "ada", f'@exercise("4.1")\n{of_no_eleven}')
    found = row(tmp_path, variants={"4.1": [{"ranks": 3, "size": 11}]})
    assert found.state == "own-fail"
    assert found.remark.startswith("with ranks=3, size=11: ")


# What a submission leaves behind


def no_file(path: Path, kind: str) -> None:
    """Something in a file's place that is waited on for ever, or goes on for ever, or is too much."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"[" + b"[]," * (20 * MIB) + b"[]]")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "zeros", "brackets"])
def test_notes_that_are_no_plain_files_are_no_notes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_in(tmp_path / "ada", cell("return 1"))
    no_file(tmp_path / "ada/.minifsdp/reveals/4.1.json", kind)
    monkeypatch.setattr(marking, "run_check", lambda *_: Verdict("passed", "as before"))
    assert row(tmp_path).state == "own-pass"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", slow("zeros"), slow("brackets")])
def test_what_an_answer_puts_where_its_result_and_output_were_is_not_read(kind: str) -> None:
    put = {"pipe": "os.mkfifo(name)", "zeros": "os.symlink('/dev/zero', name)", "brackets": "brackets(name)"}[kind]
    leaves = cell(
        "import os",
        "def brackets(name): open(name, 'w').write('[' * 20_000_000)",
        "if os.path.exists('output'): os.remove('output')",
        f"for name in ('result.json', 'output'): {put}",
        "os._exit(3)",
    )
    found = run_check(Submission("4.1", SETUP, leaves), PATIENT)
    assert (found.state, "ended with code 3 and without a result" in found.text) == ("crash", True), found


def test_folders_deeper_than_pythons_recursion_are_removed_and_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    digs = cell("import os", "for _ in range(1500): os.mkdir('d'); os.chdir('d')", "raise ValueError('mine')")
    assert "ValueError: mine" in run_check(Submission("4.1", SETUP, digs), PATIENT).text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("state", ["own-pass", "read", "crash", ["passed"], None])
def test_a_result_whose_state_is_none_of_a_check_is_none(state: Any, tmp_path: Path) -> None:
    """It has the secret: the answer has found that in the memory of its process."""
    (tmp_path / "result.json").write_text(json.dumps({"state": state, "text": "", "secret": "known"}))
    found = of_result(tmp_path, io.BytesIO(), "known", 0)
    assert (found.state, repr(state) in found.text) == ("crash", True)


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_a_notebook_that_is_no_plain_file_is_said_to_be_none(kind: str, tmp_path: Path) -> None:
    no_file(tmp_path / "ada/lab04_flat_parameter.ipynb", kind)
    (task,) = find_tasks(tmp_path)
    assert task.answer == Problem(
        "missing", "no notebook of a lab, found lab04_flat_parameter.ipynb, which is not a plain file"
    )


@pytest.mark.slow
def test_an_answer_that_stops_a_process_of_its_check_has_a_remark_that_says_so() -> None:
    stops = cell("import os, signal", "os.kill(os.getpid(), signal.SIGSTOP)")
    found = run_check(Submission("4.1", SETUP, stops), Limits(seconds=20.0))
    assert found == Verdict("timeout", "no result after 20 s: one of its processes was stopped")


SIGNALS = {"kill": "SIGKILL", "interrupt": "SIGINT", "stop": "SIGSTOP"}


@pytest.mark.parametrize("name", ["kill", slow("interrupt"), slow("stop")])
def test_an_answer_that_ends_or_stops_its_parent_costs_its_own_row(name: str, tmp_path: Path) -> None:
    right_but = RIGHT.replace("return", f"os.kill(PARENT, signal.{SIGNALS[name]})\n    return")
    before = "import os, signal\nPARENT = os.getppid()  # a later parent is no part of the marking"
    hand_in(tmp_path / "in/ada", f'{before}\n@exercise("4.1")\n{right_but}')
    hand_in(tmp_path / "in/bert", cell("return 1"))
    out = tmp_path / "marks.csv"
    done = minifsdp("lab", "mark", str(tmp_path / "in"), "--out", str(out))
    assert done.returncode == 0, done.stderr
    ada, bert = (row for row in csv.DictReader(out.open()) if row["exercise"] == "4.1")
    was = "stopped" if name == "stop" else f"killed ({SIGNALS[name]}), by the answer itself or from outside"
    assert ada["state"] == "crash"
    assert ada["remark"].startswith(f"its supervisor was {was}")
    assert ada["remark"].endswith("; mark the others again") == (name != "stop")
    assert bert["state"] == "own-fail"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who adopts an orphan")
def test_an_orphan_that_drops_its_environment_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = f"setsid env -i sh -c 'echo $$ > {pid}; exec sleep 4321' >/dev/null 2>&1 &"
    leaves = cell(
        "import os, time",
        f"os.system({command!r})",
        f"while not os.path.exists({str(pid)!r}): time.sleep(0.01)",
        "raise ValueError('mine')",
    )
    assert "ValueError: mine" in run_check(Submission("4.1", SETUP, leaves), PATIENT).text
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise KeyboardInterrupt", "it ends the check: KeyboardInterrupt"),
        ("raise SystemExit('done')", "it raises: SystemExit: done"),
        ("import pytest; pytest.exit('done')", "it raises: _pytest.outcomes.Exit: done"),
    ],
)
def test_an_answer_that_ends_the_check_is_said_to(how: str, said: str, tmp_path: Path) -> None:
    hand_in(tmp_path / "ada", cell(how))
    state, text = row(tmp_path)[3::2]
    assert state == "own-fail"
    assert text.startswith(said)


def test_output_beyond_the_limit_is_found_however_fast_it_came(tmp_path: Path) -> None:
    hand_in(tmp_path / "ada", cell("print('x' * 3 * 2**20, flush=True)", "return 1"))
    assert row(tmp_path, Limits(seconds=120, output=2**20))[3::2] == ("crash", "it wrote more than 1 MiB")


HOPS = """
import os, time
end = time.time() + 30
while time.time() < end:
    os.fork() and os._exit(0)
    open({file!r}, "w").write(str(time.time()))
    time.sleep(0.001)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who adopts an orphan")
def test_an_orphan_that_forks_and_ends_a_thousand_times_a_second_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "heartbeat"
    leaves = cell(
        "import os, sys, time",
        "if not os.fork():",
        "    os.setsid()",
        f"    os.execve(sys.executable, ['python', '-c', {HOPS.format(file=str(file))!r}], {{}})",
        f"while not os.path.exists({str(file)!r}): time.sleep(0.01)",
        "raise ValueError('mine')",
    )
    for _ in range(3):
        assert "ValueError: mine" in run_check(Submission("4.1", SETUP, leaves), PATIENT).text
        last = file.read_text()
        time.sleep(0.1)
        assert file.read_text() == last
        file.unlink()


# What does not run


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marking, "run_check", lambda *_: pytest.fail("a check was run"))


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("sources", "state", "remark"),
    [
        ((None,), "blank", ""),
        ((), "missing", "no cell has the tag exercise-4.1"),
        ((None, None), "altered", "2 cells have the tag exercise-4.1"),
        (('@exercise("4.1")\ndef mine(flat, ranks):\n    return 1',), "altered", "does not define pad_and_chunk"),
        (("def pad_and_chunk(flat, ranks):\n    return 1",), "altered", 'is not under @exercise("4.1")'),
        (('@exercise("4.2")\ndef pad_and_chunk(flat, ranks):\n    return 1',), "altered", "is not under"),
        (('@exercise("4.1")\ndef pad_and_chunk(flat, ranks:\n    return 1',), "altered", "is not Python: "),
        (("\ud800",), "altered", "is not Python: "),
        (("(" * 10**5,), "altered", "is not Python: "),
        (("-" * 10**5 + "1",), "altered", "is not Python: "),
        (("\0",), "altered", "is not Python: "),
        (("1;" * 200_000,), "altered", "has more than 200,000 characters"),
        ((f"@exercise({'-' * 900}4.1)\ndef pad_and_chunk(flat, ranks):\n    return 1",), "altered", ""),
    ],
)
def test_cells(sources: tuple[str | None, ...], state: str, remark: str, tmp_path: Path) -> None:
    hand_in(tmp_path / "ada", *sources)
    found = row(tmp_path)
    assert (found.state, remark in found.remark) == (state, True), found


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    "content",
    [
        bytes(range(256)) * 100,
        b"",
        b'{"cells": [',
        b"[1]",
        b'{"cells": 5}',
        b'{"cells": [5]}',
        b'{"cells": [{"source": 5}]}',
        b'{"cells": [{"source": [], "metadata": 5}]}',
        b'{"cells": [{"source": [], "metadata": {"tags": 5}}]}',
        b"[" * 10**6,
        b"9" * 10**5,
    ],
)
def test_files_that_are_no_notebooks(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada/lab04_flat_parameter.ipynb").write_bytes(content)
    found = row(tmp_path)
    assert (found.state, found.remark) == ("altered", "lab04_flat_parameter.ipynb cannot be read as a notebook")


@pytest.mark.usefixtures("nothing_runs")
def test_folders_without_a_notebook_and_links_to_others(tmp_path: Path) -> None:
    path = hand_in(tmp_path / "bert", None)
    (tmp_path / "ada").mkdir()
    (tmp_path / "carl").mkdir()
    (tmp_path / "carl" / path.name).symlink_to(path)
    (tmp_path / "dora.ipynb").write_text("{}")
    (tmp_path / ".hidden").mkdir()
    rows = [marking.mark(task, {}, PATIENT) for task in handed_in.find_tasks(tmp_path)]
    assert {row.submission for row in rows} == {"ada", "bert", "carl", "dora.ipynb"}
    states = {row.submission: row.state for row in rows if row.exercise in ("", "4.1")}
    assert states == {"ada": "missing", "bert": "blank", "carl": "missing", "dora.ipynb": "missing"}
    assert [row.exercise for row in rows if row.submission == "bert"] == list(stubs_of("04"))


@pytest.mark.usefixtures("nothing_runs")
def test_of_two_notebooks_the_one_of_this_edition_counts(tmp_path: Path) -> None:
    path = hand_in(tmp_path / "ada", "\ud800")
    path.rename(path.with_name("lab04_old.ipynb"))
    hand_in(tmp_path / "ada", None)
    assert row(tmp_path).state == "altered", "both are of this edition"
    old = json.loads(path.with_name("lab04_old.ipynb").read_text())
    old["metadata"]["minifsdp"]["edition"] = "an older one"
    path.with_name("lab04_old.ipynb").write_text(json.dumps(old))
    assert row(tmp_path).state == "blank"


@pytest.mark.usefixtures("nothing_runs")
def test_folders_beyond_pythons_recursion_are_searched(tmp_path: Path) -> None:
    hand_in(tmp_path / "ada", None)
    deep = [str(tmp_path / "ada") + "/d" * depth for depth in range(1, 1500)]
    for folder in deep:
        os.mkdir(folder)
    assert row(tmp_path).state == "blank"
    for folder in reversed(deep):  # pytest's own way to remove them is recursive
        os.rmdir(folder)


def test_all_is_read_before_the_first_answer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hand_in(tmp_path / "ada", cell("return 1"))
    (task,) = [task for task in handed_in.find_tasks(tmp_path) if task.exercise == "4.1"]
    path.write_text("changed by another's answer")
    (path.parent / ".minifsdp/reveals").mkdir(parents=True)
    (path.parent / ".minifsdp/reveals/4.1.json").write_text("true")
    monkeypatch.setattr(marking, "run_check", lambda *_: Verdict("passed", "as before"))
    assert marking.mark(task, {}, PATIENT).state == "own-pass"


# The table


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["minifsdp", "lab", "mark", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_the_table_has_a_row_for_each_and_no_formulas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hand_in(tmp_path / "in/=ada()", None)
    alike = ["cy", "cy ", " cy", "cy\n", "=cy", "'=cy", "'=cy'"]
    for name in alike:
        hand_in(tmp_path / "in" / name, None)
    hand_in(tmp_path / "in/bert", cell("return 1"))
    monkeypatch.setattr(marking, "run_check", lambda *_: Verdict("failed", "=1+1\nand \x1b[31mred"))
    assert command(monkeypatch, str(tmp_path / "in"), "--out", str(tmp_path / "marks.csv")) == 0
    rows = list(csv.DictReader((tmp_path / "marks.csv").open()))
    assert list(rows[0]) == ["submission", "lab", "exercise", "state", "seconds", "remark"]
    mine = {row["submission"]: row for row in rows if row["exercise"] == "4.1"}
    assert mine["'=ada()'"]["state"] == "blank"
    assert mine["bert"]["remark"] == "'=1+1; and ?[31mred"
    assert len(rows) == 9 * len(stubs_of("04"))
    assert len(mine) == 9, "each has a name of its own"
    assert all(len(name.splitlines()) == 1 and name[0] not in "=+-@" for name in mine)
    assert "1 own-fail" in capsys.readouterr().out


def mark_in_turn(folder: Path, monkeypatch: pytest.MonkeyPatch, *doings: Callable[[], object]) -> list[marking.Row]:
    """Mark into `marks.csv` as many answers as there are doings, one while each is marked; what was shown."""
    left, shown = list(doings), []

    def run(*_: object) -> Verdict:
        left.pop(0)()
        return Verdict("failed", "as it is")

    monkeypatch.setattr(marking, "run_check", run)
    tasks = [handed_in.Task(f"learner {number}", "04", "4.1", cell("return 1")) for number in range(len(doings))]
    try:
        marking.mark_all(tasks, folder / "marks.csv", {}, PATIENT, shown.append)
    finally:
        assert not list(folder.glob(".marks*")), "nothing is left beside the table"
    return shown


def table(path: Path) -> list[list[str]]:
    return [list(line) for line in csv.reader(path.open())][1:]


def as_text(rows: list[marking.Row]) -> list[list[str]]:
    return [list(map(str, row)) for row in rows]


@pytest.mark.parametrize("kind", ["edited", "removed", "a link", "a pipe"])
def test_the_table_is_what_was_shown_whatever_an_answer_makes_of_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, other = tmp_path / "marks.csv", tmp_path / "other"
    other.write_text("another's")

    def meddle() -> None:
        opened = [file.path for file in psutil.Process().open_files()]
        assert str(out) not in opened, "another process finds it in /proc"
        forged = "learner 0,04,4.1,own-pass,0.0,\n"
        if kind == "edited":
            out.write_text(forged)
            return
        out.unlink()
        if kind == "a link":
            out.symlink_to(other)
        elif kind == "a pipe":
            os.mkfifo(out)

    shown = mark_in_turn(tmp_path, monkeypatch, lambda: None, meddle, lambda: None)
    assert [row.state for row in shown] == ["own-fail"] * 3
    assert table(out) == as_text(shown)
    assert other.read_text() == "another's"


def test_a_marking_that_is_interrupted_leaves_the_rows_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mark_in_turn(tmp_path, monkeypatch, lambda: None, lambda: None, interrupt, lambda: None)
    assert [row[0] for row in table(tmp_path / "marks.csv")] == ["learner 0", "learner 1"]
    assert f"{tmp_path / 'marks.csv'}: 2 of 4 rows" in capsys.readouterr().err


def test_a_table_that_cannot_be_written_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def block() -> None:
        (tmp_path / "marks.csv").unlink()
        (tmp_path / "marks.csv").mkdir()

    with pytest.raises(OSError, match=r"marks\.csv"):
        mark_in_turn(tmp_path, monkeypatch, lambda: None, block)
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "submission",
        "learner 0",
        "learner 1",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('["9.9"]\nvariants = []', "there is no exercise '9.9'"),
        ('["4.1"]\nvariant = []', 'under ["4.1"] write variants = '),
        ('["4.1"]\nvariants = 3', 'under ["4.1"] write variants = '),
        ('["4.1"]\nvariants = [{rank = 3}]', "4.1 has a field 'rank'; there are ranks, seed, size"),
        ('["4.1"]\nvariants = [{ranks = 0}]', "4.1 has ranks = 0"),
        ('["4.1"]\nvariants = [{ranks = true}]', "4.1 has ranks = True"),
        ("4.1 = ", "variants.toml: "),
        ('["4.1"]\nvariants = [{ranks = -1}]', "4.1 has ranks = -1: must be at least 1"),
        ('["4.1"]\nvariants = [{ranks = 65}]', "4.1 has ranks = 65: must be at most 64"),
        ('["4.1"]\nvariants = [{ranks = 99999999999999999999}]', "4.1 has ranks = 99999999999999999999: must be at"),
        ('["4.1"]\nvariants = [{size = 100_000_001}]', "4.1 has size = 100000001: must be at most 100,000,000"),
        ('["4.1"]\nvariants = [{seed = 9223372036854775808}]', "4.1 has seed = 9223372036854775808: must fit into 64"),
        ('["4.1"]\nvariants = [{seed = -9223372036854775809}]', "4.1 has seed = -9223372036854775809: must fit into"),
        ('["4.1"]\nvariants = [{seed = 1.5}]', "4.1 has seed = 1.5: must be a whole number"),
        (f'["4.1"]\nvariants = [{{ranks = "{500 * "x"}"}}]', f"ranks = '{39 * 'x'}...: must be a whole number"),
        (f'["4.1"]\nvariants = [{{seed = 1{5000 * "0"}}}]', "toml: it has a number of some thousand digits; give"),
        (f'["4.1"]\nvariants = [{{seed = 0x{5000 * "f"}}}]', "4.1 has seed = a number of 20,000 bits: must fit into"),
        ("\ufeff\ufeff", "variants.toml: "),
    ],
)
def test_bad_variants_end_in_one_line(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hand_in(tmp_path / "in/ada", None)
    (tmp_path / "variants.toml").write_text(text)
    words = ["--out", str(tmp_path / "marks.csv"), "--variants", str(tmp_path / "variants.toml")]
    assert command(monkeypatch, str(tmp_path / "in"), *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / "marks.csv").exists()


@pytest.mark.parametrize("seed", [-(2**63), slow(-1), slow(2**63 - 1)])
def test_a_variant_has_any_seed_that_the_command_line_has(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "variants.toml"
    path.write_text(f'["2.1"]\nvariants = [{{seed = {seed}}}]', encoding="utf-8-sig")
    assert marking.read_variants(path) == {"2.1": [{"seed": seed}]}
    answer = f'@exercise("2.1")\n{find_reference("2.1").source}'
    assert run_check(Submission("2.1", setup_of("02"), answer), PATIENT, {"seed": seed})[0] == "passed"


def test_a_full_disk_is_named_with_the_table_and_leaves_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hand_in(tmp_path / "in/ada", None)
    out = tmp_path / "marks.csv"

    def fill() -> None:
        (_, hard), before = resource.getrlimit(resource.RLIMIT_FSIZE), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        full.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)

    with contextlib.ExitStack() as full, pytest.raises(OSError, match="File too large") as stop:
        mark_in_turn(tmp_path, monkeypatch, lambda: None, fill)
    assert stop.value.filename == str(out)
    assert not out.exists()
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert len(mark_in_turn(tmp_path, monkeypatch, lambda: None)) == 1, "it can be done again"


def test_bad_requests_end_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "marks.csv"
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert command(monkeypatch, str(folder), "--out", str(out)) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    hand_in(tmp_path / "in/ada", None)
    out.write_text("mine")
    assert command(monkeypatch, str(tmp_path / "in"), "--out", str(out)) == 2
    assert "already exists" in capsys.readouterr().err
    assert out.read_text() == "mine"


@pytest.mark.parametrize("body", [DEADLOCK, slow(("sum(range(10**15))  # holds the GIL",))], ids=["ranks", "C"])
def test_killing_the_marking_ends_the_check_and_its_ranks(body: tuple[str, ...], tmp_path: Path) -> None:
    hand_in(tmp_path / "in/ada", cell("import os", "open(os.environ['STARTED'], 'w').close()", *body))
    parent = subprocess.Popen(
        [sys.executable, "-m", "minifsdp", "lab", "mark", str(tmp_path / "in"), "--out", str(tmp_path / "marks.csv")],
        env=os.environ | {"STARTED": str(tmp_path / "started")},
        stderr=subprocess.DEVNULL,
    )
    word, deadline = os.environ["MARKER"], time.monotonic() + 90
    while not (tmp_path / "started").exists() or (
        body is DEADLOCK and not any(process.name() == "rank 1 of 2" for process in _marked(word))
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(_marked(word)) >= (5 if body is DEADLOCK else 2), "the marking, the check, its fork server, two ranks"
    parent.kill()
    parent.wait()
    # and nothing carries the marker any more: see _no_process_left
