"""The rules of the decks. Whether these of slides/ keep them is `make slides-check`, the look at each `make slides`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment
from jinja2.nodes import Const
from matplotlib.figure import Figure

from minifsdp.course.ladder.rungs import PIPELINE_RUNGS, RUNGS, TENSOR_RUNGS

SLIDES = Path(__file__).parents[2] / "slides"
sys.path.insert(0, str(SLIDES))

import compose  # noqa: E402
import decks  # noqa: E402
from draw.canvas import WIDTH, draw_all  # noqa: E402
from draw.legible import illegible  # noqa: E402

SLIDE = "\n# One\n\n{{ rung('ddp') }}\n\n{{ figure('one', 'one') }}\n\n<!-- What to say. -->\n"


@pytest.mark.parametrize(
    ("slides", "figures", "says"),
    [
        ([SLIDE] * 15, {"one"}, None),
        ([SLIDE] * 14, {"one"}, "has 14 slides: 15 to 30"),
        ([SLIDE] * 31, {"one"}, "has 31 slides: 15 to 30"),
        ([SLIDE] * 15, {"one", "two"}, "does not show two"),
        ([SLIDE.replace("{{ rung('ddp') }}", "")] * 2 + [SLIDE] * 13, {"one"}, "slide 2: no {{ rung(...) }}"),
        ([SLIDE] * 14 + ["\nno heading\n\n<!-- What to say. -->\n"], {"one"}, "slide 15: no heading"),
        ([SLIDE] * 14 + ["\n# One\n\n<!-- _class: title -->\n"], {"one"}, "slide 15: no notes for the speaker"),
    ],
)
def test_a_rule_that_is_broken_is_named(slides: list[str], figures: set[str], says: str | None) -> None:
    drawn: Any = dict.fromkeys(figures)
    deck = compose.Deck("made-up", "---\nmarp: true\n---\n" + "---\n".join(slides), drawn, {})
    assert len(deck.slides) == len(slides)
    found = compose.problems(deck)
    assert [says in each for each in found] == [True] if says else found == []


def test_a_slide_says_how_far_up_the_ladder_it_is() -> None:
    source = "---\nmarp: true\n---\n{{ rung('zero1') }}\n---\n{{ rung('zero1', 'towards') }}\n"
    on, towards = compose.Deck("made-up", source, {}, {}).slides
    assert f"rung 4 of {len(RUNGS)}: <b>zero1</b>" in on
    assert (on.count('"done"'), on.count('"ahead"')) == (4, len(RUNGS) - 4)
    assert f"towards rung 4 of {len(RUNGS)}" in towards
    assert (towards.count('"done"'), towards.count('"ahead"')) == (3, len(RUNGS) - 3)
    second = compose.Deck("made-up", "---\nmarp: true\n---\n{{ rung('tp-sp') }}\n", {}, {}).slides[0]
    assert f"second ladder,  rung 3 of {len(TENSOR_RUNGS)}: <b>tp-sp</b>" in second
    assert (second.count('"done"'), second.count('"ahead"')) == (3, len(TENSOR_RUNGS) - 3)
    third = compose.Deck("made-up", "---\nmarp: true\n---\n{{ rung('1f1b') }}\n", {}, {}).slides[0]
    assert f"third ladder,  rung 4 of {len(PIPELINE_RUNGS)}: <b>1f1b</b>" in third


def test_a_figure_that_is_not_what_its_code_draws_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decks, "SLIDES", tmp_path)
    (tmp_path / "figures").mkdir()
    deck = compose.Deck("made-up", SLIDE, {"one": Figure, "two": Figure}, {})
    for path, image in draw_all(deck.figures, tmp_path / "figures").items():
        path.write_bytes(image)
    assert decks.stale(deck) == []
    (tmp_path / "figures" / "one.svg").write_bytes(b"of yesterday")
    (tmp_path / "figures" / "two.svg").unlink()
    assert ["draws today" in each for each in decks.stale(deck)] == [True, False]
    assert "never drawn" in decks.stale(deck)[1]


def test_claims_lead_to_their_labs() -> None:
    said = compose.Deck("made-up", "{{ claim('C4', 'C2') }}", {}, {}).text
    assert [f"<b>lab {lab}</b>" in said for lab in ("05", "08", "00")] == [True] * 3
    assert all(claim not in said for claim in ("C4", "C2"))
    with pytest.raises(KeyError, match="C99"):
        _ = compose.Deck("made-up", "{{ claim('C99') }}", {}, {}).text


def test_a_slide_names_its_labs_by_title_while_the_line_has_room() -> None:
    one, many = compose.Deck(
        "made-up", "---\nmarp: true\n---\n{{ claim('C14') }}\n---\n{{ claim('C4', 'C9', 'C21') }}\n", {}, {}
    ).slides
    assert "See <b>lab 06</b> (Overlap)" in one
    assert "(" not in many
    assert "</b> and <b>lab 10a</b>" in many


def test_a_slide_takes_its_word_from_the_headings_of_the_lab() -> None:
    said = compose.Deck("made-up", "{{ claim('C2', word='Derived') }}{{ claim('C43', word='Modelled') }}", {}, {}).text
    assert "Derived in <b>lab 00</b>" in said
    assert "Modelled in <b>lab 08</b>" in said
    with pytest.raises(ValueError, match="lab 08 has no heading 'Measured' above C43"):
        _ = compose.Deck("made-up", "{{ claim('C43', word='Measured') }}", {}, {}).text


@pytest.mark.parametrize("name", compose.DECKS)
def test_no_name_is_broken_across_lines(name: str) -> None:
    """A string in an expression of a deck's text is a key; wrapping a paragraph anew breaks it in silence."""
    tree = Environment().parse((SLIDES / f"{name}.md").read_text())
    assert not [const.value for const in tree.find_all(Const) if isinstance(const.value, str) and "\n" in const.value]


def test_a_figure_that_nobody_draws_cannot_be_shown() -> None:
    with pytest.raises(ValueError, match="there is no figure 'none'"):
        _ = compose.Deck("made-up", SLIDE.replace("'one', ", "'none', "), {"one": None}, {}).text  # type: ignore[dict-item]


# Figures that can be read


def page(height: float = 4.6, width: float = WIDTH) -> Figure:
    return Figure(figsize=(width, height))


def test_small_type_and_a_figure_that_wastes_its_slide_are_named() -> None:
    figure = page(2.0, 9.0)
    figure.subplots().text(0.5, 0.5, "small", fontsize=17)
    figure.axes[0].axis("off")
    assert illegible(figure) == [
        "9.0 x 2.0 inches: 11.5 x 3.0 to 5.2 fill a slide",
        "'small' has 17 pt: 18 at least",
    ]


def test_text_that_leaves_the_figure_is_named() -> None:
    figure = page()
    axes = figure.subplots()
    axes.set(xlim=(0, 0.99), yticks=[])  # the last tick is not drawn
    axes.tick_params(labelsize=18)
    axes.text(0.9, 0.5, "far too long for its place", fontsize=18)
    assert illegible(figure) == ["'far too long for its place' is cut off"]


@pytest.mark.parametrize(
    ("behind", "ink", "is_read"),
    [("#009E73", "white", False), ("#009E73", "black", True), ("#0072B2", "white", True), ("#0072B2", "black", False)],
)
def test_contrast_is_that_with_what_is_drawn_behind_a_text(behind: str, ink: str, is_read: bool) -> None:
    for fill in ("bar", "area", "label"):
        figure = page()
        axes = figure.subplots()
        axes.axis("off")
        style: Any = {"fontsize": 20, "color": ink}
        if fill == "bar":
            axes.bar(0, 1, color=behind)
        elif fill == "area":
            axes.stackplot([-1, 1], [1, 1], colors=[behind])
        else:
            style |= {"bbox": {"facecolor": behind}}
        axes.text(0, 0.5, "words", **style)
        assert (illegible(figure) == []) == is_read, fill


def test_text_outside_a_stepped_area_is_on_white() -> None:
    figure = page()
    axes = figure.subplots()
    axes.axis("off")
    axes.stackplot([0, 1, 2], [[0, 4, 4]], colors=["#1B1F24"], step="post")
    axes.text(0.3, 2, "black on white", fontsize=20, color="black")
    assert illegible(figure) == []
