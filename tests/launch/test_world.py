"""The choice of a world: by what a machine has and what is asked for; made-up GPUs, for none is touched."""

import os
import re
import socket
import textwrap
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands_in_forks import torchrun

from minifsdp import comm, gloo
from minifsdp.instruments.launch import launch, rank_device, spmd, world
from minifsdp.instruments.launch.group import join_group, set_sharing
from minifsdp.instruments.launch.world import World, choose_world


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("MINIFSDP_DEVICE", "MINIFSDP_SHARE_GPU")
    for name in (*ours, "SLURM_GPUS_PER_TASK", "CUDA_LAUNCH_BLOCKING", "RANK", "MASTER_ADDR", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", forbidden)


def forbidden(*args: Any) -> None:
    raise AssertionError("CUDA was initialized: what is forked from this process could not use it")


def have(monkeypatch: pytest.MonkeyPatch, gpus: int, **environment: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


TASK = {"SLURM_GPUS_PER_TASK": "1"}
JOB = {"RANK": "0", "MASTER_ADDR": "node0"}
CHOICES: list[tuple[int, dict[str, str], dict[str, Any], tuple[str, tuple[int, ...], bool], str]] = [
    (0, {}, {}, ("gloo", (), False), "2 ranks over gloo on CPU: no GPU here"),
    (1, {}, {}, ("gloo", (), False), "2 ranks over gloo on CPU: 1 GPU for 2 ranks, and no --share-gpu"),
    (2, {}, {}, ("nccl", (0, 1), False), "2 ranks over NCCL, a GPU each: 2 GPUs here"),
    (8, {}, {"device": "cpu"}, ("gloo", (), False), "2 ranks over gloo on CPU: as requested"),
    (8, {}, {"backend": "gloo"}, ("gloo", (), False), "2 ranks over gloo on CPU: as requested"),
    (8, {"MINIFSDP_DEVICE": "cpu"}, {}, ("gloo", (), False), "2 ranks over gloo on CPU: MINIFSDP_DEVICE=cpu forces it"),
    (8, {"MINIFSDP_DEVICE": "cuda"}, {"backend": "gloo"}, ("gloo", (), False), "as requested"),
    (8, {"MINIFSDP_DEVICE": "auto"}, {}, ("nccl", (0, 1), False), "8 GPUs here"),
    (1, {}, {"share_gpu": True}, ("nccl", (0, 0), True), "2 ranks over NCCL, sharing cuda:0: 1 GPU here, shared as"),
    (1, {"MINIFSDP_SHARE_GPU": "1"}, {}, ("nccl", (0, 0), True), "sharing cuda:0"),
    (1, {"MINIFSDP_SHARE_GPU": "1"}, {"share_gpu": False}, ("gloo", (), False), "no --share-gpu"),
    (1, {"MINIFSDP_SHARE_GPU": "1", "MINIFSDP_DEVICE": "cpu"}, {}, ("gloo", (), False), "MINIFSDP_DEVICE=cpu"),
    (2, {}, {"ranks": 4, "share_gpu": True}, ("nccl", (0, 1, 0, 1), True), "4 ranks over NCCL, sharing cuda:0, cuda:1"),
    (2, {}, {"share_gpu": True}, ("nccl", (0, 1), False), "a GPU each"),
    (1, {}, {"ranks": 1}, ("nccl", (0,), False), "1 rank over NCCL, a GPU each: 1 GPU here"),
    (2, {}, {"ranks": 16, "here": 2}, ("nccl", (0, 1), False), "16 ranks over NCCL"),
    (1, {**TASK, "RANK": "3"}, {"ranks": 4}, ("nccl", (0, 0, 0, 0), False), "1 GPU for each task of this Slurm step"),
    (1, {"SLURM_GPUS_PER_TASK": "h100:1", "RANK": "3"}, {"ranks": 4}, ("nccl", (0,) * 4, False), "1 GPU for each task"),
    (2, {"SLURM_GPUS_PER_TASK": "gpu:h100:2", "RANK": "3"}, {"ranks": 4}, ("nccl", (0,) * 4, False), "2 GPUs for each"),
    (1, {**JOB, "MINIFSDP_DEVICE": "cpu"}, {}, ("gloo", (), False), "MINIFSDP_DEVICE=cpu forces it"),
    (0, JOB, {}, ("gloo", (), False), "no GPU here"),
    (1, {"RANK": "0"}, {}, ("gloo", (), False), "1 GPU for 2 ranks"),  # asked inside a rank that `launch` started
    (4, {**TASK, "RANK": "3"}, {"ranks": 4}, ("nccl", (0, 1, 2, 3), False), "4 GPUs here"),
    (1, TASK, {}, ("gloo", (), False), "1 GPU for 2 ranks"),  # this is the one task, and starts its ranks itself
    (1, TASK, {"share_gpu": True}, ("nccl", (0, 0), True), "sharing cuda:0"),
    (0, {"SLURM_GPUS_PER_TASK": "0", "RANK": "0"}, {}, ("gloo", (), False), "no GPU here"),
    (0, {}, {"ranks": 512, "backend": "fake"}, ("fake", (), False), "rank 0 of 512 on cpu, alone: collectives carry"),
    (1, {}, {"ranks": 512, "backend": "fake"}, ("fake", (0,), False), "rank 0 of 512 on cuda, alone"),
]


@pytest.mark.parametrize(("gpus", "environment", "asked", "chosen", "line"), CHOICES)
def test_what_is_chosen_and_why(monkeypatch, gpus, environment, asked, chosen, line):
    have(monkeypatch, gpus, **environment)
    made = choose_world(**{"ranks": 2, **asked})
    assert (made.backend, made.gpus, made.shares_gpu) == chosen
    assert made.device == ("cuda" if chosen[1] else "cpu")
    assert line in str(made)
    assert "\n" not in str(made)


@pytest.mark.parametrize(
    ("gpus", "environment", "asked", "says"),
    [
        (0, {}, {"device": "tpu"}, "--device tpu: choose auto, cpu or cuda"),
        (0, {"MINIFSDP_DEVICE": "gpu"}, {}, "MINIFSDP_DEVICE=gpu: choose auto, cpu or cuda, or unset it"),
        (1, {"MINIFSDP_SHARE_GPU": "yes"}, {}, "MINIFSDP_SHARE_GPU=yes: choose 1 or 0, or unset it"),
        (0, {}, {"device": "cuda"}, "there is no GPU for 2 ranks: use the CPU"),
        (1, {}, {"device": "cuda"}, "there is 1 GPU for 2 ranks: use --share-gpu"),
        (3, {}, {"backend": "nccl", "ranks": 4}, "there are 3 GPUs for 4 ranks: use --share-gpu"),
        (1, {"MINIFSDP_DEVICE": "cuda"}, {}, "there is 1 GPU for 2 ranks"),
        (8, {"MINIFSDP_DEVICE": "cpu"}, {"device": "cuda"}, "MINIFSDP_DEVICE=cpu forces the CPU: unset it"),
        (1, {}, {"device": "cpu", "share_gpu": True}, "leave one of them out"),
        (0, {}, {"share_gpu": True}, "this machine has no GPU to share"),
        (0, {"MINIFSDP_SHARE_GPU": "1"}, {}, "this machine has no GPU to share"),
        (1, {}, {"ranks": 9, "share_gpu": True}, "at most 8 ranks per GPU, not 9 on 1 GPU"),
        (1, {"CUDA_LAUNCH_BLOCKING": "1"}, {"share_gpu": True}, "CUDA_LAUNCH_BLOCKING=1: unset it"),
        (0, {"MINIFSDP_SHARE_GPU": "yes"}, {"device": "cpu"}, "MINIFSDP_SHARE_GPU=yes: choose 1 or 0"),
        (0, {"RANK": "x", "WORLD_SIZE": "2"}, {}, "RANK=x is not a number of ranks"),
        (0, {"RANK": "0", "WORLD_SIZE": "two"}, {}, "WORLD_SIZE=two is not a number of ranks"),
        (0, {"RANK": "0", "WORLD_SIZE": "2"}, {"ranks": 3}, "--ranks 3, but this job was started with 2"),
        (1, JOB, {}, "this job has 1 GPU for 2 ranks on this machine: ask for --share-gpu"),
        (1, {**JOB, "SLURM_GPUS_PER_TASK": "h100:2"}, {}, "this job has 1 GPU for 2 ranks"),
        (2, {**JOB, "LOCAL_WORLD_SIZE": "4"}, {"ranks": 8}, "this job has 2 GPUs for 4 ranks"),
        (0, {}, {"ranks": 65}, "--ranks 65: gloo serves at most 64 ranks on one machine"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(monkeypatch, gpus, environment, asked, says):
    have(monkeypatch, gpus, **environment)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        choose_world(**{"ranks": 2, **asked})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [gloo.NAME, gloo.OLD_NAME])
@pytest.mark.parametrize("backend", [None, "fake"])
def test_collectives_that_there_are_not_are_refused_before_a_rank_starts(monkeypatch, name, backend):
    monkeypatch.setenv(name, "ring")
    with pytest.raises(ValueError, match=f"^{name}=ring: set MINIFSDP_COLLECTIVES to auto or native, or unset it$"):
        choose_world(2, "cpu", backend=backend)


def test_a_torch_without_nccl(monkeypatch):
    have(monkeypatch, 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "has no NCCL" in str(choose_world(2))
    with pytest.raises(ValueError, match="has no NCCL: install a CUDA build"):
        choose_world(2, "cuda")


def test_ranks_of_other_machines_need_no_gpu_here(monkeypatch):
    have(monkeypatch, 2, RANK="0", LOCAL_WORLD_SIZE="2")
    assert choose_world(4).gpus == (0, 1)


def test_the_line_is_printed_once_and_by_one_rank(monkeypatch, capsys):
    monkeypatch.setattr(world, "_told", False)
    made = World(2, "gloo", (), False, "no GPU here")
    have(monkeypatch, 0)
    world.tell_if_chosen(made)
    assert capsys.readouterr().err == ""  # there was nothing to choose
    have(monkeypatch, 1)
    world.tell_if_chosen(made)
    world.tell(made)
    assert capsys.readouterr().err == "2 ranks over gloo on CPU: no GPU here\n"
    monkeypatch.setattr(world, "_told", False)
    monkeypatch.setenv("RANK", "1")
    world.tell(made)
    assert capsys.readouterr().err == ""


def test_mps_is_named_where_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert choose_world(2, share_gpu=True).why == "1 GPU here, shared as requested"
    (tmp_path / "control").touch()
    assert choose_world(2, share_gpu=True).why == "1 GPU here, shared as requested under MPS"


@pytest.mark.parametrize("shares", [False, True])
def test_joining_with_nccl(monkeypatch, shares):
    """In the order that NCCL needs: the rank's GPU and its variables first, then the group, then its connections."""
    done: list[Any] = []

    def init(backend: str, **options: Any) -> None:
        shared = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        nccl = options["pg_options"]
        assert nccl._timeout == options["timeout"] == timedelta(milliseconds=60_123)  # all that NCCL's options keep
        done.append((backend, options["rank"], nccl.is_high_priority_stream, shared))

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: done.append(index))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronized"))
    monkeypatch.setattr(torch, "zeros", lambda *size, device: f"zeros on {device}")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "all_reduce", done.append)
    monkeypatch.setattr(os, "environ", {})
    gpus = (0, 0) if shares else (0, 1)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        join_group(None, 1, 1, World(2, "nccl", gpus, shares, ""), 60.1234567)
        for said in (
            "barrier(): using the device under current context. You can",
            "An unbatched P2P op (send/recv) was",
        ):
            warnings.warn(said, stacklevel=1)
        warnings.warn("a barrier that is new", stacklevel=1)
    assert [str(each.message) for each in shown] == ["a barrier that is new"]  # the others are as meant
    assert [done[0], *done[2:]] == [gpus[1], "zeros on cuda", "synchronized"]
    assert done[1][:3] == ("nccl", 1, True)
    variables = done[1][3]
    if shares:
        assert variables["NCCL_HOSTID"] == "minifsdp-1"
        assert variables["NCCL_SOCKET_IFNAME"] in ("lo", "lo0")
        assert variables["NCCL_P2P_DISABLE"] == variables["NCCL_SHM_DISABLE"] == "1"
    else:
        assert variables == {}


@pytest.mark.parametrize(("gpus", "size", "shares"), [(1, 2, True), (1, 4, True), (2, 2, False)])
def test_a_job_that_will_share_gpus_sets_nccls_variables_before_its_first_group(monkeypatch, gpus, size, shares):
    """NCCL reads many once in a process; `ladder` first trains on rank 0 alone, which has a GPU to itself."""
    seen: list[dict[str, str]] = []

    def join(*args: Any) -> None:
        seen.append({name: value for name, value in os.environ.items() if name.startswith("NCCL_")})

    have(monkeypatch, gpus, RANK="0", WORLD_SIZE=str(size), LOCAL_WORLD_SIZE="2")
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")})
    store = dist.HashStore()
    dist.PrefixStore("minifsdp/launch1", store).add("left", size - 1)
    monkeypatch.setattr(spmd, "_connect", lambda world_size: spmd._Job(store, 0, size, 0, 2))
    monkeypatch.setattr(spmd, "join_group", join)
    assert spmd.run_spmd(len, 1, ("alone",), 5.0, None, True, None) == [5]
    (variables,) = seen
    assert variables.get("NCCL_HOSTID") == ("minifsdp-0" if shares else None)
    assert ("NCCL_SOCKET_IFNAME" in variables) == (shares and size == 2)  # the job is on one machine
    before = dict(os.environ)
    set_sharing(0, True)  # when it joins the next group: what NCCL has read stays
    assert shares is (os.environ == before)


def test_rank_0_of_many_alone():
    def look() -> tuple[Any, ...]:
        ours, theirs = torch.full((2,), 7.0), torch.zeros(16)
        comm.all_gather(theirs, ours, comm.world()).wait()
        comm.all_reduce(ours, comm.world()).wait()
        return dist.get_rank(), dist.get_world_size(), rank_device().type, ours.tolist(), theirs.shape[0]

    assert launch(look, 8, backend="fake") == [(0, 8, "cpu", [7.0, 7.0], 16)]


def test_ranks_that_choose_differently_say_so(tmp_path: Path):
    """A node without its GPUs: no rank waits for peers that will never come."""
    script = """
        import os, sys, torch
        import torch.distributed as dist
        from minifsdp.instruments.launch import launch, RankError
        dist.is_nccl_available = lambda: True
        torch.cuda.device_count = lambda: 2 * int(os.environ["RANK"])
        try:
            launch(print, 2)
        except RankError as error:
            print(f"{os.environ['RANK']} says {str(error).splitlines()[0]}", flush=True)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    words = ["--nproc-per-node", "2", "--master-port", free_port(), str(tmp_path / "script.py")]
    done = torchrun(*words, timeout=90)
    assert done.returncode == 0, done.stderr
    host = socket.gethostname()
    for rank in "01":
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{rank} says")]
        assert f"rank 0 chose gloo on {host} (no GPU here), rank 1 chose nccl on {host} (2 GPUs here)" in line


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
