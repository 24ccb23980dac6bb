"""Record a real run as a program: its kernels, collectives, waits, allocations and frees, in the host's order.

Recording is on CPU, where streams are names and events are clock readings (device.py), with any transport for the
collectives: gloo, an emulated link, or none at all (paper.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minifsdp import comm, device, gloo
from minifsdp.batch import Batch
from minifsdp.comm import Call, Link
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.instruments.machine.program import STEP, Program
from minifsdp.instruments.machine.tape import Tape
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.instruments.watch.step import take_step
from minifsdp.instruments.watch.storages import Books, Operators
from minifsdp.trainer import Trainer
from minifsdp.wrapper_names import clean_name


class Recorder(Ledger):
    """A ledger that also records the program.

    Open it, build the model, call `watch`, train; open an emulated link, if any, before the recorder. The program
    begins at the last `reset_peaks`, with the buffers alive then, or where the recorder was opened.

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
        # The program is for a GPU, where reduce-scatter needs no extra buffer.
        self._on_exit.enter_context(patch.object(gloo, "wanted", lambda: "native"))
        return self

    def watch(self, model: nn.Module, optimizer: Any = None, leaves: Any = ()) -> None:
        """Watch as a ledger does; also names the units of a FullyShardedDataParallel model after their modules.

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
        """Set the name of a unit and its buffers."""
        for what, buffer in unit.buffers.items():
            self._books.name(buffer, name, what)

    def program(self) -> Program:
        """The program recorded so far."""
        return self._books.program()


def record_steps(build: Callable[[], Trainer], batch: Batch, steps: int = 2) -> Program:
    """Record this rank's training steps, with marks "step", "forward", "backward", "optimizer" and "rest".

    Args:
        build: makes model and optimizer.
        batch: this rank's arguments of the model, which returns its loss; the same in every step.
        steps: number of steps. The first has no gather order to follow yet, creates the optimizer's state and starts
            with an empty allocator cache, so evaluate the last.
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
    """Operators that also report each kernel and its duration to the tape."""

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
    """A link that records each collective and passes it on."""

    def __init__(self, tape: Tape, carrier: Link | None) -> None:
        self._tape, self._carrier = tape, carrier

    def submit(self, call: Call, collective: Any) -> Any:
        self._tape.issue(call, [argument for argument in collective.args if isinstance(argument, Tensor)])
        return collective() if self._carrier is None else self._carrier.submit(call, collective)
