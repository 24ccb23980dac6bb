"""Reference answers of lab 10b, checkpoints, frozen parameters and recomputation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from minifsdp import comm, device
from minifsdp.comm import Group
from minifsdp.contents import Contents
from minifsdp.course.workshop.references import reference
from minifsdp.flat_param import FlatParameter, find_parameters
from minifsdp.optim_state import gather_states
from minifsdp.sharded_values import shard_value


class NamedUnit(NamedTuple):
    """A unit's flat parameter with names, as in the notebook's set-up cell."""

    flat: FlatParameter
    names: list[list[str]]


class Piece(Protocol):
    """Rows of a saved tensor; the notebook defines the class."""

    first: int
    count: int

    def read(self) -> Tensor: ...


class Disk(Protocol):
    """The storage for a checkpoint; the notebook defines the class."""

    def make_folder(self, path: Path) -> None: ...
    def write(self, path: Path, content: bytes) -> None: ...
    def sync(self, path: Path) -> None: ...
    def rename(self, old: Path, new: Path) -> None: ...


@reference(
    "10b.1",
    hints=(
        "One unit after the other: gather it, look at it, free it, and only then the next one. Gathering and freeing "
        "is what all ranks do together; looking is for those that have a `keep`.",
        "Per unit: `device.allocate(flat.full)`; `comm.all_gather(flat.full.data, flat.shard.data, group).wait()`; if "
        "`keep` is not None, for each of `zip(unit.names, flat.views)` one `keep(view.detach())`, entered under all of "
        "the parameter's names; `device.free(flat.full)`.",
    ),
)
def whole_values(units: Sequence[NamedUnit], group: Group, keep: Callable[[Tensor], Any] | None) -> dict[str, Any]:
    """By name, what `keep` makes of each parameter's whole value."""
    kept: dict[str, Any] = {}
    for flat, names in units:
        device.allocate(flat.full)
        comm.all_gather(flat.full.data, flat.shard.data, group).wait()
        if keep is not None:
            for names_of_one, view in zip(names, flat.views, strict=True):
                kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
        device.free(flat.full)
    return kept


@reference(
    "10b.2",
    hints=(
        "ceil(rows / ranks) rows each, counted from the start; a slice that begins beyond the end is empty, and that "
        "is right. A slice is a view: it keeps the memory of the whole.",
        "`size = -(-len(whole) // ranks)`, `first = min(rank * size, len(whole))`, "
        "`whole[first : first + size].clone()`. A tensor of no dimension has no rows, and no `len`.",
    ),
    forbids=(shard_value,),
)
def my_rows(whole: Tensor, rank: int, ranks: int) -> tuple[int, Tensor]:
    """The number of a rank's first row, and a copy of its rows."""
    if whole.dim() == 0:
        return 0, whole.clone()
    size = -(-len(whole) // ranks)
    first = min(rank * size, len(whole))
    return first, whole[first : first + size].clone()


@reference(
    "10b.3",
    hints=(
        "Count in rows of the whole tensor. Which rows do `out` and a piece have in common? From the larger of the two "
        "beginnings to the smaller of the two ends.",
        "`low, high = max(first, piece.first), min(first + len(out), piece.first + piece.count)`; only if `low < high` "
        "is there anything to read. Then row `low` is number `low - first` of `out` and `low - piece.first` of the "
        "piece. Add up `high - low`: it has to be `len(out)` in the end.",
    ),
)
def fill_rows(out: Tensor, first: int, pieces: Sequence[Piece]) -> None:
    """Fill `out`, rows `first` to `first + len(out)` of a tensor, from saved pieces of it."""
    found = 0
    for piece in pieces:
        low, high = max(first, piece.first), min(first + len(out), piece.first + piece.count)
        if low < high:
            out[low - first : high - first].copy_(piece.read()[low - piece.first : high - piece.first])
            found += high - low
    if found != len(out):
        raise ValueError(f"{found} of the {len(out)} rows from {first} on are in the pieces")


@reference(
    "10b.4",
    hints=(
        "What the optimizer has for a flat parameter has its layout: what makes parameters of a gathered buffer makes "
        "states of a gathered state. What has no elements to share out, as Adam's `step`, is the same on all ranks.",
        "For each unit, for each key of `optimizer.state.get(flat.shard, {})`: a value of the shard's shape goes the "
        "way of 10b.1, into a buffer of `device.empty(flat.full.numel(), value.dtype, 'communication', value.device)`, "
        "of which `flat.unflatten(buffer)` makes the states; anything else is cloned for each parameter.",
    ),
    forbids=(Contents.gather, gather_states),
)
def whole_states(
    units: Sequence[NamedUnit], optimizer: Optimizer, group: Group, keep: Callable[[Tensor], Any] | None
) -> dict[str, dict[str, Any]]:
    """By name, the optimizer's state of each parameter, with what `keep` makes of whole values."""
    kept: dict[str, dict[str, Any]] = {}
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            buffer = None
            wholes = [value] * len(names)
            if value.shape == flat.shard.shape:
                buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
                comm.all_gather(buffer, value, group).wait()
                wholes = flat.unflatten(buffer)
            if keep is not None:
                for names_of_one, whole in zip(names, wholes, strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole) if buffer is not None else whole.clone()
            if buffer is not None:
                device.free(buffer)
    return kept


@reference(
    "10b.5",
    hints=(
        "What has the name must be whole, so it gets the name last: after all ranks have written, and after what they "
        "have written is on the disk. A file's bytes, the names in a folder, and a folder's new name are three things "
        "to sync.",
        "Rank 0 makes the part; barrier; each rank writes and syncs its files; barrier; rank 0 syncs the part, renames "
        "it, syncs `folder`; barrier. No `try`: what the disk raises goes up, past the barriers.",
    ),
)
def commit(
    disk: Disk, folder: Path, name: str, files: Mapping[str, bytes], rank: int, barrier: Callable[[], None]
) -> None:
    """Write a checkpoint that is whole or not there; on all ranks together."""
    part, whole = folder / f".{name}.part", folder / name
    if rank == 0:
        disk.make_folder(part)
    barrier()
    for file, content in files.items():
        disk.write(part / file, content)
        disk.sync(part / file)
    barrier()
    if rank == 0:
        disk.sync(part)
        disk.rename(part, whole)
        disk.sync(folder)
    barrier()


@reference(
    "10b.6",
    hints=(
        "First find the units that would be mixed: the parameters of `find_parameters(top, skip=the blocks inside it)` "
        "for the model and for each block, which has none inside. Then walk down into those, and stop at the first "
        "module that is trained through and through.",
        "A recursive `separate(module)`: for each child that is no block, `{p.requires_grad for p in "
        "find_parameters(child, skip=the blocks inside it)}`; if that is `{True}`, the child is a unit, else go on "
        "inside it.",
    ),
)
def units_for(model: nn.Module, block: type[nn.Module]) -> set[nn.Module]:
    """The submodules that shall be units, so that no unit has frozen parameters beside trained ones."""
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = set(blocks)

    def kinds(module: nn.Module) -> set[bool]:
        inner = [each for each in module.modules() if each in blocks and each is not module]
        return {p.requires_grad for p in find_parameters(module, skip=inner)}

    def separate(module: nn.Module) -> None:
        for child in module.children():
            if child not in blocks:
                if kinds(child) == {True}:
                    units.add(child)
                else:
                    separate(child)

    for top in (model, *blocks):
        if len(kinds(top)) > 1:
            separate(top)
    return units
