"""Units and their wrappers as state dicts see them: FSDP1's have what is declared here, and more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from minifsdp.comm import Group
from minifsdp.contents import Contents
from minifsdp.flat_param import Place


class View(Protocol):
    places: list[list[Place]]


class Unit(Protocol):
    """A flat buffer of parameters; `shards` are this rank's parts of it."""

    contents: Contents
    shards: list[nn.Parameter]
    device: torch.device

    @property
    def group(self) -> Group: ...

    @property
    def title(self) -> str: ...

    @property
    def view(self) -> View: ...


class Wrapper(nn.Module):
    """A module around another one, and the unit of its parameters.

    Attributes:
        state_dict_type: takes a model, a type and its configuration; inside the `with`, the wrappers in the model
            give and take state dicts of this type.
    """

    state_dict_type: ClassVar[Callable[..., AbstractContextManager[None]]]
    process_group: Group
    sharding_strategy: Any
    _groups: Any
    _device_mesh: Any
    _unit: Unit | None
    _use_orig_params: bool
    _summoned: Any  # not None while the parameters are whole

    @property
    def _places(self) -> list[Place]:
        """The places that use the unit's parameters; a tied one has several."""
        return [] if self._unit is None else [place for users in self._unit.view.places for place in users]


def wrappers_in(model: nn.Module) -> list[Wrapper]:
    """All wrappers in `model`, itself included."""
    return [each for each in model.modules() if isinstance(each, Wrapper)]
