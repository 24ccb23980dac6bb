"""Exercise 4.2: Parameters as views."""

from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minifsdp import device
from minifsdp.course.workshop.checking import AnswerError, check, describe, expect
from minifsdp.course.workshop.placing import garbage
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.layout import Layout

from .shared import GARBAGE, WHOLE_N, numbers, total


@reference(
    "4.2",
    hints=(
        "`torch.split(full, [*sizes, padding])` cuts the buffer into one view per parameter and one of the padding; "
        "`.view(p.shape)` gives each its shape.",
        "Per parameter, in this order: `view.copy_(p.data)`, then `p.data = view`, which lets go of the old memory. "
        "What `device.empty` hands out holds garbage: the padding needs its own `zero_()`.",
    ),
    forbids=(FlatParameter.__init__, Layout.__init__),
)
def flatten_parameters(params: list[nn.Parameter], ranks: int) -> Tensor:
    """Move parameters into one buffer whose size is divisible by `ranks`, and make each a view of it.

    Afterwards each `p.data` is a contiguous view of the buffer with p's shape and values, and the
    old memory is freed. The buffer is the only allocation besides the originals: make no second
    buffer and no copy of a parameter.

    Args:
        params: parameters of one dtype on one device, each listed once, of any shapes and strides.
        ranks: N.

    Returns:
        The buffer [numel + padding], allocated by `device.empty` with the role "unsharded", of the
        parameters' dtype and without requires_grad. It holds the elements of the parameters in
        order, those of each parameter in row-major order, and zeros at the end.
    """
    sizes = [p.numel() for p in params]
    padding = -sum(sizes) % ranks
    full = device.empty(sum(sizes) + padding, params[0].dtype, "unsharded", params[0].device)
    *parts, rest = torch.split(full, [*sizes, padding])
    for p, part in zip(params, parts, strict=True):
        view = part.view(p.shape)
        view.copy_(p.data)
        p.data = view
    rest.zero_()
    return full


@check("4.2")
def check_flatten_parameters(answer, variant):
    """One buffer, and no copy beside it; zeros at its end; each parameter a view of it; the old memory is gone."""
    for ranks in (variant.ranks, 4, 16):
        for dtype in (torch.float32, torch.bfloat16):
            for divides in (False, True):
                flattened(answer, variant, ranks, dtype, divides)
        flattened_alone(answer, ranks)


def flattened_alone(answer, ranks):
    """What could stay where it is: one contiguous parameter, and nothing to pad."""
    p = nn.Parameter(numbers(2 * ranks, torch.float32).view(2, ranks))
    value = p.detach().clone()
    with handed_out() as buffers:
        full = answer([p], ranks)
    where = f"of a single parameter {list(value.shape)} over {ranks} ranks"
    role = buffers.get(full.untyped_storage().data_ptr()) if isinstance(full, torch.Tensor) else None
    expect(
        f"the buffer {where} comes from",
        f'`device.empty`, as "{role}"' if role else "elsewhere",
        '`device.empty`, as "unsharded"',
        slip="it is moved even where nothing is to be padded: by its role the ledger knows the buffer",
    )
    expect(f"the buffer {where}", full, value.reshape(-1))
    expect(f"the parameter {where}", p.detach(), value)


def flattened(answer, variant, ranks, dtype, divides):
    size = variant.size
    shapes = [(2, 5), (size, 3), (size,), ()]
    if divides:
        shapes.append(((-sum(torch.Size(shape).numel() for shape in shapes)) % ranks or ranks,))
    with garbage(), Ledger() as ledger, handed_out() as buffers:
        torch.manual_seed(variant.seed)
        # the first one lies transposed in memory, as a weight that was loaded from another framework does
        values = [torch.randn(shape[::-1]).t() if i == 0 else torch.randn(shape) for i, shape in enumerate(shapes)]
        params = [nn.Parameter(value.to(dtype)) for value in values]
        params[1].requires_grad_(False)
        params[2].grad = gradient = torch.ones_like(params[2])
        trained = [p.requires_grad for p in params]
        del values
        kept = [p.detach().clone(memory_format=torch.preserve_format) for p in params]
        pointers = [p.data_ptr() for p in params]
        before = total(ledger)
        old = sum(p.numel() * p.element_size() for p in params)
        ledger.reset_peaks()
        given = list(params)
        full = answer(given, ranks)
        peak, left = ledger.peak.total, total(ledger)
    where = f"of {[list(shape) for shape in shapes]} over {ranks} ranks"
    sizes = [value.numel() for value in kept]
    padding = -sum(sizes) % ranks
    expect(
        f"entries of `params` that are the parameters still {where}",
        [a is b for a, b in zip(given, params, strict=False)],
        [True] * len(params),
        slip="the model holds the parameters that it has: set `p.data`; another nn.Parameter, or a change of the list, "
        "does not reach it",
    )
    expect(
        f"requires_grad of the parameters {where}",
        [p.requires_grad for p in params],
        trained,
        slip="they are moved, and are otherwise as they were",
    )
    slip = "its value is moved, its .grad stays"
    expect(f"whether a parameter has its .grad still {where}", params[2].grad is gradient, True, slip=slip)
    check_buffer(full, kept, padding, ranks, where)
    offset = 0
    for i, (p, value) in enumerate(zip(params, kept, strict=True)):
        inside = p.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        moved = p.data_ptr() != pointers[i]
        slip = "`p.data` is a copy of the view: no `clone`, `contiguous` or `to` in between"
        if not moved:
            slip = "the parameter still owns its old memory: set `p.data`; a new name for the view changes no module"
        place = f"offset {p.storage_offset()} of the buffer" if inside else "memory of its own"
        expect(f"parameter {i} {where} lies at", place, f"offset {offset} of the buffer", slip=slip)
        expect(f"parameter {i} {where}", p.detach(), value, slip="the view has not the parameter's shape and order")
        offset += value.numel()
    with torch.no_grad():
        full.fill_(7)
    expect(f"a write to the buffer shows in all parameters {where}", all(bool((p == 7).all()) for p in params), True)
    item = full.element_size()
    whole = (sum(sizes) + padding) * item
    expect(
        f"bytes left {where}",
        left - (before - old),
        whole,
        slips={"the old memory is still there": whole + old},
        slip="one buffer is all that stays",
    )
    role = buffers.get(full.untyped_storage().data_ptr())
    expect(
        f"the buffer {where} comes from",
        f'`device.empty`, as "{role}"' if role else "elsewhere",
        '`device.empty`, as "unsharded"',
        slip="the ledger does not know this buffer, and counts it as activations" if role is None else None,
    )
    if peak - before > whole:
        slip = "a temporary copy of a parameter: `view.copy_(p.data)` needs none, whatever the strides of `p.data`"
        if peak - before >= whole + sum(sizes) * item:
            slip = "two copies of the buffer: copy each parameter straight into its place"
        what = f"bytes at the peak beside the parameters {where}"
        raise AnswerError(f"{what}: expected {whole:,}, got {peak - before:,}\nlikely slip: {slip}")


@contextmanager
def handed_out():
    """The roles of what `device.empty` hands out, by where the memory begins."""
    roles = {}

    def note(buffer, role):
        roles[buffer.untyped_storage().data_ptr()] = role

    device.buffer_observers.append(note)
    try:
        yield roles
    finally:
        device.buffer_observers.remove(note)


def check_buffer(full, values, padding, ranks, where):
    if not isinstance(full, torch.Tensor) or full.dim() != 1:
        raise AnswerError(f"buffer {where}: expected a tensor [numel + padding], got {describe(full)}")
    end = values[0].new_zeros(padding)
    wanted = torch.cat([*(value.reshape(-1) for value in values), end])
    numel = wanted.numel() - padding
    each = [torch.cat([v.reshape(-1), v.new_zeros(-v.numel() % ranks)]) for v in values]
    slip = None
    if full.dtype != wanted.dtype:
        slip = "another dtype: the buffer has the parameters' dtype, not torch's default"
    elif full.numel() == wanted.numel() and bool(full[:numel].isnan().any()):
        slip = "the old values are lost: copy them into the view before `p.data` is the view"
    elif full.numel() == wanted.numel() and bool(full[numel:].isnan().any()):
        slip = GARBAGE
    expect(
        f"buffer {where}",
        full,
        wanted,
        slips={
            "every parameter is padded by itself: the padding belongs once at the end": torch.cat(each),
            "no padding": wanted[:numel],
            "elements in the order of memory: parameter 0 is a transposed view, its rows are not contiguous": torch.cat(
                [*(value.t().reshape(-1) if i == 0 else value.reshape(-1) for i, value in enumerate(values)), end]
            ),
            **({} if padding else {WHOLE_N: torch.cat([wanted, wanted.new_zeros(ranks)])}),
        },
        slip=slip,
    )
    expect(
        f"requires_grad of the buffer {where}",
        full.requires_grad,
        False,
        slip="autograd has recorded the copy: `.data`",
    )
