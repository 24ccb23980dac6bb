"""Gradients of replicated parameters: equal on all tensor-parallel ranks, or the copies part in silence.

Between a column-parallel and a row-parallel layer a rank computes with its own heads or features. A layer there that
has all of its parameters on every rank, such as a norm of each head, gets another gradient on each: that of these
heads. The gradient of the whole model is the sum. `SequenceParallel` sums; other styles, and layers without a style,
leave each rank with its own. Shapes show nothing of it, so the ranks compare what they have, once for each optimizer.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.local_parts import cuts_of, local_of
from minifsdp.optimizer_steps import parameters_of
from minifsdp.private import FakeTensor, name_of
from minifsdp.process_groups import global_ranks, mesh_group

TOLERANCE = 0.05
"""Of a gradient's norm: above what kernels that add in any order leave, below the difference of two heads."""
NOISE = 1e-6
"""Of the largest gradient's norm: what a gradient that is zero on paper has in floating point."""
_LISTED = 3

_models: WeakKeyDictionary[nn.Module, tuple[int, Group]] = WeakKeyDictionary()
"""Of parallel ones a number, in the order of their calls, which is that of all ranks, and the ranks."""
_parallel: set[tuple[int, ...]] = set()
"""The ranks of each."""
_numbers = count()
_done: WeakSet[Optimizer] = WeakSet()
"""All of their groups have compared."""
_compared: WeakKeyDictionary[Optimizer, set[tuple[int, ...]]] = WeakKeyDictionary()
"""Of an optimizer the groups that have compared: a group's ranks know it of their own group alike."""


class Print(NamedTuple):
    """A rank's copy of a parameter in three numbers (norm, sum, sum of the first half), and three of its gradient.

    Attributes:
        is_shared: it is a DTensor, which says that all ranks have the same; a plain one may be the rank's own.
    """

    is_shared: bool
    values: tuple[float, ...]
    gradient: tuple[float, ...]


def note_parallel(model: nn.Module, group: Group) -> None:
    """From now on, compare the gradients of what these ranks have replicated."""
    _models.setdefault(model, (next(_numbers), group))
    _parallel.add(tuple(global_ranks(group)))


def check_replicas(optimizer: Optimizer) -> None:
    """In the first step for which there are gradients, compare those of replicated parameters among the ranks.

    Raises:
        ValueError: a DTensor's differ; all ranks raise, before any parameter has changed. For plain parameters, of
            which a rank may have its own, there is a warning.
    """
    if optimizer in _done:
        return
    params = parameters_of(optimizer)
    if any(isinstance(local_of(p), FakeTensor) for p in params):
        return
    named = _named()
    groups: dict[tuple[int, ...], set[Group]] = defaultdict(set)
    for p in params:
        for group in _groups_of(p, named):
            groups[tuple(global_ranks(group))].add(group)
    compared = _compared.setdefault(optimizer, set())
    for ranks in sorted((groups.keys() & _parallel) - compared):
        group = min(groups[ranks], key=name_of)  # on all ranks the same, whatever their order of parameters
        of_ranks = comm.gather_objects(dict(_prints(params, named, ranks)), group)
        if any(each.gradient for prints in of_ranks for each in prints.values()):
            report(of_ranks)
            compared.add(ranks)
        elif not any(of_ranks):  # these ranks share nothing
            compared.add(ranks)
    if compared >= groups.keys() & _parallel:
        _done.add(optimizer)


def _named() -> dict[int, tuple[int, str, Group]]:
    """By a parameter's id: the outermost model that has it, its name there, and the ranks."""
    named: dict[int, tuple[int, str, Group]] = {}
    for model, (number, group) in list(_models.items()):
        for name, p in model.named_parameters():
            named.setdefault(id(p), (number, name, group))
    return named


def _groups_of(p: Any, named: dict[int, tuple[int, str, Group]]) -> list[Group]:
    if isinstance(p, DTensor):
        return [mesh_group(p.device_mesh, dim) for dim in range(p.device_mesh.ndim)]
    return [named[id(p)][-1]] if id(p) in named else []


@torch.no_grad()
def _prints(
    params: list[nn.Parameter], named: dict[int, tuple[int, str, Group]], ranks: tuple[int, ...]
) -> Iterator[tuple[tuple[int, str], Print]]:
    """Of parameters that are not sharded over these ranks, by their names."""
    for index, p in enumerate(params):
        groups = _groups_of(p, named) if isinstance(p, DTensor) else []
        dim = next((dim for dim, group in enumerate(groups) if tuple(global_ranks(group)) == ranks), None)
        g: Any = p.grad
        is_summed_later = dim is not None and isinstance(g, DTensor) and g.placements[dim].is_partial()
        if not p.requires_grad or p.is_meta or dim in cuts_of(p) or is_summed_later:
            continue
        number, name, *_ = named.get(id(p), (-1, f"parameter {index} of the optimizer"))
        yield (number, name), Print(dim is not None, _three(local_of(p)), () if g is None else _three(local_of(g)))


def _three(t: Tensor) -> tuple[float, ...]:
    if t.is_sparse:
        t = t.coalesce().values()
    flat = t.reshape(-1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    return tuple(torch.stack([flat.norm(), flat.sum(), flat[: len(flat) // 2].sum()]).tolist())


def _differ(ours: tuple[float, ...], theirs: tuple[float, ...], noise: float) -> bool:
    scale = max(ours[0], theirs[0])
    return noise < scale < math.inf and any(abs(a - b) > TOLERANCE * scale for a, b in zip(ours, theirs, strict=True))


def report(of_ranks: list[dict[tuple[int, str], Print]]) -> None:
    """Compare with the first of the ranks.

    Args:
        of_ranks: in rank order, what each has by a parameter's number of model and name.

    Raises:
        ValueError: gradients of replicated DTensors differ; those of plain parameters draw a warning.
    """
    none = (0.0, 0.0, 0.0)
    noise = NOISE * max(each.gradient[0] for prints in of_ranks for each in prints.values() if each.gradient)
    found: dict[bool, list[str]] = {True: [], False: []}
    for key, first in of_ranks[0].items():
        each = [prints[key] for prints in of_ranks if key in prints]
        is_copied = len(each) == len(of_ranks) and (first.is_shared or len({other.values for other in each}) == 1)
        if is_copied and any(_differ(first.gradient or none, other.gradient or none, noise) for other in each):
            found[first.is_shared].append(key[1])
    for is_shared, names in found.items():
        if not names:
            continue
        listed = ", ".join(names[:_LISTED]) + f" and {len(names) - _LISTED} more" * (len(names) > _LISTED)
        message = (
            f"{listed}: {len(of_ranks)} tensor-parallel ranks have different gradients for their copies. A layer on a "
            "rank's own heads or features needs SequenceParallel(sequence_dim=.., use_local_output=True) with their "
            "dimension, which sums its gradients; any other layer needs the same batch on all these ranks"
        )
        if is_shared:
            raise ValueError(message)
        warnings.warn(f"{message}. If each rank is to train its own, make it a DTensor with Shard(0)", stacklevel=5)
