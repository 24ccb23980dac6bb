"""Temporary folders, whose programs may be killed: the next to make one removes theirs, and nothing else."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import minifsdp
from minifsdp.instruments.system import scratch
from minifsdp.instruments.system.scratch import remove_abandoned, scratch_folder

MAKES_ONE = """
import sys, time
from minifsdp.instruments.system.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "nested").mkdir()
    (folder / "nested" / "file").touch()
    print(folder, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this process and of those that it starts."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    return place


@pytest.fixture
def program(place: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another program, in whose folder there is a file."""
    with subprocess.Popen([sys.executable, "-c", MAKES_ONE], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        yield program, Path(program.stdout.readline().strip())
        program.kill()


def test_the_folder_of_a_program_that_runs_stays_and_that_of_one_that_was_killed_goes(
    program: tuple[subprocess.Popen[str], Path], place: Path
) -> None:
    other, folder = program
    with scratch_folder() as mine:
        remove_abandoned()
        assert (folder / "nested" / "file").exists()
        os.kill(other.pid, signal.SIGSTOP)
        remove_abandoned()
        assert (folder / "nested" / "file").exists(), "it is only stopped"
        other.kill()
        other.wait()
        assert (folder / "nested" / "file").exists()
        with scratch_folder() as second:
            assert sorted(place.iterdir()) == sorted([mine, second])
            assert mine.stat().st_mode & 0o777 == 0o700
    assert not list(place.iterdir())


def abandoned(place: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=scratch._PREFIX, dir=place))
    (folder / "file").touch()
    return folder


def test_nothing_else_is_touched(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").touch()
    link, file = (place / f"{scratch._PREFIX}{name}" for name in ("link", "file"))
    link.symlink_to(theirs)
    file.touch()
    other_names = [place / "minifsdp-kept-1", place / "minifsdp-ffffffff-1", place / "torchinductor_me"]
    for folder in other_names:
        folder.mkdir()
    ours = abandoned(place)
    (ours / "out").symlink_to(theirs)
    remove_abandoned()
    assert not ours.exists()
    assert sorted(place.iterdir()) == sorted([link, file, *other_names])
    assert (theirs / "file").exists()

    kept = abandoned(place)
    monkeypatch.setattr(os, "getuid", lambda: kept.stat().st_uid + 1)
    remove_abandoned()
    assert (kept / "file").exists(), "another user's"


@pytest.mark.parametrize("how", ["deep", "closed"])
def test_whatever_is_in_it(how: str, place: Path) -> None:
    folder = abandoned(place)
    if how == "closed":
        (folder / "closed" / "nested").mkdir(parents=True)
        (folder / "closed").chmod(0)
    else:
        here = os.open(folder, os.O_RDONLY)
        for _ in range(1100):
            os.mkdir("d", dir_fd=here)
            below = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)
    remove_abandoned()
    assert not list(place.iterdir())


def test_where_there_are_no_locks_nothing_is_removed_but_by_its_program(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(9, "as NFS says of folders")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    other = abandoned(place)
    with scratch_folder() as mine:
        remove_abandoned()
        assert mine.exists()
    assert list(place.iterdir()) == [other]


def test_every_folder_is_made_here() -> None:
    """But for the one in which results are kept that could not be delivered: that is to stay."""
    package = Path(minifsdp.__file__).parent
    makes = re.compile(r"\b(mkdtemp|mkstemp|TemporaryDirectory|NamedTemporaryFile)\b")
    found = {path.name for path in package.rglob("*.py") if makes.search(path.read_text())}
    assert found == {"scratch.py", "whole_files.py"}


AT_ONCE = """
from minifsdp.instruments.system.scratch import scratch_folder
for number in range(100):
    with scratch_folder() as folder:
        (folder / "file").write_text(str(number))
        with scratch_folder() as second:
            assert second.exists()
        assert (folder / "file").read_text() == str(number)
"""


def test_many_at_once_remove_none_that_is_in_use(place: Path) -> None:
    programs = [subprocess.Popen([sys.executable, "-c", AT_ONCE]) for _ in range(4)]
    assert [program.wait() for program in programs] == [0] * 4
    assert not list(place.iterdir())
