"""Wrapping by policy or by hand, under the path that torch has for it (torch/distributed/fsdp/wrap.py)."""

from __future__ import annotations

from minifsdp.fsdp.torch_api.policies import CustomPolicy as CustomPolicy
from minifsdp.fsdp.torch_api.policies import ModuleWrapPolicy as ModuleWrapPolicy
from minifsdp.fsdp.torch_api.policies import NamingPolicy as NamingPolicy
from minifsdp.fsdp.torch_api.policies import WrapPolicy as WrapPolicy
from minifsdp.fsdp.torch_api.policies import _or_policy as _or_policy
from minifsdp.fsdp.torch_api.policies import always_wrap_policy as always_wrap_policy
from minifsdp.fsdp.torch_api.policies import lambda_auto_wrap_policy as lambda_auto_wrap_policy
from minifsdp.fsdp.torch_api.policies import size_based_auto_wrap_policy as size_based_auto_wrap_policy
from minifsdp.fsdp.torch_api.policies import transformer_auto_wrap_policy as transformer_auto_wrap_policy
from minifsdp.fsdp.torch_api.wrap import enable_wrap as enable_wrap
from minifsdp.fsdp.torch_api.wrap import wrap as wrap
