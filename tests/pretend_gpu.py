"""A GPU on paper: tensors of a device that is not there, and a list of what the host waits for.

Torch lets a program register a device type of its own. Fake tensors on it have no memory, but shapes, dtypes, gradients
and a device that is not the CPU; the real code runs on them, backward in the device's own thread. Whatever needs a
value on the host (`.item()`, `.tolist()`, a tensor in an `if`, `torch.tensor(..., device=...)`) raises.

Streams and events are those of device.py for the CPU, which tell what a device would have been asked.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minifsdp
from minifsdp import device
from minifsdp.course.ladder.measure import take_step
from minifsdp.course.ladder.rungs import Trainer
from minifsdp.fsdp import FullyShardedDataParallel
from minifsdp.fsdp.absent import Absent
from minifsdp.fsdp2.torch_api import api
from minifsdp.instruments.machine.paper import _absent_like

RANKS = 4
GPU, MESH = torch.device("cpu"), None  # until `register`


def register() -> None:
    """Once in a process, which is then good for nothing else: torch takes the device for the machine's accelerator."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    global GPU, MESH
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real one would be in the way
    _setup_privateuseone_for_python_backend("pretend")
    GPU = torch.device("pretend", 0)
    dist.init_process_group("cpu:fake,pretend:fake", store=FakeStore(), rank=0, world_size=RANKS)
    MESH = init_device_mesh("pretend", (RANKS,))  # of real tensors


class Waits(TorchDispatchMode):
    """Notes where the host waits for the device, and where it should have.

    Attributes:
        seen: one line each: what, and the innermost place in minifsdp.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []
        self._coming: dict[int, Any] = {}  # host memory that a copy is on its way to
        self._going: dict[int, Any] = {}  # host memory that a copy to the device still reads
        self._behind: dict[Any, set[int]] = {}  # what has come and gone once an event has happened

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, tensors = func.overloadpacket.__name__, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(t.device.type == "cpu" and t.untyped_storage()._cdata in self._coming for t in tensors):
            self._note("read before it is there")
        written = [t for t in tree_leaves(args[:1]) if isinstance(t, Tensor)] if _writes(func) else []
        if any(t.device.type == "cpu" and t.untyped_storage()._cdata in self._going for t in written):
            self._note("written while it is read")
        returned = func(*args, **kwargs)
        if name in ("copy_", "_to_copy"):
            target, source = args[:2] if name == "copy_" else (returned, args[0])
            blocks = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
            if target.device != source.device and blocks:
                self._note(f"copy to {target.device.type}")
            elif target.device.type == "cpu" != source.device.type:  # into pinned memory, in both cases
                self._coming[target.untyped_storage()._cdata] = target
            elif source.device.type == "cpu" != target.device.type and not blocks:
                self._going[source.untyped_storage()._cdata] = source
        return returned

    def hear(self, command: device.Command) -> None:
        """What the device is asked beside kernels."""
        if command.verb == "record":
            self._behind[command.subject] = {*self._coming, *self._going}
        elif command.verb == "synchronize" and isinstance(command.subject, torch.device):
            self._coming.clear()
            self._going.clear()
            self._note("device")
        elif command.verb == "synchronize":
            for memory in self._behind[command.subject]:
                self._coming.pop(memory, None)
                self._going.pop(memory, None)
            self._note("event")

    def _note(self, what: str) -> None:
        frame: Any = sys._getframe(1)
        while frame and (not _is_ours(frame.f_code.co_filename) or frame.f_code.co_filename == device.__file__):
            frame = frame.f_back
        place = Path(frame.f_code.co_filename).relative_to(_PACKAGE).as_posix() if frame else "elsewhere"
        self.seen.append(f"{what}: {place}")


_PACKAGE = Path(minifsdp.__file__).parent


def _writes(func: Any) -> bool:
    """Whether it changes its first argument."""
    alias = func._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def _is_ours(file: str) -> bool:
    return Path(file).is_relative_to(_PACKAGE)


@contextmanager
def pretend() -> Iterator[Waits]:
    """Inside the `with` all new tensors are fake, on whatever device."""
    waits = Waits()
    device.command_observers.append(waits.hear)
    try:
        mesh = patch.object(api, "all_ranks", lambda *_: MESH)
        with patch.object(Absent, "like", _absent_like), mesh, FakeTensorMode(), waits:
            yield waits
    finally:
        device.command_observers.remove(waits.hear)


def waits_of_steps(build: Callable[[], Trainer], steps: int) -> list[str]:
    """Where the host waits in some training steps; the last line is the error, if there was one."""
    with pretend() as waits:
        try:
            trainer = build()
            for module in FullyShardedDataParallel.fsdp_modules(trainer.model):
                if module._unit is not None:
                    device.free(module._unit.flat.full)  # fake views of a storage without memory give it some
            waits.seen.clear()
            tokens = torch.zeros(2, 8, dtype=torch.int64, device=GPU)
            for _ in range(steps):
                take_step(trainer, (tokens, tokens), GPU)
        except Exception:
            waits.seen.append(traceback.format_exc())
    return waits.seen
