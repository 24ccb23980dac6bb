"""What several exercises of lab 11 share."""

from typing import Protocol

import torch
from torch import Tensor

from minifsdp.comm import Group, Handle


class Replica(Protocol):
    """The unit interface that 11.3 and 11.4 may use; the notebook's set-up cell explains it."""

    mean: Tensor | None
    replicas: Group
    across: Handle | None

    def deliver(self, mean: Tensor) -> None: ...


def planned(ranks, factor):
    """By the place of each rank in a table: rows shard together, columns hold the same."""
    table = torch.arange(ranks).view(-1, factor)
    return table.tolist(), table.T.tolist()
