"""Checks of a command's settings and of its needs on this machine, before anything starts."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

ADAMW_BYTES = 12  # per parameter and between two steps: the parameter and two moments, in float32
MOST = {"layers": 10_000, "width": 2**20}  # a block of a model is a Python object
MOST_OF_OTHERS = 10**8

LEAST_OF_SHELL = (  # of one process: all labs' checks pass, on a CPU, with 40 open files and 2,000 MiB
    ("n", resource.RLIMIT_NOFILE, 64, "open files", 1, "1024"),
    ("v", resource.RLIMIT_AS, 2**31, "KiB of address space", 1024, "unlimited"),
)


def check_shell() -> None:
    """Check the limits that this process has from its shell, before ranks or checks start.

    Raises:
        OSError: one is too low.
    """
    for flag, number, least, what, unit, enough in LEAST_OF_SHELL:
        limit, most = resource.getrlimit(number)
        if limit != resource.RLIM_INFINITY and limit < least:
            where = " in a new shell" if most != resource.RLIM_INFINITY and most < 16 * least else ""
            raise OSError(
                f"this shell allows {limit // unit:,} {what}, and ranks need {least // unit:,}: "
                f"`ulimit -{flag} {enough}`{where}"
            )


def check_writable(folder: Path, option: str = "--out") -> None:
    """Make the folder that `option` names.

    Raises:
        ValueError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} {folder} cannot be written ({error.strerror}): name a folder that you may write to"
        ) from error


def check_writable_file(path: Path, option: str = "--out") -> None:
    """Make the folder of the file that `option` names, which may be there already.

    Raises:
        ValueError: it is a folder, or cannot be written.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: name a file")
    check_writable(path.parent, option)


def check_names(option: str, names: Sequence[str], known: Collection[str]) -> None:
    """Check the names given to `option`.

    Raises:
        ValueError: it names nothing, something twice, or something that is not `known`.
    """
    there = ", ".join(known)
    if not names:
        raise ValueError(f"{option} is empty; there are {there}")
    for place, name in enumerate(names):
        if name not in known:
            raise ValueError(f"{option}: there is no {name!r}; there are {there}")
        if name in names[:place]:
            raise ValueError(f"{option} names {name} twice: once is enough")


def count_fault(name: str, given: int, most: int | None = None) -> str:
    """The fault of a count; "" if it has none."""
    most = MOST.get(name, MOST_OF_OTHERS) if most is None else most
    if 1 <= given <= most:
        return ""
    return "must be at least 1" if given < 1 else f"must be at most {most:,}"


def seed_fault(given: int) -> str:
    """The fault of a seed; "" if it has none."""
    return "" if -(2**63) <= given < 2**63 else "must fit into 64 bits"


def check_seed(given: int) -> None:
    """Check the value of --seed.

    Raises:
        ValueError: torch does not accept it.
    """
    if fault := seed_fault(given):
        raise ValueError(f"--seed {given}: {fault}")


def check_counts(settings: Any, names: Iterable[str]) -> None:
    """Check attributes of `settings` that are counts, each under the option of its name; None is not checked.

    Raises:
        ValueError: one is below 1, or too large for any machine.
    """
    for name in names:
        given = getattr(settings, name)
        if given is not None and (fault := count_fault(name, given)):
            raise ValueError(f"--{name.replace('_', '-')} {given}: {fault}")


def check_host_memory(elements: int, bytes_each: int, fewer: str = "") -> None:
    """Check that the ranks fit into this machine's memory, even if everything is sharded.

    Args:
        elements: of all parameters.
        bytes_each: for one of them, over all ranks.
        fewer: further advice on saving memory, for the message.

    Raises:
        ValueError: they need more than is free.
    """
    need, have = bytes_each * elements, psutil.virtual_memory().available
    if need > have:
        raise ValueError(
            f"{elements:,} parameters take at least {need / 2**30:,.1f} GiB, and {have / 2**30:,.1f} GiB are "
            f"free here: choose a smaller --width or --layers{fewer}"
        )
