"""Files are whole or as they were, whatever the disk says, and nothing half written is left."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minifsdp.instruments.system import whole_files
from minifsdp.instruments.system.whole_files import UndeliveredError, delivering, write_new, write_whole

RECORD = {"loss": 1.0}


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """As a disk that is full after `size` bytes: with EFBIG instead of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", [write_new, write_whole])
def test_a_full_disk_leaves_what_was_there_and_names_the_file(
    write: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if write is write_whole:
        path.write_bytes(b"old")
    with files_up_to(100), pytest.raises(OSError, match="File too large") as stop:
        write(path, bytes(200))
    assert stop.value.filename == str(path)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == ([b"old"] if write is write_whole else [])
    write(path, bytes(200))
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [bytes(200)]


@pytest.mark.parametrize("links", [True, False])
def test_what_is_there_is_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    write_new(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "file", b"second")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"first"]


def test_a_pipe_in_the_way_is_not_waited_on(tmp_path: Path) -> None:
    for name in ("file", f".file.{os.getpid()}.part"):
        os.mkfifo(tmp_path / name)
    write_whole(tmp_path / "file", b"content")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"content"]


def remove(out: Path) -> None:
    shutil.rmtree(out)


def replace(out: Path) -> None:
    shutil.rmtree(out)
    out.write_text("")


def deliver(tmp_path: Path, harm: Callable[[Path], None]) -> Path:
    """Two files, after something has happened to the folder that they are for."""
    out, staging = tmp_path / "out", tmp_path / "staging"
    out.mkdir()
    staging.mkdir()
    with delivering(staging, out, RECORD):
        (staging / "a.json").write_text(json.dumps(RECORD))
        (staging / "b.png").write_bytes(bytes(200))
        harm(out)
    return out


def test_a_folder_that_has_gone_is_made_again(tmp_path: Path) -> None:
    assert {path.name for path in deliver(tmp_path, remove).iterdir()} == {"a.json", "b.png"}


def test_what_cannot_be_delivered_is_kept_and_said_where(tmp_path: Path) -> None:
    with pytest.raises(
        UndeliveredError, match=r"^--out \S+ cannot be written \(file exists\): a.json, b.png went to (\S+)"
    ):
        deliver(tmp_path, replace)
    (kept,) = tmp_path.glob("minifsdp-kept-*")
    assert json.loads((kept / "a.json").read_text()) == RECORD


def test_a_disk_that_is_full_for_the_second_file_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full_after_one(shutil.copyfile))
        with pytest.raises(UndeliveredError, match="no space left on device") as stop:
            deliver(tmp_path, lambda out: None)
    assert stop.value.record == RECORD
    assert not list((tmp_path / "out").iterdir())


def full_after_one(copy: Callable[..., Path]) -> Callable[..., Path]:
    seen = []

    def copyfile(source: Path, target: Path) -> Path:
        seen.append(target)
        if len(seen) > 1:
            target.touch()  # a truncated one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy(source, target)

    return copyfile


def test_a_full_disk_for_temporary_files_is_said_too(tmp_path: Path) -> None:
    with (
        files_up_to(100),
        pytest.raises(UndeliveredError, match=rf"^{tmp_path}: file too large: no file could be written$"),
    ):
        deliver(tmp_path, lambda out: None)
    assert whole_files._listed([Path("a"), Path("b"), Path("c"), Path("d")]) == "a, b and 2 more"
