"""Do all ranks issue the same collectives in the same order? (`TORCH_DISTRIBUTED_DEBUG=DETAIL`)

A collective waits for all ranks. If one of them takes a different path through the model, or has run out of batches,
the others hang in a collective that it never issues, or exchange data that do not belong together. So before each
collective, a rank writes down which collective it is about to issue, and reads the entries of the other ranks:

    store    "1/17/0": all-gather of blocks.1 (Block)       17: number of collectives that this group has issued before
             "1/17/1": all-gather of blocks.2 (Block)       the last number: the rank

The collectives before number 17 were the same on all ranks, because otherwise an earlier comparison would have failed.

torch compares only FSDP's all-gathers, in the first iteration, with extra collectives; in later iterations it warns
(torch/distributed/fsdp/_exec_order_utils.py).
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from itertools import count
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minifsdp import comm, process_groups
from minifsdp.comm import Call, Group, Label
from minifsdp.private import group_named

TIMEOUT = "MINIFSDP_ORDER_TIMEOUT"
"""Environment variable: seconds for which a rank waits to hear what the others are about to issue; default 30."""

_SHOWN = 4  # collectives that a report shows before the one that differs


class Order:
    """The order of one group's collectives, as this rank issues them.

    Args:
        group: the group.
        timeout: seconds to wait for the other ranks; default: the environment's.
    """

    def __init__(self, group: Group, timeout: float | None = None) -> None:
        self.store = process_groups.store_of(group, "minifsdp order")
        self.names = process_groups.global_ranks(group)
        self.name = self.names[group.rank()]
        self.life = self.store.add(f"lives of {self.name}", 1)  # a store may outlast its process group
        self.timeout = float(os.environ.get(TIMEOUT, 30)) if timeout is None else timeout
        self.issued = 0
        self.before: deque[str] = deque(maxlen=_SHOWN)

    def announce(self, collective: str) -> None:
        """Tell the other ranks which collective this one is about to issue, and read theirs.

        Raises:
            RuntimeError: the ranks are about to issue different collectives, or one is silent until the time-out. It is
                raised on every rank that has announced a collective, and on the others once they do.
        """
        keys = {name: f"{self.life}/{self.issued}/{name}" for name in self.names}
        mine, last = keys[self.name], f"{self.life}/{self.issued - 1}/{self.name}"
        failed = f"{self.life}/failed"
        self.issued += 1
        self.store.set(mine, collective)
        with suppress(RuntimeError):  # too late: what has not been said shows below
            self.store.wait(list(keys.values()), timedelta(seconds=self.timeout))
        said = {name: self.store.get(key).decode() for name, key in keys.items() if self.store.check([key])}
        if self.store.check([failed]):
            raise RuntimeError(self.store.get(failed).decode())
        if len(said) < len(keys) or len(set(said.values())) > 1:
            report = self._report(said)
            self.store.set(failed, report)
            raise RuntimeError(report)
        self.store.delete_key(last)  # all have said something since, so all have read it
        self.before.append(collective.partition(",")[0])

    def _report(self, said: dict[int, str]) -> str:
        """The collective of each set of ranks that agree, the one before it, and the cure."""
        silence = f"nothing in {self.timeout:g} s"
        ranks: dict[str, list[int]] = {}
        for name in self.names:
            ranks.setdefault(said.get(name, silence), []).append(name)
        parties = {what: f"rank{'s' * (len(names) > 1)} {', '.join(map(str, names))}" for what, names in ranks.items()}
        now = "; ".join(f"{names}: {what}" for what, names in parties.items())
        orders = [f"  {names}: {' | '.join([*self.before, what])}" for what, names in parties.items()]
        cure = "All ranks have to take the same path through the model: look for a condition on the rank or its data."
        if silence in ranks:
            cure = (
                f"Has {parties[silence]} run out of batches, left the loop, or taken a path around these layers? All "
                f"ranks need the same number of batches. If it is only slow: {TIMEOUT}=seconds waits longer."
            )
        return "\n".join([f"Detected mismatch between collectives on ranks. About to be issued: {now}.", *orders, cure])


_orders: WeakKeyDictionary[Group, Order] = WeakKeyDictionary()


def order_of(group: Group) -> Order:
    """The order of a group's collectives, which all units on that group share."""
    if group not in _orders:
        _orders[group] = Order(group)
    return _orders[group]


_made: WeakKeyDictionary[Group, count[int]] = WeakKeyDictionary()


def next_on(group: Group) -> int:
    """A number for a new unit or model: names may repeat, but all ranks create units in the same order."""
    return next(_made.setdefault(group, count(1)))


def label_of_unit(name: str, group: Group | None) -> Label:
    """The subject of a unit's collectives, which from now on are compared if torch's debug level is DETAIL."""
    check_labelled_calls()
    if group is None or not process_groups.wants_order_checked():
        return Label(name)
    return Label(name, f"unit {next_on(group)} of the group")


def announce(op: str, what: str, tensor: Tensor, group: Group, whose: str = "") -> None:
    """Exchange with the other ranks of `group` the collective and tensor that each is about to issue.

    This does nothing unless torch's debug level is DETAIL.

    Args:
        op: the collective.
        what: the name of the tensor.
        tensor: the tensor, of the same size and dtype on all ranks.
        group: the ranks that take part.
        whose: distinguishes it from others with the same name.

    Raises:
        RuntimeError: as `Order.announce`.
    """
    if process_groups.wants_order_checked() and group.size() > 1:
        _announce(op, Label(what, whose), tensor.numel(), tensor.dtype, group)


def _announce(op: str, label: Label, numel: int, dtype: torch.dtype, group: Group) -> None:
    whose = f", {label.whose}" if label.whose else ""
    order_of(group).announce(f"{op} of {label.what}, {numel:,} x {str(dtype).removeprefix('torch.')}{whose}")


def check_labelled_calls() -> None:
    """If torch's debug level is DETAIL: from now on compare every collective that has a label."""
    if process_groups.wants_order_checked() and _before_issue not in comm.observers:
        comm.observers.append(_before_issue)


def _before_issue(call: Call, phase: Literal["issue", "wait"]) -> AbstractContextManager[None]:
    if phase == "issue" and call.label is not None and call.ranks > 1 and process_groups.wants_order_checked():
        numel = call.payload // call.dtype.itemsize
        _announce(call.op.replace("_", "-"), call.label, numel, call.dtype, group_named(call.group))
    return nullcontext()
