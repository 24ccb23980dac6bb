"""Messages between the ranks of an SPMD job over its rendezvous store: their results, and the number that failed.

Anyone who reaches the store's port can write to it without a key, so its content is read as data and never as code:
`torch.load(weights_only=True)` makes numbers, text, tensors and containers of them, and calls nothing else.
"""

import dataclasses
import io
import time
from importlib import import_module
from typing import Any

import torch
from torch import serialization
from torch.distributed import Store  # type: ignore[attr-defined]

from minifsdp.instruments.launch.errors import Failure, Kind, RankError, rank_error

GRACE = 5.0  # seconds in which the others may still answer once a rank has failed
_CHUNK = 1 << 20  # bytes per stored value: a TCPStore refuses values above a few MiB


def pack(obj: Any) -> bytes:
    """`obj` as bytes that `unpack` accepts; tensors on a GPU arrive on CPU.

    Raises:
        TypeError: it holds more than data.
    """
    kind = type(obj).__name__
    with io.BytesIO() as file:
        try:
            torch.save(obj, file)
        except Exception as error:
            raise TypeError(
                f"fn returned a {kind} that cannot be pickled ({error}); return numbers or tensors"
            ) from None
        names = _classes(file)
        try:
            unpack(file.getvalue())
        except ValueError:
            raise TypeError(
                f"fn returned a {kind} with {', '.join(names) or 'something'} in it, but under torchrun and srun ranks"
                " exchange data alone: return numbers, text, tensors, lists or dicts of them, or pass the class to"
                " torch.serialization.add_safe_globals"
            ) from None
        return file.getvalue()


def unpack(content: bytes) -> Any:
    """The object that `pack` packed.

    Raises:
        ValueError: the bytes are not from `pack`, or hold more than data.
    """
    with io.BytesIO(content) as file:
        try:
            ours: list[Any] = [found for name in _classes(file) if (found := _our_class(name)) is not None]
            file.seek(0)
            with serialization.safe_globals(ours):
                return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(f"no data: {type(error).__name__}") from None


def _classes(file: io.BytesIO) -> list[str]:
    """The classes in a packed object that torch does not load as data."""
    file.seek(0)
    return list(serialization.get_unsafe_globals_in_checkpoint(file))


def _our_class(name: str) -> type | None:
    """The class of this name if it belongs to minifsdp and only holds data; else None."""
    module, _, name = name.rpartition(".")
    found = getattr(import_module(module), name, None) if module.startswith("minifsdp.") else None
    holds_data = dataclasses.is_dataclass(found) or hasattr(found, "_fields")
    return found if isinstance(found, type) and holds_data else None


def put_result(store: Store, rank: int, result: bytes) -> None:
    """Store a rank's answer: the packed result of its function."""
    _put(store, rank, "result", result)


def put_failure(store: Store, failure: Failure) -> None:
    """Store a rank's answer: its failure."""
    _put(store, failure.rank, "failure", pack(dataclasses.asdict(failure) | {"kind": int(failure.kind)}))


def _put(store: Store, rank: int, kind: str, content: bytes) -> None:
    chunks = [content[start : start + _CHUNK] for start in range(0, len(content), _CHUNK)]
    for index, chunk in enumerate(chunks):
        store.set(f"{kind}{rank}/{index}", chunk)  # type: ignore[arg-type]  # it takes bytes as well
    store.set(f"{kind}{rank}", str(len(chunks)))
    store.set(f"answer{rank}", kind)
    store.add("answers", 1)


def take_answers(store: Store, world_size: int, deadline: float) -> list[Any]:
    """Wait until each of the `world_size` ranks has answered, or one has failed and `GRACE` is over.

    Returns:
        their results, in rank order.

    Raises:
        RankError: a rank has failed, has not answered before the deadline, or its answer cannot be read.
    """
    await_count(store, "answers", world_size, deadline)
    kinds = {rank: store.get(f"answer{rank}") for rank in range(world_size) if store.check([f"answer{rank}"])}
    failed = [_get(store, rank, "failure") for rank, kind in kinds.items() if kind == b"failure"]
    if failed:
        raise rank_error([Failure(**{**each, "kind": Kind(each["kind"])}) for each in failed])
    silent = [rank for rank in range(world_size) if rank not in kinds]
    if silent:
        names = ", ".join(map(str, silent))
        raise RankError(f"no answer from rank(s) {names} in time", dict.fromkeys(silent, "no answer"))
    return [_get(store, rank, "result") for rank in range(world_size)]


def _get(store: Store, rank: int, kind: str) -> Any:
    key = f"{kind}{rank}"
    try:
        return unpack(b"".join(store.get(f"{key}/{index}") for index in range(int(store.get(key)))))
    except ValueError as error:
        headline = f"its answer cannot be read: {error}"
        raise RankError(f"rank {rank} failed: {headline}", {rank: headline}) from None


def await_count(store: Store, counter: str, count: int, deadline: float) -> None:
    """Wait until the ranks have counted up to `count`, or until the deadline, or `GRACE` after one has failed."""
    failed = False
    while store.add(counter, 0) < count and time.monotonic() < deadline:
        if not failed and store.add("failed", 0):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        time.sleep(0.01)
