"""The base of both stages: parameters in flat buckets, one shard of each per rank, and an optimizer over the shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.clip_grad import clip_grad_norm
from minifsdp.comm import Group
from minifsdp.ddp.early_steps import refuse_early_steps
from minifsdp.ddp.sync import broadcast_from_rank_0
from minifsdp.ddp.unused import used_on_any_rank
from minifsdp.kinds import bytes_of_mib
from minifsdp.local_parts import groups_of
from minifsdp.optimizer_steps import OverShards
from minifsdp.whole_tensors import check_flat
from minifsdp.zero.bucket import Bucket, make_buckets
from minifsdp.zero.parameters import check_parameters
from minifsdp.zero.state import can_share, check_state, cut_state, gather_state, scatter_state


class ShardedOptimizer(OverShards, ABC):
    """An optimizer with the interface of whole parameters, which updates this rank's shards of them.

    Args:
        params: the parameters or parameter groups, as for any torch optimizer; the same on all ranks. Their values
            become those of rank 0. Each group's parameters that require a gradient are put into buckets.
        optimizer_class: an optimizer that updates element by element, such as `torch.optim.AdamW`.
        process_group: the ranks to shard over; the default group if None.
        bucket_cap_mb: size of a bucket in MiB, the unit of communication.
        **defaults: arguments for `optimizer_class`.

    Attributes:
        param_groups: the caller's groups. LR schedulers write to them, and the next step reads them.
        inner: the `optimizer_class` instance. Its parameters are the shards or, in a bucket of which only some
            parameters have had gradients, the parameters' parts of the shard. `inner.state` is this rank's 1 / N.
        buckets: in the order of communication: group by group, each in reverse order of its parameters.

    Raises:
        ValueError: there are no parameters, a parameter occurs twice, or arguments are wrong (as in torch); parameters
            are on several or unsupported devices; or the optimizer needs whole parameters.
        RuntimeError: there is no process group; or the ranks' parameters differ in number, order, shape, dtype or
            whether they are frozen. A different order is found if the ranks have the same values.

    As with any torch optimizer, a parameter without a gradient, frozen or unused, is not changed. If only some
    parameters of a bucket have had a gradient, each parameter's part of the shard has a separate state from then on.
    With Adam, this is a step count of 4 bytes per parameter instead of per bucket, and no moments for the padding.

    Clipping and loss scaling need the shards of the mean gradients: use `clip_grad_norm_` of this class and
    `ShardedGradScaler`. In `.grad`, stage 1 has this rank's unreduced gradients, and stage 2 has nothing.
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
        check_flat(optimizer_class, defaults, "ZeRO")
        super().__init__(params, defaults)
        self._names: dict[Tensor, str] = {}
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"{i} of group {number}" for i in range(len(group["params"]))]
            self._names |= {p: f"parameter {name}" for p, name in zip(group["params"], names, strict=True)}
        check_parameters(self._names, self.process_group)
        self._frozen: list[Tensor] = [p for g in self.param_groups for p in g["params"] if not p.requires_grad]
        if self._frozen:
            broadcast_from_rank_0(self._frozen, self.process_group)
        cap = bytes_of_mib("bucket_cap_mb", bucket_cap_mb)
        make = partial(make_buckets, names=self._names, group=self.process_group, cap_bytes=cap)
        self._partition = [make(group["params"]) for group in self.param_groups]
        self.buckets = [bucket for buckets in self._partition for bucket in buckets]
        self._params = [p for bucket in self.buckets for p in bucket.params]
        self._is_reduced = False
        groups = [
            {**_hyperparameters(group), "params": [bucket.shard for bucket in buckets]}
            for group, buckets in zip(self.param_groups, self._partition, strict=True)
        ]
        self.inner = optimizer_class(groups, **defaults)
        self.defaults = self.inner.defaults
        copy_hyperparameters(self.inner, self)
        refuse_early_steps(self)

    def not_yet_averaged(self) -> Collection[Tensor]:
        """The parameters with this rank's own gradients during backward: all."""
        return self._params

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of all mean gradients; returns the norm. Collective.

        `torch.nn.utils.clip_grad_norm_` sees the gradients of this rank's batch (stage 1), or none (stage 2).
        """
        self.reduce_gradients()
        sharded: dict[tuple[Group, ...], list[Tensor]] = {}
        for bucket in self.buckets:
            sharded.setdefault((self.process_group, *groups_of(bucket.params[0])), []).append(bucket.shard)
        return clip_grad_norm(sharded, [], float(max_norm), float(norm_type), self.buckets[0].shard.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Give this rank's shards their gradients, update the shards, all-gather the parameters. Collective.

        Args:
            closure: clears the gradients, computes the loss, calls backward and returns the loss; called once.
            **kwargs: passed on to the inner optimizer's `step`.

        Returns:
            The closure's loss.
        """
        self.check_may_step()
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.reduce_gradients()
        self.update_shards(**kwargs)
        self.free_gradients()
        self.gather_parameters()
        return loss

    def check_may_step(self) -> None:
        """Raise RuntimeError if the gradients cannot be complete yet."""

    def free_gradients(self) -> None:
        """The shards have been updated: free what no later step or backward needs."""

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Give the shards their gradients, once between two `zero_grad` or steps. Collective.

        The ranks agree on the parameters that have a gradient. If only some ranks have used a parameter, its gradient
        counts as zero on the others. A parameter that no rank has used is not changed, as a torch optimizer does not
        change a parameter whose `.grad` is None.
        """
        if self._is_reduced or not self.buckets:
            return
        used = used_on_any_rank(self._params, self.parameters_with_gradients(), self.process_group)
        for bucket in self.buckets:
            bucket.in_use = [p in used for p in bucket.params]
            if any(bucket.in_use):
                self.reduce_bucket(bucket)
            else:
                bucket.free_gradients()
            if any(bucket.in_use) and not all(bucket.in_use) and not bucket.is_split:
                states = cut_state(bucket, self.inner.state.get(bucket.shard, {}))
                self._arrange(bucket, split=True)
                self._set_states(zip(bucket.shards, states, strict=True))
            bucket.assign_gradients()
        self._is_reduced = True

    @abstractmethod
    def parameters_with_gradients(self) -> Set[Tensor]:
        """The parameters that this rank has a gradient for."""

    @abstractmethod
    def reduce_bucket(self, bucket: Bucket) -> None:
        """See that `bucket.shard` has its gradient."""

    def check_dense(self, p: Tensor) -> None:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ValueError(
                f"{self._names[p]} has a sparse gradient, and flat buffers are dense: pass sparse=False to its "
                "embedding, or leave it to another optimizer"
            )

    def update_shards(self, **kwargs: Any) -> None:
        """The optimizer step, on this rank's 1 / N of the elements; `kwargs` go to the inner optimizer's `step`.

        Raises:
            RuntimeError: since the optimizer was made a parameter was given other memory, as by `module.to(...)`, or
                was unfrozen.
        """
        for bucket in self.buckets:
            bucket.check_memory()
        if any(p.requires_grad for p in self._frozen):
            raise RuntimeError("a parameter was unfrozen after the optimizer was made: make a new optimizer")
        copy_hyperparameters(self, self.inner)
        self.inner.step(**kwargs)
        copy_hyperparameters(self.inner, self)  # some optimizers keep numbers of theirs there

    def gather_parameters(self) -> None:
        """Whole parameters on every rank again: one all-gather for each bucket that was updated."""
        updated = [bucket for bucket in self.buckets if any(bucket.in_use)]
        for handle in [bucket.start_gather() for bucket in updated]:
            handle.wait()
        # The views have version counters of their own: a backward that saved the old values must fail, not use the new.
        torch.autograd.graph.increment_version([p for bucket in updated for p in bucket.params])

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as that of `optimizer_class` with whole parameters; any number of ranks can load it.

        Collective: every rank must call it, and every rank receives the whole state.
        """
        try:
            for bucket in self.buckets:
                self.state.update(gather_state(bucket, self.inner.state))
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's shard of a whole state, saved on any number of ranks or by a plain optimizer.

        Raises:
            ValueError: it is the state of other parameters.
        """
        super().load_state_dict(state_dict)  # torch checks it and hands each parameter's state to self.state
        try:
            for bucket in self.buckets:
                check_state(bucket, self.state)
            for bucket in self.buckets:
                self._arrange(bucket, split=not can_share(bucket, self.state))
                self._set_states(scatter_state(bucket, self.state).items())
                bucket.assign_gradients()
        finally:
            self.state.clear()

    def _arrange(self, bucket: Bucket, split: bool) -> None:
        """Let the inner optimizer update the bucket's shard in one, or each parameter's part; without any state."""
        for p in bucket.shards:
            self.inner.state.pop(p, None)
        bucket.split_shard(split)
        for group, buckets in zip(self.inner.param_groups, self._partition, strict=True):
            group["params"] = [p for bucket in buckets for p in bucket.shards]

    def _set_states(self, states: Iterable[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        self.inner.state.update({p: state for p, state in states if state})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch, but not once the parameters are partitioned."""
        if hasattr(self, "inner"):
            raise ValueError(f"{type(self).__name__} cannot take a new parameter group: make a new optimizer with all")
        super().add_param_group(param_group)


def copy_hyperparameters(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Give the groups of `target` all that the groups of `source` have but their parameters."""
    for group, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update(_hyperparameters(group))


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
