"""The meeting of an SPMD job's ranks: the store at MASTER_ADDR, and in it a place new to each attempt.

torchrun's agent serves one store for all attempts of a job, so after a restart it still holds what ranks that are dead
have written: addresses of gloo, counts, results.
"""

import datetime
import os
import queue
import threading
import time
import uuid

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

LIMIT = 300.0  # seconds in which all ranks have to come
_PAUSE = 0.01  # seconds between two looks into the store


def meet(rank: int, size: int) -> Store:
    """The store, once all ranks have joined. A thread waits, since C++ code would ignore Ctrl-C and SIGTERM."""
    met: queue.SimpleQueue[Store | BaseException] = queue.SimpleQueue()

    def wait() -> None:
        try:
            store = next(rendezvous("env://", timeout=datetime.timedelta(seconds=LIMIT)))[0]
            outlives_us = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            met.put(new_place(store, rank, size) if outlives_us else store)
        except BaseException as error:
            met.put(error)

    threading.Thread(target=wait, daemon=True).start()
    found = met.get()
    if isinstance(found, BaseException):
        raise found
    return found


def new_place(store: Store, rank: int, size: int, limit: float = LIMIT) -> Store:
    """A part of the store that is new to all ranks; a collective call.

    Each rank writes a word that nobody else has. Rank 0 writes all words that it finds, and again if one of them was an
    earlier attempt's, until each rank has found its own among them: then all have the same words of this attempt.

    Raises:
        TimeoutError: a rank has not come.
    """
    deadline, mine = time.monotonic() + limit, uuid.uuid4().hex
    meeting = PrefixStore("minifsdp/meeting", store)
    meeting.set(f"word{rank}", mine)
    place = PrefixStore(mine, meeting)
    heard = [f"heard{other}" for other in range(1, size)]
    while time.monotonic() < deadline:
        if rank == 0:
            if heard and not place.check(heard):
                names = [f"word{other}" for other in range(size)]
                if meeting.check(names):
                    meeting.set("words", b" ".join(map(meeting.get, names)))  # type: ignore[arg-type]
            else:
                return place
        elif meeting.check(["words"]):
            first, *others = meeting.get("words").decode().split()
            if others[rank - 1] == mine:
                place = PrefixStore(first, meeting)
                place.set(f"heard{rank}", "")
                return place
        time.sleep(_PAUSE)
    raise TimeoutError(f"rank {rank} of {size}: not all ranks have come within {limit:g} s")
