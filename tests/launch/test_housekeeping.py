"""`minifsdp ps` and `minifsdp clean`, and kernels that are interrupted, restarted and killed while ranks run."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from jupyter_client import KernelManager
from marked import marked, within

from minifsdp.course import cli
from minifsdp.course.cli import processes
from minifsdp.course.workshop.references import find_reference
from minifsdp.instruments.system.housekeeping import SERVER, Found, end_processes, find_processes


def found(word: str) -> dict[str, Found]:
    """This test's processes as `minifsdp ps` sees them, by what they are."""
    mine = {process.pid for process in marked(word)}
    return {each.what: each for each in find_processes() if each.process.pid in mine}


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str, *words: str) -> list[str]:
    """What a command prints; of all processes of this user it sees this test's only."""
    monkeypatch.setattr(processes, "find_processes", lambda: list(found(word).values()))
    monkeypatch.setattr(sys, "argv", ["minifsdp", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]


SCRIPT = """
import os, sys, time
from minifsdp.instruments.launch import launch

def busy(escapes):
    if os.environ["RANK"] == "1" and escapes and os.fork() == 0:
        os.setsid()  # out of the group that ends with the rank
    time.sleep(1000)

try:
    launch(busy, 2, False, timeout=1000)
except Exception as error:
    print(error, flush=True)
    launch(busy, 2, True, timeout=1000)
"""


RUNNING = {"rank 0 of 2", "rank 1 of 2", SERVER}


def test_clean_ends_what_a_running_script_started_the_script_goes_on_and_what_it_leaves_is_ended_without_asking(
    marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])  # not ours: it has no label
    (tmp_path / "train.py").write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    within(60, lambda: found(marker).keys() >= RUNNING)
    seen = found(marker)
    assert seen.keys() == RUNNING
    for each in seen.values():
        assert (each.starter, each.starter_pid, each.in_use) == ("train.py", parent.pid, True)
        assert 0 <= each.age < 100
        assert each.memory > 2**20
    table = command(monkeypatch, capsys, marker, "ps")
    row = next(line for line in table if "rank 1 of 2" in line)
    assert row.startswith(f"{seen['rank 1 of 2'].process.pid} rank 1 of 2 train.py ({parent.pid}) ")
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    assert command(monkeypatch, capsys, marker, "clean")[-1].startswith("nothing was ended")
    assert found(marker).keys() == seen.keys()
    ended = command(monkeypatch, capsys, marker, "clean", "--yes")
    assert sorted(line.partition(", started by ")[0] for line in ended) == sorted(
        f"ended {each.process.pid} {each.what}" for each in seen.values()
    )
    failed = parent.stdout.readline().strip()
    reasons = "killed by SIGTERM|process ended|the server of the ranks was killed"
    assert re.fullmatch(rf"rank \d failed: ({reasons}).* before fn returned", failed)
    within(60, lambda: found(marker).keys() >= RUNNING)
    assert not {each.process.pid for each in seen.values()} & {each.process.pid for each in found(marker).values()}
    assert other.poll() is None
    other.kill()
    other.wait()

    within(10, lambda: len([p for p in marked(marker) if p.name() == "rank 1 of 2"]) == 2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    within(5, lambda: found(marker).keys() == {"rank 1 of 2"})  # its fork; the server has ended
    assert not any(each.in_use for each in found(marker).values())
    assert any(
        f"rank 1 of 2 train.py ({parent.pid}, gone)" in line for line in command(monkeypatch, capsys, marker, "ps")
    )
    assert len(command(monkeypatch, capsys, marker, "clean")) == 1
    assert not marked(marker)
    assert command(monkeypatch, capsys, marker, "ps") == ["you have no minifsdp processes"]
    assert command(monkeypatch, capsys, marker, "clean") == ["nothing was ended"]


def test_who_does_not_end_politely_is_killed() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(1000)"
    deaf = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert deaf.stdout is not None
    deaf.stdout.readline()
    each = Found(psutil.Process(deaf.pid), "rank 0 of 1", "test", os.getpid(), True, 0.0, 0)
    assert not end_processes([each], patience=0.3)
    assert not psutil.pid_exists(deaf.pid)
    deaf.stdout.close()


# Kernels


class Kernel:
    """A notebook's kernel in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder), env=os.environ | {"JPY_SESSION_NAME": "lab04_flat_parameter.ipynb"})
        self.connect()

    def connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def begin(self, cell: str) -> str:
        return str(self.client.execute(cell))

    def end(self, request: str) -> str:
        """What a cell has printed or raised."""
        text = ""
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if content.get("execution_state") == "idle":
                return text
            text += content.get("text", "") + content.get("ename", "")

    def run(self, cell: str) -> str:
        return self.end(self.begin(cell))


@pytest.fixture
def kernel(marker: str, tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


HANG = """
import time
from minifsdp.instruments.launch import launch
launch(time.sleep, 2, 1000.0, timeout=1000)
"""
RANKS = (
    "import torch.distributed as dist\nfrom minifsdp.instruments.launch import launch\nprint(launch(dist.get_rank, 2))"
)
SETUP = "# set-up\nimport torch\nfrom torch import Tensor\nfrom minifsdp.course.workshop import exercise"
LOOPS = '@exercise("4.1")\ndef pad_and_chunk(flat, ranks):\n    while True: pass'
RIGHT = f'@exercise("4.1")\n{find_reference("4.1").source}'


def test_a_kernel_interrupted_is_usable_and_one_restarted_or_killed_leaves_nothing(kernel: Kernel, marker: str) -> None:
    waiting = kernel.begin(HANG)
    within(60, lambda: {"rank 0 of 2", "rank 1 of 2"} <= found(marker).keys())
    assert found(marker)["rank 0 of 2"].starter == "lab04_flat_parameter.ipynb"
    kernel.manager.interrupt_kernel()
    assert kernel.end(waiting).endswith("KeyboardInterrupt")
    within(5, lambda: found(marker).keys() == {SERVER})
    assert kernel.run(RANKS) == "[0, 1]\n"

    assert kernel.run(SETUP) == ""
    waiting = kernel.begin(LOOPS)
    within(60, lambda: "check 4.1" in found(marker))
    time.sleep(1)  # in the middle of its imports, or of the endless loop
    kernel.manager.interrupt_kernel()
    assert kernel.end(waiting).endswith("KeyboardInterrupt")
    within(5, lambda: found(marker).keys() == {SERVER})
    assert "4.1 pad_and_chunk: yours: passed" in kernel.run(RIGHT)

    kernel.begin(HANG)
    within(60, lambda: {"rank 0 of 2", "rank 1 of 2"} <= found(marker).keys())
    kernel.client.stop_channels()
    kernel.manager.restart_kernel(now=True)
    within(5, lambda: not found(marker))
    kernel.connect()
    kernel.run(SETUP)
    assert found(marker).keys() == {SERVER}, "it imports torch while the learner reads"
    kernel.begin(LOOPS)
    within(60, lambda: "check 4.1" in found(marker))
    kernel.manager.signal_kernel(9)
    within(5, lambda: not found(marker))


@pytest.mark.slow
def test_ten_kernels_at_once_neither_collide_nor_leave_anything(marker: str, tmp_path: Path) -> None:
    kernels = [Kernel(tmp_path / str(number)) for number in range(10)]
    try:
        for cells in ([RANKS] * 10, [SETUP] * 10, [RIGHT] * 10, [RANKS] * 10):
            requests = [kernel.begin(cell) for kernel, cell in zip(kernels, cells, strict=True)]
            said = {kernel.end(request).rpartition("\r")[2] for kernel, request in zip(kernels, requests, strict=True)}
            assert len(said) == 1, said
            assert said.pop().startswith(("[0, 1]", "4.1 pad_and_chunk: yours: passed")) or cells[0] == SETUP
        requests = [kernel.begin(HANG) for kernel in kernels]
        within(60, lambda: sum(p.name().startswith("rank ") for p in marked(marker)) == 20)
        for kernel in kernels[:5]:
            kernel.manager.interrupt_kernel()
        for kernel, request in list(zip(kernels, requests, strict=True))[:5]:
            assert kernel.end(request).endswith("KeyboardInterrupt")
        assert sum(p.name().startswith("rank ") for p in marked(marker)) == 10, "the others' ranks were touched"
    finally:
        for kernel in kernels:
            kernel.client.stop_channels()
            kernel.manager.shutdown_kernel(now=True)
