"""Requests that cannot be met, of any command."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest

from minifsdp.course import cli

Command = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Exit code, output and errors of `minifsdp WORDS` in this process, in which no rank may start."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["minifsdp", *words])
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        for module in ("ladder.run", "train.start", "bench.start"):
            monkeypatch.setattr(f"minifsdp.course.{module}.launch", lambda *_, **__: pytest.fail("a rank was started"))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        output = capsys.readouterr()
        return int(stop.value.code or 0), output.out, output.err

    return run


@pytest.fixture
def refused(command: Command) -> Refused:
    """The one line that `minifsdp WORDS` ends with, before any rank starts."""

    def run(*words: str) -> str:
        code, output, errors = command(*words)
        assert (code, output) == (2, "")
        (line,) = errors.splitlines()
        return line

    return run
