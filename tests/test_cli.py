"""The command line as somebody finds it who knows nothing of it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from minifsdp.course import cli
from minifsdp.course.cli import commands, lab


def minifsdp(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `minifsdp WORDS` prints, in this process; it has to end well."""
    monkeypatch.setattr(sys, "argv", ["minifsdp", *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert (end.value.code or 0, said.err) == (0, "")
    return said.out


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


def test_what_it_says_to_start_with_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in commands.START:
        name = words.split()[1]
        assert name in commands.COMMANDS or name in ("COMMAND", "--install-completion")
    assert "Commands:" in minifsdp(monkeypatch, capsys, "--help")


COMMANDS = [(name,) for name in commands.COMMANDS]
LAB = [("lab", str(each.name or each.callback.__name__)) for each in lab.app.registered_commands if each.callback]


@pytest.mark.parametrize("words", [*COMMANDS, *LAB], ids=" ".join)
def test_every_help_has_an_example_of_its_own(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = " ".join(minifsdp(monkeypatch, capsys, *words, "--help").split())
    assert f"Example: minifsdp {' '.join(words)}" in said


@pytest.mark.parametrize(
    ("typed", "names"),
    [("minifsdp la", ["ladder", "lab"]), ("minifsdp lab re", ["reveal"]), ("minifsdp ladder --ra", ["--ranks"])],
)
def test_names_are_completed(typed: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As bash asks for them, once `minifsdp --install-completion` has told it to."""
    asked = {"_MINIFSDP_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    program = "import sys; sys.argv = ['minifsdp']; from minifsdp.course import cli\n"
    program += "try: cli.main()\nexcept SystemExit: print('torch', 'torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == names
    assert done.stderr == f"torch {names == ['--ranks']}\n", "it is imported for a command's own options only"
