"""Settings of a training run, and their validation."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minifsdp.batch import Batch, shard
from minifsdp.build import sizes_of
from minifsdp.course.ladder import data
from minifsdp.course.ladder.data import Corpus
from minifsdp.course.ladder.outline import count_elements, outline
from minifsdp.course.train.layouts import check_goes
from minifsdp.fsdp import BackwardPrefetch, ShardingStrategy
from minifsdp.gpt import GPT, usual_heads
from minifsdp.instruments.system.resources import check_counts, check_seed
from minifsdp.mesh import Mesh
from minifsdp.recipe import Recipe

FLAT: dict[str, ShardingStrategy] = {
    "no-shard": ShardingStrategy.NO_SHARD,
    "grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "full": ShardingStrategy.FULL_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
    "hybrid-grad-op": ShardingStrategy._HYBRID_SHARD_ZERO2,
}
STRATEGIES = ("ddp", *FLAT, "fsdp2")
ABSENT = {
    "ddp": (
        ("precision", "forward_prefetch", "backward_prefetch", "limit", "offload"),
        "it gathers nothing and computes in the parameters' dtype; --strategy no-shard replicates too, and supports it",
    ),
    "fsdp2": (
        ("forward_prefetch", "backward_prefetch", "limit"),
        "it gathers one unit ahead by itself and needs no limiter; leave it out, or choose --strategy full",
    ),
}
"""By strategy, the options that it lacks, and why."""
RECIPES_LACK = {
    "strategy": "it says itself what is sharded; give --zero 0 to 3, or data= in --recipe",
    "forward_prefetch": "write schedule= in --recipe",
    "backward_prefetch": "write schedule= in --recipe",
    "limit": "write limit= or schedule= in --recipe",
    "offload": "only strategies keep shards in host memory",
}
"""The options that a recipe lacks, and its own words for them."""
PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
PREFETCHES = {"none": None, "pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST}

# These define the training task and are fixed by a checkpoint. All other settings may change at every start.
TASK = ("layers", "width", "heads", "context", "batch", "lines", "seed", "lr", "precision")
NEW = {"heads": None, "lines": False}  # what checkpoints without these were trained with; None: the usual number
COUNTS = ("accumulate", "replicas", "ranks", "layers", "width", "context", "batch", "steps", "every", "keep")
SIZES_OF_RECIPES = {"layers": 8, "width": 176, "context": 48, "batch": 16}
"""The usual sizes with a recipe, which any layout of eight ranks divides: a checkpoint of one goes on as another."""


@dataclass(frozen=True)
class TrainSettings:
    """Settings of `minifsdp train`; see its --help.

    Attributes:
        recipe: what is divided on each axis; None: `strategy` says it.
        heads: of attention; None: as `GPT` chooses.
        lines: a sequence counts up to the end of its line, so that ranks have different numbers of tokens.
        batch: sequences per optimizer step over all ranks and micro-batches, so that neither affects the result.
        replicas: copies of the model in a hybrid strategy, each sharded over ranks / replicas.
        every: steps between checkpoints; the last step is saved too.
        resume: go on from the last checkpoint, which must be there.
        auto_resume: go on from the last checkpoint if there is one: a launcher restarts a job with the same command.
    """

    strategy: str = "full"
    recipe: Recipe | None = None
    precision: str = "fp32"
    forward_prefetch: bool = False
    backward_prefetch: str = "pre"
    limit: bool = True
    accumulate: int = 1
    no_sync: bool = False
    offload: bool = False
    replicas: int = 2
    ranks: int = 2
    layers: int = 6
    width: int = 175
    heads: int | None = None
    context: int = 24
    batch: int = 12
    steps: int = 200
    lr: float = 1e-3
    seed: int = 0
    lines: bool = False
    data: Path | None = None
    checkpoint: Path | None = None
    every: int = 50
    keep: int = 2
    resume: bool = False
    auto_resume: bool = False
    ledger: bool = True
    time_limit: float = 86400.0

    def model(self) -> GPT:
        """The initial model, with the same parameters on every rank and under every strategy."""
        torch.manual_seed(self.seed)
        return GPT(**self.shape)  # type: ignore[arg-type]

    @property
    def shape(self) -> dict[str, int | None]:
        """The sizes of the model, as `GPT` takes them."""
        return {"width": self.width, "layers": self.layers, "heads": self.heads, "context": self.context}

    @property
    def task(self) -> dict[str, Any]:
        """The settings that a checkpoint fixes."""
        return task_of({name: getattr(self, name) for name in TASK})

    @property
    def mesh(self) -> Mesh:
        """The ranks and their axes."""
        if self.recipe is not None:
            return self.recipe.mesh
        strategy = FLAT.get(self.strategy)
        return Mesh(dp=self.ranks, replicate=self.replicas if strategy and strategy.is_hybrid else 1)

    def draw(self, corpus: Corpus, generator: torch.Generator) -> Batch:
        """The next batch, the same on every rank."""
        batch = data.draw(corpus, self.batch, self.context, generator)
        return data.up_to_line_ends(batch) if self.lines else batch

    def rows_of(self, batch: Batch, rank: int) -> Batch:
        """A rank's rows."""
        return shard(batch, self.mesh.place(rank, "dp"), self.mesh.dp)

    def check(self) -> Corpus:
        """Validate all settings and load the training text.

        Raises:
            ValueError: a setting is impossible; the message is one line with its name and the cure.
            OSError: the training text is missing.
        """
        self._check_choices()
        self._check_numbers()
        self._check_combinations()
        self._check_ranks()
        if self.recipe is not None:
            check_goes(self.recipe, self.ranks, sizes_of(outline(**self.shape)), self.fault_beside)
        corpus = data.load_text(self.data)
        data.batches(corpus, self.batch, self.context, self.seed, 0)
        return corpus

    @classmethod
    def asked_for(cls, recipe: Recipe | None, ranks: int | None, given: Mapping[str, Any]) -> TrainSettings:
        """The settings of a command line, with the usual values for what is None.

        Raises:
            ValueError: an option would be ignored.
        """
        values = {name: value for name, value in given.items() if value is not None}
        if recipe is None:
            settings = cls(ranks=cls.ranks if ranks is None else ranks, **values)
        else:
            precision = recipe.data.precision if recipe.data else "fp32"
            own = {"recipe": recipe, "ranks": recipe.mesh.ranks if ranks is None else ranks, "precision": precision}
            settings = cls(**{**SIZES_OF_RECIPES, **values, **own})
            if "strategy" in values:
                raise ValueError(
                    f"--strategy {settings.strategy} has no effect on {recipe}: {RECIPES_LACK['strategy']}"
                )
        if "replicas" in values:
            settings.check_replicas()
        return settings

    def check_replicas(self) -> None:
        """Raise ValueError if the strategy has no replicas, so that --replicas would be ignored."""
        self._check_choices()
        if self.recipe is not None:
            raise ValueError(f"--replicas {self.replicas}: those of a recipe are --replicate {self.replicas}")
        strategy = FLAT.get(self.strategy)
        if strategy is None or not strategy.is_hybrid:
            said = f"--replicas {self.replicas}: --strategy {self.strategy} has no replicas"
            raise ValueError(f"{said}: leave it out, or choose --strategy hybrid")

    def elements(self) -> int:
        """Number of elements of all parameters of the model."""
        return count_elements(**self.shape)  # type: ignore[arg-type]

    def saves_after(self, step: int) -> bool:
        return self.checkpoint is not None and (step % self.every == 0 or step == self.steps)

    def plain(self) -> dict[str, Any]:
        """The settings as a dict for JSON."""
        plain = asdict(self) | {"recipe": None if self.recipe is None else str(self.recipe) or "dp=1"}
        return {name: str(value) if isinstance(value, Path) else value for name, value in plain.items()}

    def _check_choices(self) -> None:
        choices: dict[str, Iterable[str]] = {
            "strategy": STRATEGIES,
            "precision": PRECISIONS,
            "backward_prefetch": PREFETCHES,
        }
        for name, known in choices.items():
            if (given := getattr(self, name)) not in known:
                raise ValueError(f"{_option(name)} {given}: choose from {', '.join(known)}")

    def _check_numbers(self) -> None:
        check_seed(self.seed)
        check_counts(self, COUNTS)
        for name, most in (("lr", math.inf), ("time_limit", 1e6)):
            if not 0 < (given := getattr(self, name)) <= most or given == math.inf:
                raise ValueError(
                    f"{_option(name)} {given:g}: must be above 0 and "
                    + (f"up to {most:g}" if most < math.inf else "finite")
                )

    def _check_ranks(self) -> None:
        started = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
        if started is not None and int(started) != self.ranks:
            raise ValueError(f"--ranks {self.ranks}, but this job was started with {started}: leave --ranks out")
        if self.recipe is not None:
            return
        parts = self.ranks * self.accumulate
        if self.batch % parts:
            shared = f"{self.ranks} ranks" + (f" in {self.accumulate} micro-batches" if self.accumulate > 1 else "")
            raise ValueError(f"--batch {self.batch} cannot be shared equally by {shared}: choose a multiple of {parts}")
        strategy = FLAT.get(self.strategy)
        if strategy is not None and strategy.is_hybrid and (self.ranks % self.replicas or self.ranks == self.replicas):
            raise ValueError(
                f"--strategy {self.strategy}: {self.ranks} ranks do not make {self.replicas} replicas of two or more "
                "ranks each: choose --ranks as a multiple of --replicas"
            )

    def _check_combinations(self) -> None:
        usual = TrainSettings()
        if self.recipe is not None:
            self._check_beside(self.recipe, usual)
        absent, reason = ABSENT.get(self.strategy, ((), ""))
        for name in absent if self.recipe is None else ():
            if getattr(self, name) != getattr(usual, name):
                raise ValueError(f"--strategy {self.strategy} has no {_option(name)}: {reason}")
        if self.no_sync and self.accumulate == 1:
            raise ValueError("--no-sync: a single micro-batch is always reduced; add --accumulate 2 or more")
        if self.checkpoint is None:
            for name in ("every", "keep", "resume", "auto_resume"):
                if getattr(self, name) != getattr(usual, name):
                    raise ValueError(f"{_option(name)} needs --checkpoint DIR")
        if self.resume and self.auto_resume:
            raise ValueError("--resume with --auto-resume: only the second may begin a run; leave one of them out")

    def _check_beside(self, recipe: Recipe, usual: TrainSettings) -> None:
        """
        Raises:
            ValueError: an option has no meaning with a recipe.
        """
        for name, cure in RECIPES_LACK.items():
            if getattr(self, name) != getattr(usual, name):
                raise ValueError(f"{_option(name)} has no effect on {recipe}: {cure}")
        if found := self._micro_batches_beside(recipe):
            raise ValueError(found)

    def fault_beside(self, recipe: Recipe) -> str:
        """Why these settings do not go with a recipe that divides the model, with the cure; empty: they do."""
        parts = recipe.mesh.dp * recipe.micro_batches * self.accumulate
        next_one = self.batch + -self.batch % parts
        uneven = f"--batch {self.batch} is no multiple of {parts}: give {next_one}" if self.batch % parts else ""
        return self._micro_batches_beside(recipe) or uneven

    def _micro_batches_beside(self, recipe: Recipe) -> str:
        if recipe.pipeline is not None and self.accumulate > 1:
            return f"--accumulate {self.accumulate} with pp: these are micro-batches; give --micro instead"
        data = recipe.data
        if self.no_sync and not (data and (data.shards_parameters or (data.kind, data.when) == ("ddp", "overlap"))):
            return f"--no-sync has no effect on {recipe}: only ddp, fsdp and fsdp2 can put off a reduction"
        return ""


def task_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that fix a training task, of any version, with the number of heads that was chosen for them."""
    all_given = {**NEW, **settings}
    task = {name: all_given[name] for name in TASK}
    return task | {"heads": task["heads"] or usual_heads(task["width"])}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
