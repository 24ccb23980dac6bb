"""Before a model's first forward, every tensor has memory and values, or all of its ranks raise one error.

Ranks may differ: rank 0 has loaded a checkpoint, and the others have not. A rank that raised by itself would leave the
others waiting in their first collective. So the first forward begins with a message to the group's key-value store:

    store    "5/1": {"rotary.frequencies": "values"}    what rank 1 lacks; 5: number of such exchanges before
             "5/lacking"                                written by every rank that lacks something
             "5/arrived": 2                             the last rank to arrive writes "5/all", for which all wait

No collective is used, as those of a step are what people count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from traceback import walk_stack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minifsdp import unwritten
from minifsdp.comm import Group
from minifsdp.following import is_watched, release, watch
from minifsdp.private import name_of
from minifsdp.process_groups import has_store, store_of

Lacking = dict[str, str]
"""By name, what is on the meta device, as "parameters" or "buffers"; and what lacks "values"."""

_PATIENCE = timedelta(seconds=60)  # after that a rank decides by itself: its first collective shows who is missing
_CURE = (
    "memory from to_empty() or torch.empty() has no values. Load or initialize it, or zero_() what is not used, or not "
    "read before it is written; a state dict has no non-persistent buffers"
)


class FirstForward:
    """Modules' first forward is still to come; the next one is the first again, if memory has been marked since.

    Args:
        modules: those that are sharded, averaged or parallelized together, with what is inside them.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._marks: int | None = None
        for module in modules:
            watch(module)

    @property
    def comes(self) -> bool:
        return self._marks != unwritten.marks

    def check(
        self, modules: Sequence[nn.Module], groups: Iterable[Group], tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """Check that modules may compute, and plain ones around them; the ranks agree on that the first time.

        Args:
            modules: those of this forward.
            groups: those that share the modules, in the same order on all ranks; none: each rank decides by itself.
            tensors: by name, their parameters and buffers, or this rank's parts of them; by default what they show.

        Raises:
            RuntimeError: tensors have no memory or no values, on a rank of the groups; the error names them.
        """
        if torch.compiler.is_compiling():
            return
        outer = _outermost(modules[0])
        tensors = _placed(modules, tensors, outer)
        before, lacking = self._marks, _lacking(tensors | _around(outer))
        if before is None:
            lacking = _of_all(lacking, groups)
        if lacking:
            raise RuntimeError(_report(lacking))
        self._marks = _seen[outer] = unwritten.marks
        release([*tensors.values(), *outer.buffers()])


def check_before_forward(module: nn.Module, group: Group) -> None:
    """Check a module without a wrapper before its first forward, together with the ranks that share it."""
    if module not in _alone:
        hook = module.register_forward_pre_hook(_check_alone, prepend=True)
        _alone[module] = FirstForward(module), group, hook


def _check_alone(module: nn.Module, _: Any) -> None:
    if module in _alone:  # not a copy
        first, group, hook = _alone[module]
        first.check([module], [group])
        hook.remove()
        del _alone[module]


_alone: WeakKeyDictionary[nn.Module, tuple[FirstForward, Group, RemovableHandle]] = WeakKeyDictionary()


def tensors_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The parameters and buffers of modules by name, each once."""
    found: dict[str, Tensor] = {}
    for index, module in enumerate(modules):
        place = f"{type(module).__name__} {index}: " if len(modules) > 1 else ""
        for named in (module.named_parameters(), module.named_buffers()):
            found |= {place + name: tensor for name, tensor in named}
    return found


def _placed(modules: Sequence[nn.Module], tensors: Mapping[str, Tensor] | None, outer: nn.Module) -> dict[str, Tensor]:
    """The tensors of modules by their names in the outermost one; `tensors`: by their names in the first."""
    if tensors is not None:
        place = next(f"{name}." if name else "" for name, module in outer.named_modules() if module is modules[0])
        return {place + name: t for name, t in tensors.items()}
    names = {id(t): name for name, t in tensors_of([outer]).items()}
    return {names.get(id(t), name): t for name, t in tensors_of(modules).items()}


def _around(outer: nn.Module) -> dict[str, Tensor]:
    """The tensors of modules that are in no wrapper, as far as they have memory; once, if they have values."""
    if _seen.get(outer) == unwritten.marks:
        return {}
    free = {id(t) for m in outer.modules() if not is_watched(m) for t in (*m.parameters(False), *m.buffers(False))}
    return {name: t for name, t in tensors_of([outer]).items() if id(t) in free and not t.is_meta}


def _outermost(module: nn.Module) -> nn.Module:
    """The first of the modules whose calls have led here and that contain this one."""
    # Only in frames of torch's: a caller's frame would keep what is in its `f_locals` alive.
    calls = [frame for frame, _ in walk_stack(None) if frame.f_code.co_name == "_call_impl"]
    callers = [frame.f_locals.get("self") for frame in calls]
    around = [each for each in callers if isinstance(each, nn.Module) and module in set(each.modules())]
    return around[-1] if around else module


_seen: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""By outermost module, how often memory had been marked when it was checked."""


def _lacking(tensors: Mapping[str, Tensor]) -> Lacking:
    found = {
        name: "parameters" if isinstance(t, nn.Parameter) else "buffers" for name, t in tensors.items() if t.is_meta
    }
    return found | (dict.fromkeys(unwritten.unwritten_in(tensors), "values") if unwritten.marks else {})


def _report(lacking: Lacking) -> str:
    """The problem and the cure; of two problems, the one to solve first."""
    if on_meta := [name for name, what in lacking.items() if what != "values"]:
        kinds = " and ".join(kind for kind in ("parameters", "buffers") if kind in lacking.values())
        cure = "Call model.to_empty(device=...) and initialize them."
        if "parameters" not in kinds:  # they may have been loaded
            cure = "Assign each of them a tensor with its values: to_empty() would discard the parameters' values."
        return (
            f"FSDP {kinds} should be materialized from meta device before training: {', '.join(on_meta)} are on meta. "
            f"{cure}"
        )
    return f"nothing has initialized {', '.join(lacking)}: {_CURE}"


def _of_all(lacking: Lacking, groups: Iterable[Group]) -> Lacking:
    for group in {name_of(group): group for group in groups}.values():
        if group.size() > 1 and (group in _meetings or has_store(group)):
            if group not in _meetings:
                _meetings[group] = _Meeting(group)
            lacking = _meetings[group].exchange(lacking)
    return lacking


class _Meeting:
    """The store through which the ranks of a group agree."""

    def __init__(self, group: Group) -> None:
        self._store, self._rank, self._ranks = store_of(group, "minifsdp first forward"), group.rank(), group.size()
        self._life = self._store.add(f"lives of {self._rank}", 1)  # a store may outlast its process group
        self._numbers = count()

    def exchange(self, lacking: Lacking) -> Lacking:
        """All that is lacking on a rank; on this one only, if another does not arrive in time."""
        at = f"{self._life}/{next(self._numbers)}"
        if lacking:
            self._store.set(f"{at}/{self._rank}", json.dumps(lacking))
            self._store.set(f"{at}/lacking", "")
        if self._store.add(f"{at}/arrived", 1) == self._ranks:
            self._store.set(f"{at}/all", "")
        with suppress(RuntimeError):
            self._store.wait([f"{at}/all"], _PATIENCE)
        if self._store.check([f"{at}/lacking"]):
            keys = [key for key in (f"{at}/{rank}" for rank in range(self._ranks)) if self._store.check([key])]
            lacking = {name: what for key in keys for name, what in json.loads(self._store.get(key)).items()}
        return lacking


_meetings: WeakKeyDictionary[Group, _Meeting] = WeakKeyDictionary()
