"""Mark the answers of many learners, each in its own process tree and under resource limits.

The package, the checks and the set-up cells are those of this installation; only the cells tagged as exercises are run
from a submission. This contains accidents; it is not a sandbox (docs/teaching.md). All answers are in memory before the
first one runs, and all marks stay there until the last has run, so that no answer finds another's in a file.
"""

from __future__ import annotations

import csv
import io
import os
import secrets
import stat
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Literal, NamedTuple

from minifsdp.course.workshop.catalogue import all_labs, setup_of, stubs_of
from minifsdp.course.workshop.checking import Variant
from minifsdp.course.workshop.handed_in import Problem, Task
from minifsdp.course.workshop.process import Limits, run_check
from minifsdp.course.workshop.references import is_blank
from minifsdp.course.workshop.submission import Submission
from minifsdp.instruments.launch.world import MOST_GLOO_RANKS as MOST_RANKS
from minifsdp.instruments.launch.world import forced_device
from minifsdp.instruments.system.plain_files import read_plain
from minifsdp.instruments.system.resources import check_shell, count_fault, seed_fault

Mark = Literal["own-pass", "own-fail", "blank", "read", "timeout", "crash", "missing", "altered"]
Variants = Mapping[str, Sequence[Mapping[str, int]]]
LONGEST_REMARK = 300  # characters


class Row(NamedTuple):
    """One exercise of one submission; the columns of the table."""

    submission: str
    lab: str
    exercise: str
    state: Mark
    seconds: float
    remark: str


def mark(task: Task, variants: Variants, limits: Limits) -> Row:
    """Mark one exercise of one submission; returns a row for any submission, never raises."""
    began = time.monotonic()
    try:
        state, remark = _mark(task, variants.get(task.exercise, ()), limits)
    except Exception as error:
        state, remark = "crash", f"not marked, look at it by hand: {type(error).__name__}: {error}"
    seconds = round(time.monotonic() - began, 1)
    return Row(_name(task.submission), task.lab, task.exercise, state, seconds, _plain(remark))


def _mark(task: Task, variants: Sequence[Mapping[str, int]], limits: Limits) -> tuple[Mark, str]:
    if isinstance(task.answer, Problem):
        return task.answer
    if is_blank(task.answer, stubs_of(task.lab)[task.exercise]):
        return "blank", ""
    submission = Submission(task.exercise, setup_of(task.lab), task.answer)
    for variant in ({}, *variants):
        verdict = run_check(submission, limits, variant)
        if verdict.state != "passed":
            where = ", ".join(f"{name}={value}" for name, value in variant.items())
            text = f"with {where}: {verdict.text}" if where else verdict.text
            if verdict.state == "unchecked":  # what the answer has started may still run, or memory be short
                return "crash", f"{text}; mark the others again"
            return "own-fail" if verdict.state == "failed" else verdict.state, text
    return ("read", "the reference was read") if task.read else ("own-pass", "")


def _plain(text: str) -> str:
    """Text as one printable line that no spreadsheet evaluates as a formula."""
    line = "; ".join(part.strip() for part in text.splitlines() if part.strip())
    line = "".join(char if char.isprintable() else "?" for char in line)[:LONGEST_REMARK]
    return f"'{line}" if line.startswith(("=", "+", "-", "@")) else line


def _name(submission: str) -> str:
    """The name unchanged if it is one printable line and not a formula, else quoted so that names stay distinct."""
    return submission if _plain(submission) == submission and submission[:1] not in "'\"" else _plain(ascii(submission))


def mark_all(
    tasks: Sequence[Task], out: Path, variants: Variants, limits: Limits, show: Callable[[Row], None]
) -> list[Row]:
    """Mark all tasks, then write the table; `show` is called for each row. If interrupted, write the rows so far.

    Raises:
        ValueError: the table exists already, or a MINIFSDP_ environment variable is invalid.
        OSError: a limit of the shell is too low, or the table cannot be written; it is then printed to standard output.
    """
    forced_device()
    check_shell()
    try:
        with out.open("x") as file:
            made = os.fstat(file.fileno())
    except FileExistsError:
        raise ValueError(f"{out} already exists: name another file") from None
    rows: list[Row] = []
    try:
        for task in tasks:
            rows.append(mark(task, variants, limits))
            show(rows[-1])
    finally:
        if len(rows) < len(tasks):
            print(f"{out}: {len(rows)} of {len(tasks)} rows", file=sys.stderr)
        _write(rows, out, made)
    return rows


def _write(rows: Sequence[Row], out: Path, made: os.stat_result) -> None:
    """Write the table to a new file and rename it to `out`, even if an answer has replaced `out`.

    If it cannot be written, remove the empty file that was `made` at the start.
    """
    table = io.StringIO(newline="")
    csv.writer(table).writerows([Row._fields, *rows])
    part = out.with_name(f".{out.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("x", newline="", encoding="utf-8") as file:
            file.write(table.getvalue())
        part.chmod(stat.S_IMODE(made.st_mode))
        part.replace(out)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
            if os.path.samestat(here := out.lstat(), made) and not here.st_size:
                out.unlink()
        print(table.getvalue(), end="", flush=True)
        raise OSError(error.errno, error.strerror, str(out)) from error  # a full disk's error names no file


def read_variants(path: Path) -> dict[str, list[dict[str, int]]]:
    """Read extra check settings by exercise, such as `["5.2"]` with `variants = [{ranks = 3, seed = 7}]`.

    Raises:
        ValueError: the file is invalid; the message is one line.
        OSError: the file cannot be read.
    """
    known = [exercise for lab in all_labs() for exercise in stubs_of(lab)]
    names = [field.name for field in fields(Variant)]
    try:
        tables = tomllib.loads(read_plain(path, links=True).decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deep to read") from None
    except ValueError as error:
        said = str(error).splitlines()[0]
        if "int_max_str_digits" in said:
            said = "it has a number of some thousand digits; give numbers that fit into 64 bits"
        raise ValueError(said if said.startswith(str(path)) else f"{path}: {said}") from None
    for exercise, table in tables.items():
        if exercise not in known:
            raise ValueError(f"{path}: there is no exercise {exercise!r}; there are {', '.join(known)}")
        variants = table.get("variants") if isinstance(table, dict) and list(table) == ["variants"] else None
        if not isinstance(variants, list) or not all(isinstance(each, dict) for each in variants):
            raise ValueError(
                f'{path}: under ["{exercise}"] write variants = [{{ranks = 3, seed = 7}}] and nothing else'
            )
        for name, value in (item for each in variants for item in each.items()):
            if name not in names:
                raise ValueError(f"{path}: {exercise} has a field {name!r}; there are {', '.join(names)}")
            if fault := _fault(name, value):
                raise ValueError(f"{path}: {exercise} has {name} = {_shown(value)}: {fault}")
    return {exercise: table["variants"] for exercise, table in tables.items()}


def _fault(name: str, value: object) -> str:
    """The fault of a variant's number, in the command line's words; "" if it is valid."""
    if type(value) is not int:
        return "must be a whole number"
    return seed_fault(value) if name == "seed" else count_fault(name, value, MOST_RANKS if name == "ranks" else None)


def _shown(value: object) -> str:
    """A value in at most 43 characters; Python refuses to print integers of several thousand digits."""
    if type(value) is int and value.bit_length() > 128:
        return f"a number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
