"""What a lab's texts call of the package: the code of the definitions that they import, wherever it is.

To a definition belongs what it uses of its own file, and so on. Moved, with other comments or a new docstring it is
what it was, and so is a text that imports it from another place.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import minifsdp

PACKAGE = Path(minifsdp.__file__).parent


@cache
def called(text: str) -> frozenset[str]:
    """The code of the package's definitions that a text imports, and of what they use of their own files."""
    return frozenset(code for file, name in imported(text) for code in with_what_it_uses(file, name))


@cache
def code_of(text: str) -> str:
    """A text without docstrings, comments, and what it imports from the package."""
    return code(ast.parse(text), text.splitlines())


def imported(text: str) -> Iterator[tuple[Path, str | None]]:
    """Of each name that a text imports from the package, the file that defines it, and its name there or None."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and is_ours(node):
            module = importlib.import_module(str(node.module))
            yield from (defining(module, alias.name) for alias in node.names)


def defining(module: ModuleType, name: str) -> tuple[Path, str | None]:
    """Where what a module has under this name is defined, and as what; None as the name of a module."""
    if not hasattr(module, name):
        return file_of(importlib.import_module(f"{module.__name__}.{name}")), None
    value = getattr(module, name)
    if inspect.ismodule(value):
        return file_of(value), None
    of = getattr(value, "__module__", None) or ""
    if of.startswith(f"{PACKAGE.name}.") and isinstance(getattr(value, "__name__", None), str):
        return file_of(sys.modules[of]), value.__name__
    return file_of(module), name


def file_of(module: ModuleType) -> Path:
    return Path(str(module.__file__))


@cache
def with_what_it_uses(file: Path, name: str | None) -> frozenset[str]:
    """The code of a definition and of those of its file that it uses; of all, if it has none of this name."""
    there = definitions(file)
    found: set[str] = set()
    left = {name} & there.keys() or there.keys()
    while left:
        found |= left
        left = {used for each in left for used in there[each].uses} & there.keys() - found
    return frozenset(there[each].code for each in found)


class Definition(NamedTuple):
    code: str = ""
    uses: frozenset[str] = frozenset()


@cache
def definitions(file: Path) -> dict[str, Definition]:
    """By name, what a file defines; a name that it defines in several places has the code of all."""
    text = file.read_text()
    lines, there = text.splitlines(), defaultdict(Definition)
    for statement in statements(ast.parse(text)):
        uses = frozenset(node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
        for name in defined_by(statement):
            there[name] = Definition(there[name].code + code(statement, lines), there[name].uses | uses)
    return dict(there)


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Those of a module, also where it asks for something first."""
    for each in tree.body:
        yield each
        if isinstance(each, ast.If | ast.Try):
            yield from (inner for inner in ast.walk(each) if isinstance(inner, ast.stmt) and inner is not each)


def defined_by(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            targets: list[Any] = getattr(statement, "targets", None) or [statement.target]  # type: ignore[union-attr]
            return {node.id for each in targets for node in ast.walk(each) if isinstance(node, ast.Name)}
    return set()


def code(tree: ast.AST, lines: list[str]) -> str:
    """The lines of a statement or a module, without docstrings, comments on lines of their own, and our imports."""
    left_out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            left_out |= span(node.body[0])
        elif isinstance(node, ast.ImportFrom) and is_ours(node):
            left_out |= span(node)
    there = range(1, len(lines) + 1) if isinstance(tree, ast.Module) else sorted(span(tree))
    kept = [lines[number - 1] for number in there if number not in left_out]
    return "\n".join(line for line in kept if line.strip() and not line.lstrip().startswith("#"))


def span(node: Any) -> set[int]:
    """The numbers of its lines, from its first decorator on."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    return set(range(first, node.end_lineno + 1))


def is_ours(node: ast.ImportFrom) -> bool:
    return (node.module or "").partition(".")[0] == PACKAGE.name
