"""This machine's driver, shared memory, temporary folder and open files, each with its check."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from minifsdp.course.doctor.gpus import (
    Answer,
    Cuda,
    Gpu,
    ask_cuda,
    ask_driver,
    count_on_bus,
    gpus_of,
    nvidia_smi,
    parse_query,
)
from minifsdp.instruments.launch.world import FORCES, World, in_words
from minifsdp.instruments.system.scratch import scratch_folder

MIB = 2**20
SHARED = Path("/dev/shm")
SEGMENTS = 2 * 9_637_888 + 7_340_384
"""The least bytes of /dev/shm for a rank over NCCL: two channels to the next rank of the ring, and a pool.

A connection takes 9,637,888 bytes, the buffers of three protocols and a page (init.cc, computeBuffSizes), the proxy
thread's pool 7,340,384 (proxy.h, ncclProxyOpsPool): the sizes in NCCL's errors if /dev/shm is too small
(NVIDIA/nccl#342: four GPUs and Docker's 64 MiB; pytorch/torchtitan#853: eight and 16 MiB). GPUs with peer access need
less, more process groups need more: NVIDIA asks for 1 GiB (NCCL's user guide, Troubleshooting, Shared memory).
"""
FILES = 64, 16
"""Open files that a process needs, and those for each rank: more than seen over gloo, 8 + 4 N in the process that
starts N ranks and 17 + N in each of them; NCCL's have not been counted."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: of the thing checked.
        ok: whether it works.
        what: the observation, in one line.
        cure: the remedy; "" if none is needed.
    """

    name: str
    ok: bool
    what: str
    cure: str = ""


@dataclass(frozen=True)
class Machine:
    """The machine before a rank starts. `driver` is nvidia-smi's answer, `on_bus` the number of NVIDIA GPUs."""

    host: str
    cores: int
    memory: int  # bytes
    shared: tuple[int, int] | None  # /dev/shm: bytes in all, and free
    open_files: int
    on_bus: int
    driver: Answer
    cuda: Cuda
    gpus: list[Gpu] = field(default_factory=list)


def look() -> Machine:
    """Inspect this machine. Only its first rank queries the driver, and CUDA if there may be a GPU."""
    first = (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"
    on_bus, driver = (count_on_bus(), ask_driver()) if first else (0, Answer(None, ""))
    there = first and (on_bus or driver != (None, "") or torch.cuda.device_count())
    cuda = ask_cuda() if there else Cuda([], None)
    topology = nvidia_smi("topo", "-m").text if cuda.gpus and driver.code == 0 else ""
    usage = shutil.disk_usage(SHARED) if SHARED.is_dir() else None
    return Machine(
        socket.gethostname(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        psutil.virtual_memory().total,
        (usage.total, usage.free) if usage else None,
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        on_bus,
        driver,
        cuda,
        gpus_of(cuda, driver, topology),
    )


def driver_version(driver: Answer) -> str | None:
    """The driver's version, as nvidia-smi reported it."""
    rows = parse_query(driver.text) if driver.code == 0 else {}
    return next((row["driver_version"] for row in rows.values()), None)


def check_driver(machine: Machine, on_cpu: bool = False, built_for: str | None = torch.version.cuda) -> Finding:
    """Check that torch can use the GPUs on the bus or in the driver's list.

    Args:
        machine: from `look`.
        on_cpu: whether the CPU was asked for, so that a GPU would not be used.
        built_for: the version of CUDA that torch was built for; None: a CPU build.
    """
    cuda, driver = machine.cuda, machine.driver
    listed = len(parse_query(driver.text)) if driver.code == 0 else 0
    there = max(machine.on_bus, listed)
    if cuda.gpus:
        return Finding("driver", True, f"torch can use {_count(len(cuda.gpus))}")
    if not there and driver.code is None and not driver.text:
        return Finding("driver", True, "no NVIDIA GPU here")
    seen = f"{_count(there)} here" if there else "nvidia-smi is here"
    if built_for is None:
        what = f"{seen}, but torch {torch.__version__} is a CPU build"
        return Finding("driver", True, what, "install a CUDA build of torch to use them (pytorch.org)")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1"):
        return Finding("driver", True, f"{seen}, hidden by CUDA_VISIBLE_DEVICES={hidden}")
    why = cuda.why or "torch finds none"
    if driver.code:
        why = f"nvidia-smi says {_first(driver.text)!r}; torch says {why!r}"
    elif driver.code is None and driver.text:
        why = f"{driver.text}; torch says {why!r}"
    cure = f"install or reload a driver for CUDA {built_for} and restart; in a container, start it with --gpus all"
    return Finding("driver", on_cpu, f"{seen}, and torch cannot use them: {why}", cure)


def check_shared_memory(machine: Machine, world: World) -> Finding:
    """Check that /dev/shm has room for the buffers that NCCL's ranks share on one host."""
    name = f"{SHARED}"
    if machine.shared is None:
        return Finding(name, True, "not there, as on macOS; gloo needs none")
    size, free = machine.shared
    has = f"{free / MIB:,.0f} of {size / MIB:,.0f} MiB free"
    if world.backend != "nccl" or world.shares_gpu:
        return Finding(
            name, True, f"{has}; {'ranks on one GPU use sockets' if world.shares_gpu else 'gloo needs none'}"
        )
    need = len(world.gpus) * SEGMENTS
    what = f"{has}; NCCL needs at least {SEGMENTS / MIB:.1f} MiB a rank, {need / MIB:,.0f} MiB for {len(world.gpus)}"
    cure = "start the container with --shm-size=1g or --ipc=host, or remove old files from /dev/shm"
    return Finding(name, free >= need, what, "" if free >= need else cure)


def check_mode(machine: Machine, world: World) -> Finding:
    """Check that each of the world's GPUs accepts as many processes as it has ranks."""
    modes = {index: gpu.mode or "" for index, gpu in enumerate(machine.gpus) if index in world.gpus}
    alone = {index: mode for index, mode in modes.items() if mode.startswith(("Exclusive", "Prohibited"))}
    if not alone:
        return Finding(
            "GPU mode", True, "any number of processes may use a GPU" if all(modes.values()) else "not known"
        )
    index, mode = next(iter(alone.items()))
    what = f"cuda:{index} is in mode {mode}: "
    cure = "an administrator's `nvidia-smi -c DEFAULT` lets several processes use it"
    if mode == "Prohibited":
        return Finding("GPU mode", False, f"{what}no process may use it", cure)
    if world.shares_gpu:
        return Finding(
            "GPU mode", False, f"{what}one process at a time, so ranks cannot share it", f"{cure}; or a rank each"
        )
    return Finding("GPU mode", True, f"{what}one process at a time, so no rank while a notebook uses it", cure)


def check_temporary() -> Finding:
    """Check that `launch` can make its temporary folder."""
    try:
        with scratch_folder() as folder:
            (folder / "file").write_text("")
            return Finding("temporary folder", True, f"{folder.parent} can be written")
    except OSError as error:
        what = f"no file can be created: {error.strerror or error}"
        return Finding("temporary folder", False, what, "set TMPDIR to a folder on a disk with free space")


def check_open_files(machine: Machine, ranks: int) -> Finding:
    """Check that a process may open a file for each of its connections to other ranks."""
    need, may = FILES[0] + FILES[1] * ranks, machine.open_files
    what = f"{'any number' if may == resource.RLIM_INFINITY else may} of a process; {in_words(ranks)}: {need} needed"
    ok = may == resource.RLIM_INFINITY or may >= need
    return Finding("open files", ok, what, "" if ok else f"raise the limit: ulimit -n {max(4096, need)}")


def check_machine(machine: Machine, world: World | None, on_cpu: bool) -> list[Finding]:
    """Run this module's checks; those that need a world, only if there is one."""
    findings = [check_driver(machine, on_cpu), check_temporary()]
    if world is not None:
        findings += [check_shared_memory(machine, world), check_open_files(machine, world.ranks)]
        findings += [check_mode(machine, world)] if machine.gpus and world.gpus else []
    return findings


def asked_for_cpu(device: str) -> bool:
    return device == "cpu" or os.environ.get(FORCES) == "cpu"


def _count(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _first(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "nothing")


def as_plain(machine: Machine) -> dict[str, Any]:
    """The machine as plain data, for a record."""
    return {
        "host": machine.host,
        "cores": machine.cores,
        "memory_bytes": machine.memory,
        "shared_memory_bytes": machine.shared and {"size": machine.shared[0], "free": machine.shared[1]},
        "open_files": machine.open_files,
    }
