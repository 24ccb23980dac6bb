"""Start all ranks from rank 0's model, once, before training: the first step of every rung of DDP."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from minifsdp import comm, device
from minifsdp.local_parts import check_replicated, local_of
from minifsdp.nesting import DDP, refuse_nested
from minifsdp.private import FakeTensor


def trainable_parameters(module: nn.Module, ignored: Collection[str] = ()) -> dict[nn.Parameter, str]:
    """The trainable parameters and their names, in order of registration; a tied parameter is listed once.

    Parameters whose names are in `ignored` are left out.

    Raises:
        RuntimeError: there is none, or one is not initialized yet (torch's texts).
        ValueError: another wrapper has one.
    """
    refuse_nested(DDP, module, [p for name, p in module.named_parameters() if name in ignored])
    named = {name: p for name, p in module.named_parameters() if name not in ignored}
    if any(isinstance(p, nn.UninitializedParameter) for p in named.values()):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )
    trainable = {p: name for name, p in named.items() if p.requires_grad}
    if not trainable:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    return trainable


def start_from_rank_0(
    module: nn.Module, group: comm.Group, buffers: bool = True, ignored: Collection[str] = ()
) -> None:
    """Give every rank the values that rank 0's parameters, and its buffers unless `buffers` is False, have.

    Tensors whose names are in `ignored` keep their values. There is one broadcast per tensor, each through a
    "communication" buffer of that tensor's size, which is freed before the next broadcast.

    Raises:
        RuntimeError: as for `check_same_on_all_ranks`, or tensors are on meta, before any value is sent.
        ValueError: a tensor is sharded over these ranks.
    """
    named = named_tensors(module, buffers, ignored)
    for name, tensor in named.items():
        check_replicated(tensor, name, group)
    entries = [describe(name, tensor) for name, tensor in named.items()]
    check_same_on_all_ranks(entries, device.compute_device(None, named.values(), group), group)
    if on_meta := [name for name, tensor in named.items() if tensor.is_meta]:
        raise RuntimeError(
            f"DDP needs tensors with memory, but {', '.join(on_meta)} are on meta: call model.to_empty(device=...) and "
            "initialize them first"
        )
    for tensor in named.values():
        broadcast_from_rank_0([tensor], group)


def named_tensors(module: nn.Module, buffers: bool, ignored: Collection[str]) -> dict[str, Tensor]:
    """The parameters, and the buffers if asked for, but those whose names are `ignored`."""
    named: dict[str, Tensor] = {f"parameter {n}": p for n, p in module.named_parameters() if n not in ignored}
    if buffers:
        named |= {f"buffer {name}": b for name, b in module.named_buffers() if name not in ignored}
    return named


def broadcast_from_rank_0(tensors: list[Tensor], group: comm.Group) -> None:
    """`tensors`, of any shapes and dtypes, take rank 0's values: one broadcast of all their bytes."""
    broadcast_from(0, tensors, group)


@torch.no_grad()
def broadcast_from(source: int, tensors: list[Tensor], group: comm.Group) -> None:
    """`tensors`, of any shapes and dtypes, take the values of the group's rank `source`: one broadcast of all bytes.

    The bytes pass through one "communication" buffer, which is freed at the end. Some tensors may have been saved by
    autograd. As in torch, writing to them does not count as a change, so that two forward passes may share a backward.
    """
    # Wide elements first: then each part of the byte buffer begins where its dtype may begin.
    tensors = sorted((local_of(t).data for t in tensors), key=lambda t: -t.element_size())
    sizes = [t.numel() * t.element_size() for t in tensors]
    staging = device.empty(sum(sizes), torch.uint8, "communication", tensors[0].device)
    views = [part.view(t.dtype).view(t.shape) for part, t in zip(staging.split(sizes), tensors, strict=True)]
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    comm.broadcast(staging, source, group).wait()
    for view, tensor in zip(views, tensors, strict=True):
        tensor.copy_(view)
    device.free(staging)


def describe(name: str, tensor: Tensor) -> str:
    """The properties of a tensor on which ranks must agree before they reduce it together, in words."""
    layout = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    frozen = " frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    place = " on meta" if tensor.is_meta else ""
    return f"{name} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{layout}{frozen}{place})"


def check_same_on_all_ranks(entries: list[str], on: torch.device, group: comm.Group, whose: str = "DDP") -> None:
    """Compare a list of lines between ranks: one all-reduce of three numbers as long as they are the same.

    Raises:
        RuntimeError: they differ. The same error on every rank: the first entry that differs, and who has what.
    """
    text = "\n".join(entries).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7])  # 7 bytes and their negative fit an int64
    extremes = torch.tensor([digest, -digest, len(text)], device=on)
    comm.all_reduce(extremes, group, comm.MAX).wait()
    highest, minus_lowest, longest = extremes.tolist()
    if highest == -minus_lowest:
        return
    for versions in zip_longest(*gather_lines(text.ljust(longest), on, group), fillvalue="nothing"):
        if len(set(versions)) > 1:
            found = "; ".join(f"{version} on {ranks_with(version, versions)}" for version in dict.fromkeys(versions))
            raise RuntimeError(f"{whose} expects same model across all ranks, but finds {found}.")


def gather_lines(text: bytes, on: torch.device, group: comm.Group) -> list[list[str]]:
    """Every rank's lines, in rank order; all texts must have been padded to the same length."""
    texts = torch.empty(group.size() * len(text), dtype=torch.uint8, device=on)
    comm.all_gather(texts, torch.tensor(list(text), dtype=torch.uint8, device=on), group).wait()
    return [bytes(row).decode().rstrip().split("\n") for row in texts.view(group.size(), -1).tolist()]


def ranks_with(version: str, versions: tuple[str, ...]) -> str:
    ranks = [str(rank) for rank, other in enumerate(versions) if other == version]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


@torch.no_grad()
def check_same_order(params: Sequence[Tensor], group: comm.Group) -> None:
    """See that no rank lists the same values in another order: it would take the values of other parameters.

    Raises:
        RuntimeError: names the rank and the first parameter; the same error on every rank.
    """
    sums = torch.stack([local_of(p).abs().sum(dtype=torch.float64) for p in params])
    gathered = sums.new_zeros(group.size(), len(params))
    comm.all_gather(gathered.view(-1), sums, group).wait()
    if isinstance(gathered, FakeTensor):
        return  # without values, as when memory is estimated
    of_ranks = gathered.view(torch.int64).tolist()  # as bits: NaN equals itself
    for rank, theirs in enumerate(of_ranks):
        if theirs != of_ranks[0] and sorted(theirs) == sorted(of_ranks[0]):
            first = next(i for i, pair in enumerate(zip(theirs, of_ranks[0], strict=True)) if len(set(pair)) > 1)
            raise RuntimeError(
                f"rank {rank} lists the parameters in another order than rank 0, from parameter {first} on: its values "
                "would become those of other parameters. Give all ranks one order, such as that of model.parameters()"
            )
