"""Build a site from README, docs, labs with their outputs, code and slides: `python docs/site/build.py [--out FOLDER]`.

The site needs no server and no network. Chromium opens every page (look_around.py): exit code 1 if a page lacks an
image, makes a network request or is wider than a phone. Screenshots of some pages go to FOLDER-looks.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SITE = Path(__file__).parent
ROOT = SITE.parents[1]
SLIDES = ROOT / "slides"
MATHJAX = SLIDES / "node_modules" / "mathjax-full" / "es5" / "tex-svg.js"  # Marp's own
sys.path.insert(0, str(SLIDES))

from compose import DECKS  # noqa: E402
from excerpts import write_texts  # noqa: E402
from look_around import look_around  # noqa: E402
from stage import TERMS, stage  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="default: build/site")
    parser.add_argument("--slides", type=Path, default=ROOT / "build" / "slides", help="the output of `make slides`")
    parser.add_argument(
        "--ladder", type=Path, default=ROOT / "build" / "ladder", help="the output of `minifsdp ladder`"
    )
    args = parser.parse_args()
    explorer = args.ladder / "explore.html"
    missing = [
        path for path in (MATHJAX, *(args.slides / f"{deck}.pdf" for deck in DECKS), explorer) if not path.exists()
    ]
    if missing:
        sys.exit(f"{missing[0]} is missing: run `make site`")
    shutil.rmtree(args.out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder)
        notebooks = stage(sources)
        static = sources / "_static"
        static.mkdir()
        shutil.copy(SITE / "site.css", static)
        shutil.copy(MATHJAX, static / "mathjax.js")
        where = ["-c", str(SITE), "-D", f"html_static_path={static}", str(sources), str(args.out)]
        done = subprocess.run([sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", *where])
        if done.returncode:
            sys.exit("Sphinx reported errors in the pages")
        write_texts(args.out)
        images = {f"labs/{path.stem}.html": path.read_text().count('"image/png": "') for path in notebooks}
    copy_slides(args.slides, args.out / "slides")
    shutil.copy(explorer, args.out)
    found = look_around(args.out, images, TERMS, args.out.with_name(f"{args.out.name}-looks"))
    print(f"{len(list(args.out.rglob('*.html')))} pages, start at {args.out / 'index.html'}")
    sys.exit("\n".join(found) or None)


def copy_slides(slides: Path, out: Path) -> None:
    """The decks and their figures."""
    shutil.copytree(slides / "figures", out / "figures")
    for deck in DECKS:
        for ending in (".html", ".pdf", "-notes.pdf"):
            shutil.copy(slides / f"{deck}{ending}", out)


if __name__ == "__main__":
    main()
