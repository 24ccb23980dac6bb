"""Parameters that decide what is gathered, for example their values in fewer bits and a scale.

    local --fsdp_pre_all_gather--> inputs, metadata            tensors of any dtype, of equal sizes on all ranks
    inputs of all parameters --all-gather--> outputs           one memory [N * numel] for each input
    outputs, metadata --fsdp_post_all_gather--> leaf           created in the first gather, written to in later ones

The local tensor has the two methods, from its class or as attributes. A parameter without them sends its piece, and its
output is the leaf (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, "[Note: FSDP tensors]").
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import device, private
from minifsdp.comm import Group, Label
from minifsdp.fsdp2 import dtensors
from minifsdp.fsdp2.cut import Cut, Rows
from minifsdp.fsdp2.gather import AllGather, Gather
from minifsdp.fsdp2.held import Held, Recorded
from minifsdp.fsdp2.unit import ParamUnit, unsharded_of
from minifsdp.fsdp2.unsharded import Unsharded, renewed

_ARGUMENTS = "mesh, outer_size, outer_stride, module, mp_policy"


def extends(shard: Tensor) -> bool:
    """True if the local part of a parameter has the two methods.

    Raises:
        AssertionError: it has only one of them.
    """
    local = dtensors.local_of(shard)
    has = {name: hasattr(local, name) for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather")}
    if len({*has.values()}) > 1:
        raise AssertionError(f"Both {' and '.join(has)} should be defined if using all-gather extensions: {local}")
    return all(has.values())


class Extended:
    """The counterpart of `Unsharded` (fsdp2/unsharded.py) for a group in which a parameter extends the gather.

    Args:
        cuts: division of the parameters among the ranks of `group`.
        inner: for each parameter its placement by tensor parallelism, or None.
        dtypes: dtype of each parameter in the computation.
        group: the ranks, N.
        on: device of the computation.
        extended: the parameters that have the two methods.
        asked: for each parameter the arguments of `fsdp_pre_all_gather`, or the first of them.

    Attributes:
        views: the whole parameters; for one that extends the gather, a placeholder on meta until it is gathered.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        inner: Sequence[Any],
        dtypes: Sequence[torch.dtype],
        group: Group,
        on: torch.device,
        extended: Sequence[bool],
        asked: Sequence[tuple[Any, ...]],
    ) -> None:
        self.cuts, self.inner, self.dtypes, self.group, self.device = cuts, inner, dtypes, group, on
        self.extended, self.asked = extended, asked
        self.metadata: list[Any] = [None] * len(cuts)
        self.made: dict[int, nn.Parameter] = {}  # the leaves that `fsdp_post_all_gather` writes to
        self._new: dict[int, Tensor] = {}  # those that are there, and not yet leaves
        self._with_it: list[Sequence[Tensor]] = [()] * len(cuts)  # to be freed with the leaf
        self._shapes: list[Any] = []
        self.views: list[Tensor] = []
        self._plain: dict[int, Tensor] = {}
        for index, (cut, dtype) in enumerate(zip(cuts, dtypes, strict=True)):
            if extended[index]:
                self.views.append(torch.empty(cut.shape, dtype=dtype, device="meta"))
            else:
                self._plain[index] = device.empty(group.size() * cut.size, dtype, "unsharded", on)
                self.views.append(dtensors.whole_like(cut.whole(self._plain[index]), inner[index]))
        self.memories: list[Tensor] = [*self._plain.values()]
        self.free()

    @property
    def writes(self) -> int:
        """The number of writes, as far as it is known: not of leaves that the methods write to."""
        return sum(map(private.version_of, self._plain.values()))

    def forget(self) -> None:
        """Nothing was kept."""

    @torch.no_grad()
    def start(
        self, parts: Sequence[Tensor], keeper: Held | Recorded, all_gather: AllGather | None, label: Label
    ) -> Any:
        """Ask the parameters what to send, and start to gather it; returns what to wait for before `arrive`."""
        self.parts = parts
        sent = [(i, place, each) for i in range(len(parts)) for place, each in enumerate(self._inputs(i))]
        sent.sort(key=lambda item: -self._dtype(item[0], item[2]).itemsize)  # wide dtypes first (cut.py, Rows)
        shapes = [(i, place, None if i in self._plain else (t.shape, t.dtype)) for i, place, t in sent]
        if shapes != self._shapes:
            self._prepare(sent)
            self._shapes = shapes
        self._gather.keeper, self._gather.all_gather = keeper, all_gather
        return self._gather.start([each.view(1) if not each.ndim else each for *_, each in sent], label)

    def _dtype(self, index: int, sent: Tensor) -> torch.dtype:
        return self.dtypes[index] if index in self._plain else sent.dtype

    def _inputs(self, index: int) -> Sequence[Tensor]:
        """What a parameter sends."""
        local = dtensors.on(self.device, self.parts[index])
        if index in self._plain:
            return (local,)
        ask: Any = local.fsdp_pre_all_gather  # type: ignore[attr-defined]
        wanted = len(inspect.signature(ask).parameters)
        if wanted not in (1, 5):
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather{inspect.signature(ask)}: expects fsdp_pre_all_gather(self, {_ARGUMENTS})"
            )
        inputs, self.metadata[index] = ask(*self.asked[index][:wanted])
        piece, sizes = self.cuts[index].piece, [tuple(each.size()) for each in inputs]
        if local.size() != piece and any(size != tuple(piece) for size in sizes):
            raise AssertionError(
                f"When a parameter is unevenly sharded by FSDP (orig size={self.cuts[index].shape}, FSDP world "
                f"size={self.group.size()}), fsdp_pre_all_gather must return all-gather inputs with the padded sharded "
                f"size {piece} but got {sizes}"
            )
        return tuple(inputs)

    def _prepare(self, sent: Sequence[tuple[int, int, Tensor]]) -> None:
        """Memory for the outputs, and a gather that fills it."""
        ranks = self.group.size()
        self.outputs: dict[tuple[int, int], Tensor] = {}  # by parameter and input
        self.memories, cuts, dtypes = [], [], []
        for index, place, each in sent:
            dtype, cut, memory = self._dtype(index, each), self.cuts[index], self._plain.get(index)
            first, *rest = each.shape or (1,)
            if memory is None and not (cut.dim and each.shape == cut.piece):
                cut = Cut(torch.Size([ranks * first, *rest]), 0, ranks)
            if memory is None:
                memory = device.empty(ranks * cut.size, dtype, "unsharded", self.device)
                self.outputs[index, place] = memory[: ranks * each.numel()].view(ranks * first, *rest)
            self.memories.append(memory)
            cuts.append(cut)
            dtypes.append(dtype)
        for memory in self.memories:
            device.allocate(memory)
        as_sent = Rows(cuts, ranks, dtypes).dtype
        raw = [memory.view(as_sent) for memory in self.memories]
        self._gather = Gather(cuts, self.group, raw, dtypes, self.device)
        self.free()

    @torch.no_grad()
    def arrive(self, leaves: list[nn.Parameter]) -> bool:
        """Give the parameters their values; returns whether leaves were replaced in the list `leaves`."""
        for memory in self.memories:
            device.allocate(memory)
        self._gather.copy_out()
        for index, extended in enumerate(self.extended):
            if extended:
                self._rebuild(index)
        return self._renew(leaves)

    def _rebuild(self, index: int) -> None:
        build: Any = self.parts[index].fsdp_post_all_gather  # type: ignore[attr-defined]
        outputs = tuple(self.outputs[each] for each in sorted(self.outputs) if each[0] == index)
        arguments = outputs, self.metadata[index], self.dtypes[index]
        for each in self._with_it[index]:
            device.allocate(each)
        if index in self.made:
            build(*arguments, out=self.made[index])
            return
        whole, self._with_it[index] = build(*arguments)
        shape = self.cuts[index].shape
        self._new[index] = dtensors.whole_like(whole.as_strided(shape, _strides(shape), 0), self.inner[index])

    def _renew(self, leaves: list[nn.Parameter]) -> bool:
        """Put the leaves that are there for the first time where their placeholders are, if any."""
        for index, whole in self._new.items():
            leaves[index] = self.made[index] = renewed(leaves[index], whole)
        are_new = bool(self._new)
        self._new.clear()
        return are_new

    def free(self) -> None:
        for buffer in [*self.memories, *(each for of_one in self._with_it for each in of_one)]:
            device.free(buffer)


def extended_of(unit: ParamUnit, dtypes: Sequence[torch.dtype], mesh: Any, policy: Any) -> Unsharded | Extended:
    """The memory of a unit's whole parameters, where some may extend the gather.

    Args:
        unit: the unit.
        dtypes: dtype of each parameter in the computation.
        mesh: the mesh on which the parameters are sharded.
        policy: the policy passed to `fsdp_pre_all_gather`.

    Raises:
        AssertionError: see `extends`.
        NotImplementedError: a parameter extends the gather, and backward is to gather among fewer ranks.
    """
    extended = [extends(p) for p in unit.shards]
    if not any(extended):
        return unsharded_of(unit, dtypes)
    if unit.smaller is not None:
        raise NotImplementedError(
            f"{unit.title} has parameters with fsdp_pre_all_gather: reshard_after_forward has to be True or False"
        )
    mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]
    asked = [
        (mesh, cut.shape, _strides(cut.shape), users[0].module, policy)
        for cut, users in zip(unit.cuts, unit.view.places, strict=True)
    ]
    return Extended(unit.cuts, unit.inner, dtypes, unit.group, unit.device, extended, asked)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
