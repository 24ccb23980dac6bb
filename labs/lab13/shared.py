"""What several exercises of lab 13 share."""

import re
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp import comm
from minifsdp.course.workshop.checking import AnswerError, describe, expect
from minifsdp.course.workshop.comparing import dtype_slip
from minifsdp.instruments.launch import rank_device

Operator = Callable[[Tensor], Tensor]

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

APART = "its buffer is kept from call to call, and the next call overwrites what the last one returned"

ORDER = (
    "a collective sends elements in the order of memory, which in a transposed tensor is not the order of its shape: "
    "use `clone(memory_format=torch.contiguous_format)`"
)


def part(tensor, dim, t, rank):
    size = -(-tensor.shape[dim] // t)
    start = min(rank * size, tensor.shape[dim])
    return tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))
