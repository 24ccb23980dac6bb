"""What a deck is made of, and the rules that it keeps.

In a deck's Markdown stand, beside Marp's own directives,

    {{ figure("stages", "what is to be seen, for who cannot see it") }}
    {{ claim("C2") }}              at the bottom left: "See lab 00", where this slide's statement is examined; with
                                   word="Derived", "Derived in lab 00": the lab's number, under a heading of this word
    {{ rung("fsdp") }}             where on its ladder this slide and those after it are: at the top right
    {{ gb(psi) }}                  a number: any name of the deck's `numbers()`, written by one of its functions

Rules: 15 to 30 slides; each has a heading and notes for the speaker; a deck that shows its place on the ladder does so
from slide 2 on; every figure that is drawn is shown; every claim is one of labs/claims.toml, and its word one of the
lab's headings.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from draw.canvas import Draw
from jinja2 import Environment, StrictUndefined

from minifsdp.course.ladder.axes import AXES

SLIDES = Path(__file__).parent
LABS = SLIDES.parent / "labs"
DECKS = ("memory", "ddp", "fsdp", "overlap", "practice", "scale", "split")
FEWEST, MOST = 15, 30
TITLES_ROOM = 76  # characters of the labs that a slide names at its bottom left
DIRECTIVE = re.compile(r"\s*(_?[a-z]+: *\S+|header: .*)\s*$", re.IGNORECASE)  # of Marp's, in a comment as notes are


@dataclass(frozen=True)
class Deck:
    """A lecture.

    Attributes:
        name: of its files.
        source: the Markdown, numbers not filled in.
        figures: by name what draws it.
        numbers: what the Markdown's names stand for.
    """

    name: str
    source: str
    figures: Mapping[str, Draw]
    numbers: Mapping[str, Any]

    @cached_property
    def text(self) -> str:
        """The Markdown that Marp is given."""
        environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
        helpers: dict[str, Callable[..., str]] = {
            "figure": partial(_figure, self.figures),
            "claim": _claim,
            "rung": _rung,
        }
        return environment.from_string(self.source).render(**helpers, **self.numbers)

    @cached_property
    def slides(self) -> list[str]:
        """Without the front matter."""
        return re.split(r"^---$", self.text, flags=re.MULTILINE)[2:]


def load(name: str) -> Deck:
    """The deck, with its numbers computed."""
    drawn = import_module(f"draw.{name}")
    return Deck(name, (SLIDES / f"{name}.md").read_text(), drawn.FIGURES, drawn.numbers())


def problems(deck: Deck) -> list[str]:
    """Which rules it breaks."""
    found = []
    if not FEWEST <= len(deck.slides) <= MOST:
        found.append(f"{deck.name}.md has {len(deck.slides)} slides: {FEWEST} to {MOST}")
    for number, slide in enumerate(deck.slides, 1):
        if not re.search(r"^# \S", slide, re.MULTILINE):
            found.append(f"{deck.name}.md, slide {number}: no heading")
        if not any(not DIRECTIVE.match(note) for note in re.findall(r"<!--(.*?)-->", slide, re.DOTALL)):
            found.append(f"{deck.name}.md, slide {number}: no notes for the speaker")
    if "<!-- header:" in deck.text and "<!-- header:" not in deck.slides[1]:
        found.append(f"{deck.name}.md, slide 2: no {{{{ rung(...) }}}}")
    hidden = [name for name in deck.figures if f"(figures/{name}.svg)" not in deck.text]
    return found + [f"{deck.name}.md does not show {name}" for name in hidden]


def _figure(known: Mapping[str, Draw], name: str, says: str) -> str:
    if name not in known:
        raise ValueError(f"there is no figure {name!r}: {', '.join(known)}")
    return f"![{says}](figures/{name}.svg)"


def _rung(name: str, where: str = "") -> str:
    """Marp's header, with a ladder's rungs as a strip: on the rung `name`, or `where`, "towards" or "after" it."""
    words = ("", "second ladder, ", "third ladder, ", "fourth ladder, ")  # `all` has rungs of these
    ladders = zip(words, AXES.values(), strict=False)
    ladder, rungs = next((which, axis.rungs) for which, axis in ladders if name in axis.rungs)
    at = list(rungs).index(name)
    reached = at + (where != "towards")
    strip = "".join(f'<i class="{"done" if each < reached else "ahead"}"></i>' for each in range(len(rungs)))
    return f"<!-- header: '{strip} {ladder}{where} rung {at + 1} of {len(rungs)}: <b>{name}</b>' -->"


def _claim(*numbers: str, word: str = "") -> str:
    """The labs to see: their numbers, and their titles while the line has room.

    Args:
        numbers: of claims.
        word: "Measured", "Modelled", "Derived", "Computed" or "Counted": how these labs get the slide's number.

    Raises:
        ValueError: a lab has none of these claims under a heading that begins with the word.
    """
    claims, titles = tomllib.loads((LABS / "claims.toml").read_text()), _lab_titles()
    labs = sorted({lab for number in numbers for lab in claims[number]["labs"]})
    for lab in labs if word else ():
        if not any(heading.startswith(f"{word}:") for number in numbers for heading in _headings(lab, number)):
            raise ValueError(f"lab {lab} has no heading {word!r} above {' or '.join(numbers)}")
    roomy = sum(len(titles[lab]) + 10 for lab in labs) <= TITLES_ROOM
    parts = [f"<b>lab {lab}</b>" + (f" ({titles[lab]})" if roomy else "") for lab in labs]
    return f'<div class="claim">{f"{word} in" if word else "See"} {_listed(parts)}</div>'


@cache
def _notebooks() -> dict[str, Any]:
    """The labs, by number."""
    read = [json.loads(path.read_text()) for path in LABS.glob("lab*.ipynb")]
    return {each["metadata"]["minifsdp"]["lab"]: each for each in read}


def _lab_titles() -> dict[str, str]:
    """By number."""
    return {lab: each["metadata"]["minifsdp"]["title"] for lab, each in _notebooks().items()}


def _headings(lab: str, claim: str) -> list[str]:
    """The heading above each of a lab's cells that belong to a claim."""
    found, heading = list[str](), ""
    for cell in _notebooks()[lab]["cells"]:
        if cell["cell_type"] == "markdown":
            for line in re.findall(r"^#+ (.*)", "".join(cell["source"]), re.MULTILINE):
                heading = line
        if claim in cell["metadata"].get("tags", []):
            found.append(heading)
    return found


def _listed(parts: list[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
