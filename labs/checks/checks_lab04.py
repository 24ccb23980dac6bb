"""The checks of lab 04."""

from collections import OrderedDict
from contextlib import contextmanager
from itertools import pairwise

import torch
from placing import garbage
from torch import nn

from minifsdp import device
from minifsdp.course.workshop.checking import AnswerError, check, describe, expect, same
from minifsdp.instruments.watch.ledger import Ledger

GARBAGE = "uninitialized memory, here nan, in the padding: a reduction and a norm read it, so it must be zero"
WHOLE_N = "a whole N of padding where N divides: `-numel % N` is 0 there, `N - numel % N` is N"


def numbers(numel, dtype):
    """1, 2, 3, ..., such that every dtype holds them exactly."""
    return (torch.arange(numel) % 97 + 1).to(dtype)


def total(ledger):
    return sum(ledger.live().values())


@check("4.1")
def check_pad_and_chunk(answer, variant):
    """Equal shards, every element once and in order, zeros behind them, no copy but one padded buffer."""
    cases = [
        (numbers(numel, dtype), ranks)
        for ranks in (variant.ranks, 4, 16, 1)
        for numel in (variant.size, 2 * ranks, ranks + 1)
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
    ]
    for flat, ranks in cases:
        chunk_values(answer, flat, ranks)
    for flat, ranks in cases:
        chunk_memory(answer, flat, ranks)


def chunk_values(answer, flat, ranks):
    numel, length = flat.numel(), -(-flat.numel() // ranks)
    where = f"over {ranks} ranks ({numel} elements)"
    with garbage():
        shards = answer(flat.clone(), ranks)
    if not isinstance(shards, (list, tuple)) or len(shards) != ranks:
        got = f"{len(shards)}" if isinstance(shards, (list, tuple)) else describe(shards)
        raise AnswerError(f"{where}: expected a list of {ranks} tensors, got {got}")
    padding = -numel % ranks
    padded = torch.cat([flat, flat.new_zeros(padding)])
    usual = {
        "every shard is padded by itself: the padding belongs behind the last element of all": [
            torch.cat([part, part.new_zeros(length - part.numel())]) for part in flat.tensor_split(ranks)
        ],
        "the padding stands in front, so that every parameter's offset has moved": (
            torch.cat([flat.new_zeros(padding), flat]).chunk(ranks)
        ),
        "every N-th element: a shard is contiguous, and shards are in order": padded.view(-1, ranks).unbind(1),
    }
    if not padding:
        usual[WHOLE_N] = torch.cat([flat, flat.new_zeros(ranks)]).chunk(ranks)
    for rank, shard in enumerate(shards):
        slip = None
        if isinstance(shard, torch.Tensor):
            if shard.dtype != flat.dtype:
                slip = "another dtype: `torch.zeros` is float32 unless told, and `cat` promotes"
            elif shard.numel() < length:
                slip = "the shard is short, and collectives want them even: `chunk` does not pad, pad before it"
            elif bool(shard.isnan().any()):
                slip = GARBAGE
        slips = {text: wrong[rank] for text, wrong in usual.items() if len(wrong) == ranks}
        expect(f"shard {where}", shard, padded[rank * length :][:length], rank=rank, slips=slips, slip=slip)


def chunk_memory(answer, flat, ranks):
    length = -(-flat.numel() // ranks)
    where = f"over {ranks} ranks ({flat.numel()} elements)"
    given = flat.clone()
    with Ledger() as ledger:
        shards = answer(given, ranks)
        made = total(ledger)
    viewed = "where N divides, the shards are views of `flat`: who changes a shard changes the parameters"
    if ranks == 1:
        viewed = "a single rank's shard is a part of a new buffer, too, and not `flat`"
    expect(
        f"bytes made {where}",
        made,
        ranks * length * flat.element_size(),
        slips={viewed: 0},
        slip="more than one padded buffer is left",
    )
    for rank, shard in enumerate(shards):
        together = shard.untyped_storage().data_ptr() == shards[0].untyped_storage().data_ptr()
        offset = shard.storage_offset() if together else "an offset in a buffer of its own"
        slip = "every shard is a copy: `chunk` gives views of one buffer"
        expect(f"offset of the shard in the buffer {where}", offset, rank * length, rank=rank, slip=slip)
    expect(f"`flat` afterwards {where}", given, flat, slip="the input was changed")


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


@check("4.3")
def check_shard_bounds(answer, variant):
    """Each parameter's part of each shard, empty where they do not meet, the padding nobody's."""
    for sizes in ([variant.size, 3, 1, 2 * variant.size, 5], [12, 3], [16, 16], [3, 0, 4, 0]):
        for ranks in (variant.ranks, 4, 16, 1):
            bounds_of(answer, sizes, ranks)


def bounds_of(answer, sizes, ranks):
    length = -(-sum(sizes) // ranks)
    owner = [index for index, size in enumerate(sizes) for _ in range(size)] + [None] * (-sum(sizes) % ranks)
    cells = [(index, rank) for rank in range(ranks) for index in range(len(sizes))]
    got = {}
    for index, rank in cells:
        given = list(sizes)
        found = answer(given, index, rank, ranks)
        expect("`sizes` afterwards", given, sizes, slip="it is the caller's list, and is only read")
        if not isinstance(found, (list, tuple)) or len(found) != 2 or not all(type(edge) is int for edge in found):
            what = f"rank {rank}, bounds of parameter {index} of sizes {sizes} over {ranks} ranks"
            raise AnswerError(f"{what}: expected two integers (low, high), got {describe(found)}")
        got[index, rank] = tuple(found)
    usual = usual_bounds(sizes, ranks)
    # a slip that explains the whole table rather than one cell of it
    slip = next((text for text, wrong in usual.items() if all(got[cell] == wrong[cell] for cell in cells)), None)
    for index, rank in cells:
        low, high = got[index, rank]
        owned = [at for at, each in enumerate(owner[rank * length : (rank + 1) * length]) if each == index]
        right = (low, high) == (owned[0], owned[-1] + 1) if owned else 0 <= low == high <= length
        if not right:
            wanted = f"[{owned[0]}, {owned[-1] + 1}]" if owned else f"an empty range within [0, {length}]"
            what = f"rank {rank}, bounds of parameter {index} of sizes {sizes} over {ranks} ranks"
            if slip is None:
                cell = (text for text, wrong in usual.items() if wrong[index, rank] == (low, high))
                slip = next(
                    cell, "where it begins and ends, less where the shard begins, both clamped into [0, length]"
                )
            raise AnswerError(f"{what}: expected {wanted}, got [{low}, {high}]\nlikely slip: {slip}")


def usual_bounds(sizes, ranks):
    """What usual slips give, by words, for each parameter and rank."""
    length, last = -(-sum(sizes) // ranks), len(sizes) - 1
    slips = {
        "positions in the whole flat parameter: subtract where the shard begins": {},
        "`high` is the last element instead of the one behind it": {},
        "beyond the shard: clamp both ends into [0, length]": {},
        "`low` is clamped, `high` is not: the parameter goes on in the next shard": {},
        "low above high: clamp both ends into [0, length], and what does not meet is empty": {},
        "the shard's length rounded down: shards are padded, so round up": {},
        "the padding belongs to no parameter, the last one ends before it": {},
        "offset and length, where the end is asked for": {},
        "a whole N of padding where N divides, or too long a shard: its length is ceil(sum / N)": {},
        "positions in the parameter: asked are positions in the shard": {},
        "parameters are not sharded one by one: the flat parameter is, and each shard has a part of some": {},
        "ranks count from 0: the shard of rank r begins at r * length": {},
        "a parameter begins where those before it end: `sum(sizes[:index])`, without its own size": {},
        "the last one's end is not the shard's: `low` is not clamped, or `high` not from below": {},
        "the empty range of what begins in a later shard lies behind this one's end: `low` is at most the length": {},
        "sizes repeat: `sizes.index(size)` finds the first parameter of that size, `index` says which is asked for": {},
    }
    for rank in range(ranks):
        for index, size in enumerate(sizes):
            offset, start, floor = sum(sizes[:index]), rank * length, rank * (sum(sizes) // ranks)
            begin, end = offset - start, offset + size - start
            low, high = clamped(begin, length), clamped(end, length)
            whole = max(offset, start), min(offset + size, start + length)
            long = sum(sizes) // ranks + 1
            longer = tuple(clamped(edge - rank * long, long) for edge in (offset, offset + size))
            own, twin = -(-size // ranks), sum(sizes[: sizes.index(size)]) - start
            after = clamped(begin - length, length), clamped(end - length, length)
            rounded = [clamped(edge, sum(sizes) // ranks) for edge in (offset - floor, offset + size - floor)]
            wrong = [
                (whole[0], max(whole)),
                (low, high - 1 if high > low else low),
                (begin, end),
                (max(begin, 0), max(end, 0)),
                (max(begin, 0), min(end, length)),
                tuple(rounded),
                (low, clamped(end + (-sum(sizes) % ranks if index == last else 0), length)),
                (low, high - low),
                longer,
                (whole[0] - offset, whole[1] - offset) if low < high else (0, 0),
                (0, clamped(size - rank * own, own)),
                after,
                (clamped(begin + size, length), clamped(end + size, length)),
                (low, min(end, length)),
                (max(begin, 0), max(begin, 0, min(end, length))),
                (clamped(twin, length), clamped(twin + size, length)),
            ]
            for table, cell in zip(slips.values(), wrong, strict=True):
                table[index, rank] = cell
    return slips


def clamped(edge, length):
    return min(max(edge, 0), length)


class Tied(nn.Module):
    """A head with the embedding's weight, two norms of equal values, and one layer under two names."""

    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.embed = nn.Embedding(size, 4)
        self.norm1, self.norm2 = nn.LayerNorm(4, bias=False), nn.LayerNorm(4, bias=False)
        self.up = self.again = nn.Linear(4, 4)
        self.head = nn.Linear(4, size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.again(self.up(self.norm1(self.embed(tokens))))
        return self.head(self.norm2(self.scale * hidden)).square().mean()


TIED_NAMES = [
    ["scale"],
    ["embed.weight", "head.weight"],
    ["norm1.weight"],
    ["norm2.weight"],
    ["up.weight"],
    ["up.bias"],
]
BY_PATH = [[each[0], each[0].replace("up", "again")] if "up" in each[0] else each for each in TIED_NAMES]


@check("4.4")
def check_place_views(answer, variant):
    """Each parameter flattened once, its view in every place, and the gradient of both places in the one buffer."""
    torch.manual_seed(variant.seed)
    tokens = torch.arange(variant.size)
    plain = Tied(variant.size)
    loss = plain(tokens)
    loss.backward()
    with Ledger() as ledger:
        model = Tied(variant.size)
        model.load_state_dict(plain.state_dict())
        names = {id(p): name for name, p in model.named_parameters()}
        given, views, buffers = [], [], []

        def flatten(params):
            if any(p is None for p in params):
                raise AnswerError(
                    "what `flatten` is given: expected Parameters, got None among them\n"
                    "likely slip: a module may have None for a parameter (`bias=False`): skip it"
                )
            given.extend(names.get(id(p), "no parameter of the model") for p in params)
            full = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in params]))
            parts = torch.split(full, [p.numel() for p in params])
            buffers.append(full)
            views.extend(part.view(p.shape) for part, p in zip(parts, params, strict=True))
            return list(views)

        said = answer(model, flatten)
        ledger.mark("placed")
        left = total(ledger)
    if not buffers:
        raise AnswerError("`flatten` was not called: it makes the views")
    expect("calls of `flatten`", len(buffers), 1, slip="one call with all parameters: they share one buffer")
    first = [users[0] for users in TIED_NAMES]
    expect(
        "what `flatten` is given",
        given,
        first,
        slips={
            "the tied parameter once per place: flattened, sharded and updated twice, it is tied no more": (
                [*first, "embed.weight"]
            ),
            "parameters of equal values taken for one: they are tied if they are one object": (
                [name for name in first if not name.startswith("norm2")]
            ),
        },
        slip="each parameter once, in the order of `named_parameters`",
    )
    check_places(model, views)
    expect(
        "names returned",
        said,
        TIED_NAMES,
        slips={
            "one place of each: the tied parameter has two": [[name] for name in first],
            "the root's own Parameter has no prefix, and no dot": [[".scale"], *TIED_NAMES[1:]],
            "a module reached by two paths is one place: `named_modules()` shows it once": BY_PATH,
        },
    )
    expect("parameters that the model still registers", [name for name, _ in model.named_parameters()], [])
    found = model(tokens)
    expect("loss with the views", found.detach(), loss.detach(), slip="the views are not where they belong")
    found.backward()
    wanted = torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
    expect("gradient of the buffer", buffers[0].grad, wanted, tolerance=1e-5)
    expect("bytes left", left, wanted.numel() * 4, slip="the original parameters are still held by somebody")
    check_nested(answer)
    check_twice_in_one(answer)
    check_without_memory(answer)


def check_without_memory(answer):
    """Parameters on meta, which have no memory: all have one address."""
    with torch.device("meta"):
        model = nn.Sequential(OrderedDict(one=nn.Linear(2, 2, bias=False), two=nn.Linear(2, 2, bias=False)))
    said = answer(model, lambda params: [p.detach() for p in params])
    slip = "a parameter is known by what it is, and not by its address: those on meta have none"
    expect("names returned of two layers on meta", said, [["one.weight"], ["two.weight"]], slip=slip)


def check_twice_in_one(answer):
    """A module that has one Parameter under two names."""
    layer = nn.Module()
    layer.left = layer.right = nn.Parameter(torch.ones(3))
    model, views = nn.ModuleDict({"layer": layer}), []

    def flatten(params):
        views.extend(p.detach().clone() for p in params)
        return list(views)

    said = answer(model, flatten)
    where = "of a module that has one Parameter under two names"
    expect(f"Parameters {where}", len(views), 1, slip="it is flattened once")
    slip = "both names are places of it, though they are in one module"
    expect(f"names returned {where}", said, [["layer.left", "layer.right"]], slip=slip)
    found = [getattr(layer, name, None) is views[0] for name in ("left", "right")]
    expect(f"names {where} that have the view", found, [True, True], slip=slip)


def check_nested(answer):
    """Three levels down; a frozen parameter, and buffers, which stay where they are."""
    norm, linear = nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False).requires_grad_(False)
    model = nn.ModuleDict({"outer": nn.ModuleDict({"inner": nn.ModuleDict({"norm": norm, "linear": linear})})})
    buffers, views = dict(model.named_buffers()), []

    def flatten(params):
        full = torch.cat([p.detach().reshape(-1) for p in params])
        views.extend(
            part.view(p.shape) for part, p in zip(full.split([p.numel() for p in params]), params, strict=True)
        )
        return list(views)

    said = answer(model, flatten)
    places = [(norm, "weight"), (norm, "bias"), (linear, "weight")]
    names = [[f"outer.inner.{'norm' if module is norm else 'linear'}.{attribute}"] for module, attribute in places]
    where = "of a frozen layer and a BatchNorm three levels down"
    slip = "every module of the tree, whatever its depth, and every parameter, trained or not"
    expect(f"names returned {where}", said, names, slip=slip)
    found = [getattr(module, attribute) is view for (module, attribute), view in zip(places, views, strict=True)]
    expect(f"places {where} that have their view", found, [True] * 3, slip=slip)
    slip = "a buffer is no parameter, and stays as it is"
    after = dict(model.named_buffers())
    kept = [name for name in buffers if after.get(name) is buffers[name]]
    expect(f"buffers {where}", [sorted(kept), len(after)], [sorted(buffers), len(buffers)], slip=slip)


def check_places(model, views):
    for view, users in zip(views, TIED_NAMES, strict=True):
        for name in users:
            path, _, attribute = name.rpartition(".")
            found = getattr(model.get_submodule(path), attribute, None)
            if found is view:
                continue
            got, slip = describe(found), None
            if isinstance(found, nn.Parameter):
                same_memory = found.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
                got = "a Parameter over the view's memory" if same_memory else "the old Parameter"
                slip = "this place was forgotten: a tied parameter has two"
                if same_memory:
                    slip = "a Parameter is a leaf: its gradient stays in it and never reaches the buffer"
                elif name == users[0]:
                    slip = "the old Parameter is still registered there: delete it from `_parameters`, then set"
            elif isinstance(found, torch.Tensor):
                got = "another tensor of the same values" if same(found, view, 1e-6) else describe(found)
                slip = "a copy of the view: a gather writes to the buffer, and this place would not see it"
                if found.untyped_storage().data_ptr() == view.untyped_storage().data_ptr():
                    got, slip = "another view of the same memory", "it has its shape already: set it as it is"
                    if not found.requires_grad:
                        got, slip = "a detached view", "autograd does not find the flat Parameter: its gradient is lost"
            raise AnswerError(
                f"{name}: expected the view itself, got {got}" + (f"\nlikely slip: {slip}" if slip else "")
            )


def six_layers(widths):
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    layers[1].bias.requires_grad_(False)
    layers[2].register_buffer("scale", torch.ones(3))
    pairs = [nn.Sequential(OrderedDict({f"layer{i}": layers[i] for i in pair})) for pair in ((1, 2), (4, 5))]
    return nn.Sequential(OrderedDict(layer0=layers[0], middle=pairs[0], layer3=layers[3], last=pairs[1]))


NAMES = ["layer0", "middle.layer1", "middle.layer2", "layer3", "last.layer4", "last.layer5"]


def rows(widths, numbers, ranks, without=(), buffers=False):
    """The layout of a unit of these layers: pairs of name and elements, and the padding."""
    found = []
    for i in numbers:
        a, b = widths[i], widths[i + 1]
        found += [(f"{NAMES[i]}.weight", a * b), (f"{NAMES[i]}.bias", b)]
        found += [(f"{NAMES[i]}.scale", 3)] if buffers and i == 2 else []
    found = [row for row in found if row[0] not in without]
    return [*found, ("padding", -sum(n for _, n in found) % ranks)]


def pairs_of(units):
    ok = isinstance(units, (list, tuple)) and all(isinstance(unit, dict) for unit in units)
    return [list(unit.items()) for unit in units] if ok else units


@check("4.5")
def check_assign_units(answer, variant):
    """Each parameter in one unit, the root's are the rest; padding once per unit; a tie between units is refused."""
    widths = [3, variant.size, 4, variant.size + 1, 2, 4, 5]
    for ranks in (variant.ranks, 16):
        model = six_layers(widths)
        for inner, numbers in (
            (("middle", "last"), [(0, 3), (1, 2), (4, 5)]),
            (("last",), [(0, 1, 2, 3), (4, 5)]),
            (("last", "middle"), [(0, 3), (4, 5), (1, 2)]),
        ):
            units_of(answer, widths, model, inner, numbers, ranks)
    model = six_layers([2, 2, 2, 2, 2, 2, 2])  # two layers have 12 elements
    units_of(answer, [2] * 7, model, ("middle", "last"), [(0, 3), (1, 2), (4, 5)], 4)
    for one, other in ((1, 2), (0, 3)):
        model = six_layers([3] * 7)
        tie(model, one, other)
        without = [f"{NAMES[other]}.weight"]
        units_of(answer, [3] * 7, model, ("middle", "last"), [(0, 3), (1, 2), (4, 5)], 4, without)
    for one, other in ((0, 5), (2, 4)):
        model = six_layers([3] * 7)
        tie(model, one, other)
        refused(answer, model, f"{NAMES[one]}.weight", f"{NAMES[other]}.weight")
    slip = "a name that begins as the unit's does: `layer10` is not in `layer1`, compare modules, or prefix and dot"
    three_layers(answer, ("layer1", "layer10", "layer2"), slip)
    slip = "parameters of equal values taken for one: they are tied if they are one object"
    three_layers(answer, ("layer0", "layer1", "layer2"), slip, zeros=True)
    reached_twice(answer)
    own_and_without_memory(answer)


def own_and_without_memory(answer):
    """A Parameter of the root itself; all on meta, where parameters have one address."""
    with torch.device("meta"):
        model = nn.Sequential(OrderedDict(one=nn.Linear(2, 2), two=nn.Linear(2, 2)))
        model.scale = nn.Parameter(torch.ones(()))
    what = "units of a scalar of the root, and of the layers one and two, on meta, with one wrapped, over 4 ranks"
    try:
        got = pairs_of(answer(model, [model.one], 4))
    except (ValueError, AttributeError) as error:
        said = f"{what}: expected layouts, got {type(error).__name__}: {error}"
        slip = "the root's own Parameter has no dot in its name; and on meta all parameters have one address"
        raise AnswerError(f"{said}\nlikely slip: {slip}") from error
    root = [("scale", 1), ("two.weight", 4), ("two.bias", 2), ("padding", 1)]
    slip = "a parameter is known by what it is, and not by its address: those on meta have none"
    expect(what, got, [root, [("one.weight", 4), ("one.bias", 2), ("padding", 2)]], slip=slip)


def reached_twice(answer):
    """A wrapped module that the model applies at two places: its parameters are in one unit all the same."""
    layer = nn.Linear(2, 2)
    model = nn.Sequential(OrderedDict(first=layer, middle=nn.Linear(2, 3), again=layer))
    what = "units of first, middle and again, where first and again are one module, which is wrapped, over 4 ranks"
    slip = "a module may have two paths, which is no tie of two units: compare modules, not the beginnings of names"
    wanted = [
        [("middle.weight", 6), ("middle.bias", 3), ("padding", 3)],
        [("first.weight", 4), ("first.bias", 2), ("padding", 2)],
    ]
    try:
        got = pairs_of(answer(model, [layer], 4))
    except ValueError as error:
        raise AnswerError(f"{what}: expected layouts, got ValueError: {error}\nlikely slip: {slip}") from error
    expect(what, got, wanted, slip=slip)


def three_layers(answer, names, slip, zeros=False):
    """With none of them wrapped, and the first."""
    model = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in names))
    if zeros:
        for p in model.parameters():
            nn.init.zeros_(p)
    each = [[(f"{name}.weight", 4), (f"{name}.bias", 2)] for name in names]
    for inner, wanted in (
        ([], [[*each[0], *each[1], *each[2], ("padding", 2)]]),
        ([model[0]], [[*each[1], *each[2], ("padding", 0)], [*each[0], ("padding", 2)]]),
        (list(model), [[("padding", 0)], *([*rows, ("padding", 2)] for rows in each)]),
    ):
        equal = ", all zero" if zeros else ""
        what = f"units of {', '.join(names)}{equal}, with {len(inner) or 'none'} wrapped, over 4 ranks"
        try:
            got = pairs_of(answer(model, inner, 4))
        except ValueError as error:
            raise AnswerError(f"{what}: expected layouts, got ValueError: {error}\nlikely slip: {slip}") from error
        expect(what, got, wanted, slip=slip)


def tie(model, one, other):
    layers = [model.get_submodule(name) for name in NAMES]
    layers[other].weight = layers[one].weight


def units_of(answer, widths, model, inner, numbers, ranks, without=()):
    tied = f", {without[0]} tied within its unit" if without else ""
    where = f"with {' and '.join(inner)} wrapped, over {ranks} ranks{tied}"
    try:
        given = [model.get_submodule(name) for name in inner]
        got = pairs_of(answer(model, given, ranks))
        slip = "the list is the caller's, and is only read"
        expect("modules in `inner` afterwards", len(given), len(inner), slip=slip)
    except ValueError as error:
        raise AnswerError(
            f"units {where}: expected their layouts, got ValueError: {error}"
            + ("\nlikely slip: a tie within one unit is no error, only one between two units is" if without else "")
        ) from error
    wanted = [rows(widths, each, ranks, without) for each in numbers]
    everything = range(6)
    stages = [[0, 1], [2, 3], [4, 5]] if len(inner) == 2 else [[0, 1, 2], [3, 4, 5]]
    whole = [[*unit[:-1], ("padding", -sum(n for _, n in unit[:-1]) % ranks or ranks)] for unit in wanted]
    model_order = sorted(range(1, len(wanted)), key=lambda unit: numbers[unit])
    slips = {
        "the units stand in the order of `inner`, not in that of the model": [
            wanted[0],
            *(wanted[unit] for unit in model_order),
        ],
        "a buffer is no parameter: it is not flattened": [
            rows(widths, each, ranks, without, buffers=True) for each in numbers
        ],
        "frozen parameters are flattened as well: a unit is gathered whole": [
            rows(widths, each, ranks, (*without, f"{NAMES[1]}.bias")) for each in numbers
        ],
        "the root holds only what no inner unit holds, not the whole model again": (
            [rows(widths, everything, ranks, without), *wanted[1:]]
        ),
        "consecutive groups are pipeline stages: a unit is what is wrapped, the root the rest, wherever it is": (
            [rows(widths, each, ranks, without) for each in stages]
        ),
        "the tied parameter is counted at both places: within its unit it is flattened once": (
            [rows(widths, each, ranks) for each in numbers]
        ),
        "the padding is that of the unit's sum, once, not of each parameter": [
            [*unit[:-1], ("padding", sum(-n % ranks for _, n in unit[:-1]))] for unit in wanted
        ],
        WHOLE_N: whole,
    }
    all_wrong = next((text for text, wrong in slips.items() if same(got, wrong)), None)  # explains all units at once
    if not isinstance(got, list) or len(got) != len(wanted):
        count = f"{len(got)} units" if isinstance(got, list) else describe(got)
        raise AnswerError(f"units {where}: expected a list of {len(wanted)} dicts, got {count}")
    for i, (unit, right) in enumerate(zip(got, wanted, strict=True)):
        name = "root unit" if i == 0 else f"unit of {inner[i - 1]}"
        usual = {} if all_wrong else {text: wrong[i] for text, wrong in slips.items() if wrong[i] != right}
        slip = all_wrong
        if slip is None and same(unit[:-1], right[:-1]):
            slip = "the padding is that of the unit's sum, once"
        elif slip is None and same(sorted(unit, key=str), sorted(right, key=str)):
            slip = "another order: as the model registers them, and the padding last"
        expect(f"{name} {where}", unit, right, slips=usual, slip=slip)


def refused(answer, model, one, other):
    what = f"{one} and {other} are one parameter in two units: expected a ValueError that names both"
    try:
        got = pairs_of(answer(model, [model.middle, model.last], 4))
    except ValueError as error:
        if one in str(error) and other in str(error):
            return
        raise AnswerError(f"{what}, got ValueError: {error}") from error
    twice = sum(name in (one, other) for unit in got for name, _ in unit) == 2
    slip = (
        "the tie was not seen (`named_parameters()` tells one place of each), so one unit has the parameter, "
        "and the other computes with memory that was freed"
    )
    if twice:
        slip = "each unit shards and updates a copy of its own, and the two gradients are never added"
    raise AnswerError(f"{what}, got layouts\nlikely slip: {slip}")
