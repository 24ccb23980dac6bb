"""A unit: parameters that are gathered, freed and reduced together.

A unit knows *how*: a handful of verbs and the state between them. *When* is the schedule's business.

    SHARDED --start_gather--> GATHERING --wait_gather--> UNSHARDED --free--> SHARDED
    take_gradient, for each leaf --> start_reduce --> wait_reduce --> the shards' `.grad`

Autograd sees the *leaves*: one Parameter per original parameter, the same object for the life of the model, a view of
memory that is there only while the unit is unsharded. Leaves sit in their module's `__dict__`, not among its
parameters, so that an optimizer sees the shards and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from minifsdp import device
from minifsdp.comm import Done, Handle
from minifsdp.flat_param import Place
from minifsdp.private import tree_leaves


class State(Enum):
    SHARDED = 0
    GATHERING = 1
    UNSHARDED = 2


SHARDED, GATHERING, UNSHARDED = State


class Absent(torch.Tensor):
    """Stands for a parameter while its unit is sharded: has its shape and dtype, computes nothing and says why."""

    unit: Unit
    parameter: str

    harmless = frozenset(
        ["__get__", "__len__", "__repr__", "detach", "dim", "is_floating_point", "numel", "size", "stride"]
    )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the parameter is when it is there."""
        return self.unit.device

    @classmethod
    def like(cls, leaf: torch.Tensor) -> Absent:
        return torch.empty_like(leaf, device="meta").as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in cls.harmless:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        absent = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        if func is torch.Tensor.to and absent is not args[0]:
            return args[0].to(absent.device, absent.dtype)
        raise sharded_error(func.__name__, absent.parameter, absent.unit)


class Unit(ABC):
    """Base of all kinds of unit.

    Attributes:
        name: what plots call it.
        title: what messages call it: where it is in the model, once the outermost unit is known.
        leaves: the Parameters that the computation uses, whole while the unit is UNSHARDED.
        trained: which of them want a gradient.
        shards: the Parameters that the optimizer updates, 1/N of the leaves' elements.
        device: where the computation runs.
        reshard_after_forward: free the leaves after forward and gather them again for backward.
        lingers: keep the memory and its values when it is freed: a backward that nothing announces may read them.
        is_root: set for the outermost unit, which stays whole from its forward to the end of its backward.
    """

    leaves: list[nn.Parameter]
    trained: list[int]
    shards: list[nn.Parameter]
    device: torch.device

    def __init__(self, name: str, reshard_after_forward: bool = True) -> None:
        self.name = self.title = name
        self.state = SHARDED
        self.reshard_after_forward = reshard_after_forward
        self.is_root = self.lingers = False
        self._gathering: Handle | Done | None = None
        self._reducing: Handle | None = None

    @property
    def freed_after_forward(self) -> bool:
        return self.reshard_after_forward and not self.is_root

    # The verbs

    def start_gather(self) -> None:
        """Allocate the unsharded memory and start to fill it; nothing if that was done already."""
        if self.state is SHARDED:
            self._gathering = self._gather()
            self.state = GATHERING

    def wait_gather(self) -> None:
        """After this the module computes with whole parameters; on CUDA the current stream waits, not the host."""
        if self.state is GATHERING:
            assert self._gathering is not None, "the gather has returned no handle"
            self._gathering.wait()
            self._gathering = None
            self._show()
            self.state = UNSHARDED

    def free(self) -> None:
        """Give the unsharded memory back, which kernels queued on the current stream may still be reading."""
        if self.state is GATHERING:  # prefetched and never used
            self.wait_gather()
        if self.state is UNSHARDED:
            self._hide()
            if not self.lingers:
                self._release()
            self.state = SHARDED

    @abstractmethod
    def take_gradient(self, index: int) -> None:
        """Add the gradient of leaf `index` to the unit's unsharded gradient; the leaf's `.grad` becomes None."""

    @property
    @abstractmethod
    def has_gradient(self) -> bool:
        """Whether gradients have been taken that no reduction has had yet."""

    def start_reduce(self) -> None:
        """Start the reduction of what has been taken; leaves without a gradient count as zero."""
        self.wait_reduce()
        self.settle()
        self._reducing = self._reduce()

    def wait_reduce(self) -> None:
        """After this the unsharded gradient is free, and the mean in the shards' `.grad` or on its way there."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None
            self._accumulate()

    def settle(self) -> None:  # noqa: B027
        """After this the mean gradient is added to the shards' `.grad`, if `wait_reduce` has not done it."""

    def release_shards(self) -> None:  # noqa: B027
        """After this no gather reads the shards any longer, and the host may write to them."""

    def follow(self) -> None:  # noqa: B027
        """Take over what has changed in the shards since the last step, such as whether they are trained."""

    def lend(self) -> None:  # noqa: B027
        """The wrapped module's forward begins: what `parameters()` of it yields may be the leaves until `take_back`."""

    def take_back(self) -> None:  # noqa: B027
        """That forward has ended, or raised; of a unit that stays whole the outermost one. Perhaps without `lend`."""

    def check_unchanged(self) -> None:  # noqa: B027
        """A backward begins.

        Raises:
            AssertionError: the shards were changed since forward, which computed with other values.
        """

    def show_accumulated(self) -> None:  # noqa: B027
        """After a backward inside `no_sync`: let what has been taken be the shards' `.grad` until the next backward."""

    def take_accumulated(self, more: bool = False) -> None:  # noqa: B027
        """The end of `show_accumulated`: forget what is not there any longer. `more`: this backward only adds to it."""

    # What a kind of unit has to say

    @abstractmethod
    def _gather(self) -> Handle | Done: ...

    @abstractmethod
    def _release(self) -> None: ...

    @abstractmethod
    def _reduce(self) -> Handle: ...

    @abstractmethod
    def _accumulate(self) -> None: ...

    # Leaves in and out of their modules

    def _adopt(self, leaves: list[nn.Parameter], places: list[list[Place]]) -> None:
        """Take the original parameters out of their modules and let `leaves` come and go in their stead."""
        self.leaves = leaves
        self.places = places
        self._train([leaf.requires_grad for leaf in leaves])
        found: dict[nn.Module, tuple[dict[str, Any], dict[str, Any]]] = {}
        for leaf, users in zip(leaves, places, strict=True):
            absent = Absent.like(leaf)
            absent.unit, absent.parameter = self, users[0].name
            for place in users:
                del place.module._parameters[place.attribute]
                whole, sharded = found.setdefault(place.module, ({}, {}))
                whole[place.attribute], sharded[place.attribute] = leaf, absent
        # For each module its attributes, and those of them that come and go: while the unit is whole, and while not.
        self._users = [(module.__dict__, *both) for module, both in found.items()]
        self._hide()

    def _train(self, wanted: Sequence[bool]) -> None:
        """Which leaves are to get a gradient."""
        for leaf, each in zip(self.leaves, wanted, strict=True):
            leaf.requires_grad_(each)
        self.trained = [index for index, each in enumerate(wanted) if each]

    def _show(self) -> None:
        for attributes, whole, _ in self._users:
            attributes.update(whole)

    def _hide(self) -> None:
        for attributes, _, sharded in self._users:
            attributes.update(sharded)


def add_gradient(shard: nn.Parameter, gradient: torch.Tensor) -> None:
    """Accumulate `gradient` in `shard.grad`, whose memory it becomes if there is none yet."""
    if shard.grad is None:
        shard.grad = gradient
    else:
        shard.grad.add_(gradient)
        device.free(gradient)


def sharded_error(what: str, parameters: str, unit: Unit) -> RuntimeError:
    """Parameters are wanted while their unit is sharded: says which, of which unit, and how to have them whole."""
    return RuntimeError(
        f"{what} needs {parameters} of the FSDP unit {unit.title}, which is sharded; its parameters are whole only "
        "inside its forward. Call the wrapped module itself; for another method, such as generate(), use "
        "register_fsdp_forward_method(model, 'generate') or FullyShardedDataParallel.summon_full_params."
    )
