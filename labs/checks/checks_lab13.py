"""The checks of lab 13."""

import re
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from minifsdp import comm
from minifsdp.course.workshop.checking import AnswerError, check, describe, expect, on_ranks, same
from minifsdp.course.workshop.comparing import dtype_slip
from minifsdp.course.workshop.late import link_of
from minifsdp.instruments.launch import rank_device
from minifsdp.tensor_parallel import layouts

ITEM = 8  # bytes: everything is in float64


def exact(what, got, wanted, slip=None, **how):
    """`expect` in all digits: of values that are right in other digits, the dtype explains the difference."""
    expect(what, got, wanted, slip=dtype_slip(got, wanted) or slip, tolerance=1e-12, **how)


def randn(*shape, seed=0, rank=0):
    """The same on every rank that gives the same `rank`."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + rank))


def here(*tensors):
    """The tensors on this rank's device."""
    return [tensor.to(rank_device()) for tensor in tensors]


def kinds(calls):
    """Collectives with their bytes, as text."""
    return [f"{call.op} of {call.payload} bytes" for call in calls]


def pair_of(answer, group):
    pair = answer(group)
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(callable, pair))):
        raise AnswerError(f"expected two functions, f and g, got {describe(pair)}")
    return pair


def tensor(what, got, rank):
    if not isinstance(got, Tensor):
        raise AnswerError(f"rank {rank}, {what}: expected a tensor, got {describe(got)}")
    return got.detach()


# 13.1


def factors(variant, t):
    """x [rows, in] and w [in, out]: the example, then even parts, short parts, and ranks without a part."""
    rows = variant.size
    even = (rows, 2 * t, 3 * t)
    sizes = (even, (3, 2 * t + 1, 2 * t + 1), (rows, 1, 5), (2, 5, 1), (1, t + 1, t + 1))
    example = torch.tensor([[1.0, 2, 3], [4, 5, 6]]).double(), torch.tensor([[1.0, 2], [3, 4], [5, 6]]).double()
    others = [(randn(m, k, seed=variant.seed), randn(k, n, seed=variant.seed + 1)) for m, k, n in sizes]
    again = randn(*even[:2], seed=variant.seed + 2), randn(*even[1:], seed=variant.seed + 3)
    turned = [each.t().contiguous().t() for each in again]  # the same, stored column by column
    return [example, *others, again, turned]


TOO_FEW = (
    "`chunk` returns fewer than t parts if the dimension is short: the last ranks then have no columns, or no rows"
)
UNEQUAL = (
    "an all-gather needs shards of equal size, but the last ranks have fewer columns: pad every rank's result with "
    "zeros to ceil(out / t) columns, and remove the columns beyond `out` after the gather"
)


class Sent:
    """A link that notes what this rank sends."""

    def __init__(self, link):
        self.link, self.values = link, []

    def submit(self, call, collective):
        self.values.append([each for each in collective.args if isinstance(each, Tensor)][-1].flatten().tolist())
        return collective() if self.link is None else self.link.submit(call, collective)


def observe_multiply(answer, cases):
    """For each case and split: product, messages, floating-point operations, whether x and w are unchanged, values."""
    found = []
    for by in ("columns", "rows"):
        for case in cases:
            x, w = here(*case)
            given = x.clone(), w.clone()
            try:
                with (
                    link_of(Sent(comm.link)) as sent,
                    comm.record() as calls,
                    FlopCounterMode(display=False) as counter,
                ):
                    got = answer(x, w, by, comm.world())
            except (IndexError, RuntimeError, ValueError) as error:
                slip = TOO_FEW if isinstance(error, IndexError) else UNEQUAL
                if slip == UNEQUAL and not re.search(r"are not \d+ parts of|world_size times input", str(error)):
                    raise
                where = f"{by}, {list(x.shape)} times {list(w.shape)}"
                raise AnswerError(f"{where}: it raises {error!r}\nlikely slip: {slip}") from error
            unchanged = torch.equal(x, given[0]) and torch.equal(w, given[1])
            got = got.cpu() if isinstance(got, Tensor) else got
            found.append((by, *case, got, kinds(calls), counter.get_total_flops(), unchanged, sent.values))
    return found


@check("13.1")
def check_multiply(answer, variant):
    """Every rank has the full result, after one all-gather for columns and one all-reduce for rows."""
    for t in dict.fromkeys((variant.ranks, 3)):
        check_multiply_on(t, answer, variant)


def check_multiply_on(t, answer, variant):
    for rank, found in enumerate(on_ranks(t, observe_multiply, answer, factors(variant, t), slip=UNEQUAL)):
        for by, x, w, got, calls, flops, unchanged, sent in found:
            where = f"{by}, {list(x.shape)} times {list(w.shape)} on {t} ranks"
            dim = 1 if by == "columns" else 0
            size = -(-w.shape[dim] // t)
            slips, usual = (columns_slips if by == "columns" else rows_slips)(x, w, t, rank, size)
            later = [a @ b for _, a, b, *_ in found if (a.shape, b.shape) == (x.shape, w.shape)]
            if any(same(got, each, 1e-12) for each in later):
                usual = "its buffer is kept from call to call, and a later call overwrites what this one returned"
            exact(f"result by {where}", tensor(where, got, rank), x @ w, rank=rank, slips=slips, slip=usual)
            messages(where, calls, (x, w, t, size), by, rank)
            most = 2 * x.shape[0] * w.numel() // w.shape[dim] * size
            if flops > most:
                raise AnswerError(
                    f"rank {rank}, {where}: expected at most {most:,} floating-point operations, got {flops:,}\n"
                    "likely slip: each rank has to multiply only by its shard of w; otherwise, nothing is gained"
                )
            mine = part(w, dim, t, rank)
            own = x @ mine if by == "columns" else part(x, 1, t, rank) @ mine
            slip = "the shards are those of `chunk`, ceil(length / t) long: `tensor_split` evens lengths out"
            missing = [value for value in own.flatten().tolist() if min(abs(value - v) for v in sent[0]) > 1e-9]
            expect(f"values of its own result that it does not send, {where}", missing, [], rank=rank, slip=slip)
            slip = "x and w belong to the caller: do not change them"
            expect(f"x and w unchanged, {where}", unchanged, True, rank=rank, slip=slip)


def columns_slips(x, w, t, rank, size):
    padded = F.pad(w, (0, t * size - w.shape[1]))
    parts = [x @ part for part in padded.split(size, 1)]
    slips = {
        "the gather joins along the first dimension, [t, rows, out / t]; `movedim` places the shards side by side": (
            torch.cat(parts).view(x.shape[0], -1)[:, : w.shape[1]]
        ),
        "the shards belong side by side, along dimension 1, not one below the other": torch.cat(parts),
        "the columns beyond `out` are padding": x @ padded,
        "this is only this rank's shard; return the full result": x @ w[:, rank * size : (rank + 1) * size],
        "each column of the result is counted t times in a sum over the ranks": t * (x @ w),
    }
    return slips, "rank r has the columns of w and of the result that start at r · ceil(out / t)"


def rows_slips(x, w, t, rank, size):
    mine = slice(rank * size, (rank + 1) * size)
    partial_sum = x[:, mine] @ w[mine]
    some = -(-w.shape[0] // size)  # ranks with rows
    last = slice((some - 1) * size, some * size)
    slips = {
        "a rank without rows adds zeros; here, the last rows are added again": (
            x @ w + (t - some) * (x[:, last] @ w[last]) if some < t else None
        ),
        "this is only this rank's partial sum: the partial sums of all ranks have to be added up": partial_sum,
        "partial sums are added up; a mean also divides by t": x @ w / t,
        "this is the maximum of the ranks' partial sums, not their sum": torch.stack(
            [x[:, each] @ w[each] for each in (slice(r * size, (r + 1) * size) for r in range(t))]
        ).amax(0),
    }
    return slips, "rank r multiplies its columns of x by its rows of w; both start at r · ceil(in / t)"


def messages(where, calls, sizes, by, rank):
    x, w, t, size = sizes
    rows = x.shape[0]
    product = rows * w.shape[1] * ITEM
    one = f"all_gather of {t * rows * size * ITEM} bytes" if by == "columns" else f"all_reduce of {product} bytes"
    weight = "the weight was gathered, as FSDP does; here each rank keeps its shard of the weight and sends its result"
    slips = {
        "nothing was sent: either every rank has multiplied full matrices, or the collective is not from `comm`": [],
        "partial sums need no gather: an all-reduce adds them up and sends only 2 (t - 1) / t of their size": [
            f"all_gather of {t * product} bytes"
        ],
        "an all-reduce of columns padded with zeros sends twice as much as a gather": [
            f"all_reduce of {product} bytes"
        ],
        "an all-reduce of padded columns sends twice as much as a gather": [
            f"all_reduce of {t * rows * size * ITEM} bytes"
        ],
        weight: [f"all_gather of {w.numel() * ITEM} bytes"],
    }
    slip = "columns need one all-gather of the results; rows need one all-reduce"
    op, size_of = one.split()[0], int(one.split()[2])
    slips |= {
        f"the result is sent in another dtype than that of x and w: {factor} times the bytes": [
            f"{op} of {int(size_of * factor)} bytes"
        ]
        for factor in (0.25, 0.5, 2)
        if not any([f"{op} of {int(size_of * factor)} bytes"] == each for each in slips.values())
    }
    if len(calls) > 1:
        slip = "one message is enough: " + ("an all-gather" if by == "columns" else "an all-reduce")
    expect(f"messages of {where}", calls, [one], rank=rank, slips=slips, slip=slip)


# 13.2 and 13.5: pairs of autograd functions


def crossed(function, x, gradient):
    """A function's effect on a tensor and on its gradient, with the messages in each direction."""
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    given = (
        leaf.detach().clone(memory_format=torch.preserve_format),
        gradient.clone(memory_format=torch.preserve_format),
    )
    with comm.record() as forward:
        y = function(leaf)
    if not isinstance(y, Tensor):
        raise AnswerError(f"expected a tensor, got {describe(y)}")
    found = {"value": y.detach().clone(), "forward": kinds(forward), "gradient": None, "backward": []}
    if y.shape != gradient.shape:
        return found
    if not y.requires_grad:
        raise AnswerError(
            "the output: expected a tensor that requires a gradient, got one that does not\nlikely slip: autograd "
            "knows no derivative of a collective: write one in a `torch.autograd.Function` and call its `apply`"
        )
    with comm.record() as backward:
        try:
            y.backward(gradient)
        except RuntimeError as error:
            shape = re.search(r"invalid gradient at index 0 - got \[([\d, ]+)\]", str(error))
            if not shape:
                raise
            return found | {"gradient": torch.zeros(*map(int, shape[1].split(", ")), dtype=x.dtype)}
    for name, now, was in (("x", leaf.detach(), given[0]), ("the gradient that came in", gradient, given[1])):
        if now.shape != was.shape or now.stride() != was.stride():
            raise AnswerError(
                f"{name}: expected shape {list(was.shape)} as before, got {list(now.shape)}\nlikely slip: {name} was "
                "transposed in place, but may be in use elsewhere: `transpose` and `movedim` return another tensor"
            )
        if not torch.equal(now, was):
            raise AnswerError(
                f"{name}: expected the same values as before, got others\nlikely slip: {name} was summed in place, but "
                "may be in use elsewhere: sum a copy"
            )
    return found | {"gradient": None if leaf.grad is None else leaf.grad.clone(), "backward": kinds(backward)}


def summed_later(function, x, gradient):
    """The gradient of x + function(x), whose two terms receive the same gradient tensor."""
    leaf = x.clone().requires_grad_()
    (leaf + function(leaf)).backward(gradient)
    return leaf.grad


def expanded(function, x):
    """The gradient of a sum, all of whose elements share one place in memory."""
    leaf = x.clone().requires_grad_()
    function(leaf).sum().backward()
    return leaf.grad


def kept_apart(function, x, gradient):
    """Whether a second call leaves the first one's result, and gradient, as they are."""
    first, second = x.clone().requires_grad_(), (2 * x).requires_grad_()
    try:
        y = function(first)
        result = y.detach().clone()
        z = function(second)
        (of_first,) = torch.autograd.grad(y, first, gradient)
        was = of_first.clone()
        torch.autograd.grad(z, second, 3 * gradient)
        return torch.equal(y.detach(), result), torch.equal(of_first, was)
    except RuntimeError as error:
        if "modified" not in str(error) or getattr(comm.link, "pending", None):  # late.py explains a missing wait
            raise
        raise AnswerError(
            f"a second call: autograd finds what the first one returned changed\nlikely slip: {APART}"
        ) from (error)


def of_two_groups(answer, f, g, x):
    """What pairs of functions of two groups do, of which the second group is this rank alone: values and gradients.

    The functions of the first group are called after those of the second were made.
    """
    alone = dist.new_group([comm.world().rank()], use_local_synchronization=True)
    found = []
    for function in (*pair_of(answer, alone), f, g):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.backward(torch.ones_like(y) * (1 + comm.world().rank()))
        found.append((y.detach().clone(), leaf.grad))
    return found


ONE_GROUP = "a second pair of functions, of another group, has changed the first: each pair keeps its own group"


def not_contiguous(function, x, gradient):
    """The effect on tensors that are stored in another order."""
    try:
        found = crossed(function, x, gradient)
    except RuntimeError as error:
        if "view" not in str(error) and "contiguous" not in str(error):
            raise
        raise AnswerError(f"a tensor that is not contiguous: it raises {error}\nlikely slip: {ORDER}") from error
    return found["value"], found["gradient"]


APART = "its buffer is kept from call to call, and the next call overwrites what the last one returned"


def inputs_of_pair(t, variant):
    shape = (variant.size, 4)
    return [(randn(*shape, seed=variant.seed, rank=r), randn(*shape, seed=variant.seed + 7, rank=r)) for r in range(t)]


def in_other_order(x, rank):
    """The same values; on odd ranks, they are stored column by column."""
    return x.t().contiguous().t() if rank % 2 else x


def observe_pair(answer, inputs):
    group = comm.world()
    x, gradient = here(*inputs[group.rank()])
    f, g = pair_of(answer, group)
    found = {name: crossed(each, x, gradient) for name, each in (("f", f), ("g", g))}
    found["f"]["later"] = summed_later(f, x, gradient)
    found["f"]["expanded"] = expanded(f, x)
    found["f"]["order"] = crossed(f, x, in_other_order(gradient, group.rank()))["gradient"]
    found["g"]["order"] = crossed(g, in_other_order(x, group.rank()), gradient)["value"]
    with torch.no_grad():
        found["g"]["without"] = g(x).clone()
    found["two"] = of_two_groups(answer, f, g, x)
    for name, each in (("f", f), ("g", g)):
        found[name]["apart"] = kept_apart(each, x, gradient)
        found[name]["shapes"] = [of_shape(each, x, gradient, shape) for shape in SHAPES]
        found[name]["dtypes"] = [of_dtype(each, x, gradient, dtype) for dtype in DTYPES]
    return found


SHAPES = ((2, -1), (-1,), (2, 2, -1), (1, 2, 1, -1))  # of the first 4 elements
DTYPES = (torch.float32, torch.bfloat16)


def of_dtype(function, x, gradient, dtype):
    """The dtypes of the result and of the gradient, and the bytes of the messages, for tensors of this dtype."""
    found = crossed(function, x.to(dtype), gradient.to(dtype))
    bytes_sent = [int(each.split()[2]) for each in (*found["forward"], *found["backward"])]
    return [str(found[name].dtype).removeprefix("torch.") for name in ("value", "gradient")], bytes_sent


def of_shape(function, x, gradient, shape):
    """The shapes of the result and the gradient for a tensor of this shape."""
    x, gradient = (each.flatten()[:4].reshape(shape) for each in (x, gradient))
    try:
        found = crossed(function, x, gradient)
    except (IndexError, RuntimeError, ValueError) as error:
        return f"{list(x.shape)}: it raises {error}"
    return [
        list(x.shape),
        list(found["value"].shape),
        None if found["gradient"] is None else list(found["gradient"].shape),
    ]


def check_calls(what, found, rank, numel):
    """Tensors of any shape and dtype, and a second call."""
    for got in found["shapes"]:
        shape = got[0] if isinstance(got, list) else got
        slip = "f and g accept tensors of any shape, and return that shape in both directions"
        expect(f"{what}, shapes of x, of the result and of the gradient", got, [shape] * 3, rank=rank, slip=slip)
    expect(
        f"{what}, result and gradient after a second call: unchanged",
        found["apart"],
        (True, True),
        rank=rank,
        slip=APART,
    )
    for dtype, (dtypes, bytes_sent) in zip(DTYPES, found["dtypes"], strict=True):
        name = str(dtype).removeprefix("torch.")
        slip = "everything stays in the dtype of x: no buffer and no message has another one"
        expect(f"{what}, x of {name}, dtypes of result and gradient", dtypes, [name] * 2, rank=rank, slip=slip)
        expect(f"{what}, x of {name}, bytes sent", bytes_sent, [numel * dtype.itemsize], rank=rank, slip=slip)


@check("13.2")
def check_f_and_g(answer, variant):
    """f copies forward and sums backward; g does the opposite. Each runs one all-reduce, on a copy."""
    for t in dict.fromkeys((variant.ranks, 3)):
        inputs = inputs_of_pair(t, variant)
        x, gradients = (sum(each) for each in zip(*inputs, strict=True))
        message = [f"all_reduce of {x.numel() * ITEM} bytes"]
        for rank, found in enumerate(on_ranks(t, observe_pair, answer, inputs)):
            mine, gradient = inputs[rank]
            enter(found["f"], mine, gradient, gradients, message, t, rank)
            leave(found["g"], x, mine, gradient, gradients, message, t, rank)
            check_calls(f"f on {t} ranks", found["f"], rank, x.numel())
            check_calls(f"g on {t} ranks", found["g"], rank, x.numel())
            check_two(found["two"], mine, x, t, rank)


def check_two(found, mine, x, t, rank):
    """Values and gradients of the functions of this rank alone, then of all ranks."""
    own, total = (torch.ones_like(mine) * each for each in (1 + rank, t * (t + 1) // 2))
    wanted = (mine, own), (mine, own), (mine, total), (x, own)
    names = ("f of one rank", "g of one rank", f"f of {t} ranks", f"g of {t} ranks")
    for name, got, values in zip(names, found, wanted, strict=True):
        for what, a, b in zip(("its output", "the gradient of x"), got, values, strict=True):
            exact(f"{name}, with two pairs, {what}", a, b, rank=rank, slip=ONE_GROUP)


def enter(f, x, gradient, gradients, message, t, rank):
    what = f"f on {t} ranks"
    slip = "f only copies in the forward pass: all ranks already have the same x"
    if f["forward"] == message:
        slip = "this sums in the forward pass, as g does: return f first, then g"
        if f["backward"]:
            slip = "this runs an all-reduce in both directions, but there is nothing to add up in the forward pass"
    exact(f"{what}, its output", f["value"], x, rank=rank, slip=slip)
    exact(
        f"{what}, the gradient of x",
        f["gradient"],
        gradients,
        rank=rank,
        slips={
            "each rank's gradient is a partial sum: add up the gradients of all ranks": gradient,
            "partial sums are added up; a mean is for ranks that have different data": gradients / t,
            "the gradients were added up t times; once is enough": t * gradients,
        },
    )
    expect(f"{what}, messages forward", f["forward"], [], rank=rank, slip="f sends nothing in the forward pass")
    slip = "f runs one all-reduce of the gradient, `comm.all_reduce`"
    expect(f"{what}, messages backward", f["backward"], message, rank=rank, slip=slip)
    slip = "f sums the gradient of its own output; what x receives directly was summed, too, in place or by a hook on x"
    exact(f"the gradient of x + f(x) on {t} ranks", f["later"], gradient + gradients, rank=rank, slip=slip)
    slip = "the gradient of a sum is a single element in memory, expanded: sum a contiguous copy of it"
    exact(f"the gradient of x for f(x).sum() on {t} ranks", f["expanded"], torch.full_like(x, t), rank=rank, slip=slip)
    exact(f"{what}, a gradient that is not contiguous", f["order"], gradients, rank=rank, slip=ORDER)


ORDER = (
    "a collective sends elements in the order of memory, which in a transposed tensor is not the order of its shape: "
    "use `clone(memory_format=torch.contiguous_format)`"
)


def leave(g, x, mine, gradient, gradients, message, t, rank):
    what = f"g on {t} ranks"
    slips = {
        "each rank's x is a partial sum: add up those of all ranks": mine,
        "partial sums are added up; a mean also divides by t": x / t,
    }
    exact(f"{what}, its output", g["value"], x, rank=rank, slips=slips)
    exact(
        f"{what}, the gradient of x",
        g["gradient"],
        gradient,
        rank=rank,
        slips={
            "this runs an all-reduce in both directions: all ranks continue with the same sum, so each already has "
            "the complete gradient, and now has t times that": gradients,
            "the gradient of a partial sum equals the gradient of the sum: do not divide it": gradient / t,
        },
    )
    expect(f"{what}, messages forward", g["forward"], message, rank=rank, slip="g runs one all-reduce of x")
    expect(f"{what}, messages backward", g["backward"], [], rank=rank, slip="g sends nothing in the backward pass")
    exact(f"{what}, an x that is not contiguous", g["order"], x, rank=rank, slip=ORDER)
    exact(f"{what}, under torch.no_grad()", g["without"], x, rank=rank)


# 13.3

HIDDEN = 6


def mlp_parts(inner, batch, seed):
    """x, up, up_bias, down, down_bias and the gradient of the output."""
    shapes = ((*batch, HIDDEN), (inner, HIDDEN), (inner,), (HIDDEN, inner), (HIDDEN,), (*batch, HIDDEN))
    return [randn(*shape, seed=seed, rank=number) for number, shape in enumerate(shapes)]


def part(tensor, dim, t, rank):
    size = -(-tensor.shape[dim] // t)
    start = min(rank * size, tensor.shape[dim])
    return tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))


def parts_on(whole, t, rank):
    x, up, up_bias, down, down_bias, _ = whole
    return [x, part(up, 0, t, rank), part(up_bias, 0, t, rank), part(down, 1, t, rank), down_bias]


def one_mlp(leaves, gradient, add_bias=True):
    """The output and all gradients, on one process."""
    x, up, up_bias, down, down_bias = (leaf.clone().requires_grad_() for leaf in leaves)
    y = F.linear(F.gelu(F.linear(x, up, up_bias)), down)
    y = y + down_bias if add_bias else y
    y.backward(gradient)
    return y.detach(), [leaf.grad for leaf in (x, up, up_bias, down, down_bias)]


def observe_mlp(answer, whole):
    group, whole = comm.world(), here(*whole)
    leaves = [leaf.clone().requires_grad_() for leaf in parts_on(whole, group.size(), group.rank())]
    before = [leaf.detach().clone() for leaf in leaves]
    f, g = (partial(each, group=group) for each in (layouts.f, layouts.g))
    try:
        with comm.record() as forward:
            y = answer(*leaves, f, g)
    except (IndexError, RuntimeError, ValueError) as error:
        if len(whole[0].shape) == 3:
            raise
        raise AnswerError(
            f"x of shape {list(whole[0].shape)}: it raises {error}\n"
            "likely slip: x is [.., h], with one or more dimensions: `F.linear` and `@` accept all of them"
        ) from error
    if not (isinstance(y, Tensor) and y.requires_grad):
        raise AnswerError(f"expected a tensor with a gradient, got {describe(y)}")
    if y.shape != whole[-1].shape:
        slip = "the output has all features: it is the sum of the ranks' partial sums"
        if y.numel() == whole[-1].numel():
            slip = "the output has the dimensions of x: give back those that you have flattened"
        raise AnswerError(f"the output: expected {list(whole[-1].shape)}, got {list(y.shape)}\nlikely slip: {slip}")
    with comm.record() as backward:
        y.backward(whole[-1])
    same = all(torch.equal(leaf.detach(), was) for leaf, was in zip(leaves, before, strict=True))
    return y.detach(), [leaf.grad for leaf in leaves], kinds(forward), kinds(backward), same


@check("13.3")
def check_mlp(answer, variant):
    """Each pass runs one all-reduce; output and gradients are those of one process."""
    for t, each, batch in ((variant.ranks, 4, (2, 3)), (variant.ranks, 0, (5,)), (3, 0, ())):
        inner = each * t or 3 * t - 1  # even parts, then a short one
        whole = mlp_parts(inner, batch, variant.seed + inner)
        for rank, found in enumerate(on_ranks(t, observe_mlp, answer, whole)):
            compare_mlp(found, whole, t, rank)


def compare_mlp(found, whole, t, rank):
    y, gradients, forward, backward, same = found
    gradient, bias = whole[-1], whole[4]
    wanted, wholes = one_mlp(whole[:-1], gradient)
    mine, alone = one_mlp(parts_on(whole, t, rank), gradient, add_bias=False)
    message = f"all_reduce of {y.numel() * ITEM} bytes"
    where = f"the MLP on {t} ranks"
    linear = F.linear(whole[0], whole[1], whole[2])
    slips = {
        "every rank added the second bias before the sum, so it is in the sum t times": wanted + (t - 1) * bias,
        "this is only this rank's partial sum of the output: g adds up those of all ranks": mine + bias,
        "this is only a partial sum, which g has to add up; the second bias is missing, too": mine,
        "the second bias is missing": wanted - bias,
        "the first bias is missing: each rank adds its shard of it to its shard of the hidden features": F.linear(
            F.gelu(linear - whole[2]), whole[3], bias
        ),
        "the gelu is missing between the two matmuls": F.linear(linear, whole[3], bias),
        "this is the tanh approximation of gelu; the model uses the exact function": F.linear(
            F.gelu(linear, approximate="tanh"), whole[3], bias
        ),
    }
    exact(f"{where}, the output", y, wanted, rank=rank, slips=slips)
    slips = {
        "the only sum is that of g, after the second matmul; the hidden features stay on their rank": [
            *forward[:0],
            f"all_reduce of {y.numel() // HIDDEN * part(whole[1], 0, t, rank).shape[0] * ITEM} bytes",
            message,
        ],
        "nothing was added up": [],
    }
    slip = "the forward pass needs exactly one all-reduce"
    expect(f"{where}, messages forward", forward, [message], rank=rank, slips=slips, slip=slip)
    named = zip(("x", "up", "up_bias", "down", "down_bias"), gradients, range(5), strict=True)
    for name, got, number in named:
        right = wholes[number]
        if number in (1, 2, 3):
            right = part(right, 1 if number == 3 else 0, t, rank)
        slips, slip = gradient_slips(name, right, alone[number], t)
        got = torch.zeros_like(right) if got is None else got
        exact(f"{where}, the gradient of {name}", got, right, rank=rank, slips=slips, slip=slip)
    slip = "the backward pass needs one all-reduce, which f runs on the gradient of x"
    expect(f"{where}, messages backward", backward, [message], rank=rank, slip=slip)
    expect(f"{where}, x and parameters unchanged", same, True, rank=rank, slip="do not change x or the parameters")


def gradient_slips(name, right, partial_sum, t):
    slips = {f"the gradient is {t} times too large: f or g was applied once too often": t * right}
    if name == "x":
        slips["this is only this rank's partial sum: apply f to x before the first matmul"] = partial_sum
    if name == "down_bias":
        slips = {
            "a rank that does not add the bias has no gradient for it, and its copy drifts away from the others: "
            "add the bias on every rank, after the sum": torch.zeros_like(right),
            "adding 1/t of the bias on each rank gives the right sum, but only 1/t of the gradient: add the full bias "
            "after the sum": right / t,
            "every rank already has the complete gradient of the bias, which must not be summed": t * right,
        }
    return slips, "the output is right but the gradient is not: check where f is applied"


# 13.4


IN_FLOAT32 = "float32"
TOKENS_APART, ONE_LARGE = "large and small tokens", "large logits on one rank"


def losses_of(variant):
    """Ranks, name, logits and targets of each case: even parts, a short part, and logits far from zero."""
    for t in dict.fromkeys((variant.ranks, 3)):
        for name, classes, far, spread in (
            ("even parts", 4 * t, 0.0, t),
            ("a short part", 3 * t - 1, 0.0, t),
            ("large logits", 4 * t, 2e3, t),
            (ONE_LARGE, 4 * t, 2e3, 1),
            (TOKENS_APART, 4 * t, 0.0, t),
            ("the lab's vocabulary", 257, 0.0, t),
            ("one class for each rank", t, 0.0, t),
            (IN_FLOAT32, 4 * t, 0.0, t),
        ):
            logits = randn(variant.size + 4, classes, seed=variant.seed + classes)
            logits[:, : classes * spread // t] += far
            if name == TOKENS_APART:
                logits[::2] -= 2e3
            width, even = -(-classes // t), classes // t
            edges = [5, 0, width - 1, width, classes - 1, even - 1, even, 2 * even - 1, 2 * even, 2 * width]
            targets = torch.tensor(edges + list(range(variant.size)))[: variant.size + 4] % classes
            yield t, name, logits.float() if name == IN_FLOAT32 else logits, targets
            if name == "even parts":
                yield t, "one token", logits[:1], targets[:1]


def observe_losses(answer, cases):
    group = comm.world()
    t, rank, found = group.size(), group.rank(), []
    for name, *case in cases:
        logits, targets = here(*case)
        mine = part(logits, 1, t, rank).clone().requires_grad_()
        first = min(rank * -(-logits.shape[1] // t), logits.shape[1])
        given = mine.detach().clone(), targets.clone()
        try:
            with comm.record() as forward:
                loss = answer(mine, targets, first, group, partial(layouts.g, group=group))
        except (IndexError, RuntimeError) as error:
            if "index" not in str(error):
                raise
            raise AnswerError(
                f"{name}, rank {rank}: it raises {error}\nlikely slip: a token's target may be on another rank: "
                "subtract `first` from it, read column 0 if the target is not on this rank, and replace that value by 0"
            ) from error
        if not isinstance(loss, Tensor):
            raise AnswerError(f"expected the loss as a tensor, got {describe(loss)}")
        if not loss.requires_grad:
            raise AnswerError(
                "the loss: expected a tensor that requires a gradient, got one that does not\nlikely slip: only the "
                "maximum needs no gradient: sum the exponentials and the target's logit over the ranks with `g`, "
                "without `detach()` or `no_grad()`"
            )
        with comm.record() as backward:
            (3 * loss).sum().backward()
        gradient = torch.zeros_like(mine) if mine.grad is None else mine.grad
        same = torch.equal(mine.detach(), given[0]) and torch.equal(targets, given[1])
        found.append((loss.detach(), gradient, kinds(forward), kinds(backward), same))
    return found


@check("13.4")
def check_cross_entropy(answer, variant):
    """Loss and gradient are those of the full logits, even large ones; only three numbers per token are sent."""
    cases = list(losses_of(variant))
    for t in dict.fromkeys(each[0] for each in cases):
        mine = [each[1:] for each in cases if each[0] == t]
        for rank, found in enumerate(on_ranks(t, observe_losses, answer, mine)):
            for case, seen in zip(mine, found, strict=True):
                compare_loss(seen, case, t, rank)


def compare_loss(seen, case, t, rank):
    loss, gradient, forward, backward, same = seen
    name, logits, targets = case
    where = f"{name}: {logits.shape[1]} classes on {t} ranks"
    whole = logits.clone().requires_grad_()
    right = F.cross_entropy(whole, targets)
    (3 * right).backward()
    gathered = [each for each in forward if each.startswith("all_gather")]
    if gathered:
        raise AnswerError(
            f"rank {rank}, messages of {where}: expected all-reduces of three numbers per token, got {gathered[0]}\n"
            "likely slip: logits must not be gathered, because they are the largest tensor of all"
        )
    slips = loss_slips(logits, targets, t, rank)
    slip = (
        "compare with log(sum of exp(x - m)) - (x_target - m): the maximum m and the sum are over all ranks, and only "
        "the rank with the target contributes x_target - m, the others 0"
    )
    if not bool(torch.isfinite(loss).all()):
        slip = "exp of a large logit is inf: first subtract the token's maximum over all ranks"
        if name == TOKENS_APART:
            slip = "each token has a maximum of its own, over its classes: all exponentials of the others become 0"
        elif name == ONE_LARGE and bool(loss.gt(0).all()):
            slip = (
                "the target's probability is 0 in floating point, and log 0 is -inf: subtract x_target - m from the log"
            )
        elif bool(loss.lt(0).all()):
            slip = "all exponentials are 0, because the ranks' maxima were added up: reduce them with `comm.MAX`"
    close = exact if logits.dtype == torch.float64 else partial(expect, tolerance=1e-5)
    if loss.dtype != logits.dtype:
        slip = f"the loss has the dtype of the logits, {logits.dtype}"
    close(f"the loss, {where}", loss, right.detach(), rank=rank, slips=slips, slip=slip)
    numbers = len(targets) * logits.dtype.itemsize
    slips = {
        "either the sum of exponentials or the target's logit was not summed over the ranks": (
            [f"all_reduce of {numbers} bytes"] * 2
        ),
    }
    sizes = [int(each.split()[2]) for each in forward if each.startswith("all_reduce")]
    if len(sizes) != len(forward) or sum(sizes) != 3 * numbers:
        expect(
            f"messages, {where}",
            forward,
            [f"all_reduce of {numbers} bytes", f"all_reduce of {2 * numbers} bytes"],
            rank=rank,
            slips=slips,
            slip="send three numbers per token: first a maximum, then a sum and the target's logit",
        )
    wanted = part(whole.grad, 1, t, rank)
    own = part(logits, 1, t, rank).softmax(1) * 3 / len(targets)
    hot = part(F.one_hot(targets, logits.shape[1]).double(), 1, t, rank) * 3 / len(targets)
    slips = {
        "the gradient is t times too large: it must not be summed in the backward pass": t * wanted,
        "this is the softmax over only this rank's classes; divide by the sum over all ranks": own - hot,
        "the gradient of the target's logit is missing": wanted + hot,
        "the softmax is missing: the sum of exponentials went through a collective without a derivative; use g": -hot,
    }
    slip = "the maximum cancels in the loss, so it needs no gradient: `detach()` it"
    close(f"the gradient of the logits, {where}", gradient, wanted, rank=rank, slips=slips, slip=slip)
    expect(
        f"messages backward, {where}", backward, [], rank=rank, slip="nothing is sent in the backward pass: g copies"
    )
    expect(f"logits and targets unchanged, {where}", same, True, rank=rank, slip="do not change logits or targets")


def loss_slips(logits, targets, t, rank):
    """The losses that usual mistakes give on a rank."""
    parts = [part(logits, 1, t, r) for r in range(t)]
    owners = targets // -(-logits.shape[1] // t)
    wanted, largest = logits.gather(1, targets[:, None])[:, 0], logits.amax(1)
    maxima = torch.stack([each.amax(1) for each in parts])
    sums = torch.stack([(each - m[:, None]).exp().sum(1) for each, m in zip(parts, maxima, strict=True)])
    total = (logits - largest[:, None]).exp().sum(1)
    own = (parts[rank] - largest[:, None]).exp().sum(1)
    theirs = maxima.gather(0, owners[None])[0]
    right = total.log() - (wanted - largest)
    centred = [each - largest[:, None] for each in parts]
    firsts = [sum(each.shape[1] for each in parts[:r]) for r in range(t)]
    shift = sum(
        F.pad(each - largest[:, None], (0, logits.shape[1])).gather(1, targets[:, None])[:, 0] for each in parts
    )
    slips = {
        "this is the sum over the tokens; return their mean": right.sum(),
        "these are the losses of the tokens; return their mean, a single number": right,
        "each rank has subtracted its own maximum: exponentials add up only if all ranks subtract the same one": (
            sums.sum(0).log() - (wanted - theirs)
        ).mean(),
        "the sum of exponentials is only this rank's: add up those of all ranks": (
            own.log() - (wanted - largest)
        ).mean(),
        "the maximum was subtracted in the sum, but not from the target's logit": (total.log() - wanted).mean(),
        "the index of a target on this rank is relative to `first`": (total.log() - shift).mean(),
        "`first` is given: rank times this rank's number of classes is another number where the last rank has fewer": (
            total.log() - found_at(centred, targets, [r * each.shape[1] for r, each in enumerate(parts)])
        ).mean(),
        "a rank has the classes from `first` to `first` + V_r - 1: one more was counted": (
            total.log() - found_at(centred, targets, firsts, more=1)
        ).mean(),
        "the target's logit is missing": total.log().mean(),
        "the target's logit is missing on ranks that do not have it: sum it over the ranks": (
            total.log() - (wanted - largest) * (owners == rank)
        ).mean(),
    }
    for column, others in foreign_logits([each - largest[:, None] for each in parts], targets, owners).items():
        text = f"{column} was counted on ranks that do not have the target; those ranks contribute 0"
        slips[text] = (right - others).mean()
    return {text: wrong for text, wrong in slips.items() if bool(torch.isfinite(wrong).all())}


def found_at(parts, targets, firsts, more=0):
    """The sum of what the ranks find for each target, if classes begin at `firsts`, with some `more` at the end."""
    total = 0.0
    for each, first in zip(parts, firsts, strict=True):
        index, last = targets - first, each.shape[1] - 1
        here = (index >= 0) & (index <= last + more)
        total = total + each.gather(1, index.clamp(0, last)[:, None])[:, 0] * here
    return total


def foreign_logits(parts, targets, owners):
    """For each way to choose a column for another rank's target: the sum of these logits, [tokens]."""
    sums, first = {}, 0
    for r, each in enumerate(parts):
        index, last = targets - first, each.shape[1] - 1
        columns = {"column 0": 0 * index, "the nearest column": index.clamp(0, last), "a column": index % (last + 1)}
        for name, column in columns.items():
            sums[name] = sums.get(name, 0) + each.gather(1, column[:, None])[:, 0] * (owners != r)
        first += each.shape[1]
    return sums


# 13.5


def inputs_of_sequence(t, variant):
    """For each rank: a part [b, s / t, h], and a whole tensor [b, s, h]."""
    b, s, h = 2, variant.size, 3
    return [
        (randn(b, s, h, seed=variant.seed, rank=r), randn(b, t * s, h, seed=variant.seed + 3, rank=r)) for r in range(t)
    ]


def observe_sequence(answer, inputs):
    group = comm.world()
    mine, whole = here(*inputs[group.rank()])
    f, g = pair_of(answer, group)
    found = {"f": crossed(f, mine, whole), "g": crossed(g, whole, mine)}
    turned = whole.movedim(1, 0).contiguous().movedim(0, 1)
    other = mine.movedim(1, 0).contiguous().movedim(0, 1)
    found["g"]["order"] = not_contiguous(g, turned, other)
    found["f"]["order"] = not_contiguous(f, other, turned)
    for name, x, gradient in (("f", mine, whole), ("g", whole, mine)):
        if found[name]["value"].shape == gradient.shape and found[name]["gradient"].shape == x.shape:
            several = kept_apart({"f": f, "g": g}[name], x, gradient)
            one = kept_apart({"f": f, "g": g}[name], x[:1], gradient[:1])  # a move of dimensions copies nothing
            found[name]["apart"] = tuple(a and b for a, b in zip(several, one, strict=True))
    results = [found[name][what] for name in "fg" for what in ("value", "gradient")]
    shapes = [None if each is None else each.shape for each in results]
    if shapes == [whole.shape, mine.shape, mine.shape, whole.shape]:
        small = mine[:1, :1], whole[:1, : group.size()]
        found["small"] = crossed(f, *small), crossed(g, *small[::-1])
        floats = mine.float(), whole.float()
        found["float32"] = crossed(f, *floats), crossed(g, *floats[::-1])
        found["two"] = of_two_groups(answer, f, g, whole)
    return found


@check("13.5")
def check_sequence(answer, variant):
    """f gathers the sequence and reduce-scatters its gradient; g does the opposite. Both work along dimension 1."""
    for t in dict.fromkeys((variant.ranks, 3)):
        inputs = inputs_of_sequence(t, variant)
        parts, wholes = zip(*inputs, strict=True)
        joined, total = torch.cat(parts, 1), sum(wholes)
        bytes_of = total.numel() * ITEM
        gather, scatter = [f"all_gather of {bytes_of} bytes"], [f"reduce_scatter of {bytes_of} bytes"]
        for rank, found in enumerate(on_ranks(t, observe_sequence, answer, inputs)):
            f, g = found["f"], found["g"]
            what = f"f on {t} ranks"
            exact(f"{what}, its output", f["value"], joined, rank=rank, slips=joining(parts), slip=f"{DIMENSION}")
            slips = scattering(wholes, t, rank, "gradient")
            exact(f"{what}, the gradient", f["gradient"], part(total, 1, t, rank), rank=rank, slips=slips, slip=OWN)
            expect(f"{what}, messages forward", f["forward"], gather, rank=rank, slips=dear(bytes_of))
            expect(f"{what}, messages backward", f["backward"], scatter, rank=rank, slips=dear(bytes_of))
            what = f"g on {t} ranks"
            slips = scattering(wholes, t, rank, "x")
            exact(f"{what}, its output", g["value"], part(total, 1, t, rank), rank=rank, slips=slips)
            slips = joining(parts) | alone(parts, rank)
            exact(f"{what}, the gradient", g["gradient"], joined, rank=rank, slips=slips, slip=DIMENSION)
            expect(f"{what}, messages forward", g["forward"], scatter, rank=rank, slips=dear(bytes_of))
            expect(f"{what}, messages backward", g["backward"], gather, rank=rank, slips=dear(bytes_of))
            own = part(total, 1, t, rank)
            orders = (("f", f["order"], (joined, own)), ("g", g["order"], (own, joined)))
            for name, got, wanted in orders:
                for which, a, b in zip(("an x", "a gradient"), got, wanted, strict=True):
                    exact(f"{name} on {t} ranks, {which} that is not contiguous", a, b, rank=rank, slip=ORDER)
            for name, apart in (("f", f["apart"]), ("g", g["apart"])):
                what = f"{name} on {t} ranks, result and gradient after a second call: unchanged"
                expect(what, apart, (True, True), rank=rank, slip=APART)
            more_sequences(found, parts, wholes, t, rank)


def more_sequences(found, parts, wholes, t, rank):
    """One sequence with one token on each rank; float32; two groups."""
    total = sum(wholes)
    own = part(total, 1, t, rank)
    tokens, sums = torch.cat([each[:1, :1] for each in parts], 1), total[:1, :t]
    small = tokens, sums[:, rank : rank + 1]
    halves = (torch.cat([each.float() for each in parts], 1), own.float())
    cases = ("one sequence, with one token on each rank", "small", small), ("in float32", "float32", halves)
    for where, key, (a, b) in cases:
        for name, got, value, gradient in (("f", found[key][0], a, b), ("g", found[key][1], b, a)):
            slip = "everything stays in the dtype of x" if key == "float32" else DIMENSION
            for what, one, other in (("output", got["value"], value), ("gradient", got["gradient"], gradient)):
                expect(f"{name} on {t} ranks, its {what}, {where}", one, other, rank=rank, slip=slip)
            sent = [int(each.split()[2]) for each in (*got["forward"], *got["backward"])]
            expect(f"{name} on {t} ranks, bytes sent, {where}", sent, [a.nbytes] * 2, rank=rank, slip=slip)
    mine, ones = wholes[rank], torch.ones_like(wholes[rank])
    of_tokens = torch.cat([torch.ones_like(parts[rank]) * (1 + r) for r in range(t)], 1)
    wanted = (
        ("f of one rank", mine, ones * (1 + rank)),
        ("g of one rank", mine, ones * (1 + rank)),
        (f"f of {t} ranks", torch.cat(wholes, 1), ones * (t * (t + 1) // 2)),
        (f"g of {t} ranks", own, of_tokens),
    )
    for got, (name, *values) in zip(found["two"], wanted, strict=True):
        for what, one, other in zip(("its output", "the gradient of x"), got, values, strict=True):
            exact(f"{name}, with two pairs, {what}", one, other, rank=rank, slip=ONE_GROUP)


DIMENSION = (
    "the sequence is dimension 1; collectives join and split dimension 0: use `movedim(1, 0)` and `.contiguous()`"
)


OWN = "a rank keeps only its own tokens: the gradient of x has the shape of x"


def joining(parts):
    whole = torch.cat(parts, 1)
    rows = torch.cat(parts)
    return {
        "the shards are joined along the batch: bring the sequence to the front before the gather": rows,
        "the gathered buffer is [t, b, s / t, h]; viewing it as [b, s, h] mixes sequences": rows.view(whole.shape),
        "the ranks' tokens are joined in rank order; here they are in the reverse order": torch.cat(parts[::-1], 1),
        "the tokens of a rank keep their order; here the sequence is reversed": whole.flip(1),
        "`reshape` and `view` do not move dimensions: `movedim(1, 0)` does": moved_by_view(parts, whole),
    }


def moved_by_view(parts, whole):
    """Dimensions 0 and 1 renamed instead of moved, before the gather."""
    b, s, h = parts[0].shape
    return torch.cat([each.reshape(s, b, h) for each in parts]).movedim(0, 1).contiguous().view(whole.shape)


def alone(parts, rank):
    zeros = [each if r == rank else torch.zeros_like(each) for r, each in enumerate(parts)]
    return {
        "every rank's x contributes to the sums of all tokens, so its gradient covers the other ranks' tokens, too": (
            torch.cat(zeros, 1)
        )
    }


def scattering(wholes, t, rank, name):
    total = sum(wholes)
    flat = total.flatten()
    size = flat.numel() // t
    mine = part(total, 1, t, rank)
    slips = {
        f"this is a shard of only this rank's {name}, which is a partial sum: add up those of all ranks": (
            part(wholes[rank], 1, t, rank)
        ),
        "partial sums are added up; a mean also divides by t": mine / t,
    }
    if size * t == flat.numel():
        slips["this splits the batch: bring the sequence to the front before the reduce-scatter"] = flat[
            rank * size : (rank + 1) * size
        ].view(mine.shape)
    return slips


def dear(size):
    return {
        "taking a shard of an all-reduce's result gives the right values, but sends twice the bytes": [
            f"all_reduce of {size} bytes"
        ],
        "return f first, then g": [],
    }


# 13.6


NORMED = ((2, None, 5), (1, 1, 4))  # samples, tokens and features; None: the variant's size


def shape_of(each, size):
    return tuple(size if number is None else number for number in each)


def observe_norms(answer, seed, size):
    return [observe_norm(answer, seed, shape_of(each, size)) for each in NORMED]


def observe_norm(answer, seed, shape):
    group = comm.world()
    mine, weight, bias, gradient = here(
        randn(*shape, seed=seed, rank=group.rank()),
        *(randn(shape[2], seed=seed + number) for number in (11, 12)),
        randn(*shape, seed=seed + 1, rank=group.rank()),
    )
    leaves = [leaf.requires_grad_() for leaf in (mine, weight, bias)]
    given = [leaf.detach().clone() for leaf in leaves]
    with comm.record() as forward:
        y = answer(mine, weight, bias, partial(layouts.f, group=group))
    if not (isinstance(y, Tensor) and y.requires_grad):
        raise AnswerError(f"expected a tensor with a gradient, got {describe(y)}")
    same = [torch.equal(leaf.detach(), was) for leaf, was in zip(leaves, given, strict=True)]
    with comm.record() as backward:
        y.backward(gradient)
    return y.detach(), [leaf.grad for leaf in leaves], kinds(forward), kinds(backward), same


@check("13.6")
def check_norm(answer, variant):
    """Each token is normalized independently; gradients of weight and bias cover all tokens on every rank."""
    for t in dict.fromkeys((variant.ranks, 3)):
        seen = on_ranks(t, observe_norms, answer, variant.seed, variant.size)
        for number, each in enumerate(NORMED):
            compare_norms([found[number] for found in seen], variant.seed, shape_of(each, variant.size), t)


def compare_norms(seen, seed, shape, t):
    own = [one_norm(seed, shape, rank) for rank in range(t)]
    for rank, (y, gradients, forward, backward, unchanged) in enumerate(seen):
        what = f"the norm of {list(shape)} on {t} ranks"
        wanted, mine = own[rank]
        slip = "a norm treats each token independently, so the forward pass needs no message"
        expect(f"{what}, messages forward", forward, [], rank=rank, slip=slip)
        slip = "apply LayerNorm over the last dimension, with eps 1e-5"
        exact(f"{what}, the output", y, wanted, rank=rank, slip=slip)
        slip = "the tokens and the parameters belong to the caller: do not change them"
        expect(f"{what}, tokens, weight and bias unchanged", unchanged, [True] * 3, rank=rank, slip=slip)
        totals = [sum(each[1][number] for each in own) for number in range(3)]
        slips = {
            "f was applied to the tokens and added up gradients of different tokens: apply it to the parameters": (
                totals[0]
            ),
            "f was applied to the output and added up gradients of different tokens: apply it to weight and bias": (
                one_norm(seed, shape, rank, gradients_of=range(t))[1][0]
            ),
        }
        slip = "only the gradients of weight and bias are summed; that of the input covers only this rank's tokens"
        exact(f"{what}, the gradient of its input", gradients[0], mine[0], rank=rank, slips=slips, slip=slip)
        for number, name in ((1, "weight"), (2, "bias")):
            got = torch.zeros_like(totals[number]) if gradients[number] is None else gradients[number]
            slips = {
                f"this covers only this rank's tokens: the ranks' gradients of the {name} are partial sums": (
                    mine[number]
                ),
                "partial sums are added up; a mean also divides by t": totals[number] / t,
                "f was applied once too often: this is a sum of sums": t * totals[number],
                f"the {name} is a parameter and needs a gradient": torch.zeros_like(got),
            }
            exact(f"{what}, the gradient of its {name}", got, totals[number], rank=rank, slips=slips)
        size_of = sum(int(each.split()[2]) for each in backward)
        slip = "the gradients of weight and bias are summed, and nothing else is sent"
        expect(f"{what}, bytes of messages backward", size_of, 2 * shape[2] * ITEM, rank=rank, slip=slip)


def one_norm(seed, shape, rank, gradients_of=None):
    """One rank's output, and its gradients from the output gradients of that rank alone, or of several ranks."""
    x = randn(*shape, seed=seed, rank=rank).requires_grad_()
    weight, bias = (randn(shape[2], seed=seed + number).requires_grad_() for number in (11, 12))
    y = F.layer_norm(x, shape[2:], weight, bias)
    y.backward(sum(randn(*shape, seed=seed + 1, rank=each) for each in gradients_of or (rank,)))
    return y.detach(), [x.grad, weight.grad, bias.grad]


# 13.7


@check("13.7")
def check_bytes_sent(answer, variant):
    """Tensor parallelism sends four all-reduces of activations; FSDP, two gathers and a reduce-scatter."""
    rows = []
    for tokens, width, ranks, itemsize in (
        (variant.size * 10, 12, 2, 4),
        (64, 16, 3, 2),
        (1000, 8, 8, 4),
        (32, 32, 1, 8),
        (96, 24, variant.ranks, 2),
        (48, 20, 5, 4),
    ):
        parameters = 12 * width**2 + (13 * width if ranks != 5 else -7)  # the last block has other biases
        rows.append((tokens, width, parameters, ranks, itemsize, answer(tokens, width, parameters, ranks, itemsize)))
    for *_, got in rows:
        if not (isinstance(got, tuple | list) and len(got) == 2):
            raise AnswerError(f"expected two numbers of bytes, got {describe(got)}")
    for number, name in enumerate(("tensor parallelism", "FSDP")):
        always = None
        for slip in slips_of_bytes(*rows[0][:5])[number]:
            if all(close(each[5][number], slips_of_bytes(*each[:5])[number][slip]) for each in rows):
                always = slip
        for *setting, got in rows:
            tokens, width, parameters, ranks, itemsize = setting
            where = f"{tokens} tokens, width {width}, {ranks} ranks, {itemsize} bytes per element"
            right = wanted_bytes(*setting)[number]
            slip = always or "count the bytes that one rank sends for one block in one step, with ring collectives"
            expect(f"bytes that {name} sends, {where}", got[number], right, slip=slip)


def close(got, wrong):
    return isinstance(got, int | float) and abs(got - wrong) <= 1e-9 * max(1.0, abs(wrong))


def wanted_bytes(tokens, width, parameters, ranks, itemsize):
    per_element = itemsize * (ranks - 1) / ranks
    return 8.0 * tokens * width * per_element, 3.0 * parameters * per_element


def slips_of_bytes(tokens, width, parameters, ranks, itemsize):
    tensor_parallel, fsdp = wanted_bytes(tokens, width, parameters, ranks, itemsize)
    whole = 8.0 * tokens * width * itemsize, 3.0 * parameters * itemsize
    factors = "factors of 2 (attention and MLP, forward and backward, and the two halves of an all-reduce)"
    return (
        {
            f"8 is the product of three {factors}; one is missing": tensor_parallel / 2,
            f"8 is the product of three {factors}; two are missing": tensor_parallel / 4,
            "a rank sends (t - 1) / t of a tensor each time, because it already has one shard": whole[0],
            "every rank works on all tokens: these are not data-parallel ranks": tensor_parallel / ranks,
            "this is a number of elements, not of bytes": tensor_parallel / itemsize,
            "these are the bytes of all ranks; return those of one rank": tensor_parallel * ranks,
            "return tensor parallelism first, then FSDP": fsdp,
            "an element has `itemsize` bytes, which need not be 4": tensor_parallel / itemsize * 4,
            "4 all-reduces are for one block: what the loss sends does not belong to it": tensor_parallel * 5 / 4,
            "a rank sends (t - 1) / t of a tensor, a float: nothing is rounded": 8.0
            * (tokens * width * (ranks - 1) // ranks)
            * itemsize,
        },
        {
            "parameters are gathered for the forward and again for the backward pass; gradients are reduced once": fsdp
            * 2
            / 3,
            "gradients need only a reduce-scatter, which is half an all-reduce": fsdp * 4 / 3,
            "a rank sends (t - 1) / t of a tensor each time, because it already has one shard": whole[1],
            "this is a number of elements, not of bytes": fsdp / itemsize,
            "parameters are sent twice and gradients once": fsdp / 3,
            "an element has `itemsize` bytes, which need not be 4": fsdp / itemsize * 4,
            "gradients have `itemsize` bytes per element, too, which need not be 4": fsdp
            * (2 * itemsize + 4)
            / (3 * itemsize),
            "a rank sends (t - 1) / t of a tensor, a float: nothing is rounded": 3.0
            * (parameters * (ranks - 1) // ranks)
            * itemsize,
            "`parameters` is given; it need not be 12 h^2 + 13 h": 3.0
            * (12 * width**2 + 13 * width)
            * itemsize
            * (ranks - 1)
            / ranks,
            "these are the bytes of all ranks; return those of one rank": fsdp * ranks,
        },
    )
