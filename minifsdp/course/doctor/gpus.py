"""The GPUs of this machine according to nvidia-smi, the PCI bus, and CUDA, which may disagree.

nvidia-smi comes with the driver and prints the matrix of links. NVML has no such matrix, only each link's far end, so
its Python bindings (nvidia-ml-py) would add a package and save no code.

CUDA is queried in a process of its own (`python -m minifsdp.course.doctor.gpus`): a hanging driver hangs there, and the
ranks' parent leaves no context on their GPUs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PATIENCE = 10.0  # seconds for a program that queries the driver; a broken one may never answer
NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI: the vendor, and the first digits of the classes of display controllers

FIELDS = ("index", "uuid", "name", "driver_version", "pcie.link.gen.max", "pcie.link.width.max", "compute_mode")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # the header is underlined
_DEVICE = re.compile(r"GPU\d+|NIC\d+|mlx\w+|hfi\w+|rdma\w+")


class Answer(NamedTuple):
    """The output of a program. `code` is None if it is not installed, or did not end in time."""

    code: int | None
    text: str


class Cuda(NamedTuple):
    """The GPUs that torch finds, or the reason why there are none."""

    gpus: list[dict[str, Any]]
    why: str | None


@dataclass(frozen=True)
class Gpu:
    """One GPU that CUDA sees.

    Attributes:
        memory, free: bytes; `free` is None if CUDA does not report it.
        capability: compute capability, such as (9, 0).
        peers: for each GPU, whether this one can read its memory; None for itself.
        links: for each GPU, nvidia-smi's name of the connection: "NV18" for 18 NVLinks, "PIX", "PXB", "PHB", "NODE",
            "SYS" for PCIe; None for itself, and if unknown.
        pcie: generation and lanes; None if unknown.
        mode: nvidia-smi's compute mode: "Default" (any number of processes), "Exclusive_Process", "Prohibited"; None if
            unknown.
    """

    name: str
    memory: int
    free: int | None
    capability: tuple[int, int]
    peers: tuple[bool | None, ...]
    links: tuple[str | None, ...]
    pcie: tuple[int, int] | None
    mode: str | None = None


def nvidia_smi(*arguments: str) -> Answer:
    """Run nvidia-smi, the driver's program."""
    return _ask("nvidia-smi", *arguments)


def ask_driver() -> Answer:
    """Query `FIELDS`, a line for each GPU; or the driver's error."""
    return nvidia_smi(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")


def count_on_bus(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """NVIDIA's GPUs on the PCI bus, whether or not there is a driver (Linux)."""
    count = 0
    for device in devices.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        count += vendor == NVIDIA and kind.startswith(DISPLAY)
    return count


def ask_cuda() -> Cuda:
    """The GPUs that torch finds in a process of its own."""
    answer = _ask(sys.executable, "-m", __name__, patience=3 * PATIENCE)  # it imports torch
    if answer.code != 0:
        last = (answer.text.strip().splitlines() or [f"the process ended with {answer.code}"])[-1]
        return Cuda([], last)
    return Cuda(**json.loads(answer.text.splitlines()[-1]))


def gpus_of(cuda: Cuda, driver: Answer, topology: str) -> list[Gpu]:
    """The GPUs as CUDA, the driver's program and its `topo -m` describe them, matched by their UUIDs."""
    known = parse_query(driver.text) if driver.code == 0 else {}
    ways = parse_topology(topology)
    names = [f"GPU{known[gpu['uuid']]['index']}" if gpu["uuid"] in known else None for gpu in cuda.gpus]
    return [
        Gpu(
            gpu["name"],
            gpu["memory"],
            gpu["free"],
            tuple(gpu["capability"]),
            tuple(gpu["peers"]),
            tuple(ways.get((own, other)) if own and other else None for other in names),
            _pcie(known.get(gpu["uuid"], {})),
            known.get(gpu["uuid"], {}).get("compute_mode"),
        )
        for gpu, own in zip(cuda.gpus, names, strict=True)
    ]


def parse_query(text: str) -> dict[str, dict[str, str]]:
    """`ask_driver`'s lines as {uuid: {field: value}}."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    named = (dict(zip(FIELDS, row, strict=True)) for row in rows if len(row) == len(FIELDS))
    return {row["uuid"]: row for row in named}


def parse_topology(text: str) -> dict[tuple[str, str], str]:
    """The connections between GPUs in the matrix of `nvidia-smi topo -m`: {("GPU0", "GPU1"): "NV18"}."""
    columns: list[str] = []
    ways: dict[tuple[str, str], str] = {}
    for line in _COLOUR.sub("", text).splitlines():
        cells = line.split()
        if cells[:1] == ["GPU0"] and not columns:  # the header; "GPU NUMA ID", its last column, has no number
            columns = _DEVICE.findall(line)
        elif columns and cells and re.fullmatch(r"GPU\d+", cells[0]):
            ways |= {(cells[0], other): way for other, way in zip(columns, cells[1:], strict=False)}
    return {(own, other): way for (own, other), way in ways.items() if own != other and other.startswith("GPU")}


def _pcie(row: Mapping[str, str]) -> tuple[int, int] | None:
    generation, lanes = (row.get(f"pcie.link.{name}.max", "") for name in ("gen", "width"))
    return (int(generation), int(lanes)) if generation.isdecimal() and lanes.isdecimal() else None


def _ask(*command: str, patience: float = PATIENCE) -> Answer:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)
    except FileNotFoundError:
        return Answer(None, "")
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"no answer within {patience:g} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        return Answer(None, f"{command[0]}: {why}")
    return Answer(done.returncode, done.stdout or done.stderr)


def _look() -> Cuda:
    """Query CUDA, in the process of its own."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter: torch was built without CUDA
        return Cuda([], str(error).strip().partition("\n")[0])
    everyone = range(torch.cuda.device_count())
    return Cuda([_describe(index, everyone) for index in everyone], None)


def _describe(index: int, everyone: range) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    try:
        free: int | None = torch.cuda.mem_get_info(index)[0]
    except RuntimeError:  # another process has exclusive use of the GPU
        free = None
    return {
        "uuid": f"GPU-{properties.uuid}",
        "name": properties.name,
        "memory": properties.total_memory,
        "free": free,
        "capability": (properties.major, properties.minor),
        "peers": [None if other == index else torch.cuda.can_device_access_peer(index, other) for other in everyone],
    }


if __name__ == "__main__":
    print(json.dumps(_look()._asdict()))
