"""Wrong answers to lab 12, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 12.1


@wrong("12.1", "`tensor_split` evens lengths out")
def cut(whole, ranks, rank, dim=0):
    """Distributes the rows evenly."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    return whole.tensor_split(ranks, dim)[rank]


@wrong("12.1", "`chunk` returns fewer than N parts")
def cut(whole, ranks, rank, dim=0):
    """Has no piece for the last ranks."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    return whole.chunk(ranks, dim)[rank]


@wrong("12.1", "an empty shard has the other dimensions")
def cut(whole, ranks, rank, dim=0):
    """Gives ranks that are left without a tensor of no shape."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    parts = whole.chunk(ranks, dim)
    return parts[rank] if rank < len(parts) else whole.new_empty(0)


@wrong("12.1", "make the *first* shards longer")
def cut(whole, ranks, rank, dim=0):
    """Leaves the rest to the last rank."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    length = whole.shape[dim]
    rows = length // ranks
    return whole.narrow(dim, rank * rows, rows if rank < ranks - 1 else length - rank * rows)


@wrong("12.1", "it exists only in the buffers")
def cut(whole, ranks, rank, dim=0):
    """Pads the piece to the length of the first one."""
    length = whole.shape[dim]
    if dim and length % ranks:
        raise ValueError
    rows = -(-length // ranks)
    start, end = min(rank * rows, length), min((rank + 1) * rows, length)
    piece = whole.narrow(dim, start, end - start)
    if end - start == rows:
        return piece
    missing = [rows - (end - start) if i == dim else n for i, n in enumerate(whole.shape)]
    return torch.cat([piece, whole.new_zeros(missing)], dim)


@wrong("12.1", "split by elements, as a flat parameter is")
def cut(whole, ranks, rank, dim=0):
    """Cuts the flattened parameter."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    if dim:
        return whole.chunk(ranks, dim)[rank]
    size = -(-whole.numel() // ranks)
    return whole.flatten()[rank * size : (rank + 1) * size]


wrong("12.1", "padding would leave no contiguous view").diff("""
Refuses nothing.
- if dim and length % ranks:
-     raise ValueError(f"{length} rows along dimension {dim} do not make {ranks} equal shards")
""")
wrong("12.1", "along dimension 0, any length will do").diff("""
Refuses what does not divide along dimension 0, too.
- if dim and length % ranks:
-     raise ValueError(f"{length} rows along dimension {dim} do not make {ranks} equal shards")
+ if length % ranks:
+     raise ValueError
""")
wrong("12.1", "expected a view of the parameter, got a copy").diff("""
Copies the piece.
- return whole.narrow(dim, start, end - start)
+ return whole.narrow(dim, start, end - start).clone()
""")


@wrong("12.1", "the parameter is split along `dim`")
def cut(whole, ranks, rank, dim=0):
    """Cuts along dimension 0 always."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    length = whole.shape[0]
    rows = -(-length // ranks)
    start, end = min(rank * rows, length), min((rank + 1) * rows, length)
    return whole[start:end]


@wrong("12.1", "every N-th row")
def cut(whole, ranks, rank, dim=0):
    """Deals rows out in turn."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    return whole[rank::ranks]


@wrong("12.1", "not the last rows once more")
def cut(whole, ranks, rank, dim=0):
    """Gives a rank behind the end the last rows."""
    length = whole.shape[dim]
    if dim and length % ranks:
        raise ValueError
    rows = -(-length // ranks)
    start = min(rank * rows, length - 1)
    return whole.narrow(dim, start, min(rows, length - start))


wrong("12.1", "every rank refuses the parameter").diff("""
Raises only on the rank whose shard is short.
- if dim and length % ranks:
-     raise ValueError(f"{length} rows along dimension {dim} do not make {ranks} equal shards")
- start, end = min(rank * rows, length), min((rank + 1) * rows, length)
+ start, end = min(rank * rows, length), min((rank + 1) * rows, length)
+ if dim and end - start < rows:
+     raise ValueError
""")
wrong("12.1", "it raises AssertionError").diff("""
Asserts instead of raising.
- if dim and length % ranks:
-     raise ValueError(f"{length} rows along dimension {dim} do not make {ranks} equal shards")
+ assert not dim or length % ranks == 0
""")

wrong("12.1", "rank r begins at row r").diff("""
Takes the last dimension for any but the first.
- length = whole.shape[dim]
+ dim = whole.dim() - 1 if dim else 0
+ length = whole.shape[dim]
""")
wrong("12.1", "a dtype of the shard").diff("""
Returns an empty shard of torch's default dtype.
- return whole.narrow(dim, start, end - start)
+ if start == end:
+     return torch.empty([0 if i == dim else n for i, n in enumerate(whole.shape)])
+ return whole.narrow(dim, start, end - start)
""")


wrong("12.1", "even of length 0").diff("""
Makes an empty shard.
- return whole.narrow(dim, start, end - start)
+ if start == end:
+     return whole.new_empty([0 if i == dim else n for i, n in enumerate(whole.shape)])
+ return whole.narrow(dim, start, end - start)
""")
wrong("12.1", "`requires_grad_` and `detach_` change this one").diff("""
Switches the parameter's gradient off.
- return whole.narrow(dim, start, end - start)
+ return whole.requires_grad_(False).narrow(dim, start, end - start)
""")
wrong("12.1", "rank 0, shard of [4, 6, 3] over 3 ranks: expected a view").diff("""
Cuts rows of a matrix.
- return whole.narrow(dim, start, end - start)
+ if dim or not whole.numel():
+     return whole.narrow(dim, start, end - start)
+ return whole.reshape(length, -1)[start:end].view(-1, *whole.shape[1:])
""")
wrong("12.1", "the length along `dim` that N must divide").diff("""
Looks at dimension 0.
- if dim and length % ranks:
+ if dim and whole.shape[0] % ranks:
""")
wrong("12.1", "without elements").diff("""
Divides by the length.
- rows = -(-length // ranks)
+ rows = -(-length // ranks)
+ 1 // length
""")

# 12.2

wrong("12.2", "rank r packs into row r").diff("""
Packs into the first row.
- row = gathered.view(ranks, -1)[rank]
+ row = gathered.view(ranks, -1)[0]
""")


@wrong("12.2", "columns are as wide as the first rank's shard")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Packs one piece behind the other."""
    row = gathered.view(ranks, -1)[rank]
    start = 0
    for piece in pieces:
        row[start : start + piece.numel()] = piece.flatten()
        start += piece.numel()
    return row


@wrong("12.2", "an assignment to a name copies nothing")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Gives the columns other names."""
    row = gathered.view(ranks, -1)[rank]
    columns = list(row.split(sizes))
    for i, piece in enumerate(pieces):
        columns[i] = piece.flatten()
    return row


@wrong("12.2", "padding comes after the shard")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Aligns pieces at the end of their columns."""
    row = gathered.view(ranks, -1)[rank]
    for column, piece in zip(row.split(sizes), pieces, strict=False):
        column[column.numel() - piece.numel() :] = piece.flatten()
    return row


@wrong("12.2", "its input is a part of its output")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Returns a copy of the row."""
    row = gathered.view(ranks, -1)[rank]
    for column, piece in zip(row.split(sizes), pieces, strict=False):
        column[: piece.numel()] = piece.flatten()
    return row.clone()


wrong("12.2", "the gap is sent, too").diff("""
Leaves the gap out of what it returns.
- return row
+ return row[: row.numel() - sizes[-1]]
""")
wrong("12.2", "expected the row [S], got None").diff("""
Returns nothing.
- return row
+ return None
""")
wrong("12.2", "in row-major order to the beginning of its column").diff("""
Packs the pieces transposed.
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+     column[: piece.numel()].copy_(piece.movedim(0, -1).flatten())
""")
wrong("12.2", "the optimizer owns the shards: only read them").diff("""
Empties the pieces.
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+     column[: piece.numel()].view(piece.shape).copy_(piece)
+     piece.zero_()
""")

wrong("12.2", "passed through a narrower dtype").diff("""
Casts to bfloat16 always.
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+     column[: piece.numel()].view(piece.shape).copy_(piece.bfloat16())
""")
wrong("12.2", "expected the row [S], got a tensor").diff("""
Returns the row as a matrix.
- return row
+ return row[None]
""")

wrong("12.2", "all passed through the first one's").diff("""
Casts all shards to the first one's dtype.
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+     column[: piece.numel()].view(piece.shape).copy_(piece.to(pieces[0].dtype))
""")
wrong("12.2", "take nothing away").diff("""
Takes the shards out of the caller's list.
- for column, piece in zip(row.split(sizes), pieces, strict=False):
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+ for column in row.split(sizes)[:-1]:
+     piece = pieces.pop(0)
+     column[: piece.numel()].view(piece.shape).copy_(piece)
""")

wrong("12.2", "2 ranks, float64): expected a tensor [9] float64").diff("""
Casts to float32 on the way.
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+     column[: piece.numel()].view(piece.shape).copy_(piece.float())
""")
wrong("12.2", "infinities and NaNs are copied as they are").diff("""
Takes float16 for bfloat16.
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+     piece = piece.half() if piece.dtype == torch.bfloat16 else piece
+     column[: piece.numel()].view(piece.shape).copy_(piece)
""")

# 12.3


wrong("12.3", "`reshape` of a non-contiguous view is a copy").diff("""
Flattens the chunks of a parameter, which copies those along other dimensions.
-         part.copy_(row[: part.numel()].view(part.shape))
+         part.reshape(-1).copy_(row[: part.numel()])
""")
wrong("12.3", "passed through a narrower dtype").diff("""
Casts to bfloat16 on the way.
-         part.copy_(row[: part.numel()].view(part.shape))
+         part.copy_(row[: part.numel()].view(part.shape).bfloat16())
""")


@wrong("12.3", "`=` only names another tensor")
def copy_out(gathered, params, dims, sizes, ranks):
    """Builds the parameters and drops them."""
    for whole, dim, column in zip(params, dims, gathered.view(ranks, -1).split(list(sizes), 1), strict=False):
        parts = [
            row[: part.numel()].view(part.shape) for part, row in zip(whole.chunk(ranks, dim), column, strict=False)
        ]
        whole = torch.cat(parts, dim)


@wrong("12.3", "copy into them")
def copy_out(gathered, params, dims, sizes, ranks):
    """Gives the parameters other memory."""
    for whole, dim, column in zip(params, dims, gathered.view(ranks, -1).split(list(sizes), 1), strict=False):
        parts = [
            row[: part.numel()].view(part.shape) for part, row in zip(whole.chunk(ranks, dim), column, strict=False)
        ]
        whole.data = torch.cat(parts, dim)


@wrong("12.3", "the buffer is in rank order")
def copy_out(gathered, params, dims, sizes, ranks):
    """Reads the buffer in parameter order."""
    start = 0
    for whole, size in zip(params, sizes, strict=False):
        whole.copy_(gathered[start : start + whole.numel()].view(whole.shape))
        start += ranks * size


@wrong("12.3", "shards interleave")
def copy_out(gathered, params, dims, sizes, ranks):
    """Lays pieces one behind the other, whatever the dimension."""
    for whole, column in zip(params, gathered.view(ranks, -1).split(list(sizes), 1), strict=False):
        whole.copy_(column.flatten()[: whole.numel()].view(whole.shape))


@wrong("12.3", "as many as fit")
def copy_out(gathered, params, dims, sizes, ranks):
    """Copies whole rows to short pieces."""
    for whole, dim, column in zip(params, dims, gathered.view(ranks, -1).split(list(sizes), 1), strict=False):
        for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
            part.copy_(row.view(part.shape))


wrong("12.3", "some of the parameter was never written").diff("""
Leaves the last rank's piece out.
-     for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
+     for part, row in zip(whole.chunk(ranks, dim), column[:-1], strict=False):
""")
wrong("12.3", "is read here, not written to").diff("""
Clears the buffer behind it.
-         part.copy_(row[: part.numel()].view(part.shape))
+         part.copy_(row[: part.numel()].view(part.shape))
+         row.zero_()
""")


@wrong("12.3", "padding was copied, too")
def copy_out(gathered, params, dims, sizes, ranks):
    """Distributes rows evenly, so that padding lands inside."""
    for whole, dim, column in zip(params, dims, gathered.view(ranks, -1).split(list(sizes), 1), strict=False):
        for part, row in zip(whole.tensor_split(ranks, dim), column.flip(0).flip(0), strict=False):
            part.copy_(row[row.numel() - part.numel() :].view(part.shape))


wrong("12.3", "which may be 2 or more").diff("""
Treats all dimensions but the first as the second.
-     for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
+     for part, row in zip(whole.chunk(ranks, min(dim, 1)), column, strict=False):
""")
wrong("12.3", "`tensor_split` evens lengths out").diff("""
Has parts of even lengths.
-     for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
+     for part, row in zip(whole.tensor_split(ranks, dim), column, strict=False):
""")

wrong("12.3", "expected a tensor [5, 3] float64, got").diff("""
Casts to float32 on the way.
-         part.copy_(row[: part.numel()].view(part.shape))
+         part.copy_(row[: part.numel()].view(part.shape).float())
""")
wrong("12.3", "a row ends with the gap").diff("""
Forgets the gap.
- columns = gathered.view(ranks, -1).split(list(sizes), 1)
+ share = sum(sizes[:-1])
+ columns = gathered[: ranks * share].view(ranks, share).split(list(sizes[:-1]), 1)
""")
wrong("12.3", "its memory is given back later").diff("""
Frees the buffer.
- for whole, dim, column in zip(params, dims, columns, strict=False):
-     for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
-         part.copy_(row[: part.numel()].view(part.shape))
+ for whole, dim, column in zip(params, dims, columns, strict=False):
+     for part, row in zip(whole.chunk(ranks, dim), column, strict=False):
+         part.copy_(row[: part.numel()].view(part.shape))
+ gathered.untyped_storage().resize_(0)
""")

# 12.4

wrong("12.4", "after a short chunk, for ranks without a chunk, in the gap").diff("""
Leaves padding as it was.
- packed.zero_()
""")


@wrong("12.4", "the ends of short columns are not")
def chunk_cat(packed, gradients, dims, sizes):
    """Clears the gap alone."""
    packed[:, packed.shape[1] - sizes[-1] :] = 0
    for gradient, dim, column in zip(gradients, dims, packed.split(list(sizes), 1), strict=False):
        for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
            row[: part.numel()] = part.flatten()


@wrong("12.4", "each short chunk is padded by itself")
def chunk_cat(packed, gradients, dims, sizes):
    """Concatenates first, and pads behind all."""
    packed.zero_()
    for r, row in enumerate(packed):
        parts = [g.chunk(packed.shape[0], dim) for g, dim in zip(gradients, dims, strict=False)]
        mine = [part[r].flatten() for part in parts if r < len(part)]
        if mine:
            both = torch.cat(mine)
            row[: both.numel()] = both


@wrong("12.4", "the buffer is filled in place")
def chunk_cat(packed, gradients, dims, sizes):
    """Makes another buffer."""
    packed = torch.zeros_like(packed)
    for gradient, dim, column in zip(gradients, dims, packed.split(list(sizes), 1), strict=False):
        for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
            row[: part.numel()] = part.flatten()


@wrong("12.4", "the shards of parameters and gradients must agree")
def chunk_cat(packed, gradients, dims, sizes):
    """Distributes rows evenly."""
    packed.zero_()
    for gradient, dim, column in zip(gradients, dims, packed.split(list(sizes), 1), strict=False):
        for part, row in zip(gradient.tensor_split(packed.shape[0], dim), column, strict=False):
            row[: part.numel()] = part.flatten()


@wrong("12.4", "the gradients of other elements")
def chunk_cat(packed, gradients, dims, sizes):
    """Cuts the flattened gradient."""
    packed.zero_()
    for gradient, dim, column in zip(gradients, dims, packed.split(list(sizes), 1), strict=False):
        parts = gradient.chunk(packed.shape[0], dim) if dim else gradient.flatten().chunk(packed.shape[0])
        for part, row in zip(parts, column, strict=False):
            row[: part.numel()] = part.flatten()


@wrong("12.4", "they are not contiguous")
def chunk_cat(packed, gradients, dims, sizes):
    """Lays a gradient into its column as it is, whatever the dimension."""
    packed.zero_()
    for gradient, column in zip(gradients, packed.split(list(sizes), 1), strict=False):
        for part, row in zip(gradient.flatten().split(column.shape[1]), column, strict=False):
            row[: part.numel()] = part


wrong("12.4", "here nothing is divided").diff("""
Takes the mean before the sum.
-         row[: part.numel()].view(part.shape).copy_(part)
+         row[: part.numel()].view(part.shape).copy_(part / packed.shape[0])
""")
wrong("12.4", "passed through a narrower dtype").diff("""
Casts to bfloat16 on the way.
-         row[: part.numel()].view(part.shape).copy_(part)
+         row[: part.numel()].view(part.shape).copy_(part.bfloat16())
""")
wrong("12.4", "infinities and NaNs are packed as they are").diff("""
Replaces NaNs and infinities.
-         row[: part.numel()].view(part.shape).copy_(part)
+         row[: part.numel()].view(part.shape).copy_(part.nan_to_num())
""")
wrong("12.4", "they fill the beginning of their row").diff("""
Copies short chunks to whole rows.
-         row[: part.numel()].view(part.shape).copy_(part)
+         row.view(part.shape).copy_(part)
""")

wrong("12.4", "all passed through the first one's").diff("""
Casts all gradients to the first one's dtype.
-     for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
+     for part, row in zip(gradient.to(gradients[0].dtype).chunk(packed.shape[0], dim), column, strict=False):
""")
wrong("12.4", "which may be 2 or more").diff("""
Treats all dimensions but the first as the second.
-     for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
+     for part, row in zip(gradient.chunk(packed.shape[0], min(dim, 1)), column, strict=False):
""")
wrong("12.4", "may be stored in another order than its shape's").diff("""
Takes elements in the order of memory.
-     for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
+     gradient = gradient.as_strided(gradient.shape, torch.empty(gradient.shape).stride())
+     for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
""")
wrong("12.4", "belong to the caller, who frees them").diff("""
Frees each gradient when it is packed.
-     for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
-         row[: part.numel()].view(part.shape).copy_(part)
+     for part, row in zip(gradient.chunk(packed.shape[0], dim), column, strict=False):
+         row[: part.numel()].view(part.shape).copy_(part)
+     gradient.untyped_storage().resize_(0)
""")

wrong("12.4", "[2, 9] float64, got a tensor [2, 9] float64").diff("""
Casts to float32 on the way.
-         row[: part.numel()].view(part.shape).copy_(part)
+         row[: part.numel()].view(part.shape).copy_(part.float())
""")

# 12.5

wrong("12.5", "freed without a wait").diff("""
Frees without a wait.
-         device.current_stream(on).wait_event(read)
""")
wrong("12.5", "first the wait, then the free").diff("""
Frees before the wait.
-         device.current_stream(on).wait_event(read)
-         buffer.untyped_storage().resize_(0)
+         buffer.untyped_storage().resize_(0)
+         device.current_stream(on).wait_event(read)
""")
wrong("12.5", "`synchronize` stops the host").diff("""
Lets the host wait.
-         device.current_stream(on).wait_event(read)
+         read.synchronize()
""")
wrong("12.5", "what was given back has to be forgotten").diff("""
Forgets nothing.
-     kept.clear()
""")
wrong("12.5", "views keep a storage alive").diff("""
Drops the reference alone.
-         buffer.untyped_storage().resize_(0)
""")


@wrong("12.5", "the owner's stream could be handed this memory at once")
def hold():
    """Frees in `keep`."""
    events = []

    def keep(buffer):
        events.append(device.current_stream(buffer.device).record_event())
        buffer.untyped_storage().resize_(0)

    def give_back(on):
        for event in events:
            device.current_stream(on).wait_event(event)
        events.clear()

    return keep, give_back


@wrong("12.5", "an event of now is on the wrong stream")
def hold():
    """Records the event when the buffer is given back."""
    readers = []

    def keep(buffer):
        stream = device.current_stream(buffer.device)
        readers.append((buffer, stream, stream.record_event()))

    def give_back(on):
        for buffer, stream, _ in readers:
            device.current_stream(on).wait_event(stream.record_event())
            buffer.untyped_storage().resize_(0)
        readers.clear()

    return keep, give_back


@wrong("12.5", "an event marks the end of this reader")
def hold():
    """Keeps the buffer, and waits for the reader's stream later."""
    kept = []

    def keep(buffer):
        kept.append((buffer, device.current_stream(buffer.device)))

    def give_back(on):
        for buffer, reader in kept:
            device.current_stream(on).wait_stream(reader)
            buffer.untyped_storage().resize_(0)
        kept.clear()

    return keep, give_back


@wrong("12.5", "the oldest alone")
def hold():
    """Gives back one at a time."""
    kept = []

    def keep(buffer):
        kept.append((buffer, device.current_stream(buffer.device).record_event()))

    def give_back(on):
        if kept:
            buffer, read = kept.pop(0)
            device.current_stream(on).wait_event(read)
            buffer.untyped_storage().resize_(0)

    return keep, give_back


@wrong("12.5", "the last event alone")
def hold():
    """Waits for the latest reader only."""
    kept = []

    def keep(buffer):
        kept.append((buffer, device.current_stream(buffer.device).record_event()))

    def give_back(on):
        if kept:
            device.current_stream(on).wait_event(kept[-1][1])
        for buffer, _ in kept:
            buffer.untyped_storage().resize_(0)
        kept.clear()

    return keep, give_back


@wrong("12.5", "the reader goes on")
def hold():
    """Lets the reader's stream wait."""
    kept = []

    def keep(buffer):
        stream = device.current_stream(buffer.device)
        event = stream.record_event()
        stream.wait_event(event)
        kept.append(buffer)

    def give_back(on):
        for buffer in kept:
            buffer.untyped_storage().resize_(0)
        kept.clear()

    return keep, give_back


@wrong("12.5", "is what this replaces")
def hold():
    """Tells the allocator."""
    kept = []

    def keep(buffer):
        device.command_observers[-1](device.Command("record_stream", device.current_stream(buffer.device), buffer))
        kept.append(buffer)

    def give_back(on):
        for buffer in kept:
            buffer.untyped_storage().resize_(0)
        kept.clear()

    return keep, give_back


wrong("12.5", "`device.free` calls `record_stream`").diff("""
Frees with `record_stream`.
-         buffer.untyped_storage().resize_(0)
+         device.free(buffer)
""")

wrong("12.5", "however little it is").diff("""
Waits until two buffers are there.
-     for buffer, read in kept:
+     for buffer, read in kept if len(kept) > 1 else ():
""")
wrong("12.5", "only a weak reference was kept").diff("""
Refers to buffers weakly.
-     kept.append((buffer, device.current_stream(buffer.device).record_event()))
+     import weakref
+     kept.append((weakref.ref(buffer), device.current_stream(buffer.device).record_event()))

-         buffer.untyped_storage().resize_(0)
+         if buffer() is not None:
+             buffer().untyped_storage().resize_(0)
""")
wrong("12.5", "its latest event at least").diff("""
Waits for one event per buffer, the first.
-     for buffer, read in kept:
-         device.current_stream(on).wait_event(read)
-         buffer.untyped_storage().resize_(0)
+     seen = set()
+     for buffer, read in kept:
+         if id(buffer) not in seen:
+             device.current_stream(on).wait_event(read)
+         seen.add(id(buffer))
+         buffer.untyped_storage().resize_(0)
""")

wrong("12.5", "every kept buffer is given back").diff("""
Gives back what has been read.
-     for buffer, read in kept:
-         device.current_stream(on).wait_event(read)
-         buffer.untyped_storage().resize_(0)
-     kept.clear()
+     for buffer, read in [each for each in kept if each[1].query()]:
+         device.current_stream(on).wait_event(read)
+         buffer.untyped_storage().resize_(0)
+     kept[:] = [each for each in kept if not each[1].query()]
""")
wrong("12.5", "this event is another pair's").diff("""
Keeps one list for all pairs.
- def hold():
-     kept = []
+ def hold(kept=[]):
""")

# 12.6

wrong("12.6", "the gap is the last entry").diff("""
Has no gap.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ return sizes
""")
wrong("12.6", "`//` divides").diff("""
Computes with floats.
-     rows = -(-shape[dim] // ranks)
+     rows = float(-(-shape[dim] // ranks))
""")
wrong("12.6", "needs no gap").diff("""
Adds a whole step where none is missing.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ step = max(1, 16 // itemsize)
+ return [*sizes, step - sum(sizes) % step]
""")
wrong("12.6", "sizes are in elements").diff("""
Gives the gap in bytes.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ return [*sizes, -(sum(sizes) * itemsize) % 16]
""")
wrong("12.6", "not of 16 elements").diff("""
Pads to 16 elements.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ return [*sizes, -sum(sizes) % 16]
""")
wrong("12.6", "4 elements are 16 bytes for float32 alone").diff("""
Pads to 4 elements, whatever their size.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ return [*sizes, -sum(sizes) % 4]
""")
wrong("12.6", "one gap at the end is enough").diff("""
Aligns every column.
-     sizes.append(rows * prod(shape[:dim]) * prod(shape[dim + 1 :]))
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+     size = rows * prod(shape[:dim]) * prod(shape[dim + 1 :])
+     sizes.append(size + -size % max(1, 16 // itemsize))
+ return [*sizes, 0]
""")
wrong("12.6", "the entire buffer may be one by chance").diff("""
Aligns the whole buffer.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ return [*sizes, -(ranks * sum(sizes)) % max(1, 16 // itemsize)]
""")
wrong("12.6", "as wide as the *largest* shard").diff("""
Rounds down.
-     rows = -(-shape[dim] // ranks)
+     rows = shape[dim] // ranks
""")
wrong("12.6", "rows are never split").diff("""
Cuts by elements.
-     rows = -(-shape[dim] // ranks)
-     sizes.append(rows * prod(shape[:dim]) * prod(shape[dim + 1 :]))
+     sizes.append(-(-prod(shape) // ranks))
""")
wrong("12.6", "the parameter is split along `dim`").diff("""
Cuts along dimension 0 always.
-     rows = -(-shape[dim] // ranks)
-     sizes.append(rows * prod(shape[:dim]) * prod(shape[dim + 1 :]))
+     sizes.append(-(-shape[0] // ranks) * prod(shape[1:]))
""")
wrong("12.6", "`shapes` and `dims` afterwards").diff("""
Takes dimensions from the caller's list.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ dims.pop()
+ return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
""")
