"""Architectures from `transformers`: tiny, with random weights; nothing is downloaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn

from minifsdp.instruments.warm.client import server

os.environ["HF_HUB_OFFLINE"] = "1"
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, TOKENS, VOCABULARY = 6, 7, 50  # 6 rows: an equal share for 1, 2 and 3 ranks
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "use_cache": False}
LLAMA = {**SMALL, **TEXT, "num_key_value_heads": 1, "max_position_embeddings": 32}


# The models: how to build one, and which of its modules are units. Imported by the ranks only: it takes seconds.


class Example(NamedTuple):
    build: Callable[[], nn.Module]
    blocks: set[type[nn.Module]]


def llama() -> Example:
    from transformers.models.llama import modeling_llama as m

    return Example(lambda: m.LlamaForCausalLM(m.LlamaConfig(**LLAMA)), {m.LlamaDecoderLayer})


def gpt2() -> Example:
    """The output layer is the token embedding."""
    from transformers.models.gpt2 import modeling_gpt2 as m

    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = m.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **no_dropout, **TEXT)
    return Example(lambda: m.GPT2LMHeadModel(config), {m.GPT2Block})


def t5() -> Example:
    """Encoder, decoder and output layer have one embedding; the encoder's output goes to every decoder block."""
    from transformers.models.t5 import modeling_t5 as m

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = m.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **TEXT)
    return Example(lambda: m.T5ForConditionalGeneration(config), {m.T5Block})


def mixtral() -> Example:
    """One unit per block and one inside it for the experts, of which there are more than a rank has tokens."""
    from transformers.models.mixtral import modeling_mixtral as m

    experts = {"num_local_experts": ROWS * TOKENS, "num_experts_per_tok": 1, "experts_implementation": "eager"}
    config = m.MixtralConfig(**{**LLAMA, "intermediate_size": 4}, **experts)
    return Example(lambda: m.MixtralForCausalLM(config), {m.MixtralDecoderLayer, m.MixtralExperts})


def vit() -> Example:
    from transformers.models.vit import modeling_vit as m

    config = m.ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=5)
    return Example(lambda: m.ViTForImageClassification(config), {m.ViTLayer})


MODELS = {"llama": llama, "gpt2": gpt2, "t5": t5, "mixtral": mixtral, "vit": vit}


def import_before_launch() -> None:
    """Let the tests' server import these models: every rank would take a second of CPU time for it."""
    server.prepare([f"transformers.models.{name}.modeling_{name}" for name in MODELS])


WITH_TEXT = ["llama", "gpt2", "t5", "mixtral"]
TIED = {
    "gpt2": ["lm_head.weight", "transformer.wte.weight"],
    "t5": ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"],
}


def plain(name: str, seed: int = 0) -> nn.Module:
    """A new model. Biases and gains get values of their own: some biases' gradients are nothing but rounding."""
    torch.manual_seed(seed)
    model = MODELS[name]().build().train()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p), alpha=0.05)
    return model


def batch(name: str, step: int, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
    """A rank's share of the rows of a step, as arguments of the model."""
    numbers = torch.Generator().manual_seed(step)
    if name == "vit":
        pixels = torch.randn(ROWS, 3, 8, 8, generator=numbers, dtype=torch.get_default_dtype())
        whole = {"pixel_values": pixels, "labels": torch.randint(5, (ROWS,), generator=numbers)}
    else:
        ids = torch.randint(2, VOCABULARY, (ROWS, TOKENS), generator=numbers)
        whole = {"input_ids": ids, "labels": ids}
    return {key: value.chunk(ranks)[rank] for key, value in whole.items()}
