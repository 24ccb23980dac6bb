"""Exercise 9.5: Accumulate with and without communication."""

import weakref
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minifsdp import FullyShardedDataParallel, comm
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.fsdp.engine import Engine
from minifsdp.instruments.launch import rank_device

from .shared import shards_of


@reference(
    "9.5",
    hints=(
        "Two decisions for each micro-batch: what its loss counts, and whether its backward runs inside "
        "`model.no_sync()`, where gradients stay where they are. The first backward outside reduces all that has piled "
        "up.",
        "In a loop: `nullcontext()` for the last micro-batch, and for all of them if `communicate`; else "
        "`model.no_sync()`. Inside it forward, division by the number of micro-batches, backward.",
    ),
)
def accumulate(model: Any, micro_batches: Sequence[tuple[Tensor, ...]], communicate: bool) -> None:
    """Add the mean gradient of the micro-batches to the shards' `.grad`.

    Args:
        model: an FSDP model that returns a loss, the mean over its rows: `model(*micro_batch)`. `model.no_sync()` is a
            context manager; a backward pass inside it does not reduce. (In DDP the forward decides: keep both inside.)
        micro_batches: k micro-batches with equal numbers of rows. Each gradient has weight 1/k.
        communicate: if True, every micro-batch's gradient is reduced in its own backward. If False, all of them are
            reduced together, in the backward of the last one.

    Run one forward and one backward pass per micro-batch, in turn. Add to any gradients already in `.grad`. The same
    micro-batch may appear more than once.
    """
    for number, micro_batch in enumerate(micro_batches, start=1):
        reduces = communicate or number == len(micro_batches)
        with nullcontext() if reduces else model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)
        self.hidden = []  # weak references to the activations of each forward

    def forward(self, x, target, weight):
        hidden = torch.tanh(self.first(x))
        self.hidden.append(weakref.ref(hidden))
        return (weight * (self.last(hidden) - target)).square().mean()

    def alive(self):
        return sum(each() is not None for each in self.hidden)


MICRO = 3


class Accumulated(NamedTuple):
    reduced: list[int]  # reduce-scatters that had been issued after each backward
    contexts: int  # how often no_sync was entered
    inside: list[bool]  # whether each forward of the first call ran inside no_sync
    rows: list[int]  # of each forward
    most: int  # forwards that were waiting for their backward at once
    first: torch.Tensor
    second: torch.Tensor
    twice: list[int]  # reduce-scatters after each backward of one micro-batch given twice
    third: torch.Tensor  # and the gradients then
    left: int  # micro-batches on the list after the first call
    alive: int  # activations of earlier micro-batches, at most, when a forward begins or a call ends
    one: tuple[list[int], torch.Tensor]  # the same as `twice` and `third`, of one micro-batch


def rows_of(seed, rank):
    generator = torch.Generator().manual_seed(100 + 10 * seed + rank)
    return [tuple(torch.randn(2, size, generator=generator) for size in (3, 1, 1)) for _ in range(MICRO)]


def observe_accumulate(answer, seed):
    group, where = comm.world(), rank_device()
    found = {}
    micro_batches = [tuple(part.to(where) for part in each) for each in rows_of(seed, group.rank())]
    for communicate in (True, False):
        net = Net(seed).to(where)
        model = FullyShardedDataParallel(net, auto_wrap_policy={nn.Linear})
        rows, waiting, reduced, contexts, inside, alive = [], [0, 0], [], [], [], []
        no_sync, end = Engine.no_sync, Engine._end_backward

        def before(module, args, rows=rows, waiting=waiting, alive=alive, net=net, contexts=contexts, inside=inside):
            inside.append(any(contexts))
            alive.append(net.alive())
            rows.append(len(args[0]))
            waiting[0] += 1
            waiting[1] = max(waiting)

        @contextmanager
        def counted(engine, no_sync=no_sync, contexts=contexts):
            contexts.append(True)
            with no_sync(engine):
                yield
            contexts[contexts.index(True)] = False  # it has been left

        with comm.record() as calls:

            def ended(engine, end=end, reduced=reduced, waiting=waiting, calls=calls):
                end(engine)
                waiting[0] -= 1
                reduced.append(sum(c.op == "reduce_scatter" for c in calls))

            model.register_forward_pre_hook(before)
            with patch.object(Engine, "no_sync", counted), patch.object(Engine, "_end_backward", ended):
                given = list(micro_batches)
                answer(model, given, communicate)
                log, gradients = [], []
                log += reduced
                alive.append(net.alive())
                for turn in range(4):
                    if turn == 1:
                        answer(model, micro_batches, communicate)
                    elif turn == 2:
                        two_calls = rows[:], len(reduced), len(contexts), max([0, *reduced])
                        answer(model, 2 * micro_batches[:1], communicate)
                    elif turn == 3:
                        three_calls = len(reduced), max([0, *reduced])
                        answer(model, micro_batches[:1], communicate)
                    gradients.append(
                        torch.cat(
                            [torch.zeros(p.numel()) if p.grad is None else p.grad.cpu() for p in model.parameters()]
                        )
                    )
        rows, ended_before, entered, issued = two_calls
        ended, issued_then = three_calls
        twice = [each - issued for each in reduced[ended_before:ended]]
        one = [each - issued_then for each in reduced[ended:]], gradients[3]
        found[communicate] = Accumulated(
            log,
            entered // 2,
            inside[:MICRO],
            rows,
            waiting[1],
            *gradients[:2],
            twice,
            gradients[2],
            len(given),
            max(alive),
            one,
        )
    return found


@check("9.5")
def check_accumulate(answer, variant):
    """The mean of the micro-batches' gradients, reduced after each of them or once, in the last one's backward."""
    ranks = variant.ranks
    try:
        seen = on_ranks(ranks, observe_accumulate, answer, variant.seed, timeout=10)
    except AnswerError as error:
        if "unpack" in str(error) or "positional argument" in str(error):
            slip = "how many parts a micro-batch has is the model's business, here 3: `model(*micro_batch)`"
            raise AnswerError(f"{error}\nlikely slip: {slip}") from error
        raise
    means = {}
    for what in ("all", "twice"):  # all micro-batches; the first one, given twice
        net = Net(variant.seed)
        for rank in range(ranks):
            micro_batches = rows_of(variant.seed, rank)
            for micro_batch in micro_batches if what == "all" else micro_batches[:1]:
                (net(*micro_batch) / ranks / (MICRO if what == "all" else 1)).backward()
        means[what] = [shards_of(unit, ranks) for unit in (net.first, net.last)]
    for communicate in (True, False):
        at = f"communicate={communicate}: "
        wanted = [2 * number for number in (1, 2, 3)] if communicate else [0, 0, 2]
        for rank, found in enumerate(each[communicate] for each in seen):
            slip = "the list belongs to the caller, who may need it again: iterate over it, and remove nothing"
            expect(f"{at}micro-batches on the list after a call", found.left, MICRO, rank=rank, slip=slip)
            if found.rows != [2] * 2 * MICRO:
                raise AnswerError(
                    f"rank {rank}, {at}rows of all forwards of two calls: expected {[2] * 6}, got {found.rows}\n"
                    "likely slip: micro-batches exist because the whole batch does not fit: one forward for each"
                )
            if found.most > 1:
                raise AnswerError(
                    f"rank {rank}, {at}forwards that wait for their backward at once: expected 1, got {found.most}\n"
                    "likely slip: the activations of all micro-batches are alive together: forward and backward in turn"
                )
            slip = "`backward()` frees a graph's activations, unless it is asked to retain them"
            expect(f"{at}activations of earlier micro-batches in memory", found.alive, 0, rank=rank, slip=slip)
            slip = None
            if communicate and found.contexts:
                slip = "asked to communicate, and some of it ran inside `no_sync`"
            elif not communicate and not any(found.reduced):
                slip = "nothing is ever reduced: the last micro-batch has to run outside `no_sync`"
            elif not communicate and found.reduced[0] and found.contexts:
                slip = "it is the last micro-batch that reduces what has piled up, not the first"
                if found.reduced == [2, 4, 6]:
                    slip = "it is the backward that communicates: run that inside `no_sync`, not the forward alone"
            elif not communicate and not found.contexts:
                slip = "every micro-batch was reduced: `communicate` made no difference"
            elif not communicate and found.reduced[-1] == 0:
                slip = "the gradients of the last are left unsharded"
            expect(
                f"{at}reduce-scatters issued after each backward (2 units)", found.reduced, wanted, rank=rank, slip=slip
            )
            if not communicate:
                expect(
                    f"{at}forward passes inside `no_sync`",
                    found.inside,
                    [True] * (MICRO - 1) + [False],
                    rank=rank,
                    slip="only the backward pass ran inside `no_sync`: a DDP model looks at it in the forward pass",
                )
            mean, again = (torch.cat([unit[rank] for unit in means[what]]) for what in ("all", "twice"))
            last = "dropped what was there: the caller decides when gradients begin anew"
            expect(
                f"{at}the shards' gradients beside one process with all data",
                found.first,
                mean,
                rank=rank,
                tolerance=1e-5,
                slips={f"{MICRO} times the mean: divide each micro-batch's loss by their number": MICRO * mean},
                slip="not the mean of all micro-batches: is every one's gradient in it, and the last's only once?",
            )
            slips = {last: mean}
            expect(f"{at}the same, called twice", found.second, 2 * mean, rank=rank, tolerance=1e-5, slips=slips)
            expect(
                f"{at}reduce-scatters issued after each backward of one micro-batch that is given twice",
                found.twice,
                [2, 4] if communicate else [0, 2],
                rank=rank,
                slip="which one is the last, its place tells and not what is in it",
            )
            expect(
                f"{at}and the gradients of that, added to those before",
                found.third,
                2 * mean + again,
                rank=rank,
                tolerance=1e-5,
                slips={"there are 2 micro-batches now, each counts 1/2": 2 * mean + 2 / MICRO * again},
            )
            slip = "one micro-batch is the first and the last: it is reduced, and counts in full"
            expect(f"{at}reduce-scatters of one micro-batch alone", found.one[0], [2], rank=rank, slip=slip)
            expect(
                f"{at}and the gradients of that, added to those before",
                found.one[1],
                2 * mean + 2 * again,
                rank=rank,
                tolerance=1e-5,
                slip=slip,
            )
