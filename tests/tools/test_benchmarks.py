"""The benchmarks' contest, and those of the host's time and of scaling: counts, laws, records; no time is asserted."""

from __future__ import annotations

import gc
import importlib.util
import json
import runpy
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from minifsdp import comm
from minifsdp.course.bench import contest, orders, overhead, pipeline, scaling, tensor, three_axes
from minifsdp.course.bench.contest import Contest, Cost, Times
from minifsdp.course.bench.orders import Case, OrdersSettings
from minifsdp.course.bench.overhead import OverheadSettings
from minifsdp.course.bench.scaling import ScalingSettings
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp2 import FSDPModule
from minifsdp.instruments.launch import launch
from minifsdp.instruments.plots.scaling import scaling_figure
from minifsdp.instruments.system import resources

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ABOUT = {"benchmark", "command", "when", "commit", "cpu", "cores", "versions"}


def script(name: str) -> ModuleType:
    """One of the benchmarks, as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *options: str) -> int:
    """Its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *options])
        patch.setattr(sys, "path", list(sys.path))
        code: int = script(name).main()
    return code


# A contest


def noted(folder: Path) -> dict[str, Times]:
    """A contest of two, each of whose steps notes its round and name, and whether the garbage collector is on."""
    log = folder / f"rank-{dist.get_rank()}"

    def step_of(name: str) -> Callable[[int], float]:
        def step(number: int) -> float:
            with log.open("a") as file:
                file.write(f"{number} {name} {gc.isenabled()}\n")
            comm.all_reduce(torch.ones(1), comm.world()).wait()
            return float(number)

        return step

    found = Contest({name: step_of(name) for name in "abc"}, "thread", steps=3, warm_up=2).run()
    with log.open("a") as file:
        file.write(f"{gc.isenabled()} {gc.get_freeze_count()}\n")
    return found


def test_all_take_a_step_in_each_round_and_one_clock_times_them(tmp_path: Path) -> None:
    for found in launch(noted, 2, tmp_path):
        for times in found.values():
            assert times.losses == [0, 1, 2, 3, 4]
            assert (len(times.seconds), times.messages) == (3, 1)
    first, second = ((tmp_path / f"rank-{rank}").read_text().splitlines() for rank in range(2))
    assert first == second
    *steps, end = first
    assert end == "True 0"
    rounds = [[line.split() for line in steps[at : at + 3]] for at in range(0, 15, 3)]
    assert [{number for number, *_ in each} for each in rounds] == [{"0"}, {"1"}, {"2"}, {"3"}, {"4"}]
    assert all(sorted(name for _, name, _ in each) == ["a", "b", "c"] for each in rounds)
    assert len({tuple(name for _, name, _ in each) for each in rounds}) > 1
    assert {on for each in rounds for *_, on in each} == {"False"}


# Overhead


def times_of(seconds: list[float], messages: int = 0) -> Times:
    return Times(seconds, [], messages)


def test_a_cost_is_what_a_step_takes_beyond_the_plain_module() -> None:
    times = {
        "plain": times_of([3.0, 1.0, 2.0]),
        "torch-fsdp1": times_of([10.0, 12.0, 32.0, 14.0, 6.0]),
        "our-fsdp": times_of([4.0], 15),
    }
    costs = contest.costs(times, parts=5)
    assert costs == {"torch-fsdp1": Cost(2.0, (1.6, 2.4), 0), "our-fsdp": Cost(0.4, (0.4, 0.4), 15)}


OURS = ("our-fsdp", "our-fsdp-grad-op", "our-fsdp2")


def made_up_runs(*ours: float) -> list[dict[str, Cost]]:
    """Of each run what ours cost; torch's FSDP1 costs 4 and FSDP2 8 seconds, in the last run ten times that."""
    times = [1.0] * (len(ours) - 1) + [10.0]
    return [
        {
            name: Cost(cost * slow, (0.0, 9.0), 3)
            for name, cost in {"torch-fsdp1": 4.0, "torch-fsdp2": 8.0, **dict.fromkeys(OURS, us)}.items()
        }
        for us, slow in zip(ours, times, strict=True)
    ]


def test_a_ratio_is_the_median_of_the_ratios_of_the_runs() -> None:
    """And not the ratio of the medians: in a run that is slow for all, nobody is worse."""
    assert contest.ratio(made_up_runs(2.0, 1.0, 0.4), "our-fsdp", "torch-fsdp1") == 0.25


@pytest.mark.parametrize(
    ("ours", "over"),
    [(0.8, []), (1.0, []), (1.1, ["torch-fsdp1"]), (1.3, ["torch-fsdp1", "torch-fsdp2"])],
)
def test_limits_are_held_against_the_default_strategy(ours: float, over: list[str]) -> None:
    shape = script("overhead").of_shape(OverheadSettings(), made_up_runs(9.0, ours, ours / 2))
    lines = script("overhead").missed(shape)
    assert [line.split(",")[0].split()[-1] for line in lines] == over
    worse = deepcopy(shape)
    (row,) = (row for row in worse["contestants"] if row["name"] == "our-fsdp-grad-op")
    row["ratios"] = dict.fromkeys(row["ratios"], 9.0)
    assert script("overhead").missed(worse) == lines  # there is no limit for SHARD_GRAD_OP


def test_each_width_has_limits_of_its_own() -> None:
    shapes = [
        script("overhead").of_shape(OverheadSettings(width=width), made_up_runs(*[3.6] * 3)) for width in (8, 32, 256)
    ]
    assert [[line.split(",")[0] for line in script("overhead").missed(shape)] for shape in shapes] == [
        ["width 8: our-fsdp costs 0.900 x torch-fsdp1", "width 8: our-fsdp costs 0.450 x torch-fsdp2"],
        ["width 32: our-fsdp2 costs 0.450 x torch-fsdp2"],
        [],
    ]


def test_the_overhead_of_three_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "overhead.json"
    code = run("overhead", "--width", "8", "--units", "3", "--runs", "2", "--steps", "2", "--out", str(path))
    record = json.loads(path.read_text())
    assert set(record) >= ABOUT
    (shape,) = record["shapes"]
    assert (record["benchmark"], shape["units"], shape["steps"], shape["ranks"]) == ("overhead", 3, 2, 2)
    rows = {row["name"]: row for row in shape["contestants"]}
    assert list(rows) == [name for name in overhead.NAMES if name != "plain"]
    assert {name: row["messages"] for name, row in rows.items()} == {
        "torch-fsdp1": 0,
        "torch-fsdp2": 0,
        "our-fsdp": 9,  # two gathers and a reduction a unit, and the root holds nothing
        "our-fsdp-grad-op": 6,
        "our-fsdp2": 9,
    }
    for name, row in rows.items():
        assert len(row["runs"]) == 2
        assert set(row["ratios"]) == {"torch-fsdp1", "torch-fsdp2"}
        assert row["ratios"].get(name, 1) == 1
    said = capsys.readouterr()
    assert code == int(bool(said.err.splitlines()))
    assert all(name in said.out for name in rows)


def test_tensor_parallelism_next_to_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, benchmark = tmp_path / "tensor_parallel.json", script("tensor_parallel")
    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py", "--runs", "1", "--steps", "1", "--out", str(path)])
    for sizes in ("HOST", "STEPS"):
        monkeypatch.setattr(benchmark, sizes, tensor.TensorSettings(width=16, tokens=4, blocks=2))
    code = benchmark.main()
    record = json.loads(path.read_text())
    assert set(record) >= ABOUT
    assert [shape["what"] for shape in record["shapes"]] == ["host", "step"]
    for shape in record["shapes"]:
        per_block = {row["name"]: row["messages"] / shape["blocks"] for row in shape["contestants"]}
        # Forward: out and down. Backward: q, k, v and up. Sequence parallelism moves each of them both ways.
        assert per_block == {"torch-tp": 0, "our-tp": 2 + 4, "torch-tp-sp": 0, "our-tp-sp": 2 * (2 + 4)}
    assert code == int(bool(capsys.readouterr().err.splitlines()))


def test_limits_of_tensor_parallelism() -> None:
    script_ = script("tensor_parallel")
    seconds = dict(zip(("plain", *tensor.CONTESTANTS), ([1.0], [9.0], [3.0], [5.0], [1.5]), strict=True))
    costs = contest.costs({name: times_of(each) for name, each in seconds.items()}, script_.HOST.blocks)
    shape = script_.verdicts("host", script_.HOST, [tensor.Found(costs, {})])
    assert [each["ratio"] for each in shape["ratios"]] == [0.25, 0.125]
    assert script_.missed(shape) == []
    assert len(script_.missed({**shape, "limit": 0.2})) == 1
    one = tensor.Found({}, {"our-tp": 1.0, "torch-tp": 1.0, "our-tp-sp": 1.1, "torch-tp-sp": 1.0})
    assert script_.different([one]) == ["our-tp-sp computes 1.1, torch-tp-sp 1.0"]


@pytest.mark.slow
def test_three_axes_next_to_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "three_axes.json"
    code = run("three_axes", "--runs", "1", "--steps", "1", "--out", str(path))
    record = json.loads(path.read_text())
    assert set(record) >= ABOUT
    assert {name: len(times) for name, times in record["microseconds"].items()} == {"torch": 1, "our": 1}
    lines = capsys.readouterr().err.splitlines()
    assert not [line for line in lines if "computes" in line]
    assert code == int(bool(lines))


def test_limits_of_three_axes() -> None:
    def found(ours: float, loss: float) -> Any:
        costs = contest.costs({"our": times_of([ours]), "torch": times_of([4.0])})
        return three_axes.Found(costs, {"our": loss, "torch": 1.0})

    missed = script("three_axes").missed
    assert missed([found(2.9, 1.0)]) == []
    assert missed([found(3.2, 1.1)]) == [
        "step: our costs 0.800 x torch, more than 0.75",
        "ours computes 1.1, torch 1.0",
    ]


def units_of_all(units: int) -> dict[str, int]:
    kinds = (TorchFSDP, TorchFSDPModule, FullyShardedDataParallel, FSDPModule)
    models = {name: OverheadSettings(units).build(name) for name in overhead.NAMES}
    return {name: sum(isinstance(m, kinds) for m in model.modules()) for name, model in models.items()}


def test_every_contestant_has_the_same_units() -> None:
    (found,) = launch(units_of_all, 2, 3, backend="fake")
    assert found.pop("plain") == 0
    assert set(found.values()) == {3 + 1}  # and the root


def test_a_profile_names_the_functions_of_one_contestant() -> None:
    text = overhead.profile(OverheadSettings(units=2, steps=1), "our-fsdp", rows=5)
    assert "Ordered by: internal time" in text
    assert "Ordered by: cumulative time" in text
    assert "overhead.py" in text
    assert text.count("to 5 due to restriction") == 2


@pytest.mark.parametrize("options", [("--ranks", "1"), ("--units", "0"), ("--steps", "few"), ("--profile", "nobody")])
def test_overhead_refuses_what_cannot_be(options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run("overhead", *options)
    assert stop.value.code == 2
    assert f"{options[0]}: " in capsys.readouterr().err


def test_a_record_that_cannot_be_written_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overhead, "launch", lambda *_, **__: pytest.fail("a rank was started"))
    (tmp_path / "file").touch()
    for path, says in ((tmp_path / "file" / "overhead.json", "cannot be written"), (tmp_path, "is a folder")):
        assert run("overhead", "--out", str(path)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"--out {path}"[:30] in line
        assert says in line


@pytest.mark.parametrize("name", ["overhead", "scaling", "step"])
def test_an_interrupted_benchmark_ends_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As Ctrl-C ends it: in whatever it does just then."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for check in ("check_writable", "check_writable_file"):
        monkeypatch.setattr(resources, check, interrupted)
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / f"{name}.py")])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert ended.value.code == 130
    assert capfd.readouterr() == ("", "minifsdp: interrupted, nothing was written\n")


# Scaling


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Exit code and folder of a small run, on one rank and on three, which divide nothing."""
    out = tmp_path_factory.mktemp("scaling")
    return run("scaling", "--ranks", "3,1", "--units", "2,4", "--steps", "2", "--out", str(out)), out


@pytest.fixture(scope="module")
def record(scaled: tuple[int, Path]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((scaled[1] / "scaling.json").read_text())
    return content


def test_the_counts_are_those_of_the_law(scaled: tuple[int, Path], record: dict[str, Any]) -> None:
    assert scaled[0] == 0
    assert record["differs"] == []
    assert [(row["ranks"], row["units"], row["way"]) for row in record["rows"]] == [
        (ranks, units, way) for ranks, units in ((1, 4), (3, 2), (3, 4)) for way in scaling.WAYS
    ]
    for row in record["rows"]:
        assert len(row["found"]) == row["ranks"]
        assert all(found == row["law"] for found in row["found"])
        assert row["peak"] > row["law"]["parameters"] + row["law"]["optimizer"]


def test_the_law_in_plain_numbers(record: dict[str, Any]) -> None:
    """Width 64, vocabulary 257, context 16, four blocks; three ranks, four units."""
    block = 12 * 64**2 + 13 * 64
    root = 257 * 64 + 16 * 64 + 2 * 64 + 257 * 64 + 257
    assert record["parameters"] == root + 4 * block
    padded_root, padded_block = -(-root // 3) * 3, -(-block // 3) * 3
    assert padded_root != root or padded_block != block
    psi, padded = 4 * (root + 4 * block), 4 * (padded_root + 4 * padded_block)
    laws = {row["way"]: row["law"] for row in record["rows"] if (row["ranks"], row["units"]) == (3, 4)}
    assert {way: laws[way]["messages"] for way in laws} == {"ddp": 5, "fsdp-grad-op": 10, "fsdp": 14}
    assert laws["ddp"]["wire"] == round(4 / 3 * psi)
    assert laws["fsdp-grad-op"]["wire"] == round(4 / 3 * padded)
    assert laws["fsdp"]["wire"] == round(2 / 3 * (3 * padded - 4 * padded_root))
    assert laws["fsdp"]["parameters"] == padded // 3
    assert laws["fsdp"]["unsharded_peak"] == 4 * (padded_root + 2 * padded_block)
    alone = {row["way"]: row["law"] for row in record["rows"] if row["ranks"] == 1}
    assert all(law["messages"] == 5 and law["wire"] == 0 for law in alone.values())


def test_a_count_that_differs_is_named_and_is_exit_code_1(
    record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = deepcopy(record["rows"])
    rows[-1]["found"][2]["messages"] += 1
    monkeypatch.setattr(scaling, "measure", lambda settings, ranks, units: [r for r in rows if r["ranks"] == ranks])
    assert run("scaling", "--ranks", "1,3", "--units", "2,4", "--out", str(tmp_path)) == 1
    wanted = "fsdp, 3 ranks, 4 units, rank 2: messages 15, the law says 14"
    assert capsys.readouterr().err.splitlines()[-1] == wanted
    assert json.loads((tmp_path / "scaling.json").read_text())["differs"] == [wanted]


def test_the_scaling_record_is_whole(scaled: tuple[int, Path], record: dict[str, Any]) -> None:
    assert set(record) >= ABOUT
    assert {path.name for path in scaled[1].iterdir()} == {"scaling.json", "scaling.png"}
    assert (record["ranks"], record["units"], record["few_ranks"], record["some_units"]) == ([1, 3], [2, 4], 3, 4)
    assert set(record["fits"]) == set(scaling.WAYS)
    for row in record["rows"]:
        low, high = row["quartiles"]
        assert 0 < low <= row["seconds"] <= high


def test_the_figure_draws_the_record(record: dict[str, Any], tmp_path: Path) -> None:
    figure = scaling_figure({**record, "cores": 2}, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        *("time of a step", "held between steps", "sent in a step"),
        *("time of a step", "gathered at most", "messages in a step"),
    ]
    of = [row for row in record["rows"] if row["way"] == "fsdp" and row["ranks"] == 3]
    *_, law, points = figure.axes[5].lines
    assert list(law.get_xdata()) == [row["units"] for row in of]
    assert list(law.get_ydata()) == [row["law"]["messages"] for row in of]
    assert list(points.get_ydata()) == [found["messages"] for row in of for found in row["found"]]
    faint = {line.get_xdata()[0]: line.get_alpha() for line in figure.axes[0].lines if len(line.get_xdata()) == 1}
    assert faint == {1: 1.0, 3: 0.35}
    wrong = scaling_figure({**record, "differs": ["one"]}, tmp_path / "wrong.png")
    assert wrong.get_suptitle() == "Counts that differ from the law: 1"


def test_one_rank_alone_has_a_figure_too(record: dict[str, Any], tmp_path: Path) -> None:
    """Without a byte sent."""
    rows = [row for row in record["rows"] if row["ranks"] == 1]
    alone = {**record, "rows": rows, "ranks": [1], "few_ranks": 1, "some_units": rows[0]["units"]}
    figure = scaling_figure(alone, tmp_path / "scaling.png")
    (gathered,) = (axes for axes in figure.axes if axes.get_title(loc="left") == "gathered at most")
    assert (gathered.get_ylim(), [*gathered.get_yticks()]) == ((0, 1), [0])
    assert (tmp_path / "scaling.png").stat().st_size


def test_units_change_nothing_but_the_units() -> None:
    settings = ScalingSettings(units=(1, 4), width=16)
    tokens = torch.arange(8).view(1, 8)
    one, four = settings.model(1), settings.model(4)
    assert [len(model.blocks) for model in (one, four)] == [1, 4]
    assert one(tokens, tokens).item() == four(tokens, tokens).item()


def test_a_line_is_fitted_over_the_messages() -> None:
    rows = [{"law": {"messages": m}, "seconds": 0.5 + 0.002 * m} for m in (5, 9, 17)]
    assert scaling.fit(rows) == pytest.approx((0.5, 0.002))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--units", "4,6"), "6 blocks do not make 4 equal units"),
        (("--units", "4,4"), "--units: give two numbers or more"),
        (("--steps", "0"), "--steps 0: time one or more"),
        (("--ranks", "1,2,1000"), "--ranks 1000: gloo serves at most"),
        (("--out", "/proc/none"), "--out /proc/none cannot be written"),
    ],
)
def test_scaling_refuses_what_cannot_be(
    options: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "launch", lambda *_, **__: pytest.fail("a rank was started"))
    monkeypatch.setattr(sys, "argv", ["scaling.py", *options])
    assert script("scaling").main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


# Pipelines


def test_what_a_pipeline_costs_is_the_time_beyond_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the rank that takes longer, by medians."""
    fast = {"loop": [1.0, 1.0, 9.0], "torch": [3.0, 3.0, 9.0], "ours": [2.0, 2.0, 9.0]}
    slow = {"loop": [1.0], "torch": [5.0], "ours": [2.5]}
    ranks = [contest.costs({who: times_of(each) for who, each in of.items()}, beyond="loop") for of in (fast, slow)]
    monkeypatch.setattr(
        pipeline, "launch", lambda *_, **__: [dict.fromkeys(pipeline.SCHEDULES, costs) for costs in ranks]
    )
    found = pipeline.measure(pipeline.PipelineSettings())
    assert list(found) == list(pipeline.SCHEDULES)
    for costs in found.values():
        assert {who: cost.median for who, cost in costs.items()} == {"torch": 4.0, "ours": 1.5}
    assert contest.ratio([found["gpipe"]], "ours", "torch") == 0.375


def test_a_pipeline_is_recorded_and_its_limit_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = run("pipeline", "--runs", "1", "--steps", "1", "--out", str(tmp_path / "pipeline.json"))
    record = json.loads((tmp_path / "pipeline.json").read_text())
    assert record.keys() >= ABOUT
    assert [row["name"] for row in record["schedules"]] == ["gpipe", "1f1b", "interleaved"]
    assert code == any(row["ratio"] > record["limit"] for row in record["schedules"])
    assert ("more than 0.8" in capfd.readouterr().err) == bool(code)
    assert run("pipeline", "--micros", "3", "--out", str(tmp_path / "pipeline.json")) == 2


# Orders of axes

CUBE = OrdersSettings()


def timed_as_predicted(compute: float, off: dict[Case, float]) -> list[dict[Case | None, list[float]]]:
    """Ranks whose steps take what is predicted, times `off`."""
    seconds = {case: [off.get(case, 1.0) * CUBE.predict(case, compute)] * 3 for case in CUBE.cases}
    return [{None: [compute * orders.cores() / 8] * 3, **seconds}] * 8


def test_orders_that_differ_from_their_prediction_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By more than a tenth, or in rank; what two orders have across in common makes no rank."""
    monkeypatch.setattr(orders, "cores", lambda: 8)
    for off, says in (
        ({}, []),
        ({Case(4, "pp/tp/dp"): 1.05}, []),
        ({Case(4, "pp/tp/dp"): 1.2}, ["hosts of 4, pp/tp/dp: "]),
        ({Case(2, "tp/dp/pp"): 0.8}, ["hosts of 2, tp/dp/pp: ", "no faster", "no faster"]),
    ):
        ranks = timed_as_predicted(0.2, off)
        monkeypatch.setattr(orders, "launch", lambda *_, ranks=ranks, **__: ranks)
        assert run("orders", "--out", str(tmp_path)) == bool(says)
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == len(says)
        assert all(part in line for part, line in zip(says, lines, strict=True))
        record = json.loads((tmp_path / "orders.json").read_text())
        assert record.keys() >= ABOUT
        assert record["compute"] == pytest.approx(0.2)
        assert [(row["host"], row["axes"]) for row in record["rows"]] == CUBE.cases
        assert (tmp_path / "orders.png").read_bytes().startswith(b"\x89PNG")


def test_orders_are_timed_on_ranks_and_predicted_from_their_cpu_time() -> None:
    settings = OrdersSettings("dp=2,tp=2,zero=1", (2,), batch=4, layers=1, width=16, context=8, steps=1)
    found = orders.measure(settings)
    inside, across = (next(row for row in found["rows"] if row["across"] == [axis]) for axis in ("dp", "tp"))
    assert found["compute"] > 0
    for row in (inside, across):
        assert row["seconds"] > row["predicted"] - found["compute"] > 0  # links take their time
        assert row["predicted"] == settings.predict(Case(2, row["axes"]), found["compute"])
