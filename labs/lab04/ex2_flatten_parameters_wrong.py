"""Wrong answers to exercise 4.2, each with words that its rejection must contain."""

import torch
from torch import nn

from minifsdp import device
from minifsdp.course.workshop.wrong import wrong


@wrong("4.2", "the parameter still owns its old memory")
def flatten_parameters(params, ranks):
    """Fills the buffer with copies and leaves the parameters as they are."""
    numel = sum(p.numel() for p in params)
    full = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype)
    offset = 0
    for p in params:
        full[offset : offset + p.numel()] = p.data.reshape(-1)
        p = nn.Parameter(full[offset : offset + p.numel()].view(p.shape))
        offset += p.numel()
    return full


@wrong("4.2", "`p.data` is a copy of the view")
def flatten_parameters(params, ranks):
    """Points the parameters at slices of a copy."""
    numel = sum(p.numel() for p in params)
    padding = params[0].data.new_zeros(-numel % ranks)
    full = torch.cat([*(p.data.reshape(-1) for p in params), padding])
    for p, part in zip(params, full.clone().split([*(p.numel() for p in params), padding.numel()]), strict=False):
        p.data = part.view(p.shape)
    return full


@wrong("4.2", "uninitialized memory")
def flatten_parameters(params, ranks):
    """Forgets the padding, which holds what was in memory."""
    sizes = [p.numel() for p in params]
    full = device.empty(sum(sizes) + -sum(sizes) % ranks, params[0].dtype, "unsharded", params[0].device)
    for p, part in zip(params, torch.split(full, [*sizes, -sum(sizes) % ranks]), strict=False):
        part.view(p.shape).copy_(p.data)
        p.data = part.view(p.shape)
    return full


@wrong("4.2", "the old values are lost")
def flatten_parameters(params, ranks):
    """Lets the parameter be the view before its values were copied."""
    sizes = [p.numel() for p in params]
    full = device.empty(sum(sizes) + -sum(sizes) % ranks, params[0].dtype, "unsharded", params[0].device)
    *parts, rest = torch.split(full, [*sizes, -sum(sizes) % ranks])
    for p, part in zip(params, parts, strict=True):
        old = p.data
        p.data = part.view(old.shape)
        part.view(old.shape).copy_(p.data)
    rest.zero_()
    return full


@wrong("4.2", "elements in the order of memory")
def flatten_parameters(params, ranks):
    """Reads the parameters' memory from one end to the other, whatever their strides."""
    sizes = [p.numel() for p in params]
    full = params[0].data.new_zeros(sum(sizes) + -sum(sizes) % ranks)
    for p, part in zip(params, torch.split(full, [*sizes, -sum(sizes) % ranks]), strict=False):
        part.copy_(torch.as_strided(p.data, (p.numel(),), (1,)))
        p.data = part.as_strided(p.shape, p.stride())
    return full


@wrong("4.2", "every parameter is padded by itself")
def flatten_parameters(params, ranks):
    """Pads every parameter to a multiple of N."""
    sizes = [p.numel() + -p.numel() % ranks for p in params]
    full = params[0].data.new_zeros(sum(sizes))
    for p, part in zip(params, torch.split(full, sizes), strict=True):
        view = part[: p.numel()].view(p.shape)
        view.copy_(p.data)
        p.data = view
    return full


@wrong("4.2", "two copies of the buffer")
def flatten_parameters(params, ranks):
    """Concatenates, then copies into the buffer: at the peak there are two copies beside the parameters."""
    flat = torch.cat([p.data.reshape(-1) for p in params])
    full = device.empty(flat.numel() + -flat.numel() % ranks, flat.dtype, "unsharded", flat.device)
    full[: flat.numel()] = flat
    full[flat.numel() :] = 0
    offset = 0
    for p in params:
        p.data = full[offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
    return full


@wrong("4.2", "the ledger does not know this buffer")
def flatten_parameters(params, ranks):
    """Concatenates parameters and padding in one go, into memory that nobody has said the role of."""
    sizes = [p.numel() for p in params]
    padding = params[0].data.new_zeros(-sum(sizes) % ranks)
    full = torch.cat([*(p.data.reshape(-1) for p in params), padding])
    for p, part in zip(params, full.split([*sizes, padding.numel()]), strict=False):
        p.data = part.view(p.shape)
    return full


@wrong("4.2", "a temporary copy of a parameter")
def flatten_parameters(params, ranks):
    """Copies each parameter on its way into the buffer."""
    sizes = [p.numel() for p in params]
    full = device.empty(sum(sizes) + -sum(sizes) % ranks, params[0].dtype, "unsharded", params[0].device)
    *parts, rest = torch.split(full, [*sizes, -sum(sizes) % ranks])
    for p, part in zip(params, parts, strict=True):
        part.copy_(p.data.flatten().clone())
        p.data = part.view(p.shape)
    rest.zero_()
    return full


@wrong("4.2", "another dtype")
def flatten_parameters(params, ranks):
    """Makes a buffer of torch's default dtype."""
    numel = sum(p.numel() for p in params)
    full = device.empty(numel + -numel % ranks, torch.get_default_dtype(), "unsharded", params[0].device).zero_()
    offset = 0
    for p in params:
        part = full[offset : offset + p.numel()].view(p.shape)
        part.copy_(p.data)
        p.data = part
        offset += p.numel()
    return full


wrong("4.2", "another nn.Parameter, or a change of the list").diff("""
Puts new Parameters into the list, which the model does not see.
- for p, part in zip(params, parts, strict=True):
-     view = part.view(p.shape)
-     view.copy_(p.data)
-     p.data = view
+ for i, part in enumerate(parts):
+     view = part.view(params[i].shape)
+     view.copy_(params[i].data)
+     params[i] = nn.Parameter(view)
""")
wrong("4.2", "they are moved, and are otherwise as they were").diff("""
Freezes the parameters on the way.
  view.copy_(p.data)
+ p.requires_grad = False
""")


@wrong("4.2", "it is moved even where nothing is to be padded")
def flatten_parameters(params, ranks):
    """Leaves a single contiguous parameter where it is if nothing is to be padded."""
    n = sum(p.numel() for p in params)
    if len(params) == 1 and n % ranks == 0 and params[0].is_contiguous():
        return params[0].data.view(-1)
    b = device.empty(n + -n % ranks, params[0].dtype, "unsharded", params[0].device)
    o = 0
    for p in params:
        v = b[o : o + p.numel()].view(p.shape)
        v.copy_(p.data)
        p.data = v
        o += p.numel()
    b[o:] = 0
    return b


wrong("4.2", "its value is moved, its .grad stays").diff("""
Drops the gradients on the way.
- p.data = view
+ p.data = view
+ p.grad = None
""")
