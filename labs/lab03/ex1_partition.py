"""Exercise 3.1: Partition."""

import torch
from torch import Tensor, nn

from minifsdp.course.workshop.checking import AnswerError, check, expect, same
from minifsdp.course.workshop.placing import garbage
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.layout import Layout
from minifsdp.zero.bucket import Bucket

from .shared import pad


@reference(
    "3.1",
    hints=(
        "`-numel % ranks` elements are missing to the next multiple of `ranks`; they go behind the last parameter, as "
        "zeros. Views of a flat tensor come from `split` and `chunk`, never from `torch.cat`, which copies.",
        "Make `flat` of zeros, take `flat[:numel].split(sizes)`, and for each parameter: copy its values into its "
        "piece, then let `p.data` be that piece in the parameter's shape. The shards are `flat.chunk(ranks)`.",
    ),
    forbids=(Bucket.__init__, Layout.__init__),
)
def partition(params: list[nn.Parameter], ranks: int) -> tuple[Tensor, list[Tensor]]:
    """Move the parameters into one flat buffer, and split the buffer into one equal shard per rank.

    Afterwards each `p.data` is a view of the buffer in the parameter's shape, with its old values,
    and no reference to the old memory remains.

    Args:
        params: parameters of one dtype on one device; they keep this order in the buffer.
        ranks: N; the number of elements need not be divisible by N.

    Returns:
        flat [padded], where padded is the least multiple of N that holds all elements; after the
        last element, it holds zeros.
        The N shards, each a view of `flat` [padded / N]; shard r belongs to rank r.
    """
    sizes = [p.numel() for p in params]
    numel = sum(sizes)
    flat = torch.zeros(numel + -numel % ranks, dtype=params[0].dtype, device=params[0].device)
    for p, piece in zip(params, flat[:numel].split(sizes), strict=True):
        piece.copy_(p.detach().flatten())
        p.data = piece.view(p.shape)
    return flat, list(flat.chunk(ranks))


@check("3.1")
def check_partition(answer, variant):
    """One flat buffer is the parameters' memory, cut into equal shards of it, zeros behind the last parameter."""
    for ranks in dict.fromkeys((variant.ranks, 3, 4, 16)):
        check_partition_case(answer, ranks, variant)
    check_partition_case(answer, 3, variant, torch.float64)
    for ranks in dict.fromkeys((variant.ranks, 4)):
        check_partition_case(answer, ranks, variant, divides=True)
        check_transposed(answer, ranks)


def check_transposed(answer, ranks):
    """One parameter whose rows are not contiguous, as a weight that was loaded from elsewhere, and nothing to pad."""
    value = torch.arange(1.0, 1 + 3 * ranks).view(3, ranks)
    p = nn.Parameter(value.t().contiguous().t())
    over = f"over {ranks} ranks, a single parameter {list(value.shape)} that lies transposed in memory"
    slip = "a transposed parameter has no flat view of its own memory: copy it into the buffer"
    try:
        flat, shards = answer([p], ranks)
    except RuntimeError as error:
        raise AnswerError(f"{over}: {error}\nlikely slip: {slip}") from error
    expect(
        f"{over}: the flat buffer",
        flat,
        value.flatten(),
        slips={
            "its elements in the order of memory, and not row by row, as gradients are flattened": value.t().flatten()
        },
    )
    expect(f"{over}: the shards", list(shards), list(value.flatten().chunk(ranks)))
    expect(f"{over}: the parameter", p.detach(), value, slip="p.data lost its shape or its place")
    with torch.no_grad():
        flat.fill_(7)
    slip = "the flat buffer is not its memory"
    expect(f"{over}: whether a write to the buffer shows in it", bool((p == 7).all()), True, slip=slip)


def check_partition_case(answer, ranks, variant, dtype=torch.float32, divides=False):
    shapes = [(variant.size, 3), (variant.size,), (2, 2, 3), ()]
    if divides:
        shapes.append((ranks - sum(torch.Size(shape).numel() for shape in shapes) % ranks,))
    values = torch.arange(1.0, 1 + sum(torch.Size(shape).numel() for shape in shapes), dtype=dtype)
    with Ledger() as ledger:
        pieces = values.clone().split([torch.Size(shape).numel() for shape in shapes])
        params = [nn.Parameter(piece.view(shape).clone()) for piece, shape in zip(pieces, shapes, strict=True)]
        del pieces
        params[1].requires_grad_(False)
        params[0].grad = gradient = torch.ones_like(params[0])
        given, trained = list(params), [p.requires_grad for p in params]
        over = f"over {ranks} ranks, "
        try:
            with garbage():
                result = answer(given, ranks)
        except RuntimeError as error:
            if not any(words in str(error) for words in ("invalid for input of size", "split_sizes", "must match")):
                raise
            raise AnswerError(
                f"{over}the {len(values)} elements did not fit where they were put: {error}\n"
                "likely slip: the buffer is too short for the parameters; round up to a multiple of N, not down"
            ) from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor)):
            raise AnswerError(f"{over}expected the flat buffer and the list of shards, got {type(result).__name__}")
        flat, shards = result
        live = sum(ledger.mark("partitioned").values()) - gradient.nbytes
    numel, length = len(values), -(-len(values) // ranks)
    padding = torch.zeros(ranks * length - numel, dtype=dtype)
    wanted = torch.cat([values, padding])
    fronts = torch.cat([padding, values])
    each = torch.cat([pad(p.detach().flatten(), ranks) for p in params])
    expect(
        f"{over}entries of `params` that are the parameters still",
        [a is b for a, b in zip(given, params, strict=False)],
        [True] * len(params),
        slip="the model holds the parameters that it has: set `p.data`; another nn.Parameter, or a change of the list, "
        "does not reach it",
    )
    expect(
        f"{over}requires_grad of the parameters",
        [p.requires_grad for p in params],
        trained,
        slip="they are moved, and are otherwise as they were",
    )
    slip = "its value is moved, its .grad stays"
    expect(f"{over}whether a parameter has its .grad still", params[0].grad is gradient, True, slip=slip)
    expect(
        f"{over}elements of the flat buffer",
        flat.numel(),
        ranks * length,
        slips={
            "every parameter is padded by itself; pad once, behind the last one": each.numel(),
            "the remainder is dropped: N does not divide the number of elements": numel // ranks * ranks,
            "the padding is missing: equal shards need a multiple of N": numel,
            "a whole N of padding where N divides: `-numel % N` is 0 there, `N - numel % N` is N": numel + ranks,
        },
    )
    expect(f"{over}dimensions of the flat buffer", flat.dim(), 1)
    expect(
        f"{over}type of the flat buffer's elements",
        str(flat.dtype),
        str(dtype),
        slip="the buffer must have the parameters' dtype and device, which need not be the defaults",
    )
    expect(
        f"{over}whether autograd follows the flat buffer",
        flat.requires_grad,
        False,
        slip="the copying was recorded: copy p.detach(), p.data, or under torch.no_grad()",
    )
    expect(f"{over}number of shards", len(shards), ranks)
    expect(
        f"{over}elements of the shards",
        [shard.numel() for shard in shards],
        [length] * ranks,
        slip="the shards must be equal in length, wherever that cuts a parameter",
    )
    slips = {"the padding stands in front of the parameters; it belongs behind the last one": fronts}
    slip = "parameters in their order, then zeros to the end"
    if same(flat.detach()[:numel], wanted[:numel]):
        slips, slip = {}, "behind the last element the buffer must be zero"
        if bool(flat.isnan().any()):
            slip += ", and `empty` and `new_empty` hand out whatever memory held, here nan"
    expect(f"{over}the flat buffer", flat, wanted, slips=slips, slip=slip)
    for rank, (shard, part) in enumerate(zip(shards, wanted.chunk(ranks), strict=True)):
        expect(f"{over}the shard", shard, part, rank=rank, slip="shard r is part r of the flat buffer")
    where = flat.untyped_storage().data_ptr()
    expect(
        f"{over}parameters whose memory is the flat buffer",
        sum(p.untyped_storage().data_ptr() == where for p in params),
        len(params),
        slip="the flat buffer is a copy: let p.data be a view of it, or the model will see no update",
    )
    expect(
        f"{over}shards whose memory is the flat buffer",
        sum(shard.untyped_storage().data_ptr() == where for shard in shards),
        ranks,
        slip="the shards are copies, so what the optimizer writes there never reaches the model",
    )
    for p, shape, part in zip(params, shapes, values.split([p.numel() for p in params]), strict=True):
        expect(f"{over}a parameter", p.detach(), part.view(shape), slip="p.data lost its shape or its place")
    expect(
        f"{over}bytes alive afterwards",
        live,
        flat.nbytes,
        slip="something besides the flat buffer is alive: the parameters' old memory, or a second copy",
    )
