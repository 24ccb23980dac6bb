"""Llama, GPT-2 and T5 on tensor-parallel ranks train as on one process; FSDP2 may be outside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import Checks, mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tp_plans import OTHERS, PLANS, like_llama
from transformers_models import MODELS, TOKENS, VOCABULARY, import_before_launch

from minifsdp.fsdp2 import fully_shard
from minifsdp.tensor_parallel import loss_parallel

check = Checks(__name__)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "n_head": 4, "num_heads": 4}
LENGTH = TOKENS + 1  # for 2 and 4 ranks


def build(name: str, **config: int) -> Any:
    """With four heads, which 2 and 4 ranks divide."""
    torch.manual_seed(0)
    example = MODELS[name]()
    model = example.build()
    known = {key: value for key, value in {**HEADS, **config}.items() if hasattr(model.config, key)}
    wanted = type(model)(type(model.config)(**{**model.config.to_dict(), **known})).train().double()
    with torch.no_grad():
        for p in wanted.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p), alpha=0.05)
    return wanted


def loss_of(name: str, model: nn.Module, step: int, row: int = 0) -> Tensor:
    """In float64: their own loss is in float32."""
    numbers = torch.Generator().manual_seed(100 * step + row)
    ids = torch.randint(2, VOCABULARY, (2, LENGTH), generator=numbers)
    more = {"decoder_input_ids": ids.flip(1)} if name == "t5" else {}
    logits = model(input_ids=ids, **more).logits
    with loss_parallel():
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flip(0).flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss


def plain(t: Any, like: Tensor) -> Tensor:
    """As on one process: a Conv1D's weight is [in, out], a fused one of a layer by columns [3, ..]."""
    whole = t.full_tensor()
    if whole.shape == like.shape:
        return whole
    flat = whole.flatten(0, 1) if whole.dim() > like.dim() else whole
    return flat if flat.shape == like.shape else flat.T


def assert_trains_as_one_process(name: str, model: Any, alone: Any, rows: int = 1, row: int = 0) -> None:
    """Losses and parameters, the second step with the momentum of the first; one process has all rows' mean loss."""
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, alone)]
    square = [n for n, p in alone.named_parameters() if p.dim() == 2 and "c_proj" in n and p.shape[0] == p.shape[1]]
    for step in range(2):
        mine = loss_of(name, model, step, row)
        expected = torch.stack([loss_of(name, alone, step, each) for each in range(rows)])
        assert abs(mine.item() - expected[row].item()) < 1e-9
        mine.backward()
        expected.mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    for (n, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        whole = p.full_tensor().T if n in square else plain(p, q)
        torch.testing.assert_close(whole.data, q.data, rtol=0, atol=1e-9, msg=lambda text, n=n: f"{n}: {text}")


SEQUENCE = {"whole": False, "sequence": True}


@check(ranks=(2, 4), slow=(4,), wide="combinations", name=list(PLANS), sequence=SEQUENCE)
def it_trains_as_one_process_does(name: str, sequence: bool) -> None:
    alone = build(name)
    model = PLANS[name](copy.deepcopy(alone), mesh_of((dist.get_world_size(),), "tp"), sequence)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_trains_as_one_process(name, model, alone)


@check(ranks=(4, 8), slow=(8,), wide="combinations", name=list(PLANS), sequence=dict(reversed(SEQUENCE.items())))
def it_trains_with_fsdp2_outside(name: str, sequence: bool) -> None:
    mesh = mesh_of((2, dist.get_world_size() // 2), "dp", "tp")
    alone = build(name)
    model = PLANS[name](copy.deepcopy(alone), mesh["tp"], sequence)
    for module in model.modules():
        if type(module) in MODELS[name]().blocks:
            fully_shard(module, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert_trains_as_one_process(name, model, alone, 2, mesh.get_local_rank("dp"))


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def other(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **OTHERS[name][0])
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().train()
    if "experts" in str(OTHERS[name]):
        model.set_experts_implementation("eager")  # the others do not compute in float64
    return model


@check(ranks=2, name=OTHERS)
def other_architectures_train_as_one_process(name: Any) -> None:
    """Norms of heads, tied embeddings, experts that every rank has, next to a shared one that is sharded."""
    title = next(key for key, value in OTHERS.items() if value is name)
    alone = other(title)
    model = like_llama(copy.deepcopy(alone), mesh_of((2,), "tp"), **OTHERS[title][1])
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_trains_as_one_process(title, model, alone)


@check(ranks=2)
def fewer_kv_heads_than_ranks_are_refused_in_a_line() -> None:
    model = build("llama", num_key_value_heads=1)
    with pytest.raises(ValueError, match="kv_heads = 1 of LlamaAttention cannot be shared by 2 ranks") as caught:
        PLANS["llama"](model, mesh_of((2,), "tp"))
    assert "\n" not in str(caught.value)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


@pytest.fixture(autouse=True, scope="module")
def _models_are_imported() -> None:
    import_before_launch()


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
