"""Plans for architectures of `transformers`, as somebody writes them who has a model and torch's documentation."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from minifsdp.tensor_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    divide,
    parallelize_module,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def llama(model: Any, mesh: Any, sequence: bool = False) -> nn.Module:
    for layer in model.model.layers:
        heads = layer.self_attn
        heads.q_heads, heads.kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        divide(heads, mesh, "q_heads", "kv_heads")
    stream = Styles(sequence)
    layer = {
        "input_layernorm": stream.norm,
        "self_attn": stream.into("hidden_states"),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": stream.rows,
        "post_attention_layernorm": stream.norm,
        "mlp": stream.into(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": stream.rows,
    }
    plan = {
        "model.embed_tokens": stream.embedding,
        **{f"model.layers.*.{name}": style for name, style in layer.items() if style is not None},
        "model.norm": stream.norm,
        "lm_head": stream.head,
    }
    return parallelize_module(model, mesh, plan)


def gpt2(model: Any, mesh: Any, sequence: bool = False) -> nn.Module:
    for block in model.transformer.h:
        divide(block.attn, mesh, "num_heads", "split_size")
        for parent, name in (
            (block.attn, "c_attn"),
            (block.attn, "c_proj"),
            (block.mlp, "c_fc"),
            (block.mlp, "c_proj"),
        ):
            setattr(parent, name, as_linear(getattr(parent, name)))
    stream = Styles(sequence)
    block = {
        "ln_1": stream.norm,
        "attn": stream.into(0),
        "attn.c_attn": ColwiseParallel(parts=3),
        "attn.c_proj": stream.rows,
        "ln_2": stream.norm,
        "mlp": stream.into(),
        "mlp.c_fc": ColwiseParallel(),
        "mlp.c_proj": stream.rows,
    }
    plan = {
        "transformer.wte": stream.embedding,
        "transformer.wpe": stream.positions,
        **{f"transformer.h.*.{name}": style for name, style in block.items() if style is not None},
        "transformer.ln_f": stream.norm,
        "lm_head": stream.head,
    }
    return parallelize_module(model, mesh, plan)


def t5(model: Any, mesh: Any, sequence: bool = False) -> nn.Module:
    for stack in (model.encoder, model.decoder):
        for module in stack.modules():
            if hasattr(module, "relative_attention_num_buckets"):
                divide(module, mesh, "n_heads")
    stream = Styles(sequence)
    attention = {**dict.fromkeys("qkv", ColwiseParallel()), "o": stream.rows}
    layers = {
        "0.SelfAttention": attention,
        "1.EncDecAttention": attention,
        "[12].DenseReluDense": {"wi": ColwiseParallel(), "wo": stream.rows},
    }
    within = {f"{outer}.{name}": style for outer, inner in layers.items() for name, style in inner.items()}
    plan: dict[str, Any] = dict.fromkeys(("shared", "encoder.embed_tokens", "decoder.embed_tokens"), stream.embedding)
    plan |= {f"*coder.block.*.layer.{name}": style for name, style in within.items()}
    plan |= {"*coder.block.0.layer.0.SelfAttention.relative_attention_bias": ColwiseParallel(input_layouts=Replicate())}
    plan |= {"*coder.block.*.layer.*.layer_norm": stream.norm, "*coder.final_layer_norm": stream.norm}
    if sequence:
        plan |= {f"*coder.block.*.layer.{name}": stream.into() for name in ("0.SelfAttention", "[12].DenseReluDense")}
        keys, whole = {"key_value_states": Shard(1)}, {"key_value_states": Replicate()}
        both: dict[str, Any] = {"input_kwarg_layouts": keys, "desired_input_kwarg_layouts": whole}
        plan |= {
            "decoder.block.*.layer.1.EncDecAttention": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), **both
            )
        }
    return parallelize_module(model, mesh, plan | {"lm_head": stream.head})


class Styles:
    """Of what lies between the layers that are cut."""

    def __init__(self, sequence: bool) -> None:
        self.sequence = sequence
        between = {"output_layouts": Shard(1), "use_local_output": False} if sequence else {}
        self.norm = SequenceParallel() if sequence else Replicated()
        self.rows = RowwiseParallel(**between)
        self.embedding = RowwiseParallel(input_layouts=Replicate(), **between)
        self.positions = self.embedding
        self.head = ColwiseParallel(use_local_output=False)

    def into(self, first: str | int = 0) -> PrepareModuleInput | None:
        if not self.sequence:
            return None
        if isinstance(first, int):
            return PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        return PrepareModuleInput(
            input_kwarg_layouts={first: Shard(1)}, desired_input_kwarg_layouts={first: Replicate()}
        )


def as_linear(conv: Any) -> nn.Linear:
    """Of a Conv1D, whose weight is [in, out]."""
    linear = nn.Linear(*conv.weight.shape, device="meta")
    linear.weight, linear.bias = nn.Parameter(conv.weight.detach().T.contiguous()), conv.bias
    return linear


PLANS = {"llama": llama, "gpt2": gpt2, "t5": t5}


def like_llama(model: Any, mesh: Any, *, norms: tuple[str, ...] = (), more: dict[str, Any] | None = None) -> nn.Module:
    """Of architectures with Llama's names, with other norms and with experts."""
    columns, rows, same = ColwiseParallel(), RowwiseParallel(), Replicated()
    mlp = {"mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
    layer = {
        **{f"self_attn.{name}_proj": columns for name in "qkv"},
        "self_attn.o_proj": rows,
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm", *norms), same),
        **(mlp if more is None else more),
    }
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        **{f"model.layers.*.{name}": style for name, style in layer.items()},
        "model.norm": same,
        "lm_head": ColwiseParallel(use_local_output=False),
    }
    return parallelize_module(model, mesh, plan)


EXPERTS = {"mlp.gate": Replicated(), "mlp.experts": Replicated()}
SHARED_EXPERT = {
    "mlp.shared_expert_gate": Replicated(),
    "mlp.shared_expert.gate_proj": ColwiseParallel(),
    "mlp.shared_expert.up_proj": ColwiseParallel(),
    "mlp.shared_expert.down_proj": RowwiseParallel(),
}
HEAD_NORMS = {f"self_attn.{name}_norm": SequenceParallel(sequence_dim=2, use_local_output=True) for name in "qk"}
MLP = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the configuration, and of the plan
    "Gemma": ({"head_dim": 4, "tie_word_embeddings": True}, {}),
    "Gemma2": (
        {"head_dim": 4, "tie_word_embeddings": True, "query_pre_attn_scalar": 4},
        {"norms": ("pre_feedforward_layernorm", "post_feedforward_layernorm")},
    ),
    "Qwen2": ({}, {}),
    "Qwen3": ({"head_dim": 4}, {"more": {**MLP, **HEAD_NORMS}}),
    "Mixtral": ({"num_local_experts": 4}, {"more": EXPERTS}),
    "Qwen2Moe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16},
        {"more": {**EXPERTS, **SHARED_EXPERT}},
    ),
}
