"""A unit's tensors in modules and the optimizer: leaves or their stand-ins, and shards.

                   modules                                  optimizer
    sharded        stand-ins, which compute nothing         shard [P / N]
    unsharded      leaves: views of `full` [P]              shard [P / N]
    exposed        parameters: views of a buffer [P]        nothing of it, it is outside forward and backward

(The original parameters instead of the shard: torch_api/original_params.py.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minifsdp import device
from minifsdp.flat_param import FlatParameter, Place
from minifsdp.fsdp.absent import Absent, Owner
from minifsdp.fsdp.gradient import Gradient
from minifsdp.local_parts import has_post_hooks
from minifsdp.private import hooks_of, post_hooks_of, version_of
from minifsdp.whole_tensors import note_flat


class View:
    """Leaves for modules, which are present only at times, and a shard of each for the optimizer.

    Attributes:
        places: the places where each parameter is used; a tied parameter has several.
        shards: the Parameters that the optimizer updates.
    """

    def __init__(self, places: list[list[Place]], shards: list[nn.Parameter]) -> None:
        self.places, self.shards = places, shards
        self._users: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._delivered: list[nn.Parameter] = []

    @property
    def trained(self) -> list[bool]:
        """For each leaf whether it is to get a gradient."""
        return [p.requires_grad for p in self.shards]

    def take_delivered(self) -> list[nn.Parameter]:
        """The shards that have been given a gradient since the last call."""
        delivered, self._delivered = self._delivered, []
        return delivered

    def refresh(self) -> None:
        """Take over what has become of the optimizer's parameters since the last step."""

    # Modules

    def attach(self, unit: Owner) -> None:
        """Take the original parameters out of their modules, and let the unit's leaves replace them."""
        found: dict[nn.Module, tuple[dict[str, Any], dict[str, Any]]] = {}
        for leaf, users in zip(unit.leaves, self.places, strict=True):
            absent = Absent.like(leaf)
            absent.unit, absent.parameter = unit, users[0].name
            for place in users:
                del place.module._parameters[place.attribute]
                unsharded, sharded = found.setdefault(place.module, ({}, {}))
                unsharded[place.attribute], sharded[place.attribute] = leaf, absent
        # For each module its attributes, and those that replace each other: while the unit is unsharded, and sharded.
        self._users = [(module.__dict__, *both) for module, both in found.items()]
        self.hide()

    def show(self) -> None:
        """The unit is unsharded."""
        for attributes, unsharded, _ in self._users:
            attributes.update(unsharded)

    def hide(self) -> None:
        """The unit is sharded."""
        for attributes, _, sharded in self._users:
            attributes.update(sharded)

    def run(self, is_running: bool) -> None:
        """The outermost forward begins, or has ended, or raised: in between, reading sharded parameters is refused."""

    def before_forward(self) -> None:
        """The wrapped module's forward begins: until `after_forward`, its `parameters()` may yield the leaves."""

    def after_forward(self) -> None:
        """That forward has ended, or raised. Perhaps without `before_forward`."""

    def share_gradients(self) -> None:
        """No backward runs: where modules have leaves outside forward, let their `.grad` be that of the shards."""

    def take_accumulated(self) -> None:
        """A backward begins: forget what is not there any longer of an unsharded gradient that was shown."""


class FlatView(View):
    """The flat shard for the optimizer.

    Attributes:
        shows_originals: modules currently have the original parameters, outside forward and backward.
        stays: leaves are always present, because they are views of the shard, which is the whole parameter.
    """

    def __init__(self, flat: FlatParameter) -> None:
        super().__init__(flat.places, [flat.shard])
        self.flat = flat
        self.shows_originals = self.stays = False
        self._shown: Sequence[tuple[int, nn.Parameter, Tensor, int, Tensor | None]] = ()

    def attach(self, unit: Owner) -> None:
        super().attach(unit)
        if self.flat.layout.ranks > 1 or self.shards[0] is self.flat.shard:
            note_flat(self.shards, self.flat.layout.ranks)

    @property
    def trained(self) -> list[bool]:
        return [self.flat.shard.requires_grad] * len(self.places)

    def hide(self) -> None:
        if self.stays:
            self.show()
        else:
            super().hide()

    def show_originals(self, full: Tensor) -> None:
        """Let the modules have their parameters again, as views of `full` [P]."""
        for users, view in zip(self.places, self.flat.unflatten(full), strict=True):
            p = nn.Parameter(view, self.flat.shard.requires_grad)
            for place in users:
                place.module._parameters[place.attribute] = place.module.__dict__[place.attribute] = p
        self.shows_originals = True

    def hide_originals(self) -> None:
        """The end of `show_originals`."""
        self.shows_originals = False
        for place in (place for users in self.places for place in users):
            del place.module._parameters[place.attribute]
        self.hide()

    def is_changed(self, index: int) -> bool:
        """True if a user has given parameter `index` other memory, or replaced it."""
        return False

    def slices(self, shard: Tensor) -> list[Tensor]:
        """Each of `shards`' part of a tensor [P / N] of the shard's layout."""
        return [shard]

    def add(self, mean: Tensor) -> None:
        """Add a mean gradient [P / N] to `.grad` of the shards; its memory is given away.

        First come the shards' own hooks: autograd, which would call them, reaches the leaves only. They get the mean,
        as this rank has it, that of an original parameter in its shape. (Torch calls those of a flat parameter with the
        rank's own gradient, which is not reduced yet, and those of original parameters never.) They run on every rank,
        also where nothing of a parameter is here: they may communicate.
        """
        kept = False
        for index, (p, part) in enumerate(zip(self.shards, self.slices(mean), strict=True)):
            if p.requires_grad and hooks_of(p):
                self._call_hooks(index, part)
            if not p.requires_grad or not (
                p.numel() or has_post_hooks(p) or not self.flat.layout.shapes[index].numel()
            ):
                continue
            if p.grad is not None:
                p.grad.add_(part)
            elif p.numel():
                p.grad, kept = part, True
            else:
                p.grad = torch.empty_like(p)
            self._delivered.append(p)
        if not kept:
            device.free(mean)

    def _call_hooks(self, index: int, part: Tensor) -> None:
        call_hooks(self.shards[index], part, f"the flat parameter of {self.places[0][0].name}")

    # Between a backward inside `no_sync` and the next backward, the unsharded gradient [P] is the `.grad` of a shard
    # [P / N]. `zero_grad` drops it as any other; a step with it is refused. The mean of earlier backwards is put aside
    # meanwhile, and goes with it; in torch it stays (_flat_param.py, `prepare_gradient_for_backward`).

    def show_accumulated(self, gradient: Gradient) -> None:
        """Let what has been collected be the shards' `.grad`, where it can be seen, changed and dropped."""
        self._gradient = gradient
        there = [(i, p, part) for i, (p, part) in enumerate(zip(self.shards, self._collected(gradient), strict=True))]
        self._shown = [(i, p, part, version_of(part), p.grad) for i, p, part in there if part is not None]
        for _, p, part, *_ in self._shown:
            shard, p.data = p.data, part  # when it is set a gradient has to have its parameter's shape
            p.grad = part
            p.data = shard

    def take_accumulated(self) -> None:
        shown, self._shown = self._shown, ()
        for index, p, part, version, mean in shown:
            if p.grad is not part:
                self._drop(index)
                continue
            p.grad = mean
            if mean is not None and version_of(part) > version:  # zeroed in place? A host that asked would have to wait
                mean.masked_fill_(~part.any().to(mean.device), 0)

    def _collected(self, gradient: Gradient) -> list[Tensor | None]:
        """The part of each of `shards`."""
        return [gradient.full]

    def _drop(self, index: int) -> None:
        self._gradient.drop()


@torch.no_grad()
def call_hooks(p: nn.Parameter, gradient: Tensor, name: str) -> None:
    """Call the hooks of `register_hook` on a gradient on its way to `p`; they may change it, or be removed.

    Raises:
        RuntimeError: one returns something other than a gradient of this kind, or does with a DTensor what torch's
            operators do not.
    """
    for hook in [*hooks_of(p).values()]:
        try:
            changed = hook(gradient)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(gradient, DTensor):
                _explain(error, gradient, name)
            raise
        if changed is None:
            continue
        if not isinstance(changed, type(gradient)) or changed.shape != gradient.shape:
            raise RuntimeError(
                f"a hook of register_hook on {name} got a {type(gradient).__name__} {tuple(gradient.shape)} and "
                f"returned a {type(changed).__name__} {tuple(changed.shape)}: return one of the same type and shape"
            )
        gradient.copy_(changed)


def _explain(error: Exception, gradient: DTensor, name: str) -> NoReturn:
    """DTensors cannot be written to by index, nor computed with together with plain tensors."""
    reason = str(error).partition("\n")[0].rstrip(".!")
    raise RuntimeError(
        f"a hook of register_hook on {name} raised {type(error).__name__} ({reason}): its gradient is a DTensor "
        f"{tuple(gradient.shape)}. Instead of g[:5] = 0, return g * mask, where mask is a whole tensor as a DTensor, "
        "distribute_tensor(mask, g.device_mesh, g.placements)"
    ) from error


def call_post_hooks(shards: Iterable[nn.Parameter]) -> None:
    """Call the hooks of `register_post_accumulate_grad_hook`."""
    for p in shards:
        for hook in [*post_hooks_of(p).values()]:
            if p.grad is not None:
                hook(p)
