"""`minifsdp lab`: copies, editions, checks of saved notebooks, hints, progress, and requests that cannot be met."""

import errno
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import minifsdp
from minifsdp.course import cli
from minifsdp.course.workshop import catalogue, copies, progress, saved, scores
from minifsdp.course.workshop.catalogue import EXERCISE, Notebook, cells_with, labs_folder, read_notebook, source_of
from minifsdp.course.workshop.hints import hints_of
from minifsdp.course.workshop.notebook import FAILED
from minifsdp.course.workshop.references import find_reference, is_blank, lab_references
from minifsdp.course.workshop.submission import Submission
from minifsdp.course.workshop.verdict import Verdict

REFERENCE = find_reference("4.1")
RIGHT = f'@exercise("4.1")\n{REFERENCE.source}'
WRONG = RIGHT.replace("return ", "return 2 * ")
COPY = "lab04_flat_parameter.ipynb"

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`minifsdp lab WORDS` in an empty folder: exit code, and the output; errors are one line."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["minifsdp", "lab", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        code, output = int(stop.value.code or 0), capsys.readouterr()
        if code == 2:
            assert not output.out
            assert len(output.err.splitlines()) == 1, output.err
            return code, output.err
        assert not output.err
        return code, " ".join(output.out.split())

    return run


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> list[Submission]:
    """No process is started: twice the right answer is wrong. Returns what was submitted."""
    seen = []

    def judge(submission: Submission, **_: Any) -> Verdict:
        seen.append(submission)
        return Verdict("failed", "twice\nas much") if "2 *" in submission.cell else Verdict("passed", "Just right.")

    monkeypatch.setattr(saved, "run_check", judge)
    return seen


def write(text: str, exercise: str = "4.1", path: str = COPY) -> None:
    """Put an answer into a copy."""
    notebook = read_notebook(Path(path))
    cells_with(notebook["cells"], EXERCISE + exercise)[0]["source"] = text
    Path(path).write_text(json.dumps(notebook))


def answer(path: str, exercise: str = "4.1") -> str:
    return source_of(cells_with(read_notebook(Path(path))["cells"], EXERCISE + exercise)[0])


# Copies


def test_list_names_labs_and_exercises(lab: Run) -> None:
    code, said = lab("list")
    assert code == 0
    assert "04 The flat parameter" in said
    assert "The flat parameter 60 5" in said
    code, said = lab("list", "4")
    assert code == 0
    assert "4.1 Pad and chunk pad_and_chunk 5 easy" in said
    assert "5.1" not in said
    assert lab("list", "77") == (
        2,
        "minifsdp: there is no lab '77': choose from " + ", ".join(catalogue.all_labs()) + "\n",
    )


def test_a_copy_has_no_outputs_and_its_edition_and_is_never_overwritten(lab: Run) -> None:
    code, said = lab("start", "4")
    assert (code, said) == (0, f"{COPY}: continue with jupyter lab {COPY}")
    notebook, shipped = read_notebook(Path(COPY)), read_notebook(catalogue.shipped_notebook("04"))
    code_cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code_cells
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code_cells)
    texts = [source_of(cell).replace("(attachment:", "(../slides/figures/") for cell in notebook["cells"]]
    assert texts == [source_of(cell) for cell in shipped["cells"]]
    (pictured,) = [cell for cell in notebook["cells"] if "attachments" in cell]
    ((name, content),) = pictured["attachments"].items()
    assert f"](attachment:{name})" in source_of(pictured)
    picture = labs_folder().parent / "slides" / "figures" / name
    assert b64decode(content["image/svg+xml"]) == picture.read_bytes()
    assert notebook["metadata"]["minifsdp"]["edition"] == catalogue.edition_of(shipped)
    Path(COPY).write_text("mine")
    assert lab("start", "04") == (2, f"minifsdp: {COPY} already exists: continue with it, or name another folder\n")
    assert Path(COPY).read_text() == "mine"
    assert lab("start", "04", "new/folder")[0] == 0
    assert Path("new/folder", COPY).exists()


def test_without_jupyterlab_start_says_how_to_get_it(lab: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from minifsdp.course.cli import lab as module

    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert "pip install jupyterlab" in lab("start", "04")[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["start", "77"], "there is no lab '77': choose from "),
        (["start", ""], "an argument is empty: give it a value"),
        (["start"], "Missing argument 'NN'"),
        (["mark", "", "--out", "x.csv"], "an argument is empty: give it a value"),
        (["mark", ".", "--out", "x.csv", "--memory", "inf"], "'--memory'"),
        (["mark", ".", "--out", "x.csv", "--memory", "1e400"], "'--memory'"),
        (["mark", ".", "--out", "x.csv", "--memory", "nan"], "'--memory'"),
        (["mark", ".", "--out", "x.csv", "--seconds", "inf"], "'--seconds'"),
        (["mark", "fifo-free", "--out", "x.csv", "--variants", "fifo"], "fifo is not a plain file"),
        (["mark", "fifo-free", "--out", "x.csv", "--variants", "deep.toml"], "deep.toml is nested too deep to read"),
        (["check", "4.1", "fifo"], "fifo"),
        (["run", "04", "--time-limit", "nan"], "'--time-limit'"),
        (["update", "04"], "no notebook of lab 04 in this folder: minifsdp lab start 04"),
        (["check", "4.1"], "no notebook of lab 04 in this folder: minifsdp lab start 04"),
        (["check", "4.1", "nowhere.ipynb"], "there is no file nowhere.ipynb"),
        (["check", "4.77"], "there is no exercise '4.77': lab 04 has 4.1"),
        (["check", "four"], "'four' is not an exercise: give lab and number, such as 5.2"),
        (["hint", "4.77"], "there is no exercise '4.77'"),
        (["reveal", "77.1"], "there is no exercise '77.1'"),
        (["chekc", "4.1"], "No such command 'chekc'"),
    ],
)
def test_requests_that_cannot_be_met(lab: Run, words: list[str], says: str) -> None:
    os.mkfifo("fifo")
    Path("fifo-free", "ann").mkdir(parents=True)
    Path("fifo-free", "ann", "lab04_x.ipynb").write_text("{}")
    Path("deep.toml").write_text("x = " + 10_000 * "[" + 10_000 * "]")
    code, error = lab(*words)
    assert code == 2
    assert says in error


@pytest.mark.parametrize("name", ["list", "start", "update", "check", "hint", "reveal", "progress", "score", "mark"])
def test_help_has_an_example(lab: Run, name: str) -> None:
    code, said = lab(name, "--help")
    assert code == 0
    assert f"Example: minifsdp lab {name}" in said


# Scores


@pytest.mark.parametrize(("words", "labs"), [((), "lab 08 and lab 14"), (("8",), "lab 08"), (("14",), "lab 14")])
def test_score_names_the_open_tasks_that_are_left(lab: Run, words: tuple[str, ...], labs: str) -> None:
    assert lab("score", *words) == (0, f"no schedule has been tried in this folder yet: see the end of {labs}")


def test_score_shows_the_table_of_a_lab_or_of_all(lab: Run) -> None:
    scores.keep(scores.SCHEDULE, "mine", 0.0635, 9 * 2**30, None)
    scores.keep(scores.PIPELINE, "ours", 0.47, 6, None)
    eight, fourteen, both = (lab("score", *words)[1] for words in (("08",), ("14", "."), ()))
    assert "mine" in eight
    assert "63.5" in eight
    assert "ours" not in eight
    assert "ours" in fourteen
    assert "mine" not in fourteen
    assert {"mine", "ours"} <= set(both.split())


def test_score_refuses_a_lab_without_an_open_task(lab: Run) -> None:
    code, error = lab("score", "4")
    assert code == 2
    assert "lab 04 has no open task: name 08 or 14, or no lab for all tables" in error


# Checks


@pytest.mark.usefixtures("verdict")
def test_check_prints_what_the_notebook_prints(lab: Run) -> None:
    lab("start", "04")
    assert lab("check", "4.1") == (0, "4.1 pad_and_chunk: not attempted, reference in use")
    write(WRONG)
    first = f"4.1 pad_and_chunk: {FAILED} twice as much hint 1 of 2: {REFERENCE.hints[0]}"
    assert lab("check", "4.1") == (1, first)
    lab("hint", "4.1")
    assert f"hint 2 of 2: {REFERENCE.hints[1]}" in lab("check", "4.1", COPY)[1]
    assert not Path(".minifsdp/answers").exists()
    write(RIGHT)
    assert lab("check", "4.1") == (0, "4.1 pad_and_chunk: yours: passed. Just right.")
    assert json.loads(Path(".minifsdp/answers/4.1.json").read_text())["cell"] == RIGHT


def test_check_takes_setup_and_cell_by_their_tags(lab: Run, verdict: list[Submission]) -> None:
    lab("start", "04", "there")
    write(RIGHT, path=f"there/{COPY}")
    assert lab("check", "4.1", f"there/{COPY}")[0] == 0
    assert verdict == [Submission("4.1", catalogue.setup_of("04"), RIGHT)]
    assert Path("there/.minifsdp/answers/4.1.json").exists(), "kept beside the notebook"
    write("def (", path=f"there/{COPY}")
    lab("check", "4.1", f"there/{COPY}")
    assert len(verdict) == 2, "what is no Python goes to the check, which says so"


def test_check_of_a_lab_is_of_each_exercise(lab: Run, verdict: list[Submission]) -> None:
    lab("start", "04")
    write(WRONG)
    write(f'@exercise("4.2")\n{find_reference("4.2").source}', "4.2")
    code, said = lab("check", "4")
    assert code == 1
    assert [each.exercise for each in verdict] == ["4.1", "4.2"]
    assert re.findall(r"4\.\d \w+: [a-z]+", said) == [
        *("4.1 pad_and_chunk: yours", f"4.2 {find_reference('4.2').name}: yours"),
        *(f"{ref.id} {ref.name}: not" for ref in lab_references("04")[2:]),
    ]
    write(RIGHT)
    assert lab("check", "04")[0] == 0
    assert lab("check", COPY)[1] == lab("check", "04")[1], "a notebook says which lab it is"


def test_a_watched_notebook_is_checked_at_first_and_where_a_save_has_changed_it(
    lab: Run, verdict: list[Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab("start", "04")
    second = f'@exercise("4.2")\n{find_reference("4.2").source}'

    def saves() -> Iterator[Callable[[], Any]]:
        yield lambda: write(WRONG)
        yield lambda: Path(COPY).touch()
        yield lambda: write(second, "4.2")
        yield lambda: Path(COPY).rename("aside")  # as an editor may, in a save
        yield lambda: Path(COPY).write_text('{"cells": [')
        yield lambda: Path("aside").replace(COPY)
        yield lambda: write(RIGHT)

    left = saves()

    def save(_: float) -> None:
        try:
            next(left)()
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(saved, "time", SimpleNamespace(sleep=save))
    monkeypatch.setattr(sys, "argv", ["minifsdp", "lab", "check", "--watch", "04"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 130
    assert [(each.exercise, each.cell) for each in verdict] == [("4.1", WRONG), ("4.2", second), ("4.1", RIGHT)]


def test_a_watched_notebook_is_read_when_it_is_saved_and_not_in_between(
    lab: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab("start", "04")
    polls, reads = iter(range(30)), []

    def poll(_: float) -> None:
        if (number := next(polls)) == 10:
            write(RIGHT)
        elif number == 20:
            raise KeyboardInterrupt

    def read(path: Path, exercise: str) -> Submission:
        reads.append(exercise)
        return copies.answer_in(path, exercise)

    monkeypatch.setattr(saved, "time", SimpleNamespace(sleep=poll))
    monkeypatch.setattr(saved, "answer_in", read)
    with pytest.raises(KeyboardInterrupt):
        list(saved.saves(Path(COPY), ["4.1", "4.2"]))
    assert reads == 2 * ["4.1", "4.2"]


def test_check_in_a_fresh_process(lab: Run) -> None:
    lab("start", "04")
    write(RIGHT)
    code, said = lab("check", "4.1")
    assert (code, said.startswith("4.1 pad_and_chunk: yours: passed. ")) == (0, True)


def test_check_needs_one_cell_and_one_notebook(lab: Run) -> None:
    lab("start", "04")
    notebook = read_notebook(Path(COPY))
    notebook["cells"] += cells_with(notebook["cells"], EXERCISE + "4.1")
    Path(COPY).write_text(json.dumps(notebook))
    assert f"{COPY} has 2 cells with the tag exercise-4.1: there must be one" in lab("check", "4.1")[1]
    for name in ("lab04_first.ipynb", "lab04_second.ipynb"):
        Path(name).write_text(Path(COPY).read_text())
    Path(COPY).unlink()  # of its name, or with a number behind it, it would be the one
    assert "several notebooks of lab 04, name one: lab04_first.ipynb, lab04_second.ipynb" in lab("check", "4.1")[1]
    Path(COPY).write_text("{")
    Path("lab04_second.ipynb").unlink()
    assert lab("check", "4.1")[1] == f"minifsdp: {COPY} is not a notebook: give a saved .ipynb file\n"


# Help, and how far one is


@pytest.mark.usefixtures("verdict")
def test_hints_reveals_and_progress(lab: Run) -> None:
    lab("start", "04")
    assert lab("hint", "4.1")[1] == f"hint 1 of 2: {REFERENCE.hints[0]}"
    assert lab("hint", "4.1")[1] == f"hint 2 of 2: {REFERENCE.hints[1]}"
    assert lab("hint", "4.1")[1] == f"hint 2 of 2: {REFERENCE.hints[1]}"
    said = lab("progress")[1]
    assert "4.1 pad_and_chunk not attempted 2 hints 4.2" in said
    count = len(catalogue.all_exercises())
    assert f"in the saved notebooks, 0 of {count} exercises passed; next: 4.1 " in said, "of the lab that was started"
    assert lab("reveal", "4.1")[1] == " ".join(REFERENCE.source.split())
    Path(".minifsdp/predictions").mkdir()
    Path(".minifsdp/predictions/4.1.json").write_text("1234")
    write(WRONG)
    lab("check", "4.1")
    said = lab("progress")[1]
    assert "lab 03 not started" in said
    assert "4.1 pad_and_chunk not passed 2 hints, reference 1,234" in said
    write(RIGHT)
    lab("check", "4.1")
    said = lab("progress", ".")[1]
    assert "lab 04 1 of " in said
    assert "4.1 pad_and_chunk passed 2 hints" in said
    write(RIGHT + "# later")
    assert "4.1 pad_and_chunk changed since" in lab("progress")[1]


@pytest.mark.parametrize("stdout", ["full", "closed"])
def test_a_hint_that_was_not_seen_does_not_count(lab: Run, stdout: str) -> None:
    """A pipe whose reader has gone is a stdout of which nothing is seen, too."""
    reader, writer = os.pipe()
    os.close(reader)
    if stdout == "full":
        if not os.path.exists("/dev/full"):
            pytest.skip("needs /dev/full")
        os.dup2(os.open("/dev/full", os.O_WRONLY), writer)
    words = [sys.executable, "-m", "minifsdp", "lab", "hint", "4.1"]
    assert subprocess.run(words, stdout=writer, stderr=subprocess.DEVNULL, check=False).returncode == 1
    os.close(writer)
    assert not Path(".minifsdp").exists()
    assert "hint 1 of 2" in lab("hint", "4.1")[1]


@pytest.mark.parametrize("columns", ["0", "7", "29"])
def test_a_width_in_which_nothing_can_be_read_is_one_of_80(
    lab: Run, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = lab("list")
    monkeypatch.setenv("COLUMNS", columns)
    assert lab("list") == said


BAD_VARIABLES = [
    ("MINIFSDP_COLLECTIVES", "foo", "set MINIFSDP_COLLECTIVES to auto or native, or unset it"),
    ("MINIFSDP_DEVICE", "tpu", "choose auto, cpu or cuda, or unset it"),
    ("MINIFSDP_SHARE_GPU", "2", "choose 1 or 0, or unset it"),
]


@pytest.mark.parametrize(("name", "value", "cure"), BAD_VARIABLES, ids=lambda value: value if value.isupper() else "")
def test_check_and_mark_refuse_what_a_variable_cannot_say(
    lab: Run, verdict: list[Submission], name: str, value: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab("start", "04", "all/ann")
    monkeypatch.setenv(name, value)
    said = (2, f"minifsdp: {name}={value}: {cure}\n")
    assert lab("check", "4.1", f"all/ann/{COPY}") == said, "while it is still blank, too"
    write(RIGHT, path=f"all/ann/{COPY}")
    assert lab("check", "4.1", f"all/ann/{COPY}") == said
    assert lab("mark", "all", "--out", "marks.csv") == said
    assert not verdict
    assert {path.name for path in Path().iterdir()} == {"all"}


# Editions


def age(path: str, change: Callable[[Notebook], None] = lambda notebook: None) -> None:
    """Turn a copy into one of an older edition."""
    notebook = read_notebook(Path(path))
    notebook["metadata"]["minifsdp"]["edition"] = "an older one"
    change(notebook)
    Path(path).write_text(json.dumps(notebook))


def test_update_carries_answers_and_predictions_over(lab: Run) -> None:
    lab("start", "04")
    assert lab("update", "04") == (0, "you have the newest edition")
    one, other = list(catalogue.stubs_of("04"))[1:3]
    write(RIGHT)
    changed = f'@exercise("{one}")\ndef {catalogue.stubs_of("04")[one].name}(of_old):\n    return "é"'
    write(changed, one)
    write("%magic", other)

    def older(notebook: Notebook) -> None:
        said = {"cell_type": "code", "metadata": {}, "source": 'predict("4.1", 2 * (3 +\n 4), "elements")', "id": "x"}
        notebook["cells"] = [cell for cell in notebook["cells"] if not source_of(cell).startswith('predict("4.1"')]
        notebook["cells"].append(said)

    age(COPY, older)
    before = Path(COPY).read_text()
    code, said = lab("update", "04")
    new = COPY.replace(".ipynb", "_2.ipynb")
    assert (code, said.startswith(f"{new}: continue with jupyter lab {new}")) == (0, True)
    assert Path(COPY).read_text() == before
    assert [answer(new), answer(new, one), answer(new, other)] == [RIGHT, changed, "%magic"]
    assert "4.1 pad_and_chunk: carried over 4" in said
    assert f"{one} {catalogue.stubs_of('04')[one].name}: carried over; the signature is now " in said
    assert f"{other} {catalogue.stubs_of('04')[other].name}: carried over; it does not define " in said
    predictions = [source_of(cell) for cell in read_notebook(Path(new))["cells"] if "predict(" in source_of(cell)]
    assert any('predict("4.1", 2 * (3 +\n 4), ' in source for source in predictions)
    assert "prediction 4.1: carried over" in said
    age(COPY, lambda _: None)
    assert copies.find_copy("04", Path()) == Path(new), "the one of this edition"
    assert lab("update", "04") == (0, "you have the newest edition")


def test_update_leaves_what_is_not_clear_to_its_owner(lab: Run) -> None:
    lab("start", "04")
    age(COPY, lambda notebook: notebook["cells"].extend(cells_with(notebook["cells"], EXERCISE + "4.1")))
    assert "4.1 pad_and_chunk: 2 cells have its tag, carry over the right one by hand" in lab("update", "04")[1]


def test_update_carries_half_a_character_over(lab: Run) -> None:
    lab("start", "04")
    half = RIGHT + "\n# \ud800"
    write(half)
    age(COPY)
    assert lab("update", "04")[0] == 0
    assert answer(COPY.replace(".ipynb", "_2.ipynb")) == half


def test_a_name_that_is_no_text_is_shown(lab: Run) -> None:
    words = [sys.executable, "-m", "minifsdp", "lab", "start", "04", b"of \xff"]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}  # as with most languages that a system speaks
    done = subprocess.run(words, capture_output=True, check=False, env=strict)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"of \\udcff/lab04" in done.stdout
    assert Path(os.fsdecode(b"of \xff"), COPY).exists()


# Blank


STUB = catalogue.stubs_of("04")["4.1"].source
BELOW = "\n\n\ndef try_later(flat):\n    ...\n"


@pytest.mark.usefixtures("verdict")
@pytest.mark.parametrize(
    ("cell", "state"),
    [
        (RIGHT + BELOW, "passed"),
        (STUB + BELOW.replace("...", "return 2 * flat"), "not attempted"),
        (STUB.replace(" -> list[Tensor]", ""), "passed"),
    ],
)
def test_check_progress_mark_and_update_agree_on_what_is_blank(lab: Run, cell: str, state: str) -> None:
    lab("start", "04")
    write(cell)
    said = lab("check", "4.1")[1]
    assert ("yours: passed" in said, "not attempted" in said) == (state == "passed", state == "not attempted")
    assert {each.exercise: each for each in progress.standings(Path())["04"]}["4.1"].state == state
    assert is_blank(cell, catalogue.stubs_of("04")["4.1"]) == (state == "not attempted")
    age(COPY)
    assert ("4.1 pad_and_chunk: carried over" in lab("update", "04")[1]) == (state != "not attempted")


@pytest.mark.usefixtures("verdict")
def test_of_several_copies_the_last_update_is_the_one(lab: Run) -> None:
    lab("start", "04")
    for number in (2, 3):
        age(COPY if number == 2 else COPY.replace(".ipynb", "_2.ipynb"))
        assert f"_{number}.ipynb" in lab("update", "04")[1]
    assert lab("check", "4.1")[0] == 0


def test_damaged_records_count_as_none(lab: Run) -> None:
    lab("start", "04")
    for kind, content in {"hints": b"\xff\xfe", "predictions": b'"abc"', "answers": b"{}", "reveals": b"7"}.items():
        Path(".minifsdp", kind).mkdir(parents=True)
        Path(".minifsdp", kind, "4.1.json").write_bytes(content)
    assert lab("progress")[0] == 0
    assert "hint 1 of 2" in lab("hint", "4.1")[1]


@pytest.mark.parametrize("content", [None, 100_000 * "["], ids=["pipe", "deep"])
def test_a_record_that_cannot_be_read_is_none(lab: Run, content: str | None) -> None:
    lab("start", "04")
    for kind in ("hints", "predictions", "answers", "reveals"):
        Path(".minifsdp", kind).mkdir(parents=True)
        if content is None:
            os.mkfifo(Path(".minifsdp", kind, "4.1.json"))
        else:
            Path(".minifsdp", kind, "4.1.json").write_text(content)
    assert "4.1 pad_and_chunk not attempted" in lab("progress")[1]


ELIF = RIGHT + "\ndef chosen(x):\n    if x == 0: pass\n" + "".join(f"    elif x == {n}: pass\n" for n in range(1, 400))
CHAIN = f'@exercise("4.1")\ndef pad_and_chunk(flat, ranks):\n    return {" + ".join(["1"] * 2000)}\n'
DEEP_ARGUMENTS = f'@exercise("4.1")\ndef pad_and_chunk(flat, ranks={"-" * 900}1):\n    return 1\n'
BRANCHES = '@exercise("4.1")\ndef pad_and_chunk(flat, ranks):\n    if ranks == 0: pass\n' + "".join(
    f"    elif ranks == {n}: pass\n" for n in range(1, 250)
)


@pytest.mark.usefixtures("verdict")
@pytest.mark.parametrize(
    "cell", [ELIF, CHAIN, DEEP_ARGUMENTS, BRANCHES], ids=["elif", "chain", "arguments", "branches"]
)
def test_an_answer_too_deep_to_compare_is_not_blank_and_hides_no_other(lab: Run, cell: str) -> None:
    for name in ("04", "05"):
        lab("start", name)
    write(cell)
    assert "yours: passed" in lab("check", "4.1")[1]
    said = lab("progress")[1]
    assert "4.1 pad_and_chunk passed" in said
    assert "lab 05 0 of" in said
    age(COPY)
    assert "4.1 pad_and_chunk: carried over" in lab("update", "04")[1]


def test_a_full_disk_leaves_no_half_notebook(lab: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", no_space)
        assert lab("start", "04") == (2, f"minifsdp: {COPY}: no space left on device; name another path\n")
    assert not list(Path().iterdir())
    assert lab("start", "04")[0] == 0


def no_space(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content[:1000])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_progress_of_what_is_no_folder(lab: Run) -> None:
    assert lab("progress", "nowhere") == (2, "minifsdp: nowhere is not a folder: name the folder with your notebooks\n")


# Installed


def test_the_command_line_needs_no_torch_to_list_and_to_copy() -> None:
    check = "import sys, minifsdp.course.cli.lab, minifsdp.course.cli.processes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize("words", [("hint", "4.1"), ("check", "4.1"), ("check", "04"), ("run", "no lab")], ids=str)
def test_nor_for_hints_and_verdicts_which_a_fork_of_the_server_reaches(lab: Run, words: tuple[str, ...]) -> None:
    lab("start", "04")
    program = f"import sys; sys.argv = {['minifsdp', 'lab', *words]}; from minifsdp.course.cli import main\n"
    program += "try: main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("False\n"), done.stderr


@pytest.mark.parametrize("name", catalogue.all_labs())
def test_hints_are_those_of_the_references(name: str) -> None:
    found = {each: hints_of(each) for each in catalogue.stubs_of(name)}
    assert found == {ref.id: ref.hints for ref in lab_references(name)}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a wheel of this checkout is installed, as a user's site-packages."""
    root, folder = Path(minifsdp.__file__).parents[1], tmp_path_factory.mktemp("wheel")
    build_system = tomllib.loads((root / "pyproject.toml").read_text())["build-system"]
    assert build_system["build-backend"] == "setuptools.build_meta"
    build = ["setup.py", "-q", "egg_info", "--egg-base", folder, "build", "--build-base", folder / "build"]
    wheel = ["bdist_wheel", "--bdist-dir", folder / "files", "--dist-dir", folder]
    subprocess.run([sys.executable, *build, *wheel], cwd=root, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as files:  # to install one that is Python alone is to unpack it
        files.extractall(folder / "installed")
    return folder / "installed"


def run_installed(installed: Path, folder: Path, code: str) -> list[str]:
    code += "; import minifsdp; print(minifsdp.__file__)"
    command, env = [sys.executable, "-c", code], {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    *said, file = done.stdout.splitlines()
    assert file == str(installed / "minifsdp/__init__.py")
    return said


def test_a_wheel_brings_the_labs_and_uses_its_own(installed: Path, tmp_path: Path) -> None:
    code = "from minifsdp.course.workshop.copies import start; from pathlib import Path; print(start('04', Path()))"
    assert run_installed(installed, tmp_path, code) == [COPY]
    assert sorted(path.name.partition("-")[0] for path in installed.iterdir()) == ["minifsdp", "minifsdp"]


def test_a_wheel_has_each_exercise_and_no_wrong_answer(installed: Path) -> None:
    labs = installed / "minifsdp/labs"
    there = sorted(str(path.relative_to(labs)) for path in labs.rglob("*.py"))
    files = [path for name in catalogue.all_labs() for path in catalogue.exercise_files(name).values()]
    assert len(files) > 90
    shared = [path for path in labs_folder().glob("lab*/*.py") if path.stem in ("__init__", "shared")]
    assert there == sorted(str(path.relative_to(labs_folder())) for path in (*files, *shared))


def test_every_answer_is_imported_by_one_path_from_what_is_installed(installed: Path, tmp_path: Path) -> None:
    """As learners do in scripts of their own; the path of before warns, and finds the same."""
    answers = {name: [ref.name for ref in lab_references(name)] for name in catalogue.all_labs()}
    lines = [f"from minifsdp.answers.lab{name} import {', '.join(names)}" for name, names in answers.items()]
    lines += ["print(len({*map(id, (" + ", ".join(answers["05"]) + "))}))"]
    lines += ["import warnings; seen = warnings.catch_warnings(record=True).__enter__()"]
    lines += ["warnings.simplefilter('always')"]
    lines += ["from minifsdp.course.reference.lab05 import gather as before"]
    lines += ["import minifsdp.answers.lab05; print(before is minifsdp.answers.lab05.gather)"]
    lines += ["print(*(each.message for each in seen if 'lab05' in str(each.message)), sep='\\n')"]
    assert run_installed(installed, tmp_path, "\n".join(lines)) == [
        str(len(answers["05"])),
        "True",
        "minifsdp.course.reference.lab05 is minifsdp.answers.lab05 now; the old path goes with the next release",
    ]
