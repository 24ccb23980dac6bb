"""Wrong answers to exercise 3.1, each with words that its rejection must contain."""

import torch

from minifsdp.course.workshop.wrong import wrong


@wrong("3.1", "the remainder is dropped")
def partition(params, ranks):
    """Shards of numel // ranks elements: the last parameter loses its end."""
    sizes = [p.numel() for p in params]
    length = sum(sizes) // ranks
    flat = torch.cat([p.detach().flatten() for p in params])[: ranks * length].clone()
    start = 0
    for p in params:
        if start + p.numel() <= flat.numel():
            p.data = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
    return flat, list(flat.chunk(ranks))


@wrong("3.1", "every parameter is padded by itself")
def partition(params, ranks):
    """Pads each parameter to a multiple of N."""
    sizes = [p.numel() + -p.numel() % ranks for p in params]
    flat = torch.zeros(sum(sizes))
    for p, piece in zip(params, flat.split(sizes), strict=True):
        piece[: p.numel()] = p.detach().flatten()
        p.data = piece[: p.numel()].view(p.shape)
    return flat, list(flat.chunk(ranks))


wrong("3.1", "the padding is missing").diff("""
Lets chunk make the last shard shorter.
- numel = sum(sizes)
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
- for p, piece in zip(params, flat[:numel].split(sizes), strict=True):
-     piece.copy_(p.detach().flatten())
+ flat = torch.cat([p.detach().flatten() for p in params])
+ for p, piece in zip(params, flat.split(sizes), strict=True):
""")
wrong("3.1", "the padding stands in front").diff("""
Pads at the front.
- numel = sum(sizes)
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
- for p, piece in zip(params, flat[:numel].split(sizes), strict=True):
+ padding = -sum(sizes) % ranks
+ flat = torch.zeros(padding + sum(sizes))
+ for p, piece in zip(params, flat[padding:].split(sizes), strict=True):
""")


@wrong("3.1", "the flat buffer is a copy")
def partition(params, ranks):
    """Concatenates, and leaves the parameters where they are."""
    flat = torch.cat([p.detach().flatten() for p in params])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % ranks)])
    return flat, list(flat.chunk(ranks))


wrong("3.1", "the shards are copies").diff("""
Clones the shards.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.zeros(numel + -numel % ranks)
- return flat, list(flat.chunk(ranks))
+ return flat, [shard.clone() for shard in flat.chunk(ranks)]
""")
wrong("3.1", "the shards must be equal in length").diff("""
Whole parameters to ranks, as torch's ZeroRedundancyOptimizer cuts.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.zeros(numel + -numel % ranks)
- return flat, list(flat.chunk(ranks))
+ loads = [0] * ranks
+ for size in sizes:
+     loads[loads.index(min(loads))] += size
+ loads[-1] += flat.numel() - numel
+ return flat, list(flat.split(loads))
""")
wrong("3.1", "the parameters' old memory, or a second copy").diff("""
Keeps the parameters' old memory alive.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.zeros(numel + -numel % ranks)
  piece.copy_(p.detach().flatten())
+ p.old = p.data
""")
wrong("3.1", "must have the parameters' dtype").diff("""
Makes the buffer of the default type.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.zeros(numel + -numel % ranks)
""")
wrong("3.1", "behind the last element the buffer must be zero").diff("""
Leaves the padding uninitialized.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.empty(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
""")


@wrong("3.1", "the copying was recorded")
def partition(params, ranks):
    """Copies the parameters themselves, so the buffer has a grad_fn."""
    numel = sum(p.numel() for p in params)
    flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
    start = 0
    for p in params:
        piece = flat[start : start + p.numel()].view(p.shape)
        piece.copy_(p)
        p.data = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
    return flat, list(flat.chunk(ranks))


@wrong("3.1", "round up to a multiple of N, not down")
def partition(params, ranks):
    """Rounds down."""
    flat = torch.zeros(sum(p.numel() for p in params) // ranks * ranks, dtype=params[0].dtype)
    start = 0
    for p in params:
        piece = flat[start : start + p.numel()].view(p.shape)
        piece.copy_(p.detach())
        p.data = piece
        start += p.numel()
    return flat, list(flat.chunk(ranks))


wrong("3.1", "expected [True, True, True, True], got [False, False, False, False]").diff("""
Puts new Parameters into the list, which the model does not see.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
- for p, piece in zip(params, flat[:numel].split(sizes), strict=True):
-     piece.copy_(p.detach().flatten())
-     p.data = piece.view(p.shape)
+ flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype)
+ for i, piece in enumerate(flat[:numel].split(sizes)):
+     piece.copy_(params[i].detach().flatten())
+     params[i] = nn.Parameter(piece.view(params[i].shape))
""")
wrong("3.1", "a whole N of padding where N divides").diff("""
Pads by a whole N where N divides.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.zeros(numel + ranks - numel % ranks, dtype=params[0].dtype)
""")


@wrong("3.1", "expected [True, True, True, True], got []")
def partition(params, ranks):
    """Empties its caller's list."""
    sizes = [p.numel() for p in params]
    numel = sum(sizes)
    flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype)
    start = 0
    while params:
        p = params.pop(0)
        flat[start : start + p.numel()] = p.detach().flatten()
        p.data = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
    return flat, list(flat.chunk(ranks))


wrong("3.1", "they are moved, and are otherwise as they were").diff("""
Freezes the parameters on the way.
- flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
+ flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype)
- piece.copy_(p.detach().flatten())
+ p.requires_grad_(False)
+ piece.copy_(p.flatten())
""")


@wrong("3.1", "hand out whatever memory held")
def partition(params, ranks):
    """Takes the buffer from `new_empty` and leaves the padding as it comes."""
    n = sum(p.numel() for p in params)
    flat = params[0].data.new_empty(-(-n // ranks) * ranks)
    o = 0
    for p in params:
        flat[o : o + p.numel()] = p.data.reshape(-1)
        p.data = flat[o : o + p.numel()].view(p.shape)
        o += p.numel()
    return flat, list(flat.chunk(ranks))


@wrong("3.1", "has no flat view of its own memory")
def partition(params, ranks):
    """Leaves a single parameter in its memory if nothing is to be padded."""
    n = sum(p.numel() for p in params)
    if len(params) == 1 and n % ranks == 0:
        flat = params[0].data.view(-1)
        return flat, list(flat.chunk(ranks))
    flat = torch.cat([p.data.reshape(-1) for p in params] + [params[0].data.new_zeros(-n % ranks)])
    o = 0
    for p in params:
        p.data = flat[o : o + p.numel()].view(p.shape)
        o += p.numel()
    return flat, list(flat.chunk(ranks))


@wrong("3.1", "its elements in the order of memory")
def partition(params, ranks):
    """Leaves a single parameter in its memory, with the elements in the memory's order."""
    n = sum(p.numel() for p in params)
    if len(params) == 1 and n % ranks == 0:
        flat = params[0].data.as_strided((n,), (1,))
        return flat, list(flat.chunk(ranks))
    flat = torch.cat([p.data.reshape(-1) for p in params] + [params[0].data.new_zeros(-n % ranks)])
    o = 0
    for p in params:
        p.data = flat[o : o + p.numel()].view(p.shape)
        o += p.numel()
    return flat, list(flat.chunk(ranks))


wrong("3.1", "len() of a 0-d tensor").diff("""
Takes the first dimension by `len`, which a scalar does not have.
- p.data = piece.view(p.shape)
+ p.data = piece.view(len(p), *p.shape[1:])
""")
wrong("3.1", "its value is moved, its .grad stays").diff("""
Drops the gradients on the way.
- p.data = piece.view(p.shape)
+ p.data = piece.view(p.shape)
+ p.grad = None
""")
