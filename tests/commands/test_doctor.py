"""`minifsdp doctor`: what is broken is found and named, what is measured is counted as nccl-tests counts."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands_in_forks import minifsdp
from rich.console import Console

from minifsdp import comm
from minifsdp.course import cli, doctor
from minifsdp.course.doctor import bandwidth, gpus, labs, machine, peak, ranks
from minifsdp.course.doctor.collectives import CASES, DTYPES, OPERATIONS, check_collectives, compare
from minifsdp.course.doctor.gpus import Answer, Cuda, Gpu
from minifsdp.course.doctor.machine import Machine
from minifsdp.course.doctor.report import reasons, summary
from minifsdp.course.workshop import catalogue
from minifsdp.course.workshop.catalogue import folder_of
from minifsdp.instruments.launch import launch
from minifsdp.instruments.launch.world import World
from minifsdp.instruments.plots.bandwidth import bandwidth_picture, size_name

MIB = 2**20
H200 = "NVIDIA H200"


def no_progress(*_: Any) -> None: ...


def gpu(links: tuple[str | None, ...], name: str = H200, **changes: Any) -> Gpu:
    peers = tuple(None if link is None else True for link in links)
    return replace(Gpu(name, 141 * 2**30, 140 * 2**30, (9, 0), peers, links, (5, 16)), **changes)


def seen(**changes: Any) -> Machine:
    """A machine without GPUs on which all is well."""
    well = Machine("host", 8, 2**34, (2**33, 2**33), 2**20, 0, Answer(None, ""), Cuda([], None))
    return replace(well, **changes)


def run(tmp_path: Path, seconds: float = 40.0, replaced: dict[str, Callable[..., Any]] | None = None) -> dict[str, Any]:
    request = doctor.check(2, "cpu", tmp_path)
    return doctor.run(replace(request, seconds=seconds), no_progress, replaced)


def verdict(record: dict[str, Any]) -> dict[str, Any]:
    return next(finding for finding in record["findings"] if finding["name"] == ranks.CHECKS)


def command(monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    """The exit code of `minifsdp doctor`, in this process."""
    monkeypatch.setattr(sys, "argv", ["minifsdp", "doctor", *options])
    for each in (signal.SIGTERM, signal.SIGHUP):
        monkeypatch.setattr(signal, "signal", keep(signal.signal, each))
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def keep(real: Callable[..., Any], number: int) -> Callable[..., Any]:
    """`signal.signal` that leaves one signal as it is."""
    return lambda which, handler: None if which == number else real(which, handler)


# The whole of it


def test_all_is_well_on_two_ranks(tmp_path: Path) -> None:
    """A quarter of the time is spent measuring. As a fork it has imported torch."""
    done = minifsdp("doctor", "--ranks", "2", "--device", "cpu", "--seconds", "20", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "doctor.json").read_text())
    assert record["ok"]
    assert {each["name"] for each in record["findings"]} >= {"driver", "/dev/shm", "temporary folder", ranks.CHECKS}
    assert record["world"] == "2 ranks over gloo on CPU: as requested"
    assert record["versions"]["torch"] == torch.__version__
    for operation in bandwidth.OPERATIONS:
        rows = record["bandwidth"][operation]
        assert rows[0]["bytes"] == 64 * 1024
        assert all(row["repetitions"] >= bandwidth.FEWEST and row["seconds"] > 0 for row in rows)
    assert record["peak"]["rate"] > 0
    assert "copy" in record["peak"]["says"]
    assert (tmp_path / "bandwidth.png").read_bytes().startswith(b"\x89PNG")
    assert [lab["number"] for lab in record["labs"]][:2] == ["00", "01"]
    assert "all results are correct" in " ".join(done.stdout.split())


def test_one_rank_has_nobody_to_talk_to(tmp_path: Path) -> None:
    (tmp_path / "bandwidth.png").write_bytes(b"an earlier run's")
    record = doctor.run(doctor.check(1, "cpu", tmp_path), no_progress)
    assert record["ok"]
    assert record["bandwidth"] == {}
    assert not (tmp_path / "bandwidth.png").exists()


@pytest.mark.slow
def test_under_torchrun_one_speaks(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "minifsdp"]
    options = ["doctor", "--device", "cpu", "--seconds", "60", "--out", str(tmp_path)]
    done = subprocess.run([*torchrun, *options], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("This machine") == 1
    assert json.loads((tmp_path / "doctor.json").read_text())["ranks"] == 2


# Ranks that do not do


def wrong_ones() -> dict[str, dict[str, Callable[..., Any]]]:
    """Collectives that run to their end and give something else."""

    def gathered_backwards(output, shard, group):
        comm.all_gather(output, shard, group).wait()
        output.copy_(output.view(group.size(), -1).flip(0).reshape(-1))
        return comm.Done()

    def part_of_the_next(output, full, group, op):
        return comm.reduce_scatter(output, full.roll(full.numel() // group.size()), group, op)

    def always_a_sum(output, full, group, op):
        return comm.reduce_scatter(output, full, group)

    def without_a_wait(output, full, group, op):
        work = comm.reduce_scatter(output.clone(), full, group, op)
        work.wait()
        return comm.Done()

    def leaves_one_out(tensor, group, op):
        return comm.all_reduce(tensor.zero_() if group.rank() == 0 else tensor, group, op)

    def does_nothing(tensor, *args, **kwargs):
        return comm.Done()

    def from_the_first(tensor, source, group):
        return comm.broadcast(tensor, 0, group)

    def to_the_first(tensor, target, group, op):
        return comm.reduce(tensor, 0, group, op)

    def stays_here(output, tensor, group):
        output.copy_(tensor)
        return comm.Done()

    def receives_late(tensor, source, group):
        comm.recv(tensor.clone(), source, group).wait()
        return comm.Done()

    return {
        "all_gather": {"all_gather": gathered_backwards},
        "reduce_scatter, sum": {"reduce_scatter": part_of_the_next},
        "reduce_scatter, mean": {"reduce_scatter": always_a_sum},
        "reduce_scatter, max": {"reduce_scatter": without_a_wait},
        "all_reduce, sum": {"all_reduce": leaves_one_out},
        "all_reduce, mean": {"all_reduce": does_nothing},
        "broadcast": {"broadcast": from_the_first},
        "reduce, sum": {"reduce": to_the_first},
        "all_to_all": {"all_to_all": stays_here},
        "send and recv": {"recv": receives_late},
        "gather_objects": {"gather_objects": lambda value, group: comm.gather_objects(value, group)[::-1]},
    }


def all_problems(wrong: dict[str, dict[str, Callable[..., Any]]]) -> dict[str, list[str]]:
    return {"": list(check_collectives())} | {name: list(check_collectives(each)) for name, each in wrong.items()}


@pytest.mark.parametrize("count", [2, 3])
def test_a_wrong_collective_is_named_and_a_right_one_is_not(count: int) -> None:
    wrong = wrong_ones()
    each_rank = launch(all_problems, count, wrong, backend="gloo")
    assert not [rank[""] for rank in each_rank if rank[""]]
    for name, (replaced, *_) in wrong.items():
        problems = [problem for rank in each_rank for problem in rank[name]]
        for dtype in ("float32", "bfloat16"):
            assert [each for each in problems if each.startswith(f"{name} in {dtype}: rank ")], (name, dtype)
        about = "send and recv" if replaced == "recv" else replaced
        assert not [each for each in problems if not each.startswith(about)], name  # others are not blamed


def test_every_collective_of_comm_is_checked() -> None:
    """Those that start with tensors, or with an object, and take a group."""
    there = {
        name
        for name, each in vars(comm).items()
        if callable(each) and each.__module__ == comm.__name__ and not name.startswith("_") and name.islower()
        if "group" in getattr(each, "__annotations__", {}) and {"return"} <= each.__annotations__.keys()
        if each.__annotations__["return"] in ("Handle", "list[Any]")
    }
    assert there == set(OPERATIONS)


def test_wrong_values_are_the_reason(tmp_path: Path) -> None:
    def twice(tensor, group, op):
        tensor.mul_(2)
        return comm.all_reduce(tensor, group, op)

    record = run(tmp_path, replaced={"all_reduce": twice})
    assert not record["ok"]
    assert verdict(record)["what"].startswith("all_reduce, sum in float32: rank 0 of 2 has ")
    assert not record["bandwidth"]
    assert not (tmp_path / "bandwidth.png").exists()
    assert json.loads((tmp_path / "doctor.json").read_text())["ok"] is False


def test_a_rank_that_raises_is_the_reason(tmp_path: Path) -> None:
    def unreachable(tensor, source, group):
        if group.rank() == 1:
            raise ConnectionError("no route to host")
        return comm.broadcast(tensor, source, group)

    record = run(tmp_path, replaced={"broadcast": unreachable})
    assert not record["ok"]
    assert "rank 1 failed: ConnectionError: no route to host" in verdict(record)["what"]
    assert "(last: broadcast in float32)" in verdict(record)["what"]


def test_a_rank_that_dies_is_the_reason(tmp_path: Path) -> None:
    def dies(output, tensor, group):
        os._exit(7)

    record = run(tmp_path, replaced={"all_to_all": dies})
    assert "process ended with exit code 7" in verdict(record)["what"]
    assert not record["ok"]


def test_a_hang_is_the_reason_and_ends(tmp_path: Path) -> None:
    def hangs(output, tensor, group):
        time.sleep(600 if group.rank() == 0 else 0)
        return comm.all_to_all(output, tensor, group)

    record = run(tmp_path, seconds=5, replaced={"all_to_all": hangs})
    assert "no answer from rank(s) 0, 1 within 3 s" in verdict(record)["what"]
    assert "(last: all_to_all in float32)" in verdict(record)["what"]


def test_ranks_that_do_not_start_are_the_reason_and_an_earlier_alarm_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, "gloo", (), False, "")
    monkeypatch.setattr(ranks, "launch", lambda *_, **__: time.sleep(30))
    left, before = signal.getitimer(signal.ITIMER_REAL)[0], signal.getsignal(signal.SIGALRM)
    said = ranks.ask_ranks(world, [], 0.5, no_progress)
    assert "have not answered" in said.findings[-1].what
    assert "before the first collective" in said.findings[-1].what
    assert signal.getsignal(signal.SIGALRM) is before
    now = signal.getitimer(signal.ITIMER_REAL)[0]
    assert now == 0.0 if left == 0.0 else 0 < now < left


def test_what_is_wrong_with_another_machine_is_said_once() -> None:
    full = machine.Finding("/dev/shm", False, "0 of 64 MiB free", "remove old files")
    answers = [{"host": host, "own": [full], "wrong": []} for host in ("one", "one", "two", "two")]
    found = ranks._from_others(answers)
    assert [each.name for each in found] == ["/dev/shm of two"]


# What a machine lacks


def test_a_driver_that_torch_cannot_use_is_broken() -> None:
    broken = seen(on_bus=2, cuda=Cuda([], "The NVIDIA driver on your system is too old (found version 11040)."))
    found = machine.check_driver(broken, built_for="13.0")
    assert not found.ok
    assert "2 GPUs here" in found.what
    assert "too old (found version 11040)" in found.what
    assert "CUDA 13.0" in found.cure


def test_what_nvidia_smi_says_is_told() -> None:
    mismatch = Answer(18, "Failed to initialize NVML: Driver/library version mismatch\n")
    found = machine.check_driver(seen(driver=mismatch, cuda=Cuda([], "unknown error")), built_for="13.0")
    assert not found.ok
    assert "version mismatch" in found.what
    stuck = Answer(None, "nvidia-smi: no answer within 10 s")
    found = machine.check_driver(seen(driver=stuck), built_for="13.0")
    assert not found.ok
    assert "no answer within 10 s" in found.what


def test_a_driver_that_nobody_wants_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    here = seen(on_bus=1)
    assert machine.check_driver(here, on_cpu=True, built_for="13.0").ok
    cpu_build = machine.check_driver(here, built_for=None)
    assert cpu_build.ok
    assert "1 GPU here, but torch" in cpu_build.what
    assert "CUDA build" in cpu_build.cure
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hidden by CUDA_VISIBLE_DEVICES" in machine.check_driver(here, built_for="13.0").what
    assert machine.check_driver(here, built_for="13.0").ok
    assert machine.check_driver(seen(), built_for="13.0").what == "no NVIDIA GPU here"


def test_a_gpu_in_exclusive_mode_cannot_be_shared() -> None:
    """The reason is the mode, not the network: the second rank's first allocation says "busy or unavailable"."""
    modes = ("Default", "Exclusive_Process", "Prohibited")
    rows = [f"{index}, GPU-{index}, {H200}, 580.65.06, 5, 16, {mode}" for index, mode in enumerate(modes)]
    known = [
        {"uuid": f"GPU-{index}", "name": H200, "memory": 1, "free": None, "capability": [9, 0]} for index in (1, 0)
    ]
    cuda, driver = Cuda([gpu | {"peers": [None, True]} for gpu in known], None), Answer(0, "\n".join(rows))
    here = seen(cuda=cuda, driver=driver, gpus=gpus.gpus_of(cuda, driver, ""))
    assert [each.mode for each in here.gpus] == ["Exclusive_Process", "Default"]
    shared = World(2, "nccl", (0, 0), True, "1 GPU here, shared as requested")
    found = machine.check_mode(here, shared)
    assert not found.ok
    assert found.what == "cuda:0 is in mode Exclusive_Process: one process at a time, so ranks cannot share it"
    assert "nvidia-smi -c DEFAULT" in found.cure
    assert found in machine.check_machine(here, shared, on_cpu=False)
    assert machine.check_mode(here, World(2, "nccl", (1, 1), True, "")).ok
    each = machine.check_mode(here, World(2, "nccl", (0, 1), False, ""))
    assert each.ok  # a rank each: but what a notebook holds of it no rank gets
    assert "cuda:0 is in mode" in each.what
    broken = ranks._failure(shared, RuntimeError("CUDA-capable device(s) is/are busy or unavailable"), [""])
    assert "exclusive mode" in broken.cure
    assert "firewall" not in broken.cure


def test_dockers_default_is_too_little_shared_memory_for_nccl_on_four_gpus() -> None:
    docker = seen(shared=(64 * MIB, 64 * MIB))
    nccl = World(4, "nccl", (0, 1, 2, 3), False, "4 GPUs here")
    found = machine.check_shared_memory(docker, nccl)
    assert not found.ok
    assert "64 of 64 MiB free" in found.what
    assert "25.4 MiB a rank" in found.what
    assert "--shm-size=1g" in found.cure
    assert machine.check_shared_memory(seen(shared=(2**30, 2**30)), nccl).ok
    for asks_for_none in (World(4, "gloo", (), False, ""), World(4, "nccl", (0,) * 4, True, "")):
        assert machine.check_shared_memory(docker, asks_for_none).ok
    assert machine.check_shared_memory(seen(shared=None), nccl).ok


def test_open_files_and_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not machine.check_open_files(seen(open_files=256), 64).ok
    assert machine.check_open_files(seen(open_files=256), 8).ok
    assert machine.check_temporary().ok

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    found = machine.check_temporary()
    assert not found.ok
    assert "No space left" in found.what
    assert "TMPDIR" in found.cure


# Exit codes


def test_what_cannot_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    out = ["--out", str(tmp_path)]
    for options, named in [
        (["--ranks", "0"], "--ranks 0"),
        (["--peak", "fast"], "--peak 'fast'"),
        (["--peak", "0"], "--peak '0'"),
        (["--seconds", "2"], "'--seconds'"),
        (["--device", "tpu"], "--device tpu"),
        (["--ranks", "65", "--device", "cpu"], "--ranks 65"),
        (["--device", "cpu", "--share-gpu"], "--share-gpu"),
    ]:
        assert command(monkeypatch, *options, *out) == 2, options
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1
        assert named in said[0]


def test_a_broken_driver_ends_with_1_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Even if a GPU was asked for, which is then not impossible but broken; no rank is started."""
    broken = seen(on_bus=1, cuda=Cuda([], "driver too old"))
    monkeypatch.setattr(machine, "look", lambda: broken)
    monkeypatch.setattr(machine.check_driver, "__defaults__", (False, "13.0"))
    monkeypatch.setattr(doctor, "ask_ranks", lambda *_: pytest.fail("ranks were started"))
    assert command(monkeypatch, "--device", "cuda", "--out", str(tmp_path)) == 1
    said = capsys.readouterr()
    assert "driver: 1 GPU here, and torch cannot use them: driver too old" in said.err
    assert "broken" in said.out
    assert json.loads((tmp_path / "doctor.json").read_text())["world"] is None


@pytest.mark.slow
def test_nothing_that_hangs_outlives_the_budget(tmp_path: Path) -> None:
    """Not even where no time-out is heard: here, in looking at the machine."""
    program = (
        "import sys, time\n"
        "from minifsdp.course import cli\n"
        "from minifsdp.course.doctor import machine\n"
        "machine.look = lambda: time.sleep(300)\n"
        f"sys.argv = ['minifsdp', 'doctor', '--seconds', '10', '--out', {str(tmp_path)!r}]\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "while looking at the machine" in done.stderr


# What the driver's program and the bus say

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-23,96-119\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNODE\tSYS\t0-23,96-119\t0\t\tN/A\n"
    "GPU2\tSYS\tNODE\t X \tSYS\t24-47\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)


def test_topology_is_read() -> None:
    ways = gpus.parse_topology(TOPOLOGY)
    assert ways[("GPU0", "GPU1")] == ways[("GPU1", "GPU0")] == "NV18"
    assert ways[("GPU0", "GPU2")] == "SYS"
    assert ways[("GPU2", "GPU1")] == "NODE"
    assert len(ways) == 6
    assert gpus.parse_topology("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-19\t0\t\tN/A\n") == {}
    assert gpus.parse_topology("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") == {}
    spaced = "        GPU0    GPU1    CPU Affinity\nGPU0     X      PHB     0-63\nGPU1    PHB      X      0-63\n"
    assert gpus.parse_topology(spaced) == {("GPU0", "GPU1"): "PHB", ("GPU1", "GPU0"): "PHB"}


def test_gpus_are_matched_by_their_uuids() -> None:
    """CUDA may number them otherwise than the driver, and may see fewer."""
    rows = [f"{index}, GPU-{letter}, {H200}, 580.65.06, 5, 16, Default" for index, letter in enumerate("abc")]
    found = [
        {"uuid": uuid, "name": H200, "memory": 1, "free": None, "capability": [9, 0], "peers": peers}
        for uuid, peers in (("GPU-c", [None, True]), ("GPU-a", [True, None]))
    ]
    first, second = gpus.gpus_of(Cuda(found, None), Answer(0, "\n".join(rows)), TOPOLOGY)
    assert first.links == (None, "SYS")
    assert second.links == ("SYS", None)
    assert first.pcie == (5, 16)
    assert first.capability == (9, 0)
    assert first.mode == "Default"
    (alone,) = gpus.gpus_of(Cuda([found[0] | {"peers": [None]}], None), Answer(9, "broken"), "")
    assert alone.mode is None
    assert alone.links == (None,)
    assert alone.pcie is None


def test_the_bus_knows_gpus_without_a_driver(tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x068000"), ("0x8086", "0x030000")]
    ):
        device = tmp_path / f"0000:{number:02}:00.0"
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    (tmp_path / "unreadable").mkdir()
    assert gpus.count_on_bus(tmp_path) == 2  # the third is an NVSwitch
    assert gpus.count_on_bus(tmp_path / "none") == 0


def test_torch_gives_its_reason_from_a_process_of_its_own() -> None:
    found = gpus.ask_cuda()
    assert found.gpus or found.why
    if torch.version.cuda is None:
        assert "not compiled with CUDA" in str(found.why)


def test_what_torch_says_of_gpus_reaches_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two made-up GPUs, of which another process has the second for itself, and ranks that were never started."""

    def free_of(index: int) -> tuple[int, int]:
        if index == 1:
            raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")
        return 100 * 2**30, 141 * 2**30

    def properties(index: int) -> Any:
        return SimpleNamespace(name=H200, total_memory=141 * 2**30, major=9, minor=0, uuid="ab"[index])

    stubs = {"init": lambda: None, "device_count": lambda: 2, "mem_get_info": free_of}
    stubs |= {"get_device_properties": properties, "can_device_access_peer": lambda own, other: True}
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    cuda = Cuda(**json.loads(json.dumps(gpus._look()._asdict())))
    driver = Answer(0, "".join(f"{i}, GPU-{'ab'[i]}, {H200}, 580.65.06, 5, 16, Default\n" for i in range(2)))
    here = seen(cuda=cuda, driver=driver, gpus=gpus.gpus_of(cuda, driver, TOPOLOGY))
    assert [each.free for each in here.gpus] == [100 * 2**30, None]
    took = {"samples": {name: {2**20: [1e-3] * 3} for name in bandwidth.OPERATIONS}, "copy": []}
    well = machine.Finding(ranks.CHECKS, True, "all results are correct")
    monkeypatch.setattr(doctor, "ask_ranks", lambda _, findings, *rest: ranks.Ranks([*findings, well], [took] * 2))
    world = World(2, "nccl", (0, 1), False, "2 GPUs here")
    found = doctor.run(doctor.Request(world, here, False, None, 50.0, tmp_path), no_progress)
    assert found["ok"]
    assert found["versions"]["driver"] == "580.65.06"
    assert found["gpus"][0]["links"] == (None, "NV18")
    assert found["peak"]["rate"] == 450e9
    assert found["bandwidth"]["all_reduce"][0]["bus"] == pytest.approx(2**20 / 1e-3)
    assert next(lab for lab in found["labs"] if lab["number"] == "02")["worlds"]["NCCL, a GPU each"] == labs.HERE


# Rates


@pytest.mark.parametrize(
    ("operation", "algorithm", "bus"),
    [("all_gather", 100e9, 87.5e9), ("reduce_scatter", 100e9, 87.5e9), ("all_reduce", 100e9, 175e9)],
)
def test_rates_are_those_of_nccl_tests(operation: str, algorithm: float, bus: float) -> None:
    """8 GB in 80 ms on 8 ranks: 7/8 of it, or 14/8, on each rank's link."""
    assert bandwidth.rates(operation, 8 * 10**9, 8, 0.08) == pytest.approx((algorithm, bus))


def test_a_result_is_the_median_of_what_the_slowest_rank_took() -> None:
    def rank(*seconds: float) -> dict[str, Any]:
        return {"samples": {name: {4000: list(seconds)} for name in bandwidth.OPERATIONS}, "copy": [0.5, 1.0, 2.0]}

    both = [rank(1.0, 5.0, 2.0), rank(4.0, 1.0, 3.0)]
    (row,) = bandwidth.results(both)["all_reduce"]
    assert row == {"bytes": 4000, "seconds": 4.0, "algorithm": 1000.0, "bus": 1000.0, "repetitions": 3}
    assert bandwidth.copy_rate(both) == bandwidth.COPY
    assert bandwidth.copy_rate([{"copy": []}]) is None


SWITCH = [gpu(tuple(None if other == own else "NV18" for other in range(8))) for own in range(8)]
PCI = [gpu((None, "PHB")), gpu(("PHB", None), pcie=(4, 16))]
MESH = [
    gpu((None, "NV2", "NV1"), capability=(7, 0)),
    gpu(("NV2", None, "NV1"), capability=(7, 0)),
    gpu(("NV1", "NV1", None), capability=(7, 0)),
]


@pytest.mark.parametrize(
    ("there", "chosen", "rate"),
    [
        (SWITCH, range(8), 450e9),
        (SWITCH, (2, 5), 450e9),  # a switch gives both all links
        (MESH, range(3), 50e9),  # the third has two
        (MESH, (0, 1), 50e9),
        (PCI, range(2), 31.504e9),  # the slower of the two
        ([gpu((None, None)), gpu((None, None))], range(2), None),  # no nvidia-smi
        ([gpu((None,))], (0, 0), None),  # a GPU for each task of srun
        ([], range(2), None),
        ([gpu((None, "NV9"), capability=(19, 0)), gpu(("NV9", None), capability=(19, 0))], range(2), None),
        ([gpu((None, "SYS"), pcie=(9, 16)), gpu(("SYS", None))], range(2), None),
    ],
)
def test_peak_of_a_link(there: list[Gpu], chosen: Any, rate: float | None) -> None:
    found = peak.of_gpus(there, tuple(chosen))
    assert found.rate == (None if rate is None else pytest.approx(rate))
    assert found.says if rate else "--peak" in found.says


def test_a_peak_that_is_given() -> None:
    assert peak.asked("400GB/s").rate == 400e9
    assert peak.asked("200Gbit/s").rate == 25e9
    for text in ("", "400", "4.5", "-1GB/s", "inf", "400GB/s,latency=1", "400 parsecs"):
        with pytest.raises(ValueError, match="400GB/s"):
            peak.asked(text)


@pytest.mark.parametrize(
    ("world", "named"),
    [(World(2, "nccl", (0, 0), True, ""), "loopback"), (World(2, "nccl", (0, 1), False, ""), "NVLinks")],
)
def test_ranks_on_one_gpu_have_no_peak(world: World, named: str) -> None:
    said = ranks.Ranks([], [{"samples": {}, "copy": []}] * 2)
    assert named in doctor._peak(seen(gpus=SWITCH), world, said).says


def test_the_network_between_machines_has_no_known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    said = ranks.Ranks([], [{"samples": {}, "copy": [1.0]}] * 2)
    assert "network" in doctor._peak(seen(), World(2, "gloo", (), False, ""), said).says


def record() -> dict[str, Any]:
    rows = [{"bytes": 2**16, "seconds": 1e-3, "algorithm": 2e9, "bus": 1e9, "repetitions": 9}]
    rows.append(rows[0] | {"bytes": 2**20, "algorithm": 4e9, "bus": 2e9})
    return {
        "world": "2 ranks over NCCL, a GPU each: 2 GPUs here",
        "versions": {"torch": "2.11", "nccl": None},
        "machine": {"host": "host", "cores": 8, "memory_bytes": 2**36},
        "gpus": [asdict(each) for each in (gpu((None, "NV18")), gpu(("NV18", None), free=None))],
        "findings": [asdict(machine.Finding("driver", False, "too old [no markup]", "a new one"))],
        "bandwidth": {"all_gather": rows, "all_reduce": rows[:1]},
        "peak": {"rate": 4e9, "says": "4 GB/s: made up"},
        "labs": [{"number": "01", "ranks": 4, "worlds": dict.fromkeys(labs.WORLDS, labs.HERE)}],
    }


def test_what_is_drawn_is_what_was_measured() -> None:
    picture = bandwidth_picture(record())
    assert "50% of the peak" in picture.title
    (axes,) = picture.figure.axes
    drawn = {str(line.get_label()): [list(map(float, xy)) for xy in line.get_data()] for line in axes.lines}
    assert drawn["all-gather"] == [[2.0**16, 2.0**20], [1.0, 2.0]]
    assert drawn["all-reduce"] == [[2.0**16], [1.0]]
    assert drawn["peak: 4 GB/s: made up"][1] == [4.0, 4.0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["64 KiB", "1 MiB"]
    assert axes.get_xscale() == "log"
    assert "GB/s" in axes.get_ylabel()
    without = bandwidth_picture(record() | {"peak": {"rate": None, "says": "sockets"}})
    assert "No peak: sockets." in without.says
    assert len(without.figure.axes[0].lines) == 2
    assert [size_name(size) for size in (12, 65532, 2**30)] == ["12 B", "64 KiB", "1 GiB"]


def test_tables_say_it_all() -> None:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(summary(record()))
    said = console.export_text()
    for part in ("NV18", "141.0", "9.0", "4.00 (2.00)", "50% of the peak", "too old [no markup]; a new one", "none"):
        assert part in said, part
    assert reasons(record()) == ["driver: too old [no markup]; a new one"]


# Labs


def test_labs_start_no_more_ranks_than_they_say() -> None:
    """By the numbers that are written in a launch of real ranks."""
    for lab in labs.read_labs():
        (source,) = folder_of(lab.number).glob("lab*.py")
        given = [int(number) for number in re.findall(r"launch\(\w+, (\d+)(?!.*fake)", source.read_text())]
        assert lab.ranks >= max(given, default=0), lab


def test_a_lab_that_does_not_say_its_ranks_is_named_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    facts = {"title": "FSDP", "minutes": 75}
    monkeypatch.setattr(catalogue, "facts_of", lambda notebook: facts)
    monkeypatch.setattr(doctor, "ask_ranks", lambda *_: pytest.fail("ranks were started"))
    assert command(monkeypatch, "--device", "cpu", "--out", str(tmp_path)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "minifsdp: lab 00 does not say how many ranks it starts: its front matter needs `ranks: N`"


def test_labs_and_worlds() -> None:
    known = {lab.number: lab for lab in labs.read_labs()}
    assert known["00"].ranks == 0
    assert known["11"].ranks == 4
    assert known["01"].links
    assert known["07"].links  # by way of versus
    on_one = labs.worlds_of(known["11"], gpus=1)
    assert on_one["NCCL, a GPU each"] == "1 GPU"
    assert on_one["NCCL, one shared GPU"] == on_one["gloo"] == labs.HERE
    assert labs.worlds_of(known["11"], gpus=4)["NCCL, a GPU each"] == labs.HERE
    assert labs.worlds_of(known["11"], gpus=0)["NCCL, one shared GPU"] == "no GPU"
    assert set(labs.worlds_of(known["00"], gpus=8).values()) == {labs.UNUSED}


def test_differences_are_told() -> None:
    assert compare(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.float32, exact=True) == ""
    assert "3 at element 1 of 2, which should be 2" in compare(
        torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), torch.float32, exact=False
    )
    assert compare(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), torch.float32, exact=False)
    assert len(CASES) * len(DTYPES) == 28


def test_where_no_time_is_left_the_time_limit_is_not_negative(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine so slow that importing torch has taken all of it, the timer says so; the check has to be one."""
    limits: list[float] = []

    def check(*arguments: Any) -> Any:
        limits.append(arguments[-1])
        raise ValueError("that will do")

    clock = iter([0.0, *[59.0] * 1000])
    monkeypatch.setattr("minifsdp.course.cli.doctor.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("minifsdp.course.doctor.check", check)
    monkeypatch.setattr(sys, "argv", ["minifsdp", "doctor", "--seconds", "60", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        cli.main()
    assert limits == [1.0]
