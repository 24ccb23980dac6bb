"""slides/*.md -> decks to show: `python slides/decks.py [--check] [--out FOLDER] [DECK ...]`.

A deck is Markdown for Marp with numbers to be filled in; draw/NAME/ computes them and draws the deck's figures into
figures/, which are in git. Then Marp makes HTML, a PDF to project, and NAME-notes.pdf with the speaker's notes, and
Chromium looks at every slide: FOLDER/NAME/01.png and on.
Exit code 1 if a slide overflows, is empty or asks for anything outside its folder.

`--check` needs neither Node nor Chromium and writes nothing: it fails if a figure is not, byte for byte, what its code
draws today, or if a deck breaks a rule (compose.py).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chromium import program
from compose import DECKS, Deck, load, problems
from draw.canvas import check, draw_all
from draw.legible import illegible
from look import look

SLIDES = Path(__file__).parent
MARP = SLIDES / "node_modules" / ".bin" / "marp"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("decks", nargs="*", metavar="DECK", help=f"of {', '.join(DECKS)}; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if something is stale")
    parser.add_argument("--out", type=Path, default=SLIDES.parent / "build" / "slides", help="default: build/slides")
    args = parser.parse_args()
    if unknown := set(args.decks) - set(DECKS):
        parser.error(f"there is no deck {', '.join(sorted(unknown))}: choose from {', '.join(DECKS)}")
    decks = [load(name) for name in DECKS if name in args.decks or not args.decks]
    if args.check:
        found = [problem for deck in decks for problem in [*stale(deck), *problems(deck), *hard_to_read(deck)]]
        found += unused(decks) if len(decks) == len(DECKS) else []
    else:
        found = [problem for deck in decks for problem in build(deck, args.out)]
    sys.exit("\n".join(found) or None)


def stale(deck: Deck) -> list[str]:
    """Figures that are not what their code draws."""
    found = []
    for path, image in draw_all(deck.figures, SLIDES / "figures").items():
        if not path.exists():
            found.append(f"{path.name} was never drawn: make slides")
        elif path.read_bytes() != image:
            found.append(f"{path.name} is not what draw/{deck.name}/ draws today: make slides")
    return found


def hard_to_read(deck: Deck) -> list[str]:
    """Figures with type that is too small or too pale, or that waste their slide."""
    return [f"{name}.svg: {problem}" for name, draw in deck.figures.items() for problem in check(draw, illegible)]


def unused(decks: Sequence[Deck]) -> list[str]:
    """Files among the figures that no deck draws."""
    drawn = {f"{name}.svg" for deck in decks for name in deck.figures}
    return [f"figures/{each.name} is nobody's" for each in (SLIDES / "figures").iterdir() if each.name not in drawn]


def build(deck: Deck, out: Path) -> list[str]:
    """Figures, HTML, both PDFs and a picture of every slide; returns what is wrong with them."""
    for path, image in draw_all(deck.figures, SLIDES / "figures").items():
        path.write_bytes(image)
    out.mkdir(parents=True, exist_ok=True)
    shutil.copytree(SLIDES / "figures", out / "figures", dirs_exist_ok=True)
    source = out / f"{deck.name}.md"
    source.write_text(deck.text)
    marp(["-o", f"{deck.name}.html"], source)
    marp(["--pdf", "-o", f"{deck.name}.pdf"], source)
    marp(["--pdf", "--pdf-notes", "-o", f"{deck.name}-notes.pdf"], source)
    bare = out / f"{deck.name}.bare.html"
    marp(["--template", "bare", "-o", bare.name], source)
    found = problems(deck) + look(bare, out / deck.name)
    bare.unlink()
    source.unlink()
    print(f"{deck.name}: {len(deck.slides)} slides, {out / deck.name}.html, .pdf and -notes.pdf")
    return [f"{deck.name}: {problem}" for problem in found]


def marp(options: list[str], source: Path) -> None:
    if not MARP.exists():
        sys.exit("Marp is not installed: `make slides` does that, with Node's npm")
    style = ["--config-file", SLIDES / "marp.config.mjs", "--theme", SLIDES / "theme.css"]
    environ = os.environ | {"CHROME_PATH": program(), "CHROME_NO_SANDBOX": "1"}
    where: Any = {"cwd": source.parent, "env": environ, "stdin": subprocess.DEVNULL}
    done = subprocess.run([MARP, *style, source.name, *options], **where, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"Marp failed on {source.name}:\n{done.stderr}")


if __name__ == "__main__":
    main()
