"""Agreement among the ranks of a model: all of them load the same, or raise the same error.

A rank that raises by itself leaves the others waiting in their next collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

from torch import nn

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.local_parts import groups_on_meshes
from minifsdp.private import name_of

RAISED = (RuntimeError, ValueError, KeyError, TypeError, NotImplementedError)


def groups_sharing(model: nn.Module) -> list[Group]:
    """The process groups that share the model, in the same order on all ranks: none for a plain one."""
    found: list[Group] = []
    for instance in FullyShardedDataParallel.fsdp_modules(model):
        found += instance._groups.outermost_first
    for module in model.modules():
        if isinstance(module, DistributedDataParallel | nn.parallel.DistributedDataParallel):
            found.append(module.process_group)
    found += groups_on_meshes(model.parameters())
    return list({name_of(group): group for group in found if group.size() > 1}.values())


def everywhere(value: Any, groups: list[Group]) -> dict[int, Any]:
    """The value of each rank that the groups connect, by its rank in the world."""
    found = {comm.world().rank() if comm.has_world() else 0: value}
    for group in groups:
        for of_others in comm.gather_objects(found, group):
            found |= of_others
    return dict(sorted(found.items()))


@contextmanager
def same_errors(groups: list[Group]) -> Iterator[None]:
    """Raise on all ranks what the first of them has raised inside the `with`, after all have left it."""
    own = error = None
    try:
        yield
    except Exception as raised:
        own = raised
        error = type(raised)(str(raised)) if type(raised) in RAISED else RuntimeError(f"{type(raised)}: {raised}")
    error = next(filter(None, everywhere(error, groups).values()), None)
    if error is not None:
        raise error from own


def check_same(described: Mapping[str, str], groups: list[Group]) -> None:
    """Check that all ranks have been given the same values of what they share.

    Raises:
        RuntimeError: they have not, on all of them; the error names the first difference.
    """
    digest = sha256(repr(sorted(described.items())).encode()).digest()
    if len(set(everywhere(digest, groups).values())) == 1:
        return
    of_ranks = everywhere(dict(described), groups)
    for name in sorted({name for each in of_ranks.values() for name in each}):
        forms = {each.get(name, "missing"): rank for rank, each in reversed(of_ranks.items())}
        if len(forms) > 1:
            found = ", ".join(f"{form} on rank {rank}" for form, rank in reversed(forms.items()))
            raise RuntimeError(
                f"ranks have been given different states: {name} is {found}. Pass the same on all ranks, or the whole "
                "state on rank 0 with full_state_dict=True and broadcast_from_rank0=True"
            )
