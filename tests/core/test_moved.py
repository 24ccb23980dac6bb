"""Old paths and names: each is the module or object of its new path, and warns at the line that imports it."""

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import minifsdp
from minifsdp.moved import MOVED, MOVED_NAMES, new_path

BEFORE = {  # modules of the last release that are elsewhere now
    "minifsdp": "from_rank_0 optim_state sharded_values",
    "minifsdp.checkpoint": "dtensors whole",
    "minifsdp.course": "explore launch link machine plots reference system watch",
    "minifsdp.course.bench": "turns",
    "minifsdp.course.doctor": "versions",
    "minifsdp.course.explore": "holdings log page",
    "minifsdp.course.ladder": (
        "activations closed_form model per_parameter pipeline pipeline_rungs step tensor tensor_rungs"
    ),
    "minifsdp.course.launch": "answers errors group inline inside job local rank rank_server spmd start world",
    "minifsdp.course.link": "carriers emulated stream_carrier",
    "minifsdp.course.machine": (
        "allocator architectures blocks hardware hazards operators paper pieces pipeline_task program queues "
        "recorder replay shapes sleeping tape task versus"
    ),
    "minifsdp.course.plots": (
        "allocator bandwidth bench device drawing ladder layout memory palette picture quantities runs "
        "scaling schedules steps style"
    ),
    "minifsdp.course.reference": "lab00 lab05 lab10a",
    "minifsdp.course.system": "housekeeping plain_files resources whole_files",
    "minifsdp.course.watch": "cpu_memory cuda_memory description intervals ledger records storages timeline trace",
    "minifsdp.course.watch.description": "flat per_parameter report tensor_parallel",
    "minifsdp.ddp": "arguments comm_hook distributed join logging_data sparse static_graph",
    "minifsdp.fsdp": "ending steps turns watch",
    "minifsdp.fsdp.torch_api": "optimizer_checks",
    "minifsdp.fsdp.torch_api.state": "names optim optim_dict optim_names optim_schema",
    "minifsdp.fsdp2": "custom extensions forward_methods module policies reduction",
    "minifsdp.pipeline": "api orders",
    "minifsdp.pipeline.schedules": "dualpipe_v looped_bfs zbv",
}
OLD = [f"{package}.{name}" for package, names in BEFORE.items() for name in names.split()]

IMPORT_ALL = """
import importlib, sys, warnings
assert "torch" not in sys.modules
for old, new in zip(sys.argv[1::2], sys.argv[2::2]):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", DeprecationWarning)
        module = importlib.import_module(old)
        again = importlib.import_module(old)
    assert module is again is importlib.import_module(new), old
    assert module.__name__ == module.__spec__.name == new, (old, module.__spec__)
    said = [(str(each.message), each.filename) for each in heard if "old path" in str(each.message)]
    assert said == [(f"{old} is {new} now; the old path goes with the next release", "<string>")], said
"""


def run(*command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(Path(minifsdp.__file__).parents[1])}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=folder, env=environ)


def test_every_old_path_is_the_module_of_the_new_one_and_warns_once():
    assert len(OLD) > 80
    parents_first = [each for old in OLD for each in (old, new_path(old))]
    done = run("-c", IMPORT_ALL, *map(str, parents_first))
    assert not done.returncode, done.stderr


def test_every_entry_is_of_use():
    assert all(any(old == known or old.startswith(f"{known}.") for old in OLD) for known in MOVED)
    assert all(find_spec(new) for new in MOVED.values())


NAMES = {  # of the last release's modules, which are elsewhere now
    "minifsdp.fsdp.torch_api.options": (
        "FullOptimStateDictConfig FullStateDictConfig LocalOptimStateDictConfig LocalStateDictConfig "
        "OptimStateDictConfig OptimStateKeyType ShardedOptimStateDictConfig ShardedStateDictConfig StateDictConfig "
        "StateDictSettings StateDictType"
    ),
    "minifsdp.fsdp2.api": "CPUOffloadPolicy MixedPrecisionPolicy OffloadPolicy fully_shard",
    "minifsdp.pipeline.actions": "parse read_csv write_csv",
    "minifsdp.pipeline.gpt": "cross_entropy",
    "minifsdp.pipeline.torch_api.api": "from_csv",
    "minifsdp.recipe": "ORDERS PRECISIONS SCHEDULES",
    "minifsdp.tensor_parallel.prepare": "PrepareModuleInputOutput PrepareModuleOutput",
}
OLD_NAMES = [(module, name) for module, names in NAMES.items() for name in names.split()]


@pytest.mark.parametrize(("module", "name"), OLD_NAMES)
def test_every_old_name_is_the_new_one_and_warns(module: str, name: str):
    new = MOVED_NAMES[f"{module}.{name}"]
    with pytest.warns(DeprecationWarning, match=f"^{module}.{name} is {new} now; the old path goes") as heard:
        found = getattr(import_module(module), name)
    assert [each.filename for each in heard] == [__file__]
    home, _, today = new.rpartition(".")
    assert found is getattr(import_module(home), today)
    assert name not in vars(import_module(module))


@pytest.mark.filterwarnings("error::DeprecationWarning")
@pytest.mark.parametrize(
    "facade", ["minifsdp", "minifsdp.checkpoint", "minifsdp.ddp", "minifsdp.fsdp", "minifsdp.fsdp2"]
)
def test_public_names_come_from_where_they_are_now(facade: str):
    module = import_module(facade)
    assert module.__all__
    for name in module.__all__:
        getattr(module, name)


def test_other_names_are_not_found():
    assert len(OLD_NAMES) == len(MOVED_NAMES)
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from minifsdp.fsdp2.api import nothing")


LINES = (  # and how many paths each takes
    ("import minifsdp.course.launch as launching", 1),
    ("from minifsdp.course.watch.ledger import Ledger", 2),
    ("from minifsdp.course import plots", 1),
    ("from minifsdp.course import describe", 1),
    ("import minifsdp; minifsdp.course.machine.replay", 1),
    ("from minifsdp.pipeline.actions import Action, read_csv", 1),
    ("from minifsdp.pipeline.api import from_csv", 2),
)


def test_a_script_hears_of_it_at_its_own_lines(tmp_path: Path):
    (tmp_path / "script.py").write_text("".join(f"{line}\n" for line, _ in LINES))
    done = run("script.py", folder=tmp_path)
    assert not done.returncode, done.stderr
    heard = [int(line) for line in re.findall(r"script.py:(\d): DeprecationWarning: minifsdp\.", done.stderr)]
    assert heard == [number for number, (_, paths) in enumerate(LINES, 1) for _ in range(paths)]


@pytest.mark.filterwarnings("ignore:minifsdp.course.watch is")
def test_what_is_nowhere_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'minifsdp\.course\.watch\.nothing'"):
        import_module("minifsdp.course.watch.nothing")
