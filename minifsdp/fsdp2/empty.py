"""The gradient of a rank that has no row of a parameter: its norm is known, which torch does not compute.

`torch.nn.utils.clip_grad_norm_` computes the norm of each rank's part first. The infinity norm of nothing is an error
in torch, on this rank alone, while the others wait for it. As a part of a larger tensor it is 0: nothing is larger.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minifsdp.private import DisableTorchFunctionSubclass, tree_map

_ORDER = 2.0  # torch's default


class Empty(Tensor):
    """A tensor without elements. In all operations but norms it is a plain one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = func.overloadpacket.__name__
        args, kwargs = tree_map(_plain, (args, kwargs or {}))
        if name == "linalg_vector_norm" and kwargs.get("dim") is None and len(args) < 3:
            return _norm(args[0], *args[1:], **kwargs)
        if name == "_foreach_norm":
            return [_norm(t, *args[1:], **kwargs) for t in args[0]]
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return empty(_plain(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def empty(t: Tensor) -> Tensor:
    """`t`, which has no elements, as one that has norms."""
    made: Tensor = t.as_subclass(Empty)
    return made


def _plain(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device=value.device) if isinstance(value, Empty) else value


def _norm(t: Tensor, ord: Any = _ORDER, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
    """As a part of a whole: the identity of the sum, or of the minimum if the order is negative."""
    if t.numel():
        norm: Tensor = torch.linalg.vector_norm(t, ord, dtype=dtype)
        return norm
    return torch.full((), 0.0 if float(ord) >= 0 else torch.inf, dtype=dtype or t.dtype, device=t.device)
