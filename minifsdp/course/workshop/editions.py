"""Add a lab's new edition next to a learner's older copy, carrying over answers and predictions by id."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from minifsdp.course.workshop.catalogue import (
    EXERCISE,
    Cell,
    Stub,
    cells_with,
    facts_of,
    read_cells,
    read_notebook,
    shipped_notebook,
    source_of,
    stubs_of,
)
from minifsdp.course.workshop.copies import find_copy, fresh, write_new
from minifsdp.course.workshop.references import definition_in, is_blank, parse


def update(lab: str, folder: Path) -> tuple[Path | None, list[str]]:
    """Write the current edition next to an older copy, with the answers and predictions of that copy.

    Returns:
        the new copy, or None if the old one has the current edition; and one line for each item, carried over or not.

    Raises:
        ValueError: there is no such lab, or no copy of it in the folder.
        OSError: a copy cannot be read or written.
    """
    notebook = fresh(lab)
    old = find_copy(lab, folder)
    if facts_of(read_notebook(old)).get("edition") == facts_of(notebook)["edition"]:
        return None, []
    cells = read_cells(old)
    remarks = [f"answers come from {old.name}, which is unchanged"]
    remarks += _carry_answers(cells, notebook["cells"], stubs_of(lab))
    remarks += _carry_predictions(cells, notebook["cells"])
    stem, number = shipped_notebook(lab).stem, 2
    while (target := folder / f"{stem}_{number}.ipynb").exists():
        number += 1
    write_new(target, notebook)
    return target, remarks


def _is_dots(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _carry_answers(old: list[Cell], new: list[Cell], stubs: dict[str, Stub]) -> list[str]:
    remarks = []
    for exercise, stub in stubs.items():
        found = cells_with(old, EXERCISE + exercise)
        head = f"{exercise} {stub.name}"
        if len(found) > 1:
            remarks.append(f"{head}: {len(found)} cells have its tag, carry over the right one by hand")
        elif found and not is_blank(source_of(found[0]), stub):
            source = source_of(found[0])
            cells_with(new, EXERCISE + exercise)[0]["source"] = source.splitlines(keepends=True)
            remarks.append(f"{head}: carried over{_changed(source, stub)}")
    return remarks


def _changed(source: str, stub: Stub) -> str:
    """A remark if an answer's signature differs from the shipped one, else ""."""
    wanted = definition_in(stub.source, stub.name)
    try:
        parse(source)
        given = definition_in(source, stub.name)
        if ast.dump(given.args) == ast.dump(wanted.args):
            return ""
    except (SyntaxError, ValueError):
        return f"; it does not define {stub.name}"
    except RecursionError:  # arguments nested too deep to compare count as different
        pass
    return f"; the signature is now {stub.name}({ast.unparse(wanted.args)}), adapt it"


def _carry_predictions(old: list[Cell], new: list[Cell]) -> list[str]:
    said = {name: text for cell in old for name, node, text in _predictions(cell) if not _is_dots(node)}
    remarks = []
    for cell in new:
        for name, node, _ in _predictions(cell):
            if name in said and _is_dots(node):
                source = _replaced(source_of(cell), node, said.pop(name))
                cell["source"] = source.splitlines(keepends=True)
                remarks.append(f"prediction {name}: carried over")
                break
    return remarks


def _predictions(cell: Cell) -> Iterator[tuple[str, ast.expr, str]]:
    """Each call `predict("5.2", value)` in a cell: the name, the value's node, and the value's text."""
    if cell.get("cell_type") != "code" or "predict" not in source_of(cell):
        return
    try:
        tree = parse(source_of(cell))
    except SyntaxError:
        return
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("predict"), args=[ast.Constant(str(name)), value, *_]):
                yield name, value, ast.get_source_segment(source_of(cell), value) or "..."


def _replaced(source: str, node: ast.expr, text: str) -> str:
    """`source` with a node replaced by `text`; the tree counts columns in bytes."""
    lines = source.encode().splitlines(keepends=True)
    assert node.end_lineno is not None
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return before.decode() + text + after.decode()
