"""Those of FullyShardedDataParallel's methods that look at the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from torch import nn

from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.state import full


class StateMethods(nn.Module):
    """A base of FullyShardedDataParallel. All of them are collective: every rank has to call them."""

    _unit: FlatUnit | None

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        wrapped = self._modules["_fsdp_wrapped_module"]
        assert wrapped is not None
        return wrapped

    def check_is_root(self) -> bool:
        raise NotImplementedError

    @classmethod
    def fsdp_modules(cls, module: nn.Module, root_only: bool = False) -> list[Self]:
        """All instances in `module`, itself included; with `root_only`, the outermost that have run as roots."""
        found = [m for m in module.modules() if isinstance(m, cls)]
        return [m for m in found if m.check_is_root()] if root_only else found

    @staticmethod
    @contextmanager
    def summon_full_params(module: nn.Module, recurse: bool = True, writeback: bool = True) -> Iterator[None]:
        """Have whole parameters under their original names; with `writeback`, changes to them stay."""
        instances = StateMethods.fsdp_modules(module)
        with ExitStack() as stack:
            for instance in instances if recurse else [m for m in instances if m is module]:
                if instance._unit is not None:
                    stack.enter_context(full.exposed(instance.module, instance._unit, writeback))
            yield

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The full state under the original names, a copy on every rank; to be called on every rank."""
        return full.state_dict(self.module, self._unit, destination, prefix, keep_vars)
