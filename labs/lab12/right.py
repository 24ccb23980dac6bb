"""Right answers that are not the reference's: each must pass."""

from minifsdp.course.workshop.wrong import right


@right("12.1")
def cut(whole, ranks, rank, dim=0):
    """Asks `chunk` itself."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    parts = whole.chunk(ranks, dim)
    return parts[rank] if rank < len(parts) else whole.narrow(dim, whole.shape[dim], 0)


@right("12.1")
def cut(whole, ranks, rank, dim=0):
    """Splits by a list of lengths."""
    length = whole.shape[dim]
    if dim and length % ranks:
        raise ValueError(f"{length} is not divisible by {ranks}")
    rows = -(-length // ranks)
    return whole.split([max(0, min(rows, length - r * rows)) for r in range(ranks)], dim)[rank]


@right("12.1")
def cut(whole, ranks, rank, dim=0):
    """Slices with the dimension in front."""
    if dim != 0 and whole.shape[dim] % ranks != 0:
        raise ValueError("uneven")
    rows = (whole.shape[dim] + ranks - 1) // ranks
    return whole.transpose(0, dim)[rank * rows : (rank + 1) * rows].transpose(0, dim)


@right("12.2")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Assigns slices of the flat buffer."""
    total = sum(sizes)
    at = rank * total
    for piece, size in zip(pieces, sizes, strict=False):
        gathered[at : at + piece.numel()] = piece.reshape(-1)
        at += size
    return gathered[rank * total : (rank + 1) * total]


@right("12.2")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Uses one kernel for all, and fills unused places."""
    row = gathered.chunk(ranks)[rank].fill_(0)
    into = [column[: piece.numel()] for column, piece in zip(row.split(list(sizes)), pieces, strict=False)]
    torch._foreach_copy_(into, [piece.view(-1) for piece in pieces])
    return row


@right("12.2")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Concatenates a padded row, cast once."""
    import torch.nn.functional as F

    padded = [F.pad(p.flatten().to(gathered.dtype), (0, n - p.numel())) for p, n in zip(pieces, sizes, strict=False)]
    row = gathered.view(ranks, sum(sizes)).select(0, rank)
    return row.copy_(torch.cat([*padded, gathered.new_zeros(sizes[-1])]))


@right("12.3")
def copy_out(gathered, params, dims, sizes, ranks):
    """Writes through strided views of the parameters, row by row."""
    total, start = sum(sizes), 0
    for whole, dim, size in zip(params, dims, sizes, strict=False):
        rows = -(-whole.shape[dim] // ranks)
        for rank in range(ranks):
            begin = min(rank * rows, whole.shape[dim])
            length = min(rows, whole.shape[dim] - begin)
            part = whole.narrow(dim, begin, length)
            at = rank * total + start
            part[...] = gathered[at : at + part.numel()].reshape(part.shape)
        start += size


@right("12.3")
def copy_out(gathered, params, dims, sizes, ranks):
    """Sets the data of a list of parts with one kernel for each parameter."""
    for number, (whole, dim) in enumerate(zip(params, dims, strict=True)):
        column = gathered.unflatten(0, (ranks, -1)).narrow(1, sum(sizes[:number]), sizes[number])
        parts = whole.chunk(ranks, dim)
        torch._foreach_copy_(parts, [row[: p.numel()].view_as(p) for p, row in zip(parts, column, strict=False)])


@right("12.3")
def copy_out(gathered, params, dims, sizes, ranks):
    """Concatenates, leaves the padding behind, and copies once."""
    for whole, dim, column in zip(params, dims, gathered.view(ranks, -1).split(sizes, 1), strict=False):
        shape = list(whole.shape)
        shape[dim] = -(-shape[dim] // ranks)
        whole.copy_(torch.cat([row.view(shape) for row in column], dim).narrow(dim, 0, whole.shape[dim]))


@right("12.4")
def chunk_cat(packed, gradients, dims, sizes):
    """Goes by torch's own kernel where dimension 0 is cut."""
    ranks = packed.shape[0]
    parts = [torch.stack(g.chunk(ranks, dim)).flatten(1) if dim else g for g, dim in zip(gradients, dims, strict=True)]
    parts += [packed.new_zeros(ranks, sizes[-1])] if sizes[-1] else []
    torch._chunk_cat([part.to(packed.dtype) for part in parts], 0, ranks, out=packed)


@right("12.4")
def chunk_cat(packed, gradients, dims, sizes):
    """Concatenates the padded chunks of each rank."""
    ranks = packed.shape[0]
    chunks = [g.chunk(ranks, dim) for g, dim in zip(gradients, dims, strict=True)]
    for rank in range(ranks):
        row = []
        for parts, size in zip(chunks, sizes, strict=False):
            part = parts[rank].to(packed.dtype).reshape(-1) if rank < len(parts) else packed.new_empty(0)
            row += [part, packed.new_zeros(size - part.numel())]
        packed[rank] = torch.cat([*row, packed.new_zeros(sizes[-1])])


@right("12.4")
def chunk_cat(packed, gradients, dims, sizes):
    """Clears only what is unused."""
    start, ranks = 0, len(packed)
    for gradient, dim, size in zip(gradients, dims, sizes, strict=False):
        rows = -(-gradient.shape[dim] // ranks)
        for rank in range(ranks):
            begin = min(rank * rows, gradient.shape[dim])
            part = gradient.narrow(dim, begin, min(rows, gradient.shape[dim] - begin))
            packed[rank, start : start + part.numel()] = part.flatten()
            packed[rank, start + part.numel() : start + size] = 0
        start += size
    packed[:, start:].fill_(0)


@right("12.5")
def hold():
    """Waits only for each stream's latest event."""
    kept, latest = [], {}

    def keep(buffer):
        stream = device.current_stream(buffer.device)
        latest[id(stream)] = stream.record_event()
        kept.append(buffer)

    def give_back(on):
        for event in latest.values():
            device.current_stream(on).wait_event(event)
        for buffer in kept:
            buffer.untyped_storage().resize_(0)
        latest.clear()
        kept.clear()

    return keep, give_back


@right("12.5")
def hold():
    """Keeps storages, and the newest first."""
    from collections import deque

    kept = deque()

    def keep(buffer):
        event = device.new_event(buffer.device)
        event.record(device.current_stream(buffer.device))
        kept.appendleft((buffer.untyped_storage(), event))

    def give_back(on):
        stream = device.current_stream(on)
        while kept:
            storage, read = kept.popleft()
            stream.wait_event(read)
            storage.resize_(0)

    return keep, give_back


@right("12.5")
def hold():
    """Lets the stream wait for all before it frees any."""
    kept = []

    def keep(buffer):
        kept.append((buffer, device.current_stream(buffer.device).record_event()))

    def give_back(on):
        for _, read in kept:
            read.wait(device.current_stream(on))
        while kept:
            kept.pop()[0].untyped_storage().resize_(0)

    return keep, give_back


@right("12.5")
def hold():
    """Asks whether a buffer has been read, and waits only if not."""
    kept = []

    def keep(buffer):
        kept.append((buffer, device.current_stream(buffer.device).record_event()))

    def give_back(on):
        while kept:
            buffer, read = kept.pop()
            if not read.query():
                device.current_stream(on).wait_event(read)
            buffer.untyped_storage().resize_(0)

    return keep, give_back


@right("12.6")
def columns_of(shapes, dims, ranks, itemsize):
    """Counts in bytes."""
    found = []
    for shape, dim in zip(shapes, dims, strict=True):
        largest = list(shape)
        largest[dim] = (shape[dim] + ranks - 1) // ranks
        found.append(prod(largest))
    over = sum(found) * itemsize % 16
    found.append((16 - over) // itemsize if over else 0)
    return found


@right("12.6")
def columns_of(shapes, dims, ranks, itemsize):
    """Asks torch for the first chunk, and tries gaps; returns a tuple."""
    sizes = [torch.empty(s, device="meta").chunk(ranks, d)[0].numel() for s, d in zip(shapes, dims, strict=True)]
    gap = next(gap for gap in range(16) if (sum(sizes) + gap) * itemsize % 16 == 0)
    return (*sizes, gap)


@right("12.6")
def columns_of(shapes, dims, ranks, itemsize):
    """Divides by the length, multiplies by rows."""
    import math

    sizes = [prod(s) // s[d] * math.ceil(s[d] / ranks) for s, d in zip(shapes, dims, strict=True)]
    step = 16 // itemsize
    return [*sizes, (step - sum(sizes) % step) % step]
