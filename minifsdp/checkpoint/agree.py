"""Agreement among the ranks of a model: all of them load the same, or raise the same error.

A rank that raises by itself leaves the others waiting in their next collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from torch import Tensor, nn

from minifsdp import comm
from minifsdp.checkpoint.names import StateDict
from minifsdp.checkpoint.parts import Parts
from minifsdp.checkpoint.sharded_values import is_sharded
from minifsdp.checkpoint.units import wrappers_in
from minifsdp.comm import Group
from minifsdp.ddp import DistributedDataParallel
from minifsdp.local_parts import groups_on_meshes
from minifsdp.private import name_of

MISSING = "missing"
RAISED = (RuntimeError, ValueError, KeyError, TypeError, NotImplementedError)


def groups_sharing(model: nn.Module) -> list[Group]:
    """The process groups that share the model, in the same order on all ranks: none for a plain one."""
    found: list[Group] = []
    for wrapper in wrappers_in(model):
        found += wrapper._groups.outermost_first
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


@dataclass
class Exchange:
    """Values that ranks send one another together with their errors.

    Attributes:
        mine: what this rank sends: small.
        of_ranks: what every rank has sent, by its rank in the world; after the `with`.
    """

    mine: Any = None
    of_ranks: dict[int, Any] = field(default_factory=dict)


@contextmanager
def same_errors(groups: list[Group]) -> Iterator[Exchange]:
    """Raise on all ranks what the first of them has raised inside the `with`, after all have left it."""
    own = error = None
    exchange = Exchange()
    try:
        yield exchange
    except Exception as raised:
        own = raised
        error = type(raised)(str(raised)) if type(raised) in RAISED else RuntimeError(f"{type(raised)}: {raised}")
    found = everywhere((error, exchange.mine), groups)
    error = next((error for error, _ in found.values() if error is not None), None)
    if error is not None:
        raise error from own
    exchange.of_ranks = {rank: sent for rank, (_, sent) in found.items()}


def check_given(parts: Parts, state: StateDict, known: Iterable[str], groups: list[Group]) -> None:
    """Check that the ranks of a model have been given values of the same names, in forms that belong together.

    Args:
        parts: the model's.
        state: what this rank has been given, by name.
        known: names of this rank's model.
        groups: those of the model.

    Raises:
        RuntimeError: they have not; on all of them.
    """
    own = {name: form_of(state[name], parts.is_shared(name)) if name in state else MISSING for name in known}
    check_same(own, {str(name): "given" for name in state if name not in own}, groups)


def form_of(value: Any, is_shared: bool) -> str:
    """A value's type, shape and layout, if ranks have parts of it here or in the checkpoint; else it has one form."""
    if isinstance(value, Mapping):
        return str({key: form_of(value[key], is_shared) for key in sorted(value, key=str)})
    if not isinstance(value, Tensor) or not (is_shared or is_sharded(value)):
        return "given"
    layout = getattr(value, "placements", "") if value.dim() else ""
    return f"{type(value).__name__} {list(value.shape)} {layout}".rstrip()


def check_settings(groups_given: Iterable[StateDict], known: Iterable[str], groups: list[Group]) -> None:
    """Check that the ranks of a model have been given the same settings of an optimizer, such as learning rates.

    Raises:
        RuntimeError: they have not; on all of them.
    """
    own = dict.fromkeys((f"the parameter group of {name}" for name in known), MISSING)
    for group in groups_given:
        settings = str({key: plain(group[key]) for key in sorted(group) if key not in ("params", "param_names")})
        names = (f"the parameter group of {name}" for name in group["params"])
        own |= dict.fromkeys((name for name in names if name in own), settings)
    check_same(own, {}, groups)


def plain(setting: Any) -> Any:
    """A setting without what may differ between ranks, such as a device or an address."""
    if isinstance(setting, list | tuple):
        return [plain(each) for each in setting]
    if isinstance(setting, Tensor) and not is_sharded(setting) and setting.numel() == 1:
        return setting.item()
    return setting if isinstance(setting, str | int | float | complex | None) else type(setting).__name__


def check_same(own: Mapping[str, str], more: Mapping[str, str], groups: list[Group]) -> None:
    """Check that all ranks have been given the same values of what they share.

    Args:
        own: of each value of this rank's model, by name, in what form it is given; or that it is missing.
        more: what else is given. Another rank's model may have it, as with experts of its own.
        groups: those of the model.

    Raises:
        RuntimeError: ranks whose models have a value, or ranks whose models lack it, have been given different forms;
            on all of them. The error names the first difference.
    """
    digest = sha256(repr((sorted(own.items()), sorted(more.items()))).encode()).digest()
    if len(set(everywhere(digest, groups).values())) == 1:
        return
    of_ranks = everywhere((dict(own), dict(more)), groups)
    for name in sorted({name for pair in of_ranks.values() for each in pair for name in each}):
        known = {rank: own[name] for rank, (own, _) in of_ranks.items() if name in own}
        unknown = {rank: more.get(name, MISSING) for rank, (own, more) in of_ranks.items() if name not in own}
        for found in (known, unknown):
            forms = {form: rank for rank, form in reversed(found.items())}
            if len(forms) > 1:
                differing = ", ".join(f"{form} on rank {rank}" for form, rank in reversed(forms.items()))
                raise RuntimeError(
                    f"ranks have been given different states: {name} is {differing}. Pass the same on all ranks, or "
                    "the whole state on rank 0 with full_state_dict=True and broadcast_from_rank0=True"
                )
