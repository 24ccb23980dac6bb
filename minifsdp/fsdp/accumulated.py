"""What `no_sync` has accumulated, where optimizers look for it: in `.grad` of the parameters that they have.

Between a backward inside `no_sync` and the next backward, the unsharded gradient [P] is the `.grad` of a shard [P / N].
`zero_grad` drops it as any other; a step with it is refused. The mean of earlier backwards is put aside meanwhile, and
goes with it (torch/distributed/fsdp/_flat_param.py, `prepare_gradient_for_backward`; there that mean stays).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from minifsdp import device
from minifsdp.fsdp.flat_unit import FlatUnit
from minifsdp.private import version_of


class AccumulatedUnit(FlatUnit):
    """A unit whose unsharded gradient can be seen, changed and dropped between backwards."""

    _shown: Sequence[tuple[nn.Parameter, Tensor, int, Tensor | None]] = ()

    def show_accumulated(self) -> None:
        there = [(p, part) for p, part in zip(self.shards, self._accumulated(), strict=True) if part is not None]
        self._shown = [(p, part, version_of(part), p.grad) for p, part in there]
        for p, part in there:
            shard, p.data = p.data, part  # when it is set a gradient has to have its parameter's shape
            p.grad = part
            p.data = shard

    def take_accumulated(self, more: bool = False) -> None:
        super().take_accumulated(more)
        shown, self._shown = self._shown, ()
        for p, part, version, mean in shown:
            if p.grad is not part:
                self._drop(p)
                continue
            p.grad = mean
            if mean is not None and version_of(part) > version:  # zeroed in place? A host that asked would have to wait
                mean.masked_fill_(~part.any().to(mean.device), 0)

    def _accumulated(self) -> list[Tensor | None]:
        """What each of `shards` has of the unsharded gradient."""
        return [self._gradient]

    def _drop(self, p: nn.Parameter) -> None:
        """Forget what `p` has of it."""
        assert self._gradient is not None
        device.free(self._gradient)
        self._new_gradient()
