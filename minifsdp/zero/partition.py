"""What both stages share: parameters in flat buckets, one shard of each per rank, and an optimizer over the shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm, device, private
from minifsdp.clip_grad import clip_grad_norm
from minifsdp.comm import Group, Handle
from minifsdp.ddp.bucketed import assign_buckets
from minifsdp.ddp.sync import broadcast_from_rank_0, check_same_on_all_ranks, describe
from minifsdp.zero.state import gather_state, shard_state

_NEEDS_WHOLE_PARAMETERS = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, torch.optim.SparseAdam)


class Bucket:
    """Parameters of one dtype in one flat buffer, cut into N shards of equal length.

        flat [padded]              p0 | p1 | p2 | zeros
        shards [padded / N]      rank 0 |  rank 1  | rank 2     the cuts fall where they may

    The buffer is the parameters' memory: each `p.data` is a view of it, and so is this rank's shard. What the optimizer
    writes to the shard the model sees at once; what the others write arrives with `start_gather`.

    Attributes:
        params: the parameters, in the order in which backward is expected to make their gradients.
        flat: [padded], their dtype; padded is the least multiple of N that holds them. Equal on all ranks.
        shard: [padded / N], this rank's part of `flat`, as the parameter that the inner optimizer updates.
    """

    def __init__(self, params: list[nn.Parameter], group: Group) -> None:
        self.params = params
        self.group = group
        numel = sum(p.numel() for p in params)
        self.padded = -(-numel // group.size()) * group.size()
        self._sizes = [*(p.numel() for p in params), self.padded - numel]
        self.flat = torch.empty(self.padded, dtype=params[0].dtype, device=params[0].device)
        self.flat[numel:] = 0
        for p, view in zip(params, self.split(self.flat), strict=True):
            p.data = view.copy_(p)
        comm.broadcast(self.flat, 0, group).wait()
        self.shard = nn.Parameter(self.flat.chunk(group.size())[group.rank()])

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of `flat` [padded] in the parameters' shapes."""
        *pieces, _padding = flat.split(self._sizes)
        return [piece.view(p.shape) for p, piece in zip(self.params, pieces, strict=True)]

    def check_memory(self) -> None:
        """Raise RuntimeError where a parameter is no longer a view of `flat`: the model would see no more updates."""
        for p in self.params:
            if p.untyped_storage() is not self.flat.untyped_storage():
                raise RuntimeError(
                    f"a parameter {list(p.shape)} has left its bucket's memory since the optimizer was made: "
                    "convert or move the module first (module.to(...)), then make the optimizer"
                )

    def new_gradients(self, role: device.Role) -> Tensor:
        """Zeros [padded]: what no gradient is copied over, an unused parameter or the padding, counts as zero."""
        return device.empty(self.padded, self.flat.dtype, role, self.flat.device).zero_()

    def start_reduction(self, gradients: Tensor) -> tuple[Tensor, Handle]:
        """Reduce `gradients` [padded] to a new buffer [padded / N]: this rank's shard of their mean over the ranks."""
        reduced = device.empty(self.shard.numel(), self.flat.dtype, "gradients", self.flat.device)
        return reduced, comm.reduce_scatter(reduced, gradients, self.group, comm.MEAN)

    def start_gather(self) -> Handle:
        """Every rank's shard into `flat`, in place: what this rank sends lies where the others receive it."""
        return comm.all_gather(self.flat, self.shard.data, self.group)


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of whole parameters to the outside, of this rank's shards of them inside.

    Args:
        params: the parameters or parameter groups, as for any torch optimizer; the same on all ranks. Their values
            become those of rank 0. Each group's parameters that require a gradient are put into buckets.
        optimizer_class: an optimizer that updates element by element, such as `torch.optim.AdamW`.
        process_group: the ranks to shard over; the default group if None.
        bucket_cap_mb: size of a bucket in MiB, the unit of communication.
        **defaults: arguments for `optimizer_class`.

    Attributes:
        param_groups: the caller's groups. LR schedulers write here; the next step uses what it finds.
        inner: the `optimizer_class` instance. Its parameters are the shards, and `inner.state` is all the state that
            this rank has: 1 / N.
        buckets: in the order of communication: group by group, each in reverse order of its parameters.

    Raises:
        ValueError: no parameters, the same one twice, or wrong arguments (as torch); parameters on several devices or
            on one that the process group does not serve; an optimizer that needs to see whole parameters.
        RuntimeError: there is no process group; the ranks' parameters differ in number, shape, dtype or being frozen.

    Clipping and loss scaling want the mean gradients' shards, which `clip_grad_norm_` here and `ShardedGradScaler` use.
    Torch's own would see `.grad`: under stage 1 this rank's own gradients, unreduced, and under stage 2 none.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        process_group: Group | None = None,
        bucket_cap_mb: float = 25,
        **defaults: Any,
    ) -> None:
        self.process_group = comm.world(process_group)
        if issubclass(optimizer_class, _NEEDS_WHOLE_PARAMETERS):
            raise ValueError(
                f"{optimizer_class.__name__} needs whole parameters, but ZeRO gives it flat shards of them: "
                "take one that updates element by element, such as AdamW or SGD"
            )
        super().__init__(params, defaults)
        self._check_parameters()
        self._frozen: list[Tensor] = [p for g in self.param_groups for p in g["params"] if not p.requires_grad]
        if self._frozen:
            broadcast_from_rank_0(self._frozen, self.process_group)
        partition = [self._make_buckets(group["params"], int(bucket_cap_mb * 2**20)) for group in self.param_groups]
        self.buckets = [bucket for buckets in partition for bucket in buckets]
        groups = [
            {**_hyperparameters(group), "params": [bucket.shard for bucket in buckets]}
            for group, buckets in zip(self.param_groups, partition, strict=True)
        ]
        self.inner = optimizer_class(groups, **defaults)
        self.defaults = self.inner.defaults
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_hyperparameters(inner_group))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of all mean gradients; returns the norm. Collective.

        `torch.nn.utils.clip_grad_norm_` sees the gradients of this rank's batch (stage 1), or none (stage 2).
        """
        self.reduce_gradients()
        shards = [bucket.shard for bucket in self.buckets]
        group = self.process_group
        return clip_grad_norm({group: shards}, [], float(max_norm), float(norm_type), shards[0].device)

    def reduce_gradients(self) -> None:
        """See that the shards have their gradients."""

    def update_shards(self) -> None:
        """The optimizer step, on this rank's 1 / N of the elements.

        Raises:
            RuntimeError: since the optimizer was made a parameter was given other memory, as by `module.to(...)`, or
                was unfrozen.
        """
        for bucket in self.buckets:
            bucket.check_memory()
        if any(p.requires_grad for p in self._frozen):
            raise RuntimeError("a parameter was unfrozen after the optimizer was made: make a new optimizer")
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group.update(_hyperparameters(group))
        self.inner.step()

    def gather_parameters(self) -> None:
        """Whole parameters on every rank again: one all-gather per bucket."""
        for handle in [bucket.start_gather() for bucket in self.buckets]:
            handle.wait()
        # The views have version counters of their own: a backward that saved the old values must fail, not use the new.
        torch.autograd.graph.increment_version([p for bucket in self.buckets for p in bucket.params])

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as `optimizer_class` over whole parameters would give it: any number of ranks can load it.

        Collective: every rank must call it, and every rank gets (and holds) all of it.
        """
        try:
            for bucket in self.buckets:
                self.state.update(gather_state(bucket, self.inner.state))
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's shard of a whole state: from `state_dict` on any number of ranks or a plain optimizer's.

        Raises:
            ValueError: it is of other parameters, or two parameters of one bucket were updated a different number of
                times (a bucket has one step count).
        """
        super().load_state_dict(state_dict)  # torch checks it and hands each parameter's state to self.state
        try:
            shards: dict[Tensor, dict[str, Any]] = {
                bucket.shard: shard_state(bucket, self.state) for bucket in self.buckets
            }
        finally:
            self.state.clear()
        self.inner.state.clear()
        self.inner.state.update(shards)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch, but not once the parameters are partitioned."""
        if hasattr(self, "inner"):
            raise ValueError(f"{type(self).__name__} cannot take a new parameter group: make a new optimizer with all")
        super().add_param_group(param_group)

    def _check_parameters(self) -> None:
        served = private.device_types_of(self.process_group)
        named = [
            (f"parameter {i} of group {g}", p)
            for g, group in enumerate(self.param_groups)
            for i, p in enumerate(group["params"])
        ]
        if not named:
            raise ValueError("the parameter groups hold no parameter: pass model.parameters() or groups of them")
        first = named[0][1].device
        for name, p in named:
            if p.device.type not in served:
                raise ValueError(
                    f"{name} is on {p.device}, the process group serves {sorted(served)}: move the module first"
                )
            if p.device != first:
                raise ValueError(f"{name} is on {p.device}, the first one on {first}: move all to one device first")
        check_same_on_all_ranks([describe(name, p) for name, p in named], first, self.process_group)

    @torch.no_grad()
    def _make_buckets(self, params: list[nn.Parameter], cap_bytes: int) -> list[Bucket]:
        trainable = [p for p in params if p.requires_grad]
        return [Bucket(part, self.process_group) for part in assign_buckets(trainable, cap_bytes)]


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
