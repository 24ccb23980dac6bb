"""Exercise 2.2: Assign buckets."""

import torch
from torch import nn

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference
from minifsdp.ddp import bucketed


@reference(
    "2.2",
    hints=(
        "Walk through `reversed(params)` and add each to the open bucket of its dtype. If there is none, a new one "
        "begins; once a bucket is full it is open no longer.",
        "Keep the open bucket of each dtype in a dict, and append it to the result when it begins. After adding, sum "
        "numel * element_size of its parameters; if that is >= cap_bytes, delete it from the dict.",
    ),
    forbids=(bucketed.assign_buckets,),
)
def assign_buckets(params: list[nn.Parameter], cap_bytes: int) -> list[list[nn.Parameter]]:
    """Split `params` into buckets, each a list of parameters.

    Args:
        params: the parameters, in order of registration.
        cap_bytes: a bucket is closed when it holds at least this many bytes of parameters;
            0 puts each parameter in its own bucket.

    Returns:
        The buckets in the order in which they are opened. Together they contain all of `params`, each
        once and in reverse order, with one dtype per bucket and one open bucket per dtype.
        `params` is only read.
    """
    buckets: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for param in reversed(params):
        if param.dtype not in filling:
            filling[param.dtype] = []
            buckets.append(filling[param.dtype])
        bucket = filling[param.dtype]
        bucket.append(param)
        if sum(p.numel() * p.element_size() for p in bucket) >= cap_bytes:
            del filling[param.dtype]
    return buckets


def cut(sizes: list[tuple[int, torch.dtype]], cap: int, *, by: str = "begin", one_cap: bool = False) -> list[list[int]]:
    """The indices that belong together: a bucket of each dtype is open until a parameter reaches the cap.

    Args:
        by: the order of the buckets, that in which they "begin" or "close".
        one_cap: whether all that is open counts together, and is closed together.
    """
    began: list[list[int]] = []
    closed: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    for index in range(len(sizes) - 1, -1, -1):
        dtype = sizes[index][1]
        if dtype not in filling:
            filling[dtype] = []
            began.append(filling[dtype])
        filling[dtype].append(index)
        counted = [each for bucket in filling.values() for each in bucket] if one_cap else filling[dtype]
        if sum(sizes[i][0] * sizes[i][1].itemsize for i in counted) >= cap:
            closed += filling.values() if one_cap else [filling[dtype]]
            filling = {} if one_cap else {kind: bucket for kind, bucket in filling.items() if kind != dtype}
    return began if by == "begin" else closed + list(filling.values())


def cut_at_change(
    sizes: list[tuple[int, torch.dtype]], cap: int, one_dtype: bool = True, afresh: bool = True
) -> list[list[int]]:
    """One bucket open at a time: it ends with the parameter that reaches the cap, or before a dtype.

    Args:
        one_dtype: close a bucket before another dtype.
        afresh: begin to count anew after that.
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    held = 0
    for index in range(len(sizes) - 1, -1, -1):
        if one_dtype and current and sizes[current[-1]][1] != sizes[index][1]:
            buckets.append(current)
            current, held = [], 0 if afresh else held
        current = [*current, index]
        held += sizes[index][0] * sizes[index][1].itemsize
        if held >= cap:
            buckets.append(current)
            current, held = [], 0
    return buckets + [current] * bool(current)


def cut_before(sizes: list[tuple[int, torch.dtype]], cap: int) -> list[list[int]]:
    """The same, but a bucket never exceeds the cap."""
    buckets: list[list[int]] = []
    for index in range(len(sizes) - 1, -1, -1):
        held = sum(sizes[i][0] * sizes[i][1].itemsize for i in buckets[-1]) if buckets else cap
        new = sizes[index][0] * sizes[index][1].itemsize
        if not buckets or held + new > cap or sizes[buckets[-1][-1]][1] != sizes[index][1]:
            buckets.append([])
        buckets[-1].append(index)
    return buckets


def mirrored(buckets: list[list[int]], count: int) -> list[list[int]]:
    return [[count - 1 - index for index in bucket] for bucket in buckets]


def made(index: int, numel: int, dtype: torch.dtype, within: int) -> nn.Parameter:
    """A parameter of one, two or three dimensions, in a storage `within` times as long, as that of a flat parameter."""
    shape = [(1, numel), (numel, 1), (numel,), (1, numel, 1)][index % 4]
    return nn.Parameter(torch.zeros(within * numel, dtype=dtype)[:numel].view(shape))


@check("2.2")
def check_assign_buckets(answer, variant):
    """Reverse order, closed at the cap, one open bucket per dtype, every parameter once, and the list as it was."""
    size = variant.size
    full, half, double = torch.float32, torch.bfloat16, torch.float64
    plain = [(numel, full) for numel in (size, 4 * size, 2 * size, size, 5 * size, 3 * size, size)]
    mixed = [(2 * size, full), (size, full), (3 * size, half), (size, half), (size, full)]
    turns = [(size, full), (size, half), (size, full), (size, half)]
    wide = [(size, double), (2 * size, half), (size, full), (3 * size, double), (size, half), (size, double)]
    for sizes, cap in (
        (plain, 16 * size),
        (plain, 0),
        (plain, 10**9),
        (mixed, 16 * size),
        (mixed, 4 * size),
        (mixed, 10**9),
        (turns, 10**9),
        (turns, 8 * size),
        (wide, 10**9),
        (wide, 8 * size),
        ([], 16 * size),
    ):
        params = [made(index, *size, within=3 if sizes is turns else 1) for index, size in enumerate(sizes)]
        index_of = {param: index for index, param in enumerate(params)}
        for param in params[1:2]:
            param.requires_grad_(False)  # which parameters are to be reduced is for the caller to choose
        given = list(params)
        result = answer(given, cap)
        after = [index_of.get(param) for param in given]
        slip = "the list is the caller's: `reverse()`, `pop()` and the like change it, `reversed()` does not"
        expect("indices of the parameters in `params` afterwards", after, list(range(len(params))), slip=slip)
        try:
            got = [[index_of[param] for param in bucket] for bucket in result]
        except (KeyError, TypeError):
            raise AnswerError(f"cap of {cap} bytes: expected a list of lists of the parameters given") from None
        wanted = cut(sizes, cap)
        every = [[index] for index in range(len(sizes))]
        forward = mirrored(cut(sizes[::-1], cap), len(sizes))
        slips = {
            "an element of bfloat16 has 2 bytes: ask its element_size()": cut(
                [(numel * 4 // dtype.itemsize, dtype) for numel, dtype in sizes], cap
            ),
            "in order of registration: backward makes the last parameters' gradients first": forward,
            "cut from the first parameter on and then reversed: what is left over belongs at the end of backward, and "
            "so do the cuts": [bucket[::-1] for bucket in forward[::-1]],
            "the cap itself is enough: a bucket that holds cap_bytes is closed": cut(sizes, cap + 1),
            "the count of bytes begins anew with every bucket, also where the dtype changes": cut_at_change(
                sizes, cap, afresh=False
            ),
            "each dtype has an open bucket of its own: a parameter joins it, whatever came in between": cut_at_change(
                sizes, cap
            ),
            "buckets stand in the order in which they begin, not that in which they are full": cut(
                sizes, cap, by="close"
            ),
            "the cap is that of one bucket: each dtype counts its own bytes": cut(sizes, cap, one_cap=True),
            "no parameter, no bucket: an empty one would be reduced too": [[]],
            "a bucket per parameter: one latency each, as without buckets": every[::-1],
            "the last bucket is lost: it never reaches the cap, and must be reduced too": wanted[:-1],
            "the cap is in bytes; an element has element_size() of them": cut(sizes, cap * 4),
            "one buffer has one dtype: each dtype needs a bucket of its own": cut_at_change(
                sizes, cap, one_dtype=False
            ),
            "closed before the cap is reached; as in torch, the parameter that reaches it belongs to it": cut_before(
                sizes, cap
            ),
        }
        if sizes is turns:
            stored = cut([(3 * numel, dtype) for numel, dtype in sizes], cap)
            slips = {"the bytes are those of the parameter: its storage may hold others": stored} | slips
        slips = {words: wrong for words, wrong in slips.items() if wrong != wanted}
        held = ", ".join(f"{numel} {str(dtype).removeprefix('torch.')}" for numel, dtype in sizes)
        expect(f"indices of the parameters ({held}) in each bucket, cap {cap} bytes", got, wanted, slips=slips)
