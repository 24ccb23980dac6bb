"""Exercise 10b.5: Commit."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference


class Disk(Protocol):
    """The storage for a checkpoint; the notebook defines the class."""

    def make_folder(self, path: Path) -> None: ...
    def write(self, path: Path, content: bytes) -> None: ...
    def sync(self, path: Path) -> None: ...
    def rename(self, old: Path, new: Path) -> None: ...


@reference(
    "10b.5",
    hints=(
        "What has the name must be whole, so it gets the name last: after all ranks have written, and after what they "
        "have written is on the disk. A file's bytes, the names in a folder, and a folder's new name are three things "
        "to sync.",
        "Rank 0 makes the part; barrier; each rank writes and syncs its files; barrier; rank 0 syncs the part, renames "
        "it, syncs `folder`; barrier. No `try`: what the disk raises goes up, past the barriers.",
    ),
)
def commit(
    disk: Disk, folder: Path, name: str, files: Mapping[str, bytes], rank: int, barrier: Callable[[], None]
) -> None:
    """Write the checkpoint `folder / name`; a power cut leaves it complete or absent. Every rank calls this.

    Args:
        disk: has `make_folder`, `write`, `sync` and `rename` (see the set-up cell), which may raise OSError.
        folder: an existing folder that is visible to all ranks.
        name: the checkpoint's name; until it is complete, its folder is `folder / f".{name}.part"`.
        files: this rank's files, as contents by name. Names differ between ranks; the number of files may also differ,
            and may be 0.
        rank: this rank; rank 0 creates the `.part` folder and renames it.
        barrier: waits until all ranks have reached it.

    Once the final name exists, all ranks' files are on disk, both their bytes and their names. When `commit` returns,
    on any rank, the final name is on disk too, so the caller may delete the previous checkpoint. If a rank's disk
    raises an error, the rank re-raises it at once and reaches no further barrier; the others wait until the launcher
    ends them.
    """
    part, whole = folder / f".{name}.part", folder / name
    if rank == 0:
        disk.make_folder(part)
    barrier()
    for file, content in files.items():
        disk.write(part / file, content)
        disk.sync(part / file)
    barrier()
    if rank == 0:
        disk.sync(part)
        disk.rename(part, whole)
        disk.sync(folder)
    barrier()


class PaperDisk:
    """Files and folders in memory, and a log of what was done to them, by whom.

    Args:
        rank: says who calls.
        fails: (rank, number): the disk is full when that rank calls for the time after `number`. What failed is not
            done, and noted in `failed`, not in the log.
    """

    def __init__(self, rank, fails=None):
        self.files, self.folders, self.log = {}, {Path("run")}, []
        self.rank, self.fails, self.failed = rank, fails, None
        self.calls = Counter()
        self.renamed = {}
        self.emptied = []  # ranks whose `files` are others afterwards

    def _note(self, verb, *what):
        if self.fails == (self.rank(), self.calls[self.rank()]) and self.failed is None:
            self.failed = f"{verb} {what[0]}", len(self.log)
            raise OSError(28, "No space left on device")
        self.calls[self.rank()] += 1
        self.log.append((self.rank(), verb, *what))

    def _no_folder(self, path):
        now = self.renamed.get(path)
        return f"there is no folder {path}" + (f" any more, it was renamed to {now}" if now else "")

    def make_folder(self, path):
        path = Path(path)
        self._note("make_folder", path)
        if path in self.folders:
            raise FileExistsError(f"make_folder {path}: it is there already")
        if path.parent not in self.folders:
            raise FileNotFoundError(f"make_folder {path}: there is no folder {path.parent}")
        self.folders.add(path)

    def write(self, path, content):
        path = Path(path)
        self._note("write", path)
        if path.parent not in self.folders:
            raise FileNotFoundError(f"write {path}: {self._no_folder(path.parent)}")
        self.files[path] = content

    def sync(self, path):
        path = Path(path)
        self._note("sync", path)
        if path not in self.files and path not in self.folders:
            raise FileNotFoundError(f"sync {path}: there is no such file or folder")

    def rename(self, old, new):
        old, new = Path(old), Path(new)
        self._note("rename", old, new)
        if old not in self.folders and old not in self.files:
            raise FileNotFoundError(f"rename {old}: there is no such folder")
        if new in self.folders:
            raise FileExistsError(f"rename {old} to {new}: that is there already")
        self.renamed[old] = new
        self.folders = {new if f == old else f for f in self.folders}
        self.files = {(new / f.name if f.parent == old else new if f == old else f): c for f, c in self.files.items()}


class Turns:
    """Ranks as threads of which one runs at a time: rank `first` before the others, each up to its next barrier.

    Args:
        go_on: when a rank raises, the others run on to where they wait for it; default: all end.
    """

    def __init__(self, ranks, first, go_on=False):
        self.go_on = go_on
        self.order = sorted(range(ranks), key=lambda rank: (rank != first, rank))
        self.go = [threading.Semaphore(0) for _ in range(ranks)]
        self.back = threading.Semaphore(0)
        self.state = ["ready"] * ranks
        self.errors: dict[int, BaseException] = {}
        self.current = 0
        self.over = False

    def run(self, program):
        threads = [threading.Thread(target=self._rank, args=(r, program), daemon=True) for r in range(len(self.go))]
        for thread in threads:
            thread.start()
        while "ready" in self.state and (self.go_on or not self.errors):
            for rank in self.order:
                if self.state[rank] == "ready" and (self.go_on or not self.errors):
                    self._let(rank)
            if all(state != "ready" for state in self.state) and "done" not in self.state:
                self.state = ["ready"] * len(self.state)
        stuck = [rank for rank, state in enumerate(self.state) if state == "waits"]
        self.over = True
        for rank in stuck or range(len(self.go)):
            if self.state[rank] != "done":
                self._let(rank)
        return [] if self.errors else stuck

    def _let(self, rank):
        self.current = rank
        self.go[rank].release()
        self.back.acquire()

    def _rank(self, rank, program):
        self.go[rank].acquire()
        try:
            if not self.over:
                program(rank, lambda: self._barrier(rank))
        except Over:
            pass
        except BaseException as error:
            self.errors[rank] = error
        self.state[rank] = "done"
        self.back.release()

    def _barrier(self, rank):
        if self.over:
            raise Over
        self.state[rank] = "waits"
        self.back.release()
        self.go[rank].acquire()
        if self.over:
            raise Over


class Over(BaseException):
    """Ends a rank that waits for ever."""


WHOLE, PART = Path("run") / "step-7.5", Path("run") / ".step-7.5.part"


@check("10b.5")
def check_commit(answer, variant):
    """Under its name only when all is on the disk, whichever rank comes first, and never if a disk has failed."""
    for first in range(variant.ranks):
        check_commit_case(answer, variant, first, "ab")
    for first in range(variant.ranks):
        check_commit_case(answer, variant, first, "ab", "", "a")
    check_commit_case(answer, replace(variant, ranks=1), 0, "ab")
    for rank in reversed(range(variant.ranks)):
        for first in {rank, 0, variant.ranks - 1}:
            number = 0
            while check_full(answer, variant, first, rank, number):
                number += 1
    check_left_over(answer, variant)


def run_commit(answer, variant, disk, turns, *names):
    """Files of each rank, and who waits for ever; `names` are those of rank 0's files, of rank 1's, and round again."""
    files = [
        {f"rank-{rank}-{name}": content(variant.seed, rank, name) for name in names[rank % len(names)]}
        for rank in range(variant.ranks)
    ]

    def program(rank, barrier):
        given = dict(files[rank])
        answer(disk, Path("run"), "step-7.5", given, rank, barrier)
        disk.log.append((rank, "returns"))
        if given != files[rank]:
            disk.emptied.append(rank)

    return {name: content for each in files for name, content in each.items()}, turns.run(program)


def content(seed, rank, name):
    """Bytes that are no text; rank 0's second file is empty."""
    return b"" if (rank, name) == (0, "b") else f" {seed} {rank} {name}".encode() + bytes([0, 255, 10])


def check_full(answer, variant, first, rank, number):
    """The disk is full at one call of one rank. Returns whether there was such a call."""
    turns = Turns(variant.ranks, first, go_on=True)
    disk = PaperDisk(lambda: turns.current, fails=(rank, number))
    run_commit(answer, variant, disk, turns, "ab")
    if disk.failed is None:
        return False
    call, at = disk.failed
    what = f"rank {first} first, rank {rank}'s {call} raises OSError (no space left)"
    if rank not in turns.errors:
        raise AnswerError(
            f"{what}: expected rank {rank} to raise it, got it swallowed\n"
            "likely slip: do not swallow the error: the caller would delete the previous checkpoint, and has no other"
        )
    if not isinstance(turns.errors[rank], OSError):
        raise AnswerError(
            f"{what}: expected rank {rank} to raise it, got {type(turns.errors[rank]).__name__}\n"
            "likely slip: the error goes up as it is: the caller looks for an OSError, and for its number"
        )
    if any(each[1] == "rename" and WHOLE in each[2:] for each in disk.log[at:]):
        raise AnswerError(
            f"{what}: expected no checkpoint, got one named {WHOLE.name} that lacks it\n"
            "likely slip: call no barrier after an error: a barrier says that this rank has written its files"
        )
    return True


def check_left_over(answer, variant):
    """A killed run has left its part."""
    turns = Turns(variant.ranks, 0, go_on=True)
    disk = PaperDisk(lambda: turns.current)
    disk.folders.add(PART)
    disk.files[PART / "rank-9-a"] = b"of another run"
    files, _ = run_commit(answer, variant, disk, turns, "ab")
    found = {path.name for path in disk.files if path.parent == WHOLE}
    if WHOLE in disk.folders and found != files.keys():
        raise AnswerError(
            f"a killed run has left {PART}: expected FileExistsError on rank 0, got its files in {WHOLE}\n"
            "likely slip: the folder is that of another run: `make_folder` raises so that you stop"
        )
    if WHOLE not in disk.folders and 0 not in turns.errors:
        raise AnswerError(
            f"a killed run has left {PART}: expected an error on rank 0, got neither error nor checkpoint"
        )


def check_commit_case(answer, variant, first, *names):
    turns = Turns(variant.ranks, first)
    disk = PaperDisk(lambda: turns.current)
    files, stuck = run_commit(answer, variant, disk, turns, *names)
    what = f"rank {first} first" if variant.ranks > 1 else "one rank alone"
    unequal = len(names) > 1
    if unequal:
        what += ", ranks have different numbers of files, rank 1 none"
    for rank, error in turns.errors.items():
        if not isinstance(error, OSError):
            raise AnswerError(f"{what}, rank {rank}: {type(error).__name__}: {error}") from error
        raise AnswerError(f"{what}, rank {rank}: {error}\nlikely slip: {why_disk(disk, error)}")
    if stuck:
        raise AnswerError(
            f"{what}: rank {stuck[0]} waits at a barrier for ever, others have returned\n"
            + (
                "likely slip: as many barriers on every rank, however many files it has"
                if unequal
                else "likely slip: a barrier is for all ranks: not inside `if rank == 0`"
            )
        )
    check_log(what, disk, files)
    slip = "the files belong to the caller, who may need them again: iterate over them, and remove nothing"
    expect(f"{what}, ranks whose `files` have changed", disk.emptied, [], slip=slip)


def why_disk(disk, error):
    text = str(error)
    renamed = any(each[1] == "rename" for each in disk.log)
    if text.startswith("write") and renamed:
        return "rank 0 has to know that the others have written: a barrier before the rename"
    if text.startswith("make_folder"):
        return "one rank makes the folder: rank 0"
    if text.startswith(f"sync {PART}/"):
        return "sync your files before the barrier: after it rank 0 renames the part"
    if text.startswith("rename") or "sync" in text:
        return "one rank gives the name: rank 0"
    return "a rank may be here before rank 0 has made the folder: a barrier in between"


def check_log(what, disk, files):
    log = disk.log

    def fail(text, slip):
        raise AnswerError(f"{what}, {text}\nlikely slip: {slip}")

    early = [each[2] for each in log if each[1] == "write" and WHOLE in (each[2], each[2].parent)]
    if early:
        fail(
            f"written under the final name: expected nothing, got {early[0]}",
            "killed now, half a checkpoint has the name of a whole one: write into the part, and rename that",
        )
    places = sorted({str(each[2].parent) for each in log if each[1] == "write"} - {str(PART)})
    if places:
        fail(f"where the files are written: expected {PART}, got {places[0]}", "the part lies beside what it becomes")
    renames = [each for each in log if each[1] == "rename"]
    if [each[2:] for each in renames] != [(PART, WHOLE)]:
        got = ", ".join(f"{a} to {b}" for _, _, a, b in renames) or "none"
        fail(f"renames: expected {PART} to {WHOLE}, got {got}", "the one rename of the folder is the commit")
    at = log.index(renames[0])
    done = {entry[1:]: place for place, entry in enumerate(log) if entry[1] != "returns"}
    written = {name: done.get(("write", PART / name)) for name in files}
    late = sorted(name for name, place in written.items() if place is None or place > at)
    if late:
        fail(
            f"at the rename: expected all ranks' files, got all but {', '.join(late)}",
            "rank 0 has to know that the others have written: a barrier before the rename",
        )
    for name, content in files.items():
        if disk.files.get(WHOLE / name) != content:
            fail(f"{name}: expected its bytes, got others", "each file has what `files` says")
        synced = done.get(("sync", PART / name))
        if synced is None or synced > at:
            fail(
                f"{name} at the rename: expected its bytes on the disk, got them in a cache",
                "after a power cut the name may be there and the file empty: sync each file that was written",
            )
        if synced < written[name]:
            fail(f"{name}: expected write, then sync, got the opposite", "sync saves what has been written before it")
    folder = done.get(("sync", PART), -1)
    if folder > at or folder == -1:
        fail(
            "the part at the rename: expected the names of the files on the disk, got them in a cache",
            "a folder is a file too, with names in it: sync the part before it is renamed",
        )
    if folder < max(written.values()):
        fail("the sync of the part: expected after all files", "it saves no names that are added afterwards")
    end = min((place for place, e in enumerate(log) if e[1:] == ("sync", Path("run")) and place > at), default=None)
    if end is None:
        fail(
            "the new name at the end: expected on the disk, got it in a cache",
            "the rename changes the folder around it: sync `folder`, after the rename",
        )
    returns = [each[0] for each in log[:end] if each[1] == "returns"]
    if returns:
        fail(
            f"a return before the checkpoint has its name: expected none, got rank {returns[0]}'s",
            "after its return, a rank may delete the previous checkpoint: hence the last barrier",
        )
