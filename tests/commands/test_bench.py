"""`minifsdp bench`: a step of each in turn, the same losses or no result, and a record that the pictures repeat."""

import copy
import gc
import json
import math
import re
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from rich.console import Console

from minifsdp import device
from minifsdp.course.bench import compete, memory, report, start
from minifsdp.course.bench.contestants import BASELINES, CONTESTANTS, Contestant
from minifsdp.course.bench.prediction import GPUS, PREDICTED, predict
from minifsdp.course.bench.settings import BenchSettings
from minifsdp.course.ladder.rungs import RUNGS, plain
from minifsdp.instruments import plots
from minifsdp.instruments.launch import launch, rank_device
from minifsdp.instruments.launch.world import World
from minifsdp.instruments.machine import A100, H200
from minifsdp.instruments.machine.program import Kernel
from minifsdp.instruments.system.whole_files import UndeliveredError
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.step import take_step

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HONEST = ("plain", "torch-ddp-view", "torch-fsdp1", "torch-fsdp2", "our-ddp", "our-fsdp-grad-op", "zero1", "fsdp-limit")
WRONG = ("alone", "broken")
SMALL = BenchSettings(only=HONEST + WRONG, layers=2, width=32, context=16, steps=3, warm_up=2)


def broken(model):
    """Its loss is not a number."""
    with torch.no_grad():
        model.head.bias.fill_(math.nan)
    return plain(model)


def noting(model, name, contestant, folder):
    """The contestant; each forward leaves its name in a file of the rank."""
    trainer = contestant.build(model)
    path = folder / f"order-{torch.distributed.get_rank()}"

    def note(*_):
        with path.open("a") as file:
            file.write(f"{name}\n")

    trainer.model.register_forward_pre_hook(note)
    return trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def record(folder):
    """One run for all tests: honest contestants, one that trains alone without saying so, and one that is broken."""
    everybody = CONTESTANTS | {
        "alone": Contestant("minifsdp", "forgets to communicate", plain),
        "broken": Contestant("minifsdp", "loses its values", broken),
    }
    noted = {
        name: each._replace(build=partial(noting, name=name, contestant=each, folder=folder))
        for name, each in everybody.items()
    }
    return start.run(start.check(SMALL, "cpu", folder, contestants=noted), lambda *_: None)


def by_name(record):
    return {row["name"]: row for row in record["contestants"]}


def honest(record):
    """The same, had the wrong ones not taken part."""
    return record | {"contestants": [row for row in record["contestants"] if row["name"] not in WRONG]}


def unmeasured(record):
    """The same of `--no-memory`."""
    rows = [row | {"bytes": None} for row in record["contestants"]]
    return record | {"contestants": rows, "memory": report.NOT_MEASURED}


def on_gpu(record):
    """The same with what only a GPU gives: made up, each contestant's different."""
    record = copy.deepcopy(record)
    for place, row in enumerate(record["contestants"]):
        row["bytes"] = {
            "allocated_peak": (place + 2) * 2**20,
            "reserved_peak": (place + 4) * 2**20,
            "alloc_retries": place % 3,
        }
        row["model_seconds"] = 1e-3 * (place + 1) if place % 2 else None
    return record


def test_contestants_take_a_step_by_turns_in_changing_order(record, folder):
    """The same order on all ranks. And then the memory of each is measured, alone."""
    rounds, everybody = SMALL.warm_up + SMALL.steps, len(SMALL.only)
    order, same = ((folder / f"order-{rank}").read_text().split() for rank in range(2))
    assert order == same
    turns = [tuple(order[round * everybody :][:everybody]) for round in range(rounds)]
    assert all(sorted(turn) == sorted(SMALL.only) for turn in turns)
    assert len(set(turns)) == rounds
    alone = [name for name in SMALL.only for _ in range(memory.WARM_UP + memory.WINDOWS)]
    assert order[rounds * everybody :] == alone


def test_losses_are_those_of_one_process(record):
    rounds = SMALL.warm_up + SMALL.steps
    assert record["reference_losses"][-1] < record["reference_losses"][0]
    for name in HONEST:
        row = by_name(record)[name]
        assert row["agrees"], name
        assert row["off"] <= record["tolerance"]
        assert row["compared"] == (1 if name == "plain" else rounds)
        assert row["losses"][: row["compared"]] == pytest.approx(
            record["reference_losses"][: row["compared"]], rel=record["tolerance"]
        )


def threads_after(work):
    work()
    return torch.get_num_threads()


def test_one_process_computes_with_as_many_threads_as_a_rank():
    """With others it sums in another order, and ten steps at width 512 make 1e-4 of a difference of 1e-7."""
    train = partial(compete.train_alone, replace(SMALL, steps=1, warm_up=0))
    assert launch(threads_after, 1, train) * 2 == launch(threads_after, 2, int)


def test_a_wrong_step_is_no_result(record):
    rows = by_name(record)
    assert [name for name, row in rows.items() if not row["agrees"]] == list(WRONG)
    assert rows["alone"]["off"] > 3 * record["tolerance"]  # after steps so few
    assert rows["broken"]["off"] is None
    assert set(rows["broken"]["losses"]) == {None}
    line = report.disagreement(record)
    assert "alone by" in line
    assert "broken by" in line
    assert not [name for name in HONEST if f"{name} by" in line]
    assert report.disagreement(honest(record)) is None


def test_a_last_step_that_is_wrong_is_seen():
    """Each rank's loss counts, not their mean, and every step."""
    reference = [[4.0, 5.0], [3.0, 4.0]]
    contestant = CONTESTANTS["our-fsdp"]

    def row(first, second):
        ranks = [
            {"contestants": {"x": {"losses": losses, "step_seconds": [1.0], "bytes": None}}}
            for losses in (first, second)
        ]
        return report._row("x", contestant, reference, ranks)

    assert row([4.0, 3.0], [5.0, 4.0])["agrees"]
    assert not row([4.0, 3.0], [5.0, 4.1])["agrees"]
    assert not row([4.0, 3.1], [5.0, 3.9])["agrees"]  # whose mean is right
    assert not row([4.0, 3.0], [5.0, math.inf])["agrees"]


def test_the_record_is_whole_and_consistent(record, folder):
    assert json.loads((folder / "bench.json").read_text()) == record
    json.dumps(record, allow_nan=False)
    assert {path.name for path in folder.iterdir()} == {"bench.json", "bench.png", "order-0", "order-1"}
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert tuple(by_name(record)) == SMALL.only
    assert record["world"].startswith("2 ranks over gloo on CPU")
    assert record["model"]["parameters"] == sum(p.numel() for p in SMALL.model().parameters())
    rows = by_name(record)
    for row in rows.values():
        assert len(row["step_seconds"]) == SMALL.steps
        low, high = row["quartiles"]
        assert 0 < min(row["step_seconds"]) <= low <= row["median"] <= high <= max(row["step_seconds"])
        assert list(row["bytes"]) == ["allocated_peak"]
        assert row["model_seconds"] is None
        assert row["ratios"] == {
            name: row["median"] / rows[name]["median"]
            for name in ("plain", "torch-ddp-view", "torch-fsdp1", "torch-fsdp2")
        }


def test_bytes_are_those_of_the_model_and_its_state(record):
    """Parameter, gradient and two moments: all on every rank, or half of them; the rest is activations and buffers."""
    states = 16 * record["model"]["parameters"]
    peaks = {name: row["bytes"]["allocated_peak"] for name, row in by_name(record).items()}
    for name in ("plain", "torch-ddp-view", "our-ddp"):
        assert states < peaks[name] < 3 * states, name
    for name in ("torch-fsdp1", "torch-fsdp2", "our-fsdp-grad-op", "fsdp-limit"):
        assert states / 2 < peaks[name] < peaks["torch-ddp-view"], name
    assert record["memory"] == memory.ON_CPU


@pytest.mark.slow
def test_measured_again_it_holds_as_much():
    """Nothing is left of those that were measured in between."""
    settings = replace(SMALL, only=("torch-ddp-view", "our-ddp", "torch-fsdp1", "fsdp"))
    for ranks in launch(measured_twice, 2, settings, backend="gloo"):
        for first, second in ranks:
            assert second == pytest.approx(first, rel=0.03)


def measured_twice(settings):
    where = rank_device()
    batch = compete._shard(next(settings.batches()), torch.distributed.get_rank(), 2, where)
    rounds = [
        [
            memory.measure_memory(partial(compete._build, settings, CONTESTANTS[name], where), batch, where)
            for name in settings.only
        ]
        for _ in range(2)
    ]
    return [(first["allocated_peak"], second["allocated_peak"]) for first, second in zip(*rounds, strict=True)]


def test_memory_is_measured_only_if_asked():
    settings = replace(SMALL, ranks=1, only=("plain",), memory=False)
    (rank,) = launch(compete.compete, 1, settings, CONTESTANTS, backend="gloo")
    assert rank["contestants"]["plain"]["bytes"] is None


def shown(record, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.bench_table(record))
    return console.export_text()


def numbers_of(name, text):
    """What stands beside a name, in each table."""
    return [line.split()[1:] for line in text.splitlines() if line.split()[:1] == [name]]


def test_the_table_has_what_the_record_has(record):
    text = shown(record)
    for row in record["contestants"]:
        (ms, _, *ratios, _), (held,) = numbers_of(row["name"], text)
        assert float(ms) == pytest.approx(1e3 * row["median"], rel=0.01)
        assert ratios == [f"{ratio:.2f}" for ratio in row["ratios"].values()]
        assert float(held) == pytest.approx(row["bytes"]["allocated_peak"] / 2**20, abs=0.05)
    assert "tries" not in text
    text = shown(unmeasured(record))
    assert "peak" not in text
    assert "not measured" in text
    text = shown(on_gpu(record))
    assert "tries" in text
    assert numbers_of("torch-fsdp1", text)[1] == ["4.0", "6", "2"]  # allocated and reserved MiB, retries


def test_it_fits_a_terminal(record):
    """With every baseline and all that a GPU gives, the longest name and steps of seconds."""
    slow = {"median": 1.234, "quartiles": [1.1, 1.3], "ratios": dict.fromkeys(BASELINES, 12.34)}
    for given in (record, on_gpu(record)):
        rows = [row | slow for row in given["contestants"]]
        last = rows[-1] | {"name": "torch-fsdp1-grad-op"}
        assert "…" not in shown(given | {"contestants": [*rows, last]}, width=80)


@pytest.mark.parametrize("of", [unmeasured, lambda record: record, on_gpu], ids=["unmeasured", "cpu", "gpu"])
def test_the_figure_draws_the_record(record, tmp_path, of):
    record = of(honest(record))
    rows = record["contestants"]
    figure = plots.bench_figure(record, tmp_path / "bench.png")
    seconds, *rest = figure.axes
    assert [bar.get_width() for bar in seconds.patches] == pytest.approx([1e3 * row["median"] for row in rows])
    assert [label.get_text() for label in seconds.get_yticklabels()] == [row["name"] for row in rows]
    whiskers = [line.get_xdata().tolist() for line in seconds.lines if len(line.get_xdata()) == 2]
    assert whiskers == [pytest.approx([1e3 * each for each in row["quartiles"]]) for row in rows]
    diamonds = [line.get_xdata()[0] for line in seconds.lines if len(line.get_xdata()) == 1]
    assert diamonds == [1e3 * row["model_seconds"] for row in rows if row["model_seconds"] is not None]
    for kind, row in (("allocated_peak", 0), ("reserved_peak", 1)):  # the filled bars lie over the outlines
        drawn = [[bar for bar in axes.patches if bool(bar.get_facecolor()[3]) != row] for axes in rest]
        there = [each["bytes"][kind] for each in rows if each["bytes"] and kind in each["bytes"]]
        unit = 2**20 if max(there, default=0) >= 2**20 else 2**10
        assert [bar.get_width() * unit for bars in drawn for bar in bars] == pytest.approx(there)


def test_the_figure_says_when_there_is_no_result(record, tmp_path):
    figure = plots.bench_figure(record, tmp_path / "bench.png")
    assert figure.get_suptitle() == "No result: alone, broken computed something else"


def test_each_is_measured_from_warm_to_warm(monkeypatch):
    """The peak is reset after the steps that make the optimizer's state, and retries are of the steps after it."""
    events = []
    retries = iter((0, 3, 8))

    def stats(where):
        events.append("read")
        held = {"current": 1, "peak": 20}
        kinds = {
            f"{kind}_bytes.all.{when}": held[when] for kind in ("allocated", "active", "reserved") for when in held
        }
        return kinds | {"num_alloc_retries": next(retries)}

    def read(where):
        return device.memory_stats(torch.device("cuda"))

    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda where: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(memory, "record_memory_history", lambda on: events.append("record" if on else "stop"))
    monkeypatch.setattr(memory, "memory_snapshot", lambda: {"device_traces": [[], [entry("alloc", 1, 17, 2**62)]]})
    monkeypatch.setattr(memory, "device", SimpleNamespace(memory_stats=read, synchronize=lambda where: None))
    monkeypatch.setattr(memory, "take_step", lambda *_: events.append("step"))
    monkeypatch.setattr(memory, "time", SimpleNamespace(time_ns=time.time_ns, sleep=lambda _: events.append("pause")))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: events.append("collective"))
    monkeypatch.setattr(torch, "zeros", lambda *_, **on: None)
    build = partial(compete._build, SMALL, CONTESTANTS["plain"], torch.device("cpu"))
    measured = memory.measure_memory(build, None, torch.device("cuda"))
    assert measured == {"allocated_peak": 17, "reserved_peak": 19, "alloc_retries": 5}
    before, after = events[: events.index("reset")], events[events.index("reset") + 1 :]
    let_go = ["pause", "collective"]  # NCCL's process group drops the tensors of what its watchdog has seen to end
    assert before == [*let_go, "empty", "read", "record", *["step"] * memory.WARM_UP, *let_go]
    assert after == ["read", *["step"] * memory.MEASURED, "read", "stop"]


def entry(action, addr, size, time_us):
    return {"action": action, "addr": addr, "size": size, "time_us": time_us}


def test_what_others_have_left_is_not_counted():
    """Torch's DDP leaves its buckets, which are freed while a later contestant is measured: not less is held then."""
    trace = [
        entry("segment_alloc", 0, 1000, 0),
        entry("alloc", 1, 300, 1),
        entry("alloc", 2, 200, 2),
        entry("free_requested", 2, 200, 3),
        entry("free_completed", 2, 200, 4),
        entry("free_requested", 9, 118, 10),  # of one before
        entry("alloc", 3, 50, 11),
        entry("free_requested", 3, 50, 12),
    ]
    assert memory.own_peak(trace, since=0) == 500
    assert memory.own_peak(trace, since=10) == 350


def measured_alone(names):
    """Bytes that each has at work, and that are left when it has gone."""
    where = rank_device()
    batch = compete._shard(next(SMALL.batches()), 0, 2, where)
    found = {}
    for name in names:
        with Ledger() as ledger:
            trainer = compete._build(SMALL, CONTESTANTS[name], where)
            take_step(trainer, batch, where)
            held = ledger.live()
            memory.release(trainer)
            del trainer
            gc.collect()
            found[name] = sum(held.values()), sum(ledger.live().values())
    return found


def test_nothing_is_left_for_the_next_to_be_measured_with():
    names = ("plain", "torch-ddp-view", "torch-fsdp1", "torch-fsdp2", "our-ddp-view", "our-fsdp", "fsdp-prefetch")
    for found in launch(measured_alone, 2, names, backend="gloo"):
        for name, (held, left) in found.items():
            assert held > 100_000, name
            assert left < 100, name


def test_everybody_is_there():
    assert set(RUNGS) <= set(CONTESTANTS)
    assert set(PREDICTED) <= set(CONTESTANTS)
    assert not [name for name in PREDICTED if CONTESTANTS[name].family == "torch"]


# The device model

PAPER = replace(SMALL, only=("plain", "torch-fsdp1", "our-fsdp"), ranks=4, width=64, context=64)
GB = 1e9


def test_a_faster_link_is_not_slower():
    by_bandwidth = [predict(PAPER, "NVIDIA H200", bandwidth, 20e-6) for bandwidth in (GB / 2, GB, 400 * GB)]
    assert all(set(each.seconds) == {"plain", "our-fsdp"} for each in by_bandwidth)  # torch's cannot be recorded
    assert all("model of H200 141 GB" in each.says and "not measured" in each.says for each in by_bandwidth)
    slow, faster, fast = (each.seconds["our-fsdp"] for each in by_bandwidth)
    assert slow > faster >= fast
    assert len({each.seconds["plain"] for each in by_bandwidth}) == 1
    assert predict(PAPER, "NVIDIA H200", GB, 1e-3).seconds["our-fsdp"] > faster


def test_float32_is_computed_without_tf32():
    product = Kernel("mm", "", 0, (), (), flops=1e12, nbytes=1, dtype_size=4, seconds=0.0)
    for gpu in GPUS.values():
        assert gpu.without_tf32.kernel(product) > 5 * gpu.kernel(product)
        assert gpu.without_tf32.kernel(product._replace(dtype_size=2)) == gpu.kernel(product._replace(dtype_size=2))
    assert H200.without_tf32.kernel(product) < A100.without_tf32.kernel(product)


def test_one_rank_has_no_link():
    alone = predict(replace(PAPER, ranks=1), "NVIDIA H200", 1.0, 0.0)
    assert "GB/s" not in alone.says
    assert alone.seconds["our-fsdp"] < predict(PAPER, "NVIDIA H200", GB, 0.0).seconds["our-fsdp"]


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA H100 PCIe", "Tesla T4"])
def test_no_numbers_no_prediction(name):
    assert predict(PAPER, name, GB, 0.0).seconds is None
    assert name in predict(PAPER, name, GB, 0.0).says


def test_what_does_not_fit_is_not_predicted():
    huge = replace(PAPER, only=("plain",), layers=2, width=32768)
    assert "does not fit" in predict(huge, "NVIDIA H200", GB, 0.0).says


@pytest.mark.parametrize(
    ("world", "link", "says"),
    [
        (World(4, "gloo", (), False, ""), (0.0, GB), "none on CPU"),
        (World(4, "nccl", (0,) * 4, True, ""), (0.0, GB), "ranks that share a GPU"),
        (World(4, "nccl", (0, 1, 2, 3), False, ""), None, "--measured-link"),
    ],
    ids=["cpu", "shared", "no link"],
)
def test_when_there_is_nothing_to_predict(tmp_path, world, link, says):
    prediction = start._predict(start.Request(PAPER, CONTESTANTS, world, link, tmp_path), "NVIDIA H200")
    assert prediction.seconds is None
    assert says in prediction.says


def test_ranks_that_share_a_gpu_are_said_to(record):
    shared = World(2, "nccl", (0, 0), True, "1 GPU here, shared as requested")
    one = replace(SMALL, only=("plain",))
    ranks = [
        {"device": "X", "threads": 1, "contestants": {"plain": {"losses": [1.0], "step_seconds": [1.0], "bytes": None}}}
    ] * 2
    made = report.make_record(one, CONTESTANTS, shared, [[1.0, 1.0]], ranks, predict(one, "X", GB, 0.0))
    assert made["world"].startswith(str(shared))
    assert report.SHARED in made["world"]
    assert report.SHARED not in record["world"]


# The command


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_step_is_exit_code_1(monkeypatch, command, tmp_path, record, wrong):
    monkeypatch.setattr(start, "run", lambda request, show: record if wrong else honest(record))
    code, out, errors = command("bench", "--device", "cpu", "--out", str(tmp_path))
    assert code == (1 if wrong else 0)
    assert ("wrong step's time is no result" in errors) == wrong
    assert "our-fsdp-grad-op" in out


def test_results_that_cannot_be_written_are_shown_all_the_same(monkeypatch, command, tmp_path, record):
    def undelivered(request, show):
        raise UndeliveredError("--out gone cannot be written", honest(record))

    monkeypatch.setattr(start, "run", undelivered)
    code, out, errors = command("bench", "--device", "cpu", "--out", str(tmp_path))
    assert code == 1
    assert "our-fsdp-grad-op" in out
    assert errors.splitlines()[-1] == "minifsdp: --out gone cannot be written"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--only", "plain,torch-fsdp3"], "--only: there is no 'torch-fsdp3'; there are plain, torch-ddp"),
        (["--only", ","], "--only is empty"),
        (["--only", "plain,our-ddp,plain"], "--only names plain twice"),
        (["--ranks", "0"], "--ranks 0: must be at least 1"),
        (["--ranks", "1000"], "--ranks 1000: gloo serves at most 64"),
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--warm-up", "0"], "--warm-up 0: must be at least 1"),
        (["--heads", "3", "--width", "32"], "--heads 3 does not divide --width 32"),
        (["--seed", "9" * 30], "--seed 9999"),
        (["--context", "9999999"], "shorter than one batch"),
        (["--width", "65536", "--layers", "96"], "GiB are free here: choose a smaller --width"),
        (["--measured-link", "fast"], "bad link 'fast'"),
        (["--device", "tpu"], "--device tpu: choose auto, cpu or cuda"),
        (["--share-gpu"], "--share-gpu"),
        (["--layers", "10000", "--width", "8192"], "GiB are free here: choose a smaller --width or --layers"),
        (["--layers", "9" * 20], f"--layers {'9' * 20}: must be at most 10,000"),
        (["--width", "9" * 20], f"--width {'9' * 20}: must be at most 1,048,576"),
        (["--measured-link", ""], "--measured-link is empty: give it a value"),
        (["--out", "file"], "--out file cannot be written"),
        (["--out", "old"], "--out old/bench.json is a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_requests_end_in_one_line(monkeypatch, refused, tmp_path, options, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "old" / "bench.json").mkdir(parents=True)
    assert says in re.sub(r"\s+", " ", refused("bench", "--device", "cpu", *options))
