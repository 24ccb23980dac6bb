"""Jobs of torchrun on three axes whose ranks are killed at random: each restarts by itself, to the bits of no kill."""

from __future__ import annotations

import json
import random
import time
from contextlib import ExitStack
from typing import Any

import psutil

from tools.launchers.places import UnavailableError
from tools.launchers.running import MARK, Place, end_all, given, last_line, namespaces, notes_of, prepare, start
from tools.launchers.ways import Way

NAME = "torchrun, restarted"
RANKS, STEPS = 8, 300
RECIPE = "--pp 2 --dp 2 --zero 1 --batch 16"  # beside the tensor parallelism of all launchers' ranks
SAVED = f"{RECIPE} --checkpoint OUT/kept --every 20 --auto-resume"
SECONDS = 900  # for a job


def restarted(kills: int, place: Place, versions: dict[str, str], seed: int = 0) -> dict[str, Any]:
    """The row of a torchrun that restarts, after that many kills of any rank, in as many jobs as it takes.

    A kill comes at any time of an attempt, or within two seconds after its first checkpoint.

    Returns:
        a row as of `run`, with "kills"; "jobs"; "begun_at": the step at which the last attempt of each job began;
        "bits_equal": whether all jobs have the losses of a run that nobody killed.
    """
    line = f"torchrun --standalone --nproc-per-node {RANKS} --max-restarts {kills + 5} -m minifsdp TRAIN"
    way = Way(NAME, "torch", line)
    row: dict[str, Any] = {"name": way.name, "version": versions["torch"]}
    row["command"] = line.replace("TRAIN", f"TRAIN {SAVED}")
    chance, done, begun, equal = random.Random(seed), 0, [], []
    try:
        expected = _job(Way(NAME, "minifsdp", f"minifsdp TRAIN --ranks {RANKS}"), place, 0, chance, RECIPE)[1]["losses"]
        while done < kills:
            hit, record = _job(way, place, kills - done, chance, SAVED)
            done += hit
            begun.append(record["begun_at_step"])
            equal.append(record["losses"] == expected)
    except UnavailableError as error:
        return row | {"state": "not run", "reason": f"after {done} kills: {error}"}
    figures = {"kills": done, "jobs": len(begun), "begun_at": begun, "bits_equal": all(equal), "steps": STEPS}
    about = given(place, place.environ() | {"OMP_NUM_THREADS": "1"})
    return row | {"state": "ran", "hosts": "1 host", **figures, "last_line": last_line(place), **about}


def _job(way: Way, place: Place, kills: int, chance: random.Random, options: str) -> tuple[int, dict[str, Any]]:
    """The number of kills in a job until it ended, at most `kills`, and its train.json."""
    environ, hit, deadline = prepare(place), 0, time.monotonic() + SECONDS
    with ExitStack() as stack:
        inside = namespaces(way, place, stack)
        job = start(way, place, environ | {"OMP_NUM_THREADS": "1"}, inside[0], options=f"--steps {STEPS} {options}")
        try:
            while job.poll() is None:
                if time.monotonic() > deadline:
                    raise UnavailableError(f"it did not end within {SECONDS} s: {last_line(place)}")
                if hit < kills and len(ranks := _living(place)) == RANKS:
                    if hit % 3:  # two of three attempts save first
                        _await_save(place, ranks, deadline)
                    time.sleep((2 if hit % 3 else 8) * chance.random())
                    hit += _kill(chance.choice(ranks))
                    psutil.wait_procs(ranks, timeout=max(0.0, deadline - time.monotonic()))
                time.sleep(0.1)
        finally:
            end_all(environ[MARK])
    if job.returncode:
        raise UnavailableError(f"exit code {job.returncode}: {last_line(place)}")
    return hit, json.loads((place.out / "train.json").read_text())


def _living(place: Place) -> list[psutil.Process]:
    """The processes of the ranks that live."""
    return [psutil.Process(note["pid"]) for note in notes_of(place) if psutil.pid_exists(note["pid"])]


def _kill(rank: psutil.Process) -> int:
    """SIGKILL; returns how many processes it ended."""
    try:
        rank.kill()
    except psutil.Error:
        return 0
    return 1


def _await_save(place: Place, ranks: list[psutil.Process], deadline: float) -> None:
    """Wait until an attempt has made a checkpoint, or ended."""
    before = {path.name for path in place.out.glob("kept/step-*")}
    while {path.name for path in place.out.glob("kept/step-*")} == before and time.monotonic() < deadline:
        if not all(rank.is_running() for rank in ranks):
            return
        time.sleep(0.01)
