"""One meaning per colour: drawing code has no colours of its own, families share none, and text can be read."""

from __future__ import annotations

import ast
import re
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.colors import CSS4_COLORS, TABLEAU_COLORS

from minifsdp.instruments.plots import palette
from minifsdp.instruments.watch.storages import TAGS

ROOT = Path(__file__).parents[2]
DRAWING = sorted(
    each
    for folder in ("minifsdp/course", "slides", "labs", "docs", "benchmarks")
    for each in (ROOT / folder).rglob("*.py")
    if each.name != "palette.py" and "node_modules" not in each.parts
)
STYLE_SHEETS = [ROOT / "slides/theme.css", *sorted((ROOT / "docs/site").rglob("*.css"))]
NEUTRAL = {"white", "black", "none"}
FAMILIES = {
    name: set(colours.values() if isinstance(colours, dict) else colours)
    for name, colours in vars(palette).items()
    if name.endswith("_COLOURS")
}
GREYS = {palette.BLACK, palette.INK, palette.SOFT, palette.LINE, palette.PALE, palette.WHITE}
SHARED = {  # one thing with two names
    frozenset({"LANE_COLOURS", "COLLECTIVE_COLOURS"}): {palette.GATHER},
    frozenset({"STRATEGY_COLOURS", "CONTESTANT_COLOURS"}): set(palette.STRATEGY_COLOURS.values()),
}
COLOUR_ARGUMENT = re.compile(r"(face|edge|label|e|mec|mfc)?colou?rs?$|^(fc|ec|c)$")


def own_colours(path: Path) -> list[str]:
    """Hex codes, and names of colours that are given as a colour."""
    found = []
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += re.findall(r"(?<!\w)#[0-9a-fA-F]{6}\b|^#[0-9a-fA-F]{3}$", node.value)
        if isinstance(node, ast.keyword) and COLOUR_ARGUMENT.search(node.arg or ""):
            names = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            found += [
                each
                for each in names
                if isinstance(each, str)
                and (each in CSS4_COLORS or each in TABLEAU_COLORS or re.fullmatch(r"C\d|[bgrcmyk]|0?\.\d+", each))
                and each not in NEUTRAL
            ]
    return found


@pytest.mark.parametrize(
    "code",
    ['plot(color="#0072B2")', 'plot(color="red")', 'look = {"text": "#123"}', 'bar(facecolor=("white", "C1"))'],
)
def test_a_colour_of_ones_own_is_found(code: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(code)
    assert len(own_colours(tmp_path / "own.py")) == 1


def test_only_the_palette_has_colours() -> None:
    assert len(DRAWING) > 100
    assert {str(each.relative_to(ROOT)): own for each in DRAWING if (own := own_colours(each))} == {}


@pytest.mark.parametrize("sheet", STYLE_SHEETS, ids=lambda each: each.name)
def test_style_sheets_take_theirs_from_it(sheet: Path) -> None:
    known = {each.lower() for family in FAMILIES.values() for each in family} | {each.lower() for each in GREYS}
    assert set(re.findall(r"#[0-9a-f]{3,8}\b", sheet.read_text().lower())) <= known


@pytest.mark.parametrize(("one", "other"), [*combinations(FAMILIES, 2)])
def test_families_share_no_colour(one: str, other: str) -> None:
    assert FAMILIES[one] & FAMILIES[other] <= SHARED.get(frozenset({one, other}), set()) | GREYS


def test_a_family_s_colours_differ() -> None:
    for name in FAMILIES:
        colours = getattr(palette, name)
        assert len(set(colours.values() if isinstance(colours, dict) else colours)) == len(colours), name


def test_every_tag_has_a_colour() -> None:
    """In the same order: the explorer writes bytes by the number of their tag, and names them by the colours."""
    assert list(palette.TAG_COLOURS) == list(TAGS)


def test_text_has_a_contrast_of_4_5() -> None:
    for colour in {each for family in FAMILIES.values() for each in family} | GREYS:
        assert palette.contrast(palette.ink_on(colour), colour) >= 4.5, colour
        assert palette.contrast(palette.as_text(colour), palette.WHITE) >= 4.5, colour


def test_contrast_is_that_of_wcag() -> None:
    assert palette.contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert palette.contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.005)  # the well-known near miss


def test_names_of_one_thing_have_one_colour() -> None:
    assert palette.colour_of("ZeRO-3") == palette.colour_of("FULL_SHARD") == palette.STRATEGY_COLOURS["FSDP"]
    assert palette.colour_of("bfloat16") == palette.DTYPE_COLOURS["bf16"]
    for stage, name in (("stage 1", "ZeRO-1"), ("stage 2", "ZeRO-2"), ("stage 3", "FSDP"), ("your FSDP", "FSDP")):
        assert palette.colour_of(stage) == palette.STRATEGY_COLOURS[name]
    assert palette.colour_of("no such name") is None
