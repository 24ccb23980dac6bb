"""`make gpu-check` with a GPU that is not there: its parts are small programs that write made-up results."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from minifsdp.course import cli
from minifsdp.course.cli import commands
from minifsdp.course.workshop.tree import end_members
from minifsdp.instruments.link.emulated import parse_link
from minifsdp.instruments.system.housekeeping import TREE
from tools import ROOT
from tools.gpu_check import check, command, parts, process
from tools.gpu_check.junit import count, parse_junit
from tools.gpu_check.machine import Machine, NoGpuError
from tools.gpu_check.parts import PARTS, Part, Ranks, measured_link, ranks_for
from tools.gpu_check.summary import figures
from tools.records import Record, find_records, read_record
from tools.worlds_table import RUNGS, TORCHS, worlds_table

REAL = dict(PARTS)
VERSIONS = {"python": "3", "torch": "2.stub", "cuda": "0", "nccl": "0.stub", "driver": None, "minifsdp": "0"}
GPU = Machine("Stub GPU 1000", 1, VERSIONS)
NAME = "stub-gpu-1000-x1"
PIXEL = "open(os.path.join(out, 'curve.png'), 'wb').write(b'\\x89PNG')"
GOOD = f"{PIXEL}; write({{'world': '2 ranks over NCCL, sharing cuda:0: made up', 'figure': 1}})"
BAD = "print('first'); print('minifsdp: the link is down'); sys.exit(1)"


class Done(NamedTuple):
    code: int
    out: str
    errors: list[str]


def stub(body: str, *packages: str) -> Part:
    """A part that runs `body`, in which `write(results)` leaves results and `out` is the folder."""
    program = (
        "import json, os, sys, time; out = sys.argv[1]\n"
        "def write(results): open(os.path.join(out, 'results.json'), 'w').write(json.dumps(results))\n" + body
    )
    return Part(
        packages,
        lambda ranks, out: [["-c", program, str(out)]],
        lambda folder: json.loads((folder / "results.json").read_text()),
        lambda results: f"figure {results['figure']}",
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with the made-up GPU, and a checkout that is not this one; all parts pass."""
    (tmp_path / "pyproject.toml").touch()
    for variable in ("MINIFSDP_DEVICE", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(check, "find_gpus", lambda: GPU)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    for name in PARTS:
        monkeypatch.setitem(PARTS, name, stub(GOOD))
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command line."""

    def of(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["tools.gpu_check", *words])
        monkeypatch.setattr("signal.signal", lambda *_: None)
        with pytest.raises(SystemExit) as stop:
            cli.main("tools.gpu_check.command")
        output = capsys.readouterr()
        return Done(int(stop.value.code or 0), output.out, output.err.splitlines())

    return of


def record(root: Path) -> Record:
    return read_record(root / "benchmarks" / "records" / f"{NAME}.json")


def states(root: Path) -> dict[str, str]:
    return {name: part.state for name, part in record(root).parts.items()}


# Runs


def test_every_part_goes_on_record_with_its_pictures(gpu: Path, run: Callable[..., Done]) -> None:
    done = run()
    assert done.code == 0
    found = record(gpu)
    assert (found.gpu, found.count, found.versions) == ("Stub GPU 1000", 1, VERSIONS)
    assert list(found.parts) == ["doctor", "tests", "ladder", "step", "labs"]
    for name, part in found.parts.items():
        assert (part.state, part.reason, part.results["figure"]) == ("passed", None, 1)
        assert part.plots == [f"{name}-curve.png"]
        assert (gpu / "benchmarks" / "records" / NAME / f"{name}-curve.png").read_bytes().startswith(b"\x89PNG")
        assert part.command.startswith("python -c")
        assert part.versions == VERSIONS
    assert [line.split()[1] for line in done.errors[1:]] == [n for name in found.parts for n in (name, f"{name}:")]
    assert done.out.count("figure 1") == 5
    assert done.out.splitlines()[-1] == str(gpu / "benchmarks" / "records" / f"{NAME}.json")


def test_a_part_that_runs_alone_leaves_the_others(gpu: Path, run: Callable[..., Done], monkeypatch: Any) -> None:
    run()
    before = record(gpu)
    newer = Machine(GPU.gpu, GPU.count, {**VERSIONS, "torch": "newer"})
    monkeypatch.setattr(check, "find_gpus", lambda: newer)
    monkeypatch.setattr(check, "commit", lambda root: "another")
    monkeypatch.setitem(PARTS, "ladder", stub("write({'figure': 2})"))
    assert run("--part", "ladder").code == 0
    after = record(gpu)
    assert {name: part for name, part in after.parts.items() if name != "ladder"} == {
        name: part for name, part in before.parts.items() if name != "ladder"
    }
    ladder = after.parts["ladder"]
    assert (ladder.results, ladder.commit, ladder.versions["torch"]) == ({"figure": 2}, "another", "newer")
    assert list(after.parts) == list(before.parts)
    pictures = {path.name for path in (gpu / "benchmarks" / "records" / NAME).iterdir()}
    assert pictures == {f"{name}-curve.png" for name in PARTS if name != "ladder"}  # the earlier ladder's is gone


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (BAD, "exit code 1: the link is down"),
        ("os.kill(os.getpid(), 11)", "ended by signal 11: it printed nothing"),
        ("print('no file')", "it left no results: FileNotFoundError"),
        ("open(os.path.join(out, 'results.json'), 'w').write('{')", "it left no results: JSONDecodeError"),
    ],
    ids=["exit code", "signal", "no file", "half a file"],
)
def test_a_part_that_fails_takes_nothing_with_it(
    gpu: Path, run: Callable[..., Done], monkeypatch: Any, body: str, says: str
) -> None:
    run("--part", "labs")
    monkeypatch.setitem(PARTS, "ladder", stub(f"{PIXEL}\n{body}"))
    assert run().code == 1
    assert states(gpu) == dict.fromkeys(PARTS, "passed") | {"ladder": "failed"}
    ladder = record(gpu).parts["ladder"]
    assert str(ladder.reason).startswith(says)
    assert (ladder.results, ladder.plots) == ({}, [])


def test_a_record_does_not_say_where_the_checkout_lies(gpu: Path, monkeypatch: Any) -> None:
    here = f"{gpu}/tests/gpu/test_a.py"
    monkeypatch.setitem(PARTS, "ladder", stub(f"sys.exit('failed ({here}:7)')"))
    monkeypatch.setitem(PARTS, "step", stub(f"write({{'figure': {here!r}}})"))
    done = check.gpu_check(check.prepare(["ladder", "step"], None, None))
    assert done["ladder"].reason == "exit code 1: failed (tests/gpu/test_a.py:7)"
    assert done["step"].results == {"figure": "tests/gpu/test_a.py"}


def test_what_is_done_is_on_record_before_the_next_part_starts(
    gpu: Path, run: Callable[..., Done], monkeypatch: Any
) -> None:
    path = gpu / "benchmarks" / "records" / f"{NAME}.json"
    look = f"write({{'figure': list(json.load(open({str(path)!r}))['parts'])}})"
    monkeypatch.setitem(PARTS, "labs", stub(look))
    run()
    assert record(gpu).parts["labs"].results["figure"] == ["doctor", "tests", "ladder", "step"]


def test_interrupted_it_keeps_what_is_done_and_leaves_no_process(
    gpu: Path, run: Callable[..., Done], monkeypatch: Any
) -> None:
    def interrupt(process: subprocess.Popen[bytes], limit: float) -> int | None:
        if calls.append(process) or len(calls) == 2:
            raise KeyboardInterrupt
        return process.wait(limit)

    calls: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(process, "_wait", interrupt)
    monkeypatch.setitem(PARTS, "tests", stub("time.sleep(1000)"))
    assert run().code == 130
    assert states(gpu) == {"doctor": "passed"}
    assert calls[1].poll() is not None


def test_at_the_limit_the_whole_tree_of_processes_ends(gpu: Path, monkeypatch: Any) -> None:
    """Also one that has left the group, and one whose parent is gone; and none of them hears an interrupt."""
    monkeypatch.setattr(process, "PATIENCE", 0.5)
    escape = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "pids = open(os.path.join(out, 'pids'), 'w')\n"
        "for depth in range(2):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if depth == 0 and os.fork() > 0: os._exit(0)\n"
        "        pids.write(f'{os.getpid()} '); pids.flush(); time.sleep(1000)\n"
        "time.sleep(1000)"
    )
    monkeypatch.setitem(PARTS, "ladder", stub(escape))
    start = time.monotonic()
    done = check.gpu_check(check.prepare(["ladder"], None, None), limit=2.0)
    assert time.monotonic() - start < 30
    assert (done["ladder"].state, done["ladder"].reason) == ("failed", "took longer than 2 s")
    pids = [int(pid) for pid in (gpu / check.FILES / "ladder" / "pids").read_text().split()]
    assert len(set(pids)) == 2
    assert not [pid for pid in pids if running(pid)]


def test_it_waits_for_what_it_has_killed_though_that_no_longer_shows_whose_it_is(monkeypatch: Any) -> None:
    """As while the kernel takes a process apart: its memory is gone, and its environment with it, and it is not."""
    marked = os.environ | {TREE: "deadbeef"}
    root, other = (subprocess.Popen(["sleep", "1000"], env=marked, start_new_session=True) for _ in range(2))
    kill, environ, dying = psutil.Process.kill, psutil.Process.environ, set()

    def kill_slowly(self: psutil.Process) -> None:
        if self.pid not in dying:
            dying.add(self.pid)
            threading.Timer(0.5 * (self.pid == other.pid), kill, [self]).start()

    monkeypatch.setattr(psutil.Process, "kill", kill_slowly)
    monkeypatch.setattr(psutil.Process, "environ", lambda self: {} if self.pid in dying else environ(self))
    end_members(root.pid, "deadbeef")
    root.kill()
    assert dying == {other.pid}
    assert not running(other.pid)
    other.wait()


def running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_over_its_limit_a_command_may_still_write_what_it_has(gpu: Path, monkeypatch: Any) -> None:
    late = (
        "try: time.sleep(1000)\n"
        "except KeyboardInterrupt: write({'tests': [{'name': 'a', 'outcome': 'passed', 'seconds': 1, 'reason': None}]})"
    )
    monkeypatch.setitem(PARTS, "tests", stub(late))
    done = check.gpu_check(check.prepare(["tests"], None, None), limit=2.0)["tests"]
    assert done.state == "failed"
    assert [test["name"] for test in done.results["tests"]] == ["a"]


def test_the_limits_keep_a_part_under_nine_minutes() -> None:
    assert check.LIMIT + process.PATIENCE + 5 < 540  # end_members' own patience is 5 s


def test_a_part_that_is_two_commands_shares_its_limit_and_stops_at_the_first_that_fails(
    gpu: Path, monkeypatch: Any
) -> None:
    several = [["-c", "print('one')"], ["-c", BAD.replace("sys.exit(1)", "raise SystemExit(3)")], ["-c", "print('no')"]]
    monkeypatch.setitem(PARTS, "step", PARTS["step"].__class__((), lambda ranks, out: several, dict, str))
    done = check.gpu_check(check.prepare(["step"], None, None))["step"]
    assert (done.state, done.reason) == ("failed", "exit code 3: the link is down")
    assert (gpu / check.FILES / "step" / "output.log").read_text().split("\n")[0] == "one"
    assert done.command.count(" && ") == 2


def test_missing_packages_are_named_and_nothing_runs(gpu: Path, run: Callable[..., Done], monkeypatch: Any) -> None:
    monkeypatch.setitem(PARTS, "labs", stub("open(os.path.join(out, 'ran'), 'w')", "json", "no_such_a", "no_such_b"))
    done = run()
    assert done.code == 0  # skipped is not failed
    labs = record(gpu).parts["labs"]
    assert (labs.state, labs.reason) == ("skipped", "not installed here: no_such_a, no_such_b")
    assert not (gpu / check.FILES / "labs" / "ran").exists()
    assert done.errors[-1] == "NOT RUN: labs (for the reasons above)"
    assert run("--part", "labs").code == 1  # unless there is nothing else


def test_the_table_says_state_seconds_and_figures_or_the_reason(
    gpu: Path, run: Callable[..., Done], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(PARTS, "tests", stub(BAD))
    monkeypatch.setitem(PARTS, "step", stub("write({'other': '[red]'})"))
    lines = {line.split()[0]: line.strip().split(maxsplit=3) for line in run().out.splitlines() if line.split()}
    assert lines["doctor"][1::2] == ["passed", "figure 1"]
    assert lines["tests"][1::2] == ["failed", "exit code 1: the link is down"]
    assert lines["step"][1:2] + lines["step"][3:] == ["passed"]  # no such figure, no complaint
    assert float(lines["doctor"][2]) == record(gpu).parts["doctor"].seconds


# Requests that cannot be met


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "gpu-check needs an NVIDIA GPU; the driver is asleep"),
        (("--part", "stairs"), "--part stairs: the parts are doctor, tests, ladder, step, labs"),
        (("--rungs", "ddp"), "--rungs"),
    ],
)
def test_without_a_gpu_nothing_is_written(
    run: Callable[..., Done], monkeypatch: Any, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    def none() -> Machine:
        raise NoGpuError("the driver is asleep")

    monkeypatch.setattr(check, "find_gpus", none)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    done = run(*words, "--out", str(tmp_path / "records"))
    assert (done.code, done.out, len(done.errors)) == (2, "", 1)
    assert says in done.errors[0]
    assert not list(tmp_path.iterdir())


def test_its_help_has_an_example(run: Callable[..., Done]) -> None:
    done = run("--help")
    assert done.code == 0
    assert "Example: python -m tools.gpu_check --part" in done.out


@pytest.mark.slow
def test_on_this_machine_the_real_question_is_answered(monkeypatch: Any, tmp_path: Path) -> None:
    """CUDA is asked in a process of its own, which sees no GPU: hidden where there is one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = [sys.executable, "-m", "tools.gpu_check", "--out", str(tmp_path / "records")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("minifsdp: gpu-check needs an NVIDIA GPU; ")
    assert not list(tmp_path.iterdir())


def test_under_torchrun_a_forced_cpu_and_a_broken_record_are_refused_before_anything_runs(
    gpu: Path, run: Callable[..., Done], monkeypatch: Any
) -> None:
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    assert run().errors == ["minifsdp: MINIFSDP_DEVICE=cpu keeps the parts from the GPU: unset it"]
    monkeypatch.delenv("MINIFSDP_DEVICE")
    monkeypatch.setenv("RANK", "0")
    assert run().errors == ["minifsdp: gpu-check starts its ranks itself: run it once, not under torchrun (unset RANK)"]
    monkeypatch.delenv("RANK")
    path = gpu / "benchmarks" / "records" / f"{NAME}.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    monkeypatch.setattr(command, "gpu_check", lambda *_: pytest.fail("a part was started"))
    done = run()
    assert done.code == 2
    assert done.errors[0].startswith(f"minifsdp: {path}: ")
    assert path.read_text() == "{"


def test_make_takes_the_environment_that_is_there_and_makes_none() -> None:
    def commands(*words: str) -> str:
        made = ["make", "-n", "-C", str(ROOT), "gpu-check", "PYTHON=some-python", *words]
        return subprocess.run(made, capture_output=True, text=True, timeout=60, check=True).stdout

    without = commands("READY=/no/such/file", "PART=doctor step")
    assert "some-python" in without
    assert "-m tools.gpu_check --part doctor --part step" in without
    assert "pip" not in without
    assert "venv" not in without
    assert ".venv/bin/python" in commands("READY=README.md")


# What the parts are


@pytest.mark.parametrize(
    ("gpus", "share", "ranks"),
    [
        (1, None, Ranks(2, True)),
        (1, False, Ranks(1, False)),
        (4, None, Ranks(4, False)),
        (2, True, Ranks(4, True)),
    ],
)
def test_ranks(gpus: int, share: bool | None, ranks: Ranks) -> None:
    assert ranks_for(gpus, share) == ranks


@pytest.mark.parametrize("ranks", [Ranks(2, True), Ranks(3, False, "latency=30us,bandwidth=300GB/s")], ids=str)
def test_the_commands_that_are_ours_take_the_options_that_they_are_given(
    ranks: Ranks, tmp_path: Path, monkeypatch: Any
) -> None:
    """Each refuses the request only for want of a GPU: what is asked for before that is right."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "1000")
    from typer.main import get_command

    for name in ("doctor", "ladder", "step"):
        for words in PARTS[name].commands(ranks, tmp_path):
            assert words[:2] == ["-m", "minifsdp"]
            app: Any = get_command(commands.app)
            chosen = app.get_command(None, words[2])
            context = chosen.make_context(words[2], words[3:])
            assert context.params["device"] == "cuda"
            assert context.params["share_gpu"] == (ranks.shared and "alone" not in str(context.params["out"]))
            assert context.params.get("batch", 0) % context.params["ranks"] == 0 or name != "ladder"


def test_the_record_has_the_allocators_figures_and_not_its_curves(tmp_path: Path) -> None:
    figures = {"alloc_retries": 3, "peaks": {"allocated": 5, "reserved": 8}}
    rungs = [
        {"name": "fsdp", "cuda": {**figures, "curve": {"us": [0]}, "ledger": {"us": [0]}}, "moments": [[["zero", {}]]]},
        {"name": "ddp", "cuda": None},
    ]
    (tmp_path / "ladder.json").write_text(json.dumps({"rungs": rungs}))
    expected = [{"name": "fsdp", "cuda": figures}, {"name": "ddp", "cuda": None}]
    assert PARTS["ladder"].read(tmp_path)["rungs"] == expected


def test_tests_and_labs_are_those_of_the_checkout() -> None:
    ((*tests,),) = PARTS["tests"].commands(Ranks(2, True), Path("out"))
    assert tests[-3:] == ["-m", "gpu or multigpu", "tests/gpu"]
    ((*labs,),) = PARTS["labs"].commands(Ranks(2, True), Path("out"))
    assert labs[labs.index("nbval") - 1 :][:3] == ["-p", "nbval", "--nbval-lax"]  # pyproject.toml leaves nbval out
    assert "-n" not in labs  # on a shared GPU a notebook at a time: processes take turns there
    assert "-n" in PARTS["labs"].commands(Ranks(8, False), Path("out"))[0]
    assert "labs/lab00_memory.ipynb" in labs
    assert {"nbval", "ipykernel"} <= {*PARTS["labs"].packages}


def test_the_link_for_the_device_model_is_what_was_measured() -> None:
    """S bytes in latency + S / bandwidth seconds give back both numbers."""
    latency, bandwidth, sizes = 30e-6, 2e9, [2**10, 2**20, 2**34]
    rows = [{"seconds": latency + size / bandwidth, "bus": size / (latency + size / bandwidth)} for size in sizes]
    text = measured_link({"bandwidth": {"all_gather": rows, "all_reduce": []}})
    assert text is not None
    link = parse_link(text)
    assert link.latency == pytest.approx(latency, rel=0.02)
    assert link.bandwidth == pytest.approx(bandwidth, rel=0.001)
    assert measured_link({"bandwidth": {}}) is None


def test_the_step_takes_the_link_of_the_doctor_that_ran_before(gpu: Path, monkeypatch: Any) -> None:
    seen = []

    def commands(ranks: Ranks, out: Path) -> list[list[str]]:
        seen.append(ranks.link)
        return [["-c", ""]]

    monkeypatch.setitem(PARTS, "doctor", stub("write({'link': 'measured', 'ranks': 2})"))
    monkeypatch.setitem(PARTS, "step", Part((), commands, lambda folder: {}, str))
    check.gpu_check(check.prepare(["doctor", "step"], None, None))
    check.gpu_check(check.prepare(["step"], None, False))  # one rank: the link was between two
    assert seen == ["measured", None]


def test_the_doctors_results_do_not_name_the_machine(tmp_path: Path) -> None:
    row = {"seconds": 1.0, "bus": 1e9}
    said = {"machine": {"host": "secret", "cores": 2}, "bandwidth": {"all_gather": [row]}}
    (tmp_path / "doctor.json").write_text(json.dumps(said))
    results = parts.PARTS["doctor"].read(tmp_path)
    assert "secret" not in json.dumps(results)
    assert results["machine"] == {"cores": 2}
    assert results["link"] == "latency=0.0us,bandwidth=1.0000GB/s"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_commands_leave_what_the_record_and_its_table_are_made_of(gpu: Path, monkeypatch: Any) -> None:
    """Doctor, ladder and benchmark, on CPU in the place of the GPU."""
    monkeypatch.setattr(Ranks, "options", property(lambda ranks: ["--ranks", str(ranks.count), "--device", "cpu"]))
    for size in ("_STEP", "_LADDER"):
        monkeypatch.setattr(parts, size, ["--width", "32", "--context", "16", "--steps", "2"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("doctor", "ladder", "step"):
        monkeypatch.setitem(PARTS, name, REAL[name])
    done = check.gpu_check(check.prepare(["doctor", "ladder", "step"], None, None))
    assert {name: (part.state, part.reason) for name, part in done.items()} == dict.fromkeys(done, ("passed", None))
    assert all(figures(name, part) for name, part in done.items())
    assert {name: part.plots for name, part in done.items()} == {
        "doctor": ["doctor-bandwidth.png"],
        "ladder": ["ladder-memory.png", "ladder-timeline.png"],
        "step": ["step-alone-bench.png", "step-bench.png"],
    }
    assert "gloo" in done["step"].world
    assert done["step"].command.count(f"--measured-link {done['doctor'].results['link']} ") == 1
    steps = [line for line in worlds_table([record(gpu)]).splitlines() if line.startswith("| `")]
    assert len(steps) == len(TORCHS) + len(RUNGS)
    for line in steps:
        assert re.fullmatch(r"\| `\S+`( \| [\d.]+ \| \d+){2} \| ([\d.]+ \| (\d+%|none)|not run \| not run) \|", line)


# pytest's report


def reported(tmp_path: Path, source: str) -> dict[str, Any]:
    """What is read of the report that pytest really writes of these tests."""
    (tmp_path / "test_made_up.py").write_text(f"import pytest\n{source}")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=junit.xml", "test_made_up.py"]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run([sys.executable, *words], cwd=tmp_path, env=bare, capture_output=True, timeout=100, check=False)
    return parse_junit((tmp_path / "junit.xml").read_text())


def test_outcomes_and_figures_of_a_real_report(tmp_path: Path) -> None:
    source = """
@pytest.mark.parametrize("case", ["a-b"])
def test_good(case, record_property):
    record_property("overlap.both_ms", 1.5); record_property("world", "2 ranks: <made up> & shared")
    record_property("even", True); record_property("lost", float("nan"))
def test_bad(record_property):
    record_property("claim", 1); assert 1 == 2, "one is\\nnot two"
def test_skipped(): pytest.skip("one GPU only")
@pytest.fixture
def breaks():
    yield
    raise OSError("late")
def test_late(breaks, record_property): record_property("claim", 1)
@pytest.mark.xfail
def test_expected(): assert False
"""
    report = reported(tmp_path, source)
    assert {test["name"]: test["outcome"] for test in report["tests"]} == {
        "test_made_up::test_good[a-b]": "passed",
        "test_made_up::test_bad": "failed",
        "test_made_up::test_skipped": "skipped",
        "test_made_up::test_late": "failed",
        "test_made_up::test_expected": "skipped",
    }
    reasons = {test["name"].split("::")[1]: test["reason"] for test in report["tests"]}
    assert reasons["test_good[a-b]"] is None
    assert reasons["test_bad"] == "AssertionError: one is"
    assert reasons["test_skipped"] == "one GPU only"
    assert "late" in reasons["test_late"]
    figures = {
        "overlap.both_ms": 1.5,
        "world": "2 ranks: <made up> & shared",
        "even": True,
        "lost": "nan",
    }
    assert report["figures"] == {"test_made_up::test_good[a-b]": figures}  # none of those that have failed
    assert count(report["tests"]) == {"passed": 1, "failed": 2, "skipped": 2}
    with pytest.raises(ValueError, match="no XML"):
        parse_junit("<testsuite>")


def test_a_test_that_was_interrupted_is_none() -> None:
    """As pytest 9 reports it: a case without a name."""
    cases = '<testcase classname="a.b" name="c" /><testcase time="0.000" />'
    report = parse_junit(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert report["tests"] == [{"name": "b::c", "outcome": "passed", "seconds": 0.0, "reason": None}]


def test_tests_that_fail_are_named_and_their_outcomes_kept_without_figures(gpu: Path, monkeypatch: Any) -> None:
    outcomes = [
        {"name": name, "outcome": "failed" if name in "bcde" else "passed", "seconds": 1, "reason": None}
        for name in "abcde"
    ]
    results = {"tests": outcomes, "figures": {"a": {"x": 1}}}
    body = f"write(json.loads({json.dumps(json.dumps(results))})); sys.exit(1)"
    monkeypatch.setitem(PARTS, "tests", stub(body))
    done = check.gpu_check(check.prepare(["tests"], None, None))["tests"]
    assert (done.state, done.reason) == ("failed", "4 of 5 failed: b, c, d, ...")
    assert done.results == {"tests": outcomes}


def test_tests_that_were_all_skipped_have_not_passed(gpu: Path, run: Callable[..., Done], monkeypatch: Any) -> None:
    outcomes = [{"name": "a", "outcome": "skipped", "seconds": 0, "reason": "no GPU that torch can use"}]
    monkeypatch.setitem(PARTS, "tests", stub(f"write({{'tests': json.loads({json.dumps(json.dumps(outcomes))})}})"))
    assert run("--part", "tests").code == 1
    tests = record(gpu).parts["tests"]
    assert (tests.state, tests.reason) == ("skipped", "all 1 skipped: no GPU that torch can use")
    assert find_records(gpu / "benchmarks" / "records") == [record(gpu)]
