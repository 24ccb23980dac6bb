"""Exercise 4.1: Pad and chunk."""

import torch
from torch import Tensor

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect
from minifsdp.course.workshop.placing import garbage
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter
from minifsdp.instruments.watch.ledger import Ledger
from minifsdp.layout import Layout

from .shared import GARBAGE, WHOLE_N, numbers, total


@reference(
    "4.1",
    hints=(
        "`-numel % ranks` elements are missing to the next multiple of `ranks`: none if `ranks` divides `numel`.",
        "`flat.new_zeros(numel + padding)`, copy `flat` into its beginning, and `chunk(ranks)` the whole.",
    ),
    forbids=(FlatParameter.__init__, Layout.__init__),
)
def pad_and_chunk(flat: Tensor, ranks: int) -> list[Tensor]:
    """Split a flat tensor into one equal shard per rank, in order, with zeros at the end.

    Args:
        flat: [numel], of any dtype; not changed.
        ranks: N.

    Returns:
        N views of one new buffer [numel + padding], each [ceil(numel / N)] and of `flat`'s dtype.
    """
    padded = flat.new_zeros(flat.numel() + -flat.numel() % ranks)
    padded[: flat.numel()] = flat
    return list(padded.chunk(ranks))


@check("4.1")
def check_pad_and_chunk(answer, variant):
    """Equal shards, every element once and in order, zeros behind them, no copy but one padded buffer."""
    cases = [
        (numbers(numel, dtype), ranks)
        for ranks in (variant.ranks, 4, 16, 1)
        for numel in (variant.size, 2 * ranks, ranks + 1)
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
    ]
    for flat, ranks in cases:
        chunk_values(answer, flat, ranks)
    for flat, ranks in cases:
        chunk_memory(answer, flat, ranks)


def chunk_values(answer, flat, ranks):
    numel, length = flat.numel(), -(-flat.numel() // ranks)
    where = f"over {ranks} ranks ({numel} elements)"
    with garbage():
        shards = answer(flat.clone(), ranks)
    if not isinstance(shards, (list, tuple)) or len(shards) != ranks:
        got = f"{len(shards)}" if isinstance(shards, (list, tuple)) else describe(shards)
        raise AnswerError(f"{where}: expected a list of {ranks} tensors, got {got}")
    padding = -numel % ranks
    padded = torch.cat([flat, flat.new_zeros(padding)])
    usual = {
        "every shard is padded by itself: the padding belongs behind the last element of all": [
            torch.cat([part, part.new_zeros(length - part.numel())]) for part in flat.tensor_split(ranks)
        ],
        "the padding stands in front, so that every parameter's offset has moved": (
            torch.cat([flat.new_zeros(padding), flat]).chunk(ranks)
        ),
        "every N-th element: a shard is contiguous, and shards are in order": padded.view(-1, ranks).unbind(1),
    }
    if not padding:
        usual[WHOLE_N] = torch.cat([flat, flat.new_zeros(ranks)]).chunk(ranks)
    for rank, shard in enumerate(shards):
        slip = None
        if isinstance(shard, torch.Tensor):
            if shard.dtype != flat.dtype:
                slip = "another dtype: `torch.zeros` is float32 unless told, and `cat` promotes"
            elif shard.numel() < length:
                slip = "the shard is short, and collectives want them even: `chunk` does not pad, pad before it"
            elif bool(shard.isnan().any()):
                slip = GARBAGE
        slips = {text: wrong[rank] for text, wrong in usual.items() if len(wrong) == ranks}
        expect(f"shard {where}", shard, padded[rank * length :][:length], rank=rank, slips=slips, slip=slip)


def chunk_memory(answer, flat, ranks):
    length = -(-flat.numel() // ranks)
    where = f"over {ranks} ranks ({flat.numel()} elements)"
    given = flat.clone()
    with Ledger() as ledger:
        shards = answer(given, ranks)
        made = total(ledger)
    viewed = "where N divides, the shards are views of `flat`: who changes a shard changes the parameters"
    if ranks == 1:
        viewed = "a single rank's shard is a part of a new buffer, too, and not `flat`"
    expect(
        f"bytes made {where}",
        made,
        ranks * length * flat.element_size(),
        slips={viewed: 0},
        slip="more than one padded buffer is left",
    )
    for rank, shard in enumerate(shards):
        together = shard.untyped_storage().data_ptr() == shards[0].untyped_storage().data_ptr()
        offset = shard.storage_offset() if together else "an offset in a buffer of its own"
        slip = "every shard is a copy: `chunk` gives views of one buffer"
        expect(f"offset of the shard in the buffer {where}", offset, rank * length, rank=rank, slip=slip)
    expect(f"`flat` afterwards {where}", given, flat, slip="the input was changed")
