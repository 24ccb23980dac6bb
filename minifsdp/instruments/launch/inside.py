"""The environment of the launched function in a rank: `report`, and no terminal."""

import builtins
import contextlib
import io
import pdb
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch

_deliver: Callable[[Any], None] | None = None
_is_rank_process = False


def report(obj: Any) -> None:
    """Hand `obj` to the `on_report(rank, obj)` of the running launch at once, while the ranks still run.

    Raises:
        RuntimeError: outside a launched function.
    """
    if _deliver is None:
        raise RuntimeError("report works inside a function that launch runs; no launch is running here")
    _deliver(obj)


def inside_rank() -> bool:
    """True if `launch` has started this process as a rank."""
    return _is_rank_process


def call_user(fn: Callable[..., Any], args: tuple[Any, ...], deliver: Callable[[Any], None]) -> Any:
    """Call `fn(*args)`, with `report` going to `deliver`. Stacks and tracebacks are shown from this frame inwards."""
    with _delivering(deliver):
        return fn(*args)


@contextlib.contextmanager
def _delivering(deliver: Callable[[Any], None]) -> Iterator[None]:
    global _deliver
    before, _deliver = _deliver, deliver
    try:
        yield
    finally:
        _deliver = before


class _ToHost(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that sends GPU tensors as CPU tensors: the receiver may have no GPU, or none to spare."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def pickled(obj: Any) -> bytes:
    """Pickle for the process that called `launch`; tensors on a GPU arrive on CPU."""
    with io.BytesIO() as file:
        _ToHost(file).dump(obj)
        return file.getvalue()


def pack_result(result: Any) -> bytes:
    """Pickle a rank's result.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        return pickled(result)
    except Exception as error:
        kind = type(result).__name__
        raise TypeError(f"fn returned a {kind} that cannot be pickled ({error}); return numbers or tensors") from None


def become_rank() -> None:
    """Mark this process as a rank: a breakpoint in it prints one line and goes on, `input` raises that line."""
    global _is_rank_process
    _is_rank_process = True
    advice = "a rank has no terminal; use launch(fn, 1, inline=True)"
    told = False

    def skip_breakpoint(*args: Any, **kwargs: Any) -> None:
        nonlocal told
        if not told:
            frame = sys._getframe(1)
            print(f"breakpoint at {frame.f_code.co_filename}:{frame.f_lineno} skipped: {advice}", flush=True)
        told = True

    def refuse_input(prompt: object = "") -> str:
        raise EOFError(f"input({prompt!r}): {advice}")

    sys.breakpointhook = skip_breakpoint
    pdb.set_trace = pdb.Pdb.set_trace = skip_breakpoint  # type: ignore[method-assign]
    builtins.input = refuse_input
