"""FSDP2: individually sharded parameters, which stay in their modules under their names.

The public names are imported on first use, so that lab 12, which cuts and gathers plain tensors, needs no DTensors.
"""

from typing import TYPE_CHECKING

from minifsdp.on_first_use import on_first_use

if TYPE_CHECKING:
    from minifsdp.clip_grad import clip_grad_norm_
    from minifsdp.fsdp2.held import Held, Recorded
    from minifsdp.fsdp2.hooks import use_schedule
    from minifsdp.fsdp2.torch_api.api import fully_shard
    from minifsdp.fsdp2.torch_api.forward_methods import register_fsdp_forward_method
    from minifsdp.fsdp2.torch_api.module import FSDPModule, UnshardHandle
    from minifsdp.fsdp2.torch_api.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "Held",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Recorded",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "register_fsdp_forward_method",
    "use_schedule",
]

__getattr__ = on_first_use(
    __name__,
    __all__,
    *(".held", ".torch_api.policies", ".torch_api.module", ".torch_api.forward_methods", ".hooks", ".torch_api.api"),
    "..clip_grad",
)
