"""The ladder on each rank: train, measure and trace every rung on the same model and data."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
import torch.distributed as dist

from minifsdp import comm, device
from minifsdp.batch import Batch
from minifsdp.build import build
from minifsdp.comm import Call
from minifsdp.cost.model import Model
from minifsdp.cost.traffic import Message, totals
from minifsdp.course.ladder import data
from minifsdp.course.ladder.axes import AXES
from minifsdp.course.ladder.rungs import RUNGS, Rung, Trainer, plain
from minifsdp.course.ladder.traced import NAMES, trace_step
from minifsdp.gpt import GPT
from minifsdp.instruments.explore.holdings import holdings_of
from minifsdp.instruments.explore.log import LoggedStep, StepLog
from minifsdp.instruments.launch import rank_device, report
from minifsdp.instruments.launch.group import share_cores
from minifsdp.instruments.link.emulated import EmulatedLink, HostLinks, let_communication_go_first, parse_links
from minifsdp.instruments.system.resources import check_names
from minifsdp.instruments.system.scratch import scratch_folder
from minifsdp.instruments.watch.cuda_memory import MemoryHistory, clear_cache
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.step import align, take_step
from minifsdp.instruments.watch.storages import Tag
from minifsdp.instruments.watch.timeline import read_trace
from minifsdp.instruments.watch.trace import PHASES
from minifsdp.mesh import Mesh
from minifsdp.pipeline.actions import Action
from minifsdp.pipeline.simulate import Timed
from minifsdp.pipeline.turns import InTurns
from minifsdp.private import group_named
from minifsdp.process_groups import global_ranks
from minifsdp.recipe import Recipe

WARM_UP = 1  # steps before the measured one: the first creates the optimizer's state and learns the order of units
MEASURING = "measuring"  # the end of a report; no step is timed any longer


@dataclass(frozen=True)
class Settings:
    """The settings of one run of the ladder; see `minifsdp ladder --help`.

    Of `rungs`, those in `recipes` are no names of the ladder's, but recipes as they print themselves.
    """

    ranks: int = 2
    rungs: tuple[str, ...] = tuple(RUNGS)
    steps: int = 20
    batch: int = 12
    layers: int = 6
    width: int = 175
    context: int = 24
    text: Path | None = None
    link: str | None = None
    limit: int = 2
    seed: int = 0
    axis: str = "data"
    heads: int | None = None
    recipes: tuple[str, ...] = ()

    @classmethod
    def on(cls, axis: str, **given: Any) -> Self:
        """Settings of an axis; None: its default.

        Raises:
            ValueError: there is no such axis.
        """
        check_names("--axis", (axis,), AXES)
        known = {name: value for name, value in given.items() if value is not None}
        return cls(**{"axis": axis, "rungs": tuple(AXES[axis].rungs), **AXES[axis].sizes, **known})

    def beside(self, rungs: Sequence[str] | None, recipes: Sequence[Recipe]) -> Self:
        """These settings with recipes after some rungs; None: after one rung to compare them with.

        Raises:
            ValueError: a recipe is given twice.
        """
        ladder = AXES[self.axis].rungs
        own = tuple(str(recipe) for recipe in recipes)
        if twice := [name for name in own if own.count(name) > 1]:
            raise ValueError(f"--recipe {twice[0]} is given twice: once is enough")
        first = ("ddp",) if "ddp" in ladder else tuple(ladder)[:1]
        return replace(self, rungs=(*(first if rungs is None else rungs), *own), recipes=own)

    def rung(self, name: str) -> Rung:
        """One of the ladder's, or a recipe's own."""
        if name not in self.recipes:
            return AXES[self.axis].rungs[name]

        def recipe(ranks: int, limit: int) -> Recipe:
            own = Recipe.parse(name)
            if own.mesh.ranks != ranks:
                raise ValueError(f"it is for {own.mesh.ranks} ranks, not {ranks}: give it alone, without --ranks")
            return own

        return Rung("a recipe of your own", recipe)

    def recipe(self, rung: str) -> Recipe:
        """A rung's recipe.

        Raises:
            ValueError: so many ranks cannot.
        """
        return self.rung(rung).recipe(self.ranks, self.limit)

    def bubble(self, rung: str) -> float:
        """A pipeline's, by its formula."""
        return self.rung(rung).bubble(self.ranks)

    @property
    def rows(self) -> int:
        """A batch has to be a multiple of so many sequences, for the rungs that so many ranks can climb."""
        shares = []
        for name in self.rungs:
            with suppress(ValueError, KeyError):  # told by `faults`, and by who checks names
                recipe = self.recipe(name)
                shares.append(recipe.mesh.dp * recipe.micro_batches)
        return lcm(*shares)

    def faults(self, model: Model) -> dict[str, str]:
        """By rung, why so many ranks cannot climb it."""
        faults = {name: self.rung(name).fault(model, self.ranks) for name in self.rungs}
        return {name: fault for name, fault in faults.items() if fault}

    @property
    def shape(self) -> dict[str, int | None]:
        """The sizes of the model, as `GPT` takes them."""
        return {"width": self.width, "layers": self.layers, "heads": self.heads, "context": self.context}

    def model(self) -> GPT:
        """The same parameters on every rank and every rung."""
        torch.manual_seed(self.seed)
        return GPT(**self.shape)  # type: ignore[arg-type]

    def build(self, rung: str, where: torch.device, other: str = "", drawn: GPT | None = None) -> Trainer:
        """A fresh model on a rung, or on one of its variants; a copy of `drawn`, if given, is made faster.

        No ranks count their tokens: rows are of equal length, and none is left out.
        """
        recipe = self.rung(rung).others[other](self.ranks, self.limit) if other else self.recipe(rung)
        model = self.model() if drawn is None else deepcopy(drawn)
        return replace(build(model.to(where), recipe), loss_of=None)

    @property
    def others(self) -> list[tuple[str, str]]:
        """The variants of these rungs: the rung's name, and the value that it does not have itself."""
        rungs = [(name, self.rung(name)) for name in self.rungs]
        return [(name, other) for name, rung in rungs for other in rung.others if other != rung.own(self.limit)]

    def batches(self) -> Iterator[Batch]:
        """The same whole batches on every rank."""
        return data.batches(data.load_text(self.text), self.batch, self.context, self.seed, self.steps)

    def shares(self, rank: int, where: torch.device) -> dict[str, list[Batch]]:
        """By rung, a rank's rows of every batch; rungs that share them alike have the same ones."""
        meshes = {name: self.recipe(name).mesh for name in self.rungs}
        places = {name: (mesh.place(rank, "dp"), mesh.dp) for name, mesh in meshes.items()}
        rows = {
            place: [data.to_device(data.shard(whole, *place), where) for whole in self.batches()]
            for place in {*places.values()}
        }
        return {name: rows[place] for name, place in places.items()}


def train_alone(settings: Settings) -> list[float]:
    """Train in one process on the whole batch; report once at the start; return the loss of each step."""
    report("started")
    share_cores(settings.ranks)  # as many threads as a rank has, so that kernels sum in the same order
    where = rank_device()
    trainer = plain(settings.model().to(where))
    return [float(take_step(trainer, batch, where)) for batch in settings.batches()]


def run_rungs(settings: Settings, traces: Path) -> dict[str, dict[str, Any]]:
    """Run all rungs on this rank three times: timed, traced, measured, so that no instrument disturbs another.

    What is timed comes first: what this machine does beside the last measurements, such as the import of what draws,
    costs no step's time.

    Returns:
        by rung: "losses" (this rank's) and "step_seconds"; "actions", a pipeline's in the last step; on rank 0
        "traced", a traced step, its spans still in its trace; "bytes", "curve", "collectives", "log" and, on a GPU,
        "cuda" of one measured step; "others", by the value of its variants their "log" and "traced". Rank 0 writes
        `trace-<rung>.json`, and on a GPU `snapshot-<rung>.pickle`, to the folder `traces`.
    """
    link = parse_links(settings.link) if settings.link else None
    if link is not None:
        let_communication_go_first()
    rank, where = dist.get_rank(), rank_device()
    shards = settings.shares(rank, where)
    fresh = partial(settings.build, where=where, drawn=settings.model())
    total = len(settings.rungs) * (settings.steps + 2) + len(settings.others)
    done = 0

    def advance(name: str, what: str) -> None:
        nonlocal done
        done += 1
        if rank == 0:
            report((f"{name}: {what}", done, total))

    with link or nullcontext():
        trainers = {name: fresh(name) for name in settings.rungs}
        records = _train(trainers, shards, where, advance)
        for name in settings.rungs:
            usual = median(records[name]["step_seconds"])
            path = traces / trace_of(name)
            records[name]["traced"] = trace_step(trainers.pop(name), shards[name][0], where, path, link, usual)
            advance(name, "tracing")
            records[name]["others"] = {}
        for name, other in settings.others:
            records[name]["others"][other] = log_step(partial(fresh, name, other=other), shards[name][0], link)
            advance(name, f"{settings.rung(name).varies} = {other}")
        for name in settings.rungs:  # once no other rung's trainer holds memory, and no step is timed any longer
            snapshot = traces / snapshot_of(name) if rank == 0 else None
            records[name] |= measure_memory(partial(fresh, name), shards[name][0], where, snapshot)
            records[name]["sent"] = _by_axis(records[name].pop("calls"), settings.recipe(name).mesh, rank)
            advance(name, MEASURING)
    return records


def _train(
    trainers: dict[str, Trainer],
    shards: dict[str, list[Batch]],
    where: torch.device,
    advance: Callable[[str, str], None],
) -> dict[str, dict[str, Any]]:
    """Time one step of each rung in turn, so that other load on the machine affects them all alike."""
    records: dict[str, dict[str, Any]] = {name: {"losses": [], "step_seconds": []} for name in trainers}
    done = {name: clock_actions(trainer) for name, trainer in trainers.items()}
    for step in range(len(next(iter(shards.values())))):
        for name, trainer in trainers.items():
            align(where)
            start = time.perf_counter()
            loss = take_step(trainer, shards[name][step], where)
            device.synchronize(where)
            records[name]["step_seconds"].append(time.perf_counter() - start)
            records[name]["losses"].append(float(loss))
            records[name]["actions"] = [done[name].popleft() for _ in range(len(done[name]))]
            advance(name, "training")
    return records


def clock_actions(trainer: Trainer) -> deque[Timed]:
    """A pipeline's actions on this rank from now on, as they are done, in seconds of this rank's clock."""
    done: deque[Timed] = deque()

    @contextmanager
    def timed(action: Action) -> Iterator[None]:
        start = time.monotonic()
        yield
        done.append(Timed(action, start, time.monotonic()))

    if isinstance(trainer.passes, InTurns):
        trainer.passes.schedule.executor.around.append(timed)
    return done


def log_step(
    build: Callable[[], Trainer], batch: Batch, link: EmulatedLink | HostLinks | None = None
) -> dict[str, Any]:
    """Measure a step on this rank, then trace one, for the explorer; all ranks call it.

    Args:
        build: makes a fresh trainer.
        batch: this rank's.
        link: the emulated link, if it is in use.

    Returns:
        "traced", a `TracedStep` on rank 0; "log", a `LoggedStep`.
    """
    where = rank_device()
    trainer, measured = _measured(build, batch, where, None)
    with scratch_folder() as folder:
        path = folder / "trace.json"
        traced = trace_step(trainer, batch, where, path, link, None)
        if traced is not None:
            traced = replace(traced, spans=read_trace(path))
    return {"traced": traced, "log": measured["log"]}


def measure_memory(
    build: Callable[[], Trainer], batch: Batch, where: torch.device, snapshot: Path | None = None
) -> dict[str, Any]:
    """Measure one step with the ledger, which also sees the trainer built; a GPU's allocator keeps its own history.

    The ledger slows the host down, so the device lags behind it less than in an unwatched step.

    Args:
        build: makes the trainer.
        batch: this rank's.
        where: the rank's device.
        snapshot: file for the allocator's history; None: it is not kept.

    Returns:
        "bytes", "curve", "collectives", "cuda" and "log", as in `run_rungs`; "calls", the step's.
    """
    return _measured(build, batch, where, snapshot)[1]


def _measured(
    build: Callable[[], Trainer], batch: Batch, where: torch.device, snapshot: Path | None
) -> tuple[Trainer, dict[str, Any]]:
    """The trainer after its measured step, and what `measure_memory` returns."""
    clear_cache(where)
    with Ledger() as ledger:
        trainer = build()
        ledger.watch(trainer.model, trainer.optimizer)
        for _ in range(WARM_UP):
            take_step(trainer, batch, where)
        rest: dict[Tag, int] = {}
        activations: dict[str, int] = {}
        history = MemoryHistory(where, snapshot)
        log = StepLog(holdings_of(trainer.model, trainer.optimizer), ledger)

        def tell(phase: str) -> None:
            if phase == "rest":
                rest.update(ledger.live())
            elif phase in PHASES:
                activations[phase] = ledger.mark(phase)["activations"]
                history.mark(phase)
            else:
                activations[phase] = ledger.settled()["activations"]
            log.mark(NAMES.get(phase, phase))

        ledger.reset_peaks()
        with history, comm.record() as calls, log:
            take_step(trainer, batch, where, tell)
        return trainer, {
            "bytes": {
                "parameters": rest["parameters"],
                "gradients": rest["gradients"],
                "optimizer": rest["optimizer"],
                "unsharded_peak": ledger.peak_of("unsharded"),
                "gradients_peak": ledger.peak_of("gradients", "communication"),
                "activations": max(activations.values()) - activations["forward"],
                "peak": ledger.peak.total,
            },
            "curve": ledger.curve(),
            "calls": calls,
            "collectives": _totals(calls),
            "cuda": history.beside(ledger),
            "log": LoggedStep.of(log),
        }


def _totals(calls: list[Call]) -> dict[str, dict[str, int]]:
    """Calls, payload and wire bytes by operation."""
    totals: dict[str, dict[str, int]] = {}
    for op in sorted({call.op for call in calls}):
        same = [call for call in calls if call.op == op]
        payload, wire = sum(call.payload for call in same), round(sum(call.wire for call in same))
        totals[op] = {"calls": len(same), "payload": payload, "wire": wire}
    return totals


def _by_axis(calls: list[Call], mesh: Mesh, rank: int) -> dict[str, dict[str, dict[str, int]]]:
    """This rank's calls by axis and operation, as `cost.traffic.totals` has them; groups of one rank send nothing."""
    sent = [call for call in calls if call.op != "recv" and call.ranks > 1]
    axes = {name: mesh.axis_of(global_ranks(group_named(name)), rank) for name in {call.group for call in sent}}
    return totals(Counter(Message(axes[call.group], call.op, call.payload) for call in sent))


def trace_of(rung: str) -> str:
    """The name of a rung's trace; that of a recipe may have the slashes of `axes=dp/pp`."""
    return f"trace-{rung.replace('/', '-')}.json"


def snapshot_of(rung: str) -> str:
    """The name of its allocator's snapshot, on a GPU."""
    return f"snapshot-{rung.replace('/', '-')}.pickle"
