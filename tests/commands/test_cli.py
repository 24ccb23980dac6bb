"""The command line as somebody finds it who knows nothing of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from minifsdp.course.cli import commands, lab
from minifsdp.instruments.warm.needs import RANKS_NEED


@pytest.fixture
def printed(command: Any) -> Any:
    """What `minifsdp WORDS` prints, in this process; it has to end well."""

    def run(*words: str) -> str:
        code, output, errors = command(*words)
        assert (code, errors) == (0, "")
        return str(output)

    return run


def test_without_a_word_it_says_in_one_screen_what_there_is_and_imports_no_torch() -> None:
    program = "import sys; sys.argv = ['minifsdp']\nfrom minifsdp.course import cli\ntry: cli.main()\n"
    program += "except SystemExit as end: sys.exit('torch' in sys.modules or end.code)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.rstrip().splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    said = [line.split()[0] for line in lines if re.match(r"  [a-z]", line)]
    assert said[: len(commands.COMMANDS)] == list(commands.COMMANDS)


def test_what_it_says_to_start_with_is_there(printed: Any) -> None:
    for words in commands.START:
        name = words.split()[1]
        assert name in commands.COMMANDS or name in ("COMMAND", "--install-completion")
    assert "Commands:" in printed("--help")


def test_the_server_imports_what_ranks_need_while_the_command_imports_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a command's help, nor under torchrun, where this process is a rank."""
    asked: list[str] = []
    monkeypatch.setattr(commands.server, "prepare", asked.extend)
    monkeypatch.setattr(commands, "import_module", lambda name: asked.append(name) or import_module(name))
    monkeypatch.setattr(sys, "argv", ["minifsdp", "ladder"])
    group: Any = typer.main.get_command(commands.app)
    for name, command in commands.COMMANDS.items():
        asked.clear()
        group.get_command(None, name)
        *needed, module = asked
        assert module.endswith(command.module)
        ours = [each for each in needed if each not in RANKS_NEED]
        assert bool(ours) == bool(command.ranks_need)
        assert all(find_spec(each) for each in ours)
    for where in ({"RANK": "0"}, {}):
        asked.clear()
        monkeypatch.delenv("RANK", raising=False)
        for name, value in where.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["minifsdp", "ladder", *([] if where else ["--help"])])
        group.get_command(None, "ladder")
        assert len(asked) == 1, "the command's own module"


COMMANDS = [(name,) for name in commands.COMMANDS]
LAB = [("lab", str(each.name or each.callback.__name__)) for each in lab.app.registered_commands if each.callback]


@pytest.mark.parametrize("words", [*COMMANDS, *LAB], ids=" ".join)
def test_every_help_has_an_example_of_its_own(words: tuple[str, ...], printed: Any) -> None:
    said = " ".join(printed(*words, "--help").split())
    assert f"Example: minifsdp {' '.join(words)}" in said


COMPLETED = {
    "minifsdp la": ["ladder", "lab"],
    "minifsdp lab re": ["reveal"],
    "minifsdp lab start 1": ["10a", "10b", "11", "12", "13", "14", "15"],
    "minifsdp lab hint 5.": [f"5.{number}" for number in range(1, 7)],
    "minifsdp ladder --ra": ["--ranks"],
    "minifsdp ladder --rungs ddp,z": ["ddp,zero1", "ddp,zero2", "ddp,zb-h1"],
}
COMPLETE = f"""
import os, sys
sys.argv = ["minifsdp"]
from minifsdp.course import cli
for typed in {list(COMPLETED)}:
    os.environ |= {{"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}}
    try: cli.main()
    except SystemExit: print("torch", "torch" in sys.modules)
"""


def test_names_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bash asks for them, once `minifsdp --install-completion` has told it to."""
    monkeypatch.setenv("_MINIFSDP_COMPLETE", "complete_bash")
    done = subprocess.run([sys.executable, "-c", COMPLETE], capture_output=True, text=True, check=False)
    said = re.findall(r"(.*?)torch (True|False)\n", done.stdout, re.DOTALL)
    assert [names.split() for names, _ in said] == list(COMPLETED.values())
    imported = [torch == "True" for _, torch in said]
    assert imported == ["ladder " in typed for typed in COMPLETED], "it is imported for a command's own options only"


# Output that cannot be written


def with_streams(streams: str, *words: str, cwd: Path) -> tuple[int, list[str]]:
    """Exit code and lines on stderr of `minifsdp WORDS`, with its streams as the shell's `streams` says."""
    command = f'exec "$0" -m minifsdp "$@" {streams}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, *words], cwd=cwd, stderr=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, done.stderr.splitlines()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["lab list", "lab list 04", "lab start 04", "lab progress", "lab --help", "ps"])
def test_a_stdout_that_is_full_is_said_in_one_line(words: str, tmp_path: Path) -> None:
    said = ["minifsdp: cannot write to stdout: No space left on device"]
    assert with_streams(">/dev/full", *words.split(), cwd=tmp_path) == (1, said)
    (tmp_path / "other").mkdir()
    assert with_streams(">&-", *words.split(), cwd=tmp_path / "other") == (0, [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("streams", [">/dev/full 2>&-", pytest.param(">&- 2>/dev/full", marks=pytest.mark.slow)])
def test_a_run_is_not_lost_for_a_message(streams: str, tmp_path: Path) -> None:
    sizes = "--layers 1 --width 16 --context 8 --batch 4 --steps 2 --no-ledger --device cpu"
    code, _ = with_streams(streams, "train", *sizes.split(), "--out", "out", cwd=tmp_path)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"train.json", "loss.png"}
    assert code == (0 if ">&- " in streams else 1)


def test_a_pipe_that_is_closed_ends_in_silence(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "minifsdp", "lab", "list"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_error_that_cannot_be_said_has_its_exit_code(tmp_path: Path) -> None:
    assert with_streams("2>/dev/full", "lab", "start", "77", cwd=tmp_path) == (2, [])
    assert with_streams("2>&-", "lab", "start", "77", cwd=tmp_path) == (2, [])
