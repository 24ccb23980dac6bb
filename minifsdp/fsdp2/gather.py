"""Unsharded parameters from the ranks' pieces: copy in, all-gather, copy out.

    pieces --cast, copy--> my row of gathered [N, S] --all-gather--> gathered --transpose--> unsharded [N * S]

The gather works in place: a rank's pieces are packed into its own row. The copy in and the collective are queued on the
stream for gathers, the copy out on that of the computation, and the gathered buffer is released after the copy out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minifsdp import comm, device, private
from minifsdp.comm import Group, Label
from minifsdp.fsdp2.cut import Cut, Rows
from minifsdp.fsdp2.held import Held, Recorded

AllGather = Callable[[Tensor, Tensor, Group, Label | None], Any]
"""Starts to gather every rank's row; returns what to wait for (comm.py)."""


class Gather:
    """One way to fill the memory of a unit's unsharded parameters.

    Args:
        cuts: division of the parameters among the ranks of `group`.
        group: the ranks, N.
        memories: for each parameter, memory for at least N * size elements, as in a buffer of these parameters.
        dtypes: dtype of each parameter in the computation.
        on: device of the buffers.

    Attributes:
        gathered: the buffer [N * S] in rank order, freed at first.
        keeper: releases it after the copy out.
        all_gather: a different all-gather than that of comm.py, with the same arguments; None: that one.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        group: Group,
        memories: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        on: torch.device,
    ) -> None:
        self.group, self.device = group, on
        ranks = group.size()
        self.rows = Rows(cuts, ranks, dtypes)
        self.gathered = device.empty(self.rows.numel, self.rows.dtype, "communication", on)
        self.by_rank = self.gathered.view(ranks, self.rows.row)
        self.my_row = self.by_rank[group.rank()]
        self.my_pieces = self.rows.local(self.my_row, group.rank())
        self.columns = self.rows.columns(self.gathered)
        gaps = torch.empty(ranks, self.rows.gap, dtype=self.rows.dtype, device=on)
        # Aliases with version counters of their own: to gather is not to modify what autograd has saved.
        targets = [m.data[: ranks * size] for m, size in zip(memories, self.rows.sizes, strict=False)]
        if self.rows.transposes:
            *columns, _ = self.columns
            typed = [target.view(dtype) for target, dtype in zip(targets, dtypes, strict=True)]
            self.targets = [
                cut.by_rank(cut.whole(target)) if cut.dim and cut.shape.numel() else target.view(ranks, -1)
                for target, cut in zip(typed, cuts, strict=True)
            ]
            self.columns = [c.view(t.dtype).view(t.shape) for c, t in zip(columns, self.targets, strict=True)]
        else:
            self.targets = [*(target.view(ranks, -1) for target in targets), gaps]
        self.keeper: Held | Recorded = Held()
        self.all_gather: AllGather | None = None
        device.free(self.gathered)

    @torch.no_grad()
    def start(self, pieces: list[Tensor], label: Label) -> Any:
        """Pack this rank's pieces, cast on the way, and gather; returns what to wait for before `copy_out`."""
        self.keeper.give_back(self.device)
        device.allocate(self.gathered)
        private.foreach_copy(self.my_pieces, pieces)
        if self.group.size() == 1:  # the copy is waited for as a collective would be
            return device.current_stream(self.device).record_event()
        all_gather = self.all_gather or comm.all_gather
        return all_gather(self.gathered, self.my_row, self.group, label)

    def copy_out(self) -> None:
        """Give each parameter its values; called where the computation is queued."""
        if self.rows.transposes:
            private.foreach_copy(self.targets, self.columns)
        else:
            private.split_copy(self.by_rank, self.rows.sizes, self.targets)
        self.keeper.keep(self.gathered)
