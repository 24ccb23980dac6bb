"""The labs' exercises: references pass, blanks are recognized, wrong answers are rejected with the right words.

And their notebooks: what each must have, and the cell in which each statement is measured.

There are some 1,700 wrong answers, and `make test-labs` runs all of them. It then writes down what each lab
was, in wrong_answers.json, by `python tests/labs/test_labs.py`. Of a lab that is so still `make test-course` runs one
wrong answer of each exercise, and the references in the check's own setting; the others are marked `rest`. Of a lab
that has changed it runs all.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from functools import cache
from typing import Any

import pytest
from all_ran import WHEN_ALL_RAN, digest, draw, is_as_when_all_ran, load, rest_of, wrong_answers

from minifsdp.course.workshop import wrong
from minifsdp.course.workshop.catalogue import (
    EXERCISE,
    Cell,
    all_labs,
    cells_with,
    exercise_file,
    exercise_files,
    folder_of,
    lab_of,
    labs_folder,
    read_cells,
    setup_of,
    shipped_notebook,
    source_of,
    stubs_of,
    tags_of,
)
from minifsdp.course.workshop.cells import define, last_lines
from minifsdp.course.workshop.checking import AnswerError, Variant, examine, find_check
from minifsdp.course.workshop.references import Reference, is_blank, lab_references

CLAIMS = {
    "00": ["C1", "C2", "C3", "C35", "C36"],
    "01": ["C5", "C6", "C38", "C39", "C40"],
    "02": ["C7", "C40"],
    "03": ["C8"],
    "04": ["C6", "C9", "C10"],
    "05": ["C4", "C8", "C11", "C12", "C13", "C37"],
    "06": ["C14"],
    "07": ["C15"],
    "08": ["C4", "C16", "C43"],
    "09": ["C17", "C18", "C41", "C46"],
    "10a": ["C9", "C19", "C20", "C21"],
    "10b": ["C22", "C23", "C41", "C42"],
    "11": ["C25", "C44"],
    "12": ["C26"],
    "13": ["C13", "C27"],
    "14": ["C28", "C29", "C32"],
    "15": ["C30", "C31", "C45"],
}
LABS = sorted({*CLAIMS, *all_labs()})
REFERENCES = [ref for lab in LABS for ref in lab_references(lab)]
PARTS = ("lab", "called")  # that have to be as they were for the sample to do
RAISES = re.compile(
    r"rank \d+ failed|no answer from|ranks? .*(did not|still|timed out)|it raises|the cell itself raises"
)


for right in labs_folder().glob("lab*/right.py"):
    load(right)
WRONG = [each for lab in LABS for each in wrong_answers(lab)]


def verdict(exercise: str, source: str, variant: Variant) -> str | None:
    """What the check says of an answer, None if it passes: as a fresh process would, but in this one."""
    try:
        answer = define(setup_of(lab_of(exercise)), f'@exercise("{exercise}")\n{source}', exercise)
        examine(exercise, answer, variant)
    except AnswerError as error:
        return str(error)
    except Exception as error:
        return "it raises: " + last_lines(error)
    return None


@cache
def rejection(number: int) -> str | None:
    """What is said of a wrong answer in the check's own setting."""
    return verdict(WRONG[number].exercise, WRONG[number].source, Variant())


def exercise_id(ref: Reference) -> str:
    return ref.id


def wrong_id(number: int) -> str:
    return f"{WRONG[number].exercise}-{re.sub(r'[^a-z0-9]+', '_', WRONG[number].slip.lower())[:60]}"


def referenced(ref: Reference, **setting: int) -> Any:
    return pytest.param(
        ref,
        Variant(**setting),
        id=f"{ref.id}-{'another' if setting else 'default'}",
        marks=rest_of(lab_of(ref.id), *PARTS, sampled=not setting),
    )


class TestExercises:
    @pytest.mark.parametrize(
        ("ref", "variant"),
        [referenced(ref, **setting) for ref in REFERENCES for setting in ({}, {"ranks": 3, "seed": 1, "size": 10})],
    )
    def test_a_reference_passes_its_check(self, ref: Reference, variant: Variant) -> None:
        assert verdict(ref.id, ref.source, variant) is None

    @pytest.mark.parametrize("ref", REFERENCES, ids=exercise_id)
    def test_the_stub_is_blank_and_other_empty_bodies_are_answers(self, ref: Reference) -> None:
        stub = stubs_of(lab_of(ref.id))[ref.id].source
        assert is_blank(stub, ref)
        for body in ("pass", "return None"):
            answered = re.sub(r"\.\.\.\s*$", body, stub)
            assert answered != stub
            assert not is_blank(answered, ref)

    @pytest.mark.parametrize("ref", REFERENCES, ids=exercise_id)
    def test_two_hints_and_a_sentence_for_success(self, ref: Reference) -> None:
        assert len(ref.hints) == 2
        assert len({hint.strip() for hint in ref.hints} - {""}) == 2
        assert (find_check(ref.id).__doc__ or "").strip().endswith(".")


class TestFiles:
    @pytest.mark.parametrize("ref", REFERENCES, ids=exercise_id)
    def test_an_exercise_is_one_file_whose_answer_is_typed(self, ref: Reference) -> None:
        """Typed in full: mypy --strict asks it of an answer only if a part is, since checks are not."""
        file = exercise_file(ref.id)
        assert file.stem == f"ex{ref.id.partition('.')[2]}_{ref.name}"
        for part in (ref.function, find_check(ref.id)):
            assert part.__module__ == f"minifsdp.answers.lab{lab_of(ref.id)}.{file.stem}"
        signature = inspect.signature(ref.function)
        given = [signature.return_annotation, *(each.annotation for each in signature.parameters.values())]
        assert inspect.Signature.empty not in given

    @pytest.mark.parametrize("lab", LABS)
    def test_a_lab_gives_its_answers_and_a_check_imports_no_wrong_one(self, lab: str) -> None:
        answers = importlib.import_module(f"minifsdp.answers.lab{lab}")
        assert {name: getattr(answers, name) for name in answers.__all__} == {
            ref.name: ref.function for ref in lab_references(lab)
        }
        files = [*exercise_files(lab).values(), *folder_of(lab).glob("shared.py"), folder_of(lab) / "__init__.py"]
        assert not [
            file.name for file in files if re.search(r"import .*_wrong|_wrong import|\bright import", file.read_text())
        ]


class TestOtherRightAnswers:
    @pytest.mark.parametrize("answer", wrong.accepted, ids=lambda answer: answer.exercise)
    def test_it_passes(self, answer: wrong.Right) -> None:
        assert verdict(answer.exercise, answer.source, Variant()) is None


@cache
def numbers_of(exercise: str) -> list[int]:
    return [number for number, answer in enumerate(WRONG) if answer.exercise == exercise]


def wrong_answer(number: int) -> Any:
    exercise = WRONG[number].exercise
    mine = numbers_of(exercise)
    marks = rest_of(lab_of(exercise), *PARTS, sampled=number == mine[draw(exercise, len(mine))])
    return pytest.param(number, id=wrong_id(number), marks=marks)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # some do just this
class TestWrongAnswers:
    @pytest.mark.parametrize("number", map(wrong_answer, range(len(WRONG))))
    def test_it_is_rejected_with_its_words(self, number: int) -> None:
        said = rejection(number)
        assert said is not None, f"accepted: {WRONG[number].slip}"
        assert WRONG[number].words in said

    @pytest.mark.parametrize("ref", REFERENCES, ids=exercise_id)
    def test_ci_runs_one_or_all(self, ref: Reference) -> None:
        mine = [wrong_answer(number) for number, each in enumerate(WRONG) if each.exercise == ref.id]
        assert sum(not each.marks for each in mine) == (1 if is_as_when_all_ran(lab_of(ref.id), *PARTS) else len(mine))

    @pytest.mark.parametrize("ref", REFERENCES, ids=exercise_id)
    def test_there_are_four_for_different_reasons(self, ref: Reference) -> None:
        mine = [each for each in WRONG if each.exercise == ref.id]
        assert len(mine) >= 4
        words = [each.words for each in mine]
        assert len(set(words)) == len(words)
        assert not [(a, b) for a in words for b in words if a is not b and a in b], "one's words contain another's"
        assert all(each.name == ref.name and each.slip for each in mine)

    @pytest.mark.parametrize(
        "id", [pytest.param(each.id, marks=rest_of(lab_of(each.id), *PARTS)) for each in REFERENCES]
    )
    def test_three_run_to_the_end(self, id: str) -> None:
        mine = [number for number, each in enumerate(WRONG) if each.exercise == id]
        assert sum(not RAISES.match(rejection(number) or "") for number in mine) >= 3


class TestNotebooks:
    @pytest.mark.parametrize("lab", LABS)
    def test_one_set_up_cell_that_says_so(self, lab: str) -> None:
        cells = read_cells(shipped_notebook(lab))
        marked = [cell for cell in cells if source_of(cell).lstrip().startswith("# set-up")]
        assert cells_with(cells, "setup") == marked
        assert len(marked) == 1

    @pytest.mark.parametrize("lab", LABS)
    def test_a_cell_for_each_exercise(self, lab: str) -> None:
        cells = read_cells(shipped_notebook(lab))
        tags = [tag.removeprefix(EXERCISE) for cell in cells for tag in tags_of(cell) if tag.startswith(EXERCISE)]
        assert tags == [ref.id for ref in lab_references(lab)]

    @pytest.mark.parametrize(("lab", "claim"), [(lab, claim) for lab, claims in CLAIMS.items() for claim in claims])
    def test_a_cell_measures_the_claim(self, lab: str, claim: str) -> None:
        cells = cells_with(read_cells(shipped_notebook(lab)), claim)
        assert cells, f"no cell of lab {lab} has the tag {claim}"
        assert any(printed(cell) for cell in cells)

    @pytest.mark.parametrize("lab", LABS)
    def test_predictions_come_before_their_outcomes(self, lab: str) -> None:
        code = "\n".join(source_of(cell) for cell in read_cells(shipped_notebook(lab)) if cell["cell_type"] == "code")
        predicted = [(match[1], match.start()) for match in re.finditer(r'^predict\(\s*"([^"]+)", \.\.\.', code, re.M)]
        measured = [(match[1], match.start()) for match in re.finditer(r'^\s*outcome\(\s*"([^"]+)"', code, re.M)]
        assert predicted
        assert {name for name, _ in predicted} == {name for name, _ in measured}
        first = dict(reversed(measured))
        assert all(place < first[name] for name, place in predicted)

    @pytest.mark.parametrize("lab", LABS)
    def test_there_are_pictures_and_from_lab_02_on_a_timeline(self, lab: str) -> None:
        cells = [cell for cell in read_cells(shipped_notebook(lab)) if cell["cell_type"] == "code"]
        shown = [cell for cell in cells if any("image/png" in each.get("data", {}) for each in cell["outputs"])]
        assert shown
        assert any(re.search(r"\bstages\(|\bcurve\(", source_of(cell)) for cell in shown)
        if lab >= "02":
            assert any(re.search(r"\b(timeline|pipeline)\(", source_of(cell)) for cell in shown)

    @pytest.mark.parametrize("lab", LABS)
    def test_every_cell_has_run_in_order_and_none_failed(self, lab: str) -> None:
        cells = [cell for cell in read_cells(shipped_notebook(lab)) if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        assert not [each for cell in cells for each in cell["outputs"] if each["output_type"] == "error"]

    @pytest.mark.parametrize("lab", LABS)
    def test_nothing_of_this_machine_is_stored(self, lab: str) -> None:
        text = "\n".join(printed(cell) for cell in read_cells(shipped_notebook(lab)) if cell["cell_type"] == "code")
        assert not re.findall(r"/tmp/\S*|/home/\S*|/root/\S*|0x[0-9a-f]{6,}|ipykernel_\d+", text)


def printed(cell: Cell) -> str:
    """The text that a cell has put out, and what stands for its pictures."""
    streams = ["".join(each.get("text", "")) for each in cell["outputs"]]
    data = ["".join(each.get("data", {}).get("text/plain", "")) for each in cell["outputs"]]
    return "".join(streams + data)


if __name__ == "__main__":
    WHEN_ALL_RAN.write_text(json.dumps({lab: digest(lab) for lab in LABS}, indent=1) + "\n")
