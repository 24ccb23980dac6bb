"""Wrong answers as diffs of the reference: what they become, and what is refused."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from minifsdp.course.workshop import wrong as workshop
from minifsdp.course.workshop.catalogue import all_labs
from minifsdp.course.workshop.references import lab_references
from minifsdp.course.workshop.wrong import Wrong, bare, wrong

REFERENCE = '''\
def total(
    values: list[int],
    scale: float = 1.0,
) -> float:
    """The sum of the values."""
    result: float = 0
    last: int | None

    for value in values:
        if value:
            result += value
        print("ß", value)
    for value in values:
        print("ß", value)
    return scale * result
'''


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="total", source=REFERENCE)
    monkeypatch.setattr(workshop, "find_reference", lambda exercise: found)
    monkeypatch.setattr(workshop, "collected", [])


def made(text: str) -> Wrong:
    wrong("5.3", "words").diff(text)
    return workshop.collected[-1]


class TestWhatADiffBecomes:
    def test_an_entry_with_the_slip_for_a_docstring(self) -> None:
        entry = made("""
Forgets the scale,
and that nobody asked for it.
- return scale * result
+ return result
""")
        assert entry[:3] == ("5.3", "words", "total")
        assert entry.slip == "Forgets the scale,\nand that nobody asked for it."
        assert ast.get_docstring(ast.parse(entry.source).body[0]) == entry.slip
        assert entry.source.endswith("    return result\n")
        assert ": float" not in entry.source

    def test_several_swaps_in_any_order_at_any_indentation(self) -> None:
        entry = made("""
Slips.
- return scale * result
+ return result
  if value:
+     value += 1
-     result += value

- result = 0
+ result = 1
""")
        lines = ['    """Slips."""', "    result = 1", "    for value in values:", "        if value:"]
        assert entry.source.splitlines()[1:6] == [*lines, "            value += 1"]
        assert "result += value" not in entry.source

    def test_the_signature_may_be_swapped(self) -> None:
        assert "values, scale):" in made("Slips.\n- def total(values, scale=1.0):\n+ def total(values, scale):").source

    def test_lines_that_are_there_twice_are_told_apart_by_those_before_them(self) -> None:
        entry = made("""
Slips.
  for value in values:
-     print("ß", value)
+     pass
""")
        assert entry.source.count("print") == 1


@pytest.mark.parametrize(
    ("swaps", "message"),
    [
        ("- return result\n+ return 0", r"0 places in the reference have these lines, not one:\nreturn result"),
        ("- esult += value\n+ pass", "0 places"),
        ("- if value:\n- result += value\n+ pass", "0 places"),
        ('- print("ß", value)\n+ pass', "2 places"),
        ("- return scale * result\n+ return scale * result", "this swap changes nothing:\nreturn scale"),
        ("  return scale * result", "this swap changes nothing"),
        ("", "it swaps nothing"),
        ("+ return 0", "after which line of the reference does this stand?\nreturn 0"),
        ("- if value:\n-     result += value\n\n- result += value\n+ pass", "in common:\n            result += value"),
        ("- return scale * result\nreturn 0", "'return 0' is in the swaps without a mark"),
    ],
)
def test_a_swap_that_cannot_be_made_is_refused_by_the_name_of_its_entry(swaps: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)^the wrong answer to 5.3 with the slip 'Slips.': .*") as refused:
        made(f"Slips.\n{swaps}")
    assert message.replace("\\n", "\n") in str(refused.value)
    assert workshop.collected == []


def test_bare_text_is_the_reference_but_for_docstring_and_types() -> None:
    assert bare(REFERENCE).splitlines()[:4] == [
        "def total(values, scale=1.0):",
        "    result = 0",
        "    for value in values:",
        "        if value:",
    ]


class Untyped(ast.NodeTransformer):
    """A tree without docstrings, annotations and asserts."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.body = node.body[ast.get_docstring(node) is not None :]
        node.returns = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign | None:
        return ast.Assign([node.target], node.value) if node.value else None

    def visit_Assert(self, node: ast.Assert) -> None:
        return None


@pytest.mark.parametrize("lab", all_labs())
def test_every_reference_is_the_same_when_bare(lab: str) -> None:
    for ref in lab_references(lab):
        assert ast.dump(Untyped().visit(ast.parse(ref.source))) == ast.dump(ast.parse(bare(ref.source))), ref.id
