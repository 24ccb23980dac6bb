"""Parameters that stay in their modules: as DTensors while sharded, as plain Parameters while unsharded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.flat_param import Place
from minifsdp.fsdp.absent import Owner
from minifsdp.fsdp.view import View, call_hooks, call_post_hooks
from minifsdp.fsdp2 import dtensors
from minifsdp.fsdp2.empty import empty
from minifsdp.fsdp2.unreduced import StandIn, Unreduced, is_zeroed_stand_in
from minifsdp.optimizer_checks import UNSHARDED, check_steps_after_backward, note_taken
from minifsdp.private import hooks_of, in_backward, pass_on_hooks

_ON_THE_HOST = "the gradient of an unsharded parameter is in host memory, with its shard: call reshard() to use it"


class InPlaceView(View):
    """Leaves and sharded parameters, which replace each other in their modules under the same name.

    Args:
        places: the places where each parameter is used.
        shards: the sharded parameters.
        pins: keep them in pinned memory.

    Attributes:
        parts: this rank's part of each, as of the last `find_replaced`.
    """

    def __init__(self, places: list[list[Place]], shards: list[nn.Parameter], pins: bool = False) -> None:
        super().__init__(places, shards)
        self.is_shown, self.pins = False, pins
        self._unreduced = Unreduced(())
        self._leaves: list[nn.Parameter] = []
        self._hooked: set[int] = set()
        self._shared: list[tuple[nn.Parameter, nn.Parameter, Tensor, Tensor]] = []
        self._put(shards)
        self._pin()
        self.parts = [dtensors.local_of(p) for p in shards]

    def _put(self, parameters: list[nn.Parameter]) -> None:
        for p, users in zip(parameters, self.places, strict=True):
            for place in users:
                place.module._parameters[place.attribute] = p

    def attach(self, unit: Owner) -> None:
        """Let the unit's leaves and the shards replace each other."""
        self._leaves, self._hooked = unit.leaves, set()
        found: dict[nn.Module, tuple[dict[str, Any], dict[str, Any]]] = {}
        for leaf, p, users in zip(unit.leaves, self.shards, self.places, strict=True):
            check_steps_after_backward(users[0].name, p)
            note_taken(leaf, users[0].name, unit, UNSHARDED)
            for place in users:
                unsharded, sharded = found.setdefault(place.module, ({}, {}))
                unsharded[place.attribute], sharded[place.attribute] = leaf, p
        self._users = [(module._parameters, *both) for module, both in found.items()]

    def show(self) -> None:
        super().show()
        self.is_shown = True
        if not in_backward():
            self.share_gradients()

    def hide(self) -> None:
        super().hide()
        self.is_shown = False
        self._end_sharing()

    def find_replaced(self) -> bool:
        """True if the modules have other parameters since: `to_empty`, `load_state_dict(assign=True)`, by hand."""
        if self.is_shown:
            return False
        before = self.shards
        self.shards = [self._in_module(users[0]) for users in self.places]
        self._pin()
        self.parts = [dtensors.local_of(p) for p in self.shards]
        replaced = [pair for pair in zip(before, self.shards, strict=True) if pair[0] is not pair[1]]
        for shard, p in replaced:
            pass_on_hooks(shard, p)
        return bool(replaced)

    @staticmethod
    def _in_module(place: Place) -> nn.Parameter:
        p = place.module._parameters.get(place.attribute)
        if p is None:
            raise RuntimeError(f"{place.name} is no longer a parameter of its module: remove it before fully_shard")
        return p

    def check_materialized(self, whose: str) -> None:
        """
        Raises:
            RuntimeError: parameters are on meta.
        """
        names = [users[0].name for users in self.places]
        on_meta = [name for name, p in zip(names, self.shards, strict=True) if p.device.type == "meta"]
        if on_meta:
            raise RuntimeError(
                f"FSDP parameters should be materialized from meta device before training: {', '.join(on_meta)} of "
                f"{whose} are on meta. Call model.to_empty(device=...) and initialize them."
            )

    def check_dtypes(self, trained: Iterable[int], whose: str) -> None:
        """
        Raises:
            AssertionError: the trained parameters have several dtypes.
        """
        if len(found := {self.shards[index].dtype for index in trained}) > 1:
            raise AssertionError(
                f"FSDP expects uniform original parameter dtype but got {found} among what {whose} trains: shard "
                "modules of other dtypes separately"
            )

    def _pin(self) -> None:
        for p in self.shards if self.pins else []:
            dtensors.pin(p)

    # Gradients

    def share_gradients(self) -> None:
        """Let leaves have the `.grad` of their shards until they go, or a backward begins: who drops one drops both."""
        for leaf, p in zip(self._leaves, self.shards, strict=True):
            if (grad := p.grad) is None:
                continue
            if leaf.requires_grad and id(leaf) not in self._hooked:
                leaf.register_hook(partial(InPlaceView._end_sharing, weakref.proxy(self)))  # nothing has announced it
                self._hooked.add(id(leaf))
            if leaf.dtype != grad.dtype:
                leaf.grad_dtype = grad.dtype
            leaf.grad = grad if leaf.device == grad.device else StandIn.of(p, _ON_THE_HOST, leaf.device)
            self._shared.append((leaf, p, grad, leaf.grad))

    def _end_sharing(self, _: Any = None) -> None:
        shared, self._shared = self._shared, []
        for leaf, p, grad, shown in shared:
            now, is_sharded = leaf.grad, getattr(leaf.grad, "device_mesh", None) == dtensors.spec_of(p).mesh
            if now is not shown and p.grad is grad:
                p.grad = now if is_sharded else None
            elif is_zeroed_stand_in(shown):
                grad.zero_()
            if is_sharded:
                leaf.grad = None
            if leaf.dtype != grad.dtype:
                leaf.grad_dtype = leaf.dtype

    def show_accumulated(self, trained: Iterable[int], drop: Callable[[int], None]) -> None:
        """Gradients stay in the unit: let `.grad` show it; `take_accumulated` drops those that were zeroed since."""
        self._unreduced, self._drop = Unreduced((index, self.shards[index]) for index in trained), drop

    def take_accumulated(self) -> None:
        self._end_sharing()
        for index in self._unreduced.end():
            self._drop(index)

    def add(self, parts: list[tuple[int, Tensor]]) -> None:
        """Add pieces of a mean gradient to `.grad` of their parameters, by index; their memory is given away.

        Hooks of `register_hook` get their piece first, as a DTensor. Hooks of `register_post_accumulate_grad_hook` run
        here, while the backward of other units may still be running: an optimizer's step in one of them frees the
        gradient early.
        """
        for index, part in parts:
            p = self.shards[index]
            if hooks_of(p):
                call_hooks(p, dtensors.like(part, p), self.places[index][0].name)
            if p.grad is None:
                p.grad = dtensors.like(part if part.numel() else empty(part), p)
            else:
                with torch.no_grad():
                    dtensors.local_of(p.grad).add_(part)
        call_post_hooks(self.shards[index] for index, _ in parts)
