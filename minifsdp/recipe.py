"""Recipes: a mesh of ranks, and what is divided on each of its axes. Plain values, which print themselves.

    pp=2,dp=2,tp=2,zero=1,sequence,order=1f1b,micro=4

is 1F1B over two stages, in each of them two replicas that share the optimizer state, and in each replica two ranks that
share every layer, and the sequence between layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minifsdp.mesh import Mesh
from minifsdp.words import check, check_kinds, made, named, refuse_idle, said, split, words_of

if TYPE_CHECKING:
    from minifsdp.pipeline.actions import Plan

SCHEDULES = {
    "ddp": ("overlap", "buckets", "parameters"),
    "zero1": ("buckets",),
    "zero2": ("overlap",),
    "fsdp": ("limit", "prefetch", "overlap", "sync"),
    "fsdp2": ("limit", "prefetch"),
}
"""By kind of data parallelism, when its messages are sent; the first is the usual one."""

ORDERS = ("1f1b", "gpipe", "naive", "interleaved", "zb-h1")
PRECISIONS = ("fp32", "bf16")
MICROS = 2
"""Micro-batches for each rank of a pipeline, unless a recipe says otherwise."""
ZERO = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "fsdp2"}
"""ZeRO's stages."""


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


@dataclass(frozen=True)
class Recipe:
    """A mesh and what is divided on its axes; None: nothing, and the axis has one rank.

    Raises:
        TypeError: a part is of another class.
        ValueError: an axis has several ranks that divide nothing.
    """

    mesh: Mesh = field(default_factory=Mesh)
    data: DataParallel | None = None
    tensor: TensorParallel | None = None
    pipeline: PipelineParallel | None = None

    def __post_init__(self) -> None:
        for (name, part), kind in zip(vars(self).items(), _PARTS, strict=True):
            if not isinstance(part, kind) and (part is not None or kind is Mesh):
                raise TypeError(f"{name}={part!r}: give a {kind.__name__}, or a recipe as text to Recipe.parse")
        for axis in self.mesh.divided:
            if axis in _TO_COME:
                raise ValueError(f"{axis}={self.mesh.size(axis)}: {_TO_COME[axis]} parallelism is not supported yet")
            if axis not in self.divided:
                raise ValueError(f"{axis}={self.mesh.size(axis)}: nothing is divided among these ranks")
        data = self.data
        if self.mesh.replicate > 1 and not (data and data.shards_parameters):
            raise ValueError(f"replicate={self.mesh.replicate}: only fsdp and fsdp2 have shards to replicate")
        if 1 < self.mesh.replicate == self.mesh.dp:
            raise ValueError(
                f"replicate={self.mesh.dp} of dp={self.mesh.dp} ranks: nothing is sharded; choose data=ddp"
            )
        if self.pipeline is not None and data is not None and data.kind == "fsdp2":
            for word in ("schedule", "limit", "reshard", "hold"):
                if (value := getattr(data, word)) != getattr(DataParallel, word):
                    raise ValueError(
                        f"{word}={value} with data=fsdp2 and pp: units stay gathered for a step; leave it out"
                    )
        if self.pipeline is not None and self.pipeline.order == "zb-h1" and data is not None and data.kind == "zero2":
            raise ValueError(
                "data=zero2 with order=zb-h1: a backward has a part for each layer, and every part would reduce all "
                "buckets; choose zero=1, or order=1f1b"
            )
        if self.tensor is not None and data is not None:
            if data.kind == "fsdp":
                raise ValueError("data=fsdp with tensor parallelism: parts cannot be flattened; choose data=fsdp2")
            if (data.kind, data.when) in (("ddp", "buckets"), ("ddp", "parameters")):
                raise ValueError(f"schedule={data.when} with tensor parallelism: choose schedule=overlap")

    @property
    def divided(self) -> list[str]:
        """The axes on which something is divided, perhaps by one."""
        parts = {"dp": self.data, "tp": self.tensor, "pp": self.pipeline}
        return [axis for axis, part in parts.items() if part is not None]

    @property
    def micro_batches(self) -> int:
        """Parts into which a replica's rows are cut."""
        if self.pipeline is None or self.pipeline.order == "naive":
            return 1
        return self.pipeline.micro or MICROS * self.mesh.pp

    @property
    def actions(self) -> Plan:
        """Of each rank of the pipeline its actions; without one, forward and backward."""
        if self.pipeline is None:
            alone: Any = [[(0, "F", 0), (0, "B", 0)]]
            return alone  # type: ignore[no-any-return]
        from minifsdp.pipeline.schedules.orders import action_lists  # where torch is needed

        return action_lists(self.pipeline.order, self.mesh.pp, self.micro_batches, self.pipeline.stages)

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """A recipe from what it prints; an axis with several ranks divides what is usual unless it is said.

        Raises:
            TypeError: it is no text.
            ValueError: a word is unknown, or a value impossible.
        """
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is of type {type(text).__name__}: give a recipe as text, such as dp=2,zero=1")
        given: dict[str, str] = {}
        for name, value in map(named, split(text)):
            if name in given:
                raise ValueError(f"{name} is given twice: {name}={given[name]} and {name}={value}")
            given[name] = value
        if "zero" in given and "data" in given:
            raise ValueError(f"zero={given['zero']} and data={given['data']} both say what is sharded: leave one out")
        if (stage := given.pop("zero", None)) is not None:
            check("zero", stage, ZERO)
            given["data"] = ZERO[stage]
        mesh, *parts = ({name: given.pop(name) for name in words_of(part) if name in given} for part in _PARTS)
        if given:
            known = ", ".join(["zero", *(name for part in _PARTS for name in words_of(part))])
            raise ValueError(f"{next(iter(given))} is no word of a recipe: choose from {known}")
        sizes = made(Mesh, mesh)
        divided = zip(_PARTS[1:], parts, (sizes.dp, sizes.tp, sizes.pp), strict=True)
        return cls(sizes, *(made(part, words) if words or ranks > 1 else None for part, words, ranks in divided))

    def __str__(self) -> str:
        axes = {"dp": self.data, "tp": self.tensor, "pp": self.pipeline}
        parts = [said(part, self.mesh.size(axis) == 1) for axis, part in axes.items() if part is not None]
        return ",".join(word for words in (said(self.mesh), *parts) for word in words)


_PARTS = (Mesh, DataParallel, TensorParallel, PipelineParallel)
_TO_COME = {"cp": "context", "ep": "expert"}
