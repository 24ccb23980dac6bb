"""Runs the parts one after the other and puts each on record as soon as it is done."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minifsdp.instruments.system.resources import check_writable
from tools import ROOT
from tools.gpu_check.junit import count
from tools.gpu_check.machine import Machine, commit, find_gpus
from tools.gpu_check.parts import PARTS, UNREADABLE, Ranks, ranks_for
from tools.gpu_check.process import Ended, run_limited
from tools.records import PARTS as ORDER
from tools.records import Part as Recorded
from tools.records import Record, parse_record, read_record

LIMIT = 520.0  # seconds for a part; with what it takes to end it, still under nine minutes
FILES = Path("results", "gpu-check")  # under the checkout: logs, traces and all else that the parts write

Told = Callable[[str, Recorded | None], None]


@dataclass(frozen=True)
class Request:
    """A check that can start.

    Attributes:
        root: the checkout; the parts run there.
        path: of the record.
        names: of the parts, in their order.
    """

    root: Path
    machine: Machine
    commit: str
    ranks: Ranks
    names: tuple[str, ...]
    path: Path


def prepare(names: Sequence[str], out: Path | None, share: bool | None) -> Request:
    """Check what can be checked before the first part starts.

    Args:
        names: of the parts; empty for all.
        out: the folder of the record; None for the checkout's `benchmarks/records`.
        share: as `parts.ranks_for` takes it.

    Raises:
        NoGpuError: there is no GPU.
        ValueError: the request cannot be met, or there is a record that cannot be read.
    """
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"--part {unknown[0]}: the parts are {', '.join(PARTS)}")
    if os.environ.get("MINIFSDP_DEVICE") == "cpu":
        raise ValueError("MINIFSDP_DEVICE=cpu keeps the parts from the GPU: unset it")
    if "RANK" in os.environ:
        raise ValueError("gpu-check starts its ranks itself: run it once, not under torchrun (unset RANK)")
    machine = find_gpus()
    folder = out or ROOT / "benchmarks" / "records"
    check_writable(folder)
    check_writable(ROOT / FILES, "the folder")
    blank = Record(machine.gpu, machine.count, machine.versions, {})
    path = folder.resolve() / f"{blank.name}.json"
    if path.exists():
        read_record(path)
    chosen = tuple(name for name in PARTS if name in names or not names)
    return Request(ROOT, machine, commit(ROOT), ranks_for(machine.count, share), chosen, path)


def gpu_check(request: Request, tell: Told = lambda name, done: None, limit: float = LIMIT) -> dict[str, Recorded]:
    """Run the parts; each is on record when the next one starts.

    Args:
        request: what to run.
        tell: called with a part's name and None when it starts, and with what came of it when it is on record.
        limit: seconds for each part.

    Returns:
        the parts that have run, by name.
    """
    done = {}
    for name in request.names:
        tell(name, None)
        done[name], pictures = _run(request, name, limit)
        _put(request, name, done[name], pictures)
        tell(name, done[name])
    return done


def _run(request: Request, name: str, limit: float) -> tuple[Recorded, list[Path]]:
    """One part, and its pictures where it has left them."""
    part = PARTS[name]
    files = request.root / FILES / name
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    commands = part.commands(replace(request.ranks, link=_link(request)), FILES / name)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    said = " && ".join(shlex.join(["python", *command]) for command in commands)
    result = Recorded("skipped", None, 0.0, now, request.commit, request.machine.versions, said, {}, [])
    if part.missing:
        return replace(result, reason=f"not installed here: {', '.join(part.missing)}"), []
    ended = _run_all(request, name, commands, limit)
    result = replace(result, seconds=round(ended.seconds, 1))
    try:
        results, unread = _relative(part.read(files), request.root), None
    except UNREADABLE as error:
        results, unread = {}, f"it left no results: {type(error).__name__}: {error}"
    state, reason = _verdict(ended, results, unread, limit)
    if state != "passed":
        results = {key: value for key, value in results.items() if key == "tests"}
        reason = " ".join(_relative(reason, request.root).split())
        return replace(result, state=state, reason=reason, results=results), []
    pictures = sorted(files.rglob("*.png"))
    names = ["-".join([name, *picture.relative_to(files).parts]) for picture in pictures]
    return replace(result, state="passed", results=results, plots=names), pictures


def _relative(said: Any, root: Path) -> Any:
    """What was said, with files of the checkout called by their place in it."""
    return json.loads(json.dumps(said).replace(json.dumps(f"{root}{os.sep}")[1:-1], ""))


def _run_all(request: Request, name: str, commands: Sequence[Sequence[str]], limit: float) -> Ended:
    """One after the other, as long as they succeed; the limit is for all of them."""
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, [str(request.root), os.environ.get("PYTHONPATH")]))}
    if request.ranks.shared:
        variables["MINIFSDP_SHARE_GPU"] = "1"
    log = request.root / FILES / name / "output.log"
    ended = Ended(0, 0.0, "")
    for command in commands:
        before = ended.seconds
        ended = run_limited(command, f"gpu-check {name}", limit - before, log, request.root, variables)
        ended = ended._replace(seconds=before + ended.seconds)
        if ended.code != 0:
            break
    return ended


def _link(request: Request) -> str | None:
    """What the doctor has measured between as many ranks, if that is on record."""
    doctor = read_record(request.path).passed("doctor") if request.path.exists() else None
    return doctor.results.get("link") if doctor and doctor.results.get("ranks") == request.ranks.count else None


def _verdict(ended: Ended, results: Mapping[str, Any], unread: str | None, limit: float) -> tuple[Any, str]:
    """State and, if it is not "passed", reason."""
    if ended.code is None:
        return "failed", f"took longer than {limit:g} s"
    tests = results.get("tests", [])
    if failed := [test["name"] for test in tests if test["outcome"] == "failed"]:
        return "failed", f"{len(failed)} of {len(tests)} failed: {', '.join(failed[:3])}{', ...' * (len(failed) > 3)}"
    if ended.code:
        how = f"ended by signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
        return "failed", f"{how}: {ended.last}"
    if unread:
        return "failed", unread
    if tests and not count(tests)["passed"]:
        return "skipped", f"all {len(tests)} skipped: {tests[0]['reason']}"
    return "passed", ""


def _put(request: Request, name: str, part: Recorded, pictures: Sequence[Path]) -> None:
    """Put a part into the record, in the place of what it was before; the rest of the record stays."""
    machine = request.machine
    before = read_record(request.path).parts if request.path.exists() else {}
    parts = {**before, name: part}
    ordered = {each: parts[each] for each in ORDER if each in parts}
    text = Record(machine.gpu, machine.count, machine.versions, ordered).dumps()
    parse_record(text)  # what could not be read again is not written
    folder = request.path.with_suffix("")
    if pictures:
        folder.mkdir(exist_ok=True)
    for picture, plot in zip(pictures, part.plots, strict=True):
        _replace(folder / plot, picture.read_bytes())
    _replace(request.path, text.encode())
    for old in before[name].plots if name in before else []:
        if old not in part.plots:
            (folder / old).unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """A file that is whole whenever one looks."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(content)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)
