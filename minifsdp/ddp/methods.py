"""What torch's class has beside training: attributes, a communication hook, a static graph, pickling."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import comm
from minifsdp.ddp import arguments
from minifsdp.ddp.comm_hook import Hook, HookedReduce
from minifsdp.ddp.join import JoinableModule


class TorchMethods(JoinableModule):
    """The part of torch/nn/parallel/distributed.py that a training loop seldom touches.

    Attributes:
        device, device_type: of the module's first parameter.
        is_multi_device_module: whether its parameters lie on several.
        modules_buffers: the buffers that ranks share, as they are now.
        broadcast_buffers: another name of `forward_sync_buffers`.
    """

    static_graph: bool
    find_unused_parameters: bool
    _comm_hook: tuple[Any, Hook] | None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return next(self._parameters_here()).device

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        return len({p.device for p in self._parameters_here()}) > 1

    @property
    def modules_buffers(self) -> list[Tensor]:
        return [b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore]

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _parameters_here(self) -> Iterator[nn.Parameter]:
        return (p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore)

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward gives all ranks rank 0's buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let `hook(state, bucket)` reduce the buckets, as those of torch's `ddp_comm_hooks` do.

        Its collectives are its own: `minifsdp.comm` does not see them.

        Args:
            state: whatever the hook wants to keep.
            hook: gets a `GradBucket` and returns a future of the tensor [numel] that becomes the gradients; to divide
                by the number of ranks is up to it.

        Raises:
            TypeError, ValueError: `hook` is not such a function.
            RuntimeError: there is one already.
        """
        if self._comm_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.reducer.leave_to(HookedReduce(state, hook))
        self._comm_hook = state, hook

    def _set_static_graph(self) -> None:
        """What `static_graph=True` does at construction; before the first forward."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        arguments.warn_of_no_effect(False, self.find_unused_parameters)
        self.static_graph = True
        self.reducer = self._make_reducer()

    def _make_reducer(self) -> Any:
        raise NotImplementedError

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Leave parameters and buffers with these names in `module` to each rank; before it is wrapped."""
        module._ddp_params_and_buffers_to_ignore = list(params_and_buffers_to_ignore)  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["reducer"], state["process_group"]
        state.pop("_running", None)
        self._check_default_group()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = comm.world()
        self.reducer = self._make_reducer()

    def _check_default_group(self) -> None:
        if self.process_group is not comm.world():
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
