"""One launcher, run: what its ranks were given, what it printed last, and what signals do to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tools import ROOT
from tools.launchers.places import UnavailableError, hosts, slurm
from tools.launchers.ways import Way

SECONDS = 300  # for a run; torch is imported up to four times
LONG = "--steps 1000000 --checkpoint OUT/kept --every 2"  # it does not end by itself
NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "NODE_RANK", "OMP_NUM_THREADS"),
)
"""The variables of the table."""
LEFT_OUT = re.compile(r"LAUNCHER_|_$|PWD|SHLVL|SLURM_CONF|LS_COLORS|GLOO_SOCKET_IFNAME")
MARK = "LAUNCHER_MARK"


class Place(NamedTuple):
    """A folder of a run, the environment's `bin`, and whether there can be network namespaces."""

    folder: Path
    bin: Path
    divided: bool

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def environ(self) -> dict[str, str]:
        """The variables of a run; none of a launcher around this one, and none that sets threads."""
        kept = {name: value for name, value in os.environ.items() if not re.match(r"(OMP_|SLURM_|RANK$|WORLD_)", name)}
        path = os.pathsep.join([str(self.bin), kept["PATH"]])
        ours = {"PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent / "notes")])}
        quiet = {"HOME": str(self.folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(self.folder)}
        return kept | ours | quiet | {"LAUNCHER_NOTES": str(self.notes), MARK: uuid.uuid4().hex}


def run(way: Way, place: Place, versions: dict[str, str]) -> dict[str, Any]:
    """A row of the record."""
    row: dict[str, Any] = {"name": way.name, "version": versions.get(way.package), "command": way.command}
    try:
        row |= _run_to_its_end(way, place)
        for name, number in (("ctrl_c", signal.SIGINT), ("sigterm", signal.SIGTERM)) if way.signals else ():
            row[name] = _signalled(way, place, number)
    except UnavailableError as error:
        row |= {"state": "not run", "reason": str(error)}
    return row


def _run_to_its_end(way: Way, place: Place) -> dict[str, Any]:
    environ = prepare(place)
    with ExitStack() as stack:
        inside = namespaces(way, place, stack)
        if way.cluster:
            environ |= stack.enter_context(slurm(place.folder / "slurm"))
        began = time.monotonic()
        jobs = [start(way, place, environ, words, host) for host, words in enumerate(inside)]
        try:
            codes = [job.wait(max(1.0, SECONDS + began - time.monotonic())) for job in jobs]
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"it did not end within {SECONDS} s: {last_line(place)}") from None
        finally:
            end_all(environ[MARK])
    if any(codes):
        raise UnavailableError(f"exit code {max(codes)}: {last_line(place)}")
    (written,) = [*place.out.glob("train.json"), *place.out.glob("ladder.json")]
    return {
        "state": "ran",
        "hosts": f"{way.hosts} network namespaces" if way.hosts > 1 and place.divided else "1 host",
        "seconds": round(time.monotonic() - began, 1),
        "losses": json.loads(written.read_text()).get("losses"),
        "last_line": last_line(place),
        **given(place, environ),
    }


def prepare(place: Place) -> dict[str, str]:
    """Empty the folder; returns the variables of a run."""
    shutil.rmtree(place.folder, ignore_errors=True)
    for folder in (place.folder, place.notes, place.out):
        folder.mkdir(parents=True)
    return place.environ()


def namespaces(way: Way, place: Place, stack: ExitStack) -> list[list[str]]:
    """For each host, the words before a command that run it there."""
    if not place.divided or way.cluster:  # slurmd needs the machine's cgroups
        return [[]] * way.hosts
    return [["ip", "netns", "exec", name] for name in stack.enter_context(hosts(way.hosts))]


def start(
    way: Way, place: Place, environ: dict[str, str], inside: list[str], host: int = 0, options: str = "--steps 4"
) -> subprocess.Popen[bytes]:
    """Start the command of a host, as a shell does: in a process group of its own."""
    two = way.hosts > 1 and place.divided
    if way.hosts > 1:
        environ = environ | {"GLOO_SOCKET_IFNAME": "eth0" if two else "lo"}
    addresses = [f"10.99.0.{each + 1}" if two else "127.0.0.1" for each in range(way.hosts)]
    line = way.line(place.out, place.bin / "minifsdp", addresses, host, options)
    with (place.folder / f"host{host}.txt").open("w") as said:
        return subprocess.Popen(
            [*inside, "bash", "-c", f"exec {line}"],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )


def last_line(place: Place) -> str:
    """Of what the run has printed: of its batch job, if it is one; else of the host that has rank 0."""
    files = [*place.out.glob("job.txt")] or [*place.folder.glob("host*.txt")]
    lines = [line for file in files for line in file.read_text().splitlines() if line.strip()]
    results = [line for line in lines if "train.json" in line] if len(files) > 1 else []
    last = re.sub(r"\x1b\[[0-9;]*m", "", (results or lines or ["nothing"])[-1]).strip()
    return last.replace(str(place.out), "OUT").replace(str(place.folder), "FOLDER")[:300]


def notes_of(place: Place) -> list[dict[str, Any]]:
    """The notes of the ranks, or of the one process that starts them itself, in order of rank."""
    notes = [json.loads(path.read_text()) for path in place.notes.glob("*.json")]
    notes = [note for note in notes if "-c" not in note["argv"][1:3]]  # not the server that ranks are forked from
    return sorted(notes, key=lambda note: int(note["variables"].get("RANK", note["variables"].get("LOCAL_RANK", 0))))


def given(place: Place, environ: dict[str, str]) -> dict[str, Any]:
    """What the ranks were given.

    Returns:
        "processes": how many processes the launcher started; "variables": of each name in `NAMES`, the values of all
        of these processes, absent where none has it; "others": names of other new variables; "folder" and "python":
        whether these are the launcher's.
    """
    notes = notes_of(place)
    attempts = [note["variables"].get("TORCHELASTIC_RESTART_COUNT") for note in notes]
    notes = [note for note in notes if note["variables"].get("TORCHELASTIC_RESTART_COUNT") == max(attempts, key=_count)]
    seen = [note["variables"] for note in notes]
    new = {name for variables in seen for name in variables if name not in environ and not LEFT_OUT.match(name)}
    return {
        "processes": len(notes),
        "variables": {name: [each.get(name) for each in seen] for name in NAMES if name in new},
        "others": sorted(new - {*NAMES}),
        "folder": "as started" if {note["folder"] for note in notes} == {str(ROOT)} else "its own",
        "python": "as started" if {note["python"] for note in notes} == {str(place.bin / "python")} else "another",
    }


def _count(attempt: str | None) -> int:
    return int(attempt or 0)


def _signalled(way: Way, place: Place, number: signal.Signals) -> dict[str, Any]:
    """What comes of a signal while the ranks train: Ctrl-C goes to the process group, SIGTERM to the launcher alone.

    Returns:
        "code": the launcher's exit code; "seconds" until it ended; "left": how many processes there were 15 s later.
    """
    environ = prepare(place)
    with ExitStack() as stack:
        inside = namespaces(way, place, stack)
        job = start(way, place, environ, inside[0], options=LONG)
        try:
            deadline = time.monotonic() + SECONDS
            while not [*place.out.glob("kept/step-*")]:
                if job.poll() is not None or time.monotonic() > deadline:
                    return {"code": job.poll(), "seconds": None, "left": None}
                time.sleep(0.2)
            began = time.monotonic()
            if number is signal.SIGINT:
                os.killpg(job.pid, number)
            else:
                job.send_signal(number)
            code = job.wait(90)
            seconds = time.monotonic() - began
            left = psutil.wait_procs(marked(environ[MARK]), timeout=15)[1]
            return {"code": code, "seconds": round(seconds, 1), "left": len(left)}
        except subprocess.TimeoutExpired:
            return {"code": None, "seconds": None, "left": len(marked(environ[MARK]))}
        finally:
            end_all(environ[MARK])


def marked(mark: str) -> list[psutil.Process]:
    """The processes of a run, which carry its mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def end_all(mark: str) -> None:
    """End every process of a run."""
    for process in marked(mark):
        try:
            process.kill()
        except psutil.Error:
            continue
