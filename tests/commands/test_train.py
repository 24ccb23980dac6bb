"""`minifsdp train`: what is refused, what a restart gives back, and that a kill at any moment costs only steps."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import commands_in_forks
import psutil
import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks, shared_folder
from rich.console import Console
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.optim import AdamW

from minifsdp.course import cli
from minifsdp.course import train as course
from minifsdp.course.ladder import data
from minifsdp.course.train import checkpoint, report, start
from minifsdp.course.train.folder import clean, held, latest, prune
from minifsdp.course.train.layouts import recipe_of
from minifsdp.course.train.loop import take_step, train
from minifsdp.course.train.settings import STRATEGIES, TASK, TrainSettings
from minifsdp.course.train.state import State, begin
from minifsdp.gpt import GPT
from minifsdp.instruments.launch import launch
from minifsdp.instruments.launch.world import choose_world
from minifsdp.instruments.warm.client import Process
from minifsdp.recipe import Recipe

check = Checks(__name__)

TINY = {"layers": 2, "width": 8, "context": 8, "batch": 12, "ledger": False}
OPTIONS = [f"--{name}={value}" for name, value in TINY.items() if name != "ledger"] + ["--no-ledger", "--device", "cpu"]
TEXT = "what it is"


class WithDropout(TrainSettings):
    """Whose losses depend on the random numbers of every rank."""

    def model(self) -> GPT:
        model = super().model()
        for block in model.blocks:
            block.down = nn.Sequential(block.down, nn.Dropout(0.2))
        return model


def losses(settings: TrainSettings, whole: Path | None = None) -> list[float]:
    return train(settings, TEXT, whole)["losses"]


# Restarts, on ranks

FOR_ALL_RANKS = [
    *({"strategy": name} for name in STRATEGIES if name not in ("hybrid", "hybrid-grad-op")),
    {"strategy": "fsdp2", "precision": "fp16", "accumulate": 2},
    {"strategy": "fsdp2", "offload": True, "accumulate": 3, "no_sync": True},
    {"precision": "bf16", "forward_prefetch": True},
    {"precision": "fp16", "backward_prefetch": "post", "accumulate": 2},
    {"offload": True, "accumulate": 3, "no_sync": True, "limit": False},
]


@check(options={" ".join(map(str, options.values())): options for options in FOR_ALL_RANKS})
@check(ranks=4, options={name: {"strategy": name} for name in ("hybrid", "hybrid-grad-op", "ddp")})
def goes_on_bit_for_bit(options: dict[str, Any]) -> None:
    """Two steps, a restart and two more are four steps, dropout included. On four ranks a sum's order matters."""
    whole = WithDropout(**TINY, steps=4, ranks=dist.get_world_size(), **options)
    with shared_folder() as folder:
        losses(replace(whole, steps=2, checkpoint=folder))
        assert losses(replace(whole, checkpoint=folder), latest(folder)) == losses(whole)
        assert latest(folder) == folder / "step-00000004"


LAYOUTS = ("dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2,sequence", "pp=2", "cp=2,zero=0", "cp=2,zero=3")


@check(layout=LAYOUTS)
@check(ranks=4, layout=("pp=2,tp=2,sequence",))
def layout_goes_on_bit_for_bit(layout: str) -> None:
    """The same of recipes, whose ranks have different numbers of tokens."""
    recipe = Recipe.parse(layout)
    whole = TrainSettings(**TINY | {"batch": 16}, recipe=recipe, ranks=recipe.mesh.ranks, steps=4, lines=True)
    with shared_folder() as folder:
        expected = losses(whole)
        losses(replace(whole, steps=2, checkpoint=folder))
        assert losses(replace(whole, checkpoint=folder), latest(folder)) == expected
    assert expected == pytest.approx(losses_alone(whole), rel=1e-5)


def losses_alone(settings: TrainSettings) -> list[float]:
    """Of one process that knows nothing of ranks: each a mean over the tokens of its batch that count."""
    model, corpus, draws = settings.model(), data.load_text(), torch.Generator().manual_seed(settings.seed)
    optimizer, found = AdamW(model.parameters(), settings.lr), []
    for _ in range(settings.steps):
        loss = model(*settings.draw(corpus, draws))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@check()
def learns() -> None:
    given = losses(TrainSettings(**TINY, steps=30, lr=1e-2))
    assert given[-1] < given[0] - 0.5


@check()
def batch_is_of_the_step() -> None:
    """However many micro-batches it is cut into, reduced each or all at once."""
    whole = TrainSettings(**TINY, steps=4)
    expected = losses(whole)
    for no_sync in (False, True):
        assert losses(replace(whole, accumulate=3, no_sync=no_sync)) == pytest.approx(expected, rel=1e-5)


@check()
def keeps_as_many_as_asked() -> None:
    with shared_folder() as folder:
        losses(TrainSettings(**TINY, steps=7, checkpoint=folder, every=2, keep=3))
        if dist.get_rank() == 0:
            assert sorted(path.name for path in folder.iterdir()) == [".lock", *(f"step-{n:08}" for n in (4, 6, 7))]


@check()
def scale_is_kept() -> None:
    """One that is too large costs a step on every rank, and a restart knows what was learnt from it."""
    settings, where = TrainSettings(**TINY, precision="fp16"), torch.device("cpu")
    state = begin(settings, where)
    state.scaler.load_state_dict({**state.scaler.state_dict(), "scale": 2.0**40})
    before = [p.detach().clone() for p in state.trainer.model.parameters()]
    tokens = torch.zeros(6, 8, dtype=torch.int64)
    take_step(state, (tokens, tokens), settings, where)
    assert all(torch.equal(p, old) for p, old in zip(state.trainer.model.parameters(), before, strict=True))
    state.step = 1
    again = begin(settings, where)
    with shared_folder() as folder:
        checkpoint.save(state, replace(settings, checkpoint=folder), TEXT)
        checkpoint.restore(again, folder / "step-00000001")
    assert again.scaler.get_scale() == 2.0**39


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(monkeypatch, ranks, name):
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    check.assert_passed(ranks, name)


def test_other_ranks_and_strategies_go_on_from_it(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    whole = TrainSettings(**TINY, steps=4)
    flat, each = tmp_path / "flat" / "step-00000002", tmp_path / "each" / "step-00000002"

    def on_two_ranks() -> list[list[float]]:
        expected = losses(whole)
        for folder, strategy in ((flat, "full"), (each, "fsdp2")):
            folder.parent.mkdir(exist_ok=True)
            losses(replace(whole, steps=2, strategy=strategy, checkpoint=folder.parent))
        goes_on = [(flat, "no-shard"), (flat, "fsdp2"), (each, "full"), (each, "ddp")]
        return [expected, *(losses(replace(whole, strategy=name), folder) for folder, name in goes_on)]

    expected, *given = launch(on_two_ranks, 2)[0]

    def on_three_ranks() -> list[list[float]]:
        goes_on = [(flat, "full"), (flat, "fsdp2"), (each, "full"), (each, "fsdp2")]
        return [losses(replace(whole, ranks=3, strategy=name), folder) for folder, name in goes_on]

    given += launch(on_three_ranks, 3)[0]
    given += launch(losses, 1, replace(whole, ranks=1, strategy="ddp"), flat, inline=True)
    for each in given:
        assert each[:2] == expected[:2]
        assert each == pytest.approx(expected, rel=1e-5)


# Whole or not there


class Killed(BaseException):
    """The process ends here."""


def test_a_kill_at_any_system_call_leaves_a_whole_checkpoint(monkeypatch, tmp_path):
    """Every fsync, rename and deletion of a save in turn is the last thing that the process does not do."""
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    settings = TrainSettings(**{**TINY, "layers": 1}, ranks=1, strategy="ddp", keep=1)

    def die_in_save(state: State, folder: Path, last: int) -> bool:
        calls = count()

        def dies(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if next(calls) >= last:  # dead from here on, whoever catches it
                raise Killed
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            for name in ("fsync", "rename", "mkdir", "rmdir", "unlink"):
                patch.setattr(os, name, partial(dies, getattr(os, name)))
            try:
                checkpoint.save(state, replace(settings, checkpoint=folder), TEXT)
            except (Killed, OSError):
                return True
        return False

    def every_call() -> list[int]:
        state, survivors = begin(settings, torch.device("cpu")), []
        state.step = 1
        first = tmp_path / "first"
        first.mkdir()
        checkpoint.save(state, replace(settings, checkpoint=first), TEXT)
        files = {path.name for path in (first / "step-00000001").iterdir()}
        for last in count():
            folder = tmp_path / str(last)
            shutil.copytree(first, folder)
            state.step = 2
            killed = die_in_save(state, folder, last)
            clean(folder)
            assert {path.name for path in folder.iterdir()} <= {"step-00000001", "step-00000002"}
            assert all({file.name for file in whole.iterdir()} == files for whole in folder.iterdir())
            again = begin(settings, torch.device("cpu"))
            checkpoint.restore(again, latest(folder))
            survivors.append(again.step)
            if not killed:
                return survivors
        raise AssertionError

    (survivors,) = launch(every_call, 1, inline=True)
    assert survivors == sorted(survivors), "once the new one is there, it stays"
    assert survivors.count(1) > 5
    assert survivors.count(2) > 5


def test_all_is_on_the_disk_before_it_has_a_name(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    synced: set[int] = set()
    before: list[set[int]] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def note_rename(source: Any, target: Any, **kwargs: Any) -> None:
        if Path(target).name.startswith("step-"):
            before.append(set(synced))
            synced.clear()
        rename(source, target, **kwargs)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    launch(losses, 1, TrainSettings(**TINY, ranks=1, strategy="ddp", steps=1, checkpoint=tmp_path), inline=True)
    whole = tmp_path / "step-00000001"
    (at_rename,) = before
    assert {path.stat().st_ino for path in (whole, *whole.iterdir())} <= at_rename
    assert tmp_path.stat().st_ino in synced


def test_what_a_killed_run_left_is_ignored_and_deleted(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    settings = TrainSettings(**TINY, ranks=1, steps=2, checkpoint=tmp_path, resume=True)
    for name in (".step-00000009.part", ".step-00000001.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.pt").touch()
    with pytest.raises(ValueError, match="contains no checkpoint"):
        course.check(settings, "cpu", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_only_looks_like_a_checkpoint_is_its_owners(monkeypatch, tmp_path):
    """Copies, notes and folders of other names are neither counted, nor deleted, nor gone on from."""
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    kept = tmp_path / "kept"
    settings = TrainSettings(
        **{**TINY, "layers": 1}, ranks=1, strategy="ddp", steps=2, checkpoint=kept, every=1, keep=1
    )
    kept.mkdir()
    launch(losses, 1, settings, inline=True)
    theirs = {"step-00000002-best", "step-00000020.bak", "step-99999999x", ".step-notes"}
    for name in theirs:
        shutil.copytree(kept / "step-00000002", kept / name)
    for name in ("step-00000004.txt", ".step-00000004.txt.old"):
        (kept / name).write_text("notes")
    assert latest(kept).name == "step-00000002"
    clean(kept)
    launch(losses, 1, replace(settings, steps=4), latest(kept), inline=True)
    files = {"step-00000004.txt", ".step-00000004.txt.old", ".lock"}
    assert {path.name for path in kept.iterdir()} == theirs | files | {"step-00000004"}


def test_the_last_checkpoint_is_the_one_of_most_steps(tmp_path):
    for step in (99999999, 100000000):
        (tmp_path / f"step-{step}").mkdir()
    assert latest(tmp_path).name == "step-100000000"


def test_a_linked_checkpoint_is_one_and_what_it_links_to_stays(tmp_path):
    there = tmp_path / "there"
    (tmp_path / "kept").mkdir()
    there.mkdir()
    (tmp_path / "kept" / "step-00000001").symlink_to(there)
    (tmp_path / "kept" / "step-00000002").mkdir()
    prune(tmp_path / "kept", 1)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step-00000002"]
    assert there.is_dir()


def test_only_one_run_at_a_time_writes(tmp_path):
    with held(tmp_path), pytest.raises(ValueError, match="belongs to another run"), held(tmp_path, 0):
        pass
    with held(tmp_path):
        pass


# kill -9


class Run:
    """`minifsdp train` as a process, with all that it starts."""

    def __init__(self, folder: Path, *options: str) -> None:
        words = ["train", *OPTIONS, *options, "--out", str(folder / "out")]
        self.errors = folder / "errors.txt"
        with self.errors.open("w") as errors:
            self.process = commands_in_forks.start(
                *words, errors=errors.fileno(), environ={**os.environ, "TMPDIR": str(folder)}
            )

    def tree(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def kill(self) -> int:
        """SIGKILL to the process group, as `kill -9 -PGID`; returns how many processes there were: all are gone."""
        if self.process.poll() is not None:
            return 0
        tree = self.tree()
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.wait() == 0:
            return 0
        _, left = psutil.wait_procs(tree, timeout=10)
        assert not left
        return len(tree)


def kill_and_go_on(
    folder: Path, kills: int, expected: list[float], seed: int = 0, options: tuple[str, ...] = (), **given: Any
) -> list[str]:
    """Kill runs again and again, in turn in a save, a moment after one, and at any time; each that ends, ends the same.

    Returns what was there after each kill: the last checkpoint, and whether another was half written or deleted.
    """
    kept, chance, hit = folder / "checkpoints", random.Random(seed), []
    kept.mkdir()
    settings = TrainSettings(**TINY | given, steps=len(expected), checkpoint=kept, every=3)
    while len(hit) < kills:
        resume = ["--resume"] if steps_in(kept) else []
        usual = [f"--steps={settings.steps}", f"--checkpoint={kept}", f"--every={settings.every}"]
        run = Run(folder, *usual, *options, *resume)
        wait_in_turn(len(hit), kept, run.process, chance)
        if run.kill():
            hit.append(" ".join([f"step {steps_in(kept)}", *(path.suffix for path in kept.glob(".step-*"))]))
            continue
        assert run.process.returncode == 0, run.errors.read_text()
        assert json.loads((folder / "out" / "train.json").read_text())["losses"] == expected
        shutil.rmtree(kept)
        kept.mkdir()
    goes_on = replace(settings, resume=steps_in(kept) > 0)
    record = course.run(course.check(goes_on, "cpu", folder / "out"), lambda *_: None)
    assert record is not None
    assert record["losses"] == expected
    last = [f"step-{step:08}" for step in (len(expected) - 3, len(expected))]
    assert {path.name for path in kept.iterdir()} == {".lock", *last}
    return hit


def wait_in_turn(number: int, kept: Path, process: Process, chance: random.Random) -> None:
    """Until this process has made some checkpoints, and writes another or not; or for some seconds."""
    due, ended = steps_in(kept) + 3 * chance.randrange(3), time.monotonic() + 4 * chance.random()
    while process.poll() is None:
        made = steps_in(kept) >= due
        if number % 3 == 2 and time.monotonic() > ended:
            return
        if (number % 3 == 1 and made) or (number % 3 == 0 and made and list(kept.glob(".step-*"))):
            time.sleep(0.05 * chance.random())
            return
        time.sleep(0.003)


def steps_in(folder: Path) -> int:
    whole = latest(folder)
    return int(whole.name[5:]) if whole else 0


@pytest.fixture
def uninterrupted(monkeypatch):
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    return lambda steps: launch(losses, 2, TrainSettings(**TINY, steps=steps))[0]


@pytest.mark.timeout(600)
def test_killed_in_a_save_it_ends_with_the_same_bits(tmp_path, uninterrupted):
    kill_and_go_on(tmp_path, 1, uninterrupted(30))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_twenty_times_it_ends_with_the_same_bits(tmp_path, uninterrupted):
    hit = kill_and_go_on(tmp_path, 20, uninterrupted(60), seed=1)
    print(*hit, sep="\n")
    assert len(hit) == 20
    assert sum("." in each for each in hit) >= 3, "some kills hit a save"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_three_axes_killed_twenty_times_end_with_the_same_bits(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    layout = Recipe.parse("pp=2,dp=2,tp=2,zero=1,sequence")
    given = {"batch": 16, "recipe": layout, "ranks": 8, "lines": True}
    expected = launch(losses, 8, TrainSettings(**TINY | given, steps=30), timeout=600)[0]
    options = (f"--recipe={layout}", "--batch=16", "--lines")
    assert len(kill_and_go_on(tmp_path, 20, expected, 2, options, **given)) == 20


# Under torchrun, and what is left


@pytest.mark.timeout(600)  # three programs import torch
def test_under_torchrun(tmp_path, uninterrupted):
    folder = tmp_path / "checkpoints"
    options = ["train", *OPTIONS, "--steps=4", f"--checkpoint={folder}", "--every=2", f"--out={tmp_path}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]  # as users do: in other tests it is a fork
    words = ["--standalone", "--nproc-per-node=2", "-m", "minifsdp", *options]
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "train.json").read_text())
    assert record["losses"] == pytest.approx(uninterrupted(4), rel=1e-5)
    assert record["settings"]["ranks"] == 2
    assert done.stdout.count("final loss") == 1, "one rank speaks"
    assert latest(folder) == folder / "step-00000004"


def test_record_and_curve(tmp_path, monkeypatch):
    """A run of one's own process, with the ledger; then a restart."""
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    settings = TrainSettings(**{**TINY, "ledger": True}, ranks=2, steps=2, checkpoint=tmp_path / "kept")
    told = []
    assert course.run(course.check(settings, "cpu", tmp_path), lambda *what: told.append(what)) is not None
    assert [step for step, _, _ in told] == [1, 2]
    settings = replace(settings, steps=3, resume=True)
    record = course.run(course.check(settings, "cpu", tmp_path), lambda *_: None)
    assert json.loads((tmp_path / "train.json").read_text()) == record
    assert record["begun_at_step"] == 2
    assert len(record["losses"]) == 3
    assert record["final_loss"] == record["losses"][-1]
    assert all(peak > 0 for peak in record["peak_bytes"])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "train.json", "loss.png"}


@pytest.mark.parametrize("values", [[5.0], [5.0, float("nan"), 3.0], [float("nan")]])
def test_any_losses_can_be_drawn_and_recorded(tmp_path, values):
    ranks = [{"losses": values, "seconds": 1.0, "peak": None}]
    record = report.record(TrainSettings(steps=len(values)), TEXT, choose_world(2, "cpu"), 0, ranks)
    report.write(record, tmp_path)
    assert "NaN" not in (tmp_path / "train.json").read_text()
    assert report.summary(record).row_count == 1


# Requests that cannot be met


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--strategy", "zero1"], "--strategy zero1: choose from ddp, no-shard, grad-op, full, hybrid"),
        (["--precision", "int8"], "--precision int8: choose from fp32, bf16, fp16"),
        (["--backward-prefetch", "early"], "--backward-prefetch early: choose from none, pre, post"),
        (["--strategy", "ddp", "--precision", "bf16"], "--strategy ddp has no --precision"),
        (["--strategy", "ddp", "--offload"], "--strategy ddp has no --offload"),
        (["--strategy", "fsdp2", "--no-limit"], "--strategy fsdp2 has no --limit: it gathers one unit ahead"),
        (["--strategy", "fsdp2", "--forward-prefetch"], "--strategy fsdp2 has no --forward-prefetch"),
        (["--strategy", "fsdp2", "--replicas", "2"], "--replicas 2: --strategy fsdp2 has no replicas"),
        (["--strategy", "hybrid", "--ranks", "3"], "3 ranks do not make 2 replicas of two or more"),
        (["--strategy", "hybrid"], "2 ranks do not make 2 replicas of two or more"),
        (["--batch", "13"], "--batch 13 cannot be shared equally by 2 ranks: choose a multiple of 2"),
        (["--accumulate", "4"], "by 2 ranks in 4 micro-batches: choose a multiple of 8"),
        (["--no-sync"], "--no-sync: a single micro-batch is always reduced"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--steps", "9" * 20], f"--steps {'9' * 20}: must be at most 100,000,000"),
        (["--width", "9" * 20], f"--width {'9' * 20}: must be at most 1,048,576"),
        (["--layers", "9" * 20], f"--layers {'9' * 20}: must be at most 10,000"),
        (["--width", "1000000"], "GiB are free here: choose a smaller --width or --layers"),
        (["--data", "pipe"], "pipe is not a regular file: name one file of text"),
        (["--out", ""], "--out is empty: give it a value"),
        (["--out="], "--out is empty: give it a value"),
        (["--keep", "0"], "--keep 0: must be at least 1"),
        (["--lr", "nan"], "--lr nan: must be above 0"),
        (["--lr", "0"], "--lr 0: must be above 0"),
        (["--lr", "inf"], "--lr inf: must be above 0 and finite"),
        (
            ["--replicas", "2"],
            "--replicas 2: --strategy full has no replicas: leave it out, or choose",
        ),
        (["--strategy", "ddp", "--replicas", "2"], "--replicas 2: --strategy ddp has no replicas"),
        (["--time-limit", "1e9"], "--time-limit 1e+09: must be above 0 and up to 1e+06"),
        (["--seed", "9" * 30], "--seed 9999"),
        (["--every", "7"], "--every needs --checkpoint DIR"),
        (["--resume"], "--resume needs --checkpoint DIR"),
        (["--auto-resume"], "--auto-resume needs --checkpoint DIR"),
        (
            ["--checkpoint", "none", "--resume", "--auto-resume"],
            "--resume with --auto-resume: only the second may begin a run; leave one of them out",
        ),
        (
            ["--checkpoint", "none", "--resume"],
            "--resume: there is no folder none; leave out --resume to start a new run",
        ),
        (
            ["--checkpoint", "empty", "--resume"],
            "--resume: empty contains no checkpoint; leave out --resume to start a new run",
        ),
        (["--checkpoint", "short.txt"], "--checkpoint short.txt cannot be written"),
        (["--data", "missing.txt"], "missing.txt: no such file"),
        (["--data", "short.txt"], "shorter than one batch"),
        (["--device", "tpu"], "--device tpu: choose auto, cpu or cuda"),
        (["--out", "short.txt"], "--out short.txt cannot be written"),
        (["--ranks", "two"], "'--ranks'"),
        (
            ["--tp", "3", "--ranks", "6"],
            "by 3 ranks: choose a multiple of 3 heads; layouts that go: dp=2,cp=3,data=fsdp2",
        ),
        (
            ["--pp", "16", "--ranks", "32"],
            "8 blocks make no 16 stages: choose 16 or more layers; layouts that go: pp=4,",
        ),
        (
            ["--tp", "2", "--dp", "4", "--ranks", "4"],
            "there are 4; layouts that go: dp=4,data=fsdp2 or dp=2,tp=2,data=fsdp2",
        ),
        (["--pp", "3", "--ranks", "8"], "pp=3: these are 3 ranks, and there are 8; layouts that go: pp=4,dp=2"),
        (["--pp", "3", "--ranks", "7"], "layouts that go: none of these axes with this model and batch"),
        (["--dp", "2", "--batch", "13"], "--batch 13 is no multiple of 2: give 14; layouts that go: tp=2 or cp=2"),
        (["--tp", "7", "--cp", "7", "--width", "8"], "layouts that go: none of these axes with this model"),
        (["--zero", "1", "--strategy", "full"], "--strategy full has no effect on data=zero1"),
        (["--zero", "1", "--offload"], "--offload has no effect on data=zero1: only strategies keep shards in host"),
        (["--zero", "1", "--accumulate", "2", "--no-sync"], "--no-sync has no effect on data=zero1"),
        (["--zero", "5"], "zero=5: choose from 0, 1, 2, 3"),
        (["--pp", "2", "--accumulate", "2"], "--accumulate 2 with pp: these are micro-batches; give --micro instead"),
        (["--tp", "2", "--replicas", "2"], "--replicas 2: those of a recipe are --replicate 2"),
        (["--tp", "2", "--precision", "fp16"], "precision=fp16: choose from fp32, bf16"),
        (["--tp", "2", "--recipe", "tp=4"], "tp is given twice: tp=4 and tp=2"),
        (["--sequence", "--dp", "2"], "sequence has no effect with tp=1: give --tp"),
        (["--recipe", "dp=2, sequence"], "sequence has no effect with tp=1: give --tp"),
        (["--recipe", "dp=2,attention=ulysses"], "attention=ulysses has no effect with cp=1: give --cp"),
        (["--recipe", "dp=2,zigzag=no"], "zigzag=no has no effect with cp=1: give --cp"),
        (
            ["--recipe", "dp=2,precision=bf16", "--precision", "fp32"],
            "precision is given twice: precision=bf16 and precision=fp32",
        ),
        (["--dp", "2", "--tp", "2", "--axes", "dp,tp"], "axes=dp,tp: give one word, as in --axes dp/tp"),
        (["--dp", "2", "--zero", "1,tp=2"], "zero=1,tp=2: give one word"),
        (["--dp", "2", "--ranks", "0"], "--ranks 0: must be at least 1"),
        (["--tp", "2", "--ranks", "-4"], "--ranks -4: must be at least 1"),
        (["--strategy", "ddp", "--ranks", "0"], "--ranks 0: must be at least 1"),
        (["--recipe", "tp=2;dp=2"], "tp=2;dp=2"),
        (["--heads", "3"], "width 175 cannot be divided into 3 heads"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_requests_end_in_one_line(monkeypatch, refused, tmp_path, options, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    device = [] if "--device" in options else ["--device", "cpu"]
    assert says in refused("train", *device, *options)


JOB = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not: use torchrun, or unset RANK"),
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            "RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not: use torchrun, or unset RANK",
        ),
        ({**JOB, "RANK": "5"}, "RANK=5 with WORLD_SIZE=2: ranks count from 0 to 1"),
        ({**JOB, "RANK": "x"}, "RANK=x is not a number of ranks: leave it to torchrun, or unset it"),
        ({**JOB, "WORLD_SIZE": "x"}, "WORLD_SIZE=x is not a number of ranks: leave it to torchrun, or unset it"),
        ({**JOB, "WORLD_SIZE": "0"}, "RANK=0 with WORLD_SIZE=0: there are no ranks"),
        ({**JOB, "MASTER_PORT": "99999999"}, "MASTER_PORT=99999999 is not a port: "),
        ({**JOB, "MASTER_PORT": "x"}, "MASTER_PORT=x is not a port: "),
        ({**JOB, "MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR=no.such.host.invalid is not found ("),
    ],
    ids=lambda value: " ".join(f"{name}={each}" for name, each in value.items()) if isinstance(value, dict) else "",
)
def test_half_a_job_is_named_by_its_variable(monkeypatch, refused, tmp_path, environment, says):
    monkeypatch.chdir(tmp_path)
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert says in refused("train", *OPTIONS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rank", "number", "code"),
    [
        ("0", signal.SIGTERM, 143),
        pytest.param("1", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("0", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("1", signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_waits_for_the_others_hears_signals(tmp_path, number, code, rank):
    with socket.create_server(("127.0.0.1", 0)) as for_now:
        port = for_now.getsockname()[1]
        if rank == "0":
            for_now.close()
        job = {**JOB, "MASTER_PORT": str(port), "RANK": rank, "LOCAL_RANK": rank}
        process = commands_in_forks.start("train", *OPTIONS, f"--out={tmp_path}", environ={**os.environ, **job})
        try:
            if rank == "0":
                await_connection(process.pid, port)
            else:  # it finds rank 0 once, and then no more
                for_now.settimeout(60)
                for_now.accept()[0].close()
                for_now.close()
            os.kill(process.pid, number)
            assert process.wait(20) == code
        finally:
            process.kill()


def await_connection(pid: int, port: int) -> None:
    """Until the process waits as a client of the store that it serves itself."""
    deadline = time.monotonic() + 60
    while port not in [each.raddr.port for each in psutil.Process(pid).net_connections() if each.raddr]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ranks_that_torchrun_did_not_start(monkeypatch, refused):
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert "--ranks 3, but this job was started with 2" in refused("train", "--ranks", "3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a checkpoint at step 2."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIFSDP_DEVICE", "cpu")
        settings = TrainSettings(**TINY, ranks=1, strategy="ddp", steps=2, checkpoint=folder / "kept")
        course.run(course.check(settings, "cpu", folder), lambda *_: None)
    return folder / "kept"


def test_one_command_begins_and_goes_on(monkeypatch, tmp_path, trained):
    """As a launcher repeats it; a checkpoint of another task is refused as with --resume."""
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    settings = TrainSettings(**TINY, ranks=1, strategy="ddp", steps=4, checkpoint=tmp_path / "new", auto_resume=True)
    request = course.check(settings, "cpu", tmp_path / "out")
    assert (request.saved, request.step) == (None, 0)
    request = course.check(replace(settings, checkpoint=trained), "cpu", tmp_path / "out")
    assert (request.saved, request.step) == (latest(trained), 2)
    with pytest.raises(ValueError, match="--seed 7: "):
        course.check(replace(settings, checkpoint=trained, seed=7), "cpu", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "holds step-00000002: add --resume to continue, or name another folder"),
        (["--resume", "--steps=1"], "--steps 1: "),
        (["--resume", "--data=text"], "not on text (400 bytes, checksum "),
        *(([*["--resume"], f"--{name}={value}"], f"--{name} {value}: ") for name, value in [
            ("layers", "3"), ("width", "16"), ("context", "4"), ("batch", "24"), ("seed", "7"), ("lr", "0.5"),
        ]),
        (["--resume", "--precision=bf16", "--strategy=full"], "--precision bf16: "),
        (["--resume", "--heads=2"], "--heads 2: {} was trained with 8; give that, or name another --checkpoint"),
        (["--resume", "--lines"], "--lines: {} was trained without it; leave it out, or name another --checkpoint"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_checkpoint_of_another_run(monkeypatch, refused, tmp_path, trained, options, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("text" * 100)
    line = refused("train", *OPTIONS, f"--checkpoint={trained}", "--ranks=1", "--strategy=ddp", *options)
    assert says.format(latest(trained)) in line
    assert str(trained) in line


def test_usual_settings_may_be_given_or_left_out(refused, tmp_path, trained):
    settings = TrainSettings(**TINY, heads=8, ranks=1, strategy="ddp", steps=4, checkpoint=trained, resume=True)
    assert course.check(settings, "cpu", tmp_path / "out").step == 2


def test_many_ranks_are_refused_soon():
    begun = time.process_time()
    with pytest.raises(ValueError, match="no multiple of 99999999"):
        TrainSettings.asked_for(recipe_of("zero=1", {}, None, 99999999), 99999999, {"steps": 1}).check()
    assert time.process_time() - begun < 5


def test_the_layouts_that_a_refusal_names_go(refused):
    for options in (
        ["--tp=3", "--ranks=2", "--accumulate=2"],
        ["--dp=3", "--ranks=2", "--accumulate=2", "--no-sync"],
        ["--zero=1", "--dp=3", "--ranks=4", "--accumulate=2"],
    ):
        line = refused("train", *OPTIONS, "--heads=4", *options)
        named = line.strip().partition("layouts that go: ")[2].split(" or ")
        assert named != [""]
        given = {"accumulate": 2, "no_sync": "--no-sync" in options, "heads": 4, **TINY}
        for recipe in map(Recipe.parse, named):
            TrainSettings.asked_for(recipe, recipe.mesh.ranks, given).check()


def test_data_parallelism_takes_the_ranks_that_are_left():
    for text, words, ranks, says in (
        ("", {"tp": 2}, 8, "dp=4,tp=2,data=fsdp2"),
        ("pp=2,tp=2", {"zero": "1"}, 8, "pp=2,dp=2,tp=2,data=zero1"),
        ("", {"dp": 2, "tp": 2}, 8, "dp=2,tp=2,data=fsdp2"),  # refused, once the model is known
        ("", {"replicate": 2}, 4, "dp=4,replicate=2,data=fsdp2"),
        ("", {"tp": 2}, None, "tp=2"),
    ):
        assert str(recipe_of(text, words, "fp32", ranks)) == says
    assert recipe_of("", {"tp": None, "sequence": False}, "bf16", 8) is None
    assert str(recipe_of("dp=2", {}, "bf16", 2)) == "dp=2,data=fsdp2,precision=bf16"


def test_a_mesh_is_drawn_before_it_trains(tmp_path):
    words = [*OPTIONS, "--pp=2", "--tp=2", "--steps=1", "--batch=16", f"--out={tmp_path}"]
    said = commands_in_forks.minifsdp("train", *words).stdout
    assert "tp  0 1  2 3" in said
    assert said.index("tp  0 1  2 3") < said.index("pp=2, tp=2")
    record = json.loads((tmp_path / "train.json").read_text())
    assert record["settings"]["recipe"] == "pp=2,tp=2"
    assert len(record["losses"]) == 1


def test_bytes_are_counted_where_two_axes_share_rows_unevenly(tmp_path):
    """257 tokens by 2 ranks, and these by 4: torch cannot view such a DTensor."""
    words = ["--layers=1", "--width=8", "--context=8", "--batch=8", "--steps=1", "--device=cpu", f"--out={tmp_path}"]
    assert commands_in_forks.minifsdp("train", *words, "--dp=4", "--tp=2", "--zero=3").returncode == 0
    assert all(json.loads((tmp_path / "train.json").read_text())["peak_bytes"])


def test_a_long_recipe_is_shown_whole():
    recipe = Recipe.parse("pp=2,dp=2,cp=2,tp=2,replicate=2,sequence,order=interleaved,stages=2,precision=bf16")
    settings = TrainSettings(recipe=recipe, ranks=16, steps=1)
    ranks = [{"losses": [5.0], "seconds": 1.0, "peak": None}]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.summary(report.record(settings, TEXT, choose_world(1, "cpu"), 0, ranks)))
    said = console.export_text()
    assert all(word in said for word in str(recipe).split(","))


def test_the_task_is_all_that_changes_what_is_learnt():
    assert set(TASK) < set(TrainSettings.__dataclass_fields__)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("file", ["run.pt", "rank-0.pt"])
@pytest.mark.parametrize("harm", [truncate, empty, Path.unlink, make_pipe])
@pytest.mark.parametrize("before", [True, False])
def test_a_damaged_checkpoint_is_named_with_the_cure(refused, tmp_path, trained, file, harm, before):
    kept = Path(shutil.copytree(trained, tmp_path / "kept"))
    if before:
        shutil.copytree(trained / "step-00000002", kept / "step-00000001")
    harm(kept / "step-00000002" / file)
    options = [*OPTIONS, f"--checkpoint={kept}", "--resume", "--ranks=1", "--strategy=ddp"]
    line = refused("train", *options)
    assert f"step-00000002 is damaged ({file}" in line
    assert line.endswith(
        "delete it; --resume then takes step-00000001"
        if before
        else "delete it; there is no earlier one: begin without --resume"
    )


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("harm", [truncate, empty, Path.unlink])
def test_damaged_shards_are_named_before_a_rank_starts(refused, tmp_path, trained, file, harm):
    kept = Path(shutil.copytree(trained, tmp_path / "kept"))
    shutil.copytree(trained / "step-00000002", kept / "step-00000001")
    harm(kept / "step-00000002" / file)
    out = tmp_path / "out"
    options = [*OPTIONS, f"--checkpoint={kept}", "--resume", "--ranks=1", "--strategy=ddp", f"--out={out}"]
    line = refused("train", *options)
    assert f"step-00000002 is damaged ({file} " in line
    assert line.endswith("delete it; --resume then takes step-00000001")
    assert not out.exists()


def test_scribbled_metadata_is_named_before_a_rank_starts(refused, tmp_path, trained):
    """Of the right size: torch would print its tracebacks on every rank."""
    kept = Path(shutil.copytree(trained, tmp_path / "kept"))
    file = kept / "step-00000002" / ".metadata"
    file.write_bytes(b"\x92" * file.stat().st_size)
    line = refused("train", *OPTIONS, f"--checkpoint={kept}", "--resume", "--ranks=1", "--strategy=ddp")
    assert "step-00000002 is damaged (.metadata: UnpicklingError): delete it; " in line


def without_list(whole: Path) -> None:
    """As a checkpoint was when it did not list its files."""
    run = torch.load(whole / "run.pt")
    del run["files"]
    torch.save(run, whole / "run.pt")


def test_a_checkpoint_without_a_list_of_its_files_is_taken_if_they_are_there(monkeypatch, tmp_path, trained):
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    kept = Path(shutil.copytree(trained, tmp_path / "kept"))
    without_list(kept / "step-00000002")
    settings = TrainSettings(**TINY, checkpoint=kept, resume=True)
    assert course.check(settings, "cpu", tmp_path / "out").step == 2
    (kept / "step-00000002" / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"step-00000002 is damaged \(.metadata is missing\)"):
        course.check(settings, "cpu", tmp_path / "out")


def test_a_checkpoint_under_another_name_is_refused(refused, tmp_path, trained):
    """Taken for step 9, it would go on with step 3, and the next one to be saved would be the first to be deleted."""
    kept = Path(shutil.copytree(trained, tmp_path / "kept"))
    shutil.copytree(kept / "step-00000002", kept / "step-00000009")
    line = refused("train", *OPTIONS, f"--checkpoint={kept}", "--resume", "--ranks=1", "--strategy=ddp")
    assert line.endswith(
        "step-00000009 is damaged (it was renamed: it holds step 2): delete it; --resume then takes step-00000002"
    )


def test_random_numbers_of_other_ranks_are_not_asked_for(monkeypatch, tmp_path, trained):
    """On another number of ranks each begins new ones, so nothing is lost with them."""
    kept = Path(shutil.copytree(trained, tmp_path / "kept"))
    (kept / "step-00000002" / "rank-0.pt").unlink()
    assert course.check(TrainSettings(**TINY, checkpoint=kept, resume=True), "cpu", tmp_path / "out").step == 2


def test_a_file_with_the_name_of_a_checkpoint_is_refused(refused, tmp_path):
    (tmp_path / "step-00000004").write_text("notes")
    line = refused("train", *OPTIONS, f"--checkpoint={tmp_path}", f"--out={tmp_path}")
    assert line.endswith("step-00000004 has a checkpoint's name but is not one: rename it")


def test_a_folder_of_notes_with_the_name_of_a_checkpoint_is_refused(refused, tmp_path):
    kept = tmp_path / "kept"
    (kept / "step-00000004").mkdir(parents=True)
    (kept / "step-00000004" / "notes.txt").write_text("notes")
    for options in ([], ["--resume"]):
        line = refused("train", *OPTIONS, f"--checkpoint={kept}", f"--out={tmp_path}", *options)
        assert line.endswith("step-00000004 has a checkpoint's name but is not one: rename it")
        assert [path.name for path in kept.iterdir()] == ["step-00000004"], "no lock is left"


def test_a_refusal_leaves_no_lock_that_was_not_there(refused, tmp_path, trained):
    kept = Path(shutil.copytree(trained, tmp_path / "kept", ignore=shutil.ignore_patterns(".lock")))
    options = [*OPTIONS, f"--checkpoint={kept}", "--ranks=1", "--strategy=ddp", f"--out={tmp_path}"]
    for more in ([], ["--resume", "--steps=1"]):
        refused("train", *options, *more)
        assert [path.name for path in kept.iterdir()] == ["step-00000002"]
    (kept / ".lock").touch()
    refused("train", *options)
    assert (kept / ".lock").exists()


def test_a_lock_that_went_while_one_waited_for_it_is_made_again(tmp_path):
    """Two runs must not hold two files of the same name."""
    (program := tmp_path / "holds.py").write_text(HOLDS)
    (folder := tmp_path / "kept").mkdir()

    def says(word: str) -> None:
        deadline = time.monotonic() + 60
        while not (tmp_path / word).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    waiting = None
    try:
        with suppress(KeyError), held(folder):
            waiting = commands_in_forks.start_fork(commands_in_forks.run_python, args=(str(program), str(folder)))
            says("waits")
            time.sleep(0.5)
            raise KeyError
        says("holds")
        with pytest.raises(ValueError, match="another run"), held(folder, 0):
            pass
    finally:
        if waiting is not None:
            waiting.kill()
            waiting.wait()
            waiting.close()


HOLDS = """
import sys, time
from pathlib import Path
from minifsdp.course.train.folder import held
folder = Path(sys.argv[1])
(folder.parent / "waits").touch()
with held(folder):
    (folder.parent / "holds").touch()
    time.sleep(1000)
"""


def test_a_folder_in_place_of_the_lock_is_named_with_the_cure(refused, tmp_path):
    (tmp_path / "kept" / ".lock").mkdir(parents=True)
    line = refused("train", *OPTIONS, f"--checkpoint={tmp_path / 'kept'}", f"--out={tmp_path}")
    assert line.endswith("kept/.lock cannot be opened (is a directory): remove it, or name another folder")


def test_results_do_not_go_into_a_checkpoint(refused, tmp_path):
    kept = tmp_path / "kept"
    for name in ("step-00000002", ".step-00000002.part", "step-00000002/results"):
        line = refused("train", *OPTIONS, f"--checkpoint={kept}", f"--out={kept / name}")
        assert f"--out {kept / name}: " in line
        assert "name another folder" in line
    assert not kept.exists()


def test_damaged_shards_are_named_with_the_cure(monkeypatch, tmp_path, trained):
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")
    whole = Path(shutil.copytree(trained, tmp_path / "kept")) / "step-00000002"
    (whole / "__0_0.distcp").write_bytes(b"not this")
    with pytest.raises(OSError, match=r"step-00000002 is damaged \(.*\): delete it; there is no earlier one"):
        launch(losses, 1, TrainSettings(**TINY, ranks=1, strategy="ddp", steps=3), whole, inline=True)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_said_in_a_line(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIFSDP_DEVICE", "cpu")

    settings = TrainSettings(**TINY, ranks=1, strategy="ddp", steps=1, checkpoint=tmp_path)
    with pytest.raises(OSError, match=r"^[^\n]*step-00000001 cannot be saved \(no space left on device\); nothing is"):
        launch(losses, 1, settings, inline=True)
    assert not list(tmp_path.glob("*/is there space"))


@pytest.fixture
def full_disk(monkeypatch):
    """No file can be written any more; torch's zip writer says of that what it says of a full disk."""

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def unexpected(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr(Path, "write_bytes", no_space)
    monkeypatch.setattr(FileSystemWriter, "write_data", unexpected)


@pytest.mark.parametrize("saved", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_save_that_fails_ends_in_one_line_and_leaves_nothing(tmp_path, trained, saved):
    kept = tmp_path / "kept"
    if saved:
        shutil.copytree(trained, kept)
    more = ["--ranks=1", "--strategy=ddp", "--steps=3", f"--checkpoint={kept}", f"--out={tmp_path / 'out'}"]
    words = ["train", *OPTIONS, *more, *(["--resume"] if saved else [])]
    done = commands_in_forks.minifsdp(*words, args=(1024,))
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line and not line.startswith("1 rank over")]
    cure = "step-00000002 is kept, and --resume continues from it" if saved else "nothing is saved yet"
    assert line == f"minifsdp: {kept / 'step-00000003'} cannot be saved (file too large); {cure}"
    assert not done.stdout
    assert {path.name for path in kept.iterdir()} == {".lock", *(["step-00000002"] if saved else [])}


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_in_a_save_leaves_nothing_half_written(tmp_path, number):
    kept = tmp_path / "kept"
    kept.mkdir()
    run = Run(tmp_path, "--steps=100000", "--every=1", f"--checkpoint={kept}")
    deadline = time.monotonic() + 60
    while not steps_in(kept):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks = [each for each in run.tree() if each.name().startswith("rank ")]
    while True:  # stopped in the middle of a save
        for rank in ranks:
            rank.suspend()
        if list(kept.glob(".step-*.part")):
            break
        assert time.monotonic() < deadline
        for rank in ranks:
            rank.resume()
        time.sleep(0.002)
    os.kill(run.process.pid, number)
    assert run.process.wait(30) == 128 + number
    assert not list(kept.glob(".step-*"))


# Results


def take_away(out: Path) -> None:
    """What is left of --out at the end: a file, say of somebody who has tidied up."""
    shutil.rmtree(out)
    out.write_text("")


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_results_that_cannot_be_written_are_kept(monkeypatch, capsys, tmp_path, with_checkpoint):
    out, kept = tmp_path / "out", tmp_path / "kept"

    def trained_ranks(*_: Any, **__: Any) -> list[dict[str, Any]]:
        take_away(out)
        if with_checkpoint:
            (kept / "step-00000002").mkdir()
        return [{"losses": [5.0, 4.0], "seconds": 1.0, "peak": None}] * 2

    monkeypatch.setattr(start, "launch", trained_ranks)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = [f"--checkpoint={kept}"] if with_checkpoint else []
    monkeypatch.setattr(sys, "argv", ["minifsdp", "train", *OPTIONS, "--steps=2", f"--out={out}", *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    assert stop.value.code == 1
    assert "4.000000" in said.out, "the loss is shown"
    line = said.err.strip().splitlines()[-1]
    (folder,) = tmp_path.glob("minifsdp-*")
    assert f"--out {out} cannot be written (file exists): loss.png, train.json went to {folder} instead" in line
    assert ("--resume with another --out writes them again from step-00000002" in line) == with_checkpoint
    assert json.loads((folder / "train.json").read_text())["losses"] == [5.0, 4.0]


def test_a_folder_that_has_gone_is_made_again(tmp_path):
    record = report.record(
        TrainSettings(steps=1), TEXT, choose_world(2, "cpu"), 0, [{"losses": [1.0], "seconds": 1, "peak": 1}]
    )
    report.write(record, tmp_path / "gone")
    assert {path.name for path in (tmp_path / "gone").iterdir()} == {"train.json", "loss.png"}
