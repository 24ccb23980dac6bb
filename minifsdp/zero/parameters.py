"""Parameters that ZeRO can shard: alike on all ranks, dense, and on one device that the process group serves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minifsdp import private
from minifsdp.comm import Group
from minifsdp.ddp.sync import check_same_on_all_ranks, check_same_order, describe
from minifsdp.whole_tensors import check_whole


def check_parameters(names: Mapping[Tensor, str], group: Group) -> None:
    """Check the parameters of an optimizer by their names, on all ranks alike.

    Raises:
        ValueError, RuntimeError: see `ShardedOptimizer`.
    """
    served = private.device_types_of(group)
    if not names:
        raise ValueError("the parameter groups hold no parameter: pass model.parameters() or groups of them")
    first = next(iter(names)).device
    for p, name in names.items():
        check_whole(p, name, group)
        if p.layout != torch.strided:
            raise ValueError(f"{name} is sparse, and flat buffers are dense: leave it to another optimizer")
        where = f"{name} is on {p.device}, the"
        if p.device.type not in served:
            raise ValueError(f"{where} process group serves {sorted(served)}: move the module first")
        if p.device != first:
            raise ValueError(f"{where} first one on {first}: move all to one device first")
    lines = [describe(name, p) for p, name in names.items()]
    check_same_on_all_ranks(lines, first, group, "ZeRO")
    check_same_order(list(names), group)
