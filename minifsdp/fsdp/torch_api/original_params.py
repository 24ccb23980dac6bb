"""`use_orig_params=True`: the optimizer sees the original parameters, each as its own slice of the shard.

    shard of rank r   [ ..w1 | b1 | w2.. ]      w1, b1, w2 keep their names and their Parameter objects;
                        1-D slices, which are empty if another rank has the elements

So parameters of one unit can be frozen individually, and can be in different optimizer groups.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor, nn

from minifsdp.flat_param import FlatParameter
from minifsdp.fsdp.absent import Owner, sharded_error
from minifsdp.fsdp.gradient import Gradient
from minifsdp.fsdp.view import FlatView, call_hooks
from minifsdp.optimizer_checks import UNSHARDED, note_taken

_GUARD: Any = "fsdp: sharded"


class OriginalParams(FlatView):
    """The original parameters for the optimizer.

    While the unit is sharded they are slices of the shard and attributes of their modules as ever; in forward and
    backward the leaves hide them. Their modules then refuse to run: torch's layers would fail on 1-D slices in words of
    their own ("weight must be 2-D"), or, where a slice happens to fit, compute nonsense. The hook that refuses is there
    only while the unit is sharded: a whole one pays nothing. Another unit's forward may read a parameter without a call
    of its module, and a slice of one element fits everywhere: while the model's forward runs, stand-ins hide slices.

    Args:
        flat: the flat parameter.
        guarded: refuse; where nothing is sharded there is no reason to.
    """

    def __init__(self, flat: FlatParameter, guarded: bool = True) -> None:
        super().__init__(flat)
        self._guarded = guarded
        self._is_lent = self._is_shown = self._is_running = False

    def attach(self, unit: Owner) -> None:
        modules = {place.module: None for users in self.places for place in users} if self._guarded else {}
        self._guards = [(module._forward_pre_hooks, self._refuse) for module in modules]
        for leaf, users in zip(unit.leaves, self.places, strict=True):
            note_taken(leaf, users[0].name, unit, UNSHARDED)
        self._unit = unit
        self.shards = [users[0].module._parameters[users[0].attribute] for users in self.places]  # type: ignore[misc]
        super().attach(unit)
        self._register(self.shards)
        self.hide_originals()

    def _register(self, parameters: list[nn.Parameter]) -> None:
        for users, p in zip(self.places, parameters, strict=True):
            for place in users:
                place.module._parameters[place.attribute] = p

    # Guards

    def _refuse(self, module: nn.Module, inputs: Any) -> None:
        names = ", ".join(place.name for users in self.places for place in users if place.module is module)
        raise sharded_error(f"{type(module).__name__}.forward", names, self._unit)

    def _put_up(self) -> None:
        for hooks, guard in self._guards:
            hooks[_GUARD] = guard
        if self._is_running and self._guarded:
            for attributes, _, absent in self._users:
                attributes.update(absent)

    def _take_down(self) -> None:
        for hooks, _ in self._guards:
            hooks.pop(_GUARD, None)
        for attributes, _, absent in self._users:
            for attribute in absent:
                attributes.pop(attribute, None)

    def run(self, is_running: bool) -> None:
        self._is_running = is_running
        if not is_running:
            self.after_forward()
        if not (self._is_shown or self.shows_originals):
            self._take_down()
            self._put_up()

    # Modules

    def show(self) -> None:
        self._take_down()
        super().show()
        self._is_shown = True

    def hide(self) -> None:
        self._is_shown = False
        self._take_down()
        self._put_up()

    def before_forward(self) -> None:
        self._is_lent = True
        self._register(self._unit.leaves)

    def after_forward(self) -> None:
        if self._is_lent:
            self._is_lent = False
            self._register(self.shards)

    def show_originals(self, full: Tensor) -> None:
        for p, view in zip(self.shards, self.flat.unflatten(full), strict=True):
            p.data = view
        self.shows_originals = True
        self._take_down()

    def hide_originals(self) -> None:
        self.shows_originals = False
        for p, part in zip(self.shards, self.slices(self.flat.shard.data), strict=True):
            p.data = part
        if not self._is_shown:
            self._put_up()

    # The optimizer

    @property
    def trained(self) -> list[bool]:
        return [p.requires_grad for p in self.shards]

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        return [self.flat.layout.bounds(index, self.flat.rank) for index in range(len(self.shards))]

    def slices(self, shard: Tensor) -> list[Tensor]:
        """Each parameter's part of a tensor [P / N] of the shard's layout; in its own shape if whole."""
        slices = [shard[low:high] for low, high in self._bounds]
        if self.flat.layout.ranks == 1:
            return [self.flat.layout.shaped(index, part) for index, part in enumerate(slices)]
        return slices

    def _call_hooks(self, index: int, part: Tensor) -> None:
        """A hook may zero rows by their numbers, so its gradient has the parameter's shape, 0 where others have it."""
        p, layout, name = self.shards[index], self.flat.layout, self.places[index][0].name
        if layout.ranks == 1:
            call_hooks(p, part, name)
            return
        whole = part.new_zeros(layout.numels[index])
        mine = layout.within(index, whole, self.flat.rank).copy_(part)
        call_hooks(p, layout.shaped(index, whole), name)
        part.copy_(mine)

    def refresh(self) -> None:
        """Take over parameters whose `.data` a user has replaced, or that are other objects than they were.

        Raises:
            RuntimeError: one has a shape that is neither the parameter's nor its slice's.
        """
        dtypes = {users[0].module._parameters[users[0].attribute].dtype for users in self.places}  # type: ignore[union-attr]
        if len(dtypes) == 1:  # else not by `Module.to` or its like
            self.flat.shard.data = self.flat.shard.data.to(dtypes.pop())
        for index, (users, part) in enumerate(zip(self.places, self.slices(self.flat.shard.data), strict=True)):
            p, shape = users[0].module._parameters[users[0].attribute], self.flat.layout.shapes[index]
            assert p is not None
            if p is self.shards[index] and p.data_ptr() == part.data_ptr() and p.shape == part.shape:
                continue
            if p.shape == part.shape:
                values = p.data
            elif p.shape == shape:
                values = self.flat.layout.part(index, p.data, self.flat.rank)
            else:
                raise RuntimeError(
                    f"Cannot writeback when the parameter shape changes\nExpects {part.shape} but got {p.shape}: "
                    f"{users[0].name} has {tuple(shape)} as a whole and {tuple(part.shape)} on this "
                    "rank. To change whole values, use FullyShardedDataParallel.summon_full_params."
                )
            part.copy_(values)
            p.data, self.shards[index] = part, p
            for place in users:
                place.module._parameters[place.attribute] = p

    def is_changed(self, index: int) -> bool:
        place, p = self.places[index][0], self.shards[index]
        low, high = self._bounds[index]
        now = place.module._parameters[place.attribute]
        return now is not p or p.data_ptr() != self.flat.shard.data[low:high].data_ptr()

    def _collected(self, gradient: Gradient) -> list[Tensor | None]:
        return gradient.collected()

    def _drop(self, index: int) -> None:
        self._gradient.drop(index)
