"""All of FSDP in one function: units, a schedule, and an engine that hooks them to the model.

    shards = shard(model, lambda module: isinstance(module, Block), group)
    optimizer = torch.optim.AdamW(shards)

Look at it first and read it last, because each name in it is the subject of a lesson. `FullyShardedDataParallel`
(torch_api/api.py) is the same with torch's arguments: a wrapper instead of the hooks, other strategies, mixed
precision, offload, deferred initialization, state dicts, and a different schedule on CPU (schedules/host.py). A unit's
`Plan` contains its ranks, dtypes and memory. An argument of `FlatUnit` determines whether the unit is freed after
forward, and an argument of the schedule, how far ahead it is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from minifsdp.comm import Group
from minifsdp.flat_param import FlatParameter, ParamPlaces, find_parameters
from minifsdp.fsdp.engine import Engine
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.plan import Plan
from minifsdp.fsdp.schedules.rate_limit import RateLimitedSchedule
from minifsdp.fsdp.schedules.sync import SyncSchedule


def shard(
    model: nn.Module,
    is_unit: Callable[[nn.Module], bool],
    group: Group,
    schedule: Callable[[Sequence[FlatUnit]], SyncSchedule] = RateLimitedSchedule,
) -> list[nn.Parameter]:
    """Shard the parameters of `model` over `group`: a unit for each module that `is_unit`, and one for the rest.

    The model is changed in place and called as before; its parameters are whole only inside the forward and backward
    of their unit. All ranks of the group call this function with the same model, and run its units in the same order.

    Args:
        model: the same on all ranks, including its values; the parameters of a unit have one dtype and one device.
        is_unit: called with each module inside `model`.
        group: the ranks, N.
        schedule: creates the schedule, which decides when units gather, free and reduce.

    Returns:
        the optimizer's parameters: the shard of each unit, 1-D, with 1/N of its elements and padding.

    Raises:
        ValueError: parameters of a unit do not fit into one buffer, or one is used in two units.
    """
    units: dict[nn.Module, FlatUnit] = {}
    for name, module, params in [*cut(model, is_unit)]:  # all of them, before the first loses its parameters
        units[module] = FlatUnit(FlatParameter(params, group.rank(), group.size()), Plan(group), name)
        units[module].is_root = module is model
    engine = Engine([*units.values()], schedule([*units.values()]))
    model.register_forward_pre_hook(lambda *_: engine.begin())
    for module, unit in units.items():
        hook_forward(module, unit, engine)
    model.register_forward_hook(lambda *_: engine.end(), always_call=True)
    return [p for unit in units.values() for p in unit.shards]


def cut(model: nn.Module, is_unit: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module, ParamPlaces]]:
    """The modules that become units, outermost first, with their names and the parameters that are in no inner unit."""
    taken: ParamPlaces = {}
    for name, module in model.named_modules():
        if module is model or is_unit(module):
            inside = [child for child in module.modules() if child is not module and is_unit(child)]
            params = find_parameters(module, skip=inside)
            for p in params.keys() & taken.keys():
                one, other = taken[p][0].name, f"{name}.{params[p][0].name}"
                raise ValueError(f"{one} and {other} are one parameter, in two units: let the outermost unit have both")
            taken |= params
            if params:
                yield name or "root", module, params


def hook_forward(module: nn.Module, unit: FlatUnit, engine: Engine) -> None:
    """Notify the engine when the module is called and when it returns."""
    modules = [*module.modules()]
    module.register_forward_pre_hook(lambda _, *inputs: engine.before(unit, inputs), with_kwargs=True)
    module.register_forward_hook(lambda _, inputs, output: engine.after(unit, output, modules))
