"""The labs whose ranks this machine can start, from their notebooks' front matter; nothing is run."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from minifsdp.course.workshop import catalogue
from minifsdp.instruments.launch.world import MOST_GLOO_RANKS, MOST_RANKS_PER_GPU

WORLDS = ("gloo", "emulated link", "NCCL, a GPU each", "NCCL, one shared GPU", "fake")
HERE, UNUSED = "yes", "-"

LINKED = {"EmulatedLink", "HostLinks", "parse_link", "versus"}  # names whose use emulates a link


@dataclass(frozen=True)
class Lab:
    """The ranks that a lab's notebook starts.

    Attributes:
        number: "10a".
        title: of the lab.
        ranks: the most in one launch, from its front matter; 0: it starts none.
        links: whether it emulates a link.
        fakes: whether it uses the fake backend, which carries nothing.
    """

    number: str
    title: str
    ranks: int
    links: bool
    fakes: bool


def read_labs() -> list[Lab]:
    """All labs shipped with this minifsdp; raises as `read_lab` does."""
    return [read_lab(number) for number in catalogue.all_labs()]


def read_lab(number: str) -> Lab:
    """Read one lab from its notebook's front matter and the names in its code.

    Raises:
        ValueError: the front matter gives no number of ranks.
    """
    notebook = catalogue.read_notebook(catalogue.shipped_notebook(number))
    facts = catalogue.facts_of(notebook)
    ranks = facts.get("ranks")
    if not isinstance(ranks, int):
        raise ValueError(f"lab {number} does not say how many ranks it starts: its front matter needs `ranks: N`")
    cells = [catalogue.source_of(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell))]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    fakes = any(isinstance(node, ast.Constant) and node.value == "fake" for node in nodes)
    return Lab(number, str(facts["title"]), ranks, bool(names & LINKED), fakes)


def worlds_of(lab: Lab, gpus: int) -> dict[str, str]:
    """Map each world to `HERE`, to the reason why not, or to `UNUSED` if the lab does not need it.

    Args:
        lab: one of `read_labs`.
        gpus: the number that NCCL could use here.
    """
    if not lab.ranks:
        return dict.fromkeys(WORLDS, UNUSED)
    found = "no GPU" if gpus == 0 else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    shares = gpus > 0 and lab.ranks <= MOST_RANKS_PER_GPU
    return {
        "gloo": HERE if lab.ranks <= MOST_GLOO_RANKS else f"at most {MOST_GLOO_RANKS} ranks",
        "emulated link": HERE if lab.links else UNUSED,
        "NCCL, a GPU each": HERE if gpus >= lab.ranks else found,
        "NCCL, one shared GPU": HERE if shares else found if not gpus else f"at most {MOST_RANKS_PER_GPU} ranks",
        "fake": HERE if lab.fakes else UNUSED,
    }
