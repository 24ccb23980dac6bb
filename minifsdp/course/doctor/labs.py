"""Which labs have the ranks that they start in which world here, read from their notebooks; nothing is run."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from minifsdp.course.launch.world import MOST_GLOO_RANKS, MOST_RANKS_PER_GPU
from minifsdp.course.workshop import catalogue

WORLDS = ("gloo", "emulated link", "NCCL, a GPU each", "NCCL, one shared GPU", "fake")
HERE, UNUSED = "yes", "-"

LINKED = {"EmulatedLink", "HostLinks", "parse_link", "versus"}  # names whose use emulates a link


@dataclass(frozen=True)
class Lab:
    """What a lab's notebook starts.

    Attributes:
        number: "10a".
        title: of the lab.
        ranks: the most that one launch has; 0: none is started.
        links: whether it emulates a link.
        fakes: whether it uses the backend that carries nothing.
    """

    number: str
    title: str
    ranks: int
    links: bool
    fakes: bool


def read_labs() -> list[Lab]:
    """All labs that are shipped with this minifsdp."""
    return [read_lab(number) for number in catalogue.all_labs()]


def read_lab(number: str) -> Lab:
    """One lab, by its notebook's code."""
    notebook = catalogue.read_notebook(catalogue.shipped_notebook(number))
    cells = [catalogue.source_of(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    tree = ast.Module([statement for cell in cells for statement in ast.parse(cell).body], [])
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    fakes = any(isinstance(node, ast.Constant) and node.value == "fake" for node in ast.walk(tree))
    title = str(catalogue.facts_of(notebook)["title"])
    return Lab(number, title, most_ranks(tree), bool(names & LINKED), fakes)


def worlds_of(lab: Lab, gpus: int) -> dict[str, str]:
    """By world: `HERE`; or why not; or `UNUSED`, if the lab does not ask for it.

    Args:
        lab: one of `read_labs`.
        gpus: how many NCCL could have here.
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


def most_ranks(tree: ast.AST) -> int:
    """The largest N that some `launch(fn, N)` is given: a number, or what its name stands for in that place."""
    scopes = _Scopes(tree)
    return max((number for call in scopes.calls["launch"] for number in scopes.numbers(_given(call))), default=0)


def _given(call: ast.Call) -> ast.expr:
    named = [keyword.value for keyword in call.keywords if keyword.arg == "world_size"]
    return call.args[1] if len(call.args) > 1 else named[0] if named else ast.Constant(2)  # launch's default


class _Scopes:
    """Finds what names stand for, from the inside out: a comprehension's, a loop's, a function's, the notebook's."""

    def __init__(self, tree: ast.AST) -> None:
        nodes = list(ast.walk(tree))
        self.outside = {inner: outer for outer in nodes for inner in ast.iter_child_nodes(outer)}
        self.calls: dict[str, list[ast.Call]] = defaultdict(list)
        self.assigned: dict[ast.AST, list[tuple[str, ast.expr]]] = defaultdict(list)
        for node in nodes:
            match node:
                case ast.Call(func=ast.Name(id=function)):
                    self.calls[function].append(node)
                case ast.Assign(targets=targets, value=value):
                    self.assigned[self._home(node)] += [pair for target in targets for pair in _pairs(target, value)]

    def numbers(self, value: ast.expr, steps: int = 9) -> list[int]:
        """What an expression may be; of a list or a tuple, what its elements may be."""
        match value:
            case ast.Constant(value=int(number)):
                return [number]
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return [number for part in parts for number in self.numbers(part, steps)]
            case ast.Name() if steps:
                return [number for each in self._bound(value) for number in self.numbers(each, steps - 1)]
        return []

    def _bound(self, name: ast.Name) -> list[ast.expr]:
        """What the innermost scope that has this name gives it."""
        scope: ast.AST = name
        while scope in self.outside:
            scope = self.outside[scope]
            if found := [value for bound, value in self._bindings(scope) if bound == name.id]:
                return found
        return []

    def _bindings(self, scope: ast.AST) -> Iterator[tuple[str, ast.expr]]:
        match scope:
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                for loop in scope.generators:
                    yield from _pairs(loop.target, loop.iter)
            case ast.For(target=target, iter=value):
                yield from _pairs(target, value)
            case ast.FunctionDef(name=function, args=arguments):
                parameters = [each.arg for each in arguments.args]
                for call in self.calls[function]:
                    yield from zip(parameters, call.args, strict=False)
                    yield from ((each.arg, each.value) for each in call.keywords if each.arg in parameters)
        yield from self.assigned[scope]

    def _home(self, node: ast.AST) -> ast.AST:
        """The function, or the notebook, that a statement is in."""
        while node in self.outside:
            node = self.outside[node]
            if isinstance(node, ast.FunctionDef):
                break
        return node


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Names with what they are given; of a loop, all that they are given in turn."""
    match target, value:
        case ast.Name(id=name), _:
            yield name, value
        case ast.Tuple(elts=targets), ast.Tuple(elts=parts) if len(targets) == len(parts):
            for each, part in zip(targets, parts, strict=True):
                yield from _pairs(each, part)
