"""The table of worlds in docs/gpu.md: what has run on GPUs, from the records and from nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from string import ascii_uppercase
from typing import Any

from tools.records import Part, Record

NOT_RUN, NONE = "not run", "none"
NO_RECORDS = "Nothing has run on a GPU yet: there are no records."
_SHARE = "sharing|on one GPU"
WORLDS = {  # name in the table -> what a line that names such a world has in it
    "NCCL, one rank per GPU": "a GPU each",
    "NCCL, several ranks on one GPU": _SHARE,
    "fake: rank 0 alone on a GPU": "alone",
}
TORCHS = ("torch-ddp", "torch-fsdp1", "torch-fsdp2")
RUNGS = (  # of minifsdp.course.ladder.rungs, which needs torch
    "ddp-naive", "ddp-bucketed", "ddp", "zero1", "zero2",
    "fsdp-grad-op", "fsdp", "fsdp-overlap", "fsdp-prefetch", "fsdp-limit",
    "fsdp2", "fsdp2-hold",
)  # fmt: skip

COLUMNS = (
    "ms: median time of a step; model: the device model's time; MiB: allocated memory at the peak of a step; hidden: "
    "communication concurrent with computation."
)
SHARED_TIMES = (
    "Ranks that share a GPU compete for it and send over loopback: such times compare rows and say nothing more."
)


def worlds_table(records: Sequence[Record]) -> str:
    """Markdown: which worlds have run, how long a step took, and what has not passed.

    Args:
        records: as `find_records` gives them.
    """
    if not records:
        return NO_RECORDS
    notes = "\n".join(f"* {note}" for note in _notes(records))
    return "\n\n".join(filter(None, [_worlds(records), _steps(records), notes]))


def _worlds(records: Sequence[Record]) -> str:
    """A row per world and record in which it ran; a collective hidden: (compute + communication - both) / shorter."""
    rows = []
    for world, word in WORLDS.items():
        ran = [row for record in records if (row := _world_row(record, word))]
        rows += [[world, *row] for row in ran or [[NOT_RUN] * 6]]
    heading = ["world", "GPUs", "ranks", "torch", "NCCL", "overlap: a delayed collective hidden under compute"]
    return markdown([*heading, "allocator retries without limiter, with it"], rows)


def _world_row(record: Record, word: str) -> list[str] | None:
    """GPUs, ranks, torch, NCCL, overlap, retries; None if nothing of this record ran in such a world."""
    ran = [(part, world) for part, world in _ran(record) if re.search(word, world)]
    if not ran:
        return None
    figures = _figures(record, word)
    ranks = ", ".join(dict.fromkeys(_ranks(world) for _, world in ran))
    versions = [", ".join(dict.fromkeys(str(part.versions.get(of)) for part, _ in ran)) for of in ("torch", "nccl")]
    return [_name(record), ranks, *versions, _hidden(figures), _retries(figures)]


def _ran(record: Record) -> Iterator[tuple[Part, str]]:
    """Every world that a passed part says it ran in."""
    for part in (part for part in record.parts.values() if part.state == "passed"):
        if part.world:
            yield part, _short(part.world)
        for figures in part.results.get("figures", {}).values():
            if "world" in figures:
                yield part, _short(figures["world"])


def _figures(record: Record, word: str) -> dict[str, Any]:
    """What tests have recorded in such a world; `multigpu.` before a name is for the report's reader."""
    found: dict[str, Any] = {}
    if tests := record.passed("tests"):
        for figures in tests.results["figures"].values():
            if re.search(word, _short(figures.get("world", ""))):
                found |= {name.removeprefix("multigpu."): value for name, value in figures.items()}
    return found


def _short(world: str) -> str:
    """A world without the reason for its choice."""
    return str(world).split(": ")[0]


def _ranks(world: str) -> str:
    """N of "2 ranks over NCCL, ..."; "rank 0" of "rank 0 of 2 on cuda, ...", which is one process."""
    first, second, *_ = world.split()
    return first if first.isdecimal() else f"{first} {second}"


def _hidden(figures: Mapping[str, Any]) -> str:
    try:
        compute, communication, both = (figures[f"overlap.{name}_ms"] for name in ("compute", "communication", "both"))
    except KeyError:
        return NOT_RUN
    return f"{(compute + communication - both) / min(compute, communication):.0%}"


def _retries(figures: Mapping[str, Any]) -> str:
    without, with_it = (figures.get(f"limiter.retries_{which}") for which in ("without", "with"))
    return NOT_RUN if without is None or with_it is None else f"{without}, {with_it}"


def _steps(records: Sequence[Record]) -> str:
    """A row per way to train that has run, columns per run, which a letter names; "" if none has.

    Of a step benchmark: times, the device model's and peaks; of a ladder: times, and the communication under compute.
    A column without a single figure is left out.
    """
    columns: dict[str, dict[str, str]] = {}
    for (_, _, results), letter in zip(_timed(records), ascii_uppercase, strict=False):
        if "rungs" in results:
            rows = results["rungs"]
            columns[f"{letter}: ms"] = {row["name"]: _ms(median(row["step_seconds"])) for row in rows}
            columns[f"{letter}: hidden"] = {row["name"]: _share(row["overlap"]) for row in rows}
        else:
            rows = results["contestants"]
            columns[f"{letter}: ms"] = {row["name"]: _ms(row["median"]) for row in rows}
            columns[f"{letter}: model, ms"] = {row["name"]: _ms(row["model_seconds"]) for row in rows}
            columns[f"{letter}: MiB"] = {row["name"]: _mib(row.get("bytes")) for row in rows}
    columns = {heading: column for heading, column in columns.items() if set(column.values()) != {NONE}}
    names = [name for name in (*TORCHS, *RUNGS) if any(name in column for column in columns.values())]
    rows = [[f"`{name}`", *(column.get(name, NOT_RUN) for column in columns.values())] for name in names]
    return markdown(["one training step", *columns], rows) if rows else ""


def _timed(records: Sequence[Record]) -> Iterator[tuple[Record, str, dict[str, Any]]]:
    """Every run with times, and its command: step benchmarks (on all ranks, on one alone) and ladders."""
    for record, results in _parts(records, "step"):
        for run in (results, results.get("alone")):
            if run:
                yield record, "bench", run
    for record, results in _parts(records, "ladder"):
        yield record, "ladder", results


def _parts(records: Sequence[Record], name: str) -> Iterator[tuple[Record, dict[str, Any]]]:
    """The results of a part, of each record in which it has passed."""
    for record in records:
        if part := record.passed(name):
            yield record, part.results


def _ms(seconds: float | None) -> str:
    return NONE if seconds is None else f"{1e3 * seconds:.3g}"


def _mib(peaks: Mapping[str, int] | None) -> str:
    return f"{peaks['allocated_peak'] / 2**20:.0f}" if peaks else NONE


def _share(overlap: float | None) -> str:
    return NONE if overlap is None else f"{overlap:.0%}"


def _notes(records: Sequence[Record]) -> Iterator[str]:
    timed = list(_timed(records))
    for (record, command, run), letter in zip(timed, ascii_uppercase, strict=False):
        model = f"; model: {run['model_says']}" if "model_says" in run else ""
        yield f"{letter}: `minifsdp {command}`, {_name(record)}, {_short(run['world'])}{model}."
    if timed:
        yield COLUMNS
    if any(re.search(_SHARE, _short(run["world"])) for _, _, run in timed):
        yield SHARED_TIMES
    for record in records:
        name = _name(record)
        for part, each in record.parts.items():
            if each.state != "passed":
                yield f"{name}: `{part}` {each.state}: {each.reason}."


def _name(record: Record) -> str:
    return f"{record.gpu} × {record.count}"


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
