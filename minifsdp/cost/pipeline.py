"""Pipelines in numbers: bubbles, messages, bytes of activations and of data parallelism; arithmetic, no tensors.

p ranks with v stages each, m micro-batches; F, B, I, W are the seconds of forward, backward, and of its two parts. A
bubble is the idle share of all ranks' time over the whole step; papers also write it as a share of the work, which is
(p - 1) / m for GPipe.

                   bubble                                    micro-batches held by rank r, at most
    naive          (p - 1) / p                               1, the whole batch
    GPipe          (p - 1) / (m + p - 1)                     m
    1F1B           the same                                  min(m, p - r)
    interleaved    (p - 1) / (v m + p - 1)                   min(v m, (v - 1) p + 2 (p - 1 - r) + 1), a v-th as large
    ZB-H1          (p - 1) (F + I - W) / (that + m (F + B))  min(m, p)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from minifsdp.cost import activations
from minifsdp.cost.activations import Cut, Sizes
from minifsdp.cost.data_parallel import Bytes, Setting
from minifsdp.cost.fsdp2 import Buffers, Shape
from minifsdp.cost.fsdp2 import fsdp2 as fsdp2_bytes

Did = tuple[int, str, int]
"""Stage, kind and micro-batch of an action."""


def bubble(ranks: int, micros: int, per_rank: int = 1) -> float:
    """The bubble of GPipe and of 1F1B, with one stage per rank or interleaved; `micros` = 1: of naive placement."""
    return (ranks - 1) / (per_rank * micros + ranks - 1)


def zero_bubble(ranks: int, micros: int, forward: float = 1, of_input: float = 1, of_weights: float = 1) -> float:
    """The bubble of ZB-H1, for the times of F, I and W."""
    idle = (ranks - 1) * (forward + of_input - of_weights)
    return idle / (micros * (forward + of_input + of_weights) + idle)


def micro_batches_held(ranks: int, micros: int, rank: int, per_rank: int = 1) -> int:
    """Micro-batches, each as often as it passes the rank, whose activations it holds at most, with 1F1B."""
    if per_rank == 1:
        return min(micros, ranks - rank)
    return min(per_rank * micros, (per_rank - 1) * ranks + 2 * (ranks - 1 - rank) + 1)


# Activations


@dataclass(frozen=True)
class Stage:
    """A stage of the course's GPT.

    Attributes:
        blocks: how many.
        is_first: it also has the embeddings.
        is_last: it also has the head, and the loss.
    """

    blocks: int
    is_first: bool
    is_last: bool


def stages_of(layers: int, stages: int) -> list[Stage]:
    """`layers` blocks in so many stages, in some one more than in later ones."""
    share, more = divmod(layers, stages)
    return [Stage(share + (n < more), n == 0, n == stages - 1) for n in range(stages)]


def kept(stage: Stage, sizes: Sizes, cut: Cut | None = None) -> int:
    """Bytes of one micro-batch from its forward to its backward; `sizes.batch` is its number of sequences."""
    blocks = stage.blocks * sum(activations.kept_by_block(sizes, cut or Cut()).values())
    before, after = activations.kept_around_blocks(sizes, cut)
    return blocks + (before if stage.is_first else 0) + (after if stage.is_last else stream(sizes, cut))


def stream(sizes: Sizes, cut: Cut | None = None) -> int:
    """Bytes of what one stage passes to the next, on each tensor-parallel rank."""
    parts = cut.ranks if cut is not None and cut.sequence else 1
    return sizes.itemsize * sizes.batch * sizes.context * sizes.width // parts


def kept_for_weights(stage: Stage, sizes: Sizes, cut: Cut | None = None) -> int:
    """Bytes of one micro-batch from I to W: inputs and output gradients of all linear layers.

    In elements of a block: inputs h + h + h + 4h, gradients 3h + h + 4h + h, each times b s. Of t tensor-parallel
    ranks each has a part of all but the inputs of qkv and up (unless they are gathered again) and the gradients of the
    outputs of out and down.
    """
    token = sizes.itemsize * sizes.batch * sizes.context
    t = 1 if cut is None else cut.ranks
    inputs = t if cut is not None and cut.regather else 1
    block = token * sizes.width * 2 // inputs + token * sizes.width * 12 // t + token * sizes.width * 2
    head = token * (sizes.width + sizes.vocabulary) if stage.is_last else 0
    return stage.blocks * (block + zeros(sizes, cut)) + head


def zeros(sizes: Sizes, cut: Cut | None) -> int:
    """Bytes of what a rank adds in a block where the first one adds the biases of out and down; kept from F to W."""
    return 0 if cut is None or cut.adds_bias else 2 * sizes.itemsize * sizes.width


def held(
    plan: Sequence[Sequence[Did]], rank: int, stages: Sequence[Stage], sizes: Sizes, cut: Cut | None = None
) -> int:
    """Bytes of activations that a rank holds at most, before an action of its list or after all."""
    return max(before for _, before in held_before(plan, rank, stages, sizes, cut))


def held_before(
    plan: Sequence[Sequence[Did]], rank: int, stages: Sequence[Stage], sizes: Sizes, cut: Cut | None = None
) -> Iterator[tuple[Did | None, int]]:
    """Bytes of activations that a rank holds before each action of its list, and at last (None) after all.

    A micro-batch's are held from F to B, or whole to I and in part to W; of a loss its value stays. A gradient that was
    sent is held until a message from its receiver shows that it has arrived; one for a stage on the same rank, until
    that stage uses it.
    """
    homes = homes_of(plan)
    passed = stream(sizes, cut)
    now = 0
    splits = any(kind == "W" for _, kind, _ in plan[rank])
    sent: list[tuple[int, int]] = []  # of each gradient on its way: the receiver, and its place in the receiver's list
    for number, kind, micro in plan[rank]:
        yield (number, kind, micro), now + passed * len(sent)
        stage, below, above = stages[number], homes.get(number - 1), homes.get(number + 1)
        source, maker = (below, (number - 1, "F")) if kind == "F" else (above, (number + 1, "BI"))
        if kind != "W" and source not in (None, rank):
            made = _place(plan[source], *maker, micro)
            sent = [each for each in sent if each[0] != source or each[1] > made]
        whole = kept(stage, sizes, cut) - (passed if below == rank else 0)  # its input is the output of a stage here
        whole += splits * stage.blocks * zeros(sizes, cut)
        if kind == "F":
            now += whole
        elif kind == "W":
            now -= kept_for_weights(stage, sizes, cut)
        else:
            now += (sizes.itemsize if stage.is_last else 0) - whole - (passed if above == rank else 0)
            now += kept_for_weights(stage, sizes, cut) if kind == "I" else 0
            if below == rank:
                now += passed
            elif below is not None:
                sent.append((below, _place(plan[below], number - 1, "BI", micro)))
    yield None, now + passed * len(sent)


def _place(actions: Sequence[Did], stage: int, kinds: str, micro: int) -> int:
    return next(n for n, each in enumerate(actions) if each[0] == stage and each[1] in kinds and each[2] == micro)


# FSDP2


def fsdp2(stages: Sequence[Sequence[Sequence[Shape]]], setting: Setting) -> Bytes:
    """Stages under FSDP2, whose parameters stay gathered for the step and whose gradients are reduced at its end.

    One stage after another reduces its gradients. Until its turn, each of its parameters has a stand-in of one element
    as its `.grad` (fsdp2/unreduced.py).

    Args:
        stages: of each of the rank's stages the shapes of each parameter, unit by unit, the root first.
        setting: `ranks` are the replicas of a stage.
    """
    units = [list(unit) for stage in stages for unit in stage if unit]
    buffers = [Buffers.of(unit, setting) for unit in units]
    held = fsdp2_bytes(units, 0, setting, ahead=0, limited=False, holds=False)
    peak, means, place = 0, 0, 0
    for number, stage in enumerate(stages):
        waiting = setting.itemsize * parameters_of(stages[number + 1 :])
        for unit in (Buffers.of(shapes, setting) for shapes in stage if shapes):
            place += 1
            left = waiting + sum(each.leaves for each in buffers[place:])
            peak = max(peak, left + means + unit.leaves + unit.packed, left + means + unit.packed + unit.reducing)
            means += unit.mean
    return replace(held, unsharded_peak=sum(unit.whole for unit in buffers), gradients_peak=peak)


def parameters_of(stages: Sequence[Sequence[Sequence[Shape]]]) -> int:
    """The number of parameters in these stages."""
    return sum(len(unit) for stage in stages for unit in stage)


# Messages


def homes_of(plan: Sequence[Sequence[Did]]) -> dict[int, int]:
    """The rank of each stage."""
    return {stage: home for home, actions in enumerate(plan) for stage, _, _ in actions}


def messages(actions: Sequence[Did], homes: Sequence[int] | Mapping[int, int], rank: int) -> int:
    """Messages that a rank sends in a step: activations up, gradients down, unless the other stage is here, too."""
    last = len(homes) - 1
    up = sum(kind == "F" and stage < last and homes[stage + 1] != rank for stage, kind, _ in actions)
    return up + sum(kind in "BI" and stage > 0 and homes[stage - 1] != rank for stage, kind, _ in actions)


class Repeats(NamedTuple):
    """Collectives of a step for each bucket or unit of a stage."""

    gathers: int
    reductions: int

    def sent(self, size: int, ranks: int) -> float:
        """Bytes that a rank sends for a padded buffer of `size` bytes, on a ring of `ranks` replicas."""
        return (self.gathers + self.reductions) * (ranks - 1) / ranks * size


def data_parallel(how: str, micros: int, is_root: bool = False) -> Repeats:
    """Collectives of data parallelism inside a stage, where each backward is whole.

    DDP's all-reduce counts as a reduction and a gather. ZeRO-1 and FSDP2, which keeps parameters for the step and
    reduces after the last micro-batch, send as much as DDP. ZeRO-2 and 3 keep no whole gradients, so every backward
    reduces; ZeRO-3 also gathers for every forward and backward (a root unit stays from forward to backward).

    Args:
        how: "ddp", "zero1", "zero2", "fsdp" (full sharding), "fsdp-grad-op" or "fsdp2".
        micros: m.
        is_root: of FSDP's units.
    """
    each = {
        "ddp": Repeats(1, 1),
        "zero1": Repeats(1, 1),
        "zero2": Repeats(1, micros),
        "fsdp-grad-op": Repeats(micros, micros),
        "fsdp": Repeats(micros if is_root else 2 * micros, micros),
        "fsdp2": Repeats(1, 1),
    }
    return each[how]
