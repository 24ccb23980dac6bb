"""The course's GPT in plain numbers: names and shapes of its parameters, and what a rank has of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import prod

from minifsdp.cost.fsdp2 import Shape
from minifsdp.cost.pipeline import stages_of

Unit = Mapping[str, Shape]
"""Parameters by name, in their order."""

BEFORE_BLOCKS = ("embed", "position")


@dataclass(frozen=True)
class Model:
    """A GPT, or what a rank has of it.

    Attributes:
        root: the parameters of no block.
        blocks: each block's, in the order of forward.
        heads: of attention, in each block of the whole model; 0: unknown.
        is_first, is_last: it has the first block, and the last.
        frozen: names of parameters that are not trained.
    """

    root: Unit
    blocks: Sequence[Unit]
    heads: int = 0
    is_first: bool = True
    is_last: bool = True
    frozen: Sequence[str] = ()

    @property
    def shapes(self) -> list[list[Shape]]:
        """Of each unit's parameters, the root's first."""
        return [list(unit.values()) for unit in (self.root, *self.blocks)]

    @property
    def units(self) -> list[list[int]]:
        """Elements of each unit's parameters, the root's first."""
        return [[prod(shape) for shape in unit] for unit in self.shapes]

    @property
    def named(self) -> list[tuple[str, Shape]]:
        """Its parameters, in their order in the model; those of blocks without the block's name."""
        before = [each for each in self.root.items() if each[0].startswith(BEFORE_BLOCKS)]
        after = [each for each in self.root.items() if not each[0].startswith(BEFORE_BLOCKS)]
        return [*before, *(each for block in self.blocks for each in block.items()), *after]

    @property
    def parameters(self) -> list[int]:
        """Elements of each, in their order in the model."""
        return [prod(shape) for _, shape in self.named]

    @property
    def head(self) -> int:
        """The number of the root's parameters, its last ones, that are used after the blocks."""
        return sum(not name.startswith(BEFORE_BLOCKS) for name in self.root)


def gpt(vocabulary: int, width: int, layers: int, heads: int, context: int, tied: bool = False) -> Model:
    """A GPT of these sizes (minifsdp/gpt.py); `tied`: the head has the embedding's weight, which counts once.

    Raises:
        ValueError: there is no such GPT.
    """
    sizes = {"vocabulary": vocabulary, "width": width, "layers": layers, "heads": heads, "context": context}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} = {size}: a GPT needs at least 1")
    if width % heads:
        raise ValueError(f"width {width} cannot be divided into {heads} heads: choose a divisor of {width}")
    norm = {"weight": (width,), "bias": (width,)}
    norms = {part: {f"{part}.{name}": shape for name, shape in norm.items()} for part in ("norm1", "norm2", "norm")}
    layer = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    linears = {f"{part}.{name}": size for part, shape in layer.items() for name, size in _linear(shape).items()}
    root = {"embed.weight": (vocabulary, width), "position.weight": (context, width), **norms["norm"]}
    head = {f"head.{name}": shape for name, shape in _linear((vocabulary, width)).items()}
    if tied:
        del head["head.weight"]
    block = {**norms["norm1"], **norms["norm2"], **linears}
    return Model({**root, **head}, [block] * layers, heads)


def _linear(shape: Shape) -> dict[str, Shape]:
    return {"weight": shape, "bias": shape[:1]}


# A stage of a pipeline


def stages(model: Model, count: int) -> list[Model]:
    """Consecutive blocks, in some stages one more than in later ones, and the ends where they belong."""
    found, used = [], 0
    for blocks, first, last in map(astuple, stages_of(len(model.blocks), count)):
        root = {n: s for n, s in model.root.items() if (first if n.startswith(BEFORE_BLOCKS) else last)}
        found.append(replace(model, root=root, blocks=model.blocks[used : used + blocks], is_first=first, is_last=last))
        used += blocks
    return found


# A part of each layer


def rows(shape: Shape, ranks: int, rank: int) -> Shape:
    """[d, ...] -> [d / t, ...], as `torch.chunk` cuts: the last ranks have fewer, perhaps none."""
    share = -(-shape[0] // ranks)
    return (min(max(shape[0] - rank * share, 0), share), *shape[1:])


def columns(shape: Shape, ranks: int, rank: int) -> Shape:
    """[out, in] -> [out, in / t]."""
    return (shape[0], *rows(shape[1:], ranks, rank))


def fused(shape: Shape, ranks: int, rank: int) -> Shape:
    """[3 h, ...] -> [3, h / t, ...]: of q, k and v the same rows."""
    return (3, *rows((shape[0] // 3, *shape[1:]), ranks, rank))


CUTS: Mapping[str, Callable[[Shape, int, int], Shape]] = {
    "embed.weight": rows,
    "head.weight": rows,
    "head.bias": rows,
    "qkv.weight": fused,
    "qkv.bias": fused,
    "out.weight": columns,
    "up.weight": rows,
    "up.bias": rows,
    "down.weight": columns,
}
"""How tensor parallelism cuts parameters; all others are whole on every rank."""


def part(model: Model, ranks: int, rank: int) -> Model:
    """The part of one of the tensor-parallel ranks."""

    def cut(unit: Unit) -> dict[str, Shape]:
        return {name: CUTS[name](shape, ranks, rank) if name in CUTS else shape for name, shape in unit.items()}

    return replace(model, root=cut(model.root), blocks=[cut(block) for block in model.blocks])
