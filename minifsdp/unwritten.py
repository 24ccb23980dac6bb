"""Memory that has not been initialized: its old content could pass for values without any error.

`marking` fills newly allocated memory with bits that no initialization writes. A single element with these bits shows
that the tensor is still unwritten:

    floating point    a NaN with all bits set; torch's own NaN has others
    integers          0xA5 in every byte
    bool              0xA5, which is neither False nor True
    other one byte    0xA5 in all elements, and no operation in place since: every value may be meant
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.local_parts import local_of
from minifsdp.private import TorchDispatchMode, version_of

marks = 0
"""How often memory has been marked in this process."""

ALLOCATING = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BYTE = 0xA5


def mark_unwritten(tensor: Tensor) -> Tensor:
    """Fill a tensor, or this rank's part of it, with bits that no initialization writes; not an operation in place."""
    global marks
    if (bits := _bits(tensor)) is not None:
        marks += 1
        bits.fill_(_mark(tensor.dtype))
    return tensor


def is_unwritten(tensor: Tensor) -> bool:
    """True if any element has not been written since `mark_unwritten`; the host waits for the answer."""
    return bool(unwritten_in({"": tensor}))


@torch.no_grad()
def unwritten_in(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """The names of the tensors with elements not written since `mark_unwritten`; the host waits once for a device."""
    found: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if tensor is not None and (answer := _shows_mark(tensor)) is not None:
            found[answer.device][name] = answer
    shows = {
        name: answer
        for each in found.values()
        for name, answer in zip(each, torch.stack([*each.values()]).tolist(), strict=True)
    }
    return [name for name in tensors if shows.get(name)]


def check_written(tensors: Mapping[str, Tensor | None], cure: str) -> None:
    """Check that all of the tensors have values.

    Raises:
        RuntimeError: some have not; the error names them, and ends with the cure.
    """
    if names := unwritten_in(tensors):
        raise RuntimeError(f"nothing has initialized {', '.join(names)}: {cure}")


@contextmanager
def marking() -> Iterator[None]:
    """Mark all memory that is allocated inside the `with`, by `to_empty`, `torch.empty` and the like.

    In another dtype, what is unwritten stays so.
    """
    if _Marking.runs:
        yield
        return
    _Marking.runs = True
    try:
        with _Marking():  # type: ignore[no-untyped-call]
            yield
    finally:
        _Marking.runs = False


class _Marking(TorchDispatchMode):
    runs = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in ALLOCATING:
            mark_unwritten(result)
        elif name == "_to_copy" and result.dtype is not args[0].dtype and result.is_floating_point():
            before, after = _bits(args[0]), _bits(result)
            if before is not None and after is not None and args[0].is_floating_point():
                after.masked_fill_((before == _mark(args[0].dtype)).to(after.device), _mark(result.dtype))
        return result


def _bits(tensor: Tensor) -> Tensor | None:
    """The bits of this rank's part as integers; None if it has no memory of its own, or a class that hides it."""
    local = local_of(tensor)
    if type(local) not in (Tensor, nn.Parameter) or local.layout is not torch.strided or local.is_meta:
        return None
    if not local.numel() or local.is_quantized:
        return None
    real = torch.view_as_real(local.data) if local.is_complex() else local.data
    return real.view(_INTEGERS[real.itemsize])


def _mark(dtype: torch.dtype) -> int:
    integer = _INTEGERS[dtype.to_real().itemsize]
    if dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex):
        return torch.iinfo(integer).max
    return int.from_bytes([_BYTE] * integer.itemsize, "little", signed=integer.is_signed)


def _shows_mark(tensor: Tensor) -> Tensor | None:
    """True in a tensor of one element, if any element is unwritten; without memory for the other elements of a float.

    None: it has none.
    """
    bits, mark = _bits(tensor), _mark(tensor.dtype)
    if bits is None:
        return None
    if tensor.itemsize == 1 and tensor.dtype is not torch.bool:
        return None if version_of(local_of(tensor)) else (bits == mark).all()
    return bits.amax() == mark if mark == torch.iinfo(bits.dtype).max else (bits == mark).any()
