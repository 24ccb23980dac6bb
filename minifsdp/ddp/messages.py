"""Errors of the reducer, in torch's words where a script may look for them."""

from __future__ import annotations


def ready_twice(name: str) -> RuntimeError:
    """A parameter has a gradient that its bucket cannot take any more."""
    return RuntimeError(
        f"Expected to mark a variable ready only once. Parameter {name} got another gradient after its bucket had "
        "taken one: it was used outside forward, or is in a reentrant checkpoint that runs more than once in a "
        "backward, or the first of several backwards from one forward did not reach all parameters, or a backward that "
        "began at no output came after another. Pass use_reentrant=False to the checkpoint or static_graph=True to "
        "DistributedDataParallel; find_unused_parameters=True, for backwards from some outputs only; use parameters "
        "inside forward only, and let it return all that the loss is made of."
    )


def unfinished(blame: str, cure: str, rank: int, missing: list[str]) -> RuntimeError:
    """The last backward has not reached these parameters on this rank."""
    return RuntimeError(
        "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates "
        f"that {blame} {cure} Parameters which did not receive grad for rank {rank}: {', '.join(missing)}"
    )
