"""Files that somebody else has left are read only if they are plain, and not beyond a size."""

import os
import socket
from pathlib import Path

import pytest

from minifsdp.instruments.system.plain_files import read_plain


def test_a_plain_file_up_to_the_limit(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"12345")
    link.symlink_to(file)
    assert read_plain(file, 5) == read_plain(str(file)) == read_plain(link, 5, links=True) == b"12345"


@pytest.mark.parametrize("links", [False, True])
def test_what_is_no_plain_file_or_too_large_is_refused_by_name_and_at_once(links: bool, tmp_path: Path) -> None:
    """At once: each of these would wait, or go on, for ever."""
    names = [tmp_path / name for name in ("pipe", "socket", "folder", "zeros", "large")]
    pipe, bound, folder, zeros, large = names
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(bound))
        folder.mkdir()
        zeros.symlink_to("/dev/zero")
        large.write_bytes(b"123456")
        for path in names:
            with pytest.raises(ValueError, match=rf"^{path} is (not a plain file|a link|too large)[^\n]*$"):
                read_plain(path, 5, links=links)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no /proc")
def test_a_file_without_a_size_is_bounded_as_well() -> None:
    with pytest.raises(ValueError, match="/proc/self/maps is too large: more than 10 bytes"):
        read_plain("/proc/self/maps", 10)


def test_what_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        read_plain(tmp_path / "absent")
