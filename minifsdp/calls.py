"""A collective as an entry in the log of collectives."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Label(NamedTuple):
    """The subject of a collective, for code that compares or draws calls.

    Attributes:
        what: the tensor, by the name of its unit or bucket.
        whose: distinguishes it from others with the same name.
    """

    what: str
    whose: str = ""


class Call(NamedTuple):
    """One collective as this rank issued it.

    Attributes:
        op: the logical operation, such as `"all_gather"`.
        function: the name of the function in `torch.distributed`.
        group: the process group's name.
        order: how many calls this rank had issued on that group before; equal on all ranks of a correct program.
        payload: bytes of the full tensor: all shards of a gather, the input of a reduction.
        ranks: size of the group, N.
        dtype: of the tensor.
        label: its subject, if the caller has named one.
        peer: of a message between two ranks the other one, by its number in the group.
    """

    op: str
    function: str
    group: str
    order: int
    payload: int
    ranks: int
    dtype: torch.dtype = torch.float32
    label: Label | None = None
    peer: int | None = None

    @property
    def wire(self) -> float:
        """Bytes this rank sends by the ring algorithm (ring.py). Nominal: a backend may move more."""
        share = (self.ranks - 1) / self.ranks
        match self.op:
            case "all_reduce":
                return 2 * share * self.payload
            case "all_gather" | "reduce_scatter" | "all_to_all":
                return share * self.payload
            case "recv":
                return 0.0
        return float(self.payload) if self.ranks > 1 else 0.0
