"""Writes the program that a real run is: its kernels, collectives, waits, allocations and frees, in the host's order.

It records on CPU, where streams are names and events readings of the clock (device.py), whatever carries the
collectives: gloo, an emulated link, or nothing at all (paper.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minifsdp import comm, device, gloo
from minifsdp.comm import Call, Link
from minifsdp.course.ladder.data import Batch
from minifsdp.course.ladder.measure import take_step
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.course.machine.program import STEP, Program
from minifsdp.course.machine.tape import Tape
from minifsdp.course.watch.ledger import Ledger
from minifsdp.course.watch.storages import Books, Operators
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.fsdp.torch_api.state.names import clean_name


class Recorder(Ledger):
    """A ledger that also keeps the program.

    Open it, build the model, call `watch`, train; an emulated link, if there is to be one, has to be open before. The
    program begins at the last `reset_peaks`, with what was alive then, or where the recorder was opened.

        with Recorder() as recorder:
            model = FullyShardedDataParallel(GPT(), auto_wrap_policy={Block})
            recorder.watch(model, optimizer)
            recorder.mark("step")
            ...
        program = recorder.program()
    """

    _books: Tape

    def _make_books(self) -> Books:
        return Tape()

    def _make_operators(self) -> Operators:
        return _Kernels(self._books)

    def __enter__(self) -> Self:
        super().__enter__()
        tape, link = self._books, comm.link
        device.command_observers.append(tape.command)
        self._on_exit.callback(device.command_observers.remove, tape.command)
        comm.observers.append(tape.waits)
        self._on_exit.callback(comm.observers.remove, tape.waits)
        comm.link = _Tap(tape, link)
        self._on_exit.callback(setattr, comm, "link", link)
        # The program is to run on a GPU, where a reduce-scatter needs no memory of ours.
        self._on_exit.enter_context(patch.object(gloo, "wanted", lambda: "native"))
        return self

    def watch(self, model: nn.Module, optimizer: Any = None, leaves: Any = ()) -> None:
        """As a ledger's; also names the units of a FullyShardedDataParallel model after their modules.

        Raises:
            RuntimeError: the model is not on the CPU, or the recorder is not open.
        """
        if any(p.device.type != "cpu" for p in model.parameters()):
            raise RuntimeError('a Recorder records on CPU: start the ranks with launch(..., backend="gloo")')
        super().watch(model, optimizer, leaves)
        for path, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel) and module._unit is not None:
                self.name_unit(clean_name(path) or "root", module._unit)

    def name_unit(self, name: str, unit: FlatUnit) -> None:
        """Name a unit and its memory."""
        for what, buffer in unit.buffers.items():
            self._books.name(buffer, name, what)

    def program(self) -> Program:
        """The program recorded so far."""
        return self._books.program()


def record_steps(build: Callable[[], Trainer], batch: Batch, steps: int = 2) -> Program:
    """The program of this rank's training steps, with marks "step", "forward", "backward", "optimizer" and "rest".

    Args:
        build: makes model and optimizer.
        batch: this rank's arguments of the model, which returns its loss; the same in every step.
        steps: how many. The first gathers without an order to follow and makes the optimizer's state, and an allocator
            has nothing cached in it: look at the last.
    """
    with Recorder() as recorder:
        trainer = build()
        recorder.watch(trainer.model, trainer.optimizer)
        recorder.reset_peaks()
        for _ in range(steps):
            recorder.mark(STEP)
            take_step(trainer, batch, torch.device("cpu"), recorder.mark)
    return recorder.program()


class _Kernels(Operators):
    """Also shows the tape what ran, and how long it took."""

    _books: Tape

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._books.begins(func, (args, kwargs))
        start = time.perf_counter()
        returned = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        self._books.operator(func.name(), (args, kwargs), returned)
        self._books.kernel(func, args, kwargs, returned, seconds)
        return returned


class _Tap:
    """A link that notes what is sent and hands it on."""

    def __init__(self, tape: Tape, carrier: Link | None) -> None:
        self._tape, self._carrier = tape, carrier

    def submit(self, call: Call, collective: Any) -> Any:
        self._tape.issue(call, [argument for argument in collective.args if isinstance(argument, Tensor)])
        return collective() if self._carrier is None else self._carrier.submit(call, collective)
