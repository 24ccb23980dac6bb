"""docs/parity.md says what is so: it has all of torch's names, what works has torch's signature, what is absent is not
there, and every behaviour has a test that is marked with its number.

`python tests/tools/test_parity_page.py` writes the names of the tests into the page anew.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchsDdp

import minifsdp.fsdp
from minifsdp.ddp import DistributedDataParallel as OurDdp
from minifsdp.fsdp import FullyShardedDataParallel as OurFsdp
from minifsdp.instruments.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "parity.md"
BEHAVIOURS = range(1, 46)
MOST_EXEMPTIONS = 5
WRONG_ON_CPU = 7
STATUSES = ("works", "absent", "refused")
of_torch_213 = pytest.mark.skipif(torch.__version__[:5] != "2.13.", reason="the page has the names of torch 2.13")


class Row(NamedTuple):
    """| `name(argument, argument)` | works, absent, or refused with an error | why |"""

    name: str
    arguments: list[str] | None
    status: str
    note: str

    @property
    def works(self) -> bool:
        return self.status == "works"


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    return text


def rows(title: str) -> list[Row]:
    """One per name; a line of a table may have several."""
    found = []
    for cell, status, note in re.findall(r"^\| (.*?`.*?) \| (\w+) \|(.*)\|$", section(title), re.M):
        assert status in STATUSES, f"{cell} is {status}"
        for name, parentheses, arguments in re.findall(r"`([\w.]+)(\((.*?)\))?`", cell):
            found.append(Row(name, re.findall(r"\w+", arguments) if parentheses else None, status, note.strip()))
    return found


def arguments_of(function: Any) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}


def own_names(kind: type, base: type) -> set[str]:
    """Public names that a class adds to its base, or overrides."""
    return {name for name in {*dir(kind)} - {*dir(base)} | {*vars(kind)} if not name.startswith("_")}


def same_default(ours: Any, theirs: Any) -> bool:
    """Enumerations of the two libraries are the same by name."""
    return (
        (ours.name == theirs.name)
        if isinstance(theirs, Enum) and isinstance(ours, Enum)
        else ours is theirs or ours == theirs
    )


def differences(ours: Any, theirs: Any, but: set[str] = frozenset()) -> list[str]:
    """How the signatures of two functions differ, for a caller who knows theirs."""
    mine, found = arguments_of(ours), []
    named = [name for name, p in arguments_of(theirs).items() if name not in but]
    for name in named:
        p = arguments_of(theirs)[name]
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            if p.kind not in {other.kind for other in mine.values()}:
                found.append(f"takes no {p}")
        elif name not in mine:
            found.append(f"has no {name}")
        elif not same_default(mine[name].default, p.default):
            found.append(f"{name} is {mine[name].default} by default, in torch {p.default}")
    order = [name for name in mine if name in named]
    if order != [name for name in named if name in order]:
        found.append(f"the order is {order}")
    return found


# What torch has: names of classes from the classes, names of instances from instances


def instances() -> dict[str, set[str]]:
    """The public attributes of one instance of each class, after a forward."""
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFsdp

    warnings.simplefilter("ignore")
    found = {}
    made: dict[str, nn.Module] = {
        "torch FullyShardedDataParallel": TorchsFsdp(nn.Linear(2, 2), device_id=torch.device("cpu")),
        "torch DistributedDataParallel": TorchsDdp(nn.Linear(2, 2)),
        "our FullyShardedDataParallel": OurFsdp(nn.Linear(2, 2)),
        "our DistributedDataParallel": OurDdp(nn.Linear(2, 2)),
    }
    for name, module in made.items():
        module(torch.ones(1, 2))
        found[name] = {key for key in vars(module).keys() - vars(nn.Module()).keys() if not key.startswith("_")}
        found[name] |= {key for key in ("module",) if hasattr(module, key)}
    return found


@pytest.fixture(scope="module")
def attributes() -> dict[str, set[str]]:
    return launch(instances, 1)[0]


CLASSES = ["FullyShardedDataParallel", "DistributedDataParallel"]


def both(name: str) -> tuple[type, type]:
    """Torch's class and ours."""
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFsdp

    return {"FullyShardedDataParallel": (TorchsFsdp, OurFsdp), "DistributedDataParallel": (TorchsDdp, OurDdp)}[name]


def methods(kind: type) -> dict[str, Any]:
    found = {name: inspect.getattr_static(kind, name) for name in own_names(kind, nn.Module)}
    return {name: getattr(kind, name) for name, value in found.items() if not isinstance(value, property)}


@of_torch_213
@pytest.mark.parametrize("name", CLASSES)
def test_no_name_is_missing(name: str, attributes: dict[str, set[str]]) -> None:
    theirs, _ = both(name)
    here = rows(name)
    plain = {row.name for row in here if row.arguments is None}
    wanted = {*arguments_of(theirs.__init__)} | attributes[f"torch {name}"]
    wanted |= own_names(theirs, nn.Module) - methods(theirs).keys()
    assert not wanted - plain
    with_arguments = {row.name: row.arguments for row in here if row.arguments is not None}
    for method, function in methods(theirs).items():
        assert method in with_arguments, f"{method} is not on the page"
        assert with_arguments[method] == [*arguments_of(function)], method


@of_torch_213
@pytest.mark.parametrize("name", CLASSES)
def test_what_works_is_as_in_torch_and_what_is_absent_is_not_there(name: str, attributes: dict[str, set[str]]) -> None:
    theirs, ours = both(name)
    here = rows(name)
    arguments = arguments_of(ours.__init__).keys()
    absent = {row.name for row in here if row.arguments is None and row.status == "absent"}
    assert differences(ours.__init__, theirs.__init__, absent) == []
    theirs_has = arguments_of(theirs.__init__).keys() | attributes[f"torch {name}"]
    wrong = []
    for one in theirs_has:  # an argument that is refused may be absent as an attribute
        there = one in arguments or one in attributes[f"our {name}"] or hasattr(ours, one)
        if there != any(row.status != "absent" for row in here if row.name == one and row.arguments is None):
            wrong.append(f"{one} is {'there' if there else 'not there'}")
    for row in (row for row in here if row.arguments is not None and hasattr(theirs, row.name)):
        mine, torchs = getattr(ours, row.name, None), getattr(theirs, row.name)
        if (mine is not None) != row.works:
            wrong.append(f"{row.name}() is {'not ' * row.works}there")
        elif row.works and row.name in methods(theirs):
            wrong += [f"{row.name}: {line}" for line in differences(mine, torchs)]
            if row.name != "train" and mine is getattr(nn.Module, row.name, None):
                wrong.append(f"{row.name} is nn.Module's")
    assert wrong == []


@pytest.mark.parametrize(
    "title", ["FullyShardedDataParallel", "Options", "Wrapping", "FSDP2", "fully_shard", "DistributedDataParallel"]
)
def test_what_is_absent_has_a_reason(title: str) -> None:
    assert [row.name for row in rows(title) if not row.works and not row.note] == []


def members(kind: type) -> list[str]:
    return [m.name for m in kind] if issubclass(kind, Enum) else [field.name for field in dataclasses.fields(kind)]


@of_torch_213
def test_options_have_the_members_and_defaults_of_torchs() -> None:
    from torch.distributed import fsdp

    here = rows("Options")
    others = {row.name for row in rows("FSDP2")} | {"FullyShardedDataParallel"}
    for name in fsdp.__all__:
        if name in others:
            continue
        theirs, ours = getattr(fsdp, name), getattr(minifsdp.fsdp, name)
        assert {f"{name}.{member}" for member in members(theirs)} <= {row.name for row in here if row.works}
        assert members(theirs) == members(ours), name
        if dataclasses.is_dataclass(theirs):
            for one, other in zip(dataclasses.fields(ours), dataclasses.fields(theirs), strict=True):
                is_required = other.default is other.default_factory is dataclasses.MISSING
                assert is_required or same_default(one.default, other.default), f"{name}.{one.name}"


@of_torch_213
def test_fsdp2_has_torchs_names_and_signatures() -> None:
    from torch.distributed import fsdp as theirs

    import minifsdp.fsdp2 as ours

    public = {name for name in vars(theirs.FSDPModule) if not name.startswith("_")}
    here = {row.name: row for row in rows("FSDP2")}
    assert public <= here.keys()
    for name, row in here.items():
        of = (ours.FSDPModule, theirs.FSDPModule) if name in public else (ours, theirs)
        mine, torchs = (getattr(each, name, None) for each in of)
        assert (mine is not None) == (row.status != "absent"), name
        if row.works and row.arguments is not None:
            assert row.arguments == [*arguments_of(torchs)], name
            if name == "fully_shard":  # its defaults are objects of each library
                assert [*arguments_of(mine), "dp_mesh_dims"] == row.arguments
            else:
                assert differences(mine, torchs) == [], name
        if row.status == "refused":
            with pytest.raises(NotImplementedError, match=name):
                mine(None)


@of_torch_213
def test_fully_shard_has_torchs_arguments() -> None:
    from torch.distributed.fsdp import fully_shard as theirs

    from minifsdp.fsdp2 import fully_shard as ours

    here = rows("fully_shard")
    assert [row.name for row in here] == [*arguments_of(theirs)]
    assert [row.name for row in here if row.works] == [*arguments_of(ours)]


def test_wrapping_functions_have_torchs_signatures() -> None:
    from torch.distributed.fsdp import wrap as theirs

    import minifsdp.fsdp.wrap as ours

    here = {row.name: row for row in rows("Wrapping")}
    public = {n for n, f in vars(theirs).items() if getattr(f, "__module__", "") == theirs.__name__ and n[0] != "_"}
    assert public <= here.keys()
    for name in public:
        assert here[name].works
        assert here[name].arguments == [*arguments_of(getattr(theirs, name))], name
        assert differences(getattr(ours, name), getattr(theirs, name)) == [], name


def test_the_scaler_has_torchs_signatures() -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Theirs

    from minifsdp.grad_scaler import ShardedGradScaler as Ours

    for row in rows("ShardedGradScaler"):
        one, other = (kind if row.name == "ShardedGradScaler" else getattr(kind, row.name) for kind in (Ours, Theirs))
        assert row.arguments == [*arguments_of(other)], row.name
        assert differences(one, other) == [], row.name


# Behaviours and the tests that show them


def numbers(node: ast.AST) -> set[int]:
    """The numbers of `behaviour(17, 18)`, `behaviour=17` and `behaviour=(17, 18)`."""
    match node:
        case ast.Call(func=ast.Name(id="behaviour") | ast.Attribute(attr="behaviour")):
            parts: list[Any] = node.args
        case ast.keyword(arg="behaviour"):
            parts = [node.value]
        case _:
            return set()
    constants = [leaf for part in parts for leaf in ast.walk(part) if isinstance(leaf, ast.Constant)]
    return {leaf.value for leaf in constants if isinstance(leaf.value, int)}


def marked(tree: ast.AST, name: str = "") -> Iterator[tuple[int, str]]:
    """(number, the function that it is a decorator or a parameter of; else the nearest name or title around it)."""
    for number in numbers(tree):
        yield number, name
    match tree:
        case ast.FunctionDef():
            name = tree.name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            pass
    for child in ast.iter_child_nodes(tree):
        yield from marked(child, name)


@cache
def marked_tests() -> dict[int, list[str]]:
    """The tests that are marked with each number, as `folder/file.py: name`; those for GPUs show nothing here."""
    found = defaultdict(list)
    for path in sorted(TESTS.glob("*/test_*.py")):
        if path != Path(__file__) and path.parent.name != "gpu":
            for number, name in marked(ast.parse(path.read_text())):
                if (title := f"{path.relative_to(TESTS)}: {name}") not in found[number]:
                    found[number].append(title)
    return found


def behaviour_rows() -> list[tuple[int, str, list[str]]]:
    """(number, what it is, the tests that the page names)."""
    found = re.findall(r"^\| (\d+) \| (.+) \| (.*) \|$", section("Behaviours"), re.M)
    return [(int(number), text, re.findall(r"`(.+?)`", tests)) for number, text, tests in found]


def exempt() -> set[int]:
    """Those for which the page says why no test here can show them."""
    return {int(number) for number in re.findall(r"^\* (\d+): .+", section("Behaviours"), re.M)}


def test_every_behaviour_is_on_the_page() -> None:
    assert [number for number, *_ in behaviour_rows()] == [*BEHAVIOURS]
    assert len(exempt()) <= MOST_EXEMPTIONS


@pytest.mark.parametrize("number", BEHAVIOURS)
def test_a_behaviour_has_a_test_that_the_page_names(number: int) -> None:
    there = marked_tests()[number]
    named = next(tests for n, _, tests in behaviour_rows() if n == number)
    assert there or number in exempt(), "no test has this number"
    assert bool(there) == bool(named)
    assert not [name for name in named if name not in there], "the page names tests that are not marked with it"


def test_where_torch_is_wrong_on_cpu_a_test_shows_that_ours_is_not() -> None:
    lines = re.findall(r"^\| .+ \| .+ \| `(\S+): (\w+)` \|$", section("Where torch is wrong on CPU"), re.M)
    assert len(lines) == WRONG_ON_CPU
    for path, name in lines:
        assert f"def {name}(" in (TESTS / path).read_text(), name


def test_the_scan_finds_every_way_to_mark() -> None:
    source = """
@pytest.mark.behaviour(1, 2)
def test_a(): ...
@check(behaviour=(3, 4))
def b(): ...
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.behaviour(5))])
def test_c(x): ...
CASES: dict = {"x": Case(marks=pytest.mark.behaviour(6))}
"""
    assert [*marked(ast.parse(source))] == [
        (1, "test_a"), (2, "test_a"), (3, "b"), (4, "b"), (5, "test_c"), (6, "CASES")
    ]  # fmt: skip


def write_tests_into_the_page() -> None:
    """The two tests of each behaviour that are about the fewest others."""
    there = marked_tests()
    others = Counter(name for names in there.values() for name in names)

    def line(match: re.Match[str]) -> str:
        names = sorted(there[int(match[1])], key=lambda name: (others[name], len(name)))[:2]
        return f"| {match[1]} | {match[2]} | {', '.join(f'`{name}`' for name in names)} |"

    before = section("Behaviours")
    after = re.sub(r"^\| (\d+) \| (.+) \| (.*) \|$", line, before, flags=re.M)
    PAGE.write_text(PAGE.read_text().replace(before, after))


if __name__ == "__main__":
    write_tests_into_the_page()
