"""`launch`: results, output, failures, time-outs, and that nothing is left behind, whatever ends whom."""

import contextlib
import ctypes
import io
import json
import linecache
import os
import pdb
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist
from commands_in_forks import run_python, start_fork, torchrun
from torch.utils.data import DataLoader, Dataset

from minifsdp.cost.bubble import bubble
from minifsdp.course.ladder.measure import Settings
from minifsdp.course.needs import PICTURES_NEED, RANKS_USE
from minifsdp.course.workshop.catalogue import all_labs
from minifsdp.instruments.launch import RankError, answers, launch, local, report
from minifsdp.instruments.launch.errors import Failure, rank_error
from minifsdp.instruments.launch.inside import pickled
from minifsdp.instruments.link.carriers import Transfer
from minifsdp.instruments.warm import client
from minifsdp.instruments.warm.client import server
from minifsdp.instruments.warm.needs import RANKS_NEED

LAUNCHER = str(Path(local.__file__).parent)
NAMED = ("minifsdp.instruments.machine", *(f"minifsdp.answers.lab{lab}" for lab in all_labs()))  # by labs' functions


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    """Of our children only the server may outlive a launch, and it has no children."""
    yield
    left = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.ppid() != os.getpid() or server.process is None or child.pid != server.process.pid:
                left.append(child)
    assert not left


def failure(fn: Callable[..., Any], *args: Any, world_size: int = 2, **options: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        launch(fn, world_size, *args, **options)
    assert LAUNCHER not in "".join(caught.value.failures.values()), "frames of the launcher are shown"
    return caught.value


# Inside a rank


def test_ranks_see_group_arguments_environment_and_path(monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "made_just_now.py").write_text("WORD = 'found'")
    launch(int, 1)  # whatever the fork server remembers, it remembers from before the changes
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JUST_SET", "yes")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def look(word: str) -> dict[str, Any]:
        import made_just_now

        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "JUST_SET")
        return {
            "arguments": word + made_just_now.WORD,
            "environ": [os.environ[name] for name in names],
            "group": (dist.get_backend(), dist.get_rank(), dist.get_world_size(), total.item()),
            "threads": torch.get_num_threads(),
            "initialized cuda": torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork(),
        }

    seen = launch(look, 3, "word ", backend="gloo")
    for rank, view in enumerate(seen):
        assert view == {
            "arguments": "word found",
            "environ": [str(rank), str(rank), "3", "yes"],
            "group": ("gloo", rank, 3, 3.0),
            "threads": max(1, len(os.sched_getaffinity(0)) // 3) if sys.platform == "linux" else view["threads"],
            "initialized cuda": False,
        }
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch(torch.get_num_threads, 1) == [3]


def test_preloading_does_not_touch_cuda() -> None:
    """What initializes the driver in the server ends it in all ranks: a fork does not survive that."""
    script = f"""
        import torch, torch.utils._triton as triton
        asked = []
        def trap(where, *names):
            for name in names:
                setattr(where, name, lambda *args, name=name: asked.append(name) or 0)
        torch.version.cuda = "13.0"  # pretend a CUDA build
        cuda = ("init", "getDeviceCount", "getDevice", "setDevice", "getCurrentRawStream")
        trap(torch._C, *[f"_cuda_{{each}}" for each in cuda])
        trap(torch._C, *[each for each in dir(torch._C) if each.startswith("_accelerator_")], "_get_accelerator")
        trap(torch.cuda, "is_available", "device_count", "current_device", "_lazy_init", "get_device_properties")
        trap(torch.accelerator, "is_available", "current_accelerator", "device_count")
        trap(triton, *[each for each in dir(triton) if each.startswith("has_triton") and "package" not in each])
        for name in {RANKS_NEED + RANKS_USE + PICTURES_NEED + NAMED}: __import__(name)
        assert asked == [], asked
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def test_the_server_imports_our_modules_that_a_function_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each rank does, in each launch. It leaves the user's alone: they may start threads, and they change."""
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(server, "prepare", lambda needs=(): told.extend(needs))
        assert launch(len, 1, [bubble, run_python, "minifsdp.no_such_module"]) == [3]
    assert bubble.__module__ in told
    assert not {run_python.__module__, "minifsdp.no_such_module"} & set(told)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_ranks_have_the_debug_level_of_the_moment(monkeypatch: Any) -> None:
    """Whatever it was when the server started: torch reads it when it is imported, and the server knows none."""
    name = "TORCH_DISTRIBUTED_DEBUG"
    monkeypatch.setenv(name, "DETAIL")
    started_now = client.Server()
    started_now.prepare(())
    assert started_now.process is not None
    assert name not in psutil.Process(started_now.process.pid).environ()
    started_now.process.kill()
    started_now.process.wait()
    for said in ("DETAIL", "OFF", "INFO"):
        monkeypatch.setenv(name, said)
        assert launch(lambda: dist.get_debug_level().name, 1) == [said]


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_the_server_that_ranks_are_forked_from_asks_nvml_for_gpus_and_the_ranks_need_not() -> None:
    """Triton and torch look for a GPU by the driver's own cuInit otherwise."""
    names = ("PYTORCH_NVML_BASED_CUDA_CHECK", "TRITON_NVML_BASED_CUDA_CHECK")

    def look() -> tuple[list[str], list[str]]:
        server = dict(
            line.partition("=")[::2] for line in Path(f"/proc/{os.getppid()}/environ").read_text().split("\0")
        )
        return [name for name in names if server.get(name) == "1"], [name for name in names if name in os.environ]

    assert launch(look, 1, backend="gloo") == [(list(names), [])]
    assert not set(names) & set(os.environ)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("CUDA driver initialization failed, you might not have a CUDA gpu.", "before the ranks were forked"),
        ("CUDA error: initialization error", "before the ranks were forked"),
        ("Cannot re-initialize CUDA in forked subprocess.", "before the ranks were forked"),
        ("CUDA error: an illegal memory access was encountered", "CUDA_LAUNCH_BLOCKING=1"),
        ("CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING=1"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "exclusive mode"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", None),
        ("mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_an_error_of_cuda_says_what_it_may_come_from(said: str, hint: str | None) -> None:
    message = str(rank_error([Failure.of(RuntimeError(said), 1)]))
    assert message.startswith(f"rank 1 failed: RuntimeError: {said}")
    assert "\n" not in message
    assert hint in message if hint else message == f"rank 1 failed: RuntimeError: {said}"


def test_the_cause_that_nccl_names_last_is_in_the_headline() -> None:
    said = (
        "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error\nncclSystemError: a call failed.\nLast error:\n"
    )
    failed = Failure.of(RuntimeError(f"{said}socket: Connect to 10.0.0.2 failed\n"), 0)
    assert failed.headline.endswith("unhandled system error socket: Connect to 10.0.0.2 failed")
    assert "\n" not in failed.headline


class OnGPU(torch.Tensor):
    """Says that it is on a GPU, until it is moved to the host."""

    is_cuda = True

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: int) -> NoReturn:  # type: ignore[override]
        raise AssertionError("sent as it is")


def test_results_on_a_gpu_arrive_on_the_host() -> None:
    on_gpu = torch.ones(3, requires_grad=True).as_subclass(OnGPU)
    (sent,) = pickle.loads(pickled([on_gpu]))
    assert type(sent) is torch.Tensor
    assert sent.tolist() == [1.0, 1.0, 1.0]


def test_reports_arrive_while_ranks_run(tmp_path: Path) -> None:
    heard = []

    def on_report(rank: int, obj: Any) -> None:
        heard.append((rank, obj))
        (tmp_path / str(rank)).touch()

    def wait_to_be_heard() -> None:
        report({"step": 1})
        while not (tmp_path / os.environ["RANK"]).exists():
            time.sleep(0.01)

    assert launch(wait_to_be_heard, 2, on_report=on_report) == [None, None]
    assert sorted(heard, key=str) == [(0, {"step": 1}), (1, {"step": 1})]
    launch(lambda: report("nobody listens"), 1)
    with pytest.raises(RuntimeError, match="inside a function that launch runs"):
        report(1)


def test_output_of_python_and_c_is_shown_in_rank_order(capsys: Any) -> None:
    def chatter() -> None:
        time.sleep(0.2 * (1 - dist.get_rank()))  # rank 1 is first
        print("python")
        print("error", file=sys.stderr)
        os.system("echo child")
        print("10 %\r20 %\r", end="\n")
        ctypes.CDLL(None).printf(b"left in the buffer of C\n")
        if dist.get_rank() == 1:
            raise KeyError("and after a failure too")

    failure(chatter)
    lines = ["python", "error", "child", "20 %", "left in the buffer of C"]
    assert capsys.readouterr().out.splitlines() == [f"[rank {rank}] {line}" for rank in (0, 1) for line in lines]


def test_a_warning_of_nccl_that_is_intended_is_not_shown(capsys: Any) -> None:
    """NCCL's C++ prints it on each rank, for each peer, past Python's filters."""

    def send() -> None:
        print("[W1127 ProcessGroupNCCL.cpp:4094] Warning: An unbatched P2P op (send/recv) was called", file=sys.stderr)
        print("[W1127 ProcessGroupNCCL.cpp:4095] Warning: another", file=sys.stderr)

    launch(send, 1)
    assert capsys.readouterr().out.splitlines() == ["[rank 0] [W1127 ProcessGroupNCCL.cpp:4095] Warning: another"]


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index**2


def test_ranks_may_have_children_which_end_with_them() -> None:
    def load() -> tuple[list[int], int]:
        batches = iter(DataLoader(Squares(), batch_size=4, num_workers=1, persistent_workers=True))
        child = subprocess.Popen(["sleep", "1000"])
        return next(batches).tolist(), child.pid

    for batch, child in launch(load, 2):
        assert batch == [0, 1, 4, 9]
        deadline = time.monotonic() + 3
        while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "a rank's child outlived the launch"


def test_breakpoints_and_input_advise_instead_of_waiting(capsys: Any) -> None:
    def stop() -> str:
        breakpoint()
        pdb.set_trace()
        return "went on"

    assert launch(stop, 1) == ["went on"]
    assert "launch(fn, 1, inline=True)" in (line := capsys.readouterr().out)
    assert line.count("\n") == 1
    assert __file__ in line
    assert "launch(fn, 1, inline=True)" in str(failure(lambda: input("? "), world_size=1))
    assert "call fn directly" in str(failure(launch, stop, world_size=1))


def test_inline_runs_here_with_a_real_group_and_a_real_debugger(monkeypatch: Any) -> None:
    stopped, heard = [], []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped.append(sys._getframe(1).f_code.co_name))

    def step() -> tuple[int, int]:
        breakpoint()
        dist.barrier()
        report("here")
        return os.getpid(), dist.get_world_size()

    assert launch(step, 1, inline=True, on_report=lambda *what: heard.append(what)) == [(os.getpid(), 1)]
    assert (stopped, heard, dist.is_initialized()) == (["step"], [(0, "here")], False)
    with pytest.raises(ZeroDivisionError):
        launch(lambda: 1 / 0, 1, inline=True)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"launch\(fn, 1, inline=True\)"):
        launch(step, 2, inline=True)
    with pytest.raises(ValueError, match="destroy_process_group"):
        launch(lambda: launch(step, 1, inline=True), 1, inline=True)


# Failures


def test_exception_arrives_within_two_seconds_with_rank_and_line() -> None:
    raised_at = []

    def fail() -> None:
        if dist.get_rank() == 1:
            report(time.time())
            raise ValueError("the slip\nin two lines")
        dist.all_reduce(torch.ones(1))

    error = failure(fail, on_report=lambda rank, at: raised_at.append(at))
    assert time.time() - raised_at[0] < 2
    line = fail.__code__.co_firstlineno + 3
    assert str(error) == f"rank 1 failed: ValueError: the slip ({__file__}:{line})"
    assert list(error.failures) == [1]
    assert f'File "{__file__}", line {line}, in fail' in error.failures[1]
    assert error.failures[1].endswith("ValueError: the slip\nin two lines\n")
    assert error._render_traceback_()[-1] == f"RankError: {error}"
    assert error._render_traceback_()[1] == "Traceback (most recent call last):"


def test_a_class_in_a_function_of_a_cell_finds_the_names_of_the_notebook() -> None:
    cell: dict[str, Any] = {"__name__": "__main__", "Any": Any}
    exec("def fn():\n class Inner:\n  def same(self, x: Any): return x\n return Inner().same(1)", cell)
    assert launch(cell["fn"], 1) == [1]


def test_exception_shows_the_source_of_a_notebook_cell() -> None:
    source = 'def fail():\n    raise ValueError("from a cell")\n'
    name = f"/tmp/ipykernel_1/{uuid.uuid4().hex}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), cell)
    error = failure(cell["fail"], world_size=1)
    assert f"{name}:2" in str(error)
    assert 'raise ValueError("from a cell")' in error.failures[0]


@pytest.mark.parametrize(("kill", "how"), [(True, "killed by SIGKILL"), (False, "process ended with exit code 3")])
def test_rank_that_dies_in_mid_step_is_the_cause(kill: bool, how: str) -> None:
    def step() -> None:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL) if kill else os._exit(3)
        dist.all_reduce(torch.ones(1))

    error = failure(step, world_size=3)
    assert str(error).startswith("rank 1 failed: ")
    assert how in str(error)
    assert next(iter(error.failures)) == 1
    assert {0, 2} & set(error.failures), "the connections that others lost are listed after it"


class Unreadable:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def test_what_cannot_be_pickled_says_so() -> None:
    class OddError(Exception):
        def __init__(self) -> None:
            super().__init__("odd")
            self.lock = threading.Lock()

    def raise_odd() -> None:
        raise OddError

    assert "OddError: odd" in str(failure(raise_odd, world_size=1))
    assert "fn returned a generator that cannot be pickled" in str(failure(lambda: (i for i in ()), world_size=1))
    assert "result cannot be read here: ZeroDivisionError" in str(failure(Unreadable, world_size=1))


def test_a_rank_that_gives_no_stack_is_said_to_give_none() -> None:
    def step() -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        time.sleep(1000)

    failures = failure(step, timeout=1).failures
    assert failures[0] == "it gives no stack: the process is stopped"
    assert failures[1] == "it gives no stack: it does not answer SIGUSR1, which it may block or ignore"


def test_deadlock_ends_at_the_time_out_with_the_stacks_of_those_stuck() -> None:
    def wait_for_ever() -> None:
        threading.Event().wait()

    def step() -> None:
        if dist.get_rank() == 1:
            return
        if dist.get_rank() == 2:
            sum(range(10**15))  # holds the GIL
        threading.Thread(target=wait_for_ever, daemon=True).start()
        dist.all_reduce(torch.ones(1))

    error = failure(step, world_size=3, timeout=1)
    assert str(error) == "no answer from rank(s) 0, 2 within 1 s; finished: 1"
    assert list(error.failures) == [0, 2]
    first = step.__code__.co_firstlineno
    main, other = error.failures[0].split("another thread:\n")
    assert main.index("in all_reduce") < main.index(f'File "{__file__}", line {first + 6}, in step')
    assert "dist.all_reduce(torch.ones(1))" in main
    assert "in wait_for_ever" in other
    assert f"line {first + 4}, in step" in error.failures[2]


class SlowToLoad:
    def __reduce__(self) -> Any:
        return time.sleep, (1.0,)


def test_start_is_not_counted_and_spawned_ranks_work_too(monkeypatch: Any) -> None:
    assert launch(lambda _: dist.get_rank(), 2, SlowToLoad(), timeout=0.5) == [0, 1]
    monkeypatch.setattr(client, "forks", lambda: False)  # the way of macOS
    assert launch(dist.get_rank, 1, timeout=5) == [0]


def test_bad_calls_end_in_one_line_before_anything_starts(monkeypatch: Any) -> None:
    monkeypatch.setattr(local, "start_rank", lambda *_: pytest.fail("a rank was started"))
    lock = threading.Lock()
    for call, kind, line in [
        (lambda: launch(2, len), TypeError, "fn must be a function, not 2"),
        (lambda: launch(len, 0), ValueError, "world_size must be a whole number from 1 up, not 0"),
        (lambda: launch(len, "2"), ValueError, "not '2'"),
        (lambda: launch(len, True), ValueError, "not True"),
        (
            lambda: launch(int, 2, timeout=0),
            ValueError,
            "timeout must be a number of seconds above 0 and up to 1e6, not 0",
        ),
        (lambda: launch(int, 2, timeout=float("nan")), ValueError, "not nan"),
        (lambda: launch(int, 2, backend="ncll"), ValueError, "backend must be .* not 'ncll'"),
        (lambda: launch(lambda x: x, 2), TypeError, r"cannot call <lambda> with 0 argument\(s\): missing"),
        (lambda: launch(lambda: lock, 2), TypeError, "cannot send <lambda> and its arguments to the ranks"),
    ]:
        with pytest.raises(kind, match=line) as caught:
            call()
        assert "\n" not in str(caught.value)
    if torch.cuda.device_count() < 999:
        with pytest.raises(ValueError, match=r"CUDA was requested, but there (is|are) .* GPUs? for 999 ranks"):
            launch(int, 999, backend="nccl")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RuntimeError, match="WSL2"):
        launch(int, 2)


# Nothing is left behind


def test_interrupt_ends_the_ranks_and_leaves_this_process_usable() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background

    def nap() -> None:
        report("up")
        time.sleep(1000)

    with pytest.raises(KeyboardInterrupt):
        launch(nap, 2, on_report=lambda *_: signal.raise_signal(signal.SIGINT))
    assert launch(dist.get_rank, 2) == [0, 1]


SCRIPT = """
import os, subprocess, sys, time
from minifsdp.instruments.launch import launch
print("main")  # a second time if a rank imported this script
class Here: pass
def busy():
    import torch.distributed as dist
    both = [None, None]
    dist.all_gather_object(both, Here())  # found by plain pickle, though it is defined in a script
    if dist.get_rank() == 0:
        subprocess.Popen(["sleep", "1000"])
    os.close(os.open(sys.argv[1] + os.environ["RANK"], os.O_CREAT))
    while dist.get_rank() == 0:
        time.sleep(1)
    sum(range(10**15))  # holds the GIL, so that nothing in this rank can react
launch(busy, 2, timeout=1000)
"""


@pytest.mark.parametrize(
    ("number", "as_file"),
    [(signal.SIGKILL, False), (signal.SIGINT, True), pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow)],
)
def test_nothing_outlives_a_parent_that_is_ended(number: signal.Signals, as_file: bool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    source = [str(tmp_path / "script.py")] if as_file else ["-c", SCRIPT]
    marker = uuid.uuid4().hex
    parent = subprocess.Popen(
        [sys.executable, *source, str(tmp_path / "up")],
        env=os.environ | {"MARKER": marker, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not {"up0", "up1"} <= set(os.listdir(tmp_path)):
            assert parent.poll() is None, parent.communicate()
            time.sleep(0.05)
        assert len(_marked(marker)) >= 5, "the parent, its fork server, two ranks, a rank's child"
        parent.send_signal(number)
        deadline = time.monotonic() + (3 if number == signal.SIGKILL else 20)  # Python's own exit may take a while
        output, errors = parent.communicate(timeout=20)
        while left := _marked(marker):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        for process in _marked(marker):
            process.kill()
    assert output.count("main") == 1
    assert errors.strip().endswith("KeyboardInterrupt") or number != signal.SIGINT


def _marked(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


# Under torchrun

SPMD_SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
from minifsdp.instruments.launch import RankError, launch, report

rank, log, heard = int(os.environ["RANK"]), {}, []

def see(word):
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    report(word)
    return [dist.get_rank(), dist.get_world_size(), total.item(), os.getpid()]

def held():
    global group  # whoever holds the group keeps its connections open
    group = dist.group.WORLD
    if dist.get_rank() == 1:
        raise ValueError("slip")
    dist.all_reduce(torch.ones(1))

def pending():
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1), async_op=True)  # will never end: rank 0 waits for something else
        sys.exit("slip")
    dist.recv(torch.ones(1), 1)

def leave_one_alone():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))

for name, count in ("all", 3), ("again", 3), ("some", 2), ("one", 1), ("all again", 3):
    log[name] = launch(see, count, name, on_report=lambda *what: heard.append(what))
log["heard"] = heard
try:
    launch(see, 4, "too many")
except ValueError as error:
    log["fewer"] = str(error)
for name, fn, count, timeout in [
    ("held", held, 3, 60), ("held by some", held, 2, 60), ("pending", pending, 2, 60),
    ("unpicklable", lambda: (i for i in ()), 2, 60), ("alone", leave_one_alone, 2, 3),
]:
    began = time.monotonic()
    try:
        launch(fn, count, timeout=timeout)
    except RankError as error:
        log[name] = [str(error), list(error.failures), time.monotonic() - began]
log["after"] = launch(lambda: "x" * (3 << 20), 3) == ["x" * (3 << 20)] * 3
json.dump(log, open(f"log{rank}.json", "w"))
"""


def test_spmd_runs_in_the_ranks_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SPMD_SCRIPT)
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    words = ["--standalone", "--nproc-per-node", "3", str(tmp_path / "script.py")]
    job = torchrun(*words, folder=tmp_path, environ=environ)
    assert job.returncode == 0, job.stderr
    logs = [json.loads((tmp_path / f"log{rank}.json").read_text()) for rank in range(3)]
    pids = [seen[3] for seen in logs[0]["all"]]
    names = ["all", "again", "some", "one", "all again"]
    for rank, log in enumerate(logs):
        for name, count in zip(names, [3, 3, 2, 1, 3], strict=True):
            assert log[name] == [[r, count, sum(range(count)), pids[r]] for r in range(count)], "one list for all ranks"
        assert log["heard"] == ([[0, name] for name in names] if rank == 0 else [])
        assert log["fewer"] == (
            "launch asks for 4 ranks, but this job has 3: start it with torchrun --nproc-per-node 4 script.py"
        )
        line = 1 + SPMD_SCRIPT.splitlines().index('        raise ValueError("slip")')
        for name in ("held", "held by some"):
            message, failed, seconds = log[name]
            assert message == f"rank 1 failed: ValueError: slip ({tmp_path / 'script.py'}:{line})"
            assert failed[0] == 1
            assert seconds < 30, "the others waited for the time-out"
        assert log["pending"][0].startswith("rank 1 failed: SystemExit: slip")
        assert log["pending"][2] < 30
        assert "cannot be pickled" in log["unpicklable"][0]
        assert log["alone"][0].startswith("rank 0 failed: RuntimeError")
        assert log["after"]


ONE_RAISES = """
import os, sys, time
from minifsdp.instruments.launch import RankError, launch, spmd

join_group, began = spmd.join_group, time.monotonic()

def join(*arguments):
    print("group waits", arguments[-1], flush=True)
    join_group(*arguments)

def stuck_elsewhere():
    if os.environ["RANK"] == sys.argv[1]:
        raise ValueError("slip")
    time.sleep(300)  # as in a call of CUDA: no collective of gloo, which a closed connection would wake

spmd.join_group = join
launch(len, 2, "first", timeout=7200)
try:
    launch(stuck_elsewhere, 2, timeout=60)
except RankError as error:
    print("raised", error, file=sys.stderr)
"""


@pytest.mark.parametrize("raises", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_spmd_one_rank_raises_while_another_is_stuck_outside_gloo(raises: int, tmp_path: Path) -> None:
    """It need not wait for the time-out of 60 s, nor does the other have to end first."""
    (tmp_path / "script.py").write_text(ONE_RAISES)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in (0, 1):
            out, errors = (stack.enter_context((tmp_path / f"{name}{rank}").open("w")) for name in ("out", "errors"))
            ranks.append(
                start_fork(
                    run_python,
                    args=(str(tmp_path / "script.py"), str(raises)),
                    out=out.fileno(),
                    errors=errors.fileno(),
                    environ=os.environ | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
            for end in (ranks[rank].close, ranks[rank].wait, ranks[rank].kill):  # the last one first
                stack.callback(end)
        assert ranks[raises].wait(40) == 0
        assert ranks[1 - raises].poll() is None, "the other is stuck"
    errors = (tmp_path / f"errors{raises}").read_text()
    assert errors.index(f"[rank {raises}] Traceback") < errors.index(f"raised rank {raises} failed: ValueError: slip")
    first = "group waits 600.0\n"
    assert (tmp_path / f"out{raises}").read_text() == first + "group waits 60\n", "as a launch, at most ten minutes"
    assert (tmp_path / f"out{1 - raises}").read_text().startswith(first)


class Runs:
    """Pickled, it is a call: of `os.mkdir`."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
@pytest.mark.parametrize("kind", ["result", "failure"])
def test_spmd_runs_nothing_that_it_finds_in_the_store(kind: str, how: str, tmp_path: Path) -> None:
    """The store listens on all interfaces and asks for no key."""
    store, evil = dist.HashStore(), Runs(tmp_path / "ran")
    with io.BytesIO() as file:
        torch.save(evil, file)
        content = file.getvalue() if how == "torch.save" else pickle.dumps(evil)
    for key, value in {f"{kind}0/0": content, f"{kind}0": "1", "answer0": kind}.items():
        store.set(key, value)
    store.add("answers", 1)
    with pytest.raises(RankError, match="rank 0 failed: its answer cannot be read"):
        answers.take_answers(store, 1, time.monotonic() + 5)
    assert not (tmp_path / "ran").exists()


def test_spmd_results_are_data() -> None:
    plain = {"a": [1, 2.5, "\ud800", None, True, 2 + 1j, b"b"], 3: ({4},), "5": torch.arange(3, dtype=torch.bfloat16)}
    sent = answers.unpack(answers.pack(plain))
    assert repr(sent) == repr(plain)
    ours = [Transfer("gather", 5, 0.5, 1.0), Settings(ranks=3)]
    assert answers.unpack(answers.pack(ours)) == ours
    with pytest.raises(TypeError, match=r"fn returned a list with pathlib\S* in it, .* return numbers, text, tensors"):
        answers.pack([Path("a")])
    with torch.serialization.safe_globals([Fraction]):
        assert answers.unpack(answers.pack(Fraction(1, 2))) == Fraction(1, 2)


def test_spmd_without_a_rendezvous_says_what_is_missing(monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match=r"MASTER_ADDR .* torchrun, or unset RANK"):
        launch(int, 2)


def test_a_server_that_is_ended_as_a_rank_starts_is_replaced() -> None:
    """Before the fork; tests/launch/test_warm.py does it before the request."""
    launch(len, 1, "before")
    ended = server.process
    assert ended is not None
    ended.send_signal(signal.SIGSTOP)
    threading.Timer(0.2, ended.kill).start()
    assert launch(len, 2, "usable") == [6, 6]
    assert server.process is not ended
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.parametrize("stdout", [None, "/dev/full"])
def test_results_are_not_lost_where_the_ranks_output_cannot_be_printed(
    stdout: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open(stdout, "w") if stdout and Path(stdout).exists() else None  # noqa: SIM115
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        assert launch(lambda: print(100_000 * "x") or 7, 1, backend="gloo") == [7]
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()
