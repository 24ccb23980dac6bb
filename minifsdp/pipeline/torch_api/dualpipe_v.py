"""DualPipeV: ZBV's placement, and in steady state a forward beside a backward (DeepSeek, arXiv 2412.19437).

On a GPU the communication of one hides under the computation of the other. Here the two follow each other, so what is
left of the idea is the order: forwards of one half of the V alternate with backwards of the other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from minifsdp.pipeline.actions import Action, Kind


def dualpipe_v(rank: int, ranks: int, micros: int) -> Iterator[Action]:
    """The actions of `rank`, which has stages `rank` and `2 * ranks - 1 - rank`.

    Raises:
        ValueError: there are fewer micro-batches than stages.
    """
    if micros < 2 * ranks:
        raise ValueError(f"{micros} micro-batches do not fill DualPipeV's {2 * ranks} stages: take {2 * ranks} or more")
    down, up = rank, 2 * ranks - 1 - rank
    after = ranks - 1 - rank  # ranks further down
    done: Counter[tuple[int, bool]] = Counter()
    postponed: deque[Action] = deque()

    def do(stage: int, kind: Kind) -> Action:
        is_forward = kind == "F"
        action = Action(stage, kind, done[stage, is_forward])
        done[stage, is_forward] += 1
        if kind == "I":
            postponed.append(action._replace(kind="W"))
        return action

    for _ in range(2 * after):
        yield do(down, "F")
    for _ in range(rank + 1):
        yield do(down, "F")
        yield do(up, "F")
    for _ in range(after):
        yield do(up, "I")
        yield postponed.popleft()
        yield do(up, "F")
    for _ in range(micros - 2 * ranks + rank + 1):
        yield do(down, "F")
        yield do(up, "B")
        yield do(up, "F")
        yield do(down, "B")
    for _ in range(after):
        yield do(up, "B")
        yield do(up, "F")
        yield do(down, "B")
    for turn in range(2 * (rank + 1)):  # in the second half weights wait: other ranks need the inputs' gradients first
        yield do(down if turn % 2 else up, "I" if turn > rank else "B")
    for _ in range(after):
        if postponed:
            yield postponed.popleft()
        yield do(down, "I")
    yield from postponed
