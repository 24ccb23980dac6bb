"""Failures that may be no fault of the answer: processes killed from outside, and limits of the shell."""

from __future__ import annotations

import re
import resource
from contextlib import suppress
from pathlib import Path

from minifsdp.course.workshop.verdict import Verdict

_KILLED = re.compile(
    r"^(?P<who>rank \d+|its process|its supervisor)(?: failed:| was)? killed by (?P<how>SIG(?:KILL|TERM|INT|HUP|QUIT))"
    r"|(?P<server>the server of the ranks) was killed"
)
_KILLS = re.compile(
    r"\b(?:kill|killpg|\w*signal|getppid|ctypes|exec\w*|eval|getattr)\b"
)  # an answer without these words ends no process
_SCARCE = (  # what an error says, the limit that may be behind it, and from which value on it is not
    ("Too many open files", "n", resource.RLIMIT_NOFILE, 256),
    ("[Cc]an(?:no|'|)t allocate memory|MemoryError|bad_alloc", "v", resource.RLIMIT_AS, 2**50),
    ("can't start new thread|Resource temporarily unavailable", "u", resource.RLIMIT_NPROC, 4096),
    ("killed by SIG(?:XCPU|KILL)", "t", resource.RLIMIT_CPU, 2**50),
)


def kills_so_far() -> int:
    """The number of processes that the system has ended because memory ran out; 0 where it does not tell."""
    with suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def unless_from_outside(verdict: Verdict, cell: str, kills: int) -> Verdict:
    """A failure that may come from outside of the answer as "unchecked", with what may have happened in one line.

    Args:
        verdict: the check's.
        cell: the answer.
        kills: `kills_so_far()` before the check.
    """
    if verdict.state not in ("failed", "crash"):
        return verdict
    first, *rest = verdict.text.splitlines() or [""]
    for said, flag, number, ample in _SCARCE:
        limit = resource.getrlimit(number)[0]
        if re.search(said, first) and limit != resource.RLIM_INFINITY and limit < ample:
            unit = " KiB" if flag == "v" else " s" if flag == "t" else ""
            allowed = f"{limit // 1024 if flag == 'v' else limit:,}{unit}"
            why = f"the answer takes too much, or this shell allows too little: {allowed}, see `ulimit -{flag}`"
            return Verdict("unchecked", "\n".join([f"{first}: {why}", *rest]))
    if killed := _KILLED.search(first):
        how = f" ({killed['how']})" if killed["how"] else ""
        return Verdict("unchecked", _killed(killed["who"] or killed["server"], how, cell, kills))
    return verdict


def _killed(who: str, how: str, cell: str, kills: int) -> str:
    if kills_so_far() > kills:
        return (
            f"{who} was killed{how} because the machine ran out of memory: the answer takes too much, or other "
            "programs do: close them and check again"
        )
    if _KILLS.search(cell):
        return f"{who} was killed{how}, by the answer itself or from outside: look for it in the answer, or check again"
    return f"{who} was killed from outside{how}: check again"
