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
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from minifsdp import unwritten
from minifsdp.comm import Group
from minifsdp.following import release, watch
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
    """A model's first forward is still to come; the next one is the first again, if memory has been marked since.

    Args:
        modules: the model's.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._marks: int | None = None
        for module in modules:
            watch(module)

    @property
    def comes(self) -> bool:
        return self._marks != unwritten.marks

    def check(self, tensors: Mapping[str, Tensor | None], groups: Iterable[Group]) -> None:
        """Check that a model may compute; the ranks agree on that the first time.

        Args:
            tensors: by name, the parameters and buffers, or this rank's parts of them.
            groups: those that share the model, in the same order on all ranks.

        Raises:
            RuntimeError: tensors have no memory or no values, on a rank of the groups; the error names them.
        """
        if torch.compiler.is_compiling():
            return
        before, lacking = self._marks, _lacking(tensors)
        if before is None:
            lacking = _of_all(lacking, groups)
        if lacking:
            raise RuntimeError(_report(lacking))
        self._marks = unwritten.marks
        release(t for t in tensors.values() if t is not None)


def tensors_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The parameters and buffers of modules by name, each once."""
    found: dict[str, Tensor] = {}
    for index, module in enumerate(modules):
        place = f"{type(module).__name__} {index}: " if len(modules) > 1 else ""
        for named in (module.named_parameters(), module.named_buffers()):
            found |= {place + name: tensor for name, tensor in named}
    return found


def _lacking(tensors: Mapping[str, Tensor | None]) -> Lacking:
    found = {
        name: "parameters" if isinstance(t, nn.Parameter) else "buffers"
        for name, t in tensors.items()
        if t is not None and t.is_meta
    }
    return found | (dict.fromkeys(unwritten.unwritten_in(tensors), "values") if unwritten.marks else {})


def _report(lacking: Lacking) -> str:
    """The problem and the cure; of two problems, the one to solve first."""
    if on_meta := [name for name, what in lacking.items() if what != "values"]:
        kinds = " and ".join(kind for kind in ("parameters", "buffers") if kind in lacking.values())
        return (
            f"FSDP {kinds} should be materialized from meta device before training: {', '.join(on_meta)} are on meta. "
            "Call model.to_empty(device=...) and initialize them."
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
