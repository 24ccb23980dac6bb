"""The drop-in replacement for torch's class, with all of its arguments (torch/nn/parallel/distributed.py).

The algorithm is that of the rungs: naive.py, bucketed.py, overlapped.py. This class has a reducer (reducer.py), which
uses the lesson's `LaunchQueue` to launch buckets whose memory becomes that of the gradients (buckets.py). Every further
feature of torch's class has its own file.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.ddp.early_steps import refuse_early_steps
from minifsdp.ddp.reducer import Reducer
from minifsdp.ddp.sync import broadcast_from, start_from_rank_0, trainable_parameters
from minifsdp.ddp.torch_api import arguments
from minifsdp.ddp.torch_api.comm_hook import Hook, HookedReduce
from minifsdp.ddp.torch_api.join import JoinConfig, JoinHook, RunningRanks, announce_forward, joining
from minifsdp.ddp.torch_api.logging_data import logging_data
from minifsdp.ddp.torch_api.sparse import sparse_buckets
from minifsdp.ddp.torch_api.static_graph import StaticGraphReducer
from minifsdp.ddp.unused import UnusedFindingReducer
from minifsdp.first_forward import FirstForward
from minifsdp.kinds import check_flags, check_kind
from minifsdp.nesting import DDP, refuse_torchs_ddp


class DistributedDataParallel(nn.Module):
    """Data parallelism whose communication is hidden by backward (torch/nn/parallel/distributed.py).

    The gradients of the last layers are complete first, so their bucket is being sent while the earlier layers are
    still computing. When `backward` returns, every `.grad` is the mean over the ranks. The training loop is that of one
    process. Every backward of a forward outside `no_sync` is reduced (in torch, only the first one), so all ranks must
    run the same number of them. A parameter that the first does not reach causes an error at the next forward, as in
    torch, unless `find_unused_parameters` is set.

    Bytes, for Ψ fp32 parameters:

    * `gradient_as_bucket_view=False`: gradients take 4Ψ, in buckets of this backward. A bucket's buffer is allocated
    when
      its first gradient arrives, and each gradient moves into it and frees its own memory. Gradients of an earlier
      backward to which this one adds stay where they are, and staging ("communication") takes another 4Ψ until the end
      of backward.
    * `gradient_as_bucket_view=True`: gradients take 4Ψ, without staging. The buckets ("gradients") are allocated at
      construction and live as long as the model, and every `.grad` that is not None is a view of one. Autograd adds a
      new gradient to the view; if `.grad` was None, a hook copies the gradient there at once.
    * `find_unused_parameters`: an additional 4 bytes per parameter tensor ("communication") at the end of backward;
      with `static_graph`, 16 bytes at the end of the first backward.
    * sparse gradients (`nn.Embedding(sparse=True)`): no bucket, but N times the rows of the rank with the most rows,
      while they are gathered (sparse.py).
    * buffers: a "communication" buffer of their size at the start of a forward that broadcasts them.

    Args:
        module: the model, equal in shapes and dtypes on all ranks. It stays on its device.
        device_ids: None, or the one CUDA device of the module; tensors in inputs are then moved there.
        output_device: part of torch's signature; the outputs stay on the module's device.
        dim: part of torch's signature; it has no effect with one device per process.
        broadcast_buffers: broadcast rank 0's buffers to all ranks at construction and at each forward that follows one
            whose backward is reduced (including the first forward), as by default. Deprecated in torch 2.13.
        init_sync: compare the models of the ranks and broadcast rank 0's values. Without it they must already be equal.
        process_group: the ranks to average over; all of them by default.
        bucket_cap_mb: size in MiB at which a bucket is closed, by default 1 for the first and 25 for the others; 0
            means one bucket for each parameter.
        find_unused_parameters: find parameters that a forward has not used. If only other ranks have used a parameter,
            this rank takes part with its existing `.grad` or with zero. If no rank has used it, `.grad` is kept (if it
            is a view, it is still part of its bucket: the mean of values that are equal since the last reduction).
        check_reduction: deprecated in torch; it has no effect there either.
        gradient_as_bucket_view: let `.grad` be views of buckets that live as long as the model. Otherwise each backward
            allocates its own buckets.
        static_graph: assume that every backward is like the first (static_graph.py).
        device_mesh: a mesh of one dimension instead of a process group.
        skip_all_reduce_unused_params: part of `static_graph`.
        bucket_cap_mb_list: sizes of the buckets one by one, in the order of backward; the last applies to all others.
        forward_sync_buffers: like `broadcast_buffers`, but only in forward.
        delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision, batched_grad_copy: refused.

    Attributes:
        module: the wrapped model; names in the state dict begin with `module.`.
        require_backward_grad_sync: False inside `no_sync`.
        parameters_to_ignore: names of parameters and buffers in `module` that are not synchronized.

    Raises:
        RuntimeError: there is no process group; no parameter requires a gradient; or the models of the ranks differ.
            In the last case every rank raises the error, which names the parameter and the ranks.
        ValueError: the parameters are on several kinds of devices; or `device_ids` has several devices, or one that is
            not the module's.
        NotImplementedError: an argument is refused.
    """

    running_ranks: RunningRanks  # in a join context

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: comm.Group | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        arguments.refuse(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params and not static_graph,
            batched_grad_copy=batched_grad_copy,
        )
        check_kind("module", module, nn.Module, "a module")
        check_flags(
            broadcast_buffers=broadcast_buffers,
            init_sync=init_sync,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            forward_sync_buffers=forward_sync_buffers,
        )
        arguments.warn_of_no_effect(check_reduction, find_unused_parameters and static_graph)
        self.module = module
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        trainable_parameters(module, self.parameters_to_ignore)  # or an error that says why there are none
        arguments.check_modules(module)
        devices = {p.device for p in self._parameters_here()}
        self.device_ids, self.output_device = arguments.check_devices(devices, device_ids, output_device)
        self.dim = dim
        self.process_group = arguments.choose_group(process_group, device_mesh)
        arguments.check_replicas(module, self.process_group, self.parameters_to_ignore)
        init_buffers, self.forward_sync_buffers = arguments.when_to_sync_buffers(
            broadcast_buffers, forward_sync_buffers
        )
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.bucket_bytes_cap_list = arguments.bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._comm_hook: tuple[Any, Hook] | None = None
        self._join_config: Any = JoinConfig()  # torch's `Join` puts one of its own here
        self.has_joined = False
        self._has_run, self._first = False, FirstForward(module)
        if init_sync:
            start_from_rank_0(module, self.process_group, init_buffers, self.parameters_to_ignore)
        self.reducer = self._make_reducer()

    def _make_reducer(self) -> Reducer:
        refuse_early_steps(self)
        kind: type[Reducer] = Reducer
        if self.static_graph:
            kind = StaticGraphReducer
        elif self.find_unused_parameters:
            kind = UnusedFindingReducer
        names = trainable_parameters(self.module, self.parameters_to_ignore)
        caps, alone = self.bucket_bytes_cap_list, sparse_buckets(self.module)
        reducer = kind(names, caps, self.process_group, self.gradient_as_bucket_view, alone)
        if self._comm_hook is not None:
            reducer.leave_to(HookedReduce(*self._comm_hook))
        return reducer

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward.

        Raises:
            RuntimeError: the last backward did not reach all parameters.
        """
        if torch.is_grad_enabled():
            self.reducer.before_forward()
        if not self._has_run:
            arguments.check_optimizers(self.module)
            arguments.check_still_there(self.module, self.reducer.names)
            refuse_torchs_ddp(DDP, self.reducer.params)
            self._has_run = True
        reduces = torch.is_grad_enabled() and self.require_backward_grad_sync
        syncs_buffers = self.will_sync_module_buffers()
        source = announce_forward(self, syncs_buffers, reduces) if self._join_config.enable else 0
        if syncs_buffers:
            broadcast_from(source, self.modules_buffers, self.process_group)
        if self._first.comes:  # by each rank: one alone may run a forward, such as for an evaluation
            self._first.check([self.module], [])
        if self.device_ids:
            inputs, kwargs = arguments.to_device((inputs, kwargs), self.device)
        outputs = self.module(*inputs, **kwargs)
        # Buffers can only have come to differ in a forward, and matter to no other rank until gradients meet again.
        self.require_forward_param_sync = reduces
        if reduces:
            self.reducer.prepare(outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the backward of each forward inside the `with` accumulate this rank's own gradients.

        The next backward of a forward outside reduces all that has been accumulated.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def reduce_accumulated(self) -> None:
        """Reduce what backwards inside `no_sync` have accumulated, without another backward; on all ranks.

        This is for pipelines, whose last micro-batch may finish its backward in parts. In `no_sync` it does nothing.
        """
        if self.require_backward_grad_sync:
            self.reducer.reduce_accumulated()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Train inside the `with` on as many batches as this rank has, one backward after each forward (join.py).

        After the `with`, every rank has the values of a rank with the largest number of batches. The optimizers of
        ranks that finished early have taken fewer steps, so the states of the optimizers differ from then on.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the number of all ranks, so that all batches have
                the same weight; otherwise, by the number of ranks that are still running. A communication hook does its
                own division.
            enable: False if all ranks are known to have the same number of batches; nothing is then communicated.
            throw_on_early_termination: end training on all ranks as soon as one has no batch left.

        Raises:
            RuntimeError: on all ranks, if a rank has no batch left and `throw_on_early_termination` is set; or if a
                forward starts before the backward of the previous one.
        """
        config = JoinConfig(enable, throw_on_early_termination, is_first_joinable=True)
        return joining(self, divide_by_initial_world_size, config)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that torch's `Join` runs on a finished rank; `divide_by_initial_world_size` as in `join`.

        `Join` accepts this model beside others, such as a `ZeroRedundancyOptimizer`: it implements `Joinable`.
        """
        return JoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device on which ranks count who is running."""
        return self.device

    @property
    def join_process_group(self) -> comm.Group:
        """The ranks that join."""
        return self.process_group

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let `hook(state, bucket)` reduce the buckets, as those of torch's `ddp_comm_hooks` do.

        `minifsdp.comm` does not see the collectives of the hook.

        Args:
            state: any object that the hook needs.
            hook: receives a `GradBucket` and returns a future of the tensor [numel] that becomes the gradients; the
                hook itself has to divide by the number of ranks.

        Raises:
            TypeError, ValueError: `hook` is not such a function.
            RuntimeError: there is one already.
        """
        if self._comm_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.reducer.leave_to(HookedReduce(state, hook))
        self._comm_hook = state, hook

    def _set_static_graph(self) -> None:
        """Turn `static_graph` on after construction, before the first forward."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        arguments.warn_of_no_effect(False, self.find_unused_parameters)
        self.static_graph = True
        self.reducer = self._make_reducer()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Leave parameters and buffers with these names in `module` to each rank; before it is wrapped."""
        module._ddp_params_and_buffers_to_ignore = list(params_and_buffers_to_ignore)  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:
        """Of the module's first parameter."""
        return next(self._parameters_here()).device

    @property
    def device_type(self) -> str:
        """Such as `"cuda"`."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """True if the parameters are on several devices."""
        return len({p.device for p in self._parameters_here()}) > 1

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that ranks share, as they are now."""
        return [b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore]

    @property
    def broadcast_buffers(self) -> bool:
        """Another name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _parameters_here(self) -> Iterator[nn.Parameter]:
        return (p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore)

    def not_yet_averaged(self) -> list[nn.Parameter]:
        """The parameters that a step inside backward would update with this rank's own gradients (early_steps.py)."""
        return self.reducer.params if self.reducer.expecting or not self.require_backward_grad_sync else []

    def will_sync_module_buffers(self) -> bool:
        """True if the next forward broadcasts rank 0's buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Settings and sizes of buckets, under torch's names (logging_data.py)."""
        return logging_data(self)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["reducer"], state["process_group"]
        state.pop("running_ranks", None)
        self._check_default_group()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group, self._first = comm.world(), FirstForward(self.module)
        self.reducer = self._make_reducer()

    def _check_default_group(self) -> None:
        if self.process_group is not comm.world():
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
