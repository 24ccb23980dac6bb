"""Wrong answers to lab 12, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 12.1


@wrong("12.1", "`torch.chunk` makes all pieces as long as the first")
def cut(whole, rank, ranks):
    """Deals rows out evenly, as tensor_split does."""
    return whole.tensor_split(ranks)[rank]


@wrong("12.1", "with `//` the last rows belong to nobody")
def cut(whole, rank, ranks):
    """Rounds down."""
    rows = whole.shape[0] // ranks
    return whole[rank * rows : (rank + 1) * rows]


@wrong("12.1", "not the flattened parameter")
def cut(whole, rank, ranks):
    """Cuts as a flat parameter does."""
    flat = whole.flatten()
    size = -(-flat.numel() // ranks)
    return flat[rank * size : (rank + 1) * size]


@wrong("12.1", "an empty tensor [0, ...]")
def cut(whole, rank, ranks):
    """Gives a rank without rows a tensor of one dimension, as `torch.empty(0)` is."""
    pieces = whole.chunk(ranks)
    return pieces[rank] if rank < len(pieces) else whole.new_empty(0)


@wrong("12.1", "without padding")
def cut(whole, rank, ranks):
    """Pads all pieces to one length."""
    rows = -(-whole.shape[0] // ranks)
    padded = torch.cat([whole, whole.new_zeros(ranks * rows - whole.shape[0], *whole.shape[1:])])
    return padded[rank * rows : (rank + 1) * rows]


wrong("12.1", "expected views of the parameter, got memory of its own").diff("""
Makes a copy.
- return whole.narrow(0, start, length)
+ return whole.narrow(0, start, length).clone()
""")


@wrong("12.1", "tuple index out of range")
def cut(whole, rank, ranks):
    """Takes for granted that there are N chunks."""
    return whole.chunk(ranks)[rank]


# 12.2

wrong("12.2", "also where it is 0").diff("""
Leaves the gap out.
- return [*sizes, -sum(sizes) % (16 // itemsize)]
+ return sizes
""")
wrong("12.2", "16 bytes, not 16 elements").diff("""
Aligns to 16 elements.
- return [*sizes, -sum(sizes) % (16 // itemsize)]
+ return [*sizes, -sum(sizes) % 16]
""")
wrong("12.2", "counted in elements, like the columns").diff("""
Returns the gap in bytes.
- return [*sizes, -sum(sizes) % (16 // itemsize)]
+ return [*sizes, -sum(sizes) * itemsize % 16]
""")
wrong("12.2", "a full row needs no gap").diff("""
Adds 16 bytes to a row that is full.
- return [*sizes, -sum(sizes) % (16 // itemsize)]
+ return [*sizes, 16 // itemsize - sum(sizes) % (16 // itemsize)]
""")
wrong("12.2", "rows stay whole").diff("""
Divides elements instead of rows.
- sizes = [-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes]
+ sizes = [-(-shape.numel() // ranks) for shape in shapes]
""")
wrong("12.2", "not the whole parameter").diff("""
Makes columns as wide as the parameters.
- sizes = [-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes]
+ sizes = [shape.numel() for shape in shapes]
""")
wrong("12.2", "the longest piece decides").diff("""
Rounds down.
- sizes = [-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes]
+ sizes = [shape[0] // ranks * shape[1:].numel() for shape in shapes]
""")
wrong("12.2", "one gap, at the end of the row").diff("""
Aligns every column.
- sizes = [-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes]
+ sizes = [-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes]
+ sizes = [size + -size % (16 // itemsize) for size in sizes]
""")

# 12.3


@wrong("12.3", "also after a shorter piece")
def copy_in(row, pieces, sizes):
    """Packs without padding, one piece after the other."""
    at = 0
    for piece in pieces:
        row[at : at + piece.numel()].copy_(piece.flatten())
        at += piece.numel()


wrong("12.3", "leave the padding alone").diff("""
Clears the row first.
- for column, piece in zip(row.split(sizes), pieces, strict=False):
+ row.zero_()
+ for column, piece in zip(row.split(sizes), pieces, strict=False):
""")
wrong("12.3", "the gap is no column").diff("""
Clears the gap.
- for column, piece in zip(row.split(sizes), pieces, strict=False):
+ if sizes[-1]:
+     row[-sizes[-1] :] = 0
+ for column, piece in zip(row.split(sizes), pieces, strict=False):
""")


@wrong("12.3", "nothing has arrived in `row`")
def copy_in(row, pieces, sizes):
    """Gives names to other tensors, instead of writing."""
    columns = list(row.split(sizes))
    for number, piece in enumerate(pieces):
        columns[number] = piece.flatten().to(row.dtype)


@wrong("12.3", "and return nothing")
def copy_in(row, pieces, sizes):
    """Makes a new row."""
    return torch.cat([piece.flatten() for piece in pieces]).to(row.dtype)


@wrong("12.3", "the list is the caller's")
def copy_in(row, pieces, sizes):
    """Takes the sizes off the caller's list."""
    at = 0
    for piece in pieces:
        row[at : at + piece.numel()].copy_(piece.flatten())
        at += sizes.pop(0)


@wrong("12.3", "must match the size of tensor b")
def copy_in(row, pieces, sizes):
    """Takes for granted that pieces are as long as their columns."""
    for column, piece in zip(row.split(sizes), pieces, strict=False):
        column.copy_(piece.flatten())


# 12.4


@wrong("12.4", "a parameter's pieces are in N places of it")
def copy_out(gathered, memories, sizes, ranks):
    """Takes the buffer to be in parameter order."""
    for memory, part in zip(memories, gathered.split([ranks * size for size in sizes]), strict=False):
        memory.copy_(part)


wrong("12.4", "element by element, not piece by piece").diff("""
Transposes the elements, too.
- memory.view(ranks, -1).copy_(column)
+ memory.view(-1, ranks).copy_(column.T)
""")
wrong("12.4", "only the first row was copied").diff("""
Copies the first rank's row.
- memory.view(ranks, -1).copy_(column)
+ memory.view(ranks, -1)[0].copy_(column[0])
""")
wrong("12.4", "in reverse order").diff("""
Goes through the ranks backwards.
- memory.view(ranks, -1).copy_(column)
+ memory.view(ranks, -1).copy_(column.flip(0))
""")
wrong("12.4", "without the gap a row seems shorter").diff("""
Forgets the gap.
- columns = gathered.view(ranks, sum(sizes)).split(sizes, dim=1)
+ used = sum(sizes[:-1])
+ columns = gathered[: ranks * used].view(ranks, used).split(sizes[:-1], dim=1)
""")
wrong("12.4", "`copy_` writes to a memory").diff("""
Gives a name to another tensor.
- memory.view(ranks, -1).copy_(column)
+ memory = column.flatten()
""")
wrong("12.4", "a memory has moved").diff("""
Gives the memories other memory.
- memory.view(ranks, -1).copy_(column)
+ memory.data = column.flatten().clone()
""")

# 12.5


wrong("12.5", "the gap is summed, too").diff("""
Clears the columns, and not the gap.
- packed.zero_()
+ packed.view(ranks, sum(sizes))[:, : sum(sizes) - sizes[-1]] = 0
""")
wrong("12.5", "the padding is summed, too").diff("""
Clears nothing.
- packed.zero_()
- for rank, row in enumerate(packed.view(ranks, sum(sizes))):
+ for rank, row in enumerate(packed.view(ranks, sum(sizes))):
""")


@wrong("12.5", "still adds to the others' sum: zeros")
def pack(gradients, packed, sizes, ranks, cut):
    """Clears the columns of the gradients that are there."""
    for rank, row in enumerate(packed.view(ranks, sum(sizes))):
        *columns, gap = row.split(sizes)
        gap.zero_()
        for column, gradient in zip(columns, gradients, strict=True):
            if gradient is not None:
                column.zero_()
                piece = cut(gradient, rank, ranks).reshape(-1)
                column[: piece.numel()].copy_(piece)


@wrong("12.5", "stay where they are, as zeros")
def pack(gradients, packed, sizes, ranks, cut):
    """Closes up where there is no gradient."""
    packed.zero_()
    there = [(each, size) for each, size in zip(gradients, sizes, strict=False) if each is not None]
    for rank, row in enumerate(packed.view(ranks, sum(sizes))):
        at = 0
        for gradient, size in there:
            piece = cut(gradient, rank, ranks).reshape(-1)
            row[at : at + piece.numel()].copy_(piece)
            at += size


@wrong("12.5", "in rank order, not in parameter order")
def pack(gradients, packed, sizes, ranks, cut):
    """Packs one gradient after the other."""
    packed.zero_()
    at = 0
    for gradient, size in zip(gradients, sizes, strict=False):
        if gradient is not None:
            packed[at : at + gradient.numel()].copy_(gradient.reshape(-1))
        at += ranks * size


@wrong("12.5", "nothing has arrived in `packed`")
def pack(gradients, packed, sizes, ranks, cut):
    """Fills a buffer of its own."""
    mine = torch.zeros_like(packed)
    for rank, row in enumerate(mine.view(ranks, sum(sizes))):
        for column, gradient in zip(row.split(sizes), gradients, strict=False):
            if gradient is not None:
                piece = cut(gradient, rank, ranks).reshape(-1)
                column[: piece.numel()].copy_(piece)
    packed = mine


wrong("12.5", "view size is not compatible").diff("""
Takes for granted that gradients are contiguous.
- piece = cut(gradient, rank, ranks).reshape(-1)
+ piece = cut(gradient, rank, ranks).view(-1)
""")

# 12.6

wrong("12.6", "`device.free` calls `record_stream`: that is the other way").diff("""
Frees in `keep`, as with record_stream.
- kept.append((buffer, device.current_stream(where).record_event()))
+ device.free(buffer)
+ kept.append((buffer, device.current_stream(where).record_event()))
""")
wrong("12.6", "nothing says when the reader will be done").diff("""
Records the events when it gives back, on the owner's stream.
- kept.append((buffer, device.current_stream(where).record_event()))
+ kept.append((buffer, None))
- device.current_stream(where).wait_event(read)
+ device.current_stream(where).wait_event(device.current_stream(where).record_event())
""")
wrong("12.6", "`wait_event` of a stream, not `synchronize`").diff("""
Makes the host wait.
- device.current_stream(where).wait_event(read)
+ read.synchronize()
""")
wrong("12.6", "has to wait for the reader before its memory is used again").diff("""
Waits for nothing.
- device.current_stream(where).wait_event(read)
- buffer.untyped_storage().resize_(0)
+ buffer.untyped_storage().resize_(0)
""")
wrong("12.6", "clear the list, or every later call waits again").diff("""
Keeps what it has given back.
- kept.clear()
""")
wrong("12.6", "after the wait the memory is the owner's again").diff("""
Forgets the buffers, without freeing what others refer to.
- device.current_stream(where).wait_event(read)
- buffer.untyped_storage().resize_(0)
+ device.current_stream(where).wait_event(read)
""")
wrong("12.6", "the memory stays until the owner waits for them").diff("""
Frees the memory at once.
- kept.append((buffer, device.current_stream(where).record_event()))
+ kept.append((buffer, device.current_stream(where).record_event()))
+ buffer.untyped_storage().resize_(0)
""")
wrong("12.6", "after a wait it is not needed, and would hold the block back").diff("""
Waits, and then uses record_stream all the same.
- buffer.untyped_storage().resize_(0)
+ device.free(buffer)
""")
wrong("12.6", "`device.current_stream(where)`").diff("""
Asks for the stream of a device that it thinks of by itself.
- kept.append((buffer, device.current_stream(where).record_event()))
+ kept.append((buffer, device.current_stream(buffer.device).record_event()))
""")
