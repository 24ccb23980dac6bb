"""Three floors, library, instruments, course: none knows one above it. A lesson is short, a function a screen."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import minifsdp

PACKAGE = Path(minifsdp.__file__).parent
INSTRUMENTS, COURSE = (sorted((PACKAGE / floor).rglob("*.py")) for floor in ("instruments", "course"))
LIBRARY = sorted({*PACKAGE.rglob("*.py")} - {*INSTRUMENTS, *COURSE, PACKAGE / "__main__.py"})
FILES = LIBRARY + INSTRUMENTS + COURSE


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def imports(path: Path) -> set[str]:
    """Qualified names of all that a file imports, relative ones resolved."""
    package = path.relative_to(PACKAGE.parent).parts[:-1]
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


ABOVE = {
    "library": (LIBRARY, ("minifsdp.instruments", "minifsdp.course")),
    "instruments": (INSTRUMENTS, ("minifsdp.course",)),
}


def names_above(path: Path, floors: tuple[str, ...]) -> set[str]:
    """What a file imports of floors above its own, or names in a string that is imported later."""
    strings = {node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {each for each in imports(path) | strings if each.startswith(floors)}


@pytest.mark.parametrize("floor", ABOVE)
def test_a_floor_knows_nothing_of_those_above_it(floor: str):
    files, above = ABOVE[floor]
    found = {name(path): found for path in files if (found := names_above(path, above)) and path.name != "moved.py"}
    assert len(files) > 60
    assert not found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def room(module: str) -> str:
    """A folder has its subfolders with it; a file beside the folders is a room of its own."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] in (["instruments"], ["course"]) else 2])


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """The circles and what is above them: what remains when those that need nothing that is left go, one by one."""
    left = {each: theirs - {each} for each, theirs in arrows.items()}
    while free := [each for each, theirs in left.items() if not theirs & left.keys()]:
        left = {each: theirs for each, theirs in left.items() if each not in free}
    return sorted(left)


def test_no_folders_import_each_other_in_a_circle():
    modules = {module_of(path) for path in FILES} - {"minifsdp"}
    rooms: dict[str, set[str]] = {}
    for path in FILES:
        found = {each if each in modules else each.rpartition(".")[0] for each in imports(path)} & modules
        rooms.setdefault(room(module_of(path)), set()).update(map(room, found))
    assert len(rooms) > 50
    assert not circle(rooms)


WITH = {"minifsdp.fsdp.schedules": "minifsdp.fsdp", "minifsdp.fsdp.torch_api.state": "minifsdp.fsdp.torch_api"}
"""Subfolders that import their folder, and are imported by it: an engine and its schedules, a class and its state."""


def folder(path: Path) -> str:
    """A subfolder is a room of its own, apart from the folder; so is a facade, which is above all that it shows."""
    module = module_of(path)
    if path.parent == PACKAGE or name(path).endswith(FACADES):
        return module if path.name != "__init__.py" else f"{module}.__init__"
    found = module.rpartition(".")[0]
    return WITH.get(found, found)


def test_no_subfolder_of_the_library_and_its_folder_import_each_other():
    modules = {module_of(path): path for path in LIBRARY}
    rooms: dict[str, set[str]] = {}
    for path in LIBRARY:
        found = {each for each in imports(path) & modules.keys() if modules[each].name != "__init__.py"}
        of_facades = {each.rpartition(".")[0] for each in imports(path) - modules.keys()}
        found |= of_facades & modules.keys()
        rooms.setdefault(folder(path), set()).update(folder(modules[each]) for each in found - {"minifsdp"})
    assert {"minifsdp.fsdp2.torch_api", "minifsdp.pipeline.schedules", "minifsdp.ddp.torch_api"} <= rooms.keys()
    assert not circle(rooms)


def test_state_dicts_know_no_wrapper():
    """Wrappers and ZeRO have what `checkpoint/units.py` declares, and import what saves and loads it."""
    above = re.compile(r"minifsdp\.(fsdp|fsdp2|zero)\b")
    files = [path for path in LIBRARY if path.parent.name == "checkpoint"]
    found = {name(path): theirs for path in files if (theirs := {*filter(above.match, imports(path))})}
    assert len(files) > 8
    assert not found


def test_what_is_installed_does_without_what_only_maintainers_run():
    found = {name(path): imports(path) for path in FILES}
    assert not [file for file, theirs in found.items() if any(each.split(".")[0] == "tools" for each in theirs)]


# Files, and folders without those below them, that a learner reads from top to bottom.
LESSONS = (
    *("build.py", "comm.py", "device.py", "flat_param.py", "mesh.py", "recipe.py", "ring.py", "trainer.py"),
    *("ddp/naive.py", "ddp/bucketed.py", "ddp/overlapped.py", "ddp/reducer.py"),
    *("zero", "fsdp", "fsdp/schedules", "fsdp2", "tensor_parallel", "pipeline", "pipeline/schedules"),
)
LESSON_LINES = 250


def files_of(lesson: str) -> list[Path]:
    path = PACKAGE / lesson
    return [path] if path.is_file() else sorted(path.glob("*.py"))


def test_lessons_are_short():
    lengths = {name(path): len(path.read_text().splitlines()) for lesson in LESSONS for path in files_of(lesson)}
    assert len(lengths) > 30
    assert not {file: lines for file, lines in lengths.items() if lines > LESSON_LINES}


FUNCTION_LINES = 60
LONGER = {"course/cli/train.py: train": 67}  # not to be added to


def functions_of(path: Path) -> list[tuple[str, int]]:
    """Each with its lines, docstring included, signature not: that is as long as torch, or a command, has options."""
    functions = [n for n in nodes(path) if isinstance(n, ast.FunctionDef)]
    return [(f"{name(path)}: {n.name}", (n.end_lineno or 0) - n.body[0].lineno + 1) for n in functions]


def test_functions_fit_a_screen():
    functions = [each for path in FILES for each in functions_of(path)]
    assert len(functions) > 1000
    assert not [(function, lines) for function, lines in functions if lines > LONGER.get(function, FUNCTION_LINES)]


CALLERS = (
    "checkpoint/pieces.py",
    "checkpoint/sharded_values.py",
    "comm.py",
    "fsdp2/dtensors.py",
    "gloo.py",
    *("private/__init__.py", "private/dtensor.py"),
    "process_groups.py",
)


def test_few_call_torch_distributed():
    """One shim knows its names, costs and logs, with gloo's other ways; one makes groups.

    But for the values of sharded state dicts, which are torch.distributed's own, and for types: DTensors and meshes.
    """
    callers = {
        name(p) for p in LIBRARY for found in imports(p) if found.startswith("torch.distributed") and not is_type(found)
    }
    assert not callers - set(CALLERS)


def is_type(found: str) -> bool:
    return f"{found}.".startswith(("torch.distributed.tensor.", "torch.distributed.device_mesh."))


def test_one_file_builds_meshes():
    """The others ask it, so that axes of the same ranks have the same group."""
    built = "init_device_mesh", "DeviceMesh", "from_group"
    makers = {
        name(path)
        for path in PACKAGE.rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in built
    }
    assert makers == {"mesh.py"}


def test_the_arithmetic_shares_no_code_with_what_it_predicts():
    """It sees recipes, which are values, only as types."""
    files = [path for path in LIBRARY if path.parent.name == "cost"]
    assert len(files) > 8
    for path in files:
        others = {
            each
            for each in imports(path)
            if not each.startswith(("minifsdp.cost", "minifsdp.divisions", "minifsdp.recipe"))
        }
        assert not [each for each in others if each.split(".")[0] in ("torch", "minifsdp")], path


def test_the_walk_would_find_a_break():
    """The checks above look at real files and see relative imports."""
    assert "minifsdp.instruments.launch.launch" in imports(PACKAGE / "course" / "ladder" / "run.py")
    assert "tools.records" in imports(PACKAGE.parent / "tools" / "gpu_check" / "check.py")


def test_the_arithmetic_needs_no_torch():
    modules = ("minifsdp.cost.peak", "minifsdp.cost.traffic", "minifsdp.recipe")
    check = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_public_names_and_modules_are_there():
    for public in minifsdp.__all__:
        assert getattr(minifsdp, public).__module__.startswith("minifsdp.")
    with pytest.raises(AttributeError, match="no attribute 'FSDP3'"):
        _ = minifsdp.FSDP3
    check = "import minifsdp; minifsdp.zero.stage1, minifsdp.instruments.launch.launch, minifsdp.fsdp2.hooks"
    done = subprocess.run([sys.executable, "-c", check], check=False)
    assert done.returncode == 0, "a check's answer finds them, whether an earlier check has imported them or not"
    assert not hasattr(minifsdp, "zero4")


LESSON_FOLDERS = ("ddp", "zero", "fsdp", "fsdp/schedules", "fsdp2", "pipeline", "pipeline/schedules", "tensor_parallel")
LESSON = [p for folder in LESSON_FOLDERS for p in sorted((PACKAGE / folder).glob("*.py"))]
FACADES = ("__init__.py", "fsdp/wrap.py")  # torch's paths


def test_the_lesson_imports_nothing_that_only_a_drop_in_needs():
    read = [path for path in LESSON if not name(path).endswith(FACADES)]
    assert len(read) > 70
    found = {name(path): [each for each in imports(path) if ".torch_api" in each] for path in read}
    assert not {file: theirs for file, theirs in found.items() if theirs}


def test_the_lesson_runs_without_what_only_a_drop_in_needs():
    """Nor does anything that it imports: facades import torch's names on first use."""
    lesson = [module_of(path) for path in LESSON if not name(path).endswith("fsdp/wrap.py")]
    load = "import importlib, sys; [importlib.import_module(each) for each in sys.argv[1:]]"
    show = "print(*(each for each in sys.modules if 'minifsdp' in each and 'torch_api' in each))"
    done = subprocess.run([sys.executable, "-c", f"{load}; {show}", *lesson], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_no_circle_of_imports():
    """Neither of imports for types alone, nor of imports inside functions."""
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    assert not circle({module: imports(path) & files.keys() for module, path in files.items()})


def flats_in(path: Path) -> list[int]:
    """Lines that ask something for its attribute `flat`."""
    return [node.lineno for node in nodes(path) if isinstance(node, ast.Attribute) and node.attr == "flat"]


def test_nothing_above_a_unit_knows_what_it_is_made_of():
    """State dicts, clipping, names and descriptions ask its contents; only its own parts see the flat parameter."""
    above = [*PACKAGE.glob("checkpoint/*.py"), *INSTRUMENTS, *COURSE, *PACKAGE.glob("fsdp/torch_api/**/*.py")]
    asking = {name(path): lines for path in above if (lines := flats_in(path))}
    assert asking.keys() == {"fsdp/torch_api/original_params.py"}  # a view, which is a part of a unit


SUBJECT_LAST = re.compile(r"(What|Those|Whether|Which|Who|Whose|Where|When|How)\b")
PROSE = (
    "checkpoint",
    "cost",
    "course",
    "ddp",
    "fsdp",
    "instruments",
    "pipeline",
    "zero",
)  # and the modules beside them


def docstrings(path: Path) -> list[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [ast.get_docstring(n) for n in nodes(path) if isinstance(n, documented)]
    return [text for text in found if text]


def test_docstrings_start_with_their_subject():
    paths = [*PACKAGE.glob("*.py"), *(p for folder in PROSE for p in (PACKAGE / folder).rglob("*.py"))]
    first_lines = [
        f"{name(path)}: {text.splitlines()[0]}"
        for path in paths
        for text in docstrings(path)
        if SUBJECT_LAST.match(text)
    ]
    assert len(paths) > 80
    assert not first_lines
