"""Exercise 2.1: Average a gradient."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import comm
from minifsdp.course.workshop.checking import check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.ddp import naive

from .shared import SECONDS, THROUGH_COMM, draw, group_of_one, parameter, phases, told, travelling


@reference(
    "2.1",
    hints=(
        "The mean is a sum divided by N; `comm.MEAN` lets the all-reduce do both. Which tensor goes in: `param`, or "
        "what backward has left in it?",
        "`comm.all_reduce(tensor, group, op)` works in place and returns a handle. Give it `param.grad`, and `wait()`.",
    ),
    forbids=(naive.NaiveDDP.sync_gradients,),
)
def average_gradient(param: nn.Parameter, group: comm.Group) -> None:
    """Replace `param.grad` by its mean over the ranks, in place.

    Args:
        param: a floating-point parameter of any shape, with its gradient. The parameter itself is not changed.
        group: the ranks to average over.

    Issue one all-reduce of `param.grad`'s bytes and wait for it. Allocate no other memory.
    """
    assert param.grad is not None
    comm.all_reduce(param.grad, group, comm.MEAN).wait()


def observe_average(answer: Any, size: int, seed: int) -> dict[str, Any]:
    """One backward with the answer as the parameter's hook; parameters differ by rank, so that moving them shows."""
    rank = dist.get_rank()
    param = parameter(draw(seed + 1, rank, size, 3), None)
    before, accumulated = param.detach().clone(), []
    param.register_post_accumulate_grad_hook(lambda p: accumulated.extend([p.grad, p.grad.detach()]))
    param.register_post_accumulate_grad_hook(lambda p: answer(p, comm.world()))
    loss = (param * draw(seed, rank, size, 3).to(param.device)).sum()
    with comm.record() as calls, phases() as seen, travelling() as sent:
        loss.backward()
    other = parameter(draw(seed + 1, rank, size), draw(seed + 2, rank, size))
    answer(other, group_of_one())
    narrow = parameter(draw(seed + 3, rank, size).bfloat16(), draw(seed + 3, rank, size).bfloat16())
    with comm.record() as narrow_calls:
        answer(narrow, comm.world())
    strided = parameter(draw(seed + 4, rank, size, 3).t(), draw(seed + 4, rank, size, 3).t())
    answer(strided, comm.world())
    scalar = parameter(draw(seed + 5, rank), draw(seed + 5, rank))
    answer(scalar, comm.world())
    with torch.no_grad():
        # as a second backward leaves it
        scalar.grad.copy_(draw(seed + 6, rank))  # type: ignore[union-attr]
    answer(scalar, comm.world())
    return {
        "scalar": None if scalar.grad is None else scalar.grad.cpu(),
        "strided": None if strided.grad is None else strided.grad.cpu(),
        "narrow": None if narrow.grad is None else narrow.grad.cpu(),
        "narrow calls": told(narrow_calls),
        "moved": not torch.equal(param.detach(), before),
        "calls": told(calls),
        "phases": list(seen),
        "grad": None if param.grad is None else param.grad.cpu(),
        "in place": param.grad is not None and param.grad.data_ptr() == accumulated[1].data_ptr(),
        "its .data set": accumulated[0].data_ptr() != accumulated[1].data_ptr(),
        "reduced itself": [each.tensor.data_ptr() == accumulated[1].data_ptr() for each in sent],
        "changed": any(each.changed for each in sent),
        "alone": None if other.grad is None else other.grad.cpu(),
    }


@check("2.1")
def check_average_gradient(answer, variant):
    """One all-reduce of the gradient, waited for; `.grad` is the mean on every rank, the parameter as it was."""
    n, size = variant.ranks, variant.size
    seen = on_ranks(n, observe_average, answer, size, variant.seed, timeout=SECONDS)
    own = [draw(variant.seed, rank, size, 3) for rank in range(n)]
    total = sum(own)
    for rank, found in enumerate(seen):
        expect(
            "the parameter was changed",
            found["moved"],
            False,
            rank=rank,
            slip="the parameter is reduced instead of its gradient: the ranks' gradients stay different",
        )
        gathered = [f"all_gather of {4 * 3 * size * n} bytes"]
        expect(
            "collectives",
            found["calls"],
            [f"all_reduce of {4 * 3 * size} bytes"],
            rank=rank,
            slips={
                "an all-gather brings all N gradients to every rank: N times the memory": gathered,
                "a copy of 2 bytes per element was reduced: half the bytes, and the digits are lost; asked is the "
                "gradient in its own dtype": [f"all_reduce of {2 * 3 * size} bytes"],
                "a copy of 8 bytes per element was reduced: twice the bytes": [f"all_reduce of {8 * 3 * size} bytes"],
                "one all-reduce is enough": [f"all_reduce of {4 * 3 * size} bytes"] * 2,
            },
            slip=THROUGH_COMM,
        )
        expect(
            "what happened to the collective",
            found["phases"],
            ["issue", "wait"],
            rank=rank,
            slip="a collective's result may be read after its handle's wait(), not before",
        )
        expect(
            "the tensor was changed between issue and wait()",
            found["changed"],
            False,
            rank=rank,
            slip="while an all-reduce is under way its tensor belongs to it: dividing before wait() divides what is "
            "there so far",
        )
        slips = {
            "the sum, not the mean: steps are N times as long as one process's": total,
            "divided by N twice: MEAN has divided already": total / n**2,
            "still this rank's own gradient: the mean went into another tensor": own[rank],
        }
        expect("param.grad", found["grad"], total / n, rank=rank, slips=slips)
        expect(
            "the mean is in the tensor that backward accumulated in",
            found["in place"],
            True,
            rank=rank,
            slip="`.grad.data` was set: another memory under the same tensor, beside the one to be reduced in place"
            if found["its .data set"]
            else "a new tensor took its place: reduce in place",
        )
        expect(
            "what is all-reduced is that tensor itself",
            found["reduced itself"],
            [True],
            rank=rank,
            slip="a copy was reduced: the all-reduce works in place and needs no other memory",
        )
        other = [draw(variant.seed + 2, each, size) for each in range(n)]
        expect(
            "param.grad averaged over a group of this rank alone",
            found["alone"],
            other[rank],
            rank=rank,
            slips={"averaged over comm.world(): the ranks to average over are those of `group`": sum(other) / n},
            slip="N is the size of `group`, not a number known beforehand",
        )
        narrow = [draw(variant.seed + 3, each, size).bfloat16() for each in range(n)]
        expect(
            "param.grad of a parameter in bfloat16",
            found["narrow"],
            (sum(each.float() for each in narrow) / n).bfloat16(),
            rank=rank,
            slips={"still this rank's own gradient: `.float()` and the like make a copy here": narrow[rank]},
            tolerance=0.03,
        )
        expect(
            "collectives of a parameter in bfloat16",
            found["narrow calls"],
            [f"all_reduce of {2 * size} bytes"],
            rank=rank,
            slips={
                "its gradient was reduced as float32, in a copy of twice the bytes": [f"all_reduce of {4 * size} bytes"]
            },
            slip=THROUGH_COMM,
        )
        turned = [draw(variant.seed + 4, each, size, 3).t() for each in range(n)]
        slip = "its elements do not lie one behind the other: `.contiguous()`, `.view` and `.reshape` may make a copy"
        expect("param.grad of a transposed parameter", found["strided"], sum(turned) / n, rank=rank, slip=slip)
        slips = {"still this rank's own gradient: every backward brings one to average": draw(variant.seed + 6, rank)}
        wanted = sum(draw(variant.seed + 6, each) for each in range(n)) / n
        expect("param.grad of a scalar after a second call", found["scalar"], wanted, rank=rank, slips=slips)
