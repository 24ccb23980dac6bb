"""Which of the wrong answers run: all where what decides of them has changed, or one of every exercise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import all_ran
import called
import pytest

CACHED = (called.called, called.code_of, called.definitions, called.with_what_it_uses)
RING = '''
from minifsdp.comm import Group

RIGHT = 1  # a step

@no_grad
def all_reduce(tensor, group: Group):
    """The sum."""
    # in two halves
    return half(tensor) + RIGHT

def half(tensor):
    return rest(tensor)

def rest(tensor):
    return tensor

def unused(tensor):
    return half(tensor)
'''


def test_each_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for seconds in range(13):
        monkeypatch.setattr(all_ran, "commit_seconds", lambda seconds=seconds: seconds)
        drawn.append(all_ran.draw("5.2", 13))
    assert sorted(drawn) == list(range(13))


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path, str, str], None]]:
    """Lets a file have another text."""
    read = Path.read_text

    def change(file: Path, old: str, new: str) -> None:
        assert old in read(file)
        monkeypatch.setattr(
            Path, "read_text", lambda self: read(self).replace(old, new, 1) if self == file else read(self)
        )
        forget()

    def forget() -> None:
        for each in CACHED:
            each.cache_clear()

    yield change
    monkeypatch.undo()
    forget()


def test_all_run_again_when_what_their_check_calls_has_changed(change: Callable[[Path, str, str], None]) -> None:
    before = {lab: all_ran.digest(lab) for lab in ("01", "14")}  # ring.py defines what the checks of lab 01 call
    change(called.PACKAGE / "ring.py", "_cut(tensor, group.size())", "_cut(tensor, group.size() + 0)")
    after = {lab: all_ran.digest(lab) for lab in before}
    assert after["01"]["called"] != before["01"]["called"]
    assert after["01"]["lab"] == before["01"]["lab"]
    assert after["14"] == before["14"]


@pytest.mark.parametrize(
    ("name", "old", "new", "counts"),
    [
        ("all_reduce", "+ RIGHT", "- RIGHT", True),
        ("all_reduce", "@no_grad", "@grad", True),
        ("all_reduce", "RIGHT = 1", "RIGHT = 2", True),
        ("all_reduce", "return tensor", "return 2 * tensor", True),
        ("RIGHT", "return tensor", "return 2 * tensor", False),
        ("half", "+ RIGHT", "- RIGHT", False),
        ("all_reduce", "def unused(tensor)", "def unused(other)", False),
        ("all_reduce", "The sum.", "The sum of all.", False),
        ("all_reduce", "in two halves", "in halves", False),
        ("all_reduce", "minifsdp.comm", "minifsdp.other", False),
        ("elsewhere", "def unused(tensor)", "def unused(other)", True),
    ],
)
def test_what_counts_of_a_file(tmp_path: Path, name: str, old: str, new: str, counts: bool) -> None:
    found = []
    for number, text in enumerate((RING, RING.replace(old, new))):
        (file := tmp_path / f"ring{number}.py").write_text(text)
        found.append(called.with_what_it_uses(file, name))
    assert found[0]
    assert (found[0] != found[1]) == counts


def test_a_text_is_what_it_was_when_it_imports_from_another_place() -> None:
    assert called.code_of(RING) == called.code_of(
        RING.replace("minifsdp.comm", "minifsdp.other").replace("The sum", "")
    )
    assert called.code_of(RING) != called.code_of(RING.replace("+ RIGHT", "- RIGHT"))


def test_what_a_package_hands_on_counts_where_it_is_defined() -> None:
    text = "from minifsdp import comm\nfrom minifsdp.instruments.launch import launch\nfrom torch import nn"
    (comm, everything), (launch, name) = called.imported(text)
    assert (comm.name, everything, name) == ("comm.py", None, "launch")
    assert "def launch(" in launch.read_text()
