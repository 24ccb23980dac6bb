"""`minifsdp ladder`: the run as a user has it, from the record that it leaves."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands_in_forks import minifsdp
from other_ladders import assert_peaks_are_bounded_on_every_rank
from rich.console import Console

from minifsdp.course.ladder import run as ladder
from minifsdp.course.ladder.measure import MEASURING, Settings
from minifsdp.course.ladder.rungs import RUNGS, closed_form_setting
from minifsdp.course.ladder.tables import ladder_table
from minifsdp.instruments.launch.world import choose_world
from minifsdp.instruments.system.housekeeping import find_processes

SMALL = ["--layers", "3", "--width", "35", "--context", "16"]  # no unit of this size is divisible by 2, 3 or 4
STEPS = 4
BUSY = 0.5  # seconds of a rank's own time: it is ready after half of that
SCHEDULES = ["fsdp", "fsdp-overlap", "fsdp-prefetch", "fsdp-limit"]


def settings_on(ranks: int = 2, **given: Any) -> Settings:
    return Settings(ranks=ranks, layers=3, width=35, context=16, **given)


def climb(out: Path, progress: Any = lambda *_: None, **settings: Any) -> dict:
    """From within this process: the fork server is up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIFSDP_DEVICE", "cpu")
        request = ladder.check(settings_on(**settings), "cpu", out)
        ladder.run(request, progress)
    return json.loads((out / "ladder.json").read_text())


@pytest.fixture(scope="module", params=[2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def record(request, tmp_path_factory):
    """Every rung on N ranks. On other numbers than two, a normal run takes a few steps of a few rungs (below)."""
    return climb(tmp_path_factory.mktemp("ladder"), ranks=request.param, steps=STEPS)


def by_name(record):
    return {rung["name"]: rung for rung in record["rungs"]}


def padded(record):
    """Bytes of each unit's flat parameter, the root's first."""
    n = record["ranks"]
    return [4 * n * -(-numel // n) for numel in record["units"]]


def test_record_is_complete(record):
    assert list(by_name(record)) == list(RUNGS)
    assert record["steps"] == STEPS == len(record["reference_losses"])
    assert sum(record["units"]) == record["parameters"]
    assert not [numel for numel in record["units"] for n in (2, 3, 4) if numel % n == 0]
    assert record["backend"] == "gloo"
    assert record["data"]["bytes"] > 0
    for rung in record["rungs"]:
        assert len(rung["step_seconds"]) == STEPS
        assert len(rung["bytes"]) == len(rung["predicted"]) == record["ranks"]
        assert set(rung["bytes"][0]) == {*rung["predicted"][0], "peak"}
        assert rung["cuda"] is None, "there is no caching allocator on CPU"
        if record["ranks"] == 1:
            assert rung["overlap"] is None
        else:
            assert 0 <= rung["overlap"] <= 1


def test_losses_equal_one_process(record):
    for rung in record["rungs"]:
        assert rung["losses"] == pytest.approx(record["reference_losses"], rel=1e-4), rung["name"]
    assert record["reference_losses"][-1] < record["reference_losses"][0]


def test_schedules_are_equal_bit_for_bit(record):
    rungs = by_name(record)
    for name in (*SCHEDULES, "fsdp2", "fsdp2-hold"):
        assert rungs[name]["losses"] == rungs["fsdp"]["losses"]


def test_bytes_are_as_predicted_on_every_rank(record):
    for rung in record["rungs"]:
        for measured, predicted in zip(rung["bytes"], rung["predicted"], strict=True):
            assert {key: measured[key] for key in predicted} == predicted, rung["name"]
            assert measured["peak"] > measured["parameters"]


def test_peaks_are_bounded_on_every_rank(record):
    assert_peaks_are_bounded_on_every_rank(record)


def test_the_closed_form_is_of_the_ranks_world_not_of_the_machines_gpus(monkeypatch):
    """On a machine with GPUs `--device cpu` runs on the CPU, where no gradient waits for a device that is behind."""
    monkeypatch.delenv("MINIFSDP_DEVICE", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert not closed_form_setting(2, choose_world(2, "cpu")).runs_behind
    assert closed_form_setting(2).runs_behind


def test_what_each_rung_frees(record):
    n, psi = record["ranks"], 4 * record["parameters"]
    rungs = {name: rung["bytes"][0] for name, rung in by_name(record).items()}
    root, *blocks = padded(record)
    assert rungs["ddp"]["parameters"] == rungs["ddp"]["gradients"] == psi
    if n == 1:
        return
    assert rungs["zero1"]["optimizer"] < rungs["ddp"]["optimizer"]
    assert rungs["zero2"]["gradients"] < rungs["zero1"]["gradients"] == psi
    assert rungs["zero2"]["gradients_peak"] < rungs["zero1"]["gradients_peak"]
    assert rungs["fsdp-grad-op"]["parameters"] == (root + sum(blocks)) // n < rungs["zero2"]["parameters"]
    assert rungs["fsdp-grad-op"]["unsharded_peak"] == root + sum(blocks)
    assert rungs["fsdp"]["unsharded_peak"] == root + max(blocks)
    assert rungs["fsdp-prefetch"]["unsharded_peak"] > rungs["fsdp-limit"]["unsharded_peak"] == root + 2 * max(blocks)


def test_traffic_is_the_formulas(record):
    n, psi, units = record["ranks"], 4 * record["parameters"], padded(record)
    share = (n - 1) / n

    def wire(rung):
        return sum(total["wire"] for total in rung["collectives"].values())

    def calls(rung):
        return {op: total["calls"] for op, total in rung["collectives"].items()}

    rungs, count = by_name(record), len(units)
    for name in ("ddp-naive", "ddp-bucketed", "ddp"):
        assert set(calls(rungs[name])) == {"all_reduce"}
        assert wire(rungs[name]) == round(2 * share * psi)
    assert calls(rungs["ddp"])["all_reduce"] < calls(rungs["ddp-naive"])["all_reduce"]
    for name in ("zero1", "zero2"):
        payload = {op: total["payload"] for op, total in rungs[name]["collectives"].items()}
        used = payload.pop("all_reduce")
        assert used == 4 * calls(rungs["ddp-naive"])["all_reduce"], "whether it has a gradient, for each parameter"
        assert payload["reduce_scatter"] == payload["all_gather"]
        assert payload["all_gather"] < psi + 4 * n * calls(rungs[name])["all_gather"]  # padding and no more
        assert wire(rungs[name]) == pytest.approx(share * (sum(payload.values()) + 2 * used), abs=2)
    if n == 1:
        return
    for name in ("fsdp2", "fsdp2-hold"):
        assert calls(rungs[name]) == {"all_gather": 2 * count - 1, "reduce_scatter": count}
        assert wire(rungs["fsdp"]) < wire(rungs[name]) < 1.1 * wire(rungs["fsdp"])  # padded to whole rows
    assert calls(rungs["fsdp-grad-op"]) == {"all_gather": count, "reduce_scatter": count}
    assert wire(rungs["fsdp-grad-op"]) == pytest.approx(2 * share * sum(units), abs=1)
    for name in SCHEDULES:
        assert calls(rungs[name]) == {"all_gather": 2 * count - 1, "reduce_scatter": count}
        assert wire(rungs[name]) == pytest.approx(share * (3 * sum(units) - units[0]), abs=1)


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_few_rungs_on_other_numbers_of_ranks(ranks, tmp_path):
    few = climb(tmp_path, ranks=ranks, steps=4, rungs=("ddp", "zero2", "fsdp", "fsdp-limit", "fsdp2", "fsdp2-hold"))
    assert len(few["rungs"]) == 6
    test_losses_equal_one_process(few)
    test_bytes_are_as_predicted_on_every_rank(few)
    test_peaks_are_bounded_on_every_rank(few)
    assert by_name(few)["fsdp"]["losses"] == by_name(few)["fsdp-limit"]["losses"]
    count = len(padded(few))
    for name in ("fsdp", "fsdp-limit") if ranks > 1 else ():
        calls = {op: total["calls"] for op, total in by_name(few)[name]["collectives"].items()}
        assert calls == {"all_gather": 2 * count - 1, "reduce_scatter": count}


def test_link_changes_neither_losses_nor_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder.pictures, "draw", lambda *_: None)
    settings = {"steps": 2, "rungs": ("zero2", "fsdp-limit"), "limit": 1}
    said = []
    plain = climb(tmp_path / "plain", lambda what, *_: said.append(what), **settings)
    assert [what.endswith(MEASURING) for what in said] == [False] * (len(said) - 2) + [True] * 2, "timed steps first"
    linked = climb(tmp_path / "linked", **settings, link="latency=1ms,bandwidth=100MB/s")
    for a, b in zip(plain["rungs"], linked["rungs"], strict=True):
        assert [a[key] for key in ("losses", "bytes", "collectives")] == [
            b[key] for key in ("losses", "bytes", "collectives")
        ]
    root, *blocks = padded(linked)
    assert linked["rungs"][-1]["bytes"][0]["unsharded_peak"] == root + max(blocks)


def test_files_are_whole_and_of_this_run(tmp_path):
    """Of the command, in a process of its own."""
    for name in ("trace-ddp.json", "allocator.png", "snapshot-fsdp.pickle"):
        (tmp_path / name).write_text("of an earlier run")
    (tmp_path / "trace-mine.json").write_text("mine")
    options = [*SMALL, "--steps", "1", "--rungs", "fsdp-limit", "--device", "cpu", "--out", str(tmp_path)]
    done = minifsdp("ladder", *options)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in tmp_path.iterdir()}
    pictures = {"memory.png", "memory.gif", "timeline.png", "explore.html"}
    assert names == {"ladder.json", "trace-mine.json", "trace-fsdp-limit.json"} | pictures
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("memory.png", "timeline.png"))
    assert json.loads((tmp_path / "trace-fsdp-limit.json").read_text())["traceEvents"]


# Requests that cannot be met


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rungs", "ddp,fsdq"], "--rungs: there is no 'fsdq'; there are ddp-naive"),
        (["--rungs", ","], "--rungs"),
        (["--rungs", "ddp,fsdp,ddp"], "--rungs names ddp twice"),
        (["--seed", "9" * 30], "--seed 9999"),
        (["--data", "missing.txt"], "missing.txt: no such file"),
        (["--data", "."], "is a directory"),
        (["--data", "short.txt"], "shorter than one batch"),
        (["--data", "empty.txt"], "is empty"),
        (["--batch", "13"], "--batch 13 cannot be shared equally by 2 ranks"),
        (["--ranks", "0"], "--ranks 0: must be at least 1"),
        (["--ranks", "1000", "--batch", "1000"], "--ranks 1000: gloo serves at most 64"),
        (["--ranks", "two"], "'--ranks'"),
        (["--limit", "0"], "--limit 0: must be at least 1"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--width", "-8"], "--width -8: must be at least 1"),
        (["--device", "tpu"], "--device tpu: choose auto, cpu or cuda"),
        (["--layers", "9" * 20], f"--layers {'9' * 20}: must be at most 10,000"),
        (["--width", "9" * 20], f"--width {'9' * 20}: must be at most 1,048,576"),
        (["--width", "1000000"], "GiB are free here: choose a smaller --width or --layers"),
        (["--link", "fast"], "bad link 'fast'"),
        (["--link", "latency=1ms"], "it has no bandwidth"),
        (["--link", "inside=1ms@1GB/s,host=2"], "it has no across"),
        (["--out", "short.txt"], "--out short.txt cannot be written"),
        (["--out", "short.txt/below"], "--out short.txt/below cannot be written"),
        (["--colour", "red"], "--colour"),
        (["--axis", "all", "--batch", "12"], "--batch 12 cannot be shared equally by 16 micro-batches"),  # of 8 ranks
        (["--axis", "3d", "--batch", "12"], "--batch 12 cannot be shared equally by 8 ranks"),
        (["--heads", "0"], "--heads 0: must be at least 1"),
        (["--axis", "sequence"], "--axis: there is no 'sequence'; there are data, tensor, pipeline"),
        (["--axis", "tensor", "--rungs", "fsdp"], "--rungs: there is no 'fsdp'; there are ddp, tp, tp-sp"),
        (["--axis", "tensor", "--rungs", "ddp,tp-fsdp2"], "--rungs tp-fsdp2: 2 ranks are no mesh of dp x tp"),
        (
            ["--axis", "tensor", "--ranks", "5"],
            "--rungs tp: 12 heads cannot be shared by 5 ranks: choose a multiple of 5 heads",
        ),
        (["--axis", "tensor", "--width", "175"], "width 175 cannot be divided into 12 heads"),
        (["--axis", "tensor", "--context", "25", "--rungs", "tp-sp"], "25 tokens cannot be shared by 2 ranks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_requests_end_in_one_line(monkeypatch, refused, tmp_path, options, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "empty.txt").touch()
    assert says in refused("ladder", "--device", "cpu", *options)
    assert {path.name for path in tmp_path.iterdir()} <= {"short.txt", "empty.txt", "results"}


def test_more_ranks_than_gpus(monkeypatch, refused, tmp_path):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert "there is 1 GPU for 2 ranks: use --share-gpu" in refused("ladder", "--device", "cuda")


def training(pid: int) -> bool:
    """Whether both ranks of this command are in the middle of their steps."""
    ranks = [each.process for each in find_processes() if each.starter_pid == pid and each.what.endswith(" of 2")]
    return len(ranks) == 2 and all(rank.cpu_times().user > BUSY for rank in ranks)


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_interrupted_it_leaves_no_process_and_no_file(tmp_path, signum, code):
    command = [sys.executable, "-m", "minifsdp", "ladder", *SMALL, "--steps", "50", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "MINIFSDP_DEVICE": "cpu"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not training(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 3, "the server and two ranks"
    process.send_signal(signum)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert ("interrupted, nothing was written" in errors) == (signum == signal.SIGINT)
    assert "Traceback" not in errors
    _, left = psutil.wait_procs(ranks, timeout=10)
    assert not left
    assert not list((tmp_path / "out").iterdir())


# The table


def test_the_table_ticks_what_is_as_predicted_and_names_what_is_not(record):
    def rows() -> dict[str, str]:
        lines = shown()
        assert max(map(len, lines)) <= 80
        return {name: next(line for line in lines if line.split()[:1] == [name]) for name in RUNGS}

    def shown() -> list[str]:
        console = Console(width=80, file=io.StringIO())
        console.print(ladder_table(changed))
        return console.file.getvalue().splitlines()

    changed = json.loads(json.dumps(record))
    assert all(line.rstrip().endswith("\N{CHECK MARK}") for line in rows().values())
    changed["rungs"][3]["bytes"][-1]["optimizer"] += 1
    said = rows()
    wrong = record["rungs"][3]["name"]
    assert [name for name, line in said.items() if "\N{CHECK MARK}" not in line] == [wrong]
    assert f"{wrong}: optimizer +1 bytes on rank {len(record['rungs'][3]['bytes']) - 1}" in map(str.strip, shown())


def test_the_table_s_headings_are_whole_words_and_it_says_why_ddp_is_above_ddp_naive(record):
    def shown(rungs: list[Any]) -> str:
        console = Console(width=80, file=io.StringIO())
        console.print(ladder_table(record | {"rungs": rungs}))
        return console.file.getvalue()

    text = shown(record["rungs"])
    head = text[: text.index("ddp-naive")].split()
    assert {"parameters", "gradients", "optimizer", "unsharded", "peak"} <= set(head)
    assert "ddp peaks above ddp-naive" in text
    assert "difference" in text
    assert "ddp-naive" not in shown([rung for rung in record["rungs"] if rung["name"] != "ddp-naive"])
