"""Memory that has not been initialized: its old content could pass for values without any error.

`mark_unwritten` fills such memory with bits that no initialization writes. A single element with these bits shows that
the tensor is still unwritten:

    floating point    a NaN of either sign, with 1100101 after the exponent; torch's and CUDA's have other bits
    integers          0xA5 in every byte
    bool              0xA5, which is neither False nor True
    other one byte    0xA5 in all elements, and no operation in place since: every value may be meant

Most operations keep the upper bits of a NaN, also casts, but not those with bfloat16. Those of other kinds are lost:
following.py marks the results again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor, nn

from minifsdp.local_parts import local_of
from minifsdp.private import DisableTorchFunctionSubclass, version_of

marks = 0
"""How often memory has been marked in this process."""
plain: set[type[Tensor]] = {Tensor, nn.Parameter}
"""Classes that hide no memory."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BYTE, _NAN, _NAN_BITS = 0xA5, 0b1100101, 7


def mark_unwritten(tensor: Tensor) -> Tensor:
    """Fill a tensor, or this rank's part of it, with bits that no initialization writes; not an operation in place."""
    global marks
    if (bits := _bits(tensor)) is not None:
        marks += 1
        bits.fill_(_mark(tensor.dtype))
    return tensor


def mark_where(tensor: Tensor, gaps: Tensor) -> None:
    """Mark elements of a tensor, or of this rank's part of it, but all or none in one byte.

    Args:
        gaps: bool, of the shape of that part or one that is expanded to it; on any device.
    """
    if (bits := _bits(tensor)) is not None:
        gaps = gaps.to(bits.device)
        gaps = gaps.any() if tensor.itemsize == 1 and tensor.dtype is not torch.bool else gaps
        bits.masked_fill_(gaps.unsqueeze(-1) if tensor.is_complex() else gaps, _mark(tensor.dtype))


def is_unwritten(tensor: Tensor) -> bool:
    """True if any element has not been written since `mark_unwritten`; the host waits for the answer."""
    return bool(unwritten_in({"": tensor}))


@torch.no_grad()
def unwritten_in(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """The names of the tensors with elements not written since `mark_unwritten`.

    The host waits once for a device, and once more if there are NaNs. Large floating-point tensors without any need no
    memory for this.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with DisableTorchFunctionSubclass():
        suspects = _true_of({name: _may_show(tensor) for name, tensor in given.items()})
        gaps = {name: gaps_in(given[name]) for name in suspects}
        return _true_of({name: None if each is None else each.any() for name, each in gaps.items()})


def check_written(tensors: Mapping[str, Tensor | None], cure: str) -> None:
    """Check that all of the tensors have values.

    Raises:
        RuntimeError: some have not; the error names them, and ends with the cure.
    """
    if names := unwritten_in(tensors):
        raise RuntimeError(f"nothing has initialized {', '.join(names)}: {cure}")


def gaps_in(tensor: Tensor) -> Tensor | None:
    """The unwritten elements of this rank's part, as a bool tensor; None: it has no memory, or is written."""
    bits, mark = _bits(tensor), _mark(tensor.dtype)
    if bits is None:
        return None
    found = bits == mark
    if tensor.itemsize == 1 and tensor.dtype is not torch.bool:
        return None if version_of(local_of(tensor)) else found.all().expand(found.shape)
    if tensor.is_floating_point() or tensor.is_complex():
        found |= bits == mark + torch.iinfo(bits.dtype).min
    return found.any(-1) if tensor.is_complex() else found


def _true_of(answers: Mapping[str, Tensor | None]) -> list[str]:
    """The names of those that are true; the host waits once for a device."""
    found: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, answer in answers.items():
        if answer is not None:
            found[answer.device][name] = answer
    true = {
        name
        for each in found.values()
        for name, answer in zip(each, torch.stack([*each.values()]).tolist(), strict=True)
        if answer
    }
    return [name for name in answers if name in true]


def _may_show(tensor: Tensor) -> Tensor | None:
    """True in a tensor of one element, if any is NaN, or an integer's is unwritten."""
    if (bits := _bits(tensor)) is None:
        return None
    if tensor.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex()):
        return bits.view(tensor.dtype.to_real()).amax().isnan()
    gaps = gaps_in(tensor)
    return None if gaps is None else gaps.any()


def _bits(tensor: Tensor) -> Tensor | None:
    """The bits of this rank's part as integers; None if it has no memory of its own, or a class that hides it."""
    local = local_of(tensor)
    if type(local) not in plain or local.layout is not torch.strided or local.is_meta:
        return None
    if not local.numel() or local.is_quantized:
        return None
    real = torch.view_as_real(local.data) if local.is_complex() else local.data
    return real.view(_INTEGERS[real.itemsize])


@cache
def _mark(dtype: torch.dtype) -> int:
    integer = _INTEGERS[dtype.to_real().itemsize]
    if dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex):
        infinity = torch.tensor(torch.inf, dtype=dtype.to_real(), device="cpu").view(integer).item()
        eps = torch.finfo(dtype).eps  # 2 to minus the number of bits after the exponent
        return int(infinity + _NAN / eps / 2**_NAN_BITS)
    return int.from_bytes([_BYTE] * integer.itemsize, "little", signed=integer.is_signed)
