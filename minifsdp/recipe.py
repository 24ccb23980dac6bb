"""Recipes: a mesh of ranks, and what is divided on each of its axes. Plain values, which print themselves.

    pp=2,dp=2,tp=2,zero=1,sequence,order=1f1b,micro=4

is 1F1B over two stages, in each of them two replicas that share the optimizer state, and in each replica two ranks that
share every layer, and the sequence between layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minifsdp.divisions import ContextParallel, DataParallel, PipelineParallel, TensorParallel
from minifsdp.mesh import Mesh
from minifsdp.words import check, made, named, said, split, worded, words_of

if TYPE_CHECKING:
    from minifsdp.pipeline.actions import Plan

MICROS = 2
"""Micro-batches for each rank of a pipeline, unless a recipe says otherwise."""
ZERO = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "fsdp2"}
"""ZeRO's stages."""


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
    context: ContextParallel | None = None

    def __post_init__(self) -> None:
        for (name, part), kind in zip(vars(self).items(), _PARTS, strict=True):
            if not isinstance(part, kind) and (part is not None or kind is Mesh):
                raise TypeError(f"{name}={part!r}: give a {kind.__name__}, or a recipe as text to Recipe.parse")
        if self.context is not None and self.data is None and self.mesh.cp > 1:
            raise ValueError(f"cp={self.mesh.cp} without data: these ranks' gradients have to be averaged; choose one")
        for axis in self.mesh.divided:
            if axis in _TO_COME:
                raise ValueError(f"{axis}={self.mesh.size(axis)}: {_TO_COME[axis]} parallelism is not supported yet")
            if axis not in self.divided:
                raise ValueError(f"{axis}={self.mesh.size(axis)}: nothing is divided among these ranks")
        data = self.data
        if self.mesh.replicate > 1 and not (data and data.shards_parameters):
            raise ValueError(f"replicate={self.mesh.replicate}: only fsdp and fsdp2 have shards to replicate")
        if 1 < self.mesh.replicate == self.mesh.with_different_tokens:
            raise ValueError(
                f"replicate={self.mesh.dp} of dp={self.mesh.dp} ranks: nothing is sharded; choose data=ddp"
            )
        if self.pipeline is not None and data is not None and data.kind == "fsdp2":
            for word in ("schedule", "limit", "reshard", "hold"):
                if (value := getattr(data, word)) != getattr(DataParallel, word):
                    raise ValueError(
                        f"{worded(word, value)} with data=fsdp2 and pp: units stay gathered for a step; leave it out"
                    )
        if self.pipeline is not None and self.pipeline.order == "zb-h1" and data is not None and data.kind in _WHOLE:
            raise ValueError(f"data={data.kind} with order=zb-h1: {_WHOLE[data.kind]}, or order=1f1b")
        if self.tensor is not None and data is not None:
            if data.kind == "fsdp":
                raise ValueError("data=fsdp with tensor parallelism: parts cannot be flattened; choose data=fsdp2")
            if (data.kind, data.when) in (("ddp", "buckets"), ("ddp", "parameters")):
                raise ValueError(f"schedule={data.when} with tensor parallelism: choose schedule=overlap")

    @property
    def divided(self) -> list[str]:
        """The axes on which something is divided, perhaps by one."""
        parts = {"dp": self.data, "tp": self.tensor, "pp": self.pipeline, "cp": self.context}
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
        ranks_of_parts = (sizes.with_different_tokens, sizes.tp, sizes.pp, sizes.cp)
        divided = zip(_PARTS[1:], parts, ranks_of_parts, strict=True)
        return cls(sizes, *(made(part, words) if words or ranks > 1 else None for part, words, ranks in divided))

    def __str__(self) -> str:
        axes = {"dp": self.data, "tp": self.tensor, "pp": self.pipeline, "cp": self.context}
        parts = [said(part, self.mesh.size(axis) == 1) for axis, part in axes.items() if part is not None]
        return ",".join(word for words in (said(self.mesh), *parts) for word in words)


_PARTS = (Mesh, DataParallel, TensorParallel, PipelineParallel, ContextParallel)
_WHOLE = {
    "zero2": "a backward has a part for each layer, and every part would reduce all buckets; choose zero=1",
    "fsdp": "the gradient of a unit's flat parameter comes at once, and no weight's can wait; choose data=fsdp2",
}
"""Kinds of data parallelism that need a backward in one part, and why."""
_TO_COME = {"ep": "expert"}
