"""Records of what has run on GPUs: read and checked, for the table of docs/gpu.md and for the labs.

One file per kind of machine, `benchmarks/records/<gpu>-x<count>.json`, its pictures in a folder of the same name, both
written by `make gpu-check`. A record claims figures only for what has passed; each of its parts says when it ran, from
which commit and with which versions. The labs show their pictures by `minifsdp.instruments.watch.records`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn

from minifsdp.instruments.system.plain_files import read_plain
from tools import ROOT

FORMAT = 1
PARTS = ("doctor", "tests", "ladder", "step", "labs")
RECORDS = ROOT / "benchmarks" / "records"

_STATES = ("passed", "failed", "skipped")
_OUTCOME = {"name", "outcome", "seconds", "reason"}  # what is said of each test, whether or not all have passed

State = Literal["passed", "failed", "skipped"]


class RecordError(ValueError):
    """A record that is none: one line with the file, the place in it and what is wrong there."""


@dataclass(frozen=True)
class Part:
    """What came of one part of `make gpu-check`.

    Attributes:
        state: "skipped" means that nothing ran.
        reason: one line that says why the part has not passed; None if it has.
        seconds: by the clock.
        when: the start, as ISO 8601 in UTC.
        commit: of the source that ran; ends in "-dirty" if files had been changed since.
        versions: of python, torch, cuda, nccl, driver, minifsdp; None where there is none.
        command: with which the part can be repeated in a checkout.
        results: what the part measured, by the part's own names; of one that has not passed only `tests`, the outcome
            of each.
        plots: names of PNGs in the record's folder.
    """

    state: State
    reason: str | None
    seconds: float
    when: str
    commit: str
    versions: dict[str, str | None]
    command: str
    results: dict[str, Any]
    plots: list[str]

    @property
    def world(self) -> str:
        """The line with which the part said where its ranks ran; "" if it has none."""
        return str(self.results.get("world", ""))


@dataclass(frozen=True)
class Record:
    """All parts that have run on one kind of machine.

    Attributes:
        gpu: name, as the driver gives it.
        count: of GPUs.
        versions: as in `Part`, of the last run.
        parts: by name, in the order of `PARTS`; a part that never ran is not there.
    """

    gpu: str
    count: int
    versions: dict[str, str | None]
    parts: dict[str, Part]

    @property
    def name(self) -> str:
        """Of its file and of its folder of pictures: "nvidia-h200-x1"."""
        return f"{re.sub(r'[^a-z0-9]+', '-', self.gpu.lower()).strip('-')}-x{self.count}"

    def passed(self, part: str) -> Part | None:
        """A part, if it has passed."""
        found = self.parts.get(part)
        return found if found and found.state == "passed" else None

    def dumps(self) -> str:
        """The text of its file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n"


def find_records(folder: Path = RECORDS) -> list[Record]:
    """All records of a folder, by name; none if there is no such folder.

    Raises:
        RecordError: one of them is no record.
    """
    return [read_record(path) for path in sorted(folder.glob("*.json"))]


def read_record(path: Path) -> Record:
    """One record, with its pictures beside it.

    Raises:
        RecordError: it is none, or one that claims what it may not.
    """
    try:
        record = parse_record(read_plain(path, links=True).decode())
        if record.name != path.stem:
            _refuse(f"it is of {record.gpu} x {record.count}, so its name has to be {record.name}.json")
        for part, plot in ((part, plot) for part, each in record.parts.items() for plot in each.plots):
            if not (path.parent / record.name / plot).is_file():
                _refuse(f"parts.{part}: the picture {record.name}/{plot} is not there")
    except (ValueError, OSError, RecursionError) as error:
        raise RecordError(f"{path}: {' '.join(str(error).split())}") from error
    return record


def parse_record(text: str) -> Record:
    """The record that a file's text is.

    Raises:
        ValueError: it is none; names the place and what is wrong there.
    """
    content = json.loads(text, parse_constant=lambda word: _refuse(f"a figure is {word}"))
    kinds = {"format": int, "gpu": str, "count": int, "versions": dict, "parts": dict}
    _check_fields(content, kinds, "the record")
    if content["format"] != FORMAT:
        _refuse(f"format is {content['format']}, and this is read: {FORMAT}")
    if content["count"] < 1 or not content["gpu"].strip():
        _refuse("it names no GPU")
    _check_versions(content["versions"], "versions")
    if unknown := [name for name in content["parts"] if name not in PARTS]:
        _refuse(f"parts.{unknown[0]} is none of {', '.join(PARTS)}")
    for name, part in content["parts"].items():
        _check_part(part, f"parts.{name}")
    parts = {name: Part(**content["parts"][name]) for name in PARTS if name in content["parts"]}
    return Record(content["gpu"], content["count"], content["versions"], parts)


def _check_part(part: Any, at: str) -> None:
    text, number = str, (int, float)
    kinds: list[Any] = [text, (str, NoneType), number, text, text, dict, text, dict, list]
    _check_fields(part, dict(zip((field.name for field in fields(Part)), kinds, strict=True)), at)
    if part["state"] not in _STATES:
        _refuse(f"{at}.state is {part['state']!r}, not one of {', '.join(_STATES)}")
    passed, reason = part["state"] == "passed", part["reason"]
    if passed != (reason is None) or (reason is not None and len(reason.splitlines()) != 1):
        _refuse(f"{at}.reason has to be {'null' if passed else 'one line'}, for the part has {part['state']}")
    try:
        datetime.fromisoformat(part["when"])
    except ValueError:
        _refuse(f"{at}.when is {part['when']!r}, which is no time")
    _check_versions(part["versions"], f"{at}.versions")
    for plot in part["plots"]:
        if not isinstance(plot, str) or Path(plot).name != plot or not plot.endswith(".png"):
            _refuse(f"{at}.plots has {plot!r}, which is no name of a PNG")
    _check_claims(part, at)


def _check_claims(part: Mapping[str, Any], at: str) -> None:
    """Figures and pictures are of what has passed; a part has not if one of its tests has failed."""
    tests = part["results"].get("tests", [])
    if not isinstance(tests, list) or not all(isinstance(test, dict) and {*test} == _OUTCOME for test in tests):
        _refuse(f"{at}.results.tests has to be a list of {', '.join(sorted(_OUTCOME))}")
    if part["state"] == "passed":
        if failed := [test["name"] for test in tests if test["outcome"] == "failed"]:
            _refuse(f"{at} is called passed, but {failed[0]} has failed")
    elif claims := [key for key in part["results"] if key != "tests"]:
        _refuse(f"{at} has {part['state']} and yet claims figures: {', '.join(claims)}")
    elif part["plots"]:
        _refuse(f"{at} has {part['state']} and yet shows {part['plots'][0]}")


def _check_fields(content: Any, kinds: Mapping[str, Any], at: str) -> None:
    if not isinstance(content, dict):
        _refuse(f"{at} is no table of fields")
    if missing := [name for name in kinds if name not in content]:
        _refuse(f"{at} has no field {missing[0]!r}")
    if unknown := [name for name in content if name not in kinds]:
        _refuse(f"{at} has an unknown field {unknown[0]!r}")
    for name, kind in kinds.items():
        if not isinstance(content[name], kind) or isinstance(content[name], bool):
            _refuse(f"{at}: {name} is {content[name]!r}")


def _check_versions(versions: Mapping[str, Any], at: str) -> None:
    if wrong := [name for name, version in versions.items() if not isinstance(version, str | None)]:
        _refuse(f"{at}.{wrong[0]} is {versions[wrong[0]]!r}, neither text nor null")


def _refuse(what: str) -> NoReturn:
    raise ValueError(what)
