"""What others start: variables that they leave out, jobs of several agents, restarts. See docs/launchers.md."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from commands_in_forks import run_python, start_fork

from minifsdp.instruments.launch import world
from minifsdp.instruments.launch.world import World, local_ranks

TRAIN = ["train", "--layers=2", "--width=8", "--context=8", "--batch=12", "--no-ledger", "--device=cpu"]
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


def losses(out: Path) -> list[float]:
    record = json.loads((out / "train.json").read_text())
    assert record["settings"]["ranks"] == 2
    return [*record["losses"]]


def test_ranks_of_a_group_without_rank_are_one_job(tmp_path: Path) -> None:
    """Lightning Fabric's own launcher sets WORLD_SIZE and LOCAL_RANK, no RANK, and initializes the process group."""
    (tmp_path / "script.py").write_text(FABRIC)
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_WORLD_SIZE")} | job
    words = ("script.py", *TRAIN, "--steps=2", "--out=out")
    with ExitStack() as stack:
        logs = [stack.enter_context((tmp_path / f"log{rank}").open("w+")) for rank in (0, 1)]
        ranks = [
            start_fork(
                run_python,
                args=words,
                folder=tmp_path,
                out=log.fileno(),
                errors=log.fileno(),
                environ=environ | {"LOCAL_RANK": str(rank)},
            )
            for rank, log in enumerate(logs)
        ]
        for each in ranks:
            stack.callback(each.close)
            stack.callback(each.kill)
        codes = [each.wait(60) for each in ranks]
        said = [Path(log.name).read_text() for log in logs]
    assert codes == [0, 0], said
    assert len(losses(tmp_path / "out")) == 2
    assert [text.count("2 ranks over gloo") for text in said] == [1, 0], "one job, of which rank 0 speaks"


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
