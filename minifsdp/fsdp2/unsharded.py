"""The memory of a unit's unsharded parameters, filled from the shards or from the parts kept after forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import device
from minifsdp.comm import Group, Label
from minifsdp.fsdp2 import dtensors
from minifsdp.fsdp2.cut import Cut, Rows
from minifsdp.fsdp2.gather import AllGather, Gather
from minifsdp.fsdp2.held import Held, Recorded
from minifsdp.private import pass_on_hooks, version_of


class Unsharded:
    """A buffer [N * S] in parameter order, freed at first, and views of it in the parameters' shapes.

    With `smaller`, a rank keeps its part for this smaller number of ranks after forward, and backward gathers these
    parts. This takes more memory between the two, but the gather in backward stays among those ranks.

    Args:
        cuts: division of the parameters among the ranks of `group`.
        inner: for each parameter its placement by tensor parallelism, or None.
        dtypes: dtype of each parameter in the computation.
        group: the ranks, N.
        smaller: some of these ranks; None: backward gathers from all.
        on: device of the buffer.

    Attributes:
        views: the unsharded parameters.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        inner: Sequence[Any],
        dtypes: Sequence[torch.dtype],
        group: Group,
        smaller: Group | None,
        on: torch.device,
    ) -> None:
        self.dtypes, self.smaller, self.device = dtypes, smaller, on
        rows = Rows(cuts, group.size(), dtypes)
        self.full = device.empty(rows.numel, rows.dtype, "unsharded", on)
        *memories, _ = rows.memories(self.full)
        wholes = [cut.whole(m.view(dtype)) for cut, m, dtype in zip(cuts, memories, dtypes, strict=True)]
        self.views = [dtensors.whole_like(each, spec) for each, spec in zip(wholes, inner, strict=True)]
        self._gathers = [Gather(cuts, group, memories, dtypes, on)]
        if smaller is not None:
            fewer = [Cut(cut.shape, cut.dim, smaller.size()) for cut in cuts]
            self._gathers.append(Gather(fewer, smaller, memories, dtypes, on))
        self._gather = self._gathers[0]
        self._kept: list[Tensor] = []
        device.free(self.full)

    @property
    def writes(self) -> int:
        """The number of writes, other than by gathers."""
        return version_of(self.full)

    def keep(self) -> None:
        """Forward is over: keep this rank's parts among `smaller`, which is not None."""
        assert self.smaller is not None
        rank, cuts = self.smaller.rank(), self._gathers[1].rows.cuts
        whole = [dtensors.local_of(view) for view in self.views]
        self._kept = [cut.of(each, rank).clone() for cut, each in zip(cuts, whole, strict=True)]
        self._copied = device.current_stream(self.device).record_event()

    def forget(self) -> None:
        """What forward has kept is out of date."""
        self._kept = []

    def start(
        self, parts: Sequence[Tensor], keeper: Held | Recorded, all_gather: AllGather | None, label: Label
    ) -> Any:
        """Start to fill the buffer from this rank's parts; returns what to wait for before `arrive`."""
        self._gather, pieces = self._gathers[0], [dtensors.on(self.device, part) for part in parts]
        if self._kept:
            self._gather, pieces = self._gathers[1], self._kept
            device.current_stream(self.device).wait_event(self._copied)
        self._gather.keeper, self._gather.all_gather = keeper, all_gather
        return self._gather.start(pieces, label)

    def arrive(self, leaves: list[nn.Parameter]) -> bool:
        """Give the parameters their values; the computation is queued after it, on the same stream.

        Returns:
            whether leaves were replaced in the list `leaves`: never.
        """
        device.allocate(self.full)
        self._gather.copy_out()
        self._kept = []  # this stream has waited for their last reader
        return False

    def free(self) -> None:
        device.free(self.full)


def renewed(leaf: nn.Parameter, whole: Tensor) -> nn.Parameter:
    """A leaf with these values, and with `requires_grad` and the hooks of `leaf`."""
    new = nn.Parameter(whole, leaf.requires_grad)
    pass_on_hooks(leaf, new)
    return new
