"""Memory accesses and FLOPs of an operator, from its schema, arguments and return value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from minifsdp.instruments.watch.storages import leaves_in, storages_in
from minifsdp.private import identity, schema_of

_aten = torch.ops.aten
_NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::lift_fresh")
_OVERWRITES = ("aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_")


class Work(NamedTuple):
    """Attributes:
    reads: tensors whose content the operator reads.
    writes: tensors that it changes or creates.
    runs: True if it launches a kernel; False for a view or uninitialized memory.
    """

    reads: list[Tensor]
    writes: list[Tensor]
    runs: bool

    @property
    def nbytes(self) -> int:
        """Bytes read and written. An expanded tensor counts at most its storage."""
        tensors = (*self.reads, *self.writes)
        return sum(min([t.numel() * t.element_size(), *(s.nbytes() for s in storages_in(t))]) for t in tensors)

    @property
    def dtype_size(self) -> int:
        """Element size in bytes of the first floating-point output; 4 if there is none."""
        return next((t.element_size() for t in self.writes if t.is_floating_point()), 4)


def work_of(func: Any, args: Any, kwargs: Any, returned: Any) -> Work:
    """The work that an operator has done."""
    given = _tensors((args, kwargs))
    old = {identity(storage) for storage in storages_in(given)}
    writes: list[Tensor] = []
    unread = given if _wants_shapes_only(func) else []
    for at, name, is_overwritten in _written(func):
        changed = _tensors(args[at] if at < len(args) else kwargs.get(name))
        writes += changed
        unread = unread + changed if is_overwritten else unread
    writes += [t for t in _tensors(returned) if not old.issuperset(map(identity, storages_in(t)))]
    reads = [t for t in given if not any(t is other for other in unread)] if unread else given
    in_name_only = func.name().startswith(_NO_KERNEL) or torch.Tag.inplace_view in func.tags
    return Work(reads, writes, bool(writes) and not in_name_only)


def flops_of(func: Any, args: Any, kwargs: Any, returned: Any) -> float:
    """Floating-point operations of matrix products, convolutions and attention; 0 for other operators."""
    count = _FLOPS.get(func._overloadpacket)
    return count(*args, **kwargs, out_val=returned) if count else 0


@cache
def _written(func: Any) -> list[tuple[int, str, bool]]:
    """Place and name of each argument that is written, and whether all of it is: `self`, `out`, `_foreach_`'s lists."""
    overwrites = func.name().startswith(_OVERWRITES)
    arguments = enumerate(schema_of(func).arguments)
    written = [(at, each) for at, each in arguments if each.alias_info and each.alias_info.is_write]
    return [(at, each.name, bool(each.is_out or overwrites)) for at, each in written]


@cache
def _wants_shapes_only(func: Any) -> bool:
    return bool(schema_of(func).name.endswith("_like") or schema_of(func).name.startswith("aten::new_"))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_in(tree) if isinstance(leaf, Tensor)]


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, out_val: Any) -> int:
    """Forward's operations for each requested gradient. (torch's own count ignores the groups of a convolution.)"""
    needs_input, needs_weight, _ = rest[-1]
    return 2 * (grad.numel() // grad.shape[1]) * weight.numel() * (int(needs_input) + int(needs_weight))


_FLOPS: Mapping[Any, Callable[..., Any]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
    _aten.convolution_backward: _convolution_backward,
}
