"""A test of each collective, on values that tell ranks, parts and reductions apart.

The functions to check are arguments, so that wrong ones can be checked too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.instruments.launch import rank_device

OPERATIONS: dict[str, Callable[..., Any]] = {
    "all_gather": comm.all_gather,
    "reduce_scatter": comm.reduce_scatter,
    "all_reduce": comm.all_reduce,
    "broadcast": comm.broadcast,
    "reduce": comm.reduce,
    "all_to_all": comm.all_to_all,
    "send": comm.send,
    "recv": comm.recv,
    "gather_objects": comm.gather_objects,
}
"""The operations of `minifsdp.comm`."""

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-6}  # relative, of reductions; data only sent must be equal
_REDUCTIONS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "sum": (comm.SUM, lambda inputs: inputs.sum(0)),
    "mean": (comm.MEAN, lambda inputs: inputs.mean(0)),
    "max": (comm.MAX, lambda inputs: inputs.amax(0)),
}
_PART = 4  # elements of each rank's part

Outcome = tuple[Tensor, Tensor]  # received, expected


@dataclass(frozen=True)
class Rank:
    """One rank's view: its number, the operations to check, and the values that it sends."""

    operations: Mapping[str, Callable[..., Any]]
    dtype: torch.dtype

    @property
    def number(self) -> int:
        return comm.world().rank()

    @property
    def ranks(self) -> int:
        return comm.world().size()

    def do(self, operation: str, *tensors: Tensor, **options: Any) -> Any:
        """Start an operation on the default group."""
        return self.operations[operation](*tensors, group=comm.world(), **options)

    def place(self, values: Tensor) -> Tensor:
        return values.to(rank_device(), self.dtype, copy=True)

    def room(self, numel: int) -> Tensor:
        return torch.full((numel,), -1.0, device=rank_device(), dtype=self.dtype)

    def sent(self, rank: int, other: int = 0) -> Tensor:
        """[4]: each value encodes sender, receiver and position; exact in bfloat16 up to 8 ranks."""
        return 4.0 * self.ranks * rank + 4.0 * other + torch.arange(_PART)

    def inputs(self) -> Tensor:
        """[N, 4 N]: row r is rank r's input to a reduction.

        Each rank raises different elements, which exposes a rank that is left out; each part has a value of its own,
        which exposes swapped parts.
        """
        element = torch.arange(_PART * self.ranks)
        raised = element % self.ranks == torch.arange(self.ranks).unsqueeze(1)
        return 1.0 + raised * (1.0 + element // _PART)


def _all_gather(rank: Rank) -> Outcome:
    output = rank.room(_PART * rank.ranks)
    rank.do("all_gather", output, rank.place(rank.sent(rank.number))).wait()
    return output, torch.cat([rank.sent(each) for each in range(rank.ranks)])


def _all_to_all(rank: Rank) -> Outcome:
    output, everyone = rank.room(_PART * rank.ranks), range(rank.ranks)
    rank.do("all_to_all", output, rank.place(torch.cat([rank.sent(rank.number, each) for each in everyone]))).wait()
    return output, torch.cat([rank.sent(each, rank.number) for each in everyone])


def _reduce_scatter(rank: Rank, reduction: str) -> Outcome:
    output, (op, reduced) = rank.room(_PART), _REDUCTIONS[reduction]
    rank.do("reduce_scatter", output, rank.place(rank.inputs()[rank.number]), op=op).wait()
    return output, reduced(rank.inputs())[_PART * rank.number : _PART * (rank.number + 1)]


def _all_reduce(rank: Rank, reduction: str) -> Outcome:
    tensor, (op, reduced) = rank.place(rank.inputs()[rank.number]), _REDUCTIONS[reduction]
    rank.do("all_reduce", tensor, op=op).wait()
    return tensor, reduced(rank.inputs())


def _reduce(rank: Rank, reduction: str) -> Outcome:
    tensor, (op, reduced) = rank.place(rank.inputs()[rank.number]), _REDUCTIONS[reduction]
    last = rank.ranks - 1
    rank.do("reduce", tensor, target=last, op=op).wait()
    return (tensor, reduced(rank.inputs())) if rank.number == last else (tensor[:0], tensor[:0])


def _broadcast(rank: Rank) -> Outcome:
    tensor, last = rank.place(rank.sent(rank.number)), rank.ranks - 1
    rank.do("broadcast", tensor, source=last).wait()
    return tensor, rank.sent(last)


def _send_recv(rank: Rank) -> Outcome:
    """Send once around the ring: even ranks send first, odd ranks receive first, so that there is no deadlock."""
    left, right = (rank.number - 1) % rank.ranks, (rank.number + 1) % rank.ranks
    if left == rank.number:
        return rank.room(0), rank.room(0)
    outgoing, incoming = rank.place(rank.sent(rank.number, right)), rank.room(_PART)
    send, receive = partial(rank.do, "send", outgoing, target=right), partial(rank.do, "recv", incoming, source=left)
    for start in (send, receive) if rank.number % 2 == 0 else (receive, send):
        start().wait()
    return incoming, rank.sent(left, rank.number)


def _gather_objects(rank: Rank) -> Outcome:
    numbers = rank.operations["gather_objects"](rank.number, comm.world())
    return rank.place(torch.tensor(numbers)), torch.arange(rank.ranks)


CASES: dict[str, Callable[[Rank], Outcome]] = {
    "all_gather": _all_gather,
    **{f"reduce_scatter, {op}": partial(_reduce_scatter, reduction=op) for op in _REDUCTIONS},
    **{f"all_reduce, {op}": partial(_all_reduce, reduction=op) for op in _REDUCTIONS},
    **{f"reduce, {op}": partial(_reduce, reduction=op) for op in _REDUCTIONS},
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send and recv": _send_recv,
    "gather_objects": _gather_objects,
}


def check_collectives(
    replaced: Mapping[str, Callable[..., Any]] | None = None, tell: Callable[[str], Any] = lambda name: None
) -> Iterator[str]:
    """Run every case in every dtype on this rank; yield a line for each wrong result.

    Args:
        replaced: functions to check instead of those of `minifsdp.comm`, by name.
        tell: called with the name of each case before it runs.
    """
    for dtype in DTYPES:
        rank = Rank({**OPERATIONS, **(replaced or {})}, dtype)
        for name, case in CASES.items():
            title = f"{name} in {str(dtype).removeprefix('torch.')}"
            tell(title)
            got, expected = case(rank)
            if problem := compare(got, expected, dtype, exact="," not in name):
                yield f"{title}: rank {rank.number} of {rank.ranks} has {problem}"


def compare(got: Tensor, expected: Tensor, dtype: torch.dtype, exact: bool) -> str:
    """Describe the first wrong element; "" if there is none."""
    ours, theirs = got.double().cpu(), expected.to(dtype).double().cpu()
    near = ours == theirs if exact else torch.isclose(ours, theirs, rtol=TOLERANCE[dtype], atol=0.0)
    if bool(near.all()):
        return ""
    place = int((~near).nonzero()[0])
    return f"{ours[place]:.6g} at element {place} of {ours.numel()}, which should be {theirs[place]:.6g}"
