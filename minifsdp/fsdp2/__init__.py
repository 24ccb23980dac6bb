"""FSDP2: individually sharded parameters, which stay in their modules under their names."""

from minifsdp.clip_grad import clip_grad_norm_ as clip_grad_norm_
from minifsdp.fsdp2.api import fully_shard as fully_shard
from minifsdp.fsdp2.forward_methods import register_fsdp_forward_method as register_fsdp_forward_method
from minifsdp.fsdp2.held import Held as Held
from minifsdp.fsdp2.held import Recorded as Recorded
from minifsdp.fsdp2.hooks import use_schedule as use_schedule
from minifsdp.fsdp2.module import FSDPModule as FSDPModule
from minifsdp.fsdp2.module import UnshardHandle as UnshardHandle
from minifsdp.fsdp2.policies import CPUOffloadPolicy as CPUOffloadPolicy
from minifsdp.fsdp2.policies import MixedPrecisionPolicy as MixedPrecisionPolicy
from minifsdp.fsdp2.policies import OffloadPolicy as OffloadPolicy
