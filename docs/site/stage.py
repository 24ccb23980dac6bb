"""The site's sources: README, docs and labs unchanged, and a page for each linked file of code."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable
from os.path import normpath, relpath
from pathlib import Path

import yaml
from compose import DECKS  # of slides/

SITE = Path(__file__).parent
ROOT = SITE.parents[1]
TERMS: dict[str, str] = tomllib.loads((SITE / "terms.toml").read_text())["terms"]
RUNG = re.compile(r"^\| `([\w-]+)` \| \[[^]]+\]\(\.\./([^)]+)\)", re.MULTILINE)  # a row of the table in docs/code.md
LINK = re.compile(r"(?<=\]\()(?!\w+://|#)([^)#\s]*)(#(?:[^()]|\([^()]*\))*)?(?=\))")
SHOWN = {".py": "python", ".toml": "toml", ".sbatch": "bash", ".json": "json", ".cff": "yaml", ".yaml": "yaml"}
MAINTAINERS = ("CONTRIBUTING", "docs/speed")
PICTURES = (".png", ".gif", ".svg")

EXPLORER = """---
hide-toc: true
---
# Explorer

The explorer shows one step of each rung on four ranks, from the log of a run of `minifsdp ladder --ranks 4`.
<a href="explore.html">Open the explorer on a page of its own</a>.

<iframe src="explore.html" class="explorer" title="The explorer"></iframe>
<script>
addEventListener("message", ({ source, data }) => {
  const frame = document.querySelector("iframe.explorer");
  if (source === frame.contentWindow && data.explorerHeight) frame.style.height = `${data.explorerHeight + 8}px`;
});
</script>
"""
HEAD = "---\norphan: true\nhide-toc: true\n{}---\n"
UNSEARCHED = "nosearch: true\n"  # code that repeats pages: the labs' sources and checks, figures, records
FOLDERS = {
    "benchmarks/records/cpu": "Records of runs on a CPU",
}
"""Contents of the folders that are not packages."""

Pages = dict[str, str]
"""Page contents by path; all paths are relative to the sources or the checkout."""


def stage(sources: Path) -> list[Path]:
    """Fill the folder `sources`; returns the notebooks in it."""
    files = tracked()
    pages = {name: (ROOT / name).read_text() for name in files if is_page(name)}
    linked = {target for name, text in pages.items() for target in targets(name, text)}
    pages |= code_pages(files, linked)
    pages["lectures.md"] = lectures()
    pages["explorer.md"] = EXPLORER
    documents = sorted(name[:-3] for name in pages if name.startswith("docs/") and name[:-3] not in MAINTAINERS)
    rungs = [f"{rung} <{name}>" for rung, name in RUNG.findall(pages["docs/code.md"])]
    pages["index.md"] = "".join(
        [
            pages.pop("README.md"),
            toctree(["labs/README", "lectures", "explorer"], "Course"),
            toctree(rungs, "Rungs"),
            toctree(["minifsdp/index"], "Code"),
            toctree(documents, "Documents"),
            toctree(MAINTAINERS, "For maintainers"),
        ]
    )
    pages["labs/README.md"] += toctree(sorted(name[5:-6] for name in pages if name.endswith(".ipynb")))
    for name, text in pages.items():
        path = sources / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(relinked(name, text, pages))
    for name in files:
        if name.endswith(PICTURES) and (name.startswith("docs/") or name in linked):
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, sources / name)
    return sorted((sources / "labs").glob("*.ipynb"))


def tracked() -> list[str]:
    """The files that git tracks."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def is_page(name: str) -> bool:
    """True if a file is a page of the site without conversion."""
    return bool(re.fullmatch(r"(README|CONTRIBUTING)\.md|docs/\w+\.md|labs/README\.md|labs/lab\w+\.ipynb", name))


def targets(name: str, text: str) -> Iterable[str]:
    """The files in this checkout that a page links to."""
    return (normpath(f"{name}/../{path}") for path, _ in LINK.findall(prose(name, text)) if path)


def prose(name: str, text: str) -> str:
    """A notebook's Markdown; a page without its blocks of code."""
    if name.endswith(".ipynb"):
        return "\n".join(
            "".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"
        )
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def code_pages(files: Iterable[str], linked: Iterable[str]) -> Pages:
    """A page for each file and folder in `linked`, for everything in such a folder, and for the package."""
    pages: Pages = {}
    folders = {target for target in linked if (ROOT / target).is_dir() and target != "slides"} | {"minifsdp"}
    wanted = {*linked, *(name for name in files if any(name.startswith(f"{folder}/") for folder in folders))}
    shown = sorted(name for name in wanted if Path(name).suffix in SHOWN)
    for name in shown:
        text = (ROOT / name).read_text()
        pages[f"{name}.md"] = f"{head(name)}# `{name}`\n\n{found_by(name)}{fenced(name, text)}"
    for folder in {parent for name in shown for parent in above(name) if any(map(parent.startswith, folders))}:
        pages[f"{folder}/index.md"] = listing(folder, [name for name in shown if name.startswith(f"{folder}/")])
    return pages


def head(name: str) -> str:
    """The front matter of a page of code."""
    return HEAD.format("" if name.partition("/")[0] == "minifsdp" else UNSEARCHED)


def above(name: str) -> list[str]:
    """The folders that contain a file, innermost first."""
    return [str(parent) for parent in Path(name).parents if parent.name]


def found_by(name: str) -> str:
    """Entries of the index that a search for one of the file's terms finds before any text."""
    return "".join(f"```{{index}} ! single: {term}\n```\n\n" for term, file in TERMS.items() if file == name)


def fenced(name: str, text: str) -> str:
    return f"``````{SHOWN[Path(name).suffix]}\n{text}\n``````\n"


def listing(folder: str, names: list[str]) -> str:
    """A folder's page: its folders and files, each with the first line of its docstring."""
    inner = sorted({Path(name).relative_to(folder).parts[0] for name in names if Path(name).parent != Path(folder)})
    files = [Path(name).name for name in names if Path(name).parent == Path(folder)]
    rows = [f"| [`{each}/`]({each}/index.md) | {of_folder(f'{folder}/{each}')} |" for each in inner]
    rows += [f"| [`{each}`]({each}.md) | {says(f'{folder}/{each}')} |" for each in files]
    pages = [*(f"{each}/ <{each}/index>" for each in inner), *(f"{each} <{each}>" for each in files)]
    return "\n".join([f"{head(folder)}# `{folder}/`\n", "| name | contents |", "|---|---|", *rows, toctree(pages)])


def of_folder(name: str) -> str:
    """The contents of a folder, in a sentence."""
    package = f"{name}/__init__.py"
    return says(package) if (ROOT / package).exists() else FOLDERS[name]


def says(name: str) -> str:
    """The first line of a module's docstring."""
    text = (ast.get_docstring(ast.parse((ROOT / name).read_text())) or "") if name.endswith(".py") else ""
    return text.partition("\n")[0].replace("|", "\\|")


def toctree(names: Iterable[str], caption: str = "") -> str:
    options = [":hidden:", ":titlesonly:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["\n\n```{toctree}", *options, "", *names, "```\n"])


def lectures() -> str:
    """The page of the lectures: a picture, the title and the subject of each, from its front matter."""
    card = (
        '<p><a href="slides/{0}.html"><img src="slides/{image}" alt="a figure of lecture {1}"/></a><br/>'
        '<b>{1}. <a href="slides/{0}.html">{title}</a></b><br/>'
        "{description} 50 minutes. "
        '<a href="slides/{0}.pdf">PDF</a>, <a href="slides/{0}-notes.pdf">PDF with notes</a></p>'
    )
    cards = []
    for number, deck in enumerate(DECKS, 1):
        _, head, _ = (ROOT / "slides" / f"{deck}.md").read_text().split("---\n", 2)
        cards.append(card.format(deck, number, **yaml.safe_load(head)))
    return "\n".join(["# Lectures\n", '<div class="lectures">', *cards, "</div>\n"])


def relinked(name: str, text: str, pages: Pages) -> str:
    """The page's text with its links rewritten to site pages."""
    if not name.endswith(".ipynb"):
        return LINK.sub(leading(name, pages), text)
    notebook = json.loads(text)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    for cell in cells:
        cell["source"] = LINK.sub(leading(name, pages), "".join(cell["source"]))
    if sum(len(re.findall("^# ", cell["source"], re.MULTILINE)) for cell in cells) > 1:  # a page has one title
        for cell in cells[1:]:
            cell["source"] = re.sub("^(#+ )", r"#\1", cell["source"], flags=re.MULTILINE)
    return json.dumps(notebook)


def leading(name: str, pages: Pages) -> Callable[[re.Match[str]], str]:
    """A function that rewrites a link in `name`."""

    def link(found: re.Match[str]) -> str:
        path, fragment = found[1], found[2] or ""
        target = normpath(f"{name}/../{path}") if path else name
        known = {"README.md": "index.md", "slides": "lectures.md"}.get(target, target)
        known = "lectures.md" if known in (f"slides/{deck}.md" for deck in DECKS) else known
        page = next((each for each in (known, f"{known}.md", f"{known}/index.md") if each in pages), known)
        if page.endswith(".ipynb"):  # Jupyter's names of headings, to GitHub's
            fragment = "#" * bool(fragment) + re.sub(r"[^\w-]", "", fragment.lower())
        return (relpath(page, Path(name).parent) if path else "") + fragment

    return link
