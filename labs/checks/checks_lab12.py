"""The checks of lab 12."""

import math
from contextlib import contextmanager
from unittest.mock import patch

import torch

from minifsdp import device
from minifsdp.course.workshop.checking import AnswerError, check, expect

POISON = -77.0  # stands wherever an answer must not write, and where it must

# 12.1


def rows_of(shape, ranks):
    """How many rows each rank has, counted row by row."""
    longest = math.ceil(shape[0] / ranks)
    return [sum(row // longest == rank for row in range(shape[0])) for rank in range(ranks)]


def numbered(shape, seed=0):
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1000 * seed


def shapes_of(variant):
    n = variant.ranks
    return ((5, 3), (2 * n, 4), (1,), (n + 1, 2), (variant.size,), (3, 2, 2), (2 * n + 1,))


@check("12.1")
def check_cut(answer, variant):
    """Equal pieces but for the last ranks', which are shorter or empty, as views: nothing is copied."""
    for ranks in dict.fromkeys((2, variant.ranks, 4, 1)):
        for shape in shapes_of(variant):
            whole, counts = numbered(shape, variant.seed), rows_of(shape, ranks)
            even, rest = divmod(shape[0], ranks)
            balanced = [even + (rank < rest) for rank in range(ranks)]
            before, views = whole.clone(), []
            setting = f"a parameter of shape {list(shape)} over {ranks} ranks"
            for rank in range(ranks):
                got = answer(whole, rank, ranks)
                if not isinstance(got, torch.Tensor):
                    raise AnswerError(f"{setting}: rank {rank}, expected a tensor, got {type(got).__name__}")
                start = sum(counts[:rank])
                wanted = whole[start : start + counts[rank]]
                flat = whole.flatten()
                piece = -(-flat.numel() // ranks)
                slips = {
                    "a rank that has no rows has an empty tensor [0, ...], of the parameter's other dimensions": (
                        whole.new_empty(0)
                    ),
                    "cut dimension 0, not the flattened parameter: a row stays in one piece": flat[
                        rank * piece : (rank + 1) * piece
                    ],
                    "`torch.chunk` makes all pieces as long as the first; only the last are shorter": whole[
                        sum(balanced[:rank]) : sum(balanced[: rank + 1])
                    ],
                    "round up: with `//` the last rows belong to nobody": whole[even * rank : even * (rank + 1)],
                    "a piece is what is there, without padding": torch.cat(
                        [wanted, wanted.new_zeros(max(counts) - len(wanted), *shape[1:])]
                    ),
                }
                expect(f"{setting}: piece", got, wanted, rank=rank, slips=slips)
                views.append(got)
            if any(
                got.numel() and got.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr() for got in views
            ):
                raise AnswerError(
                    f"{setting}: expected views of the parameter, got memory of its own\n"
                    "likely slip: slicing and `narrow` make views; whoever wants a copy can make one"
                )
            expect(f"a parameter of shape {list(shape)} afterwards", whole, before, slip="only look at the parameter")


# 12.2


def columns_of(shapes, ranks):
    return [max(rows_of(shape, ranks)) * math.prod(shape[1:]) for shape in shapes]


@check("12.2")
def check_plan_row(answer, variant):
    """A column for the longest piece of each parameter, and a gap to a multiple of 16 bytes: the same on every rank."""
    groups = (shapes_of(variant), ((5, 3), (4,)), ((8, 4), (8,)), ((3,),), ((1,), (1,), (1,)), ((7, 7), (7,), (2, 5)))
    for shapes in groups:
        for ranks in dict.fromkeys((2, variant.ranks, 4, 1)):
            for itemsize in (4, 2, 8):
                given = [torch.Size(shape) for shape in shapes]
                sizes = columns_of(shapes, ranks)
                used = sum(sizes) * itemsize
                wanted = [*sizes, (math.ceil(used / 16) * 16 - used) // itemsize]
                got = answer(given, ranks, itemsize)
                setting = f"shapes {[list(shape) for shape in shapes]}, {ranks} ranks, {itemsize} bytes an element"
                if not isinstance(got, list | tuple):
                    raise AnswerError(f"{setting}: expected a list of numbers, got {type(got).__name__}")
                evenly = [math.ceil(math.prod(shape) / ranks) for shape in shapes]
                whole = [math.prod(shape) for shape in shapes]
                slips = {
                    "the gap is the last column of all, also where it is 0": sizes,
                    "a full row needs no gap": [
                        *sizes,
                        16 // itemsize - sum(sizes) % (16 // itemsize),
                    ],
                    "16 bytes, not 16 elements: divide by `itemsize`": [*sizes, -sum(sizes) % 16],
                    "the gap is counted in elements, like the columns": [*sizes, -used % 16],
                    "rows stay whole: ceil(d / N) of them, times the elements of a row": [
                        *evenly,
                        -sum(evenly) % (16 // itemsize),
                    ],
                    "a column holds a rank's piece, not the whole parameter": [*whole, -sum(whole) % (16 // itemsize)],
                    "the columns are as wide on every rank: the longest piece decides, so round up": [
                        *(short := [shape[0] // ranks * math.prod(shape[1:]) for shape in shapes]),
                        -sum(short) % (16 // itemsize),
                    ],
                    "one gap, at the end of the row: parameters need no alignment of their own": [
                        *(wide := [-(-size * itemsize // 16) * 16 // itemsize for size in sizes]),
                        -sum(wide) % (16 // itemsize),
                    ],
                }
                expect(f"{setting}: columns and gap", list(got), wanted, slips=slips)


# 12.3


def laid_out(variant, ranks):
    """Parameters in fp32, their columns in a row, and the gap: one that is never 0."""
    shapes = [(5, 3), (4,), (ranks + 1, 2), (1,), (variant.size, 2)]
    sizes = columns_of(shapes, ranks)
    return [numbered(shape, seed) for seed, shape in enumerate(shapes, variant.seed)], [*sizes, 3]


def pieces_of(whole, ranks):
    return list(whole.split(rows_of(whole.shape, ranks)))


@check("12.3")
def check_copy_in(answer, variant):
    """Each piece at the beginning of its column, cast on the way; the padding and the gap are left alone."""
    for ranks in dict.fromkeys((2, variant.ranks, 4)):
        wholes, sizes = laid_out(variant, ranks)
        for dtype in (torch.float32, torch.bfloat16):
            for rank in reversed(range(ranks)):  # the last has less
                pieces = [pieces_of(whole, ranks)[rank] for whole in wholes]
                before = [piece.clone() for piece in pieces]
                row = torch.full((sum(sizes),), POISON, dtype=dtype)
                wanted, tight, at, dense = row.clone(), row.clone(), 0, 0
                for piece, size in zip(pieces, sizes, strict=False):
                    wanted[at : at + piece.numel()] = piece.flatten().to(dtype)
                    tight[dense : dense + piece.numel()] = piece.flatten().to(dtype)
                    at, dense = at + size, dense + piece.numel()
                zeroed, cleared = wanted.clone(), wanted.clone()
                zeroed[wanted == POISON] = 0
                cleared[-sizes[-1] :] = 0
                given = [*sizes]
                got = answer(row, pieces, given)
                setting = f"rank {rank} of {ranks}, row of {dtype}"
                if got is not None and got is not row:
                    raise AnswerError(f"{setting}: write to `row`, and return nothing: got {type(got).__name__}")
                slips = {
                    "nothing has arrived in `row`: `copy_` writes to it, `=` does not": torch.full_like(row, POISON),
                    "each begins at its column, also after a shorter piece: columns are alike on all ranks": tight,
                    "the gap is no column of a parameter's: leave it alone": cleared,
                    "leave the padding alone: nobody reads it, and to write it costs": zeroed,
                }
                expect(f"{setting}: the row", row, wanted, slips=slips)
                expect(f"{setting}: the pieces afterwards", pieces, before, slip="the pieces are the optimizer's")
                expect("`sizes` afterwards", given, sizes, slip="the list is the caller's, who needs it again")


# 12.4


def gathered_from(wholes, sizes, ranks, dtype):
    """What the all-gather leaves, with poison as padding."""
    buffer = torch.full((ranks, sum(sizes)), POISON, dtype=dtype)
    for rank in range(ranks):
        at = 0
        for whole, size in zip(wholes, sizes, strict=False):
            piece = pieces_of(whole, ranks)[rank].flatten()
            buffer[rank, at : at + piece.numel()] = piece.to(dtype)
            at += size
    return buffer.flatten()


@check("12.4")
def check_copy_out(answer, variant):
    """Each parameter's pieces together, in rank order, straight into its memory."""
    for ranks in dict.fromkeys((2, variant.ranks, 4, 1)):
        wholes, sizes = laid_out(variant, ranks)
        for dtype in (torch.float32, torch.bfloat16):
            gathered = gathered_from(wholes, sizes, ranks, dtype)
            before = gathered.clone()
            memories = [torch.full((ranks * size,), POISON - 1, dtype=dtype) for size in sizes[:-1]]
            given, pointers = [*sizes], [memory.data_ptr() for memory in memories]
            got = answer(gathered, memories, given, ranks)
            setting = f"{ranks} ranks, {dtype}"
            if got is not None:
                raise AnswerError(f"{setting}: write to the memories, and return nothing: got {type(got).__name__}")
            if [memory.data_ptr() for memory in memories] != pointers:
                raise AnswerError(
                    f"{setting}: a memory has moved\nlikely slip: the parameters are views of it: copy into it"
                )
            expect("`gathered` afterwards", gathered, before, slip="the buffer is only read")
            expect("`sizes` afterwards", given, sizes, slip="the list is the caller's, who needs it again")
            table, at = gathered.view(ranks, -1), 0
            for number, (whole, size, memory) in enumerate(zip(wholes, sizes, memories, strict=False)):
                wanted = table[:, at : at + size].flatten()
                what = f"{setting}: memory of parameter {number}, of shape {list(whole.shape)}"
                start = ranks * at
                slips = {
                    "nothing has arrived: `copy_` writes to a memory, `=` to a name": torch.full_like(
                        wanted, POISON - 1
                    ),
                    "the buffer is in rank order: a parameter's pieces are in N places of it": gathered[
                        start : start + ranks * size
                    ],
                    "element by element, not piece by piece: rank 0's piece comes whole, then rank 1's": table[
                        :, at : at + size
                    ].T.flatten(),
                    "only the first row was copied: every rank has a piece": torch.cat(
                        [wanted[:size], torch.full_like(wanted[size:], POISON - 1)]
                    ),
                    "the ranks are in reverse order": table.flip(0)[:, at : at + size].flatten(),
                    "without the gap a row seems shorter than it is, and the ranks' columns shift": gathered[
                        : ranks * (sum(sizes) - sizes[-1])
                    ]
                    .view(ranks, -1)[:, at : at + size]
                    .flatten(),
                }
                expect(what, memory, wanted, slips=slips)
                rows = memory.view(-1, *whole.shape[1:])[: whole.shape[0]]
                expect(f"{what}, as the parameter", rows, whole.to(dtype))
                at += size


# 12.5


def plain_cut(whole, rank, ranks):
    return pieces_of(whole, ranks)[rank]


@check("12.5")
def check_pack(answer, variant):
    """Rank r's rows of every gradient in row r, zeros in the padding, the gap, and where there is no gradient."""
    for ranks in dict.fromkeys((2, variant.ranks, 4, 1)):
        wholes, sizes = laid_out(variant, ranks)
        for missing in ((), (1,), (0, 3)):
            for dtype in (torch.float32, torch.bfloat16):
                gradients = [None if i in missing else whole + 1 for i, whole in enumerate(wholes)]
                if not missing:
                    gradients[0] = gradients[0].T.contiguous().T  # as autograd may make it
                before = [None if each is None else each.clone() for each in gradients]
                packed = torch.full((ranks * sum(sizes),), POISON, dtype=dtype)
                wanted = torch.zeros(ranks, sum(sizes), dtype=dtype)
                dirty = torch.full((ranks, sum(sizes)), POISON, dtype=dtype)
                shifted, at, dense = wanted.clone(), 0, 0
                for gradient, size in zip(gradients, sizes, strict=False):
                    for rank in range(ranks):
                        piece = torch.empty(0) if gradient is None else pieces_of(gradient, ranks)[rank].flatten()
                        wanted[rank, at : at + len(piece)] = dirty[rank, at : at + len(piece)] = piece.to(dtype)
                        shifted[rank, dense : dense + len(piece)] = piece.to(dtype)
                    at, dense = at + size, dense + size * (gradient is not None)
                absent_dirty, at = wanted.clone(), 0
                for gradient, size in zip(gradients, sizes, strict=False):
                    if gradient is None:
                        absent_dirty[:, at : at + size] = POISON
                    at += size
                gap_dirty = wanted.clone()
                gap_dirty[:, -sizes[-1] :] = POISON
                in_order = torch.cat([
                    torch.cat([
                        torch.zeros(ranks * size) if g is None
                        else torch.cat([g.flatten(), torch.zeros(ranks * size - g.numel())])
                        for g, size in zip(gradients, sizes, strict=False)
                    ]),
                    torch.zeros(ranks * sizes[-1]),
                ]).to(dtype)  # fmt: skip
                given = [*sizes]
                setting = f"{ranks} ranks, {dtype}" + f", no gradient for {list(missing)}" * bool(missing)
                got = answer(gradients, packed, given, ranks, plain_cut)
                if got is not None and got is not packed:
                    raise AnswerError(f"{setting}: write to `packed`, and return nothing: got {type(got).__name__}")
                slips = {
                    "nothing has arrived in `packed`: `copy_` writes to it, `=` does not": torch.full_like(
                        packed, POISON
                    ),
                    "in rank order, not in parameter order: rank r keeps row r": in_order,
                    "the columns of what has no gradient stay where they are, as zeros": shifted.flatten(),
                    "what has no gradient on this rank still adds to the others' sum: zeros": absent_dirty.flatten(),
                    "the gap is summed, too: garbage there may overflow": gap_dirty.flatten(),
                    "the padding is summed, too, and becomes memory of `.grad`: zeros": dirty.flatten(),
                }
                expect(f"{setting}: the packed gradients", packed, wanted.flatten(), slips=slips)
                for after, was in zip(gradients, before, strict=True):
                    if after is not None:
                        expect("a gradient afterwards", after, was, slip="gradients are only read")
                expect("`sizes` afterwards", given, sizes, slip="the list is the caller's, who needs it again")


# 12.6

READER, OWNER = "the reader's stream", "the owner's stream"


@contextmanager
def followed(log, streams):
    """What is queued on which stream, and the events by their number."""
    numbers, kept = {}, []

    def watch(command):
        where = next((name for name, stream in streams.items() if stream is command.stream), "another stream")
        if command.verb == "record":
            kept.append(command.subject)
            numbers[id(command.subject)] = len(kept)
            log.append(f"event {len(kept)} on {where}")
        elif command.verb == "wait":
            log.append(f"{where} waits for event {numbers.get(id(command.subject))}")
        elif command.verb == "synchronize":
            log.append("the host waits")
        else:
            log.append(f"{command.verb} on {where}")

    device.command_observers.append(watch)
    try:
        yield
    finally:
        device.command_observers.remove(watch)


def freed(buffers):
    return [not buffer.untyped_storage().nbytes() for buffer in buffers]


WHERE = torch.device("cpu", 0)  # not the `cpu` that an answer may think of by itself


@check("12.6")
def check_hold(answer, variant):
    """Kept until the owner's stream waits for the reader's event, then freed; the host waits for nothing."""
    streams = {OWNER: device.new_stream(WHERE), READER: device.new_stream(WHERE)}
    current_stream = device.current_stream

    def of_device(where):
        if where != WHERE:
            raise AnswerError(
                f"whose current stream it is: expected that of `where`, got that of {where}\n"
                "likely slip: a rank may have several devices: `device.current_stream(where)`"
            )
        return current_stream(where)

    pairs = [pair_of(answer), pair_of(answer)]
    for count in (1, 2, 2 + variant.size % 3):
        for keep, give_back in pairs:  # the second pair must not share what the first one keeps
            log: list[str] = []
            buffers = [torch.zeros(variant.size + 4) for _ in range(count)]
            with patch.object(device, "current_stream", of_device), followed(log, streams):
                for buffer in buffers:
                    with device.on_stream(streams[READER]):
                        keep(buffer)
                wanted = [f"event {number} on {READER}" for number in range(1, count + 1)]
                expect(f"after `keep` of {count}: queued", log, wanted, slip=why_kept(log))
                expect(
                    f"after `keep` of {count}: freed",
                    freed(buffers),
                    [False] * count,
                    slip="the reader's kernels are queued, not done: the memory stays until the owner waits for them",
                )
                with device.on_stream(streams[OWNER]):
                    give_back()
                waits = [f"{OWNER} waits for event {number}" for number in range(1, count + 1)]
                last = [f"{OWNER} waits for event {count}"]
                if log[count:] != last:  # the last event of one stream comes after all before it
                    expect(
                        f"`give_back` of {count}: queued", log[count:], waits, slip=why_given_back(log[count:], count)
                    )
                slip = "after the wait the memory is the owner's again: `buffer.untyped_storage().resize_(0)`"
                expect(f"after `give_back` of {count}: freed", freed(buffers), [True] * count, slip=slip)
                log.clear()
                with device.on_stream(streams[OWNER]):
                    give_back()
                slip = "what has been given back is no longer kept: clear the list, or every later call waits again"
                expect("a second `give_back`: queued", log, [], slip=slip)
    keep, give_back = pairs[0]
    buffer, log = torch.zeros(4), []
    with patch.object(device, "current_stream", of_device), followed(log, streams):
        with device.on_stream(streams[READER]):
            keep(buffer)
        pairs[1][1]()
    expect(
        "freed by another pair's `give_back`",
        freed([buffer]),
        [False],
        slip="each call of `hold` makes a list of its own: two owners' buffers must not mix",
    )
    with patch.object(device, "current_stream", of_device), device.on_stream(streams[OWNER]):
        give_back()


def pair_of(answer):
    pair = answer(WHERE)
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(callable, pair))):
        raise AnswerError(f"expected two functions, `keep` and `give_back`, got {type(pair).__name__}")
    return pair


def why_kept(log):
    if not log:
        return "nothing says when the reader will be done: record an event on its stream, which is current"
    if any("record_stream" in each for each in log):
        return "`device.free` calls `record_stream`: that is the other way, whose memory comes back later"
    if any("host" in each for each in log):
        return "the host has to run ahead: it queues a wait, and waits for nothing itself"
    return "one event for each buffer, on the stream that is current when `keep` is called"


def why_given_back(log, count):
    if any("host" in each for each in log):
        return "the host has to run ahead: `wait_event` of a stream, not `synchronize`"
    if any("record_stream" in each for each in log):
        return "`device.free` calls `record_stream`: after a wait it is not needed, and would hold the block back"
    if not log:
        return "the owner's stream has to wait for the reader before its memory is used again"
    if any("another stream" in each or READER in each for each in log):
        return "who waits is the stream that is current in `give_back`: the owner's"
    if log == [f"{OWNER} waits for event 1"] and count > 1:
        return "one wait is enough only if it is for the last event"
    return "an event for each buffer, and a wait for each event"
