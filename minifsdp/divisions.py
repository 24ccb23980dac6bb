"""Parts of a recipe: what is divided on each axis of a mesh. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from minifsdp.words import check, check_kinds, refuse_idle

SCHEDULES = {
    "ddp": ("overlap", "buckets", "parameters"),
    "zero1": ("buckets",),
    "zero2": ("overlap",),
    "fsdp": ("limit", "prefetch", "overlap", "sync"),
    "fsdp2": ("limit", "prefetch"),
}
"""By kind of data parallelism, when its messages are sent; the first is the usual one."""

ORDERS = ("1f1b", "gpipe", "naive", "interleaved", "zb-h1")
ATTENTIONS = ("ring", "gathered", "ulysses")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class DataParallel:
    """The division of model state among ranks with different rows.

    Attributes:
        kind: "ddp": nothing; "zero1": the optimizer state; "zero2": gradients, too; "fsdp" and "fsdp2": parameters,
            too, unit by unit in one flat parameter, or each by itself.
        schedule: when messages are sent, of `SCHEDULES`; "": the first there. Of DDP, "parameters" and "buckets" are
            sent after backward; of FSDP, "sync" waits for each, "overlap" computes meanwhile, "prefetch" also gathers
            ahead, "limit" no more than `limit` units.
        limit: the most units gathered at once.
        depth: of "prefetch": how many units ahead; None: all.
        reshard: units are freed after forward and gathered again for backward. FSDP2's in a pipeline always stay
            gathered for the step.
        hold: FSDP2's buffers are held by reference until their stream has waited for who reads them.
        precision: of gathered parameters and of computation; reductions are in float32.
    """

    kind: str = "fsdp2"
    schedule: str = ""
    limit: int = 2
    depth: int | None = None
    reshard: bool = True
    hold: bool = False
    precision: str = "fp32"

    def __post_init__(self) -> None:
        check_kinds(self)
        check("data", self.kind, SCHEDULES)
        check("schedule", self.when, SCHEDULES[self.kind])
        check("precision", self.precision, PRECISIONS)
        if self.precision != "fp32" and not self.shards_parameters:
            raise ValueError(f"precision={self.precision} with data={self.kind}: choose fsdp or fsdp2, which convert")
        if self.limit < 1:
            raise ValueError(f"limit={self.limit}: the unit that computes has to be gathered; choose 1 or more")
        if self.depth is not None and self.depth < 0:
            raise ValueError(f"depth={self.depth}: choose 0, for no unit ahead, or more")
        refuse_idle(self, f"data={self.kind} and schedule={self.when}")

    @property
    def when(self) -> str:
        """The schedule."""
        return self.schedule or SCHEDULES[self.kind][0]

    @property
    def shards_parameters(self) -> bool:
        return self.kind in ("fsdp", "fsdp2")

    @property
    def idle(self) -> list[str]:
        """The words that have no effect on this kind and schedule."""
        used = {
            "limit": self.when == "limit",
            "depth": (self.kind, self.when) == ("fsdp", "prefetch"),
            "reshard": self.shards_parameters,
            "hold": self.kind == "fsdp2",
        }
        return [word for word, is_used in used.items() if not is_used]


@dataclass(frozen=True)
class TensorParallel:
    """The division of every layer among ranks with the same rows.

    Attributes:
        sequence: activations between layers that are cut, along the sequence.
        regather: with it, the inputs of layers by columns are kept as parts and gathered again in backward.
    """

    sequence: bool = False
    regather: bool = False

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.regather and not self.sequence:
            raise ValueError("regather without sequence: inputs are whole on every rank, and nothing is gathered")


@dataclass(frozen=True)
class ContextParallel:
    """The division of sequences among ranks that attend together.

    Attributes:
        attention: of `ATTENTIONS`: keys and values go round in a "ring", or are "gathered", or "ulysses" divides heads.
        zigzag: each rank has an early and a late part, so that under the causal mask all have the same work.
    """

    attention: str = "ring"
    zigzag: bool = True

    def __post_init__(self) -> None:
        check_kinds(self)
        check("attention", self.attention, ATTENTIONS)


@dataclass(frozen=True)
class PipelineParallel:
    """The turns of ranks with different layers.

    Attributes:
        order: of `ORDERS`.
        stages: of each rank.
        micro: micro-batches into which a replica's rows are cut; 0: `MICROS` for each rank.
    """

    order: str = "1f1b"
    stages: int = 1
    micro: int = 0

    def __post_init__(self) -> None:
        check_kinds(self)
        check("order", self.order, ORDERS)
        if self.stages < 1 or self.micro < 0:
            raise ValueError(f"stages={self.stages}, micro={self.micro}: there is at least 1 of each")
        if (self.stages > 1) != (self.order == "interleaved"):
            raise ValueError(f"stages={self.stages} with order={self.order}: interleaved has several, the others one")
        refuse_idle(self, f"order={self.order}")

    @property
    def idle(self) -> list[str]:
        """The words that have no effect on this order."""
        return ["micro"] if self.order == "naive" else []
