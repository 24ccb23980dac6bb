"""What others start: variables that they leave out, jobs of several agents, restarts. See docs/launchers.md."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands_in_forks import run_python, run_torchrun, start_fork

from minifsdp.course.train.loop import train
from minifsdp.course.train.settings import TrainSettings
from minifsdp.instruments.launch import launch, world
from minifsdp.instruments.launch.meeting import new_place
from minifsdp.instruments.launch.world import World, local_ranks

TINY = {"layers": 2, "width": 8, "context": 8, "batch": 12}
TRAIN = ["train", *(f"--{name}={value}" for name, value in TINY.items()), "--no-ledger", "--device=cpu"]
FABRIC = """
import os, sys
import torch.distributed as dist
from minifsdp.course.cli import main

rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=size)
main()
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def started(words: list[str], folder: Path, stack: ExitStack) -> tuple[list[Any], list[Any]]:
    """Two ranks as Lightning Fabric's launcher starts them, and the files of what they print."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_WORLD_SIZE")} | job
    logs = [stack.enter_context((folder / f"log{rank}").open("w+")) for rank in (0, 1)]
    ranks = [
        start_fork(
            run_python,
            args=tuple(words),
            folder=folder,
            out=log.fileno(),
            errors=log.fileno(),
            environ=environ | {"LOCAL_RANK": str(rank)},
        )
        for rank, log in enumerate(logs)
    ]
    for each in ranks:
        stack.callback(each.close)
        stack.callback(each.kill)
    return ranks, logs


def losses(out: Path) -> list[float]:
    record = json.loads((out / "train.json").read_text())
    assert record["settings"]["ranks"] == 2
    return [*record["losses"]]


def test_ranks_of_a_group_without_rank_are_one_job(tmp_path: Path) -> None:
    """Lightning Fabric's own launcher sets WORLD_SIZE and LOCAL_RANK, no RANK, and initializes the process group."""
    (tmp_path / "script.py").write_text(FABRIC)
    with ExitStack() as stack:
        ranks, logs = started(["script.py", *TRAIN, "--steps=2", "--out=out"], tmp_path, stack)
        codes = [each.wait(60) for each in ranks]
        said = [Path(log.name).read_text() for log in logs]
    assert codes == [0, 0], said
    assert len(losses(tmp_path / "out")) == 2
    assert [text.count("2 ranks over gloo") for text in said] == [1, 0], "one job, of which rank 0 speaks"


INTERRUPTED = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from minifsdp.instruments.launch import launch

rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo", rank=rank, world_size=2)
signal.signal(signal.SIGINT, signal.default_int_handler)  # this test may be a job in the background

def wait_for_rank_0():
    open(f"begun{rank}", "w").close()
    time.sleep(1000 * (rank == 0))
    dist.all_reduce(torch.ones(1))

launch(wait_for_rank_0, 2)
"""


def test_ctrl_c_ends_a_rank_that_waits_for_rank_0_in_a_collective(tmp_path: Path) -> None:
    """It hears no signal there, so rank 0 must not wait for it: its end wakes the other one."""
    (tmp_path / "script.py").write_text(INTERRUPTED)
    with ExitStack() as stack:
        ranks = started(["script.py"], tmp_path, stack)[0]
        while not all((tmp_path / f"begun{rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        time.sleep(0.2)
        for each in (ranks[1], ranks[0]):
            os.kill(each.pid, signal.SIGINT)
        assert all(each.wait(30) not in (0, None) for each in ranks)


@pytest.mark.parametrize(
    ("environ", "here"),
    [
        ({"RANK": "1", "LOCAL_SIZE": "2"}, 2),  # deepspeed's name
        ({"RANK": "1", "LOCAL_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, 3),
        ({"RANK": "1", "LOCAL_SIZE": ""}, 4),
        ({"LOCAL_SIZE": "2"}, 4),
    ],
)
def test_how_many_ranks_are_here(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], here: int) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert local_ranks(4) == here


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "srun started 2 tasks, but RANK is not set: each is"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, ""),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "RANK": "0"}, ""),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ""),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, ""),  # the batch script itself
    ],
)
def test_tasks_that_are_no_ranks_are_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environ: dict[str, str], says: str
) -> None:
    """A sweep with a run per task is fine; two runs that were meant to be one write the same files."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(world, "_told", False)
    for name in ("RANK", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    world.tell(World(2, "gloo", (), False, "no GPU here"))
    _, *more = capsys.readouterr().err.splitlines()
    assert bool(more) == bool(says)
    assert all(line.startswith(says) for line in more)


DIES = """
import os, signal
from minifsdp.course.cli import main
from minifsdp.course.train import loop

save = loop.save

def save_and_die(state, *rest):
    save(state, *rest)
    if state.step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

loop.save = save_and_die
main()
"""


@pytest.mark.parametrize("agents", [1, 2])
def test_a_job_restarts_by_itself_and_ends_with_the_same_bits(
    agents: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is killed; its agent, and the other one, start all ranks again with the same command."""
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    expected = launch(train, 2, TrainSettings(**TINY, steps=8, ledger=False), "")[0]["losses"]
    (tmp_path / "script.py").write_text(DIES)
    meet = [f"--nnodes={agents}", f"--nproc-per-node={2 // agents}", "--max-restarts=3", "--monitor-interval=0.1"]
    meet += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    words = ["script.py", *TRAIN, "--steps=8", "--checkpoint=kept", "--every=3", "--auto-resume", "--out=out"]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_WORLD_SIZE")}
    with ExitStack() as stack:
        logs = [stack.enter_context((tmp_path / f"log{agent}").open("w+")) for agent in range(agents)]
        jobs = [
            start_fork(
                run_torchrun,
                "torchrun",
                *meet,
                *words,
                folder=tmp_path,
                out=log.fileno(),
                errors=log.fileno(),
                environ=environ | {"OMP_NUM_THREADS": "1"},
            )
            for log in logs
        ]
        for each in jobs:
            stack.callback(each.close)
            stack.callback(each.kill)
        codes = [each.wait(120) for each in jobs]
        said = [Path(log.name).read_text() for log in logs]
    assert codes == [0] * agents, said
    assert losses(tmp_path / "out") == expected
    assert json.loads((tmp_path / "out" / "train.json").read_text())["begun_at_step"] == 3


def test_a_place_is_new_to_ranks_of_each_attempt() -> None:
    """Whatever those before have left, in whichever order the ranks come, and if one of them died on its way."""
    store = dist.HashStore()
    made: list[list[str]] = []
    for late in (None, 0, 1, 2):
        assert abandoned(store, of=3)

        def join(rank: int, late: int | None = late) -> str:
            if rank == late:
                time.sleep(0.05)
            place = new_place(store, rank, 3, 20)
            place.set(f"seen{rank}", "")
            place.wait([f"seen{other}" for other in range(3)], timedelta(seconds=20))
            assert place.add("count", 1) <= 3
            place.set("name", str(len(made)))
            return place.get("name").decode()

        with ThreadPoolExecutor(3) as pool:
            made.append([*pool.map(join, range(3))])
    assert made == [[str(attempt)] * 3 for attempt in range(4)]


def abandoned(store: dist.Store, of: int) -> bool:
    """True if a rank 1 that comes alone finds nobody, and goes with its word left there."""
    try:
        new_place(store, 1, of, 0.03)
    except TimeoutError as error:
        return f"rank 1 of {of}: not all ranks have come" in str(error)
    return False


def test_one_rank_needs_nobody() -> None:
    new_place(dist.HashStore(), 0, 1, 1).set("key", "value")
