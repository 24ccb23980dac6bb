"""The checks of lab 10b."""

import threading
from collections import Counter
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import comm
from minifsdp.course.workshop.checking import AnswerError, check, expect, on_ranks
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.watch.ledger import Ledger

ITEM = 4  # bytes
TIED = ["tied.weight", "again.weight"]  # further names of 1.weight


class NamedUnit(NamedTuple):
    """As in the notebook's set-up cell."""

    flat: FlatParameter
    names: list[list[str]]


def make_units(variant, where="cpu", dtype=torch.float32):
    """Three units with padding on 2, 3 and 4 ranks; in the second a weight has three names. Alike on all ranks."""
    torch.manual_seed(variant.seed)
    group = comm.world()
    units = []
    for number in range(3):
        numels = {"weight": (2 + number, variant.size), "bias": (3,)}
        filler = -sum(torch.Size(shape).numel() for shape in numels.values()) % 12 + 1
        shapes = {**numels, "scale": (filler,)}
        module = nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()}).to(where, dtype)
        flat = FlatParameter(find_parameters(module), group.rank(), group.size())
        names = [[f"{number}.{name}"] for name in shapes]
        if number == 1:
            names[0] += TIED
        units.append(NamedUnit(flat, names))
    return units


def storages(values):
    """Bytes behind tensors, each storage once."""
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in values}.values())


def has_memory(tensor):
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


class Keep:
    """Copies, and notes what it was shown."""

    def __init__(self):
        self.shown, self.without, self.attached = Counter(), 0, 0

    def __call__(self, whole):
        if not isinstance(whole, torch.Tensor):
            raise AnswerError(f"keep() was given {type(whole).__name__}: expected the parameter's whole value")
        self.shown[tuple(whole.shape)] += 1
        self.attached += whole.requires_grad
        if not has_memory(whole):
            self.without += 1
            return torch.full(whole.shape, torch.nan)
        return whole.detach().clone()


# 10b.1


class Refused(str):
    """What an answer was refused for while it ran: an exception would lose all but its first line on the way back."""


def refusing(observe):
    """Let `observe` return what it refuses an answer for."""

    @wraps(observe)
    def observed(*args):
        try:
            return observe(*args)
        except AnswerError as error:
            return Refused(error)

    return observed


def seen_on(ranks, observe, *args, slip):
    """What the ranks have seen, in their order; raises what the first of them has refused the answer for."""
    try:
        seen = on_ranks(ranks, observe, *args, timeout=6, slip=slip)
    except AnswerError as error:
        if "'NoneType' object is not callable" in str(error):
            raise AnswerError(f"{error}\nlikely slip: {KEEPERS}") from error
        raise
    for rank, each in enumerate(seen):
        if isinstance(each, Refused):
            raise AnswerError(f"rank {rank}, {each}")
    return seen


def another_group():
    """All ranks again, in a group that is not the world: its name tells which one an answer has used."""
    return dist.new_group(list(range(comm.world().size())))


KEPT = ((torch.float32, 0), (torch.bfloat16, -1))  # of what dtype the units are, and which rank keeps


@refusing
def observe_whole_values(answer, variant):
    group = another_group()
    ranks = range(group.size())
    return [observe_kept(answer, variant, group, dtype, {ranks[keeper]}) for dtype, keeper in KEPT]


def observe_kept(answer, variant, group, dtype, kept_by):
    with Ledger() as ledger:
        units = make_units(variant, rank_device(), dtype)
        for unit in units:
            unit.flat.shard.data.add_(group.rank() + 1)  # as after a step of the optimizer
        keep = Keep() if group.rank() in kept_by else None
        ledger.reset_peaks()
        order, seen = [], ledger.live()["unsharded"]
        with comm.record() as calls, Waited(order, group):
            result = answer(units, group, keep)
        if not torch.is_grad_enabled():
            raise AnswerError(
                "gradients after the call: expected switched on as before, got switched off\n"
                "likely slip: `set_grad_enabled` stays: `with torch.no_grad():` ends, or `keep` gets `view.detach()`"
            )
        peak, left = ledger.peak_of("unsharded") - seen, ledger.live()["unsharded"] - seen
    comm.all_reduce(torch.zeros(1, device=rank_device()), group).wait()  # nobody leaves while a gather is under way
    first = (result or {}).get("1.weight")
    others = {id((result or {}).get(name, first)) for name in TIED} - {id(first)}
    found = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in dict(result or {}).items()}
    return (
        found,
        [c.op for c in calls],
        order,
        peak,
        left,
        None if keep is None else (keep.shown, keep.without, 1 + len(others)),
    )


class AtOnce(comm.Handle):
    """A collective that is over when it has begun: if nobody waits, it does not write into memory that is freed."""

    __slots__ = ()

    def __init__(self, call, work):
        work.wait()
        super().__init__(call, work)


class Waited:
    """The issues and waits of collectives, in order; refuses those in another group, and those that do not fit."""

    def __init__(self, seen, group):
        self.seen, self.group = seen, group
        self.patches = [patch.object(comm, "Handle", AtOnce), patch.object(comm, "all_gather", self.all_gather)]
        self.gather = comm.all_gather

    def __enter__(self):
        comm.observers.append(self.watch)
        for each in self.patches:
            each.start()

    def __exit__(self, *exc):
        comm.observers.remove(self.watch)
        for each in self.patches:
            each.stop()

    def watch(self, call, phase):
        if call.group != self.group.group_name:
            raise AnswerError(
                f"the group of the {call.op}: expected the one that was given, got another\n"
                "likely slip: `group` need not be the world: with hybrid sharding it is a part of it"
            )
        self.seen.append(f"{phase} {call.op}")
        return NOTHING

    def all_gather(self, output, shard, group):
        ranks = self.group.size()
        if output.dtype != shard.dtype:
            raise AnswerError(
                f"a gather's buffer: expected {shard.dtype} as its shards, got {output.dtype}\n"
                "likely slip: a buffer has the dtype of what is gathered into it, which need not be float32"
            )
        if output.numel() != ranks * shard.numel():
            raise AnswerError(
                f"a gather's buffer: expected {ranks * shard.numel():,} elements for shards {list(shard.shape)}, "
                f"got {output.numel():,}\n"
                "likely slip: "
                + (
                    "a state may have a dimension, and not the shard's shape: compare the shapes"
                    if shard.dim()
                    else "gather what has the shard's shape, whatever its key: `step` is not the only number"
                )
            )
        return self.gather(output, shard, group)


class Nothing:
    def __enter__(self): ...

    def __exit__(self, *exc): ...


NOTHING = Nothing()


def expected_values(variant, dtype):
    """The units of all ranks put together, as a plain dict."""
    whole = {}
    flats = [fake_units(variant, rank, dtype) for rank in range(variant.ranks)]
    for at, unit in enumerate(flats[0]):
        full = torch.cat([ranks_units[at].flat.shard.detach() + (rank + 1) for rank, ranks_units in enumerate(flats)])
        for names, view in zip(unit.names, unit.flat.unflatten(full), strict=True):
            whole |= dict.fromkeys(names, view)
    return whole


def fake_units(variant, rank, dtype=torch.float32):
    """`make_units` as another rank would have it."""

    class FakeGroup:
        def rank(self):
            return rank

        def size(self):
            return variant.ranks

    world, comm.world = comm.world, lambda: FakeGroup()
    try:
        return make_units(variant, dtype=dtype)
    finally:
        comm.world = world


KEEPERS = "every rank that has a `keep` uses it, whatever its number: test `keep is not None`"
EVERYBODY = "every rank takes part in every all-gather, also one that keeps nothing"


@check("10b.1")
def check_whole_values(answer, variant):
    """One unit whole at a time, on every rank; kept by rank 0 alone."""
    found = seen_on(variant.ranks, observe_whole_values, answer, variant, slip=EVERYBODY)
    for number, (dtype, keeper) in enumerate(KEPT):
        check_kept([each[number] for each in found], variant, dtype, range(variant.ranks)[keeper])


def check_kept(found, variant, dtype, keeper):
    """What the ranks have done with units of a dtype, of which rank `keeper` alone has a `keep`."""
    units = fake_units(variant, 0, dtype)
    largest = max(unit.flat.full.numel() for unit in units) * dtype.itemsize
    everything = sum(unit.flat.full.numel() for unit in units) * dtype.itemsize
    everywhere = all(each[4] == everything for each in found)
    wanted = expected_values(variant, dtype)
    gathers = ["all_gather"] * len(units)
    for rank, (result, ops, order, peak, left, kept) in enumerate(found):
        expect("collectives", ops, gathers, rank=rank, slip="one all-gather per unit, whatever the rank keeps")
        expect(
            "issues and waits",
            order,
            ["issue all_gather", "wait all_gather"] * len(units),
            rank=rank,
            slip="until the handle's `wait()` the buffer holds anything; and one unit after the other",
        )
        expect(
            "unsharded bytes afterwards",
            left,
            0,
            rank=rank,
            slips={"nothing is freed: the entire model stays unsharded next to its state dict": everything}
            if everywhere
            else {},
            slip="each unit is freed as soon as it has been kept, on ranks that keep nothing too",
        )
        expect(
            "unsharded bytes at the peak",
            peak,
            largest,
            rank=rank,
            slips={"the whole model at once: free a unit before the next one is gathered": everything},
        )
        if rank != keeper:
            expect("the result", result, {}, rank=rank, slip="a rank whose `keep` is None gets an empty dict")
            continue
        if kept[0].total() == 0 and not result:
            raise AnswerError(f"rank {rank}, calls of keep(): expected some, got none\nlikely slip: {KEEPERS}")
        shown, without, objects = kept
        if without:
            raise AnswerError(
                f"rank {rank}, values given to keep(): expected whole ones, got {without} without memory\n"
                "likely slip: freed before it was kept"
            )
        expect(
            "calls of keep()",
            sum(shown.values()),
            sum(len(unit.names) for unit in units),
            rank=rank,
            slips={"a tied parameter is kept once, and all of its names lead to it": len(wanted)},
            slip="once per parameter, with its whole value",
        )
        slip = "put what `keep` returns under all names of a parameter, not a copy of it: it may be any object"
        expect(f"objects under 1.weight, {' and '.join(TIED)}", objects, 1, rank=rank, slip=slip)
        tied = "a plain module's state dict has all names of a tied weight"
        missing = wanted.keys() - result.keys()
        expect_names(rank, result, wanted, tied if missing and missing <= set(TIED) else None)
        for name, value in wanted.items():
            expect(
                name,
                result[name],
                value,
                rank=rank,
                slip="`flat.views` are the parameters in their shapes and their dtype",
            )


def expect_names(rank, result, wanted, slip):
    """On a rank that keeps; says which names are missing and which are too many, since the rest is of no interest."""
    missing, more = sorted(wanted.keys() - result.keys()), sorted(result.keys() - wanted.keys())
    if missing or more:
        faults = [f"{len(missing)} missing ({', '.join(missing[:6])})"] if missing else []
        faults += [f"{len(more)} too many ({', '.join(map(str, more[:6]))})"] if more else []
        text = f"rank {rank}, names: expected {len(wanted)}, got {', '.join(faults)}"
        raise AnswerError(f"{text}\nlikely slip: {slip}" if slip else text)


# 10b.2

VIEW = "likely slip: a slice is a view and keeps the whole tensor's memory: copy it"


LARGE = 2**60 + 1  # no floating-point dtype of torch has it


@check("10b.2")
def check_my_rows(answer, variant):
    """Rows of dimension 0, ceil(rows / N) each, in memory of their own; the last ranks have fewer or none."""
    generator = torch.Generator().manual_seed(variant.seed)
    size = variant.size
    shapes = [(size, 3), (2 * size + 1,), (1, 4), (3, 2), (6, 5), (0, 2), (1,), ()]
    for ranks in (1, variant.ranks, 4, 5):
        for shape in shapes:
            check_rows(answer, torch.randn(shape, generator=generator), ranks)
    check_rows(answer, torch.randn(size, 3, generator=generator, dtype=torch.bfloat16), variant.ranks)
    for shape in ((size, 2, 3), (5, 1, 2, 2)):
        check_rows(answer, torch.randn(shape, generator=generator), variant.ranks)
    for number in (torch.tensor(LARGE), torch.tensor(1.5, dtype=torch.bfloat16)):
        check_rows(answer, number, variant.ranks)
    large = LARGE + torch.arange(size)
    for rank in range(variant.ranks):
        got, rows = pair(call_rows(answer, large, rank, variant.ranks))[1], -(-size // variant.ranks)
        same = torch.equal(got, large[rank * rows :][:rows])
        slip = "on the way through a floating-point dtype large whole numbers lose their last digits"
        expect("whole numbers above 2**60, torch.int64: all rows are as they were", same, True, rank=rank, slip=slip)
    for ranks in (1, variant.ranks, 4):
        check_rows(answer, torch.randn(3, size, generator=generator).T, ranks, " (a transpose, not contiguous)")


def check_rows(answer, whole, ranks, which=""):
    shape = list(whole.shape)
    if not shape:
        for rank in range(ranks):
            try:
                got = pair(answer(whole, rank, ranks))
            except (TypeError, IndexError) as error:
                raise AnswerError(
                    f"a number, shape []: {error}\n"
                    "likely slip: a tensor of no dimension cannot be cut: every rank has it"
                ) from error
            expect(f"a number on rank {rank} of {ranks}", got[0], 0, slip="every rank has it whole, from row 0 on")
            what = f"a number in {str(whole.dtype).removeprefix('torch.')} on rank {rank} of {ranks}"
            expect(what, got[1], whole, slip="a number keeps its dtype and all of its digits: `clone()`")
            if got[1].untyped_storage()._cdata == whole.untyped_storage()._cdata:
                raise AnswerError("a number: expected a copy, got the tensor itself\nlikely slip: a copy, here too")
        return
    rows = -(-len(whole) // ranks)
    floor = len(whole) // ranks
    even = [len(part) for part in torch.tensor_split(whole, ranks)]
    sizes = [max(0, min(rows, len(whole) - rank * rows)) for rank in range(ranks)]
    got = [pair(call_rows(answer, whole, rank, ranks)) for rank in range(ranks)]
    lengths = [len(part) if part.dim() else -1 for _, part in got]
    what = f"shape {shape}{which} on {ranks} ranks"
    expect(
        f"{what}, rows by rank",
        lengths,
        sizes,
        slips={
            "one element is not a number: [1] is a row, which one rank has": [1] * ranks if shape == [1] else None,
            "the remaining rows belong to no rank: round up": [floor] * ranks,
            "all remaining rows went to the last rank: round up, and the last ranks have fewer": [
                *[floor] * (ranks - 1),
                len(whole) - floor * (ranks - 1),
            ],
            "this is as even as possible, and another layout: ceil(rows / N) each, as long as there are any": even,
        },
    )
    for rank, (first, part) in enumerate(got):
        expect(
            f"{what}, rank {rank}'s first row",
            first,
            min(rank * rows, len(whole)),
            slips={"a rank without rows begins at the end, not beyond it": rank * rows, "rank, not row": rank},
        )
        expected = whole[rank * rows : rank * rows + rows]
        if part.dtype != whole.dtype:
            raise AnswerError(
                f"{what}, rank {rank}'s rows: expected {whole.dtype}, got {part.dtype}\n"
                "likely slip: a checkpoint keeps each tensor's dtype: copy without converting"
            )
        slip = "its rows are not next to each other in memory: index it" if which else None
        slip = slip or "whole rows, in the tensor's other dimensions"
        expect(f"{what}, rank {rank}'s rows", part, expected, slip=slip)
        held = part.untyped_storage().nbytes()
        expect(
            f"{what}, bytes that rank {rank} holds",
            held,
            part.numel() * part.element_size(),
            slips={VIEW.removeprefix("likely slip: "): whole.numel() * part.element_size()},
        )
        if held and part.untyped_storage()._cdata == whole.untyped_storage()._cdata:
            raise AnswerError(f"{what}, rank {rank}: expected a copy, got the tensor's own memory\n{VIEW}")


def call_rows(answer, whole, rank, ranks):
    try:
        return answer(whole, rank, ranks)
    except IndexError as error:
        raise AnswerError(
            f"shape {list(whole.shape)}, rank {rank} of {ranks}: {error}\n"
            "likely slip: `chunk` makes fewer than N pieces where the rows do not suffice; such a rank has none"
        ) from error


def pair(got):
    if not (isinstance(got, tuple) and len(got) == 2 and isinstance(got[1], torch.Tensor)):
        raise AnswerError(f"expected a pair (first row, rows), got an object of type {type(got).__name__}")
    return got


# 10b.3


class CountedPiece:
    """A piece that notes when it is read."""

    def __init__(self, first, rows):
        self.first, self.count, self.rows, self.reads = first, len(rows), rows, 0

    def read(self):
        self.reads += 1
        return self.rows.clone()


@check("10b.3")
def check_fill_rows(answer, variant):
    """Every row from the piece that has it, for any numbers of ranks then and now; nothing else is read."""
    generator = torch.Generator().manual_seed(variant.seed)
    for rows in (variant.size, 2 * variant.size + 1, 2):
        whole = torch.randn(rows, 3, generator=generator)
        for then, now in ((2, 3), (3, 2), (1, variant.ranks), (variant.ranks, 1), (4, 5), (5, 4)):
            check_fill(answer, whole, then, now, shuffle=False)
            check_fill(answer, whole, then, now, shuffle=True)
    check_empty(answer, generator)
    whole = torch.randn(6, 3, generator=generator)
    check_any_values(answer, torch.where(whole > 1, torch.nan, whole).index_fill(0, torch.tensor(4), torch.nan))
    check_any_values(answer, torch.arange(18).view(6, 3))
    out, whole_numbers = torch.zeros(3, 3, dtype=torch.int64), LARGE + torch.arange(18).view(6, 3)
    answer(out, 2, cut_into(whole_numbers, 2))
    slip = "on the way through a floating-point dtype large whole numbers lose their last digits"
    same = torch.equal(out, whole_numbers[2:5])
    expect("whole numbers above 2**60, torch.int64: all rows are as they were saved", same, True, slip=slip)
    check_shapes(answer, generator)
    check_many(answer)
    for lost, first in ((2, 1), (1, 1), (3, 1), (0, 0), (5, 3)):
        check_lost(answer, whole, lost, first)


def check_empty(answer, generator):
    """A piece without rows, of a rank that had none, in the middle of `out`."""
    whole = torch.randn(6, 3, generator=generator)
    pieces = [CountedPiece(0, whole[:3]), CountedPiece(3, whole[3:3]), CountedPiece(3, whole[3:])]
    out = torch.full((4, 3), torch.nan)
    answer(out, 1, pieces)
    expect("`out`, where a piece without rows lies between two", out, whole[1:5])
    slip = "a piece with `count` 0 has no rows in common with anything: where it begins does not matter"
    expect("how often a piece without rows is read", pieces[1].reads, 0, slip=slip)
    try:
        answer(torch.empty(0, 3), 6, [])
    except Exception as error:
        text = f"an `out` without rows, and no pieces: expected no error, got {type(error).__name__}: {error}"
        raise AnswerError(
            f"{text}\nlikely slip: an `out` without rows lacks none, however few pieces there are"
        ) from error


def check_many(answer):
    """As many pieces as ranks have saved."""
    whole = torch.arange(1_500.0).view(-1, 1)
    out = torch.full_like(whole, torch.nan)
    try:
        answer(out, 0, cut_into(whole, len(whole)))
    except RecursionError as error:
        raise AnswerError(
            "1,500 pieces of one row: expected all of them, got RecursionError\n"
            "likely slip: a call for each piece is one too many for Python's stack: use a loop"
        ) from error
    expect("1,500 pieces of one row, `out`", out, whole)


def check_shapes(answer, generator):
    """One dimension, three, and rows of `out` that do not lie one behind the other."""
    for shape, what in (((6,), "one dimension"), ((6, 2, 3), "three dimensions")):
        whole = torch.randn(shape, generator=generator)
        out = torch.full_like(whole[2:5], torch.nan)
        try:
            answer(out, 2, cut_into(whole, 2))
        except Exception as error:
            text = f"a tensor of {what}: {type(error).__name__}: {str(error).splitlines()[0]}"
            raise AnswerError(f"{text}\nlikely slip: rows are dimension 0, however many others there are") from error
        expect(f"a tensor of {what}, `out`", out, whole[2:5], slip="rows are dimension 0")
    whole = torch.randn(6, 3, generator=generator)
    out = torch.full((3, 3), torch.nan).T
    try:
        answer(out, 2, cut_into(whole, 2))
    except RuntimeError as error:
        raise AnswerError(f"an `out` that is a transpose: RuntimeError: {error}\nlikely slip: {STRIDES}") from error
    expect("an `out` that is a transpose", out, whole[2:5], slip=STRIDES)


STRIDES = "`out` need not be contiguous: write into `out[low:high]`, not through a `view` or `reshape`, which may copy"


def check_lost(answer, whole, lost, first):
    """Row `lost` is in no piece; rows `first` to `first + 3` are wanted."""
    pieces = [CountedPiece(0, whole[:lost]), CountedPiece(lost + 1, whole[lost + 1 :])]
    out = torch.full((3, 3), torch.nan)
    place = {0: "the first", 2: "the last"}.get(lost - first, "a middle")
    what = f"{place} row of `out` that is in no piece"
    try:
        answer(out, first, pieces)
    except ValueError:
        return
    except Exception as error:
        raise AnswerError(f"{what}: expected a ValueError, got {type(error).__name__}") from error
    raise AnswerError(
        f"{what}: expected a ValueError, got nothing\n"
        "likely slip: rows that are never filled keep what the memory held: count the rows that were found"
    )


def check_any_values(answer, whole):
    """Two pieces whose values are not numbers, or whole ones: what has been found must not be told from values."""
    what = "values that are NaN" if whole.is_floating_point() else "a tensor of whole numbers, torch.int64"
    out = torch.zeros_like(whole[2:])
    slip = "likely slip: whether a row was found is not in its values: count the rows"
    try:
        answer(out, 2, cut_into(whole, 2))
    except Exception as error:
        text = f"{what}: expected the rows as they are saved, got {type(error).__name__}: {str(error).splitlines()[0]}"
        raise AnswerError(f"{text}\n{slip}") from error
    if not torch.equal(out.nan_to_num(7.5), whole[2:].nan_to_num(7.5)):
        raise AnswerError(f"{what}: expected the rows as they are saved, got others\n{slip}")


def cut_into(whole, ranks):
    rows = -(-len(whole) // ranks)
    return [CountedPiece(min(r * rows, len(whole)), whole[r * rows :][:rows]) for r in range(ranks)]


def check_fill(answer, whole, then, now, shuffle):
    rows = -(-len(whole) // now)
    for rank in range(now):
        first = min(rank * rows, len(whole))
        wanted = whole[first : first + rows]
        pieces = cut_into(whole, then)
        given = pieces[::-1] if shuffle else pieces[:]
        order = given[:]
        out = torch.full_like(wanted, torch.nan)
        what = f"{len(whole)} rows, saved by {then} ranks{', pieces in another order' * shuffle}, rank {rank} of {now}"
        try:
            answer(out, first, given)
        except AnswerError:
            raise
        except Exception as error:
            slip = "pieces and `out` begin at different rows: take what both have, from each one's own first row on"
            if isinstance(error, ValueError) and not len(wanted):
                slip = "a rank without rows lacks nothing"
            elif isinstance(error, ValueError):
                slip = "no row is missing: look at every piece there is, in whatever order they come"
            elif isinstance(error, IndexError):
                slip = "there need not be a piece for each rank: any number of ranks may have saved"
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise AnswerError(f"{what}: {text}\nlikely slip: {slip}") from error
        if len(out) and bool(torch.isnan(out).all()):
            raise AnswerError(
                f"{what}: expected the rows in `out`, got nothing there\n"
                "likely slip: `out` is to be written in place; an assignment only gives another tensor its name"
            )
        if len(out) and bool(torch.isnan(out).any()):
            raise AnswerError(
                f"{what}: expected every row of `out`, got {int(torch.isnan(out).any(1).sum())} without values\n"
                "likely slip: rows may come from several pieces: take of each what it has"
            )
        shifted = "the right row for each: row `low` is number `low - first` of `out`, `low - piece.first` of the piece"
        numbered = pieces[rank].rows[: len(out)] if rank < then else None
        pieces_of = "there need not be a piece for each rank: any number of ranks may have saved"
        expect(f"{what}, `out`", out, wanted, slips={pieces_of: numbered}, slip=shifted)
        slip = "the list belongs to the caller, who may need it again: `sorted` makes a new one, `sort` changes it"
        kept = [each is piece for each, piece in zip(given, order, strict=False)]
        expect(f"{what}, pieces in their places afterwards", kept, [True] * len(order), slip=slip)
        reads = [piece.reads for piece in pieces]
        needed = [int(max(first, p.first) < min(first + len(wanted), p.first + p.count)) for p in pieces]
        expect(
            f"{what}, how often each piece is read",
            reads,
            needed,
            slips={"all pieces are read, on every rank: N times the checkpoint from the disk": [1] * then},
            slip="a piece that has rows of `out` is read once, another not at all",
        )


# 10b.4


STATES_DTYPE = torch.bfloat16
OTHER_KEYS = ("step", "mu_product", "exp_avg", "exp_avg_sq", "history", "row", "count")


@refusing
def observe_both(answer, variant):
    """Of Adam, kept by rank 0; and of one with other states, a unit with one element a rank, kept by the last rank."""
    group = another_group()
    first_rank, last_rank = {0}, {group.size() - 1}
    gain = nn.ParameterDict({"gain": torch.arange(group.size()) + 1.0}).to(rank_device())
    small = NamedUnit(FlatParameter(find_parameters(gain), group.rank(), group.size()), [["gain"]])
    units = make_units(variant, rank_device(), STATES_DTYPE)
    adam = observe_whole_states(answer, group, units, torch.optim.Adam, first_rank)
    first, _, frozen = make_units(variant, rank_device())
    units = [first, small, frozen]
    try:
        return adam, observe_whole_states(answer, group, units, WithHistory, last_rank)
    except AnswerError as error:
        return adam, Refused(error)  # what Adam's states say comes first


class WithHistory(torch.optim.NAdam):
    """Keeps two tensors more that are the same on all ranks: of another shape, and of as many elements as the shard.

    And its second moments in more digits than the parameters have.
    """

    def step(self):
        super().step()
        for shard, state in self.state.items():
            state["exp_avg_sq"] = state["exp_avg_sq"].double() + 1e-12
            state["history"] = torch.arange(3.0, device=shard.device)
            state["row"] = torch.arange(float(shard.numel()), device=shard.device).view(1, -1)
            state["count"] = torch.tensor(LARGE, device=shard.device)


def observe_whole_states(answer, group, units, make_optimizer, kept_by):
    with Ledger() as ledger:
        optimizer = make_optimizer([unit.flat.shard for unit in reversed(units)], lr=0.1)
        for unit in units[:2]:  # the third is frozen, and has no state
            gradient = torch.arange(unit.flat.shard.numel(), device=rank_device()) + 1.0 + group.rank()
            unit.flat.shard.grad = gradient.to(unit.flat.shard.dtype)
        optimizer.step()
        optimizer.zero_grad()
        having = len(optimizer.state)
        keep = Keep() if group.rank() in kept_by else None
        ledger.reset_peaks()
        buffers = ledger.live()["communication"]
        order = []
        with comm.record() as calls, Waited(order, group):
            result = answer(units, optimizer, group, keep)
        peak, left = ledger.peak_of("communication") - buffers, ledger.live()["communication"] - buffers
    comm.all_reduce(torch.zeros(1, device=rank_device()), group).wait()
    if len(optimizer.state) != having:
        raise AnswerError(
            f"shards that have a state in the optimizer: expected {having} as before, got {len(optimizer.state)}\n"
            "likely slip: `optimizer.state` is a defaultdict: `[flat.shard]` makes an entry where there is none"
        )
    result = dict(result or {})
    tensors = [v for state in result.values() for v in state.values() if isinstance(v, torch.Tensor)]
    own = len({v.untyped_storage()._cdata for v in tensors}) == len(tensors)
    theirs = {v.untyped_storage()._cdata for state in optimizer.state.values() for v in state.values()}
    own = own and not theirs & {v.untyped_storage()._cdata for v in tensors}
    found = {name: {k: plain(v) for k, v in state.items()} for name, state in result.items()}
    shards = [{k: plain(v) for k, v in optimizer.state[unit.flat.shard].items()} for unit in units[:2]]
    return (
        found,
        [c.op for c in calls],
        order,
        peak,
        left,
        own,
        shards,
        None if keep is None else (keep.without, keep.shown[()]),
    )


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone() if has_memory(value) else None
    return value


@check("10b.4")
def check_whole_states(answer, variant):
    """States in the parameters' shapes and under their names, the step in a copy for each, one buffer at a time."""
    slip = "every rank takes part in the same gathers, also one that keeps nothing"
    seen = seen_on(variant.ranks, observe_both, answer, variant, slip=slip)
    check_states([adam for adam, _ in seen], fake_units(variant, 0)[:2], STATES_DTYPE.itemsize)
    try:
        for rank, (_, others) in enumerate(seen):
            if isinstance(others, Refused):
                raise AnswerError(f"rank {rank}, {others}")
        check_others([others for _, others in seen], fake_units(variant, 0)[0])
    except AnswerError as error:
        raise AnswerError(f"an optimizer whose states are {', '.join(OTHER_KEYS)}: {error}") from error


def check_states(seen, units, itemsize):
    """Adam's, of two units; what was seen on each rank."""
    largest = max(unit.flat.full.numel() for unit in units) * itemsize
    together = sum(unit.flat.full.numel() for unit in units) * itemsize
    wanted: dict[str, Any] = {}
    for at, unit in enumerate(units):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            parts = [each[6][at][key] for each in seen]
            wholes = [parts[0]] * 3 if key == "step" else unit.flat.unflatten(torch.cat(parts))
            for names, whole in zip(unit.names, wholes, strict=True):
                wanted.setdefault(names[0], {})[key] = whole
    for rank, (result, ops, order, peak, left, own, _, kept) in enumerate(seen):
        expect(
            "collectives",
            ops,
            ["all_gather"] * 4,
            rank=rank,
            slips={
                "Adam's `step` is on every rank already": ["all_gather"] * 6,
                "states stay after `zero_grad`: ask for the unit's states, not for its gradient": [],
                "states are found by the shard: the optimizer may have its parameters in another order": (
                    ["all_gather"] * 2
                ),
            },
            slip="one per unit and key of the shard's shape; none for a unit without state",
        )
        wanted_order = ["issue all_gather", "wait all_gather"] * 4
        expect("issues and waits", order, wanted_order, rank=rank, slip="wait before you read, then the next state")
        if left:
            raise AnswerError(
                f"rank {rank}, bytes of gathered states afterwards: expected 0, got {left:,}\n"
                "likely slip: each buffer is given back as soon as its states are kept"
            )
        if peak > largest:
            too = ", on ranks that keep nothing too" if rank else ""
            both = "all states of all units" if peak >= 2 * together else "more than one state"
            raise AnswerError(
                f"rank {rank}, bytes of gathered states at the peak: expected {largest:,}, got {peak:,}\n"
                f"likely slip: {both} whole at once: one unit's, one key's, then give it back{too}"
            )
        expect(
            "bytes of gathered states at the peak, by the role `communication`",
            peak,
            largest,
            rank=rank,
            slip="allocate the buffer with `device.empty(..., 'communication', ...)`, so that its bytes are counted",
        )
        if rank:
            expect("the result", result, {}, rank=rank, slip="a rank whose `keep` is None gets an empty dict")
            continue
        without, numbers = kept
        if numbers:
            raise AnswerError(
                f"rank 0, calls of keep() with a number: expected none, got {numbers}\n"
                "likely slip: `keep` is for whole states; of a number each parameter gets a `clone()`"
            )
        if without or any(value is None for state in result.values() for value in state.values()):
            raise AnswerError(
                "rank 0, whole states: expected values, got some without memory\n"
                "likely slip: the buffer was given back before its states were kept"
            )
        slip = "a unit without state, as a frozen one, has no entries"
        more = result.keys() - wanted.keys()
        if more and more <= set(TIED):
            slip = "a tied parameter has one state, under its first name"
        expect_names(rank, result, wanted, slip)
        for name, state in wanted.items():
            expect(f"keys of {name}", sorted(result[name]), sorted(state), rank=rank, slip="every key, the step too")
            for key, value in state.items():
                expect(
                    f"{key} of {name}",
                    result[name][key],
                    value,
                    rank=rank,
                    slip="a `clone()` of the tensor that the optimizer has"
                    if key == "step"
                    else "`flat.unflatten(buffer)`: the parameters' shapes, without the padding",
                )
        if not own:
            raise AnswerError(
                "rank 0, values with memory of their own: expected all, got some that share theirs\n"
                "likely slip: Adam adds 1 to each parameter's `step`: with a shared tensor, each adds for all"
            )


def check_others(seen, unit):
    """What differs from Adam: more states, a unit whose shard has one element, and that the last rank keeps."""
    keeper = len(seen) - 1
    for rank, (_, ops, *_) in enumerate(seen):
        expect(
            "collectives",
            ops,
            ["all_gather"] * 4,
            rank=rank,
            slip="a shard may have one element: what is gathered has the shard's *shape*: [1] and not [], "
            "[n] and not [1, n]",
        )
    for rank, (result, *_) in enumerate(seen[:keeper]):
        expect("the result", result, {}, rank=rank, slip="a rank whose `keep` is None gets an empty dict")
    result, shards = seen[keeper][0], [each[6] for each in seen]
    if not result:
        raise AnswerError(f"rank {keeper}, the result: expected states, got none\nlikely slip: {KEEPERS}")
    wholes = {"gain": lambda parts: torch.cat(parts)}
    wholes |= {
        names[0]: lambda parts, at=at: unit.flat.unflatten(torch.cat(parts))[at] for at, names in enumerate(unit.names)
    }
    expect_names(keeper, result, wholes, None)
    for name, whole in wholes.items():
        slip = "the optimizer says which keys there are: other optimizers have others"
        expect(f"keys of {name}", sorted(result[name]), sorted(OTHER_KEYS), rank=keeper, slip=slip)
        for key in OTHER_KEYS:
            parts = [each[name == "gain"][key] for each in shards]
            gathered = key.startswith("exp_avg")
            slip = None if gathered else "what has another shape than the shard is a `clone()` on each rank"
            wanted = whole(parts) if gathered else parts[0]
            if gathered:
                dtype = "a state need not have the parameters' dtype: the buffer is of `value.dtype`"
                expect(
                    f"dtype of {key} of {name}",
                    str(result[name][key].dtype),
                    str(wanted.dtype),
                    rank=keeper,
                    slip=dtype,
                )
            expect(f"{key} of {name}", result[name][key], wanted, rank=keeper, slip=slip)


# 10b.5


class PaperDisk:
    """Files and folders in memory, and a log of what was done to them, by whom.

    Args:
        rank: says who calls.
        fails: (rank, number): the disk is full when that rank calls for the time after `number`. What failed is not
            done, and noted in `failed`, not in the log.
    """

    def __init__(self, rank, fails=None):
        self.files, self.folders, self.log = {}, {Path("run")}, []
        self.rank, self.fails, self.failed = rank, fails, None
        self.calls = Counter()
        self.renamed = {}
        self.emptied = []  # ranks whose `files` are others afterwards

    def _note(self, verb, *what):
        if self.fails == (self.rank(), self.calls[self.rank()]) and self.failed is None:
            self.failed = f"{verb} {what[0]}", len(self.log)
            raise OSError(28, "No space left on device")
        self.calls[self.rank()] += 1
        self.log.append((self.rank(), verb, *what))

    def _no_folder(self, path):
        now = self.renamed.get(path)
        return f"there is no folder {path}" + (f" any more, it was renamed to {now}" if now else "")

    def make_folder(self, path):
        path = Path(path)
        self._note("make_folder", path)
        if path in self.folders:
            raise FileExistsError(f"make_folder {path}: it is there already")
        if path.parent not in self.folders:
            raise FileNotFoundError(f"make_folder {path}: there is no folder {path.parent}")
        self.folders.add(path)

    def write(self, path, content):
        path = Path(path)
        self._note("write", path)
        if path.parent not in self.folders:
            raise FileNotFoundError(f"write {path}: {self._no_folder(path.parent)}")
        self.files[path] = content

    def sync(self, path):
        path = Path(path)
        self._note("sync", path)
        if path not in self.files and path not in self.folders:
            raise FileNotFoundError(f"sync {path}: there is no such file or folder")

    def rename(self, old, new):
        old, new = Path(old), Path(new)
        self._note("rename", old, new)
        if old not in self.folders and old not in self.files:
            raise FileNotFoundError(f"rename {old}: there is no such folder")
        if new in self.folders:
            raise FileExistsError(f"rename {old} to {new}: that is there already")
        self.renamed[old] = new
        self.folders = {new if f == old else f for f in self.folders}
        self.files = {(new / f.name if f.parent == old else new if f == old else f): c for f, c in self.files.items()}


class Turns:
    """Ranks as threads of which one runs at a time: rank `first` before the others, each up to its next barrier.

    Args:
        go_on: when a rank raises, the others run on to where they wait for it; default: all end.
    """

    def __init__(self, ranks, first, go_on=False):
        self.go_on = go_on
        self.order = sorted(range(ranks), key=lambda rank: (rank != first, rank))
        self.go = [threading.Semaphore(0) for _ in range(ranks)]
        self.back = threading.Semaphore(0)
        self.state = ["ready"] * ranks
        self.errors: dict[int, BaseException] = {}
        self.current = 0
        self.over = False

    def run(self, program):
        threads = [threading.Thread(target=self._rank, args=(r, program), daemon=True) for r in range(len(self.go))]
        for thread in threads:
            thread.start()
        while "ready" in self.state and (self.go_on or not self.errors):
            for rank in self.order:
                if self.state[rank] == "ready" and (self.go_on or not self.errors):
                    self._let(rank)
            if all(state != "ready" for state in self.state) and "done" not in self.state:
                self.state = ["ready"] * len(self.state)
        stuck = [rank for rank, state in enumerate(self.state) if state == "waits"]
        self.over = True
        for rank in stuck or range(len(self.go)):
            if self.state[rank] != "done":
                self._let(rank)
        return [] if self.errors else stuck

    def _let(self, rank):
        self.current = rank
        self.go[rank].release()
        self.back.acquire()

    def _rank(self, rank, program):
        self.go[rank].acquire()
        try:
            if not self.over:
                program(rank, lambda: self._barrier(rank))
        except Over:
            pass
        except BaseException as error:
            self.errors[rank] = error
        self.state[rank] = "done"
        self.back.release()

    def _barrier(self, rank):
        if self.over:
            raise Over
        self.state[rank] = "waits"
        self.back.release()
        self.go[rank].acquire()
        if self.over:
            raise Over


class Over(BaseException):
    """Ends a rank that waits for ever."""


WHOLE, PART = Path("run") / "step-7.5", Path("run") / ".step-7.5.part"


@check("10b.5")
def check_commit(answer, variant):
    """Under its name only when all is on the disk, whichever rank comes first, and never if a disk has failed."""
    for first in range(variant.ranks):
        check_commit_case(answer, variant, first, "ab")
    for first in range(variant.ranks):
        check_commit_case(answer, variant, first, "ab", "", "a")
    check_commit_case(answer, replace(variant, ranks=1), 0, "ab")
    for rank in reversed(range(variant.ranks)):
        for first in {rank, 0, variant.ranks - 1}:
            number = 0
            while check_full(answer, variant, first, rank, number):
                number += 1
    check_left_over(answer, variant)


def run_commit(answer, variant, disk, turns, *names):
    """Files of each rank, and who waits for ever; `names` are those of rank 0's files, of rank 1's, and round again."""
    files = [
        {f"rank-{rank}-{name}": content(variant.seed, rank, name) for name in names[rank % len(names)]}
        for rank in range(variant.ranks)
    ]

    def program(rank, barrier):
        given = dict(files[rank])
        answer(disk, Path("run"), "step-7.5", given, rank, barrier)
        disk.log.append((rank, "returns"))
        if given != files[rank]:
            disk.emptied.append(rank)

    return {name: content for each in files for name, content in each.items()}, turns.run(program)


def content(seed, rank, name):
    """Bytes that are no text; rank 0's second file is empty."""
    return b"" if (rank, name) == (0, "b") else f" {seed} {rank} {name}".encode() + bytes([0, 255, 10])


def check_full(answer, variant, first, rank, number):
    """The disk is full at one call of one rank. Returns whether there was such a call."""
    turns = Turns(variant.ranks, first, go_on=True)
    disk = PaperDisk(lambda: turns.current, fails=(rank, number))
    run_commit(answer, variant, disk, turns, "ab")
    if disk.failed is None:
        return False
    call, at = disk.failed
    what = f"rank {first} first, rank {rank}'s {call} raises OSError (no space left)"
    if rank not in turns.errors:
        raise AnswerError(
            f"{what}: expected rank {rank} to raise it, got it swallowed\n"
            "likely slip: do not swallow the error: the caller would delete the previous checkpoint, and has no other"
        )
    if not isinstance(turns.errors[rank], OSError):
        raise AnswerError(
            f"{what}: expected rank {rank} to raise it, got {type(turns.errors[rank]).__name__}\n"
            "likely slip: the error goes up as it is: the caller looks for an OSError, and for its number"
        )
    if any(each[1] == "rename" and WHOLE in each[2:] for each in disk.log[at:]):
        raise AnswerError(
            f"{what}: expected no checkpoint, got one named {WHOLE.name} that lacks it\n"
            "likely slip: call no barrier after an error: a barrier says that this rank has written its files"
        )
    return True


def check_left_over(answer, variant):
    """A killed run has left its part."""
    turns = Turns(variant.ranks, 0, go_on=True)
    disk = PaperDisk(lambda: turns.current)
    disk.folders.add(PART)
    disk.files[PART / "rank-9-a"] = b"of another run"
    files, _ = run_commit(answer, variant, disk, turns, "ab")
    found = {path.name for path in disk.files if path.parent == WHOLE}
    if WHOLE in disk.folders and found != files.keys():
        raise AnswerError(
            f"a killed run has left {PART}: expected FileExistsError on rank 0, got its files in {WHOLE}\n"
            "likely slip: the folder is that of another run: `make_folder` raises so that you stop"
        )
    if WHOLE not in disk.folders and 0 not in turns.errors:
        raise AnswerError(
            f"a killed run has left {PART}: expected an error on rank 0, got neither error nor checkpoint"
        )


def check_commit_case(answer, variant, first, *names):
    turns = Turns(variant.ranks, first)
    disk = PaperDisk(lambda: turns.current)
    files, stuck = run_commit(answer, variant, disk, turns, *names)
    what = f"rank {first} first" if variant.ranks > 1 else "one rank alone"
    unequal = len(names) > 1
    if unequal:
        what += ", ranks have different numbers of files, rank 1 none"
    for rank, error in turns.errors.items():
        if not isinstance(error, OSError):
            raise AnswerError(f"{what}, rank {rank}: {type(error).__name__}: {error}") from error
        raise AnswerError(f"{what}, rank {rank}: {error}\nlikely slip: {why_disk(disk, error)}")
    if stuck:
        raise AnswerError(
            f"{what}: rank {stuck[0]} waits at a barrier for ever, others have returned\n"
            + (
                "likely slip: as many barriers on every rank, however many files it has"
                if unequal
                else "likely slip: a barrier is for all ranks: not inside `if rank == 0`"
            )
        )
    check_log(what, disk, files)
    slip = "the files belong to the caller, who may need them again: iterate over them, and remove nothing"
    expect(f"{what}, ranks whose `files` have changed", disk.emptied, [], slip=slip)


def why_disk(disk, error):
    text = str(error)
    renamed = any(each[1] == "rename" for each in disk.log)
    if text.startswith("write") and renamed:
        return "rank 0 has to know that the others have written: a barrier before the rename"
    if text.startswith("make_folder"):
        return "one rank makes the folder: rank 0"
    if text.startswith(f"sync {PART}/"):
        return "sync your files before the barrier: after it rank 0 renames the part"
    if text.startswith("rename") or "sync" in text:
        return "one rank gives the name: rank 0"
    return "a rank may be here before rank 0 has made the folder: a barrier in between"


def check_log(what, disk, files):
    log = disk.log

    def fail(text, slip):
        raise AnswerError(f"{what}, {text}\nlikely slip: {slip}")

    early = [each[2] for each in log if each[1] == "write" and WHOLE in (each[2], each[2].parent)]
    if early:
        fail(
            f"written under the final name: expected nothing, got {early[0]}",
            "killed now, half a checkpoint has the name of a whole one: write into the part, and rename that",
        )
    places = sorted({str(each[2].parent) for each in log if each[1] == "write"} - {str(PART)})
    if places:
        fail(f"where the files are written: expected {PART}, got {places[0]}", "the part lies beside what it becomes")
    renames = [each for each in log if each[1] == "rename"]
    if [each[2:] for each in renames] != [(PART, WHOLE)]:
        got = ", ".join(f"{a} to {b}" for _, _, a, b in renames) or "none"
        fail(f"renames: expected {PART} to {WHOLE}, got {got}", "the one rename of the folder is the commit")
    at = log.index(renames[0])
    done = {entry[1:]: place for place, entry in enumerate(log) if entry[1] != "returns"}
    written = {name: done.get(("write", PART / name)) for name in files}
    late = sorted(name for name, place in written.items() if place is None or place > at)
    if late:
        fail(
            f"at the rename: expected all ranks' files, got all but {', '.join(late)}",
            "rank 0 has to know that the others have written: a barrier before the rename",
        )
    for name, content in files.items():
        if disk.files.get(WHOLE / name) != content:
            fail(f"{name}: expected its bytes, got others", "each file has what `files` says")
        synced = done.get(("sync", PART / name))
        if synced is None or synced > at:
            fail(
                f"{name} at the rename: expected its bytes on the disk, got them in a cache",
                "after a power cut the name may be there and the file empty: sync each file that was written",
            )
        if synced < written[name]:
            fail(f"{name}: expected write, then sync, got the opposite", "sync saves what has been written before it")
    folder = done.get(("sync", PART), -1)
    if folder > at or folder == -1:
        fail(
            "the part at the rename: expected the names of the files on the disk, got them in a cache",
            "a folder is a file too, with names in it: sync the part before it is renamed",
        )
    if folder < max(written.values()):
        fail("the sync of the part: expected after all files", "it saves no names that are added afterwards")
    end = min((place for place, e in enumerate(log) if e[1:] == ("sync", Path("run")) and place > at), default=None)
    if end is None:
        fail(
            "the new name at the end: expected on the disk, got it in a cache",
            "the rename changes the folder around it: sync `folder`, after the rename",
        )
    returns = [each[0] for each in log[:end] if each[1] == "returns"]
    if returns:
        fail(
            f"a return before the checkpoint has its name: expected none, got rank {returns[0]}'s",
            "after its return, a rank may delete the previous checkpoint: hence the last barrier",
        )


# 10b.6


class Adapter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)


class Adapted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.base, self.adapter = nn.Linear(width, width), Adapter(width)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.ModuleDict({"proj": Adapted(width), "act": nn.Tanh()})


class LastLayer(Layer):
    """A block by inheritance."""


class Toy(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed, self.layers = nn.Embedding(5, width), nn.ModuleList(Layer(width) for _ in range(layers - 1))
        self.layers.append(LastLayer(width))
        self.tail = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 5))


class Body(Toy):
    """Holds blocks, and a parameter directly."""

    def __init__(self, width, layers):
        super().__init__(width, layers)
        self.gain = nn.Parameter(torch.ones(width))


class Headed(nn.Module):
    """A body with blocks, and a head beside it, as language models have."""

    def __init__(self, width, layers):
        super().__init__()
        self.body, self.head = Body(width, layers), nn.Linear(width, 5)


def frozen_but(model, *trained):
    for name, p in model.named_parameters():
        p.requires_grad_(any(part in name for part in trained))
    return model


@check("10b.6")
def check_units_for(answer, variant):
    """No unit mixes, and none is smaller than it has to be."""
    width, layers = variant.size, 3
    every = [f"layers.{number}" for number in range(layers)]
    adapters = [f"{name}.inner.proj.adapter" for name in every]
    norms = [f"{name}.norm" for name in every]
    cases = {
        "everything is trained": (("",), every),
        "everything is frozen": (("nothing",), every),
        "norms are trained": ((".norm",), every + norms),
        "adapters are trained": (("adapter",), every + adapters),
        "adapters and norms are trained": (("adapter", ".norm"), every + adapters + norms),
        "the last block is trained": ((f"layers.{layers - 1}",), every),
        "the tail is trained": (("tail",), [*every, "tail"]),
        "blocks are trained, embedding and tail are not": (("layers",), every),
        "a block's adapter and the tail are trained": (
            ("layers.1.inner.proj.adapter", "tail"),
            [*every, adapters[1], "tail"],
        ),
    }
    inside = [f"body.{name}" for name in every]
    headed = {
        "blocks and head are frozen, the rest of the body is trained": (
            ("body.embed", "body.gain", "body.tail"),
            [*inside, "body"],
        ),
        "the head is trained, the body is frozen": (("head",), [*inside, "head"]),
    }
    for what, case in cases.items():
        check_units(answer, what, Toy(width, layers), every, *case)
    for what, case in headed.items():
        check_units(answer, what, Headed(width, layers), inside, *case)
    own = "all but the parameter that the model holds directly is trained"
    check_units(answer, own, Body(width, layers), every, ("embed", "tail", "layers"), [*every, "embed", "tail"])


def check_units(answer, what, model, every, trained, wanted):
    model = frozen_but(model, *trained)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    got = answer(model, Layer)
    names = {module: name for name, module in model.named_modules()}
    if not isinstance(got, set | frozenset) or any(module not in names for module in got):
        raise AnswerError(f"{what}: expected a set of the model's modules, got {type(got).__name__}")
    got = {names[module] for module in got}
    changed = {name: p.requires_grad for name, p in model.named_parameters()} != before
    if changed:
        raise AnswerError(f"{what}: expected the parameters as they were, got `requires_grad` changed")
    if got != set(wanted):
        raise AnswerError(why_units(what, model, got, set(wanted), every))


def why_units(what, model, got, wanted, blocks):
    more, less = sorted(got - wanted), sorted(wanted - got)
    faults = [f"missing: {', '.join(less)}"] if less else []
    faults += [f"too many: {', '.join(name or 'the model itself' for name in more)}"] if more else []
    lines = [f"{what}: units {'; '.join(faults)}"]
    modules = dict(model.named_modules())
    children = {f"{block}.{child}" for block in blocks for child, _ in modules[block].named_children()}

    if less and what.startswith("all but the parameter") and not set(less) & set(blocks):
        slip = "the model's unit has the parameters that it holds directly as well: with one frozen it mixes"
    elif less and all(type(modules[name]) is LastLayer for name in less):
        slip = "a subclass of `block` is a block too: `isinstance`"
    elif set(less) & set(blocks):
        slip = "each block is a unit, whatever is frozen in it"
    elif "" in more:
        slip = "the outermost module is wrapped anyway: name submodules"
    elif any(not next(iter(modules[name].parameters()), None) is not None for name in more):
        slip = "a module without parameters makes no unit"
    elif "layers" in more:
        slip = "once its blocks are units, a list of blocks has no parameters left"
    elif any(block.startswith(f"{name}.") for name in less for block in blocks):
        slip = "on the way down, too, only the parameters outside its blocks count"
    elif children & set(less) and not children & got:
        slip = "no block is found to mix: if `skip` has the block itself, no parameter of it is left to look at"
    elif more and all(any(name.startswith(f"{other}.") for other in wanted - set(blocks)) for name in more):
        slip = "go no deeper than necessary: a module that is trained entirely is one unit, not several"
    elif any(not p.requires_grad for name in more for p in modules[name].parameters()) and less:
        slip = "separate the trained ones: frozen modules stay together in what is left of the block"
    elif any(not p.requires_grad for name in more for p in modules[name].parameters()):
        slip = "one unit of frozen parameters too many: the block's own unit has them already"
    elif any(name.startswith(block + ".") for name in more for block in blocks) or more:
        slip = "a unit that does not mix needs no separation: every additional unit is an additional message"
    elif any(name == "tail" for name in less):
        slip = "the root is a unit too: what no block holds can mix as well"
    elif less:
        slip = "look deeper: trained modules may lie further down than a block's children"
    else:
        slip = ""
    return "\n".join([*lines, *([f"likely slip: {slip}"] if slip else [])])
