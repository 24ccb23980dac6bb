"""The labs' shape: what is shown and what is folded, the time that they ask for, their pictures and lectures."""

from __future__ import annotations

import re
from typing import Any

import pytest

from minifsdp.course.workshop.catalogue import (
    EXERCISE,
    SETUP,
    about,
    all_labs,
    labs_folder,
    read_cells,
    shipped_notebook,
    source_of,
    stubs_of,
    tags_of,
)

LABS = {lab: read_cells(shipped_notebook(lab)) for lab in all_labs()}
WORDS_A_MINUTE = 200
FOLDED = "hide-input"


def lines_of(cell: dict[str, Any]) -> int:
    return sum(bool(line.strip()) for line in source_of(cell).splitlines())


def code(lab: str) -> list[dict[str, Any]]:
    return [cell for cell in LABS[lab] if cell["cell_type"] == "code"]


def is_folded(cell: dict[str, Any]) -> bool:
    return FOLDED in tags_of(cell)


@pytest.mark.parametrize("lab", LABS)
def test_nothing_that_a_learner_writes_or_reads_is_folded(lab: str) -> None:
    for cell in code(lab):
        tags, source = tags_of(cell), source_of(cell)
        to_write = any(tag.startswith(EXERCISE) for tag in tags) or source.startswith("predict(")
        assert not (is_folded(cell) and (to_write or "shown" in tags)), source[:60]
        assert is_folded(cell) or SETUP not in tags
        assert is_folded(cell) == bool(cell["metadata"].get("jupyter", {}).get("source_hidden")), (
            "on the site as in Lab"
        )


def test_what_is_shown_is_less_than_three_lines_for_each_that_is_written() -> None:
    """The code around an exercise is folded: of seven lines in a notebook a learner writes one."""
    cells = [cell for lab in LABS for cell in code(lab)]
    written = sum(lines_of(cell) for cell in cells if any(tag.startswith(EXERCISE) for tag in tags_of(cell)))
    shown = sum(lines_of(cell) for cell in cells if not is_folded(cell))
    assert sum(map(lines_of, cells)) > 7 * written
    assert shown < 3 * written


@pytest.mark.parametrize("lab", LABS)
def test_exercises_say_how_long_they_take_and_a_lab_has_that_time_and_the_time_to_read(lab: str) -> None:
    stubs = stubs_of(lab).values()
    assert all(stub.minutes and stub.difficulty for stub in stubs)
    words = sum(len(source_of(cell).split()) for cell in LABS[lab] if cell["cell_type"] == "markdown")
    needed = sum(stub.minutes or 0 for stub in stubs) + words / WORDS_A_MINUTE
    minutes = about(lab)["minutes"]
    assert minutes - 10 <= needed <= minutes + 2, f"{needed:.0f} minutes"
    texts = "\n".join(source_of(cell) for cell in LABS[lab] if cell["cell_type"] == "markdown")
    said = re.findall(r"(?:\*\*Time\*\*|\| time \|) (\d+) minutes", texts)
    assert said == [str(minutes)]
    assert minutes <= 95 or "two sessions" in texts


@pytest.mark.parametrize("lab", LABS)
def test_a_lab_begins_with_a_picture_and_names_its_lecture(lab: str) -> None:
    head = source_of(LABS[lab][0])
    (picture,) = re.findall(r"!\[[^\]]{40,}\]\(\.\./(slides/figures/[\w-]+\.svg)\)", head)
    (deck,) = re.findall(r"\*From \[lecture \d, [^\]]+\]\(\.\./(slides/\w+\.md)\)", head)
    assert (labs_folder().parent / picture).exists()
    text = (labs_folder().parent / deck).read_text()
    assert f'figure("{picture.split("/")[-1].removesuffix(".svg")}"' in text, "it is one of that lecture's"
    (labs,) = re.findall(r"^Lecture \d of 7: before labs? (.+)$", text, re.MULTILINE)
    assert lab in re.findall(r"\w+", labs)


HEAD = re.compile(
    r"\*\*You need\*\* \S.* "
    r"\*\*Time\*\* \d+ minutes(?:, in two sessions; the break is marked)?\. "
    r"\*\*Runs\*\* on a laptop \([^()]+\)(?:, on one GPU(?: that the ranks share \(`MINIFSDP_SHARE_GPU=1`\))?)?"
    r", or on (?:one GPU|a GPU node \(NCCL, one rank per GPU\))\. "
    r"\*\*Memory\*\* (?:at most|less than|about|a few) (?:tens of )?(?:[\d.]+ )?MiB of "
)


@pytest.mark.parametrize("lab", LABS)
def test_every_head_says_what_a_lab_needs_in_one_form(lab: str) -> None:
    assert HEAD.search(" ".join(source_of(LABS[lab][0]).split()))


@pytest.mark.parametrize("lab", LABS)
def test_questions_are_numbered_and_every_rung_says_what_is_missing(lab: str) -> None:
    """An answer is Markdown: a blank line ends the block of HTML, in which backticks would be shown as they are."""
    texts = "\n\n".join(source_of(cell) for cell in LABS[lab] if cell["cell_type"] == "markdown")
    assert [texts.count(f"\n## {title}\n") for title in ("What is still missing", "Questions")] == [1, 1]
    questions = texts.partition("\n## Questions\n")[2]
    assert re.findall(r"^\*\*(\d+)\. ", questions, re.MULTILINE) == [
        str(number) for number in range(1, questions.count("<details>") + 1)
    ]
    shown = re.findall(r"^<\w.*?(?=\n\n|\Z)", texts, re.MULTILINE | re.DOTALL)  # blocks of HTML
    assert [each for each in shown if "`" in each] == []


def test_lab_02_ends_with_its_last_exercise_and_what_follows_is_more() -> None:
    texts = "\n".join(source_of(cell) for cell in LABS["02"] if cell["cell_type"] == "markdown")
    headings = re.findall(r"^#{2,3} (.+)$", texts, re.MULTILINE)
    after = headings[headings.index("2.6 Accumulate without communication") :]
    assert after[1:3] == ["What is still missing", "What to remember"]
    more = after.index("More: break it")
    assert sum(heading.startswith("Break it") for heading in after[more:]) == 3
    assert not any(heading.startswith("Break it") for heading in after[:more])
