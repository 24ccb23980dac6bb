"""Code that `torch.compile` must leave alone."""

from __future__ import annotations

from functools import cache

from minifsdp.private import leave_uncompiled

LEFT_ALONE = (
    *("fsdp", "fsdp2", "tensor_parallel"),
    *("comm", "gloo", "order", "device", "draws", "flat_param", "local_parts", "private"),
    *("first_forward", "following", "process_groups", "unwritten"),
)


@cache
def stay_out_of_graphs() -> None:
    """Let `torch.compile` break its graphs around units and at collectives, and compile the computation between them.

    Gathers, frees and hooks are not operations of a graph. The compiler treats torch's own FSDP in the same way: code
    in those files runs as it is, and what it calls is looked at again (torch/_dynamo/trace_rules.py).
    """
    leave_uncompiled(f"minifsdp.{name}" for name in LEFT_ALONE)
