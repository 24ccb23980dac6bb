"""Exercise 13.2: f and g."""

from typing import Any

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.tensor_parallel import layouts

from .shared import (
    APART,
    ITEM,
    ONE_GROUP,
    ORDER,
    Operator,
    crossed,
    exact,
    here,
    kept_apart,
    of_two_groups,
    pair_of,
    randn,
)


@reference(
    "13.2",
    hints=(
        "An autograd function has a forward and a backward. Each of your two functions returns its input unchanged in "
        "one of these directions, and a sum over the ranks in the other.",
        "Write `class Enter(torch.autograd.Function)` with two static methods, `forward(ctx, x)` and `backward(ctx, "
        "gradient)`, and a class `Leave` in the same way. To sum, all-reduce a contiguous *copy*, because x or the "
        "gradient may be in use elsewhere. Return `Enter.apply, Leave.apply`.",
    ),
    forbids=(layouts.f, layouts.g, layouts.move, layouts.relaid, layouts.all_reduced),
)
def f_and_g(group: Group) -> tuple[Operator, Operator]:
    """Return f and g for a group, which accept tensors of any shape and dtype. Results and messages have that dtype.

    f(x): returns x. In the backward pass, it returns the sum of the ranks' gradients over `group`.
    g(x): returns the sum of the ranks' x over `group`. In the backward pass, it returns the gradient unchanged.

    Neither function modifies its input or the gradient that it receives, because other code may hold a
    reference to them. A gradient may be non-contiguous, but the tensor that is sent must be contiguous.
    """

    def summed(x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total, group).wait()
        return total

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return summed(gradient)

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    return Enter.apply, Leave.apply


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
