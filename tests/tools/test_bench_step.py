"""`benchmarks/step.py`: what it runs, what it keeps, and when a limit is missed; no rank starts here."""

import importlib.util
import json
import os
import sys
from functools import cache
from pathlib import Path

import pytest

from minifsdp.course.bench import start
from minifsdp.course.bench.contestants import CONTESTANTS
from minifsdp.course.bench.settings import BenchSettings
from minifsdp.instruments.launch.world import World

PATH = Path(__file__).parents[2] / "benchmarks" / "step.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_step", PATH)
step = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(step)


@cache
def shape(width):
    return BenchSettings(width=width).shape()


def bench_record(settings, seconds=(), heavy=()):
    """What `minifsdp bench` might return: ours takes half of torch's, but for what is said here."""
    ours = {name: {"median": 0.5, "bytes": 50} for name in settings.only if name.startswith("our")}
    figures = {name: {"median": 1.0, "bytes": 100} for name in settings.only} | ours
    for name, each in dict(seconds).items():
        figures[name]["median"] = each
    for name, each in dict(heavy).items():
        figures[name]["bytes"] = each
    rows = [
        {
            "name": name,
            "median": each["median"],
            "quartiles": [each["median"]] * 2,
            "bytes": {"allocated_peak": each["bytes"]} if settings.memory else None,
            "agrees": True,
        }
        for name, each in figures.items()
    ]
    about = {"world": "made up", "threads": 1, "batch": settings.batch, "memory": "made up", "tolerance": 1e-4}
    return {**about, "model": shape(settings.width), "contestants": rows}


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """Run it on made-up records of `minifsdp bench`; returns the exit code, the record and the settings of each run."""

    interfaces = []

    def run(*options, runs=1, of=bench_record, connections=(1,)):
        ran = []
        interfaces.clear()

        def answer(request, show):
            show("plain: timing", 1, 2)
            ran.append(request.settings)
            interfaces.append(os.environ["GLOO_SOCKET_IFNAME"].split(","))
            return of(request.settings)

        out = tmp_path / "step.json"
        monkeypatch.setattr(start, "run", answer)
        monkeypatch.setattr(start, "choose_world", lambda ranks, *_: World(ranks, "gloo", (), False, ""))
        monkeypatch.setattr(sys, "argv", ["step.py", "--out", str(out), "--runs", str(runs), *options])
        if connections:
            sys.argv += ["--connections", *map(str, connections)]
        code = step.main()
        return code, json.loads(out.read_text()) if out.exists() else None, ran

    run.interfaces = interfaces
    return run


def test_it_runs_all_widths_and_weighs_once_in_each(benchmark):
    code, record, ran = benchmark("--steps", "7", runs=3)
    assert code == 0
    assert [(each.width, each.context, each.memory) for each in ran] == [
        *[(512, 128, True), (512, 128, False), (512, 128, False)],
        *[(256, 64, True), (256, 64, False), (256, 64, False)],
        *[(32, 16, True), (32, 16, False), (32, 16, False)],
    ]
    for each in ran:
        shape = each.shape()
        assert (each.steps, each.ranks, each.batch, shape["layers"], shape["heads"]) == (7, 2, 2, 8, 8)
    assert ran[0].shape()["parameters"] == pytest.approx(25.5e6, rel=0.01)
    assert [each for each in CONTESTANTS if each in step.ONLY] == list(step.ONLY)
    assert {name for _, ours, theirs, _ in step.LIMITS for name in (ours, theirs)} <= set(step.ONLY)
    assert [size["model"]["width"] for size in record["sizes"]] == [512, 256, 32]
    for size in record["sizes"]:
        assert [row["name"] for row in size["rows"]] == list(step.ONLY)
        assert all(len(row["seconds"]) == len(row["quartiles"]) == 3 and row["bytes"] for row in size["rows"])
    held = [limit for *_, limits in step.LIMITS for limit in limits if limit is not None]
    assert sorted(each["limit"] for each in record["verdicts"]) == sorted(held)
    assert {"benchmark", "command", "when", "commit", "cpu", "cores", "versions"} <= record.keys()


def test_with_one_connection_and_with_two(benchmark):
    """Each is held to every limit; gloo opens a connection for each interface that it is given."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    _, record, _ = benchmark("--width", "512", runs=2, connections=())
    assert [len(each) for each in benchmark.interfaces] == [1, 1, 2, 2]
    assert {len(set(each)) for each in benchmark.interfaces} == {1}
    assert [size["connections"] for size in record["sizes"]] == [1, 2]
    assert [each["connections"] for each in record["verdicts"]] == [1] * len(step.LIMITS) + [2] * len(step.LIMITS)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before


@pytest.mark.parametrize("text", ["seconds: 3", "[]", '{"benchmark": "scaling"}'])
def test_a_file_that_is_no_record_is_not_checked(benchmark, tmp_path, capsys, text):
    (tmp_path / "other").write_text(text)
    code, _, ran = benchmark("--check", "--out", str(tmp_path / "other"))
    assert (code, ran) == (2, [])
    assert capsys.readouterr().err == f"{tmp_path / 'other'} is no record of this benchmark\n"


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({"seconds": {"our-ddp": 1.0}}, []),
        ({"seconds": {"our-ddp": 1.001}}, [("seconds", "our-ddp", "torch-ddp-view")]),
        ({"seconds": {"our-fsdp": 0.7}}, [("seconds", "our-fsdp", "torch-fsdp2")]),
        ({"seconds": {"our-fsdp2": 0.53}}, [("seconds", "our-fsdp2", "our-fsdp")]),
        ({"seconds": {"our-fsdp-grad-op": 0.83}}, [("seconds", "our-fsdp-grad-op", "torch-fsdp1-grad-op")]),
        ({"heavy": {"our-fsdp": 100}}, []),
        ({"heavy": {"our-fsdp2": 51}}, [("bytes", "our-fsdp2", "our-fsdp")]),
        ({"heavy": {"our-fsdp": 100, "torch-fsdp1": 99}}, [("bytes", "our-fsdp", "torch-fsdp1")]),
        ({"heavy": {"our-fsdp-grad-op": 101}}, [("bytes", "our-fsdp-grad-op", "torch-fsdp1-grad-op")]),
    ],
)
def test_a_limit_is_met_or_missed(benchmark, capsys, figures, missed):
    code, record, _ = benchmark("--width", "512", of=lambda settings: bench_record(settings, **figures))
    found = [(each["what"], each["ours"], each["theirs"]) for each in record["verdicts"] if not each["met"]]
    assert found == missed
    assert code == bool(missed)
    assert capsys.readouterr().out.count("NO ") == len(missed)


def test_widths_have_limits_of_their_own(benchmark):
    slower = {"our-fsdp": 1.1, "torch-fsdp1": 9.0, "torch-fsdp2": 9.0}
    _, record, _ = benchmark(of=lambda settings: bench_record(settings, slower))
    assert [(each["width"], each["theirs"]) for each in record["verdicts"] if not each["met"]] == [
        (512, "torch-ddp-view")
    ]


def test_the_median_of_ratios_counts(benchmark):
    """Of the runs' ratios, not the ratio of the runs' medians, which here is 1."""
    answers = iter([(1.0, 4.0), (2.0, 1.0), (6.0, 2.0)])

    def of(settings):
        ours, theirs = next(answers)
        return bench_record(settings, {"our-ddp": ours, "torch-ddp-view": theirs})

    code, record, _ = benchmark("--width", "256", runs=3, of=of)
    verdict = record["verdicts"][0]
    assert verdict["ratios"] == [0.25, 2.0, 3.0]
    assert (verdict["ratio"], verdict["met"], code) == (2.0, False, 1)


def test_a_record_is_held_to_the_limits_of_today(benchmark, monkeypatch):
    """`--check` believes neither its verdicts nor its widths."""
    assert benchmark()[0] == 0
    assert benchmark("--check")[0] == 0
    monkeypatch.setattr(
        step, "LIMITS", [(what, ours, theirs, (0.4, 0.4, 0.4)) for what, ours, theirs, _ in step.LIMITS]
    )
    code, _, ran = benchmark("--check")
    assert (code, ran) == (1, [])


def test_what_was_not_run_is_not_met(benchmark):
    assert benchmark("--width", "256")[0] == 0
    assert benchmark("--check", "--width", "256")[0] == 0
    assert benchmark("--check")[0] == 1


def test_wrong_losses_are_no_record(benchmark, tmp_path):
    def of(settings):
        record = bench_record(settings)
        record["contestants"][-1] |= {"agrees": False, "off": 0.5}
        return record

    with pytest.raises(SystemExit, match=r"our-fsdp2 by 5.0e-01"):
        benchmark(of=of)
    assert not (tmp_path / "step.json").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ranks", "0"], "--ranks 0: must be at least 1"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--check"], "step.json"),
        (["--out", str(PATH / "step.json")], f"{PATH} cannot be written"),
    ],
)
def test_what_cannot_be_had_is_one_line(benchmark, capsys, options, says):
    code, record, ran = benchmark(*options)
    assert (code, record, ran) == (2, None, [])
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_four_ranks_stand_beside_two(benchmark, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(step, "cpu_records_folder", lambda: tmp_path)
    benchmark("--width", "512", of=lambda settings: bench_record(settings, {"our-ddp": 0.625}))
    (tmp_path / "step.json").rename(tmp_path / "step-2-ranks.json")
    capsys.readouterr()
    benchmark("--ranks", "4", "--width", "512")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "our-ddp" in line]
    assert line.split()[-2:] == ["0.50", "0.625"]
