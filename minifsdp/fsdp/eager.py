"""What `torch.compile` is to leave alone."""

from __future__ import annotations

from functools import cache


@cache
def stay_out_of_graphs() -> None:
    """Let `torch.compile` break its graphs around every unit, and compile the units' own computation.

    Gathers, frees and hooks are not operations of a graph. The compiler treats torch's own FSDP in the same way: code
    in those files runs as it is, and what it calls is looked at again (torch/_dynamo/trace_rules.py). The import takes
    seconds, which any of torch's optimizers would take too.
    """
    from torch._dynamo import trace_rules

    for name in ("minifsdp.fsdp", "minifsdp.comm", "minifsdp.device", "minifsdp.flat_param"):
        trace_rules.add(name)
