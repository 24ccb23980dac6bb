"""Functions that `torch.compile` must leave alone."""

from __future__ import annotations

from functools import cache

from minifsdp.private import leave_uncompiled


@cache
def stay_out_of_graphs() -> None:
    """Let `torch.compile` break its graphs around every unit, and compile the units' own computation.

    Gathers, frees and hooks are not operations of a graph. The compiler treats torch's own FSDP in the same way: code
    in those files runs as it is, and what it calls is looked at again (torch/_dynamo/trace_rules.py).
    """
    leave_uncompiled(f"minifsdp.{name}" for name in _OURS)


_OURS = ("fsdp", "fsdp2", "comm", "gloo", "order", "device", "flat_param", "local_parts", "private")
