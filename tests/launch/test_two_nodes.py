"""Two nodes of two ranks, as two torchruns that meet at an address: a job whose ranks are not all on one machine."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from minifsdp.course import cli
from minifsdp.course.ladder import run as ladder
from minifsdp.course.ladder.measure import Settings

RUNGS = ("fsdp-limit",)
LADDER = ["ladder", "--device=cpu", f"--rungs={','.join(RUNGS)}", "--steps=2", "--layers=2", "--width=32"]
SECONDS = 120


class Node(NamedTuple):
    """What came of one node's torchrun, and what each of its two ranks has written."""

    code: int
    output: list[str]
    errors: list[str]


def two_nodes(folder: Path, *words: str) -> list[Node]:
    """`minifsdp WORDS --out ...` as a job of four ranks; node i has the folder `out<i>` for its files."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meet = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}", "--redirects=3"]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # the host's name need not resolve
    command = [sys.executable, "-m", "torch.distributed.run", *meet]
    jobs = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", f"--log-dir=log{node}", "-m", "minifsdp", *words, f"--out=out{node}"],
            cwd=folder,
            env=environ,
            stderr=subprocess.DEVNULL,  # torchrun's own traceback, if a rank has failed
        )
        for node in (0, 1)
    ]
    try:
        codes = [job.wait(SECONDS) for job in jobs]
    finally:
        for job in jobs:
            job.terminate()  # torchrun ends its ranks with it
            job.wait()
    return [
        Node(code, said(folder / f"log{node}", "stdout"), said(folder / f"log{node}", "stderr"))
        for node, code in enumerate(codes)
    ]


def said(log: Path, stream: str) -> list[str]:
    files = sorted(log.glob(f"*/attempt_0/*/{stream}.log"))
    assert [file.parent.name for file in files] == ["0", "1"]
    return [file.read_text() for file in files]


def losses(folder: Path) -> dict[str, list[float]]:
    record = json.loads((folder / "ladder.json").read_text())
    assert record["ranks"] == 4
    return {rung["name"]: rung["losses"] for rung in record["rungs"]}


@pytest.mark.slow
def test_the_ladder_has_the_losses_that_it_has_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: gloo reduces in an order that depends on the ranks, not on where they are."""
    first, second = two_nodes(tmp_path, *LADDER, "--ranks=4")
    assert (first.code, second.code) == (0, 0), (first, second)

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    settings = Settings(ranks=4, rungs=RUNGS, steps=2, layers=2, width=32)
    ladder.run(ladder.check(settings, "cpu", tmp_path / "one"), lambda *_: None)
    assert losses(tmp_path / "out0") == losses(tmp_path / "one")
    assert [*losses(tmp_path / "one")] == [*RUNGS]

    files = {path.name for path in (tmp_path / "out0").iterdir()}
    assert files == {path.name for path in (tmp_path / "one").iterdir()}
    assert list((tmp_path / "out1").iterdir()) == [], "rank 0 writes"
    assert "ladder.json" in first.output[0]
    assert (first.output[1], *second.output) == ("", "", ""), "rank 0 prints"
    assert "4 ranks over gloo on CPU" in first.errors[0]
    assert not any("ranks over" in errors for errors in (first.errors[1], *second.errors))


TOO_MANY = ["--ranks=5", "--batch=15"]
REFUSAL = "minifsdp: --ranks 5, but this job was started with 4: choose at most 4\n"


@pytest.mark.parametrize("rank", [0, 3])
def test_more_ranks_than_the_job_has_are_refused(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By each rank alone and in one line, before it meets the others: so none waits for another."""
    for name, value in {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(ladder, "launch", lambda *_, **__: pytest.fail("it would have met the others"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["minifsdp", *LADDER, *TOO_MANY, f"--out={tmp_path}"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert tuple(capsys.readouterr()) == ("", REFUSAL)


@pytest.mark.slow
def test_too_many_ranks_end_every_node(tmp_path: Path) -> None:
    for node in two_nodes(tmp_path, *LADDER, *TOO_MANY):
        assert node.code == 1, "torchrun's own for a rank that has failed"
        assert {line for line in node.errors if line} == {REFUSAL}, "or nothing, of a rank that torchrun ended first"
        assert node.output == ["", ""]
