"""A whole value, and the pieces of it that a rank has: what `torch.distributed.checkpoint` saves, and fills on loading.

    whole    qkv.weight [3 width, width]     query rows      key rows        value rows
    rank 1 of 2 tensor-parallel ranks        [    | xxxx ]   [    | xxxx ]   [    | xxxx ]     three pieces
    cut again among 2 data-parallel ones     [    | x    ]   [    | x    ]   ...

dcp asks each value for its pieces: where they begin in the whole, how long they are, and their memory. So a checkpoint
knows no layout: whoever loads it names pieces of its own, and dcp reads what overlaps with them. A DTensor is always
one piece, in the shape of its layer instead of the plain model's, and torch gets its place wrong where two axes share
rows unevenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from minifsdp.local_parts import local_of
from minifsdp.private import dtensor


class Pieces(Tensor):
    """A value of a model or of its optimizer in the plain model's shape, without memory of its own.

    Attributes:
        value: the DTensor that has the memory.
        pieces: this rank's, views of that memory, by the indices at which they begin.
    """

    value: DTensor
    pieces: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(cls, value: DTensor, shape: Sequence[int]) -> Pieces:
        """`value` in another shape, if a layer has cut its rows into so many matrices."""
        made: Pieces = dtensor.without_memory(cls, shape, value.dtype, value.device)
        made.value, local, start = value, local_of(value.detach()), begin_of(value)
        if made.shape == value.shape:
            made.pieces = {start: local}
        else:  # [3, width, width] of [3 width, width]
            rows = value.shape[1]
            made.pieces = {(start[0] * rows + n * rows + start[1], *start[2:]): part for n, part in enumerate(local)}
        made.pieces = {begin: piece for begin, piece in made.pieces.items() if piece.numel()}
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func}: a value in pieces has no operators; its pieces and its DTensor have")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Pieces({[*self.shape]}, {[(begin, [*piece.shape]) for begin, piece in self.pieces.items()]})"

    # What torch/distributed/checkpoint/planner_helpers.py asks for

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(begin), piece.shape) for begin, piece in self.pieces.items()]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        of_all = TensorProperties.create_from_tensor(local_of(self.value))
        data = [TensorWriteData(chunk, of_all, self.shape) for chunk in self.__create_chunk_list__()]
        return [
            WriteItem(MetadataIndex(name, each.chunk.offsets), WriteItemType.SHARD, tensor_data=each) for each in data
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.pieces[tuple(index.offset or [0] * self.dim())]


def begin_of(value: DTensor) -> tuple[int, ...]:
    """The indices in the whole value at which this rank's part begins.

    Strided shards, FSDP2's of what tensor parallelism has already cut, are cuts of that part.
    """
    mesh, places = value.device_mesh, [*enumerate(value.placements)]
    begin, sizes = [0] * value.dim(), [*value.shape]
    for dim, place in sorted(places, key=lambda each: isinstance(each[1], dtensor.StridedShard)):
        if hasattr(place, "dim"):
            rows = -(-sizes[place.dim] // mesh.size(dim))
            low = min(rows * mesh.get_local_rank(dim), sizes[place.dim])
            begin[place.dim] += low
            sizes[place.dim] = min(rows, sizes[place.dim] - low)
    return tuple(begin)
