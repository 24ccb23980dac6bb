"""FSDP2: individually sharded parameters, which stay in their modules under their names.

The public names are imported on first use, so that lab 12, which cuts and gathers plain tensors, needs no DTensors.
"""

from typing import TYPE_CHECKING

from minifsdp.on_first_use import on_first_use

if TYPE_CHECKING:
    from minifsdp.clip_grad import clip_grad_norm_
    from minifsdp.fsdp2.api import fully_shard
    from minifsdp.fsdp2.forward_methods import register_fsdp_forward_method
    from minifsdp.fsdp2.held import Held, Recorded
    from minifsdp.fsdp2.hooks import use_schedule
    from minifsdp.fsdp2.module import FSDPModule, UnshardHandle
    from minifsdp.fsdp2.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

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
    __name__, __all__, ".held", ".policies", ".module", ".forward_methods", ".hooks", ".api", "..clip_grad"
)
