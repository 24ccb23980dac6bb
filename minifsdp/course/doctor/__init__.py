"""The doctor: this machine's hardware, a test of its ranks, their bandwidth, and the labs that they can run.

check(...)   checks the request, looks at the machine
run(...)    checks the machine, starts the ranks, measures; writes doctor.json and bandwidth.png
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minifsdp.course.doctor import bandwidth, labs, machine, peak
from minifsdp.course.doctor.machine import Finding, Machine
from minifsdp.course.doctor.peak import Peak
from minifsdp.course.doctor.ranks import Ranks, ask_ranks
from minifsdp.instruments.launch.world import Device, World, choose_world, is_first, local_ranks
from minifsdp.instruments.system.resources import check_writable
from minifsdp.instruments.system.scratch import scratch_folder
from minifsdp.instruments.system.versions import versions
from minifsdp.instruments.system.whole_files import delivering

__all__ = ["Finding", "Progress", "Request", "check", "run"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """A request that has passed every check. `world` is None if the driver is broken and the CPU was not asked for."""

    world: World | None
    machine: Machine
    on_cpu: bool
    peak: Peak | None
    seconds: float
    out: Path


def check(
    ranks: int | None,
    device: Device,
    out: Path,
    share_gpu: bool | None = None,
    peak_rate: str | None = None,
    seconds: float = 60.0,
) -> Request:
    """Check the request, look at the machine, and make the output folder.

    Args:
        ranks: N; None: torchrun's, or one for each GPU and at least 2.
        device: "auto", "cpu" or "cuda".
        out: the folder for doctor.json and bandwidth.png.
        share_gpu: whether ranks may share a GPU; None: as MINIFSDP_SHARE_GPU says.
        peak_rate: the link's rate, such as "400GB/s", instead of the one known here.
        seconds: time limit for this and `run` together.

    Raises:
        ValueError: the request is impossible; one line that names the fault and the cure.
    """
    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks {ranks}: must be at least 1")
    given = None if peak_rate is None else peak.asked(peak_rate)
    start = time.monotonic()
    here = machine.look()
    on_cpu = machine.asked_for_cpu(device)
    driver = machine.check_driver(here, on_cpu)
    if ranks is None:
        ranks = int(os.environ.get("WORLD_SIZE") or (2 if on_cpu or share_gpu else max(2, len(here.gpus))))
    try:
        world: World | None = choose_world(ranks, device, share_gpu) if driver.ok or on_cpu else None
    except ValueError as error:
        raise ValueError(f"{error} ({driver.what})" if driver.cure else str(error)) from None
    check_writable(out)
    return Request(world, here, on_cpu, given, seconds - (time.monotonic() - start), out)


def run(
    request: Request, progress: Progress, replaced: Mapping[str, Callable[..., Any]] | None = None
) -> dict[str, Any]:
    """Check the machine, start the ranks, and write the results.

    Args:
        request: from `check`.
        progress: called with the current step, the number of steps done, and their total.
        replaced: collectives to check instead of those of `minifsdp.comm`, by name.

    Returns:
        the content of `doctor.json`, on every rank of an SPMD run; only the first writes it. "ok": nothing is broken.

    Raises:
        ValueError: a lab does not state its number of ranks.
        UndeliveredError: the output folder can no longer be written; names the folder that has the files.
    """
    here, world = request.machine, request.world
    start, known = time.monotonic(), labs.read_labs()
    findings = machine.check_machine(here, world, request.on_cpu)
    said = Ranks()
    if world is not None:
        said = ask_ranks(world, findings, request.seconds, progress, replaced)
        findings = said.findings
    measured = bandwidth.results(said.measured) if said.measured else {}
    record = {
        "format": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "ok": all(finding.ok for finding in findings),
        "seconds": time.monotonic() - start,
        "world": None if world is None else str(world),
        "ranks": 0 if world is None else world.ranks,
        "backend": None if world is None else world.backend,
        "versions": versions(machine.driver_version(here.driver)),
        "machine": machine.as_plain(here),
        "gpus": [asdict(gpu) for gpu in here.gpus],
        "findings": [asdict(finding) for finding in findings],
        "bandwidth": measured,
        "peak": (request.peak or _peak(here, world, said))._asdict(),
        "labs": [asdict(lab) | {"worlds": labs.worlds_of(lab, len(here.gpus))} for lab in known],
    }
    if is_first():
        _write(record, request.out)
    return record


def _peak(here: Machine, world: World | None, said: Ranks) -> Peak:
    """The link's peak bandwidth, if it is known."""
    if world is None or not said.measured:
        return Peak(None, "nothing was measured")
    if local_ranks(world.ranks) < world.ranks:
        return Peak(None, "the network between the machines is not known; give it with --peak")
    if world.shares_gpu:
        return Peak(None, "ranks on one GPU talk by sockets over loopback, through the host: no link to compare")
    if world.gpus:
        return peak.of_gpus(here.gpus, world.gpus)
    rate = bandwidth.copy_rate(said.measured)
    assert rate is not None
    return Peak(rate, f"{rate / peak.GB:,.3g} GB/s: a plain copy in memory, on all ranks at once, measured in this run")


def _write(record: dict[str, Any], out: Path) -> None:
    """Write `doctor.json` and `bandwidth.png`; if nothing was measured, delete an earlier run's picture."""
    measured = any(record["bandwidth"].values())
    with scratch_folder() as staging, delivering(staging, out, record):
        (staging / "doctor.json").write_text(json.dumps(record, indent=1) + "\n")
        if measured:
            from minifsdp.instruments.plots.bandwidth import bandwidth_picture

            (staging / "bandwidth.png").write_bytes(bandwidth_picture(record)._repr_png_())
    if not measured:
        (out / "bandwidth.png").unlink(missing_ok=True)
