"""All of FSDP2 in one function: parameters become DTensors in place, as one unit, and hooks notify the engine.

Look at it first and read it last, because each name in it is the subject of a lesson. `fully_shard`
(torch_api/api.py) is the same with torch's arguments: policies, checks, gathers that a parameter extends, reductions
that the user has chosen, and methods of the sharded module (torch/distributed/fsdp/_fully_shard).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from minifsdp.comm import Group
from minifsdp.flat_param import ParamPlaces, find_parameters
from minifsdp.fsdp.plan import Plan
from minifsdp.fsdp.reduction import Reduction
from minifsdp.fsdp2 import dtensors
from minifsdp.fsdp2.cut import Cut
from minifsdp.fsdp2.hooks import ModuleGroup, has_module_group
from minifsdp.fsdp2.unit import MakeUnsharded, ParamUnit, unsharded_of

Place = Callable[[nn.Parameter], Any] | None
"""Returns the `Shard(dim)` of a parameter; None, or if it returns None: `Shard(0)`."""


def shard(
    modules: Sequence[nn.Module],
    params: ParamPlaces,
    mesh: Any,
    plan: Plan,
    on: torch.device,
    policy: Any,
    reshard_after_forward: bool | None = None,
    smaller: Group | None = None,
    place: Place = None,
    unsharded: MakeUnsharded = unsharded_of,
    reduction: Reduction | None = None,
) -> ModuleGroup:
    """Shard parameters as one unit, which is gathered for these modules; inner modules first.

    Args:
        modules: the modules that are gathered together.
        params: theirs, as `params_of` finds them; none: the modules have hooks, and no unit.
        mesh: the mesh on which the sharded parameters are placed.
        plan: ranks, dtypes and memory.
        on: device of the computation.
        policy: dtypes of inputs and outputs.
        reshard_after_forward: free the unit after forward. None: yes, except for the outermost modules.
        smaller: ranks among which backward gathers the parts kept after forward; None: all ranks.
        place: the dimension along which each parameter is sharded.
        unsharded: creates the memory of the unsharded parameters.
        reduction: averages gradients; None: over the ranks of the plan.

    Raises:
        NotImplementedError: a parameter is split unevenly along a dimension other than 0.
    """
    unit = None
    if params:
        cuts = [_cut(p, places[0].name, place, plan.group.size()) for p, places in params.items()]
        name, reshard = type(modules[0]).__name__, reshard_after_forward is not False
        unit = ParamUnit(params, cuts, mesh, plan, on, name, reshard, smaller, unsharded, reduction)
    return ModuleGroup(modules, unit, policy, reshard_after_forward is None, on)


def params_of(modules: Sequence[nn.Module], ignored: Collection[torch.Tensor] = ()) -> ParamPlaces:
    """The parameters that no inner call has taken, with all places that use them; wide dtypes first (cut.py, Rows)."""
    taken = {inner for outer in modules for inner in outer.modules() if has_module_group(inner)}
    left_out = {id(p) for p in ignored}
    params: ParamPlaces = {}
    for each in modules:
        for p, places in find_parameters(each, taken).items():
            if id(p) not in left_out:
                params.setdefault(p, []).extend(places)
    return dict(sorted(params.items(), key=lambda item: -item[0].itemsize))


def _cut(p: nn.Parameter, name: str, place: Place, ranks: int) -> Cut:
    dim = dtensors.dim_of(place(p) if place else None, p, name)
    cut = Cut(dtensors.local_of(p).shape, dim, ranks)
    if dim and cut.shape[dim] % ranks:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {name} is {list(cut.shape)}, over {ranks} ranks"
        )
    return cut
